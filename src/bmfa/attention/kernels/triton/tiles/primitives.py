"""Device functions that the kernels for tiles share: addresses, masked loads, online softmax.

A tile has S = SIDE * SIDE slots, one for each of its tokens in raster order. Slots beyond the edge of
the grid hold no token. Tensors of tokens have any strides but a contiguous head dimension. k and v have
one head for HEADS_PER_KEY consecutive heads of q.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
# Replaces a sum of 0, where no token exists. Any other sum is at least 1: its largest term is exp(0).
SMALLEST_SUM = tl.constexpr(1e-30)


@triton.jit
def split_batch_head(batch_head, H):
    """Return the batch index, the head index and their joint index, all in int64 for addresses."""
    return (batch_head // H).to(tl.int64), (batch_head % H).to(tl.int64), batch_head.to(tl.int64)


@triton.jit
def square_unit(x):
    """Return a power of two near the largest of numbers, by which they are divided before they are
    squared: squares of float32 numbers below 1e-19 or above 1e19 are none."""
    bits = tl.max(tl.abs(x)).to(tl.int32, bitcast=True) & 0x7F800000
    return tl.minimum(tl.maximum(bits, 0x01000000), 0x7E000000).to(tl.float32, bitcast=True)


@triton.jit
def sum_products(x, y, AXIS: tl.constexpr):
    """Return the float64 sums of x * y over a dimension."""
    x_unit, y_unit = square_unit(x), square_unit(y)
    total = tl.sum((x / x_unit) * (y / y_unit), AXIS)
    return total.to(tl.float64) * x_unit.to(tl.float64) * y_unit.to(tl.float64)


@triton.jit
def group_tokens(
    group, slots, height, width, tiles_across,
    SIDE: tl.constexpr, GROUP_TILES: tl.constexpr,
):  # fmt: skip
    """Return the token in each slot of GROUP_TILES tiles side by side, and a mask of the slots that are
    on the grid.

    Tokens are numbered from the first spatial token. `height` is that of a frame, and tiles lie
    inside of a frame.
    """
    COLUMNS: tl.constexpr = SIDE * GROUP_TILES
    groups_across = (tiles_across + GROUP_TILES - 1) // GROUP_TILES
    group_row = group // groups_across
    frame_rows = (height + SIDE - 1) // SIDE
    row = (group_row % frame_rows) * SIDE + slots // COLUMNS
    column = (group % groups_across) * COLUMNS + slots % COLUMNS
    token = ((group_row // frame_rows) * height + row) * width + column
    return token, (row < height) & (column < width)


@triton.jit
def tile_tokens(tile, slots, height, width, tiles_across, SIDE: tl.constexpr):
    """Return the token in each slot of a tile, and a mask of the slots that are on the grid."""
    return group_tokens(tile, slots, height, width, tiles_across, SIDE, 1)


@triton.jit
def valid_tokens(valid, tokens, on_grid, MASKED: tl.constexpr):
    """Return the mask of tokens that are on the grid and, with a mask, valid."""
    if MASKED:
        return on_grid & (tl.load(valid + tokens, mask=on_grid, other=0) != 0)
    return on_grid


@triton.jit
def load_rows(base, rows, stride, mask, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load (n, BLOCK_D) rows of D numbers, 0 outside of the mask and beyond D."""
    columns = tl.arange(0, BLOCK_D)
    pointers = base + rows.to(tl.int64)[:, None] * stride + columns[None, :]
    if D == BLOCK_D:
        return tl.load(pointers, mask=mask[:, None], other=0.0)
    return tl.load(pointers, mask=mask[:, None] & (columns < D)[None, :], other=0.0)


@triton.jit
def probe_queries(
    q, stride_qt, probe_tokens, slots, num_probes, query_prefix,
    D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Load the queries (n, BLOCK_D) of slots: probes first, then those before the grid; 0 for the
    others."""
    is_probe = slots < num_probes
    tokens = tl.load(probe_tokens + slots, mask=is_probe, other=-1)
    is_prefix = (slots >= num_probes) & (slots < num_probes + query_prefix)
    tokens = tl.where(is_prefix, slots - num_probes, tokens)
    return load_rows(q, tokens, stride_qt, tokens >= 0, D, BLOCK_D)


@triton.jit
def online_softmax(m_i, l_i, acc, logits, values, PRECISION: tl.constexpr):
    """Add a block of logits (base 2) and its values to a running softmax.

    `m_i` (n,) is the running maximum, `l_i` (n,) the sum of weights 2^(logit - m_i), and `acc`
    (n, BLOCK_D) the sum of weighted values. All are rescaled when the maximum moves.
    """
    m_new = tl.maximum(m_i, tl.max(logits, 1))
    shift = tl.where(m_new == float("-inf"), 0.0, m_new)
    weights = tl.exp2(logits - shift[:, None])
    scale = tl.exp2(m_i - shift)
    l_i = l_i * scale + tl.sum(weights, 1)
    acc = acc * scale[:, None]
    acc += tl.dot(weights.to(values.dtype), values, input_precision=PRECISION)
    return m_new, l_i, acc
