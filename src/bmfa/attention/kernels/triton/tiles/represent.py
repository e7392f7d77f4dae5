"""Kernel 2: tangents of all tiles at the representatives, exact probes, and statistics of tiles."""

import triton
import triton.language as tl

from bmfa.attention.kernels.triton.tiles.primitives import (
    LOG2E,
    SMALLEST_SUM,
    load_rows,
    probe_queries,
    split_batch_head,
    tile_tokens,
    valid_tokens,
)
from bmfa.attention.kernels.triton.tiles.statistics import summarise_tiles

LN2 = tl.constexpr(0.6931471805599453)


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
