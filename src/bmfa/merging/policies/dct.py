"""DCT: tokens as a signal whose high frequencies are dropped after every block."""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Literal

import torch
from torch import Tensor

from bmfa.grid import Grid
from bmfa.merging.policies.base import FractionPolicy, LayerState, ReducedTokens, kept_count


@dataclass(frozen=True)
class DCT(FractionPolicy):
    """Drop high frequencies along the sequence: every block keeps ceil(fraction T) of T coefficients.

    The spatial tokens are transformed by an orthonormal DCT-II, truncated to M coefficients, and
    transformed back by an inverse of length M times sqrt(M / T), so that a constant signal keeps
    its value.

    Args:
        fraction: fraction of the coefficients that every block keeps, in (0, 1].

    Raises:
        ValueError: the fraction is out of range.
        TypeError: the fraction is not a number.

    Example:
        >>> import bmfa
        >>> str(bmfa.merging.DCT(0.95))
        'dct:0.95'
    """

    name: ClassVar[str] = "dct"
    stage: ClassVar[Literal["attention", "mlp"]] = "mlp"
    transforms: ClassVar[bool] = True

    def reduce(self, state: LayerState) -> ReducedTokens | None:
        before, after = state.tokens, kept_count(self.fraction, state.tokens)
        if before == after:
            return None
        return _transform(state, resampling_matrix(before, after), resampling_matrix(after, before))


@dataclass(frozen=True)
class GridDCT(DCT):
    """Drop high frequencies along both sides of the grid, which keeps neighbours together.

    After block l a side of n tokens has round(n fraction^((l + 1) / 2)) tokens, at least 1: every
    block keeps about the fraction of the tokens.

    Args:
        fraction: fraction of the tokens that every block keeps, in (0, 1].

    Raises:
        ValueError: the fraction is out of range.
        TypeError: the fraction is not a number.

    Example:
        >>> import bmfa
        >>> str(bmfa.merging.GridDCT(0.95))
        'dct2:0.95'
    """

    name: ClassVar[str] = "dct2"

    def reduce(self, state: LayerState) -> ReducedTokens | None:
        before, after = (self._sides(state.grid, state.layer + more) for more in (0, 1))
        if before == after:
            return None
        down, up = (
            torch.kron(resampling_matrix(x[0], y[0]), resampling_matrix(x[1], y[1]))
            for x, y in ((before, after), (after, before))
        )
        return _transform(state, down, up)

    def _sides(self, grid: Grid, blocks: int) -> tuple[int, int]:
        """Return height and width after so many blocks."""
        factor = self.fraction ** (blocks / 2)
        return max(1, round(grid.height * factor)), max(1, round(grid.width * factor))


# A model of 24 blocks needs two matrices per block; at 256 tokens one takes 512 KiB.
@lru_cache(maxsize=128)
def resampling_matrix(length: int, new_length: int) -> Tensor:
    """Return (new_length, length) float64: truncate or zero-pad a signal in frequency."""
    shared = min(length, new_length)
    matrix = dct_basis(new_length)[:shared].T @ dct_basis(length)[:shared]
    return matrix * math.sqrt(new_length / length)


def dct_basis(length: int) -> Tensor:
    """Return the orthonormal DCT-II, (frequency, position) float64."""
    index = torch.arange(length, dtype=torch.float64)
    basis = torch.cos(math.pi / length * (index + 0.5) * index.unsqueeze(1))
    basis *= math.sqrt(2.0 / length)
    basis[0] /= math.sqrt(2.0)
    return basis


def _transform(state: LayerState, down: Tensor, up: Tensor) -> ReducedTokens:
    """Multiply the spatial tokens by `down` (T', T) in float32; each then stands for N / T' tokens."""
    prefix, dtype = state.prefix, state.x.dtype
    compute = torch.promote_types(dtype, torch.float32)
    spatial = down.to(state.x.device, compute) @ state.x[:, prefix:].to(compute)
    x = torch.cat((state.x[:, :prefix], spatial.to(dtype)), 1)
    size = state.size.new_full(x.shape[:2], state.grid.size / len(down))
    size[:, :prefix] = state.size[:, :prefix]
    return ReducedTokens(x, size, unmerge_matrix=up.to(state.x.device, compute))
