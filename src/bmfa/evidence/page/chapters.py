"""The chapters of the page: each says what was done, shows it, and how to make it again."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from html import escape
from pathlib import PurePath
from typing import Any

import torch

from bmfa.evidence.bench import chapter as bench_tables
from bmfa.evidence.classification import chapter as classification_chapter
from bmfa.evidence.classification import reduction_chapter
from bmfa.evidence.closed_loop import chapter as closed_loop_chapter
from bmfa.evidence.closed_loop import layer_chapter
from bmfa.evidence.page import figures, paper
from bmfa.evidence.page.markup import (
    Column,
    code,
    decimal,
    figure,
    made_by,
    pairs,
    paragraph,
    table,
)
from bmfa.evidence.page.records import Evidence, number, text
from bmfa.evidence.pictures import chapter as picture_chapter
from bmfa.evidence.probes import chapter as probe_chapter
from bmfa.evidence.synthetic import chapter as synthetic_chapter
from bmfa.grid import Grid
from bmfa.records import Row
from bmfa.trees.build import screen
from bmfa.trees.rules import Gamma

LONG_VALUES = (
    *("scores", "boxes", "picture", "gap_quantiles"),
    *("attention", "screened_attention"),
)


@dataclass(frozen=True)
class Chapter:
    """A chapter, and the experiment without which it can only say how to get it."""

    name: str
    title: str
    experiment: str
    content: Callable[[Evidence], str]

    def render(self, evidence: Evidence) -> str:
        """The chapter as a section."""
        content = self.content(evidence) if self.present(evidence) else self._absent(evidence)
        return f'<section id="{self.name}"><h2>{escape(self.title)}</h2>{content}</section>'

    def present(self, evidence: Evidence) -> bool:
        """Whether its record is at hand."""
        return evidence.has(self.experiment)

    def _absent(self, evidence: Evidence) -> str:
        command = code(evidence.commands(self.experiment)[0])
        return f'<p class="absent">Not measured here. Get it with {command}</p>'


def ablation(evidence: Evidence) -> str:
    """One parameter of Algorithm 1 changed at a time."""
    dataset = str(evidence.setting("ablation", "dataset") or "")
    where = paper.dataset_title(dataset)
    one, two = (
        evidence.value("ablation", "mean_gap", parameter="lookahead", value=value)
        for value in (1, 2)
    )
    finding = ""
    if one is not None and two is not None and two < one:
        finding = (
            f"Looking two levels down instead of one takes the mean gap from {decimal(one, 3)} to "
            f"{decimal(two, 3)}: the paper leaves this to future work."
        )
    intro = paragraph(
        "One parameter of Algorithm 1 is changed at a time; the others stay at ε = 0.005, full "
        "depth, 16 × 16 cells and a look-ahead of one level.",
        f"Data: {where}." if where else "",
        finding,
    )
    caption = (
        "The threshold buys accuracy with leaves. Rings are the paper's numbers, of COCO; its run "
        "times are of another machine and of code that takes one instance at a time."
    )
    columns = [Column("Parameter"), Column("Value", 0), Column("Mean gap", 3), Column("Leaf %", 3)]
    columns += [Column("µs", 1), Column("Paper: mean gap", 3, paper=True)]
    columns += [Column("Leaf %", 2, paper=True), Column("ms", 3, paper=True)]
    rows = [_ablation_row(row) for row in evidence.rows("ablation")]
    return intro + figure(figures.ablation, evidence, caption) + table("Ablations", columns, rows)


def _ablation_row(row: Row) -> list[Any]:
    value = number(row, "value")
    printed = paper.ABLATION.get((text(row, "parameter"), value or 0.0))
    theirs = (
        (printed.mean_gap, printed.leaf_percent, printed.milliseconds) if printed else [None] * 3
    )
    ours = [row.get(c) for c in ("mean_gap", "leaf_percent", "microseconds_per_instance")]
    return [text(row, "parameter"), text(row, "value"), *ours, *theirs]


def cases(evidence: Evidence) -> str:
    """Single instances."""
    intro = paragraph(
        "Single instances: the crop, the scores that the probe gives its cells, and what two "
        "trees keep of them. An object centred in its crop can leave Algorithm 1 with one leaf."
    )
    caption = (
        "Bright cells have high scores. Each tree shows the mean score of every leaf; lines are "
        "the leaves' borders."
    )
    return (
        intro
        + figure(figures.cases, evidence, caption)
        + _largest_gap(evidence)
        + _beside_the_papers_figures(evidence)
    )


def _largest_gap(evidence: Evidence) -> str:
    """Whether any instance probed here reaches the gaps of the paper's cases."""
    rows = evidence.select("probe", mode="image-edge", group="all", method="sparge-mean")
    known = [(gap, text(row, "dataset")) for row in rows if (gap := number(row, "max_gap"))]
    if not known:
        return ""
    largest, dataset = max(known)
    low, high = paper.CASE_GAPS
    sentence = (
        f"The largest gap of a mean over all instances probed here is {decimal(largest, 3)} "
        f"({paper.dataset_title(dataset)}); the paper's four cases have {decimal(low, 3)} to "
        f"{decimal(high, 3)}."
    )
    beyond = " None reaches them: its scores may have a longer upper tail than our fit gives them."
    return paragraph(sentence + (beyond if largest < low else ""))


