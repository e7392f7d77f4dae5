"""The chapters on classification and on token reduction: figures, and the claims of the paper."""

from typing import TYPE_CHECKING

from bmfa.evidence.page import leaf_plots, paper, plots
from bmfa.evidence.page.chapter import Chapter
from bmfa.evidence.page.claims import Measured, Verdict, claim, judge_direction
from bmfa.evidence.page.formats import format_number, format_percent, format_small
from bmfa.evidence.page.model_runs import ModelRun, is_reduction, judged_run, model_runs
from bmfa.evidence.page.record_set import RecordSet, get_number, get_text, need_number, require_any
from bmfa.records import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

COMPARED = (paper.BMFA, paper.RANDOM, paper.FIXED)
SMALL_DROP = 1.0  # percentage points of top-1
# Two methods have the same cost if their operations differ by at most this share: the share of tokens
# kept has steps of a token, which are about one percent.
SAME_COST = 0.02
LEAST_COMPARED = 3  # methods of the same cost that make a table
# Two methods with an output KL below this cannot be told apart: both leave the output unchanged.
NEGLIGIBLE_KL = 1e-4
RATE = "images_per_second"
SPEED_LABEL = "images per second, logarithmic; the lines cross at the full model"


def rule_runs(records: RecordSet) -> list[ModelRun]:
    """Return every evaluation with its rules."""
    return model_runs(records.of("evaluate"), lambda row: not is_reduction(row))


def reduction_runs(records: RecordSet) -> list[ModelRun]:
    """Return every evaluation with its token reductions."""
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


def unchanged(run: ModelRun) -> int:
    """Return how many methods leave the output of the model unchanged."""
    return sum((get_number(row, "output_kl") or 0.0) < NEGLIGIBLE_KL for row in run.rows)


# Figures


@plots.figure("top1", "evaluate")
def top1(records: RecordSet, narrow: bool) -> "Drawing":
    """Top-1 accuracy against leaf ratio, ours and the paper's."""
    runs = require_any(rule_runs(records))
    full = [get_number(run.full, "top1_percent") for run in runs]
    sources: list[leaf_plots.Panel] = [(run.panel_title, run.rows, []) for run in runs]
    sources.append((f"Paper: {paper.MODEL}, ImageNet", paper.imagenet_rows(), []))
    measure = ("top1_percent", "top-1, %; the line is the full model")
    full.append(paper.IMAGENET["full"].top1_percent)
    return leaf_plots.against_leaf_ratio(sources, [measure], narrow, full)


@plots.figure("accuracy", "evaluate")
def accuracy(records: RecordSet, narrow: bool) -> "Drawing":
    """Top-1 accuracy against images per second for every method."""
    runs = require_any(model_runs(records.of("evaluate"), lambda row: bool(row.get(RATE))))
    names = list(dict.fromkeys(name for run in runs for name in run.families))
    drawing, panels = plots.panels(len(runs), 2, narrow, 330, names)
    for run, axes in zip(runs, panels, strict=True):
        labelled = any(get_number(row, "top1_percent") is not None for row in run.rows)
        column, y_label = (
            ("top1_percent", "top-1, %") if labelled else leaf_plots.OUTPUT_MEASURES[0]
        )
        plots.mark_level(axes, get_number(run.full, RATE), get_number(run.full, column))
        leaf_plots.draw_families(axes, run.rows, RATE, column)
        plots.set_log_range(axes, "x", [need_number(row, RATE) for row in run.rows], 1.15)
        axes.margins(y=0.08)
        plots.label(axes, run.panel_title, y_label, SPEED_LABEL)
    return drawing


@plots.figure("reductions", "evaluate")
def reductions(records: RecordSet, narrow: bool) -> "Drawing":
    """Agreement and output KL of token reductions against operations."""
    runs = reduction_runs(records)
    names = list(dict.fromkeys(name for run in runs for name in run.families))
    drawing, panels = plots.panels(2 * len(runs), 2, narrow, 290, names)
    pairs = [(run, measure) for run in runs for measure in leaf_plots.OUTPUT_MEASURES]
    for axes, (run, (column, y_label)) in zip(panels, pairs, strict=True):
        leaf_plots.set_measure_axis(axes, column, run.rows)
        leaf_plots.draw_families(axes, run.rows, "gflops", column)
        plots.mark_level(axes, x=get_number(run.full, "gflops"))
        plots.label(axes, run.panel_title, y_label, "GFLOPs per image; the line is the full model")
    return drawing


# Claims


