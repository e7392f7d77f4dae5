"""Kernel 1: the mean query of each group, how far its queries are from it, and the probes."""

import triton
import triton.language as tl

from bmfa.attention.kernels.triton.tiles.primitives import (
    group_tokens,
    load_rows,
    split_batch_head,
    sum_products,
    valid_tokens,
)


@triton.jit
def pool_kernel(
    q, valid, q_mean, q_spread, group_counts, counts, probe_tokens, probe_deviation, probes, v_radius,
    stride_qb, stride_qh, stride_qt,
    H, prefix, height, width, frames, tiles_across, num_tiles, num_groups, position_stride, num_probes,
    num_slots, qk_scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, SIDE: tl.constexpr, GROUP_TILES: tl.constexpr,
    UNIFORM_SHARE: tl.constexpr, MASKED: tl.constexpr, OWN_GRID: tl.constexpr,
):  # fmt: skip
    """Summarise the queries of one group of one head. Grid: (R, B * H).

    Writes q_mean (B * H, R, D), q_spread (B * H, R) = qk_scale^2 rho / 2d, and the tokens of the group
    and of its tiles to group_counts (B * H, R) and counts (B * H, T). If the
    group has a probe, writes its token, or -1, to probe_tokens (B * H, num_probes), its difference to
    the mean to probe_deviation (B * H, num_slots, D) and its weight to the last column of probes (B *
    H, num_probes, 3). Sets v_radius (B * H) to 0.

    The grid and the prefix are those of the queries. With OWN_GRID they are not those of the keys, no
    mask applies, and `summarise_tiles` writes counts.
    """
    group = tl.program_id(0)
    batch, head, batch_head = split_batch_head(tl.program_id(1), H)
    q += batch * stride_qb + head * stride_qh + prefix * stride_qt
    valid += batch * frames * height * width
    QUERIES: tl.constexpr = SIDE * SIDE * GROUP_TILES
    slots, columns = tl.arange(0, QUERIES), tl.arange(0, BLOCK_D)
    tokens, on_grid = group_tokens(group, slots, height, width, tiles_across, SIDE, GROUP_TILES)
    exists = valid_tokens(valid, tokens, on_grid, MASKED)
    queries = load_rows(q, tokens, stride_qt, exists, D, BLOCK_D).to(
        tl.float32
    )  # (QUERIES, BLOCK_D)
    count = tl.sum(exists.to(tl.float32), 0)
    at_least_one = tl.maximum(count, 1.0)
    means = (tl.sum(queries, 0) / at_least_one).to(q_mean.dtype.element_ty)  # (BLOCK_D,)
    difference = tl.where(exists[:, None], queries - means.to(tl.float32)[None, :], 0.0)
    square = sum_products(difference, difference, 1)  # (QUERIES,)
    line = batch_head * num_groups + group
    tl.store(q_mean + line * D + columns, means, mask=columns < D)
    spread = tl.sqrt(tl.sum(square, 0) / at_least_one) * tl.sqrt(tl.max(square, 0))
    tl.store(q_spread + line, spread * (qk_scale * qk_scale / (2 * D)))
    tl.store(group_counts + line, count)
    if not OWN_GRID:
        for member in tl.static_range(GROUP_TILES):
            groups_across = (tiles_across + GROUP_TILES - 1) // GROUP_TILES
            tile_column = (group % groups_across) * GROUP_TILES + member
            tile = (group // groups_across) * tiles_across + tile_column
            in_row = tile_column < tiles_across
            of_tile = slots // SIDE % GROUP_TILES == member
            tile_count = tl.sum((exists & of_tile).to(tl.float32), 0)
            tl.store(counts + batch_head * num_tiles + tile, tile_count, mask=in_row)
    if group == 0:
        tl.store(v_radius + batch_head, 0)
    # The group at a position p is p * stride modulo R; `position_stride` inverts that.
    position = group * position_stride % num_groups
    if position < num_probes:
        # Tiling.probe_quantile
        quantile = ((group * 40503 + head.to(tl.int32) * 9973 + 17) % 65536).to(tl.float32)
        quantile = (quantile + 0.5) / 65536
        largest = tl.max(square, 0)
        ratio = square / tl.where(largest > 0.0, largest, 1.0)
        fourth = ratio * ratio
        uniform = tl.where(exists, 1.0 / at_least_one, 0.0)
        far = fourth / tl.where(largest > 0.0, tl.sum(fourth, 0), 1.0)
        p = tl.where(largest > 0.0, UNIFORM_SHARE * uniform + (1 - UNIFORM_SHARE) * far, uniform)
        # The first slot whose cumulative probability exceeds the quantile, or the last valid one.
        passed = exists & (tl.cumsum(p, 0) > quantile)
        last = tl.max(tl.where(exists, slots, -1), 0)
        chosen = tl.minimum(tl.min(tl.where(passed, slots, QUERIES), 0), last)
        token = tl.sum(tl.where(slots == chosen, prefix + tokens, 0), 0)
        own = tl.sum(tl.where(slots == chosen, p, 0.0), 0)
        target = batch_head * num_probes + position
        tl.store(probe_tokens + target, tl.where(last >= 0, token, -1))
        weight = tl.where(last >= 0, 1.0 / tl.where(own > 0.0, own, 1.0), 0.0)
        tl.store(probes + target * 3 + 2, weight)
        deviation = tl.sum(tl.where((slots == chosen)[:, None], difference, 0.0), 0)
        tl.store(
            probe_deviation + (batch_head * num_slots + position) * D + columns,
            deviation.to(probe_deviation.dtype.element_ty), mask=columns < D,
        )  # fmt: skip
