"""What a policy is: in every block it reads the tokens and may return fewer of them."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from bmfa.checks import check_integer, check_number
from bmfa.grid import Grid
from bmfa.merging.dispatch import merge, tome_features

# Shares are decimal fractions: what a product with one misses of a whole number is rounding.
_ROUNDING = 1e-9


@dataclass(frozen=True, eq=False)
class Moment:
    """The tokens of one block, between attention and perceptron or behind both."""

    layer: int
    depth: int
    grid: Grid
    prefix: int
    x: Tensor  # (B, T, C), prefix tokens first
    size: Tensor  # (B, T) float32
    k: Tensor  # (B, heads, T, d) of this block's attention
    mass: Tensor | None = None  # (B, parts, rows, T), see kernels.eager.merging.attend
    backend: str = "auto"

    @property
    def tokens(self) -> int:
        """The tokens that may be reduced: all but the prefix."""
        return self.x.shape[1] - self.prefix

    @property
    def unit_keys(self) -> Tensor:
        """(B, T, d) unit mean over heads of the keys: their products are cosines."""
        return tome_features(self.k, self.backend)

    @property
    def cosines(self) -> Tensor:
        """(B, T - prefix, T - prefix) cosines of the mean-head keys, -inf on the diagonal."""
        keys = self.unit_keys[:, self.prefix :].float()
        return (keys @ keys.transpose(1, 2)).diagonal_scatter(
            keys.new_full(keys.shape[:2], -torch.inf), dim1=1, dim2=2
        )

    @property
    def attention(self) -> Tensor:
        """(B, rows, T) the mass, mean over heads: of the prefix queries, then of the others."""
        return self.parts.sum(1) / self.k.shape[1]

    @property
    def parts(self) -> Tensor:
        """The mass as attention left it; merging adds the parts itself."""
        if self.mass is None:
            raise RuntimeError("the attention mass was not computed; let reads_mass ask for it")
        return self.mass

    def merge(self, features: Tensor | None, weight: Tensor | None, r: int, pair: str) -> "Step":
        """Bipartite merging of r tokens, on the backend of this pass.

        Features and weight as in kernels.eager.merging.merge.
        """
        x, size, target = merge(
            self.x,
            self.size,
            features,
            weight,
            r,
            prefix=self.prefix,
            pair=pair,
            backend=self.backend,
        )
        return Step(x, size, target)


@dataclass(frozen=True, eq=False)
class Step:
    """The tokens after a policy acted, and how to find the old ones in them."""

    x: Tensor  # (B, T', C)
    size: Tensor  # (B, T') float32
    target: Tensor | None = None  # (B, T) new position of every old token, -1 where it was pruned
    spread: Tensor | None = None  # (T - prefix, T' - prefix) matrix from new tokens to old ones


@dataclass(frozen=True)
class Policy:
    """How tokens are reduced; immutable, its parameters checked when made."""

    stage: ClassVar[Literal["attention", "mlp"]] = "attention"  # behind which of them it acts
    proportional: ClassVar[bool] = True  # whether attention adds log(size)
    prunes: ClassVar[bool] = False  # whether tokens may leave without being merged into another
    reads_others: ClassVar[bool] = False  # whether the mass of queries behind the prefix counts

    def check(self, grid: Grid, prefix: int, depth: int) -> None:
        """Raise where the parameters fit no block of a model on this grid."""

    def reads_mass(self, layer: int, depth: int) -> bool:
        """Whether this block's attention mass is asked for."""
        return False

    def step(self, moment: Moment) -> Step | None:
        """Fewer tokens, or None where this block keeps all."""
        raise NotImplementedError


def check_budget(budget: object, *, least: float = 0.0) -> None:
    """A whole number of tokens to remove from each block, or the share that each block keeps."""
    if isinstance(budget, int) and not isinstance(budget, bool):
        check_integer("tokens removed from a block", budget, low=0)
    else:
        check_number("share kept by a block", budget, low=least, high=1.0, open_low=least == 0.0)


def removed(budget: int | float, tokens: int) -> int:
    """The tokens that leave a block of some tokens, the prefix not counted."""
    if isinstance(budget, int):
        return budget
    return math.floor(tokens - budget * tokens + _ROUNDING)


def kept(share: float, tokens: int) -> int:
    """The smallest whole number that is at least a share of the tokens."""
    return math.ceil(share * tokens - _ROUNDING)


def check_pairs(policy: object, budget: int | float, grid: Grid) -> None:
    """Raise where even the first block has too few tokens for the budget to find partners."""
    if removed(budget, grid.size) > grid.size // 2:
        raise ValueError(
            f"{policy} removes {removed(budget, grid.size)} tokens a block, but a "
            f"{grid.height}x{grid.width} grid has {grid.size // 2} pairs; pass at most that many"
        )
