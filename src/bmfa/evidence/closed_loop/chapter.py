"""The chapters on screening inside a model and on its layers, and the claims of the paper."""

from collections.abc import Sequence
from typing import Any

from bmfa.evidence.closed_loop import figures
from bmfa.evidence.page import paper
from bmfa.evidence.page.blocks import (
    METHOD,
    Block,
    Chapter,
    Column,
    NotMeasured,
    Table,
    illustrate,
    paragraph,
)
from bmfa.evidence.page.claims import Claim, Verdict, direction, not_measured
from bmfa.evidence.page.formats import format_number, format_percent, format_small
from bmfa.evidence.page.model_runs import (
    EMBEDDED,
    ModelRun,
    closed_loop_runs,
    layer_runs,
    papers_model_first,
    select_layer_records,
)
from bmfa.evidence.page.record_set import RecordSet, get_number, get_text
from bmfa.records import Row

BMFA, COIN = paper.QUADRANTS[0], paper.RANDOM[0]
COLUMNS = (
    METHOD,
    Column("Leaf %", 2),
    Column("Agreement %", 1),
    Column("Output KL", 3),
    Column("Attention KL", 3),
    Column("Top-1 %", 1),
    Column("Paper: leaf %", 2, paper=True),
    Column("Agreement %", 2, paper=True),
    Column("Output KL", 3, paper=True),
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
            "the share of pictures whose top class is that of the full model. Output KL is the "
            "divergence of the class distributions, KL(full ‖ screened).",
            f"The paper screens the last four of the twelve layers of {paper.MODEL} on 5,000 pictures "
            "of COCO.",
            *(_describe(run) for run in runs),
        ),
        *illustrate(
            figures.closed_loop,
            select_layer_records(records, several=False),
            "In the upper row, up and to the left is better; in the lower row, down and to the left. A "
            "line joins the parameters of one rule. An output KL below 10⁻⁸ is drawn at 10⁻⁸. "
            + ("Rings are the paper's agreement on ImageNet. " if rings else "")
            + "The panels on the right show the points that the paper prints.",
        ),
        *(block for run in runs for block in paragraph(*_findings(run), lead=f"{run.title}.")),
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
            "Here it is the embedded model (0.9 M parameters, eight layers, 14 × 14 tokens like "
            f"{paper.MODEL}) on {run.images:,} pictures that the library draws: the order of the rules "
            "can be compared with the paper, the numbers cannot."
        )
    what = "which are not those of the paper" if run.is_papers_model else "which is another model"
    return f"{run.title} is shown on {run.images:,} pictures, {what}."


def _findings(run: ModelRun) -> list[str]:
    return [
        _bmfa_and_coin(run),
        _algorithm_1_and_blocks(run),
        _variance_rows(run),
        _cheapest_optimal(run),
        _mass_rule(run),
    ]


def _agreement(run: ModelRun, method: str) -> str:
    agreement, leaf = (run.value(method, c) for c in ("agreement_percent", "leaf_percent"))
    return f"{format_percent(agreement, 1)} at {format_percent(leaf, 1)} leaves"


def _bmfa_and_coin(run: ModelRun) -> str:
    ours, coin = (run.value(method, "agreement_percent") for method in (BMFA, COIN))
    if ours is None or coin is None:
        return ""
    comparison = "higher" if ours > coin else "no higher"
    return (
        f"{BMFA}, our fit to the rule of the paper's tables, has an agreement of "
        f"{_agreement(run, BMFA)}; this is {comparison} than that of random quadrants with a similar "
        f"number of leaves ({_agreement(run, COIN)})."
    )


def _algorithm_1_and_blocks(run: ModelRun) -> str:
    """Algorithm 1 and fixed 2 x 2 blocks, at the leaf ratio nearest to theirs."""
    fixed = run.row(paper.FIXED)
    leaf, kl = get_number(fixed, "leaf_percent"), get_number(fixed, "output_kl")
    rows = [row for row in run.family("gamma") if get_number(row, "leaf_percent") is not None]
    if leaf is None or kl is None or not rows:
        return ""
    nearest = min(rows, key=lambda row: abs((get_number(row, "leaf_percent") or 0.0) - leaf))
    method, ours = get_text(nearest, "method"), get_number(nearest, "output_kl")
    if ours is None:
        return ""
    better = ours < kl
    return (
        f"Algorithm 1 as printed, {method} ({_agreement(run, method)}, output KL "
        f"{format_small(ours)}), is {'better' if better else 'not better'} than fixed blocks of 2 × 2 "
        f"tokens ({_agreement(run, paper.FIXED)}, {format_small(kl)})"
        + ("." if better else ": its score measures how much a block varies, not its mass.")
    )


