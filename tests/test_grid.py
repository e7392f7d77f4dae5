"""Grid: splits checked by hand, Z-order, partitions, and errors that name the value."""

import copy
import pickle

import numpy as np
import pytest
import torch

from bmfa.grid import Grid, check_grid
from cases import LARGE, SIZES


def labels(grid: Grid, depth: int) -> list[list[int]]:
    return grid.partition(depth).view(grid.height, grid.width).tolist()


def test_a_row_of_seven_splits_into_three_and_four():
    grid = Grid(1, 7)
    assert labels(grid, 0) == [[0, 0, 0, 0, 0, 0, 0]]
    assert labels(grid, 1) == [[0, 0, 0, 1, 1, 1, 1]]
    assert labels(grid, 2) == [[0, 1, 1, 2, 2, 3, 3]]
    assert labels(grid, 3) == [[0, 1, 2, 3, 4, 5, 6]]
    assert grid.depth == 3


def test_unequal_sides_split_floor_first():
    grid = Grid(5, 3)
    assert labels(grid, 1) == [[0, 1, 1], [0, 1, 1], [2, 3, 3], [2, 3, 3], [2, 3, 3]]
    # The bottom right 3x2: rows 1 | 2, columns 1 | 1; single tokens keep their own label.
    assert labels(grid, 2) == [[0, 2, 3], [1, 4, 5], [6, 8, 9], [7, 10, 11], [7, 10, 11]]
    assert grid.depth == 3


def test_z_order_by_hand():
    expected = [0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15]
    assert Grid(4, 4).z_order.tolist() == expected
    assert Grid(3, 2).z_order.tolist() == [0, 1, 2, 4, 3, 5]
    assert Grid(1, 7).z_order.tolist() == list(range(7))
    assert labels(Grid(3, 1), 1) == [[0], [1], [1]]  # a side of one does not split
    sizes = [(1, 1), (2, 2), (3, 3), (16, 16), (17, 16), (37, 37), (1, 64)]
    assert [Grid(*size).depth for size in sizes] == [0, 1, 2, 4, 5, 6, 6]


def test_partitions_nest_are_rectangles_and_lie_together_in_z_order():
    for height, width in SIZES + LARGE:
        grid = Grid(height, width)
        finer = grid.z_order.argsort()
        assert torch.equal(grid.z_order[finer], torch.arange(grid.size))
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


def test_what_a_grid_hands_out_is_a_copy_and_partitions_end_in_single_tokens():
    grid = Grid(3, 5)
    expected = grid.z_order
    grid.z_order.fill_(0)
    assert torch.equal(grid.z_order, expected)
    for depth in (grid.depth, grid.depth + 1, 99):
        assert torch.equal(grid.partition(depth), grid.z_order.argsort())


def test_grids_are_values():
    assert Grid(3, 4) == Grid(3, 4) != Grid(4, 3)
    assert len({Grid(3, 4), Grid(3, 4), Grid(4, 3)}) == 2
    assert Grid(3, 4).size == 12
    grid = Grid(height=np.int64(9), width=np.uint8(12))
    assert grid == Grid(9, 12) and hash(grid) == hash(Grid(9, 12))
    assert repr(grid) == "Grid(height=9, width=12)"
    assert copy.deepcopy(grid) == pickle.loads(pickle.dumps(grid)) == grid
    with pytest.raises(AttributeError):
        Grid(3, 4).height = 5


def test_bad_sides_and_depths_are_named_and_get_a_suggestion():
    for sides, error, message in [
        ((0, 4), ValueError, "height is 0; pass an integer at least 1"),
        ((4, -1), ValueError, "width is -1; pass an integer at least 1"),
        ((4.0, 4), TypeError, "height is 4.0; pass an integer"),
        ((4, "4"), TypeError, "width is '4'; pass an integer"),
        ((True, 4), TypeError, "height is True; pass an integer"),
        ((4, None), TypeError, "width is None; pass an integer"),
        ((196,), TypeError, r"Grid got \(196\); did you mean Grid\(14, 14\)\?"),
        (((14, 16),), TypeError, r"Grid got \(\(14, 16\)\); did you mean Grid\(14, 16\)\?"),
        ((3, 14, 16), TypeError, r"\(3, 14, 16\); .* Grid\(14, 16\)\? A grid has two sides"),
        ((), TypeError, r"Grid got nothing; pass Grid\(height, width\)"),
        ((15,), TypeError, r"Grid got \(15\); pass Grid\(height, width\)"),
    ]:
        with pytest.raises(error, match=message):
            Grid(*sides)
    with pytest.raises(TypeError, match="unexpected keyword"):
        Grid(9, breadth=12)
    for depth, error in [(-1, ValueError), (1.0, TypeError), (True, TypeError)]:
        with pytest.raises(error, match=f"depth is {depth}; pass an integer"):
            Grid(4, 4).partition(depth)
    assert check_grid((3, 4)) == check_grid([3, 4]) == check_grid(Grid(3, 4)) == Grid(3, 4)
    with pytest.raises(TypeError, match=r"grid is 196; did you mean Grid\(14, 14\)\?"):
        check_grid(196)
