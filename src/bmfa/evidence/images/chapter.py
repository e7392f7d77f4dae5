"""The chapters on single instances and on images inside a model."""

import math
from typing import Any

from bmfa.energy import binary_gap
from bmfa.evidence.images import figures
from bmfa.evidence.page import paper
from bmfa.evidence.page.blocks import METHOD, Block, Chapter, Column, Table, illustrate, paragraph
from bmfa.evidence.page.claims import Verdict, claim, judge_direction
from bmfa.evidence.page.formats import format_number, format_percent
from bmfa.evidence.page.record_set import (
    RecordSet,
    command_for,
    get_number,
    get_text,
    need_number,
    require_any,
)
from bmfa.records import Row

INSTANCE_COLUMNS = (
    Column("title", "Instance"),
    Column("minority_area_percent", "Minority, % of cells", 1),
    Column("gibbs_mass_percent", "% of Gibbs mass", 1),
    Column("gap", "Gap of the mean", 3),
    Column("leaves", f"Leaves of Algorithm 1 at ε = {paper.OVERVIEW_EPSILON:g}"),
    Column("instances", "Instances", 0),
    Column("gaps", "Their gaps"),
    Column("unsplit_percent", "Root never split, %", 0),
)
IMAGE_COLUMNS = (
    Column("title", "Image"),
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
# A claim about a small part that holds nearly all mass: percentages, and a gap that loses 1 - exp(-2),
# or 86 % of it.
LARGE_AREA, LEAST_MASS, LEAST_GAP = 20.0, 90.0, 2.0
SMALL_E = 0.05  # by Pinsker's inequality, moves at most sqrt(0.05 / 2) = 16 % of the mass


def _instances(records: RecordSet) -> list[Block]:
    return [
        *paragraph(
            "The figures of the paper that show single images, redrawn. Its images are from COCO; "
            "ours are drawn from a seed, with a kite, a person, a book and a spoon as in the paper, "
            "and scored by our fit to its probe."
        ),
        *illustrate(
            figures.motivation,
            records,
            "Two blocks of an image, as in the paper's first figure. A small part of each block holds "
            "nearly all of the softmax mass; the mean of the block loses it, and Algorithm 1 keeps it. "
            "Orange marks are the shares that the paper prints for its two blocks.",
        ),
        *paragraph(_binary_model()),
        *illustrate(
            figures.pipeline,
            records,
            f"A kite, its scores and the tree of Algorithm 1 at ε = {paper.OVERVIEW_EPSILON:g}, and "
            "the agreement of the screened with the full model. Rings are the paper's numbers, of "
            "DeiT-Tiny on COCO: A adaptive, R random, F fixed.",
        ),
        *illustrate(
            figures.cases,
            records,
            "The paper's four objects, drawn and from other data sets. Bright cells have high scores. "
            "Each tree shows the mean score of every leaf; lines are the borders of the leaves.",
        ),
        *paragraph(_unsplit(records), _largest_gap(records)),
        _instance_table(records),
    ]


def _binary_model() -> str:
    """Whether the numbers of the paper's two blocks fit each other."""
    gaps = []
    for block in paper.FIRST_FIGURE:
        area, mass = block.area_percent / 100, block.mass_percent / 100
        advantage = math.log(mass * (1 - area) / (area * (1 - mass)))
        gaps.append(
            f"{format_number(advantage, 2)} and {format_number(float(binary_gap(area, advantage)))}"
        )
    printed = " and ".join(format_number(block.gap) for block in paper.FIRST_FIGURE)
    return (
        "The paper's numbers fit each other: if a block had two levels of scores only, area and mass "
        f"of its two blocks would give an advantage and a gap of {'; and of '.join(gaps)}. It prints "
        f"gaps of {printed}."
    )


def _source(dataset: str) -> str:
    return "drawn" if dataset == "embedded" else paper.dataset_title(dataset)


def _heading(dataset: str) -> str:
    name = _source(dataset)
    return name[:1].upper() + name[1:]


def _unsplit(records: RecordSet) -> str:
    """How often Algorithm 1 does not split the root of the instances that were chosen from."""
    first = {
        (get_text(row, "dataset"), get_text(row, "title")): row for row in records.rows("cases")
    }
    parts = [
        f"{format_percent(share, 0)} of the {get_text(row, 'instances')} {_source(dataset)} {title}s"
        for (dataset, title), row in first.items()
        if (share := get_number(row, "unsplit_percent"))
    ]
    if not parts:
        return ""
    return (
        f"Shown are instances that Algorithm 1 splits, as in the paper. It does not split the root of "
        f"{', '.join(parts)}: their contours are spread evenly over the four quarters."
    )


def _largest_gap(records: RecordSet) -> str:
    """The largest gap of a mean in all probes, and whether it reaches the paper's cases."""
    rows = records.rows("probe", mode="image-edge", group="all", method="block-mean")
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
    rows = [
        {
            **row,
            "title": f"{_heading(get_text(row, 'dataset'))}: {get_text(row, 'title')}",
            "leaves": _leaves(row),
            "gaps": _range(row, "gap"),
        }
        for row in records.rows("cases")
        if get_text(row, "method").startswith("gamma:")
    ]
    for row in records.rows("blocks"):
        rows.append({**row, "title": f"Drawn: {get_text(row, 'title').lower()}", "leaves": None})
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


def _leaves(row: Row) -> str:
    return f"{len(row.get('boxes', ()))} of {len(row.get('scores', ()))}"


def _range(row: Row, name: str) -> str | None:
    low, high = get_number(row, f"{name}_low"), get_number(row, f"{name}_high")
    return None if low is None or high is None else f"{format_number(low)} to {format_number(high)}"


@claim(
    "Four instances: shares of area and of Gibbs mass of the bright part in %, gap of the mean",
    f"{paper.CASE_AREAS[0]} to {paper.CASE_AREAS[1]}, over {paper.CASE_MASS:g}, "
    f"{paper.CASE_GAPS[0]} to {paper.CASE_GAPS[1]}",
    command_for("cases"),
)
def _four_instances(records: RecordSet) -> tuple[str, Verdict, str]:
    found = [row for row in records.rows("cases") if get_text(row, "method").startswith("gamma:")]
    # On the paper's data set if there are instances of it, else on all others.
    rows = require_any([row for row in found if get_text(row, "dataset") == "coco"] or found)
    areas, masses, gaps = (
        [need_number(row, column) for row in rows]
        for column in ("minority_area_percent", "gibbs_mass_percent", "gap")
    )
    ours = ", ".join(
        f"{format_number(min(values), digits)} to {format_number(max(values), digits)}"
        for values, digits in ((areas, 1), (masses, 1), (gaps, 3))
    )
    # The claim is that a small part has nearly all of the mass, and that the mean loses most of it.
    holds = max(areas) < LARGE_AREA and min(masses) > LEAST_MASS and min(gaps) > LEAST_GAP
    names = sorted({paper.dataset_title(get_text(row, "dataset")) for row in rows})
    note = f"{', '.join(names)}, with scores from our fit to the paper's probe."
    return ours, judge_direction(holds), note


def _images(records: RecordSet) -> list[Block]:
    rows = records.rows("image")
    return [
        *paragraph(
            "The attention of one query over the image, exact and on the trees of several rules. E "
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
        Table("The same in numbers", IMAGE_COLUMNS, rows),
    ]


def _how_chosen(records: RecordSet) -> str:
    text = (
        "The four cases of the paper are COCO instances with scores built from annotations, shown "
        "above; the paper shows no attention of a model."
    )
    count = records.setting("image", "chosen_from")
    if count is None:
        return text
    return (
        f"{text} Of the first {count} embedded images, these are the one with the smallest object, "
        "the one with the most centred object, the one with the most clutter, and "
        f"{records.setting('image', 'failure')}."
    )


def _changed_classes(rows: list[Row]) -> str:
    """The rules that change the predicted class."""
    changed = [
        row for row in rows if get_text(row, "full_class") != get_text(row, "screened_class")
    ]
    if not changed:
        return "No rule shown here changes the predicted class of these images."
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


INSTANCES = Chapter("cases", "The paper's images", "cases", _instances, (_four_instances,))
IMAGES = Chapter("images", "Images in a model", "image", _images)
