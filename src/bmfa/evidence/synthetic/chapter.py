"""The chapters on the synthetic stress test."""

from typing import Any

from bmfa.evidence.page import figures, paper
from bmfa.evidence.page.markup import PAPER_COLUMNS, Column, decimal, figure, paragraph, table
from bmfa.evidence.page.records import Evidence, in_order, number, text
from bmfa.records import Row


def sweep(evidence: Evidence) -> str:
    """All settings, for every place of the minority."""
    count = evidence.setting("synthetic", "settings", 396)
    intro = paragraph(
        "A grid of 16 × 16 scores holds 1 to 64 bright tokens of advantage Δ among zeros. Of all "
        f"settings, the {count} count in which the bright tokens hold at least half of the softmax "
        "mass. The gap is F minus the summary's estimate, with F the log of the mean of the "
        "exponentials: how much of the softmax normaliser is lost, in nats."
    )
    caption = (
        "The same minority at five places. Algorithm 1 looks one level down, so it is blind where "
        "the quarters of a block have equal means. Best is a line near zero on the left that lies low "
        "on the right as well."
    )
    return (
        intro
        + _findings(evidence)
        + figure(figures.placements, evidence, caption)
        + _corner_table(evidence)
        + _placement_table(evidence, "mean_gap", "Mean gap by placement")
        + _placement_table(evidence, "leaf_percent", "Leaf ratio by placement, % of tokens")
    )


def curve(evidence: Evidence) -> str:
    """One minority, ever brighter."""
    intro = paragraph(
        "One bright corner, ever brighter. At the dotted line it holds half of the softmax mass "
        "(Δ = log((1 − α) / α), α its share of the tokens); from there on the mean's loss grows as "
        "fast as Δ itself."
    )
    return intro + figure(figures.failure_curve, evidence, _first_splits(evidence))


def _first_splits(evidence: Evidence) -> str:
    """From which advantage on Algorithm 1 sees a minority of each size."""
    rows = [r for r in evidence.rows("failure-curve") if r.get("method") == paper.ALGORITHM_1]
    sentences = []
    for cells in dict.fromkeys(row.get("cells") for row in rows):
        some = [row for row in rows if row.get("cells") == cells]
        leaves = [number(row, "leaf_percent") or 0.0 for row in some]
        split = [
            number(r, "delta") or 0.0 for r, n in zip(some, leaves, strict=True) if n > min(leaves)
        ]
        bright = f"{cells} bright token{'' if cells == 1 else 's'}"
        if split:
            sentences.append(
                f"With {bright} Algorithm 1 splits the root from Δ = {min(split):.1f} on."
            )
        else:
            sentences.append(
                f"With {bright} it never does so in this range, and its line is that of the mean."
            )
    return " ".join(sentences)


def _findings(evidence: Evidence) -> str:
    """What the numbers say, losses included."""

    def gap(method: str, place: str, column: str = "mean_gap") -> str:
        return decimal(evidence.value("synthetic", column, method=method, placement=place), 3)

    places = in_order(evidence.rows("synthetic"), "placement")
    sentences = []
    if "centred" in places:
        sentences.append(
            f"The headline depends on the place: Algorithm 1 has {gap(paper.ALGORITHM_1, 'corner')} "
            f"with the minority in the corner and {gap(paper.ALGORITHM_1, 'centred')} with it in the "
            f"centre, where the mean has {gap('sparge-mean', 'centred')} and fixed-depth:2 "
            f"{gap('fixed-depth:2', 'centred')}."
        )
    corner = {
        text(row, "method"): number(row, "mean_gap") or 0.0
        for row in evidence.select("synthetic", placement="corner")
    }
    mass = next((method for method in corner if method.startswith("mass")), None)
    if mass is not None and corner[mass] > corner.get(paper.ALGORITHM_1, 0.0):
        sentences.append(
            f"Weighing by mass alone does not help: {mass} has {gap(mass, 'corner')} in the corner, "
            "because it weighs the same blind score."
        )
    least = evidence.value("synthetic", "min_gap", method="mean-variance", placement="corner")
    if least is not None and least < 0:
        sentences.append(
            f"The variance correction overestimates as well, by up to {decimal(-least, 3)}; its mean "
            "is of signed gaps."
        )
    sentences.append(
        "The optimal, exact-gap and certified trees need exact scores; gamma-h2 needs block means "
        "alone."
    )
    return paragraph(*sentences)


def _corner_table(evidence: Evidence) -> str:
    columns = [Column("Method", code=True), Column("Mean gap", 3)]
    columns += [Column("P95 gap", 3), Column("Largest", 3), Column("Leaf %", 3)]
    columns += PAPER_COLUMNS
    rows = [_corner_row(row) for row in evidence.select("synthetic", placement="corner")]
    return table("Minority in the corner, as in the paper", columns, rows)


def _corner_row(row: Row) -> list[Any]:
    method = text(row, "method")
    ours = [row.get(name) for name in ("mean_gap", "p95_gap", "max_gap", "leaf_percent")]
    printed = paper.SYNTHETIC.get(method)
    theirs = [printed.mean_gap, printed.p95_gap, printed.leaf_percent] if printed else [None] * 3
    return [method, *ours, *theirs]


def _placement_table(evidence: Evidence, column: str, caption: str) -> str:
    rows = evidence.rows("synthetic")
    places = in_order(rows, "placement")
    values = {(text(r, "method"), text(r, "placement")): number(r, column) for r in rows}
    columns = [Column("Method", code=True), *(Column(place, 3) for place in places)]
    body = [[m, *(values.get((m, p)) for p in places)] for m in in_order(rows, "method")]
    return table(caption, columns, body)
