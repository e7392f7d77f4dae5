"""The chapters on the synthetic stress test, and the claims of the paper on it."""

from bmfa.evidence.page import paper
from bmfa.evidence.page.blocks import (
    METHOD,
    PAPER_GAP_COLUMNS,
    Block,
    Chapter,
    Column,
    Table,
    illustrate,
    paragraph,
)
from bmfa.evidence.page.claims import (
    TOLERANCE,
    Claim,
    Verdict,
    compare,
    direction,
    not_measured,
)
from bmfa.evidence.page.formats import format_number, format_numbers, format_percent
from bmfa.evidence.page.record_set import RecordSet, get_number, get_text, unique
from bmfa.evidence.synthetic import figures

# The optimal tree of all settings under one penalty, at the leaves of Algorithm 1 in the corner.
EQUAL_LEAVES = "optimal-leaves-pooled:0.05794"


def _stress_test(records: RecordSet) -> list[Block]:
    count = records.setting("synthetic", "settings", 396)
    return [
        *paragraph(
            "A 16 × 16 grid of scores holds 1 to 64 bright tokens of advantage Δ; all other scores "
            f"are zero. The {count} settings in which the bright tokens hold at least half of the "
            "softmax mass are evaluated. The gap is F minus the estimate of a summary, where F is the "
            "logarithm of the mean exponential: the part of the softmax normaliser that is lost, in "
            "nats."
        ),
        *paragraph(*_findings(records)),
        *illustrate(
            figures.placements,
            records,
            "The same minority at five placements. Algorithm 1 looks one level down, so it does not "
            "detect a minority if the four quarters of a block have equal means. A good method is "
            "near zero on the left and low on the right.",
        ),
        _corner_table(records),
        _placement_table(records, "mean_gap", "Mean gap by placement"),
        _placement_table(records, "leaf_percent", "Leaf ratio by placement, % of tokens"),
    ]


def _findings(records: RecordSet) -> list[str]:
    def gap(method: str, placement: str) -> str:
        return format_number(_values(records, method, placement)[0])

    sentences = []
    if "centred" in unique(records.rows("synthetic"), "placement"):
        sentences.append(
            "The main result depends on the placement. The mean gap of Algorithm 1 is "
            f"{gap(paper.ALGORITHM_1, 'corner')} with the minority in the corner and "
            f"{gap(paper.ALGORITHM_1, 'centred')} with the minority in the centre; there the mean has "
            f"{gap('sparge-mean', 'centred')} and fixed-depth:2 has {gap('fixed-depth:2', 'centred')}."
        )
    corner = {
        get_text(row, "method"): get_number(row, "mean_gap") or 0.0
        for row in records.rows("synthetic", placement="corner")
    }
    mass = next((method for method in corner if method.startswith("mass")), None)
    if mass is not None and corner[mass] > corner.get(paper.ALGORITHM_1, 0.0):
        sentences.append(
            f"Weighting by mass does not help on its own: {mass} has {gap(mass, 'corner')} in the "
            "corner, because it weights the same one-level score."
        )
    lowest = records.value("synthetic", "min_gap", method="mean-variance", placement="corner")
    if lowest is not None and lowest < 0:
        sentences.append(
            f"The variance correction also overestimates F, by up to {format_number(-lowest)}; its "
            "mean gap is a mean of signed gaps."
        )
    sentences.append(
        "The optimal, exact-gap and certified trees read exact scores; gamma-h2 reads block means only."
    )
    return sentences


def _corner_table(records: RecordSet) -> Block:
    columns = [METHOD, Column("Mean gap", 3), Column("P95 gap", 3), Column("Largest", 3)]
    rows = []
    for row in records.rows("synthetic", placement="corner"):
        method = get_text(row, "method")
        ours = [row.get(name) for name in ("mean_gap", "p95_gap", "max_gap", "leaf_percent")]
        rows.append([method, *ours, *paper.cells(paper.SYNTHETIC.get(method))])
    return Table(
        "Minority in the corner, as in the paper",
        [*columns, Column("Leaf %", 3), *PAPER_GAP_COLUMNS],
        rows,
    )


def _placement_table(records: RecordSet, column: str, caption: str) -> Block:
    rows = records.rows("synthetic")
    placements = unique(rows, "placement")
    values = {
        (get_text(r, "method"), get_text(r, "placement")): get_number(r, column) for r in rows
    }
    columns = [METHOD, *(Column(placement, 3) for placement in placements)]
    body = [[m, *(values.get((m, p)) for p in placements)] for m in unique(rows, "method")]
    return Table(caption, columns, body)


def _failure_curve(records: RecordSet) -> list[Block]:
    return [
        *paragraph(
            "A bright corner of increasing advantage. At the dotted line it holds half of the softmax "
            "mass (Δ = log((1 − α) / α), where α is its share of the tokens). Beyond the line, the "
            "loss of the mean grows as fast as Δ itself."
        ),
        *illustrate(figures.failure_curve, records, _first_splits(records)),
    ]


def _first_splits(records: RecordSet) -> str:
    """The advantage from which on Algorithm 1 splits the root, for each size of the minority."""
    rows = records.rows("failure-curve", method=paper.ALGORITHM_1)
    sentences = []
    for cells in dict.fromkeys(row.get("cells") for row in rows):
        curve = [row for row in rows if row.get("cells") == cells]
        leaves = [get_number(row, "leaf_percent") or 0.0 for row in curve]
        split = [
            get_number(row, "delta") or 0.0
            for row, leaf in zip(curve, leaves, strict=True)
            if leaf > min(leaves)
        ]
        tokens = f"{cells} bright token{'' if cells == 1 else 's'}"
        if split:
            sentences.append(
                f"With {tokens}, Algorithm 1 splits the root from Δ = {min(split):.1f} on."
            )
        else:
            sentences.append(
                f"With {tokens}, it does not split the root in this range, and its curve coincides "
                "with that of the mean."
            )
    return " ".join(sentences)


