"""ToMe: every block merges the r pairs of tokens whose keys are most alike."""

from dataclasses import dataclass

from bmfa.grid import Grid
from bmfa.merging.policies.base import Moment, Policy, Step, check_budget, check_pairs, removed


@dataclass(frozen=True)
class ToMe(Policy):
    """Bipartite matching by the cosine of mean-head keys; means weighted by size.

    The budget is a whole number of tokens to remove from each block, or the share that each keeps;
    where the tokens run out, a block removes as many as find a partner.
    """

    budget: int | float

    def __post_init__(self) -> None:
        check_budget(self.budget, least=0.5)

    def __str__(self) -> str:
        return f"tome:{self.budget!r}"

    def check(self, grid: Grid, prefix: int, depth: int) -> None:
        """At most half of the tokens find a partner."""
        check_pairs(self, self.budget, grid)

    def step(self, moment: Moment) -> Step | None:
        """Merge."""
        r = min(removed(self.budget, moment.tokens), moment.tokens // 2)
        if r == 0:
            return None
        # Squared distances of the unit mean keys are 2 - 2 cosine: the same order.
        return moment.merge(moment.k, None, r, "none")
