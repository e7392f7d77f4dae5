"""Example records of the model experiments, as the page reads them."""

import base64
import io
import re
from collections.abc import Sequence
from html import unescape
from unittest.mock import patch

import pytest

from bmfa.evidence.page import plots
from bmfa.evidence.page.build import build_page
from bmfa.records import Record, Row

ENVIRONMENT = {"python": "3.11.9", "torch": "2.13.0", "device_name": "a processor"}
DEIT = "timm:deit_tiny_patch16_224"
# Leaf ratio, agreement, output KL of DeiT-Tiny on 500 ImageNet images, last four layers.
REFERENCE = {
    "fixed-blocks:2": (25.00, 86.0, 0.103),
    "global-mean": (0.51, 56.8, 0.893),
    "random-quadrants:0.25": (26.5, 76.4, 0.286),
    "random-quadrants:0.5": (51.0, 88.4, 0.117),
    "quadrant-gap:0.8": (35.40, 88.0, 0.097),
    "quadrant-gap:0.5": (56.68, 93.6, 0.027),
    "variance:0.8": (43.26, 92.5, 0.041),
    "variance:0.2": (95.90, 99.5, 0.001),
    "gamma:0.8": (0.6, 63.0, 0.86),
    "gamma:0.05": (26.53, 84.8, 0.173),
    "gamma:0.02": (56.19, 92.4, 0.059),
    "mass:0.005": (17.69, 93.0, 0.063),
    "optimal:0.005": (15.65, 92.8, 0.029),
    "optimal:0.002": (31.58, 98.2, 0.0050),
}
# Top-1, agreement, output KL, GFLOPs, speed-up.
MERGED = {
    "tome:8": (69.0, 94.2, 0.026, 0.93, 1.05),
    "tome:12": (68.2, 89.6, 0.071, 0.71, 1.18),
    "free-energy:8": (69.2, 96.0, 0.020, 0.93, 1.11),
    "free-energy:12": (68.8, 93.0, 0.047, 0.71, 1.27),
}


def closed_loop(model: str = "embedded") -> Record:
    """One choice of layers."""
    rows: list[Row] = [_loop_row("full", "none", (100.0, 100.0, 0.0))]
    rows += [_loop_row(method, "last-4", point) for method, point in REFERENCE.items()]
    return Record("closed-loop", {"model": model, "layers": ["last-4"]}, rows, ENVIRONMENT)


def layers(model: str = "embedded", lead: float = 8.0) -> Record:
    """Several layers from the last; the paper's rule leads a coin by so many points."""
    choices = ["last-2", "last-4", "all"]
    rows = [
        _loop_row(method, choice, (30.0, 90.0 - 5 * place + ahead, 0.05 * (place + 1)), images=40)
        for place, choice in enumerate(choices)
        for method, ahead in (("quadrant-gap:0.8", lead), ("random-quadrants:0.25", 0.0))
    ]
    return Record("closed-loop", {"model": model, "layers": choices}, rows, ENVIRONMENT)


def single(model: str = "embedded") -> Record:
    """Each layer alone."""
    rows = [
        _loop_row(method, str(layer), (1.0, 99.0 - layer, 10.0 ** (layer - 6)), images=40)
        for layer in range(5)
        for method in ("global-mean", "optimal:0.002")
    ]
    choices = [str(layer) for layer in range(5)]
    return Record("closed-loop", {"model": model, "layers": choices}, rows, ENVIRONMENT)


def evaluate(model: str = "embedded", merged: bool = True) -> Record:
    """Rules and reductions."""
    full = {"method": "full", "images": 500, "top1_percent": 69.2, "top5_percent": 90.6}
    full |= {"drop_pp": 0.0, "agreement_percent": 100.0, "output_kl": 0.0, "leaf_percent": None}
    full |= {"final_tokens": 197, "gflops": 1.26, "images_per_second": 45000.0}
    full |= {"images_per_second_end_to_end": 4000.0, "speedup": 1.0}
    rows: list[Row] = [full]
    for method, (leaf, agreement, kl) in REFERENCE.items():
        drop = (100 - agreement) / 5
        row = full | {"method": method, "leaf_percent": leaf, "agreement_percent": agreement}
        row |= {"output_kl": kl, "top1_percent": 69.2 - drop, "drop_pp": drop, "speedup": 0.87}
        rows.append(row)
    for method, (top1, agreement, kl, cost, speed) in MERGED.items() if merged else ():
        row = full | {"method": method, "top1_percent": top1, "drop_pp": 69.2 - top1}
        row |= {"agreement_percent": agreement, "output_kl": kl, "gflops": cost, "speedup": speed}
        rows.append(row | {"final_tokens": 101})
    return Record("evaluate", {"model": model, "layers": "last-4"}, rows, ENVIRONMENT)


