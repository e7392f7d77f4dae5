"""Exact attention in C++ against float64 and `scaled_dot_product_attention`."""

import math

import numpy as np
import pytest
import torch

from bmfa import Grid, screened_attention
from bmfa.attention.kernels import native
from bmfa.attention.kernels.native import library
from bmfa.attention.tiling import Tiling
from native_cases import BLOCK, DIMS, DTYPES, SETS, check_exact, draw_case, run_exact
from tiled_cases import TiledCase

pytestmark = pytest.mark.skipif(library.load() is None, reason=str(library.unavailable_reason()))
SLOW = pytest.mark.slow


def exact_case(q, k, v, valid=None, scale=1.0, prefix=0):
    """Tokens in one row."""
    keys, queries = k.shape[2] - prefix, q.shape[2] - prefix
    tiling = Tiling(Grid(1, keys), query_grid=None if queries == keys else Grid(1, max(1, queries)))
    return TiledCase(q, k, v, tiling, {"prefix": prefix, "scale": scale, "tau": 1.0}, valid)


def draw_tokens(seed, dtype=torch.float32):
    """A case of 1 to 300 tokens near the edges of blocks."""
    rng = np.random.default_rng([seed, 7])
    tokens, queries = (int(rng.choice([1, 2, 63, 64, 65, 129, rng.integers(1, 301)])) for _ in "kq")
    return draw_case(
        seed, dtype, grid=Grid(1, tokens), prefix=int(rng.choice([0, 1, 5, 70])),
        query_grid=Grid(1, queries) if seed % 2 else None,
    )  # fmt: skip


@pytest.mark.parametrize(
    "seeds",
    [range(150), *(pytest.param(range(n, n + 500), marks=SLOW) for n in (150, 650))],
    ids=str,
)
def test_drawn_cases_equal_float64(seeds):
    for seed in seeds:
        for dtype in DTYPES:
            check_exact(draw_case(seed, dtype) if seed % 4 == 0 else draw_tokens(seed, dtype))


@SLOW
@pytest.mark.parametrize("name", SETS)
def test_every_number_of_tokens(name, monkeypatch):
    monkeypatch.setenv("BMFA_NATIVE", name)
    generator = torch.Generator().manual_seed(0)
    for dtype in DTYPES:
        for tokens in range(1, 301):
            check_exact(
                exact_case(
                    *torch.randn(3, 1, 2, tokens, 33, generator=generator).to(dtype), scale=0.2
                )
            )


@SLOW
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_mixture_of_head_dimensions(dtype):
    generator = torch.Generator().manual_seed(0)
    for d in (*DIMS, 1, 2, 3, 5, 255):
        for e in (*DIMS, 1, 2, 3, 5, 255):
            q, k = torch.randn(2, 2, 2, 75, d, generator=generator).to(dtype)
            v = torch.randn(2, 2, 75, e, generator=generator).to(dtype)
            check_exact(exact_case(q, k, v, scale=d**-0.5))


def test_one_channel_and_one_token():
    for d, e in ((1, 1), (1, 256), (256, 1), (3, 5)):
        q, k, v = torch.randn(2, 3, 1, d), torch.randn(2, 3, 1, d), torch.randn(2, 3, 1, e)
        assert torch.equal(native.exact_attention(q, k, v, scale=1.0), v)
        many = native.exact_attention(q.expand(2, 3, 70, d), k, v, scale=1.0)
        assert torch.equal(many, v.expand(2, 3, 70, e))


def test_one_valid_key_is_the_output_and_without_one_the_prefix():
    for dtype in DTYPES:
        q, k, v = torch.randn(3, 1, 2, 300, 24).to(dtype)
        for token in (0, 63, 64, 150, 299):
            valid = torch.zeros(1, 300, dtype=torch.bool)
            valid[0, token] = True
            got = native.exact_attention(q, k, v, scale=1.0, valid=valid)
            assert torch.equal(got, v[:, :, token : token + 1].expand_as(v))
            masked = native.exact_attention(q, k, v, scale=1.0, valid=valid, mask_queries=True)
            assert torch.equal(masked, got.where(valid[:, None, :, None], 0.0))
        none = torch.zeros(1, 299, dtype=torch.bool)
        got = native.exact_attention(q, k, v, scale=1.0, prefix=1, valid=none)
        assert torch.equal(got, v[:, :, :1].expand_as(v))