def _variance_rows(run: ModelRun) -> str:
    rows = run.family("variance")
    if not rows:
        return "The paper's variance-only row was not measured."
    results = [f"{r['method']} {_agreement(run, get_text(r, 'method'))}" for r in rows]
    printed = paper.CLOSED_LOOP[paper.VARIANCE]
    return (
        f"Quadrants kept by their variance: {', '.join(results)}. The paper prints one such row, "
        f"{format_percent(printed.agreement_percent, 2)} at {format_percent(printed.leaf_percent, 2)} "
        "leaves, without a threshold."
    )


def _cheapest_optimal(run: ModelRun) -> str:
    """The optimal tree with the fewest leaves whose output KL is at most that of the paper's rule."""
    leaf, kl = (run.value(BMFA, column) for column in ("leaf_percent", "output_kl"))
    if leaf is None or kl is None:
        return ""
    rows = [r for r in run.family("optimal") if (get_number(r, "output_kl") or 0.0) <= kl]
    best = min(rows, key=lambda r: get_number(r, "leaf_percent") or 100.0, default={})
    ours = get_number(best, "leaf_percent")
    if not ours:
        return f"No optimal tree measured here has an output KL as low as that of {BMFA}."
    if ours >= leaf:
        needed = format_percent(ours, 1)
        return f"The optimal tree needs {needed} leaves to reach the output KL of {BMFA}."
    return (
        f"The optimal tree reaches the output KL of {BMFA} with {format_percent(ours, 1)} leaves "
        f"({get_text(best, 'method')}) instead of {format_percent(leaf, 1)}, "
        f"{format_number(leaf / ours, 1)} times fewer."
    )


def _mass_rule(run: ModelRun) -> str:
    """The mass rule, if even its best parameter is worse than fixed blocks."""
    fixed = run.value(paper.FIXED, "agreement_percent")
    rows = run.family("mass")
    best = max(rows, key=lambda row: get_number(row, "agreement_percent") or 0.0, default={})
    agreement = get_number(best, "agreement_percent")
    if agreement is None or fixed is None or agreement >= fixed:
        return ""
    method = get_text(best, "method")
    return (
        f"The mass rule is worse than fixed blocks: its best parameter ({method}) has an agreement of "
        f"{_agreement(run, method)}, because it weights a score that does not detect a small object "
        "inside a block."
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
    run = papers_model_first(runs)
    leaf = None if run is None else run.value(paper.PRINTED_THRESHOLD, "leaf_percent")
    if run is not None and leaf is not None:
        printed = paper.CLOSED_LOOP[BMFA].leaf_percent
        sentences.append(
            f"At the threshold of the tables, ε = 0.8, Algorithm 1 has {format_percent(leaf, 1)} leaves "
            f"({run.title}), whereas the paper prints {format_percent(printed, 2)}."
        )
    if run is None or not run.is_papers_model:
        sentences.append(
            f"To compare the two in {paper.MODEL} itself, run bmfa report --weights FILE --imagenet DIR "
            "with its weights and pictures."
        )
    return sentences


def _table(run: ModelRun) -> Block:
    layers = get_text(run.rows[0], "layers")
    caption = f"{run.heading}, {layers}; the paper: {paper.MODEL}, COCO, last-4"
    return Table(caption, COLUMNS, [_table_row(row) for row in run.all_rows])


def _table_row(row: Row) -> list[Any]:
    point = paper.CLOSED_LOOP.get(get_text(row, "method"))
    printed = (
        [point.leaf_percent, point.agreement_percent, point.output_kl] if point else [None] * 3
    )
    kl = format_small(get_number(row, "output_kl"))
    shown = [row.get("leaf_percent"), row.get("agreement_percent"), kl, row.get("attention_kl")]
    return [get_text(row, "method"), *shown, row.get("top1_percent"), *printed]


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
            *(_lead_over_coin(run, choices) for run, choices in several),
            *(_most_sensitive_layer(run) for run, _ in single),
        ),
        *illustrate(
            figures.layers,
            select_layer_records(records, several=True),
            "Agreement (left) and output KL (right). The embedded model has eight layers, so last-8 "
            "would be all of them.",
        ),
    ]


