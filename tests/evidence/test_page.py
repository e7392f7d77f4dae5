"""The page and its figures: structure, honesty of the summary, escaping, and a real browser."""

import base64
import io
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from unittest.mock import patch
from xml.etree import ElementTree

import pytest

import model_records
from bmfa.evidence.page import figures, plots, style
from bmfa.evidence.page.build import CHAPTERS, all_claims, build_page
from bmfa.evidence.page.canvas import Figure
from bmfa.evidence.page.claims import Claim, Verdict, judge_numbers
from bmfa.evidence.page.drawing import spread_labels
from bmfa.evidence.page.formats import format_number
from bmfa.evidence.page.record_set import RecordSet
from bmfa.packages import load_package
from bmfa.records import Record

ENVIRONMENT = {"python": "3.11.9", "torch": "2.13.0", "device_name": "a processor"}
# Mean and P95 gap and leaf ratio of the recovered sweep, minority in the corner.
CORNER = {
    "block-mean": (2.58202, 5.11414, 0.390625),
    "mean-variance": (1.32019, 3.47580, 0.390625),
    "fixed-depth:1": (1.90110, 4.39950, 1.5625),
    "fixed-depth:2": (1.12874, 3.79060, 6.25),
    "gamma:0.005": (0.26061, 2.03472, 5.79427),
    "edge-aware": (0.0, 0.0, 100.0),
    "gamma-h2:0.005": (0.0153, 0.0, 6.4098),
    "mass:0.002": (0.8347, 4.0957, 4.2998),
    "optimal:0.001": (0.0, 0.0, 6.4927),
    "optimal-leaves-pooled:0.05794": (0.00866, 0.06, 5.78835),
}
# Mean and P95 gap, leaf ratio and share of unsplit roots of 343 COCO instances.
COCO = {
    "block-mean": (2.268, 2.542, 0.390625, None),
    "mean-variance": (0.783, 1.134, 0.390625, None),
    "fixed-depth:1": (2.222, 2.515, 1.5625, 0.0),
    "fixed-depth:2": (1.863, 2.210, 6.25, 0.0),
    "gamma:0.005": (0.606, 2.465, 28.4575, 26.5),
    "edge-aware": (0.0, 0.0, 100.0, None),
    "optimal:0.001": (0.0013, 0.0052, 35.967, 0.0),
}


def record(experiment: str, rows: list[dict], **settings: object) -> Record:
    return Record(experiment, settings, rows, ENVIRONMENT)


def synthetic() -> Record:
    rows = []
    for placement in ("corner", "shifted-1-1", "centred"):
        for method, (mean, tail, leaf) in CORNER.items():
            if placement == "centred" and method in ("gamma:0.005", "mass:0.002"):
                mean, tail, leaf = CORNER["block-mean"]
            if placement == "centred" and method == "fixed-depth:2":
                mean = 1.8533
            least = -2.23 if method == "mean-variance" else 0.0
            values = {"count": 396, "mean_gap": mean, "p95_gap": tail, "min_gap": least}
            rows.append({"method": method, "placement": placement, **values, "leaf_percent": leaf})
    return record("synthetic", rows, settings=396)


def failure_curve() -> Record:
    rows = [
        {
            "method": method,
            "cells": cells,
            "delta": delta / 2,
            "gap": share * max(0.0, delta / 2 - 2),
            "leaf_percent": 3.9 if method == "gamma:0.005" and delta > 8 and cells == 4 else 0.39,
        }
        for cells in (4, 1)
        for method, share in (("block-mean", 0.6), ("gamma:0.005", 0.2), ("optimal:0.001", 0.0))
        for delta in range(19)
    ]
    return record("failure-curve", rows)


def scene(method: str, boxes: list[list[int]], **values: object) -> dict:
    scores = [6.0 if index in (5, 6) else 0.0 for index in range(16)]
    row = {"method": method, "height": 4, "width": 4, "scores": scores, "boxes": boxes}
    shares = {"minority_area_percent": 12.5, "gibbs_mass_percent": 98.3}
    return {**row, **shares, "gap": 3.1, "leaf_percent": 25.0, **values}


QUARTERS = [[0, 0, 2, 2], [0, 2, 2, 4], [2, 0, 4, 2], [2, 2, 4, 4]]


