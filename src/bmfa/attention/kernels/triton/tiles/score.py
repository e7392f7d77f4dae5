"""Kernel 2 of 5: score every token by the representative queries.

Computes the log-sum-exp and the gap of each tile for each representative, and adds up what the programs
of the pooling kernel left in parts.
"""

import triton
import triton.language as tl

from bmfa.attention.kernels.triton.tiles.primitives import (
    load_rows,
    split_batch_head,
    tile_tokens,
    valid_tokens,
)

# A gap is the difference of a log-sum-exp, log n and a mean score, which are off by about
# 8 roundings of float32 (8 * 2^-23 = 9.5e-7) of |mean| + log 64 or less. A gap below that counts as 0.
GAP_ROUNDING = tl.constexpr(1e-6)
LOG_TOKENS = tl.constexpr(4.0)  # about log 64, the logarithm of the tokens of a full tile
# Gaps are stored in float16, whose largest number is 65504.
LARGEST_STORED_GAP = tl.constexpr(6e4)
# Counts that are added up in one step.
BLOCK_COUNTS = tl.constexpr(1024)


@triton.jit
def reduce_parts(
    kv_cov_parts, kv_cov, counts, prefix_m, prefix_l, prefix_acc, o,
    stride_ob, stride_oh, stride_ot, H, prefix, num_tiles, batch_head, strip, parts, qk_scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, STRIP: tl.constexpr, BLOCK_PARTS: tl.constexpr,
):  # fmt: skip
    """Add up the parts of STRIP rows of kv_cov, and of every (D / STRIP)-th prefix output.

    Writes kv_cov (B * H, D, D) times qk_scale / n, and the rows of o of the prefix queries.
    """
    batch, head, batch_head = split_batch_head(batch_head, H)
    columns, lines = tl.arange(0, BLOCK_D), strip * STRIP + tl.arange(0, STRIP)
    square = lines[:, None] * D + columns[None, :]
    mask = (lines < D)[:, None] & (columns < D)[None, :]
    total = tl.zeros((STRIP, BLOCK_D), tl.float32)
    for part in range(parts):
        source = kv_cov_parts + (batch_head * parts + part) * (D * D) + square
        total += tl.load(source, mask=mask, other=0.0).to(tl.float32)
    n = 0.0
    for start in range(0, num_tiles, BLOCK_COUNTS):
        tiles = start + tl.arange(0, BLOCK_COUNTS)
        tile_counts = counts + batch_head * num_tiles + tiles
        n += tl.sum(tl.load(tile_counts, mask=tiles < num_tiles, other=0.0), 0)
    total *= qk_scale / tl.maximum(n, 1.0)
    target = kv_cov + batch_head * (D * D) + square
    tl.store(target, total.to(kv_cov.dtype.element_ty), mask=mask)
    for token in range(strip, prefix, tl.cdiv(D, STRIP)):
        part_index = tl.arange(0, BLOCK_PARTS)
        offsets = (batch_head * parts + part_index) * prefix + token
        is_part = part_index < parts
        m_i = tl.load(prefix_m + offsets, mask=is_part, other=float("-inf"))
        weights = tl.exp2(m_i - tl.max(m_i, 0))
        l_i = tl.sum(weights * tl.load(prefix_l + offsets, mask=is_part, other=0.0), 0)
        pointers = prefix_acc + offsets[:, None] * D + columns[None, :]
        acc = tl.load(pointers, mask=is_part[:, None] & (columns < D)[None, :], other=0.0)
        output = tl.sum(weights[:, None] * acc, 0) / l_i
        row = o + batch * stride_ob + head * stride_oh + token * stride_ot
        tl.store(row + columns, output.to(o.dtype.element_ty), mask=columns < D)


