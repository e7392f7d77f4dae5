"""Figure of the ablations: threshold, depth, grid and look-ahead of Algorithm 1."""

from typing import TYPE_CHECKING

from bmfa.evidence.page import paper, style
from bmfa.evidence.page.canvas import Canvas, figure
from bmfa.evidence.page.drawing import (
    Margins,
    add_labels,
    draw_line,
    draw_point,
    panel_grid,
    set_ticks,
)
from bmfa.evidence.page.record_set import RecordSet, get_points

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Columns over the threshold, with title and axis label.
THRESHOLD_PANELS = (
    ("mean_gap", "Error", "mean gap"),
    ("leaf_percent", "Leaf ratio", "% of tokens"),
    ("microseconds_per_instance", "Run time", "µs per instance, logarithmic"),
)
# Parameters for which the mean gap is shown, with title and axis label.
PARAMETER_PANELS = (
    ("depth", "Depth", "maximum depth of the tree"),
    ("grid", "Grid", "cells along a side"),
    ("lookahead", "Look-ahead", "levels below the block"),
)
RATIO = 1.6  # the run time axis reaches this factor beyond the data


@figure("ablation", needs=("ablation",))
def ablation(records: RecordSet, narrow: bool) -> Canvas:
    """Error, leaf ratio and run time over threshold, depth, grid and look-ahead."""
    records.require("ablation")
    legend = ["gamma", paper.NAME]
    canvas, panels = panel_grid(
        6, 3, narrow=narrow, height=170, margins=Margins(right=24), legend=legend
    )
    for axes, (column, title, y_label) in zip(panels[:3], THRESHOLD_PANELS, strict=True):
        axes.set(xscale="log", xlim=(0.07, 0.0007))
        set_ticks(axes.xaxis, [0.05, 0.02, 0.01, 0.005, 0.002, 0.001])
        _draw_values(axes, records, "epsilon", column)
        if column == "microseconds_per_instance":
            _set_time_axis(axes)
        else:
            axes.set_ylim(0, axes.get_ylim()[1] * 1.06)
        add_labels(canvas, axes, title, y_label, "threshold ε")
    for axes, (parameter, title, x_label) in zip(panels[3:], PARAMETER_PANELS, strict=True):
        _draw_values(axes, records, parameter, "mean_gap")
        axes.set_ylim(0, axes.get_ylim()[1] * 1.06)
        if parameter == "grid":
            axes.set_xscale("log", base=2)
        if values := [value for value, _ in _values(records, parameter, "mean_gap")]:
            set_ticks(axes.xaxis, values)
        axes.margins(x=0.14)
        _annotate_leaf_ratios(axes, records, parameter)
        add_labels(canvas, axes, title, "mean gap, annotated with the leaf ratio", x_label)
    return canvas


def _values(records: RecordSet, parameter: str, column: str) -> list[tuple[float, float]]:
    return get_points(records.rows("ablation", parameter=parameter), "value", column)


def _printed(point: paper.AblationPoint, column: str) -> float | None:
    if column == "microseconds_per_instance":
        return None if point.milliseconds is None else 1000 * point.milliseconds
    return point.mean_gap if column == "mean_gap" else point.leaf_percent


def _draw_values(axes: "Axes", records: RecordSet, parameter: str, column: str) -> None:
    """Draw our values as a line, and the paper's as rings."""
    for (name, value), point in paper.ABLATION.items():
        if name == parameter:
            draw_point(axes, paper.NAME, value, _printed(point, column))
    draw_line(axes, "gamma", _values(records, parameter, column))


def _set_time_axis(axes: "Axes") -> None:
    low, high = (float(value) for value in axes.dataLim.intervaly)
    axes.set(yscale="log", ylim=(low / RATIO, high * RATIO))
    ticks = [step * 10.0**power for power in range(-1, 6) for step in (1, 3)]
    set_ticks(axes.yaxis, [tick for tick in ticks if low / RATIO <= tick <= high * RATIO])


def _annotate_leaf_ratios(axes: "Axes", records: RecordSet, parameter: str) -> None:
    """Write the leaf ratio beside each point, on the side that the line leaves free."""
    leaves = dict(_values(records, parameter, "leaf_percent"))
    line = _values(records, parameter, "mean_gap")
    for index, (value, gap) in enumerate(line):
        if value not in leaves:
            continue
        before, after = line[max(0, index - 1)][1], line[min(index + 1, len(line) - 1)][1]
        rise = gap - before if index else after - gap
        flat = abs(rise) < 0.05 * max(gap for _, gap in line)
        axes.annotate(
            f"{leaves[value]:.0f} %",
            (value, gap),
            xytext=(0 if flat else -7 if rise > 0 else 7, 8),
            textcoords="offset points",
            ha="center" if flat else "right" if rise > 0 else "left",
            fontsize=style.SMALL,
            color=style.MUTED.light,
        )