def gallery() -> Record:
    rows = [
        scene(method, boxes, placement=placement, title=f"{placement}, {method}")
        for placement in ("corner", "centred")
        for method, boxes in (
            ("block-mean", [[0, 0, 4, 4]]),
            ("gamma:0.005", QUARTERS if placement == "corner" else [[0, 0, 4, 4]]),
            ("optimal:0.001", QUARTERS),
        )
    ]
    return record("gallery", rows)


def probe(dataset: str = "coco") -> Record:
    rows = []
    for method, (mean, tail, leaf, unsplit) in COCO.items():
        values = {"mean_gap": mean, "median_gap": mean / 2, "p95_gap": tail, "p99_gap": tail}
        values |= {"max_gap": tail, "leaf_percent": leaf, "unsplit_percent": unsplit}
        row = {"dataset": dataset, "mode": "image-edge", "method": method, **values}
        quantiles = [tail * place / 100 for place in range(101)]
        rows.append({**row, "group": "all", "instances": 343, "gap_quantiles": quantiles})
        rows.append({**row, "group": "small", "instances": 40})
    return record("probe", rows, dataset=dataset, mode="image-edge")


def ablation(dataset: str = "coco") -> Record:
    values = {
        "epsilon": [(0.05, 1.708, 8.3), (0.005, 0.606, 28.5), (0.001, 0.147, 51.5)],
        "depth": [(2, 1.935, 4.5), (4, 0.606, 28.5), (5, 0.606, 28.5)],
        "grid": [(8, 0.416, 55.2), (16, 0.606, 28.5), (32, 1.034, 10.8)],
        "lookahead": [(1, 0.606, 28.5), (2, 0.0001, 41.0)],
    }
    rows = [
        {"parameter": parameter, "value": value, "mean_gap": gap, "leaf_percent": leaf}
        | {"microseconds_per_instance": 21.0, "instances": 343}
        for parameter, points in values.items()
        for value, gap, leaf in points
    ]
    return record("ablation", rows, dataset=dataset)


def image() -> str:
    image = pytest.importorskip("PIL.Image").new("RGB", (8, 8), (200, 90, 30))
    buffer = io.BytesIO()
    image.save(buffer, "JPEG")
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def cases(uri: str | None = None) -> Record:
    uri = image() if uri is None else uri
    rows = [
        scene(method, QUARTERS, title=title, dataset="coco", image=uri, error=0.001)
        | {
            "category": title,
            "instances": 3,
            "unsplit_percent": 33.3,
            "gap_low": 2.4,
            "gap_high": 3.2,
        }
        for title in ("kite", "spoon")
        for method in ("gamma:0.004", "optimal:0.001")
    ]
    return record("cases", rows, dataset="coco")


def blocks() -> Record:
    rows = [
        scene("gamma:0.005", QUARTERS, title=title, image=image(), error=0.01)
        | {"scene": image(), "scene_box": [0.1, 0.1, 0.4, 0.5]}
        for title in ("Block 1", "Block 2")
    ]
    return record("blocks", rows)


def failures() -> Record:
    rows = [
        scene(method, boxes, rule=rule, role=role, title="tiles", error=error, leaves=len(boxes))
        for rule in ("gamma", "quadrant-gap")
        for role, method, boxes, error in (
            ("fails", f"{rule}:0.5", [[0, 0, 4, 4]], 3.1),
            ("better", "exact-gap:0.1", QUARTERS, 0.4),
            ("optimal", "optimal-leaves:4", QUARTERS, 0.4),
        )
    ]
    return record("failures", rows, searched=666, settings=203)


