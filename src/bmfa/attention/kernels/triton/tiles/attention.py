"""One online softmax over mean tiles, prefix tokens and the tokens of expanded tiles."""

import triton
import triton.language as tl

from bmfa.attention.kernels.triton.tiles.pool import absorb
from bmfa.attention.kernels.triton.tiles.tokens import LOG2E, existing, load_rows, tokens_of


@triton.jit
def attend(
    q, k, v, valid, kbar, vbar, qbar, counts, energy, gap, amounts, masses, cross, lost, output,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    o_batch, o_head, o_row,
    heads, prefix, height, width, across, tiles, first, rows, groups, shares, factor,
    D: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr, SIDE: tl.constexpr,
    COARSE: tl.constexpr, PREFIX: tl.constexpr, SHARES: tl.constexpr,
    ALIGNED: tl.constexpr, MASKED: tl.constexpr, RAGGED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (tile of queries, head): these queries against the list of their group."""
    SLOTS: tl.constexpr = SIDE * SIDE
    tile, head = tl.program_id(0) + first * GROUP, tl.program_id(1)
    row = tile // GROUP - first
    batch, place, wide = (
        (head // heads).to(tl.int64),
        (head % heads).to(tl.int64),
        head.to(tl.int64),
    )
    q += batch * q_batch + place * q_head + prefix * q_row
    k += batch * k_batch + place * k_head
    v += batch * v_batch + place * v_head
    valid += batch * height * width
    kbar += wide * tiles * D
    vbar += wide * tiles * D
    counts += wide * tiles
    line = wide * rows + row
    slots, columns = tl.arange(0, SLOTS), tl.arange(0, BLOCK_D)
    inside = columns < D
    tokens, present = tokens_of(tile, slots, height, width, across, ALIGNED, SIDE)
    asked = load_rows(q, tokens, q_row, present, D, BLOCK_D)
    # What the representative knows, asked for early and used after the mean tiles.
    amount = tl.load(amounts + wide * groups + first + row)
    kept = tl.load(masses + line)
    every = tl.arange(0, SHARES)
    given_back = tl.load(
        lost + (line * shares + every)[:, None] * D + columns[None, :],
        mask=(every < shares)[:, None] & inside[None, :], other=0.0,
    )  # fmt: skip
    mean = tl.load(qbar + (wide * groups + first + row) * D + columns, mask=inside, other=0.0)

    binary = factor * LOG2E
    top = tl.full((SLOTS,), float("-inf"), tl.float32)
    mass = tl.zeros((SLOTS,), tl.float32)
    result = tl.zeros((SLOTS, BLOCK_D), tl.float32)
    for start in range(0, tiles, COARSE):
        places = start + tl.arange(0, COARSE)
        known = places < tiles
        keys = load_rows(kbar, places, D, known, D, BLOCK_D)
        values = load_rows(vbar, places, D, known, D, BLOCK_D)
        bonus = tl.load(gap + line * tiles + places, mask=known, other=float("-inf"))
        if MASKED or RAGGED:
            count = tl.load(counts + places, mask=known, other=1.0)
            bonus = (bonus.to(tl.float32) + tl.log(tl.maximum(count, 1.0))) * LOG2E
        else:
            bonus = bonus.to(tl.float32) * LOG2E + 6.0  # log2 of the tile's 64 tokens
        logits = tl.dot(asked, tl.trans(keys), input_precision=PRECISION) * binary + bonus[None, :]
        top, mass, result = absorb(top, mass, result, logits, values, PRECISION)
    square = columns[:, None] * D + columns[None, :]
    within = inside[:, None] & inside[None, :]
    moment = tl.load(cross + wide * (D * D) + square, mask=within, other=0.0)
    apart = (asked.to(tl.float32) - mean.to(tl.float32)[None, :]).to(asked.dtype)
    linear = tl.dot(apart, moment, input_precision=PRECISION)
    loss = tl.sum(given_back.to(tl.float32), 0) / tl.where(kept > 0.0, kept, 1.0)
    result += mass[:, None] * (linear + loss[None, :])

    if PREFIX > 0:
        before = tl.arange(0, PREFIX)
        exact = load_rows(k, before, k_row, before < prefix, D, BLOCK_D)
        exact_values = load_rows(v, before, v_row, before < prefix, D, BLOCK_D)
        exact_logits = tl.dot(asked, tl.trans(exact), input_precision=PRECISION) * binary
        exact_logits = tl.where((before < prefix)[None, :], exact_logits, float("-inf"))
        top, mass, result = absorb(top, mass, result, exact_logits, exact_values, PRECISION)

    k += prefix * k_row
    v += prefix * v_row
    listed = (energy + line * tiles).to(tl.pointer_type(tl.int32))
    for index in range(amount):
        expanded = tl.load(listed + index)
        tokens_there, there = tokens_of(expanded, slots, height, width, across, ALIGNED, SIDE)
        exists = existing(valid, tokens_there, there, MASKED)
        fine = load_rows(k, tokens_there, k_row, exists, D, BLOCK_D)
        fine_values = load_rows(v, tokens_there, v_row, exists, D, BLOCK_D)
        fine_logits = tl.dot(asked, tl.trans(fine), input_precision=PRECISION) * binary
        if MASKED or RAGGED:
            fine_logits = tl.where(exists[None, :], fine_logits, float("-inf"))
        top, mass, result = absorb(top, mass, result, fine_logits, fine_values, PRECISION)

    result = result / tl.where(mass > 0.0, mass, 1.0)[:, None]
    output += batch * o_batch + place * o_head + prefix * o_row
    pointers = output + tokens.to(tl.int64)[:, None] * o_row + columns[None, :]
    tl.store(pointers, result.to(output.dtype.element_ty), mask=present[:, None] & inside[None, :])
