"""What the paper claims of the synthetic stress test."""

from bmfa.report import paper
from bmfa.report.evidence import Evidence, number
from bmfa.report.markup import decimal
from bmfa.report.verdicts import PRINTED, Claim, Verdict, judge, missing, percent, show


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
    verdict = judge([(printed.mean_gap, mean), (printed.p95_gap, tail)], 0, 0, PRINTED)
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
    verdict = judge(compared, 0, 0, PRINTED)
    note = "With the minority in the corner of the grid; the next row has the other places."
    return Claim(claim, words, f"{show(mean, tail)} at {percent(leaf)}", verdict, note)


def _place_matters(evidence: Evidence) -> Claim:
    claim = "Refinement brings the residual near zero: worst mean gap over the places"
    rows = evidence.select("synthetic", method=paper.ALGORITHM_1)
    gaps = {str(row.get("placement")): number(row, "mean_gap") for row in rows}
    known = {place: gap for place, gap in gaps.items() if gap is not None}
    if not known:
        return missing(claim, "near zero", "synthetic")
    place = max(known, key=lambda name: known[name])
    mean = _synthetic(evidence, "sparge-mean", place)[0]
    words = f"{show(known[place])} ({place})"
    if known[place] <= 2 * paper.SYNTHETIC[paper.ALGORITHM_1].mean_gap:
        return Claim(claim, "near zero", words, Verdict.CLOSE)
    note = (
        f"The mean alone has {show(mean)} there: where all quarters look alike, nothing is split."
    )
    return Claim(claim, "near zero", words, Verdict.NOT_AS_CLAIMED, note)


def _fixed_depth(evidence: Evidence) -> Claim:
    claim = "Where to refine matters more than how much: fixed-depth:2 at similar leaves"
    printed = paper.SYNTHETIC["fixed-depth:2"]
    words = f"{show(printed.mean_gap)} at {percent(printed.leaf_percent)}"
    mean, _, leaf = _synthetic(evidence, "fixed-depth:2")
    if mean is None:
        return missing(claim, words, "synthetic")
    verdict = judge([(printed.mean_gap, mean), (printed.leaf_percent, leaf)], 0, 0, PRINTED)
    fixed, adaptive = (
        _synthetic(evidence, method, "centred")[0]
        for method in ("fixed-depth:2", paper.ALGORITHM_1)
    )
    lost = fixed is not None and adaptive is not None and fixed < adaptive
    note = f"Centred, it is the other way round: {show(fixed)} against {show(adaptive)}."
    return Claim(claim, words, f"{show(mean)} at {percent(leaf)}", verdict, note if lost else "")


def _optimal(evidence: Evidence) -> Claim:
    claim = "The least gap for the leaves: worst mean gap over the places"
    printed = f"{show(paper.SYNTHETIC[paper.ALGORITHM_1].mean_gap)} (corner only)"
    rows = [r for r in evidence.rows("synthetic") if str(r.get("method")).startswith("optimal:")]
    gaps = [gap for row in rows if (gap := number(row, "mean_gap")) is not None]
    leaves = [leaf for row in rows if (leaf := number(row, "leaf_percent")) is not None]
    if not gaps or not leaves:
        return missing(claim, printed, "synthetic")
    beaten = max(gaps) < paper.SYNTHETIC[paper.ALGORITHM_1].mean_gap
    words = f"{show(max(gaps))} at {decimal(min(leaves), 1)} to {decimal(max(leaves), 1)} %"
    spent = rows[0].get("method"), _synthetic(evidence, str(rows[0].get("method")))[2]
    note = (
        f"{spent[0]} takes {percent(spent[1])} of leaves in the corner and reads every score; "
        "Algorithm 1 reads block means alone."
    )
    return Claim(claim, printed, words, Verdict.BEATEN if beaten else Verdict.NOT_AS_CLAIMED, note)
