"""Measures of a model, as the figures of the closed loop and of classification show them."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from bmfa.evidence.page import paper, plots
from bmfa.evidence.page.model_runs import by_family
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
SMALLEST_KL = 1e-8  # a smaller output KL is drawn here, because the axis is logarithmic
KL_TICKS = {
    **{1e-8: "10⁻⁸", 1e-7: "", 1e-6: "10⁻⁶", 1e-5: "", 1e-4: "10⁻⁴", 1e-3: "", 0.01: "0.01"},
    **{0.1: "", 1: "1", 10: ""},
}
# Title, rows, and rows of the paper as rings.
Panel = tuple[str, Sequence[Row], Sequence[Row]]


def against_leaf_ratio(
    sources: Sequence[Panel],
    measures: Sequence[tuple[str, str]],
    narrow: bool,
    full: Sequence[float | None] = (),
) -> "Drawing":
    """Plot measures against the leaf ratio.

    Args:
        sources: columns of panels.
        measures: rows of panels, as the column of the rows and the label of the axis.
        narrow: True for a narrow screen.
        full: for each column the value of the full model, drawn as a horizontal line.
    """
    names = list(by_family(row for _, rows, _ in sources for row in rows))
    names += [paper.NAME] if any(printed for _, _, printed in sources) else []
    drawing, panels = plots.panels(len(sources) * len(measures), len(sources), narrow, 290, names)
    pairs = [(measure, source) for measure in measures for source in sources]
    for index, (axes, ((column, y_label), source)) in enumerate(zip(panels, pairs, strict=True)):
        title, rows, printed = source
        plots.set_axes(axes, title, y_label, **plots.LEAF_AXIS)
        set_measure_axis(axes, column, [row for _, rows, _ in sources for row in rows])
        plots.mark_level(axes, y=full[index % len(sources)] if full else None)
        for row in printed:
            point = get_number(row, "leaf_percent"), get_number(row, column)
            plots.draw_point(axes, paper.NAME, *point)
        draw_families(axes, rows, "leaf_percent", column)
    return drawing


def draw_families(axes: "Axes", rows: Iterable[Row], x: str, column: str) -> None:
    """Draw a line through the parameters of every method."""
    for name, found in by_family(rows).items():
        plots.draw_line(axes, name, get_points(clip_kl(found), x, column))


def clip_kl(rows: Iterable[Row]) -> list[Row]:
    """Return rows whose output KL is at least the smallest that the axis shows."""
    clipped = []
    for row in rows:
        kl = get_number(row, "output_kl")
        clipped.append(row if kl is None else {**row, "output_kl": max(kl, SMALLEST_KL)})
    return clipped


def set_measure_axis(axes: "Axes", column: str, rows: Sequence[Row]) -> None:
    """Set the vertical axis: percentages up to 100, or a logarithmic output KL."""
    values = [value for row in clip_kl(rows) if (value := get_number(row, column)) is not None]
    if column == "output_kl":
        low = max((tick for tick in KL_TICKS if tick <= min(values, default=1)), default=1e-8)
        axes.set(yscale="log", ylim=(low / 2, 10))
        ticks = {tick: label for tick, label in KL_TICKS.items() if tick >= low}
        plots.set_ticks(axes.yaxis, list(ticks), list(ticks.values()))
    else:
        low = min(90.0, 10 * (min(values, default=0.0) // 10))
        axes.set_ylim(low, 100 + (100 - low) * 0.04)
