"""Static block hierarchies over a grid, level by level: the quadtree, and tiles."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import torch
from torch import Tensor

from bmfa.grid import Grid, check_one_frame, normal_tensors, split_point


@dataclass(frozen=True, eq=False)
class Level:
    """The blocks of one depth with more than one token, and the single tokens of that depth.

    `children` indexes the rows [blocks | tokens] of the next level. A missing child repeats a
    present one, so that every gathered row exists and only needs a weight of 0.
    """

    boxes: Tensor  # (n, 4) top, left, bottom, right; half open
    starts: Tensor  # (n,) rank of the block's first token in depth-first order
    tokens: Tensor  # (t,) raster index
    token_starts: Tensor  # (t,) rank in depth-first order
    parents: Tensor  # (n,) row of the parent among the previous level's blocks
    token_parents: Tensor  # (t,)
    children: Tensor  # (n, k)
    present: Tensor  # (n, k) bool

    @property
    def size(self) -> int:
        """Number of blocks with more than one token."""
        return self.boxes.shape[0]

    @cached_property
    def children_contiguous(self) -> bool:
        """True if all children are present and consecutive in the next level."""
        n, k = self.children.shape
        return bool(self.present.all()) and torch.equal(
            self.children.flatten().cpu(), torch.arange(n * k)
        )

    def to(self, device: torch.device) -> "Level":
        """Return the level on another device."""
        names = self.__dataclass_fields__
        return Level(**{name: getattr(self, name).to(device) for name in names})


@dataclass(frozen=True, eq=False)
class Layout:
    """A static hierarchy of rectangles over a grid: the quadtree, or tiles split into tokens.

    Depth-first order visits the tokens of every block consecutively; for the quadtree it is Z-order.
    """

    grid: Grid
    levels: tuple[Level, ...]

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """First row of each level in the list of all blocks, then the number of all blocks."""
        return (0, *np.cumsum([level.size for level in self.levels]).tolist())

    @property
    def block_count(self) -> int:
        """Number of blocks with more than one token, over all levels."""
        return self.offsets[-1]

    @cached_property
    @normal_tensors
    def token_rank(self) -> Tensor:
        """(N,) rank of each raster token in depth-first order."""
        rank = torch.empty(self.grid.size, dtype=torch.int64, device=self.device)
        for level in self.levels:
            rank[level.tokens] = level.token_starts
        return rank

    @property
    def device(self) -> torch.device:
        """Device of the index tensors."""
        return self.levels[0].boxes.device

    def gather_children(self, depth: int, blocks: Tensor, tokens: Tensor | None) -> Tensor:
        """Gather the rows of the children of the blocks at `depth`.

        Args:
            depth: Level of the parents, of n blocks with k children each.
            blocks: (n', B) rows of the blocks of the next level.
            tokens: (N, B) rows of all tokens in raster order; None for rows of zeros.

        Returns:
            (n, k, B) rows.
        """
        level, below = self.levels[depth], self.levels[depth + 1]
        n, k = level.children.shape
        if below.size == 0 and tokens is not None:
            rows = tokens.index_select(0, below.tokens[level.children].flatten())
        elif level.children_contiguous and below.tokens.numel() == 0:
            rows = blocks
        else:
            if tokens is None:
                singles = blocks.new_zeros(below.tokens.numel(), blocks.shape[1])
            else:
                singles = tokens.index_select(0, below.tokens)
            rows = torch.cat((blocks, singles)).index_select(0, level.children.flatten())
        return rows.view(n, k, rows.shape[1])

    def to(self, device: torch.device | str) -> "Layout":
        """Return the layout on another device; copies are cached."""
        device = torch.device(device)
        return self if device == self.device else _to_device(self, device)


@lru_cache(maxsize=64)
@normal_tensors
def _to_device(layout: Layout, device: torch.device) -> Layout:
    return Layout(layout.grid, tuple(level.to(device) for level in layout.levels))


@lru_cache(maxsize=256)
@normal_tensors
def quadtree_layout(grid: Grid) -> Layout:
    """Return the quadtree: a side n splits into floor(n / 2) and the rest, a side of 1 does not."""
    check_one_frame(grid, "a quadtree")
    root = np.array([[0, 0, grid.height, grid.width]])
    return Layout(grid, _build_levels(root, _quarter, grid.width))


@lru_cache(maxsize=256)
@normal_tensors
def tile_layout(grid: Grid, side: int) -> Layout:
    """Return tiles of side x side tokens from the top left, smaller at the right and the bottom."""
    frames, rows, lefts = np.meshgrid(
        np.arange(grid.frames), np.arange(0, grid.height, side), np.arange(0, grid.width, side),
        indexing="ij",
    )  # fmt: skip
    first, row, left = frames.ravel() * grid.height, rows.ravel(), lefts.ravel()
    bottom, right = np.minimum(row + side, grid.height), np.minimum(left + side, grid.width)
    boxes = np.stack((first + row, left, first + bottom, right), -1)  # frames one below the other
    return Layout(grid, _build_levels(boxes, _split_into_tokens, grid.width))


def _quarter(boxes: np.ndarray) -> np.ndarray:
    """(n, 4, 4) children: top left, top right, bottom left, bottom right; some may be empty."""
    top, left, bottom, right = boxes.T
    middle, center = split_point(top, bottom), split_point(left, right)
    return np.stack(
        (
            np.stack((top, left, middle, center), -1),
            np.stack((top, center, middle, right), -1),
            np.stack((middle, left, bottom, center), -1),
            np.stack((middle, center, bottom, right), -1),
        ),
        axis=1,
    )


def _split_into_tokens(boxes: np.ndarray) -> np.ndarray:
    """(n, k, 4) single tokens of each box in raster order, padded with empty boxes."""
    height, width = (boxes[:, 2:] - boxes[:, :2]).max(0)
    dy, dx = (steps.ravel() for steps in np.mgrid[0:height, 0:width])
    top, left = boxes[:, :1] + dy, boxes[:, 1:2] + dx  # (n, k)
    inside = ((top < boxes[:, 2:3]) & (left < boxes[:, 3:])).astype(top.dtype)
    return np.stack((top, left, top + inside, left + inside), -1)


def _area(boxes: np.ndarray) -> np.ndarray:
    area: np.ndarray = np.prod(boxes[..., 2:] - boxes[..., :2], axis=-1)
    return area


def _build_levels(
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
            "children": _child_rows(area),
            "present": present,
        }
        levels.append(Level(**{name: torch.from_numpy(array) for name, array in fields.items()}))
        starts = (starts[block][:, None] + np.cumsum(area, axis=1) - area)[present]
        parents, boxes = np.nonzero(present)[0], kids[present]
    return tuple(levels)


def _child_rows(area: np.ndarray) -> np.ndarray:
    """(n, k) row of each child in the next level; a missing child repeats the first present one."""
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
