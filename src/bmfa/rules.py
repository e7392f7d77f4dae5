"""How splits are decided: each rule is immutable, checks its parameters when made, and scores nodes."""

from dataclasses import dataclass

from bmfa.checks import check_integer, check_number


class Rule:
    """Base of all rules."""


@dataclass(frozen=True)
class Gamma(Rule):
    epsilon: float
    lookahead: int = 1

    def __post_init__(self) -> None:
        check_number("epsilon", self.epsilon, low=0.0)
        check_integer("lookahead", self.lookahead, low=1)


@dataclass(frozen=True)
class ExactGap(Rule):
    epsilon: float


@dataclass(frozen=True)
class Certified(Rule):
    epsilon: float


@dataclass(frozen=True)
class Mass(Rule):
    epsilon: float
    coarse: bool = False


@dataclass(frozen=True)
class Optimal(Rule):
    penalty: float | None = None
    leaves: float | int | None = None
    error: float | None = None
    pooled: bool = False


@dataclass(frozen=True)
class FixedDepth(Rule):
    depth: int


@dataclass(frozen=True)
class FixedBlocks(Rule):
    side: int


@dataclass(frozen=True)
class QuadrantGap(Rule):
    epsilon: float


@dataclass(frozen=True)
class RandomQuadrants(Rule):
    p: float
    seed: int = 0


@dataclass(frozen=True)
class Variance(Rule):
    epsilon: float


@dataclass(frozen=True)
class GlobalMean(Rule):
    pass
