"""The launch of the certificate."""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from bmfa.attention.kernels.triton.launcher import Plan
from bmfa.attention.kernels.triton.tiled.arguments import Frame, mask_or_any
from bmfa.attention.kernels.triton.tiled.certifying import certify
from bmfa.attention.kernels.triton.tiled.sizes import CONFIGURATION, PLAIN


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
    frame = Frame.of((q, k), valid, height, width, prefix, factor, aligned)
    marks = expanded.contiguous().view(torch.uint8)
    _certifier(frame, per_score, always)(q, k, mask_or_any(valid, q), marks, longest, bound)
    return bound


@lru_cache(maxsize=64)
def _certifier(frame: Frame, per_score: float, always: float) -> Plan:
    """The launch with everything settled but the tensors."""
    values = {**frame.arguments(), "per_score": per_score, "always": always, "PLAIN": PLAIN}
    names: Any = certify.arg_names[6:]  # behind the tensors
    rest = tuple(values[name] for name in names)
    programs = (values["groups"], frame.batch * frame.heads, 1)
    warps, stages = CONFIGURATION["certify"]
    return Plan(certify, programs, rest, num_warps=warps, num_stages=stages)
