"""Kernels 5 and 6: the expanded tiles of each group, and the cross-covariance of the others."""

import triton
import triton.language as tl

from bmfa.attention.kernels.triton.tiles.levels import log_partition, tile_losses
from bmfa.attention.kernels.triton.tiles.primitives import split_batch_head
from bmfa.attention.kernels.triton.tiles.represent import SMALLEST_SUM


@triton.jit
def select_kernel(
    k, q_mean, q_spread, counts, k_spread, log_mass, expanded_list, coarse_share, thresholds,
    exact_heads, expanded_count, coarse_bits, num_items, first_item, items,
    stride_kb, stride_kh, stride_kt, H, prefix, num_tiles, first_row, row_capacity, group_stride,
    band, item_capacity, qk_scale,
    ITEM_TILES: tl.constexpr, SKIP_EXACT: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Choose the expanded tiles of one group of one head. Grid: (rows, B * H).

    Writes the expanded tiles to the row of expanded_list (B * H, row_capacity, T), their number to
    expanded_count (B * H, R), a bit for each tile that is not expanded to coarse_bits (B * H, R, words),
    and the shares of those tiles, which sum to 1, to coarse_share (B * H, row_capacity, T). Sets log_mass
    to -inf for expanded and for empty tiles.

    A group reads its first ITEM_TILES expanded tiles itself. The others are divided into items of as many
    tiles. num_items counts those of a band, items (item_capacity) has head, row and number of each in one
    code, 0 for none, and first_item (B * H, row_capacity) the first item of the row, -1 if it has none.
    """
    row = tl.program_id(0)
    batch, head, batch_head = split_batch_head(tl.program_id(1), H)
    position = first_row + row
    group = batch_head * num_tiles + position * group_stride % num_tiles
    line = (batch_head * row_capacity + row) * num_tiles
    tiles, columns = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_D)
    is_tile = tiles < num_tiles
    q_means = tl.load(q_mean + group * D + columns, mask=columns < D, other=0.0)
    k += batch * stride_kb + head * stride_kh
    lse = tl.load(log_mass + line + tiles, mask=is_tile, other=float("-inf"))
    count = tl.load(counts + batch_head * num_tiles + tiles, mask=is_tile, other=0.0)
    spread = tl.load(k_spread + batch_head * num_tiles + tiles, mask=is_tile, other=0.0)
    log_z = log_partition(lse, q_means, k, stride_kt, prefix, qk_scale, D, BLOCK_D)
    mass, loss = tile_losses(lse, log_z, spread * tl.load(q_spread + group))
    threshold = tl.load(thresholds + batch * 2 + position % 2)
    everything = (tl.load(exact_heads + batch_head) != 0) | (threshold == 0.0)
    expanded = (((loss >= threshold) & (loss > 0.0)) | everything) & (count > 0.0)
    coarse = (count > 0.0) & (expanded == 0)
    num_expanded = tl.sum(expanded.to(tl.int32), 0)
    tl.store(expanded_count + group, num_expanded)
    place = tl.cumsum(expanded.to(tl.int32), 0) - 1
    tl.store(expanded_list + line + place, tiles, mask=expanded)
    tl.store(log_mass + line + tiles, float("-inf"), mask=is_tile & (coarse == 0))
    extra = tl.maximum(tl.cdiv(num_expanded - ITEM_TILES, ITEM_TILES), 0)
    if SKIP_EXACT:
        extra = tl.where(tl.load(exact_heads + batch_head) != 0, 0, extra)
    first = -1
    if extra > 0:
        index = tl.arange(0, BLOCK_T // ITEM_TILES)
        code = (batch_head.to(tl.int32) * row_capacity + row) * (BLOCK_T // ITEM_TILES) + index + 1
        reserved = tl.atomic_add(num_items + band, extra)
        # Without room for all, the group reads all of its tiles itself.
        fits = reserved + extra <= item_capacity
        inside = (index < extra) & (reserved + index < item_capacity)
        tl.store(items + reserved + index, tl.where(fits, code, 0), mask=inside)
        first = tl.where(fits, reserved, -1)
    tl.store(first_item + batch_head * row_capacity + row, first)
    share = tl.where(coarse, mass, 0.0)
    share = share / tl.maximum(tl.sum(share, 0), SMALLEST_SUM)
    tl.store(coarse_share + line + tiles, share.to(coarse_share.dtype.element_ty), mask=is_tile)
    packed = tl.reshape(coarse.to(tl.int32), (BLOCK_T // 32, 32)) << tl.arange(0, 32)[None, :]
    word = tl.arange(0, BLOCK_T // 32)
    num_words = tl.cdiv(num_tiles, 32)
    tl.store(coarse_bits + group * num_words + word, tl.sum(packed, 1), mask=word < num_words)


@triton.jit
def cross_kernel(
    coarse_share, cross, exact_heads, group_cross,
    num_tiles, num_rows, row_capacity, qk_scale,
    D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SKIP_EXACT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Average the covariances of the tiles that BLOCK_R groups do not expand.

    Grid: (blocks of D * D, row blocks, B * H). Writes group_cross (B * H, row_capacity, D, D), times
    qk_scale.
    """
    batch_head = tl.program_id(2).to(tl.int64)
    skip = False
    if SKIP_EXACT:
        skip = tl.load(exact_heads + batch_head) != 0
    if not skip:
        rows = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
        entries = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        is_row, is_entry = rows < num_rows, entries < D * D
        lines = (batch_head * row_capacity + rows) * num_tiles
        total = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)
        for start in range(0, num_tiles, BLOCK_K):
            tiles = start + tl.arange(0, BLOCK_K)
            is_tile = tiles < num_tiles
            share = tl.load(
                coarse_share + lines[:, None] + tiles[None, :],
                mask=is_row[:, None] & is_tile[None, :], other=0.0,
            )  # fmt: skip
            covariance = tl.load(
                cross + (batch_head * num_tiles + tiles)[:, None] * (D * D) + entries[None, :],
                mask=is_tile[:, None] & is_entry[None, :], other=0.0,
            )  # fmt: skip
            total = tl.dot(share, covariance, total, input_precision=PRECISION)
        target = group_cross + (batch_head * row_capacity + rows)[:, None] * (D * D)
        tl.store(
            target + entries[None, :], (total * qk_scale).to(group_cross.dtype.element_ty),
            mask=is_row[:, None] & is_entry[None, :],
        )  # fmt: skip
