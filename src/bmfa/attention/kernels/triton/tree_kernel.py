"""One pass over q, k, v for small grids: scores, trees, leaf means, softmax, output."""

import triton
import triton.language as tl

from bmfa.attention.kernels.triton.tree_levels import ascend, descend, entry, widen


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
