"""The page and its figures: numbers and verdicts, structure, escaping, and a real browser."""

import base64
import re
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest

import chromium
import model_records
from bmfa.evidence import recorded
from bmfa.evidence.page import figures, plots
from bmfa.evidence.page.build import CHAPTERS, all_claims, build_page
from bmfa.evidence.page.claims import MEASURES, TEXTS, Claim, Verdict, judge, judge_numbers
from bmfa.evidence.page.formats import format_number, format_small
from bmfa.evidence.page.record_set import RecordSet
from bmfa.packages import load_package
from bmfa.records import Record, Row
from model_records import DEIT, ENVIRONMENT, image, page_text, page_without_figures

# Recorded runs that the tests read.
SHIPPED = (
    *("synthetic", "gallery", "probe-coco-image-edge", "probe-coco-mask-only"),
    *("probe-lvis-image-edge", "probe-embedded", "trees-cpu", "attention-cpu"),
    *("model-saliency-h200", "model-cpu", "model-saliency-cpu"),
)
POOLED = "optimal-leaves-pooled:0.05794"
RINGS = f">{plots.PAPER_TITLE}<"
HOSTILE = "<script>alert('x')</script>"
QUARTERS = [[0, 0, 2, 2], [0, 2, 2, 4], [2, 0, 4, 2], [2, 2, 4, 4]]


# Records


def record(experiment: str, rows: list[Row], **settings: object) -> Record:
    return Record(experiment, settings, rows, ENVIRONMENT)


def shipped(name: str) -> Record:
    found = Record.from_json((recorded.folder() / f"{name}.json").read_text("utf-8"))
    if name != "synthetic":
        return found
    row = {"placement": "corner", "method": POOLED, "mean_gap": 0.00866, "leaf_percent": 5.78835}
    return replace(found, rows=[*found.rows, row])


def changed(made: Record, **values: object) -> Record:
    """A copy of a record with changed values in all rows; a function is given the row."""
    rows = [
        row | {key: value(row) if callable(value) else value for key, value in values.items()}
        for row in made.rows
    ]
    return replace(made, rows=rows)


def failure_curve() -> Record:
    rows = [
        {"method": method, "cells": cells, "delta": delta / 2}
        | {"gap": share * max(0.0, delta / 2 - 2)}
        | {"leaf_percent": 3.9 if (method, cells) == ("gamma:0.005", 4) and delta > 8 else 0.39}
        for cells in (4, 1)
        for method, share in (("block-mean", 0.6), ("gamma:0.005", 0.2), ("optimal:0.001", 0.0))
        for delta in range(19)
    ]
    return record("failure-curve", rows)


def ablation() -> Record:
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
    return record("ablation", rows, dataset="coco")


def scene(method: str, boxes: list[list[int]], **values: object) -> Row:
    scores = [6.0 if index in (5, 6) else 0.0 for index in range(16)]
    row = {"method": method, "height": 4, "width": 4, "scores": scores, "boxes": boxes}
    shares = {"minority_area_percent": 12.5, "gibbs_mass_percent": 98.3}
    return {**row, **shares, "gap": 3.1, "leaf_percent": 25.0, **values}


def cases(uri: str | None = None) -> Record:
    gaps = {"error": 0.001, "gap_low": 2.4, "gap_high": 3.2}
    shared = {"dataset": "coco", "instances": 3, "unsplit_percent": 33.3, **gaps}
    rows = [
        scene(method, QUARTERS, title=title, category=title, image=uri or image(), **shared)
        for title in ("kite", "spoon")
        for method in ("gamma:0.004", "optimal:0.001")
    ]
    return record("cases", rows, dataset="coco")


