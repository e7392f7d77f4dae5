"""The summary: what the paper claims, what is measured here, and the verdict."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from bmfa.report import paper
from bmfa.report.evidence import Evidence, in_order, number
from bmfa.report.markup import NOTHING, decimal

PRINTED = 0.0006  # three decimals were printed
EQUAL, NEAR = 0.03, 0.25

Pairs = Sequence[tuple[float | None, float | None]]


class Verdict(Enum):
    """How a claim fared; the sign says the same as the word."""

    REPRODUCED = ("✓", "reproduced")
    BEATEN = ("↑", "beaten")
    CLOSE = ("≈", "close")
    NOT_AS_CLAIMED = ("✗", "not as claimed")
    NOT_MEASURED = ("○", "not measured")


@dataclass(frozen=True)
class Claim:
    """A row of the summary; `command` makes what is missing."""

    claim: str
    printed: str
    ours: str
    verdict: Verdict
    note: str = ""
    command: str = ""


def claims(evidence: Evidence) -> list[Claim]:
    """All claims of the paper that this page can judge, in the order of its chapters."""
    return [
        _mean_loses(evidence),
        _algorithm_repairs(evidence),
        _place_matters(evidence),
        _fixed_depth(evidence),
        _optimal_synthetic(evidence),
        _probe(evidence, "coco"),
        _probe(evidence, "lvis"),
        _embedded_order(evidence),
        _tail(evidence),
        _mask_only(evidence),
        _no_tail(evidence),
        _threshold(evidence),
        _depth(evidence),
        _grid(evidence),
        _run_time(evidence),
        *_models(evidence),
    ]


def judge(pairs: Pairs, equal: float = EQUAL, near: float = NEAR, least: float = 0.005) -> Verdict:
    """Compare (printed, ours): relative difference, or absolute where it is as small as `least`."""
    worst = 0.0
    for printed, ours in pairs:
        if printed is None or ours is None:
            return Verdict.NOT_MEASURED
        if abs(ours - printed) > least:
            worst = max(worst, abs(ours - printed) / max(abs(printed), 1e-9))
    if worst <= equal:
        return Verdict.REPRODUCED
    return Verdict.CLOSE if worst <= near else Verdict.NOT_AS_CLAIMED


def show(*values: float | None) -> str:
    """Values with three decimals, as the paper prints them."""
    return ", ".join(decimal(value, 3) for value in values)


def percent(value: float | None) -> str:
    """A leaf ratio with three decimals."""
    return NOTHING if value is None else f"{decimal(value, 3)} %"


def _missing(evidence: Evidence, claim: str, printed: str, experiment: str) -> Claim:
    command = evidence.command(experiment)
    return Claim(claim, printed, NOTHING, Verdict.NOT_MEASURED, "Get it with", command)


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
        return _missing(evidence, claim, words, "synthetic")
    verdict = judge([(printed.mean_gap, mean), (printed.p95_gap, tail)], 0, 0, PRINTED)
    note = "The same wherever the minority lies: a mean does not see places."
    return Claim(claim, words, show(mean, tail), verdict, note)


def _algorithm_repairs(evidence: Evidence) -> Claim:
    claim = "Algorithm 1 repairs it: mean and P95 gap, leaf ratio"
    printed = paper.SYNTHETIC[paper.ALGORITHM_1]
    words = f"{show(printed.mean_gap, printed.p95_gap)} at {percent(printed.leaf_percent)}"
    mean, tail, leaf = _synthetic(evidence, paper.ALGORITHM_1)
    if mean is None:
        return _missing(evidence, claim, words, "synthetic")
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
        return _missing(evidence, claim, "near zero", "synthetic")
    place = max(known, key=lambda name: known[name])
    mean = _synthetic(evidence, "sparge-mean", place)[0]
    words = f"{show(known[place])} ({place})"
    if known[place] <= 2 * paper.SYNTHETIC[paper.ALGORITHM_1].mean_gap:
        return Claim(claim, "near zero", words, Verdict.CLOSE)
    note = f"The mean alone has {show(mean)} there: four equal quarters give a score of 0, so the root is never split."
    return Claim(claim, "near zero", words, Verdict.NOT_AS_CLAIMED, note)


def _fixed_depth(evidence: Evidence) -> Claim:
    claim = "Where to refine matters more than how much: fixed-depth:2 at similar leaves"
    printed = paper.SYNTHETIC["fixed-depth:2"]
    words = f"{show(printed.mean_gap)} at {percent(printed.leaf_percent)}"
    mean, _, leaf = _synthetic(evidence, "fixed-depth:2")
    if mean is None:
        return _missing(evidence, claim, words, "synthetic")
    verdict = judge([(printed.mean_gap, mean), (printed.leaf_percent, leaf)], 0, 0, PRINTED)
    fixed, adaptive = (
        _synthetic(evidence, method, "centred")[0]
        for method in ("fixed-depth:2", paper.ALGORITHM_1)
    )
    lost = fixed is not None and adaptive is not None and fixed < adaptive
    note = f"Centred, it is the other way round: {show(fixed)} against {show(adaptive)}."
    return Claim(claim, words, f"{show(mean)} at {percent(leaf)}", verdict, note if lost else "")


def _optimal_synthetic(evidence: Evidence) -> Claim:
    claim = "The least gap for the leaves: worst mean gap over the places"
    printed = f"{show(paper.SYNTHETIC[paper.ALGORITHM_1].mean_gap)} (corner only)"
    rows = [r for r in evidence.rows("synthetic") if str(r.get("method")).startswith("optimal")]
    gaps = [gap for row in rows if (gap := number(row, "mean_gap")) is not None]
    leaves = [leaf for row in rows if (leaf := number(row, "leaf_percent")) is not None]
    if not gaps or not leaves:
        return _missing(evidence, claim, printed, "synthetic")
    beaten = max(gaps) < paper.SYNTHETIC[paper.ALGORITHM_1].mean_gap
    words = f"{show(max(gaps))} at {decimal(min(leaves), 1)} to {decimal(max(leaves), 1)} %"
    note = "The optimal tree reads every score, Algorithm 1 block means alone."
    return Claim(
        claim, printed, words, Verdict.BEATEN if beaten else Verdict.NOT_AS_CLAIMED, note
    )


def _probed(
    evidence: Evidence, dataset: str, method: str, mode: str = "image-edge"
) -> list[float | None]:
    return [
        evidence.value("probe", column, dataset=dataset, mode=mode, method=method, group="all")
        for column in ("mean_gap", "p95_gap", "leaf_percent", "instances", "unsplit_percent")
    ]


def _probe(evidence: Evidence, dataset: str) -> Claim:
    title = paper.DATASETS[dataset]
    claim = f"On {title} instances, Algorithm 1 lowers the mean gap of the mean"
    printed = paper.PROBES[dataset, "image-edge"]
    before, after = printed["sparge-mean"], printed[paper.ALGORITHM_1]
    words = f"{show(before.mean_gap)} to {show(after.mean_gap)} at {percent(after.leaf_percent)}"
    mean = _probed(evidence, dataset, "sparge-mean")[0]
    gap, _, leaf, instances, _ = _probed(evidence, dataset, paper.ALGORITHM_1)
    if mean is None or gap is None:
        return _missing(evidence, claim, words, "probe")
    compared = [(before.mean_gap, mean), (after.mean_gap, gap), (after.leaf_percent, leaf)]
    note = (
        f"{decimal(instances, 0)} of {paper.INSTANCES[dataset]:,} instances; the protocol is "
        "recovered, not proven."
    )
    ours = f"{show(mean)} to {show(gap)} at {percent(leaf)}"
    return Claim(claim, words, ours, judge(compared), note)


def _embedded_order(evidence: Evidence) -> Claim:
    claim = "The methods rank alike on other data: by mean gap, on the embedded pictures"
    printed = paper.PROBES["coco", "image-edge"]
    order = sorted(printed, key=lambda method: printed[method].mean_gap)
    gaps = {method: _probed(evidence, "embedded", method)[0] for method in order}
    known = {method: gap for method, gap in gaps.items() if gap is not None}
    if len(known) < len(order):
        return _missing(evidence, claim, "the order of its table", "probe")
    same = sorted(known, key=lambda method: known[method]) == order
    words = "the same order" if same else "another order"
    note = f"{show(known['sparge-mean'])} to {show(known[paper.ALGORITHM_1])}, on pictures that the project makes itself."
    verdict = Verdict.REPRODUCED if same else Verdict.NOT_AS_CLAIMED
    return Claim(claim, "the order of its table", words, verdict, note)


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
        return _missing(evidence, claim, words, "probe")
    verdict = Verdict.REPRODUCED if tail > correction else Verdict.NOT_AS_CLAIMED
    note = f"It comes from the {decimal(unsplit, 1)} % of instances whose root is never split."
    ours = f"{show(tail)} against {show(correction)} ({paper.DATASETS[dataset]})"
    return Claim(claim, words, ours, verdict, note if unsplit is not None else "")


def _measured_dataset(evidence: Evidence) -> str:
    """The paper's own data set where it was probed, else another one."""
    probed = in_order(evidence.rows("probe"), "dataset")
    return next((dataset for dataset in paper.DATASETS if dataset in probed), "coco")


