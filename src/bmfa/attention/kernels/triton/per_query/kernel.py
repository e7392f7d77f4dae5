"""One kernel from q, k, v to outputs and trees on small grids: scores, splits, leaf means, softmax.

The grid is extended to a complete quadtree with 4^DEPTH slots. A side of one token, which does not
split, goes to both halves with half the weight each, so that every slot holds a token and the four
slots of a block at the deepest level have equal weights. The slot of a token spells its path with the
root's choice in the lowest digit: the four children of a block are 4^level slots apart, and sums over
the children of large levels stay inside a thread.

Blocks of a level are (BLOCK_Q, n), their children (BLOCK_Q, 4, n), with n = 4^level. Scores are divided
by tau and by log 2, so that exponentials are powers of 2. A level passes to the one above what the rule
needs of the children, as `carry`; tokens carry nothing.

`table` holds three numbers for each block, one level after the other (see `tables.py`).
"""

# Tuples grow as a static loop unrolls.
# mypy: disable-error-code=assignment

import triton
import triton.language as tl

from bmfa.attention.kernels.triton.per_query.tables import FIRST_WORD_LEVELS, PARTS, SHARE, WEIGHT
from bmfa.trees.pyramid import ROUNDINGS

ROUNDING = tl.constexpr(ROUNDINGS * 2.0**-23)  # a difference up to this share of its terms is 0
LOG_2 = tl.constexpr(0.6931471805599453)
# exp2(x) - 1 keeps its relative accuracy below this, and the series above it.
SERIES_FROM = tl.constexpr(-0.7)
WORD_LEVEL = tl.constexpr(FIRST_WORD_LEVELS)
WEIGHT_ROW, SHARE_ROW, PARTS_ROW = tl.constexpr(WEIGHT), tl.constexpr(SHARE), tl.constexpr(PARTS)


@triton.jit
def load_rows(base, index, mask, stride, D, BLOCK_D: tl.constexpr):
    """Load (n, BLOCK_D) rows of D numbers, 0 outside of the mask and beyond D."""
    column = tl.arange(0, BLOCK_D)
    return tl.load(
        base + index.to(tl.int64)[:, None] * stride + column[None, :],
        mask=mask[:, None] & (column < D)[None, :],
        other=0.0,
    )


