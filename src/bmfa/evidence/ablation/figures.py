"""The ablations: threshold with run time, depth, grid and look-ahead."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from bmfa.evidence.page import paper, style
from bmfa.evidence.page.marks import foot, heading, legend, log_ticks
from bmfa.evidence.page.records import Evidence, number
from bmfa.evidence.page.sheet import Margins, Sheet, panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PAPER_COLUMNS: dict[str, Callable[[paper.Ablated], float | None]] = {
    "mean_gap": lambda printed: printed.mean_gap,
    "leaf_percent": lambda printed: printed.leaf_percent,
    "microseconds_per_instance": lambda printed: (
        None if printed.milliseconds is None else 1000 * printed.milliseconds
    ),
}
THRESHOLD = (
    ("mean_gap", "Error", "mean gap"),
    ("leaf_percent", "Leaf ratio", "% of tokens"),
    ("microseconds_per_instance", "Run time", "µs an instance, logarithmic"),
)
OTHERS = (
    ("depth", "Depth", "greatest depth of the tree"),
    ("grid", "Grid", "cells along a side"),
    ("lookahead", "Look-ahead", "levels below the block"),
)


def ablation(evidence: Evidence, narrow: bool) -> Sheet:
    """Error, leaves and run time over the threshold; error over depth, grid and look-ahead."""
    evidence.require("ablation")
    width, columns = (style.NARROW, 1) if narrow else (style.WIDE, 3)
    sheet, axes = panels(6, columns, width, 170, Margins(left=44, right=24), foot=34)
    for panel, (column, title, below) in zip(axes[:3], THRESHOLD, strict=True):
        panel.set_xscale("log")
        panel.set_xlim(0.07, 0.0007)
        log_ticks(panel.xaxis, [0.05, 0.02, 0.01, 0.005, 0.002, 0.001])
        _line(panel, evidence, "epsilon", column)
        if column == "microseconds_per_instance":
            _log_scale(panel)
        else:
            _from_zero(panel)
        heading(sheet, panel, title, below, indent=40)
        foot(sheet, panel, "threshold ε")
    for panel, (parameter, title, below) in zip(axes[3:], OTHERS, strict=True):
        _line(panel, evidence, parameter, "mean_gap")
        _from_zero(panel)
        _ticks_at_values(panel, evidence, parameter)
        _name_leaves(panel, evidence, parameter)
        heading(sheet, panel, title, "mean gap, leaf ratio beside it", indent=40)
        foot(sheet, panel, below)
    legend(sheet, ["gamma", paper.NAME], sheet.height - 26, 2 if narrow else 4)
    return sheet


def _points(evidence: Evidence, parameter: str, column: str) -> list[tuple[float, float]]:
    rows = evidence.select("ablation", parameter=parameter)
    points = [(number(row, "value"), number(row, column)) for row in rows]
    return sorted((x, y) for x, y in points if x is not None and y is not None)


def _line(axes: "Axes", evidence: Evidence, parameter: str, column: str) -> None:
    """Ours as a line, the paper's points as rings."""
    printed = [
        (value, PAPER_COLUMNS[column](one))
        for (name, value), one in paper.ABLATION.items()
        if name == parameter
    ]
    ring = style.method_style(paper.NAME)
    for value, place in printed:
        if place is not None:
            axes.plot([value], [place], clip_on=False, **ring.mark)
    points = _points(evidence, parameter, column)
    if points:
        look = style.method_style("gamma")
        axes.plot(*zip(*points, strict=True), clip_on=False, **look.line, **look.mark)


def _from_zero(axes: "Axes") -> None:
    axes.set_ylim(0, axes.get_ylim()[1] * 1.06)


def _log_scale(axes: "Axes") -> None:
    low, high = (float(value) for value in axes.dataLim.intervaly)
    axes.set_yscale("log")
    axes.set_ylim(low / 1.6, high * 1.6)
    ticks = [step * 10.0**power for power in range(-1, 6) for step in (1, 3)]
    log_ticks(axes.yaxis, [tick for tick in ticks if low / 1.6 <= tick <= high * 1.6])


def _ticks_at_values(axes: "Axes", evidence: Evidence, parameter: str) -> None:
    values = [value for value, _ in _points(evidence, parameter, "mean_gap")]
    if parameter == "grid":
        axes.set_xscale("log", base=2)
    if values:
        log_ticks(axes.xaxis, values)
    axes.margins(x=0.14)


def _name_leaves(axes: "Axes", evidence: Evidence, parameter: str) -> None:
    """Write each point's leaf ratio on the side that the line leaves free."""
    leaves = dict(_points(evidence, parameter, "leaf_percent"))
    points = _points(evidence, parameter, "mean_gap")
    for index, (value, gap) in enumerate(points):
        before, after = points[max(0, index - 1)][1], points[min(index + 1, len(points) - 1)][1]
        rise = gap - before if index else after - gap
        flat = abs(rise) < 0.05 * max(gap for _, gap in points)
        if value in leaves:
            axes.annotate(
                f"{leaves[value]:.0f} %",
                (value, gap),
                xytext=(0 if flat else -7 if rise > 0 else 7, 8),
                textcoords="offset points",
                ha="center" if flat else "right" if rise > 0 else "left",
                fontsize=style.SMALL,
                color=style.MUTED.light,
            )
