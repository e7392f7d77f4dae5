"""Kernels 1 and 2: the mean query and the probe of each group; tangents and statistics of all tiles.

The second one attends exactly with the probes, too.
"""

import triton
import triton.language as tl

from bmfa.attention.kernels.triton.tiles.primitives import (
    LOG2E,
    SMALLEST_SUM,
    group_tokens,
    load_rows,
    probe_queries,
    split_batch_head,
    sum_products,
    tile_tokens,
    valid_tokens,
)

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def pool_kernel(
    q, valid, q_mean, q_spread, group_counts, counts, probe_tokens, probe_deviation, probes, v_radius,
    stride_qb, stride_qh, stride_qt,
    H, prefix, height, width, frames, tiles_across, num_tiles, num_groups, position_stride, num_probes,
    num_slots, qk_scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, SIDE: tl.constexpr, GROUP_TILES: tl.constexpr,
    UNIFORM_SHARE: tl.constexpr, MASKED: tl.constexpr, OWN_GRID: tl.constexpr,
):  # fmt: skip
    """Summarise the queries of one group of one head. Grid: (R, B * H).

    Writes q_mean (B * H, R, D), q_spread (B * H, R) = qk_scale^2 rho / 2d, and the tokens of the group
    and of its tiles to group_counts (B * H, R) and counts (B * H, T). If the
    group has a probe, writes its token, or -1, to probe_tokens (B * H, num_probes), its difference to
    the mean to probe_deviation (B * H, num_slots, D) and its weight to the last column of probes (B *
    H, num_probes, 3). Sets v_radius (B * H) to 0.

    The grid and the prefix are those of the queries. With OWN_GRID they are not those of the keys, no
    mask applies, and `summarise_tiles` writes counts.
    """
    group = tl.program_id(0)
    batch, head, batch_head = split_batch_head(tl.program_id(1), H)
    q += batch * stride_qb + head * stride_qh + prefix * stride_qt
    valid += batch * frames * height * width
    QUERIES: tl.constexpr = SIDE * SIDE * GROUP_TILES
    slots, columns = tl.arange(0, QUERIES), tl.arange(0, BLOCK_D)
    tokens, on_grid = group_tokens(group, slots, height, width, tiles_across, SIDE, GROUP_TILES)
    exists = valid_tokens(valid, tokens, on_grid, MASKED)
    queries = load_rows(q, tokens, stride_qt, exists, D, BLOCK_D).to(
        tl.float32
    )  # (QUERIES, BLOCK_D)
    count = tl.sum(exists.to(tl.float32), 0)
    at_least_one = tl.maximum(count, 1.0)
    means = (tl.sum(queries, 0) / at_least_one).to(q_mean.dtype.element_ty)  # (BLOCK_D,)
    difference = tl.where(exists[:, None], queries - means.to(tl.float32)[None, :], 0.0)
    square = sum_products(difference, difference, 1)  # (QUERIES,)
    line = batch_head * num_groups + group
    tl.store(q_mean + line * D + columns, means, mask=columns < D)
    spread = tl.sqrt(tl.sum(square, 0) / at_least_one) * tl.sqrt(tl.max(square, 0))
    tl.store(q_spread + line, spread * (qk_scale * qk_scale / (2 * D)))
    tl.store(group_counts + line, count)
    if not OWN_GRID:
        for member in tl.static_range(GROUP_TILES):
            groups_across = (tiles_across + GROUP_TILES - 1) // GROUP_TILES
            tile_column = (group % groups_across) * GROUP_TILES + member
            tile = (group // groups_across) * tiles_across + tile_column
            in_row = tile_column < tiles_across
            of_tile = slots // SIDE % GROUP_TILES == member
            tile_count = tl.sum((exists & of_tile).to(tl.float32), 0)
            tl.store(counts + batch_head * num_tiles + tile, tile_count, mask=in_row)
    if group == 0:
        tl.store(v_radius + batch_head, 0)
    # The group at a position p is p * stride modulo R; `position_stride` inverts that.
    position = group * position_stride % num_groups
    if position < num_probes:
        # Tiling.probe_quantile
        quantile = ((group * 40503 + head.to(tl.int32) * 9973 + 17) % 65536).to(tl.float32)
        quantile = (quantile + 0.5) / 65536
        largest = tl.max(square, 0)
        ratio = square / tl.where(largest > 0.0, largest, 1.0)
        fourth = ratio * ratio
        uniform = tl.where(exists, 1.0 / at_least_one, 0.0)
        far = fourth / tl.where(largest > 0.0, tl.sum(fourth, 0), 1.0)
        p = tl.where(largest > 0.0, UNIFORM_SHARE * uniform + (1 - UNIFORM_SHARE) * far, uniform)
        # The first slot whose cumulative probability exceeds the quantile, or the last valid one.
        passed = exists & (tl.cumsum(p, 0) > quantile)
        last = tl.max(tl.where(exists, slots, -1), 0)
        chosen = tl.minimum(tl.min(tl.where(passed, slots, QUERIES), 0), last)
        token = tl.sum(tl.where(slots == chosen, prefix + tokens, 0), 0)
        own = tl.sum(tl.where(slots == chosen, p, 0.0), 0)
        target = batch_head * num_probes + position
        tl.store(probe_tokens + target, tl.where(last >= 0, token, -1))
        weight = tl.where(last >= 0, 1.0 / tl.where(own > 0.0, own, 1.0), 0.0)
        tl.store(probes + target * 3 + 2, weight)
        deviation = tl.sum(tl.where((slots == chosen)[:, None], difference, 0.0), 0)
        tl.store(
            probe_deviation + (batch_head * num_slots + position) * D + columns,
            deviation.to(probe_deviation.dtype.element_ty), mask=columns < D,
        )  # fmt: skip


@triton.jit
def tile_or_prefix_tokens(
    tile, valid, prefix, height, width, tiles_across, num_tiles,
    SIDE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Return the tokens in the slots of a tile and which exist. Past the last tile, these are the tokens
    of the prefix, whose numbers are negative, and after that none."""
    slots = tl.arange(0, SIDE * SIDE)
    tokens, on_grid = tile_tokens(tile, slots, height, width, tiles_across, SIDE)
    exists = valid_tokens(valid, tokens, on_grid & (tile < num_tiles), MASKED)
    in_prefix = (tile == num_tiles) & (slots < prefix)
    return tl.where(tile == num_tiles, slots - prefix, tokens), exists | in_prefix


@triton.jit
def tile_softmax(queries, tile_k, exists, qk_scale_log2, PRECISION: tl.constexpr):
    """Return the softmax weights of the tokens of a tile, not normalised, in the dtype of the keys,
    their sums and the log-sum-exp (natural)."""
    logits = tl.dot(queries, tl.trans(tile_k), input_precision=PRECISION) * qk_scale_log2
    logits = tl.where(exists[None, :], logits, float("-inf"))
    m_i = tl.max(logits, 1)
    shift = tl.where(m_i == float("-inf"), 0.0, m_i)
    weights = tl.exp2(logits - shift[:, None])
    lse = (m_i + tl.log2(tl.maximum(tl.sum(weights, 1), SMALLEST_SUM))) * LN2
    weights = weights.to(tile_k.dtype)
    return weights, tl.maximum(tl.sum(weights.to(tl.float32), 1), SMALLEST_SUM), lse


@triton.jit
def represent_tiles(
    k, v, valid, q_mean, log_mass, k_tangent, v_tangent, stride_kt, stride_vt,
    prefix, height, width, tiles_across, num_tiles, num_groups, line_stride, first_row, num_rows,
    group_stride, program, block, qk_scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, SIDE: tl.constexpr,
    TILES: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Tangents of TILES tiles at BLOCK_R representatives; all pointers are those of the head."""
    rows = block * BLOCK_R + tl.arange(0, BLOCK_R)
    columns = tl.arange(0, BLOCK_D)
    is_row, in_head = rows < num_rows, columns < D
    groups = (first_row + rows) * group_stride % num_groups
    q_means = load_rows(q_mean, groups, D, is_row, D, BLOCK_D)
    for member in range(TILES):
        tile = program * TILES + member
        tokens, exists = tile_or_prefix_tokens(
            tile, valid, prefix, height, width, tiles_across, num_tiles, SIDE, MASKED
        )
        tile_k = load_rows(k, tokens, stride_kt, exists, D, BLOCK_D)  # (S, BLOCK_D)
        tile_v = load_rows(v, tokens, stride_vt, exists, D, BLOCK_D)
        weights, total, lse = tile_softmax(q_means, tile_k, exists, qk_scale * LOG2E, PRECISION)
        inverse = 1.0 / total
        tl.store(log_mass + rows * line_stride + tile, lse, mask=is_row & (tile <= num_tiles))
        pointers = (rows * num_tiles + tile)[:, None] * D + columns[None, :]
        mask = is_row[:, None] & in_head[None, :] & (tile < num_tiles)
        k_means = tl.dot(weights, tile_k, input_precision=PRECISION) * inverse[:, None]
        tl.store(k_tangent + pointers, k_means.to(tile_k.dtype), mask=mask)
        v_means = tl.dot(weights, tile_v, input_precision=PRECISION) * inverse[:, None]
        tl.store(v_tangent + pointers, v_means.to(tile_v.dtype), mask=mask)


@triton.jit
def attend_probes(
    q, k, v, valid, probe_tokens, probe_lse, probe_v, stride_qt, stride_kt, stride_vt,
    prefix, query_prefix, height, width, tiles_across, num_tiles, line_stride, num_probes, num_slots,
    program, block, qk_scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, SIDE: tl.constexpr,
    TILES: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Log-sum-exp and mean value of TILES tiles at the queries of BLOCK_R slots."""
    rows = block * BLOCK_R + tl.arange(0, BLOCK_R)
    columns = tl.arange(0, BLOCK_D)
    is_slot, in_head = rows < num_slots, columns < D
    probes = probe_queries(q, stride_qt, probe_tokens, rows, num_probes, query_prefix, D, BLOCK_D)
    for member in range(TILES):
        tile = program * TILES + member
        tokens, exists = tile_or_prefix_tokens(
            tile, valid, prefix, height, width, tiles_across, num_tiles, SIDE, MASKED
        )
        tile_k = load_rows(k, tokens, stride_kt, exists, D, BLOCK_D)
        tile_v = load_rows(v, tokens, stride_vt, exists, D, BLOCK_D)
        weights, total, lse = tile_softmax(probes, tile_k, exists, qk_scale * LOG2E, PRECISION)
        values = tl.dot(weights, tile_v, input_precision=PRECISION) / total[:, None]
        is_line = is_slot & (tile <= num_tiles)
        tl.store(probe_lse + rows * line_stride + tile, lse, mask=is_line)
        pointers = probe_v + (rows * line_stride + tile)[:, None] * D + columns[None, :]
        tl.store(pointers, values.to(tile_v.dtype), mask=is_line[:, None] & in_head[None, :])


@triton.jit
def summarise_tiles(
    k, v, valid, q_mean, group_counts, probe_deviation, counts, cross, k_spread, v_radius, probe_cross,
    stride_kt, stride_vt,
    height, width, tiles_across, num_tiles, num_groups, group_stride, num_probes, num_slots, program,
    qk_scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, SIDE: tl.constexpr, TILES: tl.constexpr,
    MASKED: tl.constexpr, OWN_GRID: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Summarise the keys and values of TILES tiles; all pointers are those of the head.

    Writes the covariance `cross` (T, D, D) of keys and values under the softmax at the mean query of the
    head, its product probe_cross (num_slots, T, D) with the probes, k_spread (2, T), the mean and the
    largest |k - mean k|^2, and the bits of the largest |v - mean v| in a tile to v_radius. With
    OWN_GRID, writes the tokens of each tile to counts (T).
    """
    S: tl.constexpr = SIDE * SIDE
    slots, columns = tl.arange(0, S), tl.arange(0, BLOCK_D)
    in_head = columns < D
    # The means of the first groups, which are spread over the grid: the mean query of the head.
    groups = slots * group_stride % num_groups
    weight = tl.load(group_counts + groups, mask=slots < num_groups, other=0.0)
    means = load_rows(q_mean, groups, D, slots < num_groups, D, BLOCK_D).to(tl.float32)
    q_head = tl.sum(weight[:, None] * means, 0) / tl.maximum(tl.sum(weight, 0), 1.0)
    dtype = cross.dtype.element_ty
    square = columns[:, None] * D + columns[None, :]
    for member in range(TILES):
        tile = program * TILES + member
        tokens, on_grid = tile_tokens(tile, slots, height, width, tiles_across, SIDE)
        exists = valid_tokens(valid, tokens, on_grid & (tile < num_tiles), MASKED)
        keys = load_rows(k, tokens, stride_kt, exists, D, BLOCK_D).to(tl.float32)  # (S, BLOCK_D)
        values = load_rows(v, tokens, stride_vt, exists, D, BLOCK_D).to(tl.float32)
        logits = tl.sum(keys * q_head[None, :], 1) * qk_scale
        logits = tl.where(exists, logits, float("-inf"))
        m_i = tl.max(logits, 0)
        p = tl.exp(logits - tl.where(m_i == float("-inf"), 0.0, m_i))
        p = p / tl.maximum(tl.sum(p, 0), SMALLEST_SUM)
        keys = keys - tl.sum(p[:, None] * keys, 0)[None, :]
        values = values - tl.sum(p[:, None] * values, 0)[None, :]
        covariance = tl.dot(
            tl.trans((p[:, None] * keys).to(dtype)), values.to(dtype), input_precision=PRECISION
        ).to(dtype)
        is_tile = tile < num_tiles
        mask = in_head[:, None] & in_head[None, :] & is_tile
        tl.store(cross + tile.to(tl.int64) * (D * D) + square, covariance, mask=mask)
        if OWN_GRID:
            tl.store(counts + tile, tl.sum(exists.to(tl.float32), 0), mask=is_tile)
        count = tl.maximum(tl.sum(exists.to(tl.float32), 0), 1.0)
        k_squares = tl.where(exists, sum_products(keys, keys, 1), 0.0)
        spread = (tl.sum(k_squares, 0) / count).to(tl.float32)
        tl.store(k_spread + tile, spread, mask=is_tile)
        farthest = tl.max(k_squares, 0).to(tl.float32)
        tl.store(k_spread + num_tiles + tile, farthest, mask=is_tile)
        v_squares = tl.where(exists, sum_products(values, values, 1), 0.0)
        radius = tl.sqrt(tl.max(v_squares, 0)).to(tl.float32)
        # The bits of numbers that are not negative are in their order.
        tl.atomic_max(v_radius, radius.to(tl.int32, bitcast=True))
        for start in range(0, num_slots, S):
            slot = start + slots
            deviation = load_rows(probe_deviation, slot, D, slot < num_probes, D, BLOCK_D)
            product = tl.dot(deviation, covariance, input_precision=PRECISION) * qk_scale
            pointers = (slot * num_tiles + tile)[:, None] * D + columns[None, :]
            is_stored = (slot < num_probes)[:, None] & in_head[None, :] & is_tile
            tl.store(probe_cross + pointers, product.to(dtype), mask=is_stored)


@triton.jit
def represent_kernel(
    q, k, v, valid, q_mean, group_counts, probe_tokens, probe_deviation, log_mass, k_tangent, v_tangent,
    probe_lse, probe_v, counts, cross, k_spread, v_radius, probe_cross,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt,
    H, prefix, height, width, frames, tiles_across, num_tiles, num_groups, line_stride, first_row,
    num_rows, row_capacity, group_stride, num_probes, num_slots, tile_programs, query_prefix, qk_scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, SIDE: tl.constexpr,
    TILES: tl.constexpr, STAT_TILES: tl.constexpr, PROBING: tl.constexpr,
    MASKED: tl.constexpr, OWN_GRID: tl.constexpr, HEADS_PER_KEY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Summarise tiles at representatives. Grid: (programs, blocks of BLOCK_R rows, B * H).

    Row r of the band is the group at position first_row + r. The first `tile_programs` programs write,
    for each row and tile, log_mass (B * H, row_capacity, line_stride) = log sum exp of the scores, and
    the means k_tangent and v_tangent (B * H, row_capacity, T, D) of keys and values under their
    softmax.

    With PROBING, in the first band, as many programs attend exactly with the queries of num_slots slots
    (probes, then those before the grid): probe_lse (B * H, num_slots, line_stride) and the mean values
    probe_v (B * H, num_slots, line_stride, D) of each tile. The last programs summarise STAT_TILES tiles
    each (`summarise_tiles`).

    After the T tiles, a line has one more entry for the prefix. The grid and the prefix are those of the
    keys; with OWN_GRID there are `query_prefix` queries before the grid of the queries.
    """
    if not OWN_GRID:
        query_prefix = prefix
    program, block = tl.program_id(0), tl.program_id(1)
    batch, head, batch_head = split_batch_head(tl.program_id(2), H)
    q += batch * stride_qb + head * stride_qh
    k += batch * stride_kb + head // HEADS_PER_KEY * stride_kh + prefix * stride_kt
    v += batch * stride_vb + head // HEADS_PER_KEY * stride_vh + prefix * stride_vt
    valid += batch * frames * height * width
    if program < tile_programs:
        if block * BLOCK_R < num_rows:
            rows = batch_head * row_capacity
            represent_tiles(
                k, v, valid, q_mean + batch_head * num_groups * D, log_mass + rows * line_stride,
                k_tangent + rows * num_tiles * D, v_tangent + rows * num_tiles * D,
                stride_kt, stride_vt, prefix, height, width, tiles_across, num_tiles, num_groups,
                line_stride, first_row, num_rows, group_stride, program, block, qk_scale,
                D, BLOCK_D, BLOCK_R, SIDE, TILES, MASKED, PRECISION,
            )  # fmt: skip
    elif PROBING and program < 2 * tile_programs:
        if block * BLOCK_R < num_slots:
            lines = batch_head * num_slots * line_stride
            attend_probes(
                q, k, v, valid, probe_tokens + batch_head * num_probes, probe_lse + lines,
                probe_v + lines * D, stride_qt, stride_kt, stride_vt, prefix, query_prefix, height,
                width, tiles_across, num_tiles, line_stride, num_probes, num_slots,
                program - tile_programs, block, qk_scale,
                D, BLOCK_D, BLOCK_R, SIDE, TILES, MASKED, PRECISION,
            )  # fmt: skip
    elif PROBING:  # noqa: SIM102
        if block == 0:
            tiles = batch_head * num_tiles
            summarise_tiles(
                k, v, valid, q_mean + batch_head * num_groups * D,
                group_counts + batch_head * num_groups,
                probe_deviation + batch_head * num_slots * D, counts + tiles,
                cross + tiles * (D * D), k_spread + 2 * tiles, v_radius + batch_head,
                probe_cross + batch_head * num_slots * num_tiles * D, stride_kt, stride_vt,
                height, width, tiles_across, num_tiles, num_groups, group_stride, num_probes, num_slots,
                program - 2 * tile_programs, qk_scale,
                D, BLOCK_D, SIDE, STAT_TILES, MASKED, OWN_GRID, PRECISION,
            )  # fmt: skip
