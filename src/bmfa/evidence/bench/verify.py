"""Verification before timing: what will be timed is compared with float64 on small grids."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bmfa.attention.api import screened_attention
from bmfa.attention.inputs import Backend
from bmfa.attention.kernels.reference import tiled_attention
from bmfa.attention.tiling import Tiling
from bmfa.evidence.bench.dense import dense_path, exact_attention
from bmfa.evidence.bench.settings import leaves_for
from bmfa.grid import Grid

# (height, width), prefix, True if tokens are masked: ragged and even grids.
CASES = (((13, 21), 1, False), ((16, 16), 0, False), ((13, 21), 5, True))
HEADS = 2
# Relative error allowed for an output, in units of the epsilon of the dtype. Means, weights and
# outputs are each rounded to the dtype; a wrong token or weight is off by far more.
ROUNDINGS = 8
# Share of the groups of queries that must expand as many tiles as the specification, so that the median
# query is in one of them.
LEAST_AGREEMENT = 0.6
FLOAT32_ROUNDINGS = 256


def check_backend(backend: Backend, dtype: torch.dtype, device: str, dims: Sequence[int]) -> None:
    """Raise ValueError if a backend of tiled attention differs from the specification."""
    for dim in dims:
        for seed, (shape, prefix, masked) in enumerate(CASES):
            grid = Grid(*shape)
            tokens, valid = _tokens(seed, grid, prefix, dim, dtype, masked)
            tiles = Tiling(grid).tiles
            for expanded in (0, 2, tiles):
                case = _Case(grid, prefix, valid, expanded)
                error = case.error(tokens, backend, device)
                _check_error(f"backend {backend}", error, dtype, case)


def check_dense(names: Sequence[str], dtype: torch.dtype, device: str, dims: Sequence[int]) -> None:
    """Raise ValueError if a dense path differs from exact attention on a small grid."""
    grid = Grid(13, 21)
    for dim in dims:
        q, k, v = (x.to(device) for x in _tokens(0, grid, 1, dim, dtype, False)[0])
        expected = exact_attention(q, k, v)
        for name in names:
            output = dense_path(name)(q, k, v)
            error = float((output.double() - expected).norm() / expected.norm())
            _check_error(f"dense path {name}", error, dtype, _Case(grid, 1, None, 0))


def _tokens(
    seed: int, grid: Grid, prefix: int, dim: int, dtype: torch.dtype, masked: bool
) -> tuple[list[Tensor], Tensor | None]:
    """Return random q, k, v, (1, HEADS, prefix + N, d), and a mask; masked tokens are NaN.

    Keys grow over the grid, so that tiles differ by more than rounding in what they lose.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (1, HEADS, prefix + grid.size, dim)
    q, k, v = (torch.randn(shape, generator=generator) for _ in range(3))
    row = torch.arange(grid.height).unsqueeze(1) / grid.height
    column = torch.arange(grid.width) / grid.width
    k[:, :, prefix:] *= (0.2 + 0.6 * row + 1.2 * column).flatten().unsqueeze(-1)
    tokens = [x.to(dtype) for x in (q, k, v)]
    if not masked:
        return tokens, None
    valid = torch.rand(1, grid.size, generator=generator) < 0.8
    masked_tokens = torch.cat((valid.new_zeros(1, prefix), ~valid), 1)[:, None, :, None]
    return [x.masked_fill(masked_tokens, torch.nan) for x in tokens], valid


@dataclass(frozen=True, eq=False)
class _Case:
    grid: Grid
    prefix: int
    valid: Tensor | None  # (1, N) bool
    expanded: int  # tiles for each group of queries

    def error(self, tokens: Sequence[Tensor], backend: Backend, device: str) -> float:
        """Return the median relative error of a query, or inf if other tiles are expanded.

        Groups of queries may differ in tiles whose losses are within rounding of the threshold, which
        is rounded itself; the median query is not in such a group. Without expanded tiles, and with
        all of them, no group may differ.
        """
        tiling, valid = Tiling(self.grid), self.valid
        q, k, v = (x.double().numpy() for x in tokens)
        expected = tiled_attention(
            q,
            k,
            v,
            tiling,
            prefix=self.prefix,
            scale=q.shape[-1] ** -0.5,
            expand=self.expanded,
            valid=None if valid is None else valid.numpy(),
        )
        options: dict[str, Any] = {"allow_dense": False, "backend": backend}
        screened = screened_attention(
            *(x.to(device) for x in tokens),
            grid=self.grid,
            prefix=self.prefix,
            leaves=leaves_for(tiling, self.expanded),
            valid=None if valid is None else valid.to(device),
            **options,
        )
        counts = torch.from_numpy(expected.expanded.sum(-1))
        found = screened.stats.expanded_count
        if screened.stats.backend != backend or found is None:
            return torch.inf
        agreeing = float((counts == found.cpu()).double().mean())
        if agreeing < (LEAST_AGREEMENT if 0 < self.expanded < tiling.tiles else 1.0):
            return torch.inf
        exact = torch.from_numpy(expected.output)
        errors = (screened.output.cpu().double() - exact).norm(dim=-1) / exact.norm(dim=-1)
        if valid is not None:
            queries = torch.cat((valid.new_ones(1, self.prefix), valid), 1)
            errors = errors[queries.unsqueeze(1).expand(errors.shape)]
        return float(errors.nan_to_num(torch.inf).median())


def _check_error(what: str, error: float, dtype: torch.dtype, case: _Case) -> None:
    roundings = FLOAT32_ROUNDINGS if dtype == torch.float32 else ROUNDINGS
    allowed = roundings * torch.finfo(dtype).eps
    if not error <= allowed:
        name, masked = str(dtype).removeprefix("torch."), ", masked" * (case.valid is not None)
        raise ValueError(
            f"{what} is off by {error:.1e} in {name} on a {case.grid.height}x{case.grid.width} grid, "
            f"prefix {case.prefix}{masked} ({allowed:.1e} is allowed); nothing is timed on red tests: "
            "run make test"
        )
