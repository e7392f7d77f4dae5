"""The C++ kernels: exact attention against float64, equal bits, memory, threads and forks.

test_tiles.py compares tiled attention with the specification.
"""

import itertools
import math
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from bmfa import Grid, screened_attention
from bmfa.attention.kernels import native
from bmfa.attention.kernels.eager.tiles import tiled_attention as eager_attention
from bmfa.attention.kernels.native import compile as build
from bmfa.attention.kernels.native import library
from bmfa.attention.tiling import Tiling
from tiled_cases import (
    BLOCK,
    DIMS,
    EPS,
    LAYOUTS,
    NATIVE,
    TiledCase,
    draw_case,
    largest_score,
    lay_out,
    make_case,
)

pytestmark = pytest.mark.skipif(library.load() is None, reason=str(library.unavailable_reason()))
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
SLOW = pytest.mark.slow
DTYPES = NATIVE.dtypes
SETS = library.supported_sets()
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by their size in bytes


def run_exact(case: TiledCase) -> Tensor:
    """Run the exact kernel."""
    settings = {name: case.settings[name] for name in ("prefix", "scale", "tau")}
    masked = case.tiling.query_grid is None
    return native.exact_attention(
        case.q, case.k, case.v, valid=case.valid, mask_queries=masked, **settings
    )


def check_exact(case: TiledCase) -> None:
    """Assert an error of at most twice that of torch in the same dtype, and the rounding of sums."""
    got, want = run_exact(case), case.dense()
    assert got.dtype == case.q.dtype and got.shape == want.shape
    theirs = float((case.dense(case.q.dtype).double() - want).abs().max())
    ours = float((got.double() - want).abs().max())
    # Partial sums of a score walk to about |q| |k| sqrt(j / d^2) after j of d terms, so that their
    # roundings add up to about |q| |k| eps / 2.
    rounding = NATIVE.sums(case) + 2 * EPS + EPS / 2 * largest_score(case)
    allowed = 2 * theirs + rounding * float(case.v.nan_to_num(0.0).abs().max())
    assert ours <= allowed, (ours, theirs, allowed)


def results(case: TiledCase) -> tuple[Tensor, ...]:
    """All results of both kernels."""
    got = NATIVE.run(case)
    return got.output, got.expanded, got.expanded_count, got.probes, run_exact(case)


def equal(got: Sequence[Tensor], want: Sequence[Tensor]) -> bool:
    """True for equal bits. NumPy compares, because operations of torch that run in several threads hang
    in a forked process."""
    return all(np.array_equal(_bits(x), _bits(y)) for x, y in zip(got, want, strict=True))


def _bits(x: Tensor) -> np.ndarray:
    return x.view(torch.uint8 if x.dtype == torch.bool else INTEGERS[x.element_size()]).numpy()


# Exact attention


def exact_case(q, k, v, valid=None, scale=1.0, prefix=0):
    """Tokens in one row."""
    keys, queries = k.shape[2] - prefix, q.shape[2] - prefix
    tiling = Tiling(Grid(1, keys), query_grid=None if queries == keys else Grid(1, max(1, queries)))
    return TiledCase(q, k, v, tiling, {"prefix": prefix, "scale": scale, "tau": 1.0}, valid)


def draw_tokens(seed, dtype=torch.float32):
    """A case of 1 to 300 tokens near the edges of blocks."""
    rng = np.random.default_rng([seed, 7])
    tokens, queries = (int(rng.choice([1, 2, 63, 64, 65, 129, rng.integers(1, 301)])) for _ in "kq")
    query_grid, prefix = Grid(1, queries) if seed % 2 else None, int(rng.choice([0, 1, 5, 70]))
    return draw_case(seed, dtype, grid=Grid(1, tokens), prefix=prefix, query_grid=query_grid)


@pytest.mark.parametrize("seeds", [range(100), pytest.param(range(100, 700), marks=SLOW)])
def test_drawn_cases_equal_float64(seeds):
    for seed, dtype in itertools.product(seeds, DTYPES):
        check_exact(draw_case(seed, dtype) if seed % 4 == 0 else draw_tokens(seed, dtype))


