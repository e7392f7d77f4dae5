"""The chapters on single instances and on pictures inside a model."""

from typing import Any

import torch

from bmfa.evidence.page import paper
from bmfa.evidence.page.blocks import METHOD, Block, Chapter, Column, Table, illustrate, paragraph
from bmfa.evidence.page.formats import format_number
from bmfa.evidence.page.record_set import RecordSet, get_number, get_text
from bmfa.evidence.pictures import figures
from bmfa.grid import Grid
from bmfa.records import Row
from bmfa.trees.build import screen
from bmfa.trees.rules import Gamma

INSTANCE_COLUMNS = (
    Column("title", "Instance"),
    Column("minority_area_percent", "Minority, % of cells", 1),
    Column("gibbs_mass_percent", "% of Gibbs mass", 1),
    Column("gap", "Gap of the mean", 3),
    Column("leaves", f"Leaves of Algorithm 1 at ε = {paper.OVERVIEW_EPSILON:g}"),
)
PICTURE_COLUMNS = (
    Column("title", "Picture"),
    METHOD,
    Column("gap", "Gap of one mean", 3),
    Column("error", "E", 4),
    Column("certificate", "Certificate", 4),
    Column("leaf_percent", "Leaf %", 1),
    Column("moved_percent", "Mass moved %", 2),
    Column("output_kl", "Output KL", 3, small=True),
    Column("full_class", "Full model predicts"),
    Column("screened_class", "Screened model predicts"),
)
SMALL_E = 0.05  # by Pinsker's inequality, moves at most sqrt(0.05 / 2) = 16 % of the mass


def _instances(records: RecordSet) -> list[Block]:
    return [
        *paragraph(
            "Single instances: the crop, the scores that the probe assigns to its cells, and the "
            "summaries of two trees. If an object is centred in its crop, Algorithm 1 may keep a "
            "single leaf."
        ),
        *illustrate(
            figures.cases,
            records,
            "Bright cells have high scores. Each tree shows the mean score of every leaf; lines are "
            "the borders of the leaves.",
        ),
        *paragraph(_largest_gap(records)),
        _instance_table(records),
    ]


def _largest_gap(records: RecordSet) -> str:
    """The largest gap of a mean in all probes, and whether it reaches the paper's cases."""
    rows = records.rows("probe", mode="image-edge", group="all", method="sparge-mean")
    gaps = [(gap, get_text(row, "dataset")) for row in rows if (gap := get_number(row, "max_gap"))]
    if not gaps:
        return ""
    largest, dataset = max(gaps)
    low, high = paper.CASE_GAPS
    text = (
        f"The largest gap of a mean over all instances probed here is {format_number(largest)} "
        f"({paper.dataset_title(dataset)}); the four cases of the paper have {format_number(low)} to "
        f"{format_number(high)}."
    )
    if largest < low:
        text += " None reaches them: the paper's scores may have a longer upper tail than our fit."
    return text


def _instance_table(records: RecordSet) -> Block:
    """Area, mass and gap of our instances and of the paper's figures."""
    instances = {get_text(row, "title"): row for row in records.rows("cases")}
    rows = [{**row, "leaves": _leaves(row)} for row in instances.values()]
    for which, block in zip(("first", "second"), paper.FIRST_FIGURE, strict=True):
        rows.append(_paper_row(f"first figure, {which} block", *vars(block).values()))
    areas = " to ".join(format_number(value, 1) for value in paper.CASE_AREAS)
    gaps = " to ".join(format_number(value) for value in paper.CASE_GAPS)
    rows.append(_paper_row("four cases", areas, f"over {format_number(paper.CASE_MASS, 0)}", gaps))
    leaves = f"{paper.OVERVIEW_LEAVES} of {paper.OVERVIEW_TOKENS}"
    rows.append(_paper_row("overview, a kite", leaves=leaves))
    caption = "Single instances here and in the figures of the paper, which are from COCO"
    return Table(caption, INSTANCE_COLUMNS, rows)


def _paper_row(
    name: str, area: Any = None, mass: Any = None, gap: Any = None, leaves: str | None = None
) -> Row:
    shares = {"minority_area_percent": area, "gibbs_mass_percent": mass}
    return {"title": f"Paper: {name}", **shares, "gap": gap, "leaves": leaves}


def _leaves(row: Row) -> str | None:
    """The leaves of Algorithm 1 at the threshold of the paper's overview figure."""
    scores, grid = row.get("scores"), Grid(int(row["height"]), int(row["width"]))
    if not isinstance(scores, list) or len(scores) != grid.size:
        return None
    tree = screen(torch.tensor(scores, dtype=torch.float64), grid, Gamma(paper.OVERVIEW_EPSILON))
    return f"{int(tree.leaf_count)} of {grid.size}"


def _pictures(records: RecordSet) -> list[Block]:
    rows = records.rows("picture")
    return [
        *paragraph(
            "The attention of one query over the picture, exact and on the trees of several rules. E "
            "is the divergence of this attention over all keys. The certificate is a proven bound on "
            "E: it is computed from the exact scores if the rule reads them, otherwise from block "
            "statistics of the keys, which gives a loose bound.",
            _how_chosen(records),
            _changed_classes(rows),
        ),
        *illustrate(
            figures.attention_cases,
            records,
            "Bright tokens receive attention; lines are the borders of the leaves. Below every tree: "
            "E, the leaf ratio, and the class that the model predicts with its last layers screened.",
        ),
        Table("The same in numbers", PICTURE_COLUMNS, rows),
    ]


def _how_chosen(records: RecordSet) -> str:
    text = (
        "The four cases of the paper are COCO instances with scores built from annotations, shown "
        "above; the paper shows no attention of a model."
    )
    count = records.setting("picture", "chosen_from")
    if count is None:
        return text
    return (
        f"{text} Of the first {count} embedded pictures, these are the one with the smallest object, "
        "the one with the most centred object, the one with the most clutter, and "
        f"{records.setting('picture', 'failure')}."
    )


def _changed_classes(rows: list[Row]) -> str:
    """The rules that change the predicted class."""
    changed = [
        row for row in rows if get_text(row, "full_class") != get_text(row, "screened_class")
    ]
    if not changed:
        return "No rule shown here changes the predicted class of these pictures."
    changes = [
        f"{get_text(row, 'method')} changes {get_text(row, 'full_class')} to "
        f"{get_text(row, 'screened_class')} (E {format_number(get_number(row, 'error'), 2)})"
        for row in changed
    ]
    text = f"The predicted class changes in these cases: {'; '.join(changes)}."
    if any((get_number(row, "error") or 0.0) < SMALL_E for row in changed):
        text += (
            " If E is small nevertheless, the change is caused by other queries, heads or layers than "
            "the one shown."
        )
    return text


INSTANCES = Chapter("cases", "Single instances", "cases", _instances)
PICTURES = Chapter("pictures", "Pictures in a model", "picture", _pictures)
