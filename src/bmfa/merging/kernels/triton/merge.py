"""Bipartite matching and merging of tokens in one Triton kernel, one program per image."""

# Triton's language has no types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,import"

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from bmfa.attention.kernels.triton.launch import CachedLaunch
from bmfa.merging.kernels.triton.features import (
    MAX_LAUNCHES,
    feature_statistics,
    load_features,
    load_rows,
    store_rows,
)

# Pinned launch configuration; measured by `bmfa evaluate --method tome:8`.
BLOCK_DST = 32  # destinations per step of the matching
BLOCK_C = 64  # channels per step
WARPS = 8  # up to 256 tokens, twice as many beyond
# 128 registers per thread let two programs share a multiprocessor. More than 32 pairs and float32
# features need more registers than that, and are left to the compiler.
MAX_REGISTERS = 128

# A cost that overflows float32 is replaced by this number, which is below the infinity of the
# tokens that are not matched, so that r pairs are always found.
MAX_COST = tl.constexpr(3.0e38)


@triton.jit
def _load_weights(weight, rows, T, PARTS: tl.constexpr, BLOCK_PARTS: tl.constexpr):
    """Load the weights of some tokens, summed over their parts (PARTS, T)."""
    part = tl.arange(0, BLOCK_PARTS)
    mask = (part < PARTS)[:, None] & (rows < T)[None, :]
    return tl.sum(tl.load(weight + part[:, None] * T + rows[None, :], mask=mask, other=0.0), 0)


@triton.jit
def _cheapest_partners(
    f, weight, T, prefix, stride_fh, stride_ft, stride_fc,
    F: tl.constexpr, KEYS: tl.constexpr, H: tl.constexpr, WEIGHTED: tl.constexpr,
    PARTS: tl.constexpr, BLOCK_PARTS: tl.constexpr, HALF: tl.constexpr, BLOCK_DST: tl.constexpr,
    BLOCK_F: tl.constexpr,
):  # fmt: skip
    """Return the least cost of each even position, and the index of its odd one; ties to the lowest."""
    src = 2 * tl.arange(0, HALF)
    mean_src, factor_src = feature_statistics(
        f, src, src < T, stride_fh, stride_ft, stride_fc, F, KEYS, H, BLOCK_F
    )
    if WEIGHTED:
        weight_src = _load_weights(weight, src, T, PARTS, BLOCK_PARTS)
    best = tl.full((HALF,), float("inf"), tl.float32)
    partner = tl.zeros((HALF,), tl.int32)
    for step in range(0, HALF, BLOCK_DST):
        index = step + tl.arange(0, BLOCK_DST)
        dst = 2 * index + 1
        product = tl.zeros((HALF, BLOCK_DST), tl.float32)
        norm_src = tl.zeros((HALF,), tl.float32)
        norm_dst = tl.zeros((BLOCK_DST,), tl.float32)
        mean_dst, factor_dst = feature_statistics(
            f, dst, dst < T, stride_fh, stride_ft, stride_fc, F, KEYS, H, BLOCK_F
        )
        for start in range(0, F, BLOCK_F):
            f_src = load_features(
                f, src, src < T, mean_src, factor_src, start,
                stride_fh, stride_ft, stride_fc, F, KEYS, H, BLOCK_F,
            )  # fmt: skip
            f_dst = load_features(
                f, dst, dst < T, mean_dst, factor_dst, start,
                stride_fh, stride_ft, stride_fc, F, KEYS, H, BLOCK_F,
            )  # fmt: skip
            product = tl.dot(f_src, tl.trans(f_dst), product, input_precision="ieee")
            norm_src += tl.sum(f_src.to(tl.float32) * f_src.to(tl.float32), 1)
            norm_dst += tl.sum(f_dst.to(tl.float32) * f_dst.to(tl.float32), 1)
        cost = norm_src[:, None] + norm_dst[None, :] - 2.0 * product  # (HALF, BLOCK_DST)
        if WEIGHTED:
            weight_dst = _load_weights(weight, dst, T, PARTS, BLOCK_PARTS)
            cost *= weight_src[:, None] + weight_dst[None, :]
        cost = tl.where(cost < MAX_COST, cost, MAX_COST)
        cost = tl.where(((dst >= prefix) & (dst < T))[None, :], cost, float("inf"))
        least = tl.min(cost, 1)
        where = tl.min(tl.where(cost == least[:, None], index[None, :], HALF), 1)
        partner = tl.where(least < best, where, partner)
        best = tl.minimum(least, best)
    return tl.where((src >= prefix) & (src < T), best, float("inf")), partner


