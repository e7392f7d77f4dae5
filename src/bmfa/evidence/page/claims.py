"""The claims of the paper and the verdicts on them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from bmfa.evidence.page.formats import MISSING
from bmfa.evidence.page.origins import describe_data
from bmfa.evidence.page.record_set import MissingValueError, RecordSet, command_for
from bmfa.records import Record

TOLERANCE = 0.0006  # the paper prints three decimals; half a unit of the last one, and rounding


class Verdict(Enum):
    """The result for one claim, as a symbol and a word.

    The first three are used only if data and model are the paper's own, the next four otherwise.
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

    @property
    def css_class(self) -> str:
        """The class of the badge in page.css."""
        return self.value[1].replace(" ", "-")


@dataclass(frozen=True)
class Claim:
    """One row of the summary table.

    Attributes:
        claim: what the paper claims.
        printed: the numbers that the paper prints.
        ours: the numbers measured here.
        verdict: how the two compare.
        note: what is different from the paper's experiment.
        command: the command that measures a missing number.
        data: the origin of the numbers measured here, and their number of images or instances.
    """

    claim: str
    printed: str
    ours: str
    verdict: Verdict
    note: str = ""
    command: str = ""
    data: str = ""


ClaimTest = Callable[[RecordSet], Claim]
# Our numbers, the verdict, a note and, if the claim chooses among the records, those that it read.
Measured = tuple[str, Verdict, str] | tuple[str, Verdict, str, Sequence[Record]]


def claim(
    text: str, printed: str, experiment: str, *, command: str = "", **settings: Any
) -> Callable[[Callable[[RecordSet], Measured]], ClaimTest]:
    """Decorate a function that tests a claim of the paper on records.

    Args:
        text: what the paper claims.
        printed: the numbers that the paper prints.
        experiment: the experiment whose records the numbers are from.
        command: the command that makes the records; by default that of the experiment.
        settings: settings of the records.

    Returns:
        A decorator of a function of the records. If it raises MissingValueError, the claim is not
        measured and shows the command.
    """

    def decorate(measure: Callable[[RecordSet], Measured]) -> ClaimTest:
        def test(records: RecordSet) -> Claim:
            try:
                ours, verdict, note, *chosen = measure(records)
            except MissingValueError:
                makes = command or command_for(experiment, settings)
                return Claim(text, printed, MISSING, Verdict.NOT_MEASURED, "Run", makes)
            read = chosen[0] if chosen else records.of(experiment, **settings)
            return Claim(text, printed, ours, verdict, note, data=describe_data(read))

        return test

    return decorate


def judge_numbers(*pairs: tuple[float | None, float]) -> Verdict:
    """Compare (printed, measured) numbers on the paper's own data at the printed precision."""
    equal = [p is not None and abs(measured - p) <= TOLERANCE for p, measured in pairs]
    return Verdict.REPRODUCED if all(equal) else Verdict.NOT_AS_CLAIMED


def judge_direction(holds: bool) -> Verdict:
    """Return the verdict on a claim that is tested on other data or in another model."""
    return Verdict.AGREES if holds else Verdict.DIFFERS