def comparison(lead: float = 12.0, gain: tuple[float, float, float] = (5.0, 2.0, 8.0)) -> Record:
    """Rules at equal leaves and policies at equal operations; `gain` with its interval."""
    full: Row = {"method": "full", "kind": "full", "images": 200, "agreement_percent": 100.0}
    full |= {"output_kl": 0.0, "top1_percent": 81.0, "mask_iou": 0.85, "leaf_percent": 100.0}
    rows: list[Row] = [full | {"gflops": 0.72}]
    for share in (6.25, 25.0):
        for method, ahead in (("gamma:0.1", 0.0), ("optimal:0.01", lead), ("fixed-blocks:4", -9.0)):
            row = full | {"method": method, "kind": "rule", "target_percent": share}
            row |= {"leaf_percent": share + 0.2, "agreement_percent": 70.0 + ahead}
            row |= {"output_kl": 0.3 - 0.01 * ahead, "top1_percent": 60.0 + ahead, "mask_iou": 0.8}
            row |= {"gain_pp": ahead, "gain_low_pp": ahead - 3, "gain_high_pp": ahead + 3}
            rows.append(row)
    for baseline in ("tome:16", "tome:24"):
        for method, values in ((baseline, (0.0, 0.0, 0.0)), ("free-energy:0.9", gain)):
            row = full | {"method": method, "kind": "reduction", "baseline": baseline}
            row |= {"gflops": 0.5, "agreement_percent": 80.0 + values[0], "output_kl": 0.2}
            row |= zip(("gain_pp", "gain_low_pp", "gain_high_pp"), values, strict=True)
            rows.append({key: row[key] for key in row if key != "leaf_percent"})
    return Record("comparison", {"model": "embedded", "layers": "all"}, rows, ENVIRONMENT)


def images() -> Record:
    """Two images on a 4x4 grid, each with two trees."""
    quarters = [[0, 0, 2, 2], [0, 2, 2, 4], [2, 0, 4, 2], [2, 2, 4, 4]]
    full = [0.4 if place == 5 else 0.04 for place in range(16)]
    rows: list[Row] = []
    for title in ("Small badge: ring", "Failure: ring"):
        for method, boxes in (("gamma:0.05", [[0, 0, 4, 4]]), ("optimal:0.002", quarters)):
            changed = title.startswith("Failure") and method.startswith("gamma")
            row = {"model": "embedded", "title": title, "method": method, "layer": 7, "head": 1}
            row |= {"query": "class", "height": 4, "width": 4, "image": image()}
            row |= {"scores": [3.0 * share for share in full], "attention": full}
            row |= {"screened_attention": [1 / 16] * 16, "boxes": boxes, "leaves": len(boxes)}
            row |= {"leaf_percent": 100 * len(boxes) / 16, "gap": 1.5, "error": 0.25}
            row |= {"certificate": 0.26, "certificate_from": "scores", "moved_percent": 3.0}
            row |= {"full_class": "ring", "full_class_percent": 98.0, "output_kl": 0.1}
            row |= {"screened_class": "eight" if changed else "ring"}
            rows.append(row | {"screened_class_percent": 60.0, "label": "ring"})
    settings = {"model": "embedded", "chosen_from": 100, "failure": "the output moved most"}
    return Record("image", settings, rows, ENVIRONMENT)


def every() -> list[Record]:
    """A record of every model experiment."""
    return [closed_loop(), layers(), single(), comparison(), images(), evaluate()]


def page_without_figures(records: Sequence[Record]) -> str:
    """The page of records; its figures, which take most of the time, are not drawn."""
    with patch.object(plots.Figure, "__call__", return_value="<svg></svg>"):
        return build_page(records)


def page_text(page: str, section: str) -> str:
    """The text of a section of a page, without figures and markup."""
    found = page.partition(f'<section id="{section}">')[2].partition("</section>")[0]
    found = re.sub(r"<svg.*?</svg>", " ", found, flags=re.S)
    found = unescape(re.sub(r"<[^>]+>", "", found)).replace("\u00a0", " ")
    return re.sub(r"\s+", " ", found)


def image() -> str:
    """A photograph of one colour as a data URI."""
    made = pytest.importorskip("PIL.Image").new("RGB", (8, 8), (200, 90, 30))
    buffer = io.BytesIO()
    made.save(buffer, "JPEG")
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _loop_row(
    method: str, layers: str, point: tuple[float, float, float], images: int = 100
) -> Row:
    leaf, agreement, kl = point
    row: Row = {"method": method, "layers": layers, "images": images, "leaf_percent": leaf}
    row |= {"agreement_percent": agreement, "output_kl": kl, "attention_kl": 2 * kl}
    return row | {"top1_percent": 0.7 * agreement}
