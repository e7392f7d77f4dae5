"""The chapters on the synthetic stress test, and the claims of the paper on it."""

from bmfa.evidence.page import paper
from bmfa.evidence.page.blocks import (
    METHOD,
    PAPER_GAP_COLUMNS,
    Block,
    Chapter,
    Column,
    Table,
    describe,
    illustrate,
    paragraph,
    with_paper,
)
from bmfa.evidence.page.claims import TOLERANCE, Verdict, claim, judge_direction, judge_numbers
from bmfa.evidence.page.formats import format_number, format_numbers, format_percent
from bmfa.evidence.page.record_set import (
    RecordSet,
    command_for,
    get_number,
    get_text,
    need_number,
    require_any,
    unique,
)
from bmfa.evidence.synthetic import figures
from bmfa.records import Row

# The optimal tree of all settings under one penalty, at the leaves of Algorithm 1 in the corner.
EQUAL_LEAVES = "optimal-leaves-pooled:0.05794"

CORNER_COLUMNS = (
    METHOD,
    Column("mean_gap", "Mean gap", 3),
    Column("p95_gap", "P95 gap", 3),
    Column("max_gap", "Largest", 3),
    Column("leaf_percent", "Leaf %", 3),
    *PAPER_GAP_COLUMNS,
)


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
        *paragraph(
            describe(_main_result, records),
            describe(_mass_rule, records),
            describe(_variance_correction, records),
            "The optimal, exact-gap and certified trees read exact scores; gamma-h2 reads block means "
            "only.",
        ),
        *illustrate(
            figures.placements,
            records,
            "The same minority at five placements. Algorithm 1 looks one level down, so it does not "
            "detect a minority if the four quarters of a block have equal means. A good method has a "
            "mean gap near zero and a low leaf ratio.",
        ),
        Table(
            "Minority in the corner, as in the paper",
            CORNER_COLUMNS,
            [
                with_paper(row, paper.SYNTHETIC.get(get_text(row, "method")))
                for row in records.rows("synthetic", placement="corner")
            ],
        ),
        _placement_table(records, "mean_gap", "Mean gap by placement"),
        _placement_table(records, "leaf_percent", "Leaf ratio by placement, % of tokens"),
    ]


def _main_result(records: RecordSet) -> str:
    corner, centre = (_values(records, paper.ALGORITHM_1, p)[0] for p in ("corner", "centred"))
    mean, fixed = (_values(records, m, "centred")[0] for m in ("block-mean", "fixed-depth:2"))
    return (
        f"The main result depends on the placement. The mean gap of Algorithm 1 is "
        f"{format_number(corner)} with the minority in the corner and {format_number(centre)} with the "
        f"minority in the centre; there the mean has {format_number(mean)} and fixed-depth:2 has "
        f"{format_number(fixed)}."
    )


def _mass_rule(records: RecordSet) -> str:
    rows = records.rows("synthetic", placement="corner")
    method = next((m for m in unique(rows, "method") if m.startswith("mass")), "")
    gap = _values(records, method)[0]
    if gap <= _values(records, paper.ALGORITHM_1)[0]:
        return ""
    return (
        f"Weighting by mass does not help on its own: {method} has {format_number(gap)} in the corner, "
        "because it weights the same one-level score."
    )


def _variance_correction(records: RecordSet) -> str:
    lowest = records.value("synthetic", "min_gap", method="mean-variance", placement="corner")
    if lowest >= 0:
        return ""
    return (
        f"The variance correction also overestimates F, by up to {format_number(-lowest)}; its mean gap "
        "is a mean of signed gaps."
    )


def _placement_table(records: RecordSet, column: str, caption: str) -> Block:
    rows = records.rows("synthetic")
    by_method: dict[str, Row] = {m: {"method": m} for m in unique(rows, "method")}
    for row in rows:
        by_method[get_text(row, "method")][get_text(row, "placement")] = get_number(row, column)
    columns = [METHOD, *(Column(name, name, 3) for name in unique(rows, "placement"))]
    return Table(caption, columns, list(by_method.values()))


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


def _values(records: RecordSet, method: str, placement: str = "corner") -> list[float]:
    """Mean gap, P95 gap and leaf ratio of a method."""
    return [
        records.value("synthetic", column, method=method, placement=placement)
        for column in ("mean_gap", "p95_gap", "leaf_percent")
    ]


COMMAND = command_for("synthetic")
MEAN, BMFA = paper.SYNTHETIC["block-mean"], paper.SYNTHETIC[paper.ALGORITHM_1]
FIXED = paper.SYNTHETIC["fixed-depth:2"]


