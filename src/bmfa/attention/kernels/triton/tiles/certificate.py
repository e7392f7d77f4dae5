"""The free energy that the mean tiles lose, exactly, for every query: one more pass over the keys."""

import triton
import triton.language as tl

from bmfa.attention.kernels.triton.tiles.tokens import LOG2E, existing, load_rows, tokens_of


@triton.jit
def add_mass(top, mass, other, more):
    """The sum of `mass` of scale 2^top and `more` of scale 2^other; a scale of -inf is nothing."""
    higher = tl.maximum(top, other)
    level = tl.where(higher == float("-inf"), 0.0, higher)
    return higher, mass * tl.exp2(top - level) + more * tl.exp2(other - level)


@triton.jit
def score_tile(
    asked, k, valid, index, k_row, height, width, across, binary,
    D: tl.constexpr, BLOCK_D: tl.constexpr, SIDE: tl.constexpr,
    ALIGNED: tl.constexpr, MASKED: tl.constexpr, RAGGED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores (base 2) of a tile, -inf where there is no token, their mean, and how many there are."""
    slots = tl.arange(0, SIDE * SIDE)
    tokens, inside = tokens_of(index, slots, height, width, across, ALIGNED, SIDE)
    exists = existing(valid, tokens, inside, MASKED)
    keys = load_rows(k, tokens, k_row, exists, D, BLOCK_D)
    scores = tl.dot(asked, tl.trans(keys), input_precision=PRECISION) * binary
    total = tl.sum(scores, 1)  # keys that do not exist are 0, and so are their scores
    count = SIDE * SIDE * 1.0
    if MASKED or RAGGED:
        count = tl.sum(exists.to(tl.float32), 0)
        scores = tl.where(exists[None, :], scores, float("-inf"))
    return scores, total / tl.maximum(count, 1.0), count


@triton.jit
def certify(
    q, k, valid, expanded, longest, bounds,
    q_batch, q_head, q_row, k_batch, k_head, k_row,
    heads, prefix, height, width, across, tiles, groups, factor, per_score, always,
    D: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr, SIDE: tl.constexpr,
    PREFIX: tl.constexpr, ALIGNED: tl.constexpr, MASKED: tl.constexpr, RAGGED: tl.constexpr,
    PRECISION: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """Program (query group, head): E / tau = log Z - log Z~ of each of its queries, rounded upwards.

    Z adds up the tokens; Z~ takes n exp(mean score) for a tile that stays. No mean key is read: the
    mean of the scores is at hand, and its rounding is that of the scores. 0 where no tile stays.
    Where the norms (`longest` is the longest key of the head) allow no score beyond 2^PLAIN, there is
    no maximum to look for. `per_score` times the largest such score, and `always`, are added for what
    rounding may have taken.
    """
    SLOTS: tl.constexpr = SIDE * SIDE
    QUERIES: tl.constexpr = GROUP * SLOTS
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
    queries = tl.arange(0, QUERIES)
    tile = group * GROUP + queries // SLOTS
    tokens, on_grid = tokens_of(tile, queries % SLOTS, height, width, across, ALIGNED, SIDE)
    on_grid = on_grid & (tile < tiles)
    present = existing(valid, tokens, on_grid, MASKED)
    asked = load_rows(q, tokens, q_row, present, D, BLOCK_D)
    binary = factor * LOG2E
    exact_top = tl.full((QUERIES,), float("-inf"), tl.float32)
    exact = tl.zeros((QUERIES,), tl.float32)
    if PREFIX > 0:
        before = tl.arange(0, PREFIX)
        own = load_rows(k, before, k_row, before < prefix, D, BLOCK_D)
        own_scores = tl.dot(asked, tl.trans(own), input_precision=PRECISION) * binary
        own_scores = tl.where((before < prefix)[None, :], own_scores, float("-inf"))
        exact_top = tl.max(own_scores, 1)
        exact = tl.sum(tl.exp2(own_scores - exact_top[:, None]), 1)
    coarse_top, coarse = exact_top, exact
    k += prefix * k_row
    some = False
    wide_asked = asked.to(tl.float32)
    reach = tl.sqrt(tl.sum(wide_asked * wide_asked, 1)) * tl.load(longest + wide) * tl.abs(factor)
    if tl.max(reach, 0) * LOG2E < PLAIN:
        coarse = exact * tl.exp2(exact_top)
        exact = coarse
        for index in range(tiles):
            scores, mean, count = score_tile(
                asked, k, valid, index, k_row, height, width, across, binary,
                D, BLOCK_D, SIDE, ALIGNED, MASKED, RAGGED, PRECISION,
            )  # fmt: skip
            mass = tl.sum(tl.exp2(scores), 1)
            stays = (tl.load(expanded + index) == 0) & (count > 1.0)
            some = some | stays
            exact += mass
            coarse += tl.where(stays, count * tl.exp2(mean), mass)
        exact_top = tl.zeros((QUERIES,), tl.float32)
        coarse_top = exact_top
    else:
        for index in range(tiles):
            scores, mean, count = score_tile(
                asked, k, valid, index, k_row, height, width, across, binary,
                D, BLOCK_D, SIDE, ALIGNED, MASKED, RAGGED, PRECISION,
            )  # fmt: skip
            top = tl.max(scores, 1)
            level = tl.where(top == float("-inf"), 0.0, top)
            mass = tl.sum(tl.exp2(scores - level[:, None]), 1)
            stays = (tl.load(expanded + index) == 0) & (count > 1.0)
            some = some | stays
            exact_top, exact = add_mass(exact_top, exact, top, mass)
            # A bright minority may lie so far above its mean that the two sums share no scale.
            coarse_top, coarse = add_mass(
                coarse_top, coarse, tl.where(stays, mean, top), tl.where(stays, count, mass)
            )
    apart = (exact_top - coarse_top) + (tl.log2(exact) - tl.log2(coarse))
    bound = tl.maximum(apart * (1.000001 / LOG2E), 0.0) + per_score * reach + always
    bound = tl.where(bound == bound, bound, float("inf"))  # nothing is known of what is no number
    bound = tl.where(some & present, bound, 0.0)
    tl.store(bounds + wide * (prefix + height * width) + prefix + tokens, bound, mask=on_grid)
    if group == 0 and PREFIX > 0:
        first = tl.arange(0, PREFIX)
        tl.store(bounds + wide * (prefix + height * width) + first, 0.0, mask=first < prefix)