@triton.jit
def load_table(table, ROW: tl.constexpr, LEVEL: tl.constexpr, DEPTH: tl.constexpr):
    """Load (n,) one of the three numbers of the blocks of a level."""
    return tl.load(table + ROW * (4**DEPTH // 3) + 4**LEVEL // 3 + tl.arange(0, 4**LEVEL))


@triton.jit
def exp2_fine(x, FINE: tl.constexpr):
    """Return 2^x, or if FINE 2^x - 1 to within rounding of itself, for x <= 0 within rounding."""
    result = tl.exp2(x)
    if FINE:
        y = x * LOG_2
        series = 1 / 5040 + y * (1 / 40320)
        series = 1 / 720 + y * series
        series = 1 / 120 + y * series
        series = 1 / 24 + y * series
        series = 1 / 6 + y * series
        series = 1 / 2 + y * series
        result = tl.where(x > SERIES_FROM, y + y * y * series, result - 1.0)
    return result


@triton.jit
def log2_fine(x, FINE: tl.constexpr):
    """Return log2(x), or if FINE log2(1 + x): the inverse of `exp2_fine`."""
    if FINE:
        total = 1.0 + x
        unchanged = total == 1.0
        correction = x / tl.where(unchanged, 1.0, total - 1.0)  # undoes the rounding of the sum
        result = tl.where(unchanged, x / LOG_2, tl.log2(total) * correction)
    else:
        result = tl.log2(x)
    return result


@triton.jit
def zero_if_rounding(value, terms):
    """Return the value, or 0 if it is within the rounding of the terms it was computed from."""
    return tl.where(value > terms * ROUNDING, value, 0.0)


@triton.jit
def block_means(children, weights, magnitude, DEEPEST: tl.constexpr):
    """Return the largest child mean, offsets from it, their mean (shift) and the block means.

    Offsets within the rounding of scores of that magnitude are 0; scores of tokens are exact.
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
    """Return Gamma > threshold without a logarithm: sum_C w_C 2^offset > 2^(shift + threshold)."""
    total = tl.sum(weights * exp2_fine(offsets, FINE), 1)
    bar = tl.maximum(tl.abs(shift) * ROUNDING, threshold)
    return total > exp2_fine(shift + bar, FINE)


@triton.jit
def block_gaps(offsets, weights, shift, child_gaps, FINE: tl.constexpr, DEEPEST: tl.constexpr):
    """Return the exact gaps from those of the children: log sum_C w_C 2^(offset + gap) - shift."""
    top = tl.zeros_like(shift)
    if not DEEPEST:
        offsets += child_gaps
        top = tl.max(offsets, 1)
        offsets -= top[:, None, :]
    total = tl.sum(weights * exp2_fine(offsets, FINE), 1)
    return zero_if_rounding(top + log2_fine(total, FINE) - shift, tl.abs(top) + tl.abs(shift))


@triton.jit
def block_variances(offsets, weights, shift, child_variances, DEEPEST: tl.constexpr):
    """Return the population variances from those of the children."""
    deviation = offsets - shift[:, None, :]
    squares = deviation * deviation
    if not DEEPEST:
        squares += child_variances
    return tl.sum(weights * squares, 1)


@triton.jit
def recovered_mass(
    offsets, weights, shift, mass, inverse_z, FINE: tl.constexpr, DEEPEST: tl.constexpr
):
    """Return the share of Z that each split recovers, and 1 / Z; `mass` is n 2^largest of a block."""
    total = tl.sum(weights * exp2_fine(offsets, FINE), 1)
    if DEEPEST:
        block_z = 1.0 + total if FINE else total
        inverse_z = 1.0 / tl.sum(mass * block_z, 1)
    at_mean = exp2_fine(shift, FINE)
    excess = total - at_mean
    if FINE:
        excess = zero_if_rounding(excess, tl.abs(at_mean))
    return excess * mass * inverse_z[:, None], inverse_z


@triton.jit
def decide_level(
    below, carry, magnitude, top, inverse_z, table, coins, threshold,
    RULE: tl.constexpr, FINE: tl.constexpr, LEVEL: tl.constexpr, DEPTH: tl.constexpr,
    MAX_DEPTH: tl.constexpr, BLOCK_Q: tl.constexpr,
):  # fmt: skip
    """Compute the means of the blocks of a level, whether they split, and what the next level needs.

    `magnitude`, `top` and `inverse_z` (BLOCK_Q,) belong to a query: the largest absolute score, the
    largest score and 1 / Z. The deepest level computes them.
    """
    nodes: tl.constexpr = 4**LEVEL
    deepest: tl.constexpr = LEVEL == DEPTH - 1
    count = load_table(table, WEIGHT_ROW, LEVEL, DEPTH)
    weights = 0.25
    if not deepest:
        sizes = tl.reshape(load_table(table, WEIGHT_ROW, LEVEL + 1, DEPTH), (4, nodes))
        weights = (sizes / count[None, :])[None, :, :]
    children = tl.reshape(below, (BLOCK_Q, 4, nodes))
    carry = tl.reshape(carry, (BLOCK_Q, 4, nodes))
    largest, offsets, shift, mean = block_means(children, weights, magnitude, deepest)
    if deepest:
        magnitude = tl.max(tl.maximum(tl.abs(largest), tl.abs(shift)), 1)
        top = tl.max(largest, 1)
    new_carry = mean
    wants = tl.full((BLOCK_Q, nodes), True, tl.int1)
    if RULE == "gamma":
        wants = gamma_exceeds(offsets, weights, shift, threshold, FINE)
    elif RULE == "exact-gap" or RULE == "quadrant-gap":
        new_carry = block_gaps(offsets, weights, shift, carry, FINE, deepest)
        wants = new_carry > threshold
    elif RULE == "variance":
        new_carry = block_variances(offsets, weights, shift, carry, deepest)
        wants = new_carry > threshold
    elif RULE == "mass" or RULE == "optimal":
        mass = count[None, :] * tl.exp2(largest - top[:, None])
        gain, inverse_z = recovered_mass(offsets, weights, shift, mass, inverse_z, FINE, deepest)
        if RULE == "mass":
            wants = gain > threshold * load_table(table, SHARE_ROW, LEVEL, DEPTH)[None, :]
        else:
            # The gain of a split with the best splits below it, minus the penalty of its leaves.
            net = gain - threshold * load_table(table, PARTS_ROW, LEVEL, DEPTH)[None, :]
            if not deepest:
                net += tl.sum(carry, 1)
            wants = net > 0.0
            new_carry = tl.maximum(net, 0.0)
            if LEVEL == MAX_DEPTH:  # never split, so no gain for the blocks above
                new_carry = tl.zeros_like(net)
    elif RULE == "random-quadrants":
        wants = ((coins[:, None] >> tl.arange(0, nodes)[None, :]) & 1) != 0
    else:  # fixed-depth
        wants &= LEVEL < threshold
    if LEVEL != 1 and (RULE == "quadrant-gap" or RULE == "variance" or RULE == "random-quadrants"):
        wants = tl.full((BLOCK_Q, nodes), True, tl.int1)  # these rules decide on quadrants alone
    return mean, wants, largest, new_carry, magnitude, top, inverse_z


@triton.jit
def bottom_up(
    scores, table, coins, threshold,
    RULE: tl.constexpr, FINE: tl.constexpr, DEPTH: tl.constexpr, MAX_DEPTH: tl.constexpr,
    BLOCK_Q: tl.constexpr,
):  # fmt: skip
    """Return the means and split decisions of all levels from the tokens up, and the largest score of
    each block of the deepest level.
    """
    magnitude = tl.zeros((BLOCK_Q,), tl.float32)
    mean, level_wants, peaks, carry, magnitude, top, inverse_z = decide_level(
        scores, scores, magnitude, magnitude, magnitude, table, coins, threshold,
        RULE, FINE, DEPTH - 1, DEPTH, MAX_DEPTH, BLOCK_Q,
    )  # fmt: skip
    means, wants = (scores, mean), (level_wants,)
    for step in tl.static_range(1, DEPTH):
        mean, level_wants, _, carry, magnitude, top, inverse_z = decide_level(
            mean, carry, magnitude, top, inverse_z, table, coins, threshold,
            RULE, FINE, DEPTH - 1 - step, DEPTH, MAX_DEPTH, BLOCK_Q,
        )  # fmt: skip
        means = means + (mean,)  # noqa: RUF005 (Triton has no starred tuples)
        wants = wants + (level_wants,)  # noqa: RUF005
    return means, wants, peaks


@triton.jit
def repeat_for_children(blocks, BLOCK_Q: tl.constexpr, NODES: tl.constexpr):
    """Return (BLOCK_Q, 4 n): what each of n blocks has, at its four children."""
    repeated = tl.broadcast_to(blocks[:, None, :], (BLOCK_Q, 4, NODES))
    return tl.reshape(repeated, (BLOCK_Q, 4 * NODES))


@triton.jit
def pack_splits(splits, split_bits, first_word, exists, LEVEL: tl.constexpr, BLOCK_Q: tl.constexpr):
    """Pack the (BLOCK_Q, n) splits of a level: add a few to the first word, write many out."""
    nodes: tl.constexpr = 4**LEVEL
    bits = splits.to(tl.int32)
    if LEVEL < WORD_LEVEL:
        first_word += tl.sum(bits << (nodes // 3 + tl.arange(0, nodes))[None, :], 1)
    else:
        packed = tl.reshape(bits, (BLOCK_Q, nodes // 32, 32)) << tl.arange(0, 32)[None, None, :]
        word = 1 + (nodes - 64) // 96 + tl.arange(0, nodes // 32)
        tl.store(split_bits[:, None] + word[None, :], tl.sum(packed, 2), mask=exists[:, None])
    return first_word


@triton.jit
def top_down(
    means, wants, split_bits, exists,
    DEPTH: tl.constexpr, MAX_DEPTH: tl.constexpr, BLOCK_Q: tl.constexpr,
):  # fmt: skip
    """Return the mean of the leaf above each block of the deepest level, and which of these split.

    Writes a bit for each split. A block at MAX_DEPTH that the rule would split has its bit set and
    remains a leaf.
    """
    leaf_mean = means[DEPTH]
    splits = wants[DEPTH - 1]
    first_word = pack_splits(splits, split_bits, tl.zeros((BLOCK_Q,), tl.int32), exists, 0, BLOCK_Q)
    for level in tl.static_range(1, DEPTH):
        reached = repeat_for_children(splits & (level - 1 < MAX_DEPTH), BLOCK_Q, 4 ** (level - 1))
        above = repeat_for_children(leaf_mean, BLOCK_Q, 4 ** (level - 1))
        leaf_mean = tl.where(reached, means[DEPTH - level], above)
        splits = reached & wants[DEPTH - 1 - level]
        if level <= MAX_DEPTH:
            first_word = pack_splits(splits, split_bits, first_word, exists, level, BLOCK_Q)
    tl.store(split_bits, first_word, mask=exists)
    return leaf_mean, splits & (DEPTH - 1 < MAX_DEPTH)


@triton.jit
def per_query_attention_kernel(
    q, k, v, o, split_bits, slot_tokens, table, coins,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt,
    stride_ob, stride_oh, stride_ot,
    H, num_queries, D, DV, qk_scale_log2, threshold,
    RULE: tl.constexpr, FINE: tl.constexpr, DEPTH: tl.constexpr, MAX_DEPTH: tl.constexpr,
    PREFIX: tl.constexpr, BLOCK_PREFIX: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, WORDS: tl.constexpr, BLOCK_Q: tl.constexpr, HEADS_PER_KEY: tl.constexpr,
):  # fmt: skip
    """Attend with BLOCK_Q queries of one head, each with its own tree.

    Grid: (blocks of queries, B * H). q is (B, H, Q, D), k (B, H / HEADS_PER_KEY, PREFIX + N, D), v and o
    have DV channels. Writes o and split_bits (B * H * Q, WORDS).
    """
    batch_head = tl.program_id(1)
    batch, head = (batch_head // H).to(tl.int64), (batch_head % H).to(tl.int64)
    rows = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    exists = rows < num_queries
    tree = batch_head.to(tl.int64) * num_queries + rows
    q += batch * stride_qb + head * stride_qh
    k += batch * stride_kb + head // HEADS_PER_KEY * stride_kh
    v += batch * stride_vb + head // HEADS_PER_KEY * stride_vh
    queries = load_rows(q, rows, exists, stride_qt, D, BLOCK_D)  # (BLOCK_Q, BLOCK_D)
    tokens = tl.load(slot_tokens + tl.arange(0, 4**DEPTH))
    every = tokens >= 0
    keys = load_rows(k, tokens, every, stride_kt, D, BLOCK_D)
    scores = tl.dot(queries, tl.trans(keys), input_precision="tf32x3")
    scores = scores * qk_scale_log2  # (BLOCK_Q, 4^DEPTH)
    query_coins = tl.zeros((BLOCK_Q,), tl.int32)
    if RULE == "random-quadrants":
        query_coins = tl.load(coins + tree, mask=exists, other=0).to(tl.int32)
    means, wants, peaks = bottom_up(
        scores, table, query_coins, threshold, RULE, FINE, DEPTH, MAX_DEPTH, BLOCK_Q
    )
    leaf_mean, splits = top_down(
        means, wants, split_bits + tree * WORDS, exists, DEPTH, MAX_DEPTH, BLOCK_Q
    )

    m_i = tl.max(tl.where(splits, peaks, leaf_mean), 1)
    if PREFIX > 0:
        prefix_tokens = tl.arange(0, BLOCK_PREFIX)
        in_prefix = prefix_tokens < PREFIX
        prefix_k = tl.trans(load_rows(k, prefix_tokens, in_prefix, stride_kt, D, BLOCK_D))
        prefix_logits = tl.dot(queries, prefix_k, input_precision="tf32x3") * qk_scale_log2
        prefix_logits = tl.where(in_prefix[None, :], prefix_logits, float("-inf"))
        m_i = tl.maximum(m_i, tl.max(prefix_logits, 1))
    # Every slot of a block at the deepest level has a quarter of the weight of the block.
    weight = tl.log2(0.25 * load_table(table, WEIGHT_ROW, DEPTH - 1, DEPTH))[None, :]
    weight = weight - m_i[:, None]
    leaf_logits = repeat_for_children(leaf_mean, BLOCK_Q, 4 ** (DEPTH - 1))
    splits = repeat_for_children(splits, BLOCK_Q, 4 ** (DEPTH - 1))
    logits = tl.where(splits, scores, leaf_logits)
    p = tl.exp2(logits + repeat_for_children(weight, BLOCK_Q, 4 ** (DEPTH - 1)))
    l_i = tl.sum(p, 1)
    values = load_rows(v, tokens, every, stride_vt, DV, BLOCK_DV)
    acc = tl.dot(p.to(values.dtype), values, input_precision="tf32x3")
    if PREFIX > 0:
        p = tl.exp2(prefix_logits - m_i[:, None])
        l_i += tl.sum(p, 1)
        values = load_rows(v, prefix_tokens, in_prefix, stride_vt, DV, BLOCK_DV)
        acc = tl.dot(p.to(values.dtype), values, acc, input_precision="tf32x3")
    column = tl.arange(0, BLOCK_DV)
    o += batch * stride_ob + head * stride_oh
    tl.store(
        o + rows.to(tl.int64)[:, None] * stride_ot + column[None, :],
        (acc / l_i[:, None]).to(o.dtype.element_ty),
        mask=exists[:, None] & (column < DV)[None, :],
    )
