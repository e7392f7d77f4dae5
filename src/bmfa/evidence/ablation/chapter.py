"""The figure of the ablations of Algorithm 1, and the claims of the paper on them."""

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from bmfa.evidence.page import paper, plots
from bmfa.evidence.page.claims import Measured, Verdict, claim, judge_direction
from bmfa.evidence.page.formats import format_number
from bmfa.evidence.page.record_set import RecordSet, get_number, get_points
from bmfa.evidence.page.rendering import chapter_values
from bmfa.records import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

# Parameter, column, title and labels of the vertical and the horizontal axis of every panel.
GAP_LABEL = "mean gap; the leaf ratio stands below"
PANELS = (
    ("epsilon", "mean_gap", "Error", "mean gap", "threshold ε"),
    ("epsilon", "leaf_percent", "Leaf ratio", "% of tokens", "threshold ε"),
    ("epsilon", "microseconds_per_instance", "Run time", "µs per instance", "threshold ε"),
    ("depth", "mean_gap", "Depth", GAP_LABEL, "maximum depth of the tree"),
    ("grid", "mean_gap", "Grid", GAP_LABEL, "cells along a side"),
    ("lookahead", "mean_gap", "Look-ahead", GAP_LABEL, "levels below the block"),
)


@chapter_values("ablations")
def rows_beside_the_papers(records: RecordSet) -> dict[str, list[Row]]:
    """Return the rows with the paper's numbers."""
    rows = []
    for row in records.rows("ablation"):
        printed = paper.beside(row, paper.ABLATION.get((row["parameter"], row["value"])))
        if "paper_milliseconds" in printed:
            printed["paper_microseconds_per_instance"] = 1000 * printed["paper_milliseconds"]
        rows.append(printed)
    return {"rows": rows}


@plots.figure("ablation", "ablation")
def ablation(records: RecordSet, narrow: bool) -> "Drawing":
    """Error, leaf ratio and run time over threshold, depth, grid and look-ahead."""
    drawing, panels = plots.panels(6, 3, narrow, 270, ["gamma", paper.NAME])
    every_row = rows_beside_the_papers(records)["rows"]
    for axes, (parameter, column, *labels) in zip(panels, PANELS, strict=True):
        rows = [row for row in every_row if row["parameter"] == parameter]
        printed = get_points(rows, "value", f"paper_{column}")
        measured = get_points(rows, "value", column)
        for x, y in printed:
            plots.draw_point(axes, paper.NAME, x, y)
        plots.draw_line(axes, "gamma", measured)
        ticks = {row["value"]: f"{row['value']:g}" for row in rows}
        if parameter == "epsilon":
            axes.set(xscale="log", xlim=(0.07, 0.0007))
        else:
            axes.set_xscale("log" if parameter == "grid" else "linear")
            axes.margins(x=0.14)
            for row in rows:
                ticks[row["value"]] += f"\n{format_number(get_number(row, 'leaf_percent'), 0)} %"
        plots.set_ticks(axes.xaxis, list(ticks), list(ticks.values()))
        if column == "microseconds_per_instance" and measured:
            plots.set_log_range(axes, "y", [y for _, y in printed + measured], 1.6)
        else:
            axes.set_ylim(0, axes.get_ylim()[1] * 1.06)
        plots.set_axes(axes, *labels)
    return drawing


# Claims


def _values(
    records: RecordSet, parameter: str, values: Sequence[float], column: str = "mean_gap"
) -> list[float]:
    return [records.value("ablation", column, parameter=parameter, value=v) for v in values]


def _decreases(values: Sequence[float]) -> bool:
    return all(after < before for before, after in pairwise(values))


@claim("threshold")
def threshold(records: RecordSet) -> Measured:
    gaps = _values(records, "epsilon", (0.05, 0.001))
    leaves = _values(records, "epsilon", (0.05, 0.001), "leaf_percent")
    holds = _decreases(gaps) and _decreases(leaves[::-1])
    return judge_direction(holds), {"gaps": gaps, "leaves": leaves}


@claim("depth")
def depth(records: RecordSet) -> Measured:
    gaps = _values(records, "depth", (4, 5))
    return judge_direction(gaps[0] == gaps[1]), {"gaps": gaps}


@claim("grid")
def grid(records: RecordSet) -> Measured:
    gaps = _values(records, "grid", (8, 16, 32))
    return judge_direction(_decreases(gaps[::-1])), {"gaps": gaps}


@claim("run-time")
def run_time(records: RecordSet) -> Measured:
    (ours,) = _values(records, "epsilon", (0.005,), "microseconds_per_instance")
    return Verdict.NOT_COMPARABLE, {"microseconds": ours}
