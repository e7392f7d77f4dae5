"""The rows of model experiments, model by model."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from bmfa.evidence.page.records import Evidence, number, text
from bmfa.records import Row

EMBEDDED = "embedded"
FULL = "full"
MAIN = "last-4"
# Output KL below which two methods cannot be told apart: both keep the output.
TELLING = 1e-4
# What models are called in prose; others go by the name that loaded them.
TITLES = {
    EMBEDDED: "Embedded model",
    "timm:deit_tiny_patch16_224": "DeiT-Tiny",
    "hf:facebook/deit-tiny-patch16-224": "DeiT-Tiny",
}
# Layers of the models that are known here: a choice of that many from the last is all of them.
DEPTHS = {"Embedded model": 8, "DeiT-Tiny": 12}
REDUCTIONS = (
    *("tome", "pitome", "tofu", "diffrate", "crossget", "dct", "evit"),
    *("random-pool", "fixed-pool", "free-energy"),
)


@dataclass(frozen=True)
class Run:
    """What one model gave: a row for each method, the full model's apart."""

    model: str
    full: Row | None
    rows: Sequence[Row]

    @property
    def title(self) -> str:
        """The model as people call it."""
        plain = PurePath(self.model).name if self.model.startswith("/") else self.model
        return TITLES.get(self.model, plain)

    @property
    def papers(self) -> bool:
        """Whether this is the paper's own model."""
        return self.title == TITLES["timm:deit_tiny_patch16_224"]

    def takes_all(self, choice: str) -> bool:
        """Whether last-K is all layers of this model."""
        depth = DEPTHS.get(self.title)
        return depth is not None and choice in {f"last-{count}" for count in range(depth, 100)}

    @property
    def images(self) -> int:
        """Pictures, of the row that saw most."""
        return int(max((number(row, "images") or 0 for row in self.rows), default=0))

    @property
    def heading(self) -> str:
        """The model and how many pictures it saw."""
        return f"{self.title}, {self.images:,} pictures" if self.images else self.title

    def row(self, method: str) -> Row:
        """The row of a method; an empty one where it was not measured."""
        return next((row for row in self.rows if text(row, "method") == method), {})

    def value(self, method: str, column: str) -> float | None:
        """One number of a method."""
        return number(self.row(method), column)

    def family(self, name: str) -> list[Row]:
        """The rows of a method at all its settings."""
        return [row for row in self.rows if family(row) == name]


def family(row: Row) -> str:
    """A method's name without its parameter."""
    return text(row, "method").partition(":")[0]


def is_reduction(row: Row) -> bool:
    """Whether the method merges or drops tokens instead of screening attention."""
    return family(row) in REDUCTIONS


def closed_loops(evidence: Evidence) -> list[Run]:
    """Every model with the last four layers screened, or with its first choice of layers."""
    runs = []
    for model, rows in _by_model(evidence, "closed-loop").items():
        choices = list(dict.fromkeys(text(r, "layers") for r in rows if not _is_full(r)))
        main = MAIN if MAIN in choices else next(iter(choices), "")
        runs.append(_run(model, rows, main))
    return [run for run in runs if run.rows]


def depths(evidence: Evidence, single: bool = False) -> list[tuple[Run, list[str]]]:
    """Every model with several choices of layers, and the choices; `single` layers or words."""
    found = []
    for model in _by_model(evidence, "closed-loop"):
        rows: list[Row] = []
        for record in evidence.records:
            named = str(record.settings.get("model", EMBEDDED)) == model
            some = [r for r in record.rows if text(r, "layers").isdecimal() == single]
            choices = {text(row, "layers") for row in some if not _is_full(row)}
            if record.experiment == "closed-loop" and named and len(choices) > 1:
                rows += some
        rows = _latest((row for row in rows if not _is_full(row)), ("method", "layers"))
        if rows:
            choices_in_order = list(dict.fromkeys(text(row, "layers") for row in rows))
            found.append((Run(model, None, rows), choices_in_order))
    return found


def of_depths(evidence: Evidence, several: bool) -> Evidence:
    """The closed-loop records of several choices of layers, or those of one; all where none is."""
    made = [record for record in evidence.records if record.experiment == "closed-loop"]
    some = [
        r for r in made if (len({text(row, "layers") for row in r.rows} - {"none"}) > 1) == several
    ]
    return Evidence(some or made)


def evaluations(evidence: Evidence) -> list[Run]:
    """Every model with all methods of its evaluation."""
    by_model = _by_model(evidence, "evaluate")
    runs = [_run(model, rows) for model, rows in by_model.items()]
    return [run for run in runs if run.rows]


def papers_first(runs: Sequence[Run]) -> Run | None:
    """The run to judge the paper's claims by: of its own model where there is one."""
    return next((run for run in runs if run.papers), next(iter(runs), None))


def _run(model: str, rows: Sequence[Row], layers: str | None = None) -> Run:
    full = [row for row in rows if _is_full(row)]
    some = (row for row in rows if not _is_full(row) and layers in (None, text(row, "layers")))
    return Run(model, max(full, key=_images) if full else None, _most_images(some))


def _by_model(evidence: Evidence, experiment: str) -> dict[str, list[Row]]:
    """All rows of an experiment, the embedded model's first."""
    found: dict[str, list[Row]] = {}
    for record in evidence.records:
        if record.experiment == experiment and record.rows:
            found.setdefault(str(record.settings.get("model", EMBEDDED)), []).extend(record.rows)
    return dict(sorted(found.items(), key=lambda item: item[0] != EMBEDDED))


def _most_images(rows: Iterable[Row]) -> list[Row]:
    """One row for each method: that of most pictures, of several the latest."""
    found: dict[str, Row] = {}
    for row in rows:
        before = found.get(text(row, "method"))
        if before is None or _images(row) >= _images(before):
            found.pop(text(row, "method"), None)  # the order is that of the rows that count
            found[text(row, "method")] = row
    return list(found.values())


def _latest(rows: Iterable[Row], keys: Sequence[str]) -> list[Row]:
    return list({tuple(text(row, key) for key in keys): row for row in rows}.values())


def _images(row: Row) -> float:
    return number(row, "images") or 0.0


def _is_full(row: Row) -> bool:
    return text(row, "method") == FULL
