"""The chapters on screening inside a model and on its layers: figures, and the claims of the paper."""

from functools import partial
from typing import TYPE_CHECKING, Any

from bmfa.evidence.page import leaf_plots, paper, plots
from bmfa.evidence.page.claims import Measured, Verdict, claim, judge_direction
from bmfa.evidence.page.model_runs import ModelRun, closed_loop_runs, judged_run, layer_runs
from bmfa.evidence.page.record_set import RecordSet, get_text, need_number, require_any, unique
from bmfa.evidence.page.rendering import chapter_values

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

SIMILAR_LEAVES = 5.0  # percentage points within which two leaf ratios count as the same budget
NEARLY_ALL = 90.0  # percent of the tokens


@chapter_values("closed-loop")
def closed_loop_values(records: RecordSet) -> dict[str, Any]:
    """Return the runs of the closed loop, and their records alone for the figure."""
    runs = closed_loop_runs(records)
    return {"runs": runs, "records": RecordSet([run.record for run in runs])}


@chapter_values("layers")
def layer_values(records: RecordSet) -> dict[str, Any]:
    """Return the runs of several choices of layers, and their records alone for the figure."""
    runs = require_any(layer_runs(records))
    return {"runs": runs, "records": RecordSet([run.record for run in runs])}


# Figures


@plots.figure("closed-loop", "closed-loop")
def closed_loop(records: RecordSet, narrow: bool) -> "Drawing":
    """Agreement with the full model and output KL against leaf ratio, ours and the paper's."""
    sources = [
        (run.panel_title, run.rows, paper.imagenet_rows() if run.is_papers_model else [])
        for run in closed_loop_runs(records)
    ]
    printed = [{"method": name, **vars(point)} for name, point in paper.CLOSED_LOOP.items()]
    sources.append((f"Paper: {paper.MODEL}, COCO", printed, []))
    return leaf_plots.against_leaf_ratio(sources, leaf_plots.OUTPUT_MEASURES, narrow)


@plots.figure("layers", "closed-loop")
def layers(records: RecordSet, narrow: bool) -> "Drawing":
    """Agreement and output KL over the screened layers, several layers and single ones."""
    runs = sorted(require_any(layer_runs(records)), key=lambda run: run.is_by_layer)
    drawing, panels = plots.panels(2 * len(runs), 2, narrow, 300)
    pairs = [(run, measure) for run in runs for measure in leaf_plots.OUTPUT_MEASURES]
    for axes, (run, (column, y_label)) in zip(panels, pairs, strict=True):
        choices = unique(run.rows, "layers")
        rows = [
            {**row, "index": choices.index(get_text(row, "layers"))}
            for row in leaf_plots.clip_kl(run.rows)
        ]
        title = f"{run.panel_title}, one layer" if run.is_by_layer else run.panel_title
        plots.set_axes(axes, title, y_label, "screened layers", xlim=(-0.25, len(choices) - 0.75))
        axes.set_xticks(range(len(choices)), [c.replace("last-", "last ") for c in choices])
        leaf_plots.set_measure_axis(axes, column, rows)
        plots.draw_methods(axes, rows, "index", column, 210)
    return drawing


# Claims


def _more_than(other: str, records: RecordSet) -> Measured:
    """The agreement of the paper's rule is higher than that of another method."""
    run = judged_run(closed_loop_runs(records))
    ours, theirs = run.by_method[paper.BMFA], run.by_method[other]
    ahead = need_number(ours, "agreement_percent") > need_number(theirs, "agreement_percent")
    return judge_direction(ahead), {"run": run, "ours": ours, "other": theirs}, [run.record]


claim("more-than-random")(partial(_more_than, paper.RANDOM))
claim("more-than-fixed")(partial(_more_than, paper.FIXED))


@claim("same-as-algorithm-1")
def same_as_algorithm_1(records: RecordSet) -> Measured:
    run = judged_run(closed_loop_runs(records))
    ours, quadrants = run.by_method[paper.PRINTED_THRESHOLD], run.by_method[paper.BMFA]
    printed = paper.CLOSED_LOOP[paper.BMFA].leaf_percent
    same = abs(need_number(ours, "leaf_percent") - printed) <= SIMILAR_LEAVES
    numbers = {"run": run, "algorithm_1": ours, "quadrants": quadrants}
    return judge_direction(same), numbers, [run.record]


@claim("variance-keeps-all")
def variance_keeps_all(records: RecordSet) -> Measured:
    run = judged_run(closed_loop_runs(records))
    rows = require_any(run.families.get("variance", []))
    rows.sort(key=lambda row: need_number(row, "leaf_percent"))
    printed = paper.CLOSED_LOOP[paper.VARIANCE].agreement_percent
    enough = [row for row in rows if need_number(row, "agreement_percent") >= printed]
    row = enough[0] if enough else rows[-1]
    return (
        judge_direction(row["leaf_percent"] >= NEARLY_ALL),
        {"run": run, "row": row},
        [run.record],
    )


@claim("smallest-kl")
def smallest_kl(records: RecordSet) -> Measured:
    run = judged_run(closed_loop_runs(records))
    ours = run.by_method[paper.BMFA]
    leaf = need_number(ours, "leaf_percent")
    rows = [r for r in run.families.get("optimal", []) if need_number(r, "leaf_percent") <= leaf]
    best = min(require_any(rows), key=lambda row: need_number(row, "output_kl"))
    verdict = (
        Verdict.AHEAD if best["output_kl"] < need_number(ours, "output_kl") else Verdict.DIFFERS
    )
    return verdict, {"run": run, "best": best, "ours": ours}, [run.record]


@claim("lead-persists")
def lead_persists(records: RecordSet) -> Measured:
    run = judged_run(run for run in layer_runs(records) if not run.is_by_layer)
    choices = unique(run.rows, "layers")
    ahead = [c for c in choices if _quality(run, paper.BMFA, c) > _quality(run, paper.RANDOM, c)]
    missing = [choice for choice in paper.LAYER_CHOICES if choice not in choices]
    numbers = {"run": run, "ahead": ahead, "missing": missing}
    return judge_direction(ahead == choices), numbers, [run.record]


def _quality(run: ModelRun, method: str, layers: str) -> tuple[float, float]:
    """The agreement and, among equal ones, the output KL; more is better."""
    rows = (row for row in run.rows if (row["method"], row["layers"]) == (method, layers))
    row = next(rows, {})
    return need_number(row, "agreement_percent"), -need_number(row, "output_kl")
