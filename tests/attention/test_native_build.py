"""Compiling and loading the C++ kernels: instruction sets, BMFA_NATIVE, and machines without a build."""

import platform
import re
import shutil
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location

import pytest

from bmfa.attention.kernels.native import compile as build
from bmfa.attention.kernels.native import library

SETS = tuple(build.INSTRUCTION_SETS.get(build.architecture() or "", ()))
# A library with nothing but what the loader needs, which compiles in a moment.
STUB = """#include "stub.h"
EXPORT const char* bmfa_sources() { return BMFA_SOURCES; }
EXPORT long long bmfa_scratch_bytes() { return 0; }
"""
HEADER = '#define EXPORT extern "C" __attribute__((visibility("default")))\n'

needs_compiler = pytest.mark.skipif(
    not SETS or not build._compiler(), reason="needs a C++ compiler on Linux or macOS"
)


def clear_caches():
    library._select.cache_clear()
    library.supported_sets.cache_clear()


@pytest.fixture
def stub(tmp_path, monkeypatch):
    """`compile` in a folder of its own with the stub, where `library` looks for objects."""
    (tmp_path / "tiles.cpp").write_text(STUB)
    (tmp_path / "stub.h").write_text(HEADER)
    spec = spec_from_file_location("stub_compile", shutil.copy(build.__file__, tmp_path))
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(library, "_build", lambda: module)
    monkeypatch.delenv("BMFA_NATIVE", raising=False)
    clear_caches()
    yield module
    monkeypatch.undo()
    clear_caches()


def objects(module):
    return sorted(path.name for path in module.FOLDER.glob("tiles-*"))


@needs_compiler
def test_every_set_is_compiled_once_and_loaded_in_one_process(stub, monkeypatch):
    assert stub.compile_all() == (list(SETS), None)
    assert objects(stub) == sorted(f"tiles-{name}.so" for name in SETS)
    assert library.built_sets() == SETS
    for name in library.supported_sets():
        monkeypatch.setenv("BMFA_NATIVE", name)
        assert library.instruction_set() == name
        assert library.load().bmfa_sources().decode() == stub.sources_hash(name)
        assert library.load() is library.load()
    monkeypatch.delenv("BMFA_NATIVE")
    monkeypatch.setenv("CXX", "false")  # is not run: nothing is out of date
    assert stub.compile_all() == (list(SETS), None)
    monkeypatch.setenv("BMFA_NATIVE", "off")  # leaves them out of a wheel all the same
    assert stub.compile_all()[0] == []


@needs_compiler
def test_values_of_the_environment_variable(stub, monkeypatch):
    stub.compile_all()
    best, *_, last = (*library.supported_sets(), library.supported_sets()[-1])
    unknown = "BMFA_NATIVE=sse9 is not known on this machine; it accepts auto, off, "
    for value, chosen, reason in (
        ("", best, None),
        ("AUTO", best, None),
        (f" {last} ", last, None),
        ("off", None, "BMFA_NATIVE is off"),
        ("sse9", None, unknown),
    ):
        monkeypatch.setenv("BMFA_NATIVE", value)
        assert library.instruction_set() == chosen and (library.load() is None) == (chosen is None)
        found = library.unavailable_reason()
        assert found is None if reason is None else reason in found


@needs_compiler
def test_a_missing_or_broken_object_has_a_reason_and_auto_takes_the_next(stub, monkeypatch):
    stub.compile_all()
    best, *others = library.supported_sets()
    for content, reason in (
        (b"no object", rf"tiles-{best}\.so cannot be loaded .* run python -m"),
        (None, f"{best} have not been compiled; run python -m"),
    ):
        stub.object_path(best).unlink()
        if content is not None:
            stub.object_path(best).write_bytes(content)
        for setting, chosen in ((best, None), ("auto", others[0] if others else None)):
            clear_caches()
            monkeypatch.setenv("BMFA_NATIVE", setting)
            assert library.instruction_set() == chosen
            assert chosen or re.search(reason, library.unavailable_reason())


@pytest.mark.skipif(build.architecture() != "x86_64", reason="other processors have one set")
@needs_compiler
def test_a_set_that_the_processor_lacks_is_not_loaded(stub, monkeypatch):
    stub.compile_all()
    monkeypatch.setattr(library, "_processor_features", set)
    clear_caches()
    assert library.supported_sets() == ("baseline",) and library.instruction_set() == "baseline"
    monkeypatch.setenv("BMFA_NATIVE", "avx2")
    assert library.load() is None
    assert library.unavailable_reason() == "this processor does not have avx2; it has baseline"


