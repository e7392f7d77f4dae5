"""Kernel 2: tangents of all tiles at the representatives, exact probes, and statistics of tiles."""

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
def represent_tiles(
    k, v, valid, q_mean, log_mass, k_tangent, v_tangent, stride_kt, stride_vt,
    height, width, tiles_across, num_tiles, first_row, num_rows, group_stride, program, block, qk_scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, SIDE: tl.constexpr,
    TILES: tl.constexpr, Z_ORDER: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Tangents of TILES tiles at BLOCK_R representatives; all pointers are those of the head."""
    rows = block * BLOCK_R + tl.arange(0, BLOCK_R)
    slots, columns = tl.arange(0, SIDE * SIDE), tl.arange(0, BLOCK_D)
    is_row, in_head = rows < num_rows, columns < D
    groups = (first_row + rows) * group_stride % num_tiles
    q_means = load_rows(q_mean, groups, D, is_row, D, BLOCK_D)
    line = rows * num_tiles
    for member in range(TILES):
        tile = program * TILES + member
        tokens, on_grid = tile_tokens(tile, slots, height, width, tiles_across, Z_ORDER, SIDE)
        exists = valid_tokens(valid, tokens, on_grid & (tile < num_tiles), MASKED)
        tile_k = load_rows(k, tokens, stride_kt, exists, D, BLOCK_D)  # (S, BLOCK_D)
        tile_v = load_rows(v, tokens, stride_vt, exists, D, BLOCK_D)
        weights, total, lse = tile_softmax(q_means, tile_k, exists, qk_scale * LOG2E, PRECISION)
        inverse = 1.0 / total
        is_line = is_row & (tile < num_tiles)
        tl.store(log_mass + line + tile, lse, mask=is_line)
        pointers = (line + tile)[:, None] * D + columns[None, :]
        mask = is_line[:, None] & in_head[None, :]
        k_means = tl.dot(weights, tile_k, input_precision=PRECISION) * inverse[:, None]
        tl.store(k_tangent + pointers, k_means.to(tile_k.dtype), mask=mask)
        v_means = tl.dot(weights, tile_v, input_precision=PRECISION) * inverse[:, None]
        tl.store(v_tangent + pointers, v_means.to(tile_v.dtype), mask=mask)


@triton.jit
def attend_probes(
    q, k, v, valid, probe_tokens, probe_lse, probe_v, stride_qt, stride_kt, stride_vt,
    prefix, height, width, tiles_across, num_tiles, num_probes, num_slots, program, block, qk_scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, SIDE: tl.constexpr,
    TILES: tl.constexpr, Z_ORDER: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Log-sum-exp and mean value of TILES tiles at the queries of BLOCK_R slots."""
    rows = block * BLOCK_R + tl.arange(0, BLOCK_R)
    slots, columns = tl.arange(0, SIDE * SIDE), tl.arange(0, BLOCK_D)
    is_slot, in_head = rows < num_slots, columns < D
    probes = probe_queries(q, stride_qt, probe_tokens, rows, num_probes, prefix, D, BLOCK_D)
    line = rows * num_tiles
    for member in range(TILES):
        tile = program * TILES + member
        tokens, on_grid = tile_tokens(tile, slots, height, width, tiles_across, Z_ORDER, SIDE)
        exists = valid_tokens(valid, tokens, on_grid & (tile < num_tiles), MASKED)
        tile_k = load_rows(k, tokens, stride_kt, exists, D, BLOCK_D)
        tile_v = load_rows(v, tokens, stride_vt, exists, D, BLOCK_D)
        weights, total, lse = tile_softmax(probes, tile_k, exists, qk_scale * LOG2E, PRECISION)
        values = tl.dot(weights, tile_v, input_precision=PRECISION) / total[:, None]
        is_line = is_slot & (tile < num_tiles)
        tl.store(probe_lse + line + tile, lse, mask=is_line)
        pointers = probe_v + (line + tile)[:, None] * D + columns[None, :]
        tl.store(pointers, values.to(tile_v.dtype), mask=is_line[:, None] & in_head[None, :])


@triton.jit
def summarise_tiles(
    q, k, v, valid, q_mean, counts, probe_tokens, cross, k_spread, v_radius, probe_cross,
    stride_qt, stride_kt, stride_vt,
    prefix, height, width, tiles_across, num_tiles, group_stride, num_probes, num_slots, program,
    stat_tiles, qk_scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, SIDE: tl.constexpr,
    Z_ORDER: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Covariance of keys and values at the mean query of the head, and spreads, of stat_tiles tiles."""
    slots, columns = tl.arange(0, SIDE * SIDE), tl.arange(0, BLOCK_D)
    in_head = columns < D
    q_head = tl.zeros((BLOCK_D,), tl.float32)
    n = 0.0
    for start in range(0, num_tiles, 64):
        tiles = start + tl.arange(0, 64)
        count = tl.load(counts + tiles, mask=tiles < num_tiles, other=0.0)
        means = load_rows(q_mean, tiles, D, tiles < num_tiles, D, BLOCK_D).to(tl.float32)
        q_head += tl.sum(count[:, None] * means, 0)
        n += tl.sum(count, 0)
    q_head = q_head / tl.maximum(n, 1.0)
    square = columns[:, None] * D + columns[None, :]
    for member in range(stat_tiles):
        tile = program * stat_tiles + member
        tokens, on_grid = tile_tokens(tile, slots, height, width, tiles_across, Z_ORDER, SIDE)
        exists = valid_tokens(valid, tokens, on_grid & (tile < num_tiles), MASKED)
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
        is_tile = tile < num_tiles
        tl.store(
            cross + tile.to(tl.int64) * (D * D) + square, covariance,
            mask=in_head[:, None] & in_head[None, :] & is_tile,
        )  # fmt: skip
        difference = tile_k - (tl.sum(tile_k, 0) / count)[None, :]
        difference = tl.where(exists[:, None], difference, 0.0)
        spread = tl.sum(tl.sum(difference * difference, 1), 0) / count
        tl.store(k_spread + tile, spread, mask=is_tile)
        difference = tile_v - (tl.sum(tile_v, 0) / count)[None, :]
        difference = tl.where(exists[:, None], difference, 0.0)
        radius = tl.sqrt(tl.max(tl.sum(difference * difference, 1), 0))
        # The bits of numbers that are not negative are in their order.
        tl.atomic_max(v_radius, radius.to(tl.int32, bitcast=True), mask=is_tile)
        for start in range(0, num_slots, SIDE * SIDE):
            slot = start + slots
            probes = probe_queries(q, stride_qt, probe_tokens, slot, num_probes, prefix, D, BLOCK_D)
            groups = slot * group_stride % num_tiles
            means = load_rows(q_mean, groups, D, slot < num_probes, D, BLOCK_D)
            deviation = (probes.to(tl.float32) - means.to(tl.float32)) * qk_scale
            product = tl.dot(deviation.to(covariance.dtype), covariance, input_precision=PRECISION)
            pointers = (slot * num_tiles + tile)[:, None] * D + columns[None, :]
            tl.store(
                probe_cross + pointers, product.to(probe_cross.dtype.element_ty),
                mask=(slot < num_probes)[:, None] & in_head[None, :] & is_tile,
            )  # fmt: skip


@triton.jit
def represent_kernel(
    q, k, v, valid, q_mean, counts, probe_tokens,
    log_mass, k_tangent, v_tangent, probe_lse, probe_v, cross, k_spread, v_radius, probe_cross,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt,
    H, prefix, height, width, tiles_across, num_tiles, first_row, num_rows, row_capacity, group_stride,
    num_probes, num_slots, tile_programs, stat_tiles, qk_scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, SIDE: tl.constexpr,
    TILES: tl.constexpr, PROBING: tl.constexpr, Z_ORDER: tl.constexpr, MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Summarise tiles at representatives. Grid: (programs, blocks of BLOCK_R rows, B * H).

    Row r of the band is the group at position first_row + r. The first `tile_programs` programs write, for
    each row and tile, log_mass (B * H, row_capacity, T) = log sum exp of the scores, and the means
    k_tangent and v_tangent (B * H, row_capacity, T, D) of keys and values under their softmax.

    With PROBING, in the first band, as many programs attend exactly with the queries of num_slots slots
    (probes, then the prefix): probe_lse (B * H, num_slots, T) and the mean values probe_v
    (B * H, num_slots, T, D) of each tile. The others write, for stat_tiles tiles each, the covariance
    `cross` (B * H, T, D, D) of keys and values under the softmax at the mean query of the head, k_spread
    (B * H, T), v_radius (B * H), the bits of the largest |v - mean v| in a tile, and the product probe_cross (B * H, num_slots, T, D) of cross with the probes.
    """
    program, block = tl.program_id(0), tl.program_id(1)
    batch, head, batch_head = split_batch_head(tl.program_id(2), H)
    q += batch * stride_qb + head * stride_qh
    k += batch * stride_kb + head * stride_kh + prefix * stride_kt
    v += batch * stride_vb + head * stride_vh + prefix * stride_vt
    valid += batch * height * width
    q_mean += batch_head * num_tiles * D
    rows = batch_head * row_capacity * num_tiles
    if program < tile_programs:
        if block * BLOCK_R < num_rows:
            represent_tiles(
                k, v, valid, q_mean, log_mass + rows, k_tangent + rows * D, v_tangent + rows * D,
                stride_kt, stride_vt, height, width, tiles_across, num_tiles,
                first_row, num_rows, group_stride, program, block, qk_scale,
                D, BLOCK_D, BLOCK_R, SIDE, TILES, Z_ORDER, MASKED, PRECISION,
            )  # fmt: skip
    elif PROBING:
        probe_tokens += batch_head * num_probes
        lines = batch_head * num_slots * num_tiles
        if program < 2 * tile_programs:
            if block * BLOCK_R < num_slots:
                attend_probes(
                    q, k, v, valid, probe_tokens, probe_lse + lines, probe_v + lines * D,
                    stride_qt, stride_kt, stride_vt, prefix, height, width, tiles_across, num_tiles,
                    num_probes, num_slots, program - tile_programs, block, qk_scale,
                    D, BLOCK_D, BLOCK_R, SIDE, TILES, Z_ORDER, MASKED, PRECISION,
                )  # fmt: skip
        elif block == 0:
            tiles = batch_head * num_tiles
            summarise_tiles(
                q, k, v, valid, q_mean, counts + tiles, probe_tokens, cross + tiles * (D * D),
                k_spread + tiles, v_radius + batch_head, probe_cross + lines * D,
                stride_qt, stride_kt, stride_vt, prefix, height, width, tiles_across, num_tiles,
                group_stride, num_probes, num_slots, program - 2 * tile_programs, stat_tiles, qk_scale,
                D, BLOCK_D, SIDE, Z_ORDER, MASKED, PRECISION,
            )  # fmt: skip
