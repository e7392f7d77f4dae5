"""Rules that split while a score of the block exceeds epsilon."""

from dataclasses import dataclass, fields
from typing import ClassVar

import torch
from torch import Tensor

from bmfa import bounds
from bmfa.checks import check_flag, check_integer, check_number
from bmfa.trees.pyramid import Pyramid, ScorePyramid
from bmfa.trees.rules.base import (
    MUST_REFINE,
    SAFE,
    UNDECIDED,
    Context,
    Decision,
    Needs,
    Rule,
    descend,
    descend_by,
    spell,
)


@dataclass(frozen=True)
class Threshold(Rule):
    """Split while the score exceeds epsilon."""

    epsilon: float

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("epsilon", self.epsilon, low=0.0)

    def decide(self, scores: Tensor, context: Context) -> Decision:
        """Splits from the scores of all blocks."""
        return descend_by(scores, self.epsilon, context)


@dataclass(frozen=True)
class Gamma(Threshold):
    """Algorithm 1: split while Gamma > epsilon, Gamma from descendants `lookahead` levels below.

    A lower bound on the exact gap: it never splits in vain, and it may miss what its descendants'
    means hide.
    """

    lookahead: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("lookahead", self.lookahead, low=1)

    @property
    def needs(self) -> Needs:
        """Means: Gamma reads nothing else."""
        return "means"

    def __str__(self) -> str:
        return f"gamma{'' if self.lookahead == 1 else f'-h{self.lookahead}'}:{spell(self.epsilon)}"

    def scores(self, pyramid: Pyramid) -> Tensor:
        """Gamma of every block."""
        return torch.cat([pyramid.gamma(d, self.lookahead) for d in range(pyramid.depth)])

    def screen(self, pyramid: Pyramid, context: Context) -> Decision:
        """Splits level by level, so that a pyramid of keys computes only what is reached."""
        if self.lookahead > 1:
            return descend(context, lambda d, _: pyramid.gamma(d, self.lookahead) > self.epsilon)
        return descend(context, lambda d, some: pyramid.gamma_exceeds(d, self.epsilon, some))


@dataclass(frozen=True)
class ExactGap(Threshold):
    """Split while the exact gap G > epsilon; epsilon 0 gives dense attention."""

    def __str__(self) -> str:
        return f"exact-gap:{spell(self.epsilon)}"

    def scores(self, pyramid: Pyramid) -> Tensor:
        """G of every block."""
        assert isinstance(pyramid, ScorePyramid)
        return torch.cat(pyramid.gaps())


@dataclass(frozen=True)
class Certified(Threshold):
    """Split while the upper bound U > epsilon, so that every leaf's gap is proven at most epsilon.

    U is Bennett's two-point bound from the block's maximum and variance; L, the larger of Gamma and
    the two-point lower bound from minimum and variance, tells at the depth limit which leaves
    certainly break epsilon.
    """

    double: ClassVar[bool] = True

    def __str__(self) -> str:
        return f"certified:{spell(self.epsilon)}"

    def scores(self, pyramid: Pyramid) -> Tensor:
        """U of every block, then L of every block."""
        blocks = _Statistics.of(pyramid)
        return torch.cat((blocks.upper(pyramid.tau), blocks.lower(pyramid.tau)))

    def screen(self, pyramid: Pyramid, context: Context) -> Decision:
        """Splits of the trees of a pyramid, the bounds taken only where a cheaper one leaves doubt.

        Gamma > epsilon forces a split, as U is no smaller; a range bound of at most epsilon makes a
        block safe, as U is no larger.
        """
        blocks = _Statistics.of(pyramid)
        forced = blocks.gamma > self.epsilon
        safe = bounds.hoeffding(blocks.minimum, blocks.maximum, tau=pyramid.tau) <= self.epsilon
        upper = torch.where(forced, torch.inf, 0.0).to(blocks.mean.dtype)
        lower = blocks.gamma.clone()
        open_ = ~(forced | safe)
        some = blocks.where(open_)
        upper[open_] = some.upper(pyramid.tau)
        lower[open_] = some.lower(pyramid.tau)
        return self.decide(torch.cat((upper, lower)), context)

    def decide(self, scores: Tensor, context: Context) -> Decision:
        """Splits by U, every block labelled by U and L."""
        upper, lower = scores.chunk(2)
        decision = descend_by(upper, self.epsilon, context)
        labels = torch.full_like(upper, UNDECIDED, dtype=torch.int8)
        labels[lower > self.epsilon] = MUST_REFINE
        labels[upper <= self.epsilon] = SAFE
        return Decision(decision.split, decision.limited, labels)


