"""Trees with the least price of leaves and lost mass together, by bottom-up pruning."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bmfa.checks import check_flag, check_leaves, check_number, python_number
from bmfa.grid import Grid
from bmfa.trees.pyramid import Pyramid, ScorePyramid, machine_epsilon
from bmfa.trees.rules.base import Context, Decision, Rule, descend, spell

# Smaller penalties count as 0, by dtype: gains this small a share of Z are lost to underflow.
LEAST_PENALTY = {torch.float32: 1e-30, torch.float64: 1e-250}


@dataclass(frozen=True, eq=False)
class Optimal(Rule):
    """The tree of the least penalty * leaves - (share of Z held), of all trees on the hierarchy.

    Splitting block B recovers gain_B = pi_B (exp(Gamma_B / tau) - 1) of Z, costs k_B - 1 leaves, and
    opens its children: with advantage A_B = max(0, gain_B - penalty (k_B - 1) + sum_C A_C) the split
    is kept iff that sum is positive.

    The trees of all penalties form a path, each a refinement of the one before: the corners of the
    convex hull of (leaves, share of Z held) over all trees. None of them is beaten by a tree with as
    many or fewer leaves. A budget takes one tree of this path: `leaves` the largest that fits, `error`
    the smallest whose E is no larger. It is the best tree of the path, not of all trees: a tree off
    the path may lie between it and its neighbour on the path. It may meet the same `error` with fewer
    leaves, though with more than the next smaller tree of the path has; or hold more of Z within the
    same `leaves`, though less than the next larger tree.

    With an `error` that no tree down to `max_depth` meets, the largest tree of the path is taken.
    Budgets are met to within rounding of E. Shared trees are pruned by aggregated gains, and `error`
    is then a budget of E computed from these.

    Args:
        penalty: The share of Z that a leaf must hold to be worth it, at least 0.
        leaves: A budget of leaves: an int (at least 2) is a count, a float in (0, 1] a fraction of the
            valid tokens.
        error: A budget of E = F - F~, at least 0. Exactly one of these three is given.
        pooled: Whether a budget holds for the average of the batch, under one penalty for all trees,
            instead of for each tree.
    """

    penalty: float | None = None
    leaves: float | int | None = None
    error: float | None = None
    pooled: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flag("pooled", self.pooled)
        given = [n for n in ("penalty", "leaves", "error") if getattr(self, n) is not None]
        if len(given) != 1:
            raise ValueError(
                f"Optimal got {' and '.join(given) or 'nothing'}; give exactly one of "
                "penalty=, leaves= and error="
            )
        if self.penalty is not None:
            check_number("penalty", self.penalty, low=0.0)
            if self.pooled:
                raise ValueError(
                    "pooled=True shares a budget; with penalty= there is none to share"
                )
        if self.error is not None:
            check_number("error", self.error, low=0.0)
        if self.leaves is not None:
            check_leaves(self.leaves)

    @property
    def together(self) -> bool:
        """A pooled budget is spent over the whole batch."""
        return self.pooled

    def __str__(self) -> str:
        if self.penalty is not None:
            return f"optimal:{spell(self.penalty)}"
        pooled = "-pooled" if self.pooled else ""
        if self.error is not None:
            return f"optimal-error{pooled}:{spell(self.error)}"
        return f"optimal-leaves{pooled}:{python_number(self.leaves)!r}"

    def check(self, grid: Grid, tokens: int) -> None:
        """A count of leaves cannot exceed the tokens there are."""
        if isinstance(self.leaves, int) and self.leaves > tokens:
            raise ValueError(
                f"leaves is {self.leaves} and the {grid.height}x{grid.width} grid has {tokens} valid "
                f"tokens; pass an integer from 2 to {tokens}, or a fraction in (0, 1]"
            )

    def scores(self, pyramid: Pyramid) -> Tensor:
        """The share of Z each split recovers, then the share the root holds."""
        assert isinstance(pyramid, ScorePyramid)
        gains = [pyramid.gain(d) for d in range(pyramid.depth)]
        return torch.cat((*gains, pyramid.root_share().unsqueeze(0)))

    def decide(self, scores: Tensor, context: Context) -> Decision:
        """Splits from the gains of all blocks."""
        pruning = Pruning(scores, context)
        asking = pruning.asking(self._penalty(pruning))
        return descend(context, lambda depth, _: asking[depth])

    def _penalty(self, pruning: "Pruning") -> Tensor:
        """(B,) the penalty itself, or the one at which the budget is met."""
        if self.penalty is not None:
            return pruning.constant(self.penalty)
        if self.error is not None:
            error = self.error
            return pruning.search(lambda cost: self._average(cost.error) <= error, smaller=False)
        total, leaves = pruning.context.counts.total, self.leaves
        assert leaves is not None
        budget = total * leaves if isinstance(leaves, float) else torch.full_like(total, leaves)
        # A fraction that stands for a whole count must not lose it to rounding: 0.3 of 10 is 3.
        budget = (budget * (1 + 1e-6)).clamp(min=1)
        return pruning.search(
            lambda cost: self._average(cost.leaves) <= self._average(budget), smaller=True
        )

    def _average(self, values: Tensor) -> Tensor:
        """The value of each tree, or their mean for all where the budget is pooled."""
        return values.double().mean().expand_as(values) if self.pooled else values


@dataclass(frozen=True)
class Cost:
    """What pruned trees cost and miss."""

    leaves: Tensor  # (B,)
    error: Tensor  # (B,) E


class Pruning:
    """Bottom-up pruning of B trees by the (blocks, B) gains of their splits."""

    def __init__(self, gain: Tensor, context: Context) -> None:
        self.context = context
        self.like = gain
        # Aggregated gains bound what is missing; what aggregated roots hold would bound nothing.
        self.root = None if context.shared or not len(gain) else gain[-1]
        self.depths = range(len(context.layout.levels) - 1)
        self.gain = [context.rows(gain, depth) for depth in self.depths]
        # A block without valid tokens has no children; it is never reached and costs nothing.
        self.cost = [(k - 1).clamp(min=0) for k in context.counts.branching]

    def constant(self, value: float) -> Tensor:
        """(B,) the same penalty for every tree."""
        return self.like.new_full((self.context.trees,), value)

    def asking(self, penalty: Tensor) -> list[Tensor]:
        """(n, B) for every level: the splits worth their leaves, at one penalty for each tree."""
        asking: list[Tensor] = []
        advantage: Tensor | None = None
        for depth in reversed(self.depths):
            net = self.gain[depth] - penalty * self.cost[depth]
            if advantage is not None:
                net += self._sum_children(depth, advantage)
            asking.append(net > 0)
            # Blocks at the depth limit are judged by all that lies below, for the mark they get; to
            # those above they offer nothing.
            limit = depth == self.context.max_depth
            advantage = torch.zeros_like(net) if limit else net.clamp_(min=0)
        return asking[::-1]

    def measure(self, asking: list[Tensor]) -> Cost:
        """Leaves and error of the trees that make these splits."""
        context = self.context
        first = context.layout.levels[0]
        leaves = held = None
        for depth in reversed(self.depths):
            made = torch.zeros_like(asking[depth]) if self._beyond(depth) else asking[depth]
            more, gain = self.cost[depth].expand_as(made), self.gain[depth]
            if leaves is not None and held is not None:
                more = more + self._sum_children(depth, leaves)
                gain = gain + self._sum_children(depth, held)
            leaves, held = more * made, gain * made
        if leaves is None or held is None:
            return Cost(self.constant(1.0), self.constant(0.0))
        missing = (sum(gain.sum(0) for gain in self.gain) - held.sum(0)).clamp(0, 1)
        error = missing.neg().log1p_().neg_()
        if self.root is not None:  # where little is held, 1 - missing is rounding
            error = torch.where(missing > 0.5, -(self.root + held.sum(0)).log(), error)
        error = error * context.tau
        return Cost(first.size + first.tokens.numel() + leaves.sum(0), error)

    def _beyond(self, depth: int) -> bool:
        return self.context.max_depth is not None and depth >= self.context.max_depth

    def _sum_children(self, depth: int, below: Tensor) -> Tensor:
        """(n, B) what the children of each block add up to; tokens add nothing."""
        rows = self.context.layout.gather_children(depth, below, None)
        level = self.context.layout.levels[depth]
        return (
            rows.sum(1)
            if level.children_contiguous
            else (rows * level.present.unsqueeze(-1)).sum(1)
        )

    def search(self, fits: Callable[[Cost], Tensor], smaller: bool) -> Tensor:
        """(B,) the smallest or the largest penalty that fits, found by bisection of its logarithm."""
        nothing = self.constant(0.0)
        low, high = self.constant(LEAST_PENALTY[self.like.dtype]), self.constant(1.0)

        def met(penalty: Tensor) -> Tensor:
            return fits(self.measure(self.asking(penalty)))

        free = met(nothing)
        while bool((high > low * (1 + 4 * machine_epsilon(low))).any()):
            middle = low.sqrt() * high.sqrt()
            raised = met(middle) ^ smaller
            low, high = torch.where(raised, middle, low), torch.where(raised, high, middle)
        if smaller:
            return torch.where(free, nothing, high)
        return torch.where(met(low), low, nothing)