def _mask_only(evidence: Evidence) -> Claim:
    claim = "Without pixel edges Algorithm 1 still leads in the mean, not in P95"
    ours_mean, ours_tail, _, instances, _ = _probed(
        evidence, "coco", paper.ALGORITHM_1, "mask-only"
    )
    mean, tail, *_ = _probed(evidence, "coco", "mean-variance", "mask-only")
    printed, variance = paper.MASK_ONLY[paper.ALGORITHM_1], paper.MASK_ONLY["mean-variance"]
    words = f"{show(*printed)} against {show(*variance)}"
    if None in (ours_mean, ours_tail, mean, tail):
        return _missing(evidence, claim, words, "probe")
    compared = [
        (printed[0], ours_mean),
        (printed[1], ours_tail),
        (variance[0], mean),
        (variance[1], tail),
    ]
    leads = ours_mean is not None and mean is not None and ours_mean < mean
    note = f"On {decimal(instances, 0)} COCO instances" + (
        "." if leads else " the variance correction leads in the mean as well."
    )
    verdict = judge(compared) if leads else Verdict.NOT_AS_CLAIMED
    return Claim(claim, words, f"{show(ours_mean, ours_tail)} against {show(mean, tail)}", verdict, note)


def _no_tail(evidence: Evidence) -> Claim:
    claim = "The least P95 gap of a summary without annotations"
    best = paper.PROBES["coco", "image-edge"]["mean-variance"].p95_gap
    words = f"{show(best)} (mean-variance, COCO)"
    dataset = _measured_dataset(evidence)
    rows = evidence.select("probe", dataset=dataset, mode="image-edge", group="all")
    optimal = [row for row in rows if str(row.get("method")).startswith("optimal")]
    tail = number(optimal[0], "p95_gap") if optimal else None
    leaf = number(optimal[0], "leaf_percent") if optimal else None
    if tail is None or best is None:
        return _missing(evidence, claim, words, "probe")
    verdict = Verdict.BEATEN if tail < best else Verdict.NOT_AS_CLAIMED
    theirs = _probed(evidence, dataset, paper.ALGORITHM_1)[2]
    note = f"{optimal[0].get('method')} reads exact scores; Algorithm 1 has {percent(theirs)} leaves."
    return Claim(claim, words, f"{show(tail)} at {percent(leaf)}", verdict, note)


