"""PiToMe: tokens with many similar tokens have a high energy and merge first."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.nn.functional import elu

from bmfa.merging.policies.base import BudgetPolicy, LayerState, ReducedTokens

_LARGEST_MARGIN = 0.75  # published by Tran et al., 2024: margin of the first block


@dataclass(frozen=True)
class PiToMe(BudgetPolicy):
    """Matching of tokens ranked by energy (Tran et al., 2024).

    energy_i = mean_j ELU(cos_ij - margin) with margin = 0.75 (1 - layer / depth). In the first half
    of the blocks even ranks match odd ranks and the r best pairs merge. In the second half only the
    first 2 r ranks can merge, and each even rank merges into its best odd rank.

    Args:
        budget: int, number of tokens that every block removes; or float in [0.5, 1], fraction of
            the spatial tokens that every block keeps. A block with too few tokens removes half of
            them.

    Raises:
        ValueError: the budget is out of range.
        TypeError: the budget is not a number.

    Example:
        >>> import bmfa
        >>> str(bmfa.merging.PiToMe(0.95))
        'pitome:0.95'
    """

    name: ClassVar[str] = "pitome"

    def remove(self, state: LayerState, r: int) -> ReducedTokens:
        cosines = state.cosines
        margin = _LARGEST_MARGIN * (1.0 - state.layer / state.depth)
        energy = elu(cosines - margin).mean(-1)
        ranked = energy.argsort(dim=1, descending=True, stable=True)  # (B, n) positions
        if 2 * state.layer >= state.depth:
            ranked = ranked[:, : 2 * r]
        return state.merge_pairs(*_best_pairs(cosines, ranked, r))


def _best_pairs(cosines: Tensor, ranked: Tensor, r: int) -> tuple[Tensor, Tensor]:
    """Return (B, r) positions at even ranks, most similar first, and their partners at odd ranks."""
    even, odd = ranked[:, ::2], ranked[:, 1::2]
    rows = cosines.gather(1, even.unsqueeze(-1).expand(-1, -1, cosines.shape[2]))
    scores = rows.gather(2, odd.unsqueeze(1).expand(-1, even.shape[1], -1))  # (B, even, odd)
    best, partner = scores.max(2)
    chosen = best.argsort(dim=1, descending=True, stable=True)[:, :r]
    return even.gather(1, chosen), odd.gather(1, partner.gather(1, chosen))
