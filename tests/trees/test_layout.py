"""Static layouts: bookkeeping of the levels of quadtrees and tiles."""

import torch

from bmfa.grid import Grid
from bmfa.trees.layout import Layout, Level, quadtree_layout, tile_layout
from cases import LARGE, SIZES

TILES = [(1, 1, 1), (1, 7, 3), (5, 8, 3), (4, 4, 4), (14, 14, 4), (6, 3, 1), (3, 5, 9), (33, 64, 7)]


def layouts() -> list[Layout]:
    made = [quadtree_layout(Grid(*size)) for size in SIZES + LARGE]
    return made + [tile_layout(Grid(height, width), side) for height, width, side in TILES]


def block_sizes(level: Level) -> torch.Tensor:
    """(n,) number of tokens of each block."""
    top, left, bottom, right = level.boxes.unbind(-1)
    return (bottom - top) * (right - left)


def test_boxes_of_fourteen_squared():
    levels = quadtree_layout(Grid(14, 14)).levels
    assert levels[0].boxes.tolist() == [[0, 0, 14, 14]]
    assert levels[1].boxes.tolist() == [[0, 0, 7, 7], [0, 7, 7, 14], [7, 0, 14, 7], [7, 7, 14, 14]]
    first = [[0, 0, 3, 3], [0, 3, 3, 7], [3, 0, 7, 3], [3, 3, 7, 7]]
    assert levels[2].boxes[:4].tolist() == first
    assert block_sizes(levels[2])[:4].tolist() == [9, 12, 12, 16]
    # 3x3 splits into 1 | 2 each way: a single token, which ends there, and three blocks.
    assert levels[3].tokens[0] == 0
    assert levels[3].boxes[:3].tolist() == [[0, 1, 1, 3], [1, 0, 3, 1], [1, 1, 3, 3]]
    assert [level.size for level in levels] == [1, 4, 16, 60, 0]


def test_layouts_are_built_once():
    layout = quadtree_layout(Grid(9, 11))
    assert quadtree_layout(Grid(9, 11)) is layout is not quadtree_layout(Grid(11, 9))
    assert tile_layout(Grid(9, 11), 4) is tile_layout(Grid(9, 11), 4)
    assert tile_layout(Grid(9, 11), 4) is not tile_layout(Grid(9, 11), 3)
    assert layout.to("cpu") is layout
    assert layout.to("meta") is layout.to("meta")
    assert layout.to("meta").device.type == "meta"


def test_every_token_ends_at_one_level():
    for layout in layouts():
        everything = torch.arange(layout.grid.size)
        tokens = torch.cat([level.tokens for level in layout.levels])
        assert torch.equal(tokens.sort().values, everything)
        starts = torch.cat([level.token_starts for level in layout.levels])
        assert torch.equal(layout.token_rank[tokens], starts)
        assert torch.equal(layout.token_rank.sort().values, everything)
        if layout is quadtree_layout(layout.grid):
            assert layout.grid.depth == len(layout.levels) - 1
            assert torch.equal(layout.token_rank.argsort(), layout.grid.z_order)
        else:
            assert bool((layout.levels[0].starts.diff() > 0).all())


def test_offsets_count_the_blocks():
    for layout in layouts():
        sizes = torch.tensor([level.size for level in layout.levels])
        assert layout.offsets == (0, *sizes.cumsum(0).tolist())
        assert layout.block_count == layout.offsets[-1]
        assert sizes[-1] == 0, "the last level holds single tokens alone"
        assert all(bool((block_sizes(level) > 1).all()) for level in layout.levels)


def test_tiles_have_remainders_at_the_right_and_the_bottom():
    layout = tile_layout(Grid(5, 8), 3)
    boxes = [[0, 0, 3, 3], [0, 3, 3, 6], [0, 6, 3, 8], [3, 0, 5, 3], [3, 3, 5, 6], [3, 6, 5, 8]]
    assert layout.levels[0].boxes.tolist() == boxes
    assert layout.levels[0].starts.tolist() == [0, 9, 18, 24, 30, 36]
    # Inside a tile the tokens lie in raster order.
    assert layout.token_rank.argsort()[18:24].tolist() == [6, 7, 14, 15, 22, 23]
    first = tile_layout(Grid(4, 4), 3).levels[0]  # a remainder of one token is a token
    assert first.boxes.tolist() == [[0, 0, 3, 3], [0, 3, 3, 4], [3, 0, 4, 3]]
    assert first.tokens.tolist() == [15] and first.token_starts.tolist() == [15]
    assert tile_layout(Grid(3, 4), 1).block_count == 0
    assert tile_layout(Grid(3, 4), 4).levels[0].boxes.tolist() == [[0, 0, 3, 4]]


def test_partition_labels_the_blocks_of_every_level():
    for height, width in SIZES:
        layout = quadtree_layout(Grid(height, width))
        for depth, level in enumerate(layout.levels):
            labels = layout.grid.partition(depth).view(height, width)
            for top, left, bottom, right in level.boxes.tolist():
                block = labels[top:bottom, left:right]
                assert bool((block == block[0, 0]).all())
                assert int((labels == block[0, 0]).sum()) == block.numel()
