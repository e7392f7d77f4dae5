"""Figures of classification and token reduction: accuracy over leaf ratio, speed and operations."""

from typing import TYPE_CHECKING

from bmfa.evidence.page import paper, style
from bmfa.evidence.page.canvas import Canvas, figure
from bmfa.evidence.page.drawing import add_labels, panel_grid, set_log_range
from bmfa.evidence.page.model_plots import (
    OUTPUT_MEASURES,
    PanelData,
    draw_families,
    imagenet_rows,
    plot_against_leaf_ratio,
    set_measure_axis,
)
from bmfa.evidence.page.model_runs import ModelRun, evaluation_runs, is_reduction
from bmfa.evidence.page.record_set import RecordSet, get_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RATE = "images_per_second"
# The accuracy that is shown; images without labels have the agreement only.
ACCURACIES = {"top1_percent": "top-1, %", "agreement_percent": "agreement with the full model, %"}


def screened_runs(records: RecordSet) -> list[ModelRun]:
    """Return every evaluation, with its rules that have a leaf ratio."""
    return evaluation_runs(
        records,
        lambda row: get_number(row, "leaf_percent") is not None and not is_reduction(row),
    )


def reduction_runs(records: RecordSet) -> list[ModelRun]:
    """Return every evaluation, with its token reductions."""
    return evaluation_runs(records, is_reduction)


def timed_runs(records: RecordSet) -> list[ModelRun]:
    """Return every evaluation, with its methods whose speed was measured."""
    return evaluation_runs(records, lambda row: bool(get_number(row, RATE)))


@figure("top1", needs=("evaluate",), available=lambda records: bool(screened_runs(records)))
def top1(records: RecordSet, narrow: bool) -> Canvas:
    """Top-1 accuracy against leaf ratio, ours and the paper's."""
    records.require("evaluate")
    data = [
        PanelData(run.panel_title, run, full=get_number(run.full or {}, "top1_percent"))
        for run in screened_runs(records)
    ]
    printed = ModelRun(paper.MODEL, None, imagenet_rows())
    full = paper.IMAGENET["full"].top1_percent
    data.append(PanelData(f"Paper: {paper.MODEL}, ImageNet", printed, full=full))
    measure = ("top1_percent", "top-1, %; the line is the full model")
    return plot_against_leaf_ratio(data, [measure], narrow)


@figure("accuracy", needs=("evaluate",), available=lambda records: bool(timed_runs(records)))
def accuracy(records: RecordSet, narrow: bool) -> Canvas:
    """Top-1 accuracy against images per second for every method."""
    records.require("evaluate")
    runs = timed_runs(records)
    if not runs:
        raise ValueError("no evaluate row was timed; run bmfa evaluate with --repeats 5")
    names = list(dict.fromkeys(name for run in runs for name in run.families()))
    columns = min(2, len(runs))
    canvas, panels = panel_grid(len(runs), columns, narrow=narrow, height=240, legend=names)
    for run, axes in zip(runs, panels, strict=True):
        labelled = any(get_number(row, "top1_percent") is not None for row in run.rows)
        column = "top1_percent" if labelled else "agreement_percent"
        _set_axes(axes, run, column)
        _mark_full_model(axes, run, RATE, column)
        draw_families(axes, run, RATE, column)
        x_label = "images per second, logarithmic; the lines cross at the full model"
        add_labels(canvas, axes, run.panel_title, ACCURACIES[column], x_label)
    return canvas


def _set_axes(axes: "Axes", run: ModelRun, column: str) -> None:
    rates, values = (
        [value for row in run.all_rows if (value := get_number(row, name)) is not None]
        for name in (RATE, column)
    )
    set_log_range(axes, "x", [rate for rate in rates if rate > 0], 1.15)
    margin = max(0.08 * (max(values) - min(values)), 0.2)
    axes.set_ylim(min(values) - margin, max(values) + margin)


def _mark_full_model(axes: "Axes", run: ModelRun, x: str, y: str = "") -> None:
    full = run.full or {}
    for column, draw in ((x, axes.axvline), (y, axes.axhline)):
        value = get_number(full, column)
        if value is not None:
            draw(value, color=style.INK.light, linewidth=1.0)


@figure("reductions", needs=("evaluate",), available=lambda records: bool(reduction_runs(records)))
def reductions(records: RecordSet, narrow: bool) -> Canvas:
    """Agreement and output KL of token reductions against operations."""
    records.require("evaluate")
    runs = reduction_runs(records)
    if not runs:
        raise ValueError(
            "no evaluate row is of a reduction; run bmfa evaluate with --method tome:8"
        )
    names = list(dict.fromkeys(name for run in runs for name in run.families()))
    canvas, panels = panel_grid(2 * len(runs), 2, narrow=narrow, height=210, legend=names)
    pairs = [(run, measure) for run in runs for measure in OUTPUT_MEASURES]
    for axes, (run, (column, y_label)) in zip(panels, pairs, strict=True):
        set_measure_axis(axes, column, run.rows)
        draw_families(axes, run, "gflops", column)
        _mark_full_model(axes, run, "gflops")
        x_label = "GFLOPs per image; the line is the full model"
        add_labels(canvas, axes, run.panel_title, y_label, x_label)
    return canvas
