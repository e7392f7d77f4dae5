"""A bound on the error E of tiled attention for every query: E itself, rounded outward."""

import torch
from torch import Tensor

from bmfa.tiling import Tiling


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
        if backend == "triton":
            from bmfa.kernels.triton.tiled import operators

            lost = operators.tile_losses(q, k, tiling, expanded, prefix, factor, valid, order)
        else:
            from bmfa.kernels.eager.certifying import tile_losses

            lost = tile_losses(q, k, tiling, expanded, prefix=prefix, factor=factor, valid=valid)
        slack = _slack(q, k, tiling, prefix, abs(factor), valid)
        bound = torch.where(lost == -torch.inf, 0.0, lost.double().clamp(min=0) + slack) * tau
        if valid is not None:
            bound = bound.where(valid.unsqueeze(1), 0.0)
        return torch.cat((bound.new_zeros(*q.shape[:2], prefix), bound), -1)


def _slack(
    q: Tensor, k: Tensor, tiling: Tiling, prefix: int, factor: float, valid: Tensor | None
) -> Tensor:
    """(B, heads, N) what rounding may have taken from log Z - log Z~, in float64.

    With R the largest score that the norms allow, a score is a product of d terms, a mean score a sum
    of S of them, and the exponent a difference: each off by less than (d + S + 16) R units. A sum of
    T tiles of S positive terms and its logarithm are off by T + S + 64 units. Units are two roundings
    of the working precision: matrix units may truncate, and exponentials are good to two.
    """
    working = torch.float64 if q.dtype == torch.float64 else torch.float32
    unit = 2 * torch.finfo(working).eps
    keys = torch.linalg.vector_norm(k, dim=-1, dtype=working)
    queries = torch.linalg.vector_norm(q[:, :, prefix:], dim=-1, dtype=working)
    if valid is not None:
        keys[:, :, prefix:].masked_fill_(~valid.unsqueeze(1), 0.0)
    reach: Tensor = factor * queries.double() * keys.amax(-1, keepdim=True).double()
    slots = tiling.side**2
    return 2 * unit * ((q.shape[-1] + slots + 16) * reach + tiling.tiles + slots + 64)
