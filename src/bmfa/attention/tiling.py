"""Geometry and constants of tiles: tiles of keys, groups of queries, and token layouts.

Shapes: B batch, H heads, N spatial tokens in raster order, T tiles, S = side * side slots in a tile,
R groups of queries. A ragged grid has tiles with fewer than S tokens; their other slots are empty.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from bmfa.checks import check_integer, check_leaves
from bmfa.grid import Grid, check_grid

# Side of a tile in tokens. The Triton kernels are written for this size and refuse others.
TILE_SIDE = 8
DEFAULT_ERROR = 0.03
# Tokens from which the queries of two tiles share a representative. Representatives, which see every
# token, are half as many then. With 16,384 tokens the error grows by 12 to 15 % if no tile is expanded,
# and with 4,096 tokens by 18 to 28 % (q, k, v of two models; `bmfa bench attention`).
WIDE_GROUP_TOKENS = 16384

# Thresholds at which the probes are evaluated: powers of this ratio, from 1 to 2.7e-6, and 0, at which
# every tile is expanded. Errors between two levels are interpolated, so that the ratio matters little.
NUM_LEVELS, LEVEL_RATIO = 16, 0.4
# Share of the error target that is aimed at, and that of a call with fewer than FEW_GROUPS groups:
# probes are a sample, whose error varies by about 10 %, and by 20 % with few groups. A result above the
# target is computed again, so that a lower aim expands fewer tiles in all: with 32x32 tokens of a
# ViT-S/14, 0.75 takes 1.16 runs a call and 0.85 takes 1.34.
ERROR_AIM, ERROR_AIM_OF_FEW_GROUPS = 0.88, 0.75
# If the error falls from above the target to less than this share of it between two levels, it is not
# interpolated and the lower threshold is taken: many tiles have the same loss.
STEEP_FALL = 0.2
# Likewise for a budget: the upper threshold is taken if the share of expanded tiles grows beyond this
# multiple of it between two levels.
STEEP_RISE = 3.0
# Part of the probability of a probe that is equal for all queries of its group; the rest grows with the
# fourth power of the distance from the mean query, as the squared error of a tangent does.
UNIFORM_SHARE = 0.2
# Standard deviations of a score, over the directions of a query of a group, by which a query is assumed
# to be off at most.
FARTHEST = 3.0
# Largest factor of the first-order correction. Above 1 it makes up for terms of higher order.
LARGEST_SHRINKAGE = 1.2
# Relative length below which the corrections of the probes are noise, and no correction is made.
SMALLEST_CORRECTION = 1e-3
# A result is taken if its measured error is at most the target, and the upper bound on it at most
# MOST_UPPER times the target. A result that misses by at most MOST_EXCESS is computed again, for
# RETRY_AIM of the aim that would have met both; any other, and one that misses again, exactly.
MOST_UPPER, MOST_EXCESS, RETRY_AIM = 1.3, 1.5, 0.95
# Before anything is attended, the probes predict how close a result comes to that. Thresholds are chosen
# again where it is above MOST_PREDICTED, for CHOICE_AIM of the aim that would have met it, MOST_CHOICES
# times in all. Of 384 calls (DeiT-Tiny and ViT-S/14, 4,096 tokens, four photographs, targets of 0.02 to
# 0.1), 2 % of those with a prediction up to 0.93 missed, and 20 % of the others, and a second run costs
# more than the 3 % of tiles that a lower aim expands.
MOST_PREDICTED, CHOICE_AIM, MOST_CHOICES = 0.93, 0.98, 8
# Groups with probes, at most.
PROBE_SLOTS = 64
# Probes of a group, and of a group of a call with fewer than FEW_GROUPS groups.
PROBES_PER_GROUP, FEW_GROUPS, PROBES_OF_FEW_GROUPS = 2, 32, 4
# The Triton kernels have one probe a group. They attend with PROBE_SLOTS queries at once, probes and
# queries of the prefix together; at least LEAST_PROBES of them are probes, if there are as many groups.
LEAST_PROBES = 32


@dataclass(frozen=True)
class Tiling:
    """Square tiles over a grid, from the top left, smaller at the right and bottom edges.

    Tiles are numbered in raster order, frame by frame. The queries of a tile, or of a few tiles side by
    side, form a group, which shares one representative query and expands the same tiles of keys.

    Args:
        grid: Grid of the spatial tokens.
        side: Side of a tile in tokens.
        query_grid: Grid of the queries, if it is not that of the keys.
        group_tiles: Number of tiles side by side whose queries form a group. The default, 0, means 2
            from WIDE_GROUP_TOKENS tokens on, and otherwise 1.
        tile_columns: Width of a tile in units of its side, 1 for tiles of keys.
        probes_per_group: Number of probes in each group that has any. The default, 0, means
            PROBES_OF_FEW_GROUPS if there are fewer than FEW_GROUPS groups, and otherwise
            PROBES_PER_GROUP. 1 is for the Triton kernels, see `probe_groups`.
    """

    grid: Grid
    side: int = TILE_SIDE
    query_grid: Grid | None = None
    group_tiles: int = 0
    tile_columns: int = 1
    probes_per_group: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "grid", check_grid(self.grid))
        check_integer("side", self.side, low=2)
        if self.group_tiles == 0:
            wide = self.query_grid is None and self.grid.size >= WIDE_GROUP_TOKENS
            object.__setattr__(self, "group_tiles", 2 if wide else 1)
        if self.probes_per_group == 0:
            few = self.groups < FEW_GROUPS
            probes = PROBES_OF_FEW_GROUPS if few else PROBES_PER_GROUP
            object.__setattr__(self, "probes_per_group", probes)

    @property
    def width(self) -> int:
        """Width of a tile in tokens."""
        return self.side * self.tile_columns

    @property
    def separate_groups(self) -> bool:
        """True if the groups of queries are not the tiles of keys."""
        return self.query_grid is not None or self.group_tiles > 1

    @property
    def queries(self) -> "Tiling":
        """The tiling of the queries, whose tiles are the groups."""
        if not self.separate_groups:
            return self
        grid = self.query_grid or self.grid
        return replace(
            self, grid=grid, query_grid=None, group_tiles=1, tile_columns=self.group_tiles
        )

    @property
    def frame_rows(self) -> int:
        """Number of rows of tiles in a frame."""
        return -(-self.grid.height // self.side)

    @property
    def rows(self) -> int:
        """Number of rows of tiles in all frames."""
        return self.grid.frames * self.frame_rows

    @property
    def columns(self) -> int:
        """Number of columns of tiles."""
        return -(-self.grid.width // self.width)

    @property
    def tiles(self) -> int:
        """T, the number of tiles."""
        return self.rows * self.columns

    @property
    def slots(self) -> int:
        """S, the number of slots in a tile."""
        return self.side * self.width

    @property
    def groups(self) -> int:
        """R, the number of groups of queries, one for each tile of the query grid."""
        return self.queries.tiles

    @property
    def ragged(self) -> bool:
        """True if some tiles have fewer than S tokens."""
        return self.grid.height % self.side != 0 or self.grid.width % self.width != 0

    @cached_property
    def slot_tokens(self) -> Tensor:
        """(T, S) raster index of the token in each slot, -1 for empty slots."""
        grid = self.grid  # on the CPU, whatever the default device of torch is
        frame = torch.arange(grid.frames, device="cpu").view(-1, 1, 1, 1, 1)
        row = torch.arange(self.frame_rows * self.side, device="cpu").view(1, -1, 1, self.side, 1)
        column = torch.arange(self.columns * self.width, device="cpu").view(1, 1, -1, 1, self.width)
        inside = (row < grid.height) & (column < grid.width)
        index = torch.where(inside, (frame * grid.height + row) * grid.width + column, -1)
        return index.reshape(self.tiles, self.slots)

    @cached_property
    def group_order(self) -> Tensor:
        """(R,) int64 permutation of the groups, in which any first ones are spread over the grid.

        Position r holds group r * stride modulo R, with a stride near the golden ratio.
        """
        return torch.arange(self.groups, device="cpu") * self.group_stride % self.groups

    @cached_property
    def group_stride(self) -> int:
        """Difference, modulo R, of the groups at consecutive positions of `group_order`."""
        stride = max(1, round(0.618 * self.groups))
        while math.gcd(stride, self.groups) != 1:
            stride += 1
        return stride

    @property
    def error_aim(self) -> float:
        """Share of the error target that the thresholds aim at."""
        return ERROR_AIM_OF_FEW_GROUPS if self.groups < FEW_GROUPS else ERROR_AIM

    def probe_slots(self, prefix: int) -> int:
        """Return the number of queries that Triton attends exactly in a head, padding included.

        Args:
            prefix: Number of queries before the grid.
        """
        return -(-(prefix + LEAST_PROBES) // PROBE_SLOTS) * PROBE_SLOTS

    def probe_groups(self, prefix: int) -> int:
        """Return the number of groups with probes, the first ones in `group_order`.

        With one probe a group they fill the slots of the Triton kernels beside the prefix.

        Args:
            prefix: Number of queries before the grid.
        """
        slots = self.probe_slots(prefix) - prefix if self.probes_per_group == 1 else PROBE_SLOTS
        return min(self.groups, slots)

    def probes(self, prefix: int) -> int:
        """Return P, the number of probes; probe j of the group at position r has the index
        r * probes_per_group + j."""
        return self.probe_groups(prefix) * self.probes_per_group

    def probe_quantile(self, group: Any, head: Any, probe: Any = 0) -> Any:
        """Return the number in (0, 1), by a fixed hash, that draws a probe of a group of a head.

        The arguments are integers, or tensors of integers that broadcast. The result is alike.
        The numbers of the probes of a group are 1 / probes_per_group apart, modulo 1: systematic
        sampling, in which a query of at least that probability is always drawn.
        """
        first = ((group * 40503 + head * 9973 + 17) % 65536 + 0.5) / 65536
        return (first + probe / self.probes_per_group) % 1.0

    def tiles_within(self, leaves: float | int) -> int:
        """Return the mean number of tiles of a group that a budget of leaves can expand.

        An expanded tile has S leaves and any other tile has one. Tiles count as full.

        Args:
            leaves: A float is a fraction of the N tokens, an int is a number of leaves.

        Returns:
            The number of expanded tiles, from 0 to T. A budget of N leaves expands every tile.
        """
        leaves = check_leaves(leaves, size=max(2, self.grid.size))
        budget = leaves * self.grid.size if isinstance(leaves, float) else leaves
        if budget >= self.grid.size:
            return self.tiles
        return min(self.tiles, max(0, int((budget - self.tiles) // (self.slots - 1))))


@dataclass(frozen=True, eq=False)
class TiledAttention:
    """Result of a kernel of the tiled form."""

    output: Tensor  # (B, H, prefix + N, d)
    expanded_count: Tensor  # (B, H, R) int32, expanded tiles of each group
    probes: Tensor  # (B, H, P, 3) float64: |output - exact|^2, |exact|^2, weight of the probe
    expanded_or_make: Tensor | Callable[[], Tensor]  # see `expanded`
    exact: bool = False  # True if every head was computed exactly

    @cached_property
    def expanded(self) -> Tensor:
        """(B, H, R, T) bool, True for the tiles that a group of queries reads token by token."""
        made = self.expanded_or_make
        return made if isinstance(made, Tensor) else made()


def tokens_to_tiles(tokens: Tensor, tiling: Tiling, dtype: torch.dtype) -> Tensor:
    """(B H, T, S, *) from (B, H, N, *) tokens in raster order, zeros in empty slots."""
    side, grid = tiling.side, tiling.grid
    x = unflatten(tokens.flatten(0, 1).to(dtype), 1, (grid.frames, grid.height, grid.width))
    if tiling.ragged:
        x = pad(x, (0, 0, 0, -grid.width % tiling.width, 0, -grid.height % side))
    x = unflatten(x, 3, (tiling.columns, tiling.width)).flatten(1, 2)
    x = unflatten(x, 1, (tiling.rows, side))  # (B H, rows, side, columns, width, *)
    return x.transpose(2, 3).flatten(3, 4).flatten(1, 2)


def tiles_to_tokens(tiles: Tensor, tiling: Tiling) -> Tensor:
    """(B H, N, *) in raster order from (B H, T, S, *)."""
    side, grid = tiling.side, tiling.grid
    x = unflatten(tiles.flatten(1, 2), 1, (tiling.rows, tiling.columns, side, tiling.width))
    x = x.transpose(2, 3).flatten(3, 4).flatten(1, 2)  # (B H, rows * side, columns * width, *)
    x = unflatten(x, 1, (grid.frames, tiling.frame_rows * side))
    return x[:, :, : grid.height, : grid.width].flatten(1, 3)


def slots_with_tokens(tiling: Tiling, valid: Tensor | None, device: torch.device) -> Tensor:
    """(B or 1, T, S) bool, the slots with a token, of those in a mask (B or 1, N) if there is one."""
    slots = tiling.slot_tokens.to(device)
    exist = (slots >= 0).unsqueeze(0)
    return exist if valid is None else valid[:, slots.clamp(min=0)] & exist


def unflatten(x: Tensor, dim: int, sizes: tuple[int, ...]) -> Tensor:
    """`torch.Tensor.unflatten` with type annotations."""
    result: Tensor = x.unflatten(dim, sizes)  # type: ignore[no-untyped-call]
    return result
