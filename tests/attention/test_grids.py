"""Grids of several frames, queries with a grid of their own, and heads that share keys."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import interpolate, scaled_dot_product_attention

import bmfa
from bmfa import Grid, certify, screened_attention
from bmfa.attention.kernels import native
from bmfa.attention.kernels.eager.tiles import attention, tiled_attention
from bmfa.attention.tiling import Tiling
from native_cases import run as run_native
from tiled_cases import TiledCase, compare


def smooth(seed: int, *shape: int) -> Tensor:
    """(..., tokens, d) float64 that vary slowly from token to token."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).cumsum(-2) / 6


def case_on(
    grid: Grid, query_grid: Grid | None = None, *, prefix: int = 1, query_prefix: int | None = None,
    masked: bool = False, seed: int = 0, **budget: float,
) -> TiledCase:  # fmt: skip
    settings: dict[str, Any] = {"prefix": prefix, "scale": 0.25, "tau": 1.0, **budget}
    tokens, queries = prefix + grid.size, prefix + grid.size
    if query_grid is not None:
        settings["query_prefix"] = prefix if query_prefix is None else query_prefix
        queries = settings["query_prefix"] + query_grid.size
    k, v = smooth(seed, 2, 2, 2, tokens, 16)
    valid = None
    if masked:
        generator = torch.Generator().manual_seed(seed)
        valid = torch.rand(2, grid.size, generator=generator) < 0.7
    q = smooth(seed + 1, 2, 2, queries, 16)
    return TiledCase(q, k, v, Tiling(grid, query_grid=query_grid), settings, valid)


def run_eager(case: TiledCase) -> Any:
    got = tiled_attention(case.q, case.k, case.v, case.tiling, valid=case.valid, **case.settings)
    assert got is not None
    return got


# Frames


@pytest.mark.parametrize("budget", [{"error": 0.05}, {"expand": 2.3}, {"error": 0.0}])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("grid", [Grid(5, 11, frames=3), Grid(9, 8, frames=2)])
def test_frames_equal_the_reference(grid: Grid, masked: bool, budget: dict[str, float]) -> None:
    case = case_on(grid, masked=masked, **budget)
    got = run_eager(case)
    assert compare(case, got, case.oracle()) >= 0.95 * got.expanded_count.numel()