def _beside_the_papers_figures(evidence: Evidence) -> str:
    """Area, mass and gap of our cases and the paper's, and leaves at the threshold of its overview."""
    epsilon = f"ε = {paper.OVERVIEW_EPSILON:g}"
    columns = [Column("Instance"), Column("Minority, % of cells", 1), Column("of Gibbs mass, %", 1)]
    columns += [Column("Gap of the mean", 3), Column(f"Leaves of Algorithm 1 at {epsilon}")]
    shown = {text(row, "title"): row for row in evidence.rows("cases")}
    measures = ("minority_area_percent", "gibbs_mass_percent", "gap")
    rows: list[list[Any]] = [
        [title, *(row.get(name) for name in measures), _leaves(row)] for title, row in shown.items()
    ]
    for which, block in zip(("first", "second"), paper.FIRST_FIGURE, strict=True):
        name = f"Paper: first figure, {which} block"
        rows.append([name, block.area_percent, block.mass_percent, block.gap, None])
    areas = " to ".join(decimal(value, 1) for value in paper.CASE_AREAS)
    gaps = " to ".join(decimal(value, 3) for value in paper.CASE_GAPS)
    rows.append(["Paper: four cases", areas, f"over {decimal(paper.CASE_MASS, 0)}", gaps, None])
    overview = f"{paper.OVERVIEW_LEAVES} of {paper.OVERVIEW_TOKENS}"
    rows.append(["Paper: overview, a kite", None, None, None, overview])
    return table(
        "Single instances here and in the paper's figures, which are of COCO", columns, rows
    )


def _leaves(row: Row) -> str | None:
    """Leaves of Algorithm 1 on the scores of a case, at the threshold of the paper's overview."""
    scores, grid = row.get("scores"), Grid(int(row["height"]), int(row["width"]))
    if not isinstance(scores, list) or len(scores) != grid.size:
        return None
    tree = screen(torch.tensor(scores, dtype=torch.float64), grid, Gamma(paper.OVERVIEW_EPSILON))
    return f"{int(tree.leaf_count)} of {grid.size}"


def bench(evidence: Evidence) -> str:
    """Speed: attention and models, then all else as a plain table."""
    others = [row for row in evidence.rows("bench") if row.get("what") not in bench_tables.KINDS]
    plain = _plain("bench", evidence, others) if others else ""
    return (
        bench_tables.chapter(evidence)
        + plain
        + paragraph("Times are medians of one run, on the machines named at the end of this page.")
    )


