"""ToFu: ToMe's matching; early blocks prune the sources, later ones merge and keep norms."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from bmfa.grid import Grid
from bmfa.merging.kernels.eager import bipartite_target, match, pool
from bmfa.merging.policies.base import Moment, Policy, Step, check_budget, check_pairs, removed


@dataclass(frozen=True)
class ToFu(Policy):
    """The first half of the blocks prunes; the others merge by MLERP.

    MLERP keeps the direction of the mean and takes the largest norm in the group.
    """

    prunes: ClassVar[bool] = True
    budget: int | float

    def __post_init__(self) -> None:
        check_budget(self.budget, least=0.5)

    def __str__(self) -> str:
        return f"tofu:{self.budget!r}"

    def check(self, grid: Grid, prefix: int, depth: int) -> None:
        """At most half of the tokens find a partner."""
        check_pairs(self, self.budget, grid)

    def step(self, moment: Moment) -> Step | None:
        """Prune or merge."""
        r = min(removed(self.budget, moment.tokens), moment.tokens // 2)
        if r == 0:
            return None
        tokens, prefix = moment.x.shape[1], moment.prefix
        source, destination = match(moment.unit_keys, None, r, prefix=prefix)
        target = bipartite_target(source, destination, tokens, prefix)
        if 2 * moment.layer < moment.depth:
            target = target.scatter(1, source, -1)
            x, size = pool(moment.x, moment.size, target, tokens - r)
        else:
            x, size = pool(moment.x, moment.size, target, tokens - r)
            x = _largest_norms(moment.x, x, target)
        return Step(x, size, target)


def _largest_norms(x: Tensor, means: Tensor, target: Tensor) -> Tensor:
    """The means with the largest norm among the tokens of each."""
    norms = torch.linalg.vector_norm(x.float(), dim=-1)
    largest = norms.new_zeros(means.shape[:2]).scatter_reduce(1, target.long(), norms, "amax")
    wide = means.float()
    length = torch.linalg.vector_norm(wide, dim=-1)
    factor = largest / length.where(length > 0, 1.0)
    scaled: Tensor = wide * factor.unsqueeze(-1)
    return scaled.to(x.dtype)
