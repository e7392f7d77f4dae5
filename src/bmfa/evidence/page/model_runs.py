"""The rows of closed-loop and evaluate records, grouped by model."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath

from bmfa.evidence.methods import FULL, family, is_kind
from bmfa.evidence.page.origins import RECORDED, describe_origin, origin
from bmfa.evidence.page.record_set import (
    MissingValueError,
    RecordSet,
    get_number,
    get_text,
    need_number,
    unique,
)
from bmfa.records import Row

EMBEDDED = "embedded"
MAIN_LAYERS = "last-4"
# Two methods with an output KL below this cannot be told apart: both leave the output unchanged.
NEGLIGIBLE_KL = 1e-4
# Titles of models; other models are shown by the name that loads them.
TITLES = {
    EMBEDDED: "Embedded model",
    "timm:deit_tiny_patch16_224": "DeiT-Tiny",
    "hf:facebook/deit-tiny-patch16-224": "DeiT-Tiny",
}
# Number of layers by title: last-K with K at least this number means all layers.
DEPTHS = {"Embedded model": 8, "DeiT-Tiny": 12}


@dataclass(frozen=True)
class ModelRun:
    """The results of one model.

    Attributes:
        model: the name that loads the model.
        full: the row of the unmodified model, if there is one.
        rows: one row for each method.
        recorded: where and when the run was recorded, as a phrase; "" if it was made with the page.
    """

    model: str
    full: Row | None
    rows: Sequence[Row]
    recorded: str = ""

    @property
    def title(self) -> str:
        """The title of the model; of a path its last part."""
        name = PurePath(self.model).name if self.model.startswith("/") else self.model
        return TITLES.get(self.model, name)

    @property
    def title_in_sentence(self) -> str:
        """The title in the middle of a sentence."""
        return f"the {self.title.lower()}" if self.model == EMBEDDED else self.title

    @property
    def is_papers_model(self) -> bool:
        """True if this is the model of the paper."""
        return self.title == "DeiT-Tiny"

    @property
    def images(self) -> int:
        """The largest number of images of any row."""
        return int(max((get_number(row, "images") or 0 for row in self.rows), default=0))

    @property
    def heading(self) -> str:
        """The title and the number of images."""
        return f"{self.title}, {self.images:,} images" if self.images else self.title

    @property
    def caption(self) -> str:
        """The heading of a table: also where and when the run was recorded."""
        title = f"{self.title}, {self.recorded}" if self.recorded else self.title
        return f"{title}, {self.images:,} images" if self.images else title

    @property
    def panel_title(self) -> str:
        """The heading as it fits over a panel of a figure."""
        title = f"{self.title}, recorded" if self.recorded else self.title
        return f"{title}, {self.images:,} images" if self.images else title

    @property
    def all_rows(self) -> list[Row]:
        """The row of the full model, then those of the methods."""
        return [*([] if self.full is None else [self.full]), *self.rows]

    def covers_all_layers(self, choice: str) -> bool:
        """Return True if last-K selects all layers of this model."""
        depth, count = DEPTHS.get(self.title), choice.removeprefix("last-")
        return depth is not None and choice != count and count.isdecimal() and int(count) >= depth

    def row(self, method: str) -> Row:
        """Return the row of a method, or an empty row."""
        return next((row for row in self.rows if get_text(row, "method") == method), {})

    def value(self, method: str, column: str) -> float:
        """Return one number of a method; raise MissingValueError if it was not measured."""
        return need_number(self.row(method), column)

    def values(self, method: str, *columns: str) -> list[float]:
        """Return several numbers of a method; raise MissingValueError if one was not measured."""
        return [self.value(method, column) for column in columns]

    def family(self, name: str) -> list[Row]:
        """Return the rows of a method at all its parameters."""
        return [row for row in self.rows if family(get_text(row, "method")) == name]

    def families(self) -> list[str]:
        """Return the methods without their parameters."""
        return list(dict.fromkeys(family(get_text(row, "method")) for row in self.rows))

    def filter(self, condition: Callable[[Row], bool]) -> "ModelRun":
        """Return the same run with some of its rows."""
        return replace(self, rows=[row for row in self.rows if condition(row)])


def is_reduction(row: Row) -> bool:
    """Return True if the method merges or drops tokens instead of screening attention."""
    return is_kind(get_text(row, "method"), "reduction")


def closed_loop_runs(records: RecordSet) -> list[ModelRun]:
    """Return every model with its last four layers screened, or with its first choice of layers."""
    runs = []
    for model, rows in _rows_by_model(records, "closed-loop").items():
        choices = unique([row for row in rows if not _is_full(row)], "layers")
        layers = MAIN_LAYERS if MAIN_LAYERS in choices else next(iter(choices), "")
        chosen = [r for r in rows if _is_full(r) or get_text(r, "layers") == layers]
        runs.append(_make_run(records, model, chosen))
    return [run for run in runs if run.rows]


def evaluation_runs(
    records: RecordSet, condition: Callable[[Row], bool] = lambda row: True
) -> list[ModelRun]:
    """Return every model with the methods of its evaluation that meet a condition."""
    by_model = _rows_by_model(records, "evaluate")
    runs = [_make_run(records, model, rows).filter(condition) for model, rows in by_model.items()]
    return [run for run in runs if run.rows]


def layer_runs(records: RecordSet, single: bool = False) -> list[tuple[ModelRun, list[str]]]:
    """Return every model that was screened at several choices of layers, and the choices.

    Args:
        records: the records.
        single: True for choices of one layer each, False for choices such as last-2 and all.
    """
    runs = []
    for model in _rows_by_model(records, "closed-loop"):
        rows: list[Row] = []
        for record in records.of("closed-loop"):
            found = [
                row
                for row in record.rows
                if not _is_full(row) and get_text(row, "layers").isdecimal() == single
            ]
            same_model = str(record.settings.get("model", EMBEDDED)) == model
            if same_model and len(unique(found, "layers")) > 1:
                rows += found
        if rows:
            latest = {(get_text(r, "method"), get_text(r, "layers")): r for r in rows}
            rows = list(latest.values())
            run = ModelRun(model, None, rows, _recorded(records, rows))
            runs.append((run, unique(rows, "layers")))
    return runs


def select_layer_records(records: RecordSet, several: bool) -> RecordSet:
    """Return the closed-loop records of several choices of layers, or of one; else all of them."""
    closed_loop = records.of("closed-loop")
    chosen = [
        record
        for record in closed_loop
        if (len(set(unique(record.rows, "layers")) - {"none"}) > 1) == several
    ]
    return RecordSet(chosen or closed_loop)


def judged_run(runs: Sequence[ModelRun]) -> ModelRun:
    """Return the run of the paper's own model, else of another one, else of the embedded model.

    Raises:
        MissingValueError: if there is no run.
    """
    if not runs:
        raise MissingValueError("model")
    return min(runs, key=lambda run: (not run.is_papers_model, run.model == EMBEDDED))


def _rows_by_model(records: RecordSet, experiment: str) -> dict[str, list[Row]]:
    """All rows of an experiment by model, the embedded model first."""
    rows: dict[str, list[Row]] = {}
    for record in records.of(experiment):
        if record.rows:
            rows.setdefault(str(record.settings.get("model", EMBEDDED)), []).extend(record.rows)
    return dict(sorted(rows.items(), key=lambda item: item[0] != EMBEDDED))


def _make_run(records: RecordSet, model: str, rows: Sequence[Row]) -> ModelRun:
    full = [row for row in rows if _is_full(row)]
    best = max(full, key=_images) if full else None
    chosen = _most_images(row for row in rows if not _is_full(row))
    return ModelRun(model, best, chosen, _recorded(records, chosen))


def _recorded(records: RecordSet, rows: Sequence[Row]) -> str:
    """Where and when the rows were recorded, "" if they were not or not all of them."""
    holding = records.holding(rows)
    if {origin(record) for record in holding} != {RECORDED}:
        return ""
    return "; ".join(dict.fromkeys(map(describe_origin, holding)))


def _most_images(rows: Iterable[Row]) -> list[Row]:
    """One row for each method: the one with most images, the latest of several."""
    chosen: dict[str, Row] = {}
    for row in rows:
        before = chosen.get(get_text(row, "method"))
        if before is None or _images(row) >= _images(before):
            chosen.pop(get_text(row, "method"), None)  # moves the method to the end
            chosen[get_text(row, "method")] = row
    return list(chosen.values())


def _images(row: Row) -> float:
    return get_number(row, "images") or 0.0


def _is_full(row: Row) -> bool:
    return get_text(row, "method") == FULL
