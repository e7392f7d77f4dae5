"""Exact attention in C++ against float64 and `scaled_dot_product_attention`."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from bmfa import screened_attention
from bmfa.attention.kernels import native
from bmfa.attention.kernels.native import library
from native_cases import BLOCK, DIMS, DTYPES, LAYOUTS, SETS, lay_out

pytestmark = pytest.mark.skipif(library.load() is None, reason=str(library.unavailable_reason()))

SLOW = pytest.mark.slow
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES)


class Exact(NamedTuple):
    """A problem; tokens that do not exist hold NaN."""

    q: Tensor  # (B, H, Q, d)
    k: Tensor  # (B, H or a divisor, prefix + N, d)
    v: Tensor  # (B, likewise, prefix + N, e)
    valid: Tensor | None  # (B or 1, N)
    options: dict[str, Any]  # scale, tau, prefix, mask_queries

    def run(self, **changes: Any) -> Tensor:
        return native.exact_attention(
            self.q, self.k, self.v, valid=self.valid, **self.options | changes
        )

    def torch(self, dtype: torch.dtype) -> Tensor:
        """`scaled_dot_product_attention` in a dtype, with zeros for invalid queries."""
        share = self.q.shape[1] // self.k.shape[1]
        q, k, v = (x.nan_to_num(0.0).to(dtype) for x in (self.q, self.k, self.v))
        k, v = (x.repeat_interleave(share, 1) for x in (k, v))
        mask = None
        if self.valid is not None:
            before = self.valid.new_ones(len(self.valid), self.options["prefix"])
            mask = torch.cat((before, self.valid), 1)[:, None, None]
        scale = self.options["scale"] / self.options["tau"]
        output = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
        if self.options["mask_queries"] and mask is not None:
            output = output.where(mask.mT, 0.0)
        return output

    def check(self) -> None:
        """Assert an error of at most twice that of torch in the same dtype, and the rounding of sums."""
        got, want = self.run(), self.torch(torch.float64)
        assert got.dtype == self.q.dtype and got.shape == want.shape
        theirs = float((self.torch(self.q.dtype).double() - want).abs().max())
        ours = float((got.double() - want).abs().max())
        # Weights are summed by blocks, and queries multiplied by the scale before the products.
        tokens, eps = self.k.shape[2], float(torch.finfo(torch.float32).eps)
        sums = (min(tokens, BLOCK) + tokens / BLOCK) * eps / 2
        scores = self.q.nan_to_num(0.0).double().norm(dim=-1).amax()
        scores *= self.k.nan_to_num(0.0).double().norm(dim=-1).amax()
        score = float(scores) * abs(self.options["scale"]) / self.options["tau"]
        largest = float(self.v.nan_to_num(0.0).abs().max())
        allowed = (
            2 * theirs + (sums + 2 * eps + eps / 2 * score / self.q.shape[-1] ** 0.5) * largest
        )
        assert ours <= allowed, (ours, theirs, allowed)


def draw(seed: int, dtype: torch.dtype = torch.float32, **changes: Any) -> Exact:
    """Draw 1 to 300 tokens, self-attention or other numbers of queries."""
    rng = np.random.default_rng([seed, 7])
    key_heads, share, batch = (int(x) for x in rng.integers(1, 4, 3))
    d, e = (int(x) for x in rng.choice(DIMS, 2))
    tokens = int(rng.choice([1, 2, 63, 64, 65, 128, 129, int(rng.integers(1, 301))]))
    prefix = min(tokens - 1, int(rng.choice([0, 1, 5, 70])))
    own = bool(rng.random() < 0.5)
    queries = tokens if own else int(rng.integers(1, 301))
    tau, layout = float(rng.choice([0.5, 1.0, 2.0])), str(rng.choice(LAYOUTS))
    sizes = rng.choice([0.3, 1.0, 4.0], 3)
    shapes = (
        (batch, key_heads * share, queries, d), (batch, key_heads, tokens, d),
        (batch, key_heads, tokens, e),
    )  # fmt: skip
    tensors = [
        torch.from_numpy(rng.normal(size=x) * s).to(dtype)
        for x, s in zip(shapes, sizes, strict=True)
    ]
    valid = draw_mask(rng, batch, tokens - prefix) if rng.random() < 0.6 else None
    if valid is not None:
        if layout == "one image":
            valid = valid[:1]
        gone = torch.cat((valid.new_zeros(len(valid), prefix), ~valid), 1)[:, None, :, None]
        tensors = [
            x if i == 0 and not own else x.masked_fill(gone, math.nan)
            for i, x in enumerate(tensors)
        ]
    q, k, v = (lay_out(x, layout) for x in tensors)
    options = {"scale": d**-0.5, "tau": tau, "prefix": prefix, "mask_queries": own}
    return Exact(q, k, v, valid, options | changes)


def draw_mask(rng: np.random.Generator, batch: int, tokens: int) -> Tensor:
    """(B, tokens): random tokens, whole blocks of 64, or all but one token are missing."""
    valid = torch.from_numpy(rng.random((batch, tokens)) < 0.7)
    kind = int(rng.integers(4))
    if kind == 1:
        start = BLOCK * int(rng.integers(tokens // BLOCK + 1))
        valid[:, start : start + BLOCK] = False
    if kind == 2:
        valid[:] = torch.arange(tokens) // BLOCK % 2 == 1
    if kind == 3:
        valid[:] = False
    valid[torch.arange(batch), torch.from_numpy(rng.integers(tokens, size=batch))] = True
    return valid


@EVERY_DTYPE
@pytest.mark.parametrize("seeds", [range(80), pytest.param(range(80, 1000), marks=SLOW)], ids=str)
def test_drawn_cases_equal_torch(seeds: range, dtype: torch.dtype) -> None:
    for seed in seeds:
        draw(seed, dtype).check()


@pytest.mark.parametrize("name", SETS)
def test_every_instruction_set_equals_torch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BMFA_NATIVE", name)
    for seed in range(1000, 1030):
        draw(seed, DTYPES[seed % 3]).check()


@SLOW
@EVERY_DTYPE
@pytest.mark.parametrize("name", SETS)
def test_every_number_of_tokens(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BMFA_NATIVE", name)
    generator = torch.Generator().manual_seed(0)
    for tokens in range(1, 301):
        q, k, v = torch.randn(3, 1, 2, tokens, 33, generator=generator).to(dtype)
        options = {"scale": 0.2, "tau": 1.0, "prefix": 0, "mask_queries": True}
        Exact(q, k, v, None, options).check()


@SLOW
@EVERY_DTYPE
def test_every_mixture_of_head_dimensions(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    for d in (*DIMS, 1, 2, 3, 5, 255):
        for e in (*DIMS, 1, 2, 3, 5, 255):
            q, k = torch.randn(2, 2, 2, 75, d, generator=generator).to(dtype)
            v = torch.randn(2, 2, 75, e, generator=generator).to(dtype)
            options = {"scale": d**-0.5, "tau": 1.0, "prefix": 0, "mask_queries": True}
            Exact(q, k, v, None, options).check()


def test_one_channel_and_one_token() -> None:
    for d, e in ((1, 1), (1, 256), (256, 1), (3, 5)):
        q, k, v = torch.randn(2, 3, 1, d), torch.randn(2, 3, 1, d), torch.randn(2, 3, 1, e)
        assert torch.equal(native.exact_attention(q, k, v, scale=1.0), v)
        many = native.exact_attention(q.expand(2, 3, 70, d), k, v, scale=1.0)
        assert torch.equal(many, v.expand(2, 3, 70, e))


def test_one_valid_key_is_the_output() -> None:
    for dtype in DTYPES:
        q, k, v = torch.randn(3, 1, 2, 300, 24).to(dtype)
        for token in (0, 63, 64, 150, 299):
            valid = torch.zeros(1, 300, dtype=torch.bool)
            valid[0, token] = True
            got = native.exact_attention(q, k, v, scale=1.0, valid=valid)
            assert torch.equal(got, v[:, :, token : token + 1].expand_as(v))
            masked = native.exact_attention(q, k, v, scale=1.0, valid=valid, mask_queries=True)
            assert torch.equal(masked, got.where(valid[:, None, :, None], 0.0))


def test_no_valid_token_leaves_the_prefix() -> None:
    q, k, v = torch.randn(3, 2, 2, 80, 24)
    valid = torch.zeros(2, 79, dtype=torch.bool)
    got = native.exact_attention(q, k, v, scale=1.0, prefix=1, valid=valid)
    assert torch.equal(got, v[:, :, :1].expand_as(v))


@EVERY_DTYPE
def test_layouts_and_shared_heads_give_equal_bits(dtype: torch.dtype) -> None:
    for seed in range(20):
        case = draw(2000 + seed, dtype)
        want = case._replace(q=case.q.clone(), k=case.k.clone(), v=case.v.clone()).run()
        assert torch.equal(case.run(), want)
        for layout in ("contiguous", "packed", "tokens first", "strided"):
            q, k, v = (lay_out(x.clone(), layout) for x in case[:3])
            assert torch.equal(case._replace(q=q, k=k, v=v).run(), want), layout
        share = case.q.shape[1] // case.k.shape[1]
        k, v = (x.repeat_interleave(share, 1) for x in (case.k, case.v))
        assert torch.equal(case._replace(k=k, v=v).run(), want)
        for b in range(len(case.q)):
            valid = case.valid
            valid = valid if valid is None or len(valid) == 1 else valid[b : b + 1]
            q, k, v = (x[b : b + 1] for x in case[:3])
            alone = case._replace(q=q, k=k, v=v, valid=valid).run()
            assert torch.equal(alone, want[b : b + 1])


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_half_types_are_computed_in_single_precision(dtype: torch.dtype) -> None:
    for seed in range(20):
        case = draw(3000 + seed, dtype)
        single = case._replace(q=case.q.float(), k=case.k.float(), v=case.v.float()).run()
        assert torch.equal(case.run(), single.to(dtype))


def test_permuted_keys_change_rounding_alone() -> None:
    """And a permutation of the queries permutes the output to the bit."""
    q, k, v = torch.randn(3, 1, 2, 200, 40, generator=torch.Generator().manual_seed(0))
    order = torch.randperm(200, generator=torch.Generator().manual_seed(1))
    want = native.exact_attention(q, k, v, scale=0.2)
    assert torch.equal(native.exact_attention(q[:, :, order], k, v, scale=0.2), want[:, :, order])
    got = native.exact_attention(q, k[:, :, order], v[:, :, order], scale=0.2)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("power", [-100, 100])
def test_powers_of_two_scale_to_the_bit(power: int) -> None:
    factor = 2.0**power
    for seed in range(4000, 4010):
        case = draw(seed)
        want = case.run()
        assert torch.equal(case._replace(v=case.v * factor).run(), want * factor)
        assert torch.equal(case._replace(q=case.q * factor, k=case.k / factor).run(), want)


def test_a_maximum_that_moves_with_every_block() -> None:
    """Scores that grow or fall by blocks of keys, far beyond the range of exp."""
    for step in (30.0, -30.0, 100.0, -100.0, 1e4, -1e4):
        q, k = torch.zeros(1, 1, 64, 16), torch.zeros(1, 1, 300, 16)
        q[..., 0], k[..., 0] = 1.0, step * (torch.arange(300) // BLOCK)
        q[..., 1:], k[..., 1:] = torch.randn(64, 15), torch.randn(300, 15)
        v = torch.randn(1, 1, 300, 20)
        options = {"scale": 1.0, "tau": 1.0, "prefix": 0, "mask_queries": False}
        Exact(q, k, v, None, options).check()


def test_small_weights_after_a_large_one() -> None:
    """Added one by one to a large weight, 16,384 equal small ones would lose 8e-4 of the output."""
    q, k = torch.zeros(1, 1, 1, 16), torch.zeros(1, 1, 16385, 16)
    q[..., 0], k[:, :, 0, 0] = 1.0, 12.0
    v = torch.ones(1, 1, 16385, 16)
    v[:, :, 0] = 0.0
    exact = 16384 / (16384 + math.exp(12))
    output = native.exact_attention(q, k, v, scale=1.0)
    assert float((output.double() / exact - 1).abs().max()) <= (64 + 16385 / 64) * 2**-24


INVALID = (("q", math.nan), ("q", math.inf), ("k", math.nan), ("k", -math.inf), ("q", 2e38))


def invalid_calls() -> Iterator[tuple[str, Exact]]:
    for name, value in INVALID:
        for token in (0, 64, 130, 199):  # in any block
            for queries in (200, 1, 65, 300):
                if name == "q" and token >= queries:
                    continue
                q, k = torch.ones(2, 2, queries, 16), torch.ones(2, 2, 200, 16)
                {"q": q, "k": k}[name][1, 1, token, 7] = value
                options = {"scale": 1.0, "tau": 1.0, "prefix": 1, "mask_queries": queries == 200}
                yield name, Exact(q, k, k.clone().fill_(1.0), None, options)


def test_nan_infinity_and_overflow_raise() -> None:
    """Anywhere in q and k, with any number of queries: some block of queries looks at each key."""
    expected = {"q": "queries hold|overflow", "k": "keys hold"}
    for name, case in invalid_calls():
        with pytest.raises(ValueError, match=expected[name]):
            case.run()
        valid = torch.ones(1, 199, dtype=torch.bool)
        with pytest.raises(ValueError, match=expected[name]):
            case._replace(valid=valid).run()


def test_infinite_values_are_values() -> None:
    q = torch.randn(1, 1, 70, 16)
    v = torch.ones(1, 1, 70, 16)
    v[:, :, 66, 3], v[:, :, 5, 4] = math.inf, math.nan
    output = native.exact_attention(q, q, v, scale=0.1)
    assert bool((output[..., 3] == math.inf).all()) and bool(output[..., 4].isnan().all())
    assert int(output.isfinite().sum()) == 70 * 14


def test_a_call_without_queries_is_empty() -> None:
    for shape, tokens in (((0, 2, 7, 8), 7), ((2, 0, 7, 8), 7), ((2, 2, 0, 8), 7)):
        k = torch.ones(shape[0], shape[1], tokens, 8)
        output = native.exact_attention(torch.ones(shape), k, k, scale=1.0)
        assert output.shape == shape and output.dtype == torch.float32


@EVERY_DTYPE
def test_the_public_function_runs_it_for_an_error_of_zero(dtype: torch.dtype) -> None:
    for masked, query_grid in ((False, None), (True, None), (True, (9, 10))):
        generator = torch.Generator().manual_seed(0)
        queries = 2 + (192 if query_grid is None else 90)
        q = torch.randn(2, 4, queries, 24, generator=generator).to(dtype)
        k, v = torch.randn(2, 2, 2, 194, 24, generator=generator).to(dtype)
        valid = torch.rand(2, 192, generator=generator) < 0.6 if masked else None
        result = screened_attention(
            q, k, v, grid=(12, 16), prefix=2, query_grid=query_grid, valid=valid, error=0.0
        )
        assert (result.stats.backend, result.stats.form) == ("native", "dense")
        options = {
            "scale": 24**-0.5, "tau": 1.0, "prefix": 2, "mask_queries": query_grid is None,
        }  # fmt: skip
        case = Exact(q, k, v, valid, options)
        assert torch.equal(result.output, case.run())
        case.check()
