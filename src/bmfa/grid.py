"""The static quadtree over a grid of tokens: its blocks level by level, built once and reused."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache, wraps

import numpy as np
import torch
from torch import Tensor

from bmfa.checks import check_integer

# Tensors that are kept must serve autograd later, whatever mode the first call ran in.
lasting = torch.inference_mode(False)


@dataclass(frozen=True)
class Grid:
    """A grid of height x width spatial tokens, in raster order unless said otherwise.

    Functions that take a grid take the pair (height, width) as well.

    Args:
        height: The number of rows, at least 1.
        width: The number of columns, at least 1.

    Example:
        >>> Grid(14, 14).size
        196
    """

    height: int
    width: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "height", check_integer("height", self.height, low=1))
        object.__setattr__(self, "width", check_integer("width", self.width, low=1))

    @property
    def size(self) -> int:
        """The number of tokens."""
        return self.height * self.width

    @property
    def depth(self) -> int:
        """The depth at which every block is a single token."""
        return (
            max(self.height, self.width) - 1
        ).bit_length()  # a side n leaves at most ceil(n / 2)

    @property
    def z_order(self) -> Tensor:
        """(N,) raster index of the i-th token in Z-order; `scores[..., grid.z_order]` reorders."""
        return quadtree(self).z_order.clone()

    @property
    def z_rank(self) -> Tensor:
        """(N,) place in Z-order of the i-th raster token: the inverse of `z_order`."""
        return quadtree(self).z_rank.clone()

    def partition(self, depth: int) -> Tensor:
        """(N,) label of the block of that depth each token lies in, blocks numbered in Z-order."""
        check_integer("depth", depth, low=0)
        layout = quadtree(self)
        starts = torch.zeros(self.size, dtype=torch.int64)
        for level in layout.levels[: depth + 1]:
            starts[level.token_starts] = 1
        if depth < len(layout.levels):
            starts[layout.levels[depth].starts] = 1
        return (starts.cumsum(0) - 1)[layout.z_rank]


def _explained(init: Callable[..., None]) -> Callable[..., None]:
    """`Grid.__init__`, with a message of its own where there are not two sizes."""

    @wraps(init)
    def explained(self: Grid, *sizes: int, **named: int) -> None:
        if len(sizes) + len(named) != 2:
            raise TypeError(f"Grid got {_spelt(sizes, named)}; {_advice(sizes)}")
        init(self, *sizes, **named)

    return explained


Grid.__init__ = _explained(Grid.__init__)  # type: ignore[method-assign]


def _spelt(sizes: tuple[object, ...], named: dict[str, int]) -> str:
    given = [repr(size) for size in sizes] + [f"{name}={size!r}" for name, size in named.items()]
    return f"({', '.join(given)})" if given else "nothing"


def _advice(sizes: tuple[object, ...]) -> str:
    """What to pass instead of these sizes."""
    match sizes:
        case (int(count),) if count > 0 and math.isqrt(count) ** 2 == count:
            return f"did you mean Grid({math.isqrt(count)}, {math.isqrt(count)})?"
        case ((height, width),):
            return f"did you mean Grid({height!r}, {width!r})?"
        case (_, height, width):
            return (
                f"did you mean Grid({height!r}, {width!r})? A grid has two sides; pictures or frames "
                "go into the batch dimension of the tensors"
            )
    return "pass Grid(height, width), or the pair (height, width) where a grid is taken"


def check_grid(grid: object) -> Grid:
    """The grid, given as one or as its two sides.

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
    sizes = tuple(grid) if isinstance(grid, (tuple, list)) else (grid,)
    raise TypeError(f"grid is {grid!r}; {_advice(sizes)}")


