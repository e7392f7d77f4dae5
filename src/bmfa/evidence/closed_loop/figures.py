"""Figures of the closed loop: agreement and output KL over leaf ratio, and over layers."""

from bmfa.evidence.page import paper
from bmfa.evidence.page.canvas import Canvas, figure
from bmfa.evidence.page.drawing import Margins, add_labels, draw_line, label_line_ends, panel_grid
from bmfa.evidence.page.model_plots import (
    OUTPUT_MEASURES,
    PanelData,
    imagenet_rows,
    plot_against_leaf_ratio,
    set_measure_axis,
    visible_points,
)
from bmfa.evidence.page.model_runs import ModelRun, closed_loop_runs, layer_runs
from bmfa.evidence.page.record_set import RecordSet, get_text, unique


@figure("closed-loop", needs=("closed-loop",))
def closed_loop(records: RecordSet, narrow: bool) -> Canvas:
    """Agreement with the full model and output KL against leaf ratio, ours and the paper's."""
    records.require("closed-loop")
    data = [
        PanelData(run.panel_title, run, imagenet_rows() if run.is_papers_model else [])
        for run in closed_loop_runs(records)
    ]
    printed = [{"method": name, **vars(point)} for name, point in paper.CLOSED_LOOP.items()]
    data.append(PanelData(f"Paper: {paper.MODEL}, COCO", ModelRun(paper.MODEL, None, printed)))
    return plot_against_leaf_ratio(data, OUTPUT_MEASURES, narrow)


def _has_layers(records: RecordSet) -> bool:
    return bool(layer_runs(records) or layer_runs(records, single=True))


@figure("layers", needs=("closed-loop",), available=_has_layers)
def layers(records: RecordSet, narrow: bool) -> Canvas:
    """Agreement and output KL over the screened layers, several layers and single ones."""
    data = [
        (run, choices, single, measure)
        for single in (False, True)
        for run, choices in layer_runs(records, single)
        for measure in OUTPUT_MEASURES
    ]
    if not data:
        raise ValueError(
            "no closed-loop rows of several choices of layers among the records; make them with: "
            "bmfa closed-loop --layers last-2 --layers last-4 --layers all --json layers.json"
        )
    margins = Margins(right=156)
    canvas, panels = panel_grid(len(data), 2, narrow=narrow, height=210, margins=margins)
    for axes, (run, choices, single, (column, y_label)) in zip(panels, data, strict=True):
        set_measure_axis(axes, column, run.rows)
        ends: dict[str, float] = {}
        for method in unique(run.rows, "method"):
            rows = [
                {**row, "index": choices.index(get_text(row, "layers"))}
                for row in run.rows
                if get_text(row, "method") == method
            ]
            line = visible_points(rows, "index", column)
            draw_line(axes, method, line, filled=True)
            ends |= {method: line[-1][1]} if line else {}
        axes.set_xticks(range(len(choices)), [c.replace("last-", "last ") for c in choices])
        axes.set_xlim(-0.25, len(choices) - 0.75)
        title = f"{run.panel_title}, one layer" if single else run.panel_title
        x_label = "screened layer" if single else "screened layers"
        add_labels(canvas, axes, title, y_label, x_label)
        label_line_ends(canvas, axes, ends)
    return canvas
