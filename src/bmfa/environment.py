"""Versions, devices, backends and optional packages of this machine, for `bmfa info`."""

import ctypes
import os
import platform
from pathlib import Path

import torch

from bmfa.attention.kernels.native import library
from bmfa.attention.kernels.triton import unsupported_reason
from bmfa.packages import PACKAGES, is_installed
from bmfa.records import Record, Row, environment

# Optional packages that `bmfa info` lists, with their use.
EXTRAS = {
    "matplotlib": "figures and the page",
    "PIL": "images",
    "pycocotools": "instance masks",
    "timm": "models named timm:NAME",
    "transformers": "models named hf:NAME",
}
# Linux: arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) asks for permission to use AMX tiles.
ARCH_REQ_XCOMP_PERM, AMX_TILE_DATA, SYS_ARCH_PRCTL = 0x1023, 18, 158


def describe() -> Record:
    """Return a record with a row for each version, device, backend and optional package."""
    frame = environment()
    rows: list[Row] = [
        {"what": "version", "name": name, "status": str(value)}
        for name, value in frame.items()
        if name not in ("command", "date", "device", "device_name", "threads", "instruction_set")
    ]
    rows += [*_devices(str(frame["device_name"])), *_backends(), *_extras()]
    return Record("info", {}, rows, frame)


def _devices(processor: str) -> list[Row]:
    threads = torch.get_num_threads()
    rows = [
        _row("device", "cpu", f"{processor}, {threads} threads"),
        _row("device", "cpu bf16", _bf16()),
    ]
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            rows.append(_row("device", f"cuda:{index}", torch.cuda.get_device_name(index)))
    else:
        reason = "torch was built without CUDA" if torch.version.cuda is None else "no CUDA device"
        rows.append(_row("device", "cuda", f"unavailable: {reason}"))
    return rows


def _backends() -> list[Row]:
    return [
        _row("backend", "eager", "available: any torch device, gradients by autograd"),
        _row("backend", "native", _native()),
        _row("backend", "triton", _triton()),
    ]


def _native() -> str:
    compiled = f"compiled: {', '.join(library.built_sets()) or 'none'}"
    reason = library.unavailable_reason()
    if reason is not None:
        return f"unavailable: {reason} ({compiled})"
    return f"available: {library.instruction_set()} ({compiled}); tiles on a CPU, without gradients"


def _triton() -> str:
    reason = unsupported_reason(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    if reason is not None:
        return f"unavailable: {reason}"
    if not torch.cuda.is_available():
        return "interpreted: TRITON_INTERPRET is set; slow, for tests"
    return "available: tiles, and trees on grids of up to 16x16; without gradients"


def _extras() -> list[Row]:
    return [
        _row(
            "extra",
            f"{PACKAGES[module][0]} ({use})",
            "available"
            if is_installed(module)
            else f"missing: pip install 'bmfa[{PACKAGES[module][1]}]'",
        )
        for module, use in EXTRAS.items()
    ]


def _bf16() -> str:
    """Status of bf16 products: oneDNN uses AMX if it is advertised, even if it is not granted."""
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA")
    if limit is not None:
        return f"oneDNN limited to {limit}"
    if amx_refused():
        return "unsafe: AMX is advertised but refused; set ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16"
    return "safe"


def amx_refused() -> bool:
    """True if the processor advertises AMX and the operating system refuses it to this process."""
    if platform.machine() != "x86_64" or platform.system() != "Linux":
        return False
    try:
        advertised = "amx_tile" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    if not advertised:
        return False
    call = ctypes.CDLL(None, use_errno=True).syscall
    return bool(call(SYS_ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, AMX_TILE_DATA) != 0)


def _row(what: str, name: str, status: str) -> Row:
    return {"what": what, "name": name, "status": status}
