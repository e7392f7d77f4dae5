"""Figures of the instance probes: gap against leaf ratio, and the distribution of gaps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bmfa.evidence.page import paper
from bmfa.evidence.page.canvas import Canvas, figure
from bmfa.evidence.page.drawing import (
    Margins,
    add_labels,
    draw_method_lines,
    draw_point,
    label_line_ends,
    panel_grid,
    set_ticks,
    value_range,
)
from bmfa.evidence.page.record_set import RecordSet, get_number, get_text, unique
from bmfa.records import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LINEAR_BELOW = 0.001  # nats; below it the gap axis is linear, so that it can show a gap of 0
# Offset in pixels and alignment of a method's name beside its point in the overview figure.
NAME_OFFSETS = {
    "block-mean": (-2, 9, "left"),
    "mean-variance": (8, -4, "left"),
    "fixed-depth:1": (2, -17, "center"),
    "fixed-depth:2": (8, -3, "left"),
    paper.ALGORITHM_1: (0, 9, "center"),
    "optimal:0.001": (0, 10, "center"),
}


@dataclass(frozen=True)
class DataSource:
    """The rows of one data source, and the numbers that the paper prints for it.

    Attributes:
        title: its name.
        instances: number of instances; 0 for the synthetic sweep.
        rows: one row for each method.
        printed: the paper's points by method.
    """

    title: str
    instances: int
    rows: Sequence[Row]
    printed: Mapping[str, paper.Point]


def data_sources(records: RecordSet) -> list[DataSource]:
    """Return the synthetic sweep and every probe, in image-edge mode if both modes were measured."""
    sources = []
    if corner := records.rows("synthetic", placement="corner"):
        sources.append(DataSource("Synthetic, corner", 0, corner, paper.SYNTHETIC))
    for dataset in paper.sort_datasets(unique(records.rows("probe"), "dataset")):
        rows = [r for r in records.rows("probe", group="all") if get_text(r, "dataset") == dataset]
        modes = unique(rows, "mode")
        mode = "image-edge" if "image-edge" in modes else next(iter(modes), "")
        rows = [row for row in rows if get_text(row, "mode") == mode]
        if rows:
            title = paper.dataset_title(dataset) + ("" if mode == "image-edge" else f", {mode}")
            count = int(get_number(rows[0], "instances") or 0)
            sources.append(DataSource(title, count, rows, paper.PROBES.get((dataset, mode), {})))
    return sources


@figure(
    "trade-off", needs=("synthetic", "probe"), available=lambda records: bool(data_sources(records))
)
def trade_off(records: RecordSet, narrow: bool) -> Canvas:
    """Mean gap against leaf ratio for every method and data source, with the paper's points."""
    sources = data_sources(records)
    if not sources:
        raise ValueError(
            "no rows of the corner placement or of all instances among the records; "
            f"make them with: {records.commands('synthetic')[0]}"
        )
    methods = list(dict.fromkeys(m for source in sources for m in unique(source.rows, "method")))
    columns, legend = min(2, len(sources)), [*methods, paper.NAME]
    canvas, panels = panel_grid(len(sources), columns, narrow=narrow, height=210, legend=legend)
    for source, axes in zip(sources, panels, strict=True):
        _draw_points(axes, source)
        count = f", {source.instances:,} instances" if source.instances else ""
        y_label = f"mean gap, logarithmic above {LINEAR_BELOW:g}"
        x_label = "leaf ratio, % of tokens, logarithmic"
        add_labels(canvas, axes, source.title + count, y_label, x_label)
    return canvas


def _draw_points(axes: "Axes", source: DataSource) -> None:
    """Draw the points of a source; rings are the paper's points."""
    axes.set_xscale("log")
    axes.set_yscale("symlog", linthresh=LINEAR_BELOW, linscale=0.4)
    axes.set(xlim=(0.25, 160), ylim=(-0.0004, 4))
    set_ticks(axes.xaxis, [0.4, 1, 3, 10, 30, 100])
    set_ticks(axes.yaxis, [0, 0.001, 0.01, 0.1, 1])
    for point in source.printed.values():
        draw_point(axes, paper.NAME, point.leaf_percent, point.mean_gap)
    for row in source.rows:
        leaf, gap = get_number(row, "leaf_percent"), get_number(row, "mean_gap")
        draw_point(axes, get_text(row, "method"), leaf, gap)


def _has_quantiles(records: RecordSet) -> bool:
    return any(row.get("gap_quantiles") for row in records.rows("probe"))


@figure("distribution", needs=("probe",), available=_has_quantiles)
def distribution(records: RecordSet, narrow: bool) -> Canvas:
    """Gap at every percentile of the instances for every method."""
    rows = [row for row in records.require("probe") if row.get("gap_quantiles")]
    if not rows:
        raise ValueError("no probe row holds gap_quantiles; run bmfa probe with this version")
    rows = [row for row in rows if row.get("mode") == "image-edge"] or rows
    datasets = paper.sort_datasets(unique(rows, "dataset"))
    limits = value_range(_quantile_rows(rows), "gap")
    margins, columns = Margins(right=130), min(3, len(datasets))
    canvas, panels = panel_grid(len(datasets), columns, narrow=narrow, height=250, margins=margins)
    for dataset, axes in zip(datasets, panels, strict=True):
        found = [row for row in rows if get_text(row, "dataset") == dataset]
        axes.set(xlim=(0, 100), ylim=limits)
        ends = draw_method_lines(axes, _quantile_rows(found), "percentile", "gap", marker_step=16)
        count = int(get_number(found[0], "instances") or 0)
        title = f"{paper.dataset_title(dataset)}, {count:,} instances"
        add_labels(canvas, axes, title, "gap", "percentile of the instances")
        label_line_ends(canvas, axes, ends)
    return canvas


def _quantile_rows(rows: Sequence[Row]) -> list[Row]:
    """One row for each percentile of each method."""
    return [
        {"method": get_text(row, "method"), "percentile": 100 * index / steps, "gap": gap}
        for row in rows
        for steps in [max(1, len(row["gap_quantiles"]) - 1)]
        for index, gap in enumerate(row["gap_quantiles"])
    ]
