"""Versions, devices, backends and optional packages of this machine, for `bmfa info`."""

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from bmfa.attention.kernels.native import library
from bmfa.attention.kernels.triton import unsupported_reason
from bmfa.packages import PACKAGES, is_installed
from bmfa.records import Record, environment

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
    hidden = ("command", "date", "device", "device_name", "threads", "instruction_set")
    found = [
        *(("version", name, str(value)) for name, value in frame.items() if name not in hidden),
        *(("device", name, status) for name, status in _devices(str(frame["device_name"]))),
        ("backend", "eager", "available: any torch device, gradients by autograd"),
        ("backend", "native", _native()),
        ("backend", "triton", _triton()),
        *(("extra", f"{PACKAGES[name][0]} ({use})", _extra(name)) for name, use in EXTRAS.items()),
    ]
    rows = [dict(zip(("what", "name", "status"), row, strict=True)) for row in found]
    return Record("info", {}, rows, frame)


def _devices(processor: str) -> Iterator[tuple[str, str]]:
    yield "cpu", f"{processor}, {torch.get_num_threads()} threads"
    yield "cpu bf16", _bf16()
    for index in range(torch.cuda.device_count()):
        yield f"cuda:{index}", torch.cuda.get_device_name(index)
    if not torch.cuda.is_available():
        reason = "torch was built without CUDA" if torch.version.cuda is None else "no CUDA device"
        yield "cuda", f"unavailable: {reason}"


def _native() -> str:
    compiled = f"compiled: {', '.join(library.built_sets()) or 'none'}"
    if (reason := library.unavailable_reason()) is not None:
        return f"unavailable: {reason} ({compiled})"
    return f"available: {library.instruction_set()} ({compiled}); tiles on a CPU, without gradients"


def _triton() -> str:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if (reason := unsupported_reason(device)) is not None:
        return f"unavailable: {reason}"
    if not torch.cuda.is_available():
        return "interpreted: TRITON_INTERPRET is set; slow, for tests"
    return "available: tiles, without gradients"


def _extra(module: str) -> str:
    return "available" if is_installed(module) else f"missing: pip install {PACKAGES[module][0]}"


def _bf16() -> str:
    """Status of bf16 products: oneDNN uses AMX if it is advertised, even if it is not granted."""
    if (limit := os.environ.get("ONEDNN_MAX_CPU_ISA")) is not None:
        return f"oneDNN limited to {limit}"
    if amx_refused():
        return "unsafe: AMX is advertised but refused; set ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16"
    return "safe"


def amx_refused() -> bool:
    """True if the processor advertises AMX and the operating system refuses it to this process."""
    features = Path("/proc/cpuinfo")  # of Linux
    if not features.is_file() or "amx_tile" not in features.read_text():
        return False
    call = ctypes.CDLL(None, use_errno=True).syscall
    return bool(call(SYS_ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, AMX_TILE_DATA) != 0)
