"""Statistics of every block of a layout, level by level: counts, means, gaps, masses, extrema.

A level is an (n, B) tensor, blocks by trees, so that every operation works on long contiguous rows
whatever the size of the grid.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

from bmfa.grid import normal_tensors
from bmfa.trees.layout import Layout

Result = TypeVar("Result")

# Roundings, in units of the machine epsilon, up to which a difference counts as 0. The mean of four
# children takes four products, three additions and one difference.
ROUNDINGS = 8.0
# A threshold of this many roundings of 1 is compared by exp, which errs by one rounding of 1: at most
# 0.1 % of the threshold. Smaller thresholds need expm1, which takes twice the time.
EXP_ROUNDINGS = 1000.0


@dataclass(frozen=True, eq=False)
class Counts:
    """Number of valid tokens of every block, by level. B is 1 if all trees have the same mask."""

    blocks: tuple[Tensor, ...]  # (n, B) valid tokens of each block
    weights: tuple[Tensor, ...]  # (n, k, B) share of each child in its parent, 0 if it is empty
    empty: tuple[Tensor, ...] | None  # (n, k, B) children without valid tokens; None without a mask
    branching: tuple[Tensor, ...]  # (n, B) children with valid tokens
    total: Tensor  # (B,) valid tokens of the grid

    @classmethod
    def from_mask(cls, layout: Layout, dtype: torch.dtype, valid: Tensor | None = None) -> "Counts":
        """Count the tokens of a (N, B) or (N, 1) mask, or all tokens."""
        return _full_counts(layout, dtype) if valid is None else _counts(layout, dtype, valid)


@lru_cache(maxsize=64)
@normal_tensors
def _full_counts(layout: Layout, dtype: torch.dtype) -> Counts:
    everything = torch.ones(layout.grid.size, 1, dtype=torch.bool, device=layout.device)
    counts = _counts(layout, dtype, everything)
    return Counts(counts.blocks, counts.weights, None, counts.branching, counts.total)


def _counts(layout: Layout, dtype: torch.dtype, valid: Tensor) -> Counts:
    ones = valid.to(dtype)
    blocks, weights, empty, branching = [], [], [], []
    below = ones[:0]
    for depth in reversed(range(len(layout.levels) - 1)):
        present = layout.levels[depth].present.unsqueeze(-1)
        children = layout.gather_children(depth, below, ones) * present  # (n, k, B)
        below = children.sum(1)
        blocks.append(below)
        weights.append(children / below.clamp(min=1).unsqueeze(1))
        empty.append(children == 0)
        branching.append((children > 0).sum(1).to(dtype))
    levels = [tuple(reversed(statistic)) for statistic in (blocks, weights, empty, branching)]
    return Counts(levels[0], levels[1], levels[2], levels[3], ones.sum(0))


def repeat_columns(mask: Tensor | None, count: int) -> Tensor | None:
    """(N, count) mask from columns that each hold for as many consecutive ones; (N, 1) stays."""
    if mask is None or mask.shape[1] <= 1:
        return mask
    return mask.repeat_interleave(count // mask.shape[1], dim=1)


@dataclass(frozen=True, eq=False)
class ChildOffsets:
    """Child means relative to the largest: M_C = largest + offset_C and M_B = largest + shift.

    offset_C <= 0 and shift = sum_C w_C offset_C, so that no exponential overflows, and a constant
    block has offsets and shift of exactly 0.
    """

    mean: Tensor  # (n, B)
    largest: Tensor  # (n, B)
    offset: Tensor  # (n, k, B)
    shift: Tensor  # (n, B)


def child_offsets(
    children: Tensor, weights: Tensor, empty: Tensor | None, score_bound: Tensor | None
) -> ChildOffsets:
    """Return the means of parents, and those of their children relative to the largest child.

    Args:
        children: (n, k, B) means of the children.
        weights: (n, k, B) or (n, k, 1) share of each child in its parent.
        empty: (n, k, B) children without valid tokens, or None.
        score_bound: (B,) bound on the scores. A spread within the rounding of such scores counts as
            0. None for children that are single tokens, which are exact.
    """
    if empty is None:
        largest = children.detach().amax(1)
        offset = children - largest.unsqueeze(1)
    else:
        largest = children.detach().masked_fill(empty, -torch.inf).amax(1)
        # A block without valid tokens has weight 0; any finite value serves.
        largest = torch.where(largest == -torch.inf, children.detach().amax(1), largest)
        offset = (children - largest.unsqueeze(1)).masked_fill(empty, 0.0)
    shift = weighted_sum(weights, offset)
    mean = largest + shift
    if score_bound is not None:
        constant = shift.abs() <= score_bound * (ROUNDINGS * machine_epsilon(shift))
        if bool(constant.any()):
            offset = offset.masked_fill(constant.unsqueeze(1), 0.0)
            shift = shift.masked_fill(constant, 0.0)
    return ChildOffsets(mean, largest, offset, shift)


def weighted_expm1(offset: Tensor, weights: Tensor, tau: float) -> Tensor:
    """(n, B) sum_C w_C exp(offset_C / tau) - 1, in (-1, 0]: exactly 0 on a constant block."""
    scaled = offset if tau == 1.0 else offset / tau
    return weighted_sum(weights, scaled.expm1())


def weighted_sum(weights: Tensor, values: Tensor) -> Tensor:
    """(n, B) sum over the children of (n, k, B) values."""
    if weights.shape[-1] == 1 and values.device.type == "cpu":
        return torch.bmm(weights.transpose(1, 2), values).squeeze(1)  # one pass instead of two
    return (weights * values).sum(1)


def zero_below_rounding(value: Tensor, *terms: Tensor) -> Tensor:
    """Return `value`, or 0 where it is within the rounding of the terms it was computed from."""
    rounding = sum(term.abs() for term in terms) * (ROUNDINGS * machine_epsilon(value))
    return torch.where(value > rounding, value, 0.0)


def machine_epsilon(tensor: Tensor) -> float:
    return torch.finfo(tensor.dtype).eps


def computed_once(compute: Callable[..., Result]) -> Callable[..., Result]:
    """Decorator of a method: its result, one for each depth, is stored with the pyramid."""

    @wraps(compute)
    def lookup(self: "Pyramid", *depth: int) -> Result:
        key = (compute.__name__, *depth)
        if key not in self.computed:
            self.computed[key] = compute(self, *depth)
        result: Result = self.computed[key]
        return result

    return lookup


class Pyramid:
    """Means of the blocks at every depth, and the quantities that follow from means alone."""

    def __init__(self, layout: Layout, counts: Counts, tau: float) -> None:
        self.layout = layout
        self.counts = counts
        self.tau = tau
        self.depth = len(layout.levels) - 1
        self.computed: dict[tuple[Any, ...], Any] = {}

    def score_bound(self) -> Tensor:
        """(B,) upper bound on `abs(scores)`, within rounding."""
        raise NotImplementedError

    def offsets(self, depth: int) -> ChildOffsets:
        """Child means relative to the largest child, for the blocks at `depth`."""
        raise NotImplementedError

    def _offsets_from(self, depth: int, children: Tensor) -> ChildOffsets:
        """Offsets of the blocks at `depth` from the (n, k, B) means of their children."""
        empty = None if self.counts.empty is None else self.counts.empty[depth]
        bound = None if depth + 1 == self.depth else self.score_bound()
        return child_offsets(children, self.counts.weights[depth], empty, bound)

    def mean(self, depth: int) -> Tensor:
        """(n, B) M of the blocks at `depth`."""
        return self.offsets(depth).mean

    @computed_once
    def _expm1(self, depth: int) -> Tensor:
        """(n, B) sum_C w_C exp(offset_C / tau) - 1 of the blocks at `depth`."""
        return weighted_expm1(self.offsets(depth).offset, self.counts.weights[depth], self.tau)

    def gamma(self, depth: int, lookahead: int = 1) -> Tensor:
        """(n, B) Gamma from the descendants `lookahead` levels below the blocks at `depth`."""
        if lookahead == 1 or depth + 1 == self.depth:
            shift = self.offsets(depth).shift
            return zero_below_rounding(self._times_tau(self._expm1(depth).log1p()) - shift, shift)
        return self.gap_from_children(depth, self.gamma(depth + 1, lookahead - 1))

    def gamma_exceeds(self, depth: int, epsilon: float, reached: Tensor) -> Tensor:
        """(n, B) bool: one-step Gamma > epsilon. Undefined for blocks that are not reached."""
        offsets = self.offsets(depth)
        rounding = machine_epsilon(offsets.shift)
        if epsilon <= EXP_ROUNDINGS * self.tau * rounding or bool(
            offsets.shift.amin() * ROUNDINGS * rounding < -epsilon
        ):
            return self.gamma(depth) > epsilon
        scaled = offsets.offset if self.tau == 1.0 else offsets.offset / self.tau
        mass = weighted_sum(self.counts.weights[depth], scaled.exp())
        return self._times_tau(mass.log_()) > offsets.shift + epsilon

    def gap_from_children(self, depth: int, child_gaps: Tensor) -> Tensor:
        """(n, B) tau log sum_C w_C exp((M_C + g_C) / tau) - M_B from the gaps g of the level below.

        With exact child gaps this is the exact gap (recursive residual theorem); with upper or lower
        bounds it is a bound. Tokens have gap 0.
        """
        offsets = self.offsets(depth)
        raised = offsets.offset + self.layout.gather_children(depth, child_gaps, None)
        if self.counts.empty is not None:
            # A child without valid tokens must not be the largest; the largest is at least 0.
            raised = raised.masked_fill(self.counts.empty[depth], 0.0)
        top = raised.amax(1)
        log_mass = weighted_expm1(
            raised - top.unsqueeze(1), self.counts.weights[depth], self.tau
        ).log1p()
        gap = top + self._times_tau(log_mass) - offsets.shift
        return zero_below_rounding(gap, top, offsets.shift)

    @computed_once
    def excess(self, depth: int) -> Tensor:
        """(n, B) sum_C w_C exp(M_C / tau) - exp(M_B / tau), over exp(largest / tau): in [0, 1)."""
        mean = (self.offsets(depth).shift / self.tau).expm1()
        return zero_below_rounding(self._expm1(depth) - mean, mean)

    def _times_tau(self, value: Tensor) -> Tensor:
        return value if self.tau == 1.0 else value * self.tau


class ScorePyramid(Pyramid):
    """Pyramid of known scores: (N, B) tokens in raster order, one column for each tree.

    Tokens that are not valid may hold anything. They get the largest valid score of their column, so
    that the blocks they fill stay finite although their weight is 0.
    """

    def __init__(
        self, layout: Layout, counts: Counts, tau: float, tokens: Tensor, valid: Tensor | None
    ) -> None:
        super().__init__(layout, counts, tau)
        if valid is not None:
            largest = tokens.masked_fill(~valid, -torch.inf).amax(0)
            tokens = tokens.where(valid, largest)
        self.tokens = tokens
        self.valid = valid
        self._levels: list[ChildOffsets] = []
        below = tokens[:0]
        for depth in reversed(range(self.depth)):
            children = layout.gather_children(depth, below, tokens)
            self._levels.insert(0, self._offsets_from(depth, children))
            below = self._levels[0].mean

    def offsets(self, depth: int) -> ChildOffsets:
        """Child means relative to the largest child, for the blocks at `depth`."""
        return self._levels[depth]

    @computed_once
    def score_bound(self) -> Tensor:
        """(B,) largest absolute score."""
        tokens = self.tokens.detach()  # amax and amin take a tenth of the time of aminmax
        return torch.maximum(tokens.amax(0), -tokens.amin(0))

    @computed_once
    def log_partition(self) -> Tensor:
        """(B,) log Z of the grid."""
        scaled = self.tokens if self.tau == 1.0 else self.tokens / self.tau
        if self.valid is not None:
            scaled = scaled.masked_fill(~self.valid, -torch.inf)
        return scaled.logsumexp(0)

    @computed_once
    def gain(self, depth: int) -> Tensor:
        """(n, B) share of Z that splitting a block recovers: pi_B (exp(Gamma_B / tau) - 1)."""
        scale = self.offsets(depth).largest / self.tau - self.log_partition()
        return self.counts.blocks[depth] * scale.exp_() * self.excess(depth)

    def root_share(self) -> Tensor:
        """(B,) share of Z that the mean of the grid holds."""
        root = (self.mean(0) / self.tau - self.log_partition()).exp_() * self.counts.blocks[0]
        return root.sum(0)

    def gaps(self) -> list[Tensor]:
        """Exact G of every block, an (n, B) tensor for each level."""
        levels: list[Tensor] = []
        for depth in reversed(range(self.depth)):
            levels.append(
                self.gap_from_children(depth, levels[-1]) if levels else self.gamma(depth)
            )
        return levels[::-1]

    def variances(self) -> list[Tensor]:
        """Population variance of every block, an (n, B) tensor for each level."""
        levels: list[Tensor] = []
        for depth in reversed(range(self.depth)):
            offsets, weights = self.offsets(depth), self.counts.weights[depth]
            spread = (offsets.offset - offsets.shift.unsqueeze(1)).square()
            if levels:
                spread = spread + self.layout.gather_children(depth, levels[-1], None)
            # A child without valid tokens may overflow, and inf * 0 is NaN.
            levels.append(weighted_sum(weights, spread.masked_fill(weights == 0, 0.0)))
        return levels[::-1]

    def maxima(self) -> list[Tensor]:
        """Largest score of every block, an (n, B) tensor for each level."""
        return self._maxima(self.tokens, 1.0)

    def minima(self) -> list[Tensor]:
        """Smallest score of every block, an (n, B) tensor for each level."""
        return [-level for level in self._maxima(-self.tokens, -1.0)]

    def _maxima(self, tokens: Tensor, sign: float) -> list[Tensor]:
        """Largest valid token of every block; `sign` times the mean for a block without any."""
        levels: list[Tensor] = []
        for depth in reversed(range(self.depth)):
            blocks = levels[-1] if levels else tokens[:0]
            children = self.layout.gather_children(depth, blocks, tokens)
            if self.counts.empty is not None:
                children = children.masked_fill(self.counts.empty[depth], -torch.inf)
            levels.append(children.amax(1))
        levels.reverse()
        if self.counts.empty is not None:
            for depth, level in enumerate(levels):
                levels[depth] = torch.where(level == -torch.inf, sign * self.mean(depth), level)
        return levels


def pool(layout: Layout, counts: Counts, tokens: Tensor) -> list[Tensor]:
    """Mean of every block over (N, C) rows of keys or values, an (n, C) tensor for each level."""
    levels: list[Tensor] = []
    for depth in reversed(range(len(layout.levels) - 1)):
        children = layout.gather_children(depth, levels[-1] if levels else tokens[:0], tokens)
        empty = None if counts.empty is None else counts.empty[depth]
        levels.append(child_offsets(children, counts.weights[depth], empty, None).mean)
    return levels[::-1]
