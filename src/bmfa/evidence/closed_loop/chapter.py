"""The chapter on screening inside a model: what its outputs keep."""

from typing import Any

from bmfa.evidence.page import figures, paper, runs
from bmfa.evidence.page.markup import Column, decimal, figure, paragraph, prose, table, tiny
from bmfa.evidence.page.records import Evidence, number, text
from bmfa.evidence.page.runs import Run
from bmfa.records import Row

MEASURES = (
    ("Leaf %", "leaf_percent", 2),
    ("Agreement %", "agreement_percent", 1),
    ("Output KL", "output_kl", 3),
    ("Attention KL", "attention_kl", 3),
    ("Top-1 %", "top1_percent", 1),
)


def content(evidence: Evidence) -> str:
    """Agreement and output KL against leaf ratio, and Algorithm 1 against the quadrant rule."""
    found = runs.closed_loops(evidence)
    intro = paragraph(
        "Every query and head of some layers gets its own tree over the keys, and its attention is "
        "computed on the leaves; the class key stays exact. Agreement is the share of pictures whose "
        "first class stays that of the full model, output KL the divergence of the class "
        "distributions, KL(full ‖ screened).",
        _frame(found),
    )
    caption = (
        "Up and to the left is better above, down and to the left below. A line joins the settings "
        f"of one rule; a KL below 10⁻⁸ is drawn there. {_rings(found)}The right-hand panels hold the "
        "points that the paper prints."
    )
    return (
        intro
        + figure(figures.closed_loop, runs.of_depths(evidence, False), caption)
        + "".join(findings(run) for run in found)
        + quadrant_warning(found)
        + "".join(_table(run) for run in found)
    )


def _frame(found: list[Run]) -> str:
    """How what is measured here differs from what the paper measured."""
    theirs = f"The paper screens the last four of {paper.MODEL}'s twelve layers on COCO's 5,000."
    sentences = []
    for run in found:
        if run.model == runs.EMBEDDED:
            sentences.append(
                f"Here it is the embedded model (0.9 M parameters, eight layers, 14 × 14 tokens as "
                f"{paper.MODEL}) on {run.images:,} pictures that the library draws: the order of the "
                "rules can be compared with the paper's, the numbers cannot."
            )
        else:
            what = "on other pictures than the paper's" if run.papers else "another model"
            sentences.append(f"{run.title} is shown on {run.images:,} pictures, {what}.")
    return " ".join([theirs, *sentences])


def _rings(found: list[Run]) -> str:
    return (
        "Rings are the paper's agreement on ImageNet. " if any(run.papers for run in found) else ""
    )


def findings(run: Run) -> str:
    """What the numbers of one model say, for and against every rule."""
    sentences = [_against_random(run), _against_fixed(run), _variance(run), _best(run), _mass(run)]
    said = [sentence for sentence in sentences if sentence]
    return f"<p><strong>{prose(run.title)}.</strong> {prose(' '.join(said))}</p>" if said else ""


def _point(run: Run, method: str) -> str:
    agreement, leaf = (run.value(method, c) for c in ("agreement_percent", "leaf_percent"))
    return f"{decimal(agreement, 1)} % at {decimal(leaf, 1)} % leaves"


def _against_random(run: Run) -> str:
    rule, coin = paper.QUADRANTS[0], paper.RANDOM[0]
    ours, theirs = (run.value(method, "agreement_percent") for method in (rule, coin))
    if ours is None or theirs is None:
        return ""
    verb = "keeps more than" if ours > theirs else "keeps no more than"
    return (
        f"{rule}, our fit to the rule of the paper's tables, agrees with the full model on "
        f"{_point(run, rule)} and {verb} a coin that costs about as much ({_point(run, coin)})."
    )


def _against_fixed(run: Run) -> str:
    """Algorithm 1 against fixed blocks of 2 x 2, at the leaf ratio nearest to theirs."""
    fixed = run.row(paper.FIXED)
    leaf, kl = number(fixed, "leaf_percent"), number(fixed, "output_kl")
    if leaf is None or kl is None:
        return ""
    rows = [row for row in run.family("gamma") if number(row, "leaf_percent") is not None]
    best = min(rows, key=lambda row: abs((number(row, "leaf_percent") or 0.0) - leaf), default=None)
    if best is None or number(best, "output_kl") is None:
        return ""
    beats = (number(best, "output_kl") or 0.0) < kl
    name, words = text(best, "method"), "beats" if beats else "does not even beat"
    return (
        f"Algorithm 1 as printed, {name} ({_point(run, name)}, output KL "
        f"{tiny(number(best, 'output_kl'))}), {words} fixed blocks of 2 × 2 tokens "
        f"({_point(run, paper.FIXED)}, {tiny(kl)})"
        + (" here." if beats else ": it asks how much a block varies, not whether it has mass.")
    )


