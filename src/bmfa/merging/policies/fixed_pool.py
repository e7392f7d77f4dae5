"""Fixed pooling: the middle block averages square tiles of the grid."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from bmfa.checks import check_integer
from bmfa.grid import Grid
from bmfa.merging.policies.base import LayerState, Policy, ReducedTokens


@dataclass(frozen=True)
class FixedPool(Policy):
    """Average tiles of side x side tokens once, after half of the blocks.

    Tiles start at the top left and are cut at the right and bottom border, as those of
    `rules.FixedBlocks`.

    Args:
        side: side of a tile in tokens, at least 1; 1 changes nothing.

    Raises:
        ValueError: the side is below 1.
        TypeError: the side is not an integer.

    Example:
        >>> import bmfa
        >>> str(bmfa.merging.FixedPool(2))
        'fixed-pool:2'
    """

    name: ClassVar[str] = "fixed-pool"
    side: int

    def __post_init__(self) -> None:
        check_integer("side", self.side, low=1)

    def check(self, grid: Grid, prefix: int, depth: int) -> None:
        if self.side > max(grid.height, grid.width):
            raise ValueError(
                f"{self} has tiles larger than the {grid.height}x{grid.width} grid; "
                f"pass a side from 1 to {max(grid.height, grid.width)}"
            )

    def reduce(self, state: LayerState) -> ReducedTokens | None:
        if state.layer != state.depth // 2 or self.side == 1:
            return None
        grid, prefix, device = state.grid, state.prefix, state.x.device
        rows, columns = (
            torch.arange(length, device=device) // self.side for length in (grid.height, grid.width)
        )
        tiles_down, tiles_across = -(-grid.height // self.side), -(-grid.width // self.side)
        tiles = (rows.unsqueeze(1) * tiles_across + columns).flatten()  # (H * W) tile of each token
        assignment = torch.cat((torch.arange(prefix, device=device), prefix + tiles)).int()
        count = prefix + tiles_down * tiles_across
        return state.pooled(assignment.expand(len(state.x), -1), count)
