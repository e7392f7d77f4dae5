"""The chapter on the instance probes."""

from typing import Any

from bmfa.evidence.page import figures, paper
from bmfa.evidence.page.markup import (
    PAPER_COLUMNS,
    Column,
    decimal,
    details,
    figure,
    paragraph,
    table,
)
from bmfa.evidence.page.records import Evidence, in_order, number, text
from bmfa.evidence.probes.figures import sources
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
BEYOND_P95 = 5.0  # per cent of the instances
FURTHER = ("gamma-h2", "exact-gap", "certified", "optimal")


def content(evidence: Evidence) -> str:
    """Figures, then a table for every data source and mode."""
    intro = paragraph(
        "Around each annotated object the picture is cut to a square of 16 × 16 cells. Cells that "
        "the contour crosses score high, more so on a strong edge (image-edge) or all alike "
        "(mask-only); the others score low. Annotations make the scores; no method sees them but "
        "edge-aware. Unsplit is the share of instances whose root is never split."
    )
    warning = (
        '<p class="warning"><strong>The protocol is recovered, not proven.</strong> The paper’s '
        "supplement is not available. This construction was fitted to its published table, so that "
        "closeness to the table is no evidence of its own.</p>"
    )
    return (
        intro
        + warning
        + _motivation(evidence)
        + (figure(figures.trade_off, evidence, TRADE_OFF) if sources(evidence) else "")
        + _findings(evidence)
        + _distribution(evidence)
        + _tables(evidence)
    )


TRADE_OFF = (
    "Down and to the left is better. A ring is the paper's number for the point inside it. "
    "Methods that meet, such as exact-gap and certified, are drawn over each other; edge-aware keeps "
    "every token."
)


def _motivation(evidence: Evidence) -> str:
    if not evidence.has("cases"):
        return ""
    first = (
        "A block of a picture whose bright part is small in area and holds nearly all of the mass. "
        "Its mean is a single dull value."
    )
    second = (
        "From the picture to the scores of its cells, to the tree of Algorithm 1, to what the "
        "methods lose over all instances."
    )
    return figure(figures.motivation, evidence, first) + figure(figures.pipeline, evidence, second)


def _findings(evidence: Evidence) -> str:
    """What the means hide."""
    rows = evidence.select("probe", mode="image-edge", group="all", method=paper.ALGORITHM_1)
    found = {text(row, "dataset"): row for row in rows}
    rows = [found[dataset] for dataset in paper.sort_datasets(list(found))]
    known = [r for r in rows if None not in (number(r, "unsplit_percent"), number(r, "p95_gap"))]
    if not known:
        return ""
    shares = ", ".join(
        f"{decimal(row['unsplit_percent'], 1)} % ({paper.dataset_title(text(row, 'dataset'))})"
        for row in known
    )
    tails = ", ".join(decimal(row["p95_gap"], 3) for row in known)
    sentences = [f"Algorithm 1 never splits the root of some instances: {shares}."]
    if all(row["unsplit_percent"] > BEYOND_P95 for row in known):
        sentences.append(
            f"That is where its P95 gap comes from ({tails}): an object centred in its crop spreads "
            "its contour evenly over the four quarters, and the one-step score is near zero."
        )
    return paragraph(*sentences, *(_other_tails(evidence, text(row, "dataset")) for row in known))


def _other_tails(evidence: Evidence, dataset: str) -> str:
    """P95 gaps and leaves of the rules that look further than Algorithm 1."""
    rows = evidence.select("probe", mode="image-edge", group="all", dataset=dataset)
    said = [
        f"{text(row, 'method')} {decimal(row['p95_gap'], 3)} at {decimal(row['leaf_percent'], 1)} %"
        for row in rows
        if text(row, "method").partition(":")[0] in FURTHER
        and None not in (number(row, "p95_gap"), number(row, "leaf_percent"))
    ]
    title = paper.dataset_title(dataset)
    return f"P95 gaps of rules that look further ({title}): {', '.join(said)}." if said else ""


def _distribution(evidence: Evidence) -> str:
    if not any(row.get("gap_quantiles") for row in evidence.rows("probe")):
        return ""
    caption = (
        "The gap of every instance, from the least to the greatest: a mean over all of them hides how "
        "they are spread."
    )
    return figure(figures.distribution, evidence, caption)


def _tables(evidence: Evidence) -> str:
    rows = evidence.rows("probe")
    datasets = paper.sort_datasets(in_order(rows, "dataset"))
    parts = []
    for dataset in datasets:
        for mode in in_order(evidence.select("probe", dataset=dataset), "mode"):
            some = evidence.select("probe", dataset=dataset, mode=mode)
            title = f"{paper.dataset_title(dataset)}, {mode}"
            parts.append(_all_table(title, dataset, mode, some))
            parts.append(_group_table(title, [r for r in some if r.get("group") != "all"]))
    return "".join(parts)


def _all_table(title: str, dataset: str, mode: str, rows: list[Row]) -> str:
    rows = [row for row in rows if row.get("group") == "all"]
    printed = paper.PROBES.get((dataset, mode), {})
    columns = [Column("Method", code=True)]
    columns += [Column(head, decimals) for head, _, decimals in MEASURES]
    if printed:
        columns += PAPER_COLUMNS
    body = []
    for row in rows:
        cells: list[Any] = [text(row, "method"), *(row.get(name) for _, name, _ in MEASURES)]
        if printed:
            point = printed.get(text(row, "method"))
            cells += [point.mean_gap, point.p95_gap, point.leaf_percent] if point else [None] * 3
        body.append(cells)
    count = decimal(rows[0].get("instances"), 0) if rows else "0"
    return table(f"{title}, {count} instances", columns, body)


def _group_table(title: str, rows: list[Row]) -> str:
    """By size or frequency, closed until asked for."""
    if not rows:
        return ""
    columns = [Column("Group"), Column("Method", code=True), Column("Instances", 0)]
    columns += [Column(head, decimals) for head, _, decimals in MEASURES]
    groups = in_order(rows, "group")
    ordered = [row for group in groups for row in rows if text(row, "group") == group]
    body = [
        [text(row, "group"), text(row, "method"), row.get("instances")]
        + [row.get(name) for _, name, _ in MEASURES]
        for row in ordered
    ]
    return details(f"{title}, by {', '.join(groups)}", table(f"{title}, by group", columns, body))
