"""All records that a page or a figure is made from, searched by experiment and key."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

from bmfa.records import Record, Row

Candidate = TypeVar("Candidate")

# Control characters, which XML cannot hold, and lone surrogates, which UTF-8 cannot hold.
UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff\ufffe\uffff]")

# Commands of the experiments that are not `bmfa EXPERIMENT --json EXPERIMENT.json`.
COMMANDS: Mapping[str, str] = {
    **dict.fromkeys(("gallery", "blocks", "failures", "faster", "comparison"), "bmfa report"),
    "failure-curve": "bmfa synthetic --curve --json curve.json",
    "cases": "bmfa probe --cases --json cases.json",
    "bench": "bmfa bench trees --json bench.json",
    "reduction": "bmfa bench reduction --json reduction.json",
    "image": "bmfa screen embedded:3 --json image.json",
}
# Three methods after `--method`, and those after them.
MANY_METHODS = re.compile(r"(--method(?: [^-\s]\S*){3})(?: [^-\s]\S*)+")


class MissingValueError(LookupError):
    """No record holds a number that a sentence or a claim needs."""


class ByMethod(dict[str, Row]):
    """Rows by method, an empty row for a method that was not measured."""

    def __missing__(self, method: str) -> Row:
        """Return an empty row."""
        return {}


class RecordSet:
    """Records of any number of experiments.

    A record replaces an earlier one of the same experiment, settings and machine.

    Args:
        records: one record, or several in the order in which they were made.

    Example:
        >>> from bmfa.records import Record
        >>> rows = [{"method": "gamma:0.005", "placement": "corner", "mean_gap": 0.261}]
        >>> records = RecordSet(Record("synthetic", {}, rows))
        >>> records.value("synthetic", "mean_gap", placement="corner")
        0.261
    """

    def __init__(self, records: "Record | Sequence[Record] | RecordSet") -> None:
        listed = records.records if isinstance(records, RecordSet) else records
        latest = {
            (r.experiment, repr(r.settings), repr(r.environment.get("device_name"))): r
            for r in ((listed,) if isinstance(listed, Record) else listed)
        }
        self.records: tuple[Record, ...] = tuple(latest.values())

    def of(self, experiment: str, **settings: Any) -> list[Record]:
        """Return the records of an experiment that have these settings."""
        found = [record for record in self.records if record.experiment == experiment]
        return [r for r in found if all(r.settings.get(k) == v for k, v in settings.items())]

    def has(self, experiment: str) -> bool:
        """Return True if any record of the experiment has rows."""
        return any(record.rows for record in self.of(experiment))

    def rows(self, experiment: str, **values: Any) -> list[Row]:
        """Return the rows of an experiment that have these values."""
        rows = [row for record in self.of(experiment) for row in record.rows]
        return [row for row in rows if all(row.get(key) == values[key] for key in values)]

    def by_method(self, experiment: str, **values: Any) -> dict[str, Row]:
        """Return the rows of an experiment that have these values, by method; empty for others."""
        rows = self.rows(experiment, **values)
        return ByMethod({get_text(row, "method"): row for row in rows})

    def row(self, experiment: str, **values: Any) -> Row:
        """Return the last row that has these values, or raise MissingValueError."""
        return require_any(self.rows(experiment, **values))[-1]

    def value(self, experiment: str, column: str, **values: Any) -> float:
        """Return a number of the last row that has these values, or raise MissingValueError."""
        return need_number(self.row(experiment, **values), column)

    def setting(self, experiment: str, name: str, default: Any = None) -> Any:
        """Return a setting of the last record of an experiment."""
        records = self.of(experiment)
        return records[-1].settings.get(name, default) if records else default

    def commands(self, *experiments: str) -> list[str]:
        """Return the commands that make the rows of these experiments, each command once."""
        commands = []
        for experiment in experiments:
            records = self.of(experiment)
            # Figures of the probes show the image-edge mode if both modes were measured.
            shown = [r for r in records if r.settings.get("mode") == "image-edge"] or records
            commands += [_command_of(record) for record in shown] or [command_for(experiment)]
        return list(dict.fromkeys(commands))


def _command_of(record: Record) -> str:
    """The command that made a record; of `bmfa report`, which makes all, that of the experiment.

    Of many methods only the first are shown; the environment at the end of the page has all of them.
    """
    command = str(record.environment.get("command", "bmfa report"))
    if command.startswith("bmfa report"):
        return command_for(record.experiment, record.settings)
    return MANY_METHODS.sub(r"\1 ...", command)


def command_for(experiment: str, settings: Mapping[str, Any] = MappingProxyType({})) -> str:
    """Return the command that makes a record of an experiment with these settings."""
    if experiment in COMMANDS:
        return COMMANDS[experiment]
    options = ""
    if experiment == "probe":
        dataset, mode = settings.get("dataset", "coco"), settings.get("mode", "image-edge")
        files = "" if dataset == "embedded" else " --annotations FILE --images DIR"
        options = f" --dataset {dataset} --mode {mode}{files}"
    elif settings.get("model", "embedded") != "embedded":
        options = f" --model {settings['model']} --weights FILE --data-dir DIR"
    layers = settings.get("layers")
    if isinstance(layers, list | tuple) and len(layers) > 1:
        options += "".join(f" --layers {choice}" for choice in layers)
    return f"bmfa {experiment}{options} --json {experiment}.json"


def get_number(row: Row, column: str) -> float | None:
    """Return a finite number of a row, or None."""
    value = row.get(column)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def need_number(row: Row, column: str) -> float:
    """Return a finite number of a row; raise MissingValueError without one."""
    value = get_number(row, column)
    if value is None:
        raise MissingValueError(column)
    return value


def require_any(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Return candidates as a list; raise MissingValueError if there are none."""
    found = list(candidates)
    if not found:
        raise MissingValueError
    return found


def get_text(row: Row, column: str) -> str:
    """Return a value of a row as text that XML can hold, "" if it is missing."""
    value = row.get(column)
    return "" if value is None else UNPRINTABLE.sub("\ufffd", str(value))


def unique(rows: Sequence[Row], column: str) -> list[str]:
    """Return the distinct texts of a column in order of first appearance."""
    return list(dict.fromkeys(get_text(row, column) for row in rows))


def get_points(rows: Sequence[Row], x: str, y: str) -> list[tuple[float, float]]:
    """Return the (x, y) pairs of the rows that have both numbers, sorted by x."""
    pairs = [(get_number(row, x), get_number(row, y)) for row in rows]
    return sorted((a, b) for a, b in pairs if a is not None and b is not None)
