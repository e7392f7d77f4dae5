"""The best tree there is: fewest leaves for the mass they hold, by bottom-up pruning."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bmfa.checks import check_integer, check_number
from bmfa.grid import Grid
from bmfa.pyramid import Pyramid, ScorePyramid
from bmfa.rules.base import Context, Decision, Rule, descend

# Penalties below this are taken as 0: the share of Z at stake is below any score's rounding.
LEAST_PENALTY = 1e-12
BISECTIONS = 48


@dataclass(frozen=True)
class Optimal(Rule):
    """The tree of the least penalty * leaves - (mass held), of all trees on the hierarchy.

    Splitting block B recovers gain_B = pi_B (exp(Gamma_B / tau) - 1) of Z, costs k_B - 1 leaves, and
    opens its children: with advantage A_B = max(0, gain_B - penalty (k_B - 1) + sum_C A_C) the split
    is kept iff that sum is positive. Give one of `penalty`, a budget of `leaves` (an int is a count,
    a float in (0, 1] a fraction of the valid tokens) or a budget for the `error` E; a budget is met
    by the largest, or smallest, tree on the path of all penalties. Budgets hold for each tree, or,
    `pooled`, for the average of the batch under one penalty.
    """

    penalty: float | None = None
    leaves: float | int | None = None
    error: float | None = None
    pooled: bool = False

    def __post_init__(self) -> None:
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
        if isinstance(self.leaves, float):
            check_number("leaves", self.leaves, low=0.0, high=1.0, open_low=True)
        elif self.leaves is not None:
            check_integer("leaves", self.leaves, low=1)

    @property
    def together(self) -> bool:
        """A pooled budget is spent over the whole batch."""
        return self.pooled

    def __str__(self) -> str:
        if self.penalty is not None:
            return f"optimal:{self.penalty:g}"
        kind, value = ("leaves", self.leaves) if self.error is None else ("error", self.error)
        return f"optimal-{kind}{'-pooled' if self.pooled else ''}:{value:g}"

    def check(self, grid: Grid, tokens: int) -> None:
        """A count of leaves cannot exceed the tokens there are."""
        if isinstance(self.leaves, int) and self.leaves > tokens:
            raise ValueError(
                f"leaves is {self.leaves} and the {grid.height}x{grid.width} grid has {tokens} valid "
                f"tokens; pass an integer from 1 to {tokens}, or a fraction in (0, 1]"
            )

    def scores(self, pyramid: Pyramid) -> Tensor:
        """The share of Z each split recovers."""
        assert isinstance(pyramid, ScorePyramid)
        if pyramid.depth == 0:
            return pyramid.tokens[:0]
        log_partition = pyramid.log_partition()
        return torch.cat([pyramid.gain(d, log_partition) for d in range(pyramid.depth)])

    def decide(self, scores: Tensor, context: Context) -> Decision:
        """Splits from the gains of all blocks."""
        pruning = Pruning(scores, context)
        asking = pruning.run(self._penalty(pruning)).asking
        return descend(context, lambda depth, _: context.rows(asking, depth))

    def _penalty(self, pruning: "Pruning") -> Tensor:
        """(B,) the penalty itself, or the one at which the budget is met."""
        if self.penalty is not None:
            return pruning.constant(self.penalty)
        if self.error is not None:
            error = self.error
            return pruning.search(lambda run: self._average(run.error) <= error, smaller=False)
        total, leaves = pruning.context.counts.total, self.leaves
        assert leaves is not None
        budget = total * leaves if isinstance(leaves, float) else torch.full_like(total, leaves)
        # A fraction that stands for a whole count must not lose it to rounding: 0.3 of 10 is 3.
        budget = (budget * (1 + 1e-6)).clamp(min=1)
        return pruning.search(
            lambda run: self._average(run.leaves) <= self._average(budget), smaller=True
        )

    def _average(self, values: Tensor) -> Tensor:
        """The value of each tree, or their mean for all where the budget is pooled."""
        return values.double().mean().expand_as(values) if self.pooled else values


@dataclass(frozen=True)
class Run:
    """One pass of pruning: what is asked for, and what the pruned trees cost and miss."""

    asking: Tensor  # (blocks, B) bool
    leaves: Tensor  # (B,)
    error: Tensor  # (B,) E


class Pruning:
    """Bottom-up pruning of B trees by the (blocks, B) gains of their splits."""

    def __init__(self, gain: Tensor, context: Context) -> None:
        self.gain = gain
        self.context = context
        # A block without valid tokens has no children; it is never reached and costs nothing.
        self.cost = [(k - 1).clamp(min=0) for k in context.counts.branching]

    def constant(self, value: float) -> Tensor:
        """(B,) the same penalty for every tree."""
        return torch.full(
            (self.context.trees,), value, dtype=self.gain.dtype, device=self.gain.device
        )

    def run(self, penalty: Tensor) -> Run:
        """Prune at one penalty for each tree."""
        context = self.context
        asking: list[Tensor] = []
        below = self.gain.new_zeros(0, 3 * context.trees)
        for depth in reversed(range(len(context.layout.levels) - 1)):
            gain, cost = context.rows(self.gain, depth), self.cost[depth]
            advantage, leaves, held = self._children(depth, below).chunk(3, dim=1)
            net = gain - penalty * cost + advantage
            ask = net > 0
            asking.append(ask)
            if context.max_depth is not None and depth >= context.max_depth:
                ask = torch.zeros_like(ask)
            grown = torch.cat((net, cost + leaves, gain + held), dim=1)
            below = grown * ask.repeat(1, 3)
        roots = (context.layout.levels[0].size + context.layout.levels[0].tokens.numel()) * 1.0
        _, leaves, held = below.sum(0).chunk(3)
        missing = (self.gain.sum(0) - held).clamp(0, 1)
        error = missing.neg().log1p() * -context.tau
        return Run(torch.cat(asking[::-1]) if asking else self.gain > 0, roots + leaves, error)

    def _children(self, depth: int, below: Tensor) -> Tensor:
        """(n, 3 B) what the children of each block add up to."""
        rows = self.context.layout.children(depth, below, None)
        level = self.context.layout.levels[depth]
        return (rows if level.in_order else rows * level.present.unsqueeze(-1)).sum(1)

    def search(self, fits: Callable[[Run], Tensor], smaller: bool) -> Tensor:
        """(B,) the smallest or the largest penalty that fits, found by bisection of its logarithm."""
        nothing = self.constant(0.0)
        low, high = self.constant(LEAST_PENALTY), self.constant(1.0)
        free = fits(self.run(nothing))
        for _ in range(BISECTIONS):
            middle = (low * high).sqrt()
            raise_low = fits(self.run(middle)) ^ smaller
            low, high = torch.where(raise_low, middle, low), torch.where(raise_low, high, middle)
        if smaller:
            return torch.where(free, nothing, high)
        return torch.where(fits(self.run(low)), low, nothing)
