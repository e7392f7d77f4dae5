"""What the mean values of the tiles that stay lose at the representative."""

import triton
import triton.language as tl

from bmfa.attention.kernels.triton.tiles.tokens import LOG2E, existing, load_rows, tokens_of


@triton.jit
def residual(
    k, v, valid, vbar, qbar, words, tops, lost,
    k_batch, k_head, k_row, v_batch, v_head, v_row,
    heads, prefix, height, width, across, tiles, first, rows, groups, share, factor,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr, LOOP: tl.constexpr,
    SIDE: tl.constexpr, ALIGNED: tl.constexpr, MASKED: tl.constexpr, RAGGED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (part, representatives, head): sum of exp(score - top) (value - mean value)."""
    part, block, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    batch, place, wide = (
        (head // heads).to(tl.int64),
        (head % heads).to(tl.int64),
        head.to(tl.int64),
    )
    k += batch * k_batch + place * k_head + prefix * k_row
    v += batch * v_batch + place * v_head + prefix * v_row
    valid += batch * height * width
    local = block * ROWS + tl.arange(0, ROWS)
    real = local < rows
    asked = load_rows(qbar + wide * groups * D, first + local, D, real, D, BLOCK_D)
    binary = factor * LOG2E
    top = tl.load(tops + wide * rows + local, mask=real, other=0.0) * LOG2E
    marks = words + (wide * groups + first + local.to(tl.int64)) * tl.cdiv(tiles, 32)
    slots, columns, members = tl.arange(0, SIDE * SIDE), tl.arange(0, BLOCK_D), tl.arange(0, TILES)
    total = tl.zeros((ROWS, BLOCK_D), tl.float32)
    for start in range(part * share, tl.minimum(part * share + share, tiles), LOOP):
        word = tl.load(marks + start // 32, mask=real, other=0)
        masses = tl.zeros((ROWS, TILES), tl.float32)
        for member in range(LOOP):
            tile = start + member
            tokens, on_grid = tokens_of(tile, slots, height, width, across, ALIGNED, SIDE)
            exists = existing(valid, tokens, on_grid & (tile < tiles), MASKED)
            keys = load_rows(k, tokens, k_row, exists, D, BLOCK_D)
            values = load_rows(v, tokens, v_row, exists, D, BLOCK_D)
            stays = ((word >> (tile % 32)) & 1) != 0
            scores = tl.dot(asked, tl.trans(keys), input_precision=PRECISION) * binary
            # A tile that stays lies below the top; one that does not must not overflow.
            level = tl.where(stays, top, float("inf"))
            weights = tl.exp2(scores - level[:, None])
            if MASKED or RAGGED:
                weights = tl.where(exists[None, :], weights, 0.0)
            weights = weights.to(values.dtype)
            total = tl.dot(weights, values, total, input_precision=PRECISION)
            mass = tl.sum(weights.to(tl.float32), 1)
            masses = tl.where((members == member)[None, :], mass[:, None], masses)
        places = start + members
        known = (members < LOOP) & (places < tiles)
        means = load_rows(vbar + wide * tiles * D, places, D, known, D, BLOCK_D)
        total -= tl.dot(masses, means.to(tl.float32), input_precision="tf32x3")
    places = (wide * rows + local.to(tl.int64)) * tl.num_programs(0) + part
    stored = real[:, None] & (columns < D)[None, :]
    pointers = lost + places[:, None] * D + columns[None, :]
    tl.store(pointers, total.to(lost.dtype.element_ty), mask=stored)
