"""Every number of the paper that the page shows, against a transcription of its own."""

import re
from collections.abc import Mapping
from typing import Any

from bmfa.evidence import recorded
from bmfa.evidence.page import paper
from bmfa.evidence.page.claims import TEXTS
from bmfa.records import Record
from model_records import page_without_figures

GAPS = ("mean_gap", "p95_gap", "leaf_percent")
# As printed: mean gap, P95 gap and leaf ratio on COCO, then on LVIS.
IMAGE_EDGE = """
block-mean    2.254 2.551   0.391  2.277 2.613   0.391
mean-variance  0.787 1.162   0.391  0.824 1.248   0.391
fixed-depth:1  2.200 2.524   1.563  2.233 2.590   1.563
fixed-depth:2  1.840 2.241   6.250  1.865 2.313   6.250
gamma:0.005    0.526 2.434  30.810  0.596 2.509  29.225
edge-aware     0.000 0.000 100.000  0.000 0.000 100.000
"""
IMAGENET_COLUMNS = ("top1_percent", "drop_pp", "agreement_percent", "leaf_percent", "speedup")
IMAGENET = """
full                   72.084 0.000 --     --     1.000
tome:8                 71.666 0.418 94.122 --     1.187
fixed-blocks:2         69.322 2.762 87.322 25.000 0.940
quadrant-gap:0.8       69.820 2.264 88.146 34.868 0.864
quadrant-gap:0.5       71.520 0.564 93.646 55.861 0.860
random-quadrants:0.25  65.146 6.938 79.458 26.530 0.916
random-quadrants:0.5   69.148 2.936 86.908 51.024 0.920
"""
# On COCO, last four blocks.
LOOP_COLUMNS = ("leaf_percent", "agreement_percent", "output_kl")
CLOSED_LOOP = """
fixed-blocks:2         25.00 73.50 0.196
random-quadrants:0.25  26.53 61.54 0.406
random-quadrants:0.5   51.00 72.40 0.189
quadrant-gap:0.8       30.82 75.98 0.149
quadrant-gap:0.5       52.66 87.00 0.041
variance:0.2           97.57 99.02 --
"""
# Over the 396 settings.
SYNTHETIC = """
block-mean    2.582 5.114   0.391
fixed-depth:2  1.129 --      6.250
gamma:0.005    0.261 2.035   5.794
edge-aware     0.000 0.000 100.000
"""
MASK_ONLY = """
mean-variance  0.600 0.835 --
gamma:0.005    0.534 1.830 --
"""
ABLATION_COLUMNS = ("mean_gap", "leaf_percent", "milliseconds")
ABLATION = """
epsilon:0.05   1.644  9.26 0.697
epsilon:0.005  0.549 29.08 2.099
epsilon:0.001  0.120 53.24 3.350
depth:2        1.917 --    --
depth:4        0.549 29.08 2.099
depth:5        0.549 29.08 --
grid:8         0.403 56.03 --
grid:16        0.549 29.08 2.099
grid:32        0.910 12.39 3.553
"""


Table = dict[str, list[float | None]]


def table(words: str, part: slice = slice(None)) -> Table:
    rows = (line.split() for line in words.strip().splitlines())
    return {name: [None if c == "--" else float(c) for c in row[part]] for name, *row in rows}


def printed(points: Mapping[str, Any], columns: tuple[str, ...]) -> Table:
    """The numbers of `paper` in the order of columns, which are all that it has."""
    assert all(vars(point).keys() <= set(columns) for point in points.values())
    return {name: [vars(p).get(column) for column in columns] for name, p in points.items()}


COCO, LVIS = table(IMAGE_EDGE, slice(3)), table(IMAGE_EDGE, slice(3, 6))