@SLOW
def test_every_number_of_tokens_and_mixture_of_head_dimensions(monkeypatch):
    generator = torch.Generator().manual_seed(0)

    def draw(tokens, d, e, dtype):
        q, k = torch.randn(2, 2, 2, tokens, d, generator=generator).to(dtype)
        v = torch.randn(2, 2, tokens, e, generator=generator).to(dtype)
        return exact_case(q, k, v, scale=d**-0.5)

    dims = (*DIMS, 1, 2, 3, 5, 255)
    for dtype in DTYPES:
        for d, e in itertools.product(dims, dims):
            check_exact(draw(75, d, e, dtype))
        for name, tokens in itertools.product(SETS, (*range(1, 140), *range(140, 301, 7))):
            monkeypatch.setenv("BMFA_NATIVE", name)
            check_exact(draw(tokens, 33, 33, dtype))
        monkeypatch.delenv("BMFA_NATIVE")


def test_one_key_is_the_output_and_without_one_the_prefix():
    for dtype, (d, e) in itertools.product(DTYPES, ((1, 1), (1, 256), (256, 1), (24, 24))):
        q, k = torch.randn(2, 2, 3, 300, d).to(dtype)
        v = torch.randn(2, 3, 300, e).to(dtype)
        for token in (0, 63, 64, 150, 299):
            rows = slice(token, token + 1)
            valid = torch.zeros(2, 300, dtype=torch.bool)
            valid[:, token] = True
            want = v[:, :, rows].expand_as(v)
            assert torch.equal(native.exact_attention(q, k, v, scale=1.0, valid=valid), want)
            masked = native.exact_attention(q, k, v, scale=1.0, valid=valid, mask_queries=True)
            assert torch.equal(masked, want.where(valid[:, None, :, None], 0.0))
            for queries in (q, q[:, :, :1]):
                got = native.exact_attention(queries, k[:, :, rows], v[:, :, rows], scale=1.0)
                assert torch.equal(got, want[:, :, : got.shape[2]])
        none = torch.zeros(1, 299, dtype=torch.bool)
        got = native.exact_attention(q, k, v, scale=1.0, prefix=1, valid=none)
        assert torch.equal(got, v[:, :, :1].expand_as(v))