def _threshold(evidence: Evidence) -> Claim:
    claim = "Threshold 0.05 to 0.001: mean gap and leaf ratio"
    values = (0.05, 0.001)
    gaps = [evidence.value("ablation", "mean_gap", parameter="epsilon", value=v) for v in values]
    leaves = [
        evidence.value("ablation", "leaf_percent", parameter="epsilon", value=v) for v in values
    ]
    printed = [paper.ABLATION["epsilon", value] for value in values]
    words = _from_to([p.mean_gap for p in printed], [p.leaf_percent for p in printed])
    if None in (*gaps, *leaves):
        return _missing(evidence, claim, words, "ablation")
    compared = [(p.mean_gap, gap) for p, gap in zip(printed, gaps, strict=True)]
    compared += [(p.leaf_percent, leaf) for p, leaf in zip(printed, leaves, strict=True)]
    return Claim(claim, words, _from_to(gaps, leaves), judge(compared), _instances(evidence))


def _from_to(gaps: Sequence[float | None], leaves: Sequence[float | None]) -> str:
    first, last = (decimal(leaf, 2) for leaf in leaves)
    return f"{show(gaps[0])} to {show(gaps[1])}, {first} to {last} %"


def _instances(evidence: Evidence) -> str:
    dataset = str(evidence.setting("ablation", "dataset", ""))
    count = evidence.setting("ablation", "instances")
    if not isinstance(count, int):
        return ""
    return f"On {count:,} instances of {paper.DATASETS.get(dataset, dataset or 'one source')}."