def faster() -> Record:
    mask = base64.b64encode(bytes(8)).decode()  # 8 x 8 pixels, all outside
    shared = {"images": 24, "n": 4096, "top1_percent": 80.0, "agreement_percent": 96.0}
    rows = [
        {"what": "setting", "method": method, "milliseconds": time, "speedup": 400 / time, **shared}
        | {"mask_iou": iou, "mask_iou_change": iou - 0.8, "full_mask_iou": 0.97}
        | {"mask_iou_change_low": iou - 0.805, "mask_iou_change_high": iou - 0.795}
        | {"error_percent": 2.5, "density_percent": 8.0, "output_kl": 0.01}
        for method, time, iou in (
            ("full", 400.0, 0.8), ("error:0.1", 200.0, 0.79), ("error:0.3", 100.0, 0.6)
        )
    ]  # fmt: skip
    rows += [
        {"what": "image", "method": method, "title": "embedded:0", "label": HOSTILE}
        | {"milliseconds": 400.0, "mask_iou": 0.8, "mask_side": 8, "mask": mask, "true_mask": mask}
        | {"image": image()}
        for method in ("full", "error:0.1", "error:0.3")
    ]
    return record("faster", rows, side=64)


def bench() -> Record:
    row = {"what": "trees", "n": 256, "dtype": "float32", "method": "gamma:0.005", "speedup": None}
    timed = [
        {"what": "attention", "n": n, "method": method, "batch": 1, "milliseconds": time * n,
         "speedup": 1 / time, "error_l2_percent": 8 * (1 - time), "dtype": "float32", "dim": 64}
        for n in (4096, 16384)
        for method, time in (("dense", 1.0), ("tiled-tiles:0", 0.2), ("tiled-error:0.1", 0.4))
    ]  # fmt: skip
    return record("bench", [{**row, "milliseconds": 4.5}, *timed])


def masks() -> Record:
    rows = [
        {"what": "model", "img_size": 14 * side, "n": side * side, "method": method, "speedup": speed,
         "mask_iou": iou, "milliseconds": 9 / speed, "tiled_layers": int(method != "full") * 12,
         "dtype": "bfloat16", "density_percent": None if method == "full" else 9.0}
        for side in (64, 128)
        for method, speed, iou in (("full", 1.0, 1.0), ("leaves:0.1", 1.5, 0.96), ("error:0.1", 2, 0.7))
    ]  # fmt: skip
    made = record("bench", rows, model="timm:vit_small_patch14_dinov2", images=["a.jpg"])
    return replace(made, environment={**ENVIRONMENT, "device": "cpu"})


@pytest.fixture(scope="module")
def records() -> list[Record]:
    return [
        *(synthetic(), failure_curve(), gallery(), probe(), probe("embedded"), ablation()),
        *(cases(), blocks(), failures(), faster(), bench(), masks()),
        *model_records.every(),
    ]


def words(page: str) -> str:
    """What a reader sees of the commands."""
    return page.replace("<span>", "").replace("</span>", "")


@pytest.fixture(scope="module")
def page(records: list[Record]) -> str:
    return build_page(records)


