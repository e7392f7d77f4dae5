"""How keys and values vary within each tile."""

import triton
import triton.language as tl

from bmfa.attention.kernels.triton.tiles.primitives import (
    SMALLEST_SUM,
    load_rows,
    sum_products,
    tile_tokens,
    valid_tokens,
)


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