@dataclass(frozen=True, eq=False)
class Level:
    """The blocks of one depth with more than one token, and the single tokens that end there.

    `children` indexes the rows [blocks | tokens] of the next level; a missing child repeats a
    present one, so that gathered rows are always real and need only a weight of 0.
    """

    boxes: Tensor  # (n, 4) top, left, bottom, right; half open
    starts: Tensor  # (n,) place in Z-order of the block's first token
    tokens: Tensor  # (t,) raster index
    token_starts: Tensor  # (t,) place in Z-order
    parents: Tensor  # (n,) row of the parent among the previous level's blocks
    token_parents: Tensor  # (t,)
    children: Tensor  # (n, k)
    present: Tensor  # (n, k) bool

    @property
    def size(self) -> int:
        """The number of blocks."""
        return self.boxes.shape[0]

    @cached_property
    @lasting
    def counts(self) -> Tensor:
        """(n,) tokens of each block."""
        top, left, bottom, right = self.boxes.unbind(-1)
        return (bottom - top) * (right - left)

    @cached_property
    def in_order(self) -> bool:
        """Whether the children are all present and lie in the next level one after the other."""
        n, k = self.children.shape
        return bool(self.present.all()) and torch.equal(
            self.children.flatten().cpu(), torch.arange(n * k)
        )

    def to(self, device: torch.device) -> "Level":
        """The same level on another device."""
        return Level(**{name: value.to(device) for name, value in self._tensors()})

    def _tensors(self) -> list[tuple[str, Tensor]]:
        return [(name, getattr(self, name)) for name in self.__dataclass_fields__]


