"""Optimal trees: the least cost of leaves and lost mass together, by bottom-up pruning."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from bmfa.checks import check_flag, check_leaves, check_number, python_number
from bmfa.grid import Grid
from bmfa.trees.pyramid import Pyramid, ScorePyramid, machine_epsilon
from bmfa.trees.rules.base import Context, Decision, Rule, format_number, split_from_root

# Smallest penalty above 0 that a search considers: gains of a smaller share of Z underflow near the
# smallest normal number of the dtype (1e-38 and 1e-308).
LEAST_PENALTY = {torch.float32: 1e-30, torch.float64: 1e-250}
# Relative slack of a budget of leaves, so that a fraction that stands for an integer does not lose
# it to float32 rounding (6e-8): 0.3 of 10 tokens is 3.
LEAVES_SLACK = 1e-6


@dataclass(frozen=True)
class Optimal(Rule):
    """Use the tree with the least penalty * leaves - (share of Z held), among all trees.

    Splitting block B recovers gain_B = pi_B (exp(Gamma_B / tau) - 1) of Z, adds k_B - 1 leaves, and
    makes the splits of its children possible. With A_B = max(0, gain_B - penalty (k_B - 1) +
    sum_C A_C), the block is split if that maximum is positive.

    The trees of all penalties form a path, each a refinement of the one before: the corners of the
    convex hull of (leaves, share of Z held) over all trees. No tree with as many or fewer leaves
    holds more of Z than a tree of the path. A budget selects one tree of this path: `leaves` the
    largest that fits, `error` the smallest whose E is within the budget. A tree off the path may meet
    the same budget with fewer leaves, or hold more of Z with as many, but it lies between two
    neighbours of the path.

    If no tree down to `max_depth` meets `error`, the largest tree of the path is used. Budgets are
    met to within rounding of E. Shared trees are pruned by aggregated gains, from which E is then
    computed.

    Args:
        penalty: Share of Z that a leaf must hold to be kept, at least 0.
        leaves: Budget of leaves: an int of at least 2 is a number of leaves, a float in (0, 1] a
            fraction of the valid tokens.
        error: Budget of E = F - F~, at least 0, in units of the scores. Exactly one of `penalty`,
            `leaves` and `error` must be given.
        pooled: If True, the budget holds for the average over the batch, under one penalty for all
            trees, instead of for each tree.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If not exactly one of the three is given, or a value is out of range.

    Example:
        >>> import torch, bmfa
        >>> scores = torch.zeros(64)
        >>> scores[9] = 6.0
        >>> tree = bmfa.screen(scores, (8, 8), bmfa.rules.Optimal(leaves=10))
        >>> int(tree.leaf_count), bool(tree.error(scores) < 1e-6)
        (10, True)
    """

    penalty: float | None = None
    leaves: float | int | None = None
    error: float | None = None
    pooled: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flag("pooled", self.pooled)
        passed = [n for n in ("penalty", "leaves", "error") if getattr(self, n) is not None]
        if len(passed) != 1:
            raise ValueError(
                f"Optimal got {' and '.join(passed) or 'nothing'}; pass exactly one of "
                "penalty=, leaves= and error="
            )
        if self.leaves is not None:
            check_leaves(self.leaves)
        else:
            check_number(passed[0], getattr(self, passed[0]), low=0.0)
        if self.pooled and self.penalty is not None:
            raise ValueError(
                "pooled=True pools a budget, and a penalty is not a budget; pass leaves= or error="
            )

    @property
    def needs_all_trees(self) -> bool:
        """True for a pooled budget, which is spent over the batch."""
        return self.pooled

    def __str__(self) -> str:
        if self.penalty is not None:
            return f"optimal:{format_number(self.penalty)}"
        pooled = "-pooled" if self.pooled else ""
        if self.error is not None:
            return f"optimal-error{pooled}:{format_number(self.error)}"
        return f"optimal-leaves{pooled}:{python_number(self.leaves)!r}"

    def check(self, grid: Grid, tokens: int) -> None:
        """Raise ValueError if `leaves` exceeds the number of valid tokens, and the least budget."""
        if isinstance(self.leaves, int) and self.leaves > max(2, tokens):
            raise ValueError(
                f"leaves is {self.leaves} and the {grid.height}x{grid.width} grid has {tokens} valid "
                f"tokens; pass an integer from 2 to {max(2, tokens)}, or a fraction in (0, 1]"
            )

    def node_scores(self, pyramid: Pyramid) -> Tensor:
        """(blocks + 1, B) share of Z that each split recovers, then the share the root holds."""
        assert isinstance(pyramid, ScorePyramid)
        gains = [pyramid.gain(d) for d in range(pyramid.depth)]
        return torch.cat((*gains, pyramid.root_share().unsqueeze(0)))

    def decide(self, scores: Tensor, context: Context) -> Decision:
        pruning = Pruning(scores, context)
        splits = pruning.prune(self._penalty(pruning))
        return split_from_root(context, lambda depth, _: splits[depth])

    def _penalty(self, pruning: "Pruning") -> Tensor:
        """(B,) the penalty, or the penalty at which the budget is met."""
        if self.penalty is not None:
            return pruning.constant(self.penalty)
        if self.error is not None:
            error = self.error
            return pruning.search(lambda cost: self._average(cost.error) <= error, smallest=False)
        total, leaves = pruning.context.counts.total, self.leaves
        assert leaves is not None
        budget = total * leaves if isinstance(leaves, float) else torch.full_like(total, leaves)
        budget = self._average((budget * (1 + LEAVES_SLACK)).clamp(min=1))
        return pruning.search(lambda cost: self._average(cost.leaves) <= budget, smallest=True)

    def _average(self, values: Tensor) -> Tensor:
        """(B,) the values, or their mean for every tree if the budget is pooled."""
        return values.double().mean().expand_as(values) if self.pooled else values


class Cost(NamedTuple):
    """Number of leaves and error of pruned trees."""

    leaves: Tensor  # (B,)
    error: Tensor  # (B,) E


class Pruning:
    """Bottom-up pruning of B trees by the (blocks, B) gains of their splits."""

    def __init__(self, gain: Tensor, context: Context) -> None:
        self.context = context
        self.like = gain
        # Aggregated gains bound the mass that is missing; aggregated root shares bound nothing.
        self.root = None if context.shared or not len(gain) else gain[-1]
        self.depths = range(len(context.layout.levels) - 1)
        self.gain = [context.rows(gain, depth) for depth in self.depths]
        # Leaves that a split adds. A block without valid tokens has no children and adds none.
        self.added_leaves = [(k - 1).clamp(min=0) for k in context.counts.branching]

    def constant(self, value: float) -> Tensor:
        """(B,) the same value for every tree."""
        return self.like.new_full((self.context.trees,), value)

    def prune(self, penalty: Tensor) -> list[Tensor]:
        """Return the (n, B) splits of every level at a (B,) penalty."""
        splits: list[Tensor] = []
        advantage: Tensor | None = None
        for depth in reversed(self.depths):
            net = self.gain[depth] - penalty * self.added_leaves[depth]
            if advantage is not None:
                net += self._sum_children(depth, advantage)
            splits.append(net > 0)
            # Blocks at the depth limit are only marked as limited: they add nothing above them.
            limit = depth == self.context.max_depth
            advantage = torch.zeros_like(net) if limit else net.clamp_(min=0)
        return splits[::-1]

    def measure(self, splits: list[Tensor]) -> Cost:
        """Return the leaves and the error of the trees with these splits."""
        context = self.context
        first = context.layout.levels[0]
        leaves = held = None
        for depth in reversed(self.depths):
            beyond_limit = context.max_depth is not None and depth >= context.max_depth
            split = torch.zeros_like(splits[depth]) if beyond_limit else splits[depth]
            more, gain = self.added_leaves[depth].expand_as(split), self.gain[depth]
            if leaves is not None and held is not None:
                more = more + self._sum_children(depth, leaves)
                gain = gain + self._sum_children(depth, held)
            leaves, held = more * split, gain * split
        if leaves is None or held is None:
            return Cost(self.constant(1.0), self.constant(0.0))
        missing = (sum(gain.sum(0) for gain in self.gain) - held.sum(0)).clamp(0, 1)
        error = missing.neg().log1p_().neg_()
        if self.root is not None:  # if most of Z is missing, 1 - missing is mostly rounding
            error = torch.where(missing > 0.5, -(self.root + held.sum(0)).log(), error)
        error = error * context.tau
        return Cost(first.size + first.tokens.numel() + leaves.sum(0), error)

    def _sum_children(self, depth: int, below: Tensor) -> Tensor:
        """(n, B) sum over the children of each block; tokens count 0."""
        rows = self.context.layout.gather_children(depth, below, None)
        level = self.context.layout.levels[depth]
        if not level.children_contiguous:
            rows = rows * level.present.unsqueeze(-1)
        return rows.sum(1)

    def search(self, fits: Callable[[Cost], Tensor], smallest: bool) -> Tensor:
        """(B,) smallest or largest penalty whose cost fits, by bisection of its logarithm."""
        zero = self.constant(0.0)
        low, high = self.constant(LEAST_PENALTY[self.like.dtype]), self.constant(1.0)

        def is_met(penalty: Tensor) -> Tensor:
            return fits(self.measure(self.prune(penalty)))

        met_at_zero = is_met(zero)
        while bool((high > low * (1 + 4 * machine_epsilon(low))).any()):
            middle = low.sqrt() * high.sqrt()
            upper_half = is_met(middle) ^ smallest
            low, high = torch.where(upper_half, middle, low), torch.where(upper_half, high, middle)
        if smallest:
            return torch.where(met_at_zero, zero, high)
        return torch.where(is_met(low), low, zero)
