"""EViT: keep the tokens with the most class attention, and fuse the rest into one."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from bmfa.merging.policies.base import FractionPolicy, LayerState, ReducedTokens, kept_count


@dataclass(frozen=True)
class EViT(FractionPolicy):
    """Keep attentive tokens and fuse the rest, in three of the blocks (Liang et al., 2022).

    It acts after a quarter, a half and three quarters of the blocks. The tokens with the largest
    class attention stay in their order; the others become one token at the end, their average
    weighted by that attention. Attention ignores sizes: the fused token summarises what matters
    least, and with its size it would outweigh all others.

    Args:
        fraction: fraction of the spatial tokens that stay in each of the three blocks, in (0, 1].

    Raises:
        ValueError: the fraction is out of range.
        TypeError: the fraction is not a number.

    Example:
        >>> import bmfa
        >>> [layer for layer in range(12) if bmfa.merging.EViT(0.7).reads_mass(layer, 12)]
        [3, 6, 9]
    """

    name: ClassVar[str] = "evit"
    proportional: ClassVar[bool] = False

    def reads_mass(self, layer: int, depth: int) -> bool:
        return layer in {depth // 4, depth // 2, 3 * depth // 4} - {0}

    def reduce(self, state: LayerState) -> ReducedTokens | None:
        kept = kept_count(self.fraction, state.tokens)
        if not self.reads_mass(state.layer, state.depth) or kept >= state.tokens - 1:
            return None
        prefix, attention = state.prefix, state.attention  # attention is (B, T)
        order = attention[:, prefix:].argsort(dim=1, descending=True, stable=True) + prefix
        fused = torch.zeros_like(attention, dtype=torch.bool).scatter(1, order[:, kept:], True)
        position = (~fused).cumsum(1, dtype=torch.int32) - 1
        assignment = position.masked_fill(fused, prefix + kept)
        return state.pooled(assignment, prefix + kept + 1, torch.where(fused, attention, 1.0))
