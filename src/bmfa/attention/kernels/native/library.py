"""Load the compiled kernels of the best instruction set that the processor has, on first use.

The environment variable BMFA_NATIVE is `auto` (the default: the best set), `off`, or the name of a set.
Where nothing can be loaded, the functions return a reason; only `load_set` raises.
"""

import ctypes
import os
import platform
import threading
from functools import cache, lru_cache
from pathlib import Path
from types import ModuleType

_lock = threading.Lock()  # one library object for each instruction set in all threads


def load() -> ctypes.CDLL | None:
    """Return the library that BMFA_NATIVE selects, or None; `unavailable_reason` says why."""
    found = _selected(_setting())
    return None if isinstance(found, str) else found[1]


def unavailable_reason() -> str | None:
    """Return why there is no library and what to do about it, or None if there is one."""
    found = _selected(_setting())
    return found if isinstance(found, str) else None


def instruction_set() -> str | None:
    """Return the instruction set of the library that `load` returns, or None."""
    found = _selected(_setting())
    return None if isinstance(found, str) else found[0]


def load_set(name: str) -> ctypes.CDLL:
    """Return the library of one instruction set; several can be loaded in one process.

    Raises:
        ImportError: The set is unknown, not compiled, out of date, or the processor does not have it.
    """
    found = _open_set(name)
    if isinstance(found, str):
        raise ImportError(found)
    return found


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
    return tuple(name for name in _known_sets() if _build().object_path(name).is_file())


@cache
def supported_sets() -> tuple[str, ...]:
    """Return the instruction sets that this processor can run, best first."""
    available = _processor_features()
    return tuple(name for name in _known_sets() if available.issuperset(_build().features(name)))


def _setting() -> str:
    return os.environ.get("BMFA_NATIVE", "").strip().lower() or "auto"


def _build() -> ModuleType:
    # Not imported at the top level: `python -m` would find the module in sys.modules, and warn.
    from bmfa.attention.kernels.native import compile as build

    return build


def _known_sets() -> tuple[str, ...]:
    sets: dict[str, dict[str, tuple[str, ...]]] = _build().INSTRUCTION_SETS
    return tuple(sets.get(_build().architecture() or "", ()))


def _processor_features() -> set[str]:
    """Features of x86-64 beyond its baseline that the processor has and the operating system enables."""
    if platform.system() == "Darwin":
        names = _build().AVX512
        return {name for name in names if _sysctl(f"hw.optional.{name.replace('avx2', 'avx2_0')}")}
    try:  # Linux removes the flags of registers that it does not save
        lines = Path("/proc/cpuinfo").read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return set()
    flags = (line.partition(":")[2] for line in lines if line.startswith("flags"))
    return set(next(flags, "").split())


def _sysctl(name: str) -> bool:
    value, size = ctypes.c_int(0), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
    query = ctypes.CDLL(None).sysctlbyname
    status = query(name.encode(), ctypes.byref(value), ctypes.byref(size), None, ctypes.c_size_t(0))
    return bool(status == 0 and value.value)


@lru_cache(maxsize=16)
def _selected(setting: str) -> tuple[str, ctypes.CDLL] | str:
    """The instruction set and library for a value of BMFA_NATIVE, or why there is none."""
    if setting == "off":
        return "the environment variable BMFA_NATIVE is off"
    if not _known_sets():
        return str(_build().unsupported_machine())
    if setting not in ("auto", *_known_sets()):
        accepted = ", ".join(("auto", "off", *_known_sets()))
        return f"BMFA_NATIVE={setting} is not known on this machine; it accepts {accepted}"
    reasons = []
    for name in supported_sets() if setting == "auto" else (setting,):
        library = _open_set(name)
        if not isinstance(library, str):
            return name, library
        reasons.append(library)
    return reasons[0]


def _open_set(name: str) -> ctypes.CDLL | str:
    with _lock:
        return _open_once(name)


@lru_cache(maxsize=16)
def _open_once(name: str) -> ctypes.CDLL | str:
    """The library of an instruction set, or why it cannot be used."""
    if name not in _known_sets():
        return f"the instruction set {name} is not known here; there are {', '.join(_known_sets())}"
    if name not in supported_sets():
        return f"this processor does not have {name}; it has {', '.join(supported_sets())}"
    build = _build()
    path: Path = build.object_path(name)
    if not path.is_file():
        return _failure() or f"the kernels for {name} have not been compiled; run {build.COMMAND}"
    try:
        library = ctypes.CDLL(str(path))
        library.bmfa_sources.restype = ctypes.c_char_p
        library.bmfa_scratch_bytes.restype = ctypes.c_int64
        found = library.bmfa_sources()
    except (OSError, AttributeError) as error:
        return f"{path.name} cannot be loaded ({error}); run {build.COMMAND}"
    if found != build.sources_hash(name).encode():
        stale = f"{path.name} was compiled from other sources; run make setup or {build.COMMAND}"
        return _failure() or stale
    return library


def _failure() -> str | None:
    """Why the last compilation failed, as it wrote down, or None."""
    path: Path = _build().FOLDER / _build().FAILURE_FILE
    return path.read_text("utf-8", errors="replace").strip() if path.is_file() else None
