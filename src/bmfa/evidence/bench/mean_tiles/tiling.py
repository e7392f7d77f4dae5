"""Geometry of mean tiles: 8x8 tiles of keys, and groups of 8x16 queries.

Shapes: B batch, H heads, N spatial tokens in raster order, T tiles, S = side * side slots in a tile,
R groups of queries. A ragged grid has tiles with fewer than S tokens; their other slots are empty.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

from bmfa.grid import Grid

# Side of a tile in tokens, and tiles whose queries share a representative. The Triton kernels are
# written for these sizes.
TILE_SIDE = 8
GROUP_TILES = 2
# Largest gap, in units of tau, that is added to the logit of an unexpanded tile. A tile with a larger
# gap holds a token with more than exp(4) = 55 times the mean weight, almost all the mass of its 64
# tokens: adding more would extrapolate from the representative to queries that may not share it.
GAP_CAP = 4.0


@dataclass(frozen=True)
class Tiling:
    """Square tiles over a grid, from the top left, smaller at the right and bottom edges.

    Tiles are numbered in raster order. The queries of `group` consecutive tiles share one
    representative query; the last group may have fewer tiles.
    """

    grid: Grid
    side: int = TILE_SIDE
    group: int = GROUP_TILES

    @property
    def rows(self) -> int:
        """Number of rows of tiles."""
        return -(-self.grid.height // self.side)

    @property
    def columns(self) -> int:
        """Number of columns of tiles."""
        return -(-self.grid.width // self.side)

    @property
    def tiles(self) -> int:
        """T, the number of tiles."""
        return self.rows * self.columns

    @property
    def slots(self) -> int:
        """S, the number of slots in a tile."""
        return self.side * self.side

    @property
    def groups(self) -> int:
        """R, the number of groups of queries."""
        return -(-self.tiles // self.group)

    @property
    def ragged(self) -> bool:
        """True if some tiles have fewer than S tokens."""
        return self.grid.height % self.side != 0 or self.grid.width % self.side != 0

    @cached_property
    def slot_tokens(self) -> Tensor:
        """(T, S) raster index of the token in each slot, -1 for empty slots."""
        row = torch.arange(self.rows * self.side).view(-1, 1, self.side, 1)
        column = torch.arange(self.columns * self.side).view(1, -1, 1, self.side)
        inside = (row < self.grid.height) & (column < self.grid.width)
        index = torch.where(inside, row * self.grid.width + column, -1)
        return index.reshape(self.tiles, self.slots)


def tokens_to_tiles(tokens: Tensor, tiling: Tiling, dtype: torch.dtype) -> Tensor:
    """(B H, T, S, *) from (B, H, N, *) tokens in raster order, zeros in empty slots."""
    side, grid = tiling.side, tiling.grid
    x = unflatten(tokens.flatten(0, 1).to(dtype), 1, (grid.height, grid.width))
    if tiling.ragged:
        x = pad(x, (0, 0, 0, -grid.width % side, 0, -grid.height % side))
    x = unflatten(x, 2, (tiling.columns, side))
    x = unflatten(x, 1, (tiling.rows, side))  # (B H, rows, side, columns, side, *)
    return x.transpose(2, 3).flatten(3, 4).flatten(1, 2)


def tiles_to_groups(tiles: Tensor, tiling: Tiling) -> Tensor:
    """(B H, R, group, *) from (B H, T, *), zeros where the last group has fewer tiles."""
    missing = tiling.groups * tiling.group - tiling.tiles
    if missing:
        tiles = pad(tiles, (0, 0) * (tiles.dim() - 2) + (0, missing))
    return unflatten(tiles, 1, (tiling.groups, tiling.group))


def groups_to_tokens(groups: Tensor, tiling: Tiling) -> Tensor:
    """(B H, N, *) in raster order from (B H, R, group * S, *)."""
    side, grid = tiling.side, tiling.grid
    x = groups.flatten(1, 2)[:, : tiling.tiles * tiling.slots]
    x = unflatten(x, 1, (tiling.rows, tiling.columns, side, side)).transpose(2, 3)
    x = x.flatten(3, 4).flatten(1, 2)  # (B H, rows * side, columns * side, *)
    return x[:, : grid.height, : grid.width].flatten(1, 2)


def unflatten(x: Tensor, dim: int, sizes: tuple[int, ...]) -> Tensor:
    """`torch.Tensor.unflatten` with type annotations."""
    result: Tensor = x.unflatten(dim, sizes)  # type: ignore[no-untyped-call]
    return result
