"""The chapters on screening inside a model and on its layers: figures, and the claims of the paper."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from bmfa.evidence.page import leaf_plots, paper, plots
from bmfa.evidence.page.chapter import Chapter
from bmfa.evidence.page.claims import ClaimTest, Measured, Verdict, claim, judge_direction
from bmfa.evidence.page.formats import format_percent, format_small
from bmfa.evidence.page.model_runs import ModelRun, closed_loop_runs, judged_run, layer_runs
from bmfa.evidence.page.record_set import RecordSet, get_text, need_number, require_any, unique

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

BMFA, RANDOM = paper.BMFA, paper.RANDOM
SIMILAR_LEAVES = 5.0  # percentage points within which two leaf ratios count as the same budget
NEARLY_ALL = 90.0  # percent of the tokens


def _is_single(run: ModelRun) -> bool:
    """True if each choice of layers is one layer."""
    return all(choice.isdecimal() for choice in unique(run.rows, "layers"))


def layer_values(records: RecordSet) -> dict[str, Any]:
    """Return the runs of several choices of layers, and those of one layer at a time."""
    runs = require_any(layer_runs(records))
    single = [run for run in runs if _is_single(run) and "global-mean" in run.families]
    return {**_shown(runs), "single": single}


def _shown(runs: Sequence[ModelRun]) -> dict[str, Any]:
    """The runs of a chapter, and their records alone for its figure."""
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
    runs = sorted(require_any(layer_runs(records)), key=_is_single)
    drawing, panels = plots.panels(2 * len(runs), 2, narrow, 300)
    pairs = [(run, measure) for run in runs for measure in leaf_plots.OUTPUT_MEASURES]
    for axes, (run, (column, y_label)) in zip(panels, pairs, strict=True):
        choices = unique(run.rows, "layers")
        rows = [
            {**row, "index": choices.index(get_text(row, "layers"))}
            for row in leaf_plots.clip_kl(run.rows)
        ]
        leaf_plots.set_measure_axis(axes, column, rows)
        ends = plots.draw_methods(axes, rows, "index", column)
        axes.set_xticks(range(len(choices)), [c.replace("last-", "last ") for c in choices])
        axes.set_xlim(-0.25, len(choices) - 0.75)
        title = f"{run.panel_title}, one layer" if _is_single(run) else run.panel_title
        plots.label(axes, title, y_label, "screened layers")
        plots.label_ends(axes, ends, 210)
    return drawing


# Claims


def _measured(run: ModelRun, method: str) -> str:
    agreement, leaf = run.values(method, "agreement_percent", "leaf_percent")
    return f"{format_percent(agreement, 2)} at {format_percent(leaf, 2)}"


def _more_than(other: str, text: str, printed: str, remark: str = "") -> ClaimTest:
    """The claim that the agreement of the paper's rule is higher than that of another method."""

    @claim(text, printed, "closed-loop")
    def measure(records: RecordSet) -> Measured:
        run = judged_run(closed_loop_runs(records))
        (ours,), (theirs,) = (run.values(method, "agreement_percent") for method in (BMFA, other))
        shown = f"{_measured(run, BMFA)} against {_measured(run, other)}"
        return shown, judge_direction(ours > theirs), f"{run.heading}{remark}.", [run.record]

    return measure


@claim(
    "The rule of these tables is Algorithm 1: leaf ratio at ε = 0.8",
    "30.82 %",
    "closed-loop",
    command=f"bmfa closed-loop --method {paper.PRINTED_THRESHOLD} --json closed-loop.json",
)
def _same_as_algorithm_1(records: RecordSet) -> Measured:
    run = judged_run(closed_loop_runs(records))
    (leaf,), (quadrants,) = (run.values(m, "leaf_percent") for m in (paper.PRINTED_THRESHOLD, BMFA))
    same = abs(leaf - paper.CLOSED_LOOP[BMFA].leaf_percent) <= SIMILAR_LEAVES
    note = f"{run.heading}. One level of quadrants, our fit, has {format_percent(quadrants, 2)}."
    return format_percent(leaf, 2), judge_direction(same), note, [run.record]


