"""Hiera of timm: blocks that attend over the whole grid, whose tokens have an order of their own."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from bmfa.grid import Grid
from bmfa.models.replacement import InterceptedAttention
from bmfa.models.screened_layer import AttentionFunction


@dataclass(frozen=True)
class UnrolledGrid:
    """The order of Hiera's tokens: by their position in pooling cells first, then by the cell.

    A token has the index (y1, x1, ..., yk, xk, y, x), where (y1, x1) is its position in a cell of the
    first pooling that is still to come, (y2, x2) that of this cell in a cell of the next, and so on.
    """

    grid: Grid
    strides: tuple[tuple[int, int], ...]  # of the poolings to come

    @property
    def _shape(self) -> tuple[int, ...]:
        height, width, shape = self.grid.height, self.grid.width, []
        for rows, columns in self.strides:
            height, width = height // rows, width // columns
            shape += [rows, columns]
        return (*shape, height, width)

    @property
    def _axes(self) -> tuple[int, ...]:
        """The axes of `_shape` in raster order: those of rows from coarse to fine, then of columns."""
        depth = len(self._shape)
        return (*range(depth - 2, -1, -2), *range(depth - 1, -1, -2))

    def to_raster(self, x: Tensor) -> Tensor:
        """Reorder (B, heads, N, d) tokens of the model to raster order."""
        split = x.reshape(*x.shape[:2], *self._shape, x.shape[-1])
        axes = [2 + axis for axis in self._axes]
        return split.permute(0, 1, *axes, split.dim() - 1).reshape(x.shape)

    def from_raster(self, x: Tensor) -> Tensor:
        """Undo `to_raster`."""
        split = x.reshape(*x.shape[:2], *(self._shape[axis] for axis in self._axes), x.shape[-1])
        axes = [2 + self._axes.index(axis) for axis in range(len(self._axes))]
        return split.permute(0, 1, *axes, split.dim() - 1).reshape(x.shape)


@dataclass(eq=False)
class HieraAttention(InterceptedAttention):
    """Attends over the grid of the module, in raster order."""

    keys: UnrolledGrid = field(kw_only=True)
    queries: UnrolledGrid | None = field(kw_only=True)  # None if they are not pooled

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Run the function of the layer on tokens in raster order."""
        grid = self.function.passes.grid_of(
            key.shape[2], self.keys.grid
        )  # all tokens must be there
        queries = self.queries or self.keys
        output = self.function(
            queries.to_raster(query),
            self.keys.to_raster(key),
            self.keys.to_raster(value),
            grid=grid,
            query_grid=None if self.queries is None else queries.grid,
        )
        return queries.from_raster(output)


def hiera_attention(tower: Any, function: AttentionFunction) -> HieraAttention:
    """Make the replacement of a block with global attention, from the blocks of the model."""
    blocks = [i for i, b in enumerate(tower.blocks) if not b.attn.use_mask_unit_attn]
    index = blocks[function.layer]
    returned = _unrolled(tower, index)
    if tower.blocks[index].attn.q_stride > 1:  # the keys have the grid of the block before
        return HieraAttention(function, keys=_unrolled(tower, index - 1), queries=returned)
    return HieraAttention(function, keys=returned, queries=None)


def _unrolled(tower: Any, block: int) -> UnrolledGrid:
    """Return the order of the tokens that a block returns."""
    strides, size = tower.reroll.schedule[block]
    return UnrolledGrid(Grid(*size), tuple((int(rows), int(columns)) for rows, columns in strides))
