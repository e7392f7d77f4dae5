"""Kernel of the certificate: the error of every query from one more pass over the keys."""

import triton
import triton.language as tl

from bmfa.attention.kernels.triton.tiles.primitives import (
    LOG2E,
    load_rows,
    split_batch_head,
    tile_tokens,
    valid_tokens,
)

# Where all scores (base 2) are below this, exp2 needs no shift by a maximum: the sum of the 2^18 terms
# of the largest grid stays below 2^118, and each term above 2^-100, both normal in float32.
LARGEST_UNSHIFTED = tl.constexpr(100.0)
# 8 roundings of float32, upwards: two logarithms and the change of base.
ROUND_UP = tl.constexpr(1.000001)


@triton.jit
def add_scaled(m_i, l_i, m_j, l_j):
    """Add l_j 2^m_j to l_i 2^m_i and return the new pair; an exponent of -inf stands for 0."""
    m_new = tl.maximum(m_i, m_j)
    shift = tl.where(m_new == float("-inf"), 0.0, m_new)
    return m_new, l_i * tl.exp2(m_i - shift) + l_j * tl.exp2(m_j - shift)


@triton.jit
def score_tile(
    queries, k, valid, tile, stride_kt, height, width, tiles_across, qk_scale_log2,
    D: tl.constexpr, BLOCK_D: tl.constexpr, SIDE: tl.constexpr,
    Z_ORDER: tl.constexpr, MASKED: tl.constexpr, RAGGED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the scores (base 2) of a tile, -inf for missing tokens, their mean and their count."""
    slots = tl.arange(0, SIDE * SIDE)
    tokens, on_grid = tile_tokens(tile, slots, height, width, tiles_across, Z_ORDER, SIDE)
    exists = valid_tokens(valid, tokens, on_grid, MASKED)
    tile_k = load_rows(k, tokens, stride_kt, exists, D, BLOCK_D)
    scores = tl.dot(queries, tl.trans(tile_k), input_precision=PRECISION) * qk_scale_log2
    total = tl.sum(scores, 1)  # the keys of missing tokens are 0, and so are their scores
    count = SIDE * SIDE * 1.0
    if MASKED or RAGGED:
        count = tl.sum(exists.to(tl.float32), 0)
        scores = tl.where(exists[None, :], scores, float("-inf"))
    return scores, total / tl.maximum(count, 1.0), count


@triton.jit
def certificate_kernel(
    q, k, valid, expanded, longest_key, bound,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt,
    H, prefix, height, width, tiles_across, num_tiles, num_groups, qk_scale, per_score, always,
    D: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr, SIDE: tl.constexpr,
    BLOCK_PREFIX: tl.constexpr, Z_ORDER: tl.constexpr, MASKED: tl.constexpr, RAGGED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Bound E / tau = log Z - log Z~ of the GROUP * S queries of one group. Grid: (groups, B * H).

    Z sums exp over all tokens; Z~ takes n exp(mean score) for a tile that is not expanded. The mean of
    the scores needs no mean key and has the rounding of the scores. `per_score` times the largest score
    that the norms allow (`longest_key` is the largest norm of a key of the head), plus `always`, covers
    the rounding.

    Writes bound (B * H, prefix + N) in float32: 0 for prefix queries, for queries that do not exist and
    where every tile is expanded; inf where a score is NaN.
    """
    S: tl.constexpr = SIDE * SIDE
    QUERIES: tl.constexpr = GROUP * S
    group = tl.program_id(0)
    batch, head, batch_head = split_batch_head(tl.program_id(1), H)
    q += batch * stride_qb + head * stride_qh + prefix * stride_qt
    k += batch * stride_kb + head * stride_kh
    valid += batch * height * width
    expanded += (batch_head * num_groups + group) * num_tiles
    bound += batch_head * (prefix + height * width)
    rows = tl.arange(0, QUERIES)
    query_tile = group * GROUP + rows // S
    tokens, on_grid = tile_tokens(query_tile, rows % S, height, width, tiles_across, Z_ORDER, SIDE)
    on_grid = on_grid & (query_tile < num_tiles)
    exists = valid_tokens(valid, tokens, on_grid, MASKED)
    queries = load_rows(q, tokens, stride_qt, exists, D, BLOCK_D)  # (QUERIES, BLOCK_D)
    qk_scale_log2 = qk_scale * LOG2E
    # Z = exact_l 2^exact_m and Z~ = coarse_l 2^coarse_m
    exact_m = tl.full((QUERIES,), float("-inf"), tl.float32)
    exact_l = tl.zeros((QUERIES,), tl.float32)
    if BLOCK_PREFIX > 0:
        prefix_tokens = tl.arange(0, BLOCK_PREFIX)
        in_prefix = prefix_tokens < prefix
        prefix_k = load_rows(k, prefix_tokens, stride_kt, in_prefix, D, BLOCK_D)
        prefix_scores = tl.dot(queries, tl.trans(prefix_k), input_precision=PRECISION)
        prefix_scores = prefix_scores * qk_scale_log2
        prefix_scores = tl.where(in_prefix[None, :], prefix_scores, float("-inf"))
        exact_m = tl.max(prefix_scores, 1)
        exact_l = tl.sum(tl.exp2(prefix_scores - exact_m[:, None]), 1)
    coarse_m, coarse_l = exact_m, exact_l
    k += prefix * stride_kt
    any_coarse = False
    q_f32 = queries.to(tl.float32)
    largest_score = tl.sqrt(tl.sum(q_f32 * q_f32, 1)) * tl.load(longest_key + batch_head)
    largest_score = largest_score * tl.abs(qk_scale)
    if tl.max(largest_score, 0) * LOG2E < LARGEST_UNSHIFTED:
        coarse_l = exact_l * tl.exp2(exact_m)
        exact_l = coarse_l
        for tile in range(num_tiles):
            scores, mean, count = score_tile(
                queries, k, valid, tile, stride_kt, height, width, tiles_across, qk_scale_log2,
                D, BLOCK_D, SIDE, Z_ORDER, MASKED, RAGGED, PRECISION,
            )  # fmt: skip
            mass = tl.sum(tl.exp2(scores), 1)
            coarse = (tl.load(expanded + tile) == 0) & (count > 1.0)
            any_coarse = any_coarse | coarse
            exact_l += mass
            coarse_l += tl.where(coarse, count * tl.exp2(mean), mass)
        exact_m = tl.zeros((QUERIES,), tl.float32)
        coarse_m = exact_m
    else:
        for tile in range(num_tiles):
            scores, mean, count = score_tile(
                queries, k, valid, tile, stride_kt, height, width, tiles_across, qk_scale_log2,
                D, BLOCK_D, SIDE, Z_ORDER, MASKED, RAGGED, PRECISION,
            )  # fmt: skip
            m_i = tl.max(scores, 1)
            shift = tl.where(m_i == float("-inf"), 0.0, m_i)
            mass = tl.sum(tl.exp2(scores - shift[:, None]), 1)
            coarse = (tl.load(expanded + tile) == 0) & (count > 1.0)
            any_coarse = any_coarse | coarse
            exact_m, exact_l = add_scaled(exact_m, exact_l, m_i, mass)
            # Z and Z~ have exponents of their own: a maximum may be far above the mean of its tile.
            coarse_m, coarse_l = add_scaled(
                coarse_m, coarse_l, tl.where(coarse, mean, m_i), tl.where(coarse, count, mass)
            )
    error = (exact_m - coarse_m) + (tl.log2(exact_l) - tl.log2(coarse_l))
    error = tl.maximum(error * (ROUND_UP / LOG2E), 0.0) + per_score * largest_score + always
    error = tl.where(error == error, error, float("inf"))  # NaN: nothing is known
    error = tl.where(any_coarse & exists, error, 0.0)
    tl.store(bound + prefix + tokens, error, mask=on_grid)
    if group == 0 and BLOCK_PREFIX > 0:
        first = tl.arange(0, BLOCK_PREFIX)
        tl.store(bound + first, 0.0, mask=first < prefix)
