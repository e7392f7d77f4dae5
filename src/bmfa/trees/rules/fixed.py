"""Rules of fixed shape, and the one-level rules on the four quadrants."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from bmfa.checks import check_integer, check_number
from bmfa.grid import Grid
from bmfa.trees.layout import Layout, tile_layout
from bmfa.trees.pyramid import Pyramid, ScorePyramid
from bmfa.trees.rules.base import Context, Decision, Needs, Rule, descend, spell


@dataclass(frozen=True)
class Fixed(Rule):
    """Splits that depend on no score."""

    @property
    def needs(self) -> Needs:
        """Nothing."""
        return "nothing"

    def scores(self, pyramid: Pyramid) -> Tensor:
        """No rows at all."""
        return torch.empty(0, 0)


@dataclass(frozen=True)
class FixedDepth(Fixed):
    """All blocks of one depth."""

    depth: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("depth", self.depth, low=0)

    def __str__(self) -> str:
        return f"fixed-depth:{self.depth}"

    def decide(self, scores: Tensor, context: Context) -> Decision:
        """Split everything above the depth."""
        return descend(context, lambda depth, reached: reached & (depth < self.depth))


@dataclass(frozen=True)
class FixedBlocks(Fixed):
    """Square tiles from the top left, with remainders at the right and the bottom."""

    side: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("side", self.side, low=1)

    def __str__(self) -> str:
        return f"fixed-blocks:{self.side}"

    def layout(self, grid: Grid) -> Layout:
        """The tiles, which are no quadtree nodes."""
        return tile_layout(grid, min(self.side, max(grid.height, grid.width)))

    def decide(self, scores: Tensor, context: Context) -> Decision:
        """Split nothing."""
        return descend(context, lambda _, reached: ~reached)


@dataclass(frozen=True)
class GlobalMean(FixedDepth):
    """One leaf."""

    depth: int = field(default=0, init=False, repr=False)

    def __str__(self) -> str:
        return "global-mean"


class Quadrants(Rule):
    """A child of the root is kept token by token, or summarised by its mean."""

    def keep(self, scores: Tensor, context: Context) -> Tensor:
        """(quadrants, B) the blocks at depth 1 that are kept."""
        raise NotImplementedError

    def decide(self, scores: Tensor, context: Context) -> Decision:
        """Split the root, then everything inside the quadrants kept."""

        def wanted(depth: int, reached: Tensor) -> Tensor:
            return self.keep(scores, context) if depth == 1 else reached

        return descend(context, wanted)


@dataclass(frozen=True)
class QuadrantGap(Quadrants):
    """Keep a quadrant whose exact gap G > epsilon."""

    epsilon: float

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("epsilon", self.epsilon, low=0.0)

    def __str__(self) -> str:
        return f"quadrant-gap:{spell(self.epsilon)}"

    def scores(self, pyramid: Pyramid) -> Tensor:
        """G of the quadrants."""
        assert isinstance(pyramid, ScorePyramid)
        return pyramid.gaps()[1] if pyramid.depth > 1 else pyramid.tokens[:0]

    def keep(self, scores: Tensor, context: Context) -> Tensor:
        """Above epsilon."""
        return scores > self.epsilon


@dataclass(frozen=True)
class Variance(QuadrantGap):
    """Keep a quadrant whose population variance / (2 tau), its second-order gap, > epsilon."""

    def __str__(self) -> str:
        return f"variance:{spell(self.epsilon)}"

    def scores(self, pyramid: Pyramid) -> Tensor:
        """The second-order gap of the quadrants."""
        assert isinstance(pyramid, ScorePyramid)
        return (
            pyramid.variances()[1] / (2 * pyramid.tau) if pyramid.depth > 1 else pyramid.tokens[:0]
        )


@dataclass(frozen=True)
class RandomQuadrants(Quadrants):
    """Keep each quadrant of each tree by an independent coin of probability p."""

    p: float
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("p", self.p, low=0.0, high=1.0)
        check_integer("seed", self.seed, low=0)

    @property
    def needs(self) -> Needs:
        """Nothing: a coin reads no score."""
        return "nothing"

    @property
    def together(self) -> bool:
        """The coins of a batch are drawn at once, so that no chunking shows in them."""
        return True

    def __str__(self) -> str:
        return f"random-quadrants:{spell(self.p)}"

    def scores(self, pyramid: Pyramid) -> Tensor:
        """No rows at all."""
        return torch.empty(0, 0)

    def coins(self, trees: int, quadrants: int) -> Tensor:
        """(trees, quadrants) which children of the root of each tree are kept."""
        generator = torch.Generator().manual_seed(self.seed)
        return torch.rand(trees, quadrants, generator=generator) < self.p

    def keep(self, scores: Tensor, context: Context) -> Tensor:
        """Heads; a coin falls for every child of the root, also for single tokens."""
        root, quadrants = context.layout.levels[:2]
        coins = self.coins(context.trees, int(root.present.sum())).to(root.boxes.device)
        return coins.T[root.children[root.present] < quadrants.size]
