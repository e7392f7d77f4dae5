"""DiffRate: a number of tokens to keep, and of tokens to merge into, for every block."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

from bmfa.grid import Grid
from bmfa.merging.policies.base import BudgetPolicy, LayerState, ReducedTokens

# Published learnt numbers of DeiT-Tiny, class token included: (tokens kept, tokens after merging)
# per block.
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
class DiffRate(BudgetPolicy):
    """Prune the tokens with the least class attention, merge those before them (Chen et al., 2023).

    In block l the first P_l tokens are kept, and of these the tokens after the first M_l merge into
    the most similar of the first M_l. The merged token is the unweighted average of its group, and
    its size grows by the size of each source times its cosine, if positive. The first block never
    acts.

    Args:
        budget: "0.8g" or "0.9g", the numbers learnt for DeiT-Tiny at 224 px; or int, number of
            tokens that every block merges; or float in (0, 1], fraction of the spatial tokens that
            every block keeps; or a schedule, the tokens that each block merges, 0 in the first. With
            numbers and schedules nothing is pruned.

    Raises:
        ValueError: the budget is out of range or its name is unknown.
        TypeError: the budget is not a number, a schedule or a name.

    Example:
        >>> import bmfa
        >>> str(bmfa.merging.DiffRate("0.8g"))
        'diffrate:0.8g'
    """

    name: ClassVar[str] = "diffrate"
    prunes: ClassVar[bool] = True
    min_fraction: ClassVar[float] = 0.0
    budget: int | float | tuple[int, ...] | str  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if not isinstance(self.budget, str):
            super().__post_init__()
        elif self.budget not in DEIT_TINY:
            raise ValueError(f"numbers {self.budget!r} are unknown; pass {' or '.join(DEIT_TINY)}")

    def __str__(self) -> str:
        return f"diffrate:{self.budget}" if isinstance(self.budget, str) else super().__str__()

    def check(self, grid: Grid, prefix: int, depth: int) -> None:
        if not isinstance(self.budget, str):
            super().check(grid, prefix, depth)
            if isinstance(self.budget, tuple) and self.budget[0] > 0:
                raise ValueError(f"{self}: the first block never merges tokens; pass 0 for it")
        elif (prefix + grid.size, depth) != (197, 12):
            raise ValueError(
                f"{self} has numbers for 197 tokens in 12 blocks, and the model has "
                f"{prefix + grid.size} tokens in {depth}; pass a count or a fraction, e.g. diffrate:8"
            )

    def max_removed(self, tokens: int) -> int:
        return tokens - 1

    def reads_mass(self, layer: int, depth: int) -> bool:
        return layer > 0

    def reduce(self, state: LayerState) -> ReducedTokens | None:
        total = state.x.shape[1]
        keep, final = self._counts(state)
        if state.layer == 0 or final == total:
            return None
        order = _order_by_attention(state)
        features = normalize(state.x.float(), dim=-1)
        ranked = features.gather(1, order.unsqueeze(-1).expand_as(features))
        position = torch.arange(total, device=order.device).expand_as(order)
        position = position.masked_fill(position >= keep, -1)
        size = state.size.gather(1, order)
        if keep > final:
            cosines = ranked[:, final:keep] @ ranked[:, state.prefix : final].transpose(1, 2)
            best, partner = cosines.max(2)
            position = position.clone()
            position[:, final:keep] = partner + state.prefix
            size[:, final:keep] *= best.clamp(min=0.0)
        assignment = torch.empty_like(position).scatter(1, order, position).to(torch.int32)
        sizes = torch.empty_like(size).scatter(1, order, size)
        unweighted = torch.ones_like(sizes)
        return replace(state, size=sizes).pooled(assignment, final, unweighted)

    def _counts(self, state: LayerState) -> tuple[int, int]:
        """Return P, the tokens kept, and M, the tokens after merging; both count the prefix."""
        total = state.x.shape[1]
        if isinstance(self.budget, str):
            keep, final = (counts[state.layer] for counts in DEIT_TINY[self.budget])
            return min(keep, total), min(final, total)
        return total, total - self.removed(state)


def _order_by_attention(state: LayerState) -> Tensor:
    """Return (B, T) positions: the prefix, then spatial tokens by class attention, descending."""
    prefix = state.prefix
    spatial = state.attention[:, prefix:].argsort(dim=1, descending=True, stable=True)
    first = torch.arange(prefix, device=spatial.device).expand(len(spatial), -1)
    return torch.cat((first, spatial + prefix), 1)
