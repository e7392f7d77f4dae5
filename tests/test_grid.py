"""The static quadtree: splits checked by hand, Z-order, bookkeeping of the levels, tiles."""

import pytest
import torch

from bmfa.grid import Grid, Layout, Level, quadtree, tiles

SIZES = [
    (1, 1),
    (1, 2),
    (2, 1),
    (1, 7),
    (2, 2),
    (3, 2),
    (5, 3),
    (4, 4),
    (14, 14),
    (16, 25),
    (33, 64),
]
LARGE = [(37, 37), (256, 256)]
TILES = [(1, 1, 1), (1, 7, 3), (5, 8, 3), (4, 4, 4), (14, 14, 4), (6, 3, 1), (3, 5, 9), (33, 64, 7)]


def layouts() -> list[Layout]:
    made = [quadtree(Grid(*size)) for size in SIZES + LARGE]
    return made + [tiles(Grid(height, width), side) for height, width, side in TILES]


def name(layout: Layout) -> str:
    grid = layout.grid
    return f"{grid.height}x{grid.width}-{len(layout.levels)}-levels"


every_layout = pytest.mark.parametrize("layout", layouts(), ids=name)
every_size = pytest.mark.parametrize(("height", "width"), SIZES + LARGE)


def rows(level: Level, width: int) -> torch.Tensor:
    """(n + t, 4) boxes of the rows [blocks | tokens]."""
    top, left = level.tokens // width, level.tokens % width
    return torch.cat((level.boxes, torch.stack((top, left, top + 1, left + 1), -1)))


def labels(grid: Grid, depth: int) -> list[list[int]]:
    return grid.partition(depth).view(grid.height, grid.width).tolist()


def test_a_row_of_seven_splits_into_three_and_four():
    grid = Grid(1, 7)
    assert labels(grid, 0) == [[0, 0, 0, 0, 0, 0, 0]]
    assert labels(grid, 1) == [[0, 0, 0, 1, 1, 1, 1]]
    assert labels(grid, 2) == [[0, 1, 1, 2, 2, 3, 3]]
    assert labels(grid, 3) == [[0, 1, 2, 3, 4, 5, 6]]
    assert grid.depth == 3


def test_a_side_of_one_does_not_split():
    grid = Grid(3, 1)
    assert labels(grid, 1) == [[0], [1], [1]]
    assert labels(grid, 2) == [[0], [1], [2]]
    assert grid.depth == 2


def test_unequal_sides_split_floor_first():
    grid = Grid(5, 3)
    assert labels(grid, 1) == [[0, 1, 1], [0, 1, 1], [2, 3, 3], [2, 3, 3], [2, 3, 3]]
    # The bottom right 3x2: rows 1 | 2, columns 1 | 1; single tokens keep their own label.
    assert labels(grid, 2) == [[0, 2, 3], [1, 4, 5], [6, 8, 9], [7, 10, 11], [7, 10, 11]]
    assert grid.depth == 3


def test_boxes_of_fourteen_squared():
    levels = quadtree(Grid(14, 14)).levels
    assert levels[0].boxes.tolist() == [[0, 0, 14, 14]]
    assert levels[1].boxes.tolist() == [[0, 0, 7, 7], [0, 7, 7, 14], [7, 0, 14, 7], [7, 7, 14, 14]]
    first = [[0, 0, 3, 3], [0, 3, 3, 7], [3, 0, 7, 3], [3, 3, 7, 7]]
    assert levels[2].boxes[:4].tolist() == first
    assert levels[2].counts[:4].tolist() == [9, 12, 12, 16]
    # 3x3 splits into 1 | 2 each way: a single token, which ends there, and three blocks.
    assert levels[3].tokens[0] == 0
    assert levels[3].boxes[:3].tolist() == [[0, 1, 1, 3], [1, 0, 3, 1], [1, 1, 3, 3]]
    assert [level.size for level in levels] == [1, 4, 16, 60, 0]


@pytest.mark.parametrize(
    ("size", "depth"),
    [
        ((1, 1), 0),
        ((2, 2), 1),
        ((3, 3), 2),
        ((16, 16), 4),
        ((17, 16), 5),
        ((37, 37), 6),
        ((1, 64), 6),
    ],
)
def test_depth_is_that_of_the_longest_side(size, depth):
    assert Grid(*size).depth == depth


def test_z_order_of_four_squared():
    grid = Grid(4, 4)
    assert grid.z_order.tolist() == [0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15]