class Links(HTMLParser):
    """Everything a page names that a browser could load, and the ids it gives."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.ids: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if name in ("src", "href", "xlink:href", "srcset", "data", "action"):
                self.links.append(value or "")
            if name == "id":
                self.ids.append(value or "")


def find(records: list[Record], part: str) -> Claim:
    return next(claim for claim in all_claims(RecordSet(records)) if part in claim.claim)


def test_sections_are_in_order(page: str) -> None:
    marks_in_order = ["This page measures", 'id="summary"', 'id="methods"', 'id="synthetic"']
    marks_in_order += [
        'id="failure"',
        'id="probes"',
        'id="ablations"',
        'id="cases"',
        'id="failures"',
        'id="equal-leaves"',
        'id="equal-operations"',
    ]
    places = [page.index(mark) for mark in [*marks_in_order, 'id="bench"', 'id="environment"']]
    assert places == sorted(places)
    assert "not measured here" not in page.lower()


def test_every_figure_has_a_caption_and_a_command(page: str) -> None:
    assert page.count("<figure") == page.count("<figcaption") == len(figures.ALL)
    for block in re.findall(r"<figcaption>.*?</figcaption>", page, re.S):
        assert "Made by <code>bmfa " in block
    assert "bmfa synthetic --curve --json curve.json" in words(page)
    assert "bmfa probe --dataset embedded --mode image-edge --json probe.json" in words(page)


def test_chapters_without_records_show_their_command() -> None:
    page = build_page([])
    assert page.count("Not measured here. Run") == len(CHAPTERS)
    assert "bmfa ablation --json ablation.json" in words(page)
    assert "<svg" not in page
    assert {claim.verdict for claim in all_claims(RecordSet([]))} == {Verdict.NOT_MEASURED}


def test_any_single_record_makes_a_page(records: list[Record]) -> None:
    with patch.object(Figure, "__call__", return_value="<svg></svg>"):
        for one in records:
            assert "</html>" in build_page([one])


@pytest.mark.slow
def test_any_single_record_makes_a_page_with_figures(records: list[Record]) -> None:
    for one in records:
        assert "</html>" in build_page([one])


def test_unknown_experiment_gets_a_plain_table() -> None:
    rows = [{"method": "full", "top1_percent": 72.084, "note": None, "mixed": 0.25}]
    page = build_page([record("another", [*rows, {"method": "tome:8", "mixed": "none"}])])
    assert "<h2>Another</h2>" in page and "72.084" in page and "note" not in page
    assert ">0.25<" in page and ">none<" in page


def test_summary_reproduces_what_the_paper_prints(records: list[Record]) -> None:
    for part in ("396 settings", "Algorithm 1 repairs the loss", "Where to refine"):
        assert find(records, part).verdict is Verdict.REPRODUCED


STRICT = {Verdict.REPRODUCED, Verdict.NOT_AS_CLAIMED, Verdict.BEATEN}
SWEEP = (
    "396 settings",
    "Algorithm 1 repairs the loss",
    "Where to refine",
    "The smallest mean gap at no more",
)


def test_strict_verdicts_need_the_papers_data_and_model(records: list[Record]) -> None:
    worse = [
        replace(one, rows=[{**row, "mean_gap": 9.9, "agreement_percent": 1.0} for row in one.rows])
        for one in records
    ]
    for made in (records, worse, [*records, *own_model()], [*worse, *own_model()]):
        for claim in all_claims(RecordSet(made)):
            if claim.verdict in STRICT:
                assert any(part in claim.claim for part in SWEEP), claim.claim


def own_model() -> list[Record]:
    """The paper's model on a part of its images."""
    return [
        model_records.closed_loop(model_records.DEIT),
        model_records.layers(model_records.DEIT),
        model_records.evaluate(model_records.DEIT),
    ]


@pytest.mark.parametrize(
    "part",
    [
        "On COCO instances",
        "same order on other data",
        "P95 gap of Algorithm 1",
        "Threshold",
        "Depth 5",
        "finer grid",
    ],
)
def test_claims_on_other_data_agree_in_direction(records: list[Record], part: str) -> None:
    assert find(records, part).verdict is Verdict.AGREES
    assert find([*records, ablation("embedded")], part).verdict is Verdict.AGREES


def test_claims_that_fail_on_other_data_differ_here() -> None:
    backwards = record("probe", [dict(row) for row in probe().rows], dataset="coco")
    for row in backwards.rows:
        row["mean_gap"], row["p95_gap"] = -row["mean_gap"], -row["p95_gap"]
    for part in ("On COCO instances", "P95 gap of Algorithm 1"):
        assert find([backwards], part).verdict is Verdict.DIFFERS


def test_the_chapter_faster_shows_the_fastest_setting_that_keeps_the_masks() -> None:
    text = section([faster()], "faster")
    assert (
        "With patch(error=0.1), an image takes 200 ms instead of 400 ms, 2.0 times as fast" in text
    )
    assert "−0.010 (−0.015 to −0.005)" in text
    claim = find([faster()], "Leaf ratio is not yet a speed-up")
    assert claim.verdict is Verdict.AHEAD
    assert claim.ours == "2.00, mask IoU −0.010"
    worse = replace(faster(), rows=[r for r in faster().rows if r["method"] != "error:0.1"])
    assert find([worse], "Leaf ratio is not yet a speed-up").verdict is Verdict.AGREES


def test_a_mask_of_another_size_is_refused() -> None:
    rows = [{**row, "mask_side": 9} for row in faster().rows]
    with pytest.raises(ValueError, match=r"holds 8 bytes of true_mask for 9x9 pixels; pass base64"):
        figures.ALL["masks"](record("faster", rows))


def test_times_of_another_machine_are_not_comparable(records: list[Record]) -> None:
    assert find(records, "Screening one instance").verdict is Verdict.NOT_COMPARABLE


