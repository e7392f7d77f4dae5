"""Kernels 3 and 4: the error of every probe at every level, and the thresholds chosen from them."""

import triton
import triton.language as tl

from bmfa.attention.kernels.triton.tiles.primitives import (
    SMALLEST_SUM,
    load_rows,
    split_batch_head,
    sum_products,
)

# Factor that keeps the weights of single tiles, which sum to 1, in the range of float16.
WEIGHT_SCALE = tl.constexpr(1024.0)
# Sum of the weights of a level, relative to the exact ones, below which the error of a probe is that of
# an output of 0. Values are rounded by up to 2^-9, which the division by the sum amplifies.
SMALLEST_Z = tl.constexpr(1e-3)


@triton.jit
def log_sum_exp(logits, prefix):
    """Return the log-sum-exp of a vector and one more number, of which some may be -inf."""
    m_i = tl.maximum(tl.max(logits, 0), prefix)
    m_i = tl.where(m_i == float("-inf"), 0.0, m_i)
    total = tl.sum(tl.exp(logits - m_i), 0) + tl.exp(prefix - m_i)
    return m_i + tl.log(tl.maximum(total, SMALLEST_SUM))


@triton.jit
def tile_losses(lse, log_z, q_spread, k_spread, k_farthest, count, FARTHEST: tl.constexpr):
    """Return the shares of tiles in Z, and their losses."""
    log_mass = lse - log_z
    mass = tl.exp(log_mass)
    far = q_spread * k_farthest
    far = tl.minimum(far, FARTHEST * tl.sqrt(2.0 * far))
    # mass * (exp(far) - 1) / count, limited to 1 before it overflows
    grown = tl.exp(tl.minimum(log_mass + far - tl.log(tl.maximum(count, 1.0)), 0.0))
    shrunk = tl.where(far < 1e-3, far * (1.0 - 0.5 * far), 1.0 - tl.exp(-far))
    return mass, tl.minimum(mass * (q_spread * k_spread) + grown * shrunk, 1.0)


@triton.jit
def add_weighted(total, weights, values, PRECISION: tl.constexpr):
    """Add WEIGHT_SCALE weights @ values. The weights are a sum of two numbers of the dtype of values,
    since differences of such sums are small."""
    weights = weights * WEIGHT_SCALE
    high = weights.to(values.dtype)
    low = (weights - high.to(tl.float32)).to(values.dtype)
    total = tl.dot(high, values, total, input_precision=PRECISION)
    return tl.dot(low, values, total, input_precision=PRECISION)


