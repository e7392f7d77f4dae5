"""Rules decide which blocks of a tree are split."""

from bmfa.trees.rules.base import LABELS, Rule
from bmfa.trees.rules.fixed import (
    FixedBlocks,
    FixedDepth,
    GlobalMean,
    QuadrantGap,
    RandomQuadrants,
    Variance,
)
from bmfa.trees.rules.names import as_rule, parse, register
from bmfa.trees.rules.optimal import Optimal
from bmfa.trees.rules.threshold import Certified, ExactGap, Gamma, Mass

__all__ = [
    "LABELS",
    "Certified",
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
    "register",
]