def blocks() -> Record:
    place = {"image": image(), "scene": image(), "scene_box": [0.1, 0.1, 0.4, 0.5]}
    titles = ("Block 1", "Block 2")
    rows = [scene("gamma:0.005", QUARTERS, title=t, error=0.01, **place) for t in titles]
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
    shared |= {"error_percent": 2.5, "density_percent": 8.0, "output_kl": 0.01}
    settings = {"full": (400.0, 0.8), "error:0.1": (200.0, 0.79), "error:0.3": (100.0, 0.6)}
    rows: list[Row] = [
        {"what": "setting", "method": method, "milliseconds": time, "speedup": 400 / time, **shared}
        | {"mask_iou": iou, "mask_iou_change": iou - 0.8, "full_mask_iou": 0.97}
        | {"mask_iou_change_low": iou - 0.805, "mask_iou_change_high": iou - 0.795}
        for method, (time, iou) in settings.items()
    ]
    rows += [
        {"what": "image", "method": method, "title": "embedded:0", "label": HOSTILE}
        | {"milliseconds": 400.0, "mask_iou": 0.8, "mask_side": 8, "mask": mask, "true_mask": mask}
        | {"image": image()}
        for method in settings
    ]
    return record("faster", rows, side=64)


@pytest.fixture(scope="module")
def records() -> list[Record]:
    made = [failure_curve(), ablation(), cases(), blocks(), failures(), faster()]
    return [*map(shipped, SHIPPED), *made, *model_records.every()]


@pytest.fixture(scope="module")
def page(records: list[Record]) -> str:
    return build_page(records)


def find(records: list[Record], name: str) -> Claim:
    return judge(name, RecordSet(records))


def section(records: list[Record], name: str) -> str:
    return page_text(page_without_figures(records), name)


# Claims


def test_claims_have_the_numbers_and_the_verdicts_of_the_records(records: list[Record]) -> None:
    expected = {
        "end-to-end": (Verdict.AHEAD, "2.00, mask IoU −0.010"),
        "mean-loses-minority": (Verdict.REPRODUCED, "2.582, 5.114"),
        "algorithm-1-repairs": (Verdict.REPRODUCED, "0.261, 2.035 at 5.794 %"),
        "worst-placement": (Verdict.DIFFERS, "2.582 (centred)"),
        "fixed-depth": (Verdict.REPRODUCED, "1.129 at 6.250 %"),
        "optimal-tree": (Verdict.BEATEN, "0.009 at 5.788 %"),
        "coco-mean-gap": (Verdict.AGREES, "2.268 to 0.606 at 28.458 %"),
        "lvis-mean-gap": (Verdict.AGREES, "2.258 to 0.521 at 29.825 %"),
        "same-order": (Verdict.AGREES, "the same order"),
        "p95-gap": (Verdict.AGREES, "2.465 against 1.134"),
        "without-edges": (Verdict.DIFFERS, "0.651, 1.833 against 0.585, 0.845"),
        "smallest-p95-gap": (Verdict.AHEAD, "0.005 at 35.967 %"),
        "threshold": (Verdict.AGREES, "1.708 to 0.147, 8.30 to 51.50 %"),
        "depth": (Verdict.AGREES, "0.606, 0.606"),
        "grid": (Verdict.AGREES, "0.416, 0.606, 1.034"),
        "run-time": (Verdict.NOT_COMPARABLE, "21 µs"),
        "four-instances": (Verdict.AGREES, "12.5 to 12.5, 98.3 to 98.3, 3.100 to 3.100"),
        "optimal-ahead": (Verdict.AHEAD, "12.0 at 6.25 %, 12.0 at 25.00 %"),
        "more-than-random": (Verdict.AGREES, "88.00 % at 35.40 % against 76.40 % at 26.50 %"),
        "more-than-fixed": (Verdict.AGREES, "88.00 % at 35.40 % against 86.00 % at 25.00 %"),
        "same-as-algorithm-1": (Verdict.DIFFERS, "0.60 %"),
        "variance-keeps-all": (Verdict.AGREES, "99.50 % at 95.90 % (variance:0.2)"),
        "smallest-kl": (Verdict.AHEAD, "0.005 at 31.58 % (optimal:0.002)"),
        "lead-persists": (Verdict.AGREES, "last-2, last-4, all"),
        "accuracy": (Verdict.AGREES, "2.40; random 4.72, fixed 2.80"),
        "no-speed-up": (Verdict.AGREES, "0.87 times (variance:0.8)"),
        "merging": (Verdict.AGREES, "0.20 points, 1.05 times"),
        "best-merging": (Verdict.AHEAD, "96.00 %, 0.020 (free-energy:8)"),
    }
    assert TEXTS.keys() == MEASURES.keys() == expected.keys() | {"merging-ahead"}
    for name, (verdict, ours) in expected.items():
        claim = find(records, name)
        assert (claim.verdict, claim.ours) == (verdict, ours), name
    assert {claim.verdict for claim in all_claims(RecordSet([]))} == {Verdict.NOT_MEASURED}


