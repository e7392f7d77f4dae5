"""ToFu: ToMe's matching; early blocks prune tokens, later blocks merge them and keep their norms."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from bmfa.merging.operation import assign_bipartite, match_bipartite
from bmfa.merging.policies.base import BudgetPolicy, LayerState, ReducedTokens


@dataclass(frozen=True)
class ToFu(BudgetPolicy):
    """Pruning in the first half of the blocks, MLERP merging in the second (Kim et al., 2024).

    MLERP keeps the direction of the average and gives it the largest norm of the tokens in the
    group.

    Args:
        budget: int, number of tokens that every block removes; or float in [0.5, 1], fraction of
            the spatial tokens that every block keeps. A block with too few tokens removes half of
            them.

    Raises:
        ValueError: the budget is out of range.
        TypeError: the budget is not a number.

    Example:
        >>> import bmfa
        >>> str(bmfa.merging.ToFu(0.95))
        'tofu:0.95'
    """

    name: ClassVar[str] = "tofu"
    prunes: ClassVar[bool] = True

    def remove(self, state: LayerState, r: int) -> ReducedTokens:
        tokens, prefix = state.x.shape[1], state.prefix
        source, destination = match_bipartite(state.unit_keys, None, r, prefix=prefix)
        assignment = assign_bipartite(source, destination, tokens, prefix)
        if 2 * state.layer < state.depth:
            return state.pooled(assignment.scatter(1, source, -1), tokens - r)
        merged = state.pooled(assignment, tokens - r)
        x = _with_largest_norms(state.x, merged.x, assignment)
        return ReducedTokens(x, merged.size, assignment)


def _with_largest_norms(x: Tensor, means: Tensor, assignment: Tensor) -> Tensor:
    """Scale the means (B, T', C) to the largest norm among the tokens x (B, T, C) of each."""
    norms = torch.linalg.vector_norm(x.float(), dim=-1)
    largest = norms.new_zeros(means.shape[:2]).scatter_reduce(1, assignment.long(), norms, "amax")
    values = means.float()
    length = torch.linalg.vector_norm(values, dim=-1)
    factor = largest / length.where(length > 0, 1.0)
    scaled: Tensor = values * factor.unsqueeze(-1)
    return scaled.to(x.dtype)
