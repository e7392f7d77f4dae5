"""Kernels 6 to 8: attention over expanded tiles, tangent tiles and prefix; and exact attention."""

import triton
import triton.language as tl

from bmfa.attention.kernels.triton.tiles.primitives import (
    LOG2E,
    group_tokens,
    load_rows,
    online_softmax,
    split_batch_head,
    sum_products,
    tile_tokens,
    valid_tokens,
)


@triton.jit
def attend_expanded(
    m_i, l_i, acc, queries, k, v, valid, expanded_list, first, last, stride_kt, stride_vt,
    height, width, tiles_across, qk_scale_log2,
    D: tl.constexpr, BLOCK_D: tl.constexpr, SIDE: tl.constexpr,
    MASKED: tl.constexpr, RAGGED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the tokens of the expanded tiles from `first` to `last` in the list to an online softmax."""
    slots = tl.arange(0, SIDE * SIDE)
    for index in range(first, last):
        tile = tl.load(expanded_list + index)
        tokens, on_grid = tile_tokens(tile, slots, height, width, tiles_across, SIDE)
        exists = valid_tokens(valid, tokens, on_grid, MASKED)
        tile_k = load_rows(k, tokens, stride_kt, exists, D, BLOCK_D)
        tile_v = load_rows(v, tokens, stride_vt, exists, D, BLOCK_D)
        logits = tl.dot(queries, tl.trans(tile_k), input_precision=PRECISION) * qk_scale_log2
        if MASKED or RAGGED:
            logits = tl.where(exists[None, :], logits, float("-inf"))
        m_i, l_i, acc = online_softmax(m_i, l_i, acc, logits, tile_v, PRECISION)
    return m_i, l_i, acc


@triton.jit
def expand_kernel(
    q, k, v, valid, expanded_list, expanded_count, items, item_m, item_l, item_acc,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt,
    H, prefix, height, width, frames, tiles_across, num_tiles, num_groups, first_row, row_capacity,
    group_stride, query_prefix, query_height, query_width, query_tiles_across, qk_scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, SIDE: tl.constexpr, GROUP_TILES: tl.constexpr,
    NUM_ITEMS: tl.constexpr, ITEM_TILES: tl.constexpr, MASKED: tl.constexpr,
    RAGGED: tl.constexpr, OWN_GRID: tl.constexpr, HEADS_PER_KEY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend with the queries of a group over one item of its expanded tiles. Grid: (item_capacity,).

    Writes the online softmax of the item: item_m and item_l (item_capacity, QUERIES), and item_acc
    (item_capacity, QUERIES, D). With OWN_GRID the queries have a grid and a prefix of their own.
    """
    if not OWN_GRID:
        query_prefix, query_height, query_width = prefix, height, width
        query_tiles_across = tiles_across
    QUERIES: tl.constexpr = SIDE * SIDE * GROUP_TILES
    item = tl.program_id(0)
    code = tl.load(items + item)
    if code > 0:
        number, line = code % NUM_ITEMS, code // NUM_ITEMS
        batch, head, batch_head = split_batch_head(line // row_capacity, H)
        group = (first_row + line % row_capacity) * group_stride % num_groups
        q += batch * stride_qb + head * stride_qh + query_prefix * stride_qt
        k += batch * stride_kb + head // HEADS_PER_KEY * stride_kh + prefix * stride_kt
        v += batch * stride_vb + head // HEADS_PER_KEY * stride_vh + prefix * stride_vt
        valid += batch * frames * height * width
        slots, columns = tl.arange(0, QUERIES), tl.arange(0, BLOCK_D)
        tokens, on_grid = group_tokens(
            group, slots, query_height, query_width, query_tiles_across, SIDE, GROUP_TILES
        )
        group_q = load_rows(q, tokens, stride_qt, on_grid, D, BLOCK_D)  # (QUERIES, BLOCK_D)
        m_i = tl.full((QUERIES,), float("-inf"), tl.float32)
        l_i = tl.zeros((QUERIES,), tl.float32)
        acc = tl.zeros((QUERIES, BLOCK_D), tl.float32)
        first = number * ITEM_TILES
        last = tl.minimum(
            first + ITEM_TILES, tl.load(expanded_count + batch_head * num_groups + group)
        )
        m_i, l_i, acc = attend_expanded(
            m_i, l_i, acc, group_q, k, v, valid, expanded_list + line.to(tl.int64) * num_tiles, first,
            last, stride_kt, stride_vt, height, width, tiles_across, qk_scale * LOG2E,
            D, BLOCK_D, SIDE, MASKED, RAGGED, PRECISION,
        )  # fmt: skip
        tl.store(item_m + item * QUERIES + slots, m_i)
        tl.store(item_l + item * QUERIES + slots, l_i)
        pointers = item_acc + (item * QUERIES + slots)[:, None] * D + columns[None, :]
        tl.store(pointers, acc, mask=(columns < D)[None, :])


@triton.jit
def attention_kernel(
    q, k, v, valid, q_mean, k_tangent, v_tangent, log_mass, expanded_list, expanded_count, first_item,
    item_m, item_l, item_acc, group_cross, shrinkage, v_radius, exact_heads, probe_tokens, probe_exact,
    probes, o,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt,
    stride_ob, stride_oh, stride_ot,
    H, prefix, height, width, frames, tiles_across, num_tiles, num_groups, line_stride, first_row,
    row_capacity, group_stride, num_probes, query_prefix, query_height, query_width, query_tiles_across,
    qk_scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, SIDE: tl.constexpr, GROUP_TILES: tl.constexpr,
    BLOCK_MEANS: tl.constexpr, BLOCK_PREFIX: tl.constexpr, ITEM_TILES: tl.constexpr,
    SKIP_EXACT: tl.constexpr, MASKED: tl.constexpr, RAGGED: tl.constexpr,
    OWN_GRID: tl.constexpr, HEADS_PER_KEY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend with the queries of one group of one head. Grid: (rows, B * H).

    Row r is the group at position first_row + r. Attends over the tangents of its unexpanded tiles, the
    prefix and the first ITEM_TILES expanded tiles, and adds the items of `expand_kernel`. Writes the
    rows of o of the group's queries, and if one of them is a probe, its |output - exact|^2 to probes (B
    * H, num_probes, 3). With SKIP_EXACT, heads in `exact_heads` are left out. With OWN_GRID the queries
    have a grid and a prefix of their own.
    """
    if not OWN_GRID:
        query_prefix, query_height, query_width = prefix, height, width
        query_tiles_across = tiles_across
    QUERIES: tl.constexpr = SIDE * SIDE * GROUP_TILES
    row = tl.program_id(0)
    batch, head, batch_head = split_batch_head(tl.program_id(1), H)
    position = first_row + row
    skip = False
    if SKIP_EXACT:
        skip = tl.load(exact_heads + batch_head) != 0
        if skip & (position < num_probes):
            tl.store(probes + (batch_head * num_probes + position) * 3, 0.0)
    if not skip:
        group = position * group_stride % num_groups
        q += batch * stride_qb + head * stride_qh + query_prefix * stride_qt
        k += batch * stride_kb + head // HEADS_PER_KEY * stride_kh
        v += batch * stride_vb + head // HEADS_PER_KEY * stride_vh
        valid += batch * frames * height * width
        line = batch_head * row_capacity + row
        slots, columns = tl.arange(0, QUERIES), tl.arange(0, BLOCK_D)
        in_head = columns < D
        tokens, on_grid = group_tokens(
            group, slots, query_height, query_width, query_tiles_across, SIDE, GROUP_TILES
        )
        group_q = load_rows(q, tokens, stride_qt, on_grid, D, BLOCK_D)  # (QUERIES, BLOCK_D)
        # Loaded early to hide the latency; used after the tangent tiles.
        num_expanded = tl.load(expanded_count + batch_head * num_groups + group)
        item = tl.load(first_item + line)
        factor = tl.load(shrinkage + batch_head * 2 + position % 2)
        limit = 2.0 * tl.load(v_radius + batch_head).to(tl.float32, bitcast=True)
        q_means = tl.load(
            q_mean + (batch_head * num_groups + group) * D + columns, mask=in_head, other=0.0
        )
        deviation = (group_q.to(tl.float32) - q_means.to(tl.float32)[None, :]).to(group_q.dtype)
        qk_scale_log2 = qk_scale * LOG2E
        m_i = tl.full((QUERIES,), float("-inf"), tl.float32)
        l_i = tl.zeros((QUERIES,), tl.float32)
        acc = tl.zeros((QUERIES, BLOCK_D), tl.float32)
        k_tangent += line * num_tiles * D
        v_tangent += line * num_tiles * D
        for start in range(0, num_tiles, BLOCK_MEANS):
            tiles = start + tl.arange(0, BLOCK_MEANS)
            is_tile = tiles < num_tiles
            k_means = load_rows(k_tangent, tiles, D, is_tile, D, BLOCK_D)  # (BLOCK_MEANS, BLOCK_D)
            v_means = load_rows(v_tangent, tiles, D, is_tile, D, BLOCK_D)
            # -inf for expanded and empty tiles
            lse = tl.load(log_mass + line * line_stride + tiles, mask=is_tile, other=float("-inf"))
            logits = tl.dot(deviation, tl.trans(k_means), input_precision=PRECISION)
            logits = logits * qk_scale_log2 + (lse * LOG2E)[None, :]
            m_i, l_i, acc = online_softmax(m_i, l_i, acc, logits, v_means, PRECISION)
        # l_i is now u, the weight of the tangent tiles, not normalised: add u times the correction.
        square = columns[:, None] * D + columns[None, :]
        mask = in_head[:, None] & in_head[None, :]
        covariance = tl.load(group_cross + line * (D * D) + square, mask=mask, other=0.0)
        correction = tl.dot(deviation, covariance, input_precision=PRECISION) * factor
        length = tl.sqrt(sum_products(correction, correction, 1)).to(tl.float32)
        clip = tl.where(length > limit, limit / tl.where(length > 0.0, length, 1.0), 1.0)
        acc += (l_i * clip)[:, None] * correction

        if BLOCK_PREFIX > 0:
            prefix_tokens = tl.arange(0, BLOCK_PREFIX)
            in_prefix = prefix_tokens < prefix
            prefix_k = load_rows(k, prefix_tokens, stride_kt, in_prefix, D, BLOCK_D)
            prefix_v = load_rows(v, prefix_tokens, stride_vt, in_prefix, D, BLOCK_D)
            prefix_logits = tl.dot(group_q, tl.trans(prefix_k), input_precision=PRECISION)
            prefix_logits = prefix_logits * qk_scale_log2
            prefix_logits = tl.where(in_prefix[None, :], prefix_logits, float("-inf"))
            m_i, l_i, acc = online_softmax(m_i, l_i, acc, prefix_logits, prefix_v, PRECISION)

        own = tl.where(item >= 0, tl.minimum(num_expanded, ITEM_TILES), num_expanded)
        m_i, l_i, acc = attend_expanded(
            m_i, l_i, acc, group_q, k + prefix * stride_kt, v + prefix * stride_vt, valid,
            expanded_list + line * num_tiles, 0, own, stride_kt, stride_vt, height, width,
            tiles_across, qk_scale_log2, D, BLOCK_D, SIDE, MASKED, RAGGED, PRECISION,
        )  # fmt: skip
        for index in range(tl.cdiv(num_expanded - own, ITEM_TILES)):
            rows = ((item + index) * QUERIES).to(tl.int64) + slots
            m_j, l_j = tl.load(item_m + rows), tl.load(item_l + rows)
            acc_j = load_rows(item_acc, rows, D, rows >= 0, D, BLOCK_D)
            m_new = tl.maximum(m_i, m_j)
            shift = tl.where(m_new == float("-inf"), 0.0, m_new)
            scale_i, scale_j = tl.exp2(m_i - shift), tl.exp2(m_j - shift)
            l_i = l_i * scale_i + l_j * scale_j
            acc = acc * scale_i[:, None] + acc_j * scale_j[:, None]
            m_i = m_new

        acc = acc / tl.where(l_i > 0.0, l_i, 1.0)[:, None]
        o += batch * stride_ob + head * stride_oh + query_prefix * stride_ot
        pointers = o + tokens.to(tl.int64)[:, None] * stride_ot + columns[None, :]
        result = acc.to(o.dtype.element_ty)
        tl.store(pointers, result, mask=on_grid[:, None] & in_head[None, :])
        if position < num_probes:
            probe = batch_head * num_probes + position
            token = tl.load(probe_tokens + probe)
            exact = tl.load(probe_exact + probe * D + columns, mask=in_head, other=0.0)
            difference = result.to(tl.float32) - exact[None, :]
            is_probe = on_grid & (tokens + query_prefix == token)  # (QUERIES,)
            difference = tl.where(is_probe[:, None], difference, 0.0)
            error = tl.sum(sum_products(difference, difference, 1), 0)
            tl.store(probes + probe * 3, error)


@triton.jit
def exact_kernel(
    q, k, v, valid, exact_heads, o,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt,
    stride_ob, stride_oh, stride_ot,
    H, prefix, height, width, frames, num_queries, qk_scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr, OWN_GRID: tl.constexpr, HEADS_PER_KEY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend exactly with BLOCK_M queries of one head in `exact_heads`. Grid: (query blocks, B * H).

    Tokens are taken in their order in memory, the prefix among them. Without OWN_GRID there are as many
    queries.
    """
    batch, head, batch_head = split_batch_head(tl.program_id(1), H)
    if tl.load(exact_heads + batch_head) != 0:
        q += batch * stride_qb + head * stride_qh
        k += batch * stride_kb + head // HEADS_PER_KEY * stride_kh
        v += batch * stride_vb + head // HEADS_PER_KEY * stride_vh
        valid += batch * frames * height * width
        num_tokens = prefix + frames * height * width
        if not OWN_GRID:
            num_queries = num_tokens
        rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
        columns = tl.arange(0, BLOCK_D)
        queries = load_rows(q, rows, stride_qt, rows < num_queries, D, BLOCK_D)
        qk_scale_log2 = qk_scale * LOG2E
        m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        l_i = tl.zeros((BLOCK_M,), tl.float32)
        acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        for start in range(0, num_tokens, BLOCK_N):
            tokens = start + tl.arange(0, BLOCK_N)
            exists = tokens < num_tokens
            if MASKED:
                spatial = exists & (tokens >= prefix)
                exists = exists & (tl.load(valid + tokens - prefix, mask=spatial, other=1) != 0)
            keys = load_rows(k, tokens, stride_kt, exists, D, BLOCK_D)
            values = load_rows(v, tokens, stride_vt, exists, D, BLOCK_D)
            logits = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * qk_scale_log2
            logits = tl.where(exists[None, :], logits, float("-inf"))
            m_i, l_i, acc = online_softmax(m_i, l_i, acc, logits, values, PRECISION)
        acc = acc / tl.where(l_i > 0.0, l_i, 1.0)[:, None]
        o += batch * stride_ob + head * stride_oh
        pointers = o + rows.to(tl.int64)[:, None] * stride_ot + columns[None, :]
        mask = (rows < num_queries)[:, None] & (columns < D)[None, :]
        tl.store(pointers, acc.to(o.dtype.element_ty), mask=mask)
