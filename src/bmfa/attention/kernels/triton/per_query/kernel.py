"""What each rule asks of the blocks of one level, for a tile of queries.

Blocks are (Q, n), their children (Q, 4, n); weights are the shares of the children in their block. What
a rule carries upwards, it finds at the children in `below`; tokens carry nothing. Scores are over tau
and in units of log 2, so that exponentials are powers of 2.
"""

import triton
import triton.language as tl

# Tuples grow as a static loop unrolls.
# mypy: disable-error-code=assignment


# What counts as 0: so many roundings of float32, as in `bmfa.trees.pyramid`.
ROUNDING = tl.constexpr(8 * 2.0**-23)
LOG_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def power(x, FINE: tl.constexpr):
    """2^x, or where FINE 2^x - 1 to within rounding of itself; x <= 0, or barely above."""
    result = tl.exp2(x)
    if FINE:
        near = x * LOG_2
        series = 1 / 5040 + near * (1 / 40320)
        series = 1 / 720 + near * series
        series = 1 / 120 + near * series
        series = 1 / 24 + near * series
        series = 1 / 6 + near * series
        series = 1 / 2 + near * series
        result = tl.where(x > -0.7, near + near * near * series, result - 1.0)
    return result


@triton.jit
def logarithm(x, FINE: tl.constexpr):
    """log2 of x, or where FINE of 1 + x: the inverse of `power`."""
    if FINE:
        whole = 1.0 + x
        flat = whole == 1.0
        slope = x / tl.where(flat, 1.0, whole - 1.0)  # undoes the rounding of the sum
        result = tl.where(flat, x / LOG_2, tl.log2(whole) * slope)
    else:
        result = tl.log2(x)
    return result


@triton.jit
def settle(value, terms):
    """The value, or 0 where it is no larger than the rounding of what it was computed from."""
    return tl.where(value > terms * ROUNDING, value, 0.0)


@triton.jit
def block_step(children, weights, magnitude, DEEPEST: tl.constexpr):
    """The largest child mean, offsets from it, their mean and the mean of each block.

    A spread within the rounding of scores of that magnitude is none; tokens are exact.
    """
    largest = tl.max(children, 1)
    offsets = children - largest[:, None, :]
    shift = tl.sum(weights * offsets, 1)
    mean = largest + shift
    if not DEEPEST:
        flat = tl.abs(shift) <= magnitude[:, None] * ROUNDING
        offsets = tl.where(flat[:, None, :], 0.0, offsets)
        shift = tl.where(flat, 0.0, shift)
    return largest, offsets, shift, mean


@triton.jit
def gamma_exceeds(offsets, weights, shift, threshold, FINE: tl.constexpr):
    """Gamma > threshold, without its logarithm: sum_C w_C 2^offset > 2^(shift + threshold)."""
    lift = tl.sum(weights * power(offsets, FINE), 1)
    bar = tl.maximum(tl.abs(shift) * ROUNDING, threshold)
    return lift > power(shift + bar, FINE)


@triton.jit
def exact_gaps(offsets, weights, shift, below, FINE: tl.constexpr, DEEPEST: tl.constexpr):
    """The exact gap from those of the children: log sum_C w_C 2^(offset + gap) - shift."""
    top = tl.zeros_like(shift)
    if not DEEPEST:
        offsets += below
        top = tl.max(offsets, 1)
        offsets -= top[:, None, :]
    lift = tl.sum(weights * power(offsets, FINE), 1)
    return settle(top + logarithm(lift, FINE) - shift, tl.abs(top) + tl.abs(shift))


@triton.jit
def variances(offsets, weights, shift, below, DEEPEST: tl.constexpr):
    """The population variance from those of the children."""
    apart = offsets - shift[:, None, :]
    spread = apart * apart
    if not DEEPEST:
        spread += below
    return tl.sum(weights * spread, 1)


@triton.jit
def recovered(offsets, weights, shift, mass, scale, FINE: tl.constexpr, DEEPEST: tl.constexpr):
    """The share of Z that each split recovers, and 1 / Z; `mass` is n 2^largest of each block."""
    lift = tl.sum(weights * power(offsets, FINE), 1)
    if DEEPEST:
        held = 1.0 + lift if FINE else lift
        scale = 1.0 / tl.sum(mass * held, 1)
    flat = power(shift, FINE)
    excess = lift - flat
    if FINE:
        excess = settle(excess, tl.abs(flat))
    return excess * mass * scale[:, None], scale


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


