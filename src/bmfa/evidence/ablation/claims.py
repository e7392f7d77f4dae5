"""What the paper claims of its ablations."""

from collections.abc import Sequence
from itertools import pairwise

from bmfa.evidence.page import paper
from bmfa.evidence.page.markup import decimal
from bmfa.evidence.page.records import Evidence
from bmfa.evidence.page.verdicts import Claim, Verdict, direction, missing, show


def claims(evidence: Evidence) -> list[Claim]:
    """The claims in the order of the chapter."""
    return [_threshold(evidence), _depth(evidence), _grid(evidence), _run_time(evidence)]


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
        return missing(claim, words, "ablation")
    held = _falls(gaps) and _falls(leaves[::-1])
    return Claim(claim, words, _from_to(gaps, leaves), direction(held), _measured_on(evidence))


def _measured_on(evidence: Evidence) -> str:
    dataset = str(evidence.setting("ablation", "dataset") or "")
    count = evidence.value("ablation", "instances", parameter="epsilon", value=0.005)
    instances = "" if count is None else f" on {count:,.0f} instances"
    return (
        f"Measured{instances} of {paper.dataset_title(dataset) or 'one source'}, scores by our fit; "
        "the paper's numbers are of COCO, so the trend counts."
    )


def _falls(values: Sequence[float | None]) -> bool:
    known = [value for value in values if value is not None]
    return all(after < before for before, after in pairwise(known))


def _from_to(gaps: Sequence[float | None], leaves: Sequence[float | None]) -> str:
    first, last = (decimal(leaf, 2) for leaf in leaves)
    return f"{show(gaps[0])} to {show(gaps[1])}, {first} to {last} %"


def _depth(evidence: Evidence) -> Claim:
    claim = "Depth 5 changes nothing on a grid of 16: mean gap at depth 4 and 5"
    gaps = [evidence.value("ablation", "mean_gap", parameter="depth", value=v) for v in (4, 5)]
    words = show(paper.ABLATION["depth", 4].mean_gap, paper.ABLATION["depth", 5].mean_gap)
    if gaps[0] is None or gaps[1] is None:
        return missing(claim, words, "ablation")
    note = "On any data: depth 4 is that of single tokens, so there is nothing to split."
    return Claim(claim, words, show(*gaps), direction(gaps[0] == gaps[1]), note)


def _grid(evidence: Evidence) -> Claim:
    claim = "A finer grid costs fewer leaves and loses more: mean gap at 8, 16 and 32 cells"
    values = (8, 16, 32)
    printed = [paper.ABLATION["grid", value].mean_gap for value in values]
    gaps = [evidence.value("ablation", "mean_gap", parameter="grid", value=v) for v in values]
    if None in gaps:
        return missing(claim, show(*printed), "ablation")
    held = _falls(gaps[::-1])
    return Claim(claim, show(*printed), show(*gaps), direction(held), _measured_on(evidence))


def _run_time(evidence: Evidence) -> Claim:
    claim = "Screening one instance at the default threshold"
    printed = paper.ABLATION["epsilon", 0.005].milliseconds or 0.0
    words = f"{decimal(1000 * printed, 0)} µs"
    ours = evidence.value("ablation", "microseconds_per_instance", parameter="epsilon", value=0.005)
    if ours is None:
        return missing(claim, words, "ablation")
    note = "Other machine, other code: a batch in torch against one instance at a time in NumPy."
    return Claim(claim, words, f"{decimal(ours, 0)} µs", Verdict.NOT_COMPARABLE, note)