def test_a_maximum_that_moves_with_every_block():
    """Scores that grow or fall by blocks of keys, far beyond the range of exp."""
    for step in (30.0, -30.0, 100.0, -100.0, 1e4, -1e4):
        q, k = torch.zeros(1, 1, 64, 16), torch.zeros(1, 1, 300, 16)
        q[..., 0], k[..., 0] = 1.0, step * (torch.arange(300) // BLOCK)
        q[..., 1:], k[..., 1:] = torch.randn(64, 15), torch.randn(300, 15)
        check_exact(exact_case(q, k, torch.randn(1, 1, 300, 20)))


def test_small_weights_after_a_large_one():
    """Added one by one to a large weight, 16,384 equal small ones would lose 8e-4 of the output."""
    q, k = torch.zeros(1, 1, 1, 16), torch.zeros(1, 1, 16385, 16)
    q[..., 0], k[:, :, 0, 0] = 1.0, 12.0
    v = torch.ones(1, 1, 16385, 16)
    v[:, :, 0] = 0.0
    exact = 16384 / (16384 + math.exp(12))
    output = native.exact_attention(q, k, v, scale=1.0)
    assert float((output.double() / exact - 1).abs().max()) <= (64 + 16385 / 64) * 2**-24


def test_every_half_number_is_read_and_written():
    """All bit patterns below 1e36, whose sums are finite, as values of keys, each of which one query
    attends to alone."""
    for dtype in DTYPES[1:]:
        numbers = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
        v = numbers.where(numbers.abs() < 1e36, 0.0).view(1, 1, 256, 256)
        q = torch.eye(256, dtype=dtype).view(1, 1, 256, 256)
        assert torch.equal(native.exact_attention(q, q, v, scale=1000.0), v)


def test_nan_infinity_and_overflow_raise():
    """Anywhere in q and k, with any number of queries: some block of queries looks at each key."""
    messages, v = {"q": "queries hold|overflow", "k": "keys hold"}, torch.ones(2, 2, 200, 16)
    every = torch.ones(1, 199, dtype=torch.bool)
    numbers = [("q", math.nan), ("q", math.inf), ("k", math.nan), ("k", -math.inf), ("q", 2e38)]
    for (name, value), token, queries, valid in itertools.product(
        numbers, (0, 64, 130, 199), (200, 1, 65, 300), (None, every)
    ):
        if name == "k" or token < queries:
            q, k = torch.ones(2, 2, queries, 16), v.clone()
            {"q": q, "k": k}[name][1, 1, token, 7] = value
            options = {"prefix": 1, "valid": valid, "mask_queries": queries == 200}
            with pytest.raises(ValueError, match=messages[name]):
                native.exact_attention(q, k, v, scale=1.0, **options)


def test_infinite_values_are_values():
    case = make_case(3, (16, 16), error=0.0)
    case.v[:, :, 66, 3], case.v[:, :, 5, 4] = math.inf, math.nan
    for output in (run_exact(case), NATIVE.run(case).output):
        assert bool((output[..., 3] == math.inf).all()) and bool(output[..., 4].isnan().all())
        assert int(output.isfinite().sum()) == 257 * 30


def test_the_public_function_returns_the_results_of_the_kernels():
    for dtype, (masked, own) in itertools.product(
        DTYPES, ((False, None), (True, None), (True, Grid(9, 10)))
    ):
        options = {"query_grid": own, "masked": masked, "dtype": dtype, "batch": 2, "prefix": 2}
        case = make_case(3, (16, 24), heads=4, **options)
        case = replace(case, k=case.k[:, ::2], v=case.v[:, ::2])
        for error, form, output in (
            (0.0, "dense", run_exact(case)),
            (0.1, "tiled", NATIVE.run(case, error=0.1).output),
        ):
            grids = {"grid": (16, 24), "query_grid": own, "valid": case.valid, "prefix": 2}
            backend = {"backend": "native"} if form == "tiled" else {}
            stats = screened_attention(case.q, case.k, case.v, **grids, **backend, error=error)
            assert (stats.stats.backend, stats.stats.form) == ("native", form)
            assert torch.equal(stats.output, output)


# Tiles


def test_every_instruction_set_equals_the_specification(monkeypatch):
    for name in SETS:
        monkeypatch.setenv("BMFA_NATIVE", name)
        assert library.instruction_set() == name
        for dtype in DTYPES:
            NATIVE.check_many(range(3000, 3005), dtype)
            for seed in range(20):
                check_exact(draw_case(seed, dtype))


def test_tangents_that_do_not_fit_into_memory():
    """They are made for some heads and bands of groups at a time. The torch form in float64 is quicker
    than the specification."""
    case = make_case(6, (28, 28), heads=9, dims=(16, 256), side=2, error=0.002)
    got = NATIVE.run(case)  # 196 groups in 4 bands
    q, k, v = (x.double() for x in (case.q, case.k, case.v))
    want = eager_attention(q, k, v, case.tiling, **case.settings)
    same = (got.expanded == want.expanded).all(-1)
    assert float(same.float().mean()) > 0.99
    assert 0.05 < float(got.expanded.float().mean()) < 0.9
    slots = case.tiling.slot_tokens[same.all(1)[0]]
    difference = (got.output - want.output)[:, :, 1 + slots.flatten()].abs().max()
    assert float(difference) < 1e-5 * float(v.abs().max())


# Layouts, heads and images, of both kernels


def test_layouts_shared_heads_and_images_give_equal_bits():
    """Views of a projection, odd offsets, channels that are not contiguous, strides of 0; a copy of the
    keys for each head; and each image alone."""
    for dtype, seed in itertools.product(DTYPES, range(8)):
        heads = ((2, 1), (6, 2))[seed % 2]
        case = draw_case(4000 + seed, dtype, layout="contiguous", batch=2, heads=heads)
        want = results(case)
        for layout in LAYOUTS[:4]:
            assert equal(results(case.map(lambda x, to=layout: lay_out(x, to))), want), layout
        assert equal(results(case.whole()), want)
        for b in range(2):
            assert equal(results(case.image(b)), [x[b : b + 1] for x in want])
        for layout in LAYOUTS[4:]:  # equal images or heads, in memory of their own
            repeated = case.map(lambda x, to=layout: lay_out(x, to))
            if case.valid is not None and layout == "one image":
                repeated = replace(repeated, valid=case.valid[:1].expand(2, -1))
                assert equal(results(replace(repeated, valid=case.valid[:1])), results(repeated))
            assert equal(results(repeated.map(torch.clone)), results(repeated)), layout
        if case.valid is None:
            every = torch.ones(1, case.tiling.grid.size, dtype=torch.bool)
            assert equal(results(replace(case, valid=every)), want)


def test_views_of_one_projection_are_read_in_place():
    for dtype in DTYPES:
        case = make_case(3, (9, 16), heads=3, batch=2, dims=(24, 24), dtype=dtype, expand=1.7)
        packed = torch.stack([x.transpose(1, 2) for x in (case.q, case.k, case.v)], 2)
        q, k, v = packed.permute(2, 0, 3, 1, 4)  # from (B, N, 3, H, d)
        call, output = native._describe(q, k, v, None, 0.2, 0, None, False)
        assert (call.q.data, call.k.data, call.v.data) == (q.data_ptr(), k.data_ptr(), v.data_ptr())
        assert output.transpose(1, 2).is_contiguous()
        assert equal(results(replace(case, q=q, k=k, v=v)), results(case))


def test_the_default_device_does_not_matter():
    q, k, v = torch.randn(3, 1, 2, 33 * 34, 32)
    for error in (0.0, 0.05):
        call = partial(screened_attention, q, k, v, grid=(33, 34), error=error, backend="native")
        with torch.device("meta"):
            got = call().output
        assert torch.equal(got, call().output)


def test_exact_heads_and_expanded_tiles_have_the_bits_of_exact_attention():
    for seed, budget in itertools.product(
        range(8), ({"error": 0.0}, {"error": None, "expand": 1.0})
    ):
        got = results(draw_case(9000 + seed, **budget))
        assert torch.equal(got[0], got[4])
    case = NATIVE.exact_heads((24, 24))
    for heads, expected in ((slice(None), False), (slice(1, None), True)):
        part = case.map(lambda x, heads=heads: x[:, heads])
        got = NATIVE.attend(part, {"expand": None} | part.settings)
        assert got.exact is expected
        torch.testing.assert_close(
            got.output[:, -2:], run_exact(part)[:, -2:], rtol=2e-5, atol=2e-5
        )


# The public function


def test_invalid_tokens_raise_as_the_eager_path_does():
    grid, generator = Grid(12, 16), torch.Generator().manual_seed(0)
    drawn = torch.randn(3, 2, 2, 1 + grid.size, 24, generator=generator)
    drawn[1] *= 30.0
    valid = torch.rand(2, grid.size, generator=generator) < 0.7
    valid[:, [2, 6, 149, -1]] = True
    cases = [("q", 3, x, rf"queries hold -?{abs(x)}") for x in (math.nan, math.inf, -math.inf)]
    cases += [("k", t, x, "keys hold") for t in (0, 150, -1) for x in (math.nan, -math.inf)]
    cases += [("q", 0, math.nan, "queries hold nan")]  # of the prefix
    cases += [("q", 7, 1e38, "overflow")]  # not in float16, which has no such number
    for (name, token, value, message), mask in itertools.product(cases, (None, valid)):
        for dtype in DTYPES[: 2 if value == 1e38 else 3]:
            q, k, v = drawn.to(dtype, copy=True)
            {"q": q, "k": k}[name][1, 1, token, 5] = value
            common = {"grid": grid, "prefix": 1, "valid": mask}
            for options in ({"error": 0.1}, {"error": 0.0}, {"leaves": 0.3}):
                raised = []
                for backend in ("native", "eager"):
                    with pytest.raises(ValueError, match=message) as caught:
                        screened_attention(q, k, v, backend=backend, **common, **options)
                    raised.append(str(caught.value))
                assert raised[0] == raised[1]


def test_an_empty_batch_and_no_heads():
    for shape in ((0, 2, 65, 16), (2, 0, 65, 16)):
        q = torch.zeros(shape)
        for options in ({"error": 0.1}, {"error": 0.0}, {"leaves": 0.5}):
            result = screened_attention(q, q, q, grid=(8, 8), prefix=1, backend="native", **options)
            assert result.output.shape == shape and result.stats.backend == "native"


# Threads, memory and processes


@pytest.fixture
def threads():
    """`torch.set_num_threads`, which ends with the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


# So much work that every one of 5 threads gets some.
LARGE = {"grid": (45, 49), "batch": 3, "heads": 2, "dims": (40, 40)}
CASES = [
    make_case(0, dtype=DTYPES[0], error=0.03, **LARGE),
    make_case(1, dtype=DTYPES[1], error=0.03, group_tiles=2, masked=True, **LARGE),
    make_case(2, dtype=DTYPES[2], expand=3.0, **LARGE),
]


# Equal bits


def test_any_number_of_threads_gives_equal_bits(monkeypatch, threads):
    """In the threads of torch, and in threads of their own."""
    parallel = library.parallel
    for name, of_torch in itertools.product(SETS, (True, False)):
        monkeypatch.setenv("BMFA_NATIVE", name)
        monkeypatch.setattr(library, "parallel", parallel if of_torch else lambda: None)
        for case in CASES if name == SETS[0] else CASES[:2]:
            threads(1)
            want = results(case)
            assert 0 < int(want[2].sum()) < want[1].numel()
            for number in (2, 5, 2) if name == SETS[0] else (5,):
                threads(number)
                assert equal(results(case), want), number


@SLOW
def test_drawn_and_repeated_cases_give_equal_bits(threads):
    """With numbers of threads up to more than there is work for; threads take turns in another order
    each time."""
    cases = [(draw_case(seed, DTYPES[seed % 3]), (2, 3, 5, 16, 64, 300)) for seed in range(100)]
    for case, numbers in (*cases, *((case, (2, 3, 5) * 20) for case in CASES)):
        threads(1)
        want = results(case)
        for number in numbers:
            threads(number)
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
            numpy = SimpleNamespace(**vars(np) | {"empty": poisoned(np.empty, byte)})
            patch.setattr(native, "np", numpy)
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
        assert equal((case.q, case.k, case.v), before)
    assert float(torch.tensor([1e-38]) * 0.01) > 0.0
    assert float(np.float32(1e-38) * np.float32(0.01)) > 0.0


# Concurrent calls and forks


def test_four_python_threads_at_once(threads):
    """Calls with different shapes equal those one after the other; `ctypes` releases the GIL."""
    cases = [draw_case(seed, DTYPES[seed % 3]) for seed in range(200, 212)]
    cases += CASES[:2]
    want = [results(case) for case in cases]

    def work(first, number, start):
        torch.set_num_threads(number)
        start.wait()
        order = [(first * 5 + turn) % len(cases) for turn in range(len(cases))]
        return [index for index in order if not equal(results(cases[index]), want[index])]

    for number in (1, 3):
        start = threading.Barrier(4)
        with ThreadPoolExecutor(4) as pool:
            wrong = [pool.submit(work, first, number, start) for first in range(4)]
            assert [x.result() for x in wrong] == [[]] * 4
        threads(1)


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
def test_a_fork_after_use(threads):
    """The threads of the parent do not exist in the child, nor those of the child in its own."""
    want = [results(case) for case in CASES[:2]]

    def child():
        in_child(lambda: gives(want[:1], 2), 30)
        given = gives(want, 2, 1, 2)
        library._select.cache_clear()  # as in a fork before first use
        return given and gives(want, 1)

    for before in (1, 2):
        threads(before)
        assert gives(want, before)
        in_child(child)
        assert gives(want, before)


# Sanitizers


@pytest.mark.install
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_sanitizers_find_nothing(tmp_path):
    """`native_driver.cpp` draws cases, and is compiled with the sanitizers of addresses and of
    undefined behaviour."""
    driver = Path(__file__).with_name("native_driver.cpp")
    sanitize = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g", "-O1"]
    # The sanitizer needs its own library to be the first one.
    environment = {key: x for key, x in os.environ.items() if key != "LD_PRELOAD"}
    for name in SETS:
        flags = [flag for flag in build.set_flags(name) if flag not in ("-shared", "-fPIC", "-O3")]
        program = str(tmp_path / name)
        command = ["g++", *flags, *sanitize, f"-I{build.FOLDER}", "-o", program, str(driver)]
        subprocess.run(command, check=True)
        for seed in ("0", "1"):
            run = [program, seed, "150"]
            done = subprocess.run(run, env=environment, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr[-3000:]
            assert done.stdout.split() == ["150", "cases"]
