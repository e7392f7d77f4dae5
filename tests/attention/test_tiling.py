"""Tiles, groups and budgets."""

from itertools import pairwise

import pytest
import torch

from bmfa.attention.tiling import (
    TiledAttention,
    Tiling,
    slots_with_tokens,
    tiles_to_tokens,
    tokens_to_tiles,
)
from bmfa.grid import Grid
from tiled_cases import NAMED_GRIDS


@pytest.mark.parametrize("shape", NAMED_GRIDS)
@pytest.mark.parametrize("side", [8, 5, 2])
def test_every_token_has_one_slot(shape: tuple[int, int], side: int) -> None:
    tiling = Tiling(Grid(*shape), side)
    assert tiling.slot_tokens.shape == (tiling.tiles, side * side)
    assert tiling.slot_tokens.dtype == torch.int64
    tokens = tiling.slot_tokens[tiling.slot_tokens >= 0]
    assert torch.equal(tokens.sort().values, torch.arange(tiling.grid.size))
    assert tiling.groups == tiling.tiles
    assert tiling.ragged == bool((tiling.slot_tokens < 0).any())
    assert tiling.slot_tokens is tiling.slot_tokens


def test_slots_are_raster_within_raster() -> None:
    tiling = Tiling(Grid(9, 17))
    assert (tiling.rows, tiling.columns) == (2, 3)
    for tile, slot in ((0, 0), (1, 9), (2, 8), (3, 3), (4, 63), (5, 0)):
        row, column = tile // 3 * 8 + slot // 8, tile % 3 * 8 + slot % 8
        inside = row < 9 and column < 17
        assert tiling.slot_tokens[tile, slot] == (row * 17 + column if inside else -1)


@pytest.mark.parametrize("shape", NAMED_GRIDS)
def test_layout_is_undone(shape: tuple[int, int]) -> None:
    tiling = Tiling(Grid(*shape))
    tokens = torch.randn(2, 2, tiling.grid.size, 3)
    tiles = tokens_to_tiles(tokens, tiling, torch.float64)
    assert tiles.dtype == torch.float64
    flat = tokens.flatten(0, 1).double()
    gathered = flat[:, tiling.slot_tokens.clamp(min=0)]
    gathered[:, tiling.slot_tokens < 0] = 0
    assert torch.equal(tiles, gathered)
    assert torch.equal(tiles_to_tokens(tiles, tiling), flat)
    exist = slots_with_tokens(tiling, None, tokens.device)
    assert torch.equal(exist[0], tiling.slot_tokens >= 0)


@pytest.mark.parametrize("shape", [*NAMED_GRIDS, (128, 128), (80, 24)])
def test_any_first_groups_in_order_are_spread_over_the_grid(shape: tuple[int, int]) -> None:
    tiling = Tiling(Grid(*shape))
    order = tiling.group_order
    assert torch.equal(order.sort().values, torch.arange(tiling.groups))
    for count in (8, 16, 64):
        if count < tiling.groups:
            first = order[:count].sort().values
            gaps = torch.cat((first, first[:1] + tiling.groups)).diff()
            assert int(gaps.max()) <= 4 * -(-tiling.groups // count)


@pytest.mark.parametrize("prefix", [0, 1, 5, 32, 33, 100])
def test_probes_and_prefix_fill_slots(prefix: int) -> None:
    """The Triton kernels have one probe in a group."""
    tiling = Tiling(Grid(128, 128), probes_per_group=1)
    assert tiling.probe_slots(prefix) % 64 == 0
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


@pytest.mark.parametrize("probes", [1, 2, 3])
def test_probes_of_a_group_are_drawn_systematically(probes: int) -> None:
    tiling = Tiling(Grid(64, 64), probes_per_group=probes)
    assert tiling.probes(0) == probes * tiling.probe_groups(0)
    for group in range(64):
        quantiles = sorted(tiling.probe_quantile(group, 1, draw) for draw in range(probes))
        gaps = [after - before for before, after in pairwise(quantiles)]
        assert gaps == pytest.approx([1 / probes] * (probes - 1))
        assert 0 < quantiles[0] < 1 / probes  # in each part of this length lies one


def test_leaves_buy_tiles() -> None:
    tiling = Tiling(Grid(64, 64))  # 64 tiles
    assert tiling.tiles_within(64) == 0
    assert tiling.tiles_within(64 + 63) == 1
    assert tiling.tiles_within(64 + 62) == 0
    assert tiling.tiles_within(2) == 0
    assert tiling.tiles_within(0.1) == (410 - 64) // 63
    assert tiling.tiles_within(1.0) == 64
    assert tiling.tiles_within(4096) == 64


@pytest.mark.parametrize("shape", NAMED_GRIDS)
def test_a_budget_is_kept_and_all_tokens_are_dense(shape: tuple[int, int]) -> None:
    tiling = Tiling(Grid(*shape))
    for leaves in range(max(2, tiling.tiles), tiling.grid.size, 7):
        assert tiling.tiles + 63 * tiling.tiles_within(leaves) <= max(leaves, tiling.tiles)
    assert tiling.tiles_within(1.0) == tiling.tiles
    if tiling.grid.size > 1:  # an integer of 1 is refused
        assert tiling.tiles_within(tiling.grid.size) == tiling.tiles


@pytest.mark.parametrize(
    ("make", "error", "word"),
    [
        (lambda: Tiling(64), TypeError, "grid is 64"),  # type: ignore[arg-type]
        (lambda: Tiling(Grid(8, 8), side=1), ValueError, "side is 1"),
        (lambda: Tiling(Grid(8, 8)).tiles_within(0), ValueError, "leaves is 0"),
        (lambda: Tiling(Grid(8, 8)).tiles_within(1.5), ValueError, "leaves is 1.5"),
        (lambda: Tiling(Grid(8, 8)).tiles_within(True), TypeError, "leaves is True"),
    ],
)
def test_bad_input_is_named(make, error, word) -> None:
    with pytest.raises(error, match=word):
        make()


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
