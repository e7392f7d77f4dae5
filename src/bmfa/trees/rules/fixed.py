"""Rules of fixed shape, and rules that decide on the four quadrants of the grid alone."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from bmfa.checks import check_integer, check_number
from bmfa.grid import Grid
from bmfa.trees.layout import Layout, tile_layout
from bmfa.trees.pyramid import Pyramid, ScorePyramid
from bmfa.trees.rules.base import (
    Context,
    Decision,
    Rule,
    ThresholdRule,
    split_from_root,
)


@dataclass(frozen=True)
class FixedDepth(Rule):
    """Split every block above one depth; the leaves are all blocks of that depth.

    Args:
        depth: Depth of the leaves, at least 0. Single tokens above it are leaves too.

    Raises:
        TypeError: If `depth` is not an integer.
        ValueError: If `depth` is negative.

    Example:
        >>> import torch, bmfa
        >>> tree = bmfa.screen(torch.zeros(64), (8, 8), bmfa.rules.FixedDepth(2))
        >>> int(tree.leaf_count)
        16
    """

    name = "fixed-depth"
    needs = "nothing"
    depth: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("depth", self.depth, low=0)

    def decide(self, scores: Tensor, context: Context) -> Decision:
        return split_from_root(context, lambda depth, reached: reached & (depth < self.depth))


@dataclass(frozen=True)
class FixedBlocks(Rule):
    """Use square tiles from the top left, smaller at the right and bottom edges.

    Args:
        side: Side of a tile in tokens, at least 1.

    Raises:
        TypeError: If `side` is not an integer.
        ValueError: If `side` is below 1.

    Example:
        >>> import torch, bmfa
        >>> tree = bmfa.screen(torch.zeros(35), (5, 7), bmfa.rules.FixedBlocks(4))
        >>> tree.leaf_boxes.tolist()
        [[0, 0, 4, 4], [0, 4, 4, 7], [4, 0, 5, 4], [4, 4, 5, 7]]
    """

    name = "fixed-blocks"
    needs = "nothing"
    side: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("side", self.side, low=1)

    def layout(self, grid: Grid) -> Layout:
        """Return the tiles, which are not nodes of the quadtree."""
        return tile_layout(grid, min(self.side, max(grid.height, grid.width)))

    def decide(self, scores: Tensor, context: Context) -> Decision:
        return split_from_root(context, lambda _, reached: ~reached)


@dataclass(frozen=True)
class GlobalMean(FixedDepth):
    """Split nothing: one leaf, the mean of the grid.

    Example:
        >>> import torch, bmfa
        >>> int(bmfa.screen(torch.randn(64), (8, 8), bmfa.rules.GlobalMean()).leaf_count)
        1
    """

    depth: int = field(default=0, init=False, repr=False)

    def __str__(self) -> str:
        return "global-mean"


class QuadrantRule(Rule):
    """Base of rules that expand a quadrant of the grid token by token, or take its mean."""

    def expanded_quadrants(self, scores: Tensor, context: Context) -> Tensor:
        """(quadrants, B) bool: blocks at depth 1 that are expanded."""
        raise NotImplementedError

    def decide(self, scores: Tensor, context: Context) -> Decision:
        def wants_split(depth: int, reached: Tensor) -> Tensor:
            return self.expanded_quadrants(scores, context) if depth == 1 else reached

        return split_from_root(context, wants_split)


@dataclass(frozen=True)
class QuadrantGap(QuadrantRule, ThresholdRule):
    """Expand every quadrant of the grid whose exact gap G exceeds epsilon.

    Args:
        epsilon: Threshold of the gap, at least 0, in units of the scores.

    Raises:
        TypeError: If `epsilon` is not a number.
        ValueError: If `epsilon` is negative or not finite.

    Example:
        >>> import torch, bmfa
        >>> scores = torch.zeros(16)
        >>> scores[0] = 8.0  # one outlier in the top left quadrant
        >>> int(bmfa.screen(scores, (4, 4), bmfa.rules.QuadrantGap(0.8)).leaf_count)
        7
    """

    name = "quadrant-gap"

    def node_scores(self, pyramid: Pyramid) -> Tensor:
        """(quadrants, B) G of the quadrants."""
        assert isinstance(pyramid, ScorePyramid)
        return pyramid.gaps()[1] if pyramid.depth > 1 else pyramid.tokens[:0]

    def expanded_quadrants(self, scores: Tensor, context: Context) -> Tensor:
        return scores > self.epsilon


@dataclass(frozen=True)
class Variance(QuadrantGap):
    """Expand every quadrant whose population variance / (2 tau) exceeds epsilon.

    This is the second-order approximation of the gap.

    Args:
        epsilon: Threshold, at least 0, in units of the scores.

    Raises:
        TypeError: If `epsilon` is not a number.
        ValueError: If `epsilon` is negative or not finite.

    Example:
        >>> import torch, bmfa
        >>> scores = torch.zeros(16)
        >>> scores[0] = 8.0  # variance 12 in the top left quadrant
        >>> int(bmfa.screen(scores, (4, 4), bmfa.rules.Variance(0.5)).leaf_count)
        7
    """

    name = "variance"

    def node_scores(self, pyramid: Pyramid) -> Tensor:
        """(quadrants, B) second-order gap of the quadrants."""
        assert isinstance(pyramid, ScorePyramid)
        if pyramid.depth < 2:
            return pyramid.tokens[:0]
        return pyramid.variances()[1] / (2 * pyramid.tau)


@dataclass(frozen=True)
class RandomQuadrants(QuadrantRule):
    """Expand each quadrant of each tree with probability p, independently.

    Args:
        p: Probability in [0, 1].
        seed: Seed of the random numbers, at least 0.

    Raises:
        TypeError: If `p` is not a number or `seed` is not an integer.
        ValueError: If `p` or `seed` is out of range.

    Example:
        >>> import torch, bmfa
        >>> rule = bmfa.rules.RandomQuadrants(0.25, seed=1)
        >>> bmfa.screen(torch.zeros(4, 64), (8, 8), rule).leaf_count
        tensor([ 4, 19,  4,  4])
    """

    name = "random-quadrants"
    needs = "nothing"
    p: float
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("p", self.p, low=0.0, high=1.0)
        check_integer("seed", self.seed, low=0)

    @property
    def needs_all_trees(self) -> bool:
        """True: the random numbers of a batch are drawn at once, whatever its chunks are."""
        return True

    def draw(self, trees: int, quadrants: int) -> Tensor:
        """(trees, quadrants) bool: children of the root of each tree that are expanded."""
        generator = torch.Generator().manual_seed(self.seed)
        return torch.rand(trees, quadrants, generator=generator) < self.p

    def expanded_quadrants(self, scores: Tensor, context: Context) -> Tensor:
        # A number is drawn for every child of the root, single tokens included.
        root, quadrants = context.layout.levels[:2]
        drawn = self.draw(context.trees, int(root.present.sum())).to(root.boxes.device)
        return drawn.T[root.children[root.present] < quadrants.size]
