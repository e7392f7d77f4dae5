"""Where the tokens of a tile lie, and how they are loaded."""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def tokens_of(tiles, slots, height, width, across, ALIGNED: tl.constexpr, SIDE: tl.constexpr):
    """Token of each slot and whether it lies on the grid; with ALIGNED, tiles are contiguous."""
    if ALIGNED:
        tokens = tiles * (SIDE * SIDE) + slots
        return tokens, tokens < height * width
    row = (tiles // across) * SIDE + slots // SIDE
    column = (tiles % across) * SIDE + slots % SIDE
    return row * width + column, (row < height) & (column < width)


@triton.jit
def existing(valid, tokens, on_grid, MASKED: tl.constexpr):
    """Whether each token exists: on the grid, and valid where there is a mask."""
    if MASKED:
        return on_grid & (tl.load(valid + tokens, mask=on_grid, other=0) != 0)
    return on_grid


@triton.jit
def load_rows(base, rows, stride, exists, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """(rows, BLOCK_D) values of some rows, 0 where they do not exist or the head dim ends."""
    columns = tl.arange(0, BLOCK_D)
    pointers = base + rows.to(tl.int64)[:, None] * stride + columns[None, :]
    if D == BLOCK_D:
        return tl.load(pointers, mask=exists[:, None], other=0.0)
    return tl.load(pointers, mask=exists[:, None] & (columns < D)[None, :], other=0.0)
