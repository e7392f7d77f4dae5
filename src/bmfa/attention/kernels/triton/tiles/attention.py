"""Kernel 5 of 5: one online softmax over mean tiles, prefix tokens and tokens of expanded tiles."""

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


@triton.jit
def attention_kernel(
    q, k, v, valid, k_mean, v_mean, q_mean, counts, lse, gap, expanded_count, coarse_mass, kv_cov,
    residual_parts, o,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt,
    stride_ob, stride_oh, stride_ot,
    H, prefix, height, width, tiles_across, num_tiles, first_group, num_rows, num_groups, splits,
    qk_scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr, SIDE: tl.constexpr,
    LOG2_S: tl.constexpr, BLOCK_MEANS: tl.constexpr, BLOCK_PREFIX: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    Z_ORDER: tl.constexpr, MASKED: tl.constexpr, RAGGED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend with the S queries of one tile of one head. Grid: (tiles of queries, B * H).

    The first tile is that of group `first_group`. Reads the list of expanded tiles that the selection
    left in lse, and writes the rows of o of the tile's queries.
    """
    S: tl.constexpr = SIDE * SIDE
    tile = tl.program_id(0) + first_group * GROUP
    batch, head, batch_head = split_batch_head(tl.program_id(1), H)
    row = tile // GROUP - first_group
    q += batch * stride_qb + head * stride_qh + prefix * stride_qt
    k += batch * stride_kb + head * stride_kh
    v += batch * stride_vb + head * stride_vh
    valid += batch * height * width
    k_mean += batch_head * num_tiles * D
    v_mean += batch_head * num_tiles * D
    counts += batch_head * num_tiles
    line = batch_head * num_rows + row
    slots, columns = tl.arange(0, S), tl.arange(0, BLOCK_D)
    in_head = columns < D
    tokens, on_grid = tile_tokens(tile, slots, height, width, tiles_across, Z_ORDER, SIDE)
    tile_q = load_rows(q, tokens, stride_qt, on_grid, D, BLOCK_D)  # (S, BLOCK_D)
    # Loaded early to hide the latency; used after the mean tiles.
    group = batch_head * num_groups + first_group + row
    num_expanded = tl.load(expanded_count + group)
    mass = tl.load(coarse_mass + line)
    split = tl.arange(0, BLOCK_SPLITS)
    residual = tl.load(
        residual_parts + (line * splits + split)[:, None] * D + columns[None, :],
        mask=(split < splits)[:, None] & in_head[None, :], other=0.0,
    )  # fmt: skip
    q_means = tl.load(q_mean + group * D + columns, mask=in_head, other=0.0)

    qk_scale_log2 = qk_scale * LOG2E
    m_i = tl.full((S,), float("-inf"), tl.float32)
    l_i = tl.zeros((S,), tl.float32)
    acc = tl.zeros((S, BLOCK_D), tl.float32)
    for start in range(0, num_tiles, BLOCK_MEANS):
        tiles = start + tl.arange(0, BLOCK_MEANS)
        is_tile = tiles < num_tiles
        k_means = load_rows(k_mean, tiles, D, is_tile, D, BLOCK_D)  # (BLOCK_MEANS, BLOCK_D)
        v_means = load_rows(v_mean, tiles, D, is_tile, D, BLOCK_D)
        # gap of the tile, -inf for expanded and empty tiles; below it becomes log2(n exp(gap))
        log_gap = tl.load(gap + line * num_tiles + tiles, mask=is_tile, other=float("-inf"))
        if MASKED or RAGGED:
            count = tl.load(counts + tiles, mask=is_tile, other=1.0)
            log_gap = (log_gap.to(tl.float32) + tl.log(tl.maximum(count, 1.0))) * LOG2E
        else:
            log_gap = log_gap.to(tl.float32) * LOG2E + LOG2_S
        logits = tl.dot(tile_q, tl.trans(k_means), input_precision=PRECISION) * qk_scale_log2
        logits = logits + log_gap[None, :]
        m_i, l_i, acc = online_softmax(m_i, l_i, acc, logits, v_means, PRECISION)
    # l_i is now u, the unnormalised weight of the mean tiles: add u (residual + (q - q_mean) kv_cov).
    # kv_cov includes the factor qk_scale / n.
    square = columns[:, None] * D + columns[None, :]
    mask = in_head[:, None] & in_head[None, :]
    covariance = tl.load(kv_cov + batch_head * (D * D) + square, mask=mask, other=0.0)
    deviation = (tile_q.to(tl.float32) - q_means.to(tl.float32)[None, :]).to(tile_q.dtype)
    first_order = tl.dot(deviation, covariance, input_precision=PRECISION)
    zeroth_order = tl.sum(residual.to(tl.float32), 0) / tl.where(mass > 0.0, mass, 1.0)
    acc += l_i[:, None] * (first_order + zeroth_order[None, :])

    if BLOCK_PREFIX > 0:
        prefix_tokens = tl.arange(0, BLOCK_PREFIX)
        in_prefix = prefix_tokens < prefix
        prefix_k = load_rows(k, prefix_tokens, stride_kt, in_prefix, D, BLOCK_D)
        prefix_v = load_rows(v, prefix_tokens, stride_vt, in_prefix, D, BLOCK_D)
        prefix_logits = (
            tl.dot(tile_q, tl.trans(prefix_k), input_precision=PRECISION) * qk_scale_log2
        )
        prefix_logits = tl.where(in_prefix[None, :], prefix_logits, float("-inf"))
        m_i, l_i, acc = online_softmax(m_i, l_i, acc, prefix_logits, prefix_v, PRECISION)

    k += prefix * stride_kt
    v += prefix * stride_vt
    # The selection kernel has replaced the log-sum-exp of the group by its list of expanded tiles.
    expanded_list = (lse + line * num_tiles).to(tl.pointer_type(tl.int32))
    for index in range(num_expanded):
        expanded = tl.load(expanded_list + index)
        key_tokens, key_on_grid = tile_tokens(
            expanded, slots, height, width, tiles_across, Z_ORDER, SIDE
        )
        exists = valid_tokens(valid, key_tokens, key_on_grid, MASKED)
        tile_k = load_rows(k, key_tokens, stride_kt, exists, D, BLOCK_D)
        tile_v = load_rows(v, key_tokens, stride_vt, exists, D, BLOCK_D)
        tile_logits = tl.dot(tile_q, tl.trans(tile_k), input_precision=PRECISION) * qk_scale_log2
        if MASKED or RAGGED:
            tile_logits = tl.where(exists[None, :], tile_logits, float("-inf"))
        m_i, l_i, acc = online_softmax(m_i, l_i, acc, tile_logits, tile_v, PRECISION)

    acc = acc / tl.where(l_i > 0.0, l_i, 1.0)[:, None]
    o += batch * stride_ob + head * stride_oh + prefix * stride_ot
    pointers = o + tokens.to(tl.int64)[:, None] * stride_ot + columns[None, :]
    tl.store(pointers, acc.to(o.dtype.element_ty), mask=on_grid[:, None] & in_head[None, :])
