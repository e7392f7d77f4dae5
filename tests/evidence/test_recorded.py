"""Recorded runs on real data: complete, and replaced by one's own."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from bmfa import __version__
from bmfa.cli import main
from bmfa.evidence import recorded, report
from bmfa.evidence.page import paper, plots
from bmfa.evidence.page.build import all_claims
from bmfa.evidence.page.claims import judge
from bmfa.evidence.page.origins import describe_data, mark_recorded, origin
from bmfa.evidence.page.record_set import RecordSet
from bmfa.records import Record
from model_records import page_without_figures

FRAME = {"python": "3.11", "torch": "2.13.0", "device_name": "a processor"}


@pytest.fixture(scope="module")
def shown() -> dict[str, Record]:
    found, problems = recorded.load()
    assert problems == [] and list(found) == list(recorded.SHOWN)
    return found


def test_the_runs_cover_what_the_paper_prints(shown: dict[str, Record]) -> None:
    found = RecordSet(list(shown.values()))
    for dataset, mode in paper.PROBES:
        methods = {row["method"] for row in found.rows("probe", dataset=dataset, mode=mode)}
        assert set(paper.PROBES[dataset, mode]) <= methods
    closed_loop = {row["method"] for row in found.rows("closed-loop", layers="last-4")}
    assert set(paper.CLOSED_LOOP) <= closed_loop
    assert set(paper.IMAGENET) <= {row["method"] for row in found.rows("evaluate")}
    assert found.rows("bench", method="leaves:0.1")


def test_two_experiments_on_the_same_images_agree(shown: dict[str, Record]) -> None:
    """The closed loop and the evaluation screen the same layers, with kernels of their own."""
    loop = {
        row["method"]: row
        for row in shown["closed-loop-deit-h200"].rows
        if row["layers"] in ("last-4", "none")
    }
    compared = [row for row in shown["evaluate-rules-deit-h200"].rows if row["method"] in loop]
    assert len(compared) > 8
    for row in compared:
        other = loop[row["method"]]
        assert row["images"] == other["images"] == 500
        # One image of 500 is 0.2 points: a class may change where two scores nearly tie.
        assert abs(row["agreement_percent"] - other["agreement_percent"]) <= 0.2
        assert row["output_kl"] == pytest.approx(other["output_kl"], rel=0.01, abs=1e-6)


def test_the_page_compares_reductions_at_equal_operations_and_shows_their_schedules(
    shown: dict[str, Record],
) -> None:
    made, reduction = shown["evaluate-rules-deit-h200"], shown["reduction-deit-cpu"]
    page = page_without_figures([made, reduction])
    rows = {row["method"]: row for row in made.rows if row["final_tokens"] is not None}
    for tome in ("tome:8", "tome:12"):
        after = page.partition(f"reductions at the operations of {tome}, by output KL</caption>")[2]
        table = after.partition("</table>")[0]
        names = re.findall(r'<th scope="row" class="text"><code>(.*?)</code>', table)
        limit = rows[tome]["gflops"]
        equal = [name for name, row in rows.items() if abs(row["gflops"] - limit) <= 0.02 * limit]
        assert len(names) >= 8
        assert names == sorted(equal, key=lambda name: rows[name]["output_kl"])
    both = [row for row in reduction.rows if row["reported_on"] == "both"]
    table = page.partition("schedules of free-energy on images that did not choose them</caption>")
    cells = re.findall(r"<td>([−\d.]+)</td>\s*<td>([−\d.]+)</td>\s*</tr>", table[2])[:6]
    keys = ("gain_low_pp", "gain_high_pp")
    assert cells == [tuple(f"{row[key]:.1f}".replace("-", "−") for key in keys) for row in both]
    alone = page_without_figures([reduction])  # without its chapter a plain table
    assert 'id="record-0"' not in page and 'id="record-0"' in alone


def test_verdicts_and_chapters_name_their_data(shown: dict[str, Record]) -> None:
    records = RecordSet(list(shown.values()))
    coco = judge("coco-mean-gap", records)
    assert coco.data == describe_data([shown["probe-coco-image-edge"]])
    assert re.fullmatch(r"recorded on .+ \(\d{4}-\d\d-\d\d\), 343 instances", coco.data)
    random = judge("more-than-random", records)
    assert random.data == describe_data([shown["closed-loop-deit-h200"]])
    assert judge("same-order", records).data == ""  # the embedded images were not measured
    page = page_without_figures(list(shown.values()))
    assert f'<span class="data">{coco.data}</span>' in page
    assert page.count("Recorded, not run with this page.") >= 4
    for option in ("--coco ANNOTATIONS IMAGES", "--lvis ANNOTATIONS", "--weights FILE --imagenet"):
        assert f"bmfa report {option}" in page
    own = [replace(record, environment=FRAME) for record in shown.values()]
    for claim in all_claims(RecordSet(own)):
        assert claim.data == "" or claim.data.startswith("own, ")
    assert "Recorded, not run" not in page_without_figures(own)


def test_the_origin_of_a_record() -> None:
    assert origin(Record("synthetic", {}, [], FRAME)) == "synthetic"
    assert origin(Record("evaluate", {"model": "embedded"}, [], FRAME)) == "embedded"
    own = Record("evaluate", {"model": "timm:x"}, [{"images": 1}], FRAME)
    assert describe_data([own, own]) == "own, 1 image"
    assert describe_data([mark_recorded(own)]) == "recorded on a processor, 1 image"


# The command line


def small_run(**options: object):
    """Stands for all experiments: one record of the embedded images, and the user's own."""
    rows = [{"dataset": "coco", "mode": "image-edge", "method": "gamma:0.005", "group": "all"}]
    for name in ("embedded", *(["coco"] if options["coco"] else [])):
        settings = {"dataset": name, "mode": "image-edge"}
        yield f"probe-{name}-image-edge", Record("probe", settings, rows, FRAME)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "run", small_run)
    monkeypatch.setattr(report, "explore", lambda *args, **options: None)
    monkeypatch.setattr("bmfa.evidence.explorer.page.build_explorer", lambda *a, **k: "<html>")
    monkeypatch.setattr(plots.Figure, "__call__", lambda *a, **k: "<svg></svg>")


