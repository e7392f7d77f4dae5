"""Statistics of every block of a layout, level by level: counts, means, gaps, masses, extrema.

Batches lie in columns: a level is an (n, B) tensor, blocks by trees, so that each step works on
long contiguous rows whatever the grid.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from bmfa.grid import normal_tensors
from bmfa.trees.layout import Layout

# A difference counts as 0 up to this many roundings of the terms it was computed from.
ROUNDINGS = 8.0
# A threshold this many roundings of 1 above 0 is told apart from it by a plain exponential.
COARSE = 1000.0


@dataclass(frozen=True, eq=False)
class Counts:
    """Valid tokens of every block: the true weights. B is 1 where one mask serves all trees."""

    blocks: tuple[Tensor, ...]  # (n, B) valid tokens of each block
    weights: tuple[Tensor, ...]  # (n, k, B) share of each child in its parent, 0 where it is empty
    empty: tuple[Tensor, ...] | None  # (n, k, B) children without valid tokens; None without a mask
    branching: tuple[Tensor, ...]  # (n, B) children with valid tokens
    total: Tensor  # (B,) valid tokens of the grid

    @classmethod
    def of(cls, layout: Layout, dtype: torch.dtype, valid: Tensor | None = None) -> "Counts":
        """Counts under a mask of shape (N, B) or (N, 1), or of all tokens."""
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
        level = layout.levels[depth]
        children = layout.gather_children(depth, below, ones) * level.present.unsqueeze(
            -1
        )  # (n, k, B)
        below = children.sum(1)
        blocks.append(below)
        weights.append(children / below.clamp(min=1).unsqueeze(1))
        empty.append(children == 0)
        branching.append((children > 0).sum(1).to(dtype))
    return Counts(
        tuple(reversed(blocks)),
        tuple(reversed(weights)),
        tuple(reversed(empty)),
        tuple(reversed(branching)),
        ones.sum(0),
    )


@dataclass(frozen=True, eq=False)
class Step:
    """Child means relative to the largest: M_C = largest + offset_C and M_B = largest + shift.

    offset_C <= 0 and shift = sum_C w_C offset_C, so no exponential overflows, and a constant block
    has offsets and shift of exactly 0.
    """

    mean: Tensor  # (n, B)
    largest: Tensor  # (n, B)
    offset: Tensor  # (n, k, B)
    shift: Tensor  # (n, B)


def child_step(
    children: Tensor, weights: Tensor, empty: Tensor | None, magnitude: Tensor | None
) -> Step:
    """The step from child means (n, k, B) to their parents.

    A spread within the rounding of scores of that (B,) magnitude is no spread: those offsets count
    as 0. Tokens are exact, and come without one.
    """
    if empty is None:
        largest = children.detach().amax(1)
        offset = children - largest.unsqueeze(1)
    else:
        largest = children.detach().masked_fill(empty, -torch.inf).amax(1)
        # A block without valid tokens takes what its children hold: any finite value will do.
        largest = torch.where(largest == -torch.inf, children.detach().amax(1), largest)
        offset = (children - largest.unsqueeze(1)).masked_fill(empty, 0.0)
    shift = weighted_sum(weights, offset)
    mean = largest + shift
    if magnitude is not None:
        flat = shift.abs() <= magnitude * (ROUNDINGS * machine_epsilon(shift))
        if bool(flat.any()):
            offset = offset.masked_fill(flat.unsqueeze(1), 0.0)
            shift = shift.masked_fill(flat, 0.0)
    return Step(mean, largest, offset, shift)


def child_lift(offset: Tensor, weights: Tensor, tau: float) -> Tensor:
    """(n, B) sum_C w_C exp(offset_C / tau) - 1, in (-1, 0]: exactly 0 on a constant block."""
    scaled = offset if tau == 1.0 else offset / tau
    return weighted_sum(weights, scaled.expm1())


def weighted_sum(weights: Tensor, values: Tensor) -> Tensor:
    """(n, B) sum over the children of (n, k, B) values."""
    if weights.shape[-1] == 1 and values.device.type == "cpu":
        return torch.bmm(weights.transpose(1, 2), values).squeeze(1)  # one pass instead of two
    return (weights * values).sum(1)


def settle(value: Tensor, *terms: Tensor) -> Tensor:
    """`value`, or 0 where it is no larger than the rounding of the terms it is computed from."""
    floor = sum(term.abs() for term in terms) * (ROUNDINGS * machine_epsilon(value))
    return torch.where(value > floor, value, 0.0)


def machine_epsilon(tensor: Tensor) -> float:
    """The relative spacing of the tensor's dtype."""
    return torch.finfo(tensor.dtype).eps


