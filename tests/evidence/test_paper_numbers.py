"""Every number of the paper that the page shows, against a transcription of its own."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, is_dataclass
from html.parser import HTMLParser
from typing import Any

import pytest

from bmfa.evidence.page import paper
from bmfa.evidence.page.build import build_page
from bmfa.records import Record

# As printed: mean gap, P95 gap and leaf ratio on COCO, then on LVIS.
IMAGE_EDGE = """
block-mean    2.254 2.551   0.391  2.277 2.613   0.391
mean-variance  0.787 1.162   0.391  0.824 1.248   0.391
fixed-depth:1  2.200 2.524   1.563  2.233 2.590   1.563
fixed-depth:2  1.840 2.241   6.250  1.865 2.313   6.250
gamma:0.005    0.526 2.434  30.810  0.596 2.509  29.225
edge-aware     0.000 0.000 100.000  0.000 0.000 100.000
"""
# Top-1, drop, agreement, leaf ratio and speed-up on ImageNet-1K.
IMAGENET = """
full                   72.084 0.000 --     --     1.000
tome:8                 71.666 0.418 94.122 --     1.187
fixed-blocks:2         69.322 2.762 87.322 25.000 0.940
quadrant-gap:0.8       69.820 2.264 88.146 34.868 0.864
quadrant-gap:0.5       71.520 0.564 93.646 55.861 0.860
random-quadrants:0.25  65.146 6.938 79.458 26.530 0.916
random-quadrants:0.5   69.148 2.936 86.908 51.024 0.920
"""
# Leaf ratio, agreement and output KL on COCO, last four blocks.
CLOSED_LOOP = """
fixed-blocks:2         25.00 73.50 0.196
random-quadrants:0.25  26.53 61.54 0.406
random-quadrants:0.5   51.00 72.40 0.189
quadrant-gap:0.8       30.82 75.98 0.149
quadrant-gap:0.5       52.66 87.00 0.041
variance:0.2           97.57 99.02 --
"""
# Mean gap, P95 gap and leaf ratio over the 396 settings.
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
# Mean gap, leaf ratio and milliseconds an instance.
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
COUNTS = {"coco": 36_149, "lvis": 20_000}


def table(words: str) -> dict[str, tuple[float | None, ...]]:
    rows = (line.split() for line in words.strip().splitlines())
    return {name: tuple(None if c == "--" else float(c) for c in cells) for name, *cells in rows}


def printed(points: Mapping[str, Any]) -> dict[str, tuple[float | None, ...]]:
    return {name: tuple(asdict(point).values()) for name, point in points.items()}


def test_the_probes_are_as_printed() -> None:
    both = table(IMAGE_EDGE)
    coco = {name: row[:3] for name, row in both.items()}
    lvis = {name: row[3:] for name, row in both.items()}
    assert {key: printed(points) for key, points in paper.PROBES.items()} == {
        ("coco", "image-edge"): coco,
        ("lvis", "image-edge"): lvis,
        ("coco", "mask-only"): table(MASK_ONLY),
    }
    assert paper.INSTANCES == COUNTS


def test_the_sweep_the_loop_and_imagenet_are_as_printed() -> None:
    assert printed(paper.SYNTHETIC) == table(SYNTHETIC)
    assert printed(paper.CLOSED_LOOP) == table(CLOSED_LOOP)
    assert printed(paper.IMAGENET) == table(IMAGENET)
    assert (paper.COCO_IMAGES, paper.IMAGENET_IMAGES) == (5_000, 50_000)


def test_the_ablations_are_as_printed() -> None:
    ours = {f"{name}:{value:g}": point for (name, value), point in paper.ABLATION.items()}
    assert printed(ours) == table(ABLATION)


def test_the_figures_are_as_printed() -> None:
    assert [tuple(asdict(block).values()) for block in paper.FIRST_FIGURE] == [
        (12.5, 97.6, 2.923),
        (10.5, 97.1, 2.854),
    ]
    assert (paper.CASE_AREAS, paper.CASE_MASS, paper.CASE_GAPS) == (
        (9.8, 12.5),
        97.0,
        (2.854, 3.091),
    )
    assert paper.OVERVIEW_EPSILON == 0.004
    assert (paper.OVERVIEW_LEAVES, paper.OVERVIEW_TOKENS) == (82, 256)


CHECKED = {
    *("PROBES", "INSTANCES", "SYNTHETIC", "CLOSED_LOOP", "IMAGENET", "ABLATION"),
    *("COCO_IMAGES", "IMAGENET_IMAGES", "FIRST_FIGURE", "CASE_AREAS", "CASE_MASS", "CASE_GAPS"),
    *("OVERVIEW_EPSILON", "OVERVIEW_LEAVES", "OVERVIEW_TOKENS"),
}


def has_number(value: Any) -> bool:
    if is_dataclass(value) and not isinstance(value, type):
        return has_number(list(asdict(value).values()))
    if isinstance(value, Mapping):
        return has_number([*value, *value.values()])
    if isinstance(value, list | tuple):
        return any(map(has_number, value))
    return isinstance(value, int | float)


def test_no_number_of_the_paper_goes_unchecked() -> None:
    found = {name for name, value in vars(paper).items() if name.isupper() and has_number(value)}
    assert found == CHECKED


class Cells(HTMLParser):
    """The tables of a page by caption: every row as its cells, and whether each is the paper's."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tables: dict[str, list[list[tuple[str, bool]]]] = {}
        self.caption, self.text, self.paper = "", "", False
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag in ("caption", "td", "th"):
            self.text = ""
            self.paper = "paper" in (dict(attributes).get("class") or "").split()
        if tag == "tr" and self.caption:
            self.tables[self.caption].append([])

    def handle_data(self, data: str) -> None:
        self.text += data

    def handle_endtag(self, tag: str) -> None:
        if tag == "caption":
            self.caption = self.text
            self.tables.setdefault(self.caption, [])
        if tag in ("td", "th") and self.caption:
            self.tables[self.caption][-1].append((self.text, self.paper))


