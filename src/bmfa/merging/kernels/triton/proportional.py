"""Proportional attention and the mass each token receives, in Triton, with all keys on chip."""

# Triton's language has no types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,import"

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from bmfa.attention.kernels.triton.launch import CachedLaunch

LOG2_E = math.log2(math.e)

# (queries a tile, tiles a program, warps, stages), pinned: no tuning at run time. One program takes
# all queries of a head, so that keys are fetched once, while registers and shared memory hold them;
# beyond, twice the logits a row need twice the threads. float32 products leave the tensor cores,
# where small tiles need no spilling.
HALF_PRECISION = (64, 9, 4, 2)
MANY_TOKENS = (64, 1, 8, 1)
WIDE_HEADS = (64, 1, 4, 1)
SINGLE_PRECISION = (16, 1, 8, 1)


@triton.jit
def _bias(size, first, T, N: tl.constexpr):
    """log2 of the sizes of N keys; a key past the end weighs nothing."""
    keys = first + tl.arange(0, N)
    bias = tl.log2(tl.load(size + keys, mask=keys < T, other=1.0))
    return tl.where(keys < T, bias, float("-inf"))


@triton.jit
def _rows(base, first, T, stride_t, stride_d, N: tl.constexpr, D: tl.constexpr, DIM: tl.constexpr):
    """N rows of one head, (N, D), zero past the last token and past the head dimension."""
    rows = (first + tl.arange(0, N)).to(tl.int64)
    columns = tl.arange(0, D)
    inside = (rows < T)[:, None] & (columns < DIM)[None, :]
    address = base + rows[:, None] * stride_t + columns[None, :] * stride_d
    return tl.load(address, mask=inside, other=0.0)


@triton.jit
def _store_mass(partial, p, share, first, T, N: tl.constexpr):
    """Column sums of one tile's attention, each query with its share."""
    keys = first + tl.arange(0, N)
    tl.store(partial + keys, tl.sum(p.to(tl.float32) * share[:, None], 0), mask=keys < T)


@triton.jit
def _store_zero(partial, T, N: tl.constexpr):
    keys = tl.arange(0, N)
    tl.store(partial + keys, tl.zeros((N,), tl.float32), mask=keys < T)


