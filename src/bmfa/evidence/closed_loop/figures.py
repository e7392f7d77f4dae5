"""Models against leaf ratio or operations: agreement, output KL, top-1; the paper's points beside."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bmfa.evidence.page import paper, runs, style
from bmfa.evidence.page.marks import LEGEND_ROW, foot, heading, legend, log_ticks
from bmfa.evidence.page.records import Evidence, number
from bmfa.evidence.page.sheet import Margins, Sheet, load, panels
from bmfa.records import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MEASURES = (
    ("agreement_percent", "agreement with the full model, %"),
    ("output_kl", "output KL, logarithmic"),
)
LEAVES = "leaf ratio, % of tokens, logarithmic"
LEAST_KL = 1e-8
KL_TICKS = {
    **{1e-8: "10⁻⁸", 1e-7: "", 1e-6: "10⁻⁶", 1e-5: "", 1e-4: "10⁻⁴", 1e-3: "", 0.01: "0.01"},
    **{0.1: "", 1: "1", 10: ""},
}


@dataclass(frozen=True)
class Source:
    """The points of one panel, and what the paper prints of the same methods there."""

    title: str
    rows: Sequence[Row]
    printed: Sequence[Row] = field(default_factory=list)
    full: float | None = None  # where the full model's line lies


def closed_loop(evidence: Evidence, narrow: bool) -> Sheet:
    """Agreement and output KL against leaf ratio, ours beside the paper's."""
    evidence.require("closed-loop")
    found = [
        Source(run.heading, run.rows, _imagenet_rows() if run.papers else [])
        for run in runs.closed_loops(evidence)
    ]
    rows = [{"method": name, **vars(point)} for name, point in paper.CLOSED_LOOP.items()]
    found.append(Source(f"Paper: {paper.MODEL}, COCO", rows))
    return _against_leaves(found, MEASURES, narrow)


def screened(evidence: Evidence) -> list[runs.Run]:
    """Every evaluation with the rules alone that have a leaf ratio."""
    found = []
    for run in runs.evaluations(evidence):
        rows = [row for row in run.rows if number(row, "leaf_percent") is not None]
        rows = [row for row in rows if not runs.is_reduction(row)]
        found += [runs.Run(run.model, run.full, rows)] if rows else []
    return found


def reduced(evidence: Evidence) -> list[runs.Run]:
    """Every evaluation with the token reductions alone."""
    found = []
    for run in runs.evaluations(evidence):
        rows = [row for row in run.rows if runs.is_reduction(row)]
        found += [runs.Run(run.model, run.full, rows)] if rows else []
    return found


def top1(evidence: Evidence, narrow: bool) -> Sheet:
    """Top-1 against leaf ratio, ours beside the paper's."""
    evidence.require("evaluate")
    found = [
        Source(run.heading, run.rows, full=number(run.full or {}, "top1_percent"))
        for run in screened(evidence)
    ]
    full = paper.IMAGENET["full"].top1_percent
    found.append(Source(f"Paper: {paper.MODEL}, ImageNet", _imagenet_rows(), full=full))
    return _against_leaves(
        found, (("top1_percent", "top-1, %; the line is the full model"),), narrow
    )


