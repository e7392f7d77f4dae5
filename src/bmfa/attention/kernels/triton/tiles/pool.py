"""Kernel 1 of 5: one pass over q, k and v that pools tiles and attends with the prefix queries.

It computes the means of keys and values over each tile, the means of queries over each group, how far
tokens are from these means, parts of the cross-covariance of keys and values, and parts of the exact
outputs of the prefix queries.
"""

import triton
import triton.language as tl

from bmfa.attention.kernels.triton.tiles.primitives import (
    LOG2E,
    load_rows,
    online_softmax,
    split_batch_head,
    tile_tokens,
    valid_tokens,
)

# A mean squared distance is a difference of two sums of squares. 16 roundings of float32
# (16 * 2^-23 = 1.9e-6) of the larger one count as 0.
SPREAD_ROUNDING = tl.constexpr(2e-6)


@triton.jit
def sum_of_squares(x):
    x = x.to(tl.float32)
    return tl.sum(tl.sum(x * x, 1), 0)


@triton.jit
def mean_squared_distance(mean_square, means):
    """Return mean |x|^2 - |mean x|^2, or 0 within its rounding or if the squares overflow."""
    distance = mean_square - tl.sum(means * means, 1)
    return tl.where(distance > SPREAD_ROUNDING * mean_square, distance, 0.0)


