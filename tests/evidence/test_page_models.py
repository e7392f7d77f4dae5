"""The model chapters of the page: figures, honest claims, and text that follows the records."""

from unittest.mock import patch
from xml.etree import ElementTree

import pytest

import model_records
from bmfa.evidence.page import figures, paper, plots
from bmfa.evidence.page.build import CHAPTERS, all_claims, build_page
from bmfa.evidence.page.canvas import Figure
from bmfa.evidence.page.claims import Claim, Verdict
from bmfa.evidence.page.formats import format_small
from bmfa.evidence.page.record_set import RecordSet
from bmfa.evidence.report import CLOSED_LOOP_METHODS
from bmfa.records import Record
from model_records import DEIT, page_text

FIGURES = ("closed-loop", "layers", "top1", "reductions", "attention-cases")


def find(records: list[Record], part: str) -> Claim:
    return next(claim for claim in all_claims(RecordSet(records)) if part in claim.claim)


def chapter(records: list[Record], name: str) -> str:
    """The text of one chapter on the page; its figures are not drawn."""
    with patch.object(Figure, "__call__", return_value=""):
        return page_text(build_page(records), name)


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("name", FIGURES)
def test_model_figures_are_well_formed(name: str, narrow: bool) -> None:
    text = figures.ALL[name](model_records.every(), narrow=narrow)
    root = ElementTree.fromstring(text)
    margin = 0 if isinstance(figures.ALL[name], plots.Figure) else 32
    assert float(root.attrib["width"]) == (plots.NARROW if narrow else plots.WIDE) + margin
    assert len(text) < 300_000


def test_figures_show_the_papers_points() -> None:
    for name in ("closed-loop", "top1"):
        text = figures.ALL[name](model_records.every())
        assert "Paper: DeiT-Tiny" in text and "Embedded model, " in text
    both = figures.ALL["closed-loop"](
        [model_records.closed_loop(), model_records.closed_loop(DEIT)]
    )
    assert "Embedded model, 100 images" in both and ">DeiT-Tiny, 100 images<" in both
    assert ">paper<" in both  # the rings of ImageNet, on the paper's own model alone
    assert ">paper<" not in figures.ALL["closed-loop"](model_records.closed_loop())


def test_the_page_has_the_model_chapters_in_order() -> None:
    page = build_page(model_records.every())
    assert len(page.encode()) < 700_000
    names = ("closed-loop", "layers", "images", "classification", "reductions", "bench")
    places = [page.index(f'<section id="{name}">') for name in names]
    assert places == sorted(places)
    for name in FIGURES:
        assert page.count(f'id="figure-{name}"') == 1
    assert "Algorithm 1 as printed" in page


def test_one_record_makes_one_chapter() -> None:
    page = build_page([model_records.images()])
    assert "</html>" in page and page.count("Not measured here. Run") == len(CHAPTERS) - 1
    assert "--layers last-2" in chapter([model_records.closed_loop()], "layers")
    assert "--method tome:8" in chapter([model_records.evaluate(merged=False)], "reductions")
    assert "last-2" in chapter([model_records.layers()], "layers")


@pytest.mark.parametrize(
    ("part", "verdict"),
    [
        ("preserves more than random", Verdict.AGREES),
        ("more than fixed blocks", Verdict.AGREES),
        ("tables is Algorithm 1", Verdict.DIFFERS),
        ("By variance alone", Verdict.AGREES),
        ("The smallest output KL", Verdict.AHEAD),
        ("lead over random", Verdict.AGREES),
        ("loses less accuracy", Verdict.AGREES),
        ("no speed-up", Verdict.AGREES),
        ("speed-up of tome:8", Verdict.AGREES),
        ("best merging", Verdict.AHEAD),
    ],
)
def test_claims_are_judged_by_the_records(part: str, verdict: Verdict) -> None:
    claim = find(model_records.every(), part)
    assert claim.verdict is verdict
    assert "Embedded model" in claim.note
    assert find([], part).verdict is Verdict.NOT_MEASURED


def test_claims_that_fail_differ_here() -> None:
    base = model_records.closed_loop()
    swap = {"quadrant-gap:0.8": 70.0, "optimal:0.005": None, "optimal:0.002": None}
    rows = [
        {**row, "agreement_percent": swap.get(row["method"], row["agreement_percent"]) or 0.0}
        | ({"output_kl": 5.0} if row["method"].startswith("optimal") else {})
        for row in base.rows
    ]
    records = [Record("closed-loop", base.settings, rows), model_records.layers(lead=-1.0)]
    for part in ("preserves more than random", "more than fixed blocks", "The smallest output KL"):
        assert find(records, part).verdict is Verdict.DIFFERS
    assert find(records, "lead over random").verdict is Verdict.DIFFERS
    worse = model_records.evaluate()
    slower = [
        {**row, "speedup": 0.68, "agreement_percent": 10.0}
        if row["method"].startswith(("tome", "free"))
        else {**row, "speedup": 1.2}
        for row in worse.rows
    ]
    changed = [Record("evaluate", worse.settings, slower)]
    assert find(changed, "speed-up of tome:8").verdict is Verdict.DIFFERS
    assert find(changed, "no speed-up").verdict is Verdict.AHEAD


