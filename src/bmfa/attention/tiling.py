"""Geometry of the tiled form: tiles of keys, groups of queries, budgets, and token layouts.

Shapes: B batch, H heads, N spatial tokens in raster order, T tiles, S = side * side slots in a tile,
R groups of queries. A ragged grid has tiles with fewer than S tokens; their other slots are empty.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

from bmfa.checks import check_integer, check_leaves, check_number
from bmfa.grid import Grid, check_grid

# Side of a tile in tokens, and tiles whose queries share a representative. The Triton kernels are
# written for these sizes and refuse others.
TILE_SIDE = 8
GROUP_TILES = 2
# Largest gap, in units of tau, that is added to the logit of an unexpanded tile. A tile with a larger
# gap holds a token with more than exp(4) = 55 times the mean weight, almost all the mass of its 64
# tokens: adding more would extrapolate from the representative to queries that may not share it.
GAP_CAP = 4.0
DEFAULT_ERROR = 0.1


@dataclass(frozen=True)
class Tiling:
    """Square tiles over a grid, from the top left, smaller at the right and bottom edges.

    Tiles are numbered in raster order. The queries of `group` consecutive tiles share one
    representative query; the last group may have fewer tiles.

    Args:
        grid: Grid of the spatial tokens.
        side: Side of a tile in tokens.
        group: Number of tiles in a group of queries.
    """

    grid: Grid
    side: int = TILE_SIDE
    group: int = GROUP_TILES

    def __post_init__(self) -> None:
        object.__setattr__(self, "grid", check_grid(self.grid))
        check_integer("side", self.side, low=2)
        check_integer("group", self.group, low=1)

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

    @property
    def z_aligned(self) -> bool:
        """True if the tokens of every tile are consecutive in Z-order."""
        return not self.ragged and self.rows == self.columns and self.rows & (self.rows - 1) == 0

    @cached_property
    def slot_tokens(self) -> Tensor:
        """(T, S) raster index of the token in each slot, -1 for empty slots."""
        row = torch.arange(self.rows * self.side).view(-1, 1, self.side, 1)
        column = torch.arange(self.columns * self.side).view(1, -1, 1, self.side)
        inside = (row < self.grid.height) & (column < self.grid.width)
        index = torch.where(inside, row * self.grid.width + column, -1)
        return index.reshape(self.tiles, self.slots)

    def tiles_within(self, leaves: float | int) -> int:
        """Return the number of tiles that a budget of leaves can expand.

        An expanded tile has S leaves and any other tile has one. Tiles count as full, so a ragged
        grid never exceeds the budget.

        Args:
            leaves: A float is a fraction of the N tokens, an int is a number of leaves.

        Returns:
            The number of expanded tiles, from 0 to T. A budget of N leaves expands every tile.
        """
        leaves = check_leaves(leaves, size=self.grid.size)
        budget = leaves * self.grid.size if isinstance(leaves, float) else leaves
        if budget >= self.grid.size:
            return self.tiles
        return min(self.tiles, max(0, int((budget - self.tiles) // (self.slots - 1))))


@dataclass(frozen=True)
class Budget:
    """Stopping criterion of the tiled form: a target for the error, or a number of expanded tiles.

    Exactly one of the two is not None.
    """

    error: float | None
    expand: int | None

    @classmethod
    def of(cls, tiling: Tiling, error: float | None, leaves: float | int | None) -> "Budget":
        """Make a budget from the arguments of `screened_attention`, with the default error if both
        are None."""
        if leaves is not None:
            return cls(None, tiling.tiles_within(leaves))
        return cls(check_number("error", DEFAULT_ERROR if error is None else error, low=0.0), None)

    def __str__(self) -> str:
        return f"error {self.error:g}" if self.expand is None else f"{self.expand} tiles expanded"


@dataclass(frozen=True, eq=False)
class TiledAttention:
    """Result of a kernel of the tiled form."""

    output: Tensor  # (B, H, prefix + N, d)
    expanded_count: Tensor  # (B, H, R) int32, expanded tiles of each group
    expanded_or_make: Tensor | Callable[[], Tensor]  # see `expanded`

    @cached_property
    def expanded(self) -> Tensor:
        """(B, H, R, T) bool, True for the tiles that a group of queries reads token by token."""
        made = self.expanded_or_make
        return made if isinstance(made, Tensor) else made()


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


def valid_slots(tiling: Tiling, valid: Tensor | None, like: Tensor) -> Tensor | None:
    """(B H, T, S) bool, True for slots with a valid token of `like` (B, H, ...).

    None if every slot has one.
    """
    batch, heads = like.shape[:2]
    if valid is None:
        if not tiling.ragged:
            return None
        valid = torch.ones(1, tiling.grid.size, dtype=torch.bool, device=like.device)
    inside = tokens_to_tiles(valid[:, None, :, None], tiling, torch.bool).squeeze(-1)
    return inside.repeat_interleave(batch * heads // len(inside), 0)


def unflatten(x: Tensor, dim: int, sizes: tuple[int, ...]) -> Tensor:
    """`torch.Tensor.unflatten` with type annotations."""
    result: Tensor = x.unflatten(dim, sizes)  # type: ignore[no-untyped-call]
    return result
