"""Load and store rows of tokens, and make the features that tokens are matched by, in Triton."""

# Triton's language has no types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,import"

import torch
import triton
import triton.language as tl
from torch import Tensor

from bmfa.attention.kernels.triton.launch import CachedLaunch

LAYER_NORM_EPS = tl.constexpr(1e-5)  # the default of torch.nn.functional.layer_norm
MIN_NORM = tl.constexpr(1e-12)  # the default of torch.nn.functional.normalize
# Launches that each kernel caches, a few hundred bytes each; a reduced model of 24 blocks needs 24.
MAX_LAUNCHES = 256
# Keys per program of unit_mean_keys_kernel: 32 rows of 64 channels fill four warps.
KEYS_BLOCK_T = 32


@triton.jit
def load_rows(x, rows, mask, start, C, stride_t, stride_c, BLOCK_C: tl.constexpr):
    """Load (rows, BLOCK_C) channels from `start` on, 0 where masked and beyond C."""
    cols = start + tl.arange(0, BLOCK_C)
    ptrs = x + rows.to(tl.int64)[:, None] * stride_t + cols.to(tl.int64)[None, :] * stride_c
    return tl.load(ptrs, mask=mask[:, None] & (cols < C)[None, :], other=0.0)


@triton.jit
def store_rows(x, rows, mask, start, C, values, BLOCK_C: tl.constexpr):
    """Store (rows, BLOCK_C) channels from `start` on into contiguous rows of C channels."""
    cols = start + tl.arange(0, BLOCK_C)
    ptrs = x + rows.to(tl.int64)[:, None] * C + cols[None, :]
    tl.store(ptrs, values.to(x.dtype.element_ty), mask=mask[:, None] & (cols < C)[None, :])


@triton.jit
def _load_unnormalised(
    f, rows, mask, start, stride_h, stride_t, stride_c,
    F: tl.constexpr, KEYS: tl.constexpr, H: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """Load (rows, BLOCK_F) float32: the tokens, or the sum over heads of the keys."""
    tile = load_rows(f, rows, mask, start, F, stride_t, stride_c, BLOCK_F).to(tl.float32)
    if KEYS:
        for h in range(1, H):
            f_h = f + tl.full((), h, tl.int64) * stride_h
            tile += load_rows(f_h, rows, mask, start, F, stride_t, stride_c, BLOCK_F)
    return tile


@triton.jit
def feature_statistics(
    f, rows, mask, stride_h, stride_t, stride_c,
    F: tl.constexpr, KEYS: tl.constexpr, H: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """Return (rows) mean and inverse deviation of a layer norm, or 0 and the inverse norm of keys."""
    mean = tl.zeros(rows.shape, tl.float32)
    square = tl.zeros(rows.shape, tl.float32)
    if not KEYS:
        for start in range(0, F, BLOCK_F):
            tile = _load_unnormalised(
                f, rows, mask, start, stride_h, stride_t, stride_c, F, KEYS, H, BLOCK_F
            )
            mean += tl.sum(tile, 1)
        mean /= F
    for start in range(0, F, BLOCK_F):
        tile = _load_unnormalised(
            f, rows, mask, start, stride_h, stride_t, stride_c, F, KEYS, H, BLOCK_F
        )
        tile -= mean[:, None]
        tile = tl.where((start + tl.arange(0, BLOCK_F) < F)[None, :], tile, 0.0)
        square += tl.sum(tile * tile, 1)
    if KEYS:
        return mean, 1.0 / tl.maximum(tl.sqrt(square), MIN_NORM * H)
    else:
        return mean, 1.0 / tl.sqrt(square / F + LAYER_NORM_EPS)


@triton.jit
def load_features(
    f, rows, mask, mean, factor, start, stride_h, stride_t, stride_c,
    F: tl.constexpr, KEYS: tl.constexpr, H: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """Return (rows, BLOCK_F) features from `start` on, in the dtype of f."""
    tile = _load_unnormalised(
        f, rows, mask, start, stride_h, stride_t, stride_c, F, KEYS, H, BLOCK_F
    )
    tile = (tile - mean[:, None]) * factor[:, None]
    tile = tl.where((start + tl.arange(0, BLOCK_F) < F)[None, :], tile, 0.0)
    return tile.to(f.dtype.element_ty)


@triton.jit(do_not_specialize=["T"])
def unit_mean_keys_kernel(
    k, o, T, stride_kb, stride_kh, stride_kt, stride_kd,
    H: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """o (B, T, D) = mean over heads of k (B, H, T, D), divided by its norm; BLOCK_T tokens a program."""
    blocks = tl.cdiv(T, BLOCK_T)
    b = (tl.program_id(0) // blocks).to(tl.int64)
    rows = (tl.program_id(0) % blocks) * BLOCK_T + tl.arange(0, BLOCK_T)
    k += b * stride_kb
    mean = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    for _ in range(H):
        mean += load_rows(k, rows, rows < T, 0, D, stride_kt, stride_kd, BLOCK_D).to(tl.float32)
        k += stride_kh
    mean /= H
    norm = tl.sqrt(tl.sum(mean * mean, 1))
    unit = mean / tl.maximum(norm, MIN_NORM)[:, None]
    store_rows(o + b * T * D, rows, rows < T, 0, D, unit, BLOCK_D)


def launch_unit_mean_keys(k: Tensor) -> Tensor:
    """Return (B, T, d) in the dtype of the keys (B, H, T, d)."""
    batch, _, tokens, dim = k.shape
    features = torch.empty((batch, tokens, dim), dtype=k.dtype, device=k.device)
    if batch * tokens > 0:
        prepare_unit_mean_keys(k)(k, features)
    return features


def prepare_unit_mean_keys(k: Tensor) -> CachedLaunch:
    """Return the launch for keys of this shape and these strides."""
    batch, heads, tokens, dim = k.shape
    block_d = max(16, triton.next_power_of_2(dim))
    arguments = (tokens, *k.stride(), heads, dim, block_d, KEYS_BLOCK_T)
    programs = batch * triton.cdiv(tokens, KEYS_BLOCK_T)
    return CachedLaunch(unit_mean_keys_kernel, programs, arguments, num_warps=4)