def test_z_order_of_an_irregular_grid():
    assert Grid(3, 2).z_order.tolist() == [0, 1, 2, 4, 3, 5]
    assert Grid(1, 7).z_order.tolist() == list(range(7))


@every_size
def test_z_order_is_a_permutation_and_z_rank_its_inverse(height, width):
    grid = Grid(height, width)
    everything = torch.arange(grid.size)
    assert torch.equal(grid.z_order.sort().values, everything)
    assert torch.equal(grid.z_order[grid.z_rank], everything)
    assert torch.equal(grid.z_rank[grid.z_order], everything)


@every_size
def test_partitions_nest_are_rectangles_and_lie_together_in_z_order(height, width):
    grid = Grid(height, width)
    finer = torch.arange(grid.size)[grid.z_rank]
    for depth in reversed(range(grid.depth + 1)):
        partition = grid.partition(depth)
        in_order = partition[grid.z_order]
        assert in_order[0] == 0 and set(in_order.diff().tolist()) <= {0, 1}
        # Every finer block has one label: as many pairs as finer labels.
        pairs = torch.stack((finer, partition)).unique(dim=1)
        assert pairs.shape[1] == int(finer.max()) + 1
        sizes = partition.bincount()
        row, column = torch.arange(grid.size) // width, torch.arange(grid.size) % width
        spans = []
        for place in (row, column):
            low = torch.full_like(sizes, grid.size).scatter_reduce(0, partition, place, "amin")
            high = torch.zeros_like(sizes).scatter_reduce(0, partition, place, "amax")
            spans.append(high - low + 1)
        assert torch.equal(spans[0] * spans[1], sizes)
        finer = partition
    assert int(finer.max()) == 0


def test_depth_is_that_of_the_quadtree():
    for height in range(1, 20):
        for width in (1, 2, 3, 5, 8, 9, 16, 17, 33):
            grid = Grid(height, width)
            assert grid.depth == len(quadtree(grid).levels) - 1


def test_partition_beyond_the_depth_is_single_tokens():
    grid = Grid(3, 5)
    for depth in (grid.depth, grid.depth + 1, 99):
        assert torch.equal(grid.partition(depth), grid.z_rank)


def test_what_a_grid_hands_out_is_a_copy():
    grid = Grid(4, 4)
    expected = grid.z_order
    grid.z_order.fill_(0)
    grid.z_rank.fill_(0)
    assert torch.equal(grid.z_order, expected)
    assert torch.equal(grid.z_order[grid.z_rank], torch.arange(16))


def test_layouts_are_built_once():
    assert quadtree(Grid(9, 11)) is quadtree(Grid(9, 11))
    assert tiles(Grid(9, 11), 4) is tiles(Grid(9, 11), 4)
    assert tiles(Grid(9, 11), 4) is not tiles(Grid(9, 11), 3)
    assert quadtree(Grid(9, 11)) is not quadtree(Grid(11, 9))
    layout = quadtree(Grid(9, 11))
    assert layout.to("cpu") is layout
    assert layout.to("meta") is layout.to("meta")
    assert layout.to("meta").device.type == "meta"


@every_layout
def test_every_token_ends_at_one_level(layout):
    tokens = torch.cat([level.tokens for level in layout.levels])
    assert torch.equal(tokens.sort().values, torch.arange(layout.grid.size))
    starts = torch.cat([level.token_starts for level in layout.levels])
    assert torch.equal(layout.z_rank[tokens], starts)
    assert torch.equal(layout.z_order[layout.z_rank], torch.arange(layout.grid.size))


@every_layout
def test_children_fill_their_parents(layout):
    width = layout.grid.width
    for level, below in zip(layout.levels, layout.levels[1:], strict=False):
        boxes = rows(below, width)
        area = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
        children = boxes[level.children]  # (n, k, 4)
        assert bool((area[level.children] * level.present).sum(1).eq(level.counts).all())
        inside = torch.cat(
            (
                children[..., :2] >= level.boxes[:, None, :2],
                children[..., 2:] <= level.boxes[:, None, 2:],
            ),
            -1,
        )
        assert bool(inside.all())
        # Each row of the level below is the child of one parent, and knows it.
        parents = torch.arange(level.size)[:, None].expand_as(level.children)
        listed = level.children[level.present]
        assert torch.equal(listed.sort().values, torch.arange(len(boxes)))
        known = torch.cat((below.parents, below.token_parents))
        assert torch.equal(known[listed], parents[level.present])


