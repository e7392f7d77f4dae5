"""Compile the C++ kernels, once for each instruction set of the processor's architecture.

Run as `python -m bmfa.attention.kernels.native.compile`, or by the build hook of the package, which
loads this file without the rest of `bmfa`: it imports only the standard library. Each instruction set
has a shared object of its own, so that no function compiled for one is linked into another.
"""

import contextlib
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

FOLDER = Path(__file__).parent
COMMAND = "python -m bmfa.attention.kernels.native.compile"
# Why the last compilation failed, in one line; absent after one without a failure.
FAILURE_FILE = "build-failure.txt"
# Instruction sets of each architecture, best first, with the processor features they need: `-mNAME` of
# the compiler, and a flag of the same name in /proc/cpuinfo. The baseline and NEON need none.
AVX2 = ("avx2", "fma", "f16c")
AVX512 = ("avx512f", "avx512bw", "avx512dq", "avx512vl", *AVX2)
INSTRUCTION_SETS: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {"avx512": AVX512, "avx2": AVX2, "baseline": ()},
    "arm64": {"neon": ()},
}
# Not -ffast-math, which turns denormals off for the whole process, nor -march=native. CXXFLAGS is not
# read, because a flag in it may add instructions that the baseline must not have.
FLAGS = (
    *("-std=c++17", "-O3", "-fno-math-errno", "-ffp-contract=fast", "-fno-exceptions", "-fno-rtti"),
    *("-fPIC", "-shared", "-fvisibility=hidden", "-pthread"),
)
# With --as-needed, the C++ runtime library is linked only if a symbol of it is used, and none is.
LINUX_FLAGS = ("-static-libgcc", "-Wl,--as-needed", "-Wl,--no-undefined")
LONGEST_REASON = 300  # characters of a compiler's message that are kept


def architecture() -> str | None:
    """Return the architecture to compile for, a key of `INSTRUCTION_SETS`, or None if it has no kernels.

    On macOS, a single `-arch` in the environment variable ARCHFLAGS takes precedence over the machine.
    """
    machine = platform.machine().lower()
    if platform.system() == "Darwin":
        named = re.findall(r"-arch\s+(\S+)", os.environ.get("ARCHFLAGS", ""))
        machine = named[0] if len(named) == 1 else machine
    elif platform.system() != "Linux":
        return None
    name = {"amd64": "x86_64", "aarch64": "arm64"}.get(machine, machine)
    return name if name in INSTRUCTION_SETS else None


def known_sets() -> tuple[str, ...]:
    """Return the instruction sets of the architecture, best first."""
    return tuple(INSTRUCTION_SETS.get(architecture() or "", ()))


def features(name: str) -> tuple[str, ...]:
    """Return the processor features that an instruction set needs."""
    return next(sets[name] for sets in INSTRUCTION_SETS.values() if name in sets)


def object_path(name: str, folder: Path = FOLDER) -> Path:
    """Return the path of the shared object of an instruction set."""
    return folder / f"tiles-{name}.so"


def set_flags(name: str) -> tuple[str, ...]:
    """Return the flags of the compiler that do not depend on the machine it runs on."""
    needed = features(name)
    wide = ("-mprefer-vector-width=512",) if "avx512f" in needed else ()
    return (*FLAGS, *(f"-m{feature}" for feature in needed), *wide)


def sources_hash(name: str, folder: Path = FOLDER) -> str:
    """Return the hash of the C++ sources in a folder and of the flags of an instruction set."""
    digest = hashlib.sha256(" ".join(set_flags(name)).encode())
    for path in sorted([*folder.glob("*.cpp"), *folder.glob("*.h")]):
        content = path.read_bytes()
        digest.update(f"\n{path.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:32]


def compile_all(folder: Path = FOLDER) -> tuple[list[str], str | None]:
    """Compile every instruction set that is missing or out of date.

    A failure is returned, and written to `build-failure.txt` for the loader. Nothing is raised, so that
    an installation without a compiler succeeds.

    Returns:
        The instruction sets that are up to date now, and why others are not, or None.
    """
    built: list[str] = []
    try:
        if os.environ.get("BMFA_NATIVE", "").strip().lower() == "off":
            reason: str | None = (
                f"BMFA_NATIVE was off at installation; with g++ or clang, run {COMMAND}"
            )
        else:
            reason = _compile_missing(folder)
            built = [name for name in known_sets() if _is_current(name, folder)]
    except (OSError, ValueError) as error:  # an unreadable source, an unbalanced quote in CXX
        reason = f"the kernels were not compiled ({error}); run {COMMAND}"
    with contextlib.suppress(OSError):  # the folder is read-only; the reason is still returned
        (folder / FAILURE_FILE).unlink(missing_ok=True)
        if reason is not None:
            (folder / FAILURE_FILE).write_text(f"{reason}\n", "utf-8")
    return built, reason


def _compile_missing(folder: Path) -> str | None:
    """Compile what is missing or out of date; return why that failed, or None."""
    if architecture() is None:
        return unsupported_machine()
    missing = [name for name in known_sets() if not _is_current(name, folder)]
    if not missing:
        return None
    compiler = _compiler()
    if not compiler:
        return f"no C++ compiler was found; install g++ or clang and run {COMMAND}"
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        problems = pool.map(lambda name: _compile(name, compiler, folder), missing)
        failed = [(name, text) for name, text in zip(missing, problems, strict=True) if text]
    if not failed:
        return None
    name, text = failed[0]
    advice = f"install a recent g++ or clang and run {COMMAND}"
    return f"{compiler[0]} cannot compile the kernels for {name} ({text}); {advice}"


def unsupported_machine() -> str:
    """Return the reason for a machine that has no kernels."""
    machine = f"{platform.system()} on {platform.machine() or 'an unknown processor'}"
    return f"there are kernels for Linux and macOS on x86-64 and ARM64, not for {machine}"


def _compiler() -> list[str]:
    """The command of a C++ compiler: $CXX, which may have arguments, or the first one on PATH."""
    chosen = shlex.split(os.environ.get("CXX", ""))
    found = [path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))]
    return chosen or found[:1]


def _is_current(name: str, folder: Path) -> bool:
    """True if the object exists and contains the hash of its sources, which the compiler embeds."""
    path = object_path(name, folder)
    return path.is_file() and sources_hash(name, folder).encode() in path.read_bytes()


def _compile(name: str, compiler: list[str], folder: Path) -> str | None:
    """Compile one instruction set, to an object that appears whole or not at all; return what failed."""
    final = object_path(name, folder)
    partial = final.with_name(f"{final.name}.{os.getpid()}")
    host = LINUX_FLAGS if platform.system() == "Linux" else ("-arch", str(architecture()))
    sources = f'-DBMFA_SOURCES="{sources_hash(name, folder)}"'
    command = [*compiler, *set_flags(name), *host, sources, "-o", partial.name, "tiles.cpp"]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, errors="replace")
        if done.returncode == 0:
            os.replace(partial, final)
            return None
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if "error" in line] or lines
        return (errors or [f"exit status {done.returncode}"])[0][:LONGEST_REASON]
    except OSError as error:  # no such compiler, a read-only folder
        return str(error)[:LONGEST_REASON]
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def main() -> int:
    """Compile, print the outcome, and return 1 on a failure."""
    built, reason = compile_all()
    for name in built:
        print(f"up to date: {object_path(name).name}")
    if reason is not None:
        print(f"not compiled: {reason}", file=sys.stderr)
    return int(reason is not None)


if __name__ == "__main__":
    sys.exit(main())
