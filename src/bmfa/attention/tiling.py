"""Square tiles over a grid, groups of neighbouring tiles, and what attention over them returns."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

from bmfa.checks import check_integer, check_number
from bmfa.grid import Grid, check_grid

# The largest gap that is added to a tile's logit: beyond it a tile belongs among the expanded ones.
CAP = 4.0


@dataclass(frozen=True)
class Tiling:
    """Tiles of side x side tokens from the top left, smaller at the right and bottom.

    Tiles are numbered in raster order; `group` consecutive ones hold the queries that share a
    representative, the last group perhaps fewer.
    """

    grid: Grid
    side: int = 8
    group: int = 2

    def __post_init__(self) -> None:
        object.__setattr__(self, "grid", check_grid(self.grid))
        check_integer("side", self.side, low=2)
        check_integer("group", self.group, low=1)

    @property
    def tiles_down(self) -> int:
        """Rows of tiles."""
        return -(-self.grid.height // self.side)

    @property
    def tiles_across(self) -> int:
        """Columns of tiles."""
        return -(-self.grid.width // self.side)

    @property
    def tiles(self) -> int:
        """T, the number of tiles."""
        return self.tiles_down * self.tiles_across

    @property
    def groups(self) -> int:
        """R, the number of query groups."""
        return -(-self.tiles // self.group)

    @property
    def ragged(self) -> bool:
        """Whether some tile has fewer than side * side tokens."""
        return self.grid.height % self.side != 0 or self.grid.width % self.side != 0

    @property
    def z_aligned(self) -> bool:
        """Whether every tile is contiguous in Z-order: both sides halve evenly down to the tile's."""
        down, across = self.tiles_down, self.tiles_across
        return not self.ragged and down == across and down & (down - 1) == 0

    @cached_property
    def slots(self) -> Tensor:
        """(T, side * side) raster index of the token in each slot of each tile; -1 where none is."""
        down = torch.arange(self.tiles_down * self.side).view(-1, 1, self.side, 1)
        across = torch.arange(self.tiles_across * self.side).view(1, -1, 1, self.side)
        inside = (down < self.grid.height) & (across < self.grid.width)
        index = torch.where(inside, down * self.grid.width + across, -1)
        return index.reshape(self.tiles, self.side * self.side)

    def expanded_from_leaves(self, leaves: float | int) -> int:
        """How many tiles a budget of leaves expands: tokens of those tiles, one for every other.

        A float is a fraction of the tokens, an int a count. Tiles count as full, so that a ragged
        grid never exceeds the budget; a budget of all tokens expands every tile.
        """
        size = self.grid.size
        if isinstance(leaves, int):
            budget = float(check_integer("leaves", leaves, low=1))
        else:
            budget = check_number("leaves", leaves, low=0.0, high=1.0, open_low=True) * size
        if budget >= size:
            return self.tiles
        return min(self.tiles, max(0, int((budget - self.tiles) // (self.side**2 - 1))))


@dataclass(frozen=True, eq=False)
class Tiled:
    """What tiled attention returns: outputs, and which tiles each group of queries expanded."""

    output: Tensor  # (B, heads, prefix + N, d)
    counts: Tensor  # (B, heads, R) int32, tiles expanded
    expanded: Tensor | Callable[[], Tensor]  # (B, heads, R, T) bool, perhaps made on demand

    @cached_property
    def marks(self) -> Tensor:
        """(B, heads, R, T) whether the queries of a group see a tile token by token."""
        return self.expanded if isinstance(self.expanded, Tensor) else self.expanded()


def by_tiles(tokens: Tensor, tiling: Tiling, dtype: torch.dtype) -> Tensor:
    """(B heads, T, S, *) from (B, heads, N, *) in raster order, zeros in slots without a token."""
    side, grid = tiling.side, tiling.grid
    x = split_dimension(tokens.flatten(0, 1).to(dtype), 1, (grid.height, grid.width))
    if tiling.ragged:
        x = pad(x, (0, 0, 0, -grid.width % side, 0, -grid.height % side))
    x = split_dimension(x, 2, (tiling.tiles_across, side))
    x = split_dimension(x, 1, (tiling.tiles_down, side))
    return x.transpose(2, 3).flatten(3, 4).flatten(1, 2)


def by_groups(tiles: Tensor, tiling: Tiling) -> Tensor:
    """(G, R, group, *) from (G, T, *), zeros where the last group has fewer tiles."""
    missing = tiling.groups * tiling.group - tiling.tiles
    if missing:
        tiles = pad(tiles, (0, 0) * (tiles.dim() - 2) + (0, missing))
    return split_dimension(tiles, 1, (tiling.groups, tiling.group))


def by_raster(groups: Tensor, tiling: Tiling) -> Tensor:
    """(G, N, *) from (G, R, group * S, *)."""
    side, grid = tiling.side, tiling.grid
    x = groups.flatten(1, 2)[:, : tiling.tiles * side * side]
    x = split_dimension(x, 1, (tiling.tiles_down, tiling.tiles_across, side, side)).transpose(2, 3)
    x = x.flatten(3, 4).flatten(1, 2)  # (G, rows, columns, *)
    return x[:, : grid.height, : grid.width].flatten(1, 2)


def existing_slots(tiling: Tiling, valid: Tensor | None, like: Tensor) -> Tensor | None:
    """(B heads, T, S) which slots hold a token of (B, heads, ...); None where all do."""
    batch, heads = like.shape[:2]
    if valid is None:
        if not tiling.ragged:
            return None
        valid = torch.ones(1, tiling.grid.size, dtype=torch.bool, device=like.device)
    inside = by_tiles(valid[:, None, :, None], tiling, torch.bool).squeeze(-1)
    return inside.repeat_interleave(batch * heads // len(inside), 0)


@dataclass(frozen=True, eq=False)
class Existing:
    """What of a masked call over tiles exists: a token of the mask is both a query and a key."""

    queries: Tensor  # (B or 1, N) bool, spatial queries in the order of the call
    groups: Tensor  # (B or 1, R) bool, groups with a query, as the backend numbers them
    tiles: Tensor  # (B or 1,) the number of tiles with a key

    @classmethod
    def of(cls, valid: Tensor, tiling: Tiling, order: str, backend_order: str) -> "Existing":
        """From (B or 1, N) valid tokens in raster order.

        Args:
            valid: bool.
            tiling: Tiles and groups.
            order: The order of the call's queries, "raster" or "z".
            backend_order: The order in which the backend took them: in Z-order tiles are contiguous.
        """
        turned = valid
        if order == "z":
            turned = valid[:, tiling.grid.z_order.to(valid.device)]
        if backend_order == "z":
            inside = split_dimension(turned, 1, (tiling.tiles, tiling.side**2))
        else:
            inside = by_tiles(valid[:, None, :, None], tiling, torch.bool).squeeze(-1)
        tiles = inside.any(-1)
        return cls(turned, by_groups(tiles, tiling).any(-1), tiles.sum(-1))


def split_dimension(x: Tensor, dimension: int, sizes: tuple[int, ...]) -> Tensor:
    """`x.unflatten`, which torch leaves without types."""
    result: Tensor = x.unflatten(dimension, sizes)  # type: ignore[no-untyped-call]
    return result
