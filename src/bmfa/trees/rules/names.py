"""Rules by their command-line names, NAME:VALUE."""

import re
from collections.abc import Callable

from bmfa.trees.rules.base import Rule
from bmfa.trees.rules.fixed import (
    FixedBlocks,
    FixedDepth,
    GlobalMean,
    QuadrantGap,
    RandomQuadrants,
    Variance,
)
from bmfa.trees.rules.optimal import Optimal
from bmfa.trees.rules.threshold import Certified, ExactGap, Gamma, Mass


def _optimal_leaves(text: str, pooled: bool = False) -> Optimal:
    """An integer is a number of leaves, any other number a fraction of the tokens."""
    return Optimal(leaves=int(text) if text.isdigit() else float(text), pooled=pooled)


# Name to a function of the text after the colon.
MAKERS: dict[str, Callable[[str], Rule]] = {
    "gamma": lambda text: Gamma(float(text)),
    "gamma-h2": lambda text: Gamma(float(text), lookahead=2),
    "exact-gap": lambda text: ExactGap(float(text)),
    "certified": lambda text: Certified(float(text)),
    "mass": lambda text: Mass(float(text)),
    "mass-coarse": lambda text: Mass(float(text), coarse=True),
    "optimal": lambda text: Optimal(float(text)),
    "optimal-leaves": _optimal_leaves,
    "optimal-leaves-pooled": lambda text: _optimal_leaves(text, pooled=True),
    "optimal-error": lambda text: Optimal(error=float(text)),
    "optimal-error-pooled": lambda text: Optimal(error=float(text), pooled=True),
    "fixed-depth": lambda text: FixedDepth(int(text)),
    "fixed-blocks": lambda text: FixedBlocks(int(text)),
    "quadrant-gap": lambda text: QuadrantGap(float(text)),
    "variance": lambda text: Variance(float(text)),
}
LOOKAHEAD = re.compile(r"gamma-h(\d+)")
EXAMPLES = "gamma:0.005, gamma-h2:0.005, certified:0.5, mass:0.002, optimal:0.002, fixed-depth:2"


def parse(text: str, seed: int = 0) -> Rule:
    """Return the rule of a command-line name.

    Args:
        text: Name with its value, such as `gamma:0.005`, `gamma-h3:0.005` or `global-mean`.
        seed: Seed of `random-quadrants`.

    Returns:
        The rule; `str(rule)` is a name that parses to the same rule.

    Raises:
        ValueError: If the name is unknown or its value is out of range.

    Example:
        >>> import bmfa
        >>> bmfa.rules.parse("gamma-h2:0.005")
        Gamma(epsilon=0.005, lookahead=2)
    """
    name, colon, value = text.partition(":")
    if not value and (name in MAKERS or name == "random-quadrants" or LOOKAHEAD.fullmatch(name)):
        raise ValueError(f"rule {text!r} has no value; rules read NAME:VALUE, e.g. {EXAMPLES}")
    try:
        if name == "global-mean" and not colon:
            return GlobalMean()
        if name == "random-quadrants":
            return RandomQuadrants(float(value), seed)
        if lookahead := LOOKAHEAD.fullmatch(name):
            return Gamma(float(value), lookahead=int(lookahead[1]))
        if name in MAKERS:
            return MAKERS[name](value)
    except ValueError as error:
        raise ValueError(
            f"rule {text!r}: {error}; rules read NAME:VALUE, e.g. {EXAMPLES}"
        ) from None
    names = ", ".join((*MAKERS, "random-quadrants", "global-mean"))
    raise ValueError(f"rule {text!r} is unknown; pass NAME:VALUE with a name of {names}")


def as_rule(rule: object) -> Rule:
    """Return `rule` as a `Rule`.

    Args:
        rule: A `Rule`, or a name that `parse` reads. `random-quadrants` by name has seed 0.

    Returns:
        The rule itself, or the rule of that name.

    Raises:
        TypeError: If `rule` is neither a `Rule` nor a string.
        ValueError: If the name is unknown or its value is out of range.

    Example:
        >>> import bmfa
        >>> bmfa.rules.as_rule("gamma:0.005")
        Gamma(epsilon=0.005, lookahead=1)
    """
    if isinstance(rule, Rule):
        return rule
    if isinstance(rule, str):
        return parse(rule)
    hint = f"; {rule.__name__} is a class: pass an instance" if isinstance(rule, type) else ""
    raise TypeError(
        f"rule is {rule!r}; pass one of bmfa.rules, e.g. rules.Gamma(0.005), or its name, "
        f"e.g. 'gamma:0.005'{hint}"
    )
