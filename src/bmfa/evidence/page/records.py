"""The rows of all records at hand, found by experiment and key."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from bmfa.records import Record, Row

UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff\ufffe\uffff]")

# What names a row: of two rows with the same name, the later one counts.
KEYS: Mapping[str, tuple[str, ...]] = {
    "synthetic": ("placement", "method"),
    "failure-curve": ("cells", "method", "delta"),
    "gallery": ("placement", "method", "title"),
    "probe": ("dataset", "mode", "method", "group"),
    "ablation": ("parameter", "value"),
    "cases": ("dataset", "title", "picture", "method"),
    "picture": ("model", "title", "layer", "head", "query", "method"),
}

COMMANDS: Mapping[str, str] = {
    "synthetic": "bmfa synthetic --json synthetic.json",
    "failure-curve": "bmfa synthetic --curve --json curve.json",
    "gallery": "bmfa report",
    "ablation": "bmfa ablation --json ablation.json",
    "cases": "bmfa report",
    "bench": "bmfa bench trees --json bench.json",
    "picture": "bmfa screen embedded:3 --json picture.json",
}
MODELS = ("closed-loop", "evaluate")


class Evidence:
    """What a page or a figure knows: records, and nothing else."""

    def __init__(self, records: Record | Sequence[Record]) -> None:
        self.records = (records,) if isinstance(records, Record) else tuple(records)

    def has(self, experiment: str) -> bool:
        """Whether any row of the experiment is at hand."""
        return any(record.rows for record in self.records if record.experiment == experiment)

    def rows(self, experiment: str) -> list[Row]:
        """All rows of an experiment, in order, a repeated one replaced by its later version."""
        keys = KEYS.get(experiment)
        found = [row for r in self.records if r.experiment == experiment for row in r.rows]
        if keys is None:
            return found
        return list({tuple(str(row.get(key)) for key in keys): row for row in found}.values())

    def require(self, experiment: str) -> list[Row]:
        """The rows of an experiment, or an error that says how to get them."""
        rows = self.rows(experiment)
        if not rows:
            known = ", ".join(record.experiment for record in self.records) or "none"
            raise ValueError(
                f"no {experiment} rows among the records ({known}); "
                f"make them with: {self.commands(experiment)[0]}"
            )
        return rows

    def select(self, experiment: str, **keys: Any) -> list[Row]:
        """The rows of an experiment with these values."""
        return [
            row
            for row in self.rows(experiment)
            if all(row.get(key) == value for key, value in keys.items())
        ]

    def value(self, experiment: str, column: str, **keys: Any) -> float | None:
        """One number of one row; None where it is not at hand."""
        rows = self.select(experiment, **keys)
        return number(rows[-1], column) if rows else None

    def setting(self, experiment: str, name: str, default: Any = None) -> Any:
        """A setting of the last record of an experiment."""
        found = [r.settings for r in self.records if r.experiment == experiment]
        return found[-1].get(name, default) if found else default

    def commands(self, experiment: str) -> list[str]:
        """The commands that make the rows: as recorded, or that of the experiment alone."""
        made = [record for record in self.records if record.experiment == experiment]
        # Figures of the probes show image-edge where there is a choice.
        chosen = [one for one in made if one.settings.get("mode") == "image-edge"] or made
        own = [_recorded_command(one) or command(experiment, one.settings) for one in chosen]
        return list(dict.fromkeys(own)) or [command(experiment, {})]


def _recorded_command(record: Record) -> str | None:
    """The command that made a record; None for `bmfa report`, which makes all of them."""
    words = record.environment.get("command")
    return None if words is None or str(words).startswith("bmfa report") else str(words)


def command(experiment: str, settings: Mapping[str, Any]) -> str:
    """The command that makes a record with these settings."""
    if experiment in MODELS:
        return _model_command(experiment, settings)
    if experiment != "probe":
        return COMMANDS.get(experiment, f"bmfa {experiment} --json {experiment}.json")
    dataset, mode = settings.get("dataset", "coco"), settings.get("mode", "image-edge")
    files = "" if dataset == "embedded" else " --annotations FILE --images DIR"
    return f"bmfa probe --dataset {dataset} --mode {mode}{files} --json probe.json"


def _model_command(experiment: str, settings: Mapping[str, Any]) -> str:
    model = str(settings.get("model", "embedded"))
    files = "" if model == "embedded" else f" --model {model} --weights FILE --data-dir DIR"
    layers = settings.get("layers")
    choices = [str(one) for one in layers] if isinstance(layers, list | tuple) else []
    if len(choices) > 4:
        return "bmfa report"  # one command for each layer alone would be a page
    chosen = "".join(f" --layers {choice}" for choice in choices if choices != ["last-4"])
    method = f" --method {settings['method']}" if "method" in settings else ""
    return f"bmfa {experiment}{files}{chosen}{method} --json {experiment}.json"


def number(row: Row, column: str) -> float | None:
    """A finite number of a row, else None."""
    value = row.get(column)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def text(row: Row, column: str) -> str:
    """A value of a row as text that XML can hold; empty where it is missing."""
    value = row.get(column)
    return "" if value is None else UNPRINTABLE.sub("\ufffd", str(value))


def in_order(rows: Sequence[Row], column: str) -> list[str]:
    """The different texts of a column, in the order in which they first appear."""
    return list(dict.fromkeys(text(row, column) for row in rows))
