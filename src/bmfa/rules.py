"""The public rules, which decide the blocks of a tree that are split; defined in `trees/rules`."""

from bmfa.trees.rules import (
    LABELS,
    Certified,
    ExactGap,
    FixedBlocks,
    FixedDepth,
    Gamma,
    GlobalMean,
    Mass,
    Optimal,
    QuadrantGap,
    RandomQuadrants,
    Rule,
    Variance,
    as_rule,
    parse,
)

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
]
