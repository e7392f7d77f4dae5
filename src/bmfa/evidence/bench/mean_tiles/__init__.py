"""Mean tiles, the scheme before tangent tiles: a baseline of the attention benchmark.

A tile of keys that is not expanded is its mean key and mean value, with three corrections by the
representative of a group of 8x16 queries: the gap of the tile, one residual of the values and one
cross-covariance of keys and values for all tiles. The kernels are those that the library ran before, at
a fixed number of expanded tiles, without masks and Z-order.
"""

from torch import Tensor

from bmfa.evidence.bench.mean_tiles import eager
from bmfa.evidence.bench.mean_tiles.tiling import GroupedTiling
from bmfa.grid import Grid


def mean_tile_attention(
    q: Tensor, k: Tensor, v: Tensor, *, grid: Grid, prefix: int, expand: int, backend: str
) -> Tensor:
    """Compute attention over mean tiles.

    Args:
        q, k, v: (B, H, prefix + N, d), spatial tokens in raster order.
        grid: Grid of the N spatial tokens.
        prefix: Number of tokens before the grid.
        expand: Number of tiles that every group of queries expands.
        backend: `"triton"` or `"eager"`.

    Returns:
        (B, H, prefix + N, d) output in the dtype of q.
    """
    if backend == "triton":
        from bmfa.evidence.bench.mean_tiles import launch

        return launch.attention(q, k, v, grid, prefix, expand)[0]
    return eager.attention(q, k, v, grid, prefix, expand)[0]


def tiles_of(grid: Grid) -> int:
    """Return the number of tiles of a grid."""
    return GroupedTiling(grid).tiles
