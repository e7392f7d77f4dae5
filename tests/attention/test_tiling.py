"""Tiles, groups and budgets."""

import itertools

import pytest
import torch

from bmfa.attention import tiling as tilings
from bmfa.attention.tiling import TiledAttention, Tiling, tiles_to_tokens, tokens_to_tiles
from bmfa.grid import Grid
from tiled_cases import NAMED_GRIDS

SHAPES = (*(Grid(*shape) for shape in NAMED_GRIDS), Grid(5, 11, frames=3))


def test_every_token_has_one_slot() -> None:
    for grid, side in itertools.product(SHAPES, (8, 5, 2)):
        tiling = Tiling(grid, side)
        assert tiling.slot_tokens.shape == (tiling.tiles, side * side)
        assert tiling.slot_tokens.dtype == torch.int64
        tokens = tiling.slot_tokens[tiling.slot_tokens >= 0]
        assert torch.equal(tokens.sort().values, torch.arange(grid.size))
        assert tiling.groups == tiling.tiles
        assert tiling.ragged == bool((tiling.slot_tokens < 0).any())
        assert tiling.slot_tokens is tiling.slot_tokens
        for tokens in tiling.slot_tokens:  # no tile has tokens of two frames
            assert len((tokens[tokens >= 0] // (grid.height * grid.width)).unique()) == 1


def test_slots_are_raster_within_raster() -> None:
    tiling = Tiling(Grid(9, 17))
    assert (tiling.rows, tiling.columns) == (2, 3)
    for tile, slot in ((0, 0), (1, 9), (2, 8), (3, 3), (4, 63), (5, 0)):
        row, column = tile // 3 * 8 + slot // 8, tile % 3 * 8 + slot % 8
        inside = row < 9 and column < 17
        assert tiling.slot_tokens[tile, slot] == (row * 17 + column if inside else -1)


def test_layout_is_undone() -> None:
    for grid in SHAPES:
        tiling = Tiling(grid)
        tokens = torch.randn(2, 2, grid.size, 3)
        tiles = tokens_to_tiles(tokens, tiling, torch.float64)
        assert tiles.dtype == torch.float64
        flat, inside = tokens.flatten(0, 1).double(), tiling.slot_tokens >= 0
        gathered = flat[:, tiling.slot_tokens.clamp(min=0)] * inside.unsqueeze(-1)
        assert torch.equal(tiles, gathered)
        assert torch.equal(tiles_to_tokens(tiles, tiling), flat)
        assert torch.equal(tilings.slots_with_tokens(tiling, None, tokens.device)[0], inside)


def test_any_first_groups_in_order_are_spread_over_the_grid() -> None:
    for grid in (*SHAPES, Grid(128, 128), Grid(80, 24)):
        tiling = Tiling(grid)
        order = tiling.group_order
        assert torch.equal(order.sort().values, torch.arange(tiling.groups))
        for count in (8, 16, 64):
            if count < tiling.groups:
                first = order[:count].sort().values
                gaps = torch.cat((first, first[:1] + tiling.groups)).diff()
                assert int(gaps.max()) <= 4 * -(-tiling.groups // count)


def test_probes_and_prefix_fill_slots() -> None:
    """The Triton kernels have one probe in a group."""
    tiling = Tiling(Grid(128, 128), probes_per_group=1)
    for prefix in (0, 1, 5, 32, 33, 100):
        assert tiling.probe_slots(prefix) == 64 * (1 + (prefix > 32) + (prefix > 96))
        assert tiling.probes(prefix) == tiling.probe_slots(prefix) - prefix >= 32
        assert Tiling(Grid(16, 16), probes_per_group=1).probes(prefix) == 4


def test_quantiles_of_probes_are_uniform() -> None:
    groups, heads = torch.arange(256), torch.arange(12).unsqueeze(1)
    tiling = Tiling(Grid(128, 128))
    quantiles = tiling.probe_quantile(groups, heads)
    assert float(quantiles[3, 7]) == pytest.approx(tiling.probe_quantile(7, 3), abs=1e-7)
    assert bool(((quantiles > 0) & (quantiles < 1)).all())
    counts = torch.histc(quantiles, bins=16, min=0, max=1)
    # 192 each; a binomial count has a standard deviation of 13.
    assert bool(((counts - 192).abs() < 5 * 13).all())


def test_probes_of_a_group_are_drawn_systematically() -> None:
    for probes, group in itertools.product((1, 2, 3), range(64)):
        tiling = Tiling(Grid(64, 64), probes_per_group=probes)
        assert tiling.probes(0) == probes * tiling.probe_groups(0)
        quantiles = sorted(tiling.probe_quantile(group, 1, draw) for draw in range(probes))
        gaps = [after - before for before, after in itertools.pairwise(quantiles)]
        assert gaps == pytest.approx([1 / probes] * (probes - 1))
        assert 0 < quantiles[0] < 1 / probes  # in each part of this length lies one


def test_leaves_buy_tiles() -> None:
    tiling = Tiling(Grid(64, 64))  # 64 tiles
    few = ((2, 0), (64, 0), (64 + 62, 0), (64 + 63, 1))
    for leaves, tiles in (*few, (0.1, (410 - 64) // 63), (1.0, 64), (4096, 64)):
        assert tiling.tiles_within(leaves) == tiles
    for grid in SHAPES:
        tiling = Tiling(grid)
        for leaves in range(max(2, tiling.tiles), grid.size, 7):
            assert tiling.tiles + 63 * tiling.tiles_within(leaves) <= max(leaves, tiling.tiles)
        assert tiling.tiles_within(1.0) == tiling.tiles
        if grid.size > 1:  # an integer of 1 is refused
            assert tiling.tiles_within(grid.size) == tiling.tiles


def test_bad_input_is_named() -> None:
    with pytest.raises(TypeError, match="grid is 64"):
        Tiling(64)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="side is 1"):
        Tiling(Grid(8, 8), side=1)
    for leaves, error in ((0, ValueError), (1.5, ValueError), (True, TypeError)):
        with pytest.raises(error, match=f"leaves is {leaves}"):
            Tiling(Grid(8, 8)).tiles_within(leaves)


def test_marks_are_made_once_on_demand() -> None:
    calls = []

    def marks() -> torch.Tensor:
        calls.append(1)
        return torch.ones(1, 1, 1, 1, dtype=torch.bool)

    output, probes = torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 3)
    lazy = TiledAttention(output, torch.ones(1, 1, 1, dtype=torch.int32), probes, marks)
    assert not calls
    assert lazy.expanded is lazy.expanded and len(calls) == 1
    eager = TiledAttention(lazy.output, lazy.expanded_count, probes, lazy.expanded)
    assert eager.expanded is lazy.expanded
