"""How native calls run: equal bits for any threads and memory, concurrent calls, forks, sanitizers."""

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from bmfa import Grid
from bmfa.attention.kernels import native
from bmfa.attention.kernels.native import compile as build
from bmfa.attention.kernels.native import library
from bmfa.attention.tiling import Tiling
from native_cases import DTYPES, SETS, draw_case, run
from tiled_cases import TiledCase

pytestmark = pytest.mark.skipif(library.load() is None, reason=str(library.unavailable_reason()))

SLOW = pytest.mark.slow
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by their size in bytes
Result = tuple[Tensor, ...]
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """`torch.set_num_threads`, which ends with the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def large_case(seed: int, **budget: float) -> TiledCase:
    """So much work that every one of 5 threads gets some."""
    generator = torch.Generator().manual_seed(seed)
    tiling = Tiling(Grid(45, 49), group_tiles=1 + seed % 2)
    shape = (3, 2, 2, 1 + tiling.grid.size, 40)
    q, k, v = (torch.randn(shape, generator=generator).cumsum(3) / 6).to(DTYPES[seed % 3])
    valid = None
    if seed % 2:
        valid = torch.rand(2, tiling.grid.size, generator=generator) < 0.8
    settings = {"prefix": 1, "scale": 0.15, "tau": 1.0, **budget}
    return TiledCase(q, k, v, tiling, settings, valid)


def results(case: TiledCase) -> Result:
    """All results of the tiled and the exact call."""
    got = run(case)
    exact = native.exact_attention(
        case.q, case.k, case.v, scale=case.settings["scale"], tau=case.settings["tau"],
        prefix=case.settings["prefix"], valid=case.valid,
        mask_queries=case.tiling.query_grid is None,
    )  # fmt: skip
    return got.output, got.expanded, got.expanded_count, got.probes, exact


def equal(got: Result, want: Result) -> bool:
    """True for equal bits. NumPy compares, because operations of torch that run in several threads hang
    in a forked process."""
    return all(np.array_equal(bits(x), bits(y)) for x, y in zip(got, want, strict=True))


def bits(x: Tensor) -> np.ndarray:
    return x.view(torch.uint8 if x.dtype == torch.bool else INTEGERS[x.element_size()]).numpy()


CASES = [
    large_case(seed, **budget)
    for seed, budget in enumerate(({"error": 0.03}, {"error": 0.03}, {"expand": 3.0}))
]


# Equal bits


@pytest.mark.parametrize("of_torch", [True, False])
@pytest.mark.parametrize("name", SETS)
def test_any_number_of_threads_gives_equal_bits(
    name: str, of_torch: bool, monkeypatch: pytest.MonkeyPatch, threads: Callable[[int], None]
) -> None:
    """In the threads of torch, and in threads of their own."""
    monkeypatch.setenv("BMFA_NATIVE", name)
    if not of_torch:
        monkeypatch.setattr(library, "parallel", lambda: None)
    for case in CASES if name == SETS[0] else CASES[:2]:
        threads(1)
        want = results(case)
        assert 0 < int(want[2].sum()) < want[1].numel()
        for number in (2, 5, 2) if name == SETS[0] else (5,):
            threads(number)
            assert equal(results(case), want), number


@SLOW
def test_drawn_cases_give_equal_bits(threads: Callable[[int], None]) -> None:
    """With numbers of threads up to more than there is work for, many times."""
    for seed in range(150):
        case = draw_case(seed, DTYPES[seed % 3])
        threads(1)
        want = results(case)
        for number in (2, 3, 5, 16, 64, 300):
            threads(number)
            assert equal(results(case), want), (seed, number)


@SLOW
def test_repeated_calls_give_equal_bits(threads: Callable[[int], None]) -> None:
    """Threads take turns in another order each time."""
    for case in CASES:
        threads(1)
        want = results(case)
        for number in (2, 3, 5):
            threads(number)
            for _ in range(30):
                assert equal(results(case), want)


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Fill scratch memory and outputs, which are `torch.empty`, with a byte before each call."""
    allocate, empty = native._allocate, torch.empty
    filled: list[int] = []

    def fill(byte: int) -> None:
        def poisoned(*size: Any, **options: Any) -> Tensor:
            fresh = empty(*size, **options)
            fresh.view(torch.uint8).fill_(byte if fresh.dtype != torch.bool else byte % 2)
            filled.append(fresh.numel())
            return fresh

        monkeypatch.setattr(torch, "empty", poisoned)
        monkeypatch.setattr(native, "_allocate", lambda size: allocate(size).fill_(byte))

    yield fill
    assert len(filled) > 0