def test_permuted_keys_change_rounding_alone():
    """And a permutation of the queries permutes the output to the bit."""
    q, k, v = torch.randn(3, 1, 2, 200, 40, generator=torch.Generator().manual_seed(0))
    order = torch.randperm(200, generator=torch.Generator().manual_seed(1))
    want = native.exact_attention(q, k, v, scale=0.2)
    assert torch.equal(native.exact_attention(q[:, :, order], k, v, scale=0.2), want[:, :, order])
    got = native.exact_attention(q, k[:, :, order], v[:, :, order], scale=0.2)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


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


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_every_half_number_is_read_and_written(dtype):
    """All bit patterns below 1e36, whose sums are finite, as values of keys, each of which one query
    attends to alone."""
    numbers = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    v = numbers.where(numbers.abs() < 1e36, 0.0).view(1, 1, 256, 256)
    q = torch.eye(256, dtype=dtype).view(1, 1, 256, 256)
    assert torch.equal(native.exact_attention(q, q, v, scale=1000.0), v)


def test_nan_infinity_and_overflow_raise():
    """Anywhere in q and k, with any number of queries: some block of queries looks at each key."""
    messages = {"q": "queries hold|overflow", "k": "keys hold"}
    for name, value in (
        ("q", math.nan),
        ("q", math.inf),
        ("k", math.nan),
        ("k", -math.inf),
        ("q", 2e38),
    ):
        for token in (0, 64, 130, 199):  # in any block
            for queries in (200, 1, 65, 300):
                if name == "q" and token >= queries:
                    continue
                q, k = torch.ones(2, 2, queries, 16), torch.ones(2, 2, 200, 16)
                {"q": q, "k": k}[name][1, 1, token, 7] = value
                for valid in (None, torch.ones(1, 199, dtype=torch.bool)):
                    with pytest.raises(ValueError, match=messages[name]):
                        native.exact_attention(
                            q, k, torch.ones(2, 2, 200, 16), scale=1.0, prefix=1, valid=valid,
                            mask_queries=queries == 200,
                        )  # fmt: skip


def test_infinite_values_are_values():
    q = torch.randn(1, 1, 70, 16)
    v = torch.ones(1, 1, 70, 16)
    v[:, :, 66, 3], v[:, :, 5, 4] = math.inf, math.nan
    output = native.exact_attention(q, q, v, scale=0.1)
    assert bool((output[..., 3] == math.inf).all()) and bool(output[..., 4].isnan().all())
    assert int(output.isfinite().sum()) == 70 * 14


def test_a_call_without_queries_is_empty():
    for shape, tokens in (((0, 2, 7, 8), 7), ((2, 0, 7, 8), 7), ((2, 2, 0, 8), 7)):
        k = torch.ones(shape[0], shape[1], tokens, 8)
        output = native.exact_attention(torch.ones(shape), k, k, scale=1.0)
        assert output.shape == shape and output.dtype == torch.float32


def test_the_public_function_runs_it_for_an_error_of_zero():
    for dtype in DTYPES:
        for masked, own in ((False, False), (True, False), (True, True)):
            case = draw_case(
                3, dtype, grid=Grid(12, 16), query_grid=Grid(9, 10) if own else None, batch=2,
                heads=(4, 2), prefix=2, query_prefix=2, tau=1.0, masked=masked, layout="contiguous",
                group_tiles=1, side=8,
            )  # fmt: skip
            result = screened_attention(
                case.q, case.k, case.v, grid=(12, 16), prefix=2, query_grid=(9, 10) if own else None,
                valid=case.valid, error=0.0,
            )  # fmt: skip
            assert (result.stats.backend, result.stats.form) == ("native", "dense")
            assert torch.equal(result.output, run_exact(case))
            check_exact(case)
