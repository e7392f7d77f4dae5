"""Figures of the synthetic stress test: gallery, placements and failure curve."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from bmfa.energy import critical_advantage
from bmfa.evidence.page import style
from bmfa.evidence.page.canvas import Canvas, figure
from bmfa.evidence.page.drawing import (
    Margins,
    add_labels,
    draw_method_lines,
    label_line_ends,
    panel_grid,
    set_ticks,
    value_range,
)
from bmfa.evidence.page.record_set import RecordSet, get_number, get_text, unique
from bmfa.evidence.page.score_maps import ScoreMap, draw_row, minority_shares, tree_title

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TOKENS = 256  # of the 16 x 16 grid
LABELLED = Margins(right=130)  # space for the names of the methods
PLACEMENTS = {
    "corner": "In the corner",
    "centred": "In the centre",
    "shifted-1-1": "Shifted by one token",
    "shifted-4-4": "Shifted by four tokens",
    "scattered": "Scattered",
}
GAP = 10.0  # pixels between panels


@figure("gallery", needs=("gallery",))
def gallery(records: RecordSet, narrow: bool) -> Canvas:
    """A bright minority, and what the mean, Algorithm 1 and the optimal tree keep of it."""
    rows = records.require("gallery")
    placements = unique(rows, "placement")
    maps = [
        ScoreMap.from_rows([row for row in rows if get_text(row, "placement") == placement])
        for placement in placements
    ]
    columns = 1 + max(len(score_map.rows) for score_map in maps)
    width, text_width = (style.NARROW, 0.0) if narrow else (style.WIDE, 190.0)
    side = min(165.0, (width - text_width - (columns - 1) * GAP - 1) / columns)
    above, below = (74.0, 44.0) if narrow else (26.0, 22.0)
    height = above + side + below
    canvas = Canvas(width, len(maps) * height)
    for index, (placement, score_map) in enumerate(zip(placements, maps, strict=True)):
        top = index * height + above
        trees = [score_map.tree_panel(row, tree_title(row)) for row in score_map.rows]
        draw_row(canvas, text_width, top, side, GAP, [score_map.scores_panel(), *trees])
        y = top - above + 14 if narrow else top + 14
        canvas.add_title(0, y, PLACEMENTS.get(placement, placement))
        shares = minority_shares(score_map.first)
        for line, text in enumerate([", ".join(shares)] if narrow else shares):
            canvas.add_note(0, y + 18 + 17 * line, text)
    return canvas


@figure("failure-curve", needs=("failure-curve",))
def failure_curve(records: RecordSet, narrow: bool) -> Canvas:
    """Gap against the advantage of the minority for every method, the critical point marked."""
    rows = records.require("failure-curve")
    sizes = sorted({int(size) for row in rows if (size := get_number(row, "cells"))}, reverse=True)
    limits = value_range(rows, "gap")
    canvas, panels = panel_grid(len(sizes), 2, narrow=narrow, height=270, margins=LABELLED)
    for cells, axes in zip(sizes, panels, strict=True):
        curve = [row for row in rows if row.get("cells") == cells]
        axes.set_xlim(0, max(get_number(row, "delta") or 0.0 for row in curve))
        axes.set_ylim(limits)
        ends = draw_method_lines(axes, curve, "delta", "gap", marker_step=15)
        _mark_critical_point(axes, cells)
        title = f"{cells} bright {'token' if cells == 1 else 'tokens'} of {TOKENS}"
        x_label = "advantage Δ of the bright tokens"
        add_labels(canvas, axes, title, "gap, F − estimate", x_label)
        label_line_ends(canvas, axes, ends)
    return canvas


@figure("placements", needs=("synthetic",))
def placements(records: RecordSet, narrow: bool) -> Canvas:
    """Mean gap and leaf ratio of every method for every placement of the minority."""
    rows = records.require("synthetic")
    names = unique(rows, "placement")
    indexed = [{**row, "index": names.index(get_text(row, "placement"))} for row in rows]
    canvas, panels = panel_grid(2, 2, narrow=narrow, height=250, margins=LABELLED)
    panels[1].set_yscale("log")
    set_ticks(panels[1].yaxis, [0.3, 1, 3, 10, 30, 100])
    for axes, column, title, y_label in (
        (panels[0], "mean_gap", "Error", "mean gap"),
        (panels[1], "leaf_percent", "Cost", "leaf ratio, % of tokens, logarithmic"),
    ):
        ends = draw_method_lines(axes, indexed, "index", column, marker_step=1)
        axes.set_xlim(-0.3, len(names) - 0.7)
        axes.set_xticks(range(len(names)), _placement_ticks(names, narrow))
        add_labels(canvas, axes, title, y_label)
        label_line_ends(canvas, axes, ends)
    return canvas


def _placement_ticks(placements: Sequence[str], narrow: bool) -> list[str]:
    """Tick labels; on a narrow screen every second short one is moved to the second line."""
    names = [name.replace("shifted-", "shifted\n").replace("-", ",") for name in placements]
    lower = [narrow and index % 2 == 0 < index and "\n" not in n for index, n in enumerate(names)]
    return [f"\n{name}" if low else name for name, low in zip(names, lower, strict=True)]


def _mark_critical_point(axes: "Axes", cells: int) -> None:
    """Mark the advantage at which the minority holds half of the softmax mass."""
    critical = float(critical_advantage(cells / TOKENS))
    odds = (TOKENS - cells) / cells
    axes.axvline(critical, color=style.INK.light, linewidth=1.0, linestyle=(0, (2, 2)))
    shift, alignment = (-6, "right") if critical > axes.get_xlim()[1] / 2 else (6, "left")
    for line, text in enumerate(("half of the mass", f"log {odds:g} ≈ {critical:.3f}")):
        axes.annotate(
            text,
            (critical, axes.get_ylim()[1]),
            xytext=(shift, -12 - 15 * line),
            textcoords="offset points",
            ha=alignment,
            fontsize=style.SMALL,
            bbox={"facecolor": style.SURFACE.light, "edgecolor": "none", "pad": 1.0},
        )
