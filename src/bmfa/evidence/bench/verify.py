"""Verification before timing: what will be timed is compared with float64 on small grids."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bmfa.attention.api import screened_attention
from bmfa.attention.inputs import Backend
from bmfa.attention.kernels.reference import tiled_attention
from bmfa.attention.tiling import Tiling
from bmfa.evidence.bench.dense import dense_path, exact_attention
from bmfa.evidence.bench.methods import leaves_for
from bmfa.grid import Grid

# Prefix, and True if tokens are masked. The grid is ragged.
CASES = ((1, False), (5, True))
GRID, HEADS = Grid(13, 21), 2
# Relative error allowed for an output, in units of the epsilon of the dtype. Means, weights and
# outputs are each rounded to the dtype; a wrong token or weight is off by far more.
ROUNDINGS = {torch.float32: 256, torch.float16: 8, torch.bfloat16: 8}
# Share of the groups of queries that must expand as many tiles as the specification, so that the median
# query is in one of them. Without expanded tiles, and with all of them, no group may differ.
LEAST_AGREEMENT = 0.6


def check_backend(backend: Backend, dtype: torch.dtype, device: str, dim: int) -> None:
    """Raise ValueError if a backend of tiled attention differs from the specification."""
    tiles = Tiling(GRID).tiles
    for seed, (prefix, masked) in enumerate(CASES):
        tokens, valid = _tokens(seed, prefix, dim, dtype, masked)
        for expanded in (0, 2, tiles):
            agreement = LEAST_AGREEMENT if 0 < expanded < tiles else 1.0
            error = _error(tokens, valid, prefix, backend, device, expanded, agreement)
            _check_error(f"backend {backend}", error, dtype)


def check_dense(names: Sequence[str], dtype: torch.dtype, device: str, dim: int) -> None:
    """Raise ValueError if a dense path differs from exact attention on a small grid."""
    q, k, v = (x.to(device) for x in _tokens(0, 1, dim, dtype, False)[0])
    expected = exact_attention(q, k, v)
    for name in names:
        error = (dense_path(name)(q, k, v).double() - expected).norm() / expected.norm()
        _check_error(f"dense path {name}", float(error), dtype)


def _tokens(
    seed: int, prefix: int, dim: int, dtype: torch.dtype, masked: bool
) -> tuple[list[Tensor], Tensor | None]:
    """Return random q, k, v, (1, HEADS, prefix + N, d), and a mask; masked tokens are NaN.

    Keys grow over the grid, so that tiles differ by more than rounding in what they lose.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (1, HEADS, prefix + GRID.size, dim)
    q, k, v = (torch.randn(shape, generator=generator) for _ in range(3))
    row = torch.arange(GRID.height).unsqueeze(1) / GRID.height
    column = torch.arange(GRID.width) / GRID.width
    k[:, :, prefix:] *= (0.2 + 0.6 * row + 1.2 * column).flatten().unsqueeze(-1)
    tokens = [x.to(dtype) for x in (q, k, v)]
    if not masked:
        return tokens, None
    valid = torch.rand(1, GRID.size, generator=generator) < 0.8
    masked_tokens = torch.cat((valid.new_zeros(1, prefix), ~valid), 1)[:, None, :, None]
    return [x.masked_fill(masked_tokens, torch.nan) for x in tokens], valid


def _error(
    tokens: Sequence[Tensor],
    valid: Tensor | None,
    prefix: int,
    backend: Backend,
    device: str,
    expanded: int,
    agreement: float,
) -> float:
    """Return the median relative error of a query, or inf if other tiles are expanded.

    Groups of queries may differ in tiles whose losses are within rounding of the threshold, which is
    rounded itself; the median query is not in such a group.
    """
    tiling = Tiling(GRID)
    q, k, v = (x.double().numpy() for x in tokens)
    mask = None if valid is None else valid.numpy()
    specified = tiled_attention(
        q, k, v, tiling, prefix=prefix, scale=q.shape[-1] ** -0.5, expand=expanded, valid=mask
    )
    options: dict[str, Any] = {"allow_dense": False, "backend": backend}
    screened = screened_attention(
        *(x.to(device) for x in tokens),
        grid=GRID,
        prefix=prefix,
        leaves=leaves_for(tiling, expanded),
        valid=None if valid is None else valid.to(device),
        **options,
    )
    counts, found = torch.from_numpy(specified.expanded.sum(-1)), screened.stats.expanded_count
    if screened.stats.backend != backend or found is None:
        return torch.inf
    if float((counts == found.cpu()).double().mean()) < agreement:
        return torch.inf
    exact = torch.from_numpy(specified.output)
    errors = (screened.output.cpu().double() - exact).norm(dim=-1) / exact.norm(dim=-1)
    if valid is not None:
        errors = errors[:, :, torch.cat((valid.new_ones(1, prefix), valid), 1)[0]]
    return float(errors.nan_to_num(torch.inf).median())


def _check_error(what: str, error: float, dtype: torch.dtype) -> None:
    allowed = ROUNDINGS[dtype] * torch.finfo(dtype).eps
    if not error <= allowed:
        raise ValueError(
            f"{what} is off by {error:.1e} in {str(dtype).removeprefix('torch.')} on a "
            f"{GRID.height}x{GRID.width} grid ({allowed:.1e} is allowed); nothing is timed on red "
            "tests: run make test"
        )