def _claims(records: RecordSet) -> list[Claim]:
    return [
        _mean_loses_minority(records),
        _algorithm_1_repairs(records),
        _worst_placement(records),
        _fixed_depth(records),
        _optimal_tree(records),
    ]


def _values(records: RecordSet, method: str, placement: str = "corner") -> list[float | None]:
    """Mean gap, P95 gap and leaf ratio of a method."""
    return [
        records.value("synthetic", column, method=method, placement=placement)
        for column in ("mean_gap", "p95_gap", "leaf_percent")
    ]


def _mean_loses_minority(records: RecordSet) -> Claim:
    claim = "The mean of a block loses a bright minority: mean and P95 gap over 396 settings"
    point = paper.SYNTHETIC["sparge-mean"]
    printed = format_numbers(point.mean_gap, point.p95_gap)
    mean, p95, _ = _values(records, "sparge-mean")
    if mean is None:
        return not_measured(claim, printed, "synthetic")
    verdict = compare([(point.mean_gap, mean), (point.p95_gap, p95)])
    note = "The same for every placement: a mean does not depend on positions."
    return Claim(claim, printed, format_numbers(mean, p95), verdict, note)


def _algorithm_1_repairs(records: RecordSet) -> Claim:
    claim = "Algorithm 1 repairs the loss: mean and P95 gap, leaf ratio"
    point = paper.SYNTHETIC[paper.ALGORITHM_1]
    printed = (
        f"{format_numbers(point.mean_gap, point.p95_gap)} at {format_percent(point.leaf_percent)}"
    )
    mean, p95, leaf = _values(records, paper.ALGORITHM_1)
    if mean is None:
        return not_measured(claim, printed, "synthetic")
    verdict = compare([(point.mean_gap, mean), (point.p95_gap, p95), (point.leaf_percent, leaf)])
    ours = f"{format_numbers(mean, p95)} at {format_percent(leaf)}"
    note = "With the minority in the corner of the grid; the next row shows other placements."
    return Claim(claim, printed, ours, verdict, note)


def _worst_placement(records: RecordSet) -> Claim:
    claim = "Refinement brings the residual near zero: largest mean gap over the placements"
    rows = records.rows("synthetic", method=paper.ALGORITHM_1)
    gaps = {
        str(r.get("placement")): g for r in rows if (g := get_number(r, "mean_gap")) is not None
    }
    if not gaps:
        return not_measured(claim, "near zero (corner)", "synthetic")
    placement = max(gaps, key=lambda name: gaps[name])
    mean = _values(records, "sparge-mean", placement)[0]
    holds = gaps[placement] <= 2 * paper.SYNTHETIC[paper.ALGORITHM_1].mean_gap
    note = "The paper places the minority in the corner; the other placements are this library's."
    if not holds:
        note += (
            f" The gap of the mean is {format_number(mean)} there: if all quarters have equal means, "
            "nothing is split."
        )
    ours = f"{format_number(gaps[placement])} ({placement})"
    return Claim(claim, "near zero (corner)", ours, direction(holds), note)


def _fixed_depth(records: RecordSet) -> Claim:
    claim = "Where to refine matters more than how much: fixed-depth:2 at a similar leaf ratio"
    point = paper.SYNTHETIC["fixed-depth:2"]
    printed = f"{format_number(point.mean_gap)} at {format_percent(point.leaf_percent)}"
    mean, _, leaf = _values(records, "fixed-depth:2")
    if mean is None:
        return not_measured(claim, printed, "synthetic")
    verdict = compare([(point.mean_gap, mean), (point.leaf_percent, leaf)])
    fixed, adaptive = (
        _values(records, method, "centred")[0] for method in ("fixed-depth:2", paper.ALGORITHM_1)
    )
    note = ""
    if fixed is not None and adaptive is not None and fixed < adaptive:
        note = (
            "With the minority in the centre the order is reversed: "
            f"{format_number(fixed)} against {format_number(adaptive)}."
        )
    return Claim(claim, printed, f"{format_number(mean)} at {format_percent(leaf)}", verdict, note)


def _optimal_tree(records: RecordSet) -> Claim:
    claim = "The smallest mean gap at no more leaves than Algorithm 1, minority in the corner"
    point = paper.SYNTHETIC[paper.ALGORITHM_1]
    printed = f"{format_number(point.mean_gap)} at {format_percent(point.leaf_percent)}"
    limit = (point.leaf_percent or 0.0) + TOLERANCE
    candidates = [
        (gap, leaf, str(row.get("method")))
        for row in records.rows("synthetic", placement="corner")
        if str(row.get("method")).startswith("optimal")
        and (gap := get_number(row, "mean_gap")) is not None
        and (leaf := get_number(row, "leaf_percent")) is not None
        and leaf <= limit
    ]
    if not candidates:
        missing = not_measured(claim, printed, "synthetic")
        command = f"bmfa synthetic --method {EQUAL_LEAVES} --json synthetic.json"
        return Claim(claim, printed, missing.ours, missing.verdict, missing.note, command)
    gap, leaf, method = min(candidates)
    verdict = Verdict.BEATEN if gap < point.mean_gap else Verdict.NOT_AS_CLAIMED
    note = f"{method} reads every score; Algorithm 1 reads block means only."
    return Claim(claim, printed, f"{format_number(gap)} at {format_percent(leaf)}", verdict, note)


STRESS_TEST = Chapter("synthetic", "Synthetic stress test", "synthetic", _stress_test, _claims)
FAILURE_CURVE = Chapter("failure", "Where the mean begins to fail", "failure-curve", _failure_curve)
