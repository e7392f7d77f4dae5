"""A bound on the error E of tiled attention for every query: E itself, rounded outward."""

import torch
from torch import Tensor

from bmfa.attention.kernels.eager.tiles import log_partition_loss, working_precision
from bmfa.attention.tiling import Tiling


def tiled_certificate(
    backend: str,
    q: Tensor,
    k: Tensor,
    tiling: Tiling,
    expanded: Tensor,
    *,
    prefix: int,
    scale: float,
    tau: float = 1.0,
    valid: Tensor | None = None,
    order: str = "raster",
) -> Tensor:
    """(B, heads, prefix + N) float64: a bound on E = F - F~ of every query over all keys.

    F~ is the free energy of the partition that `expanded` (B, heads, R, T) marks: tiles that stay are
    their mean score n times, without corrections; the others and the prefix are exact. Prefix queries
    and those that are not valid have E = 0. F takes every score, but no value and no output: less
    work than dense attention. All but the backend "triton" take raster order.
    """
    factor = scale / tau
    with torch.no_grad():
        working = torch.float32 if backend == "triton" else working_precision(q)
        per_score, always = _allowances(q.shape[-1], tiling, prefix, working)
        if backend == "triton":
            from bmfa.attention.kernels.triton.tiles import operators

            longest = _longest_key(k, prefix, valid, torch.float32)
            bound = operators.log_partition_loss_bound(
                q, k, tiling, expanded, longest, prefix=prefix, factor=factor,
                per_score=per_score, always=always, valid=valid, order=order,
            )  # fmt: skip
            return bound.double() * tau
        lost = log_partition_loss(q, k, tiling, expanded, prefix=prefix, factor=factor, valid=valid)
        longest = _longest_key(k, prefix, valid, torch.float64)
        norms = torch.linalg.vector_norm(q[:, :, prefix:], dim=-1, dtype=torch.float64)
        reach = abs(factor) * norms * longest.unsqueeze(-1)
        bound = lost.double().clamp(min=0) + per_score * reach + always
        bound = bound.where(bound == bound, torch.inf)  # nothing is known of what is no number
        bound = torch.where(lost == -torch.inf, 0.0, bound) * tau
        if valid is not None:
            bound = bound.where(valid.unsqueeze(1), 0.0)
        return torch.cat((bound.new_zeros(*q.shape[:2], prefix), bound), -1)


def _longest_key(k: Tensor, prefix: int, valid: Tensor | None, dtype: torch.dtype) -> Tensor:
    """(B, heads) the norm of the longest key that exists."""
    norms: Tensor = torch.linalg.vector_norm(k, dim=-1, dtype=dtype)
    if valid is not None:
        norms[:, :, prefix:].masked_fill_(~valid.unsqueeze(1), 0.0)
    return norms.amax(-1)


def _allowances(dim: int, tiling: Tiling, prefix: int, working: torch.dtype) -> tuple[float, float]:
    """What rounding may take from log Z - log Z~: for each unit of the largest score R, and always.

    R is what the norms allow. A score is a product of d terms, a mean score a sum of S of them, and
    the exponent a difference: each off by less than (d + S + 16) R units. A sum of T tiles of S
    positive terms and of the prefix, and its logarithm, are off by T + S + prefix + 64 units. Units are
    two roundings of the working precision: matrix units may truncate, and exponentials are good to two.
    """
    slots, unit = tiling.side**2, 2 * torch.finfo(working).eps
    terms = tiling.tiles + slots + prefix
    return 2 * unit * (dim + slots + 16), 2 * unit * (terms + 64)
