"""Hiera of timm, and the one of SAM 2 in transformers: the blocks that attend over the whole grid."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

from bmfa.grid import Grid
from bmfa.models.hosts.base import AttentionFunction, VisionTransformer, class_name
from bmfa.models.hosts.timm import ReplaceSDPA, TimmAttention
from bmfa.models.hosts.transformers import OverridingAttention
from bmfa.models.packed_calls import attend_images, watch_blocks

TIMM_TOWER = "timm.models.hiera.Hiera"
SAM2_TOWER = "transformers.models.sam2.modeling_sam2.Sam2HieraDetModel"
_MASK_UNITS = "attention inside mask units"
_WINDOWS = "attention inside windows"
_POOLED = "pooled queries"
_STAGES = "its blocks pool the tokens of a whole grid"


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
        """Reorder (B, heads, N, d) tokens of the host to raster order."""
        split = x.reshape(*x.shape[:2], *self._shape, x.shape[-1])
        axes = [2 + axis for axis in self._axes]
        return split.permute(0, 1, *axes, split.dim() - 1).reshape(x.shape)

    def from_raster(self, x: Tensor) -> Tensor:
        """Undo `to_raster`."""
        split = x.reshape(*x.shape[:2], *(self._shape[axis] for axis in self._axes), x.shape[-1])
        axes = [2 + self._axes.index(axis) for axis in range(len(self._axes))]
        return split.permute(0, 1, *axes, split.dim() - 1).reshape(x.shape)


@dataclass(eq=False)
class HieraAttention(TimmAttention):
    """Runs the module's own forward with our attention over the grid of the module."""

    tokens: UnrolledGrid = field(kw_only=True)  # of the keys
    queries: UnrolledGrid | None = field(kw_only=True)  # None if they are not pooled

    def uses_host(self, x: Any) -> bool:
        """False: `run` decides, which knows the grid."""
        return False

    def run(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Compute the output of the attention module."""
        grid, token_grid = self.tokens.grid, self.function.token_grid
        token_grid.of_attention(args[0].shape[1], grid)  # all tokens must be there
        if token_grid.passes.run_with(grid, partial(self.function.uses_host_on, grid, args[0])):
            return forward(*args, **kwargs)
        with ReplaceSDPA(self._attend):
            return forward(*args, **kwargs)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        queries = self.queries or self.tokens
        output = attend_images(
            self.function,
            self.tokens.grid,
            queries.to_raster(query),
            self.tokens.to_raster(key),
            self.tokens.to_raster(value),
            query_grid=None if self.queries is None else queries.grid,
        )
        return queries.from_raster(output)


class Sam2Attention(OverridingAttention):
    """Runs the module's own forward with the grid of its input, which has the shape (B, H, W, C)."""

    def run(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Compute the output of the attention module."""
        x = args[0] if args else kwargs["hidden_states"]
        # Integers, not symbols: whatever depends on a grid is a constant of a compiled graph.
        grid = Grid(int(x.shape[1]), int(x.shape[2]))
        call = partial(self._run, grid, x, partial(forward, *args, **kwargs))
        return self.function.token_grid.passes.run_with(grid, call)

    def _run(self, grid: Grid, x: Tensor, forward: Callable[[], Any]) -> Any:
        self.function.uses_host_on(grid, x.flatten(1, 2))  # stores the grid for the decision
        return forward()


def find_towers(model: nn.Module) -> list[VisionTransformer]:
    """List the Hiera towers in a model."""
    makers = {TIMM_TOWER: _timm_host, SAM2_TOWER: _sam2_host}
    return [
        makers[class_name(module)](module)
        for module in model.modules()
        if class_name(module) in makers
    ]


def _timm_host(tower: Any) -> VisionTransformer:
    if len(tower.tokens_spatial_shape) != 2:
        raise TypeError(
            f"{class_name(tower)} with tokens in {len(tower.tokens_spatial_shape)} dimensions is not "
            "supported; pass a model of images"
        )
    blocks = tuple(tower.blocks)
    dense: dict[int, str] = {}
    layouts: list[tuple[UnrolledGrid, UnrolledGrid | None]] = []
    for index, block in enumerate(blocks):
        if block.attn.use_mask_unit_attn:
            dense[index] = _MASK_UNITS
        elif block.attn.q_stride > 1:  # the keys have the grid of the block before
            layouts.append((_unrolled(tower, index - 1), _unrolled(tower, index)))
        else:
            layouts.append((_unrolled(tower, index), None))
    return VisionTransformer(
        replacement=partial(_hiera_attention, tuple(layouts)),
        tower=tower,
        blocks=blocks,
        attentions=tuple(b.attn for i, b in enumerate(blocks) if i not in dense),
        projection=tower.patch_embed.proj,
        prefix=0,
        layout=None,
        reads_spatial_tokens=True,
        watch=watch_blocks,
        dense_blocks=dense,
        not_reducible=_STAGES,
    )


def _hiera_attention(
    layouts: tuple[tuple[UnrolledGrid, UnrolledGrid | None], ...], function: AttentionFunction
) -> HieraAttention:
    tokens, queries = layouts[function.layer]
    return HieraAttention(function, tokens=tokens, queries=queries)


def _unrolled(tower: Any, block: int) -> UnrolledGrid:
    """Return the order of the tokens that a block returns."""
    strides, size = tower.reroll.schedule[block]
    return UnrolledGrid(Grid(*size), tuple((int(rows), int(columns)) for rows, columns in strides))


def _sam2_host(tower: Any) -> VisionTransformer:
    blocks = tuple(tower.blocks)
    dense: dict[int, str] = {}
    for index, block in enumerate(blocks):
        if block.window_size > 0:
            dense[index] = _WINDOWS
        elif block.query_stride:
            dense[index] = _POOLED
    return VisionTransformer(
        replacement=Sam2Attention,
        tower=tower,
        blocks=blocks,
        attentions=tuple(b.attn for i, b in enumerate(blocks) if i not in dense),
        projection=tower.patch_embed.projection,
        prefix=0,
        layout=None,
        reads_spatial_tokens=True,
        watch=watch_blocks,
        dense_blocks=dense,
        not_reducible=_STAGES,
    )
