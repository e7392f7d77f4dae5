"""One pass over q, k and v: means of tiles and groups, first-order matrix, prefix queries.

Sums of tiles are rows of a product with a one-hot matrix, so that no reduction crosses warps.
"""

import triton
import triton.language as tl

from bmfa.attention.kernels.triton.tiles.tokens import LOG2E, existing, load_rows, tokens_of


@triton.jit
def absorb(top, mass, output, logits, values, PRECISION: tl.constexpr):
    """Take logits (base 2) and values into a running softmax; every accumulator is rescaled."""
    higher = tl.maximum(top, tl.max(logits, 1))
    level = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp2(logits - level[:, None])
    scale = tl.exp2(top - level)
    mass = mass * scale + tl.sum(weights, 1)
    output = output * scale[:, None]
    output += tl.dot(weights.to(values.dtype), values, input_precision=PRECISION)
    return higher, mass, output


@triton.jit
def squared(tile):
    """The sum of the squares."""
    wide = tile.to(tl.float32)
    return tl.sum(tl.sum(wide * wide, 1), 0)


@triton.jit
def spread(squares, means):
    """The mean squared distance from the means: 0 where rounding alone may leave that much, and where
    squares are beyond single precision."""
    apart = squares - tl.sum(means * means, 1)
    return tl.where(apart > 2e-6 * squares, apart, 0.0)


