"""Rules that split a block while its score exceeds epsilon."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from bmfa import bounds
from bmfa.checks import check_flag, check_integer
from bmfa.trees.pyramid import Pyramid, ScorePyramid
from bmfa.trees.rules.base import (
    MUST_REFINE,
    SAFE,
    UNDECIDED,
    Context,
    Decision,
    Needs,
    ThresholdRule,
    format_number,
    split_above,
    split_from_root,
)


@dataclass(frozen=True)
class Gamma(ThresholdRule):
    """Split while the refinement score Gamma exceeds epsilon (Algorithm 1).

    Gamma is a lower bound on the exact gap: every split is necessary, but structure that the means
    of the descendants hide is missed.

    Args:
        epsilon: Threshold of Gamma, at least 0, in units of the scores.
        lookahead: Levels below a block whose means Gamma compares, at least 1. Larger values see
            more and take longer.

    Raises:
        TypeError: If an argument is not a number.
        ValueError: If an argument is out of range.

    Example:
        >>> import torch, bmfa
        >>> scores = torch.zeros(64)
        >>> scores[9] = 6.0
        >>> tree = bmfa.screen(scores, (8, 8), bmfa.rules.Gamma(0.005))
        >>> int(tree.leaf_count)
        10
        >>> str(bmfa.rules.Gamma(0.005, lookahead=2))
        'gamma-h2:0.005'
    """

    needs = "means"
    lookahead: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("lookahead", self.lookahead, low=1)

    def __str__(self) -> str:
        suffix = "" if self.lookahead == 1 else f"-h{self.lookahead}"
        return f"gamma{suffix}:{format_number(self.epsilon)}"

    def node_scores(self, pyramid: Pyramid) -> Tensor:
        """(blocks, B) Gamma."""
        return torch.cat([pyramid.gamma(d, self.lookahead) for d in range(pyramid.depth)])

    def screen(self, pyramid: Pyramid, context: Context) -> Decision:
        """Return the splits; a pyramid of keys computes only the blocks that are reached."""
        if self.lookahead > 1:
            return split_from_root(
                context, lambda depth, _: pyramid.gamma(depth, self.lookahead) > self.epsilon
            )
        return split_from_root(
            context, lambda depth, reached: pyramid.gamma_exceeds(depth, self.epsilon, reached)
        )


@dataclass(frozen=True)
class ExactGap(ThresholdRule):
    """Split while the exact gap G exceeds epsilon; epsilon 0 gives dense attention.

    Args:
        epsilon: Threshold of the gap, at least 0, in units of the scores.

    Raises:
        TypeError: If `epsilon` is not a number.
        ValueError: If `epsilon` is negative or not finite.

    Example:
        >>> import torch, bmfa
        >>> scores = torch.arange(16.0)
        >>> tree = bmfa.screen(scores, (4, 4), bmfa.rules.ExactGap(0.0))
        >>> int(tree.leaf_count), float(tree.error(scores))
        (16, 0.0)
    """

    name = "exact-gap"

    def node_scores(self, pyramid: Pyramid) -> Tensor:
        """(blocks, B) G."""
        assert isinstance(pyramid, ScorePyramid)
        return torch.cat(pyramid.gaps())


@dataclass(frozen=True)
class Certified(ThresholdRule):
    """Split while an upper bound U on the gap exceeds epsilon: no leaf has a larger gap.

    U is Bennett's two-point bound from the maximum and the variance of the block. L, the larger of
    Gamma and the lower bound from minimum and variance, tells at the depth limit which leaves
    certainly exceed epsilon. `Tree.leaf_labels` holds the result for each leaf: safe (U <= epsilon),
    must-refine (L > epsilon) or undecided, as indices into `bmfa.rules.LABELS`.

    Args:
        epsilon: Threshold of the gap, at least 0, in units of the scores.

    Raises:
        TypeError: If `epsilon` is not a number.
        ValueError: If `epsilon` is negative or not finite.

    Example:
        >>> import torch, bmfa
        >>> scores = torch.zeros(64)
        >>> scores[9] = 6.0
        >>> tree = bmfa.screen(scores, (8, 8), bmfa.rules.Certified(0.5))
        >>> {bmfa.rules.LABELS[label] for label in tree.leaf_labels.tolist()}
        {'safe'}
    """

    float64_statistics: ClassVar[bool] = True
    name = "certified"

    def node_scores(self, pyramid: Pyramid) -> Tensor:
        """(2 blocks, B) U of every block, then L of every block."""
        blocks = _BlockStatistics.from_pyramid(pyramid)
        return torch.cat((blocks.upper(pyramid.tau), blocks.lower(pyramid.tau)))

    def screen(self, pyramid: Pyramid, context: Context) -> Decision:
        """Return the splits; U and L are computed only where cheaper bounds leave a block open.

        Gamma > epsilon forces a split, because U >= Gamma. A range bound of at most epsilon makes a
        block safe, because U is no larger.
        """
        blocks = _BlockStatistics.from_pyramid(pyramid)
        forced = blocks.gamma > self.epsilon
        safe = bounds.hoeffding(blocks.minimum, blocks.maximum, tau=pyramid.tau) <= self.epsilon
        upper = torch.where(forced, torch.inf, 0.0).to(blocks.mean.dtype)
        lower = blocks.gamma.clone()
        undecided = ~(forced | safe)
        remaining = _BlockStatistics(*(statistic[undecided] for statistic in blocks))
        upper[undecided] = remaining.upper(pyramid.tau)
        lower[undecided] = remaining.lower(pyramid.tau)
        return self.decide(torch.cat((upper, lower)), context)

    def decide(self, scores: Tensor, context: Context) -> Decision:
        upper, lower = scores.chunk(2)
        decision = split_above(upper, self.epsilon, context)
        labels = torch.full_like(upper, UNDECIDED, dtype=torch.int8)
        labels[lower > self.epsilon] = MUST_REFINE
        labels[upper <= self.epsilon] = SAFE
        return Decision(decision.split, decision.limited, labels)


class _BlockStatistics(NamedTuple):
    """Statistics of blocks from which the bounds of `Certified` are computed."""

    mean: Tensor
    variance: Tensor
    minimum: Tensor
    maximum: Tensor
    gamma: Tensor

    @classmethod
    def from_pyramid(cls, pyramid: Pyramid) -> "_BlockStatistics":
        assert isinstance(pyramid, ScorePyramid)
        depths = range(pyramid.depth)
        means, gammas = (list(map(level, depths)) for level in (pyramid.mean, pyramid.gamma))
        extrema = (pyramid.minima(), pyramid.maxima())
        return cls(*map(torch.cat, (means, pyramid.variances(), *extrema, gammas)))

    def upper(self, tau: float) -> Tensor:
        return bounds.bennett(self.maximum, self.mean, self.variance, tau=tau)

    def lower(self, tau: float) -> Tensor:
        bound = bounds.lower(self.minimum, self.mean, self.variance, tau=tau)
        return torch.maximum(self.gamma, bound)


@dataclass(frozen=True)
class Mass(ThresholdRule):
    """Split while the share of Z that the split recovers exceeds epsilon.

    The share is pi_B (exp(Gamma_B / tau) - 1) with pi_B = n_B exp(M_B / tau) / Z.

    Args:
        epsilon: Threshold, a share of the partition function Z, at least 0.
        coarse: If True, Z is the mass of the tree built so far with its next level, which means
            alone give. It is never above the exact Z, so that no fewer blocks are split.

    Raises:
        TypeError: If `epsilon` is not a number or `coarse` not a bool.
        ValueError: If `epsilon` is negative or not finite.

    Example:
        >>> import torch, bmfa
        >>> scores = torch.zeros(64)
        >>> scores[9] = 6.0
        >>> int(bmfa.screen(scores, (8, 8), bmfa.rules.Mass(0.002)).leaf_count)
        10
    """

    coarse: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flag("coarse", self.coarse)

    def __str__(self) -> str:
        return f"mass{'-coarse' if self.coarse else ''}:{format_number(self.epsilon)}"

    @property
    def needs(self) -> Needs:  # type: ignore[override]
        """Tokens for the exact Z, means for the coarse Z."""
        return "means" if self.coarse else "tokens"

    def node_scores(self, pyramid: Pyramid) -> Tensor:
        """(blocks, B) share of Z that each split recovers."""
        if self.coarse:
            raise ValueError(
                f"{self} decides each tree from its own splits, so trees cannot be shared; "
                "use coarse=False or share=None"
            )
        assert isinstance(pyramid, ScorePyramid)
        return torch.cat([pyramid.gain(d) for d in range(pyramid.depth)])

    def screen(self, pyramid: Pyramid, context: Context) -> Decision:
        if not self.coarse:
            return super().screen(pyramid, context)
        # log Z of the leaves so far, to which the splits of each level are added, (1, B)
        log_mass = pyramid.counts.blocks[0].log() + pyramid.mean(0) / pyramid.tau

        def wants_split(depth: int, reached: Tensor) -> Tensor:
            nonlocal log_mass
            counts, largest = pyramid.counts.blocks[depth], pyramid.offsets(depth).largest
            gain = (counts * pyramid.excess(depth)).log() + largest / pyramid.tau
            gain = gain.masked_fill(~reached, -torch.inf)
            refined = torch.cat((log_mass, gain)).logsumexp(0, keepdim=True)
            selected = (gain - refined).exp() > self.epsilon
            gain = gain.masked_fill(~selected, -torch.inf)
            log_mass = torch.cat((log_mass, gain)).logsumexp(0, keepdim=True)
            return selected

        return split_from_root(context, wants_split)
