"""Records carry the command that made them, and no folder of the machine."""

import json
import shlex
from datetime import UTC, date, datetime

import pytest

from bmfa import __version__
from bmfa.cli import main
from bmfa.records import Record, environment, made_by_command, without_folders


def test_words_lose_their_folders_and_nothing_else():
    for typed, kept in {
        "/home/me/weights/deit.safetensors": "deit.safetensors",
        "photos/": "photos",
        r"C:\Users\me\deit.safetensors": "deit.safetensors",
        "--weights=../deit.safetensors": "--weights=deit.safetensors",
        "hf:/home/me/models/deit": "hf:deit",
    }.items():
        assert without_folders(typed) == kept
    for kept in ("hf:facebook/deit-tiny-patch16-224", "timm:deit_tiny", "--layers", "8,9,10", "-"):
        assert without_folders(kept) == kept


def test_the_environment_has_the_command_of_the_run_alone_the_date_and_the_version():
    before = datetime.now(UTC).date()
    with made_by_command(["bench", "trees", "--json", "/tmp/a b.json"]):
        made = environment()
    assert made["command"] == "bmfa bench trees --json 'a b.json'"
    assert before <= date.fromisoformat(made["date"]) <= datetime.now(UTC).date()
    assert made["bmfa"] == __version__
    assert "command" not in environment()


def test_every_command_writes_itself_without_folders(tmp_path):
    folder = tmp_path / "private folder"
    folder.mkdir()
    for line in (
        "synthetic --method gamma:0.005 --placement corner",
        "synthetic --curve --method gamma:0.005",
        "probe --limit 2 --method block-mean --workers 1",
        "ablation --limit 2 --workers 1",
        "bench trees --grids 4 --repeats 1 --batch-size 1",
        "bench attention --tokens 64 --method tiles:0 --repeats 1",
        "bench model --img-size 64 --method error:0.1 --repeats 1",
        "closed-loop --limit 2 --method global-mean",
        "evaluate --limit 2 --method global-mean --repeats 0",
        "screen embedded:3 --method gamma:0.05 --output FOLDER/a.png",
        "info",
    ):
        typed = [word.replace("FOLDER", str(folder)) for word in line.split()]
        main([*typed, "--quiet", "--json", str(folder / "made.json")])
        text = (folder / "made.json").read_text("utf-8")
        words = ["bmfa", *line.replace("FOLDER/", "").split(), "--quiet", "--json", "made.json"]
        assert Record.from_json(text).environment["command"] == shlex.join(words)
        assert "private folder" not in text


def test_files_of_a_run_are_named_without_folders(tmp_path):
    image = pytest.importorskip("PIL.Image")
    folder, target = tmp_path / "private folder" / "images", tmp_path / "made.json"
    for name in ("0", "1"):
        (folder / name).mkdir(parents=True)
    image.new("RGB", (32, 32), "red").save(folder / "0" / "good.png")
    (folder / "1" / "broken.png").write_bytes(b"no image")
    rest = ["--quiet", "--json", str(target)]
    main(
        ["evaluate", "--data-dir", str(folder), "--method", "global-mean", "--repeats", "0", *rest]
    )
    assert json.loads(target.read_text("utf-8"))["settings"]["skipped"] == 1
    assert "private folder" not in target.read_text("utf-8")
    output = ["--output", str(tmp_path / "a.png")]
    main(["screen", str(folder / "0" / "good.png"), "--method", "gamma:0.05", *output, *rest])
    assert "good.png" in target.read_text("utf-8")
    assert "private folder" not in target.read_text("utf-8")
