"""The chapter on the instance probes, and the claims of the paper on them."""

from collections.abc import Mapping

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
    with_paper,
)
from bmfa.evidence.page.claims import ClaimTest, Verdict, claim, judge_direction
from bmfa.evidence.page.formats import format_number, format_numbers, format_percent
from bmfa.evidence.page.origins import RECORDED, describe_origin, origin
from bmfa.evidence.page.record_set import (
    RecordSet,
    command_for,
    get_number,
    get_text,
    require_any,
    unique,
)
from bmfa.evidence.probes import figures
from bmfa.records import Row

MEASURES = (
    Column("mean_gap", "Mean gap", 3),
    Column("median_gap", "Median", 3),
    Column("p95_gap", "P95", 3),
    Column("p99_gap", "P99", 3),
    Column("max_gap", "Largest", 3),
    Column("leaf_percent", "Leaf %", 3),
    Column("unsplit_percent", "Unsplit %", 1),
)
BEYOND_P95 = 5.0  # percent of the instances lie above the 95th percentile
DEEPER_RULES = ("gamma-h2", "exact-gap", "certified", "optimal")


def _content(records: RecordSet) -> list[Block]:
    return [
        *paragraph(
            "The image is cropped around each annotated object and divided into 16 × 16 cells. Cells "
            "on the contour of the object get a high score, which depends on the strength of the image "
            "edge (image-edge) or is the same for all (mask-only); other cells get a low score. The "
            "scores are built from annotations, but only edge-aware reads the annotations. “Unsplit” "
            "is the share of instances whose root is never split."
        ),
        *paragraph(
            "The supplement of the paper is not available. This construction was fitted to the "
            "published table, so agreement with the table is not independent evidence.",
            lead="The protocol is reconstructed, not confirmed.",
            style="warning",
        ),
        *illustrate(
            figures.trade_off,
            records,
            "Down and to the left is better. A ring is the number that the paper prints for the point "
            "inside it. Methods with equal results, such as exact-gap and certified, are drawn over "
            "each other; edge-aware keeps every token.",
        ),
        *paragraph(*_findings(records)),
        *illustrate(
            figures.distribution,
            records,
            "The gap of every instance, from the smallest to the largest. A mean over all instances "
            "hides this spread.",
        ),
        *_tables(records),
    ]


def _findings(records: RecordSet) -> list[str]:
    rows = records.rows("probe", mode="image-edge", group="all", method=paper.ALGORITHM_1)
    by_dataset = {get_text(row, "dataset"): row for row in rows}
    rows = [by_dataset[dataset] for dataset in paper.sort_datasets(list(by_dataset))]
    rows = [
        r for r in rows if None not in (get_number(r, "unsplit_percent"), get_number(r, "p95_gap"))
    ]
    if not rows:
        return []
    shares = ", ".join(
        f"{format_percent(row['unsplit_percent'], 1)} ({paper.dataset_title(get_text(row, 'dataset'))})"
        for row in rows
    )
    sentences = [f"Algorithm 1 does not split the root of some instances: {shares}."]
    if all(row["unsplit_percent"] > BEYOND_P95 for row in rows):
        tails = format_numbers(*(row["p95_gap"] for row in rows))
        sentences.append(
            f"These instances cause its P95 gap ({tails}): if an object is centred in its crop, its "
            "contour is spread evenly over the four quarters, and the one-level score is near zero."
        )
    # The tables have the other data sets.
    return [*sentences, _deeper_rules(records, get_text(rows[0], "dataset"))]


def _deeper_rules(records: RecordSet, dataset: str) -> str:
    """P95 gap and leaf ratio of the rules that look further down than Algorithm 1."""
    results = [
        f"{get_text(row, 'method')} {format_number(row['p95_gap'])} at "
        f"{format_percent(row['leaf_percent'], 1)}"
        for row in records.rows("probe", mode="image-edge", group="all")
        if get_text(row, "dataset") == dataset
        and get_text(row, "method").partition(":")[0] in DEEPER_RULES
        and None not in (get_number(row, "p95_gap"), get_number(row, "leaf_percent"))
    ]
    title = paper.dataset_title(dataset)
    return f"P95 gaps of rules that look deeper ({title}): {', '.join(results)}." if results else ""


