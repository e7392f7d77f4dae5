"""The grid of spatial tokens and its Z-order."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor

from bmfa.checks import check_integer

P = ParamSpec("P")
Side = TypeVar("Side", np.ndarray, Tensor)

# Decorator: tensors that are cached must be normal tensors, also where the first call is made in
# inference mode, because autograd cannot save inference tensors.
normal_tensors = torch.inference_mode(False)


def split_point(start: Side, stop: Side) -> Side:
    """Return where the sides [start, stop) split: floor(n / 2) tokens, then the rest."""
    middle: Side = start + (stop - start) // 2
    return middle


def _explain_wrong_sides(init: Callable[P, None]) -> Callable[P, None]:
    """Replace Python's message about missing arguments by one that suggests the right call."""

    @wraps(init)
    def checked_init(*args: P.args, **kwargs: P.kwargs) -> None:
        sides = args[1:]  # without self
        if len(sides) + len(kwargs) - ("frames" in kwargs) != 2:
            received = [repr(side) for side in sides]
            received += [f"{name}={side!r}" for name, side in kwargs.items()]
            call = f"({', '.join(received)})" if received else "nothing"
            raise TypeError(f"Grid got {call}; {_suggest_grid(sides)}")
        init(*args, **kwargs)

    return checked_init


@dataclass(frozen=True, init=False, repr=False)
class Grid:
    """A grid of `height` x `width` spatial tokens, in raster order unless stated otherwise.

    Every function that takes a grid also accepts the pair `(height, width)`.

    A sequence of images whose tokens attend to each other is a grid of several frames: its tokens are
    those of the first frame in raster order, then those of the second, and so on. Attention over tiles
    takes such a grid, and its tiles lie inside of a frame. Trees and merging take one frame.

    Args:
        height: Number of rows, at least 1.
        width: Number of columns, at least 1.
        frames: Number of frames, at least 1. Keyword only.

    Raises:
        TypeError: If the arguments are not integers.
        ValueError: If a side is below 1.

    Example:
        >>> import bmfa
        >>> grid = bmfa.Grid(14, 14)
        >>> grid.size
        196
        >>> bmfa.Grid(196)
        Traceback (most recent call last):
        ...
        TypeError: Grid got (196); did you mean Grid(14, 14)?
        >>> bmfa.Grid(37, 37, frames=4).size
        5476
    """

    height: int
    width: int
    frames: int = 1

    @_explain_wrong_sides
    def __init__(self, height: int, width: int, *, frames: int = 1) -> None:
        object.__setattr__(self, "height", check_integer("height", height, low=1))
        object.__setattr__(self, "width", check_integer("width", width, low=1))
        object.__setattr__(self, "frames", check_integer("frames", frames, low=1))

    def __repr__(self) -> str:
        frames = "" if self.frames == 1 else f", frames={self.frames}"
        return f"Grid(height={self.height}, width={self.width}{frames})"

    def __str__(self) -> str:
        return ("" if self.frames == 1 else f"{self.frames}x") + f"{self.height}x{self.width}"

    @property
    def size(self) -> int:
        """Number of tokens, `frames * height * width`."""
        return self.frames * self.height * self.width

    @property
    def depth(self) -> int:
        """Smallest depth at which every block of the quadtree is a single token."""
        return (max(self.height, self.width) - 1).bit_length()  # a side n leaves ceil(n / 2)

    @property
    def z_order(self) -> Tensor:
        """(N,) int64: raster index of the i-th token in Z-order.

        The tokens of every quadtree block are consecutive in Z-order; `scores[..., grid.z_order]`
        reorders raster scores, and `z_order.argsort()` is the position of every raster token.

        Example:
            >>> import bmfa
            >>> bmfa.Grid(3, 2).z_order
            tensor([0, 1, 2, 4, 3, 5])
        """
        check_one_frame(self, "Z-order")
        return _z_codes(self).argsort(stable=True)

    def partition(self, depth: int) -> Tensor:
        """Label every token with its quadtree block at one depth.

        Args:
            depth: Depth of the blocks, at least 0. A single token above that depth is its own block.

        Returns:
            (N,) int64 labels in raster order; blocks are numbered from 0 in Z-order.

        Raises:
            TypeError: If `depth` is not an integer.
            ValueError: If `depth` is negative.

        Example:
            >>> import bmfa
            >>> bmfa.Grid(2, 4).partition(1)
            tensor([0, 0, 1, 1, 2, 2, 3, 3])
        """
        check_integer("depth", depth, low=0)
        check_one_frame(self, "a quadtree")
        codes = _z_codes(self) >> 2 * max(0, self.depth - depth)
        labels: Tensor = torch.unique(codes, return_inverse=True)[1]
        return labels


def check_grid(grid: object) -> Grid:
    """Return `grid` as a `Grid`.

    Args:
        grid: A `Grid`, or a tuple or list (height, width).

    Returns:
        The grid.

    Raises:
        TypeError: If `grid` is anything else.
        ValueError: If a side is below 1.
    """
    if isinstance(grid, Grid):
        return grid
    if isinstance(grid, (tuple, list)) and len(grid) == 2:
        return Grid(*grid)
    sides = tuple(grid) if isinstance(grid, (tuple, list)) else (grid,)
    raise TypeError(f"grid is {grid!r}; {_suggest_grid(sides)}")


def check_one_frame(grid: Grid, what: str) -> None:
    """Raise a ValueError if a grid has several frames; `what` names what takes one."""
    if grid.frames > 1:
        raise ValueError(
            f"the grid has {grid.frames} frames, and {what} takes one; pass every frame as an image of "
            f"the batch with Grid({grid.height}, {grid.width}), or attend over tiles (error= or leaves=)"
        )


def _suggest_grid(sides: tuple[object, ...]) -> str:
    match sides:
        case (int(count),) if count > 0 and math.isqrt(count) ** 2 == count:
            return f"did you mean Grid({math.isqrt(count)}, {math.isqrt(count)})?"
        case ((height, width),):
            return f"did you mean Grid({height!r}, {width!r})?"
        case (_, height, width):
            return (
                f"did you mean Grid({height!r}, {width!r})? A grid has two sides; images go into the "
                "batch dimension of the tensors, and frames that attend to each other into frames="
            )
    return "pass Grid(height, width), or the pair (height, width) where a grid is taken"


def _z_codes(grid: Grid) -> Tensor:
    """(N,) int64 Z-order code of every raster token: a row bit and a column bit for each level.

    The bits tell which half of its block the token belongs to, the pair of the root first, so that
    the tokens of a block share a prefix.
    """
    rows, columns = (_half_bits(side, grid.depth) for side in (grid.height, grid.width))
    return (2 * rows.unsqueeze(1) + columns).flatten()  # (H, W) -> (N,)


def _half_bits(side: int, depth: int) -> Tensor:
    """(side,) int64: bit 2 * (depth - 1 - l) is 1 in the second half of a block of level l."""
    index = torch.arange(side)
    start, stop, bits = torch.zeros_like(index), torch.full_like(index, side), index * 0
    for _ in range(depth):
        middle = split_point(start, stop)
        second = index >= middle
        start, stop = torch.where(second, middle, start), torch.where(second, stop, middle)
        bits = 4 * bits + second
    return bits


def grid_to_list(grid: Grid | None) -> list[int]:
    """Return height, width and frames for an operator of torch, which takes no grids; [] for None."""
    return [] if grid is None else [grid.height, grid.width, grid.frames]


def grid_from_list(sides: Sequence[int]) -> Grid | None:
    """Return the grid of `grid_to_list`."""
    return Grid(sides[0], sides[1], frames=sides[2]) if sides else None
