"""The chapters on screening inside a model and on its layers, and the claims of the paper."""

from collections.abc import Sequence

from bmfa.evidence.closed_loop import figures
from bmfa.evidence.page import paper
from bmfa.evidence.page.blocks import (
    METHOD,
    Block,
    Chapter,
    Column,
    NotMeasured,
    Paragraph,
    Table,
    describe,
    illustrate,
    paragraph,
    with_paper,
)
from bmfa.evidence.page.claims import Verdict, claim, judge_direction
from bmfa.evidence.page.formats import format_number, format_percent, format_small
from bmfa.evidence.page.model_runs import (
    EMBEDDED,
    ModelRun,
    closed_loop_runs,
    judged_run,
    layer_runs,
    select_layer_records,
)
from bmfa.evidence.page.record_set import (
    RecordSet,
    command_for,
    get_number,
    get_text,
    need_number,
    require_any,
)

BMFA, RANDOM = paper.BMFA, paper.RANDOM
COLUMNS = (
    METHOD,
    Column("leaf_percent", "Leaf %", 2),
    Column("agreement_percent", "Agreement %", 1),
    Column("output_kl", "Output KL", 3, small=True),
    Column("attention_kl", "Attention KL", 3),
    Column("top1_percent", "Top-1 %", 1),
    Column("paper_leaf_percent", "Paper: leaf %", 2),
    Column("paper_agreement_percent", "Agreement %", 2),
    Column("paper_output_kl", "Output KL", 3),
)
SIMILAR_LEAVES = 5.0  # percentage points within which two leaf ratios count as the same budget
NEARLY_ALL = 90.0  # percent of the tokens


def _content(records: RecordSet) -> list[Block]:
    runs = closed_loop_runs(records)
    rings = any(run.is_papers_model for run in runs)
    return [
        *paragraph(
            "Every query and head of the screened layers gets its own tree over the keys, and its "
            "attention is computed on the leaves; the key of the class token stays exact. Agreement is "
            "the share of images whose top class is that of the full model. Output KL is the "
            "divergence of the class distributions, KL(full ‖ screened).",
            f"The paper screens the last four of the twelve layers of {paper.MODEL} on 5,000 images "
            "of COCO.",
            *(_describe(run) for run in runs),
        ),
        *illustrate(
            figures.closed_loop,
            select_layer_records(records, several=False),
            "Up and to the left is better for the agreement, down and to the left for the output KL. A "
            "line joins the parameters of one rule. An output KL below 10⁻⁸ is drawn at 10⁻⁸. "
            + ("Rings are the paper's agreement on ImageNet. " if rings else "")
            + "The panels titled “Paper” show the points that the paper prints.",
        ),
        *(
            Paragraph(" ".join(filter(None, (describe(f, run) for f in FINDINGS))), f"{run.title}.")
            for run in runs
        ),
        *paragraph(
            *_which_rule(runs),
            lead="The rule of the paper's model tables is our inference.",
            style="warning",
        ),
        *(_table(run) for run in runs),
    ]


def _describe(run: ModelRun) -> str:
    if run.model == EMBEDDED:
        return (
            "Here it is the embedded model (1.0 M parameters, eight layers, 16 × 16 tokens; "
            f"{paper.MODEL} has 14 × 14) on {run.images:,} images that the library draws: the order "
            "of the rules can be compared with the paper, the numbers cannot."
        )
    if run.is_papers_model:
        return f"{run.title} is shown on {run.images:,} images, which are not those of the paper."
    return f"{run.title}, another model than the paper's, is shown on {run.images:,} images."


def _agreement(run: ModelRun, method: str) -> str:
    agreement, leaf = run.values(method, "agreement_percent", "leaf_percent")
    return f"{format_percent(agreement, 1)} at {format_percent(leaf, 1)} leaves"


def _bmfa_and_random(run: ModelRun) -> str:
    higher = run.value(BMFA, "agreement_percent") > run.value(RANDOM, "agreement_percent")
    return (
        f"{BMFA}, our fit to the rule of the paper's tables, has an agreement of "
        f"{_agreement(run, BMFA)}; this is {'higher' if higher else 'no higher'} than that of random "
        f"quadrants ({_agreement(run, RANDOM)})."
    )


