"""A claim, its verdict, and how two sets of numbers are compared."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from bmfa.report.evidence import command
from bmfa.report.markup import NOTHING, decimal

PRINTED = 0.0006  # three decimals were printed
EQUAL, NEAR = 0.03, 0.25

Pairs = Sequence[tuple[float | None, float | None]]


class Verdict(Enum):
    """How a claim fared; the sign says the same as the word."""

    REPRODUCED = ("✓", "reproduced")
    BEATEN = ("↑", "beaten")
    CLOSE = ("≈", "close")
    NOT_AS_CLAIMED = ("✗", "not as claimed")
    NOT_MEASURED = ("○", "not measured")


@dataclass(frozen=True)
class Claim:
    """A row of the summary; `command` makes what is missing."""

    claim: str
    printed: str
    ours: str
    verdict: Verdict
    note: str = ""
    command: str = ""


def judge(pairs: Pairs, equal: float = EQUAL, near: float = NEAR, least: float = 0.005) -> Verdict:
    """Compare (printed, ours): relative difference, or absolute where it is as small as `least`."""
    worst = 0.0
    for printed, ours in pairs:
        if printed is None or ours is None:
            return Verdict.NOT_MEASURED
        if abs(ours - printed) > least:
            worst = max(worst, abs(ours - printed) / max(abs(printed), 1e-9))
    if worst <= equal:
        return Verdict.REPRODUCED
    return Verdict.CLOSE if worst <= near else Verdict.NOT_AS_CLAIMED


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
