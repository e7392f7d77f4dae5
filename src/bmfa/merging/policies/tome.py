"""ToMe: every block merges the r pairs of tokens with the most similar keys."""

from dataclasses import dataclass
from typing import ClassVar

from bmfa.merging.policies.base import BudgetPolicy, LayerState, ReducedTokens


@dataclass(frozen=True)
class ToMe(BudgetPolicy):
    """Bipartite matching by the cosine of the mean keys; averages weighted by size (Bolya et al., 2023).

    Args:
        budget: int, number of tokens that every block removes; or float in [0.5, 1], fraction of
            the spatial tokens that every block keeps. A block with too few tokens removes half of
            them.

    Raises:
        ValueError: the budget is out of range.
        TypeError: the budget is not a number.

    Example:
        >>> import bmfa
        >>> str(bmfa.merging.ToMe(8))
        'tome:8'
    """

    name: ClassVar[str] = "tome"

    def remove(self, state: LayerState, r: int) -> ReducedTokens:
        # The squared distance of unit keys is 2 - 2 cosine: the nearest are the most similar.
        return state.merge_cheapest(r, keys=state.k)
