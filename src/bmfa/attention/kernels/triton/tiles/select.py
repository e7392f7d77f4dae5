"""Kernels 5 and 6: the expanded tiles of each group, and the cross-covariance of the others."""

import triton
import triton.language as tl

from bmfa.attention.kernels.triton.tiles.levels import log_sum_exp, tile_losses
from bmfa.attention.kernels.triton.tiles.primitives import SMALLEST_SUM, split_batch_head


@triton.jit
def select_kernel(
    q_spread, counts, k_spread, log_mass, expanded_list, coarse_share, thresholds,
    exact_heads, expanded_count, coarse_bits,
    H, num_tiles, num_groups, line_stride, first_row, row_capacity, group_stride,
    BLOCK_T: tl.constexpr, FARTHEST: tl.constexpr,
):  # fmt: skip
    """Choose the expanded tiles of one group of one head. Grid: (rows, B * H).

    Writes the expanded tiles to the row of expanded_list (B * H, row_capacity, T), their number to
    expanded_count (B * H, R), a bit for each tile that is not expanded to coarse_bits (B * H, R,
    words), and the shares of those tiles, which sum to 1, to coarse_share (B * H, row_capacity, T).
    Sets log_mass to -inf for expanded and for empty tiles.
    """
    row = tl.program_id(0)
    batch, _, batch_head = split_batch_head(tl.program_id(1), H)
    position = first_row + row
    group = batch_head * num_groups + position * group_stride % num_groups
    line = (batch_head * row_capacity + row) * num_tiles
    log_mass += (batch_head * row_capacity + row) * line_stride
    tiles = tl.arange(0, BLOCK_T)
    is_tile = tiles < num_tiles
    lse = tl.load(log_mass + tiles, mask=is_tile, other=float("-inf"))
    log_z = log_sum_exp(lse, tl.load(log_mass + num_tiles))  # the prefix comes after the tiles
    count = tl.load(counts + batch_head * num_tiles + tiles, mask=is_tile, other=0.0)
    k_spread += 2 * batch_head * num_tiles
    spread = tl.load(k_spread + tiles, mask=is_tile, other=0.0)
    farthest = tl.load(k_spread + num_tiles + tiles, mask=is_tile, other=0.0)
    q_spreads = tl.load(q_spread + group)
    mass, loss = tile_losses(lse, log_z, q_spreads, spread, farthest, count, FARTHEST)
    threshold = tl.load(thresholds + batch * 2 + position % 2)
    everything = (tl.load(exact_heads + batch_head) != 0) | (threshold == 0.0)
    expanded = (((loss >= threshold) & (loss > 0.0)) | everything) & (count > 0.0)
    coarse = (count > 0.0) & (expanded == 0)
    num_expanded = tl.sum(expanded.to(tl.int32), 0)
    tl.store(expanded_count + group, num_expanded)
    index = tl.cumsum(expanded.to(tl.int32), 0) - 1
    tl.store(expanded_list + line + index, tiles, mask=expanded)
    tl.store(log_mass + tiles, float("-inf"), mask=is_tile & (coarse == 0))
    share = tl.where(coarse, mass, 0.0)
    share = share / tl.maximum(tl.sum(share, 0), SMALLEST_SUM)
    tl.store(coarse_share + line + tiles, share.to(coarse_share.dtype.element_ty), mask=is_tile)
    packed = tl.reshape(coarse.to(tl.int32), (BLOCK_T // 32, 32)) << tl.arange(0, 32)[None, :]
    word = tl.arange(0, BLOCK_T // 32)
    num_words = tl.cdiv(num_tiles, 32)
    tl.store(coarse_bits + group * num_words + word, tl.sum(packed, 1), mask=word < num_words)


@triton.jit
def assign_items(
    expanded_count, exact_heads, first_item, items,
    heads, num_groups, first_row, num_rows, row_capacity, group_stride, item_capacity,
    ITEM_TILES: tl.constexpr, NUM_ITEMS: tl.constexpr, SKIP_EXACT: tl.constexpr,
):  # fmt: skip
    """Divide the expanded tiles of all groups of a band after their first ITEM_TILES into items.

    Items go to groups in their order while there is room: a group gets all of its items or none. Writes
    first_item (B * H, row_capacity), -1 for none, and for each item head, row and number in one code, 0
    for none, to items (item_capacity).
    """
    BLOCK: tl.constexpr = 1024
    used = 0
    for start in range(0, item_capacity, BLOCK):
        index = start + tl.arange(0, BLOCK)
        tl.store(items + index, 0, mask=index < item_capacity)
    tl.debug_barrier()
    for start in range(0, heads * num_rows, BLOCK):
        index = start + tl.arange(0, BLOCK)
        mask = index < heads * num_rows
        head, row = index // num_rows, index % num_rows
        group = head * num_groups + (first_row + row) * group_stride % num_groups
        count = tl.load(expanded_count + group, mask=mask, other=0)
        extra = tl.maximum((count - 1) // ITEM_TILES, 0)
        if SKIP_EXACT:
            extra = tl.where(tl.load(exact_heads + head, mask=mask, other=0) != 0, 0, extra)
        end = used + tl.cumsum(extra, 0)
        fits = mask & (extra > 0) & (end <= item_capacity)
        first = tl.where(fits, end - extra, -1)
        tl.store(first_item + head * row_capacity + row, first, mask=mask)
        code = (head * row_capacity + row) * NUM_ITEMS
        for number in range(1, tl.max(extra, 0) + 1):
            stored = fits & (number <= extra)
            tl.store(items + first + number - 1, code + number, mask=stored)
        used += tl.sum(extra, 0)


@triton.jit
def cross_kernel(
    coarse_share, cross, exact_heads, group_cross, expanded_count, first_item, items,
    num_tiles, num_groups, heads, first_row, num_rows, row_capacity, group_stride, item_capacity,
    entry_blocks, qk_scale,
    ITEM_TILES: tl.constexpr, NUM_ITEMS: tl.constexpr, D: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SKIP_EXACT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Average the covariances of the tiles that BLOCK_R groups do not expand.

    Grid: (blocks of D * D and one more, row blocks, B * H). Writes group_cross
    (B * H, row_capacity, D, D), times qk_scale. The last block assigns the items of the band.
    """
    batch_head = tl.program_id(2).to(tl.int64)
    last = tl.program_id(0) == entry_blocks
    skip = last
    if SKIP_EXACT:
        skip = skip | (tl.load(exact_heads + batch_head) != 0)
    if last & (tl.program_id(1) == 0) & (batch_head == 0):
        assign_items(
            expanded_count, exact_heads, first_item, items, heads, num_groups, first_row, num_rows,
            row_capacity, group_stride, item_capacity, ITEM_TILES, NUM_ITEMS, SKIP_EXACT,
        )  # fmt: skip
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
