"""Lines named at their ends: the failure curve, the placements, the distribution of gaps."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from bmfa.energy import critical_advantage
from bmfa.evidence.page import paper, style
from bmfa.evidence.page.marks import end_labels, foot, heading
from bmfa.evidence.page.records import Evidence, in_order, number, text
from bmfa.evidence.page.sheet import Margins, Sheet, panels
from bmfa.records import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TOKENS = 256
NAMED = Margins(right=130)


def failure_curve(evidence: Evidence, narrow: bool) -> Sheet:
    """Gap against the minority's advantage, one panel for each size of the minority."""
    rows = evidence.require("failure-curve")
    sizes = sorted({int(size) for row in rows if (size := number(row, "cells"))}, reverse=True)
    limits = _range(rows, "gap")
    sheet, axes = _line_panels(len(sizes), narrow, height=270)
    for cells, panel in zip(sizes, axes, strict=True):
        some = [row for row in rows if row.get("cells") == cells]
        panel.set_xlim(0, max(number(row, "delta") or 0.0 for row in some))
        panel.set_ylim(limits)
        ends = _lines(panel, some, "delta", "gap", every=15)
        _critical_point(panel, cells)
        share = "token" if cells == 1 else "tokens"
        heading(sheet, panel, f"{cells} bright {share} of {TOKENS}", "gap, F − estimate")
        foot(sheet, panel, "advantage Δ of the bright tokens")
        end_labels(sheet, panel, ends)
    return sheet


def placements(evidence: Evidence, narrow: bool) -> Sheet:
    """Mean gap and leaf ratio for every place of the minority."""
    rows = evidence.require("synthetic")
    places = in_order(rows, "placement")
    sheet, axes = _line_panels(2, narrow, height=250)
    ratio = "leaf ratio, % of tokens, logarithmic"
    for panel, column, title, below in (
        (axes[0], "mean_gap", "What is lost", "mean gap"),
        (axes[1], "leaf_percent", "What it costs", ratio),
    ):
        if column == "leaf_percent":
            panel.set_yscale("log")
            panel.set_yticks([0.3, 1, 3, 10, 30, 100], ["0.3", "1", "3", "10", "30", "100"])
            panel.minorticks_off()
        numbered = [{**row, "place": places.index(text(row, "placement"))} for row in rows]
        ends = _lines(panel, numbered, "place", column, every=1)
        panel.set_xlim(-0.3, len(places) - 0.7)
        panel.set_xticks(range(len(places)), _place_names(places, narrow))
        heading(sheet, panel, title, below)
        end_labels(sheet, panel, ends)
    return sheet


def _place_names(places: Sequence[str], narrow: bool) -> list[str]:
    """Names for the axis; where there is little room, every second short one stands lower."""
    names = [place.replace("shifted-", "shifted\n").replace("-", ",") for place in places]
    lower = [narrow and index % 2 == 0 < index and "\n" not in n for index, n in enumerate(names)]
    return [f"\n{name}" if low else name for name, low in zip(names, lower, strict=True)]


def distribution(evidence: Evidence, narrow: bool) -> Sheet:
    """Gap at every percentile of the instances, one panel for each data source."""
    rows = [row for row in evidence.require("probe") if row.get("gap_quantiles")]
    mode = "image-edge" if any(row.get("mode") == "image-edge" for row in rows) else None
    rows = [row for row in rows if mode in (None, row.get("mode"))]
    datasets = paper.sort_datasets(in_order(rows, "dataset"))
    if not datasets:
        raise ValueError("no probe row holds gap_quantiles; probe again with this version")
    limits = _range(_quantile_points(rows), "gap")
    sheet, axes = _line_panels(len(datasets), narrow, height=250, columns=min(3, len(datasets)))
    for dataset, panel in zip(datasets, axes, strict=True):
        some = [row for row in rows if text(row, "dataset") == dataset]
        panel.set(xlim=(0, 100), ylim=limits)
        ends = _lines(panel, _quantile_points(some), "percentile", "gap", every=16)
        count = int(number(some[0], "instances") or 0)
        heading(sheet, panel, f"{paper.dataset_title(dataset)}, {count:,} instances", "gap")
        foot(sheet, panel, "percentile of the instances")
        end_labels(sheet, panel, ends)
    return sheet


def _line_panels(
    count: int, narrow: bool, height: float, columns: int = 2
) -> tuple[Sheet, list["Axes"]]:
    if narrow:
        return panels(count, 1, style.NARROW, height, NAMED)
    return panels(count, columns, style.WIDE, height, NAMED)


def _lines(axes: "Axes", rows: Sequence[Row], x: str, y: str, every: int) -> dict[str, float]:
    """Draw a line for each method; where each ends."""
    ends = {}
    methods = in_order(rows, "method")
    for index, method in enumerate(methods):
        some = [row for row in rows if text(row, "method") == method]
        points = [(number(row, x), number(row, y)) for row in some]
        known = sorted((a, b) for a, b in points if a is not None and b is not None)
        if not known:
            continue
        look = style.method_style(method)
        # Markers of the methods stand at different places, or lines that coincide would hide them.
        start = index * every // len(methods)
        xs, ys = zip(*known, strict=True)
        axes.plot(xs, ys, markevery=(start, every), clip_on=False, **look.line, **look.mark)
        ends[method] = ys[-1]
    return ends


def _range(rows: Sequence[Row], column: str) -> tuple[float, float]:
    """From a little below the least value to a little above the greatest."""
    values = [value for row in rows if (value := number(row, column)) is not None]
    highest = max(values, default=0.0) or 1.0
    return min(values, default=0.0) - 0.04 * highest, 1.15 * highest


def _critical_point(axes: "Axes", cells: int) -> None:
    """Mark where the minority holds half of the Gibbs mass, on the side that has more room."""
    place = float(critical_advantage(cells / TOKENS))
    odds = (TOKENS - cells) / cells
    axes.axvline(place, color=style.INK.light, linewidth=1.0, linestyle=(0, (2, 2)))
    top, most = axes.get_ylim()[1], axes.get_xlim()[1]
    shift, side = (-6, "right") if place > most / 2 else (6, "left")
    for line, words in enumerate(("half of the mass", f"log {odds:g} ≈ {place:.3f}")):
        axes.annotate(
            words,
            (place, top),
            xytext=(shift, -12 - 15 * line),
            textcoords="offset points",
            ha=side,
            fontsize=style.SMALL,
            bbox={"facecolor": style.SURFACE.light, "edgecolor": "none", "pad": 1.0},
        )


def _quantile_points(rows: Sequence[Row]) -> list[Row]:
    """One row for each percentile of each method."""
    points = []
    for row in rows:
        quantiles = row["gap_quantiles"]
        step = 100 / max(1, len(quantiles) - 1)
        for index, gap in enumerate(quantiles):
            points.append({"method": text(row, "method"), "percentile": index * step, "gap": gap})
    return points