class Pyramid:
    """Means of the blocks at every depth, and what follows from means alone."""

    def __init__(self, layout: Layout, counts: Counts, tau: float) -> None:
        self.layout = layout
        self.counts = counts
        self.tau = tau
        self.depth = len(layout.levels) - 1
        self._steps: dict[int, Step] = {}
        self._lifts: dict[int, Tensor] = {}
        self._excesses: dict[int, Tensor] = {}

    def children(self, depth: int) -> Tensor:
        """(n, k, B) means of the children of the blocks at `depth`."""
        raise NotImplementedError

    def magnitude(self) -> Tensor:
        """(B,) a bound on the size of the scores, or so."""
        raise NotImplementedError

    def step(self, depth: int) -> Step:
        """The step from the children to the blocks at `depth`."""
        if depth not in self._steps:
            empty = None if self.counts.empty is None else self.counts.empty[depth]
            weights = self.counts.weights[depth]
            magnitude = None if depth + 1 == self.depth else self.magnitude()
            self._steps[depth] = child_step(self.children(depth), weights, empty, magnitude)
        return self._steps[depth]

    def mean(self, depth: int) -> Tensor:
        """(n, B) M of the blocks at `depth`."""
        return self.step(depth).mean

    def lift(self, depth: int) -> Tensor:
        """(n, B) sum_C w_C exp(offset_C / tau) - 1 of the blocks at `depth`."""
        if depth not in self._lifts:
            weights = self.counts.weights[depth]
            self._lifts[depth] = child_lift(self.step(depth).offset, weights, self.tau)
        return self._lifts[depth]

    def gamma(self, depth: int, lookahead: int = 1) -> Tensor:
        """(n, B) Gamma from the descendants `lookahead` levels below the blocks at `depth`."""
        if lookahead == 1 or depth + 1 == self.depth:
            shift = self.step(depth).shift
            return settle(self._scaled(self.lift(depth).log1p()) - shift, shift)
        return self.residual(depth, self.gamma(depth + 1, lookahead - 1))

    def gamma_exceeds(self, depth: int, epsilon: float, reached: Tensor) -> Tensor:
        """(n, B) whether one-step Gamma > epsilon, for the blocks reached; for others, anything.

        Far above the resolution of the dtype a plain exponential serves: it errs by a rounding of 1,
        which expm1, twice its price, is there to avoid for small spreads.
        """
        step, weights = self.step(depth), self.counts.weights[depth]
        coarse = epsilon > COARSE * self.tau * machine_epsilon(step.shift)
        if not coarse or bool(
            step.shift.amin() * ROUNDINGS * machine_epsilon(step.shift) < -epsilon
        ):
            return self.gamma(depth) > epsilon
        scaled = step.offset if self.tau == 1.0 else step.offset / self.tau
        return self._scaled(weighted_sum(weights, scaled.exp()).log_()) > step.shift + epsilon

    def residual(self, depth: int, below: Tensor) -> Tensor:
        """(n, B) tau log sum_C w_C exp((M_C + g_C) / tau) - M_B for gaps g of the blocks below.

        The recursive residual theorem: with exact child gaps this is the exact gap, with upper or
        lower bounds on them a bound; tokens have gap 0.
        """
        step = self.step(depth)
        raised = step.offset + self.layout.gather_children(depth, below, None)
        if self.counts.empty is not None:
            # A child without valid tokens must not be the largest; the largest is at least 0.
            raised = raised.masked_fill(self.counts.empty[depth], 0.0)
        top = raised.amax(1)
        lift = child_lift(raised - top.unsqueeze(1), self.counts.weights[depth], self.tau)
        return settle(top + self._scaled(lift.log1p()) - step.shift, top, step.shift)

    def _scaled(self, value: Tensor) -> Tensor:
        return value if self.tau == 1.0 else value * self.tau

    def excess(self, depth: int) -> Tensor:
        """(n, B) sum_C w_C exp(M_C / tau) - exp(M_B / tau), over exp(largest / tau): in [0, 1)."""
        if depth not in self._excesses:
            flat = (self.step(depth).shift / self.tau).expm1()
            self._excesses[depth] = settle(self.lift(depth) - flat, flat)
        return self._excesses[depth]


