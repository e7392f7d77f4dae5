"""Geometry of mean tiles: 8x8 tiles of keys, and groups of 8x16 queries.

Shapes: B batch, H heads, N spatial tokens in raster order, T tiles, S = side * side slots in a tile,
R groups of queries. A ragged grid has tiles with fewer than S tokens; their other slots are empty.
"""

from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import pad

from bmfa.attention.tiling import Tiling, tiles_to_tokens, unflatten

# Tiles whose queries share a representative. The Triton kernels are written for this number.
GROUP_TILES = 2
# Largest gap, in units of tau, that is added to the logit of an unexpanded tile. A tile with a larger
# gap holds a token with more than exp(4) = 55 times the mean weight, almost all the mass of its 64
# tokens: adding more would extrapolate from the representative to queries that may not share it.
GAP_CAP = 4.0


@dataclass(frozen=True)
class GroupedTiling(Tiling):
    """Tiles of which several consecutive ones form a group of queries.

    The queries of `group` tiles share one representative query; the last group may have fewer tiles.

    Args:
        grid: Grid of the spatial tokens.
        side: Side of a tile in tokens.
        group: Number of tiles in a group of queries.
    """

    group: int = GROUP_TILES

    @property
    def groups(self) -> int:
        """R, the number of groups of queries."""
        return -(-self.tiles // self.group)


def tiles_to_groups(tiles: Tensor, tiling: GroupedTiling) -> Tensor:
    """(B H, R, group, *) from (B H, T, *), zeros where the last group has fewer tiles."""
    missing = tiling.groups * tiling.group - tiling.tiles
    if missing:
        tiles = pad(tiles, (0, 0) * (tiles.dim() - 2) + (0, missing))
    return unflatten(tiles, 1, (tiling.groups, tiling.group))


def groups_to_tokens(groups: Tensor, tiling: GroupedTiling) -> Tensor:
    """(B H, N, *) in raster order from (B H, R, group * S, *)."""
    slots = groups.flatten(1, 2)[:, : tiling.tiles * tiling.slots]
    return tiles_to_tokens(unflatten(slots, 1, (tiling.tiles, tiling.slots)), tiling)
