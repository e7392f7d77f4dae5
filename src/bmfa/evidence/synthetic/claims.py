"""What the paper claims of the synthetic stress test."""

from bmfa.evidence.page import paper
from bmfa.evidence.page.markup import NOTHING
from bmfa.evidence.page.records import Evidence, number
from bmfa.evidence.page.verdicts import (
    PRINTED,
    Claim,
    Verdict,
    direction,
    judge,
    missing,
    percent,
    show,
)

EQUAL_LEAVES = "optimal-leaves-pooled:0.05794"


def claims(evidence: Evidence) -> list[Claim]:
    """The claims in the order of the chapter."""
    return [
        _mean_loses(evidence),
        _algorithm_repairs(evidence),
        _place_matters(evidence),
        _fixed_depth(evidence),
        _optimal(evidence),
    ]


def _synthetic(evidence: Evidence, method: str, place: str = "corner") -> list[float | None]:
    return [
        evidence.value("synthetic", column, method=method, placement=place)
        for column in ("mean_gap", "p95_gap", "leaf_percent")
    ]


def _mean_loses(evidence: Evidence) -> Claim:
    claim = "A block's mean loses a bright minority: mean and P95 gap over 396 settings"
    printed = paper.SYNTHETIC["sparge-mean"]
    mean, tail, _ = _synthetic(evidence, "sparge-mean")
    words = show(printed.mean_gap, printed.p95_gap)
    if mean is None:
        return missing(claim, words, "synthetic")
    verdict = judge([(printed.mean_gap, mean), (printed.p95_gap, tail)])
    note = "The same wherever the minority lies: a mean does not see places."
    return Claim(claim, words, show(mean, tail), verdict, note)


def _algorithm_repairs(evidence: Evidence) -> Claim:
    claim = "Algorithm 1 repairs it: mean and P95 gap, leaf ratio"
    printed = paper.SYNTHETIC[paper.ALGORITHM_1]
    words = f"{show(printed.mean_gap, printed.p95_gap)} at {percent(printed.leaf_percent)}"
    mean, tail, leaf = _synthetic(evidence, paper.ALGORITHM_1)
    if mean is None:
        return missing(claim, words, "synthetic")
    compared = [(printed.mean_gap, mean), (printed.p95_gap, tail), (printed.leaf_percent, leaf)]
    verdict = judge(compared)
    note = "With the minority in the corner of the grid; the next row has the other places."
    return Claim(claim, words, f"{show(mean, tail)} at {percent(leaf)}", verdict, note)


def _place_matters(evidence: Evidence) -> Claim:
    claim = "Refinement brings the residual near zero: worst mean gap over the placements"
    rows = evidence.select("synthetic", method=paper.ALGORITHM_1)
    gaps = {str(row.get("placement")): number(row, "mean_gap") for row in rows}
    known = {place: gap for place, gap in gaps.items() if gap is not None}
    if not known:
        return missing(claim, "near zero (corner)", "synthetic")
    place = max(known, key=lambda name: known[name])
    mean = _synthetic(evidence, "sparge-mean", place)[0]
    words = f"{show(known[place])} ({place})"
    held = known[place] <= 2 * paper.SYNTHETIC[paper.ALGORITHM_1].mean_gap
    note = "The paper's minority lies in the corner; the other placements are this library's."
    if not held:
        note += (
            f" The mean has {show(mean)} there: where all quarters look alike, nothing is split."
        )
    return Claim(claim, "near zero (corner)", words, direction(held), note)


def _fixed_depth(evidence: Evidence) -> Claim:
    claim = "Where to refine matters more than how much: fixed-depth:2 at similar leaves"
    printed = paper.SYNTHETIC["fixed-depth:2"]
    words = f"{show(printed.mean_gap)} at {percent(printed.leaf_percent)}"
    mean, _, leaf = _synthetic(evidence, "fixed-depth:2")
    if mean is None:
        return missing(claim, words, "synthetic")
    verdict = judge([(printed.mean_gap, mean), (printed.leaf_percent, leaf)])
    fixed, adaptive = (
        _synthetic(evidence, method, "centred")[0]
        for method in ("fixed-depth:2", paper.ALGORITHM_1)
    )
    lost = fixed is not None and adaptive is not None and fixed < adaptive
    note = f"Centred, it is the other way round: {show(fixed)} against {show(adaptive)}."
    return Claim(claim, words, f"{show(mean)} at {percent(leaf)}", verdict, note if lost else "")


def _optimal(evidence: Evidence) -> Claim:
    claim = "The least mean gap at no more leaves than Algorithm 1 has, minority in the corner"
    printed = paper.SYNTHETIC[paper.ALGORITHM_1]
    words = f"{show(printed.mean_gap)} at {percent(printed.leaf_percent)}"
    most = (printed.leaf_percent or 0.0) + PRINTED
    found = [
        (gap, leaf, str(row.get("method")))
        for row in evidence.select("synthetic", placement="corner")
        if str(row.get("method")).startswith("optimal")
        and (gap := number(row, "mean_gap")) is not None
        and (leaf := number(row, "leaf_percent")) is not None
        and leaf <= most
    ]
    if not found:
        made = f"bmfa synthetic --method {EQUAL_LEAVES} --json synthetic.json"
        return Claim(claim, words, NOTHING, Verdict.NOT_MEASURED, "Get it with", made)
    gap, leaf, method = min(found)
    verdict = Verdict.BEATEN if gap < printed.mean_gap else Verdict.NOT_AS_CLAIMED
    note = f"{method} reads every score; Algorithm 1 reads block means alone."
    return Claim(claim, words, f"{show(gap)} at {percent(leaf)}", verdict, note)
