"""No benchmark on red tests: what will be timed is first compared with the float64 specification."""

from collections.abc import Sequence

import torch
from torch import Tensor

from bmfa.attention.api import screened_attention
from bmfa.attention.inputs import Backend
from bmfa.attention.kernels.reference import tiled_attention
from bmfa.attention.tiling import Tiling
from bmfa.evidence.bench.dense_paths import dense_path, exact
from bmfa.grid import Grid

# (height, width), prefix, whether tokens are missing: ragged and even grids.
CASES = (((13, 21), 1, False), ((16, 16), 0, False), ((13, 21), 5, True))
HEADS = 2
# Means, weights and outputs are rounded to the dtype in turn: the relative error of an output is a
# few times its epsilon. A wrong token or a wrong weight is off by far more.
ROUNDINGS = 8
FLOAT32_ROUNDINGS = 256


def check_backend(backend: Backend, dtype: torch.dtype, device: str, dims: Sequence[int]) -> None:
    """Raise where a backend of tiled attention differs from the specification on small grids."""
    for dim in dims:
        for seed, (shape, prefix, masked) in enumerate(CASES):
            grid = Grid(*shape)
            tokens, valid = _tokens(seed, grid, prefix, dim, dtype, masked)
            tiles = Tiling(grid).tiles
            for expand in (0, 2, tiles):
                error = _error(tokens, grid, prefix, valid, expand, backend, device)
                _judge(f"backend {backend}", error, dtype, grid, prefix, masked)


def check_dense(names: Sequence[str], dtype: torch.dtype, device: str, dims: Sequence[int]) -> None:
    """Raise where a dense path differs from exact attention on a small grid."""
    grid = Grid(13, 21)
    for dim in dims:
        q, k, v = (x.to(device) for x in _tokens(0, grid, 1, dim, dtype, False)[0])
        truth = exact(q, k, v)
        for name in names:
            got = dense_path(name)(q, k, v)
            error = float((got.double() - truth).norm() / truth.norm())
            _judge(f"dense path {name}", error, dtype, grid, 1, False)


def _tokens(
    seed: int, grid: Grid, prefix: int, dim: int, dtype: torch.dtype, masked: bool
) -> tuple[list[Tensor], Tensor | None]:
    """q, k, v as a model has them, and a mask under which they are NaN."""
    generator = torch.Generator().manual_seed(seed)
    shape = (1, HEADS, prefix + grid.size, dim)
    tokens = [torch.randn(shape, generator=generator).to(dtype) for _ in range(3)]
    if not masked:
        return tokens, None
    valid = torch.rand(1, grid.size, generator=generator) < 0.8
    gone = torch.cat((valid.new_zeros(1, prefix), ~valid), 1)[:, None, :, None]
    return [x.masked_fill(gone, torch.nan) for x in tokens], valid


def _error(
    tokens: Sequence[Tensor],
    grid: Grid,
    prefix: int,
    valid: Tensor | None,
    expand: int,
    backend: Backend,
    device: str,
) -> float:
    """Relative error over the groups of queries that expand what the specification expands."""
    tiling, dim = Tiling(grid), tokens[0].shape[-1]
    q, k, v = (x.double().numpy() for x in tokens)
    wanted = tiled_attention(
        q,
        k,
        v,
        tiling,
        prefix=prefix,
        scale=dim**-0.5,
        expand=expand,
        valid=None if valid is None else valid.numpy(),
    )
    queries, keys, values = (x.to(device) for x in tokens)
    got = screened_attention(
        queries,
        keys,
        values,
        grid=grid,
        prefix=prefix,
        leaves=leaves_of(tiling, expand),
        valid=None if valid is None else valid.to(device),
        form="tiled",
        backend=backend,
    )
    if got.stats.expanded_count is None or got.stats.backend != backend:
        return torch.inf
    counts = torch.from_numpy(wanted.expanded.sum(-1))
    if not torch.equal(counts, got.stats.expanded_count.cpu().to(counts)):
        return torch.inf
    difference = got.output.cpu().double() - torch.from_numpy(wanted.output)
    per_query = difference.norm(dim=-1) / torch.from_numpy(wanted.output).norm(dim=-1)
    if valid is not None:
        seen = torch.cat((valid.new_ones(1, prefix), valid), 1)
        per_query = per_query[seen.unsqueeze(1).expand(per_query.shape)]
    # A tile whose loss lies within rounding of the last one expanded may take its place for a group;
    # the median query is not of such a group.
    return float(per_query.nan_to_num(torch.inf).median())


def leaves_of(tiling: Tiling, expand: int) -> int:
    """The budget that expands so many tiles for each group."""
    return max(2, min(tiling.grid.size, tiling.tiles + expand * (tiling.slots - 1)))


def _judge(
    what: str, error: float, dtype: torch.dtype, grid: Grid, prefix: int, masked: bool
) -> None:
    roundings = FLOAT32_ROUNDINGS if dtype == torch.float32 else ROUNDINGS
    allowed = roundings * torch.finfo(dtype).eps
    if not error <= allowed:
        name = str(dtype).removeprefix("torch.")
        raise ValueError(
            f"{what} is off by {error:.1e} in {name} on a {grid.height}x{grid.width} grid, prefix "
            f"{prefix}{', masked' if masked else ''} ({allowed:.1e} is allowed); nothing is timed on "
            "red tests: run make test"
        )