def test_memory_may_hold_anything(
    poison: Callable[[int], None], threads: Callable[[int], None]
) -> None:
    """Every element of scratch and of results is written before it is read: NaN, -1, huge and tiny
    numbers, and what the calls before left there."""
    cases = [draw_case(seed, DTYPES[seed % 3]) for seed in range(12)]
    cases += [draw_case(100 + seed, masked=True, query_grid=None) for seed in range(6)]
    cases += CASES
    want = [results(case) for case in cases]
    for byte in (0xFF, 0x00, 0x7F, 0x01):
        poison(byte)
        for number in (1, 3):
            threads(number)
            for index, case in enumerate(cases):
                assert equal(results(case), want[index]), (byte, index)


def test_scratch_is_used_within_its_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """What follows the scratch memory that the library asks for, and its alignment, is left alone."""
    guard, seen = 4096, []

    def allocate(size: int) -> Tensor:
        memory = torch.full((size + 2 * guard,), 0xA5, dtype=torch.uint8)
        seen.append((memory, size))
        return memory[guard : guard + size]

    monkeypatch.setattr(native, "_allocate", allocate)
    for seed in range(25):
        results(draw_case(seed, DTYPES[seed % 3]))
        for memory, size in seen:
            assert bool((memory[:guard] == 0xA5).all()) and bool(
                (memory[guard + size :] == 0xA5).all()
            )
        seen.clear()


def test_inputs_are_left_alone() -> None:
    for case in CASES:
        before = [x.clone() for x in (case.q, case.k, case.v)]
        results(case)
        assert all(map(torch.equal, (case.q, case.k, case.v), before))


def test_denormal_numbers_stay_on() -> None:
    """A library that is compiled with -ffast-math would turn them off for the process."""
    results(CASES[0])
    assert (
        float(torch.tensor([1e-38]) * 0.01) > 0.0
        and float(np.float32(1e-38) * np.float32(0.01)) > 0
    )


# Concurrent calls and forks


