"""The same trees and outputs on a CUDA device, and tiled attention at the sizes it is made for.

test_tiles.py compares small grids with the specification, on this device too if there is one.
"""

import itertools
import warnings
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.nn.functional import interpolate, scaled_dot_product_attention

from bmfa import Grid, certify, screen, screen_keys, screened_attention
from bmfa.attention.kernels.eager.tiles import tiled_attention as eager_attention
from bmfa.attention.tiling import Tiling as AnyTiling
from bmfa.trees.rules import parse
from cases import RULES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
Tiling = partial(AnyTiling, probes_per_group=1)  # as in the kernels
HALF_TYPES = (torch.bfloat16, torch.float16)
DTYPES = (*HALF_TYPES, torch.float32)
pytest.importorskip("triton", reason="needs triton")

from bmfa.attention.kernels.triton.tiles.operators import tiled_attention  # noqa: E402


def test_trees_are_those_of_the_cpu():
    generator = torch.Generator().manual_seed(0)
    for name, size in itertools.product(RULES, ((14, 14), (16, 25), (1, 7), (37, 37))):
        grid, rule = Grid(*size), parse(name)
        scores = 2 * torch.randn(3, 5, grid.size, generator=generator, dtype=torch.float64)
        for valid in (None, torch.rand(3, 1, grid.size, generator=generator) < 0.8):
            expected = screen(scores, grid, rule, valid=valid)
            tree = screen(scores.cuda(), grid, rule, valid=None if valid is None else valid.cuda())
            assert tree.device.type == "cuda"
            assert torch.equal(tree.split.cpu(), expected.split)
            torch.testing.assert_close(tree.error(scores.cuda()).cpu(), expected.error(scores))
            assert torch.equal(tree.leaf_index.cpu(), expected.leaf_index)
    shape = (2, 4, 196, 32)
    q, k = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    for by in ("max", "mean", 0.9):
        trees = [
            screen_keys(*x, Grid(14, 14), parse("gamma:0.02"), share=(1, 2), share_by=by)
            for x in ((q, k), (q.cuda(), k.cuda()))
        ]
        assert torch.equal(trees[1].split.cpu(), trees[0].split)


def test_attention_is_that_of_the_cpu():
    for name, dtype in itertools.product(RULES, (torch.float64, *DTYPES)):
        generator = torch.Generator().manual_seed(1)
        qkv = [torch.randn(2, 3, 73, 16, generator=generator).to(dtype) for _ in range(3)]
        common = {"grid": (9, 8), "prefix": 1, "rule": parse(name)}
        expected = screened_attention(*qkv, **common)
        moved = [x.cuda() for x in qkv]
        result = screened_attention(*moved, **common)
        same = (result.tree.split.cpu() == expected.tree.split).all(0).view(expected.tree.shape)
        # In the working precision of half types a threshold may fall between two roundings.
        assert same.all() if dtype == torch.float64 else same.double().mean() > 0.97
        tolerance = 8 * torch.finfo(dtype).eps
        difference = (result.output.cpu() - expected.output)[same].double()
        assert difference.norm() <= tolerance * expected.output[same].double().norm()
        assert torch.isfinite(certify(*moved, result).distance).all()


# Tiled attention


def smooth(side, dim, dtype, *, prefix=1, heads=3, seed=0):
    """Return q, k, v that vary slowly over the grid, as views of one projection."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randn(3 * heads, dim, 8, 8, generator=generator)
    fine = interpolate(coarse.cuda(), size=side, mode="bicubic")
    spatial = fine.view(3, 1, heads, dim, side * side).transpose(-1, -2)
    first = torch.randn(3, 1, heads, prefix, dim, generator=generator).cuda()
    x = torch.cat((first, spatial + 0.1 * torch.randn_like(spatial)), 3).permute(1, 3, 0, 2, 4)
    return x.contiguous().to(dtype).permute(2, 0, 3, 1, 4).unbind(0)


def on_two_grids(side, query_side, dim, dtype, prefix=1, query_prefix=1, heads=3):
    """Return q of one grid and k and v of another, or of one if `query_side` is None."""
    q, k, v = smooth(side, dim, dtype, prefix=prefix, heads=heads)
    if query_side is not None:
        q, _, _ = smooth(query_side, dim, dtype, prefix=query_prefix, heads=heads, seed=1)
    return q, k, v


def tiling_of(side: int, query_side: int | None = None) -> AnyTiling:
    return Tiling(Grid(side, side), query_grid=query_side and Grid(query_side, query_side))


def dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return exact attention in float64, some queries at a time."""
    k, v = k.double(), v.double()
    parts = [
        scaled_dot_product_attention(x.double(), k, v, attn_mask=mask) for x in q.split(2048, 2)
    ]
    return torch.cat(parts, 2)


