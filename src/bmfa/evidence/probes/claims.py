"""What the paper claims of the instance probes."""

from bmfa.evidence.page import paper
from bmfa.evidence.page.markup import decimal
from bmfa.evidence.page.records import Evidence, in_order, number
from bmfa.evidence.page.verdicts import Claim, Verdict, direction, missing, percent, show
from bmfa.evidence.probes.chapter import BEYOND_P95


def claims(evidence: Evidence) -> list[Claim]:
    """The claims in the order of the chapter."""
    return [
        _mean_gap(evidence, "coco"),
        _mean_gap(evidence, "lvis"),
        _embedded_order(evidence),
        _tail(evidence),
        _mask_only(evidence),
        _no_tail(evidence),
    ]


def _probed(
    evidence: Evidence, dataset: str, method: str, mode: str = "image-edge"
) -> list[float | None]:
    return [
        evidence.value("probe", column, dataset=dataset, mode=mode, method=method, group="all")
        for column in ("mean_gap", "p95_gap", "leaf_percent", "instances", "unsplit_percent")
    ]


def _mean_gap(evidence: Evidence, dataset: str) -> Claim:
    title = paper.dataset_title(dataset)
    claim = f"On {title} instances, Algorithm 1 lowers the mean gap of the mean"
    printed = paper.PROBES[dataset, "image-edge"]
    before, after = printed["sparge-mean"], printed[paper.ALGORITHM_1]
    words = f"{show(before.mean_gap)} to {show(after.mean_gap)} at {percent(after.leaf_percent)}"
    mean = _probed(evidence, dataset, "sparge-mean")[0]
    gap, _, leaf, instances, _ = _probed(evidence, dataset, paper.ALGORITHM_1)
    if mean is None or gap is None:
        return missing(claim, words, "probe", dataset=dataset)
    note = (
        f"{decimal(instances, 0)} of {paper.INSTANCES[dataset]:,} instances. The scores are built by "
        "our fit to the paper's table, so that closeness to it is no evidence of its own."
    )
    ours = f"{show(mean)} to {show(gap)} at {percent(leaf)}"
    return Claim(claim, words, ours, direction(gap < mean), note)


def _embedded_order(evidence: Evidence) -> Claim:
    claim = "The methods rank alike on other data: by mean gap, on the embedded pictures"
    printed = paper.PROBES["coco", "image-edge"]
    order = sorted(printed, key=lambda method: printed[method].mean_gap)
    gaps = {method: _probed(evidence, "embedded", method)[0] for method in order}
    known = {method: gap for method, gap in gaps.items() if gap is not None}
    if len(known) < len(order):
        return missing(claim, "the order of its table", "probe", dataset="embedded")
    same = sorted(known, key=lambda method: known[method]) == order
    words = "the same order" if same else "another order"
    gaps_said = f"{show(known['sparge-mean'])} to {show(known[paper.ALGORITHM_1])}"
    note = f"{gaps_said}, on pictures that the library makes itself."
    return Claim(claim, "the order of its table", words, direction(same), note)


def _tail(evidence: Evidence) -> Claim:
    claim = "Algorithm 1's tail is worse than a variance correction's: P95 gap"
    printed = paper.PROBES["coco", "image-edge"]
    pair = printed[paper.ALGORITHM_1].p95_gap, printed["mean-variance"].p95_gap
    words = f"{show(pair[0])} against {show(pair[1])} (COCO)"
    dataset = _measured_dataset(evidence)
    tail, correction = (
        _probed(evidence, dataset, method)[1] for method in (paper.ALGORITHM_1, "mean-variance")
    )
    unsplit = _probed(evidence, dataset, paper.ALGORITHM_1)[4]
    if tail is None or correction is None:
        return missing(claim, words, "probe")
    note = f"It comes from the {decimal(unsplit, 1)} % of instances whose root is never split."
    ours = f"{show(tail)} against {show(correction)} ({paper.dataset_title(dataset)})"
    shown = note if unsplit is not None and unsplit > BEYOND_P95 else ""
    return Claim(claim, words, ours, direction(tail > correction), shown)


def _measured_dataset(evidence: Evidence) -> str:
    """The paper's own data set where it was probed, else another one."""
    probed = in_order(evidence.rows("probe"), "dataset")
    return next((dataset for dataset in paper.DATASETS if dataset in probed), "coco")


def _mask_only(evidence: Evidence) -> Claim:
    claim = "Without pixel edges Algorithm 1 still leads in the mean, not in P95"
    points = paper.PROBES["coco", "mask-only"]
    pair = points[paper.ALGORITHM_1], points["mean-variance"]
    printed = [value for point in pair for value in (point.mean_gap, point.p95_gap)]
    words = f"{show(*printed[:2])} against {show(*printed[2:])}"
    mean, tail, _, instances, _ = _probed(evidence, "coco", paper.ALGORITHM_1, "mask-only")
    other_mean, other_tail, *_ = _probed(evidence, "coco", "mean-variance", "mask-only")
    if mean is None or other_mean is None or instances is None:
        return missing(claim, words, "probe", mode="mask-only")
    held = mean < other_mean and (tail or 0.0) > (other_tail or 0.0)
    note = f"On {instances:,.0f} of {paper.INSTANCES['coco']:,} instances, scores by our fit"
    if mean > other_mean:
        note += "; the variance correction leads in the mean as well"
    ours = f"{show(mean, tail)} against {show(other_mean, other_tail)}"
    return Claim(claim, words, ours, direction(held), f"{note}.")


def _no_tail(evidence: Evidence) -> Claim:
    claim = "The least P95 gap of a summary without annotations"
    best = paper.PROBES["coco", "image-edge"]["mean-variance"].p95_gap
    words = f"{show(best)} (mean-variance, COCO)"
    dataset = _measured_dataset(evidence)
    rows = evidence.select("probe", dataset=dataset, mode="image-edge", group="all")
    optimal = [row for row in rows if str(row.get("method")).startswith("optimal:")]
    tail = number(optimal[0], "p95_gap") if optimal else None
    leaf = number(optimal[0], "leaf_percent") if optimal else None
    correction = _probed(evidence, dataset, "mean-variance")[1]
    if tail is None or correction is None:
        return missing(claim, words, "probe")
    verdict = Verdict.AHEAD if tail < correction else Verdict.DIFFERS
    theirs = _probed(evidence, dataset, paper.ALGORITHM_1)[2]
    note = (
        f"mean-variance has {show(correction)} there, with one leaf. {optimal[0].get('method')} reads "
        f"exact scores; Algorithm 1 has {percent(theirs)} leaves."
    )
    ours = f"{show(tail)} at {percent(leaf)} ({paper.dataset_title(dataset)})"
    return Claim(claim, words, ours, verdict, note)
