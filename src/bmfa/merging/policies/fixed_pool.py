"""Fixed pooling: the middle block averages square tiles of the grid."""

from dataclasses import dataclass

import torch

from bmfa.checks import check_integer
from bmfa.grid import Grid
from bmfa.merging.kernels.eager import pool
from bmfa.merging.policies.base import Moment, Policy, Step


@dataclass(frozen=True)
class FixedPool(Policy):
    """Tiles of side x side from the top left, remainders at the right and bottom, as FixedBlocks.

    Once, after half of the blocks: before, tokens know too little of the picture to be averaged.
    """

    side: int

    def __post_init__(self) -> None:
        check_integer("side", self.side, low=1)

    def __str__(self) -> str:
        return f"fixed-pool:{self.side}"

    def check(self, grid: Grid, prefix: int, depth: int) -> None:
        """A tile is no larger than the grid."""
        if self.side > max(grid.height, grid.width):
            raise ValueError(
                f"{self} has tiles larger than the {grid.height}x{grid.width} grid; "
                f"pass a side from 1 to {max(grid.height, grid.width)}"
            )

    def step(self, moment: Moment) -> Step | None:
        """Average, in the middle block."""
        if moment.layer != moment.depth // 2 or self.side == 1:
            return None
        grid, prefix, device = moment.grid, moment.prefix, moment.x.device
        rows, columns = (
            torch.arange(side, device=device) // self.side for side in (grid.height, grid.width)
        )
        across = -(-grid.width // self.side)
        tiles = (rows.unsqueeze(1) * across + columns).flatten()  # (N) tile of each token
        target = torch.cat((torch.arange(prefix, device=device), prefix + tiles)).int()
        count = prefix + across * -(-grid.height // self.side)
        target = target.expand(len(moment.x), -1)
        x, size = pool(moment.x, moment.size, target, count)
        return Step(x, size, target)