@triton.jit
def score_kernel(
    k, valid, k_mean, q_mean, counts, lse, gap,
    kv_cov_parts, kv_cov, prefix_m, prefix_l, prefix_acc, o,
    stride_kb, stride_kh, stride_kt, stride_ob, stride_oh, stride_ot,
    H, prefix, height, width, tiles_across, num_tiles, first_group, num_rows, num_groups,
    tile_programs, parts, qk_scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr,
    TILES_PER_PROGRAM: tl.constexpr, STRIP: tl.constexpr, BLOCK_PARTS: tl.constexpr,
    SIDE: tl.constexpr, Z_ORDER: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Score TILES_PER_PROGRAM tiles by BLOCK_R representatives of one head.

    Grid: (tile_programs + strips of kv_cov, blocks of representatives, B * H). The representatives are
    those of the groups first_group to first_group + num_rows. The programs past `tile_programs` reduce
    the parts of the pooling kernel.

    Writes lse (B * H, num_rows, T) = log sum_i exp(s_i), and gap = lse - log n - mean score in float16.
    The mean score is the product with the stored k_mean, so that the gap also makes up for the
    rounding of that mean.
    """
    program, block = tl.program_id(0), tl.program_id(1)
    batch, head, batch_head = split_batch_head(tl.program_id(2), H)
    if program >= tile_programs:
        if block == 0 and first_group == 0:
            reduce_parts(
                kv_cov_parts, kv_cov, counts, prefix_m, prefix_l, prefix_acc, o,
                stride_ob, stride_oh, stride_ot, H, prefix, num_tiles, tl.program_id(2),
                program - tile_programs, parts, qk_scale, D, BLOCK_D, STRIP, BLOCK_PARTS,
            )  # fmt: skip
    else:
        k += batch * stride_kb + head * stride_kh + prefix * stride_kt
        valid += batch * height * width
        rows = block * BLOCK_R + tl.arange(0, BLOCK_R)
        is_row = rows < num_rows
        q_means = load_rows(
            q_mean + batch_head * num_groups * D, first_group + rows, D, is_row, D, BLOCK_D
        )
        slots, members = tl.arange(0, SIDE * SIDE), tl.arange(0, BLOCK_T)
        m_i = tl.full((BLOCK_R, BLOCK_T), float("-inf"), tl.float32)
        l_i = tl.zeros((BLOCK_R, BLOCK_T), tl.float32)
        for member in range(TILES_PER_PROGRAM):
            tile = program * TILES_PER_PROGRAM + member
            tokens, on_grid = tile_tokens(tile, slots, height, width, tiles_across, Z_ORDER, SIDE)
            exists = valid_tokens(valid, tokens, on_grid & (tile < num_tiles), MASKED)
            tile_k = load_rows(k, tokens, stride_kt, exists, D, BLOCK_D)  # (S, BLOCK_D)
            scores = tl.dot(q_means, tl.trans(tile_k), input_precision=PRECISION) * qk_scale
            scores = tl.where(exists[None, :], scores, float("-inf"))  # (BLOCK_R, S)
            tile_m = tl.max(scores, 1)
            tile_m = tl.where(tile_m == float("-inf"), 0.0, tile_m)
            tile_l = tl.sum(tl.exp(scores - tile_m[:, None]), 1)
            of_tile = (members == member)[None, :]
            m_i = tl.where(of_tile, tile_m[:, None], m_i)
            l_i = tl.where(of_tile, tile_l[:, None], l_i)
        tile_lse = m_i + tl.log(tl.where(l_i > 0.0, l_i, 1.0))
        tile_lse = tl.where(l_i > 0.0, tile_lse, float("-inf"))  # (BLOCK_R, BLOCK_T)
        tiles = program * TILES_PER_PROGRAM + members
        is_tile = (members < TILES_PER_PROGRAM) & (tiles < num_tiles)
        k_means = load_rows(k_mean + batch_head * num_tiles * D, tiles, D, is_tile, D, BLOCK_D)
        mean = tl.dot(q_means, tl.trans(k_means), input_precision=PRECISION) * qk_scale
        count = tl.load(counts + batch_head * num_tiles + tiles, mask=is_tile, other=0.0)
        tile_gap = tile_lse - tl.log(tl.maximum(count, 1.0))[None, :] - mean
        # A tile of one token has no gap, whatever the rounding of its stored mean key.
        above_rounding = tile_gap > GAP_ROUNDING * (LOG_TOKENS + tl.abs(mean))
        has_gap = (count > 1.0)[None, :] & above_rounding
        tile_gap = tl.where(has_gap, tl.minimum(tile_gap, LARGEST_STORED_GAP), 0.0)
        offsets = (batch_head * num_rows + rows.to(tl.int64))[:, None] * num_tiles + tiles[None, :]
        mask = is_row[:, None] & is_tile[None, :]
        tl.store(lse + offsets, tile_lse, mask=mask)
        tl.store(gap + offsets, tile_gap.to(gap.dtype.element_ty), mask=mask)
