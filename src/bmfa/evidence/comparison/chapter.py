"""The chapters that tell methods apart: rules at equal leaves, merging policies at equal operations."""

from collections.abc import Sequence

from bmfa.evidence.comparison import figures
from bmfa.evidence.comparison.run import BASELINE_RULE
from bmfa.evidence.methods import METHODS, family
from bmfa.evidence.page.blocks import (
    METHOD,
    Block,
    Chapter,
    Column,
    NotMeasured,
    Table,
    describe,
    illustrate,
    paragraph,
)
from bmfa.evidence.page.claims import Verdict, claim
from bmfa.evidence.page.formats import format_number, format_percent, format_small
from bmfa.evidence.page.record_set import (
    MissingValueError,
    RecordSet,
    get_number,
    get_text,
    need_number,
)
from bmfa.records import Row

EXPERIMENT = figures.EXPERIMENT
COMMAND = "bmfa report"
LEAST_LEAD = 10.0  # points of agreement by which the optimal tree is expected to lead
LEAF_DISTANCE = 2.0  # points of leaves within which two rules count as equal
OURS, OPTIMAL = "free-energy", "optimal"
MEASURES = (
    Column("agreement_percent", "Agreement %", 1),
    Column("output_kl", "Output KL", 3, small=True),
    Column("top1_percent", "Top-1 %", 1),
    Column("mask_iou", "Mask IoU", 3),
)
GAINS = (
    Column("gain_pp", "Gain, points", 1),
    Column("gain_low_pp", "from", 1),
    Column("gain_high_pp", "to", 1),
)


def _rules(records: RecordSet) -> list[Block]:
    groups = figures.rules_by_leaves(records)
    if not groups:
        return [NotMeasured(COMMAND)]
    return [
        *paragraph(
            _task(records, next(iter(groups.values()))),
            "Every rule has its threshold set so that its trees have the same share of leaves, on other "
            "images than those it is measured on; all eight layers are screened, every query with a "
            "tree of its own.",
            *(describe(_spread, share, rows) for share, rows in groups.items()),
            *(describe(_lead, share, rows) for share, rows in groups.items()),
        ),
        *illustrate(
            figures.equal_leaves,
            records,
            "One marker for each rule, the rule with most agreement on top. Right is better.",
        ),
        *(
            Table(
                f"{format_number(share, 2)} % leaves, {_images(rows)} images; gain in agreement over "
                f"{METHODS[BASELINE_RULE].title} with its 95 % interval",
                [METHOD, Column("leaf_percent", "Leaf %", 2), *MEASURES, *GAINS],
                rows,
            )
            for share, rows in groups.items()
        ),
    ]


def _task(records: RecordSet, rows: Sequence[Row]) -> str:
    full = figures.full_row(records, rows)
    return (
        "The images show one badge in clutter, partly covered: its class is the shape of a thin "
        "outline, the texture inside and the number of small ticks, 24 classes that differ in a few "
        f"tokens. The full model names {format_percent(get_number(full, 'top1_percent'), 1)} of "
        f"{int(get_number(full, 'images') or 0):,} images correctly and finds the badge with an IoU "
        f"of {format_number(get_number(full, 'mask_iou'), 3)}."
    )


def _images(rows: Sequence[Row]) -> int:
    return int(max(get_number(row, "images") or 0 for row in rows))


def _spread(share: float, rows: Sequence[Row]) -> str:
    """The range of every measure over the rules at one share of leaves."""
    parts = []
    for column in MEASURES:
        values = [need_number(row, column.key) for row in rows]
        parts.append(
            f"{column.title.removesuffix(' %')} {column.format(min(values))} to "
            f"{column.format(max(values))}"
        )
    return f"Spread at {format_number(share, 2)} % leaves: {', '.join(parts)}."


def _row_of(rows: Sequence[Row], name: str) -> Row:
    found = next((row for row in rows if family(get_text(row, "method")) == name), None)
    if found is None:
        raise MissingValueError(name)
    return found


def _lead(share: float, rows: Sequence[Row]) -> str:
    best = _row_of(rows, OPTIMAL)
    low, high = need_number(best, "gain_low_pp"), need_number(best, "gain_high_pp")
    return (
        f"At {format_number(share, 2)} % the optimal tree agrees "
        f"{format_number(need_number(best, 'gain_pp'), 1)} points more often than Algorithm 1 (95 % "
        f"interval {format_number(low, 1)} to {format_number(high, 1)})."
    )


