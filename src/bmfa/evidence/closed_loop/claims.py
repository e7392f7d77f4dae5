"""What the paper claims of screening inside a model."""

from bmfa.evidence.closed_loop.layer_chapter import persists
from bmfa.evidence.page import paper, runs
from bmfa.evidence.page.markup import decimal, tiny
from bmfa.evidence.page.records import Evidence
from bmfa.evidence.page.runs import Run
from bmfa.evidence.page.verdicts import Claim, Verdict, direction, missing

EXPERIMENT = "closed-loop"
NEAR_LEAVES = 5.0  # percentage points: the same budget, for two ways to spend it
NEARLY_ALL = 90.0  # per cent of the tokens
FIT = "quadrant-gap stands for its rule: our fit to its leaf ratios, which the paper does not state"


def claims(evidence: Evidence) -> list[Claim]:
    """The claims in the order of the chapters, judged by the paper's own model where it is here."""
    run = runs.papers_first(runs.closed_loops(evidence))
    return [
        _random(run),
        _fixed(run),
        _algorithm(run),
        _variance(run),
        _optimal(run),
        _layers(evidence),
    ]


def _point(agreement: float | None, leaf: float | None) -> str:
    return f"{decimal(agreement, 2)} % at {decimal(leaf, 2)} %"


def _printed(method: str) -> str:
    printed = paper.CLOSED_LOOP[method]
    return _point(printed.agreement_percent, printed.leaf_percent)


def _ours(run: Run, method: str) -> str:
    return _point(run.value(method, "agreement_percent"), run.value(method, "leaf_percent"))


def where(run: Run) -> str:
    """Which model and pictures a number is of."""
    return f"{run.title}, {run.images:,} pictures"


def _random(run: Run | None) -> Claim:
    claim = "Inside a model BMFA keeps more than chance at a like budget: agreement at leaf ratio"
    rule, coin = paper.QUADRANTS[0], paper.RANDOM[0]
    words = f"{_printed(rule)} against {_printed(coin)}"
    if run is None or None in (ours := [run.value(m, "agreement_percent") for m in (rule, coin)]):
        return missing(claim, words, EXPERIMENT)
    ahead = (ours[0] or 0.0) > (ours[1] or 0.0)
    note = f"{where(run)}; the paper: {paper.MODEL}, COCO's 5,000. {FIT}."
    said = f"{_ours(run, rule)} against {_ours(run, coin)}"
    return Claim(claim, words, said, direction(ahead), note)


def _fixed(run: Run | None) -> Claim:
    claim = "And more than a fixed grid of 2 × 2 tokens"
    rule = paper.QUADRANTS[0]
    words = f"{_printed(rule)} against {_printed(paper.FIXED)}"
    pair = (rule, paper.FIXED)
    if run is None or None in (ours := [run.value(m, "agreement_percent") for m in pair]):
        return missing(claim, words, EXPERIMENT)
    ahead = (ours[0] or 0.0) > (ours[1] or 0.0)
    said = f"{_ours(run, rule)} against {_ours(run, paper.FIXED)}"
    more = (run.value(rule, "leaf_percent") or 0) > (run.value(paper.FIXED, "leaf_percent") or 0)
    note = f"{where(run)}{'; with more leaves, as in the paper' if more else ''}."
    return Claim(claim, words, said, direction(ahead), note)


def _algorithm(run: Run | None) -> Claim:
    claim = "The rule of these tables is Algorithm 1: leaf ratio at ε = 0.8"
    printed = paper.CLOSED_LOOP[paper.QUADRANTS[0]].leaf_percent
    words = f"{decimal(printed, 2)} %"
    method = paper.PRINTED_THRESHOLD
    leaf = None if run is None else run.value(method, "leaf_percent")
    if run is None or leaf is None:
        return missing(claim, words, EXPERIMENT, method=method)
    same = abs(leaf - printed) <= NEAR_LEAVES
    quadrants = run.value(paper.QUADRANTS[0], "leaf_percent")
    note = f"{where(run)}"
    note += "" if same else "; Algorithm 1 hardly splits at such a threshold"
    note += f". One level of quadrants, our fit, has {decimal(quadrants, 2)} %."
    return Claim(claim, words, f"{decimal(leaf, 2)} %", direction(same), note)