@triton.jit(do_not_specialize=["heads", "T", "prefix"])
def attend_kernel(
    q, k, v, size, output, partial,
    heads, T, prefix, scale,
    q_b, q_h, q_t, q_d, k_b, k_h, k_t, k_d, v_b, v_h, v_t, v_d,
    DIM: tl.constexpr, D: tl.constexpr, N0: tl.constexpr, N1: tl.constexpr,
    M: tl.constexpr, LOOP: tl.constexpr, MASS: tl.constexpr, OTHERS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: LOOP tiles of M queries of one head of one picture, against all its keys.

    The keys lie in two parts of N0 and N1 (powers of two, N1 may be 0), so that 189 tokens cost 192
    columns and not 256. All logits of a tile are on chip at once: the softmax needs no rescaling, and
    the columns of the finished attention can be summed.
    """
    groups = tl.cdiv(T, M * LOOP)
    program = tl.program_id(0)
    pair = (program // groups).to(tl.int64)  # picture and head
    picture = pair // heads
    head = pair % heads
    q += picture * q_b + head * q_h
    k += picture * k_b + head * k_h
    v += picture * v_b + head * v_h
    size += picture * T
    output += (picture * T * heads + head) * DIM  # (B, T, heads, DIM)
    # (B, heads, tiles, 2, T), or of the tiles with prefix queries alone (B, heads, tiles, 1, T).
    tiles = groups * LOOP
    if OTHERS:
        partial += pair * tiles * 2 * T
    else:
        tiles = tl.where(prefix > 0, tl.cdiv(prefix, M), tiles)
        partial += pair * tiles * T

    k0 = _rows(k, 0, T, k_t, k_d, N0, D, DIM)
    v0 = _rows(v, 0, T, v_t, v_d, N0, D, DIM)
    bias0 = _bias(size, 0, T, N0)
    if N1 > 0:
        k1 = _rows(k, N0, T, k_t, k_d, N1, D, DIM)
        v1 = _rows(v, N0, T, v_t, v_d, N1, D, DIM)
        bias1 = _bias(size, N0, T, N1)

    columns = tl.arange(0, D)
    start = (program % groups) * LOOP
    for step in range(LOOP):
        tile = start + step
        queries = _rows(q, tile * M, T, q_t, q_d, M, D, DIM)
        s0 = tl.dot(queries, tl.trans(k0), input_precision=PRECISION) * scale + bias0[None, :]
        top = tl.max(s0, 1)
        if N1 > 0:
            s1 = tl.dot(queries, tl.trans(k1), input_precision=PRECISION) * scale + bias1[None, :]
            top = tl.maximum(top, tl.max(s1, 1))
        p0 = tl.exp2(s0 - top[:, None])
        total = tl.sum(p0, 1)
        h0 = p0.to(v0.dtype)
        mixed = tl.dot(h0, v0, input_precision=PRECISION)
        if N1 > 0:
            p1 = tl.exp2(s1 - top[:, None])
            total += tl.sum(p1, 1)
            h1 = p1.to(v0.dtype)
            mixed = tl.dot(h1, v1, mixed, input_precision=PRECISION)
        share = 1.0 / total

        rows = tile * M + tl.arange(0, M)
        address = output + (rows.to(tl.int64) * heads * DIM)[:, None] + columns[None, :]
        inside = (rows < T)[:, None] & (columns < DIM)[None, :]
        tl.store(address, (mixed * share[:, None]).to(output.dtype.element_ty), mask=inside)

        if MASS:
            # Means over the queries of a head: whoever reads the parts has only to add. The weights
            # as the values met them: single precision of all would have to leave the registers.
            rest = tl.where((rows >= prefix) & (rows < T), share, 0.0)
            rest /= tl.maximum(T - prefix, 1)
            here = partial + tile * T
            if OTHERS:
                here += tile * T
                _store_mass(here + T, h0, rest, 0, T, N0)
                if N1 > 0:
                    _store_mass(here + T, h1, rest, N0, T, N1)
            if (tile * M < prefix) | (prefix == 0):
                only = tl.where(rows < prefix, share, 0.0) / tl.maximum(prefix, 1)
                only = tl.where(prefix == 0, rest, only)
                _store_mass(here, h0, only, 0, T, N0)
                if N1 > 0:
                    _store_mass(here, h1, only, N0, T, N1)
            elif OTHERS:
                _store_zero(here, T, 2 * N0)


def key_parts(tokens: int) -> tuple[int, int]:
    """Two powers of two (the second may be 0) that hold the tokens with the least padding."""
    whole = max(16, triton.next_power_of_2(tokens))
    half = whole // 2
    if half < 16 or tokens <= half:
        return whole, 0
    rest = max(16, triton.next_power_of_2(tokens - half))
    return (half, rest) if rest < half else (whole, 0)


def launch_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    size: Tensor,
    scale: float,
    prefix: int,
    mass: bool,
    others: bool,
    configuration: tuple[int, int, int, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Output as a (B, heads, T, d) view of (B, T, heads, d), and the mass (empty if not asked)."""
    batch, heads, tokens, dim = q.shape
    output = torch.empty((batch, tokens, heads, dim), dtype=q.dtype, device=q.device)
    shape = mass_shape(q.shape, q.dtype, prefix, others, configuration) if mass else (0,)
    partial = torch.empty(shape, dtype=torch.float32, device=q.device)
    if batch * heads > 0:
        key = (
            q.get_device(), q.dtype, q.shape, q.stride(), k.stride(), v.stride(),
            scale, prefix, mass, others, configuration,
        )  # fmt: skip
        plan = _PLANS.get(key)
        if plan is None:
            plan = _PLANS[key] = _plan(q, k, v, scale, prefix, mass, others, configuration)
        plan(q, k, v, size, output, partial)
    return output.transpose(1, 2), partial


_PLANS: dict[Any, CachedLaunch] = {}


def _plan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    prefix: int,
    mass: bool,
    others: bool,
    configuration: tuple[int, int, int, int] | None,
) -> CachedLaunch:
    batch, heads, tokens, dim = q.shape
    queries, loop, warps, stages = _configured(tokens, dim, q.dtype, configuration)
    groups = triton.cdiv(tokens, queries * loop)
    width = max(16, triton.next_power_of_2(dim))
    numbers = (heads, tokens, prefix, scale * LOG2_E, *q.stride(), *k.stride(), *v.stride())
    constants = (dim, width, *key_parts(tokens), queries, loop, mass, others, "ieee")
    return CachedLaunch(
        attend_kernel,
        batch * heads * groups,
        numbers + constants,
        num_warps=warps,
        num_stages=stages,
    )


def mass_shape(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    prefix: int,
    others: bool,
    configuration: tuple[int, int, int, int] | None = None,
) -> tuple[int, int, int, int]:
    """(B, parts, rows, T): a part for every head and tile of queries that is asked for."""
    batch, heads, tokens, dim = shape
    queries, loop, _, _ = _configured(tokens, dim, dtype, configuration)
    if prefix > 0 and not others:
        return batch, heads * triton.cdiv(prefix, queries), 1, tokens
    tiles = loop * triton.cdiv(tokens, queries * loop)
    return batch, heads * tiles, 2 if others else 1, tokens


def _configured(
    tokens: int, dim: int, dtype: torch.dtype, configuration: tuple[int, int, int, int] | None
) -> tuple[int, int, int, int]:
    """Queries a tile, tiles a program, warps and stages."""
    queries, loop, warps, stages = configuration or _default(tokens, dim, dtype)
    return queries, min(loop, triton.cdiv(tokens, queries)), warps, stages


def _default(tokens: int, dim: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    if dtype == torch.float32:
        return SINGLE_PRECISION
    if tokens > 256:
        return MANY_TOKENS
    return HALF_PRECISION if dim <= 64 else WIDE_HEADS