def test_instances_are_compared_with_the_papers_figures(page: str) -> None:
    chapter = page.partition('<section id="cases">')[2]
    chapter = " ".join(chapter.partition("</section>")[0].split())
    for printed in (
        "2.923",
        "2.854 to 3.091",
        "82 of 256",
        "9.8 to 12.5",
        "over 97",
        "97.6",
        "97.1",
    ):
        assert f">{printed}<" in chapter
    # Ours: two bright cells of 16 in a grid of 4 x 4, whose tree has four leaves.
    assert ">12.5<" in chapter and ">98.3<" in chapter and ">4 of 16<" in chapter
    assert "33 % of the 3 COCO spoons" in chapter.replace("\u00a0", " ")
    assert "The largest gap of a mean over all instances probed here is 2.542 (" in chapter
    assert "longer upper tail" in chapter


def section(records: list[Record], name: str) -> str:
    """The text of one chapter on the page; its figures are not drawn."""
    with (
        patch.object(Figure, "__call__", return_value=""),
        patch.object(plots.Figure, "__call__", return_value="<svg></svg>"),
    ):
        return model_records.page_text(build_page(records), name)


def test_sentences_depend_on_the_records() -> None:
    text = section([synthetic()], "synthetic")
    assert "mass:0.002 has 0.835 in the corner" in text
    assert (
        "is 0.261 with the minority in the corner and 2.582 with the minority in the centre" in text
    )
    assert "splits the root from Δ = 4.5 on" in section([failure_curve()], "failure")
    text = section([probe()], "probes")
    assert "26.5 % (COCO)" in text and "optimal:0.001 0.005 at 36.0 %." in text


def test_summary_shows_the_worst_placement(records: list[Record]) -> None:
    claim = find(records, "residual near zero")
    assert claim.verdict is Verdict.DIFFERS
    assert claim.ours == "2.582 (centred)" and "2.582" in claim.note
    assert "the other placements are this library's" in claim.note
    assert "1.853 against 2.582" in find(records, "Where to refine").note


def test_summary_shows_what_beats_the_paper(records: list[Record]) -> None:
    claim = find(records, "smallest mean gap at no more leaves")
    assert claim.verdict is Verdict.BEATEN and "reads every score" in claim.note
    assert claim.ours == "0.009 at 5.788 %" and claim.printed == "0.261 at 5.794 %"
    # With more leaves than Algorithm 1 nothing is beaten.
    without = synthetic()
    rows = [row for row in without.rows if "pooled" not in row["method"]]
    assert find([replace(without, rows=rows)], "smallest mean gap").verdict is Verdict.NOT_MEASURED
    claim = find(records, "smallest P95 gap")
    assert claim.ours == "0.005 at 35.967 %" and claim.verdict is Verdict.AHEAD


def test_a_different_number_is_not_reproduced() -> None:
    changed = synthetic()
    changed.rows[0]["mean_gap"] = 2.6
    assert find([changed], "396 settings").verdict is Verdict.NOT_AS_CLAIMED


@pytest.mark.parametrize(
    ("ours", "verdict"),
    [
        (0.526, Verdict.REPRODUCED),
        (0.5264, Verdict.REPRODUCED),
        (0.5267, Verdict.NOT_AS_CLAIMED),
        (1.2, Verdict.NOT_AS_CLAIMED),
    ],
)
def test_compare(ours: float, verdict: Verdict) -> None:
    assert judge_numbers((0.526, ours)) is verdict


def test_verdicts_have_a_word_and_a_symbol(page: str) -> None:
    badges = re.findall(r'<span class="verdict [a-z-]+"><span[^>]*>(.)</span> ([a-z ]+)<', page)
    assert len(badges) == len(re.findall('class="verdict ', page)) >= 15
    assert set(badges) <= {verdict.value for verdict in Verdict}


def test_probes_are_called_reconstructed_not_confirmed(page: str) -> None:
    assert "The protocol is reconstructed, not confirmed." in page


HOSTILE = "<script>alert('x')</script>"


