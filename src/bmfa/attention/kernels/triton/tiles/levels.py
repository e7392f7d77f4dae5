"""Kernels 3 and 4: the error of every probe at every level, and the thresholds chosen from them."""

import triton
import triton.language as tl

from bmfa.attention.kernels.triton.tiles.primitives import load_rows, split_batch_head
from bmfa.attention.kernels.triton.tiles.represent import SMALLEST_SUM, probe_queries

# exp(80) times 64 prefix tokens is finite in float32, which ends at exp(88.7).
LARGEST_EXPONENT = tl.constexpr(80.0)
# Smallest share of expanded tiles whose logarithm is interpolated.
SMALLEST_SHARE = tl.constexpr(1e-4)


@triton.jit
def log_partition(
    lse, q_means, k, stride_kt, prefix, qk_scale, D: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Return log Z of a representative from the log-sum-exps of all tiles, and from the prefix keys
    that start at `k`."""
    columns = tl.arange(0, BLOCK_D)
    m_i = tl.max(lse, 0)
    m_i = tl.where(m_i == float("-inf"), 0.0, m_i)
    total = tl.sum(tl.exp(lse - m_i), 0)
    for token in range(prefix):
        key = tl.load(k + token * stride_kt + columns, mask=columns < D, other=0.0)
        score = tl.sum(q_means.to(tl.float32) * key.to(tl.float32), 0) * qk_scale
        total += tl.exp(tl.minimum(score - m_i, LARGEST_EXPONENT))
    return m_i + tl.log(tl.maximum(total, SMALLEST_SUM))


@triton.jit
def tile_losses(lse, log_z, spread, sigma):
    """Return the shares of tiles in Z, and their losses."""
    mass = tl.exp(lse - log_z)
    return mass, sigma * mass * tl.minimum(spread, 1.0)


@triton.jit
def levels_kernel(
    q, k, v, q_mean, q_spread, counts, k_spread, sigma, diameter, probe_tokens, log_mass, v_tangent,
    probe_lse, probe_tangent, probe_v, probe_cross, level_stats, probe_exact, probes, o,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt,
    stride_ob, stride_oh, stride_ot,
    H, prefix, num_tiles, row_capacity, group_stride, num_probes, num_slots, qk_scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr, LEVELS: tl.constexpr,
    LEVEL_RATIO: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Evaluate one probe, or the output of one prefix query. Grid: (probes + prefix, B * H).

    For probes, writes level_stats (B * H, num_probes, 4, LEVELS): |exact - output|^2 without the
    correction, its product with the correction, |correction|^2 and the share of expanded tiles; the exact
    output to probe_exact (B * H, num_probes, D), |exact|^2 and the number of queries of the group to the
    last two columns of probes (B * H, num_probes, 3). For prefix queries, writes the row of o.
    """
    CHUNK: tl.constexpr = 64
    slot = tl.program_id(0)
    batch, head, batch_head = split_batch_head(tl.program_id(1), H)
    q += batch * stride_qb + head * stride_qh
    k += batch * stride_kb + head * stride_kh
    v += batch * stride_vb + head * stride_vh
    columns, levels = tl.arange(0, BLOCK_D), tl.arange(0, LEVELS)
    in_head = columns < D
    is_probe = slot < num_probes
    token = slot - num_probes
    if is_probe:
        token = tl.load(probe_tokens + batch_head * num_probes + slot)
    exists = token >= 0
    query = tl.load(q + token * stride_qt + columns, mask=in_head & exists, other=0.0)
    query = query.to(tl.float32)
    tiles = tl.arange(0, BLOCK_T)
    is_tile = tiles < num_tiles
    slot_line = (batch_head * num_slots + slot) * num_tiles
    exact_lse = tl.load(probe_lse + slot_line + tiles, mask=is_tile, other=float("-inf"))
    m_i = tl.max(exact_lse, 0)
    for index in range(prefix):
        key = tl.load(k + index * stride_kt + columns, mask=in_head, other=0.0).to(tl.float32)
        m_i = tl.maximum(m_i, tl.sum(query * key, 0) * qk_scale)
    m_i = tl.where(m_i == float("-inf"), 0.0, m_i)
    exact_z = tl.sum(tl.exp(exact_lse - m_i), 0)
    exact = tl.zeros((BLOCK_D,), tl.float32)
    for index in range(prefix):
        key = tl.load(k + index * stride_kt + columns, mask=in_head, other=0.0).to(tl.float32)
        value = tl.load(v + index * stride_vt + columns, mask=in_head, other=0.0).to(tl.float32)
        weight = tl.exp(tl.sum(query * key, 0) * qk_scale - m_i)
        exact_z += weight
        exact += weight * value

    largest_sigma = 0.0
    for other in range(H):
        largest_sigma = tl.maximum(largest_sigma, tl.load(sigma + batch * H + other))
    thresholds = largest_sigma * tl.exp2(levels.to(tl.float32) * tl.log2(LEVEL_RATIO))
    thresholds = tl.where(levels == LEVELS - 1, 0.0, thresholds)
    group = slot * group_stride % num_tiles
    group_line = batch_head * num_tiles + group
    q_means = tl.load(q_mean + group_line * D + columns, mask=in_head & is_probe, other=0.0)
    spread = tl.load(q_spread + group_line, mask=is_probe, other=0.0)
    row = tl.where(is_probe, slot, 0)
    row_line = (batch_head * row_capacity + row) * num_tiles
    lse = tl.load(log_mass + row_line + tiles, mask=is_tile, other=float("-inf"))
    log_z = log_partition(lse, q_means, k, stride_kt, prefix, qk_scale, D, BLOCK_D)
    own_sigma = tl.load(sigma + batch_head)

    loss_sum = tl.zeros((LEVELS, BLOCK_D), tl.float32)  # of weighted values
    cross_sum = tl.zeros((LEVELS, BLOCK_D), tl.float32)
    z_difference = tl.zeros((LEVELS,), tl.float32)
    coarse_z = tl.zeros((LEVELS,), tl.float32)
    coarse_mass = tl.zeros((LEVELS,), tl.float32)
    num_expanded = tl.zeros((LEVELS,), tl.float32)
    num_present = 0.0
    for start in range(0, num_tiles, CHUNK):
        chunk = start + tl.arange(0, CHUNK)
        present = chunk < num_tiles
        exact_logit = tl.load(probe_lse + slot_line + chunk, mask=present, other=float("-inf"))
        logit = tl.load(probe_tangent + slot_line + chunk, mask=present, other=float("-inf"))
        count = tl.load(counts + batch_head * num_tiles + chunk, mask=present, other=0.0)
        present = present & (count > 0.0)
        tile_lse = tl.load(log_mass + row_line + chunk, mask=present, other=float("-inf"))
        tile_spread = tl.load(k_spread + batch_head * num_tiles + chunk, mask=present, other=0.0)
        tile_mass, loss = tile_losses(tile_lse, log_z, tile_spread * spread, own_sigma)
        expanded = (loss[None, :] >= thresholds[:, None]) & (loss > 0.0)[None, :]
        expanded = (expanded | (thresholds == 0.0)[:, None]) & present[None, :]  # (LEVELS, CHUNK)
        coarse = (present[None, :] & (expanded == 0)).to(tl.float32)
        exact_weight = tl.where(present, tl.exp(exact_logit - m_i), 0.0)
        weight = tl.where(present, tl.exp(tl.minimum(logit, exact_logit) - m_i), 0.0)
        exact_values = load_rows(probe_v + slot_line * D, chunk, D, present, D, BLOCK_D)
        exact_values = exact_values.to(tl.float32)
        exact += tl.sum(exact_weight[:, None] * exact_values, 0)
        if is_probe:
            values = load_rows(v_tangent + row_line * D, chunk, D, present, D, BLOCK_D)
            lost = weight[:, None] * values.to(tl.float32) - exact_weight[:, None] * exact_values
            loss_sum += tl.dot(coarse, lost, input_precision=PRECISION)
            terms = load_rows(probe_cross + slot_line * D, chunk, D, present, D, BLOCK_D)
            terms = tile_mass[:, None] * terms.to(tl.float32)
            cross_sum += tl.dot(coarse, terms, input_precision=PRECISION)
            z_difference += tl.sum(coarse * (weight - exact_weight)[None, :], 1)
            coarse_z += tl.sum(coarse * weight[None, :], 1)
            coarse_mass += tl.sum(coarse * tile_mass[None, :], 1)
            num_expanded += tl.sum(expanded.to(tl.float32), 1)
            num_present += tl.sum(present.to(tl.float32), 0)
    exact = exact / tl.maximum(exact_z, SMALLEST_SUM)
    if is_probe:
        z = exact_z + z_difference  # (LEVELS,)
        z = tl.where(z > 0.0, z, 1.0)
        error = (exact[None, :] * z_difference[:, None] - loss_sum) / z[:, None]
        term = cross_sum / tl.maximum(coarse_mass, SMALLEST_SUM)[:, None]
        length = tl.sqrt(tl.sum(term * term, 1))
        limit = tl.load(diameter + batch_head)
        term = term * tl.where(length > limit, limit / tl.maximum(length, SMALLEST_SUM), 1.0)[:, None]
        term = term * (coarse_z / z)[:, None]
        line = batch_head * num_probes + slot
        stats = level_stats + line * (4 * LEVELS) + levels
        tl.store(stats, tl.sum(error * error, 1))
        tl.store(stats + LEVELS, tl.sum(error * term, 1))
        tl.store(stats + 2 * LEVELS, tl.sum(term * term, 1))
        tl.store(stats + 3 * LEVELS, num_expanded / tl.maximum(num_present, 1.0))
        tl.store(probe_exact + line * D + columns, exact, mask=in_head)
        tl.store(probes + line * 3 + 1, tl.where(exists, tl.sum(exact * exact, 0), 0.0))
        queries = tl.load(counts + batch_head * num_tiles + group)
        tl.store(probes + line * 3 + 2, tl.where(exists, queries, 0.0))
    else:
        target = o + batch * stride_ob + head * stride_oh + token * stride_ot
        tl.store(target + columns, exact.to(o.dtype.element_ty), mask=in_head)


@triton.jit
def pick(vector, index, LEVELS: tl.constexpr):
    """Return one element of a vector (LEVELS,)."""
    return tl.sum(tl.where(tl.arange(0, LEVELS) == index, vector, 0.0), 0)


@triton.jit
def half_sums(
    level_stats, probes, line, num_probes, half, LEVELS: tl.constexpr, BLOCK_P: tl.constexpr
):
    """Return weighted sums over the probes of a head that determine `half`: the four level_stats
    (LEVELS,), |exact|^2 and the weight. Both halves are taken if the other has no valid query."""
    index, levels = tl.arange(0, BLOCK_P), tl.arange(0, LEVELS)
    mask = (index < num_probes) & (index % 2 != half)
    pointers = probes + (line + index) * 3
    weight = tl.load(pointers + 2, mask=mask, other=0.0)
    norm = tl.sum(weight * tl.load(pointers + 1, mask=mask, other=0.0), 0)
    stats = level_stats + ((line + index) * (4 * LEVELS))[:, None] + levels[None, :]
    error = tl.sum(weight[:, None] * tl.load(stats, mask=mask[:, None], other=0.0), 0)
    product = tl.sum(weight[:, None] * tl.load(stats + LEVELS, mask=mask[:, None], other=0.0), 0)
    square = tl.sum(weight[:, None] * tl.load(stats + 2 * LEVELS, mask=mask[:, None], other=0.0), 0)
    share = tl.sum(weight[:, None] * tl.load(stats + 3 * LEVELS, mask=mask[:, None], other=0.0), 0)
    return error, product, square, share, norm, tl.sum(weight, 0)


@triton.jit
def shrinkage_of(product, square, LARGEST: tl.constexpr):
    factor = product / tl.where(square > 0.0, square, 1.0)
    return tl.minimum(tl.maximum(factor, 0.0), LARGEST)


@triton.jit
def choose_level(
    level_stats, probes, first_line, H, num_probes, largest_sigma, target, half,
    LEVELS: tl.constexpr, LEVEL_RATIO: tl.constexpr, LARGEST_SHRINKAGE: tl.constexpr,
    BLOCK_P: tl.constexpr, BY_ERROR: tl.constexpr,
):  # fmt: skip
    """Return the threshold of the groups at positions of parity `half`, the level at or below it, and
    which probes determine it: those of the other parity, or all if there are none."""
    present = 0.0
    for head in range(H):
        line = first_line + head * num_probes
        _, _, _, _, _, weight = half_sums(
            level_stats, probes, line, num_probes, half, LEVELS, BLOCK_P
        )
        present += weight
    source = tl.where(present > 0.0, half, 2)
    squares = tl.zeros((LEVELS,), tl.float32)
    shares = tl.zeros((LEVELS,), tl.float32)
    norms = 0.0
    for head in range(H):
        line = first_line + head * num_probes
        error, product, square, share, norm, weight = half_sums(
            level_stats, probes, line, num_probes, source, LEVELS, BLOCK_P
        )
        factor = shrinkage_of(product, square, LARGEST_SHRINKAGE)
        squares += error - 2.0 * factor * product + factor * factor * square
        shares += share / tl.maximum(weight, 1.0)
        norms += norm
    levels = tl.arange(0, LEVELS)
    if BY_ERROR:
        curve = tl.sqrt(tl.maximum(squares, 0.0) / tl.where(norms > 0.0, norms, 1.0))
        reached = curve <= target
        curve = tl.maximum(curve, SMALLEST_SUM)
    else:
        curve = shares / H
        reached = curve > target
        curve = tl.maximum(curve, SMALLEST_SHARE)
    level = tl.min(tl.where(reached, levels, LEVELS - 1), 0)
    # Between two levels, the logarithm of the curve is linear in the logarithm of the threshold.
    before, after = pick(curve, level - 1, LEVELS), pick(curve, level, LEVELS)
    before = tl.where(level == 0, 1.0, before)
    ratio = tl.log2(before / after)
    part = tl.log2(before / tl.maximum(target, SMALLEST_SUM)) / tl.where(ratio != 0.0, ratio, 1.0)
    part = tl.where(ratio != 0.0, tl.minimum(tl.maximum(part, 0.0), 1.0), 1.0)
    exponent = (level - 1).to(tl.float32) + part
    if BY_ERROR:
        everything = level == LEVELS - 1
    else:
        everything = target >= 1.0
        exponent = tl.minimum(exponent, LEVELS - 2.0)
        level = tl.minimum(level, LEVELS - 2)
        level = tl.where(target <= 0.0, 0, level)
        level = tl.where(everything, LEVELS - 1, level)
    threshold = largest_sigma * tl.exp2(exponent * tl.log2(LEVEL_RATIO))
    threshold = tl.where(level == 0, float("inf"), threshold)
    return tl.where(everything, 0.0, threshold), level, source


@triton.jit
def choose_kernel(
    level_stats, probes, sigma, thresholds, shrinkage, exact_heads,
    H, num_probes, target, exact_above,
    LEVELS: tl.constexpr, LEVEL_RATIO: tl.constexpr, LARGEST_SHRINKAGE: tl.constexpr,
    BLOCK_P: tl.constexpr, BY_ERROR: tl.constexpr,
):  # fmt: skip
    """Choose the thresholds of one picture from its probes. Grid: (B,).

    `target` is the error to aim at, or without BY_ERROR the share of tiles to expand. Writes thresholds
    (B, 2) and shrinkage (B * H, 2), for the groups at even and at odd positions, and exact_heads (B * H),
    1 for heads that would expand more than `exact_above` of the tiles.
    """
    picture = tl.program_id(0)
    first_line = picture * H * num_probes
    largest_sigma = 0.0
    for head in range(H):
        largest_sigma = tl.maximum(largest_sigma, tl.load(sigma + picture * H + head))
    threshold_0, level_0, source_0 = choose_level(
        level_stats, probes, first_line, H, num_probes, largest_sigma, target, 0, LEVELS, LEVEL_RATIO,
        LARGEST_SHRINKAGE, BLOCK_P, BY_ERROR,
    )  # fmt: skip
    threshold_1, level_1, source_1 = choose_level(
        level_stats, probes, first_line, H, num_probes, largest_sigma, target, 1, LEVELS, LEVEL_RATIO,
        LARGEST_SHRINKAGE, BLOCK_P, BY_ERROR,
    )  # fmt: skip
    tl.store(thresholds + picture * 2, threshold_0)
    tl.store(thresholds + picture * 2 + 1, threshold_1)
    for head in range(H):
        line = first_line + head * num_probes
        _, product, square, share, _, weight = half_sums(
            level_stats, probes, line, num_probes, source_0, LEVELS, BLOCK_P
        )
        factor = pick(shrinkage_of(product, square, LARGEST_SHRINKAGE), level_0, LEVELS)
        tl.store(shrinkage + (picture * H + head) * 2, factor)
        total = pick(share, level_0, LEVELS) / tl.maximum(weight, 1.0)
        _, product, square, share, _, weight = half_sums(
            level_stats, probes, line, num_probes, source_1, LEVELS, BLOCK_P
        )
        factor = pick(shrinkage_of(product, square, LARGEST_SHRINKAGE), level_1, LEVELS)
        tl.store(shrinkage + (picture * H + head) * 2 + 1, factor)
        total += pick(share, level_1, LEVELS) / tl.maximum(weight, 1.0)
        tl.store(exact_heads + picture * H + head, (0.5 * total > exact_above).to(tl.int32))
