"""Gap against leaf ratio for every data source, ours and the paper's."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bmfa.evidence.page import paper, style
from bmfa.evidence.page.marks import LEGEND_ROW, foot, heading, legend, log_ticks
from bmfa.evidence.page.records import Evidence, in_order, number, text
from bmfa.evidence.page.sheet import Margins, Sheet, panels
from bmfa.records import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Below this gap the axis is linear, so that a gap of 0 has a place.
LINEAR = 0.001


# Where the name of a method stands beside its point: pixels, and the side it begins at.
NAME_PLACES = {
    "sparge-mean": (-2, 9, "left"),
    "mean-variance": (8, -4, "left"),
    "fixed-depth:1": (2, -17, "center"),
    "fixed-depth:2": (8, -3, "left"),
    paper.ALGORITHM_1: (0, 9, "center"),
    "optimal:0.001": (0, 10, "center"),
}


@dataclass(frozen=True)
class Source:
    """The points of one data source, and those that the paper prints for it; a sweep has no
    instances."""

    title: str
    instances: int
    rows: Sequence[Row]
    printed: Mapping[str, paper.Point]


def sources(evidence: Evidence) -> list[Source]:
    """The synthetic sweep and every probe, image-edge where there are two modes."""
    found = []
    corner = evidence.select("synthetic", placement="corner")
    if corner:
        found.append(Source("Synthetic, corner", 0, corner, paper.SYNTHETIC))
    for dataset in paper.sort_datasets(in_order(evidence.rows("probe"), "dataset")):
        rows = evidence.select("probe", dataset=dataset, group="all")
        modes = in_order(rows, "mode")
        mode = "image-edge" if "image-edge" in modes else next(iter(modes), "")
        rows = [row for row in rows if text(row, "mode") == mode]
        if rows:
            title = paper.dataset_title(dataset) + ("" if mode == "image-edge" else f", {mode}")
            count = int(number(rows[0], "instances") or 0)
            found.append(Source(title, count, rows, paper.PROBES.get((dataset, mode), {})))
    return found


def trade_off(evidence: Evidence, narrow: bool) -> Sheet:
    """Mean gap against leaf ratio, one panel for each data source."""
    found = sources(evidence)
    if not found:
        raise ValueError(
            "no rows of the corner placement or of all instances among the records; "
            f"make them with: {evidence.commands('synthetic')[0]}"
        )
    methods = list(dict.fromkeys(m for one in found for m in in_order(one.rows, "method")))
    columns, legend_columns = (1, 2) if narrow else (min(2, len(found)), 4)
    legend_rows = -(-(len(methods) + 1) // legend_columns)
    width = style.NARROW if narrow else style.WIDE
    room = legend_rows * LEGEND_ROW + 12
    sheet, axes = panels(len(found), columns, width, 210, Margins(left=44), foot=room)
    for source, panel in zip(found, axes, strict=True):
        points(panel, source)
        count = f", {source.instances:,} instances" if source.instances else ""
        below = "mean gap, logarithmic above 0.001"
        heading(sheet, panel, source.title + count, below, indent=40)
        foot(sheet, panel, "leaf ratio, % of tokens, logarithmic")
    legend(sheet, [*methods, paper.NAME], sheet.height - room + 8, legend_columns)
    return sheet


def points(axes: "Axes", source: Source) -> None:
    """The points of a source on its axes, the paper's as rings around where ours should be."""
    axes.set_xscale("log")
    axes.set_yscale("symlog", linthresh=LINEAR, linscale=0.4)
    axes.set(xlim=(0.25, 160), ylim=(-0.0004, 4))
    log_ticks(axes.xaxis, [0.4, 1, 3, 10, 30, 100])
    log_ticks(axes.yaxis, [0, 0.001, 0.01, 0.1, 1])
    ring = style.method_style(paper.NAME)
    for printed in source.printed.values():
        if printed.leaf_percent is not None:
            axes.plot([printed.leaf_percent], [printed.mean_gap], clip_on=False, **ring.mark)
    for row in source.rows:
        leaf, gap = number(row, "leaf_percent"), number(row, "mean_gap")
        if leaf is not None and gap is not None:
            mark = style.method_style(text(row, "method")).open_mark
            axes.plot([leaf], [gap], linestyle="none", clip_on=False, **mark)


def named_points(axes: "Axes", source: Source) -> None:
    """The paper's methods but its oracle, and the optimal tree, each named beside its point."""
    axes.set_xscale("log")
    axes.set(xlim=(0.25, 160), ylim=(0, 2.9))
    log_ticks(axes.xaxis, [0.4, 1, 3, 10, 30, 100])
    axes.set_yticks([0, 1, 2])
    for row in source.rows:
        method = text(row, "method")
        leaf, gap = number(row, "leaf_percent"), number(row, "mean_gap")
        if leaf is None or gap is None or method not in NAME_PLACES:
            continue
        look = style.method_style(method)
        x, y, side = NAME_PLACES[method]
        axes.plot([leaf], [gap], linestyle="none", clip_on=False, **look.mark)
        axes.annotate(
            method,
            (leaf, gap),
            xytext=(x, y),
            textcoords="offset points",
            ha=side,
            fontsize=style.SMALL,
            color=look.colour.light,
            bbox={"facecolor": style.SURFACE.light, "edgecolor": "none", "pad": 0.5},
        )