def reductions(evidence: Evidence, narrow: bool) -> Sheet:
    """Agreement and output KL of token reductions against the operations of one picture."""
    evidence.require("evaluate")
    found = reduced(evidence)
    if not found:
        raise ValueError("no evaluate row is of a reduction; evaluate with --method tome:8")
    names = list(dict.fromkeys(runs.family(row) for run in found for row in run.rows))
    width, columns, legend_columns = (style.NARROW, 1, 2) if narrow else (style.WIDE, 2, 4)
    room = -(-len(names) // legend_columns) * LEGEND_ROW + 12
    sheet, axes = panels(2 * len(found), columns, width, 210, Margins(left=44), foot=room)
    for index, run in enumerate(found):
        for panel, (column, below) in zip(axes[2 * index :], MEASURES, strict=False):
            scale(panel, column, least(run.rows, column))
            for name in names:
                some = run.family(name)
                pairs = [(number(row, "gflops"), _value(row, column)) for row in some]
                _family(panel, name, [(x, y) for x, y in pairs if x is not None and y is not None])
            cost = number(run.full or {}, "gflops")
            if cost is not None:
                panel.axvline(cost, color=style.INK.light, linewidth=1.0)
            heading(sheet, panel, run.heading, below, indent=40)
            foot(sheet, panel, "GFLOPs a picture; the line is the full model")
    legend(sheet, names, sheet.height - room + 8, legend_columns)
    return sheet


def _imagenet_rows() -> list[Row]:
    return [
        {"method": name, **vars(point)}
        for name, point in paper.IMAGENET.items()
        if point.leaf_percent is not None
    ]


def _against_leaves(
    found: Sequence[Source], measures: Sequence[tuple[str, str]], narrow: bool
) -> Sheet:
    """A row of panels for each measure, a column for each source."""
    shown = [one.rows for one in found]
    families = list(dict.fromkeys(runs.family(row) for rows in shown for row in rows))
    rings = [paper.NAME] if any(one.printed for one in found) else []
    columns, legend_columns = (1, 2) if narrow else (len(found), 4)
    legend_rows = -(-(len(families) + len(rings)) // legend_columns)
    room = legend_rows * LEGEND_ROW + 12
    width = style.NARROW if narrow else style.WIDE
    count = len(found) * len(measures)
    sheet, axes = panels(count, columns, width, 200, Margins(left=44), foot=room)
    for index, (column, below) in enumerate(measures):
        some = axes[index * len(found) : (index + 1) * len(found)]
        low = least([row for rows in shown for row in rows], column)
        for source, panel in zip(found, some, strict=True):
            _points(panel, source, column, low)
            heading(sheet, panel, source.title, below, indent=40)
            foot(sheet, panel, LEAVES)
    legend(sheet, [*families, *rings], sheet.height - room + 8, legend_columns)
    return sheet


def _points(axes: "Axes", source: Source, column: str, low: float) -> None:
    """A line through the settings of every family; rings where the paper's points lie."""
    axes.set_xscale("log")
    axes.set_xlim(0.35, 140)
    log_ticks(axes.xaxis, [0.5, 1, 3, 10, 30, 100])
    scale(axes, column, low)
    if source.full is not None:
        axes.axhline(source.full, color=style.INK.light, linewidth=1.0)
    ring = style.method_style(paper.NAME)
    for row in source.printed:
        place = _place(row, column)
        if place is not None:
            axes.plot(*place, clip_on=False, **ring.mark)
    for name in dict.fromkeys(runs.family(row) for row in source.rows):
        places = [_place(row, column) for row in source.rows if runs.family(row) == name]
        _family(axes, name, [place for place in places if place is not None])


def _family(axes: "Axes", name: str, places: Sequence[tuple[float, float]]) -> None:
    if places:
        look = style.method_style(name)
        xs, ys = zip(*sorted(places), strict=True)
        axes.plot(xs, ys, clip_on=False, **look.line, **look.open_mark)


def scale(axes: "Axes", column: str, low: float) -> None:
    """Percentages up to 100; KL on a logarithmic axis."""
    if column != "output_kl":
        axes.set_ylim(low, 100 + (100 - low) * 0.04)
        return
    axes.set_yscale("log")
    axes.set_ylim(low / 2, 10)
    shown = {tick: words for tick, words in KL_TICKS.items() if tick >= low / 2}
    axes.set_yticks(list(shown), list(shown.values()))
    axes.yaxis.set_minor_locator(load("matplotlib.ticker").NullLocator())


def _place(row: Row, column: str) -> tuple[float, float] | None:
    leaf, value = number(row, "leaf_percent"), _value(row, column)
    return None if leaf is None or value is None else (leaf, value)


def _value(row: Row, column: str) -> float | None:
    """A number of a row where the axis can show it."""
    value = number(row, column)
    return max(value, LEAST_KL) if value is not None and column == "output_kl" else value


def least(rows: Sequence[Row], column: str) -> float:
    """Where the vertical axis begins."""
    values = [value for row in rows if (value := number(row, column)) is not None]
    if column == "output_kl":
        lowest = max(min(values, default=LEAST_KL), LEAST_KL)
        return max((tick for tick in KL_TICKS if tick <= lowest), default=LEAST_KL)
    return min(90.0, 10 * (min(values, default=0.0) // 10))
