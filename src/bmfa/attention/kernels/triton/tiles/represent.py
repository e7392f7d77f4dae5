"""Kernel 2: tangents of all tiles at the representatives, statistics of tiles, and exact probes."""

import triton
import triton.language as tl

from bmfa.attention.kernels.triton.tiles.primitives import (
    LOG2E,
    load_rows,
    split_batch_head,
    tile_tokens,
    valid_tokens,
)

LN2 = tl.constexpr(0.6931471805599453)
# Replaces a sum of 0, where no token exists. Any other sum is at least 1: its largest term is exp(0).
SMALLEST_SUM = tl.constexpr(1e-30)


@triton.jit
def probe_queries(
    q, stride_qt, probe_tokens, slots, num_probes, prefix, D: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Load the queries (n, BLOCK_D) of slots: probes first, then the prefix; 0 for the others."""
    is_probe = slots < num_probes
    tokens = tl.load(probe_tokens + slots, mask=is_probe, other=-1)
    is_prefix = (slots >= num_probes) & (slots < num_probes + prefix)
    tokens = tl.where(is_prefix, slots - num_probes, tokens)
    return load_rows(q, tokens, stride_qt, tokens >= 0, D, BLOCK_D)


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
def head_statistics(
    counts, v_mean, v_radius, v_squares, sigma, diameter, batch_head, num_tiles,
    D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Write the spread of the values of a head, and a bound on their diameter."""
    columns, lines = tl.arange(0, BLOCK_D), tl.arange(0, 64)
    total = tl.zeros((BLOCK_D,), tl.float32)
    n = 0.0
    for start in range(0, num_tiles, 64):
        tiles = start + lines
        count = tl.load(counts + batch_head * num_tiles + tiles, mask=tiles < num_tiles, other=0.0)
        means = load_rows(v_mean + batch_head * num_tiles * D, tiles, D, tiles < num_tiles, D, BLOCK_D)
        total += tl.sum(count[:, None] * means, 0)
        n += tl.sum(count, 0)
    mean = total / tl.maximum(n, 1.0)
    squares, radius = 0.0, 0.0
    for start in range(0, num_tiles, 64):
        tiles = start + lines
        line = batch_head * num_tiles + tiles
        count = tl.load(counts + line, mask=tiles < num_tiles, other=0.0)
        means = load_rows(v_mean + batch_head * num_tiles * D, tiles, D, tiles < num_tiles, D, BLOCK_D)
        difference = means - mean[None, :]
        distance = tl.sum(tl.where((columns < D)[None, :], difference * difference, 0.0), 1)
        within = tl.load(v_squares + line, mask=tiles < num_tiles, other=0.0)
        furthest = tl.load(v_radius + line, mask=tiles < num_tiles, other=0.0)
        squares += tl.sum(count * distance + within, 0)
        reach = tl.where(count > 0.0, tl.sqrt(distance) + furthest, 0.0)
        radius = tl.maximum(radius, tl.max(reach, 0))
    tl.store(sigma + batch_head, tl.sqrt(squares / tl.maximum(n, 1.0)))
    tl.store(diameter + batch_head, 2.0 * radius)


@triton.jit
def represent_kernel(
    q, k, v, valid, q_mean, counts, v_mean, v_radius, v_squares, probe_tokens,
    log_mass, bias, k_tangent, v_tangent, probe_lse, probe_tangent, probe_v,
    cross, k_spread, probe_cross, sigma, diameter,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt,
    H, prefix, height, width, tiles_across, num_tiles, first_row, num_rows, row_capacity, group_stride,
    num_probes, num_slots, tile_programs, stat_tiles, qk_scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, SIDE: tl.constexpr,
    TILES: tl.constexpr, PROBING: tl.constexpr, Z_ORDER: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Summarise TILES tiles at BLOCK_R representatives. Grid: (tile programs + statistics, row blocks, B * H).

    Row r of the band is the group at position first_row + r. For each row and tile, writes log_mass
    (B * H, row_capacity, T) = log sum exp of the scores, the means k_tangent and v_tangent
    (B * H, row_capacity, T, D) of keys and values under their softmax, and bias, the logit of the tile
    minus qk_scale q . k_tangent.

    With PROBING, in the first band, the queries of num_slots slots (probes, then the prefix) are attended
    exactly: probe_lse (B * H, num_slots, T) and the mean values probe_v (B * H, num_slots, T, D) of each
    tile, and the logit probe_tangent that the tangent gives. The programs past `tile_programs` write, for
    stat_tiles tiles each, the covariance `cross` (B * H, T, D, D) of keys and values under the softmax at
    the mean query of the head, k_spread (B * H, T), and the product probe_cross (B * H, num_slots, T, D)
    of cross with the probes; the first of them also sigma and diameter (B * H).
    """
    S: tl.constexpr = SIDE * SIDE
    program, block = tl.program_id(0), tl.program_id(1)
    batch, head, batch_head = split_batch_head(tl.program_id(2), H)
    q += batch * stride_qb + head * stride_qh
    k += batch * stride_kb + head * stride_kh + prefix * stride_kt
    v += batch * stride_vb + head * stride_vh + prefix * stride_vt
    valid += batch * height * width
    q_mean += batch_head * num_tiles * D
    probe_tokens += batch_head * num_probes
    rows = block * BLOCK_R + tl.arange(0, BLOCK_R)
    slots, columns = tl.arange(0, S), tl.arange(0, BLOCK_D)
    in_head = columns < D
    qk_scale_log2 = qk_scale * LOG2E
    if program < tile_programs:
        is_row = rows < num_rows
        groups = (first_row + rows) * group_stride % num_tiles
        q_means = load_rows(q_mean, groups, D, is_row, D, BLOCK_D)
        q_means_f32 = q_means.to(tl.float32)
        if PROBING:
            is_slot = rows < num_slots
            probes = probe_queries(q, stride_qt, probe_tokens, rows, num_probes, prefix, D, BLOCK_D)
        line = (batch_head * row_capacity + rows) * num_tiles
        slot_line = (batch_head * num_slots + rows) * num_tiles
        for member in range(TILES):
            tile = program * TILES + member
            tokens, on_grid = tile_tokens(tile, slots, height, width, tiles_across, Z_ORDER, SIDE)
            exists = valid_tokens(valid, tokens, on_grid & (tile < num_tiles), MASKED)
            tile_k = load_rows(k, tokens, stride_kt, exists, D, BLOCK_D)  # (S, BLOCK_D)
            tile_v = load_rows(v, tokens, stride_vt, exists, D, BLOCK_D)
            weights, total, lse = tile_softmax(q_means, tile_k, exists, qk_scale_log2, PRECISION)
            k_means = tl.dot(weights, tile_k, input_precision=PRECISION) / total[:, None]
            v_means = tl.dot(weights, tile_v, input_precision=PRECISION) / total[:, None]
            k_means = k_means.to(tile_k.dtype)  # what is stored is what the bias is made for
            k_means_f32 = k_means.to(tl.float32)
            offset = lse - qk_scale * tl.sum(q_means_f32 * k_means_f32, 1)
            is_line = is_row & (tile < num_tiles)
            tl.store(log_mass + line + tile, lse, mask=is_line)
            tl.store(bias + line + tile, offset, mask=is_line)
            pointers = (line + tile)[:, None] * D + columns[None, :]
            mask = is_line[:, None] & in_head[None, :]
            tl.store(k_tangent + pointers, k_means, mask=mask)
            tl.store(v_tangent + pointers, v_means.to(tile_v.dtype), mask=mask)
            if PROBING:
                if block * BLOCK_R < num_slots:
                    tangent = offset + qk_scale * tl.sum(probes.to(tl.float32) * k_means_f32, 1)
                    weights, total, lse = tile_softmax(
                        probes, tile_k, exists, qk_scale_log2, PRECISION
                    )
                    values = tl.dot(weights, tile_v, input_precision=PRECISION) / total[:, None]
                    is_line = is_slot & (tile < num_tiles)
                    tl.store(probe_lse + slot_line + tile, lse, mask=is_line)
                    tl.store(probe_tangent + slot_line + tile, tangent, mask=is_line)
                    tl.store(
                        probe_v + (slot_line + tile)[:, None] * D + columns[None, :],
                        values.to(tile_v.dtype), mask=is_line[:, None] & in_head[None, :],
                    )  # fmt: skip
    elif block == 0:
        statistics = program - tile_programs
        q_head = tl.zeros((BLOCK_D,), tl.float32)
        n = 0.0
        lines = tl.arange(0, 64)
        for start in range(0, num_tiles, 64):
            tiles = start + lines
            count = tl.load(
                counts + batch_head * num_tiles + tiles, mask=tiles < num_tiles, other=0.0
            )
            means = load_rows(q_mean, tiles, D, tiles < num_tiles, D, BLOCK_D).to(tl.float32)
            q_head += tl.sum(count[:, None] * means, 0)
            n += tl.sum(count, 0)
        q_head = q_head / tl.maximum(n, 1.0)
        if statistics == 0:
            head_statistics(
                counts, v_mean, v_radius, v_squares, sigma, diameter, batch_head, num_tiles, D,
                BLOCK_D,
            )  # fmt: skip
        square = columns[:, None] * D + columns[None, :]
        square_mask = in_head[:, None] & in_head[None, :]
        for member in range(stat_tiles):
            tile = statistics * stat_tiles + member
            if tile < num_tiles:
                tokens, on_grid = tile_tokens(
                    tile, slots, height, width, tiles_across, Z_ORDER, SIDE
                )
                exists = valid_tokens(valid, tokens, on_grid, MASKED)
                tile_k = load_rows(k, tokens, stride_kt, exists, D, BLOCK_D).to(tl.float32)
                tile_v = load_rows(v, tokens, stride_vt, exists, D, BLOCK_D).to(tl.float32)
                count = tl.maximum(tl.sum(exists.to(tl.float32), 0), 1.0)
                logits = tl.sum(tile_k * q_head[None, :], 1) * qk_scale
                logits = tl.where(exists, logits, float("-inf"))
                m_i = tl.max(logits, 0)
                p = tl.exp(logits - tl.where(m_i == float("-inf"), 0.0, m_i))
                p = p / tl.maximum(tl.sum(p, 0), SMALLEST_SUM)
                dk = tile_k - tl.sum(p[:, None] * tile_k, 0)[None, :]
                dv = tile_v - tl.sum(p[:, None] * tile_v, 0)[None, :]
                dk = (p[:, None] * dk).to(cross.dtype.element_ty)
                covariance = tl.dot(
                    tl.trans(dk), dv.to(cross.dtype.element_ty), input_precision=PRECISION
                ).to(cross.dtype.element_ty)
                tl.store(
                    cross + (batch_head * num_tiles + tile) * (D * D) + square, covariance,
                    mask=square_mask,
                )  # fmt: skip
                k_means = tl.sum(tile_k, 0) / count
                difference = tl.where(exists[:, None], tile_k - k_means[None, :], 0.0)
                spread = tl.sum(tl.sum(difference * difference, 1), 0) / count
                tl.store(k_spread + batch_head * num_tiles + tile, spread)
                for start in range(0, num_slots, S):
                    slot = start + slots
                    groups = slot * group_stride % num_tiles
                    probes = probe_queries(
                        q, stride_qt, probe_tokens, slot, num_probes, prefix, D, BLOCK_D
                    ).to(tl.float32)
                    means = load_rows(q_mean, groups, D, slot < num_probes, D, BLOCK_D)
                    deviation = ((probes - means.to(tl.float32)) * qk_scale).to(covariance.dtype)
                    product = tl.dot(deviation, covariance, input_precision=PRECISION)
                    tl.store(
                        probe_cross
                        + ((batch_head * num_slots + slot) * num_tiles + tile)[:, None] * D
                        + columns[None, :],
                        product.to(probe_cross.dtype.element_ty),
                        mask=(slot < num_probes)[:, None] & in_head[None, :],
                    )
