"""The same trees and outputs on a CUDA device, and tiled attention at the sizes it is made for."""

from functools import partial
from importlib.util import find_spec

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from bmfa import Grid, certify, screen, screen_keys, screened_attention
from bmfa.attention.kernels.eager.tiles import tiled_attention as eager_attention
from bmfa.attention.tiling import Tiling as AnyTiling
from bmfa.trees.rules import parse

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
Tiling = partial(AnyTiling, probes_per_group=1)  # as in the kernels
RULES = (
    "gamma:0.05",
    "gamma-h2:0.05",
    "exact-gap:0.1",
    "certified:0.1",
    "mass:0.002",
    "mass-coarse:0.002",
    "optimal:0.002",
    "optimal-leaves:0.2",
    "optimal-error:0.05",
    "fixed-depth:2",
    "fixed-blocks:3",
    "quadrant-gap:0.3",
    "variance:0.3",
    "random-quadrants:0.5",
    "global-mean",
)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("size", [(14, 14), (16, 25), (1, 7), (37, 37)])
def test_trees_are_those_of_the_cpu(name, size):
    grid, generator = Grid(*size), torch.Generator().manual_seed(0)
    scores = 2 * torch.randn(3, 5, grid.size, generator=generator, dtype=torch.float64)
    for valid in (None, torch.rand(3, 1, grid.size, generator=generator) < 0.8):
        expected = screen(scores, grid, parse(name), valid=valid)
        moved = None if valid is None else valid.cuda()
        tree = screen(scores.cuda(), grid, parse(name), valid=moved)
        assert tree.device.type == "cuda"
        assert torch.equal(tree.split.cpu(), expected.split)
        torch.testing.assert_close(tree.error(scores.cuda()).cpu(), expected.error(scores))
        assert torch.equal(tree.leaf_index.cpu(), expected.leaf_index)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_attention_is_that_of_the_cpu(name, dtype):
    grid, generator = Grid(9, 8), torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, 3, 73, 16, generator=generator).to(dtype) for _ in range(3))
    common = {"grid": grid, "prefix": 1, "rule": parse(name)}
    expected = screened_attention(q, k, v, **common)
    result = screened_attention(q.cuda(), k.cuda(), v.cuda(), **common)
    same = (result.tree.split.cpu() == expected.tree.split).all(0).view(expected.tree.shape)
    # In the working precision of half types a threshold may fall between two roundings.
    assert same.all() if dtype == torch.float64 else same.double().mean() > 0.97
    tolerance = 8 * torch.finfo(dtype).eps
    difference = (result.output.cpu() - expected.output)[same].double()
    assert difference.norm() <= tolerance * expected.output[same].double().norm()
    assert torch.isfinite(certify(q.cuda(), k.cuda(), v.cuda(), result).distance).all()


def test_shared_trees_and_keys_on_the_device():
    grid, generator = Grid(14, 14), torch.Generator().manual_seed(2)
    q, k = (torch.randn(2, 4, 196, 32, generator=generator, dtype=torch.float64) for _ in range(2))
    for by in ("max", "mean", 0.9):
        expected = screen_keys(q, k, grid, parse("gamma:0.02"), share=(1, 2), share_by=by)
        tree = screen_keys(q.cuda(), k.cuda(), grid, parse("gamma:0.02"), share=(1, 2), share_by=by)
        assert torch.equal(tree.split.cpu(), expected.split)


# Tiled attention. tests/attention/test_triton_tiles.py compares small grids with the reference, on this
# device too if there is one.

DEVICE = "cuda"
TRITON = pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
HALF_TYPES = (torch.bfloat16, torch.float16)


def tiled_attention(*arguments, **settings):
    from bmfa.attention.kernels.triton.tiles import operators

    return operators.tiled_attention(*arguments, **settings)


