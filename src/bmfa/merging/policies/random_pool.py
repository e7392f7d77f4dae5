"""Random pooling: the baseline that looks at nothing."""

from dataclasses import dataclass

import torch

from bmfa.checks import check_integer
from bmfa.grid import Grid
from bmfa.merging.kernels.eager import pool, targets
from bmfa.merging.policies.base import Moment, Policy, Step, check_budget, check_pairs, removed


@dataclass(frozen=True)
class RandomPool(Policy):
    """Every block merges r disjoint pairs drawn from a seed, the same for all pictures."""

    budget: int | float
    seed: int = 0

    def __post_init__(self) -> None:
        check_budget(self.budget, least=0.5)
        check_integer("seed", self.seed, low=0)

    def __str__(self) -> str:
        return f"random-pool:{self.budget!r}"

    def check(self, grid: Grid, prefix: int, depth: int) -> None:
        """At most half of the tokens find a partner."""
        check_pairs(self, self.budget, grid)

    def step(self, moment: Moment) -> Step | None:
        """Merge."""
        r = min(removed(self.budget, moment.tokens), moment.tokens // 2)
        if r == 0:
            return None
        batch, tokens, prefix = len(moment.x), moment.x.shape[1], moment.prefix
        # Drawn on the CPU, so that every device draws the same pairs.
        coins = torch.Generator().manual_seed(1009 * self.seed + moment.layer)
        drawn = prefix + torch.randperm(moment.tokens, generator=coins).to(moment.x.device)
        source, destination = (part.expand(batch, -1) for part in (drawn[:r], drawn[r : 2 * r]))
        target = targets(source, destination, tokens)
        x, size = pool(moment.x, moment.size, target, tokens - r)
        return Step(x, size, target)