def _layers_with_lead(run: ModelRun, choices: Sequence[str]) -> list[str]:
    """The choices of layers in which the paper's rule is better than random retention.

    The one with the higher agreement is better; if both agree equally, the one with the lower KL.
    """

    def quality(method: str, layers: str) -> tuple[float, float] | None:
        for row in run.rows:
            if get_text(row, "method") == method and get_text(row, "layers") == layers:
                agreement, kl = get_number(row, "agreement_percent"), get_number(row, "output_kl")
                return None if agreement is None else (agreement, -(kl or 0.0))
        return None

    ahead = []
    for choice in choices:
        ours, coin = quality(BMFA, choice), quality(COIN, choice)
        if ours is not None and coin is not None and ours > coin:
            ahead.append(choice)
    return ahead


def _lead_over_coin(run: ModelRun, choices: Sequence[str]) -> str:
    choices = [choice for choice in choices if not run.covers_all_layers(choice)]
    ahead = _layers_with_lead(run, choices)
    if not ahead:
        return ""
    where = "in all of them" if len(ahead) == len(choices) else f"in {', '.join(ahead)}"
    return f"{run.title}, {', '.join(choices)}: {BMFA} is ahead of {COIN} {where}."


def _most_sensitive_layer(run: ModelRun) -> str:
    rows = run.family("global-mean")
    if not rows:
        return ""
    worst = max(rows, key=lambda row: get_number(row, "output_kl") or 0.0)
    return (
        f"One mean for all keys changes the output most in layer {get_text(worst, 'layers')} of "
        f"{run.title_in_sentence} (output KL {format_number(get_number(worst, 'output_kl'))})."
    )


def _claims(records: RecordSet) -> list[Claim]:
    run = papers_model_first(closed_loop_runs(records))
    return [
        _more_than_chance(run),
        _more_than_blocks(run),
        _same_as_algorithm_1(run),
        _variance_keeps_all(run),
        _smallest_kl(run),
        _lead_persists(records),
    ]


def _point(agreement: float | None, leaf: float | None) -> str:
    return f"{format_percent(agreement, 2)} at {format_percent(leaf, 2)}"


def _printed(method: str) -> str:
    point = paper.CLOSED_LOOP[method]
    return _point(point.agreement_percent, point.leaf_percent)


def _ours(run: ModelRun, method: str) -> str:
    return _point(run.value(method, "agreement_percent"), run.value(method, "leaf_percent"))


def _is_ahead(run: ModelRun | None, other: str) -> bool | None:
    """True if the paper's rule agrees more than another method; None if one was not measured."""
    pair = [None if run is None else run.value(m, "agreement_percent") for m in (BMFA, other)]
    return None if pair[0] is None or pair[1] is None else pair[0] > pair[1]


def _more_than_chance(run: ModelRun | None) -> Claim:
    claim = "Inside a model BMFA preserves more than chance at a similar budget: agreement at leaf ratio"
    printed = f"{_printed(BMFA)} against {_printed(COIN)}"
    ahead = _is_ahead(run, COIN)
    if run is None or ahead is None:
        return not_measured(claim, printed, "closed-loop")
    note = f"{run.heading}; the paper: {paper.MODEL}, 5,000 pictures of COCO. {paper.FIT_NOTE}."
    ours = f"{_ours(run, BMFA)} against {_ours(run, COIN)}"
    return Claim(claim, printed, ours, direction(ahead), note)


def _more_than_blocks(run: ModelRun | None) -> Claim:
    claim = "It also preserves more than fixed blocks of 2 × 2 tokens"
    printed = f"{_printed(BMFA)} against {_printed(paper.FIXED)}"
    ahead = _is_ahead(run, paper.FIXED)
    if run is None or ahead is None:
        return not_measured(claim, printed, "closed-loop")
    leaves = [run.value(method, "leaf_percent") or 0 for method in (BMFA, paper.FIXED)]
    note = f"{run.heading}{'; with more leaves, as in the paper' if leaves[0] > leaves[1] else ''}."
    ours = f"{_ours(run, BMFA)} against {_ours(run, paper.FIXED)}"
    return Claim(claim, printed, ours, direction(ahead), note)