@triton.jit
def pool(
    q, k, v, valid, kbar, vbar, qbar, key_spread, query_spread, counts, cross_parts,
    prefix_tops, prefix_masses, prefix_outputs,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    heads, prefix, height, width, across, tiles, groups, factor,
    D: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr, SIDE: tl.constexpr,
    TILES: tl.constexpr, PREFIX: tl.constexpr,
    ALIGNED: tl.constexpr, MASKED: tl.constexpr, RAGGED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (part, head): TILES tiles, its part of the first-order matrix and prefix outputs."""
    SLOTS: tl.constexpr = SIDE * SIDE
    part, head = tl.program_id(0), tl.program_id(1)
    batch, place, wide = (
        (head // heads).to(tl.int64),
        (head % heads).to(tl.int64),
        head.to(tl.int64),
    )
    q += batch * q_batch + place * q_head
    k += batch * k_batch + place * k_head
    v += batch * v_batch + place * v_head
    valid += batch * height * width
    rows, slots, columns = tl.arange(0, SLOTS), tl.arange(0, SLOTS), tl.arange(0, BLOCK_D)
    count = tl.zeros((SLOTS,), tl.float32)
    key_sums = tl.zeros((SLOTS, BLOCK_D), tl.float32)
    value_sums = tl.zeros((SLOTS, BLOCK_D), tl.float32)
    query_sums = tl.zeros((SLOTS, BLOCK_D), tl.float32)
    key_squares = tl.zeros((SLOTS,), tl.float32)
    query_squares = tl.zeros((SLOTS,), tl.float32)
    moment = tl.zeros((BLOCK_D, BLOCK_D), tl.float32)
    if PREFIX > 0:
        before = tl.arange(0, PREFIX)
        asked = load_rows(q, before, q_row, before < prefix, D, BLOCK_D)
        binary = factor * LOG2E
        top = tl.full((PREFIX,), float("-inf"), tl.float32)
        mass = tl.zeros((PREFIX,), tl.float32)
        output = tl.zeros((PREFIX, BLOCK_D), tl.float32)
        if part == 0:
            own = load_rows(k, before, k_row, before < prefix, D, BLOCK_D)
            own_values = load_rows(v, before, v_row, before < prefix, D, BLOCK_D)
            own_logits = tl.dot(asked, tl.trans(own), input_precision=PRECISION) * binary
            own_logits = tl.where((before < prefix)[None, :], own_logits, float("-inf"))
            top, mass, output = absorb(top, mass, output, own_logits, own_values, PRECISION)
    q += prefix * q_row
    k += prefix * k_row
    v += prefix * v_row
    for member in range(TILES):
        tile = part * TILES + member
        tokens, on_grid = tokens_of(tile, slots, height, width, across, ALIGNED, SIDE)
        exists = existing(valid, tokens, on_grid & (tile < tiles), MASKED)
        keys = load_rows(k, tokens, k_row, exists, D, BLOCK_D)
        values = load_rows(v, tokens, v_row, exists, D, BLOCK_D)
        queries = load_rows(q, tokens, q_row, exists, D, BLOCK_D)
        mine = (rows[:, None] == member) & (slots[None, :] >= 0)
        group = (rows[:, None] == member // GROUP) & (slots[None, :] >= 0)
        key_sums = tl.dot(mine.to(keys.dtype), keys, key_sums, input_precision=PRECISION)
        value_sums = tl.dot(mine.to(keys.dtype), values, value_sums, input_precision=PRECISION)
        query_sums = tl.dot(group.to(keys.dtype), queries, query_sums, input_precision=PRECISION)
        moment = tl.dot(tl.trans(keys), values, moment, input_precision=PRECISION)
        key_squares = tl.where(rows == member, squared(keys), key_squares)
        query_squares += tl.where(rows == member // GROUP, squared(queries), 0.0)
        if MASKED or RAGGED:
            count = tl.where(rows == member, tl.sum(exists.to(tl.float32), 0), count)
        if PREFIX > 0:
            logits = tl.dot(asked, tl.trans(keys), input_precision=PRECISION) * binary
            logits = tl.where(exists[None, :], logits, float("-inf"))
            top, mass, output = absorb(top, mass, output, logits, values, PRECISION)

    places = part * TILES + rows
    known = (rows < TILES) & (places < tiles)
    if not (MASKED or RAGGED):
        count = tl.where(known, SLOTS * 1.0, 0.0)
    some = tl.maximum(count, 1.0)[:, None]
    inside = columns < D
    lines = (wide * tiles + places)[:, None] * D + columns[None, :]
    stored = known[:, None] & inside[None, :]
    key_means = key_sums / some
    apart = spread(key_squares / tl.maximum(count, 1.0), key_means)
    tl.store(key_spread + wide * tiles + places, apart, mask=known)
    tl.store(kbar + lines, key_means.to(kbar.dtype.element_ty), mask=stored)
    tl.store(vbar + lines, (value_sums / some).to(vbar.dtype.element_ty), mask=stored)
    tl.store(counts + wide * tiles + places, count, mask=known)
    moment -= tl.dot(tl.trans(key_sums), value_sums / some, input_precision="tf32x3")
    square = columns[:, None] * D + columns[None, :]
    place = (wide * tl.num_programs(0) + part) * (D * D)
    tl.store(
        cross_parts + place + square,
        moment.to(cross_parts.dtype.element_ty),
        mask=inside[:, None] & inside[None, :],
    )
    asking = tl.zeros((SLOTS,), tl.float32)
    for member in tl.static_range(TILES):
        there = tl.sum(tl.where(rows == member, count, 0.0), 0)
        asking += tl.where(rows == member // GROUP, there, 0.0)
    line = part * (TILES // GROUP) + rows
    real = (rows < TILES // GROUP) & (line < groups)
    stored = real[:, None] & inside[None, :]
    asking = tl.maximum(asking, 1.0)
    means = query_sums / asking[:, None]
    apart = spread(query_squares / asking, means) * (factor * factor / (2 * D))
    tl.store(query_spread + wide * groups + line, apart, mask=real)
    target = qbar + (wide * groups + line)[:, None] * D + columns[None, :]
    tl.store(target, means.to(qbar.dtype.element_ty), mask=stored)
    if PREFIX > 0:
        place = (wide * tl.num_programs(0) + part) * prefix + before
        tl.store(prefix_tops + place, top, mask=before < prefix)
        tl.store(prefix_masses + place, mass, mask=before < prefix)
        stored = (before < prefix)[:, None] & inside[None, :]
        tl.store(prefix_outputs + place[:, None] * D + columns[None, :], output, mask=stored)