def _tables(records: RecordSet) -> list[Block]:
    rows = records.rows("probe")
    tables: list[Block] = []
    for dataset in paper.sort_datasets(unique(rows, "dataset")):
        in_dataset = [row for row in rows if get_text(row, "dataset") == dataset]
        for mode in unique(in_dataset, "mode"):
            found = [row for row in in_dataset if get_text(row, "mode") == mode]
            title = f"{paper.dataset_title(dataset)}, {mode}"
            printed = paper.PROBES.get((dataset, mode), {})
            everything = [r for r in found if r.get("group") == "all"]
            recorded = [r for r in records.holding(everything) if origin(r) == RECORDED]
            where = "".join(f", {phrase}" for phrase in {*map(describe_origin, recorded)})
            tables.append(_method_table(title + where, printed, everything))
            tables += _group_table(title, [row for row in found if row.get("group") != "all"])
    return tables


def _method_table(title: str, printed: Mapping[str, paper.Point], rows: list[Row]) -> Block:
    count = format_number(rows[0].get("instances"), 0) if rows else "0"
    return Table(
        f"{title}, {count} instances",
        [METHOD, *MEASURES, *(PAPER_GAP_COLUMNS if printed else ())],
        [with_paper(row, printed.get(get_text(row, "method"))) for row in rows],
    )


def _group_table(title: str, rows: list[Row]) -> list[Block]:
    """A closed table by size or frequency of the objects."""
    if not rows:
        return []
    groups = unique(rows, "group")
    columns = [Column("group", "Group"), METHOD, Column("instances", "Instances", 0), *MEASURES]
    rows = sorted(rows, key=lambda row: groups.index(get_text(row, "group")))
    return [Table(f"{title}, by group", columns, rows, f"{title}, by {', '.join(groups)}")]


def _values(
    records: RecordSet, dataset: str, method: str, *columns: str, mode: str = "image-edge"
) -> list[float]:
    return [
        records.value("probe", column, dataset=dataset, mode=mode, method=method, group="all")
        for column in columns
    ]


def _best_dataset(records: RecordSet) -> str:
    """A data set of the paper if one was probed, otherwise another one."""
    probed = unique(records.rows("probe"), "dataset")
    return next((dataset for dataset in paper.DATASETS if dataset in probed), "coco")


COCO, COCO_MASKS = paper.PROBES["coco", "image-edge"], paper.PROBES["coco", "mask-only"]
BMFA, VARIANCE = paper.ALGORITHM_1, "mean-variance"
ORDER = sorted(COCO, key=lambda method: COCO[method].mean_gap)


def _mean_gap(dataset: str) -> ClaimTest:
    """The claim on the mean gap of one data set of the paper."""

    def words(mean: float, gap: float, leaf: float | None) -> str:
        return f"{format_number(mean)} to {format_number(gap)} at {format_percent(leaf)}"

    mean, bmfa = (paper.PROBES[dataset, "image-edge"][method] for method in ("block-mean", BMFA))

    @claim(
        f"On {paper.dataset_title(dataset)} instances, Algorithm 1 reduces the mean gap of the mean",
        words(mean.mean_gap, bmfa.mean_gap, bmfa.leaf_percent),
        command_for("probe", {"dataset": dataset}),
    )
    def measure(records: RecordSet) -> tuple[str, Verdict, str]:
        (mean,) = _values(records, dataset, "block-mean", "mean_gap")
        gap, leaf, instances = _values(
            records, dataset, BMFA, "mean_gap", "leaf_percent", "instances"
        )
        note = (
            f"{format_number(instances, 0)} of {paper.INSTANCES[dataset]:,} instances. The scores come "
            "from our fit to the paper's table, so agreement with it is not independent evidence."
        )
        return words(mean, gap, leaf), judge_direction(gap < mean), note

    return measure