def test_text_from_data_is_escaped() -> None:
    rows = [
        {**row, "method": HOSTILE, "placement": HOSTILE, "title": HOSTILE, "dataset": HOSTILE}
        for row in gallery().rows
    ]
    made = [record(name, rows, command=HOSTILE, note=HOSTILE) for name in ("gallery", HOSTILE)]
    curve = [{**row, "method": HOSTILE} for row in failure_curve().rows]
    probes = [{**row, "method": HOSTILE, "dataset": HOSTILE} for row in probe().rows]
    placed = [{**row, "method": HOSTILE, "placement": HOSTILE} for row in synthetic().rows]
    made += [record("cases", rows), record("failure-curve", curve), record("probe", probes)]
    made += [record("synthetic", placed), record("ablation", ablation().rows, dataset=HOSTILE)]
    made.append(Record("bench", {}, [{HOSTILE: 1.0, "method": HOSTILE}], {HOSTILE: HOSTILE}))
    page = build_page(made)
    assert "<script" not in page and "&lt;script&gt;" in page


def test_characters_that_xml_cannot_hold_are_replaced() -> None:
    rows = [{**row, "method": "a\x00b\ud800"} for row in failure_curve().rows]
    page = build_page([record("failure-curve", rows)])
    assert "a\ufffdb" in page and "\x00" not in page
    page.encode("utf-8")


@pytest.mark.parametrize(
    "uri",
    [
        "https://example.org/image.png",
        "data:image/svg+xml;base64,PHN2Zy8+",
        'data:image/png;base64,AAAA"onload="alert(1)',
        "data:image/png;base64,AAAA",
    ],
)
def test_invalid_image_uris_are_left_out(uri: str) -> None:
    text = figures.ALL["cases"](cases(uri))
    assert "no image" in text and uri not in text and "onload" not in text


def test_page_loads_nothing(page: str) -> None:
    links = Links(page).links
    assert links and all(link.startswith(("#", "data:")) for link in links)
    assert not re.search(r"url\((?!#)|@import|<script", page)
    assert "default-src 'none'" in page


def test_internal_links_resolve_and_ids_are_unique(page: str) -> None:
    found = Links(page)
    assert len(found.ids) == len(set(found.ids))
    assert {link[1:] for link in found.links if link.startswith("#")} <= set(found.ids)


def test_page_is_deterministic_and_small(records: list[Record], page: str) -> None:
    assert build_page(records) == page
    assert len(page.encode()) < 1_200_000


def test_colours_have_a_light_and_a_dark_value(page: str) -> None:
    sheet_text = style.css_variables()
    light, dark = sheet_text.split("@media")
    assert "prefers-color-scheme:dark" in dark and sheet_text in page
    used = set(re.findall(r"var\(--([a-z]+)", page)) - {"font", "mono"}
    for name in used:
        assert f"--{name}:" in light and f"--{name}:" in dark


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("name", figures.ALL)
def test_figure_is_small_well_formed_svg_with_text(
    name: str, narrow: bool, records: list[Record]
) -> None:
    text = figures.ALL[name](records, narrow=narrow)
    root = ElementTree.fromstring(text)
    margin = 0 if isinstance(figures.ALL[name], plots.Figure) else 32
    assert float(root.attrib["width"]) == (style.NARROW if narrow else style.WIDE) + margin
    assert root.find(".//{http://www.w3.org/2000/svg}text") is not None
    assert "var(--ink" in text and "DejaVu" not in text
    assert len(text) < 200_000


def test_figure_is_deterministic(records: list[Record]) -> None:
    assert figures.ALL["cases"](records) == figures.ALL["cases"](records)
    assert figures.ALL["gallery"].png(records) == figures.ALL["gallery"].png(records)


def test_figure_without_rows_names_the_command() -> None:
    assert figures.ALL["failure-curve"](synthetic()) == ""
    with pytest.raises(ValueError, match=r"do not hold the figure failure-curve.*--curve"):
        figures.ALL["failure-curve"].png(synthetic())


def test_figure_rejects_invalid_scores_and_leaves() -> None:
    with pytest.raises(ValueError, match="15 values of scores for a grid of 4x4"):
        figures.ALL["gallery"](record("gallery", [scene("gamma:1", QUARTERS, scores=[0.0] * 15)]))
    with pytest.raises(ValueError, match=r"leaf \[0, 0, 5, 4\] on a grid of 4x4"):
        figures.ALL["gallery"](record("gallery", [scene("gamma:1", [[0, 0, 5, 4]])]))


