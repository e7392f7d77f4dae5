"""DiffRate: per-block numbers of tokens to keep and of tokens to merge into."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

from bmfa.grid import Grid
from bmfa.merging.kernels.eager import pool
from bmfa.merging.policies.base import Moment, Policy, Step, check_budget, removed

# The learnt numbers of DeiT-Tiny, class token included: (tokens kept, tokens after merging).
DEIT_TINY = {
    "0.8g": (
        (197, 197, 196, 186, 166, 147, 117, 103, 92, 80, 74, 3),
        (197, 196, 190, 172, 154, 125, 107, 96, 84, 78, 70, 3),
    ),
    "0.9g": (
        (197, 197, 196, 190, 182, 166, 141, 125, 113, 105, 99, 3),
        (197, 196, 194, 188, 172, 147, 129, 115, 107, 103, 96, 3),
    ),
}


@dataclass(frozen=True)
class DiffRate(Policy):
    """Tokens sorted by class attention: the last are pruned, those before them merge.

    The first P_l tokens are kept, and of them each behind the first M_l merges into the most similar
    of those: an unweighted mean of the group, whose size grows by source size times cosine. The
    first block never acts. The budget names learnt numbers ("0.8g", "0.9g": DeiT-Tiny at 224 px), or
    is one as ToMe's: then nothing is pruned and M_l = T - r.
    """

    prunes: ClassVar[bool] = True
    budget: int | float | str

    def __post_init__(self) -> None:
        if not isinstance(self.budget, str):
            check_budget(self.budget)
        elif self.budget not in DEIT_TINY:
            raise ValueError(f"numbers {self.budget!r} are unknown; pass {' or '.join(DEIT_TINY)}")

    def __str__(self) -> str:
        budget = self.budget if isinstance(self.budget, str) else repr(self.budget)
        return f"diffrate:{budget}"

    def check(self, grid: Grid, prefix: int, depth: int) -> None:
        """Learnt numbers fit one model; otherwise one token at least must stay."""
        if isinstance(self.budget, str):
            if (prefix + grid.size, depth) != (197, 12):
                raise ValueError(
                    f"{self} holds numbers for 197 tokens in 12 blocks, not for {prefix + grid.size} "
                    f"in {depth}; pass a whole number or a share, e.g. diffrate:8"
                )
        elif removed(self.budget, grid.size) >= grid.size > 1:
            raise ValueError(
                f"{self} removes {removed(self.budget, grid.size)} tokens a block, but a "
                f"{grid.height}x{grid.width} grid has {grid.size}; pass at most {grid.size - 1}"
            )

    def reads_mass(self, layer: int, depth: int) -> bool:
        """In all blocks but the first."""
        return layer > 0

    def step(self, moment: Moment) -> Step | None:
        """Prune and merge."""
        total = moment.x.shape[1]
        keep, final = self._numbers(moment)
        if moment.layer == 0 or final == total:
            return None
        order = _order(moment)  # (B, T), prefix first
        features = normalize(moment.x.float(), dim=-1)
        ranked = features.gather(1, order.unsqueeze(-1).expand_as(features))
        place = torch.arange(total, device=order.device).expand_as(order)
        place = place.masked_fill(place >= keep, -1)
        size = moment.size.gather(1, order)
        if keep > final:
            cosines = ranked[:, final:keep] @ ranked[:, moment.prefix : final].transpose(1, 2)
            best, partner = cosines.max(2)
            place = place.clone()
            place[:, final:keep] = partner + moment.prefix
            # A token that points away from all others adds nothing to the size of its nearest.
            size[:, final:keep] *= best.clamp(min=0.0)
        target = torch.empty_like(place).scatter(1, order, place).to(torch.int32)
        sizes = torch.empty_like(size).scatter(1, order, size)
        x, size = pool(moment.x, sizes, target, final, torch.ones_like(sizes))
        return Step(x, size, target)

    def _numbers(self, moment: Moment) -> tuple[int, int]:
        """Tokens kept, and tokens after merging; the prefix counts."""
        total = moment.x.shape[1]
        if isinstance(self.budget, str):
            keep, final = (numbers[moment.layer] for numbers in DEIT_TINY[self.budget])
            return min(keep, total), min(final, total)
        r = min(removed(self.budget, moment.tokens), moment.tokens - 1)
        return total, total - r


def _order(moment: Moment) -> Tensor:
    """(B, T) positions, the prefix first, then by class attention, descending."""
    prefix = moment.prefix
    spatial = moment.attention[:, 0, prefix:].argsort(dim=1, descending=True, stable=True)
    first = torch.arange(prefix, device=spatial.device).expand(len(spatial), -1)
    return torch.cat((first, spatial + prefix), 1)
