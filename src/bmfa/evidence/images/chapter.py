"""The chapters on single instances and on images inside a model."""

from typing import Any

from bmfa.evidence.page import paper
from bmfa.evidence.page.chapter import Chapter
from bmfa.evidence.page.claims import Verdict, claim, judge_direction
from bmfa.evidence.page.formats import format_number
from bmfa.evidence.page.record_set import (
    RecordSet,
    get_number,
    get_text,
    need_number,
    require_any,
)
from bmfa.records import Record, Row

# A claim about a small part that holds nearly all mass: percentages, and a gap that loses 1 - exp(-2),
# or 86 % of it.
LARGE_AREA, LEAST_MASS, LEAST_GAP = 20.0, 90.0, 2.0


def instances(records: RecordSet) -> dict[str, Any]:
    """Return the instances whose root stays whole, the largest gap of a mean, and the table."""
    rows = records.rows("cases")
    first = {(get_text(row, "dataset"), get_text(row, "title")): row for row in rows}
    probed = records.rows("probe", mode="image-edge", group="all", method="block-mean")
    gaps = [row for row in probed if get_number(row, "max_gap")]
    return {
        "unsplit": [row for row in first.values() if get_number(row, "unsplit_percent")],
        "largest": max(gaps, key=lambda row: need_number(row, "max_gap"), default=None),
        "instances": _table(records),
    }


def source(dataset: str) -> str:
    """Return where an instance is from."""
    return "drawn" if dataset == "embedded" else paper.dataset_title(dataset)


def _table(records: RecordSet) -> list[Row]:
    """Area, mass and gap of our instances and of the paper's figures."""
    rows: list[Row] = []
    for row in _algorithm_1(records):
        name = source(get_text(row, "dataset"))
        gaps = [format_number(row[key]) for key in ("gap_low", "gap_high") if key in row]
        row = {**row, "name": f"{name[:1].upper()}{name[1:]}: {get_text(row, 'title')}"}
        leaves = f"{len(row['boxes'])} of {len(row['scores'])}"
        rows.append({**row, "leaves": leaves, "gaps": " to ".join(gaps) or None})
    for row in records.rows("blocks"):
        rows.append({**row, "name": f"Drawn: {get_text(row, 'title').lower()}", "leaves": None})
    measures = ("name", "minority_area_percent", "gibbs_mass_percent", "gap")
    for which, block in zip(("first", "second"), paper.FIRST_FIGURE, strict=True):
        name = f"Paper: first figure, {which} block"
        numbers = (name, block.area_percent, block.mass_percent, block.gap)
        rows.append(dict(zip(measures, numbers, strict=True)))
    areas, gap = ("{} to {}".format(*pair) for pair in (paper.CASE_AREAS, paper.CASE_GAPS))
    four = ("Paper: four cases", areas, f"over {paper.CASE_MASS:g}", gap)
    leaves = f"{paper.OVERVIEW_LEAVES} of {paper.OVERVIEW_TOKENS}"
    kite = {"name": "Paper: overview, a kite", "leaves": leaves}
    return [*rows, dict(zip(measures, four, strict=True)), kite]


def _algorithm_1(records: RecordSet) -> list[Row]:
    """The rows of Algorithm 1, one for each instance."""
    return [row for row in records.rows("cases") if get_text(row, "method").startswith("gamma:")]


@claim(
    "Four instances: shares of area and of Gibbs mass of the bright part in %, gap of the mean",
    f"{paper.CASE_AREAS[0]} to {paper.CASE_AREAS[1]}, over {paper.CASE_MASS:g}, "
    f"{paper.CASE_GAPS[0]} to {paper.CASE_GAPS[1]}",
    "cases",
)
def four_instances(records: RecordSet) -> tuple[str, Verdict, str, list[Record]]:
    found = _algorithm_1(records)
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
    read = records.of("cases", dataset="coco") or records.of("cases")
    return ours, judge_direction(holds), note, read


def images(records: RecordSet) -> dict[str, Any]:
    """Return the rows of the images, and those on which a rule changes the predicted class."""
    rows = records.rows("image")
    changed = [row for row in rows if row.get("full_class") != row.get("screened_class")]
    return {"rows": rows, "changed": changed}


INSTANCES = Chapter(
    "cases",
    "The paper's images",
    "images/cases.html.j2",
    "cases",
    (four_instances,),
    lambda records: {**instances(records), "source": source},
)
IMAGES = Chapter("images", "Images in a model", "images/images.html.j2", "image", values=images)
