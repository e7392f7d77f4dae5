"""Plots that the closed-loop and the classification figures share."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bmfa.evidence.page import paper, style
from bmfa.evidence.page.canvas import Canvas
from bmfa.evidence.page.drawing import add_labels, draw_line, draw_point, panel_grid, set_ticks
from bmfa.evidence.page.model_runs import ModelRun
from bmfa.evidence.page.record_set import get_number, get_points
from bmfa.records import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Columns of the rows with their axis labels.
OUTPUT_MEASURES = (
    ("agreement_percent", "agreement with the full model, %"),
    ("output_kl", "output KL, logarithmic"),
)
SMALLEST_KL = 1e-8  # a smaller output KL is drawn here, because the axis is logarithmic
KL_TICKS = {
    **{1e-8: "10⁻⁸", 1e-7: "", 1e-6: "10⁻⁶", 1e-5: "", 1e-4: "10⁻⁴", 1e-3: "", 0.01: "0.01"},
    **{0.1: "", 1: "1", 10: ""},
}


@dataclass(frozen=True)
class PanelData:
    """One column of panels: our run, or the numbers of the paper.

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


def imagenet_rows() -> list[Row]:
    """Return the paper's ImageNet results that have a leaf ratio, as rows."""
    return [
        {"method": name, **vars(point)}
        for name, point in paper.IMAGENET.items()
        if point.leaf_percent is not None
    ]


def plot_against_leaf_ratio(
    data: Sequence[PanelData], measures: Sequence[tuple[str, str]], narrow: bool
) -> Canvas:
    """Plot measures against the leaf ratio: a row of panels per measure, a column per source."""
    names = list(dict.fromkeys(name for source in data for name in source.run.families()))
    names += [paper.NAME] if any(source.printed for source in data) else []
    count = len(data) * len(measures)
    canvas, panels = panel_grid(count, len(data), narrow=narrow, height=200, legend=names)
    pairs = [(measure, source) for measure in measures for source in data]
    for axes, ((column, y_label), source) in zip(panels, pairs, strict=True):
        axes.set(xscale="log", xlim=(0.35, 140))
        set_ticks(axes.xaxis, [0.5, 1, 3, 10, 30, 100])
        every_row = [row for one in data for row in one.run.rows]
        set_measure_axis(axes, column, every_row)
        if source.full is not None:
            axes.axhline(source.full, color=style.INK.light, linewidth=1.0)
        for row in source.printed:
            draw_point(axes, paper.NAME, get_number(row, "leaf_percent"), get_number(row, column))
        draw_families(axes, source.run, "leaf_percent", column)
        add_labels(canvas, axes, source.title, y_label, "leaf ratio, % of tokens, logarithmic")
    return canvas


def draw_families(axes: "Axes", run: ModelRun, x: str, column: str) -> None:
    """Draw a line through the parameters of every method."""
    for name in run.families():
        draw_line(axes, name, visible_points(run.family(name), x, column))


def visible_points(rows: Sequence[Row], x: str, column: str) -> list[tuple[float, float]]:
    """Return the points of rows, with an output KL clipped to the smallest that the axis shows."""
    if column != "output_kl":
        return get_points(rows, x, column)
    return [(a, max(b, SMALLEST_KL)) for a, b in get_points(rows, x, column)]


def set_measure_axis(axes: "Axes", column: str, rows: Sequence[Row]) -> None:
    """Set the vertical axis: percentages up to 100, or a logarithmic output KL."""
    values = [value for row in rows if (value := get_number(row, column)) is not None]
    if column != "output_kl":
        low = min(90.0, 10 * (min(values, default=0.0) // 10))
        axes.set_ylim(low, 100 + (100 - low) * 0.04)
        return
    smallest = max(min(values, default=SMALLEST_KL), SMALLEST_KL)
    low = max((tick for tick in KL_TICKS if tick <= smallest), default=SMALLEST_KL)
    axes.set(yscale="log", ylim=(low / 2, 10))
    ticks = {tick: label for tick, label in KL_TICKS.items() if tick >= low / 2}
    set_ticks(axes.yaxis, list(ticks), list(ticks.values()))
