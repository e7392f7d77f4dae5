"""CrossGET: matching among all tokens at once (the vision branch)."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from bmfa.merging.policies.base import BudgetPolicy, LayerState, ReducedTokens, without_diagonal


@dataclass(frozen=True)
class CrossGET(BudgetPolicy):
    """Complete-graph soft matching (Shi et al., 2024).

    Tokens are ranked by their largest cosine. The r tokens with the largest cosine to a token of a
    later rank are sources, and each merges into the most similar token that is not a source. The
    order of the tokens is kept.

    Args:
        budget: int, number of tokens that every block removes; or float in (0, 1], fraction of the
            spatial tokens that every block keeps. A block keeps at least one spatial token.

    Raises:
        ValueError: the budget is out of range.
        TypeError: the budget is not a number.

    Example:
        >>> import bmfa
        >>> str(bmfa.merging.CrossGET(0.95))
        'crossget:0.95'
    """

    name: ClassVar[str] = "crossget"
    min_fraction: ClassVar[float] = 0.0

    def max_removed(self, tokens: int) -> int:
        return tokens - 1

    def remove(self, state: LayerState, r: int) -> ReducedTokens:
        cosines = without_diagonal(state.cosines)
        best = cosines.amax(2)
        rank = best.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
        later = rank.unsqueeze(1) > rank.unsqueeze(2)  # (B, i, j): True if j ranks after i
        remaining = cosines.masked_fill(~later, -torch.inf).amax(2)
        source = remaining.argsort(dim=1, descending=True, stable=True)[:, :r]
        is_source = torch.zeros_like(best, dtype=torch.bool).scatter(1, source, True)
        rows = cosines.gather(1, source.unsqueeze(-1).expand(-1, -1, cosines.shape[2]))
        destination = rows.masked_fill(is_source.unsqueeze(1), -torch.inf).argmax(2)
        return state.merge_pairs(source, destination)