@dataclass(frozen=True)
class _Statistics:
    """What the bounds of a certified tree are taken from, for all blocks or some."""

    mean: Tensor
    variance: Tensor
    minimum: Tensor
    maximum: Tensor
    gamma: Tensor

    @classmethod
    def of(cls, pyramid: Pyramid) -> "_Statistics":
        assert isinstance(pyramid, ScorePyramid)
        return cls(
            torch.cat([pyramid.mean(d) for d in range(pyramid.depth)]),
            torch.cat(pyramid.variances()),
            torch.cat(pyramid.minima()),
            torch.cat(pyramid.maxima()),
            torch.cat([pyramid.gamma(d) for d in range(pyramid.depth)]),
        )

    def where(self, some: Tensor) -> "_Statistics":
        return _Statistics(*(getattr(self, field.name)[some] for field in fields(self)))

    def upper(self, tau: float) -> Tensor:
        return bounds.bennett(self.maximum, self.mean, self.variance, tau=tau)

    def lower(self, tau: float) -> Tensor:
        bound = bounds.lower(self.minimum, self.mean, self.variance, tau=tau)
        return torch.maximum(self.gamma, bound)


@dataclass(frozen=True)
class Mass(Threshold):
    """Split while pi_B (exp(Gamma_B / tau) - 1) > epsilon: the share of Z that the split recovers.

    pi_B = n_B exp(M_B / tau) / Z with the exact Z. With `coarse`, Z is the mass of the tree built so
    far with its next level, which means alone give: it is never above Z, so never splits less.
    """

    coarse: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flag("coarse", self.coarse)

    @property
    def needs(self) -> Needs:
        """Tokens for the exact Z, means for the coarse one."""
        return "means" if self.coarse else "tokens"

    def __str__(self) -> str:
        return f"mass{'-coarse' if self.coarse else ''}:{spell(self.epsilon)}"

    def scores(self, pyramid: Pyramid) -> Tensor:
        """The mass each split recovers."""
        if self.coarse:
            raise ValueError(
                f"{self} decides each tree from its own splits, so trees cannot be shared; "
                "use coarse=False or share=None"
            )
        assert isinstance(pyramid, ScorePyramid)
        return torch.cat([pyramid.gain(d) for d in range(pyramid.depth)])

    def screen(self, pyramid: Pyramid, context: Context) -> Decision:
        """Splits of the trees of a pyramid, by the exact or the coarse partition function."""
        if not self.coarse:
            return super().screen(pyramid, context)
        # log Z of the current leaves; a level's asking blocks are judged with all its splits made.
        held = pyramid.counts.blocks[0].log() + pyramid.mean(0) / pyramid.tau  # (1, B)

        def wanted(depth: int, reached: Tensor) -> Tensor:
            nonlocal held
            counts, largest = pyramid.counts.blocks[depth], pyramid.step(depth).largest
            gain = (counts * pyramid.excess(depth)).log() + largest / pyramid.tau
            gain = gain.masked_fill(~reached, -torch.inf)
            ahead = torch.cat((held, gain)).logsumexp(0, keepdim=True)
            asking = (gain - ahead).exp() > self.epsilon
            held = torch.cat((held, gain.masked_fill(~asking, -torch.inf))).logsumexp(
                0, keepdim=True
            )
            return asking

        return descend(context, wanted)