@needs_compiler
def test_objects_of_other_sources_are_refused_and_compiled_again(stub, monkeypatch):
    stub.compile_all()
    (stub.FOLDER / "stub.h").write_text(HEADER + "// changed\n")
    assert library.load() is None
    assert "was compiled from other sources; run make setup or" in library.unavailable_reason()
    with monkeypatch.context() as patch:
        patch.setenv("CXX", "false")
        assert stub.compile_all()[0] == []
    clear_caches()
    assert "false cannot compile the kernels" in library.unavailable_reason()
    assert stub.compile_all() == (list(SETS), None)
    for name in SETS:
        assert stub.sources_hash(name).encode() in stub.object_path(name).read_bytes()


@pytest.mark.skipif(not SETS, reason="there are no kernels for this machine")
def test_without_a_build_there_is_a_reason(stub, monkeypatch):
    for variables, message in (
        ({"PATH": "", "CXX": ""}, "no C++ compiler was found; install g++ or clang"),
        ({"CXX": "false"}, "false cannot compile the kernels for"),
        ({"CXX": "/nowhere/c++ -m64"}, "/nowhere/c++ cannot compile"),
        ({"CXX": "'"}, "the kernels were not compiled (No closing quotation)"),
        ({"BMFA_NATIVE": "off"}, "BMFA_NATIVE was off at installation"),
    ):
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            built, reason = stub.compile_all()
        clear_caches()
        assert built == [] and objects(stub) == []
        assert message in reason and "\n" not in reason and stub.COMMAND in reason
        assert library.load() is None and library.instruction_set() is None
        assert library.unavailable_reason() == reason


@needs_compiler
def test_an_error_of_the_compiler_is_reported_and_a_later_build_removes_it(stub):
    source = stub.FOLDER / "tiles.cpp"
    source.write_text(STUB + "nonsense;\n")
    run = [sys.executable, str(stub.FOLDER / "compile.py")]
    done = subprocess.run(run, capture_output=True, text=True)
    assert done.returncode == 1 and objects(stub) == []
    assert re.search(r"not compiled: .*\(tiles\.cpp:4:.* error: .*nonsense", done.stderr)
    source.write_text(STUB)
    done = subprocess.run(run, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"up to date: tiles-{name}.so" for name in SETS]
    assert not (stub.FOLDER / stub.FAILURE_FILE).exists()
    assert library.load() is not None


def test_the_architecture(stub, monkeypatch):
    for system, machine, archflags, expected in (
        ("Linux", "x86_64", "-arch arm64", "x86_64"),
        ("Linux", "aarch64", "", "arm64"),
        ("Darwin", "arm64", "", "arm64"),
        ("Darwin", "arm64", "-arch x86_64", "x86_64"),
        ("Darwin", "arm64", "-arch arm64 -arch x86_64", "arm64"),
        ("Linux", "riscv64", "", None),
        ("Windows", "AMD64", "", None),
    ):
        monkeypatch.setattr(platform, "system", lambda system=system: system)
        monkeypatch.setattr(platform, "machine", lambda machine=machine: machine)
        monkeypatch.setenv("ARCHFLAGS", archflags)
        assert stub.architecture() == expected
        if expected is None:
            clear_caches()
            reason = f"there are kernels for Linux and macOS on x86-64 and ARM64, not for {system}"
            assert library.supported_sets() == library.built_sets() == () and library.load() is None
            assert reason in stub.compile_all()[1] and reason in library.unavailable_reason()


# The objects of this installation


def inspect(*command):
    if shutil.which(command[0]) is None:
        pytest.skip(f"needs {command[0]}")
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.skipif(sys.platform != "linux", reason="reads ELF")
def test_the_kernels_need_the_c_library_alone():
    allowed = {"libc", "libm", "libpthread", "ld-linux-x86-64", "ld-linux-aarch64"}
    for name in library.built_sets():
        read = inspect("readelf", "-d", str(build.object_path(name)))
        needed = re.findall(r"NEEDED.*\[([^\]]+)\]", read)
        assert {library_name.partition(".")[0] for library_name in needed} <= allowed


@pytest.mark.skipif(build.architecture() != "x86_64", reason="reads x86-64")
def test_the_kernels_have_no_instruction_of_a_better_set():
    for name, absent in (("baseline", "v[a-z]"), ("avx2", ".*%zmm|.*{%k")):
        if name not in library.built_sets():
            pytest.skip(f"the kernels for {name} are not compiled")
        read = inspect(
            "objdump", "--disassemble", "--no-show-raw-insn", str(build.object_path(name))
        )
        instructions = re.findall(r"^ +[0-9a-f]+:\t(.+)$", read, re.M)
        assert len(instructions) > 1000
        assert [line for line in instructions if re.match(absent, line)] == []