def test_the_tables_are_as_printed() -> None:
    assert {key: printed(points, GAPS) for key, points in paper.PROBES.items()} == {
        ("coco", "image-edge"): COCO,
        ("lvis", "image-edge"): LVIS,
        ("coco", "mask-only"): table(MASK_ONLY),
    }
    assert printed(paper.SYNTHETIC, GAPS) == table(SYNTHETIC)
    assert printed(paper.CLOSED_LOOP, LOOP_COLUMNS) == table(CLOSED_LOOP)
    assert printed(paper.IMAGENET, IMAGENET_COLUMNS) == table(IMAGENET)
    ablation = {f"{name}:{value:g}": point for (name, value), point in paper.ABLATION.items()}
    assert printed(ablation, ABLATION_COLUMNS) == table(ABLATION)
    assert [list(vars(block).values()) for block in paper.FIRST_FIGURE] == [
        [12.5, 97.6, 2.923],
        [10.5, 97.1, 2.854],
    ]


# Every other number of `paper`.
CONSTANTS = {
    "INSTANCES": {"coco": 36_149, "lvis": 20_000},
    "IMAGENET_IMAGES": 50_000,
    "CASE_AREAS": (9.8, 12.5),
    "CASE_MASS": 97.0,
    "CASE_GAPS": (2.854, 3.091),
    "OVERVIEW_EPSILON": 0.004,
    "OVERVIEW_LEAVES": 82,
    "OVERVIEW_TOKENS": 256,
}


def test_the_other_numbers_are_as_printed() -> None:
    assert {name: getattr(paper, name) for name in CONSTANTS} == CONSTANTS


def test_claims_print_what_the_paper_prints() -> None:
    """Each number with as many digits as a claim prints; run times in microseconds."""
    tables = (IMAGE_EDGE, SYNTHETIC, MASK_ONLY, ABLATION, CLOSED_LOOP, IMAGENET)
    known = {n for words in tables for row in table(words).values() for n in row if n is not None}
    known |= {*paper.CASE_AREAS, *paper.CASE_GAPS, paper.CASE_MASS, *(1000 * n for n in known)}
    for name, claim in TEXTS.items():
        words = re.sub(r"last-\d|tome:8|P95", "", claim["paper"]).replace(",", "")
        for number in re.findall(r"\d+(?:\.\d+)?", words):
            digits = len(number.partition(".")[2])
            nearest = min(abs(float(number) - value) for value in known)
            assert nearest <= 0.5001 * 10.0**-digits, (name, number)


def papers_cells(page: str, caption: str) -> dict[str, list[float]]:
    """Numbers in the paper's columns of the tables of a caption, by the names of the rows."""
    found = {}
    for text in re.findall(rf"<caption>{caption}[^<]*</caption>.*?</table>", page, re.S):
        for row in re.findall(r"<tr>(.*?)</tr>", text, re.S)[1:]:
            cells = re.findall(r"<t[hd]([^>]*)>(.*?)</t[hd]>", row, re.S)
            texts = [re.sub(r"<[^>]+>|\s", "", cell) for _, cell in cells]
            papers = [t for (kind, _), t in zip(cells, texts, strict=True) if "paper" in kind]
            name = texts[0] if caption != "Ablations" else f"{texts[0]}:{texts[1]}"
            found[name] = [float(text) for text in papers if text != "–"]
    return {name: numbers for name, numbers in found.items() if numbers}


def test_the_page_shows_them_in_the_papers_columns() -> None:
    rows = []
    for parameter, _, value in (name.partition(":") for name in table(ABLATION)):
        number = float(value) if "." in value else int(value)
        rows.append({"parameter": parameter, "value": number, "mean_gap": 0.0})
    synthetic = Record.from_json((recorded.folder() / "synthetic.json").read_text("utf-8"))
    ablation = Record("ablation", {"dataset": "coco"}, rows)
    page = page_without_figures([synthetic, *recorded.load()[0].values(), ablation])
    for caption, expected in {
        "Minority in the corner": table(SYNTHETIC),
        "COCO, image-edge": COCO,
        "LVIS, image-edge": LVIS,
        "COCO, mask-only": table(MASK_ONLY),
        "Ablations": table(ABLATION),
        "DeiT-Tiny[^<]*COCO, last-4": table(CLOSED_LOOP),
        "DeiT-Tiny[^<]*ImageNet": table(IMAGENET),
    }.items():
        shown = {name: [n for n in row if n is not None] for name, row in expected.items()}
        assert papers_cells(page, caption) == shown, caption
