"""Tables of the complete quadtree that the kernel reads, and the trees that it writes.

`kernel.py` describes the complete quadtree. A block whose side does not split has several copies in it.
"""

from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bmfa.grid import Grid
from bmfa.trees.layout import quadtree_layout
from bmfa.trees.rules import Decision, RandomQuadrants

# The blocks of the first three levels, 1 + 4 + 16, have their bits in one word of 32.
FIRST_WORD_LEVELS = 3
# Rows of the table: weight of a copy in tokens, its share of the block, and that share of the leaves
# that a split of the block adds.
WEIGHT, SHARE, PARTS = 0, 1, 2

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


def _copies(grid: Grid, level: int) -> tuple[Integers, Floats]:
    """Return boxes (4^level, 4), as top, left, bottom, right, and the share (4^level,) of each copy."""
    index = np.arange(4**level)
    top, left = np.zeros_like(index), np.zeros_like(index)
    bottom, right = top + grid.height, left + grid.width
    share = np.ones(4**level)
    for step in range(level):
        digit = index // 4**step % 4
        top, bottom, vertical = _halve(top, bottom, digit // 2 == 1)
        left, right, horizontal = _halve(left, right, digit % 2 == 1)
        share *= vertical * horizontal
    return np.stack((top, left, bottom, right), -1), share


def _halve(
    low: Integers, high: Integers, second: npt.NDArray[np.bool_]
) -> tuple[Integers, Integers, Floats]:
    """Return the first or second half of each side, and its share; a side of 1 is in both halves."""
    middle, single = low + (high - low) // 2, high - low == 1
    return (
        np.where(second & ~single, middle, low),
        np.where(second | single, high, middle),
        np.where(single, 0.5, 1.0),
    )


@lru_cache(maxsize=64)
def quadtree_tables(
    grid: Grid, prefix: int, order: str, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the int32 token of every slot (4^depth,), and the float32 table (3, blocks)."""
    tokens, _ = _copies(grid, grid.depth)
    raster = torch.from_numpy(tokens[:, 0] * grid.width + tokens[:, 1])
    slot_tokens = prefix + (grid.z_rank[raster] if order == "z" else raster)
    levels = []
    for level in range(grid.depth):
        boxes, share = _copies(grid, level)
        sides = boxes[:, 2:] - boxes[:, :2]
        added_leaves = np.minimum(sides, 2).prod(1) - 1
        levels.append(np.stack((sides.prod(1) * share, share, added_leaves * share)))
    table = torch.from_numpy(np.concatenate(levels, 1)).float()
    return slot_tokens.to(device, torch.int32), table.to(device)


@lru_cache(maxsize=16)
def packed_coins(rule: RandomQuadrants, trees: int, grid: Grid, device: torch.device) -> Tensor:
    """Return int8 (trees,) with a bit for every quadrant; the copies of a quadrant share its coin."""
    rows, columns = 1 + (grid.height > 1), 1 + (grid.width > 1)
    coins = rule.draw(trees, rows * columns).to(torch.int8)
    packed = torch.zeros(trees, dtype=torch.int8)
    for digit in range(4):
        row, column = min(digit // 2, rows - 1), min(digit % 2, columns - 1)
        packed |= coins[:, row * columns + column] << digit
    return packed.to(device)


@lru_cache(maxsize=64)
def _bit_positions(grid: Grid, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the word and the bit of every block, in the order of the quadtree's blocks."""
    words, bits = [], []
    for depth, level in enumerate(quadtree_layout(grid).levels[:-1]):
        boxes = _copies(grid, depth)[0].tolist()
        nodes = torch.tensor([boxes.index(box) for box in level.boxes.tolist()])
        in_first = depth < FIRST_WORD_LEVELS
        words.append(nodes * 0 if in_first else 1 + nodes // 32)
        bits.append(nodes + 4**depth // 3 if in_first else nodes % 32)
    return torch.cat(words).to(device), torch.cat(bits).to(device, torch.int32)


def decode_splits(split_bits: Tensor, grid: Grid, max_depth: int | None) -> Decision:
    """Return the splits in the kernel's bits (trees, words), and the blocks limited by max_depth."""
    layout = quadtree_layout(grid)
    words, bits = _bit_positions(grid, split_bits.device)
    offsets, last = layout.offsets, len(layout.levels) - 1
    limit = last if max_depth is None else min(max_depth, last)
    start, end = offsets[limit], offsets[min(limit + 1, last)]
    wants = split_bits[:, words[:end]].T >> bits[:end, None] & 1 != 0  # (blocks, trees)
    split = wants.new_zeros(layout.block_count, len(split_bits))
    split[:start] = wants[:start]
    return Decision(split, wants[start:] if limit < last else None)
