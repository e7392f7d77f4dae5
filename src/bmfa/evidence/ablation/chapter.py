"""The chapter on the ablations of Algorithm 1: its figure, and the claims of the paper on them."""

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from bmfa.evidence.page import paper, plots
from bmfa.evidence.page.chapter import Chapter
from bmfa.evidence.page.claims import Measured, Verdict, claim, judge_direction
from bmfa.evidence.page.formats import format_number, format_numbers
from bmfa.evidence.page.record_set import RecordSet, get_number, get_points, get_text

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


def values(records: RecordSet) -> dict[str, Any]:
    """Return the rows with the paper's numbers, and those of the look-ahead by level."""
    rows = []
    for row in records.rows("ablation"):
        point = paper.ABLATION.get((get_text(row, "parameter"), get_number(row, "value") or 0.0))
        printed = paper.beside(row, point)
        if "paper_milliseconds" in printed:
            printed["paper_microseconds_per_instance"] = 1000 * printed["paper_milliseconds"]
        rows.append(printed)
    lookahead = {row["value"]: row for row in rows if row["parameter"] == "lookahead"}
    return {"dataset": _dataset(records), "lookahead": {1: {}, 2: {}} | lookahead, "rows": rows}


def _dataset(records: RecordSet) -> str:
    return paper.dataset_title(str(records.setting("ablation", "dataset") or "one source"))


@plots.figure("ablation", "ablation")
def ablation(records: RecordSet, narrow: bool) -> "Drawing":
    """Error, leaf ratio and run time over threshold, depth, grid and look-ahead."""
    drawing, panels = plots.panels(6, 3, narrow, 270, ["gamma", paper.NAME])
    every_row = values(records)["rows"]
    for axes, (parameter, column, title, y_label, x_label) in zip(panels, PANELS, strict=True):
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
        plots.label(axes, title, y_label, x_label)
    return drawing


# Claims


def _values(
    records: RecordSet, parameter: str, values: Sequence[float], column: str = "mean_gap"
) -> list[float]:
    return [records.value("ablation", column, parameter=parameter, value=v) for v in values]


def _decreases(values: Sequence[float]) -> bool:
    return all(after < before for before, after in pairwise(values))


def _data_note(records: RecordSet) -> str:
    return (
        f"Measured on {_dataset(records)}, scores from our fit. The paper's numbers are for COCO, so "
        "only the trend is comparable."
    )


@claim(
    "Threshold 0.05 to 0.001: mean gap and leaf ratio",
    "1.644 to 0.120, 9.26 to 53.24 %",
    "ablation",
)
def _threshold(records: RecordSet) -> Measured:
    gaps = _values(records, "epsilon", (0.05, 0.001))
    leaves = _values(records, "epsilon", (0.05, 0.001), "leaf_percent")
    first, last = (format_number(leaf, 2) for leaf in leaves)
    shown = f"{' to '.join(map(format_number, gaps))}, {first} to {last} %"
    verdict = judge_direction(_decreases(gaps) and _decreases(leaves[::-1]))
    return shown, verdict, _data_note(records)


@claim(
    "Depth 5 changes nothing on a 16 × 16 grid: mean gap at depth 4 and 5",
    "0.549, 0.549",
    "ablation",
)
def _depth(records: RecordSet) -> Measured:
    gaps = _values(records, "depth", (4, 5))
    note = "True on any data: the leaves at depth 4 are single tokens, which cannot be split."
    return format_numbers(*gaps), judge_direction(gaps[0] == gaps[1]), note


@claim(
    "A finer grid has fewer leaves and loses more: mean gap at 8, 16 and 32 cells",
    "0.403, 0.549, 0.910",
    "ablation",
)
def _grid(records: RecordSet) -> Measured:
    gaps = _values(records, "grid", (8, 16, 32))
    return format_numbers(*gaps), judge_direction(_decreases(gaps[::-1])), _data_note(records)


@claim(
    "Screening one instance at the default threshold",
    "2,099 µs",
    "ablation",
)
def _run_time(records: RecordSet) -> Measured:
    (ours,) = _values(records, "epsilon", (0.005,), "microseconds_per_instance")
    note = (
        "Another machine and other code: a batch in torch here, one instance at a time in NumPy in "
        "the paper."
    )
    return f"{format_number(ours, 0)} µs", Verdict.NOT_COMPARABLE, note


ABLATIONS = Chapter(
    "ablations",
    "Ablations",
    "ablation/ablation.html.j2",
    "ablation",
    (_threshold, _depth, _grid, _run_time),
    values,
)
