"""CrossGET: matching among all tokens at once, the vision part."""

from dataclasses import dataclass

import torch

from bmfa.grid import Grid
from bmfa.merging.kernels.eager import pool, targets
from bmfa.merging.policies.base import Moment, Policy, Step, check_budget, removed


@dataclass(frozen=True)
class CrossGET(Policy):
    """Tokens ranked by their largest cosine match only later ones; the r best edges are sources.

    Each source then goes to the most similar token that is none; the order of the tokens stays.
    """

    budget: int | float

    def __post_init__(self) -> None:
        check_budget(self.budget)

    def __str__(self) -> str:
        return f"crossget:{self.budget!r}"

    def check(self, grid: Grid, prefix: int, depth: int) -> None:
        """One token at least must stay."""
        r = removed(self.budget, grid.size)
        if r >= grid.size and r > 0:
            raise ValueError(
                f"{self} removes {r} tokens a block, but a {grid.height}x{grid.width} grid has "
                f"{grid.size}; pass at most {grid.size - 1}"
            )

    def step(self, moment: Moment) -> Step | None:
        """Merge."""
        r = min(removed(self.budget, moment.tokens), moment.tokens - 1)
        if r == 0:
            return None
        cosines = moment.cosines
        best = cosines.amax(2)
        rank = best.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
        later = rank.unsqueeze(1) > rank.unsqueeze(2)  # (B, i, j): j comes after i
        remaining = cosines.masked_fill(~later, -torch.inf).amax(2)
        source = remaining.argsort(dim=1, descending=True, stable=True)[:, :r]
        leaving = torch.zeros_like(best, dtype=torch.bool).scatter(1, source, True)
        rows = cosines.gather(1, source.unsqueeze(-1).expand(-1, -1, cosines.shape[2]))
        destination = rows.masked_fill(leaving.unsqueeze(1), -torch.inf).argmax(2)
        tokens, prefix = moment.x.shape[1], moment.prefix
        target = targets(source + prefix, destination + prefix, tokens)
        x, size = pool(moment.x, moment.size, target, tokens - r)
        return Step(x, size, target)