@triton.jit
def levels_kernel(
    q_spread, counts, k_spread, v_radius, probe_tokens, probe_deviation, log_mass, k_tangent,
    v_tangent, probe_lse, probe_v, probe_cross, level_stats, probe_exact, probes, o,
    stride_ob, stride_oh, stride_ot,
    H, num_tiles, num_groups, line_stride, row_capacity, group_stride, num_probes, num_slots, qk_scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr, CHUNK: tl.constexpr,
    LEVELS: tl.constexpr, LEVEL_RATIO: tl.constexpr, FARTHEST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Evaluate one probe, or the output of one query before the grid. Grid: (probes + those, B * H).

    For probes, writes level_stats (B * H, num_probes, 4, LEVELS): |exact - output|^2 without the
    correction, its product with the correction, |correction|^2 and the share of expanded tiles; the
    exact output to probe_exact (B * H, num_probes, D), and |exact|^2 to probes (B * H, num_probes, 3).
    For queries before the grid, writes the row of o.
    """
    slot = tl.program_id(0)
    batch, head, batch_head = split_batch_head(tl.program_id(1), H)
    counts += batch_head * num_tiles
    k_spread += 2 * batch_head * num_tiles
    columns, levels = tl.arange(0, BLOCK_D), tl.arange(0, LEVELS)
    in_head = columns < D
    is_probe = slot < num_probes
    token = slot - num_probes
    if is_probe:
        token = tl.load(probe_tokens + batch_head * num_probes + slot)
    exists = token >= 0
    tiles = tl.arange(0, BLOCK_T)
    is_tile = tiles < num_tiles
    slot_line = (batch_head * num_slots + slot) * line_stride
    exact_lse = tl.load(probe_lse + slot_line + tiles, mask=is_tile, other=float("-inf"))
    prefix_lse = tl.load(probe_lse + slot_line + num_tiles)  # the prefix comes after the tiles
    exact_log_z = log_sum_exp(exact_lse, prefix_lse)

    thresholds = tl.exp2(levels.to(tl.float32) * tl.log2(LEVEL_RATIO))
    thresholds = tl.where(levels == LEVELS - 1, 0.0, thresholds)
    group = slot * group_stride % num_groups
    group_line = batch_head * num_groups + group
    spread = tl.load(q_spread + group_line, mask=is_probe, other=0.0)
    row = batch_head * row_capacity + tl.where(is_probe, slot, 0)
    lse = tl.load(log_mass + row * line_stride + tiles, mask=is_tile, other=float("-inf"))
    log_z = log_sum_exp(lse, tl.load(log_mass + row * line_stride + num_tiles))

    # The difference to the representative, once for each level. Rows of the sums below are levels; the
    # last level has no unexpanded tile, and its row of exact_sum is over all tiles instead.
    deviation = load_rows(
        probe_deviation + (batch_head * num_slots + slot) * D, levels * 0, D, (levels >= 0) & is_probe,
        D, BLOCK_D,
    )  # fmt: skip
    last = (levels == LEVELS - 1)[:, None]
    tangent_sum = tl.zeros((LEVELS, BLOCK_D), tl.float32)  # values times weights
    exact_sum = tl.zeros((LEVELS, BLOCK_D), tl.float32)
    cross_sum = tl.zeros((LEVELS, BLOCK_D), tl.float32)
    z_difference = tl.zeros((LEVELS,), tl.float32)
    coarse_z = tl.zeros((LEVELS,), tl.float32)
    coarse_mass = tl.zeros((LEVELS,), tl.float32)
    num_expanded = tl.zeros((LEVELS,), tl.float32)
    num_present = 0.0
    cross_line = (batch_head * num_slots + slot) * num_tiles
    for start in range(0, num_tiles, CHUNK):
        chunk = start + tl.arange(0, CHUNK)
        present = chunk < num_tiles
        tile_count = tl.load(counts + chunk, mask=present, other=0.0)
        present = present & (tile_count > 0.0)
        exact_logit = tl.load(probe_lse + slot_line + chunk, mask=present, other=float("-inf"))
        exact_values = load_rows(probe_v + slot_line * D, chunk, D, present, D, BLOCK_D)
        k_means = load_rows(k_tangent + row * num_tiles * D, chunk, D, present, D, BLOCK_D)
        values = load_rows(v_tangent + row * num_tiles * D, chunk, D, present, D, BLOCK_D)
        terms = load_rows(probe_cross + cross_line * D, chunk, D, present, D, BLOCK_D)
        tile_lse = tl.load(log_mass + row * line_stride + chunk, mask=present, other=float("-inf"))
        tile_spread = tl.load(k_spread + chunk, mask=present, other=0.0)
        farthest = tl.load(k_spread + num_tiles + chunk, mask=present, other=0.0)
        mass, loss = tile_losses(
            tile_lse, log_z, spread, tile_spread, farthest, tile_count, FARTHEST
        )
        logits = tl.dot(deviation, tl.trans(k_means), input_precision=PRECISION) * qk_scale
        logits = tl.minimum(logits + tile_lse[None, :], exact_logit[None, :])  # (LEVELS, CHUNK)
        expanded = (loss[None, :] >= thresholds[:, None]) & (loss > 0.0)[None, :]
        expanded = (expanded | (thresholds == 0.0)[:, None]) & present[None, :]
        coarse = present[None, :] & (expanded == 0)
        weight = tl.where(coarse, tl.exp(logits - exact_log_z), 0.0)
        exact_weight = tl.where(coarse | last, tl.exp(exact_logit - exact_log_z)[None, :], 0.0)
        tangent_sum = add_weighted(tangent_sum, weight, values, PRECISION)
        exact_sum = add_weighted(exact_sum, exact_weight, exact_values, PRECISION)
        coarse_share = tl.where(coarse, mass[None, :], 0.0)
        scaled = (coarse_share * WEIGHT_SCALE).to(terms.dtype)
        cross_sum = tl.dot(scaled, terms, cross_sum, input_precision=PRECISION)
        z_difference += tl.sum(weight - tl.where(last, 0.0, exact_weight), 1)
        coarse_z += tl.sum(weight, 1)
        coarse_mass += tl.sum(coarse_share, 1)
        num_expanded += tl.sum(expanded.to(tl.float32), 1)
        num_present += tl.sum(present.to(tl.float32), 0)
    exact_sum = exact_sum / WEIGHT_SCALE
    prefix_weight = tl.exp(prefix_lse - exact_log_z)
    prefix_values = tl.load(
        probe_v + (slot_line + num_tiles) * D + columns, mask=in_head, other=0.0
    ).to(tl.float32)
    prefix_values = tl.where(prefix_weight > 0.0, prefix_values, 0.0)
    exact = tl.sum(tl.where(last, exact_sum, 0.0), 0) + prefix_weight * prefix_values
    if is_probe:
        z = tl.maximum(1.0 + z_difference, SMALLEST_SUM)  # (LEVELS,)
        lost = tangent_sum / WEIGHT_SCALE - tl.where(last, 0.0, exact_sum)
        error = (exact[None, :] * z_difference[:, None] - lost) / z[:, None]
        # Where the tangents miss nearly all of the weight, z and the numerator are differences of almost
        # equal numbers. The output has nothing to do with the exact one then.
        missed = z < SMALLEST_Z
        error = tl.where(missed[:, None], exact[None, :], error)
        term = cross_sum / (tl.maximum(coarse_mass, SMALLEST_SUM) * WEIGHT_SCALE)[:, None]
        length = tl.sqrt(sum_products(term, term, 1)).to(tl.float32)
        limit = 2.0 * tl.load(v_radius + batch_head).to(tl.float32, bitcast=True)
        clip = tl.where(length > limit, limit / tl.maximum(length, SMALLEST_SUM), 1.0)
        term = term * tl.where(missed, 0.0, clip * coarse_z / z)[:, None]
        line = batch_head * num_probes + slot
        stats = level_stats + line * (4 * LEVELS) + levels
        tl.store(stats, sum_products(error, error, 1))
        tl.store(stats + LEVELS, sum_products(error, term, 1))
        tl.store(stats + 2 * LEVELS, sum_products(term, term, 1))
        tl.store(stats + 3 * LEVELS, num_expanded / tl.maximum(num_present, 1.0))
        tl.store(probe_exact + line * D + columns, exact, mask=in_head)
        tl.store(probes + line * 3 + 1, tl.where(exists, sum_products(exact, exact, 0), 0.0))
    else:
        target = o + batch * stride_ob + head * stride_oh + token * stride_ot
        tl.store(target + columns, exact.to(o.dtype.element_ty), mask=in_head)


@triton.jit
def load_stats(
    level_stats, column, heads, H, num_probes,
    LEVELS: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Load one of the level_stats (BLOCK_H, BLOCK_P, LEVELS) of some heads."""
    of_head = heads[:, None, None]
    index = tl.arange(0, BLOCK_P)[None, :, None]
    levels = tl.arange(0, LEVELS)[None, None, :]
    mask = (of_head < H) & (index < num_probes) & (levels >= 0)
    line = of_head * num_probes + index
    return tl.load(
        level_stats + line * (4 * LEVELS) + column * LEVELS + levels, mask=mask, other=0.0
    )


@triton.jit
def load_weights(probes, heads, H, num_probes, half, BLOCK_P: tl.constexpr):
    """Load the weights (BLOCK_H, BLOCK_P) of the probes that determine the groups of parity `half`,
    those of the other parity, or all if those have no weight, and their |exact|^2."""
    index = tl.arange(0, BLOCK_P)[None, :]
    mask = (heads[:, None] < H) & (index < num_probes)
    line = (heads[:, None] * num_probes + index) * 3
    weight = tl.load(probes + line + 2, mask=mask, other=0.0)
    other_parity = tl.where(index % 2 != half, weight, 0.0)
    weight = tl.where(tl.sum(other_parity, 1)[:, None] > 0.0, other_parity, weight)
    return weight, tl.load(probes + line + 1, mask=mask, other=0.0)


@triton.jit
def pick(table, index, LEVELS: tl.constexpr):
    """Return column `index` (BLOCK_H,) of a table (BLOCK_H, LEVELS)."""
    return tl.sum(tl.where(tl.arange(0, LEVELS)[None, :] == index, table, 0.0), 1)


@triton.jit
def share_at(share, level, part, LEVELS: tl.constexpr):
    """Return the shares (BLOCK_H,) at a part of the step to a level, of (BLOCK_H, LEVELS)."""
    before = pick(share, tl.maximum(level - 1, 0), LEVELS)
    return before + part * (pick(share, level, LEVELS) - before)


@triton.jit
def shrinkage_of(product, square, norm, SMALLEST: tl.constexpr, LARGEST: tl.constexpr):
    """Return the best factors (BLOCK_H, LEVELS) of the corrections, 0 for corrections that are smaller
    than SMALLEST of the outputs, whose squares sum to `norm` (BLOCK_H,)."""
    known = square > SMALLEST * SMALLEST * norm[:, None]
    factor = tl.where(known, product / tl.where(known, square, 1.0), 0.0)
    return tl.minimum(tl.maximum(factor, 0.0), LARGEST)


@triton.jit
def squared_errors(
    error, product, square, weight, norm, SMALLEST: tl.constexpr, LARGEST: tl.constexpr
):
    """Return the weighted sums (LEVELS,) of the squared errors, each head with its best shrinkage."""
    errors = tl.sum(weight[:, :, None] * error, 1)  # (BLOCK_H, LEVELS)
    products = tl.sum(weight[:, :, None] * product, 1)
    squares = tl.sum(weight[:, :, None] * square, 1)
    factor = shrinkage_of(products, squares, norm, SMALLEST, LARGEST)
    return tl.sum(errors - 2.0 * factor * products + factor * factor * squares, 0)


@triton.jit
def weighted_mean(values, weight):
    """Return the weighted mean (BLOCK_H, LEVELS) of shares over probes; 0 without a weight."""
    total = tl.sum(weight, 1)[:, None]
    mean = tl.sum(weight[:, :, None] * values, 1) / tl.where(total > 0.0, total, 1.0)
    return tl.minimum(mean, 1.0)  # a mean of ones may round up


@triton.jit
def interpolate(
    curve, target, LEVELS: tl.constexpr, LEVEL_RATIO: tl.constexpr, STEEP_FALL: tl.constexpr,
    STEEP_RISE: tl.constexpr, BY_ERROR: tl.constexpr,
):  # fmt: skip
    """Return the threshold at which the curve (LEVELS,) reaches the target, the level at or below it,
    and the part of the step from the level before.

    Errors fall and shares grow from level to level. Between two levels the logarithm of an error, or a
    share, is linear in the logarithm of the threshold; an error that falls too much at once takes the
    lower level, a share that grows too much the upper one. Infinity expands nothing, 0 everything.
    """
    levels = tl.arange(0, LEVELS)
    if BY_ERROR:
        level = tl.min(tl.where((curve <= target) & (target > 0.0), levels, LEVELS - 1), 0)
    else:
        level = tl.min(
            tl.where((curve > target * (1.0 + 1e-9)) & (target < 1.0), levels, LEVELS - 1), 0
        )
        level = tl.where(target <= 0.0, 0, level)
    before = tl.sum(tl.where(levels == level - 1, curve, 0.0), 0)
    after = tl.sum(tl.where(levels == level, curve, 0.0), 0)
    if BY_ERROR:
        ratio = tl.log2(tl.maximum(before, SMALLEST_SUM) / tl.maximum(after, SMALLEST_SUM))
        part = tl.log2(tl.maximum(before, SMALLEST_SUM) / tl.maximum(target, SMALLEST_SUM))
        part = tl.where(ratio != 0.0, part / tl.where(ratio != 0.0, ratio, 1.0), 1.0)
        part = tl.minimum(tl.maximum(part, 0.0), 1.0)
        complete = (level == 0) | (level == LEVELS - 1) | (after < STEEP_FALL * target)
    else:
        part = (target - before) / tl.where(after > before, after - before, 1.0)
        steep = (level == LEVELS - 1) | (after > STEEP_RISE * target)
        steep = steep & (level > 0) & (target < 1.0)
        complete = steep | (level == 0) | (target >= 1.0)
        level = tl.where(steep, level - 1, level)
    part = tl.where(complete, 1.0, part)
    threshold = tl.exp2(((level - 1).to(tl.float32) + part) * tl.log2(LEVEL_RATIO))
    threshold = tl.where((level == LEVELS - 1) & (part == 1.0), 0.0, threshold)
    # Level 0 expands tiles with a loss of 1, and a budget without room none.
    first = 1.0 if BY_ERROR else float("inf")
    return tl.where(level == 0, first, threshold), level, part


@triton.jit
def choose_kernel(
    level_stats, probes, thresholds, shrinkage, exact_heads,
    H, num_probes, target, dense_threshold,
    LEVELS: tl.constexpr, LEVEL_RATIO: tl.constexpr, SMALLEST_CORRECTION: tl.constexpr,
    LARGEST_SHRINKAGE: tl.constexpr, STEEP_FALL: tl.constexpr, STEEP_RISE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_P: tl.constexpr, BY_ERROR: tl.constexpr,
):  # fmt: skip
    """Choose the thresholds of one image from its probes. Grid: (B,).

    `target` is the error to aim at, or without BY_ERROR the share of tiles to expand. Writes thresholds
    (B, 2) and shrinkage (B * H, 2), for the groups at even and at odd positions, and exact_heads
    (B * H), 1 for heads that would expand more than `dense_threshold` of the tiles.
    """
    image = tl.program_id(0)
    level_stats += image * H * num_probes * (4 * LEVELS)
    probes += image * H * num_probes * 3
    shrinkage += image * H * 2
    in_block = tl.arange(0, BLOCK_H)
    curve_0 = tl.zeros((LEVELS,), tl.float64)
    curve_1 = tl.zeros((LEVELS,), tl.float64)
    norm_0, norm_1 = tl.sum(curve_0, 0), tl.sum(curve_1, 0)
    for start in range(0, H, BLOCK_H):
        heads = start + in_block
        weight_0, exact_0 = load_weights(probes, heads, H, num_probes, 0, BLOCK_P)
        weight_1, exact_1 = load_weights(probes, heads, H, num_probes, 1, BLOCK_P)
        if BY_ERROR:
            error = load_stats(level_stats, 0, heads, H, num_probes, LEVELS, BLOCK_P)
            product = load_stats(level_stats, 1, heads, H, num_probes, LEVELS, BLOCK_P)
            square = load_stats(level_stats, 2, heads, H, num_probes, LEVELS, BLOCK_P)
            norms_0, norms_1 = tl.sum(weight_0 * exact_0, 1), tl.sum(weight_1 * exact_1, 1)
            curve_0 += squared_errors(
                error, product, square, weight_0, norms_0, SMALLEST_CORRECTION, LARGEST_SHRINKAGE
            )
            curve_1 += squared_errors(
                error, product, square, weight_1, norms_1, SMALLEST_CORRECTION, LARGEST_SHRINKAGE
            )
            norm_0 += tl.sum(norms_0, 0)
            norm_1 += tl.sum(norms_1, 0)
        else:
            share = load_stats(level_stats, 3, heads, H, num_probes, LEVELS, BLOCK_P)
            curve_0 += tl.sum(weighted_mean(share, weight_0), 0)
            curve_1 += tl.sum(weighted_mean(share, weight_1), 0)
    if BY_ERROR:
        curve_0 = tl.sqrt(tl.maximum(curve_0, 0.0) / tl.where(norm_0 > 0.0, norm_0, 1.0))
        curve_1 = tl.sqrt(tl.maximum(curve_1, 0.0) / tl.where(norm_1 > 0.0, norm_1, 1.0))
    else:
        curve_0 = curve_0 / H
        curve_1 = curve_1 / H
    threshold_0, level_0, part_0 = interpolate(
        curve_0, target, LEVELS, LEVEL_RATIO, STEEP_FALL, STEEP_RISE, BY_ERROR
    )
    threshold_1, level_1, part_1 = interpolate(
        curve_1, target, LEVELS, LEVEL_RATIO, STEEP_FALL, STEEP_RISE, BY_ERROR
    )
    tl.store(thresholds + image * 2, threshold_0)
    tl.store(thresholds + image * 2 + 1, threshold_1)
    for start in range(0, H, BLOCK_H):
        heads = start + in_block
        weight_0, exact_0 = load_weights(probes, heads, H, num_probes, 0, BLOCK_P)
        weight_1, exact_1 = load_weights(probes, heads, H, num_probes, 1, BLOCK_P)
        product = load_stats(level_stats, 1, heads, H, num_probes, LEVELS, BLOCK_P)
        square = load_stats(level_stats, 2, heads, H, num_probes, LEVELS, BLOCK_P)
        share = load_stats(level_stats, 3, heads, H, num_probes, LEVELS, BLOCK_P)
        factor = shrinkage_of(
            tl.sum(weight_0[:, :, None] * product, 1), tl.sum(weight_0[:, :, None] * square, 1),
            tl.sum(weight_0 * exact_0, 1), SMALLEST_CORRECTION, LARGEST_SHRINKAGE,
        )  # fmt: skip
        tl.store(shrinkage + heads * 2, pick(factor, level_0, LEVELS), mask=heads < H)
        factor = shrinkage_of(
            tl.sum(weight_1[:, :, None] * product, 1), tl.sum(weight_1[:, :, None] * square, 1),
            tl.sum(weight_1 * exact_1, 1), SMALLEST_CORRECTION, LARGEST_SHRINKAGE,
        )  # fmt: skip
        tl.store(shrinkage + heads * 2 + 1, pick(factor, level_1, LEVELS), mask=heads < H)
        chosen = share_at(weighted_mean(share, weight_0), level_0, part_0, LEVELS)
        chosen += share_at(weighted_mean(share, weight_1), level_1, part_1, LEVELS)
        many = 0.5 * chosen > dense_threshold
        tl.store(exact_heads + image * H + heads, many.to(tl.int32), mask=heads < H)
