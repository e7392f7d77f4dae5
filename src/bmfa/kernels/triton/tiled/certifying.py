"""The free energy that the mean tiles lose, exactly, for every query: one more pass over the keys."""

import triton
import triton.language as tl

from bmfa.kernels.triton.tiled.tokens import LOG2E, existing, load_rows, tokens_of


@triton.jit
def add_mass(top, mass, other, more):
    """The sum of `mass` of scale 2^top and `more` of scale 2^other; a scale of -inf is nothing."""
    higher = tl.maximum(top, other)
    level = tl.where(higher == float("-inf"), 0.0, higher)
    return higher, mass * tl.exp2(top - level) + more * tl.exp2(other - level)


@triton.jit
def certify(
    q, k, valid, expanded, losses,
    q_batch, q_head, q_row, k_batch, k_head, k_row,
    heads, prefix, height, width, across, tiles, groups, factor,
    D: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr, SIDE: tl.constexpr,
    PREFIX: tl.constexpr, ALIGNED: tl.constexpr, MASKED: tl.constexpr, RAGGED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (query group, head): E / tau = log Z - log Z~ of the queries of GROUP tiles.

    Z adds up the tokens; Z~ takes n exp(mean score) for a tile that stays. No mean key is read: the
    mean of the scores is at hand, and its rounding is that of the scores. -inf where no tile stays.
    """
    SLOTS: tl.constexpr = SIDE * SIDE
    group, head = tl.program_id(0), tl.program_id(1)
    batch, place, wide = (
        (head // heads).to(tl.int64),
        (head % heads).to(tl.int64),
        head.to(tl.int64),
    )
    q += batch * q_batch + place * q_head + prefix * q_row
    k += batch * k_batch + place * k_head
    valid += batch * height * width
    expanded += (wide * groups + group) * tiles
    slots, queries = tl.arange(0, SLOTS), tl.arange(0, GROUP * SLOTS)
    tile = group * GROUP + queries // SLOTS
    tokens, on_grid = tokens_of(tile, queries % SLOTS, height, width, across, ALIGNED, SIDE)
    present = on_grid & (tile < tiles)
    asked = load_rows(q, tokens, q_row, present, D, BLOCK_D)
    binary = factor * LOG2E
    exact_top = tl.full((GROUP * SLOTS,), float("-inf"), tl.float32)
    exact = tl.zeros((GROUP * SLOTS,), tl.float32)
    if PREFIX > 0:
        before = tl.arange(0, PREFIX)
        own = load_rows(k, before, k_row, before < prefix, D, BLOCK_D)
        scores = tl.dot(asked, tl.trans(own), input_precision=PRECISION) * binary
        scores = tl.where((before < prefix)[None, :], scores, float("-inf"))
        exact_top = tl.max(scores, 1)
        exact = tl.sum(tl.exp2(scores - exact_top[:, None]), 1)
    coarse_top, coarse = exact_top, exact
    k += prefix * k_row
    some = False
    for index in range(tiles):
        there, inside = tokens_of(index, slots, height, width, across, ALIGNED, SIDE)
        exists = existing(valid, there, inside, MASKED)
        keys = load_rows(k, there, k_row, exists, D, BLOCK_D)
        scores = tl.dot(asked, tl.trans(keys), input_precision=PRECISION) * binary
        count = SLOTS * 1.0
        total = tl.sum(scores, 1)  # keys that do not exist are 0, and so are their scores
        if MASKED or RAGGED:
            count = tl.sum(exists.to(tl.float32), 0)
            scores = tl.where(exists[None, :], scores, float("-inf"))
        top = tl.max(scores, 1)
        level = tl.where(top == float("-inf"), 0.0, top)
        mass = tl.sum(tl.exp2(scores - level[:, None]), 1)
        stays = (tl.load(expanded + index) == 0) & (count > 1.0)
        some = some | stays
        exact_top, exact = add_mass(exact_top, exact, top, mass)
        # A bright minority may lie so far above its mean that the two sums share no scale.
        mean = total / tl.maximum(count, 1.0)
        coarse_top, coarse = add_mass(
            coarse_top, coarse, tl.where(stays, mean, top), tl.where(stays, count, mass)
        )
    apart = (exact_top - coarse_top) + (tl.log2(exact) - tl.log2(coarse))
    lost = tl.where(some, apart / LOG2E, float("-inf"))
    tl.store(losses + wide * height * width + tokens, lost, mask=present)