def other(experiment: str) -> Callable[[Evidence], str]:
    """A plain table for an experiment that has no chapter of its own."""
    return lambda evidence: _plain(experiment, evidence)


def _plain(experiment: str, evidence: Evidence, some: list[Row] | None = None) -> str:
    rows = evidence.rows(experiment) if some is None else some
    said = dict.fromkeys(key for row in rows for key in row if row[key] is not None)
    names = [name for name in said if name not in LONG_VALUES]
    columns = [_column(name, rows) for name in names]
    body = [[row.get(name) for name in names] for row in rows]
    return table(experiment.capitalize(), columns, body) + made_by(evidence, experiment)


def _column(name: str, rows: list[Row]) -> Column:
    values = [row.get(name) for row in rows if row.get(name) is not None]
    head = name.replace("_", " ")
    if not values or not all(isinstance(value, int | float) for value in values):
        return Column(head, code=name == "method")
    return Column(head, 0 if all(isinstance(value, int) for value in values) else 3)


def environment(evidence: Evidence) -> str:
    """Where every record was made, and with which settings."""
    places: dict[str, tuple[Mapping[str, Any], list[str]]] = {}
    for record in evidence.records:
        key = repr(sorted(record.environment.items(), key=str))
        places.setdefault(key, (record.environment, []))[1].append(record.experiment)
    blocks = [
        f"<h3>{escape(', '.join(dict.fromkeys(experiments)))}</h3>{pairs(values)}"
        for values, experiments in places.values()
    ]
    columns = [Column("Record"), Column("Settings")]
    rows = [[record.experiment, _settings(record.settings)] for record in evidence.records]
    return "".join(blocks) + table("Settings of the records", columns, rows)


def _settings(settings: Mapping[str, Any]) -> str:
    known = {name: value for name, value in settings.items() if value not in (None, {}, [])}
    return ", ".join(f"{name} = {_said(value)}" for name, value in known.items())


def _said(value: Any) -> str:
    """A value in words, those in lists and objects too; of a path its last part alone."""
    if isinstance(value, Mapping):
        if set(value) == {"instances", "names"}:
            return str(value["instances"])
        return f"({', '.join(f'{name}: {_said(one)}' for name, one in value.items())})"
    if isinstance(value, list | tuple):
        return " ".join(_said(one) for one in value)
    return PurePath(value).name if str(value).startswith("/") else str(value)


CHAPTERS = (
    Chapter("synthetic", "Synthetic stress test", "synthetic", synthetic_chapter.sweep),
    Chapter("failure", "Where the mean begins to fail", "failure-curve", synthetic_chapter.curve),
    Chapter("probes", "Instance probes", "probe", probe_chapter.content),
    Chapter("ablations", "Ablations", "ablation", ablation),
    Chapter("cases", "Single instances", "cases", cases),
    Chapter("closed-loop", "Inside a model", "closed-loop", closed_loop_chapter.content),
    Chapter("layers", "Layer sensitivity", "closed-loop", layer_chapter.content),
    Chapter("pictures", "Pictures in a model", "picture", picture_chapter.content),
    Chapter("classification", "Classification", "evaluate", classification_chapter.content),
    Chapter("reductions", "Token reduction", "evaluate", reduction_chapter.content),
    Chapter("bench", "Speed", "bench", bench),
)


def chapters(evidence: Evidence) -> list[Chapter]:
    """The known chapters, then one for every other experiment among the records."""
    known = {chapter.experiment for chapter in CHAPTERS} | {"gallery"}
    others = dict.fromkeys(r.experiment for r in evidence.records if r.experiment not in known)
    extra = [
        Chapter(f"record-{number}", experiment.capitalize(), experiment, other(experiment))
        for number, experiment in enumerate(others)
    ]
    return [*CHAPTERS, *extra]