@claim(
    "BMFA loses less accuracy than random retention or fixed blocks: drop of top-1 in percentage points",
    "2.26; random 6.94, fixed 2.76",
    "evaluate",
)
def _accuracy(records: RecordSet) -> Measured:
    run = judged_run(rule_runs(records))
    drops = [run.values(method, "drop_pp")[0] for method in COMPARED]
    holds = drops[0] < min(drops[1:])
    verdict = judge_direction(holds)
    if run.is_papers_model and run.images == paper.IMAGENET_IMAGES:
        verdict = Verdict.REPRODUCED if holds else Verdict.NOT_AS_CLAIMED
    elif drops[0] == min(drops[1:]):
        verdict = Verdict.LEVEL
    note = (
        f"{run.heading}, the full model {format_percent(get_number(run.full, 'top1_percent'), 1)}; "
        f"the paper: {paper.MODEL}, {paper.IMAGENET_IMAGES:,} images of ImageNet. {paper.FIT_NOTE}."
    )
    ours, random, fixed = (format_number(drop, 2) for drop in drops)
    return f"{ours}; random {random}, fixed {fixed}", verdict, note, [run.record]


@claim(
    "Screening after all scores are computed gives no speed-up: speed relative to the full model",
    "0.86 times",
    "evaluate",
)
def _no_speedup(records: RecordSet) -> Measured:
    run = judged_run(rule_runs(records))
    timed = require_any(row for row in run.rows if get_number(row, "speedup") is not None)
    best, method = max((need_number(row, "speedup"), get_text(row, "method")) for row in timed)
    note = f"The fastest rule; {run.heading}. The machine is named at the end of this page."
    verdict = Verdict.AGREES if best < 1 else Verdict.AHEAD
    return f"{format_number(best, 2)} times ({method})", verdict, note, [run.record]


@claim(
    "Merging preserves accuracy and is faster: drop of top-1 and speed-up of tome:8",
    "0.42 points, 1.19 times",
    "evaluate",
)
def _merging(records: RecordSet) -> Measured:
    run = judged_run(reduction_runs(records))
    (drop,), speed = run.values("tome:8", "drop_pp"), get_number(run.by_method["tome:8"], "speedup")
    verdict = judge_direction(drop <= SMALL_DROP and (speed is None or speed > 1))
    shown = f"{format_number(drop, 2)} points, {format_number(speed, 2)} times"
    return shown, verdict, f"{run.heading}; not the paper's machine.", [run.record]


@claim(
    "The best merging at the operations of tome:8: agreement and output KL",
    "94.12 % (tome:8, ImageNet)",
    "evaluate",
)
def _best_merging(records: RecordSet) -> Measured:
    run = judged_run(reduction_runs(records))
    theirs, their_kl, cost = run.values("tome:8", "agreement_percent", "output_kl", "gflops")
    cheapest = (1 - SAME_COST) * cost
    rows = [
        row
        for row in run.families.get("free-energy", [])
        if cheapest <= (get_number(row, "gflops") or 0.0) <= cost
    ]
    costliest = max(rows, key=lambda row: need_number(row, "gflops"), default={})
    method = get_text(costliest, "method") or "free-energy:8"
    ours, kl, our_cost = run.values(method, "agreement_percent", "output_kl", "gflops")
    if max(kl, their_kl) < NEGLIGIBLE_KL or (ours >= theirs) != (kl < their_kl):
        verdict = Verdict.LEVEL
    else:
        verdict = Verdict.AHEAD if ours >= theirs else Verdict.DIFFERS
    note = (
        f"{run.heading}: tome:8 has {format_percent(theirs, 2)}, {format_small(their_kl)}; "
        f"{format_number(our_cost)} against {format_number(cost)} GFLOPs."
    )
    return f"{format_percent(ours, 2)}, {format_small(kl)} ({method})", verdict, note, [run.record]


CLASSIFICATION = Chapter(
    "classification",
    "Classification",
    "classification/classification.html.j2",
    "evaluate",
    (_accuracy, _no_speedup, _merging, _best_merging),
    lambda records: {"rules": rule_runs(records), "compared": COMPARED},
)
REDUCTIONS = Chapter(
    "reductions",
    "Token reduction",
    "classification/reductions.html.j2",
    "evaluate",
    values=lambda records: {
        "runs": reduction_runs(records),
        "equal_operations": equal_operations,
        "unchanged": unchanged,
        "same_cost": SAME_COST,
        "negligible_kl": NEGLIGIBLE_KL,
    },
    command="bmfa evaluate --method tome:8 --method free-energy:8 --json evaluate.json",
)