def _variance(run: Run) -> str:
    """The variance rule at all thresholds that were run."""
    said = [f"{text(r, 'method')} {_point(run, text(r, 'method'))}" for r in run.family("variance")]
    printed = paper.CLOSED_LOOP[paper.VARIANCE]
    if not said:
        return "The paper's variance-only row was not run."
    return (
        f"Quadrants kept by their variance: {', '.join(said)}. The paper prints one such row, "
        f"{decimal(printed.agreement_percent, 2)} % at {decimal(printed.leaf_percent, 2)} % leaves, "
        "without its threshold."
    )


def _best(run: Run) -> str:
    """The cheapest optimal tree that keeps the output at least as well as the paper's rule."""
    rule = paper.QUADRANTS[0]
    leaf, kl = (run.value(rule, column) for column in ("leaf_percent", "output_kl"))
    if leaf is None or kl is None:
        return ""
    at_least = [r for r in run.family("optimal") if (number(r, "output_kl") or 0.0) <= kl]
    cheapest = min(at_least, key=lambda r: number(r, "leaf_percent") or 100.0, default=None)
    ours = None if cheapest is None else number(cheapest, "leaf_percent")
    if cheapest is None or not ours:
        return f"No optimal tree measured here keeps the output as well as {rule}."
    return (
        f"The optimal tree keeps the output at least as well as {rule} with "
        f"{decimal(ours, 1)} % leaves ({text(cheapest, 'method')}) instead of {decimal(leaf, 1)} %, "
        f"{decimal(leaf / ours, 1)} times as few."
        if ours < leaf
        else f"The optimal tree needs {decimal(ours, 1)} % leaves to keep the output as {rule} does."
    )


def _mass(run: Run) -> str:
    """The mass rule where it is worse than the fixed grid at its best."""
    rows = run.family("mass")
    fixed = run.value(paper.FIXED, "agreement_percent")
    best = max(rows, key=lambda row: number(row, "agreement_percent") or 0.0, default=None)
    agreement = None if best is None else number(best, "agreement_percent")
    if best is None or agreement is None or fixed is None or agreement >= fixed:
        return ""
    return (
        f"The mass rule disappoints: at its best ({text(best, 'method')}) it keeps "
        f"{_point(run, text(best, 'method'))}, less than fixed blocks, because it weighs a score that "
        "is blind to a small figure inside a block."
    )


def quadrant_warning(found: list[Run]) -> str:
    """Which rule the paper's tables hold, and what Algorithm 1 does at the threshold they name."""
    sentences = (
        "The paper does not say which rule its model tables hold beyond its name. On a 14 × 14 grid "
        "random retention prints 26.53 % and 51.02 %, which is p + 4 (1 − p) / 196 for p = 0.25 and "
        "0.5: one level of four 7 × 7 quadrants, each kept token by token or as its mean. The same with "
        "the exact gap as the criterion, quadrant-gap, is our fit to the leaf ratios that the paper "
        "prints of BMFA. So quadrant-gap stands for the paper's BMFA here, and gamma for "
        "Algorithm 1 as it is printed."
    )
    run = runs.papers_first(found)
    leaf = None if run is None else run.value(paper.PRINTED_THRESHOLD, "leaf_percent")
    if run is not None and leaf is not None:
        printed = paper.CLOSED_LOOP[paper.QUADRANTS[0]].leaf_percent
        sentences += (
            f" At the threshold of the tables, ε = 0.8, Algorithm 1 keeps {decimal(leaf, 1)} % leaves "
            f"({run.title}), where they print {decimal(printed, 2)} %."
        )
    if run is None or not run.papers:
        sentences += (
            f" How the two compare in {paper.MODEL} itself takes its weights and pictures: bmfa "
            "report --weights FILE --imagenet DIR."
        )
    return (
        '<p class="warning"><strong>Which rule the paper’s model tables hold is our reading.</strong> '
        f"{prose(sentences)}</p>"
    )


def _table(run: Run) -> str:
    columns = [Column("Method", code=True)]
    columns += [Column(head, decimals) for head, _, decimals in MEASURES]
    columns += [Column("Paper: leaf %", 2, paper=True), Column("Agreement %", 2, paper=True)]
    columns += [Column("Output KL", 3, paper=True)]
    whole = [run.full] if run.full is not None else []
    body = [_table_row(row) for row in [*whole, *run.rows]]
    layers = text(run.rows[0], "layers")
    caption = f"{run.heading}, {layers}; the paper: {paper.MODEL}, COCO, last-4"
    return table(caption, columns, body)


def _table_row(row: Row) -> list[Any]:
    printed = paper.CLOSED_LOOP.get(text(row, "method"))
    theirs = (
        [printed.leaf_percent, printed.agreement_percent, printed.output_kl]
        if printed
        else [None] * 3
    )
    ours = row | {"output_kl": tiny(number(row, "output_kl"))}
    return [text(row, "method"), *(ours.get(name) for _, name, _ in MEASURES), *theirs]