@triton.jit
def _rank(cost, HALF: tl.constexpr):
    """Return how many costs precede each in ascending order, ties to the lowest index."""
    index = tl.arange(0, HALF)
    other = cost[None, :]
    own = cost[:, None]
    before = (other < own) | ((other == own) & (index[None, :] < index[:, None]))
    return tl.sum(before.to(tl.int32), 1)


@triton.jit(do_not_specialize=["T", "r", "prefix"])
def merge_kernel(
    x, size, f, weight, x_new, size_new, assignment,
    T, r, prefix, stride_xb, stride_xt, stride_xc, stride_fb, stride_fh, stride_ft, stride_fc,
    C: tl.constexpr, F: tl.constexpr, KEYS: tl.constexpr, H: tl.constexpr, WEIGHTED: tl.constexpr,
    PARTS: tl.constexpr, BLOCK_PARTS: tl.constexpr, HALF: tl.constexpr, BLOCK_DST: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Match even with odd positions of one image, merge the r cheapest pairs, write the new tokens.

    f is x (B, T, C), of which the layer norm is taken, or with KEYS the keys (B, H, T, F), whose
    normalised means over heads are taken. BLOCK_R is a power of two with BLOCK_R >= r, or 0 if r is
    0: the pairs that merge form a list in order of cost, and every token that is in no pair is
    copied.
    """
    b = tl.program_id(0).to(tl.int64)
    x += b * stride_xb
    f += b * stride_fb
    size += b * T
    weight += b * PARTS * T
    assignment += b * T
    size_new += b * (T - r)
    x_new += b * (T - r) * C

    index = tl.arange(0, HALF)
    src = 2 * index
    dst = src + 1
    # Odd positions follow the prefix and the even positions that remain.
    offset = prefix + (T + 1) // 2 - (prefix + 1) // 2 - r - prefix // 2
    new_dst = tl.where(dst < prefix, dst, offset + index)
    copy_src = src < T
    copy_dst = dst < T
    if BLOCK_R > 0:
        cost, partner = _cheapest_partners(
            f, weight, T, prefix, stride_fh, stride_ft, stride_fc,
            F, KEYS, H, WEIGHTED, PARTS, BLOCK_PARTS, HALF, BLOCK_DST, BLOCK_F,
        )  # fmt: skip
        rank = _rank(cost, HALF)
        merges = rank < r
        size_src = tl.load(size + src, mask=src < T, other=0.0)

        # The list of pairs (BLOCK_R): source, index of the destination, and size of the source.
        pair = tl.arange(0, BLOCK_R)
        valid = pair < r
        hit = pair[:, None] == rank[None, :]  # (BLOCK_R, HALF)
        pair_src = tl.sum(tl.where(hit, src[None, :], 0), 1)
        pair_index = tl.sum(tl.where(hit, partner[None, :], 0), 1)
        pair_size = tl.sum(tl.where(hit, size_src[None, :], 0.0), 1)
        pair_index = tl.where(valid, pair_index, -1)
        same = (pair_index[:, None] == pair_index[None, :]) & valid[:, None]  # (BLOCK_R, BLOCK_R)
        share = tl.where(same, pair_size[None, :], 0.0)
        # Pairs with the same destination compute the same token; the cheapest of them writes it.
        earlier = same & (pair[None, :] < pair[:, None])
        writes = valid & (tl.sum(earlier.to(tl.int32), 1) == 0)
        pair_dst = 2 * pair_index + 1
        dst_size = tl.load(size + pair_dst, mask=valid, other=1.0)
        total = dst_size + tl.sum(share, 1)
        pair_new = offset + pair_index
        tl.store(size_new + pair_new, total, mask=writes)
        for start in range(0, C, BLOCK_C):
            x_src = load_rows(x, pair_src, valid, start, C, stride_xt, stride_xc, BLOCK_C)
            x_dst = load_rows(x, pair_dst, valid, start, C, stride_xt, stride_xc, BLOCK_C)
            x_sum = x_dst.to(tl.float32) * dst_size[:, None]
            x_sum = tl.dot(share, x_src.to(tl.float32), x_sum, input_precision="tf32x3")
            store_rows(x_new, pair_new, writes, start, C, x_sum / total[:, None], BLOCK_C)

        merged_into = tl.max((pair_index[:, None] == index[None, :]).to(tl.int32), 0)
        copy_src = copy_src & (rank >= r)
        copy_dst = copy_dst & (merged_into == 0)
        remains = (copy_src & (src >= prefix)).to(tl.int32)
        new_src = tl.where(src < prefix, src, prefix + tl.cumsum(remains, 0) - remains)
        tl.store(assignment + src, tl.where(merges, offset + partner, new_src), mask=src < T)
    else:
        remains = (copy_src & (src >= prefix)).to(tl.int32)
        new_src = tl.where(src < prefix, src, prefix + tl.cumsum(remains, 0) - remains)
        tl.store(assignment + src, new_src, mask=src < T)
    tl.store(assignment + dst, new_dst, mask=dst < T)

    tl.store(size_new + new_src, tl.load(size + src, mask=copy_src, other=0.0), mask=copy_src)
    tl.store(size_new + new_dst, tl.load(size + dst, mask=copy_dst, other=0.0), mask=copy_dst)
    for start in range(0, C, BLOCK_C):
        even = load_rows(x, src, copy_src, start, C, stride_xt, stride_xc, BLOCK_C)
        odd = load_rows(x, dst, copy_dst, start, C, stride_xt, stride_xc, BLOCK_C)
        store_rows(x_new, new_src, copy_src, start, C, even, BLOCK_C)
        store_rows(x_new, new_dst, copy_dst, start, C, odd, BLOCK_C)


def launch_merge(
    x: Tensor, size: Tensor, keys: Tensor | None, weight: Tensor | None, r: int, prefix: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return new tokens (B, T - r, C), their sizes (B, T - r), and the assignment (B, T)."""
    batch, tokens, channels = x.shape
    x_new = torch.empty((batch, tokens - r, channels), dtype=x.dtype, device=x.device)
    size_new = torch.empty((batch, tokens - r), dtype=torch.float32, device=x.device)
    assignment = torch.empty((batch, tokens), dtype=torch.int32, device=x.device)
    if batch > 0:
        f = x if keys is None else keys
        parts = 0 if weight is None else weight.shape[1]
        features = (f.dtype, tuple(f.shape), f.stride())
        launch = _prepare(
            x.get_device(), x.dtype, tuple(x.shape), x.stride(), features, parts, r, prefix
        )
        launch(x, size, f, size if weight is None else weight, x_new, size_new, assignment)
    return x_new, size_new, assignment


@lru_cache(maxsize=MAX_LAUNCHES)
def _prepare(
    device: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    features: tuple[torch.dtype, tuple[int, ...], tuple[int, ...]],
    parts: int,
    r: int,
    prefix: int,
) -> CachedLaunch:
    batch, tokens, channels = shape
    feature_dtype, feature_shape, feature_strides = features
    from_keys = len(feature_shape) == 4
    heads, width = (feature_shape[1], feature_shape[3]) if from_keys else (1, channels)
    if not from_keys:
        feature_strides = (feature_strides[0], 0, *feature_strides[1:])
    half = max(16, triton.next_power_of_2((tokens + 1) // 2))
    block_r = 0 if r == 0 else max(16, triton.next_power_of_2(r))
    numbers = (tokens, r, prefix, *strides, *feature_strides)
    constants = (
        channels, width, from_keys, heads, parts > 0,
        max(1, parts), triton.next_power_of_2(max(1, parts)),
        half, min(BLOCK_DST, half), block_r,
        min(64, max(16, triton.next_power_of_2(width))),
        min(BLOCK_C, max(16, triton.next_power_of_2(channels))),
    )  # fmt: skip
    capped = block_r <= 32 and feature_dtype.itemsize == 2
    return CachedLaunch(
        merge_kernel,
        batch,
        numbers + constants,
        num_warps=WARPS if tokens <= 256 else 2 * WARPS,
        num_stages=1,
        maxnreg=MAX_REGISTERS if capped else None,
    )
