"""Load the compiled kernels of the best instruction set that the processor has, on first use.

The environment variable BMFA_NATIVE is `auto` (the default: the best set), `off`, or the name of a set.
Where nothing can be loaded, there is a reason.
"""

import ctypes
import os
from functools import cache, lru_cache
from pathlib import Path
from types import ModuleType
from typing import NamedTuple


class Selection(NamedTuple):
    """What a value of BMFA_NATIVE selects: a library, or a reason for none."""

    name: str | None = None  # of the instruction set
    library: ctypes.CDLL | None = None
    reason: str | None = None


def load() -> ctypes.CDLL | None:
    """Return the library that BMFA_NATIVE selects, or None; `unavailable_reason` says why."""
    return _select(_setting()).library


def unavailable_reason() -> str | None:
    """Return why there is no library and what to do about it, or None if there is one."""
    return _select(_setting()).reason


# torch.compile takes the result as a constant. The mark is that of
# torch.compiler.assume_constant_result, which would load the compiler on import.
unavailable_reason._dynamo_marked_constant = True  # type: ignore[attr-defined]


def instruction_set() -> str | None:
    """Return the instruction set of the library that `load` returns, or None."""
    return _select(_setting()).name


def parallel() -> int | None:
    """Return the address of the function that runs work in the threads of torch, or None.

    Further threads would wait for those of torch, which go on for some time after their work. The
    function is `GOMP_parallel`, which every OpenMP runtime of torch has. The child of a fork starts
    threads of its own: those of the parent are not there.
    """
    return _parallel if os.getpid() == _process else None


def _find_parallel() -> int | None:
    try:
        return ctypes.cast(ctypes.CDLL(None).GOMP_parallel, ctypes.c_void_p).value
    except (AttributeError, OSError):
        return None


_parallel, _process = _find_parallel(), os.getpid()


def built_sets() -> tuple[str, ...]:
    """Return the instruction sets of this architecture that are compiled, best first."""
    return tuple(name for name in _build().known_sets() if _build().object_path(name).is_file())


@cache
def supported_sets() -> tuple[str, ...]:
    """Return the instruction sets that this processor can run, best first."""
    available = _processor_features()
    return tuple(
        name for name in _build().known_sets() if available.issuperset(_build().features(name))
    )


def _setting() -> str:
    return os.environ.get("BMFA_NATIVE", "").strip().lower() or "auto"


def _build() -> ModuleType:
    # Not imported at the top level: `python -m` would find the module in sys.modules, and warn.
    from bmfa.attention.kernels.native import compile as build

    return build


def _processor_features() -> set[str]:
    """Features of x86-64 beyond its baseline that the processor has and the operating system enables.

    They are read on Linux alone: torch has no builds for macOS on x86-64.
    """
    try:  # Linux removes the flags of registers that it does not save
        lines = Path("/proc/cpuinfo").read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return set()
    flags = (line.partition(":")[2] for line in lines if line.startswith("flags"))
    return set(next(flags, "").split())


@lru_cache(maxsize=16)
def _select(setting: str) -> Selection:
    known = _build().known_sets()
    if setting == "off":
        return Selection(reason="the environment variable BMFA_NATIVE is off")
    if not known:
        return Selection(reason=_build().unsupported_machine())
    if setting not in ("auto", *known):
        accepted = ", ".join(("auto", "off", *known))
        reason = f"BMFA_NATIVE={setting} is not known on this machine; it accepts {accepted}"
        return Selection(reason=reason)
    names = supported_sets() if setting == "auto" else (setting,)
    loaded = (one for one in map(_open, names) if one.library is not None)
    return next(loaded, None) or _open(names[0])


def _open(name: str) -> Selection:
    """The library of an instruction set, or why it cannot be used."""
    if name not in supported_sets():
        has = ", ".join(supported_sets())
        return Selection(reason=f"this processor does not have {name}; it has {has}")
    build = _build()
    path: Path = build.object_path(name)
    failure: Path = build.FOLDER / build.FAILURE_FILE
    # Why the last compilation failed, as it wrote down.
    failed = failure.read_text("utf-8", errors="replace").strip() if failure.is_file() else ""
    if not path.is_file():
        missing = f"the kernels for {name} have not been compiled; run {build.COMMAND}"
        return Selection(reason=failed or missing)
    try:
        library = ctypes.CDLL(str(path))
        library.bmfa_sources.restype = ctypes.c_char_p
        library.bmfa_scratch_bytes.restype = ctypes.c_int64
        found = library.bmfa_sources()
    except (OSError, AttributeError) as error:
        return Selection(reason=f"{path.name} cannot be loaded ({error}); run {build.COMMAND}")
    if found != build.sources_hash(name).encode():
        stale = f"{path.name} was compiled from other sources; run make setup or {build.COMMAND}"
        return Selection(reason=failed or stale)
    return Selection(name, library)
