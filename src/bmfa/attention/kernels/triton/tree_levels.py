"""Trees of a tile of queries, level by level: block means upwards, splits and leaf means downwards.

A grid is drawn out to a complete quadtree of 4^D slots: a side that does not split any more goes to both
halves, each with half the weight, so that every slot holds a token and the four slots of a block at the
deepest level weigh the same. The slot of a token spells its path with the root's choice in the lowest
digit: the four children of a block lie 4^level slots apart and not beside each other, and sums over
children of the large levels stay inside a thread.

The table has three numbers for each block, levels one after the other: the weight in tokens, the share
of the block that this copy of it stands for, and that share of the leaves a split adds.
"""

# Tuples grow as a static loop unrolls.
# mypy: disable-error-code=assignment

import triton
import triton.language as tl

from bmfa.attention.kernels.triton.tree_rules import (
    block_step,
    exact_gaps,
    gamma_exceeds,
    recovered,
    variances,
)

# The levels above this one have 21 blocks together, and their marks share the first word.
WORD_LEVEL = tl.constexpr(3)


@triton.jit
def entry(table, FIELD: tl.constexpr, LEVEL: tl.constexpr, DEPTH: tl.constexpr):
    """(n,) one of the numbers of the table for the blocks of a level."""
    return tl.load(table + FIELD * (4**DEPTH // 3) + 4**LEVEL // 3 + tl.arange(0, 4**LEVEL))


@triton.jit
def climb(
    below, carried, magnitude, top, scale, table, coins, threshold,
    RULE: tl.constexpr, FINE: tl.constexpr, LEVEL: tl.constexpr, DEPTH: tl.constexpr,
    LIMIT: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    """One level up: means of its blocks, the splits asked for, and what the next level needs."""
    nodes: tl.constexpr = 4**LEVEL
    deepest: tl.constexpr = LEVEL == DEPTH - 1
    count = entry(table, 0, LEVEL, DEPTH)
    weights = 0.25
    if not deepest:
        sizes = tl.reshape(entry(table, 0, LEVEL + 1, DEPTH), (4, nodes))
        weights = (sizes / count[None, :])[None, :, :]
    children = tl.reshape(below, (QUERIES, 4, nodes))
    carried = tl.reshape(carried, (QUERIES, 4, nodes))
    largest, offsets, shift, mean = block_step(children, weights, magnitude, deepest)
    if deepest:
        magnitude = tl.max(tl.maximum(tl.abs(largest), tl.abs(shift)), 1)
        top = tl.max(largest, 1)
    carry = mean
    want = tl.full((QUERIES, nodes), True, tl.int1)
    if RULE == "gamma":
        want = gamma_exceeds(offsets, weights, shift, threshold, FINE)
    elif RULE == "exact-gap" or RULE == "quadrant-gap":
        carry = exact_gaps(offsets, weights, shift, carried, FINE, deepest)
        want = carry > threshold
    elif RULE == "variance":
        carry = variances(offsets, weights, shift, carried, deepest)
        want = carry > threshold
    elif RULE == "mass" or RULE == "optimal":
        mass = count[None, :] * tl.exp2(largest - top[:, None])
        gain, scale = recovered(offsets, weights, shift, mass, scale, FINE, deepest)
        if RULE == "mass":
            want = gain > threshold * entry(table, 1, LEVEL, DEPTH)[None, :]
        else:
            # What a split gains with the best splits below it, less the penalty of its leaves.
            net = gain - threshold * entry(table, 2, LEVEL, DEPTH)[None, :]
            if not deepest:
                net += tl.sum(carried, 1)
            want = net > 0.0
            carry = tl.maximum(net, 0.0)
            if LEVEL == LIMIT:  # offers nothing to the blocks above
                carry = tl.zeros_like(net)
    elif RULE == "random-quadrants":
        want = ((coins[:, None] >> tl.arange(0, nodes)[None, :]) & 1) != 0
    else:  # fixed-depth
        want &= LEVEL < threshold
    if LEVEL != 1 and (RULE == "quadrant-gap" or RULE == "variance" or RULE == "random-quadrants"):
        want = tl.full((QUERIES, nodes), True, tl.int1)  # all of it, where a quadrant is kept
    return mean, want, largest, carry, magnitude, top, scale


@triton.jit
def ascend(
    scores, table, coins, threshold,
    RULE: tl.constexpr, FINE: tl.constexpr, DEPTH: tl.constexpr, LIMIT: tl.constexpr,
    QUERIES: tl.constexpr,
):  # fmt: skip
    """From the tokens up: means of the blocks, the splits asked for, and the largest score of each
    block at the deepest level.
    """
    magnitude = tl.zeros((QUERIES,), tl.float32)
    mean, want, peaks, carried, magnitude, top, scale = climb(
        scores, scores, magnitude, magnitude, magnitude, table, coins, threshold,
        RULE, FINE, DEPTH - 1, DEPTH, LIMIT, QUERIES,
    )  # fmt: skip
    means, wanted = (scores, mean), (want,)
    for step in tl.static_range(1, DEPTH):
        mean, want, _, carried, magnitude, top, scale = climb(
            mean, carried, magnitude, top, scale, table, coins, threshold,
            RULE, FINE, DEPTH - 1 - step, DEPTH, LIMIT, QUERIES,
        )  # fmt: skip
        means = means + (mean,)  # noqa: RUF005 (Triton knows no starred tuple)
        wanted = wanted + (want,)  # noqa: RUF005
    return means, wanted, peaks


@triton.jit
def widen(blocks, QUERIES: tl.constexpr, NODES: tl.constexpr):
    """(Q, 4 n) what each of n blocks has, at its four children."""
    spread = tl.broadcast_to(blocks[:, None, :], (QUERIES, 4, NODES))
    return tl.reshape(spread, (QUERIES, 4 * NODES))


@triton.jit
def mark(asking, marks, first, exists, LEVEL: tl.constexpr, QUERIES: tl.constexpr):
    """Bits of the (Q, n) blocks of one level: few are added to the first word, many are written."""
    nodes: tl.constexpr = 4**LEVEL
    bits = asking.to(tl.int32)
    if LEVEL < WORD_LEVEL:
        first += tl.sum(bits << (nodes // 3 + tl.arange(0, nodes))[None, :], 1)
    else:
        packed = tl.reshape(bits, (QUERIES, nodes // 32, 32)) << tl.arange(0, 32)[None, None, :]
        place = 1 + (nodes - 64) // 96 + tl.arange(0, nodes // 32)
        tl.store(marks[:, None] + place[None, :], tl.sum(packed, 2), mask=exists[:, None])
    return first


@triton.jit
def descend(
    means, wanted, marks, exists,
    DEPTH: tl.constexpr, LIMIT: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    """The mean of the leaf above each block of the deepest level, and which of these are split.

    Writes a bit for each split to `marks`; blocks at the depth limit are marked where they ask, and
    stay leaves.
    """
    held = means[DEPTH]
    asking = wanted[DEPTH - 1]
    first = mark(asking, marks, tl.zeros((QUERIES,), tl.int32), exists, 0, QUERIES)
    for level in tl.static_range(1, DEPTH):
        reached = widen(asking & (level - 1 < LIMIT), QUERIES, 4 ** (level - 1))
        held = tl.where(reached, means[DEPTH - level], widen(held, QUERIES, 4 ** (level - 1)))
        asking = reached & wanted[DEPTH - 1 - level]
        if level <= LIMIT:
            first = mark(asking, marks, first, exists, level, QUERIES)
    tl.store(marks, first, mask=exists)
    return held, asking & (DEPTH - 1 < LIMIT)
