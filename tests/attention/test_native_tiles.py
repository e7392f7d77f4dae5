"""Tiled attention in C++ against the float64 specification, and properties that must hold to the bit."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from bmfa import Grid, screened_attention
from bmfa.attention.kernels import native
from bmfa.attention.kernels.eager.tiles import tiled_attention as eager_attention
from bmfa.attention.kernels.native import library
from bmfa.attention.tiling import TiledAttention, Tiling
from native_cases import (
    DIMS,
    DTYPES,
    LAYOUTS,
    SETS,
    check,
    check_amplified,
    check_many,
    draw_case,
    expand_heads,
    lay_out,
    run,
)
from tiled_cases import NAMED_GRIDS, TiledCase

pytestmark = pytest.mark.skipif(library.load() is None, reason=str(library.unavailable_reason()))

SLOW = pytest.mark.slow
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES)
BUDGETS = ({"expand": 0.0}, {"expand": 1.7}, {"error": 0.05})
EVERY_BUDGET = pytest.mark.parametrize("budget", BUDGETS, ids=str)


def smooth_case(
    seed: int, shape: tuple[int, int], *, prefix: int = 1, dim: int = 32, value_dim: int = 0,
    heads: int = 1, batch: int = 1, dtype: torch.dtype = torch.float32, valid: Tensor | None = None,
    group_tiles: int = 1, **budget: float,
) -> TiledCase:  # fmt: skip
    """Tokens that vary slowly, so that errors of tangents are neither 0 nor 1."""
    generator = torch.Generator().manual_seed(seed)
    tiling = Tiling(Grid(*shape), group_tiles=group_tiles)
    tokens = prefix + tiling.grid.size
    q, k, v = (
        (torch.randn(batch, heads, tokens, n, generator=generator).cumsum(2) / 6).to(dtype)
        for n in (dim, dim, value_dim or dim)
    )
    settings = {"prefix": prefix, "scale": dim**-0.5, "tau": 1.0, **budget}
    return TiledCase(q, k, v, tiling, settings, valid)


def assert_equal(got: TiledAttention, want: TiledAttention, name: str = "") -> None:
    """Assert equal bits of every result; NaN in the outputs is a failure."""
    assert torch.equal(got.expanded, want.expanded), name
    assert torch.equal(got.expanded_count, want.expanded_count), name
    assert torch.equal(got.output, want.output), name
    assert torch.equal(got.probes, want.probes), name


def exact(case: TiledCase) -> Tensor:
    """Dense attention in float64; invalid tokens must not hold NaN."""
    case = expand_heads(case)
    mask = None
    if case.valid is not None:
        before = case.valid.new_ones(len(case.valid), case.settings["prefix"])
        mask = torch.cat((before, case.valid), 1)[:, None, None]
    q, k, v = (x.double() for x in (case.q, case.k, case.v))
    factor = case.settings["scale"] / case.settings["tau"]
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=factor)


# The specification


@pytest.mark.parametrize(
    "seeds",
    [range(40), *(pytest.param(range(n, n + 200), marks=SLOW) for n in range(40, 1240, 200))],
    ids=str,
)
def test_seeded_cases_equal_the_specification(seeds: range) -> None:
    """Grids, frames, query grids, masks, prefixes, shared keys, dimensions, layouts and budgets."""
    check_many(seeds)


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize(
    "seeds", [range(2000, 2015), pytest.param(range(2015, 2300), marks=SLOW)], ids=str
)
def test_half_types_equal_the_specification(dtype: torch.dtype, seeds: range) -> None:
    check_many(seeds, dtype)


@pytest.mark.parametrize("name", SETS)
def test_every_instruction_set_equals_the_specification(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BMFA_NATIVE", name)
    assert library.instruction_set() == name
    for dtype in DTYPES:
        check_many(range(3000, 3008), dtype)


@pytest.mark.parametrize("group_tiles", [1, 2])
def test_named_grids_equal_the_specification(group_tiles: int) -> None:
    for shape in NAMED_GRIDS:
        for budget in ({"error": 0.03}, {"expand": 1.7}):
            check(smooth_case(7, shape, group_tiles=group_tiles, **budget))


def test_head_dimensions_equal_the_specification() -> None:
    """Every dimension of keys and of values once, in mixtures."""
    for index, d in enumerate(DIMS):
        for dtype in DTYPES:
            e = DIMS[(5 * index + 7) % len(DIMS)]
            case = smooth_case(index, (13, 23), dim=d, value_dim=e, dtype=dtype, expand=2.0)
            got, _ = check(case)
            assert 0 < int(got.expanded_count.sum()) < got.expanded.numel()


@SLOW
@pytest.mark.parametrize("d", DIMS)
def test_every_mixture_of_head_dimensions_equals_the_specification(d: int) -> None:
    for e in DIMS:
        check_many(range(d, d + 4), dims=(d, e))


@pytest.mark.parametrize("prefix", [0, 1, 5, 64, 70, 131])
@pytest.mark.parametrize("masked", [False, True])
def test_prefixes(prefix: int, masked: bool) -> None:
    """Prefixes of more than a block of keys, too."""
    valid = None
    if masked:
        valid = torch.rand(1, 16 * 40, generator=torch.Generator().manual_seed(prefix)) < 0.7
    for budget in ({"error": 0.1}, {"expand": 1.7}):
        case = smooth_case(prefix % 7, (16, 40), prefix=prefix, valid=valid, **budget)
        got, _ = check(case)
        assert 0 < int(got.expanded_count.sum()) < got.expanded.numel()
        want = exact(case)[:, :, :prefix]
        torch.testing.assert_close(got.output[:, :, :prefix].double(), want, rtol=1e-5, atol=1e-5)


QUERY_GRIDS = {
    "fewer": (Grid(16, 18), Grid(8, 9), 1, 1),
    "more": (Grid(9, 13), Grid(20, 17), 0, 3),
    "one group": (Grid(17, 9), Grid(3, 5), 5, 0),
    "one tile": (Grid(6, 7), Grid(16, 16), 1, 2),
    "frames": (Grid(9, 6, frames=2), Grid(5, 11, frames=3), 1, 1),
    "long prefix": (Grid(16, 16), Grid(8, 24), 0, 70),
    "transposed": (Grid(10, 20), Grid(20, 10), 2, 2),
}


def test_query_grids_equal_the_specification() -> None:
    for index, (grid, query_grid, prefix, query_prefix) in enumerate(QUERY_GRIDS.values()):
        for budget in ({"error": 0.05}, {"error": None, "expand": 0.3}):
            for masked in (False, True):
                case = draw_case(
                    index, grid=grid, query_grid=query_grid, prefix=prefix,
                    query_prefix=query_prefix, masked=masked, side=8, **budget,
                )  # fmt: skip
                got, _ = check(case)
                assert got.output.shape[:3] == case.q.shape[:3]


@pytest.mark.parametrize(
    ("shape", "side", "group_tiles"),
    [
        ((20, 24), 2, 1),
        pytest.param((3, 8 * 66 - 3), 8, 1, marks=SLOW),
        pytest.param((2, 8 * 140), 8, 1, marks=SLOW),
        pytest.param((17, 8 * 44), 8, 2, marks=SLOW),
    ],
)
def test_many_groups_equal_the_specification(
    shape: tuple[int, int], side: int, group_tiles: int
) -> None:
    """More groups than lanes. The later ones have no probes, and their queries, which are far from the
    others, no part in qhat."""
    case = smooth_case(12, shape, error=0.01)
    tiling = Tiling(Grid(*shape), side, group_tiles=group_tiles)
    order = tiling.group_order[64:]
    later = tiling.queries.slot_tokens[order].flatten()
    case.q[:, :, 1 + later[later >= 0]] += 3.0
    got, _ = check(replace(case, tiling=tiling))
    assert int(got.expanded_count[:, :, order].sum()) > 0


@pytest.mark.parametrize("heads", [3, pytest.param(10, marks=SLOW)])
def test_wide_values_of_many_tiles_equal_the_specification(heads: int) -> None:
    """Memory is divided: the probes of few heads at once, and tangents that are not kept."""
    case = smooth_case(5, (40, 40), heads=heads, dim=16, value_dim=256, expand=4.0)
    got, _ = check(case)
    assert 0 < int(got.expanded_count.sum()) < got.expanded.numel()


@pytest.mark.parametrize("heads", [9, pytest.param(5, marks=SLOW)])
def test_tangents_that_do_not_fit_into_memory(heads: int) -> None:
    """They are made for some heads and bands of groups at a time. The torch form in float64 is quicker
    than the specification."""
    case = smooth_case(6, (28, 28), heads=heads, dim=16, value_dim=256, error=0.002)
    case = replace(case, tiling=Tiling(Grid(28, 28), side=2))  # 196 groups in 4 bands
    got = run(case)
    q, k, v = (x.double() for x in (case.q, case.k, case.v))
    want = eager_attention(q, k, v, case.tiling, **case.settings)
    same = (got.expanded == want.expanded).all(-1)
    assert float(same.float().mean()) > 0.99 and 0.05 < float(got.expanded.float().mean()) < 0.9
    allowed = 1e-5 * float(v.abs().max())
    slots = case.tiling.slot_tokens[same.all(1)[0]]
    assert float((got.output - want.output)[:, :, 1 + slots.flatten()].abs().max()) < allowed


# Layouts, heads and images


@EVERY_DTYPE
def test_layouts_give_equal_bits(dtype: torch.dtype) -> None:
    """Views of a projection, odd offsets, channels that are not contiguous, strides of 0."""
    for seed in range(6):
        case = draw_case(4000 + seed, dtype, layout="contiguous")
        for layout in LAYOUTS:
            first = {"one image": (0, slice(None)), "one head": (slice(None), 0)}.get(layout)
            q, k, v = case.q, case.k, case.v
            valid = case.valid
            if first is not None:  # equal images or heads, in memory of their own
                q, k, v = (
                    x[tuple([i] if i == 0 else i for i in first)].expand_as(x) for x in (q, k, v)
                )
            if layout == "one image" and valid is not None:
                valid = valid[:1].expand_as(valid)
            want = replace(case, q=q.clone(), k=k.clone(), v=v.clone(), valid=valid)
            got = replace(want, q=lay_out(q, layout), k=lay_out(k, layout), v=lay_out(v, layout))
            assert_equal(run(got), run(want), layout)


@EVERY_DTYPE
def test_views_of_one_projection_are_read_in_place(dtype: torch.dtype) -> None:
    case = smooth_case(3, (9, 16), heads=3, batch=2, dim=24, dtype=dtype, expand=1.7)
    packed = torch.stack(
        [x.transpose(1, 2) for x in (case.q, case.k, case.v)], 2
    )  # (B, N, 3, H, d)
    q, k, v = packed.permute(2, 0, 3, 1, 4)
    call, output = native._describe(q, k, v, 0.2, False)
    assert (call.q.data, call.k.data, call.v.data) == (q.data_ptr(), k.data_ptr(), v.data_ptr())
    assert output.transpose(1, 2).is_contiguous()
    assert_equal(run(replace(case, q=q, k=k, v=v)), run(case))


@EVERY_DTYPE
def test_shared_keys_equal_copies_to_the_bit(dtype: torch.dtype) -> None:
    for seed, heads in enumerate(((2, 1), (3, 1), (4, 2), (6, 2))):
        case = draw_case(5000 + seed, dtype, heads=heads)
        got, want = run(case), run(expand_heads(case))
        assert_equal(got, want)


def test_images_do_not_depend_on_each_other() -> None:
    for seed in range(8):
        case = draw_case(6000 + seed, batch=3, layout="packed")
        got = run(case)
        for b in range(3):
            valid = None if case.valid is None else case.valid[b : b + 1]
            q, k, v = (x[b : b + 1] for x in (case.q, case.k, case.v))
            alone = run(replace(case, q=q, k=k, v=v, valid=valid))
            for name in ("output", "expanded", "probes"):
                assert torch.equal(getattr(got, name)[b : b + 1], getattr(alone, name)), name


def test_one_mask_for_all_images() -> None:
    case = draw_case(9, batch=2, masked=True, layout="one image", query_grid=None)
    assert_equal(run(replace(case, valid=case.valid[:1])), run(case))
    assert_equal(run(replace(case, valid=case.valid[:1].expand(2, -1))), run(case))


def test_a_mask_that_is_all_true_changes_nothing() -> None:
    for group_tiles in (1, 2):
        case = smooth_case(5, (13, 18), prefix=2, heads=2, group_tiles=group_tiles, error=0.03)
        assert_equal(run(replace(case, valid=torch.ones(1, 13 * 18, dtype=torch.bool))), run(case))


@EVERY_DTYPE
def test_half_types_are_computed_in_single_precision(dtype: torch.dtype) -> None:
    """To the bit, and rounded to the nearest: half types are widened when they are read."""
    for seed in range(8):
        case = draw_case(7000 + seed, dtype)
        got = run(case)
        single = run(replace(case, q=case.q.float(), k=case.k.float(), v=case.v.float()))
        assert got.output.dtype == dtype
        assert torch.equal(got.output, single.output.to(dtype))
        assert torch.equal(got.expanded, single.expanded)
        assert torch.equal(got.probes[..., 1:], single.probes[..., 1:])


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_every_half_number_is_read_and_written(dtype: torch.dtype) -> None:
    """All bit patterns below 1e36, whose sums are finite, as values of keys, each of which one query
    attends to alone."""
    numbers = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    v = numbers.where(numbers.abs() < 1e36, 0.0).view(1, 1, 256, 256)
    q = torch.eye(256, dtype=dtype).view(1, 1, 256, 256)
    assert torch.equal(native.exact_attention(q, q, v, scale=1000.0), v)


# Masks and prefix


def test_what_missing_tokens_hold_does_not_matter() -> None:
    for seed in range(6):
        case = draw_case(8000 + seed, masked=True, layout="contiguous")
        missing = torch.cat(
            (case.valid.new_zeros(len(case.valid), case.settings["prefix"]), ~case.valid), 1
        )[:, None, :, None]
        own_queries = case.tiling.query_grid is not None
        results = []
        for filling in (torch.nan, torch.inf, 3e38, 0.0):
            q = case.q if own_queries else case.q.masked_fill(missing, filling)
            k, v = (x.masked_fill(missing, filling) for x in (case.k, case.v))
            results.append(run(replace(case, q=q, k=k, v=v)))
        for got in results[:-1]:
            assert_equal(got, results[-1])


@EVERY_DTYPE
@pytest.mark.parametrize("group_tiles", [1, 2])
def test_empty_tiles_and_groups(dtype: torch.dtype, group_tiles: int) -> None:
    """Tiles without a token: one at the first position, all at odd positions, all but one token."""
    tiling = Tiling(Grid(14, 24), group_tiles=group_tiles)
    valid = torch.rand(4, tiling.grid.size, generator=torch.Generator().manual_seed(1)) < 0.8
    slots, order = tiling.queries.slot_tokens, tiling.group_order
    for image, groups in ((0, order[:1]), (1, order[1::2])):
        gone = slots[groups]
        valid[image, gone[gone >= 0]] = False
    valid[2] = False
    valid[2, 30] = True
    valid[3] = False  # the prefix alone is left, if there is one
    for prefix in (0, 1):
        case = smooth_case(
            2, (14, 24), batch=4, prefix=prefix, dtype=dtype, valid=valid, group_tiles=group_tiles,
            error=0.02,
        )  # fmt: skip
        if not prefix:
            case = replace(case, q=case.q[:3], k=case.k[:3], v=case.v[:3], valid=valid[:3])
        gone = torch.cat((valid.new_zeros(4, prefix), ~valid), 1)[: len(case.q), None, :, None]
        q, k, v = (x.masked_fill(gone, torch.nan) for x in (case.q, case.k, case.v))
        case = replace(case, q=q, k=k, v=v)
        if prefix:
            last = run(case)
            assert torch.equal(last.output[3, :, :1], v[3, :, :1])
            assert int(last.expanded_count[3].sum()) == 0 and float(last.probes[3].abs().sum()) == 0
        case = replace(case, q=q[:3], k=k[:3], v=v[:3], valid=valid[:3])
        got, want = check(case)
        assert want.expanded.any() and int(got.expanded_count[2].sum()) <= 1
        empty = got.probes[:2, 0, :, 2].view(2, -1, tiling.probes_per_group).eq(0).all(-1)
        assert empty[:, :2].tolist() == [[True, False], [False, True]]


# Targets


def smooth(factor: float) -> tuple[Tensor, ...]:
    """The example of the manual, with queries multiplied by a factor."""
    generator = torch.Generator().manual_seed(0)
    coarse = torch.randn(9, 64, 8, 8, generator=generator)
    grown = torch.nn.functional.interpolate(coarse, size=64, mode="bicubic")
    q, k, v = grown.reshape(3, 1, 3, 64, 64 * 64).transpose(-1, -2)
    return q * factor, k, v


def smooth_64(factor: float, **budget: float) -> TiledCase:
    settings = {"prefix": 0, "scale": 0.125, "tau": 1.0, **budget}
    return TiledCase(*smooth(factor), Tiling(Grid(64, 64)), settings, None)


@pytest.mark.parametrize("factor", [1.0, 2.0, 3.0, 4.0])
def test_the_error_is_within_its_target(factor: float) -> None:
    want = scaled_dot_product_attention(*smooth(factor))
    for error in (0.02, 0.05, 0.1):
        got = run(smooth_64(factor, error=error))
        relative = float((got.output - want).norm() / want.norm())
        assert relative <= 1.3 * error
        if int(got.expanded_count.sum()):
            assert relative >= 0.5 * error


def test_a_budget_is_the_mean_number_of_expanded_tiles() -> None:
    for expand in (2.0, 8.0, 30.0):
        mean = float(run(smooth_64(3.0, expand=expand)).expanded_count.float().mean())
        assert 0.75 * expand <= mean <= 1.25 * expand


def test_probes_report_the_error_of_the_returned_output() -> None:
    """Each probe has the squared error of one query of its group, and its weight is 1 / (n p)."""
    for dtype in DTYPES:
        case = smooth_case(5, (24, 40), heads=2, prefix=3, dtype=dtype, expand=1.5)
        got, tiling = run(case), case.tiling
        squares = (got.output.double() - exact(case)).square().sum(-1)[:, :, 3:]
        order = tiling.group_order.repeat_interleave(tiling.probes_per_group)
        slots = tiling.queries.slot_tokens[order[: got.probes.shape[2]]]  # (P, S)
        squares = torch.where(slots >= 0, squares[:, :, slots.clamp(min=0)], torch.inf)
        difference = (squares.sqrt() - got.probes[..., :1].sqrt()).abs().amin(-1)
        size = float(exact(case).square().sum(-1).mean().sqrt())
        assert float(got.probes[..., 0].mean().sqrt()) > 1e-2 * size
        assert float(difference.max()) < 1e-5 * size
        assert got.probes.dtype == torch.float64
        sizes, weight = (slots >= 0).sum(-1), got.probes[..., 2] * tiling.probes_per_group
        assert bool((weight >= 1.0).all()) and bool(
            (weight <= 5.001 * sizes).all()
        )  # 1 / UNIFORM_SHARE


def test_heads_above_the_limit_are_exact() -> None:
    for dtype in DTYPES:
        for group_tiles, masked in ((1, False), (2, True)):
            torch.manual_seed(4)
            q, k, v = torch.randn(3, 1, 3, 1 + 24 * 24, 32).to(dtype)
            q[:, 0] *= 0.1  # nothing is expanded in this head
            q[:, 1:] *= 4
            settings = {
                "prefix": 1,
                "scale": 0.2,
                "tau": 1.0,
                "error": 0.05,
                "dense_threshold": 0.3,
            }
            tiling = Tiling(Grid(24, 24), group_tiles=group_tiles)
            valid = torch.rand(1, 576) < 0.8 if masked else None
            case = TiledCase(q, k, v, tiling, settings, valid)
            got, want = check(case)
            assert want.exact.tolist() == [[False, True, True]]
            attended = native.exact_attention(
                q, k, v, scale=0.2, prefix=1, valid=valid, mask_queries=True
            )
            torch.testing.assert_close(got.output[:, 1:], attended[:, 1:], rtol=2e-5, atol=2e-5)
            _, dense = native.tiled_attention(q, k, v, tiling, valid=valid, **settings)
            assert dense is False
            both = (x[:, 1:] for x in (q, k, v))
            _, dense = native.tiled_attention(*both, tiling, valid=valid, **settings)
            assert dense is True


def test_everything_expanded_is_exact_attention() -> None:
    for seed in range(8):
        for budget in ({"error": 0.0, "expand": None}, {"error": None, "expand": 1.0}):
            case = draw_case(9000 + seed, **budget)
            got, want = run(case), case.valid
            assert bool(got.expanded.all()) or want is not None
            attended = native.exact_attention(
                case.q, case.k, case.v, scale=case.settings["scale"], tau=case.settings["tau"],
                prefix=case.settings["prefix"], valid=case.valid,
                mask_queries=case.tiling.query_grid is None,
            )  # fmt: skip
            assert torch.equal(got.output, attended)


@pytest.mark.parametrize("dense_threshold", [0.2, 0.5])
def test_exact_heads_of_drawn_cases_equal_the_specification(dense_threshold: float) -> None:
    """`dense_threshold` lies between shares of heads; the share of a head is far from it or a tie."""
    seen = set()
    for seed in range(12):
        case = draw_case(9500 + seed, heads=(2, 2), error=0.02)
        got, want = run(case, dense_threshold=dense_threshold), expand_heads(case)
        want = replace(want, settings=want.settings | {"dense_threshold": dense_threshold}).oracle()
        equal = (got.expanded.numpy() == want.expanded).all((2, 3))
        everything = got.expanded.flatten(2).all(-1).numpy()
        if case.valid is None:
            assert equal.all(), seed
            seen |= set(everything.flatten().tolist())
    assert seen == {False, True}


# Ties, constant keys, extreme numbers


def test_tiles_with_equal_losses_are_expanded_together() -> None:
    """Every tile holds the same tokens, so that a group expands all tiles or none."""
    generator = torch.Generator().manual_seed(3)
    content = torch.randn(2, 1, 2, 64, 32, generator=generator)
    tiling, prefix = Tiling(Grid(24, 40)), 1
    k, v = torch.zeros(2, 1, 2, prefix + tiling.grid.size, 32)
    for x, tile in ((k, content[0]), (v, content[1])):
        x[:, :, prefix + tiling.slot_tokens] = tile.unsqueeze(2)
    q = torch.randn(k.shape, generator=generator)
    for budget in ({"error": 0.01}, {"error": 0.2}, {"expand": 3.0}, {"expand": 7.0}):
        case = TiledCase(q, k, v, tiling, {"prefix": 1, "scale": 0.3, "tau": 1.0, **budget}, None)
        expanded = run(case).expanded
        assert bool((expanded.all(-1) | ~expanded.any(-1)).all()), budget
    assert bool(run(case, expand=None, error=0.01).expanded.any())


@pytest.mark.parametrize("budget", [*BUDGETS, {"error": 0.0}], ids=str)
def test_constant_keys_lose_nothing(budget: dict[str, float]) -> None:
    torch.manual_seed(1)
    q, k, v = torch.randn(3, 1, 2, 3 + 14 * 14, 32)
    k[:, :, 3:] = k[:, :, 3:4]
    settings = {"prefix": 3, "scale": 0.3, "tau": 1.0, **budget}
    case = TiledCase(q, k, v, Tiling(Grid(14, 14)), settings, None)
    got = run(case)
    # Equal weights are rounded alike: 64 of a block, and the blocks.
    assert float((got.output - exact(case)).abs().max()) < 70 * 6e-8 * float(v.abs().max())
    assert int(got.expanded_count.sum()) == (0 if budget != {"error": 0.0} else 2 * 4 * 4)


def test_a_stride_of_zero_over_the_tokens() -> None:
    """Constant keys as `expand` makes them."""
    torch.manual_seed(8)
    q, k, v = torch.randn(3, 1, 1, 256, 32)
    settings = {"prefix": 0, "scale": 0.2, "tau": 1.0, "expand": 2}
    case = TiledCase(q, k[:, :, :1].expand_as(k), v, Tiling(Grid(16, 16)), settings, None)
    got = run(case)
    assert_equal(got, run(replace(case, k=case.k.clone())))
    assert int(got.expanded_count.sum()) == 0


@pytest.mark.parametrize("size", [7.0, 1e2, 1e4, 1e6])
@EVERY_BUDGET
def test_huge_keys_give_the_outputs_of_the_specification(
    size: float, budget: dict[str, float]
) -> None:
    torch.manual_seed(2)
    q, k, v = torch.randn(3, 1, 2, 1 + 16 * 25, 32)
    settings = {"prefix": 1, "scale": 0.2, "tau": 1.0, **budget}
    check_amplified(TiledCase(q, k * size, v, Tiling(Grid(16, 25)), settings, None))


def test_one_token_far_above_its_tile_moves_the_output_by_no_more_than_the_values() -> None:
    q = torch.ones(1, 1, 128, 32)
    k, v = torch.zeros(1, 1, 128, 32), torch.rand(1, 1, 128, 32)
    k[:, :, 5] = 50.0
    settings = {"prefix": 0, "scale": 1.0, "tau": 1.0, "expand": 0.0}
    case = TiledCase(q, k, v, Tiling(Grid(8, 16)), settings, None)
    assert float(run(case).output.abs().max()) <= 2.0


@pytest.mark.parametrize("common", [1e3, 1e4])
def test_what_all_queries_share_is_no_spread(common: float) -> None:
    torch.manual_seed(6)
    q, k, v = torch.randn(3, 1, 1, 256, 32)
    q[..., 0], k[..., 0] = common, 1.0
    settings = {"prefix": 0, "scale": 0.2, "tau": 1.0, "expand": 2.0}
    case = TiledCase(q, k, v, Tiling(Grid(16, 16)), settings, None)
    got, want = run(case), case.oracle()
    assert np.array_equal(got.expanded.numpy(), want.expanded)
    assert np.abs(got.output.numpy() - want.output).max() < 1e-7 * common


@pytest.mark.parametrize("power", [-100, -60, 60, 100])
def test_powers_of_two_scale_to_the_bit(power: int) -> None:
    """Values of 1e-30 to 1e30, and queries as large as keys are small: only exponents change."""
    factor = 2.0**power
    for budget in ({"error": 0.03}, {"error": 0.0}, {"expand": 1.3}):
        for seed, mask in ((5, None), (6, torch.arange(13 * 17).view(1, -1) % 3 > 0)):
            case = smooth_case(seed, (13, 17), heads=2, valid=mask, **budget)
            want = run(case)
            got = run(replace(case, v=case.v * factor))
            assert torch.equal(got.expanded, want.expanded), budget
            assert torch.equal(got.output, want.output * factor), budget
            squares = torch.tensor([factor**2, factor**2, 1.0], dtype=torch.float64)
            assert torch.equal(got.probes, want.probes * squares), budget
            assert_equal(run(replace(case, q=case.q * factor, k=case.k / factor)), want)
            assert_equal(run(replace(case, q=case.q / factor, k=case.k * factor)), want)
            assert budget != {"error": 0.03} or 0 < want.expanded.float().mean() < 1


@pytest.mark.parametrize(
    ("queries", "keys"), [(0.0, 1e20), (1e-30, 1e30), (1e30, 1e-30), (0.0, 0.0)]
)
def test_extreme_queries_and_keys_give_the_outputs_of_the_specification(
    queries: float, keys: float
) -> None:
    torch.manual_seed(7)
    q, k, v = torch.randn(3, 1, 1, 256, 32)
    for budget in ({"error": 3.0}, {"error": 0.02}, {"expand": 1.0}):
        settings = {"prefix": 0, "scale": 0.2, "tau": 1.0, **budget}
        case = TiledCase(q * queries, k * keys, v, Tiling(Grid(16, 16)), settings, None)
        got = run(case)
        want = replace(case, q=case.q.double(), k=case.k.double()).oracle()
        assert np.array_equal(got.expanded.numpy(), want.expanded)
        assert np.abs(got.output.numpy() - want.output).max() < 1e-5


INVALID = {
    "nan in q": ("q", 3, math.nan, "queries hold nan"),
    "inf in q": ("q", 3, math.inf, "queries hold inf"),
    "-inf in q": ("q", 3, -math.inf, "queries hold -?inf"),
    "nan in a prefix query": ("q", 0, math.nan, "queries hold nan"),
    "nan in k": ("k", 150, math.nan, "keys hold nan"),
    "-inf in k": ("k", 150, -math.inf, "keys hold -?inf"),
    "nan in a prefix key": ("k", 0, math.nan, "keys hold nan"),
    "inf in the last key": ("k", -1, math.inf, "keys hold inf"),
    "overflow": ("q", 7, 1e38, "overflow"),
}


@EVERY_DTYPE
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", INVALID)
def test_invalid_tokens_raise_as_the_eager_path_does(
    name: str, masked: bool, dtype: torch.dtype
) -> None:
    tensor, token, value, message = INVALID[name]
    if value == 1e38 and dtype == torch.float16:
        pytest.skip("float16 has no number whose scores overflow float32")
    grid = Grid(12, 16)
    q, k, v = torch.randn(3, 2, 2, 1 + grid.size, 24, generator=torch.Generator().manual_seed(0))
    q, k, v = (x.to(dtype) for x in (q, k, v))
    k = k * 30
    valid = None
    if masked:
        valid = torch.rand(2, grid.size, generator=torch.Generator().manual_seed(1)) < 0.7
        valid[:, [2, 6, 149, -1]] = True
    {"q": q, "k": k}[tensor][1, 1, token, 5] = value
    for options in ({"error": 0.1}, {"error": 0.0}, {"leaves": 0.3}):
        raised = []
        for backend in ("native", "eager"):
            with pytest.raises(ValueError, match=message) as caught:
                screened_attention(
                    q, k, v, grid=grid, prefix=1, valid=valid, backend=backend, **options
                )
            raised.append(str(caught.value))
        assert raised[0] == raised[1]


def test_nan_in_values_reaches_the_outputs_and_raises_nothing() -> None:
    case = smooth_case(3, (16, 16), heads=2, error=0.0)
    case.v[0, 1, 40, 3] = math.nan
    output = run(case).output
    assert bool(output[:, 1, :, 3].isnan().all()) and int(output.isnan().sum()) == 257


# Settings


def test_tau_divides_the_scale() -> None:
    case = smooth_case(4, (13, 17), heads=2, error=0.03)
    want = run(case, scale=0.05, tau=0.25)
    assert_equal(run(case, scale=0.2, tau=1.0), want)
    assert not torch.equal(run(case, scale=0.05, tau=0.5).output, want.output)


def test_the_sign_of_the_scale_and_of_the_queries() -> None:
    """A negative scale is that of negative queries."""
    case = smooth_case(4, (13, 17), heads=2, error=0.03)
    assert_equal(run(case, scale=-0.2), run(replace(case, q=-case.q), scale=0.2))


def test_an_empty_batch_and_no_heads() -> None:
    for shape in ((0, 2, 65, 16), (2, 0, 65, 16)):
        q = torch.zeros(shape)
        for options in ({"error": 0.1}, {"error": 0.0}, {"leaves": 0.5}):
            result = screened_attention(q, q, q, grid=(8, 8), prefix=1, backend="native", **options)
            assert result.output.shape == shape and result.stats.backend == "native"


@pytest.mark.parametrize("masked", [False, True])
def test_the_public_function_equals_its_eager_backend(masked: bool) -> None:
    case = smooth_case(11, (32, 32), heads=2, prefix=2)
    valid = torch.rand(1024, generator=torch.Generator().manual_seed(4)) < 0.7 if masked else None
    seen = torch.ones(1026, dtype=torch.bool)
    if valid is not None:
        seen[2:] = valid
    for options in ({"error": 0.1}, {"leaves": 0.2}):
        got, want = (
            screened_attention(
                case.q, case.k, case.v, grid=(32, 32), prefix=2, valid=valid,
                backend=backend, **options,
            )
            for backend in ("native", "eager")
        )  # fmt: skip
        torch.testing.assert_close(
            got.output[:, :, seen], want.output[:, :, seen], rtol=2e-5, atol=2e-5
        )
        assert got.stats.backend == "native" and got.stats.form == "tiled"
        assert want.stats.density < 0.4 and got.stats.density == pytest.approx(want.stats.density)
        assert got.stats.leaf_ratio == pytest.approx(want.stats.leaf_ratio)
        assert got.stats.error.estimate == pytest.approx(want.stats.error.estimate, rel=1e-3)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "float64": ({"dtype": torch.float64}, "float64, and native kernels take"),
    "channels": ({"dim": 257}, "a head has 257 channels, and the most is 256"),
    "gradients": ({"requires_grad": True}, "gradients are required"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_say_why(name: str) -> None:
    change, message = REFUSED[name]
    dim = change.pop("dim", 16)
    q, k, v = (torch.randn(1, 1, 64, dim, **change) for _ in range(3))
    options: dict[str, Any] = {"grid": (8, 8), "error": 0.1}
    with pytest.raises(ValueError, match=message):
        screened_attention(q, k, v, backend="native", **options)
    assert screened_attention(q, k, v, **options).stats.backend != "native"
    with torch.no_grad():
        if name == "gradients":
            assert screened_attention(q, k, v, backend="native", **options).output.isfinite().all()


def test_without_a_build_other_backends_run_and_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    case = smooth_case(3, (40, 40), prefix=1)
    options: dict[str, Any] = {"grid": (40, 40), "prefix": 1, "error": 0.05}
    native_result = screened_attention(case.q, case.k, case.v, backend="native", **options)
    monkeypatch.setenv("BMFA_NATIVE", "off")
    with pytest.raises(ValueError, match=r"cannot run this call: .* BMFA_NATIVE is off"):
        screened_attention(case.q, case.k, case.v, backend="native", **options)
    got = screened_attention(case.q, case.k, case.v, allow_dense=False, **options)
    assert got.stats.backend == "eager" and "BMFA_NATIVE is off" in got.stats.reason
    difference = (got.output - native_result.output).norm() / native_result.output.norm()
    assert float(difference) < 0.05
    assert screened_attention(case.q, case.k, case.v, **options).stats.backend in ("dense", "eager")


def test_small_weights_after_a_large_one() -> None:
    """Equal weights are rounded alike when they are added, by half a unit of their sum each: they must
    not be added one by one to the weight of a bright token, as 4,096 of them would lose 2e-4."""
    q, k = torch.zeros(1, 1, 4097, 16), torch.zeros(1, 1, 4097, 16)
    q[..., 0], k[:, :, 0, 0] = 1.0, 12.0
    v = torch.ones(1, 1, 4097, 16)
    v[:, :, 0] = 0.0
    settings = {"prefix": 1, "scale": 1.0, "tau": 1.0}
    for budget in ({"error": 0.0}, {"expand": 0.0}):
        case = TiledCase(q, k, v, Tiling(Grid(64, 64)), settings | budget, None)
        relative = (run(case).output / exact(case) - 1).abs().max()
        assert float(relative) <= (64 + 4097 / 64) * 2**-24, budget