@claim(
    "The methods have the same order on other data: by mean gap, on the embedded images",
    "the order of its table",
    command_for("probe", {"dataset": "embedded"}),
)
def _same_order(records: RecordSet) -> tuple[str, Verdict, str]:
    gaps = {method: _values(records, "embedded", method, "mean_gap")[0] for method in ORDER}
    same = sorted(gaps, key=lambda method: gaps[method]) == ORDER
    change = f"{format_number(gaps['block-mean'])} to {format_number(gaps[BMFA])}"
    note = f"{change}, on images that this library generates."
    return "the same order" if same else "another order", judge_direction(same), note


@claim(
    "The P95 gap of Algorithm 1 is larger than that of a variance correction",
    f"{format_number(COCO[BMFA].p95_gap)} against {format_number(COCO[VARIANCE].p95_gap)} (COCO)",
    command_for("probe"),
)
def _p95_gap(records: RecordSet) -> tuple[str, Verdict, str]:
    dataset = _best_dataset(records)
    ours, unsplit = _values(records, dataset, BMFA, "p95_gap", "unsplit_percent")
    (correction,) = _values(records, dataset, VARIANCE, "p95_gap")
    note = f"The cause is the {format_percent(unsplit, 1)} of instances whose root is not split."
    shown = f"{format_number(ours)} against {format_number(correction)}"
    shown += f" ({paper.dataset_title(dataset)})"
    return shown, judge_direction(ours > correction), note if unsplit > BEYOND_P95 else ""


@claim(
    "Without image edges Algorithm 1 still leads in the mean gap, but not in the P95 gap",
    " against ".join(
        format_numbers(COCO_MASKS[method].mean_gap, COCO_MASKS[method].p95_gap)
        for method in (BMFA, VARIANCE)
    ),
    command_for("probe", {"mode": "mask-only"}),
)
def _mask_only(records: RecordSet) -> tuple[str, Verdict, str]:
    columns = ("mean_gap", "p95_gap", "instances")
    mean, p95, instances = _values(records, "coco", BMFA, *columns, mode="mask-only")
    other_mean, other_p95, _ = _values(records, "coco", VARIANCE, *columns, mode="mask-only")
    note = f"On {instances:,.0f} of {paper.INSTANCES['coco']:,} instances, scores from our fit"
    if mean > other_mean:
        note += "; the variance correction leads in the mean gap as well"
    shown = f"{format_numbers(mean, p95)} against {format_numbers(other_mean, other_p95)}"
    return shown, judge_direction(mean < other_mean and p95 > other_p95), f"{note}."


@claim(
    "The smallest P95 gap of a summary without annotations",
    f"{format_number(COCO[VARIANCE].p95_gap)} (mean-variance, COCO)",
    command_for("probe"),
)
def _smallest_p95_gap(records: RecordSet) -> tuple[str, Verdict, str]:
    dataset = _best_dataset(records)
    rows = records.rows("probe", dataset=dataset, mode="image-edge", group="all")
    methods = require_any(m for m in unique(rows, "method") if m.startswith("optimal:"))
    p95, leaf = _values(records, dataset, methods[0], "p95_gap", "leaf_percent")
    (correction,) = _values(records, dataset, VARIANCE, "p95_gap")
    (leaves,) = _values(records, dataset, BMFA, "leaf_percent")
    note = (
        f"mean-variance has {format_number(correction)} there, with one leaf. {methods[0]} reads exact "
        f"scores; Algorithm 1 has {format_percent(leaves)} leaves."
    )
    shown = f"{format_number(p95)} at {format_percent(leaf)} ({paper.dataset_title(dataset)})"
    return shown, Verdict.AHEAD if p95 < correction else Verdict.DIFFERS, note


PROBES = Chapter(
    "probes",
    "Instance probes",
    "probe",
    _content,
    (
        *(_mean_gap("coco"), _mean_gap("lvis"), _same_order),
        *(_p95_gap, _mask_only, _smallest_p95_gap),
    ),
)
