"""A claim, its verdict, and how two sets of numbers are compared."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from bmfa.evidence.page.markup import NOTHING, decimal
from bmfa.evidence.page.records import command

PRINTED = 0.0006  # three decimals were printed

Pairs = Sequence[tuple[float | None, float | None]]


class Verdict(Enum):
    """How a claim fared; the sign says the same as the word.

    The first three are said of the paper's own data and model alone, the next four of any other.
    """

    REPRODUCED = ("✓", "reproduced")
    NOT_AS_CLAIMED = ("✗", "not as claimed")
    BEATEN = ("↑", "beaten")
    AGREES = ("∥", "agrees in direction")
    DIFFERS = ("≠", "differs here")
    AHEAD = ("↗", "ahead here")
    LEVEL = ("≈", "too close to tell")
    NOT_COMPARABLE = ("–", "not comparable")
    NOT_MEASURED = ("○", "not measured")


LEGEND = (
    "Reproduced, beaten and not as claimed are said only where data and model are the paper's own: the "
    "synthetic sweep with the minority in the corner, and DeiT-Tiny on all of ImageNet's validation "
    "pictures. On other data, on a part of the paper's, or with scores built by our fit to its probes, "
    "a claim agrees in direction or differs here, and a method of this library may be ahead here."
)


@dataclass(frozen=True)
class Claim:
    """A row of the summary; `command` makes what is missing."""

    claim: str
    printed: str
    ours: str
    verdict: Verdict
    note: str = ""
    command: str = ""


def judge(pairs: Pairs) -> Verdict:
    """Compare (printed, ours) numbers of the paper's own data, at the printed precision."""
    for printed, ours in pairs:
        if printed is None or ours is None:
            return Verdict.NOT_MEASURED
        if abs(ours - printed) > PRINTED:
            return Verdict.NOT_AS_CLAIMED
    return Verdict.REPRODUCED


def direction(held: bool) -> Verdict:
    """Whether the direction of a claim is found on other data or in another model."""
    return Verdict.AGREES if held else Verdict.DIFFERS


def show(*values: float | None) -> str:
    """Values with three decimals, as the paper prints them."""
    return ", ".join(decimal(value, 3) for value in values)


def percent(value: float | None) -> str:
    """A leaf ratio with three decimals."""
    return NOTHING if value is None else f"{decimal(value, 3)} %"


def missing(claim: str, printed: str, experiment: str, **settings: str) -> Claim:
    """A claim without the record that could judge it."""
    words = command(experiment, settings)
    return Claim(claim, printed, NOTHING, Verdict.NOT_MEASURED, "Get it with", words)