def _algorithm_1_and_blocks(run: ModelRun) -> str:
    """Algorithm 1 and fixed 2 x 2 blocks, at the leaf ratio nearest to theirs."""
    leaf, kl = run.values(paper.FIXED, "leaf_percent", "output_kl")
    distances = [
        (abs(need_number(row, "leaf_percent") - leaf), get_text(row, "method"))
        for row in run.family("gamma")
    ]
    _, method = min(require_any(distances))
    gamma_kl = run.value(method, "output_kl")
    return (
        f"Algorithm 1 as printed, {method} ({_agreement(run, method)}, output KL "
        f"{format_small(gamma_kl)}), is {'better' if gamma_kl < kl else 'not better'} than fixed "
        f"blocks of 2 × 2 tokens ({_agreement(run, paper.FIXED)}, {format_small(kl)})"
        + ("." if gamma_kl < kl else ": its score measures how much a block varies, not its mass.")
    )


def _variance_rows(run: ModelRun) -> str:
    methods = [get_text(row, "method") for row in run.family("variance")]
    if not methods:
        return "The paper's variance-only row was not measured."
    printed = paper.CLOSED_LOOP[paper.VARIANCE]
    return (
        f"Quadrants kept by their variance: "
        f"{', '.join(f'{method} {_agreement(run, method)}' for method in methods)}. The paper prints "
        f"one such row, {format_percent(printed.agreement_percent, 2)} at "
        f"{format_percent(printed.leaf_percent, 2)} leaves, without a threshold."
    )


def _cheapest_optimal(run: ModelRun) -> str:
    """The optimal tree with the fewest leaves whose output KL is at most that of the paper's rule."""
    leaf, kl = run.values(BMFA, "leaf_percent", "output_kl")
    candidates = [
        (need_number(row, "leaf_percent"), get_text(row, "method"))
        for row in run.family("optimal")
        if need_number(row, "output_kl") <= kl
    ]
    if not candidates:
        return f"No optimal tree measured here has an output KL as low as that of {BMFA}."
    optimal_leaf, method = min(candidates)
    if optimal_leaf >= leaf:
        needed = format_percent(optimal_leaf, 1)
        return f"The optimal tree needs {needed} leaves to reach the output KL of {BMFA}."
    return (
        f"The optimal tree reaches the output KL of {BMFA} with {format_percent(optimal_leaf, 1)} "
        f"leaves ({method}) instead of {format_percent(leaf, 1)}, "
        f"{format_number(leaf / optimal_leaf, 1)} times fewer."
    )


def _mass_rule(run: ModelRun) -> str:
    """The mass rule, if even its best parameter is worse than fixed blocks."""
    agreements = [
        (need_number(row, "agreement_percent"), get_text(row, "method"))
        for row in run.family("mass")
    ]
    best, method = max(require_any(agreements))
    if best >= run.value(paper.FIXED, "agreement_percent"):
        return ""
    return (
        f"The mass rule is worse than fixed blocks: its best parameter ({method}) has an agreement of "
        f"{_agreement(run, method)}, because it weights a score that does not detect a small object "
        "inside a block."
    )


FINDINGS = (
    _bmfa_and_random,
    _algorithm_1_and_blocks,
    _variance_rows,
    _cheapest_optimal,
    _mass_rule,
)


def _which_rule(runs: Sequence[ModelRun]) -> list[str]:
    """Why quadrant-gap stands for BMFA, and what Algorithm 1 does at the printed threshold."""
    sentences = [
        "The paper names the rule of its model tables but does not define it. On a 14 × 14 grid it "
        "prints leaf ratios of 26.53 % and 51.02 % for random retention. These are p + 4 (1 − p) / 196 "
        "for p = 0.25 and 0.5: one level of four 7 × 7 quadrants, each kept token by token or replaced "
        "by its mean. The same construction with the exact gap as the criterion, quadrant-gap, is our "
        "fit to the leaf ratios that the paper prints for BMFA. Here quadrant-gap stands for the "
        "paper's BMFA, and gamma for Algorithm 1 as printed."
    ]
    sentences.append(describe(_printed_threshold, runs))
    if not any(run.is_papers_model for run in runs):
        sentences.append(
            f"To compare the two in {paper.MODEL} itself, run bmfa report --weights FILE --imagenet DIR "
            "with its weights and images."
        )
    return sentences


def _printed_threshold(runs: Sequence[ModelRun]) -> str:
    run = judged_run(runs)
    leaf = format_percent(run.value(paper.PRINTED_THRESHOLD, "leaf_percent"), 1)
    printed = format_percent(paper.CLOSED_LOOP[BMFA].leaf_percent, 2)
    return (
        f"At the threshold of the tables, ε = 0.8, Algorithm 1 has {leaf} leaves ({run.title}), whereas "
        f"the paper prints {printed}."
    )