def test_verdicts_change_with_the_records() -> None:
    coco, embedded = shipped("probe-coco-image-edge"), shipped("probe-embedded")
    masks, synthetic = shipped("probe-coco-mask-only"), shipped("synthetic")
    loop, evaluate, made = model_records.closed_loop(), model_records.evaluate(), ablation()

    def minus(column: str) -> Any:
        return lambda row: -row[column]

    def starts(name: str, base: float = 0.0, sign: float = 1.0) -> Any:
        return lambda row: base + sign * row["method"].startswith(name)

    worse = changed(evaluate, output_kl=starts("free"), agreement_percent=starts("free", 90.0, -1))
    for name, one, verdict in (
        ("end-to-end", changed(faster(), speedup=0.9), Verdict.AGREES),
        ("mean-loses-minority", changed(synthetic, mean_gap=2.6), Verdict.NOT_AS_CLAIMED),
        ("algorithm-1-repairs", changed(synthetic, leaf_percent=6.0), Verdict.NOT_AS_CLAIMED),
        ("worst-placement", changed(synthetic, mean_gap=0.1), Verdict.AGREES),
        ("optimal-tree", changed(synthetic, mean_gap=0.3), Verdict.NOT_AS_CLAIMED),
        ("optimal-tree", changed(synthetic, leaf_percent=6.0), Verdict.NOT_MEASURED),
        ("coco-mean-gap", changed(coco, mean_gap=minus("mean_gap")), Verdict.DIFFERS),
        ("same-order", changed(embedded, mean_gap=minus("mean_gap")), Verdict.DIFFERS),
        ("p95-gap", changed(coco, p95_gap=minus("p95_gap")), Verdict.DIFFERS),
        ("smallest-p95-gap", changed(coco, p95_gap=1.0), Verdict.DIFFERS),
        ("without-edges", changed(masks, mean_gap=minus("mean_gap")), Verdict.AGREES),
        ("threshold", changed(made, leaf_percent=5.0), Verdict.DIFFERS),
        ("depth", changed(made, mean_gap=lambda row: row["value"]), Verdict.DIFFERS),
        ("grid", changed(made, mean_gap=minus("value")), Verdict.DIFFERS),
        ("four-instances", changed(cases(), gap=1.9), Verdict.DIFFERS),
        ("four-instances", changed(cases(), minority_area_percent=20.1), Verdict.DIFFERS),
        ("more-than-random", changed(loop, agreement_percent=5.0), Verdict.DIFFERS),
        ("more-than-fixed", changed(loop, agreement_percent=5.0), Verdict.DIFFERS),
        ("same-as-algorithm-1", changed(loop, leaf_percent=27.0), Verdict.AGREES),
        ("same-as-algorithm-1", changed(loop, leaf_percent=36.0), Verdict.DIFFERS),
        ("variance-keeps-all", changed(loop, leaf_percent=20.0), Verdict.DIFFERS),
        ("smallest-kl", changed(loop, output_kl=starts("optimal")), Verdict.DIFFERS),
        ("lead-persists", model_records.layers(lead=-1.0), Verdict.DIFFERS),
        ("accuracy", changed(evaluate, drop_pp=1.0), Verdict.LEVEL),
        ("accuracy", changed(evaluate, drop_pp=minus("drop_pp")), Verdict.DIFFERS),
        ("no-speed-up", changed(evaluate, speedup=1.2), Verdict.AHEAD),
        ("merging", changed(evaluate, speedup=0.7), Verdict.DIFFERS),
        ("merging", changed(evaluate, drop_pp=1.1), Verdict.DIFFERS),
        ("best-merging", changed(evaluate, output_kl=1e-8), Verdict.LEVEL),
        ("best-merging", changed(evaluate, output_kl=0.1), Verdict.LEVEL),
        ("best-merging", worse, Verdict.DIFFERS),
    ):
        assert find([one], name).verdict is verdict, (name, verdict)