def rows_of(experiment: str) -> Iterator[dict[str, Any]]:
    """A row of ours for every row of the paper's, with nothing in it but what names it."""
    if experiment == "synthetic":
        yield from ({"method": m, "placement": "corner"} for m in table(SYNTHETIC))
    elif experiment == "probe":
        for dataset, mode, methods in (
            ("coco", "image-edge", IMAGE_EDGE),
            ("lvis", "image-edge", IMAGE_EDGE),
            ("coco", "mask-only", MASK_ONLY),
        ):
            for method in table(methods):
                frame = {"dataset": dataset, "mode": mode, "group": "all", "instances": 1}
                yield {**frame, "method": method, "mean_gap": 1.0, "leaf_percent": 1.0}
    elif experiment == "closed-loop":
        for method in table(CLOSED_LOOP):
            yield {"method": method, "layers": "last-4", "images": 1, "leaf_percent": 1.0,
                   "agreement_percent": 1.0, "output_kl": 1.0}  # fmt: skip
    elif experiment == "evaluate":
        yield from ({"method": m, "images": 1, "top1_percent": 1.0} for m in table(IMAGENET))
    else:
        for name in table(ABLATION):
            parameter, _, value = name.partition(":")
            yield {"parameter": parameter, "value": float(value), "mean_gap": 1.0}


def papers_cells(rows: list[list[tuple[str, bool]]]) -> dict[str, tuple[float | None, ...]]:
    """Numbers in the paper's columns by method, or by parameter and value."""
    found = {}
    for (first, _), *cells in rows[1:]:
        if first == "Method":
            continue
        name = first if first in METHODS else f"{first}:{float(cells[0][0]):g}"
        numbers = [text for text, papers in cells if papers]
        found[name] = tuple(None if text == "–" else float(text) for text in numbers)
    return found


METHODS = {name for words in (IMAGE_EDGE, IMAGENET, CLOSED_LOOP) for name in table(words)}


@pytest.fixture(scope="module")
def tables() -> dict[str, list[list[tuple[str, bool]]]]:
    made = [
        Record(name, {"model": "embedded"}, list(rows_of(name)), {})
        for name in ("synthetic", "probe", "ablation", "closed-loop", "evaluate")
    ]
    return Cells(build_page(made)).tables


@pytest.mark.parametrize(
    ("caption", "expected"),
    [
        (r"Minority in the corner", table(SYNTHETIC)),
        (r"COCO, image-edge", {name: row[:3] for name, row in table(IMAGE_EDGE).items()}),
        (r"LVIS, image-edge", {name: row[3:] for name, row in table(IMAGE_EDGE).items()}),
        (r"COCO, mask-only", table(MASK_ONLY)),
        (r"Ablations", table(ABLATION)),
        (r"Embedded model.*COCO, last-4", table(CLOSED_LOOP)),
        (r"Embedded model.*ImageNet", table(IMAGENET)),
    ],
)
def test_the_page_shows_them_in_the_papers_columns(tables, caption, expected) -> None:
    (found,) = [rows for name, rows in tables.items() if re.match(caption, name)]
    assert papers_cells(found) == expected