def _depth(evidence: Evidence) -> Claim:
    claim = "Depth 5 changes nothing on a grid of 16: mean gap at depth 4 and 5"
    gaps = [evidence.value("ablation", "mean_gap", parameter="depth", value=v) for v in (4, 5)]
    words = show(paper.ABLATION["depth", 4].mean_gap, paper.ABLATION["depth", 5].mean_gap)
    if gaps[0] is None or gaps[1] is None:
        return _missing(evidence, claim, words, "ablation")
    same = Verdict.REPRODUCED if gaps[0] == gaps[1] else Verdict.NOT_AS_CLAIMED
    note = "Depth 4 is that of single tokens, so there is nothing to split."
    return Claim(claim, words, show(*gaps), same, note)


def _grid(evidence: Evidence) -> Claim:
    claim = "A finer grid costs fewer leaves and loses more: mean gap at 8, 16 and 32 cells"
    values = (8, 16, 32)
    printed = [paper.ABLATION["grid", value].mean_gap for value in values]
    gaps = [evidence.value("ablation", "mean_gap", parameter="grid", value=v) for v in values]
    if None in gaps:
        return _missing(evidence, claim, show(*printed), "ablation")
    verdict = judge(list(zip(printed, gaps, strict=True)))
    return Claim(claim, show(*printed), show(*gaps), verdict, _instances(evidence))


def _run_time(evidence: Evidence) -> Claim:
    claim = "Screening one instance at the default threshold"
    printed = paper.ABLATION["epsilon", 0.005].milliseconds or 0.0
    words = f"{decimal(1000 * printed, 0)} µs"
    ours = evidence.value(
        "ablation", "microseconds_per_instance", parameter="epsilon", value=0.005
    )
    if ours is None:
        return _missing(evidence, claim, words, "ablation")
    verdict = Verdict.BEATEN if ours < 1000 * printed else Verdict.NOT_AS_CLAIMED
    note = "Other machine, other code: a batch in torch against one instance at a time in NumPy."
    return Claim(claim, words, f"{decimal(ours, 0)} µs", verdict, note)


def _models(evidence: Evidence) -> list[Claim]:
    """What the paper claims of whole models, while no record of it is at hand."""
    absent = (
        ("closed-loop", "DeiT-Tiny keeps its predictions: agreement", "75.98 % at 30.82 %"),
        ("evaluate", "DeiT-Tiny keeps its ImageNet accuracy: top-1", "71.520 % at 55.861 %"),
    )
    return [
        Claim(claim, printed, NOTHING, Verdict.NOT_MEASURED, f"No {experiment} record is here.")
        for experiment, claim, printed in absent
        if not evidence.has(experiment)
    ]
