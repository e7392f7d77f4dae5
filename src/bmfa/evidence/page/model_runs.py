"""The records of models, as the chapters on models read them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath

from bmfa.evidence.methods import FULL, family, is_kind
from bmfa.evidence.page import paper
from bmfa.evidence.page.origins import EMBEDDED, RECORDED, caption, origin
from bmfa.evidence.page.record_set import (
    ByMethod,
    MissingValueError,
    RecordSet,
    get_number,
    get_text,
    unique,
)
from bmfa.records import Record, Row

MAIN_LAYERS = "last-4"


@dataclass(frozen=True)
class ModelRun:
    """The results of one model.

    Attributes:
        record: the record that holds them.
        rows: one row for each method.
    """

    record: Record
    rows: Sequence[Row]

    @property
    def model(self) -> str:
        """The name that loads the model."""
        return str(self.record.settings.get("model", EMBEDDED))

    @property
    def title(self) -> str:
        """The title of the model; of a path its last part."""
        if self.model == EMBEDDED:
            return "Embedded model"
        return PurePath(self.model).name if self.model.startswith("/") else paper.title(self.model)

    @property
    def is_papers_model(self) -> bool:
        """True if this is the model of the paper."""
        return self.title == paper.MODEL

    @property
    def main_layers(self) -> str:
        """The last four layers if they were screened, else the first choice of layers."""
        choices = _layers(self.record)
        return MAIN_LAYERS if MAIN_LAYERS in choices else choices[0]

    @property
    def is_by_layer(self) -> bool:
        """True if each choice of layers is one layer."""
        return all(choice.isdecimal() for choice in unique(self.rows, "layers"))

    @property
    def images(self) -> int:
        """The largest number of images of any row."""
        return int(max((get_number(row, "images") or 0 for row in self.rows), default=0))

    @property
    def heading(self) -> str:
        """The title and the number of images."""
        return f"{self.title}, {self.images:,} images"

    @property
    def panel_title(self) -> str:
        """The heading over a panel of a figure."""
        recorded = ", recorded" if origin(self.record) == RECORDED else ""
        return f"{self.title}{recorded}, {self.images:,} images"

    @property
    def caption(self) -> str:
        """The title of a table: model, origin of the numbers, and number of images."""
        return caption(self.title, self.record)

    @property
    def full(self) -> Row:
        """The row of the unmodified model, or an empty row."""
        return next(filter(_is_full, self.record.rows), {})

    @property
    def every_row(self) -> list[Row]:
        """The row of the unmodified model, if there is one, then those of the methods."""
        return [*([self.full] if self.full else []), *self.rows]

    @property
    def by_method(self) -> Mapping[str, Row]:
        """The rows by method; empty for others."""
        return ByMethod({get_text(row, "method"): row for row in self.rows})

    @property
    def families(self) -> Mapping[str, list[Row]]:
        """The rows of every method at all its parameters."""
        return by_family(self.rows)


def by_family(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Return rows by their methods without parameters."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(family(get_text(row, "method")), []).append(row)
    return found


def of_family(rows: Iterable[Row], name: str) -> Row:
    """Return the first row of a method, whatever its parameter, or an empty row."""
    return next(iter(by_family(rows).get(name, [])), {})


def is_reduction(row: Row) -> bool:
    """Return True if the method merges or drops tokens instead of screening attention."""
    return is_kind(get_text(row, "method"), "reduction")


def model_runs(
    records: Iterable[Record], condition: Callable[[Row], bool] = lambda row: True
) -> list[ModelRun]:
    """Return the methods in each record that meet a condition, the embedded model first."""
    runs = [
        ModelRun(record, [row for row in record.rows if not _is_full(row) and condition(row)])
        for record in records
    ]
    return sorted((run for run in runs if run.rows), key=lambda run: run.model != EMBEDDED)


def closed_loop_runs(records: RecordSet) -> list[ModelRun]:
    """Return every model with its last four layers screened, or with its first choice of layers."""
    found = records.of("closed-loop")
    return [
        replace(run, rows=[row for row in run.rows if get_text(row, "layers") == run.main_layers])
        for run in model_runs([r for r in found if len(_layers(r)) == 1] or found)
    ]


def layer_runs(records: RecordSet) -> list[ModelRun]:
    """Return every model that was screened at several choices of layers."""
    return model_runs(r for r in records.of("closed-loop") if len(_layers(r)) > 1)


def _layers(record: Record) -> list[str]:
    return unique([row for row in record.rows if not _is_full(row)], "layers")


def judged_run(runs: Iterable[ModelRun]) -> ModelRun:
    """Return the run of the paper's model on most images, else of another one, else the embedded one.

    Raises:
        MissingValueError: if there is no run.
    """
    ranked = sorted(
        runs, key=lambda run: (not run.is_papers_model, run.model == EMBEDDED, -run.images)
    )
    if not ranked:
        raise MissingValueError("model")
    return ranked[0]


def _is_full(row: Row) -> bool:
    return get_text(row, "method") == FULL