def test_critical_point_is_marked(records: list[Record]) -> None:
    text = figures.ALL["failure-curve"](records)
    assert "log 63 ≈ 4.143" in text and "log 255 ≈ 5.541" in text


def test_save_png(records: list[Record], tmp_path: Path) -> None:
    target = tmp_path / "made" / "curve.png"
    figures.save_png("failure-curve", records, target, scale=1.0)
    assert target.read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in target.parent.iterdir()] == ["curve.png"]
    with pytest.raises(ValueError, match=r"no figure is named 'curve'; pass one of gallery"):
        figures.save_png("curve", records, target)


def test_methods_have_distinct_marks() -> None:
    default = [*CORNER, "exact-gap:0.005", "certified:0.005"]
    looks = [style.method_mark(method) for method in default]
    assert len({(look.marker, look.hollow) for look in looks}) == len(looks)
    assert style.method_mark("gamma:0.05") == style.method_mark("gamma:0.005")
    assert style.method_mark("tome:8") == style.method_mark("tome:12")


def test_a_later_row_replaces_an_earlier_one() -> None:
    changed = [{**row, "mean_gap": 9.0} for row in synthetic().rows]
    evidence = RecordSet([synthetic(), record("synthetic", changed)])
    assert len(evidence.rows("synthetic")) == len(changed)
    assert evidence.value("synthetic", "mean_gap", method="gamma:0.005", placement="corner") == 9.0


def test_spread_labels() -> None:
    places = spread_labels([0.0, 1.0, 2.0, 50.0, 99.0, 99.5], 10.0, 0.0, 100.0)
    assert places == sorted(places) and places[0] >= 0 and places[-1] <= 100
    assert min(b - a for a, b in pairwise(places)) >= 10 - 1e-9
    assert places[3] == 50


@pytest.mark.parametrize(
    ("value", "decimals", "shown"),
    [
        (1.5625, 3, "1.563"),
        (-1e-12, 3, "0.000"),
        (-2.23, 2, "−2.23"),
        (36149, 0, "36,149"),
        (None, 3, "–"),
        ("text", 3, "text"),
        (float("inf"), 3, "inf"),
        (2e30, 3, "2e+30"),
    ],
)
def test_format_number(value: object, decimals: int, shown: str) -> None:
    assert format_number(value, decimals) == shown


def test_missing_matplotlib_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'bmfa\[report\]'"):
        load_package("matplotlib")


def test_import_does_not_load_matplotlib() -> None:
    code = "import sys, bmfa.evidence.page.build; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)
browser = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")


def open_in_chromium(text: str, folder: Path, dark: bool = False) -> tuple[list[str], Path]:
    """The lines a page writes to the console, and its screenshot."""
    source, shot = folder / "page.html", folder / "shot.png"
    source.write_text(text, encoding="utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync"]
    options += ["--disable-background-networking", "--disable-component-update"]
    options += [f"--user-data-dir={folder / 'profile'}", "--enable-logging=stderr", "--v=0"]
    options += [f"--screenshot={shot}", "--window-size=1280,2000"]
    options += ["--blink-settings=preferredColorScheme=0"] if dark else []
    command = [str(CHROMIUM), *options, source.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return [line for line in done.stderr.splitlines() if "CONSOLE" in line], shot


@browser
@pytest.mark.parametrize("dark", [False, True])
def test_chromium_shows_the_page_without_console_errors(
    page: str, tmp_path: Path, dark: bool
) -> None:
    console, shot = open_in_chromium(page, tmp_path, dark)
    assert console == []
    image = pytest.importorskip("PIL.Image").open(shot).convert("RGB")
    surface = style.SURFACE.dark if dark else style.SURFACE.light
    assert image.getpixel((5, 5)) == tuple(bytes.fromhex(surface[1:]))
    assert len(image.getcolors(1 << 24)) > 100


@browser
def test_chromium_blocks_external_requests(page: str, tmp_path: Path) -> None:
    image = '<img src="https://nowhere.invalid/image.png">'
    console, _ = open_in_chromium(page.replace("<main>", f"<main>{image}"), tmp_path)
    assert any("Content Security Policy" in line for line in console)
