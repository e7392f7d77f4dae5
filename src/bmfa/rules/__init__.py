"""How splits are decided: each rule is immutable, checks its parameters, and says its name."""

from bmfa.rules.base import LABELS, Context, Decision, Rule
from bmfa.rules.fixed import (
    FixedBlocks,
    FixedDepth,
    GlobalMean,
    QuadrantGap,
    RandomQuadrants,
    Variance,
)
from bmfa.rules.names import as_rule, parse
from bmfa.rules.optimal import Optimal
from bmfa.rules.threshold import Certified, ExactGap, Gamma, Mass

__all__ = [
    "LABELS",
    "Certified",
    "Context",
    "Decision",
    "ExactGap",
    "FixedBlocks",
    "FixedDepth",
    "Gamma",
    "GlobalMean",
    "Mass",
    "Optimal",
    "QuadrantGap",
    "RandomQuadrants",
    "Rule",
    "Variance",
    "as_rule",
    "parse",
]
