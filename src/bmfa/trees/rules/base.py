"""What a rule is: it scores the blocks of a pyramid, and turns scores into splits."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from bmfa.checks import check_number, python_number
from bmfa.grid import Grid
from bmfa.trees.layout import Layout, quadtree_layout
from bmfa.trees.pyramid import Counts, Pyramid

Needs = Literal["nothing", "means", "tokens"]
SAFE, UNDECIDED, MUST_REFINE = 0, 1, 2
LABELS = ("safe", "undecided", "must-refine")


@dataclass(frozen=True)
class Context:
    """What splits are decided on: a layout, its valid counts, a depth limit, and B trees."""

    layout: Layout
    counts: Counts
    tau: float
    trees: int
    max_depth: int | None = None
    shared: bool = False  # whether scores are aggregates over the members of each tree

    def rows(self, scores: Tensor, depth: int) -> Tensor:
        """The rows of one level out of the rows of all blocks."""
        return scores[self.layout.offsets[depth] : self.layout.offsets[depth + 1]]


@dataclass(frozen=True)
class Decision:
    """The splits of B trees, blocks of all levels one after the other."""

    split: Tensor  # (blocks, B) bool
    limited: Tensor | None = None  # (n, B) bool: blocks at max_depth that would be split
    labels: Tensor | None = None  # (blocks, B) int8 index into LABELS


@dataclass(frozen=True)
class Rule:
    """How splits are decided; immutable, its parameters checked when made."""

    # Whether statistics are taken in float64 whatever the input: bounds must hold after rounding.
    double: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:  # NumPy scalars become Python numbers
            object.__setattr__(self, name, python_number(getattr(self, name)))

    @property
    def needs(self) -> Needs:
        """What of the scores the rule reads: nothing, block means, or every token."""
        return "tokens"

    @property
    def together(self) -> bool:
        """Whether all trees of a batch must be decided at once."""
        return False

    def layout(self, grid: Grid) -> Layout:
        """The hierarchy the rule works on."""
        return quadtree_layout(grid)

    def check(self, grid: Grid, tokens: int) -> None:
        """Raise where the parameters do not fit the grid or its smallest count of valid tokens."""

    def scores(self, pyramid: Pyramid) -> Tensor:
        """(rows, B) numbers the rule decides on; trees that are shared aggregate these."""
        raise NotImplementedError

    def decide(self, scores: Tensor, context: Context) -> Decision:
        """Splits from the scores."""
        raise NotImplementedError

    def screen(self, pyramid: Pyramid, context: Context) -> Decision:
        """Splits of the trees of a pyramid."""
        return self.decide(self.scores(pyramid), context)


def spell(value: float) -> str:
    """A number as the command line reads it back, and no longer than that."""
    value = check_number("value", value)
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e15 else repr(value)


def descend(context: Context, wanted: Callable[[int, Tensor], Tensor]) -> Decision:
    """Split from the root downwards: a block is reached where its parent is split.

    `wanted(depth, reached)` gives the (n, B) blocks that ask for a split; those at max_depth are
    marked instead, and a block with one valid token is a leaf.
    """
    layout, counts = context.layout, context.counts
    split = torch.zeros(layout.block_count, context.trees, dtype=torch.bool, device=layout.device)
    reached = torch.ones(
        layout.levels[0].size, context.trees, dtype=torch.bool, device=layout.device
    )
    limited = None
    for depth, below in enumerate(layout.levels[1:]):
        asking = reached & wanted(depth, reached)
        if counts.empty is not None:
            asking &= counts.blocks[depth] > 1
        if depth == context.max_depth:
            limited = asking
            break
        context.rows(split, depth).copy_(asking)
        if below.size == 0:
            break
        reached = asking.index_select(0, below.parents)
    return Decision(split, limited)


def descend_by(scores: Tensor, threshold: float, context: Context) -> Decision:
    """Split every block reached whose score exceeds the threshold."""
    return descend(context, lambda depth, _: context.rows(scores, depth) > threshold)