def _policies(records: RecordSet) -> list[Block]:
    groups = figures.policies_by_baseline(records)
    if not groups:
        return [NotMeasured(COMMAND)]
    return [
        *paragraph(
            "Merging policies on the same images. Every policy has its budget set so that the model "
            "takes the operations of the baseline, within one percent; masks are read from the merged "
            "tokens, copied back to the grid. Free-energy merging leaves the first and the last blocks "
            "alone: it cannot reach budgets far below these, and at the operations of tome:30 it is far "
            "behind.",
            *(describe(_order, name, rows) for name, rows in groups.items()),
            *(describe(_ahead, name, rows) for name, rows in groups.items()),
        ),
        *illustrate(
            figures.equal_operations,
            records,
            "Agreement relative to ToMe with the 95 % interval of the difference on the same images, "
            "and the IoU of the mask. Right is better.",
        ),
        *(
            Table(
                f"At the operations of {name}, {_images(rows)} images; gain in agreement over it with "
                "its 95 % interval",
                [METHOD, Column("gflops", "GFLOPs", 3), *MEASURES, *GAINS],
                rows,
            )
            for name, rows in groups.items()
        ),
    ]


def _order(name: str, rows: Sequence[Row]) -> str:
    named = [
        f"{METHODS[family(get_text(row, 'method'))].title} "
        f"{format_percent(need_number(row, 'agreement_percent'), 1)}"
        for row in rows
    ]
    return f"By agreement at the operations of {name}: {', '.join(named)}."


def _ahead(name: str, rows: Sequence[Row]) -> str:
    ours = _row_of(rows, OURS)
    gain, low, high = (need_number(ours, key) for key in ("gain_pp", "gain_low_pp", "gain_high_pp"))
    relation = "ahead of" if low > 0 else "behind" if high < 0 else "too close to tell from"
    return (
        f"Free-energy merging is {relation} {name}: {format_number(gain, 1)} points (95 % interval "
        f"{format_number(low, 1)} to {format_number(high, 1)})."
    )


@claim(
    "An adaptive tree keeps the model's answers where few leaves are left: agreement of the best tree "
    "minus that of Algorithm 1 at equal leaves, points",
    "not in the paper",
    COMMAND,
)
def _optimal_ahead(records: RecordSet) -> tuple[str, Verdict, str]:
    groups = figures.rules_by_leaves(records)
    leads = []
    for share, rows in groups.items():
        best, first = _row_of(rows, OPTIMAL), _row_of(rows, BASELINE_RULE)
        apart = abs(need_number(best, "leaf_percent") - need_number(first, "leaf_percent"))
        if apart <= LEAF_DISTANCE:
            leads.append((need_number(best, "gain_pp"), share))
    if not leads:
        raise MissingValueError("gain_pp")
    lead, share = max(leads)
    verdict = Verdict.AHEAD if lead >= LEAST_LEAD else Verdict.LEVEL
    shown = ", ".join(f"{format_number(g, 1)} at {format_number(s, 2)} %" for g, s in leads)
    return (
        shown,
        verdict,
        f"Embedded model, all layers; largest at {format_number(share, 2)} % leaves.",
    )


@claim(
    "Merging by free energy at equal operations: agreement minus that of ToMe, points",
    "not in the paper",
    COMMAND,
)
def _merging_ahead(records: RecordSet) -> tuple[str, Verdict, str]:
    groups = figures.policies_by_baseline(records)
    ours = {name: _row_of(rows, OURS) for name, rows in groups.items()}
    if not ours:
        raise MissingValueError("gain_pp")
    lows = [need_number(row, "gain_low_pp") for row in ours.values()]
    highs = [need_number(row, "gain_high_pp") for row in ours.values()]
    verdict = Verdict.LEVEL
    if min(highs) < 0:
        verdict = Verdict.DIFFERS
    elif min(lows) > 0:
        verdict = Verdict.AHEAD
    shown = ", ".join(
        f"{format_number(need_number(row, 'gain_pp'), 1)} "
        f"({format_number(need_number(row, 'gain_low_pp'), 1)} to "
        f"{format_number(need_number(row, 'gain_high_pp'), 1)}) against {name}"
        for name, row in ours.items()
    )
    kl = ", ".join(format_small(need_number(row, "output_kl")) for row in ours.values())
    return shown, verdict, f"Embedded model, 95 % intervals; output KL {kl}."


EQUAL_LEAVES = Chapter(
    "equal-leaves", "Rules at equal leaves", EXPERIMENT, _rules, (_optimal_ahead,)
)
EQUAL_OPERATIONS = Chapter(
    "equal-operations", "Merging at equal operations", EXPERIMENT, _policies, (_merging_ahead,)
)