def relative_error(output: Tensor, exact: Tensor, seen: Any = ...) -> float:
    difference, exact = (output.double() - exact)[seen], exact[seen]
    return float(difference.norm() / exact.norm())


def results(*found):
    return [x for one in found for x in (one.output, one.expanded_count, one.probes, one.expanded)]


def all_equal(got, want) -> bool:
    return all(itertools.starmap(torch.equal, zip(results(got), results(want), strict=True)))


def test_tiles_have_the_error_of_eager_float64():
    for side, query_side, dim, prefix, query_prefix, masked in (
        (64, None, 64, 1, 1, False),
        (64, None, 72, 0, 0, True),
        (64, None, 80, 5, 5, False),
        (60, None, 96, 17, 17, True),
        (64, None, 128, 1, 1, True),
        (128, None, 64, 1, 1, False),
        (128, None, 32, 0, 0, True),
        (120, None, 128, 5, 5, False),
        (256, None, 64, 1, 1, False),
        (128, 64, 64, 1, 1, False),
        (128, 60, 72, 0, 5, True),
        (60, 128, 80, 5, 0, False),
        (64, 100, 96, 17, 33, True),
        (100, 64, 128, 1, 2, True),
        (256, 128, 64, 1, 1, False),
    ):
        for dtype, budget in itertools.product(DTYPES, ({"error": 0.02}, {"expand": 5.0})):
            q, k, v = on_two_grids(side, query_side, dim, dtype, prefix, query_prefix)
            valid, mask, seen = None, None, ...
            if masked:
                valid = torch.rand(1, side * side, device="cuda") < 0.8
                mask = torch.cat((valid.new_ones(1, prefix), valid), 1)[:, None, None]
                seen = ... if query_side else mask[:, 0].expand(q.shape[:3])
            settings = {"prefix": prefix, "scale": dim**-0.5, "valid": valid, **budget}
            tiling, doubles = tiling_of(side, query_side), [x.double() for x in (q, k, v)]
            exact = dense(q, k, v, mask)
            got = tiled_attention(q, k, v, tiling, **settings)
            with patch("bmfa.attention.tiling.MOST_CHOICES", 1):  # as in the kernels
                want = eager_attention(*doubles, tiling, query_prefix=query_prefix, **settings)
            plain = scaled_dot_product_attention(q, k, v, attn_mask=mask)
            rounding = relative_error(plain, exact, seen)
            errors = [relative_error(x.output, exact, seen) for x in (got, want)]
            # Thresholds follow errors, which rounding moves; the tiles of both are nearly the same.
            assert abs(errors[0] - errors[1]) <= 0.05 * errors[1] + 4 * rounding, (errors, rounding)
            counts = [float(x.expanded_count.double().mean()) for x in (got, want)]
            assert counts[1] > 0 or "error" in budget  # a large grid may meet it without any
            assert abs(counts[0] - counts[1]) <= 0.05 * counts[1] + 0.1, counts
            estimates = []
            for x in (got, want):
                error, norm, weight = x.probes.double().unbind(-1)
                estimates.append(float(((weight * error).sum() / (weight * norm).sum()).sqrt()))
            limit = 0.1 * estimates[1] + 4 * rounding
            assert abs(estimates[0] - estimates[1]) <= limit, (estimates, rounding)


