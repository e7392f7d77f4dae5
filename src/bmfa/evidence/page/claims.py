"""The claims of the paper and the verdicts on them; `claims.toml` has their sentences."""

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bmfa.evidence.page.formats import MISSING
from bmfa.evidence.page.origins import describe_data
from bmfa.evidence.page.record_set import MissingValueError, RecordSet, command_for, need_number
from bmfa.evidence.page.rendering import sentence
from bmfa.records import Record, Row

TOLERANCE = 0.0006  # the paper prints three decimals; half a unit of the last one, and rounding
TEXTS: Mapping[str, Mapping[str, Any]] = tomllib.loads(
    Path(__file__).with_name("claims.toml").read_text("utf-8")
)


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


# The verdict, the numbers of the sentences and, if a claim chooses among the records, those it read.
Measured = tuple[Verdict, Mapping[str, Any]] | tuple[Verdict, Mapping[str, Any], Sequence[Record]]
Measure = Callable[[RecordSet], Measured]
MEASURES: dict[str, Measure] = {}  # by the names in claims.toml; filled by the chapters


def claim(*names: str) -> Callable[[Measure], Measure]:
    """Decorate the function that judges claims on the records of their experiment and settings.

    It raises MissingValueError if these do not hold its numbers.
    """

    def register(measure: Measure) -> Measure:
        MEASURES.update(dict.fromkeys(names, measure))
        return measure

    return register


def judge(name: str, records: RecordSet) -> Claim:
    """Return a claim with its verdict; one without its records shows the command that makes them."""
    text = TEXTS[name]
    experiment, settings = text["experiment"], text.get("settings", {})
    found = RecordSet(records.of(experiment, **settings))
    try:
        verdict, numbers, *chosen = MEASURES[name](found)
    except MissingValueError:
        command = text.get("command") or command_for(experiment, settings)
        return Claim(text["claim"], text["paper"], MISSING, Verdict.NOT_MEASURED, "Run", command)
    ours, note = (sentence(text[part]).render(numbers, records=found) for part in ("ours", "note"))
    data = describe_data(chosen[0] if chosen else found.records)
    return Claim(text["claim"], text["paper"], ours, verdict, note, data=data)


def judge_numbers(row: Row, printed: SimpleNamespace) -> Verdict:
    """Compare a row on the paper's own data with all numbers of a point at the printed precision."""
    pairs = [(value, need_number(row, column)) for column, value in vars(printed).items()]
    equal = all(abs(measured - value) <= TOLERANCE for value, measured in pairs)
    return Verdict.REPRODUCED if equal else Verdict.NOT_AS_CLAIMED


def judge_direction(holds: bool) -> Verdict:
    """Return the verdict on a claim that is tested on other data or in another model."""
    return Verdict.AGREES if holds else Verdict.DIFFERS