@claim(
    "The mean of a block loses a bright minority: mean and P95 gap over 396 settings",
    format_numbers(MEAN.mean_gap, MEAN.p95_gap),
    COMMAND,
)
def _mean_loses_minority(records: RecordSet) -> tuple[str, Verdict, str]:
    mean, p95, _ = _values(records, "block-mean")
    verdict = judge_numbers((MEAN.mean_gap, mean), (MEAN.p95_gap, p95))
    note = "The same for every placement: a mean does not depend on positions."
    return format_numbers(mean, p95), verdict, note


@claim(
    "Algorithm 1 repairs the loss: mean and P95 gap, leaf ratio",
    f"{format_numbers(BMFA.mean_gap, BMFA.p95_gap)} at {format_percent(BMFA.leaf_percent)}",
    COMMAND,
)
def _algorithm_1_repairs(records: RecordSet) -> tuple[str, Verdict, str]:
    mean, p95, leaf = _values(records, paper.ALGORITHM_1)
    verdict = judge_numbers((BMFA.mean_gap, mean), (BMFA.p95_gap, p95), (BMFA.leaf_percent, leaf))
    note = "With the minority in the corner of the grid; the next row shows other placements."
    return f"{format_numbers(mean, p95)} at {format_percent(leaf)}", verdict, note


@claim(
    "Refinement brings the residual near zero: largest mean gap over the placements",
    "near zero (corner)",
    COMMAND,
)
def _worst_placement(records: RecordSet) -> tuple[str, Verdict, str]:
    rows = records.rows("synthetic", method=paper.ALGORITHM_1)
    gaps = [(need_number(row, "mean_gap"), get_text(row, "placement")) for row in rows]
    gap, placement = max(require_any(gaps))
    holds = gap <= 2 * BMFA.mean_gap
    note = "The paper places the minority in the corner; the other placements are this library's."
    if not holds:
        mean = format_number(_values(records, "block-mean", placement)[0])
        note += f" The gap of the mean is {mean} there: quarters with equal means are not split."
    return f"{format_number(gap)} ({placement})", judge_direction(holds), note


@claim(
    "Where to refine matters more than how much: fixed-depth:2 at a similar leaf ratio",
    f"{format_number(FIXED.mean_gap)} at {format_percent(FIXED.leaf_percent)}",
    COMMAND,
)
def _fixed_depth(records: RecordSet) -> tuple[str, Verdict, str]:
    mean, _, leaf = _values(records, "fixed-depth:2")
    verdict = judge_numbers((FIXED.mean_gap, mean), (FIXED.leaf_percent, leaf))
    note = describe(_reversed_order, records)
    return f"{format_number(mean)} at {format_percent(leaf)}", verdict, note


def _reversed_order(records: RecordSet) -> str:
    fixed, adaptive = (
        _values(records, method, "centred")[0] for method in ("fixed-depth:2", paper.ALGORITHM_1)
    )
    if fixed >= adaptive:
        return ""
    gaps = f"{format_number(fixed)} against {format_number(adaptive)}"
    return f"With the minority in the centre the order is reversed: {gaps}."


@claim(
    "The smallest mean gap at no more leaves than Algorithm 1, minority in the corner",
    f"{format_number(BMFA.mean_gap)} at {format_percent(BMFA.leaf_percent)}",
    f"bmfa synthetic --method {EQUAL_LEAVES} --json synthetic.json",
)
def _optimal_tree(records: RecordSet) -> tuple[str, Verdict, str]:
    limit = (BMFA.leaf_percent or 0.0) + TOLERANCE
    candidates = require_any(
        (need_number(row, "mean_gap"), need_number(row, "leaf_percent"), get_text(row, "method"))
        for row in records.rows("synthetic", placement="corner")
        if get_text(row, "method").startswith("optimal")
        and (get_number(row, "leaf_percent") or 0.0) <= limit
    )
    gap, leaf, method = min(candidates)
    verdict = Verdict.BEATEN if gap < BMFA.mean_gap else Verdict.NOT_AS_CLAIMED
    note = f"{method} reads every score; Algorithm 1 reads block means only."
    return f"{format_number(gap)} at {format_percent(leaf)}", verdict, note


STRESS_TEST = Chapter(
    "synthetic",
    "Synthetic stress test",
    "synthetic",
    _stress_test,
    (_mean_loses_minority, _algorithm_1_repairs, _worst_placement, _fixed_depth, _optimal_tree),
)
FAILURE_CURVE = Chapter("failure", "Where the mean begins to fail", "failure-curve", _failure_curve)
