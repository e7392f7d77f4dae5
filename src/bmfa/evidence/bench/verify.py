"""Verification before timing: what will be timed is compared with the specification on a small grid."""

import torch
from torch import Tensor

from bmfa.attention.api import screened_attention
from bmfa.attention.call import Backend
from bmfa.attention.kernels.reference import tiled_attention
from bmfa.attention.tiling import Tiling
from bmfa.evidence.bench.methods import leaves_for
from bmfa.grid import Grid

PREFIXES = (1, 5)
GRID, HEADS = Grid(13, 21), 2  # a ragged grid
# Relative error allowed for an output, in units of the epsilon of the dtype. Means, weights and
# outputs are each rounded to the dtype; a wrong token or weight is off by far more.
ROUNDINGS = {torch.float32: 256, torch.float16: 8, torch.bfloat16: 8}


def check_backend(backend: Backend, dtype: torch.dtype, device: str, dim: int) -> None:
    """Raise ValueError if the median query of a backend differs from the specification."""
    tiling, allowed = Tiling(GRID), ROUNDINGS[dtype] * torch.finfo(dtype).eps
    for prefix in PREFIXES:
        tokens = [x.to(dtype) for x in _tokens(prefix, dim)]
        q, k, v = (x.double().numpy() for x in tokens)
        for expanded in (0, 2, tiling.tiles):
            screened = screened_attention(
                *(x.to(device) for x in tokens),
                grid=GRID,
                prefix=prefix,
                leaves=leaves_for(tiling, expanded),
                allow_dense=False,
                backend=backend,
            )
            specified = tiled_attention(
                q,
                k,
                v,
                screened.stats.call.tiling,  # with as many probes as the backend has
                prefix=prefix,
                scale=dim**-0.5,
                expand=expanded,
            )
            exact = torch.from_numpy(specified.output)
            errors = (screened.output.cpu().double() - exact).norm(dim=-1) / exact.norm(dim=-1)
            error = float(errors.nan_to_num(torch.inf).median())
            if not error <= allowed:
                raise ValueError(
                    f"backend {backend} is off by {error:.1e} in {str(dtype).removeprefix('torch.')} "
                    f"on a {GRID.height}x{GRID.width} grid ({allowed:.1e} is allowed); nothing is "
                    "timed on red tests: run make test"
                )


def _tokens(prefix: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return random q, k, v, (1, HEADS, prefix + N, d).

    Keys grow over the grid, so that tiles differ by more than rounding in what they lose.
    """
    generator = torch.Generator().manual_seed(prefix)
    shape = (1, HEADS, prefix + GRID.size, dim)
    q, k, v = (torch.randn(shape, generator=generator) for _ in range(3))
    row = torch.arange(GRID.height).unsqueeze(1) / GRID.height
    column = torch.arange(GRID.width) / GRID.width
    k[:, :, prefix:] *= (0.2 + 0.6 * row + 1.2 * column).flatten().unsqueeze(-1)
    return q, k, v
