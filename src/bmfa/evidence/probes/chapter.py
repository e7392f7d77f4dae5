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
)
from bmfa.evidence.page.claims import Claim, Verdict, direction, not_measured
from bmfa.evidence.page.formats import format_number, format_numbers, format_percent
from bmfa.evidence.page.record_set import RecordSet, get_number, get_text, unique
from bmfa.evidence.pictures.figures import motivation, pipeline
from bmfa.evidence.probes import figures
from bmfa.records import Row

MEASURES = (
    ("Mean gap", "mean_gap", 3),
    ("Median", "median_gap", 3),
    ("P95", "p95_gap", 3),
    ("P99", "p99_gap", 3),
    ("Largest", "max_gap", 3),
    ("Leaf %", "leaf_percent", 3),
    ("Unsplit %", "unsplit_percent", 1),
)
BEYOND_P95 = 5.0  # percent of the instances lie above the 95th percentile
DEEPER_RULES = ("gamma-h2", "exact-gap", "certified", "optimal")


def _content(records: RecordSet) -> list[Block]:
    return [
        *paragraph(
            "The picture is cropped around each annotated object and divided into 16 × 16 cells. Cells "
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
            motivation,
            records,
            "A block of a picture whose bright part is small in area and holds nearly all of the mass. "
            "The mean replaces it by a single low value.",
        ),
        *illustrate(
            pipeline,
            records,
            "From the picture to the scores of its cells, to the tree of Algorithm 1, to the loss of "
            "every method over all instances.",
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
    return sentences + [_deeper_rules(records, get_text(row, "dataset")) for row in rows]


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
            tables.append(
                _method_table(title, printed, [r for r in found if r.get("group") == "all"])
            )
            tables += _group_table(title, [row for row in found if row.get("group") != "all"])
    return tables


def _method_table(title: str, printed: Mapping[str, paper.Point], rows: list[Row]) -> Block:
    columns = [METHOD, *(Column(name, decimals) for name, _, decimals in MEASURES)]
    body = []
    for row in rows:
        method = get_text(row, "method")
        cells = [method, *(row.get(name) for _, name, _ in MEASURES)]
        body.append(cells + (paper.cells(printed.get(method)) if printed else []))
    count = format_number(rows[0].get("instances"), 0) if rows else "0"
    columns += PAPER_GAP_COLUMNS if printed else ()
    return Table(f"{title}, {count} instances", columns, body)


def _group_table(title: str, rows: list[Row]) -> list[Block]:
    """A closed table by size or frequency of the objects."""
    if not rows:
        return []
    columns = [Column("Group"), METHOD, Column("Instances", 0)]
    columns += [Column(name, decimals) for name, _, decimals in MEASURES]
    groups = unique(rows, "group")
    body = [
        [group, get_text(row, "method"), row.get("instances")]
        + [row.get(name) for _, name, _ in MEASURES]
        for group in groups
        for row in rows
        if get_text(row, "group") == group
    ]
    return [Table(f"{title}, by group", columns, body, f"{title}, by {', '.join(groups)}")]


def _claims(records: RecordSet) -> list[Claim]:
    return [
        _mean_gap(records, "coco"),
        _mean_gap(records, "lvis"),
        _same_order(records),
        _p95_gap(records),
        _mask_only(records),
        _smallest_p95_gap(records),
    ]


def _values(
    records: RecordSet, dataset: str, method: str, mode: str = "image-edge"
) -> list[float | None]:
    """Mean gap, P95 gap, leaf ratio, instances and share of unsplit instances of a method."""
    return [
        records.value("probe", column, dataset=dataset, mode=mode, method=method, group="all")
        for column in ("mean_gap", "p95_gap", "leaf_percent", "instances", "unsplit_percent")
    ]


def _best_dataset(records: RecordSet) -> str:
    """A data set of the paper if one was probed, otherwise another one."""
    probed = unique(records.rows("probe"), "dataset")
    return next((dataset for dataset in paper.DATASETS if dataset in probed), "coco")


def _mean_gap(records: RecordSet, dataset: str) -> Claim:
    claim = (
        f"On {paper.dataset_title(dataset)} instances, Algorithm 1 reduces the mean gap of the mean"
    )
    points = paper.PROBES[dataset, "image-edge"]
    before, after = points["sparge-mean"], points[paper.ALGORITHM_1]

    def words(mean: float, gap: float, leaf: float | None) -> str:
        return f"{format_number(mean)} to {format_number(gap)} at {format_percent(leaf)}"

    printed = words(before.mean_gap, after.mean_gap, after.leaf_percent)
    mean = _values(records, dataset, "sparge-mean")[0]
    gap, _, leaf, instances, _ = _values(records, dataset, paper.ALGORITHM_1)
    if mean is None or gap is None:
        return not_measured(claim, printed, "probe", dataset=dataset)
    note = (
        f"{format_number(instances, 0)} of {paper.INSTANCES[dataset]:,} instances. The scores come "
        "from our fit to the paper's table, so agreement with it is not independent evidence."
    )
    return Claim(claim, printed, words(mean, gap, leaf), direction(gap < mean), note)


def _same_order(records: RecordSet) -> Claim:
    claim = "The methods have the same order on other data: by mean gap, on the embedded pictures"
    points = paper.PROBES["coco", "image-edge"]
    order = sorted(points, key=lambda method: points[method].mean_gap)
    gaps = {m: g for m in order if (g := _values(records, "embedded", m)[0]) is not None}
    if len(gaps) < len(order):
        return not_measured(claim, "the order of its table", "probe", dataset="embedded")
    same = sorted(gaps, key=lambda method: gaps[method]) == order
    ours = "the same order" if same else "another order"
    change = f"{format_number(gaps['sparge-mean'])} to {format_number(gaps[paper.ALGORITHM_1])}"
    note = f"{change}, on pictures that this library generates."
    return Claim(claim, "the order of its table", ours, direction(same), note)


def _p95_gap(records: RecordSet) -> Claim:
    claim = "The P95 gap of Algorithm 1 is larger than that of a variance correction"
    points = paper.PROBES["coco", "image-edge"]
    methods = (paper.ALGORITHM_1, "mean-variance")
    printed = " against ".join(format_number(points[method].p95_gap) for method in methods)
    dataset = _best_dataset(records)
    ours, correction = (_values(records, dataset, method)[1] for method in methods)
    unsplit = _values(records, dataset, paper.ALGORITHM_1)[4]
    if ours is None or correction is None:
        return not_measured(claim, f"{printed} (COCO)", "probe")
    note = ""
    if unsplit is not None and unsplit > BEYOND_P95:
        note = (
            f"The cause is the {format_percent(unsplit, 1)} of instances whose root is not split."
        )
    shown = f"{format_number(ours)} against {format_number(correction)}"
    title = paper.dataset_title(dataset)
    verdict = direction(ours > correction)
    return Claim(claim, f"{printed} (COCO)", f"{shown} ({title})", verdict, note)


def _mask_only(records: RecordSet) -> Claim:
    claim = "Without image edges Algorithm 1 still leads in the mean gap, but not in the P95 gap"
    points = paper.PROBES["coco", "mask-only"]
    pair = points[paper.ALGORITHM_1], points["mean-variance"]
    printed = " against ".join(format_numbers(point.mean_gap, point.p95_gap) for point in pair)
    mean, p95, _, instances, _ = _values(records, "coco", paper.ALGORITHM_1, "mask-only")
    other_mean, other_p95, *_ = _values(records, "coco", "mean-variance", "mask-only")
    if mean is None or other_mean is None or instances is None:
        return not_measured(claim, printed, "probe", mode="mask-only")
    holds = mean < other_mean and (p95 or 0.0) > (other_p95 or 0.0)
    note = f"On {instances:,.0f} of {paper.INSTANCES['coco']:,} instances, scores from our fit"
    if mean > other_mean:
        note += "; the variance correction leads in the mean gap as well"
    ours = f"{format_numbers(mean, p95)} against {format_numbers(other_mean, other_p95)}"
    return Claim(claim, printed, ours, direction(holds), f"{note}.")


def _smallest_p95_gap(records: RecordSet) -> Claim:
    claim = "The smallest P95 gap of a summary without annotations"
    best = paper.PROBES["coco", "image-edge"]["mean-variance"].p95_gap
    printed = f"{format_number(best)} (mean-variance, COCO)"
    dataset = _best_dataset(records)
    rows = records.rows("probe", dataset=dataset, mode="image-edge", group="all")
    optimal: Row = next((r for r in rows if str(r.get("method")).startswith("optimal:")), {})
    p95, leaf = get_number(optimal, "p95_gap"), get_number(optimal, "leaf_percent")
    correction = _values(records, dataset, "mean-variance")[1]
    if p95 is None or correction is None:
        return not_measured(claim, printed, "probe")
    leaves = _values(records, dataset, paper.ALGORITHM_1)[2]
    note = (
        f"mean-variance has {format_number(correction)} there, with one leaf. {optimal['method']} "
        f"reads exact scores; Algorithm 1 has {format_percent(leaves)} leaves."
    )
    ours = f"{format_number(p95)} at {format_percent(leaf)} ({paper.dataset_title(dataset)})"
    verdict = Verdict.AHEAD if p95 < correction else Verdict.DIFFERS
    return Claim(claim, printed, ours, verdict, note)


PROBES = Chapter("probes", "Instance probes", "probe", _content, _claims)