def test_strict_verdicts_need_the_papers_data_and_model(records: list[Record]) -> None:
    strict = {Verdict.REPRODUCED, Verdict.NOT_AS_CLAIMED, Verdict.BEATEN}
    deit = [model_records.closed_loop(DEIT), model_records.layers(DEIT)]
    own = [*deit, model_records.evaluate(DEIT)]
    worse = [changed(one, mean_gap=9.9, agreement_percent=1.0) for one in [*records, *own]]
    for made in (records, [*records, *own], worse):
        for claim in all_claims(RecordSet(made)):
            if claim.verdict in strict:
                assert claim.data == "synthetic, 396 settings", claim.claim
    whole = changed(model_records.evaluate(DEIT), images=50_000)
    assert find([whole], "accuracy").verdict is Verdict.REPRODUCED
    whole = changed(whole, drop_pp=lambda row: -row["drop_pp"])
    assert find([whole], "accuracy").verdict is Verdict.NOT_AS_CLAIMED
    for ours, verdict in ((0.5264, Verdict.REPRODUCED), (0.5267, Verdict.NOT_AS_CLAIMED)):
        assert judge_numbers({"gap": ours}, SimpleNamespace(gap=0.526)) is verdict


def test_a_claim_names_the_data_it_rests_on(records: list[Record]) -> None:
    assert find(records, "coco-mean-gap").data == "own, 343 instances"
    assert find(records, "lead-persists").data == "embedded, 40 images"
    assert find(records, "more-than-random").note.startswith("Embedded model, 100 images")
    fewer = changed(model_records.closed_loop(DEIT), images=9)
    fewer = replace(fewer, settings={**fewer.settings, "limit": 9})
    claim = find([*records, model_records.closed_loop(DEIT), fewer], "more-than-random")
    assert claim.data == "own, 100 images" and claim.note.startswith("DeiT-Tiny, 100 images")
    assert "our fit to the leaf ratios, because the paper does not define the rule" in claim.note


# Chapters


def test_the_page_has_every_chapter_and_figure(page: str, records: list[Record]) -> None:
    places = [page.index(f'id="{name}"') for name in ("summary", *CHAPTERS, "environment")]
    assert places == sorted(places) and "not measured here" not in page.lower()
    shown = set(re.findall(r'<figure id="figure-([a-z0-9-]+)">', page))
    assert figures.ALL.keys() - shown <= {
        "faster-models",
        "tuning",
    }  # that of a plan is of a command
    assert shown <= figures.ALL.keys()
    for caption in re.findall(r"<figcaption>.*?</figcaption>", page, re.S):
        assert "Made by <code>bmfa " in caption
    assert "is our inference" in page and "The protocol is reconstructed, not confirmed." in page


def test_chapters_without_records_show_their_command() -> None:
    page = build_page([])
    assert page.count("Not measured here. Run") == len(CHAPTERS) and "<svg" not in page
    assert "bmfa ablation <span>--json</span> ablation.json" in page
    page = build_page([ablation()], only_measured=True)
    assert re.findall('<section id="([a-z-]+)"', page) == ["summary", "ablations", "environment"]
    assert "ot measured" not in page and 'id="summary"' not in build_page([], only_measured=True)
    assert "--layers last-2" in section([model_records.closed_loop()], "layers")
    assert "--method tome:8" in section([model_records.evaluate(merged=False)], "reductions")


def test_any_single_record_makes_a_page(records: list[Record]) -> None:
    for one in records:
        assert "</html>" in page_without_figures([one])


def test_unknown_experiment_gets_a_plain_table() -> None:
    rows = [{"method": "full", "top1_percent": 72.084, "note": None, "mixed": 0.25, "scores": [1]}]
    page = build_page([record("another", [*rows, {"method": "tome:8", "mixed": "none"}])])
    assert "<h2>Another</h2>" in page and "72.084" in page and ">note<" not in page
    assert ">0.25<" in page and ">none<" in page and ">scores<" not in page


