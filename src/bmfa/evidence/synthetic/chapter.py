"""Figures and claims of the synthetic stress test."""

from functools import partial
from typing import TYPE_CHECKING

from bmfa.energy import critical_advantage
from bmfa.evidence.page import panels, paper, plots
from bmfa.evidence.page.claims import Measured, Verdict, claim, judge_direction, judge_numbers
from bmfa.evidence.page.record_set import RecordSet, get_text, need_number, require_any, unique

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Drawing

TOKENS = 256  # of the 16 x 16 grid
PLACEMENTS = {
    "corner": "In the corner",
    "centred": "In the centre",
    "shifted-1-1": "Shifted by one token",
    "shifted-4-4": "Shifted by four tokens",
    "scattered": "Scattered",
}


# Figures


@plots.figure("gallery", "gallery")
def gallery(records: RecordSet, narrow: bool) -> "Drawing":
    """A bright minority, and what the mean, Algorithm 1 and the optimal tree keep of it."""
    strips = []
    for rows in panels.group(records.rows("gallery"), "placement"):
        scores = panels.read_grid(rows[0], "scores")
        shown = [panels.values_panel(scores), *(panels.tree_panel(row, scores) for row in rows)]
        placement = get_text(rows[0], "placement")
        title = PLACEMENTS.get(placement, placement)
        strips.append(panels.Strip(shown, title, panels.minority_shares(rows[0])))
    return panels.draw_strips(strips, narrow, aside=170.0)


@plots.figure("failure-curve", "failure-curve")
def failure_curve(records: RecordSet, narrow: bool) -> "Drawing":
    """Gap against the advantage of the minority for every method, the critical point marked."""
    rows = records.rows("failure-curve")
    sizes = sorted({row["cells"] for row in rows}, reverse=True)
    drawing, all_axes = plots.panels(len(sizes), 2, narrow, 350)
    labels = "gap, F − estimate", "advantage Δ of the bright tokens"
    for cells, axes in zip(sizes, all_axes, strict=True):
        curve = [row for row in rows if row["cells"] == cells]
        largest = max(row["delta"] for row in curve)
        title = f"{cells} bright {'token' if cells == 1 else 'tokens'} of {TOKENS}"
        axes.set(xlim=(0, largest), ylim=plots.value_range(rows, "gap"))
        plots.set_axes(axes, title, *labels)
        plots.draw_methods(axes, curve, "delta", "gap", 270, marker_step=15)
        _mark_critical_point(axes, cells)
    return drawing


def _mark_critical_point(axes: "Axes", cells: int) -> None:
    """Mark the advantage at which the minority holds half of the softmax mass."""
    critical = float(critical_advantage(cells / TOKENS))
    plots.mark_level(axes, x=critical, linestyle=(0, (2, 2)))
    right = critical > axes.get_xlim()[1] / 2
    text = f"half of the mass\nlog {(TOKENS - cells) / cells:g} ≈ {critical:.3f}"
    place = {"xytext": (-6 if right else 6, 0), "ha": "right" if right else "left", "va": "top"}
    plots.annotate(axes, text, (critical, 0.98), xycoords=("data", "axes fraction"), **place)


@plots.figure("placements", "synthetic")
def placements(records: RecordSet, narrow: bool) -> "Drawing":
    """Mean gap and leaf ratio of every method for every placement of the minority."""
    rows = records.rows("synthetic")
    names = unique(rows, "placement")
    indexed = [{**row, "index": names.index(get_text(row, "placement"))} for row in rows]
    ticks = [name.replace("shifted-", "shifted\n").replace("-", ",") for name in names]
    if narrow:
        ticks[1:] = [tick if "\n" in tick else f"\n{tick}" for tick in ticks[1:]]
    drawing, (error, cost) = plots.panels(2, 2, narrow, 340)
    plots.set_axes(error, "Error", "mean gap")
    cost_label = "leaf ratio, % of tokens, logarithmic"
    plots.set_axes(cost, "Cost", cost_label, yscale="log", y_ticks=[0.3, 1, 3, 10, 30, 100])
    for axes, column in ((error, "mean_gap"), (cost, "leaf_percent")):
        axes.set_xlim(-0.3, len(names) - 0.7)
        axes.set_xticks(range(len(names)), ticks)
        plots.draw_methods(axes, indexed, "index", column, 250)
    return drawing


# Claims


def _as_printed(method: str, records: RecordSet) -> Measured:
    """Compare the numbers of a method, minority in the corner, with those that the paper prints."""
    row = records.row("synthetic", method=method, placement="corner")
    return judge_numbers(row, paper.SYNTHETIC[method]), row


claim("mean-loses-minority")(partial(_as_printed, "block-mean"))
claim("algorithm-1-repairs")(partial(_as_printed, paper.ALGORITHM_1))


@claim("worst-placement")
def worst_placement(records: RecordSet) -> Measured:
    rows = require_any(records.rows("synthetic", method=paper.ALGORITHM_1))
    worst = max(rows, key=lambda row: need_number(row, "mean_gap"))
    mean = records.row("synthetic", method="block-mean", placement=worst["placement"])
    near_zero = worst["mean_gap"] <= 2 * paper.SYNTHETIC[paper.ALGORITHM_1].mean_gap
    return judge_direction(near_zero), {"worst": worst, "mean": mean}


@claim("fixed-depth")
def fixed_depth(records: RecordSet) -> Measured:
    verdict, corner = _as_printed("fixed-depth:2", records)[:2]
    centre, algorithm_1 = (
        records.row("synthetic", method=method, placement="centred")
        for method in ("fixed-depth:2", paper.ALGORITHM_1)
    )
    return verdict, {"corner": corner, "centre": centre, "algorithm_1": algorithm_1}


@claim("optimal-tree")
def optimal_tree(records: RecordSet) -> Measured:
    printed = paper.SYNTHETIC[paper.ALGORITHM_1]
    rows = require_any(
        row
        for row in records.rows("synthetic", placement="corner")
        if get_text(row, "method").startswith("optimal")
        and round(need_number(row, "leaf_percent"), 3) <= printed.leaf_percent
    )
    best = min(rows, key=lambda row: need_number(row, "mean_gap"))
    beaten = best["mean_gap"] < printed.mean_gap
    return Verdict.BEATEN if beaten else Verdict.NOT_AS_CLAIMED, best