def _same_as_algorithm_1(run: ModelRun | None) -> Claim:
    claim = "The rule of these tables is Algorithm 1: leaf ratio at ε = 0.8"
    printed = paper.CLOSED_LOOP[BMFA].leaf_percent
    method = paper.PRINTED_THRESHOLD
    leaf = None if run is None else run.value(method, "leaf_percent")
    if run is None or leaf is None:
        return not_measured(claim, format_percent(printed, 2), "closed-loop", method=method)
    same = abs(leaf - printed) <= SIMILAR_LEAVES
    quadrants = format_percent(run.value(BMFA, "leaf_percent"), 2)
    note = run.heading + ("" if same else "; Algorithm 1 hardly splits at this threshold")
    note += f". One level of quadrants, our fit, has {quadrants}."
    ours = format_percent(leaf, 2)
    return Claim(claim, format_percent(printed, 2), ours, direction(same), note)


def _variance_keeps_all(run: ModelRun | None) -> Claim:
    enough = paper.CLOSED_LOOP[paper.VARIANCE].agreement_percent
    claim = (
        "By variance alone nearly every token must be kept: the fewest leaves with at least "
        f"{format_percent(enough, 2)} agreement"
    )
    printed = _printed(paper.VARIANCE)
    rows = [] if run is None else run.family("variance")
    if run is None or not rows:
        return not_measured(claim, printed, "closed-loop", method=paper.VARIANCE)
    candidates = [
        (get_number(row, "leaf_percent") or 0.0, get_text(row, "method"))
        for row in rows
        if (get_number(row, "agreement_percent") or 0.0) >= enough
    ]
    if candidates:
        leaf, method = min(candidates)
    else:
        leaf, method = max(
            (get_number(row, "leaf_percent") or 0.0, get_text(row, "method")) for row in rows
        )
    ours = f"{_ours(run, method)} ({method})"
    note = f"{run.heading}; the paper states no threshold."
    return Claim(claim, printed, ours, direction(leaf >= NEARLY_ALL), note)


def _smallest_kl(run: ModelRun | None) -> Claim:
    claim = f"The smallest output KL at no more leaves than {BMFA}"
    point = paper.CLOSED_LOOP[BMFA]
    printed = f"{format_number(point.output_kl)} at {format_percent(point.leaf_percent, 2)}"
    leaf = None if run is None else run.value(BMFA, "leaf_percent")
    kl = None if run is None else run.value(BMFA, "output_kl")
    if run is None or leaf is None or kl is None:
        return not_measured(claim, printed, "closed-loop")
    candidates = [
        (loss, leaves, get_text(row, "method"))
        for row in run.family("optimal")
        if (loss := get_number(row, "output_kl")) is not None
        and (leaves := get_number(row, "leaf_percent")) is not None
        and leaves <= leaf
    ]
    if not candidates:
        return not_measured(claim, printed, "closed-loop", method="optimal:0.002")
    loss, leaves, method = min(candidates)
    verdict = Verdict.AHEAD if loss < kl else Verdict.DIFFERS
    ours = f"{format_small(loss)} at {format_percent(leaves, 2)} ({method})"
    note = (
        f"{run.heading}: {BMFA} has {format_small(kl)} at {format_percent(leaf, 2)}. Optimal trees "
        "read exact scores, as this rule does."
    )
    return Claim(claim, printed, ours, verdict, note)


def _lead_persists(records: RecordSet) -> Claim:
    claim = "The lead over chance persists as more layers are screened"
    printed = ", ".join(paper.LAYER_CHOICES)
    found = layer_runs(records)
    run = papers_model_first([run for run, _ in found])
    if run is None:
        return not_measured(claim, printed, "closed-loop")
    choices = next(choices for other, choices in found if other is run)
    choices = [choice for choice in choices if not run.covers_all_layers(choice)]
    if not choices:
        return not_measured(claim, printed, "closed-loop")
    ahead = _layers_with_lead(run, choices)
    behind = [choice for choice in choices if choice not in ahead]
    missing = [choice for choice in paper.LAYER_CHOICES if choice not in choices]
    note = run.heading + (f"; not in {', '.join(behind)}" if behind else "")
    if all_layers := [choice for choice in missing if run.covers_all_layers(choice)]:
        note += f"; {', '.join(all_layers)} means all layers of this model and is not judged"
    elif missing:
        note += f"; {', '.join(missing)} not measured"
    ours = ", ".join(ahead) or "in none"
    return Claim(claim, printed, ours, direction(not behind), f"{note}.")


CLOSED_LOOP = Chapter("closed-loop", "Inside a model", "closed-loop", _content, _claims)
LAYERS = Chapter("layers", "Layer sensitivity", "closed-loop", _layers)