def test_sentences_have_the_numbers_of_the_records() -> None:
    evaluate = model_records.evaluate()
    evaluate = replace(evaluate, settings=evaluate.settings | {"repeats": 3, "dtype": "float32"})
    images = model_records.images()
    kept = replace(images, rows=[r for r in images.rows if r["screened_class"] == "ring"])
    timed = "a processor, torch 2.13.0, float32, batches of –, median of 3"
    for name, made, text in (
        ("faster", faster(), "With patch(error=0.1), an image takes 200 ms instead of 400 ms, 2.0"),
        ("faster", faster(), "−0.010 (−0.015 to −0.005)"),
        ("synthetic", shipped("synthetic"), "mass:0.002 has 0.835 in the corner"),
        ("failure", failure_curve(), "splits the root from Δ = 4.5 on"),
        ("probes", shipped("probe-coco-image-edge"), "26.5 % (COCO)"),
        ("probes", shipped("probe-coco-image-edge"), "optimal:0.001 0.005 at 36.0 %"),
        ("ablations", ablation(), "mean gap is 0.000 instead of 0.606"),
        ("cases", cases(), "33 % of the 3 COCO spoons: their contours"),
        ("closed-loop", model_records.closed_loop(DEIT), "0.6 % leaves (DeiT-Tiny)"),
        ("closed-loop", model_records.closed_loop(), "99.5 % at 95.9 % leaves"),
        ("layers", model_records.single(), "most in layer 4 (Embedded model"),
        ("images", images, "gamma:0.05 changes ring to eight"),
        ("images", kept, "No rule shown here changes the predicted class"),
        ("classification", evaluate, "2.40 with quadrant-gap:0.8 (35.4 % leaves)"),
        ("classification", evaluate, timed),
        ("reductions", evaluate, "with tome:8 94.2 % (0.026)"),
        ("reductions", changed(evaluate, output_kl=0.0), "Of its 4 reductions 4 leave"),
        ("equal-leaves", model_records.comparison(), "12.0 points (95 % interval 9.0 to 15.0)"),
    ):
        assert text in section([made], name), (name, text)
    # p + 4 (1 - p) / 196 is what the paper prints of random retention, to its decimals.
    for share, printed in ((0.25, 26.53), (0.5, 51.02)):
        assert 100 * (share + 4 * (1 - share) / 196) == pytest.approx(printed, abs=0.005)


def test_instances_are_compared_with_the_papers_figures(page: str) -> None:
    chapter = page.partition('<section id="cases">')[2].partition("</section>")[0]
    papers = ("2.923", "2.854 to 3.091", "82 of 256", "9.8 to 12.5", "over 97", "97.6", "97.1")
    # Ours: two bright cells of 16 in a grid of 4 x 4, whose tree has four leaves.
    for number in (*papers, "12.5", "98.3", "4 of 16"):
        assert f">{number}<" in chapter
    text = page_text(page, "cases")
    assert "The largest gap of a mean over all instances probed here is 2.787 (" in text
    assert "longer upper tail" in text


# Text


def test_text_from_data_is_escaped(records: list[Record]) -> None:
    names = ("method", "placement", "title", "dataset", "label", "full_class")
    for one in records:
        if one.experiment not in ("evaluate", "closed-loop", "comparison", "failures", "bench"):
            rows = [row | {name: HOSTILE for name in names if name in row} for row in one.rows]
            page = build_page([replace(one, rows=rows), Record(HOSTILE, {HOSTILE: 1}, rows)])
            assert "<script" not in page and "&lt;script&gt;" in page
    rows = [{**row, "method": "a\x00b\ud800"} for row in failure_curve().rows]
    page = build_page([record("failure-curve", rows)])
    assert "a\ufffdb" in page and "\x00" not in page
    page.encode("utf-8")


def test_invalid_image_uris_are_left_out() -> None:
    for uri in (
        "https://example.org/image.png",
        "data:image/svg+xml;base64,PHN2Zy8+",
        'data:image/png;base64,AAAA"onload="alert(1)',
        "data:image/png;base64,AAAA",
    ):
        text = figures.ALL["cases"](cases(uri))
        assert "no image" in text and uri not in text and "onload" not in text


