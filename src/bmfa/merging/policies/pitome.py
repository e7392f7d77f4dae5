"""PiToMe: tokens of high energy, those with many alike, merge first."""

from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import elu

from bmfa.grid import Grid
from bmfa.merging.kernels.eager import pool, targets
from bmfa.merging.policies.base import Moment, Policy, Step, check_budget, check_pairs, removed


@dataclass(frozen=True)
class PiToMe(Policy):
    """Energy_i = mean_j ELU(cos_ij - margin), margin = 0.75 (1 - l / L); the order is by energy.

    In the first half of the blocks even ranks match odd ranks and the r best edges merge; in the
    second half only the first 2 r ranks are mergeable, and each even rank goes to its best odd one.
    """

    budget: int | float

    def __post_init__(self) -> None:
        check_budget(self.budget, least=0.5)

    def __str__(self) -> str:
        return f"pitome:{self.budget!r}"

    def check(self, grid: Grid, prefix: int, depth: int) -> None:
        """At most half of the tokens find a partner."""
        check_pairs(self, self.budget, grid)

    def step(self, moment: Moment) -> Step | None:
        """Merge."""
        r = min(removed(self.budget, moment.tokens), moment.tokens // 2)
        if r == 0:
            return None
        keys = moment.unit_keys[:, moment.prefix :].float()
        cosines = keys @ keys.transpose(1, 2)
        margin = 0.75 * (1.0 - moment.layer / moment.depth)
        energy = elu(cosines - margin).mean(-1)
        ranked = energy.argsort(dim=1, descending=True, stable=True)  # (B, T) high is redundant
        if 2 * moment.layer >= moment.depth:
            ranked = ranked[:, : 2 * r]
        source, destination = _edges(cosines, ranked, r)
        tokens, prefix = moment.x.shape[1], moment.prefix
        target = targets(source + prefix, destination + prefix, tokens)
        x, size = pool(moment.x, moment.size, target, tokens - r)
        return Step(x, size, target)


def _edges(cosines: Tensor, ranked: Tensor, r: int) -> tuple[Tensor, Tensor]:
    """(B, r) sources, best edge first, and destinations: even ranks to their best odd ranks."""
    even, odd = ranked[:, ::2], ranked[:, 1::2]
    rows = cosines.gather(1, even.unsqueeze(-1).expand(-1, -1, cosines.shape[2]))
    scores = rows.gather(2, odd.unsqueeze(1).expand(-1, even.shape[1], -1))
    best, partner = scores.max(2)
    chosen = best.argsort(dim=1, descending=True, stable=True)[:, :r]
    return even.gather(1, chosen), odd.gather(1, partner.gather(1, chosen))
