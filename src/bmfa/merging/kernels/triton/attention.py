"""Proportional attention and the attention each token receives, in Triton, with all keys on chip."""

# Triton's language has no types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,import"

import math
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from bmfa.attention.kernels.triton.launch import CachedLaunch
from bmfa.merging.kernels.triton.features import MAX_LAUNCHES

LOG2_E = math.log2(math.e)  # exp(x) = exp2(x * LOG2_E)


class LaunchConfig(NamedTuple):
    """Queries per tile, tiles per program, warps, pipeline stages; see `bmfa evaluate`."""

    block_m: int
    tiles: int
    warps: int
    stages: int


# One program takes all queries of a head, so that keys are loaded once, as long as registers and
# shared memory hold them (256 tokens of dimension 64).
HALF_PRECISION = LaunchConfig(64, 9, 4, 2)
# Beyond 256 tokens a row has up to 512 scores, which need twice the threads.
MANY_TOKENS = LaunchConfig(64, 1, 8, 1)
WIDE_HEADS = LaunchConfig(64, 1, 4, 1)
# IEEE float32 products do not run on tensor cores; tiles of 16 queries do not spill.
SINGLE_PRECISION = LaunchConfig(16, 1, 8, 1)


@triton.jit
def _load_heads(
    x, start, T, stride_t, stride_d, N: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Load N tokens of one head, (N, BLOCK_D), 0 beyond the last token and beyond dimension D."""
    rows = (start + tl.arange(0, N)).to(tl.int64)
    cols = tl.arange(0, BLOCK_D)
    mask = (rows < T)[:, None] & (cols < D)[None, :]
    return tl.load(x + rows[:, None] * stride_t + cols[None, :] * stride_d, mask=mask, other=0.0)


@triton.jit
def _load_log2_size(size, start, T, N: tl.constexpr):
    """Load log2 of the sizes of N keys, -inf beyond the last key."""
    cols = start + tl.arange(0, N)
    bias = tl.log2(tl.load(size + cols, mask=cols < T, other=1.0))
    return tl.where(cols < T, bias, float("-inf"))


@triton.jit
def _store_mass(mass, p, query_weight, start, T, N: tl.constexpr):
    """Store the sums over the queries of a tile of query_weight * p, for N keys."""
    cols = start + tl.arange(0, N)
    tl.store(mass + cols, tl.sum(p.to(tl.float32) * query_weight[:, None], 0), mask=cols < T)


@triton.jit(do_not_specialize=["H", "T", "prefix"])
def proportional_attention_kernel(
    q, k, v, size, o, mass,
    H, T, prefix, scale,
    stride_qb, stride_qh, stride_qt, stride_qd,
    stride_kb, stride_kh, stride_kt, stride_kd,
    stride_vb, stride_vh, stride_vt, stride_vd,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N0: tl.constexpr, BLOCK_N1: tl.constexpr,
    BLOCK_M: tl.constexpr, TILES: tl.constexpr, MASS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """o (B, T, H, D) = softmax(q k^T + log size) v, and the mass (B, H * tiles, T) of each tile.

    A program computes TILES tiles of BLOCK_M queries of one head of one image against all keys.
    The keys are held in two blocks of BLOCK_N0 and BLOCK_N1 (powers of two; BLOCK_N1 may be 0), so
    that 189 tokens take 192 columns instead of 256. All scores of a tile are on chip at once: the
    softmax needs no rescaling, and the columns of the finished attention can be summed.
    """
    groups = tl.cdiv(T, BLOCK_M * TILES)
    program = tl.program_id(0)
    batch_head = (program // groups).to(tl.int64)
    b = batch_head // H
    h = batch_head % H
    q += b * stride_qb + h * stride_qh
    k += b * stride_kb + h * stride_kh
    v += b * stride_vb + h * stride_vh
    size += b * T
    o += (b * T * H + h) * D
    # The queries whose attention is summed: the prefix, or all if there is none.
    readers = tl.where(prefix > 0, prefix, T)
    mass += batch_head * tl.cdiv(readers, BLOCK_M) * T

    k0 = _load_heads(k, 0, T, stride_kt, stride_kd, BLOCK_N0, D, BLOCK_D)
    v0 = _load_heads(v, 0, T, stride_vt, stride_vd, BLOCK_N0, D, BLOCK_D)
    bias0 = _load_log2_size(size, 0, T, BLOCK_N0)
    if BLOCK_N1 > 0:
        k1 = _load_heads(k, BLOCK_N0, T, stride_kt, stride_kd, BLOCK_N1, D, BLOCK_D)
        v1 = _load_heads(v, BLOCK_N0, T, stride_vt, stride_vd, BLOCK_N1, D, BLOCK_D)
        bias1 = _load_log2_size(size, BLOCK_N0, T, BLOCK_N1)

    cols = tl.arange(0, BLOCK_D)
    first = (program % groups) * TILES
    for step in range(TILES):
        tile = first + step
        q_tile = _load_heads(q, tile * BLOCK_M, T, stride_qt, stride_qd, BLOCK_M, D, BLOCK_D)
        s0 = tl.dot(q_tile, tl.trans(k0), input_precision=PRECISION) * scale + bias0[None, :]
        row_max = tl.max(s0, 1)
        if BLOCK_N1 > 0:
            s1 = tl.dot(q_tile, tl.trans(k1), input_precision=PRECISION) * scale + bias1[None, :]
            row_max = tl.maximum(row_max, tl.max(s1, 1))
        p0 = tl.exp2(s0 - row_max[:, None])
        row_sum = tl.sum(p0, 1)
        p0_v = p0.to(v0.dtype)
        acc = tl.dot(p0_v, v0, input_precision=PRECISION)
        if BLOCK_N1 > 0:
            p1 = tl.exp2(s1 - row_max[:, None])
            row_sum += tl.sum(p1, 1)
            p1_v = p1.to(v0.dtype)
            acc = tl.dot(p1_v, v1, acc, input_precision=PRECISION)
        inverse = 1.0 / row_sum

        rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        ptrs = o + (rows.to(tl.int64) * H * D)[:, None] + cols[None, :]
        mask = (rows < T)[:, None] & (cols < D)[None, :]
        tl.store(ptrs, (acc * inverse[:, None]).to(o.dtype.element_ty), mask=mask)

        if MASS:  # noqa: SIM102 (Triton has no `and` of a constant and a tensor)
            if tile * BLOCK_M < readers:
                # The weights in the dtype of v: in float32 they would no longer fit into registers.
                query_weight = tl.where(rows < readers, inverse, 0.0) / readers
                _store_mass(mass + tile * T, p0_v, query_weight, 0, T, BLOCK_N0)
                if BLOCK_N1 > 0:
                    _store_mass(mass + tile * T, p1_v, query_weight, BLOCK_N0, T, BLOCK_N1)


def key_blocks(tokens: int) -> tuple[int, int]:
    """Return two powers of two (the second may be 0) that hold the tokens with the least padding."""
    padded = max(16, triton.next_power_of_2(tokens))
    half = padded // 2
    if half < 16 or tokens <= half:
        return padded, 0
    rest = max(16, triton.next_power_of_2(tokens - half))
    return (half, rest) if rest < half else (padded, 0)


def launch_config(tokens: int, dim: int, dtype: torch.dtype) -> LaunchConfig:
    """Return the pinned configuration; nothing is tuned at run time."""
    if dtype == torch.float32:
        return SINGLE_PRECISION
    if tokens > 256:
        return MANY_TOKENS
    return HALF_PRECISION if dim <= 64 else WIDE_HEADS


def mass_shape(shape: tuple[int, ...], dtype: torch.dtype, prefix: int) -> tuple[int, int, int]:
    """Return (B, parts, T) for q of a shape: one part per head and tile of queries that counts."""
    batch, heads, tokens, dim = shape
    block_m = launch_config(tokens, dim, dtype).block_m
    return batch, heads * triton.cdiv(prefix or tokens, block_m), tokens


def launch_attention(
    q: Tensor, k: Tensor, v: Tensor, size: Tensor, scale: float, prefix: int, mass: bool
) -> tuple[Tensor, Tensor]:
    """Return the output (B, H, T, d), a view of (B, T, H, d), and the mass, empty unless requested."""
    batch, heads, tokens, dim = q.shape
    output = torch.empty((batch, tokens, heads, dim), dtype=q.dtype, device=q.device)
    shape = mass_shape(q.shape, q.dtype, prefix) if mass else (0,)
    masses = torch.empty(shape, dtype=torch.float32, device=q.device)
    if batch * heads > 0:
        strides = (*q.stride(), *k.stride(), *v.stride())
        launch = _prepare(q.get_device(), q.dtype, q.shape, strides, scale, prefix, mass)
        launch(q, k, v, size, output, masses)
    return output.transpose(1, 2), masses


@lru_cache(maxsize=MAX_LAUNCHES)
def _prepare(
    device: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    scale: float,
    prefix: int,
    mass: bool,
) -> CachedLaunch:
    batch, heads, tokens, dim = shape
    config = launch_config(tokens, dim, dtype)
    tiles = min(config.tiles, triton.cdiv(tokens, config.block_m))
    programs = batch * heads * triton.cdiv(tokens, config.block_m * tiles)
    block_d = max(16, triton.next_power_of_2(dim))
    numbers = (heads, tokens, prefix, scale * LOG2_E, *strides)
    constants = (dim, block_d, *key_blocks(tokens), config.block_m, tiles, mass, "ieee")
    return CachedLaunch(
        proportional_attention_kernel,
        programs,
        numbers + constants,
        num_warps=config.warps,
        num_stages=config.stages,
    )