@pytest.mark.parametrize("number", [1, 3])
def test_four_python_threads_at_once(number: int, threads: Callable[[int], None]) -> None:
    """Calls with different shapes equal those one after the other; `ctypes` releases the GIL."""
    cases = [draw_case(seed, DTYPES[seed % 3]) for seed in range(200, 212)]
    cases += CASES[:2]
    want = [results(case) for case in cases]
    wrong: list[Any] = []
    start = threading.Barrier(4)

    def work(first: int) -> None:
        torch.set_num_threads(number)
        start.wait()
        try:
            for turn in range(len(cases)):
                index = (first * 5 + turn) % len(cases)
                if not equal(results(cases[index]), want[index]):
                    wrong.append(index)
        except BaseException as error:
            wrong.append(error)

    workers = [threading.Thread(target=work, args=(first,)) for first in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    threads(1)
    assert wrong == []


def in_child(function: Callable[[], bool], seconds: int = 60) -> None:
    """Assert that a function is True in a forked process, which is killed if it hangs."""
    process = os.fork()
    if process == 0:
        status = 1
        try:
            signal.alarm(seconds)
            status = 0 if function() else 3
        finally:
            os._exit(status)
    _, status = os.waitpid(process, 0)
    assert status == 0, f"the child ended with status {status:#x}"


@needs_fork
@pytest.mark.parametrize("before", [1, 2])
def test_a_fork_after_use(before: int, threads: Callable[[int], None]) -> None:
    """The threads of the parent do not exist in the child, which calls with 2 threads and with 1."""
    threads(before)
    want = [results(case) for case in CASES[:2]]

    def child(first: int, second: int) -> bool:
        for number in (first, second):
            torch.set_num_threads(number)
            if not all(equal(results(case), x) for case, x in zip(CASES[:2], want, strict=True)):
                return False
        return True

    in_child(lambda: child(2, 1))
    in_child(lambda: child(1, 2))
    assert all(equal(results(case), x) for case, x in zip(CASES[:2], want, strict=True))


@needs_fork
def test_a_fork_before_first_use() -> None:
    """The library is loaded in the child."""
    want = results(CASES[2])

    def child() -> bool:
        library._selected.cache_clear()
        library._open_once.cache_clear()
        return equal(results(CASES[2]), want)

    in_child(child)


@needs_fork
def test_a_fork_of_a_fork(threads: Callable[[int], None]) -> None:
    threads(2)
    want = results(CASES[0])

    def grandchild() -> bool:
        torch.set_num_threads(2)
        return equal(results(CASES[0]), want)

    def child() -> bool:
        in_child(grandchild, 30)
        return grandchild()

    in_child(child)


class Attended(Dataset):
    """Items that are computed by native calls, in the processes of a DataLoader."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Tensor:
        torch.set_num_threads(1 + index % 2)  # workers start with 1
        output = results(CASES[index % 3])[0]
        torch.set_num_threads(1)  # for torch itself
        return output


@needs_fork
def test_workers_of_a_data_loader(threads: Callable[[int], None]) -> None:
    threads(2)
    want = [results(CASES[index % 3])[0] for index in range(6)]
    loader = DataLoader(
        Attended(), batch_size=None, num_workers=2, multiprocessing_context="fork", timeout=60
    )
    for _ in range(2):  # and between the epochs, the parent calls, too
        assert equal(tuple(loader), tuple(want))
        assert equal(results(CASES[0])[:1], (want[0],))


def test_a_started_process_gives_equal_bits(tmp_path: Path) -> None:
    """Another process, another address space: results depend on nothing that is not an argument."""
    want = results(CASES[2])
    torch.save((CASES[2].q, CASES[2].k, CASES[2].v), tmp_path / "qkv.pt")
    code = (
        "import sys, torch; from bmfa.attention.kernels import native\n"
        "q, k, v = torch.load(sys.argv[1]); torch.set_num_threads(2)\n"
        "torch.save(native.exact_attention(q, k, v, scale=0.15, prefix=1), sys.argv[2])\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "qkv.pt"), str(tmp_path / "out.pt")]
    subprocess.run(command, check=True)
    assert torch.equal(torch.load(tmp_path / "out.pt"), want[-1])


# Sanitizers


@pytest.mark.install
@pytest.mark.parametrize("name", SETS)
def test_sanitizers_find_nothing(name: str, tmp_path: Path) -> None:
    """`native_driver.cpp` draws cases, and is compiled with the sanitizers of addresses and of
    undefined behaviour."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    driver = Path(__file__).with_name("native_driver.cpp")
    flags = [flag for flag in build.set_flags(name) if flag not in ("-shared", "-fPIC", "-O3")]
    sanitize = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g", "-O1"]
    program = tmp_path / "driver"
    command = [compiler, *flags, *sanitize, f"-I{build.FOLDER}", "-o", str(program), str(driver)]
    subprocess.run(command, check=True)
    # The sanitizer needs its own library to be the first one.
    environment = {key: x for key, x in os.environ.items() if key != "LD_PRELOAD"}
    for seed in (0, 1):
        done = subprocess.run(
            [str(program), str(seed), "150"], env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr[-3000:]
        assert done.stdout.split() == ["150", "cases"]
