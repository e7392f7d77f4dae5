"""The model experiments of the page: their records make its chapters, offline and on own files."""

from functools import partial
from pathlib import Path

import pytest
from PIL import Image

from bmfa.cli import main
from bmfa.data.drawn.badges import draw_badge
from bmfa.evidence import report
from bmfa.evidence.faster import run as faster
from bmfa.evidence.page import figures
from bmfa.evidence.page.build import build_page
from bmfa.models import embedded
from model_records import page_text

SHOWN = ("closed-loop", "layers", "top1", "accuracy", "reductions", "attention-cases")


@pytest.fixture(autouse=True)
def _few_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    rules, merged = ["fixed-blocks:2", "optimal:0.02"], ["tome:8", "free-energy:8"]
    few = dict.fromkeys(("closed-loop", "layers", "evaluate"), rules)
    few |= {"single-layers": ["global-mean"], "reductions": merged, "embedded-reductions": merged}
    monkeypatch.setattr(report, "METHODS", few)
    monkeypatch.setattr(report, "CPU_TIMING", (2, 1))
    # These have tests of their own.
    monkeypatch.setattr(report, "COMPARISONS", {})
    monkeypatch.setattr(report.faster, "run", partial(faster.run, side=16, images=1, shown=1))


def own_files(folder: Path) -> report.Own:
    """The embedded model and images, as if they were a person's own."""
    for index in range(3):
        path = folder / str(index) / "a.png"
        path.parent.mkdir(parents=True)
        Image.fromarray(draw_badge(0, index)[0]).save(path)
    return report.load_own(str(embedded.WEIGHTS), str(folder), "embedded", limit=2)


def test_the_records_make_every_figure_of_the_model_chapters(tmp_path: Path) -> None:
    own = own_files(tmp_path)
    records = dict(report.run_models(own, images=4, layer_images=1))
    assert list(records) == [
        *("closed-loop", "closed-loop-layers", "closed-loop-single", "faster", "images"),
        "evaluate",
        *("own-closed-loop", "own-closed-loop-layers", "own-evaluate"),
    ]
    assert {row["images"] for row in records["closed-loop"].rows} == {4}
    assert {row["images"] for row in records["own-evaluate"].rows} == {2}
    assert records["closed-loop-layers"].settings["layers"] == ["last-2", "last-4", "all"]
    alone = {row["layers"] for row in records["closed-loop-single"].rows}
    assert alone == {"none", *map(str, range(8))}
    for name in SHOWN:
        assert figures.ALL[name].drawable(list(records.values()))
    page = build_page(list(records.values())[:6])
    for chapter in ("closed-loop", "layers", "images", "classification", "reductions"):
        assert "Not measured here" not in page_text(page, chapter)


def test_every_method_of_the_page_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    from bmfa.evidence.model_methods import parse

    monkeypatch.undo()
    for name in {method for methods in report.METHODS.values() for method in methods}:
        assert parse(name).name == name


def test_files_of_ones_own_are_checked_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    own_files(tmp_path / "some")
    for arguments, words in (
        ("--weights w.safetensors", "go together"),
        ("--imagenet .", "go together"),
        ("--imagenet nowhere --weights w", "no folder or zip at nowhere"),
        ("--imagenet empty --weights w", "no images in empty"),
        ("--imagenet some --weights w --limit 0", "limit is 0"),
        ("--imagenet some --weights nowhere --model embedded", "nowhere"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["report", *arguments.split()])
        told = capsys.readouterr()
        assert ended.value.code == 2 and told.out == ""
        assert told.err.count("\n") == 1 and words in told.err
        assert not Path("report").exists()
