"""The chapters on classification and on token reduction: figures, and the claims of the paper."""

from typing import TYPE_CHECKING, Any

from bmfa.evidence.page import leaf_plots, paper, plots
from bmfa.evidence.page.claims import Measured, Verdict, claim, judge_direction
from bmfa.evidence.page.model_runs import ModelRun, is_reduction, judged_run, model_runs
from bmfa.evidence.page.record_set import RecordSet, get_number, need_number, require_any
from bmfa.evidence.page.rendering import chapter_values
from bmfa.records import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

SMALL_DROP = 1.0  # percentage points of top-1
# Two methods have the same cost if their operations differ by at most this share: the share of tokens
# kept has steps of a token, which are about one percent.
SAME_COST = 0.02
LEAST_COMPARED = 3  # methods of the same cost that make a table
# Two methods with an output KL below this cannot be told apart: both leave the output unchanged.
NEGLIGIBLE_KL = 1e-4
RATE = "images_per_second"
SPEED_LABEL = "images per second, logarithmic; the lines cross at the full model"


@chapter_values("classification")
def rule_values(records: RecordSet) -> dict[str, Any]:
    """Return every evaluation with its rules."""
    return {"runs": _rule_runs(records)}


@chapter_values("reductions")
def reduction_values(records: RecordSet) -> dict[str, Any]:
    """Return every evaluation with its token reductions."""
    return {
        "runs": _reduction_runs(records),
        "equal_operations": equal_operations,
        "same_cost": SAME_COST,
        "negligible_kl": NEGLIGIBLE_KL,
    }


def _rule_runs(records: RecordSet) -> list[ModelRun]:
    return model_runs(records.of("evaluate"), lambda row: not is_reduction(row))


def _reduction_runs(records: RecordSet) -> list[ModelRun]:
    return require_any(model_runs(records.of("evaluate"), is_reduction))


def equal_operations(run: ModelRun) -> list[tuple[Row, list[Row]]]:
    """Return each setting of ToMe, and the reductions with its operations by output KL."""
    found = []
    for tome in run.families.get("tome", []):
        cost = get_number(tome, "gflops") or 0.0
        rows = [row for row in run.rows if get_number(row, "output_kl") is not None]
        rows = [r for r in rows if abs((get_number(r, "gflops") or 0.0) - cost) <= SAME_COST * cost]
        if cost and len(rows) >= LEAST_COMPARED:
            found.append((tome, sorted(rows, key=lambda row: need_number(row, "output_kl"))))
    return found


# Figures


@plots.figure("top1", "evaluate")
def top1(records: RecordSet, narrow: bool) -> "Drawing":
    """Top-1 accuracy against leaf ratio, ours and the paper's."""
    runs = require_any(_rule_runs(records))
    sources: list[leaf_plots.Panel] = [(run.panel_title, run.rows, []) for run in runs]
    sources.append((f"Paper: {paper.MODEL}, ImageNet", paper.imagenet_rows(), []))
    full = [get_number(run.full, "top1_percent") for run in runs]
    full.append(paper.IMAGENET["full"].top1_percent)
    measure = ("top1_percent", "top-1, %; the line is the full model")
    return leaf_plots.against_leaf_ratio(sources, [measure], narrow, full)


@plots.figure("accuracy", "evaluate")
def accuracy(records: RecordSet, narrow: bool) -> "Drawing":
    """Top-1 accuracy against images per second for every method."""
    runs = require_any(model_runs(records.of("evaluate"), lambda row: bool(row.get(RATE))))
    drawing, panels = plots.panels(len(runs), 2, narrow, 330, _families(runs))
    for run, axes in zip(runs, panels, strict=True):
        labelled = any(get_number(row, "top1_percent") is not None for row in run.rows)
        measure = ("top1_percent", "top-1, %") if labelled else leaf_plots.OUTPUT_MEASURES[0]
        column, y_label = measure
        plots.set_axes(axes, run.panel_title, y_label, SPEED_LABEL)
        plots.mark_level(axes, get_number(run.full, RATE), get_number(run.full, column))
        leaf_plots.draw_families(axes, run.rows, RATE, column)
        plots.set_log_range(axes, "x", [need_number(row, RATE) for row in run.rows], 1.15)
        axes.margins(y=0.08)
    return drawing