@triton.jit
def pool_kernel(
    q, k, v, valid, k_mean, v_mean, q_mean, k_spread, q_spread, counts, kv_cov_parts,
    prefix_m, prefix_l, prefix_acc,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt,
    H, prefix, height, width, tiles_across, num_tiles, num_groups, qk_scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr, SIDE: tl.constexpr,
    TILES_PER_PROGRAM: tl.constexpr, BLOCK_PREFIX: tl.constexpr,
    Z_ORDER: tl.constexpr, MASKED: tl.constexpr, RAGGED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Pool TILES_PER_PROGRAM tiles of one head. Grid: (parts, B * H).

    Sums over tiles are rows of a product with a one-hot matrix, so that no reduction crosses warps.
    Row t of the (S, BLOCK_D) accumulators belongs to tile t of the part; S >= TILES_PER_PROGRAM.

    Writes k_mean, v_mean (B * H, T, D), q_mean (B * H, R, D), k_spread, counts (B * H, T),
    q_spread (B * H, R) times qk_scale^2 / 2D, kv_cov_parts (B * H, parts, D, D), and the online
    softmax of the prefix queries over the part: prefix_m, prefix_l (B * H, parts, prefix) and
    prefix_acc (B * H, parts, prefix, D).
    """
    S: tl.constexpr = SIDE * SIDE
    part = tl.program_id(0)
    batch, head, batch_head = split_batch_head(tl.program_id(1), H)
    q += batch * stride_qb + head * stride_qh
    k += batch * stride_kb + head * stride_kh
    v += batch * stride_vb + head * stride_vh
    valid += batch * height * width
    rows, slots, columns = tl.arange(0, S), tl.arange(0, S), tl.arange(0, BLOCK_D)
    count = tl.zeros((S,), tl.float32)
    k_sum = tl.zeros((S, BLOCK_D), tl.float32)
    v_sum = tl.zeros((S, BLOCK_D), tl.float32)
    q_sum = tl.zeros((S, BLOCK_D), tl.float32)
    k_squares = tl.zeros((S,), tl.float32)
    q_squares = tl.zeros((S,), tl.float32)
    kv_cov = tl.zeros((BLOCK_D, BLOCK_D), tl.float32)
    if BLOCK_PREFIX > 0:
        prefix_tokens = tl.arange(0, BLOCK_PREFIX)
        in_prefix = prefix_tokens < prefix
        prefix_q = load_rows(q, prefix_tokens, stride_qt, in_prefix, D, BLOCK_D)
        qk_scale_log2 = qk_scale * LOG2E
        m_i = tl.full((BLOCK_PREFIX,), float("-inf"), tl.float32)
        l_i = tl.zeros((BLOCK_PREFIX,), tl.float32)
        acc = tl.zeros((BLOCK_PREFIX, BLOCK_D), tl.float32)
        if part == 0:
            prefix_k = load_rows(k, prefix_tokens, stride_kt, in_prefix, D, BLOCK_D)
            prefix_v = load_rows(v, prefix_tokens, stride_vt, in_prefix, D, BLOCK_D)
            prefix_logits = (
                tl.dot(prefix_q, tl.trans(prefix_k), input_precision=PRECISION) * qk_scale_log2
            )
            prefix_logits = tl.where(in_prefix[None, :], prefix_logits, float("-inf"))
            m_i, l_i, acc = online_softmax(m_i, l_i, acc, prefix_logits, prefix_v, PRECISION)
    q += prefix * stride_qt
    k += prefix * stride_kt
    v += prefix * stride_vt
    for member in range(TILES_PER_PROGRAM):
        tile = part * TILES_PER_PROGRAM + member
        tokens, on_grid = tile_tokens(tile, slots, height, width, tiles_across, Z_ORDER, SIDE)
        exists = valid_tokens(valid, tokens, on_grid & (tile < num_tiles), MASKED)
        tile_k = load_rows(k, tokens, stride_kt, exists, D, BLOCK_D)  # (S, BLOCK_D)
        tile_v = load_rows(v, tokens, stride_vt, exists, D, BLOCK_D)
        tile_q = load_rows(q, tokens, stride_qt, exists, D, BLOCK_D)
        of_tile = (rows[:, None] == member) & (slots[None, :] >= 0)
        of_group = (rows[:, None] == member // GROUP) & (slots[None, :] >= 0)
        k_sum = tl.dot(of_tile.to(tile_k.dtype), tile_k, k_sum, input_precision=PRECISION)
        v_sum = tl.dot(of_tile.to(tile_k.dtype), tile_v, v_sum, input_precision=PRECISION)
        q_sum = tl.dot(of_group.to(tile_k.dtype), tile_q, q_sum, input_precision=PRECISION)
        kv_cov = tl.dot(tl.trans(tile_k), tile_v, kv_cov, input_precision=PRECISION)
        k_squares = tl.where(rows == member, sum_of_squares(tile_k), k_squares)
        q_squares += tl.where(rows == member // GROUP, sum_of_squares(tile_q), 0.0)
        if MASKED or RAGGED:
            count = tl.where(rows == member, tl.sum(exists.to(tl.float32), 0), count)
        if BLOCK_PREFIX > 0:
            logits = tl.dot(prefix_q, tl.trans(tile_k), input_precision=PRECISION) * qk_scale_log2
            logits = tl.where(exists[None, :], logits, float("-inf"))
            m_i, l_i, acc = online_softmax(m_i, l_i, acc, logits, tile_v, PRECISION)

    tiles = part * TILES_PER_PROGRAM + rows
    is_tile = (rows < TILES_PER_PROGRAM) & (tiles < num_tiles)
    if not (MASKED or RAGGED):
        count = tl.where(is_tile, S * 1.0, 0.0)
    at_least_one = tl.maximum(count, 1.0)[:, None]
    in_head = columns < D
    offsets = (batch_head * num_tiles + tiles)[:, None] * D + columns[None, :]
    mask = is_tile[:, None] & in_head[None, :]
    k_means = k_sum / at_least_one
    spread = mean_squared_distance(k_squares / tl.maximum(count, 1.0), k_means)
    tl.store(k_spread + batch_head * num_tiles + tiles, spread, mask=is_tile)
    tl.store(k_mean + offsets, k_means.to(k_mean.dtype.element_ty), mask=mask)
    tl.store(v_mean + offsets, (v_sum / at_least_one).to(v_mean.dtype.element_ty), mask=mask)
    tl.store(counts + batch_head * num_tiles + tiles, count, mask=is_tile)
    # sum (k - k_mean) (v - v_mean)^T = sum k v^T - sum_tiles k_sum v_mean^T
    kv_cov -= tl.dot(tl.trans(k_sum), v_sum / at_least_one, input_precision="tf32x3")
    square = columns[:, None] * D + columns[None, :]
    part_of_head = batch_head * tl.num_programs(0) + part
    tl.store(
        kv_cov_parts + part_of_head * (D * D) + square,
        kv_cov.to(kv_cov_parts.dtype.element_ty),
        mask=in_head[:, None] & in_head[None, :],
    )
    group_count = tl.zeros((S,), tl.float32)
    for member in tl.static_range(TILES_PER_PROGRAM):
        tile_count = tl.sum(tl.where(rows == member, count, 0.0), 0)
        group_count += tl.where(rows == member // GROUP, tile_count, 0.0)
    groups = part * (TILES_PER_PROGRAM // GROUP) + rows
    is_group = (rows < TILES_PER_PROGRAM // GROUP) & (groups < num_groups)
    group_count = tl.maximum(group_count, 1.0)
    q_means = q_sum / group_count[:, None]
    spread = mean_squared_distance(q_squares / group_count, q_means)
    spread = spread * (qk_scale * qk_scale / (2 * D))
    tl.store(q_spread + batch_head * num_groups + groups, spread, mask=is_group)
    offsets = (batch_head * num_groups + groups)[:, None] * D + columns[None, :]
    mask = is_group[:, None] & in_head[None, :]
    tl.store(q_mean + offsets, q_means.to(q_mean.dtype.element_ty), mask=mask)
    if BLOCK_PREFIX > 0:
        offsets = part_of_head * prefix + prefix_tokens
        tl.store(prefix_m + offsets, m_i, mask=in_prefix)
        tl.store(prefix_l + offsets, l_i, mask=in_prefix)
        mask = in_prefix[:, None] & in_head[None, :]
        tl.store(prefix_acc + offsets[:, None] * D + columns[None, :], acc, mask=mask)
