"""The launch of the certificate."""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from bmfa.kernels.triton.launcher import Plan
from bmfa.kernels.triton.tiled.arguments import Strides, common_arguments, named_strides
from bmfa.kernels.triton.tiled.certifying import certify
from bmfa.kernels.triton.tiled.sizes import CONFIGURATION, PLAIN


def bounds(
    q: Tensor,
    k: Tensor,
    valid: Tensor | None,
    expanded: Tensor,
    longest: Tensor,
    height: int,
    width: int,
    prefix: int,
    factor: float,
    per_score: float,
    always: float,
    aligned: bool,
) -> Tensor:
    """(B, heads, prefix + N) bounds on E / tau where `expanded` (B, heads, R, T) marks tiles.

    `longest` (B, heads) is the norm of the longest key, in float32.
    """
    bound = q.new_empty(q.shape[:3], dtype=torch.float32)
    call = _certifier(
        (*q.shape[:2], q.shape[3]), (q.stride()[:3], k.stride()[:3]), q.dtype, q.get_device(),
        valid is not None, height, width, prefix, factor, per_score, always, aligned,
    )  # fmt: skip
    mask = q if valid is None else valid.contiguous().view(torch.uint8)
    call(q, k, mask, expanded.contiguous().view(torch.uint8), longest, bound)
    return bound


@lru_cache(maxsize=64)
def _certifier(
    shape: tuple[int, int, int],
    strides: tuple[Strides, ...],
    dtype: torch.dtype,
    device: int,
    masked: bool,
    height: int,
    width: int,
    prefix: int,
    factor: float,
    per_score: float,
    always: float,
    aligned: bool,
) -> Plan:
    """The launch of the certificate with everything settled but the tensors."""
    batch, heads, dim = shape
    values = {
        **named_strides("qk", strides),
        **common_arguments(heads, dim, dtype, masked, height, width, prefix, factor, aligned),
        "per_score": per_score,
        "always": always,
        "PLAIN": PLAIN,
    }
    warps, stages = CONFIGURATION["certify"]
    programs = (values["groups"], batch * heads, 1)
    names: Any = certify.arg_names[6:]  # behind the tensors
    rest = tuple(values[name] for name in names)
    return Plan(certify, programs, rest, num_warps=warps, num_stages=stages)