def _variance(run: Run | None) -> Claim:
    printed = paper.CLOSED_LOOP[paper.VARIANCE]
    claim = (
        "By variance alone nearly every token must be kept: the fewest leaves with at least "
        f"{decimal(printed.agreement_percent, 2)} % agreement"
    )
    words = _printed(paper.VARIANCE)
    rows = [] if run is None else run.family("variance")
    if run is None or not rows:
        return missing(claim, words, EXPERIMENT, method=paper.VARIANCE)
    points = [(run.value(str(r["method"]), "leaf_percent"), str(r["method"])) for r in rows]
    enough = [
        (leaf, method)
        for leaf, method in points
        if leaf is not None
        and (run.value(method, "agreement_percent") or 0.0) >= printed.agreement_percent
    ]
    note = f"{where(run)}; the paper names no threshold."
    if not enough:
        most, method = max((leaf or 0.0, method) for leaf, method in points)
        held = most >= NEARLY_ALL
        return Claim(claim, words, f"{_ours(run, method)} ({method})", direction(held), note)
    least, method = min(enough)
    said = f"{_ours(run, method)} ({method})"
    return Claim(claim, words, said, direction(least >= NEARLY_ALL), note)


def _optimal(run: Run | None) -> Claim:
    claim = "The least output KL at no more leaves than quadrant-gap:0.8"
    rule = paper.QUADRANTS[0]
    printed = paper.CLOSED_LOOP[rule]
    words = f"{decimal(printed.output_kl, 3)} at {decimal(printed.leaf_percent, 2)} %"
    leaf, kl = (
        (None, None) if run is None else [run.value(rule, c) for c in ("leaf_percent", "output_kl")]
    )
    if run is None or leaf is None or kl is None:
        return missing(claim, words, EXPERIMENT)
    candidates = []
    for row in run.family("optimal"):
        name = str(row["method"])
        ours, loss = run.value(name, "leaf_percent"), run.value(name, "output_kl")
        if ours is not None and loss is not None and ours <= leaf:
            candidates.append((loss, ours, name))
    if not candidates:
        return missing(claim, words, EXPERIMENT, method="optimal:0.002")
    loss, ours, name = min(candidates)
    verdict = Verdict.AHEAD if loss < kl else Verdict.DIFFERS
    note = (
        f"{where(run)}: {rule} has {tiny(kl)} at {decimal(leaf, 2)} %. Optimal trees read "
        "exact scores, as the rule does."
    )
    return Claim(claim, words, f"{tiny(loss)} at {decimal(ours, 2)} % ({name})", verdict, note)


def _layers(evidence: Evidence) -> Claim:
    claim = "The lead over chance stays as more layers are screened"
    words = ", ".join(paper.LAYER_CHOICES)
    several = runs.depths(evidence)
    if not several:
        return missing(claim, words, EXPERIMENT)
    run = runs.papers_first([run for run, _ in several])
    found = next(choices for one, choices in several if one is run)
    choices = [] if run is None else [one for one in found if not run.takes_all(one)]
    if run is None or not choices:
        return missing(claim, words, EXPERIMENT)
    ahead = persists(run, choices)
    said = ", ".join(ahead) or "in none"
    behind = [choice for choice in choices if choice not in ahead]
    note = f"{where(run)}" + (f"; not in {', '.join(behind)}" if behind else "")
    unjudged = [one for one in paper.LAYER_CHOICES if one not in choices]
    whole = [one for one in unjudged if run.takes_all(one)]
    if whole:
        note += f"; {', '.join(whole)} is all layers of this model and is not judged"
    elif unjudged:
        note += f"; {', '.join(unjudged)} not run"
    return Claim(claim, words, said, direction(not behind), f"{note}.")
