"""DCT: tokens as a signal, whose high frequencies are dropped after every block."""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Literal

import torch
from torch import Tensor

from bmfa.checks import check_number
from bmfa.grid import Grid
from bmfa.merging.policies.base import Moment, Policy, Step, kept


@dataclass(frozen=True)
class DCT(Policy):
    """Along the sequence: of T tokens the first ceil(T share) coefficients remain.

    An orthonormal DCT-II, cut, and its inverse of the new length times sqrt(M / T), so that a
    constant signal keeps its value.
    """

    stage: ClassVar[Literal["attention", "mlp"]] = "mlp"
    share: float

    def __post_init__(self) -> None:
        check_number("share kept", self.share, low=0.0, high=1.0, open_low=True)

    def __str__(self) -> str:
        return f"dct:{self.share!r}"

    def step(self, moment: Moment) -> Step | None:
        """Cut."""
        left = kept(self.share, moment.tokens)
        if left == moment.tokens:
            return None
        return _transformed(
            moment, shortening(moment.tokens, left), shortening(left, moment.tokens)
        )


@dataclass(frozen=True)
class GridDCT(Policy):
    """On the grid, rows and columns alike, which keeps neighbours together.

    Behind block l a side of n tokens has round(n share^((l + 1) / 2)) left, at least 1: about the
    share of the tokens in every block.
    """

    stage: ClassVar[Literal["attention", "mlp"]] = "mlp"
    share: float

    def __post_init__(self) -> None:
        check_number("share kept", self.share, low=0.0, high=1.0, open_low=True)

    def __str__(self) -> str:
        return f"dct2:{self.share!r}"

    def step(self, moment: Moment) -> Step | None:
        """Cut."""
        before, after = (self._sides(moment.grid, moment.layer + more) for more in (0, 1))
        if before == after:
            return None
        down, up = (
            torch.kron(shortening(x[0], y[0]), shortening(x[1], y[1]))
            for x, y in ((before, after), (after, before))
        )
        return _transformed(moment, down, up)

    def _sides(self, grid: Grid, blocks: int) -> tuple[int, int]:
        """Height and width behind so many blocks."""
        factor = self.share ** (blocks / 2)
        return max(1, round(grid.height * factor)), max(1, round(grid.width * factor))


@lru_cache(maxsize=512)
def shortening(tokens: int, left: int) -> Tensor:
    """(left, tokens) matrix from a signal to one of another length, cut or padded in frequency."""
    shared = min(tokens, left)
    matrix = cosine_basis(left)[:shared].T @ cosine_basis(tokens)[:shared]
    return matrix * math.sqrt(left / tokens)


def cosine_basis(tokens: int) -> Tensor:
    """(frequency, place) float64 orthonormal DCT-II."""
    place = torch.arange(tokens, dtype=torch.float64)
    basis = torch.cos(math.pi / tokens * (place + 0.5) * place.unsqueeze(1))
    basis *= math.sqrt(2.0 / tokens)
    basis[0] /= math.sqrt(2.0)
    return basis


def _transformed(moment: Moment, down: Tensor, up: Tensor) -> Step:
    """The spatial tokens times a matrix in float32; each then stands for T / M times as many."""
    prefix, dtype = moment.prefix, moment.x.dtype
    wide = torch.promote_types(dtype, torch.float32)
    spatial = down.to(moment.x.device, wide) @ moment.x[:, prefix:].to(wide)
    x = torch.cat((moment.x[:, :prefix], spatial.to(dtype)), 1)
    size = moment.size.new_full(x.shape[:2], moment.grid.size / len(down))
    size[:, :prefix] = moment.size[:, :prefix]
    return Step(x, size, spread=up.to(moment.x.device, wide))