def on_all_of_imagenet(worse: float = 0.0) -> Record:
    """DeiT-Tiny on the paper's 50,000 images; its rule loses so many points more."""
    base = model_records.evaluate(DEIT)
    rows = [{**row, "images": 50_000} for row in base.rows]
    for row in rows:
        row["drop_pp"] += worse if row["method"] == "quadrant-gap:0.8" else 0.0
    return Record("evaluate", base.settings, rows)


def test_the_papers_model_and_images_get_strict_verdicts() -> None:
    part = "loses less accuracy"
    assert find([on_all_of_imagenet()], part).verdict is Verdict.REPRODUCED
    assert find([on_all_of_imagenet(worse=9.0)], part).verdict is Verdict.NOT_AS_CLAIMED
    assert find([model_records.evaluate(DEIT)], part).verdict is Verdict.AGREES


def test_the_quadrant_rule_is_called_our_fit() -> None:
    records = model_records.every()
    assert (
        "our fit to the leaf ratios, because the paper does not define the rule"
        in find(records, "preserves more than random").note
    )
    assert "our fit" in find(records, "tables is Algorithm 1").note
    page = chapter(records, "closed-loop")
    assert "is our inference" in page and "is our fit to the leaf ratios" in page
    assert "rule behind the paper" not in page and "Paper's rule" not in page
    assert "rule is one level of quadrants" not in page


def test_variance_claim() -> None:
    assert {"variance:0.8", "variance:0.2"} <= set(CLOSED_LOOP_METHODS)
    claim = find(model_records.every(), "By variance alone")
    assert claim.ours == "99.50 % at 95.90 % (variance:0.2)"
    assert claim.printed == "99.02 % at 97.57 %" and "states no threshold" in claim.note
    cheap = model_records.closed_loop(changes={"variance:0.8": (17.6, 100.0, 0.0)})
    assert find([cheap], "By variance alone").verdict is Verdict.DIFFERS
    base = model_records.closed_loop()
    without = [row for row in base.rows if not row["method"].startswith("variance")]
    records = [Record("closed-loop", base.settings, without)]
    assert find(records, "By variance alone").verdict is Verdict.NOT_MEASURED


def test_the_papers_model_is_preferred_for_claims() -> None:
    records = [*model_records.every(), model_records.closed_loop(DEIT)]
    claim = find(records, "preserves more than random")
    assert claim.note.startswith("DeiT-Tiny, 100 images")
    assert claim.printed == "75.98 % at 30.82 % against 61.54 % at 26.53 %"
    assert claim.ours == "88.00 % at 35.40 % against 76.40 % at 26.50 %"


def test_drops_in_the_paper_are_consistent() -> None:
    full = paper.IMAGENET["full"].top1_percent
    for point in paper.IMAGENET.values():
        assert full - point.top1_percent == pytest.approx(point.drop_pp, abs=1e-9)


def test_images_whose_class_changes_are_named() -> None:
    text = chapter(model_records.every(), "images")
    assert "gamma:0.05 changes ring to eight" in text
    kept = [row for row in model_records.images().rows if row["screened_class"] == "ring"]
    same = Record("image", {"model": "embedded"}, kept)
    assert "No rule shown here changes the predicted class" in chapter([same], "images")


def test_attention_of_the_wrong_size_is_rejected() -> None:
    rows = [{**row, "attention": [0.5, 0.5]} for row in model_records.images().rows]
    with pytest.raises(ValueError, match="2 values of attention for a grid of 4x4"):
        figures.ALL["attention-cases"](Record("image", {}, rows))


def test_text_of_a_record_is_escaped() -> None:
    rows = [{**row, "title": "<b>x", "full_class": "a<i>"} for row in model_records.images().rows]
    shown = build_page([Record("image", {"model": "<u>"}, rows)])
    assert "<b>x" not in shown and "a<i>" not in shown and "&lt;b&gt;x" in shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "–"),
        (0.149, "0.149"),
        (2.26089, "2.261"),
        (4.1e-7, "4\u00a0×\u00a010⁻⁷"),
        (0.0004, "4\u00a0×\u00a010⁻⁴"),
        (0.0, "0.000"),
        (-3e-17, "0.000"),
    ],
)
def test_format_small(value: float | None, shown: str) -> None:
    assert format_small(value) == shown


def test_speeds_have_their_conditions() -> None:
    base = model_records.evaluate()
    timed = {**base.settings, "repeats": 3, "batch_size": 10, "dtype": "float32"}
    text = chapter([Record("evaluate", timed, base.rows, base.environment)], "classification")
    assert "a processor, torch 2.13.0, float32, batches of 10, median of 3" in text
