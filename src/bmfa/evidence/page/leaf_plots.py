"""Measures of a model against the leaf ratio of its methods: closed-loop and classification figures."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bmfa.evidence.page import paper, plots
from bmfa.evidence.page.model_runs import ModelRun
from bmfa.evidence.page.record_set import get_number, get_points
from bmfa.records import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Drawing

# Columns of the rows with their axis labels.
OUTPUT_MEASURES = (
    ("agreement_percent", "agreement with the full model, %"),
    ("output_kl", "output KL, logarithmic"),
)
KL_TICKS = {
    **{1e-8: "10⁻⁸", 1e-7: "", 1e-6: "10⁻⁶", 1e-5: "", 1e-4: "10⁻⁴", 1e-3: "", 0.01: "0.01"},
    **{0.1: "", 1: "1", 10: ""},
}


@dataclass(frozen=True)
class PanelData:
    """One column of panels.

    Attributes:
        title: title of the panels.
        run: the methods, joined by lines.
        printed: rows of the paper, drawn as rings.
        full: value of the full model, drawn as a horizontal line.
    """

    title: str
    run: ModelRun
    printed: Sequence[Row] = field(default_factory=list)
    full: float | None = None


def against_leaf_ratio(
    data: Sequence[PanelData], measures: Sequence[tuple[str, str]], narrow: bool
) -> "Drawing":
    """Plot measures against the leaf ratio: a row of panels for each measure, a column per source."""
    names = list(dict.fromkeys(name for source in data for name in source.run.families()))
    names += [paper.NAME] if any(source.printed for source in data) else []
    drawing, panels = plots.panels(len(data) * len(measures), len(data), narrow, 290, names)
    pairs = [(measure, source) for measure in measures for source in data]
    for axes, ((column, y_label), source) in zip(panels, pairs, strict=True):
        axes.set(xscale="log", xlim=(0.35, 140))
        plots.set_ticks(axes.xaxis, [0.5, 1, 3, 10, 30, 100])
        set_measure_axis(axes, column, [row for one in data for row in one.run.rows])
        if source.full is not None:
            axes.axhline(source.full, color=plots.LIGHT["ink"], linewidth=1.0)
        for row in source.printed:
            point = get_number(row, "leaf_percent"), get_number(row, column)
            plots.draw_point(axes, paper.NAME, *point)
        draw_families(axes, source.run, "leaf_percent", column)
        plots.label(axes, source.title, y_label, "leaf ratio, % of tokens, logarithmic")
    return drawing


def draw_families(axes: "Axes", run: ModelRun, x: str, column: str) -> None:
    """Draw a line through the parameters of every method."""
    for name in run.families():
        plots.draw_line(axes, name, visible_points(run.family(name), x, column))


def visible_points(rows: Sequence[Row], x: str, column: str) -> list[tuple[float, float]]:
    """Return the points of rows, with an output KL clipped to the smallest that the axis shows."""
    lowest = plots.SMALLEST_KL if column == "output_kl" else float("-inf")
    return [(a, max(b, lowest)) for a, b in get_points(rows, x, column)]


def set_measure_axis(axes: "Axes", column: str, rows: Sequence[Row]) -> None:
    """Set the vertical axis: percentages up to 100, or a logarithmic output KL."""
    values = [value for row in rows if (value := get_number(row, column)) is not None]
    if column != "output_kl":
        low = min(90.0, 10 * (min(values, default=0.0) // 10))
        axes.set_ylim(low, 100 + (100 - low) * 0.04)
        return
    smallest = max(min(values, default=plots.SMALLEST_KL), plots.SMALLEST_KL)
    low = max((tick for tick in KL_TICKS if tick <= smallest), default=plots.SMALLEST_KL)
    axes.set(yscale="log", ylim=(low / 2, 10))
    ticks = {tick: label for tick, label in KL_TICKS.items() if tick >= low / 2}
    plots.set_ticks(axes.yaxis, list(ticks), list(ticks.values()))
