"""Kernels of mean tiles: pool, score, select, residual, attention, launched in this order.

A tile has S = SIDE * SIDE slots, one for each of its tokens in raster order. Slots beyond the edge of
the grid hold no token. Tensors of tokens have any strides but a contiguous head dimension.
"""

import triton
import triton.language as tl

from bmfa.attention.kernels.triton.tiles.primitives import (
    LOG2E,
    load_rows,
    online_softmax,
    split_batch_head,
    tile_tokens,
)

# A mean squared distance is a difference of two sums of squares. 16 roundings of float32
# (16 * 2^-23 = 1.9e-6) of the larger one count as 0.
SPREAD_ROUNDING = tl.constexpr(2e-6)


@triton.jit
def sum_of_squares(x):
    x = x.to(tl.float32)
    return tl.sum(tl.sum(x * x, 1), 0)


@triton.jit
def mean_squared_distance(mean_square, means):
    """Return mean |x|^2 - |mean x|^2, or 0 within its rounding or if the squares overflow."""
    distance = mean_square - tl.sum(means * means, 1)
    return tl.where(distance > SPREAD_ROUNDING * mean_square, distance, 0.0)


@triton.jit
def mean_pool_kernel(
    q, k, v, k_mean, v_mean, q_mean, k_spread, q_spread, counts, kv_cov_parts,
    prefix_m, prefix_l, prefix_acc,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt,
    H, prefix, height, width, tiles_across, num_tiles, num_groups, qk_scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr, SIDE: tl.constexpr,
    TILES_PER_PROGRAM: tl.constexpr, BLOCK_PREFIX: tl.constexpr,
    RAGGED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Pool TILES_PER_PROGRAM tiles of one head. Grid: (parts, B * H).

    Sums over tiles are rows of a product with a one-hot matrix, so that no reduction crosses warps.
    Row t of the (S, BLOCK_D) accumulators belongs to tile t of the part; S >= TILES_PER_PROGRAM.

    Writes k_mean, v_mean (B * H, T, D), q_mean (B * H, R, D), k_spread, counts (B * H, T),
    q_spread (B * H, R) times qk_scale^2 / 2D, kv_cov_parts (B * H, parts, D, D), and the online
    softmax of the prefix queries over the part: prefix_m, prefix_l (B * H, parts, prefix) and
    prefix_acc (B * H, parts, prefix, D).
    """
    S: tl.constexpr = SIDE * SIDE
    part = tl.program_id(0)
    batch, head, batch_head = split_batch_head(tl.program_id(1), H)
    q += batch * stride_qb + head * stride_qh
    k += batch * stride_kb + head * stride_kh
    v += batch * stride_vb + head * stride_vh
    rows, slots, columns = tl.arange(0, S), tl.arange(0, S), tl.arange(0, BLOCK_D)
    count = tl.zeros((S,), tl.float32)
    k_sum = tl.zeros((S, BLOCK_D), tl.float32)
    v_sum = tl.zeros((S, BLOCK_D), tl.float32)
    q_sum = tl.zeros((S, BLOCK_D), tl.float32)
    k_squares = tl.zeros((S,), tl.float32)
    q_squares = tl.zeros((S,), tl.float32)
    kv_cov = tl.zeros((BLOCK_D, BLOCK_D), tl.float32)
    if BLOCK_PREFIX > 0:
        prefix_tokens = tl.arange(0, BLOCK_PREFIX)
        in_prefix = prefix_tokens < prefix
        prefix_q = load_rows(q, prefix_tokens, stride_qt, in_prefix, D, BLOCK_D)
        qk_scale_log2 = qk_scale * LOG2E
        m_i = tl.full((BLOCK_PREFIX,), float("-inf"), tl.float32)
        l_i = tl.zeros((BLOCK_PREFIX,), tl.float32)
        acc = tl.zeros((BLOCK_PREFIX, BLOCK_D), tl.float32)
        if part == 0:
            prefix_k = load_rows(k, prefix_tokens, stride_kt, in_prefix, D, BLOCK_D)
            prefix_v = load_rows(v, prefix_tokens, stride_vt, in_prefix, D, BLOCK_D)
            prefix_logits = (
                tl.dot(prefix_q, tl.trans(prefix_k), input_precision=PRECISION) * qk_scale_log2
            )
            prefix_logits = tl.where(in_prefix[None, :], prefix_logits, float("-inf"))
            m_i, l_i, acc = online_softmax(m_i, l_i, acc, prefix_logits, prefix_v, PRECISION)
    q += prefix * stride_qt
    k += prefix * stride_kt
    v += prefix * stride_vt
    for member in range(TILES_PER_PROGRAM):
        tile = part * TILES_PER_PROGRAM + member
        tokens, on_grid = tile_tokens(tile, slots, height, width, tiles_across, SIDE)
        exists = on_grid & (tile < num_tiles)
        tile_k = load_rows(k, tokens, stride_kt, exists, D, BLOCK_D)  # (S, BLOCK_D)
        tile_v = load_rows(v, tokens, stride_vt, exists, D, BLOCK_D)
        tile_q = load_rows(q, tokens, stride_qt, exists, D, BLOCK_D)
        of_tile = (rows[:, None] == member) & (slots[None, :] >= 0)
        of_group = (rows[:, None] == member // GROUP) & (slots[None, :] >= 0)
        k_sum = tl.dot(of_tile.to(tile_k.dtype), tile_k, k_sum, input_precision=PRECISION)
        v_sum = tl.dot(of_tile.to(tile_k.dtype), tile_v, v_sum, input_precision=PRECISION)
        q_sum = tl.dot(of_group.to(tile_k.dtype), tile_q, q_sum, input_precision=PRECISION)
        kv_cov = tl.dot(tl.trans(tile_k), tile_v, kv_cov, input_precision=PRECISION)
        k_squares = tl.where(rows == member, sum_of_squares(tile_k), k_squares)
        q_squares += tl.where(rows == member // GROUP, sum_of_squares(tile_q), 0.0)
        if RAGGED:
            count = tl.where(rows == member, tl.sum(exists.to(tl.float32), 0), count)
        if BLOCK_PREFIX > 0:
            logits = tl.dot(prefix_q, tl.trans(tile_k), input_precision=PRECISION) * qk_scale_log2
            logits = tl.where(exists[None, :], logits, float("-inf"))
            m_i, l_i, acc = online_softmax(m_i, l_i, acc, logits, tile_v, PRECISION)

    tiles = part * TILES_PER_PROGRAM + rows
    is_tile = (rows < TILES_PER_PROGRAM) & (tiles < num_tiles)
    if not RAGGED:
        count = tl.where(is_tile, S * 1.0, 0.0)
    at_least_one = tl.maximum(count, 1.0)[:, None]
    in_head = columns < D
    offsets = (batch_head * num_tiles + tiles)[:, None] * D + columns[None, :]
    mask = is_tile[:, None] & in_head[None, :]
    k_means = k_sum / at_least_one
    spread = mean_squared_distance(k_squares / tl.maximum(count, 1.0), k_means)
    tl.store(k_spread + batch_head * num_tiles + tiles, spread, mask=is_tile)
    tl.store(k_mean + offsets, k_means.to(k_mean.dtype.element_ty), mask=mask)
    tl.store(v_mean + offsets, (v_sum / at_least_one).to(v_mean.dtype.element_ty), mask=mask)
    tl.store(counts + batch_head * num_tiles + tiles, count, mask=is_tile)
    # sum (k - k_mean) (v - v_mean)^T = sum k v^T - sum_tiles k_sum v_mean^T
    kv_cov -= tl.dot(tl.trans(k_sum), v_sum / at_least_one, input_precision="tf32x3")
    square = columns[:, None] * D + columns[None, :]
    part_of_head = batch_head * tl.num_programs(0) + part
    tl.store(
        kv_cov_parts + part_of_head * (D * D) + square,
        kv_cov.to(kv_cov_parts.dtype.element_ty),
        mask=in_head[:, None] & in_head[None, :],
    )
    group_count = tl.zeros((S,), tl.float32)
    for member in tl.static_range(TILES_PER_PROGRAM):
        tile_count = tl.sum(tl.where(rows == member, count, 0.0), 0)
        group_count += tl.where(rows == member // GROUP, tile_count, 0.0)
    groups = part * (TILES_PER_PROGRAM // GROUP) + rows
    is_group = (rows < TILES_PER_PROGRAM // GROUP) & (groups < num_groups)
    group_count = tl.maximum(group_count, 1.0)
    q_means = q_sum / group_count[:, None]
    spread = mean_squared_distance(q_squares / group_count, q_means)
    spread = spread * (qk_scale * qk_scale / (2 * D))
    tl.store(q_spread + batch_head * num_groups + groups, spread, mask=is_group)
    offsets = (batch_head * num_groups + groups)[:, None] * D + columns[None, :]
    mask = is_group[:, None] & in_head[None, :]
    tl.store(q_mean + offsets, q_means.to(q_mean.dtype.element_ty), mask=mask)
    if BLOCK_PREFIX > 0:
        offsets = part_of_head * prefix + prefix_tokens
        tl.store(prefix_m + offsets, m_i, mask=in_prefix)
        tl.store(prefix_l + offsets, l_i, mask=in_prefix)
        mask = in_prefix[:, None] & in_head[None, :]
        tl.store(prefix_acc + offsets[:, None] * D + columns[None, :], acc, mask=mask)


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
def mean_score_kernel(
    k, k_mean, q_mean, counts, lse, gap,
    kv_cov_parts, kv_cov, prefix_m, prefix_l, prefix_acc, o,
    stride_kb, stride_kh, stride_kt, stride_ob, stride_oh, stride_ot,
    H, prefix, height, width, tiles_across, num_tiles, first_group, num_rows, num_groups,
    tile_programs, parts, qk_scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr,
    TILES_PER_PROGRAM: tl.constexpr, STRIP: tl.constexpr, BLOCK_PARTS: tl.constexpr,
    SIDE: tl.constexpr, PRECISION: tl.constexpr,
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
            tokens, on_grid = tile_tokens(tile, slots, height, width, tiles_across, SIDE)
            exists = on_grid & (tile < num_tiles)
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


# Losses are shares of a sum, so at most 1 within rounding: their bits are below this number, and
# 31 steps of bisection tell any two of them apart.
ABOVE_BITS_OF_ONE = tl.constexpr(0x3F800002)
BISECTION_STEPS = tl.constexpr(31)
# exp(80) times 64 prefix tokens is finite in float32, which ends at exp(88.7).
LARGEST_EXPONENT = tl.constexpr(80.0)
# Replaces a sum of 0, where no token exists. Any other sum is at least 1: its largest term is exp(0).
SMALLEST_SUM = tl.constexpr(1e-30)


@triton.jit
def find_threshold(bits, budget):
    """Return the threshold, as the bits of a float32, from which on losses are expanded.

    It is the smallest t that at most `budget` losses reach. Losses are not negative, so their bits are
    in order.
    """
    low, high = 0, ABOVE_BITS_OF_ONE
    for _ in range(BISECTION_STEPS):
        middle = (low + high) // 2
        go_up = tl.sum((bits >= middle).to(tl.int32), 0) > budget
        low = tl.where(go_up, middle, low)
        high = tl.where(go_up, high, middle)
    return high


@triton.jit
def mean_select_kernel(
    k, q_mean, k_spread, q_spread, counts, lse, gap, expanded_count, lse_max, coarse_mass,
    coarse_bits,
    stride_kb, stride_kh, stride_kt, H, prefix, num_tiles, first_group, num_rows, num_groups,
    qk_scale, budget,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr,
    GAP_CAP: tl.constexpr,
):  # fmt: skip
    """Choose the expanded tiles of one query group of one head. Grid: (num_rows, B * H).

    Overwrites the row of lse (B * H, num_rows, T) with the int32 list of the expanded tiles, and the
    row of gap with the capped gaps of the other tiles, -inf for the expanded ones. Writes the length of
    the list to expanded_count (B * H, R), a bit for each tile that is not expanded to coarse_bits
    (B * H, R, words), and lse_max and coarse_mass (B * H, num_rows), which scale their sums.
    """
    row = tl.program_id(0)
    batch, head, batch_head = split_batch_head(tl.program_id(1), H)
    line = batch_head * num_rows + row
    group = batch_head * num_groups + first_group + row
    tiles, columns = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_D)
    is_tile = tiles < num_tiles
    tile_lse = tl.load(lse + line * num_tiles + tiles, mask=is_tile, other=float("-inf"))
    tile_gap = tl.load(gap + line * num_tiles + tiles, mask=is_tile, other=0.0).to(tl.float32)
    count = tl.load(counts + batch_head * num_tiles + tiles, mask=is_tile, other=0.0)
    spread = tl.load(k_spread + batch_head * num_tiles + tiles, mask=is_tile, other=0.0)
    spread *= tl.load(q_spread + group)
    capped_gap = tl.minimum(tile_gap + spread, GAP_CAP)
    q_means = tl.load(q_mean + group * D + columns, mask=columns < D, other=0.0)
    k += batch * stride_kb + head * stride_kh
    m_i = tl.max(tile_lse, 0)
    m_i = tl.where(m_i == float("-inf"), 0.0, m_i)
    mass = tl.exp(tile_lse - m_i)
    total = tl.sum(mass, 0)
    for token in range(prefix):
        prefix_k = tl.load(k + token * stride_kt + columns, mask=columns < D, other=0.0)
        score = tl.sum(q_means.to(tl.float32) * prefix_k.to(tl.float32), 0) * qk_scale
        total += tl.exp(tl.minimum(score - m_i, LARGEST_EXPONENT))
    loss = mass * (1.0 - tl.exp(-capped_gap)) / tl.maximum(total, SMALLEST_SUM)
    bits = loss.to(tl.int32, bitcast=True)
    threshold = find_threshold(bits, budget)
    expanded = (bits >= threshold) & (bits > 0)
    # Ties at the threshold go to the first tiles.
    tied = (bits == threshold - 1) & (bits > 0)
    left = budget - tl.sum(expanded.to(tl.int32), 0)
    expanded = expanded | (tied & (tl.cumsum(tied.to(tl.int32), 0) <= left))
    expanded = expanded | (is_tile & (budget >= num_tiles))
    expanded = expanded & (count > 0.0)
    coarse = (count > 0.0) & (expanded == 0)
    tl.store(expanded_count + group, tl.sum(expanded.to(tl.int32), 0))
    tl.store(lse_max + line, m_i)
    tl.store(coarse_mass + line, tl.sum(tl.where(coarse, mass, 0.0), 0))
    expanded_list = (lse + line * num_tiles).to(tl.pointer_type(tl.int32))
    tl.store(expanded_list + tl.cumsum(expanded.to(tl.int32), 0) - 1, tiles, mask=expanded)
    coarse_gap = tl.where(coarse, capped_gap, float("-inf"))
    tl.store(gap + line * num_tiles + tiles, coarse_gap.to(gap.dtype.element_ty), mask=is_tile)
    packed = tl.reshape(coarse.to(tl.int32), (BLOCK_T // 32, 32)) << tl.arange(0, 32)[None, :]
    word = tl.arange(0, BLOCK_T // 32)
    num_words = tl.cdiv(num_tiles, 32)
    tl.store(coarse_bits + group * num_words + word, tl.sum(packed, 1), mask=word < num_words)


@triton.jit
def mean_residual_kernel(
    k, v, v_mean, q_mean, coarse_bits, lse_max, residual_parts,
    stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt,
    H, prefix, height, width, tiles_across, num_tiles, first_group, num_rows, num_groups,
    tiles_per_split, qk_scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr,
    TILES_PER_STEP: tl.constexpr, SIDE: tl.constexpr,
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
            tokens, on_grid = tile_tokens(tile, slots, height, width, tiles_across, SIDE)
            exists = on_grid & (tile < num_tiles)
            tile_k = load_rows(k, tokens, stride_kt, exists, D, BLOCK_D)  # (S, BLOCK_D)
            tile_v = load_rows(v, tokens, stride_vt, exists, D, BLOCK_D)
            coarse = ((word >> (tile % 32)) & 1) != 0
            scores = tl.dot(q_means, tl.trans(tile_k), input_precision=PRECISION) * qk_scale_log2
            # Scores of unexpanded tiles are below the maximum; those of expanded ones may overflow.
            shift = tl.where(coarse, m_i, float("inf"))
            weights = tl.exp2(scores - shift[:, None])  # (BLOCK_R, S)
            if RAGGED:
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


@triton.jit
def mean_attention_kernel(
    q, k, v, k_mean, v_mean, q_mean, counts, lse, gap, expanded_count, coarse_mass, kv_cov,
    residual_parts, o,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt,
    stride_ob, stride_oh, stride_ot,
    H, prefix, height, width, tiles_across, num_tiles, first_group, num_rows, num_groups, splits,
    qk_scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr, SIDE: tl.constexpr,
    LOG2_S: tl.constexpr, BLOCK_MEANS: tl.constexpr, BLOCK_PREFIX: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    RAGGED: tl.constexpr, PRECISION: tl.constexpr,
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
    k_mean += batch_head * num_tiles * D
    v_mean += batch_head * num_tiles * D
    counts += batch_head * num_tiles
    line = batch_head * num_rows + row
    slots, columns = tl.arange(0, S), tl.arange(0, BLOCK_D)
    in_head = columns < D
    tokens, on_grid = tile_tokens(tile, slots, height, width, tiles_across, SIDE)
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
        if RAGGED:
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
        key_tokens, key_on_grid = tile_tokens(expanded, slots, height, width, tiles_across, SIDE)
        exists = key_on_grid
        tile_k = load_rows(k, key_tokens, stride_kt, exists, D, BLOCK_D)
        tile_v = load_rows(v, key_tokens, stride_vt, exists, D, BLOCK_D)
        tile_logits = tl.dot(tile_q, tl.trans(tile_k), input_precision=PRECISION) * qk_scale_log2
        if RAGGED:
            tile_logits = tl.where(exists[None, :], tile_logits, float("-inf"))
        m_i, l_i, acc = online_softmax(m_i, l_i, acc, tile_logits, tile_v, PRECISION)

    acc = acc / tl.where(l_i > 0.0, l_i, 1.0)[:, None]
    o += batch * stride_ob + head * stride_oh + prefix * stride_ot
    pointers = o + tokens.to(tl.int64)[:, None] * stride_ot + columns[None, :]
    tl.store(pointers, acc.to(o.dtype.element_ty), mask=on_grid[:, None] & in_head[None, :])
