"""Rows of tokens and the features they are matched by, made in Triton where they are read."""

# Triton's language has no types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,import"

import torch
import triton
import triton.language as tl
from torch import Tensor

from bmfa.attention.kernels.triton.launch import CachedLaunch

EPSILON = tl.constexpr(1e-5)  # of torch's layer norm


@triton.jit
def load_rows(base, rows, inside, first, width, stride_t, stride_c, BLOCK: tl.constexpr):
    """Chosen rows of one picture, BLOCK channels from `first` on, zero outside."""
    columns = first + tl.arange(0, BLOCK)
    address = (
        base + rows.to(tl.int64)[:, None] * stride_t + columns.to(tl.int64)[None, :] * stride_c
    )
    return tl.load(address, mask=inside[:, None] & (columns < width)[None, :], other=0.0)


@triton.jit
def store_rows(base, rows, inside, first, width, values, BLOCK: tl.constexpr):
    """Writes BLOCK channels of chosen rows of a contiguous picture."""
    columns = first + tl.arange(0, BLOCK)
    address = base + rows.to(tl.int64)[:, None] * width + columns[None, :]
    mask = inside[:, None] & (columns < width)[None, :]
    tl.store(address, values.to(base.dtype.element_ty), mask=mask)


@triton.jit
def _raw(
    base, rows, inside, first, width, stride_h, stride_t, stride_c,
    KIND: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Features before they are normalised, float32: the sum over heads of keys."""
    tile = load_rows(base, rows, inside, first, width, stride_t, stride_c, BLOCK).to(tl.float32)
    if KIND == "keys":
        for head in range(1, HEADS):
            more = base + tl.full((), head, tl.int64) * stride_h
            tile += load_rows(more, rows, inside, first, width, stride_t, stride_c, BLOCK)
    return tile


@triton.jit
def statistics(
    base, rows, inside, stride_h, stride_t, stride_c,
    F: tl.constexpr, KIND: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What a row has to lose and by what to multiply it: layer norm, or the length of a key."""
    shift = tl.zeros(rows.shape, tl.float32)
    square = tl.zeros(rows.shape, tl.float32)
    if KIND == "normal":
        for first in range(0, F, BLOCK):
            tile = _raw(
                base, rows, inside, first, F, stride_h, stride_t, stride_c, KIND, HEADS, BLOCK
            )
            shift += tl.sum(tile, 1)
        shift /= F
    for first in range(0, F, BLOCK):
        tile = _raw(base, rows, inside, first, F, stride_h, stride_t, stride_c, KIND, HEADS, BLOCK)
        tile -= shift[:, None]
        tile = tl.where((first + tl.arange(0, BLOCK) < F)[None, :], tile, 0.0)
        square += tl.sum(tile * tile, 1)
    if KIND == "normal":
        return shift, 1.0 / tl.sqrt(square / F + EPSILON)
    else:
        return shift, 1.0 / tl.maximum(tl.sqrt(square), 1e-12 * HEADS)


@triton.jit
def feature_rows(
    base, rows, inside, shift, factor, first, stride_h, stride_t, stride_c,
    F: tl.constexpr, KIND: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK features of chosen rows, in the dtype they come from."""
    if KIND == "given":
        return load_rows(base, rows, inside, first, F, stride_t, stride_c, BLOCK)
    else:
        tile = _raw(base, rows, inside, first, F, stride_h, stride_t, stride_c, KIND, HEADS, BLOCK)
        tile = (tile - shift[:, None]) * factor[:, None]
        tile = tl.where((first + tl.arange(0, BLOCK) < F)[None, :], tile, 0.0)
        return tile.to(base.dtype.element_ty)


@triton.jit(do_not_specialize=["T"])
def tome_kernel(
    k, features, T, k_b, k_h, k_t, k_d,
    HEADS: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Mean over heads of ROWS keys of one picture, divided by its length."""
    blocks = tl.cdiv(T, ROWS)
    picture = (tl.program_id(0) // blocks).to(tl.int64)
    rows = (tl.program_id(0) % blocks) * ROWS + tl.arange(0, ROWS)
    k += picture * k_b
    mean = tl.zeros((ROWS, D), tl.float32)
    for _ in range(HEADS):
        mean += load_rows(k, rows, rows < T, 0, DIM, k_t, k_d, D).to(tl.float32)
        k += k_h
    mean /= HEADS
    length = tl.sqrt(tl.sum(mean * mean, 1))
    unit = mean / tl.maximum(length, 1e-12)[:, None]
    store_rows(features + picture * T * DIM, rows, rows < T, 0, DIM, unit, D)


def launch_tome_features(k: Tensor, rows: int = 32, warps: int = 4) -> Tensor:
    """Unit mean over heads of the keys, (B, T, d) in their dtype."""
    batch, heads, tokens, dim = k.shape
    features = torch.empty((batch, tokens, dim), dtype=k.dtype, device=k.device)
    if batch * tokens == 0:
        return features
    width = max(16, triton.next_power_of_2(dim))
    rest = (tokens, *k.stride(), heads, dim, width, rows)
    CachedLaunch(tome_kernel, batch * triton.cdiv(tokens, rows), rest, num_warps=warps)(k, features)
    return features