def test_numbers_as_text() -> None:
    for value, decimals, shown in (
        *((1.5625, 3, "1.563"), (-1e-12, 3, "0.000"), (-2.23, 2, "−2.23"), (36149, 0, "36,149")),
        *((None, 3, "–"), ("text", 3, "text"), (float("inf"), 3, "inf"), (2e30, 3, "2e+30")),
    ):
        assert format_number(value, decimals) == shown
    for small, shown in (
        *((None, "–"), (0.149, "0.149"), (2.26089, "2.261"), (4.1e-7, "4\u00a0×\u00a010⁻⁷")),
        *((0.0004, "4\u00a0×\u00a010⁻⁴"), (0.0, "0.000"), (-3e-17, "0.000")),
    ):
        assert format_small(small) == shown


def test_page_loads_nothing_and_its_links_resolve(page: str) -> None:
    links = re.findall(r'\b(?:src|href|srcset|data|action)="([^"]*)"', page)
    ids = re.findall(r'\bid="([^"]*)"', page)
    assert links and all(link.startswith(("#", "data:")) for link in links)
    assert not re.search(r"url\((?!#)|@import|<script", page) and "default-src 'none'" in page
    assert len(ids) == len(set(ids))
    assert {link[1:] for link in links if link.startswith("#")} <= set(ids)


def test_colours_have_a_light_and_a_dark_value(page: str) -> None:
    light, dark = plots.STYLE_SHEET.split("@media")
    assert "prefers-color-scheme: dark" in dark and dark.strip() in page
    for name in set(re.findall(r"var\(--([a-z]+)", page)) - {"font", "mono"}:
        assert f"--{name}:" in light and f"--{name}:" in dark


# Figures


def test_figures_are_small_well_formed_svg_with_text(records: list[Record], page: str) -> None:
    assert len(page.encode()) < 3_000_000
    shown = re.findall(r'<div class="(wide|narrow)">(<svg.*?</svg>)', page, re.S)
    assert len(shown) >= 40
    for kind, text in shown:
        root = ElementTree.fromstring(text)
        assert float(root.attrib["width"]) == (plots.NARROW if kind == "narrow" else plots.WIDE)
        assert root.find(".//{http://www.w3.org/2000/svg}text") is not None
        assert "var(--ink" in text and "DejaVu" not in text and "<style" not in text
        assert len(text) < 350_000, root.attrib["aria-label"]
    for name in ("motivation", "layers"):  # drawn twice, the same
        again = figures.ALL[name](records).replace(" %", "\u00a0%").strip()
        assert ("wide", again) in shown


def test_a_figure_without_its_data_is_left_out_or_names_the_command() -> None:
    one = [model_records.closed_loop(), model_records.evaluate(merged=False)]
    for name in ("closed-loop", "top1"):
        assert figures.ALL[name].drawable(one)
    for name in ("layers", "reductions", "equal-leaves", "failure-curve", "distribution"):
        assert not figures.ALL[name].drawable(one) and figures.ALL[name](one) == ""
    with pytest.raises(ValueError, match=r"do not hold the figure failure-curve.*--curve"):
        figures.ALL["failure-curve"].png(one)
    made = figures.ALL["failure-curve"].png(failure_curve(), scale=1.0)
    assert made.startswith(b"\x89PNG")


def test_every_figure_with_rings_says_that_they_are_the_papers(monkeypatch) -> None:
    made = [shipped("synthetic"), ablation(), model_records.closed_loop(DEIT)]
    shown = [*recorded.load()[0].values(), *made]
    drawn, draw = [], plots.draw_point

    def draw_point(axes, method, *point) -> None:
        drawn.append(method)
        draw(axes, method, *point)

    monkeypatch.setattr(plots, "draw_point", draw_point)
    with_rings = []
    for name, figure in figures.ALL.items():
        drawn.clear()
        text = figure(shown)
        assert (RINGS in text) == ("paper" in drawn), name
        with_rings += [name] if drawn else []
    assert sorted(with_rings) == ["ablation", "closed-loop", "pipeline", "trade-off"]


