"""Random pooling: merge random pairs, the baseline that reads nothing."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from bmfa.checks import check_integer
from bmfa.merging.policies.base import BudgetPolicy, LayerState, ReducedTokens

_LAYER_STRIDE = 1009  # a prime above every depth: different seeds never share the draws of a layer


@dataclass(frozen=True)
class RandomPool(BudgetPolicy):
    """Every block merges r disjoint random pairs, the same for all images.

    Args:
        budget: int, number of tokens that every block removes; or float in [0.5, 1], fraction of
            the spatial tokens that every block keeps. A block with too few tokens removes half of
            them.
        seed: seed of the pairs, at least 0.

    Raises:
        ValueError: the budget or the seed is out of range.
        TypeError: the budget or the seed is not a number.

    Example:
        >>> import bmfa
        >>> str(bmfa.merging.RandomPool(8, seed=1))
        'random-pool:8'
    """

    name: ClassVar[str] = "random-pool"
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("seed", self.seed, low=0)

    def remove(self, state: LayerState, r: int) -> ReducedTokens:
        # Drawn on the CPU, so that every device draws the same pairs.
        generator = torch.Generator().manual_seed(_LAYER_STRIDE * self.seed + state.layer)
        drawn = torch.randperm(state.tokens, generator=generator).to(state.x.device)
        drawn = drawn.expand(len(state.x), -1)
        return state.merge_pairs(drawn[:, :r], drawn[:, r : 2 * r])