def test_exact_heads_are_dense_attention():
    """An error target of zero, all tiles, and tokens without structure, by the attention kernel and by
    one of its own."""
    tall = [{"error": 0.0}, {"error": 0.0, "dense_threshold": 0.4}]
    calls = [
        ((side, query_side, 64, dtype, 1, 1 if query_side is None else 2), settings)
        for dtype, settings in itertools.product(HALF_TYPES, (*tall, {}))
        for side, query_side in ((64, None), (256, None), (128, 64), (64, 128), (128, 100))
    ]
    for (side, query_side, *rest), settings in calls:
        q, k, v = on_two_grids(side, query_side, *rest)
        check_exact(q, k, v, tiling_of(side, query_side), **settings)
    for dim, dtype in itertools.product((32, 64, 96, 128), DTYPES):
        torch.manual_seed(dim)
        q, k, v = torch.randn(3, 1, 4, 1 + 128 * 128, dim, device="cuda").to(dtype)
        got = check_exact(q, k, v, tiling_of(128), error=0.03, dense_threshold=0.4)
        assert not bool(got.probes[..., 0].any())


def check_exact(q, k, v, tiling, **settings):
    settings = settings or {"expand": float(tiling.tiles)}
    got = tiled_attention(q, k, v, tiling, prefix=1, scale=q.shape[-1] ** -0.5, **settings)
    exact = dense(q, k, v)
    rounding = relative_error(scaled_dot_product_attention(q, k, v), exact)
    assert bool(got.expanded.all())
    assert relative_error(got.output, exact) <= 2 * rounding + 1e-6
    return got


def peak_memory(function):
    """Bytes that a call needs, and its result, after a first one that compiles the kernels."""
    function()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = function()
    return torch.cuda.max_memory_allocated() - before, result


def test_memory_is_at_most_four_times_keys_and_values_and_keys_are_not_copied():
    for side, dim, shared in ((64, 64, 1), (64, 128, 3), (256, 64, 3), (256, 128, 1)):
        q, k, v = smooth(side, dim, torch.bfloat16, heads=6)
        k, v = (x[:, : 6 // shared] for x in (k, v))
        settings = {"prefix": 1, "scale": dim**-0.5, "error": 0.03}
        used, got = peak_memory(partial(tiled_attention, q, k, v, tiling_of(side), **settings))
        held = sum(x.numel() * x.element_size() for x in results(got)[:3])
        # A bit for each tile and group is kept too, and torch allocates in pieces of 512 bytes.
        bits = 4 * got.expanded_count.numel() * -(-tiling_of(side).tiles // 32)
        limit = 4 * shared * (k.numel() + v.numel()) * k.element_size() + bits + 4096
        assert used - held <= limit
        copies = [x.repeat_interleave(shared, 1) for x in (k, v)]
        assert all_equal(got, tiled_attention(q, *copies, tiling_of(side), **settings))


def captured(function):
    """The result of a function in a CUDA graph, and the graph."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function()
    return result, graph


def test_calls_are_equal_to_the_bit_and_do_not_wait():
    """Launched by Triton at first, then directly, and from a CUDA graph."""
    for side, budget in itertools.product(
        (64, 128), ({"error": 0.02}, {"error": 0.02, "dense_threshold": 0.4}, {"expand": 30.0})
    ):
        q, k, v = smooth(side, 64, torch.bfloat16)
        q = 2 * q  # at 64x64 tokens, more than 0.4 of the tiles are expanded
        settings = {"prefix": 1, "scale": 0.125, **budget}
        attend = partial(tiled_attention, q, k, v, tiling_of(side), **settings)
        first = attend()
        try:
            with warnings.catch_warnings():  # torch says that the mode is a prototype
                warnings.simplefilter("ignore")
                torch.cuda.set_sync_debug_mode("error")
            later = [attend() for _ in range(5)]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        result, graph = captured(attend)
        for x in results(result)[:3]:
            x.zero_()
        graph.replay()
        assert all(all_equal(x, first) for x in (*later, result))


def test_a_captured_call_selects_tiles_and_gives_the_same():
    q = torch.randn(4, 3, 64 * 64, 64, device="cuda", dtype=torch.bfloat16)
    attend = partial(screened_attention, q, q, q, grid=(64, 64), leaves=0.08)
    assert attend().stats.form == "dense"
    expected = attend(allow_dense=False).output  # compiles the kernels before the capture
    result, graph = captured(attend)
    result.output.zero_()
    graph.replay()
    assert result.stats.form == "tiled" and torch.equal(result.output, expected)
