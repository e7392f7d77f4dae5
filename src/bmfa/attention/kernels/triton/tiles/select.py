"""Kernel 3 of 5: choose the tiles that each query group expands, by an error target or a budget."""

import triton
import triton.language as tl

from bmfa.attention.kernels.triton.tiles.primitives import split_batch_head

# Losses are shares of a sum, so at most 1 within rounding: their bits are below this number, and
# 31 steps of bisection tell any two of them apart.
ABOVE_BITS_OF_ONE = tl.constexpr(0x3F800002)
BISECTION_STEPS = tl.constexpr(31)
# exp(80) times 64 prefix tokens is finite in float32, which ends at exp(88.7).
LARGEST_EXPONENT = tl.constexpr(80.0)
# Replaces a sum of 0, where no token exists. Any other sum is at least 1: its largest term is exp(0).
SMALLEST_SUM = tl.constexpr(1e-30)


@triton.jit
def find_threshold(bits, loss, target, budget, BY_ERROR: tl.constexpr):
    """Return the threshold, as the bits of a float32, from which on losses are expanded.

    By error it is the largest t for which the losses below t sum to at most `target`, else the
    smallest t that at most `budget` losses reach. Losses are not negative, so their bits are in order.
    """
    low, high = 0, ABOVE_BITS_OF_ONE
    for _ in range(BISECTION_STEPS):
        middle = (low + high) // 2
        if BY_ERROR:
            go_up = tl.sum(tl.where(bits < middle, loss, 0.0), 0) <= target
        else:
            go_up = tl.sum((bits >= middle).to(tl.int32), 0) > budget
        low = tl.where(go_up, middle, low)
        high = tl.where(go_up, high, middle)
    return low if BY_ERROR else high


@triton.jit
def select_kernel(
    k, q_mean, k_spread, q_spread, counts, lse, gap, expanded_count, lse_max, coarse_mass,
    coarse_bits,
    stride_kb, stride_kh, stride_kt, H, prefix, num_tiles, first_group, num_rows, num_groups,
    qk_scale, target, budget,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr, BY_ERROR: tl.constexpr,
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
    threshold = find_threshold(bits, loss, target, budget, BY_ERROR)
    expanded = (bits >= threshold) & (bits > 0)
    if not BY_ERROR:
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