@dataclass(frozen=True, eq=False)
class Layout:
    """A static hierarchy of rectangles over a grid: the quadtree, or tiles that are never split."""

    grid: Grid
    levels: tuple[Level, ...]

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where the blocks of each level begin in the list of all blocks, its length last."""
        return (0, *np.cumsum([level.size for level in self.levels]).tolist())

    @property
    def block_count(self) -> int:
        """All blocks with more than one token."""
        return self.offsets[-1]

    @cached_property
    @lasting
    def z_rank(self) -> Tensor:
        """(N,) place in Z-order of each raster token."""
        rank = torch.empty(self.grid.size, dtype=torch.int64, device=self.device)
        for level in self.levels:
            rank[level.tokens] = level.token_starts
        return rank

    @cached_property
    @lasting
    def z_order(self) -> Tensor:
        """(N,) raster index of the i-th token in Z-order."""
        return self.z_rank.argsort()

    @property
    def device(self) -> torch.device:
        """Where the index tensors lie."""
        return self.levels[0].boxes.device

    def children(self, depth: int, blocks: Tensor, tokens: Tensor | None) -> Tensor:
        """(n, k, B) rows of the children of the blocks at `depth`.

        `blocks` are the (n', B) rows of the next level's blocks, `tokens` the (N, B) rows of all
        tokens in raster order, or None where a token counts 0.
        """
        level, below = self.levels[depth], self.levels[depth + 1]
        n, k = level.children.shape
        if below.size == 0 and tokens is not None:
            rows = tokens.index_select(0, below.tokens[level.children].flatten())
        elif level.in_order and below.tokens.numel() == 0:
            rows = blocks
        else:
            ending = (
                blocks.new_zeros(below.tokens.numel(), blocks.shape[1])
                if tokens is None
                else tokens.index_select(0, below.tokens)
            )
            rows = torch.cat((blocks, ending)).index_select(0, level.children.flatten())
        return rows.view(n, k, rows.shape[1])

    def to(self, device: torch.device | str) -> "Layout":
        """The same layout on another device, kept for reuse."""
        device = torch.device(device)
        return self if device == self.device else _moved(self, device)


@lru_cache(maxsize=64)
@lasting
def _moved(layout: Layout, device: torch.device) -> Layout:
    return Layout(layout.grid, tuple(level.to(device) for level in layout.levels))


@lru_cache(maxsize=256)
@lasting
def quadtree(grid: Grid) -> Layout:
    """The quadtree: a side n splits into floor(n / 2) and the rest, a side of 1 does not split."""
    root = np.array([[0, 0, grid.height, grid.width]])
    return Layout(grid, _levels(root, _quarters, grid.width))


@lru_cache(maxsize=256)
@lasting
def tiles(grid: Grid, side: int) -> Layout:
    """Tiles of side x side tokens from the top left, remainders at the right and the bottom."""
    tops, lefts = np.meshgrid(
        np.arange(0, grid.height, side), np.arange(0, grid.width, side), indexing="ij"
    )
    top, left = tops.ravel(), lefts.ravel()
    boxes = np.stack(
        (top, left, np.minimum(top + side, grid.height), np.minimum(left + side, grid.width)), -1
    )
    return Layout(grid, _levels(boxes, _singles, grid.width))


def _quarters(boxes: np.ndarray) -> np.ndarray:
    """(n, 4, 4) children: top-left, top-right, bottom-left, bottom-right; some may be empty."""
    top, left, bottom, right = boxes.T
    middle, centre = top + (bottom - top) // 2, left + (right - left) // 2
    return np.stack(
        (
            np.stack((top, left, middle, centre), -1),
            np.stack((top, centre, middle, right), -1),
            np.stack((middle, left, bottom, centre), -1),
            np.stack((middle, centre, bottom, right), -1),
        ),
        axis=1,
    )


def _singles(boxes: np.ndarray) -> np.ndarray:
    """(n, k, 4) the single tokens of each box in raster order, empty boxes at the end."""
    height, width = (boxes[:, 2:] - boxes[:, :2]).max(0)
    dy, dx = (steps.ravel() for steps in np.mgrid[0:height, 0:width])
    top, left = boxes[:, :1] + dy, boxes[:, 1:2] + dx  # (n, k)
    inside = ((top < boxes[:, 2:3]) & (left < boxes[:, 3:])).astype(top.dtype)
    return np.stack((top, left, top + inside, left + inside), -1)


def _area(boxes: np.ndarray) -> np.ndarray:
    area: np.ndarray = np.prod(boxes[..., 2:] - boxes[..., :2], axis=-1)
    return area


def _levels(
    boxes: np.ndarray, split: Callable[[np.ndarray], np.ndarray], width: int
) -> tuple[Level, ...]:
    """Split all boxes of a level at once until only single tokens are left."""
    levels = []
    starts = np.cumsum(_area(boxes)) - _area(boxes)
    parents = np.zeros(len(boxes), dtype=np.int64)
    while len(boxes):
        block = _area(boxes) > 1
        blocks, tokens = boxes[block], boxes[~block]
        kids = split(blocks) if len(blocks) else np.zeros((0, 4, 4), dtype=np.int64)
        area = _area(kids)
        present = area > 0
        fields = {
            "boxes": blocks,
            "starts": starts[block],
            "tokens": tokens[:, 0] * width + tokens[:, 1],
            "token_starts": starts[~block],
            "parents": parents[block],
            "token_parents": parents[~block],
            "children": _rows(area),
            "present": present,
        }
        levels.append(Level(**{name: torch.from_numpy(array) for name, array in fields.items()}))
        starts = (starts[block][:, None] + np.cumsum(area, axis=1) - area)[present]
        parents, boxes = np.nonzero(present)[0], kids[present]
    return tuple(levels)


def _rows(area: np.ndarray) -> np.ndarray:
    """(n, k) row of each child in the next level; a missing one repeats the first present."""
    present = area > 0
    block = area[present] > 1
    rows = np.zeros(area.shape, dtype=np.int64)
    rows[present] = np.where(
        block,
        np.cumsum(block, dtype=np.int64) - 1,
        block.sum() + np.cumsum(~block, dtype=np.int64) - 1,
    )
    if len(rows) == 0:
        return rows
    first = np.take_along_axis(rows, present.argmax(axis=1)[:, None], axis=1)
    return np.where(present, rows, first)
