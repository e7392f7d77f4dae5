"""Kernel 1: means and spreads of the queries and the values of each tile, and the probes."""

import triton
import triton.language as tl

from bmfa.attention.kernels.triton.tiles.primitives import (
    load_rows,
    split_batch_head,
    tile_tokens,
    valid_tokens,
)


@triton.jit
def pool_kernel(
    q, v, valid, q_mean, q_spread, counts, v_mean, v_radius, v_squares, probe_tokens,
    stride_qb, stride_qh, stride_qt, stride_vb, stride_vh, stride_vt,
    H, prefix, height, width, tiles_across, num_tiles, position_stride, num_probes, qk_scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, SIDE: tl.constexpr,
    Z_ORDER: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Summarise the queries and values of one tile of one head. Grid: (T, B * H).

    Writes q_mean (B * H, T, D), q_spread (B * H, T) = qk_scale^2 rho / 2d, counts (B * H, T), v_mean
    (B * H, T, D), and over the tile the largest |v - v_mean| in v_radius and the sum of their squares in
    v_squares (B * H, T). If the group has a probe, writes its token, or -1, to probe_tokens
    (B * H, num_probes).
    """
    S: tl.constexpr = SIDE * SIDE
    tile = tl.program_id(0)
    batch, head, batch_head = split_batch_head(tl.program_id(1), H)
    q += batch * stride_qb + head * stride_qh + prefix * stride_qt
    v += batch * stride_vb + head * stride_vh + prefix * stride_vt
    valid += batch * height * width
    slots, columns = tl.arange(0, S), tl.arange(0, BLOCK_D)
    tokens, on_grid = tile_tokens(tile, slots, height, width, tiles_across, Z_ORDER, SIDE)
    exists = valid_tokens(valid, tokens, on_grid, MASKED)
    tile_q = load_rows(q, tokens, stride_qt, exists, D, BLOCK_D).to(tl.float32)  # (S, BLOCK_D)
    tile_v = load_rows(v, tokens, stride_vt, exists, D, BLOCK_D).to(tl.float32)
    count = tl.sum(exists.to(tl.float32), 0)
    at_least_one = tl.maximum(count, 1.0)
    q_means = (tl.sum(tile_q, 0) / at_least_one).to(q_mean.dtype.element_ty)  # (BLOCK_D,)
    v_means = tl.sum(tile_v, 0) / at_least_one
    q_difference = tl.where(exists[:, None], tile_q - q_means.to(tl.float32)[None, :], 0.0)
    v_difference = tl.where(exists[:, None], tile_v - v_means[None, :], 0.0)
    q_square = tl.sum(tl.sum(q_difference * q_difference, 1), 0)
    v_square = tl.sum(v_difference * v_difference, 1)  # (S,)
    line = batch_head * num_tiles + tile
    in_head = columns < D
    tl.store(q_mean + line * D + columns, q_means, mask=in_head)
    tl.store(v_mean + line * D + columns, v_means, mask=in_head)
    tl.store(q_spread + line, q_square / at_least_one * (qk_scale * qk_scale / (2 * D)))
    tl.store(counts + line, count)
    tl.store(v_radius + line, tl.sqrt(tl.max(v_square, 0)))
    tl.store(v_squares + line, tl.sum(v_square, 0))
    # The group at a position p is p * stride modulo T; `position_stride` inverts that.
    position = tile * position_stride % num_tiles
    if position < num_probes:
        number = count.to(tl.int32)
        # Tiling.probe_rank
        rank = (tile * 40503 + head.to(tl.int32) * 9973 + 17) % 65536 * number // 65536
        earlier = tl.cumsum(exists.to(tl.int32), 0) - 1
        token = tl.sum(tl.where(exists & (earlier == rank), prefix + tokens, 0), 0)
        tl.store(
            probe_tokens + batch_head * num_probes + position, tl.where(number > 0, token, -1)
        )
