"""Kernel 4 of 5: the values that the means of unexpanded tiles lose, at each representative."""

import triton
import triton.language as tl

from bmfa.attention.kernels.triton.tiles.primitives import (
    LOG2E,
    load_rows,
    split_batch_head,
    tile_tokens,
    valid_tokens,
)


@triton.jit
def residual_kernel(
    k, v, valid, v_mean, q_mean, coarse_bits, lse_max, residual_parts,
    stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt,
    H, prefix, height, width, tiles_across, num_tiles, first_group, num_rows, num_groups,
    tiles_per_split, qk_scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr,
    TILES_PER_STEP: tl.constexpr, SIDE: tl.constexpr, Z_ORDER: tl.constexpr, MASKED: tl.constexpr,
    RAGGED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sum exp(s_i - lse_max) (v_i - v_mean) over the unexpanded tiles of one split.

    Grid: (splits, blocks of representatives, B * H). Writes residual_parts
    (B * H, num_rows, splits, D).
    """
    split, block = tl.program_id(0), tl.program_id(1)
    batch, head, batch_head = split_batch_head(tl.program_id(2), H)
    k += batch * stride_kb + head * stride_kh + prefix * stride_kt
    v += batch * stride_vb + head * stride_vh + prefix * stride_vt
    valid += batch * height * width
    rows = block * BLOCK_R + tl.arange(0, BLOCK_R)
    is_row = rows < num_rows
    q_means = load_rows(
        q_mean + batch_head * num_groups * D, first_group + rows, D, is_row, D, BLOCK_D
    )
    qk_scale_log2 = qk_scale * LOG2E
    m_i = tl.load(lse_max + batch_head * num_rows + rows, mask=is_row, other=0.0) * LOG2E
    groups = batch_head * num_groups + first_group + rows.to(tl.int64)
    words = coarse_bits + groups * tl.cdiv(num_tiles, 32)
    slots, columns, members = (
        tl.arange(0, SIDE * SIDE),
        tl.arange(0, BLOCK_D),
        tl.arange(0, BLOCK_T),
    )
    acc = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
    first_tile = split * tiles_per_split
    for start in range(
        first_tile, tl.minimum(first_tile + tiles_per_split, num_tiles), TILES_PER_STEP
    ):
        word = tl.load(words + start // 32, mask=is_row, other=0)
        masses = tl.zeros((BLOCK_R, BLOCK_T), tl.float32)
        for member in range(TILES_PER_STEP):
            tile = start + member
            tokens, on_grid = tile_tokens(tile, slots, height, width, tiles_across, Z_ORDER, SIDE)
            exists = valid_tokens(valid, tokens, on_grid & (tile < num_tiles), MASKED)
            tile_k = load_rows(k, tokens, stride_kt, exists, D, BLOCK_D)  # (S, BLOCK_D)
            tile_v = load_rows(v, tokens, stride_vt, exists, D, BLOCK_D)
            coarse = ((word >> (tile % 32)) & 1) != 0
            scores = tl.dot(q_means, tl.trans(tile_k), input_precision=PRECISION) * qk_scale_log2
            # Scores of unexpanded tiles are below the maximum; those of expanded ones may overflow.
            shift = tl.where(coarse, m_i, float("inf"))
            weights = tl.exp2(scores - shift[:, None])  # (BLOCK_R, S)
            if MASKED or RAGGED:
                weights = tl.where(exists[None, :], weights, 0.0)
            weights = weights.to(tile_v.dtype)
            acc = tl.dot(weights, tile_v, acc, input_precision=PRECISION)
            mass = tl.sum(weights.to(tl.float32), 1)
            masses = tl.where((members == member)[None, :], mass[:, None], masses)
        tiles = start + members
        is_tile = (members < TILES_PER_STEP) & (tiles < num_tiles)
        v_means = load_rows(v_mean + batch_head * num_tiles * D, tiles, D, is_tile, D, BLOCK_D)
        acc -= tl.dot(masses, v_means.to(tl.float32), input_precision="tf32x3")
    lines = (batch_head * num_rows + rows.to(tl.int64)) * tl.num_programs(0) + split
    mask = is_row[:, None] & (columns < D)[None, :]
    pointers = residual_parts + lines[:, None] * D + columns[None, :]
    tl.store(pointers, acc.to(residual_parts.dtype.element_ty), mask=mask)