def _table(run: ModelRun) -> Block:
    layers = get_text(run.rows[0], "layers")
    caption = f"{run.caption}, {layers}; the paper: {paper.MODEL}, COCO, last-4"
    printed = paper.CLOSED_LOOP
    rows = [with_paper(row, printed.get(get_text(row, "method"))) for row in run.all_rows]
    return Table(caption, COLUMNS, rows)


def _layers(records: RecordSet) -> list[Block]:
    several, single = layer_runs(records), layer_runs(records, single=True)
    if not several and not single:
        options = "--layers last-2 --layers last-4 --layers all"
        return [NotMeasured(f"bmfa closed-loop {options} --json layers.json")]
    return [
        *paragraph(
            "The same rules in an increasing number of layers, counted from the last, and in one layer "
            "at a time. The figure of the paper is in a supplement that is not available. According to "
            "its text, every method degrades with more layers and its rule stays ahead of random "
            "retention (last-2, last-4, last-8 and all layers).",
            *(_lead_over_random(run, choices) for run, choices in several),
            *(describe(_most_sensitive_layer, run) for run, _ in single),
        ),
        *illustrate(
            figures.layers,
            select_layer_records(records, several=True),
            "Agreement with the full model and output KL. The embedded model has eight layers, so "
            "last-8 would be all of them.",
        ),
    ]


def _layers_with_lead(run: ModelRun, choices: Sequence[str]) -> list[str]:
    """The choices of layers in which the paper's rule is better than random retention.

    The one with the higher agreement is better; if both agree equally, the one with the lower KL.
    """
    quality = {
        (get_text(row, "method"), get_text(row, "layers")): (agreement, -(kl or 0.0))
        for row in run.rows
        for agreement, kl in [(get_number(row, "agreement_percent"), get_number(row, "output_kl"))]
        if agreement is not None
    }
    pairs = {
        choice: [quality.get((method, choice)) for method in (BMFA, RANDOM)] for choice in choices
    }
    return [c for c, (bmfa, random) in pairs.items() if bmfa and random and bmfa > random]


def _lead_over_random(run: ModelRun, choices: Sequence[str]) -> str:
    choices = [choice for choice in choices if not run.covers_all_layers(choice)]
    ahead = _layers_with_lead(run, choices)
    if not ahead:
        return ""
    where = "in all of them" if len(ahead) == len(choices) else f"in {', '.join(ahead)}"
    return f"{run.title}, {', '.join(choices)}: {BMFA} is ahead of {RANDOM} {where}."


def _most_sensitive_layer(run: ModelRun) -> str:
    rows = run.family("global-mean")
    worst = max(require_any((need_number(row, "output_kl"), row["layers"]) for row in rows))
    return (
        f"One mean for all keys changes the output most in layer {worst[1]} of "
        f"{run.title_in_sentence} (output KL {format_number(worst[0])})."
    )


COMMAND = command_for("closed-loop")


def _judged(records: RecordSet) -> ModelRun:
    return judged_run(closed_loop_runs(records))


def _printed(method: str) -> str:
    point = paper.CLOSED_LOOP[method]
    return (
        f"{format_percent(point.agreement_percent, 2)} at {format_percent(point.leaf_percent, 2)}"
    )


def _measured(run: ModelRun, method: str) -> str:
    agreement, leaf = run.values(method, "agreement_percent", "leaf_percent")
    return f"{format_percent(agreement, 2)} at {format_percent(leaf, 2)}"


def _compare(run: ModelRun, other: str) -> tuple[str, Verdict]:
    """The agreement of the paper's rule and of another method."""
    ahead = run.value(BMFA, "agreement_percent") > run.value(other, "agreement_percent")
    return f"{_measured(run, BMFA)} against {_measured(run, other)}", judge_direction(ahead)


@claim(
    "Inside a model BMFA preserves more than random retention: agreement and leaf ratio of each",
    f"{_printed(BMFA)} against {_printed(RANDOM)}",
    COMMAND,
)
def _more_than_random(records: RecordSet) -> tuple[str, Verdict, str]:
    run = _judged(records)
    note = f"{run.heading}; the paper: {paper.MODEL}, 5,000 images of COCO. {paper.FIT_NOTE}."
    return *_compare(run, RANDOM), note


@claim(
    "It also preserves more than fixed blocks of 2 × 2 tokens",
    f"{_printed(BMFA)} against {_printed(paper.FIXED)}",
    COMMAND,
)
def _more_than_blocks(records: RecordSet) -> tuple[str, Verdict, str]:
    run = _judged(records)
    more = run.value(BMFA, "leaf_percent") > run.value(paper.FIXED, "leaf_percent")
    note = f"{run.heading}{'; with more leaves, as in the paper' if more else ''}."
    return *_compare(run, paper.FIXED), note