@every_layout
def test_starts_follow_from_the_counts(layout):
    for level, below in zip(layout.levels, layout.levels[1:], strict=False):
        starts = torch.cat((below.starts, below.token_starts))[level.children]
        counts = torch.cat((below.counts, torch.ones_like(below.tokens)))[level.children]
        counts = counts * level.present
        expected = level.starts[:, None] + counts.cumsum(1) - counts
        assert torch.equal(starts[level.present], expected[level.present])


@every_layout
def test_rows_of_children_are_gathered(layout):
    """`Layout.children` on the boxes themselves gives what the index tensors say."""
    width = layout.grid.width
    every_token = torch.arange(layout.grid.size)
    top, left = every_token // width, every_token % width
    tokens = torch.stack((top, left, top + 1, left + 1), -1)
    for depth, level in enumerate(layout.levels[:-1]):
        below = layout.levels[depth + 1]
        gathered = layout.children(depth, below.boxes, tokens)
        assert torch.equal(gathered, rows(below, width)[level.children])
        zeroed = layout.children(depth, torch.ones_like(below.boxes), None)
        block = level.children < below.size
        assert torch.equal(zeroed[..., 0].bool(), block)


@every_layout
def test_offsets_count_the_blocks(layout):
    sizes = [level.size for level in layout.levels]
    assert layout.offsets[0] == 0 and layout.block_count == sum(sizes) == layout.offsets[-1]
    assert [b - a for a, b in zip(layout.offsets, layout.offsets[1:], strict=False)] == sizes
    assert sizes[-1] == 0, "the last level holds single tokens alone"
    for level in layout.levels:
        assert bool((level.counts > 1).all())


def test_tiles_have_remainders_at_the_right_and_the_bottom():
    layout = tiles(Grid(5, 8), 3)
    assert layout.levels[0].boxes.tolist() == [
        [0, 0, 3, 3],
        [0, 3, 3, 6],
        [0, 6, 3, 8],
        [3, 0, 5, 3],
        [3, 3, 5, 6],
        [3, 6, 5, 8],
    ]
    assert layout.levels[0].counts.tolist() == [9, 9, 6, 6, 6, 4]
    assert layout.levels[0].starts.tolist() == [0, 9, 18, 24, 30, 36]
    # Inside a tile the tokens lie in raster order.
    assert layout.z_order[18:24].tolist() == [6, 7, 14, 15, 22, 23]


def test_a_remainder_of_one_token_is_a_token():
    layout = tiles(Grid(4, 4), 3)
    first = layout.levels[0]
    assert first.boxes.tolist() == [[0, 0, 3, 3], [0, 3, 3, 4], [3, 0, 4, 3]]
    assert first.tokens.tolist() == [15] and first.token_starts.tolist() == [15]


def test_tiles_of_one_token_and_of_the_whole_grid():
    assert tiles(Grid(3, 4), 1).block_count == 0
    assert tiles(Grid(3, 4), 1).levels[0].tokens.tolist() == list(range(12))
    whole = tiles(Grid(3, 4), 4)
    assert whole.levels[0].boxes.tolist() == [[0, 0, 3, 4]]


def test_grids_are_values():
    assert Grid(3, 4) == Grid(3, 4) != Grid(4, 3)
    assert len({Grid(3, 4), Grid(3, 4), Grid(4, 3)}) == 2
    assert Grid(3, 4).size == 12
    with pytest.raises(AttributeError):
        Grid(3, 4).height = 5


@pytest.mark.parametrize(
    ("height", "width", "error", "message"),
    [
        (0, 4, ValueError, "height is 0; pass an integer at least 1"),
        (4, -1, ValueError, "width is -1; pass an integer at least 1"),
        (4.0, 4, TypeError, "height is 4.0; pass an integer"),
        (4, "4", TypeError, "width is '4'; pass an integer"),
        (True, 4, TypeError, "height is True; pass an integer"),
        (4, None, TypeError, "width is None; pass an integer"),
    ],
)
def test_bad_sides_are_named(height, width, error, message):
    with pytest.raises(error, match=message):
        Grid(height, width)


@pytest.mark.parametrize(
    ("depth", "error"), [(-1, ValueError), (1.0, TypeError), (True, TypeError)]
)
def test_bad_depths_are_named(depth, error):
    with pytest.raises(error, match=f"depth is {depth}; pass an integer"):
        Grid(4, 4).partition(depth)