@triton.jit
def rows_of(base, index, inside, stride, width, WIDTH: tl.constexpr):
    """(n, WIDTH) the tokens of one head at an index, 0 where not inside."""
    column = tl.arange(0, WIDTH)
    return tl.load(
        base + index.to(tl.int64)[:, None] * stride + column[None, :],
        mask=inside[:, None] & (column < width)[None, :],
        other=0.0,
    )


@triton.jit
def screened_attention_kernel(
    q, k, v, output, marks, slots, table, coins,
    q_batch, q_head, q_token, k_batch, k_head, k_token, v_batch, v_head, v_token,
    o_batch, o_head, o_token,
    heads, queries, width, value_width, scale, threshold,
    RULE: tl.constexpr, FINE: tl.constexpr, DEPTH: tl.constexpr, LIMIT: tl.constexpr,
    PREFIX: tl.constexpr, PREFIX_TILE: tl.constexpr, WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr, WORDS: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    """Attend with QUERIES queries of one head of one picture; the scale makes powers of 2."""
    head = tl.program_id(1)
    batch, part = (head // heads).to(tl.int64), (head % heads).to(tl.int64)
    rows = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    exists = rows < queries
    tree = head.to(tl.int64) * queries + rows
    k += batch * k_batch + part * k_head
    v += batch * v_batch + part * v_head
    query = rows_of(q + batch * q_batch + part * q_head, rows, exists, q_token, width, WIDTH)
    slot = tl.load(slots + tl.arange(0, 4**DEPTH))
    every = slot >= 0
    keys = rows_of(k, slot, every, k_token, width, WIDTH)
    scores = tl.dot(query, tl.trans(keys), input_precision="tf32x3") * scale  # (Q, 4^D)
    flips = tl.zeros((QUERIES,), tl.int32)
    if RULE == "random-quadrants":
        flips = tl.load(coins + tree, mask=exists, other=0).to(tl.int32)
    means, wanted, peaks = ascend(
        scores, table, flips, threshold, RULE, FINE, DEPTH, LIMIT, QUERIES
    )
    held, split = descend(means, wanted, marks + tree * WORDS, exists, DEPTH, LIMIT, QUERIES)

    top = tl.max(tl.where(split, peaks, held), 1)
    if PREFIX > 0:
        early = tl.arange(0, PREFIX_TILE)
        first = early < PREFIX
        before = tl.trans(rows_of(k, early, first, k_token, width, WIDTH))
        before = tl.dot(query, before, input_precision="tf32x3") * scale
        before = tl.where(first[None, :], before, float("-inf"))
        top = tl.maximum(top, tl.max(before, 1))
    # Every slot of a block at the deepest level has a quarter of the block's weight.
    weight = tl.log2(0.25 * entry(table, 0, DEPTH - 1, DEPTH))[None, :] - top[:, None]
    leaf = widen(held, QUERIES, 4 ** (DEPTH - 1))
    logits = tl.where(widen(split, QUERIES, 4 ** (DEPTH - 1)), scores, leaf)
    share = tl.exp2(logits + widen(weight, QUERIES, 4 ** (DEPTH - 1)))
    total = tl.sum(share, 1)
    values = rows_of(v, slot, every, v_token, value_width, VALUE_WIDTH)
    result = tl.dot(share.to(values.dtype), values, input_precision="tf32x3")
    if PREFIX > 0:
        share = tl.exp2(before - top[:, None])
        total += tl.sum(share, 1)
        values = rows_of(v, early, first, v_token, value_width, VALUE_WIDTH)
        result = tl.dot(share.to(values.dtype), values, result, input_precision="tf32x3")
    column = tl.arange(0, VALUE_WIDTH)
    output += batch * o_batch + part * o_head
    tl.store(
        output + rows.to(tl.int64)[:, None] * o_token + column[None, :],
        (result / total[:, None]).to(output.dtype.element_ty),
        mask=exists[:, None] & (column < value_width)[None, :],
    )
