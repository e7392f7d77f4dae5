"""How native calls run: equal bits for any threads and memory, concurrent calls, forks, sanitizers."""

import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from bmfa import Grid
from bmfa.attention.kernels import native
from bmfa.attention.kernels.native import compile as build
from bmfa.attention.kernels.native import library
from bmfa.attention.tiling import Tiling
from native_cases import DTYPES, SETS, draw_case, equal, results, run_exact
from tiled_cases import TiledCase

pytestmark = pytest.mark.skipif(library.load() is None, reason=str(library.unavailable_reason()))
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")


@pytest.fixture
def threads():
    """`torch.set_num_threads`, which ends with the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def large_case(seed, **budget):
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


CASES = [
    large_case(seed, **budget)
    for seed, budget in enumerate(({"error": 0.03}, {"error": 0.03}, {"expand": 3.0}))
]


# Equal bits


@pytest.mark.parametrize("of_torch", [True, False])
@pytest.mark.parametrize("name", SETS)
def test_any_number_of_threads_gives_equal_bits(name, of_torch, monkeypatch, threads):
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


@pytest.mark.slow
def test_drawn_and_repeated_cases_give_equal_bits(threads):
    """With numbers of threads up to more than there is work for; threads take turns in another order
    each time."""
    cases = [(draw_case(seed, DTYPES[seed % 3]), 1) for seed in range(150)]
    for case, repeats in (*cases, *((case, 30) for case in CASES)):
        threads(1)
        want = results(case)
        for number in (2, 3, 5, 16, 64, 300) if repeats == 1 else (2, 3, 5):
            threads(number)
            for _ in range(repeats):
                assert equal(results(case), want), number


def test_memory_may_hold_anything(monkeypatch, threads):
    """Every element of scratch and of results is written before it is read: NaN, -1, huge and tiny
    numbers, and what the calls before left there."""
    cases = [draw_case(seed, DTYPES[seed % 3]) for seed in range(12)]
    cases += [draw_case(100 + seed, masked=True, query_grid=None) for seed in range(6)]
    cases += CASES
    want = [results(case) for case in cases]
    filled = []

    def poisoned(make, byte):
        def call(*arguments, **options):
            fresh = make(*arguments, **options)
            filled.append(len(fresh))
            raw = np.asarray(fresh)
            raw.view(np.uint8)[...] = byte if raw.dtype != bool else byte % 2
            return fresh

        return call

    for byte in (0xFF, 0x00, 0x7F, 0x01):
        with monkeypatch.context() as patch:
            patch.setattr(native, "_allocate", poisoned(native._allocate, byte))
            patch.setattr(native, "_empty", poisoned(native._empty, byte))
            for number in (1, 3):
                threads(number)
                for index, case in enumerate(cases):
                    assert equal(results(case), want[index]), (byte, index)
    assert len(filled) > 100


def test_scratch_is_used_within_its_bounds(monkeypatch):
    """What follows the scratch memory that the library asks for, and its alignment, is left alone."""
    guard, seen = 4096, []

    def allocate(size):
        memory = torch.full((size + 2 * guard,), 0xA5, dtype=torch.uint8)
        seen.append((memory, size))
        return memory[guard : guard + size]

    monkeypatch.setattr(native, "_allocate", allocate)
    for seed in range(25):
        results(draw_case(seed, DTYPES[seed % 3]))
        for memory, size in seen:
            around = torch.cat((memory[:guard], memory[guard + size :]))
            assert bool((around == 0xA5).all())
        seen.clear()


def test_inputs_and_denormal_numbers_are_left_alone():
    """A library that is compiled with -ffast-math would turn denormal numbers off for the process."""
    for case in CASES:
        before = [x.clone() for x in (case.q, case.k, case.v)]
        results(case)
        assert all(map(torch.equal, (case.q, case.k, case.v), before))
    assert float(torch.tensor([1e-38]) * 0.01) > 0.0
    assert float(np.float32(1e-38) * np.float32(0.01)) > 0.0


# Concurrent calls and forks


@pytest.mark.parametrize("number", [1, 3])
def test_four_python_threads_at_once(number, threads):
    """Calls with different shapes equal those one after the other; `ctypes` releases the GIL."""
    cases = [draw_case(seed, DTYPES[seed % 3]) for seed in range(200, 212)]
    cases += CASES[:2]
    want = [results(case) for case in cases]
    wrong = []
    start = threading.Barrier(4)

    def work(first):
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


def in_child(function, seconds=60):
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


def gives(want, *numbers):
    """True if the first cases have these results with these numbers of threads, one after the other."""
    for number in numbers:
        torch.set_num_threads(number)
        if not all(equal(results(case), x) for case, x in zip(CASES, want, strict=False)):
            return False
    return True


@needs_fork
@pytest.mark.parametrize("before", [1, 2])
def test_a_fork_after_use(before, threads):
    """The threads of the parent do not exist in the child, which calls with 2 threads and with 1, nor in
    a fork of the child."""
    threads(before)
    want = [results(case) for case in CASES[:2]]
    in_child(lambda: gives(want, 2, 1))
    in_child(lambda: gives(want, 1, 2))

    def child():
        in_child(lambda: gives(want[:1], 2), 30)
        return gives(want[:1], 2)

    in_child(child)
    assert gives(want, before)


@needs_fork
def test_a_fork_before_first_use():
    """The library is loaded in the child."""
    want = results(CASES[2])

    def child():
        library._select.cache_clear()
        return equal(results(CASES[2]), want)

    in_child(child)


class Attended(Dataset):
    """Items that are computed by native calls, in the processes of a DataLoader."""

    def __len__(self):
        return 6

    def __getitem__(self, index):
        torch.set_num_threads(1 + index % 2)  # workers start with 1
        output = results(CASES[index % 3])[0]
        torch.set_num_threads(1)  # for torch itself
        return output


@needs_fork
def test_workers_of_a_data_loader(threads):
    threads(2)
    want = [results(CASES[index % 3])[0] for index in range(6)]
    loader = DataLoader(
        Attended(), batch_size=None, num_workers=2, multiprocessing_context="fork", timeout=60
    )
    for _ in range(2):  # and between the epochs, the parent calls, too
        assert equal(tuple(loader), tuple(want))
        assert equal(results(CASES[0])[:1], (want[0],))


def test_a_started_process_gives_equal_bits(tmp_path):
    """Another process, another address space: results depend on nothing that is not an argument."""
    case = CASES[2]
    torch.save((case.q, case.k, case.v), tmp_path / "qkv.pt")
    code = (
        "import sys, torch; from bmfa.attention.kernels import native\n"
        "q, k, v = torch.load(sys.argv[1]); torch.set_num_threads(2)\n"
        "torch.save(native.exact_attention(q, k, v, scale=0.15, prefix=1), sys.argv[2])\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "qkv.pt"), str(tmp_path / "out.pt")]
    subprocess.run(command, check=True)
    assert torch.equal(torch.load(tmp_path / "out.pt"), run_exact(case))


# Sanitizers


@pytest.mark.install
@pytest.mark.parametrize("name", SETS)
def test_sanitizers_find_nothing(name, tmp_path):
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