@claim(
    "By variance alone nearly every token must be kept: the fewest leaves with at least 99.02 % "
    "agreement, or the most measured",
    "99.02 % at 97.57 %",
    "closed-loop",
    command=f"bmfa closed-loop --method {paper.VARIANCE} --json closed-loop.json",
)
def _variance_keeps_all(records: RecordSet) -> Measured:
    run = judged_run(closed_loop_runs(records))
    rows = require_any(run.families.get("variance", []))
    points = [(need_number(row, "leaf_percent"), get_text(row, "method")) for row in rows]
    printed = paper.CLOSED_LOOP[paper.VARIANCE].agreement_percent
    enough = [p for p in points if run.values(p[1], "agreement_percent")[0] >= printed]
    leaf, method = min(enough) if enough else max(points)
    note = f"{run.heading}; the paper states no threshold."
    shown = f"{_measured(run, method)} ({method})"
    return shown, judge_direction(leaf >= NEARLY_ALL), note, [run.record]


@claim(
    f"The smallest output KL at no more leaves than {BMFA}",
    "0.149 at 30.82 %",
    "closed-loop",
    command="bmfa closed-loop --method optimal:0.002 --json closed-loop.json",
)
def _smallest_kl(records: RecordSet) -> Measured:
    run = judged_run(closed_loop_runs(records))
    leaf, kl = run.values(BMFA, "leaf_percent", "output_kl")
    rows = [r for r in run.families.get("optimal", []) if need_number(r, "leaf_percent") <= leaf]
    best = min(require_any(rows), key=lambda row: need_number(row, "output_kl"))
    method, lowest = get_text(best, "method"), need_number(best, "output_kl")
    note = (
        f"{run.heading}: {BMFA} has {format_small(kl)} at {format_percent(leaf, 2)}. Optimal trees "
        "read exact scores, as this rule does."
    )
    shown = f"{format_small(lowest)} at {format_percent(best['leaf_percent'], 2)} ({method})"
    return shown, Verdict.AHEAD if lowest < kl else Verdict.DIFFERS, note, [run.record]


@claim(
    "The lead over random retention persists as more layers are screened",
    "last-2, last-4, last-8, all",
    "closed-loop",
    command="bmfa closed-loop --layers last-2 --layers last-4 --layers all --json layers.json",
)
def _lead_persists(records: RecordSet) -> Measured:
    run = judged_run(run for run in layer_runs(records) if not _is_single(run))
    choices = unique(run.rows, "layers")
    ahead = [c for c in choices if _quality(run, BMFA, c) > _quality(run, RANDOM, c)]
    missing = [choice for choice in paper.LAYER_CHOICES if choice not in choices]
    note = f"{run.heading}; not measured: {', '.join(missing) or 'none'}."
    holds = judge_direction(ahead == choices)
    return ", ".join(ahead) or "in none", holds, note, [run.record]


def _quality(run: ModelRun, method: str, layers: str) -> tuple[float, float]:
    """The agreement and, among equal ones, the output KL; more is better."""
    rows = (row for row in run.rows if (row["method"], row["layers"]) == (method, layers))
    row = next(rows, {})
    return need_number(row, "agreement_percent"), -need_number(row, "output_kl")


CLOSED_LOOP = Chapter(
    "closed-loop",
    "Inside a model",
    "closed_loop/closed_loop.html.j2",
    "closed-loop",
    (
        _more_than(
            RANDOM,
            "Inside a model BMFA preserves more than random retention: agreement and leaf ratio of each",
            "75.98 % at 30.82 % against 61.54 % at 26.53 %",
            f"; the paper: {paper.MODEL}, 5,000 images of COCO. {paper.FIT_NOTE}",
        ),
        _more_than(
            paper.FIXED,
            "It also preserves more than fixed blocks of 2 × 2 tokens",
            "75.98 % at 30.82 % against 73.50 % at 25.00 %",
        ),
        *(_same_as_algorithm_1, _variance_keeps_all, _smallest_kl, _lead_persists),
    ),
    lambda records: _shown(closed_loop_runs(records)),
)
LAYERS = Chapter(
    "layers",
    "Layer sensitivity",
    "closed_loop/layers.html.j2",
    "closed-loop",
    values=layer_values,
    command="bmfa closed-loop --layers last-2 --layers last-4 --layers all --json layers.json",
)
