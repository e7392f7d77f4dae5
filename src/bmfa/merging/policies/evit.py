"""EViT: keep the tokens that the class attends to, and fuse the rest into one."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from bmfa.checks import check_number
from bmfa.merging.kernels.eager import pool
from bmfa.merging.policies.base import Moment, Policy, Step, kept


@dataclass(frozen=True)
class EViT(Policy):
    """After a quarter, a half and three quarters of the blocks (3, 6 and 9 of 12).

    The share of the tokens with the largest class attention stays, in its order; the others become
    one token at the end, their mean weighted by that attention. Attention does not count sizes: the
    fused token is a summary of what matters least, and would outweigh all others.
    """

    proportional: ClassVar[bool] = False
    share: float

    def __post_init__(self) -> None:
        check_number("share kept", self.share, low=0.0, high=1.0, open_low=True)

    def __str__(self) -> str:
        return f"evit:{self.share!r}"

    def reads_mass(self, layer: int, depth: int) -> bool:
        """In the three blocks that act."""
        return layer in {depth // 4, depth // 2, 3 * depth // 4} - {0}

    def step(self, moment: Moment) -> Step | None:
        """Keep and fuse."""
        stay = kept(self.share, moment.tokens)
        if not self.reads_mass(moment.layer, moment.depth) or stay >= moment.tokens - 1:
            return None
        prefix = moment.prefix
        attention = moment.attention[:, 0]  # (B, T)
        order = attention[:, prefix:].argsort(dim=1, descending=True, stable=True) + prefix
        leaves = torch.zeros_like(attention, dtype=torch.bool).scatter(1, order[:, stay:], True)
        place = (~leaves).cumsum(1, dtype=torch.int32) - 1
        target = place.masked_fill(leaves, prefix + stay)
        weight = torch.where(leaves, attention, 1.0)
        x, size = pool(moment.x, moment.size, target, prefix + stay + 1, weight)
        return Step(x, size, target)