def test_tiles_lie_inside_of_a_frame() -> None:
    tiling = Tiling(Grid(5, 11, frames=3))
    slots = tiling.slot_tokens
    frame = torch.where(slots >= 0, slots // 55, -1)
    assert tiling.tiles == 3 * 1 * 2 and tiling.ragged
    for tile in frame:
        assert len(tile[tile >= 0].unique()) == 1
    assert torch.equal(slots[slots >= 0].sort().values, torch.arange(3 * 55))


def test_frames_of_whole_tiles_are_one_tall_grid() -> None:
    q, k, v = smooth(0, 3, 1, 2, 1 + 3 * 16 * 24, 32).float()
    options: dict[str, Any] = {"prefix": 1, "error": 0.05, "allow_dense": False}
    frames = screened_attention(q, k, v, grid=Grid(16, 24, frames=3), **options)
    tall = screened_attention(q, k, v, grid=(48, 24), **options)
    assert torch.equal(frames.output, tall.output)
    assert frames.stats.density == tall.stats.density
    assert torch.equal(frames.tree.leaf_index, tall.tree.leaf_index)


def test_trees_certificates_and_statistics_of_frames() -> None:
    grid = Grid(5, 11, frames=3)
    q, k, v = smooth(3, 3, 1, 2, 1 + grid.size, 32)
    exact = scaled_dot_product_attention(q, k, v)
    result = screened_attention(q, k, v, grid=grid, prefix=1, error=0.05, allow_dense=False)
    distance = (result.output - exact).norm(dim=-1)
    assert (distance <= certify(q, k, v, result).distance).all()
    ratio = result.tree.leaf_ratio.double().mean()
    assert float(ratio) == pytest.approx(result.stats.leaf_ratio)
    index = result.tree.leaf_index
    assert index.shape == (1, 2, 1 + grid.size, grid.size)
    for leaf in index[0, 0, 1].unique():  # no leaf has tokens of two frames
        assert len(((index[0, 0, 1] == leaf).nonzero() // 55).unique()) == 1


def test_rules_and_pyramids_take_one_frame() -> None:
    grid = Grid(4, 4, frames=2)
    q = k = v = torch.randn(1, 1, 32, 8)
    with pytest.raises(ValueError, match="the grid has 2 frames, and a rule takes one"):
        screened_attention(q, k, v, grid=grid, rule="gamma:0.01")
    with pytest.raises(ValueError, match="2 frames, and a quadtree takes one"):
        bmfa.screen(torch.zeros(32), grid, "gamma:0.01")
    with pytest.raises(ValueError, match="frames is 0"):
        Grid(4, 4, frames=0)
    assert repr(grid) == "Grid(height=4, width=4, frames=2)" and str(grid) == "2x4x4"
    assert grid != Grid(8, 4) and grid.size == 32


# Queries with a grid of their own


@pytest.mark.parametrize("budget", [{"error": 0.05}, {"expand": 2.3}, {"error": 0.0}])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("grid", "query_grid", "query_prefix"),
    [
        (Grid(16, 18), Grid(8, 9), 1),
        (Grid(9, 13), Grid(20, 17), 3),
        (Grid(17, 9), Grid(6, 5, frames=2), 0),
    ],
)
def test_query_grids_equal_the_reference(
    grid: Grid, query_grid: Grid, query_prefix: int, masked: bool, budget: dict[str, float]
) -> None:
    case = case_on(grid, query_grid, query_prefix=query_prefix, masked=masked, **budget)
    got, want = run_eager(case), case.oracle()
    assert got.output.shape == case.q.shape
    assert compare(case, got, want) >= 0.95 * got.expanded_count.numel()


def test_a_query_grid_meets_its_target_and_reports_it() -> None:
    grid, query_grid = Grid(40, 48), Grid(64, 64)
    generator = torch.Generator().manual_seed(0)

    def draw(on: Grid) -> Tensor:
        coarse = torch.randn(2, 64, on.height // 8, on.width // 8, generator=generator)
        fine = interpolate(coarse, size=(on.height, on.width), mode="bicubic")
        return 1.5 * fine.flatten(2).mT.unsqueeze(0)

    q, k, v = draw(query_grid), draw(grid), draw(grid)
    exact = scaled_dot_product_attention(q.double(), k.double(), v.double())
    for target in (0.03, 0.05):
        result = screened_attention(
            q, k, v, grid=grid, query_grid=query_grid, error=target, allow_dense=False
        )
        error = float((result.output - exact).norm() / exact.norm())
        assert error <= 1.3 * target and result.stats.error.met
        assert result.stats.error.estimate == pytest.approx(error, rel=0.5)
        assert 0 < result.stats.density < 1
        assert result.tree.shape == (1, 2, query_grid.size)
        ratio = result.tree.leaf_ratio.double().mean()
        assert float(ratio) == pytest.approx(result.stats.leaf_ratio)


def test_gradients_of_a_query_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice of tiles and shrinkage is a constant of the gradient, so it is made once."""
    made: list[Any] = []
    choose = attention.choose

    def choose_once(*arguments: Any, **options: Any) -> Any:
        made[:] = made or [choose(*arguments, **options)]
        return made[0]

    monkeypatch.setattr(attention, "choose", choose_once)
    grid, query_grid = Grid(9, 8), Grid(3, 5)
    k, v = (x.requires_grad_() for x in smooth(1, 2, 1, 1, 1 + grid.size, 4))
    q = smooth(2, 1, 1, 2 + query_grid.size, 4).requires_grad_()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return screened_attention(
            q, k, v, grid=grid, prefix=1, query_grid=query_grid, leaves=40, allow_dense=False
        ).output

    assert torch.autograd.gradcheck(attend, (q, k, v), eps=1e-6, atol=1e-5)


def test_query_grids_in_a_graph() -> None:
    k, v = smooth(1, 2, 1, 2, 24 * 24, 16).float()
    q = smooth(2, 1, 2, 12 * 12, 16).float()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return screened_attention(
            q, k, v, grid=(24, 24), query_grid=(12, 12), leaves=0.3, allow_dense=False
        ).output

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v), attend(q, k, v))


def test_query_grids_are_checked() -> None:
    k = v = torch.randn(1, 1, 64, 8)
    q = torch.randn(1, 1, 15, 8)
    with pytest.raises(ValueError, match=r"q has 15 queries and the 4x4 query_grid 16"):
        screened_attention(q, k, v, grid=(8, 8), query_grid=(4, 4))
    with pytest.raises(ValueError, match="pass query_grid=, the grid of the queries"):
        screened_attention(q, k, v, grid=(8, 8))
    same = screened_attention(k, k, v, grid=(8, 8), query_grid=(8, 8))
    assert same.tree.shape == (1, 1, 64)  # self-attention


@pytest.mark.parametrize("backend", ["reference", "eager", "native"])
@pytest.mark.parametrize(("prefix", "query_prefix"), [(1, 4), (5, 0)])
def test_probes_measure_their_own_queries(backend: str, prefix: int, query_prefix: int) -> None:
    """With as many queries before the grid as keys, another query would go unnoticed."""
    case = case_on(Grid(16, 16), Grid(16, 24), prefix=prefix, query_prefix=query_prefix, expand=0.7)
    q, k, v = (x.float() for x in (case.q, case.k, case.v))
    if backend == "native":
        if reason := native.unsupported_reason(q, k, v):
            pytest.skip(reason)
        got = run_native(replace(case, q=q, k=k, v=v))
        output, probes = got.output.double(), got.probes
    elif backend == "eager":
        got = run_eager(case)
        output, probes = got.output, got.probes
    else:
        want = case.oracle()
        output, probes = torch.from_numpy(want.output), torch.from_numpy(want.probes)
    exact = scaled_dot_product_attention(case.q, case.k, case.v, scale=case.settings["scale"])
    errors, norms = (x.square().sum(-1)[:, :, query_prefix:] for x in (output - exact, exact))
    tiling, count = case.tiling, case.tiling.probes_per_group
    groups = tiling.group_order[: tiling.probe_groups(query_prefix)].repeat_interleave(count)
    slots = tiling.queries.slot_tokens[groups]  # (P, S)
    found = torch.stack((errors[:, :, slots], norms[:, :, slots]), -1)  # (B, H, P, S, 2)
    difference = (found / probes[..., None, :2] - 1).abs().amax(-1).amin(-1)
    assert probes[..., 0].min() > 1e-9 and float(difference.max()) < 1e-2


# Heads that share keys


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"error": 0.05, "allow_dense": False},
        {"rule": "optimal:0.01"},
        {"leaves": 0.3},
    ],
)
@pytest.mark.parametrize("key_heads", [1, 2])
def test_fewer_key_heads_equal_repeated_ones(key_heads: int, options: dict[str, Any]) -> None:
    q = smooth(0, 2, 4, 1 + 12 * 12, 16).requires_grad_()
    k, v = (x.requires_grad_() for x in smooth(1, 2, 2, key_heads, 1 + 12 * 12, 16))
    valid = torch.rand(2, 144, generator=torch.Generator().manual_seed(0)) < 0.9
    options = options | {"grid": (12, 12), "prefix": 1, "valid": valid}
    seen = torch.cat((valid.new_ones(2, 1), valid), 1)[:, None, :, None]
    torch.manual_seed(0)
    got = screened_attention(q, k, v, **options)
    torch.manual_seed(0)
    want = screened_attention(
        q, *(x.repeat_interleave(4 // key_heads, 1) for x in (k, v)), **options
    )
    torch.testing.assert_close(got.output * seen, want.output * seen)
    assert got.stats.form == want.stats.form
    grads = [torch.autograd.grad((x.output * seen).square().sum(), (q, k, v)) for x in (got, want)]
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("query_grid", [None, Grid(9, 10)])
@pytest.mark.parametrize("budget", [{"error": 0.05}, {"expand": 1.7}, {"error": 0.0}])
@pytest.mark.parametrize("key_heads", [1, 2])
def test_shared_keys_equal_the_reference_and_copies(
    key_heads: int, budget: dict[str, float], query_grid: Grid | None
) -> None:
    case = case_on(Grid(9, 13), query_grid, masked=True, **budget)
    q = torch.cat((case.q, case.q.flip(1) * 0.7), 1)
    k, v = (x[:, :key_heads] for x in (case.k, case.v))
    copies = [x.repeat_interleave(4 // key_heads, 1) for x in (k, v)]
    want = replace(case, q=q, k=copies[0], v=copies[1])
    got = run_eager(replace(case, q=q, k=k, v=v))
    assert compare(want, got, want.oracle()) >= 0.95 * got.expanded_count.numel()
    same = run_eager(want)
    assert torch.equal(got.expanded, same.expanded)
    # Products of another number of rows may be summed in another order.
    seen = want.seen.expand(got.output.shape[:3])
    torch.testing.assert_close(got.output[seen], same.output[seen], rtol=1e-10, atol=1e-12)


def test_certificates_of_shared_keys() -> None:
    q = smooth(0, 2, 4, 1 + 12 * 12, 16)
    k, v = smooth(1, 2, 2, 2, 1 + 12 * 12, 16)
    valid = torch.rand(2, 144, generator=torch.Generator().manual_seed(0)) < 0.9
    options: dict[str, Any] = {"grid": (12, 12), "prefix": 1, "valid": valid, "leaves": 0.4}
    copies = [x.repeat_interleave(2, 1) for x in (k, v)]
    results = [
        (screened_attention(q, *x, allow_dense=False, **options), x) for x in ((k, v), copies)
    ]
    got, want = (certify(q, *x, result) for result, x in results)
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-12)
    mask = torch.cat((valid.new_ones(2, 1), valid), 1)[:, None, None]
    exact = scaled_dot_product_attention(q, *copies, attn_mask=mask)
    distance = (results[0][0].output - exact).norm(dim=-1) * mask[:, :, 0]
    assert bool((got.distance >= distance).all())


def peak_bytes(function: Callable[[], Any]) -> int:
    """Largest number of bytes that torch has allocated on the CPU at once during a call."""
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True) as profile:
        function()
    events = profile.profiler.kineto_results.events()
    changes = sorted((x.start_ns(), x.nbytes()) for x in events if x.name() == "[memory]")
    return max(accumulate(nbytes for _, nbytes in changes))


def test_shared_keys_are_not_copied() -> None:
    """Copies would be arranged in tiles, one for every query head."""
    q = smooth(0, 1, 8, 32 * 32, 16).float()
    k, v = smooth(1, 2, 1, 1, 32 * 32, 16).float()
    copies = [x.repeat_interleave(8, 1) for x in (k, v)]

    def attend(k: Tensor, v: Tensor) -> None:
        screened_attention(q, k, v, grid=(32, 32), leaves=0.2, backend="eager")

    attend(k, v)
    shared, copied = (peak_bytes(partial(attend, *x)) for x in ((k, v), copies))
    saved = sum(x.numel() * x.element_size() for x in copies) * 7 // 8  # all heads but one
    assert copied - shared >= saved, (shared, copied, saved)


def test_fewer_key_heads_in_a_graph() -> None:
    q = smooth(0, 1, 4, 24 * 24, 16).float()
    k, v = smooth(1, 2, 1, 2, 24 * 24, 16).float()
    for options in (
        {"error": 0.05},
        {"leaves": 0.3, "allow_dense": False},
        {"rule": "gamma:0.05"},
    ):

        def attend(q: Tensor, k: Tensor, v: Tensor, options: Any = options) -> Tensor:
            return screened_attention(q, k, v, grid=(24, 24), **options).output

        compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(q, k, v), attend(q, k, v))
    trained = [x.double().requires_grad_() for x in (q, k, v)]
    options = {"grid": (24, 24), "leaves": 0.3, "allow_dense": False}

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return screened_attention(q, k, v, **options).output.square().sum()

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    grads = [torch.autograd.grad(x(*trained), trained) for x in (compiled, loss)]
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other)
