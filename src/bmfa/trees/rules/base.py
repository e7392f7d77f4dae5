"""The interface of a rule: it scores the blocks of a pyramid, and turns the scores into splits."""

from collections.abc import Callable
from dataclasses import dataclass, fields
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
    """The trees for which splits are decided.

    Args:
        layout: Block hierarchy of the trees.
        counts: Valid tokens of every block.
        tau: Temperature.
        trees: Number of trees, B.
        max_depth: Depth at which no block is split; None for no limit.
        shared: True if node scores are aggregates over the members of each tree.
    """

    layout: Layout
    counts: Counts
    tau: float
    trees: int
    max_depth: int | None = None
    shared: bool = False

    def rows(self, scores: Tensor, depth: int) -> Tensor:
        """Return the rows of one level out of the rows of all blocks."""
        return scores[self.layout.offsets[depth] : self.layout.offsets[depth + 1]]


@dataclass(frozen=True)
class Decision:
    """The splits of B trees; rows are the blocks of all levels, from the root down."""

    split: Tensor  # (blocks, B) bool
    limited: Tensor | None = None  # (blocks, B) bool: those at max_depth that would be split
    labels: Tensor | None = None  # (blocks, B) int8 index into LABELS


@dataclass(frozen=True)
class Rule:
    """Base class of all rules, which decide how the blocks of a tree are split.

    A rule is immutable, checks its parameters when it is made, and prints as its command-line name.
    Subclasses define `node_scores` and `decide`, and may define a faster `screen`.

    Example:
        >>> import bmfa
        >>> isinstance(bmfa.rules.parse("mass:0.002"), bmfa.rules.Rule)
        True
    """

    # Command-line name without the value, which is the first field; "" for the name of the class.
    name: ClassVar[str] = ""
    # The part of the scores that the rule reads: "nothing", block "means", or all "tokens".
    needs: ClassVar[Needs] = "tokens"
    # True if statistics are computed in float64 for every input, so that bounds hold after rounding.
    float64_statistics: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for one in fields(self):  # NumPy scalars become Python numbers
            object.__setattr__(self, one.name, python_number(getattr(self, one.name)))

    def __str__(self) -> str:
        values = [format_number(getattr(self, one.name)) for one in fields(self)[:1]]
        return ":".join((self.name or type(self).__name__, *values))

    @property
    def needs_all_trees(self) -> bool:
        """True if the trees of a batch must be decided together."""
        return False

    def layout(self, grid: Grid) -> Layout:
        """Return the block hierarchy on which the rule decides."""
        return quadtree_layout(grid)

    def check(self, grid: Grid, tokens: int) -> None:
        """Raise ValueError if the parameters do not fit a grid of at least `tokens` valid tokens."""

    def node_scores(self, pyramid: Pyramid) -> Tensor:
        """(rows, B) node scores, which shared trees aggregate; no rows if the rule needs nothing."""
        return torch.empty(0, 0)

    def decide(self, scores: Tensor, context: Context) -> Decision:
        """Return the splits from (rows, B) node scores."""
        raise NotImplementedError

    def screen(self, pyramid: Pyramid, context: Context) -> Decision:
        """Return the splits of the trees of a pyramid."""
        return self.decide(self.node_scores(pyramid), context)


def format_number(value: float) -> str:
    """Return the shortest text that the command line reads back as the same number."""
    value = check_number("value", value)
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e15 else repr(value)


def split_from_root(context: Context, wants_split: Callable[[int, Tensor], Tensor]) -> Decision:
    """Split level by level from the root; a block is reached if its parent is split.

    Args:
        context: The trees.
        wants_split: Function of a depth and the (n, B) blocks reached there, which returns the
            (n, B) blocks to split. Blocks at `max_depth` are marked as limited instead. Blocks with
            one valid token are never split.
    """
    layout, counts = context.layout, context.counts
    split = torch.zeros(layout.block_count, context.trees, dtype=torch.bool, device=layout.device)
    reached = split.new_ones(layout.levels[0].size, context.trees)
    limited = None
    for depth, below in enumerate(layout.levels[1:]):
        selected = reached & wants_split(depth, reached)
        if counts.empty is not None:
            selected &= counts.blocks[depth] > 1
        if depth == context.max_depth:
            limited = torch.zeros_like(split)
            context.rows(limited, depth).copy_(selected)
            break
        context.rows(split, depth).copy_(selected)
        if below.size == 0:
            break
        reached = selected.index_select(0, below.parents)
    return Decision(split, limited)


def split_above(scores: Tensor, threshold: float, context: Context) -> Decision:
    """Split every reached block whose score exceeds the threshold."""
    return split_from_root(context, lambda depth, _: context.rows(scores, depth) > threshold)


@dataclass(frozen=True)
class ThresholdRule(Rule):
    """Base of rules that split while the node score exceeds epsilon."""

    epsilon: float

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("epsilon", self.epsilon, low=0.0)

    def decide(self, scores: Tensor, context: Context) -> Decision:
        return split_above(scores, self.epsilon, context)