@plots.figure("reductions", "evaluate")
def reductions(records: RecordSet, narrow: bool) -> "Drawing":
    """Agreement and output KL of token reductions against operations."""
    runs = _reduction_runs(records)
    drawing, panels = plots.panels(2 * len(runs), 2, narrow, 290, _families(runs))
    pairs = [(run, measure) for run in runs for measure in leaf_plots.OUTPUT_MEASURES]
    for axes, (run, (column, y_label)) in zip(panels, pairs, strict=True):
        x_label = "GFLOPs per image; the line is the full model"
        plots.set_axes(axes, run.panel_title, y_label, x_label)
        leaf_plots.set_measure_axis(axes, column, run.rows)
        leaf_plots.draw_families(axes, run.rows, "gflops", column)
        plots.mark_level(axes, x=get_number(run.full, "gflops"))
    return drawing


def _families(runs: list[ModelRun]) -> list[str]:
    return list(dict.fromkeys(name for run in runs for name in run.families))


# Claims


@claim("accuracy")
def loses_less(records: RecordSet) -> Measured:
    run = judged_run(_rule_runs(records))
    methods = (paper.BMFA, paper.RANDOM, paper.FIXED)
    drops = [need_number(run.by_method[method], "drop_pp") for method in methods]
    holds = drops[0] < min(drops[1:])
    verdict = judge_direction(holds)
    if run.is_papers_model and run.images == paper.IMAGENET_IMAGES:
        verdict = Verdict.REPRODUCED if holds else Verdict.NOT_AS_CLAIMED
    elif drops[0] == min(drops[1:]):
        verdict = Verdict.LEVEL
    return verdict, {"run": run, "drops": drops}, [run.record]


@claim("no-speed-up")
def no_speed_up(records: RecordSet) -> Measured:
    run = judged_run(_rule_runs(records))
    timed = require_any(row for row in run.rows if get_number(row, "speedup") is not None)
    fastest = max(timed, key=lambda row: (row["speedup"], row["method"]))
    verdict = Verdict.AGREES if fastest["speedup"] < 1 else Verdict.AHEAD
    return verdict, {"run": run, "fastest": fastest}, [run.record]


@claim("merging")
def merging(records: RecordSet) -> Measured:
    run = judged_run(_reduction_runs(records))
    tome = run.by_method["tome:8"]
    speed = get_number(tome, "speedup")
    holds = need_number(tome, "drop_pp") <= SMALL_DROP and (speed is None or speed > 1)
    return judge_direction(holds), {"run": run, "tome": tome}, [run.record]


@claim("best-merging")
def best_merging(records: RecordSet) -> Measured:
    """Free-energy merging at most at the operations of tome:8, and hardly below them."""
    run = judged_run(_reduction_runs(records))
    tome = run.by_method["tome:8"]
    cost = need_number(tome, "gflops")
    rows = [
        row
        for row in run.families.get("free-energy", [])
        if (1 - SAME_COST) * cost <= need_number(row, "gflops") <= cost
    ]
    default = run.by_method["free-energy:8"]
    ours = max(rows, key=lambda row: need_number(row, "gflops"), default=default)
    kl, their_kl = (need_number(row, "output_kl") for row in (ours, tome))
    agreement, theirs = (need_number(row, "agreement_percent") for row in (ours, tome))
    verdict = Verdict.AHEAD if agreement >= theirs else Verdict.DIFFERS
    if max(kl, their_kl) < NEGLIGIBLE_KL or (agreement >= theirs) != (kl < their_kl):
        verdict = Verdict.LEVEL
    return verdict, {"run": run, "ours": ours, "tome": tome}, [run.record]