@claim(
    "The rule of these tables is Algorithm 1: leaf ratio at ε = 0.8",
    format_percent(paper.CLOSED_LOOP[BMFA].leaf_percent, 2),
    command_for("closed-loop", {"method": paper.PRINTED_THRESHOLD}),
)
def _same_as_algorithm_1(records: RecordSet) -> tuple[str, Verdict, str]:
    run = _judged(records)
    leaf, quadrants = (run.value(m, "leaf_percent") for m in (paper.PRINTED_THRESHOLD, BMFA))
    same = abs(leaf - paper.CLOSED_LOOP[BMFA].leaf_percent) <= SIMILAR_LEAVES
    note = run.heading + ("" if same else "; Algorithm 1 hardly splits at this threshold")
    note += f". One level of quadrants, our fit, has {format_percent(quadrants, 2)}."
    return format_percent(leaf, 2), judge_direction(same), note


ENOUGH = paper.CLOSED_LOOP[paper.VARIANCE].agreement_percent


@claim(
    "By variance alone nearly every token must be kept: the fewest leaves with at least "
    f"{format_percent(ENOUGH, 2)} agreement",
    _printed(paper.VARIANCE),
    command_for("closed-loop", {"method": paper.VARIANCE}),
)
def _variance_keeps_all(records: RecordSet) -> tuple[str, Verdict, str]:
    run = _judged(records)
    points = [
        (need_number(row, "leaf_percent"), get_text(row, "method"))
        for row in run.family("variance")
    ]
    enough = [p for p in points if run.value(p[1], "agreement_percent") >= ENOUGH]
    leaf, method = min(enough) if enough else max(require_any(points))
    note = f"{run.heading}; the paper states no threshold."
    if not enough:
        note += (
            " No threshold measured here reaches this agreement; the one with most leaves is shown."
        )
    return f"{_measured(run, method)} ({method})", judge_direction(leaf >= NEARLY_ALL), note


@claim(
    f"The smallest output KL at no more leaves than {BMFA}",
    f"{format_number(paper.CLOSED_LOOP[BMFA].output_kl)} at "
    f"{format_percent(paper.CLOSED_LOOP[BMFA].leaf_percent, 2)}",
    command_for("closed-loop", {"method": "optimal:0.002"}),
)
def _smallest_kl(records: RecordSet) -> tuple[str, Verdict, str]:
    run = _judged(records)
    leaf, kl = run.values(BMFA, "leaf_percent", "output_kl")
    candidates = [
        (need_number(row, "output_kl"), need_number(row, "leaf_percent"), get_text(row, "method"))
        for row in run.family("optimal")
    ]
    lowest, leaves, method = min(require_any(c for c in candidates if c[1] <= leaf))
    note = (
        f"{run.heading}: {BMFA} has {format_small(kl)} at {format_percent(leaf, 2)}. Optimal trees "
        "read exact scores, as this rule does."
    )
    shown = f"{format_small(lowest)} at {format_percent(leaves, 2)} ({method})"
    return shown, Verdict.AHEAD if lowest < kl else Verdict.DIFFERS, note


@claim(
    "The lead over random retention persists as more layers are screened",
    ", ".join(paper.LAYER_CHOICES),
    COMMAND,
)
def _lead_persists(records: RecordSet) -> tuple[str, Verdict, str]:
    found = layer_runs(records)
    run = judged_run([run for run, _ in found])
    choices = next(choices for other, choices in found if other is run)
    choices = require_any(choice for choice in choices if not run.covers_all_layers(choice))
    ahead = _layers_with_lead(run, choices)
    behind = [choice for choice in choices if choice not in ahead]
    missing = [choice for choice in paper.LAYER_CHOICES if choice not in choices]
    note = run.heading + (f"; not in {', '.join(behind)}" if behind else "")
    all_layers = [choice for choice in missing if run.covers_all_layers(choice)]
    if all_layers:
        note += f"; {', '.join(all_layers)} means all layers of this model and is not judged"
    if absent := [choice for choice in missing if choice not in all_layers]:
        note += f"; {', '.join(absent)} not measured"
    return ", ".join(ahead) or "in none", judge_direction(not behind), f"{note}."


CLOSED_LOOP = Chapter(
    "closed-loop",
    "Inside a model",
    "closed-loop",
    _content,
    (
        *(_more_than_random, _more_than_blocks, _same_as_algorithm_1),
        *(_variance_keeps_all, _smallest_kl, _lead_persists),
    ),
)
LAYERS = Chapter("layers", "Layer sensitivity", "closed-loop", _layers)
