"""The complete quadtree of the kernel for small grids: its slots, weights, coins and marks."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from bmfa.grid import Grid
from bmfa.trees.layout import quadtree_layout
from bmfa.trees.rules import Decision, RandomQuadrants


@dataclass(frozen=True, eq=False)
class Paths:
    """Where blocks and tokens lie in the complete quadtree; see `tree_levels`."""

    boxes: np.ndarray  # (4^level, 4) top, left, bottom, right
    share: np.ndarray  # (4^level,) of its block that each copy stands for


def _paths(grid: Grid, level: int) -> Paths:
    """The blocks of a level, a side of 1 in both halves with half the share."""
    index = np.arange(4**level)
    top, left = np.zeros_like(index), np.zeros_like(index)
    bottom, right = top + grid.height, left + grid.width
    share = np.ones(4**level)
    for step in range(level):
        digit = index // 4**step % 4
        top, bottom, vertical = _half(top, bottom, digit // 2 == 1)
        left, right, horizontal = _half(left, right, digit % 2 == 1)
        share *= vertical * horizontal
    return Paths(np.stack((top, left, bottom, right), -1), share)


def _half(
    low: np.ndarray, high: np.ndarray, second: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One half of each side, and the share this copy of it has."""
    middle, single = low + (high - low) // 2, high - low == 1
    return (
        np.where(second & ~single, middle, low),
        np.where(second | single, high, middle),
        np.where(single, 0.5, 1.0),
    )


def _areas(boxes: np.ndarray) -> np.ndarray:
    areas: np.ndarray = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    return areas


@lru_cache(maxsize=64)
def tables(grid: Grid, prefix: int, order: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """The token of every slot, and the kernel's three numbers for every block."""
    tokens = _paths(grid, grid.depth).boxes
    raster = torch.from_numpy(tokens[:, 0] * grid.width + tokens[:, 1])
    slots = prefix + (grid.z_rank[raster] if order == "z" else raster)
    rows = []
    for level in range(grid.depth):
        blocks = _paths(grid, level)
        sides = blocks.boxes[:, 2:] - blocks.boxes[:, :2]
        leaves = np.minimum(sides, 2).prod(1) - 1
        rows.append(
            np.stack((_areas(blocks.boxes) * blocks.share, blocks.share, leaves * blocks.share))
        )
    table = torch.from_numpy(np.concatenate(rows, 1)).float()
    return slots.to(device, torch.int32), table.to(device)


@lru_cache(maxsize=16)
def coins_of(rule: RandomQuadrants, trees: int, grid: Grid, device: torch.device) -> Tensor:
    """(trees,) a bit for every quadrant; the copies of one share its coin."""
    rows, columns = 1 + (grid.height > 1), 1 + (grid.width > 1)
    coins = rule.draw(trees, rows * columns).to(torch.int8)
    packed = torch.zeros(trees, dtype=torch.int8)
    for digit in range(4):
        row, column = min(digit // 2, rows - 1), min(digit % 2, columns - 1)
        packed |= coins[:, row * columns + column] << digit
    return packed.to(device)


@lru_cache(maxsize=64)
def _bits(grid: Grid, device: torch.device) -> tuple[Tensor, Tensor]:
    """The word and the bit of every block's mark, in the order of the quadtree's blocks."""
    words, bits = [], []
    for depth, level in enumerate(quadtree_layout(grid).levels[:-1]):
        paths = _paths(grid, depth).boxes.tolist()
        nodes = torch.tensor([paths.index(box) for box in level.boxes.tolist()])
        words.append(nodes * 0 if depth < 3 else 1 + nodes // 32)
        bits.append(nodes + 4**depth // 3 if depth < 3 else nodes % 32)
    return torch.cat(words).to(device), torch.cat(bits).to(device, torch.int32)


def decode_splits(marks: Tensor, grid: Grid, max_depth: int | None) -> Decision:
    """The splits that the kernel marked, and the blocks that the depth limit kept from one."""
    layout = quadtree_layout(grid)
    words, bits = _bits(grid, marks.device)
    offsets, last = layout.offsets, len(layout.levels) - 1
    limit = last if max_depth is None else min(max_depth, last)
    start, end = offsets[limit], offsets[min(limit + 1, last)]
    asking = marks[:, words[:end]].T >> bits[:end, None] & 1 != 0
    split = asking.new_zeros(layout.block_count, len(marks))
    split[:start] = asking[:start]
    return Decision(split, asking[start:] if limit < last else None)
