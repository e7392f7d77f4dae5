"""Rules by their command-line names, NAME:VALUE."""

import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

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

# Name to a function of the number after the colon; without a colon it is called without one.
MAKERS: dict[str, Callable[..., Rule]] = {
    "gamma": Gamma,
    "gamma-h2": partial(Gamma, lookahead=2),
    "exact-gap": ExactGap,
    "certified": Certified,
    "mass": Mass,
    "mass-coarse": partial(Mass, coarse=True),
    "optimal": Optimal,
    # An integer is a number of leaves, any other number a fraction of the tokens.
    "optimal-leaves": lambda leaves: Optimal(leaves=leaves),
    "optimal-leaves-pooled": lambda leaves: Optimal(leaves=leaves, pooled=True),
    "optimal-error": lambda error: Optimal(error=error),
    "optimal-error-pooled": lambda error: Optimal(error=error, pooled=True),
    "fixed-depth": FixedDepth,
    "fixed-blocks": FixedBlocks,
    "quadrant-gap": QuadrantGap,
    "variance": Variance,
}
OWN_RULES: dict[str, Callable[..., Rule]] = {}  # those of `register`
LOOKAHEAD = re.compile(r"gamma-h(\d+)")
EXAMPLES = "gamma:0.005, gamma-h2:0.005, certified:0.5, mass:0.002, optimal:0.002, fixed-depth:2"


def register(name: str, make: Callable[..., Rule]) -> None:
    """Name a rule of your own, so that `NAME:VALUE` works wherever a rule is named.

    A command line registers the class of a file by itself: `--method FILE.py:CLASS:VALUE`.

    Args:
        name: Name without a colon, which no rule of bmfa has. A rule that was registered by this
            name is replaced.
        make: Class of the rule, or a function that returns it. It is called with the number after the
            colon, an `int` if it has no decimal point, and without arguments if there is no colon.

    Raises:
        ValueError: If the name has a colon, or is that of a rule of bmfa.

    Example:
        >>> import bmfa
        >>> bmfa.rules.register("my-gamma", lambda value: bmfa.rules.Gamma(value, lookahead=3))
        >>> bmfa.rules.parse("my-gamma:0.005")
        Gamma(epsilon=0.005, lookahead=3)
    """
    if (
        ":" in name
        or name in ("", "global-mean", "random-quadrants", *MAKERS)
        or LOOKAHEAD.fullmatch(name)
    ):
        raise ValueError(f"name is {name!r}; pass one without a colon that no rule of bmfa has")
    OWN_RULES[name] = make


def parse_number(text: str) -> Any:
    """Return the int or else the float that a text stands for."""
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    raise ValueError(f"{text!r} is not a number")


def parse(text: str, seed: int = 0) -> Rule:
    """Return the rule of a command-line name.

    Args:
        text: Name with its value, such as `gamma:0.005`, `gamma-h3:0.005` or `global-mean`; also that
            of a rule that was registered.
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
    name, _, value = text.partition(":")
    makers = OWN_RULES | MAKERS | {"random-quadrants": partial(RandomQuadrants, seed=seed)}
    if lookahead := LOOKAHEAD.fullmatch(name):
        makers[name] = partial(Gamma, lookahead=int(lookahead[1]))
    if text == "global-mean":
        return GlobalMean()
    if name not in makers:
        names = ", ".join((*makers, "global-mean"))
        raise ValueError(f"rule {text!r} is unknown; pass NAME:VALUE with a name of {names}")
    if not value and name not in OWN_RULES:
        raise ValueError(f"rule {text!r} has no value; rules read NAME:VALUE, e.g. {EXAMPLES}")
    try:
        return as_rule(makers[name](*([parse_number(value)] if value else [])))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"rule {text!r}: {error}; rules read NAME:VALUE, e.g. {EXAMPLES}"
        ) from None


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