class ScorePyramid(Pyramid):
    """A pyramid over known scores: (N, B) tokens in raster order, one tree for each column.

    Tokens that are not valid may hold anything; they get the largest valid score of their column,
    so that the blocks they fill stay in range although no weight is on them.
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
        self._log_partition: Tensor | None = None
        self._magnitude: Tensor | None = None
        self._gains: dict[int, Tensor] = {}

    def children(self, depth: int) -> Tensor:
        """(n, k, B) means of the children, from the level below."""
        blocks = self.tokens[:0] if depth + 1 == self.depth else self.mean(depth + 1)
        return self.layout.gather_children(depth, blocks, self.tokens)

    def magnitude(self) -> Tensor:
        """(B,) the largest score by size."""
        if self._magnitude is None:
            tokens = self.tokens.detach()  # two passes of amax cost a tenth of one of aminmax
            self._magnitude = torch.maximum(tokens.amax(0), -tokens.amin(0))
        return self._magnitude

    def gaps(self) -> list[Tensor]:
        """The exact G of every block, an (n, B) tensor for each level."""
        levels: list[Tensor] = []
        for depth in reversed(range(self.depth)):
            levels.append(self.residual(depth, levels[-1]) if levels else self.gamma(depth))
        return levels[::-1]

    def log_partition(self) -> Tensor:
        """(B,) log Z of the whole grid."""
        if self._log_partition is None:
            scaled = self.tokens if self.tau == 1.0 else self.tokens / self.tau
            if self.valid is not None:
                scaled = scaled.masked_fill(~self.valid, -torch.inf)
            self._log_partition = scaled.logsumexp(0)
        return self._log_partition

    def gain(self, depth: int) -> Tensor:
        """(n, B) share of Z that splitting a block recovers: pi_B (exp(Gamma_B / tau) - 1)."""
        if depth not in self._gains:
            scale = self.step(depth).largest / self.tau - self.log_partition()
            self._gains[depth] = self.counts.blocks[depth] * scale.exp_() * self.excess(depth)
        return self._gains[depth]

    def root_share(self) -> Tensor:
        """(B,) share of Z that the grid's mean holds."""
        root = (self.mean(0) / self.tau - self.log_partition()).exp_() * self.counts.blocks[0]
        return root.sum(0)

    def variances(self) -> list[Tensor]:
        """The population variance of every block, an (n, B) tensor for each level."""
        levels: list[Tensor] = []
        for depth in reversed(range(self.depth)):
            step, weights = self.step(depth), self.counts.weights[depth]
            spread = (step.offset - step.shift.unsqueeze(1)).square()
            if levels:
                spread = spread + self.layout.gather_children(depth, levels[-1], None)
            # An overflow of a child without tokens must not meet its weight of 0.
            levels.append(weighted_sum(weights, spread.masked_fill(weights == 0, 0.0)))
        return levels[::-1]

    def maxima(self) -> list[Tensor]:
        """The largest score of every block, an (n, B) tensor for each level."""
        levels: list[Tensor] = []
        for depth in reversed(range(self.depth)):
            blocks = levels[-1] if levels else self.tokens[:0]
            children = self.layout.gather_children(depth, blocks, self.tokens)
            if self.counts.empty is not None:
                children = children.masked_fill(self.counts.empty[depth], -torch.inf)
            levels.append(children.amax(1))
        levels.reverse()
        if self.counts.empty is not None:
            means = [self.mean(depth) for depth in range(self.depth)]
            levels = [m.where(v == -torch.inf, v) for v, m in zip(levels, means, strict=True)]
        return levels

    def minima(self) -> list[Tensor]:
        """The smallest score of every block, an (n, B) tensor for each level."""
        mirrored = ScorePyramid(self.layout, self.counts, self.tau, -self.tokens, self.valid)
        return [-level for level in mirrored.maxima()]


def pool(layout: Layout, counts: Counts, tokens: Tensor) -> list[Tensor]:
    """The mean of every block over (N, C) rows of keys or values, an (n, C) tensor a level."""
    levels: list[Tensor] = []
    for depth in reversed(range(len(layout.levels) - 1)):
        children = layout.gather_children(depth, levels[-1] if levels else tokens[:0], tokens)
        empty = None if counts.empty is None else counts.empty[depth]
        levels.append(child_step(children, counts.weights[depth], empty, None).mean)
    return levels[::-1]