@pytest.mark.usefixtures("quick")
def test_the_report_shows_them_by_default_and_ones_own_instead(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["report", "--output", str(tmp_path)])
    out = capsys.readouterr().out
    assert re.search(r"^closed-loop-deit-h200: \d+ rows, recorded on .*, 500 images$", out, re.M)
    page = (tmp_path / "index.html").read_text("utf-8")
    assert "Recorded, not run with this page." in page
    # Records of the folder are known, so that a page made again of them says where they are from.
    files = sorted(map(str, (tmp_path / "records").glob("*.json")))
    main(["report", "--records", *files, "--output", str(tmp_path / "again"), "--quiet"])
    again = (tmp_path / "again" / "index.html").read_text("utf-8")
    assert again.count("recorded on") == page.count("recorded on") > 0
    main(["report", "--output", str(tmp_path / "own"), "--coco", "a.json", "images"])
    out = capsys.readouterr().out
    assert "probe-coco-mask-only" not in out and "probe-lvis-mask-only" in out
    assert "probe-coco-image-edge: 1 rows\n" in out


@pytest.mark.usefixtures("quick")
def test_a_damaged_recorded_run_is_one_sentence_and_the_page_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = tmp_path / "copies"
    shutil.copytree(recorded.folder(), copies)
    cut = copies / "probe-coco-image-edge.json"
    cut.write_text(cut.read_text()[:3000])
    (copies / "probe-lvis-image-edge.json").unlink()
    monkeypatch.setattr(recorded, "folder", lambda: copies)
    main(["report", "--output", str(tmp_path / "page"), "--quiet"])
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and (tmp_path / "page" / "index.html").is_file()
    assert "probe-coco-image-edge is not shown (probe-coco-image-edge.json is not JSON" in lines[0]
    assert "probe-lvis-image-edge is not shown (No such file" in lines[1]


def test_a_record_of_another_version_or_form_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    frame = {**FRAME, "bmfa": "0.0.1"}
    old = Record("evaluate", {"model": "embedded"}, [{"method": "full", "images": 2}], frame)
    path, page = tmp_path / "old.json", tmp_path / "page"
    path.write_text(old.to_json())
    arguments = ["report", "--records", str(path), "--output", str(page), "--quiet"]
    main(arguments)
    warning = f"bmfa: {path} was made by bmfa 0.0.1, and this is bmfa {__version__}; its numbers"
    assert capsys.readouterr().err == f"{warning} may have another meaning\n"
    (page / "index.html").unlink()
    row = {"title": "a", "method": "gamma:0.005", "scores": "none", "height": 4, "width": 4}
    whole = json.loads(old.to_json())
    for text, words in (
        (old.to_json()[:150], "is not JSON"),
        (json.dumps({**whole, "rows": {"full": 1}}), "rows of another form"),
        (json.dumps({**whole, "rows": [["full", 1]]}), "rows of another form"),
        (json.dumps({**whole, "settings": None}), "rows of another form"),
        (json.dumps({"experiment": "evaluate"}), "lacks environment, rows, settings"),
        (
            Record("gallery", {}, [row], frame).to_json(),
            "bmfa: the page cannot be made of these records, made by bmfa 0.0.1,",
        ),
    ):
        path.write_text(text)
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        *warnings, error = capsys.readouterr().err.splitlines()
        assert stop.value.code == 2 and words in error
        assert all(line.startswith(warning) for line in warnings)
        assert not (page / "index.html").exists()