def test_figures_show_the_papers_points_and_the_critical_point(records: list[Record]) -> None:
    for name in ("closed-loop", "top1"):
        text = figures.ALL[name](records)
        assert "Paper: DeiT-Tiny" in text and "Embedded model, " in text
        assert RINGS not in text  # the rings of ImageNet, on the paper's own model alone
    assert RINGS in figures.ALL["closed-loop"](model_records.closed_loop(DEIT))
    text = figures.ALL["failure-curve"](records)
    assert "log 63 ≈ 4.143" in text and "log 255 ≈ 5.541" in text


def test_figures_refuse_values_of_another_size() -> None:
    masks = record("faster", [{**row, "mask_side": 9} for row in faster().rows])
    scores = record("gallery", [scene("gamma:1", QUARTERS, scores=[0.0] * 15)])
    for name, made, message in (
        ("masks", masks, r"holds 8 bytes of true_mask for 9x9 pixels; pass base64"),
        ("gallery", scores, "15 values of scores for a grid of 4x4"),
        (
            "attention-cases",
            changed(model_records.images(), attention=[0.5, 0.5]),
            "2 values of attention for a grid of 4x4",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            figures.ALL[name](made)


def test_methods_have_distinct_marks() -> None:
    default = dict.fromkeys(row["method"] for row in shipped("synthetic").rows)
    looks = [plots.method_mark(method) for method in default]
    assert len({(look.marker, look.hollow) for look in looks}) == len(looks)
    assert plots.method_mark("gamma:0.05") == plots.method_mark("gamma:0.005")
    assert plots.method_mark("tome:8") == plots.method_mark("tome:12")


def test_labels_keep_their_distance_and_axes_have_few_round_ticks() -> None:
    places = plots.spread_labels([0.0, 1.0, 2.0, 50.0, 99.0, 99.5], 10.0, 0.0, 100.0)
    assert places == sorted(places) and places[0] >= 0 and places[-1] <= 100
    assert min(b - a for a, b in pairwise(places)) >= 10 - 1e-9
    assert places[3] == 50
    axes = load_package("matplotlib.figure").Figure().subplots()
    for low in (0.02, 3.0, 45.0, 980.0):
        for span in (1.3, 2.0, 12.0, 900.0):
            plots.set_log_range(axes, "x", [low, low * span], 1.2)
            ticks = axes.get_xticks()
            assert 2 <= len(ticks) <= 7
            assert low / 1.2 - 1e-9 <= min(ticks) < max(ticks) <= 1.2 * low * span + 1e-9


def test_a_record_replaces_an_earlier_one_of_the_same_run() -> None:
    synthetic = shipped("synthetic")
    evidence = RecordSet([synthetic, changed(synthetic, mean_gap=9.0)])
    assert len(evidence.rows("synthetic")) == len(synthetic.rows)
    assert evidence.value("synthetic", "mean_gap", method="gamma:0.005", placement="corner") == 9.0


def test_the_absence_of_matplotlib_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install '\.\[report\]'"):
        load_package("matplotlib")


# A browser


@pytest.mark.skipif(chromium.find_chromium() is None, reason="no Chromium is installed")
def test_chromium_shows_the_page_without_a_message_and_requests_nothing(
    page: str, tmp_path: Path
) -> None:
    source, shot = tmp_path / "page.html", tmp_path / "shot.png"
    source.write_text(page, encoding="utf-8")
    for dark, surface in ((False, "#fefefe"), (True, "#14171b")):
        assert chromium.screenshot(source, shot, dark=dark) == []
        shown = pytest.importorskip("PIL.Image").open(shot).convert("RGB")
        assert shown.getpixel((5, 5)) == tuple(bytes.fromhex(surface[1:]))
        assert len(shown.getcolors(1 << 24)) > 100
    outside = '<main><img src="https://nowhere.invalid/image.png">'
    source.write_text(page.replace("<main>", outside), encoding="utf-8")
    assert any("Content Security Policy" in line for line in chromium.screenshot(source, shot))