def smooth(side, dim, dtype, *, prefix=1, heads=3, batch=1, seed=0):
    """Return q, k, v that vary slowly over the grid, as views of one projection."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randn(3 * batch * heads, dim, 8, 8, generator=generator)
    fine = torch.nn.functional.interpolate(coarse.to(DEVICE), size=side, mode="bicubic")
    spatial = fine.view(3, batch, heads, dim, side * side).transpose(-1, -2)
    first = torch.randn(3, batch, heads, prefix, dim, generator=generator).to(DEVICE)
    x = torch.cat((first, spatial + 0.1 * torch.randn_like(spatial)), 3).permute(1, 3, 0, 2, 4)
    return x.contiguous().to(dtype).permute(2, 0, 3, 1, 4).unbind(0)


def dense(q, k, v, valid=None):
    """Return exact attention in float64, some queries at a time."""
    k, v = k.double(), v.double()
    mask = None if valid is None else valid[:, None, None]
    parts = [
        scaled_dot_product_attention(x.double(), k, v, attn_mask=mask) for x in q.split(2048, 2)
    ]
    return torch.cat(parts, 2)


def relative_error(output, exact, seen=...):
    difference, exact = (output.double() - exact)[seen], exact[seen]
    return float(difference.norm() / exact.norm())


@TRITON
@pytest.mark.parametrize("dtype", [*HALF_TYPES, torch.float32])
@pytest.mark.parametrize(
    ("side", "dim", "prefix", "masked"),
    [(64, 64, 1, False), (64, 72, 0, True), (64, 80, 5, False), (60, 96, 17, True), (64, 128, 1, True),
     (128, 64, 1, False), (128, 32, 0, True), (120, 128, 5, False), (256, 64, 1, False)],
)  # fmt: skip
@pytest.mark.parametrize("budget", [{"error": 0.02}, {"expand": 5.0}])
def test_tiles_have_the_error_of_eager_float64(side, dim, prefix, masked, dtype, budget):
    q, k, v = smooth(side, dim, dtype, prefix=prefix)
    valid, present, mask, seen = None, None, None, ...
    if masked:
        valid = torch.rand(1, side * side, device=DEVICE) < 0.8
        present = torch.cat((valid.new_ones(1, prefix), valid), 1)
        mask, seen = present[:, None, None], present[:, None].expand(q.shape[:3])
    settings = {"prefix": prefix, "scale": dim**-0.5, "valid": valid, **budget}
    tiling = Tiling(Grid(side, side))
    doubles = [x.double() for x in (q, k, v)]
    exact = dense(q, k, v, present)
    got, want = (
        tiled_attention(q, k, v, tiling, **settings),
        eager_attention(*doubles, tiling, **settings),
    )
    rounding = relative_error(scaled_dot_product_attention(q, k, v, attn_mask=mask), exact, seen)
    errors = [relative_error(x.output, exact, seen) for x in (got, want)]
    # Thresholds follow errors, which rounding moves; the tiles of both are nearly the same.
    assert abs(errors[0] - errors[1]) <= 0.05 * errors[1] + 4 * rounding, (errors, rounding)
    counts = [float(x.expanded_count.double().mean()) for x in (got, want)]
    assert counts[1] > 0 or "error" in budget  # a large grid may meet the target without any
    assert abs(counts[0] - counts[1]) <= 0.05 * counts[1] + 0.1, counts
    estimates = []
    for x in (got, want):
        error, norm, weight = x.probes.double().unbind(-1)
        estimates.append(float(((weight * error).sum() / (weight * norm).sum()).sqrt()))
    assert abs(estimates[0] - estimates[1]) <= 0.1 * estimates[1] + 4 * rounding, estimates


def on_two_grids(grid, query_grid, dim, dtype, prefix, query_prefix, heads=3):
    """Return q of one grid and k and v of another."""
    q, _, _ = smooth(query_grid, dim, dtype, prefix=query_prefix, heads=heads, seed=1)
    _, k, v = smooth(grid, dim, dtype, prefix=prefix, heads=heads)
    return q, k, v


@TRITON
@pytest.mark.parametrize("dtype", [*HALF_TYPES, torch.float32])
@pytest.mark.parametrize(
    ("side", "query_side", "dim", "prefixes", "masked"),
    [(128, 64, 64, (1, 1), False), (128, 60, 72, (0, 5), True), (60, 128, 80, (5, 0), False),
     (64, 100, 96, (17, 33), True), (100, 64, 128, (1, 2), True), (256, 128, 64, (1, 1), False)],
)  # fmt: skip
@pytest.mark.parametrize("budget", [{"error": 0.02}, {"expand": 5.0}])
def test_a_query_grid_has_the_error_of_eager_float64(
    side, query_side, dim, prefixes, masked, dtype, budget
):
    prefix, query_prefix = prefixes
    q, k, v = on_two_grids(side, query_side, dim, dtype, *prefixes)
    valid, present, mask = None, None, None
    if masked:
        valid = torch.rand(1, side * side, device=DEVICE) < 0.8
        present = torch.cat((valid.new_ones(1, prefix), valid), 1)
        mask = present[:, None, None]
    settings = {"prefix": prefix, "scale": dim**-0.5, "valid": valid, **budget}
    tiling = Tiling(Grid(side, side), query_grid=Grid(query_side, query_side))
    exact = dense(q, k, v, present)
    got = tiled_attention(q, k, v, tiling, **settings)
    want = eager_attention(
        *(x.double() for x in (q, k, v)), tiling, query_prefix=query_prefix, **settings
    )
    rounding = relative_error(scaled_dot_product_attention(q, k, v, attn_mask=mask), exact)
    errors = [relative_error(x.output, exact) for x in (got, want)]
    assert abs(errors[0] - errors[1]) <= 0.05 * errors[1] + 4 * rounding, (errors, rounding)
    counts = [float(x.expanded_count.double().mean()) for x in (got, want)]
    assert abs(counts[0] - counts[1]) <= 0.05 * counts[1] + 0.1, counts


@TRITON
@pytest.mark.parametrize("dtype", HALF_TYPES)
@pytest.mark.parametrize(("side", "query_side"), [(128, 64), (64, 128), (128, 100)])
def test_a_query_grid_with_an_error_target_of_zero_is_dense_attention(side, query_side, dtype):
    q, k, v = on_two_grids(side, query_side, 64, dtype, 1, 2)
    tiling = Tiling(Grid(side, side), query_grid=Grid(query_side, query_side))
    exact = dense(q, k, v)
    rounding = relative_error(scaled_dot_product_attention(q, k, v), exact)
    for dense_threshold in (1.0, 0.4):  # by the attention kernel, and by one of its own
        settings = {"prefix": 1, "scale": 0.125, "error": 0.0, "dense_threshold": dense_threshold}
        got = tiled_attention(q, k, v, tiling, **settings)
        assert bool(got.expanded.all())
        assert relative_error(got.output, exact) <= 2 * rounding + 1e-6


@TRITON
@pytest.mark.parametrize("side", [64, 128])
@pytest.mark.parametrize("budget", [{"error": 0.02}, {"error": 0.0, "dense_threshold": 0.4}])
def test_shared_keys_equal_copies_to_the_bit_and_save_their_memory(side, budget):
    q, k, v = smooth(side, 64, torch.bfloat16, heads=6)
    tiling, settings = Tiling(Grid(side, side)), {"prefix": 1, "scale": 0.125, **budget}
    k, v = (x[:, :2] for x in (k, v))
    results, used = [], []
    for copies in (1, 3):
        for _ in range(2):  # kernels are compiled by the first call
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            keys, values = (x if copies == 1 else x.repeat_interleave(copies, 1) for x in (k, v))
            result = tiled_attention(q, keys, values, tiling, **settings)
            used.append(torch.cuda.max_memory_allocated() - before)
            results.append((result.output.clone(), result.expanded, result.probes.clone()))
            del keys, values, result
    for ours, theirs in zip(results[1], results[3], strict=True):
        assert torch.equal(ours, theirs)
    assert used[3] - used[1] >= 6 * side * side * 64 * 2 * 2


@TRITON
def test_auto_selects_tiles_for_large_query_grids():
    q, k, v = on_two_grids(256, 128, 64, torch.bfloat16, 0, 0, heads=6)
    result = screened_attention(q, k, v, grid=(256, 256), query_grid=(128, 128))
    assert result.stats.backend == "triton" and result.stats.form == "tiled"
    assert relative_error(result.output, dense(q, k, v)) <= 0.04
    q = q[:, :, : 64 * 64]
    assert screened_attention(q, k, v, grid=(256, 256), query_grid=(64, 64)).stats.form == "dense"


@TRITON
@pytest.mark.parametrize("dtype", HALF_TYPES)
@pytest.mark.parametrize("side", [64, 128, 256])
def test_an_error_target_of_zero_is_dense_attention(side, dtype):
    q, k, v = smooth(side, 64, dtype)
    for settings in ({"error": 0.0}, {"expand": float(Tiling(Grid(side, side)).tiles)}):
        got = tiled_attention(q, k, v, Tiling(Grid(side, side)), prefix=1, scale=0.125, **settings)
        exact = dense(q, k, v)
        rounding = relative_error(scaled_dot_product_attention(q, k, v), exact)
        assert bool(got.expanded.all())
        assert relative_error(got.output, exact) <= 2 * rounding


@TRITON
@pytest.mark.parametrize("dtype", [*HALF_TYPES, torch.float32])
@pytest.mark.parametrize("dim", [32, 64, 96, 128])
def test_random_tokens_are_attended_exactly(dim, dtype):
    """16,384 tokens without structure: every tile would be expanded, and all heads are exact."""
    torch.manual_seed(dim)
    q, k, v = torch.randn(3, 1, 4, 1 + 128 * 128, dim, device=DEVICE).to(dtype)
    settings = {"prefix": 1, "scale": dim**-0.5, "error": 0.03, "dense_threshold": 0.4}
    got = tiled_attention(q, k, v, Tiling(Grid(128, 128)), **settings)
    exact = dense(q, k, v)
    rounding = relative_error(scaled_dot_product_attention(q, k, v), exact)
    assert bool(got.expanded.all()) and not bool(got.probes[..., 0].any())
    assert relative_error(got.output, exact) <= 2 * rounding + 1e-6


@TRITON
@pytest.mark.parametrize("side", [64, 128])
@pytest.mark.parametrize(
    "budget", [{"error": 0.02}, {"error": 0.02, "dense_threshold": 0.4}, {"expand": 30.0}]
)
def test_calls_are_equal_to_the_bit_and_do_not_wait(side, budget):
    """Launched by Triton at first, then directly, and from a CUDA graph."""
    q, k, v = smooth(side, 64, torch.bfloat16)
    q = 2 * q  # at 64x64 tokens, more than 0.4 of the tiles are expanded

    def attend():
        return tiled_attention(q, k, v, Tiling(Grid(side, side)), prefix=1, scale=0.125, **budget)

    def facts(result):
        return result.output, result.expanded_count, result.probes

    first = attend()
    torch.cuda.set_sync_debug_mode("error")
    try:
        later = [attend() for _ in range(5)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attend()
    for x in facts(captured):
        x.zero_()
    graph.replay()
    for result in (*later, captured):
        for ours, theirs in zip(facts(result), facts(first), strict=True):
            assert torch.equal(ours, theirs)
        assert torch.equal(result.expanded, first.expanded)


@TRITON
def test_a_graph_of_a_whole_call_gives_the_same():
    grid = Grid(64, 64)
    q, k, v = smooth(64, 64, torch.bfloat16)
    options = {"grid": grid, "prefix": 1, "allow_dense": False, "backend": "triton"}
    for budget in ({"leaves": 0.1}, {"error": 0.05}):
        expected = screened_attention(q, k, v, **options, **budget).output
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = screened_attention(q, k, v, **options, **budget).output
        captured.zero_()
        graph.replay()
        assert torch.equal(captured, expected)


@TRITON
@pytest.mark.parametrize("side", [64, 256])
@pytest.mark.parametrize("dim", [64, 128])
def test_memory_is_at_most_four_times_keys_and_values(side, dim):
    q, k, v = smooth(side, dim, torch.bfloat16)
    settings = {"prefix": 1, "scale": dim**-0.5, "error": 0.03}
    tiling = Tiling(Grid(side, side))
    first = tiled_attention(q, k, v, tiling, **settings)
    held = sum(
        x.numel() * x.element_size() for x in (first.output, first.expanded_count, first.probes)
    )
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    second = tiled_attention(q, k, v, tiling, **settings)
    used = torch.cuda.max_memory_allocated() - before - held
    assert torch.equal(first.output, second.output)
    # A bit for each tile and group is kept too, and torch allocates in pieces of 512 bytes.
    bits = 4 * first.expanded_count.numel() * -(-tiling.tiles // 32)
    assert used <= 4 * (k.numel() + v.numel()) * k.element_size() + bits + 4096
