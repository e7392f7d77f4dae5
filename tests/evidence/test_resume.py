"""Runs that were killed: they continue to the result of one that was not."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from bmfa.cli import main
from bmfa.data import EmbeddedScenes, InstanceFiles, ProbeSettings, Tally
from bmfa.data.classification import EmbeddedImages, LabelledImages
from bmfa.data.images import ImagesLostError
from bmfa.data.probes import probe_block
from bmfa.evidence.classification import run as evaluation
from bmfa.evidence.closed_loop import run as closed_loop
from bmfa.evidence.probes import run as probes
from bmfa.evidence.probes.parts import _compress, pack_part, unpack_part
from bmfa.evidence.runner import resume as resuming
from bmfa.evidence.runner.resume import Checkpoint, digest, weights_digest
from bmfa.models import LoadedModel, load_model
from bmfa.records import Record
from coco_files import write_coco

METHODS = ["random-quadrants:0.5", "tome:8"]


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_model("embedded")


@pytest.fixture(scope="module")
def saved(model: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The content of a whole file of `evaluate`."""
    file = tmp_path_factory.mktemp("saved") / "parts.json"
    evaluate(model, resume=file)
    content: dict[str, Any] = json.loads(file.read_text())
    return content


class KilledError(Exception):
    """Stands for the end of the process."""


def evaluate(model: LoadedModel, **options: Any) -> Record:
    return evaluation.run(
        model, EmbeddedImages(7), METHODS, batch_size=2, repeats=0, seed=5, **options
    )


def loop(model: LoadedModel, **options: Any) -> Record:
    methods = ["random-quadrants:0.5", "optimal:0.01"]
    return closed_loop.run(
        model, EmbeddedImages(7), methods, layers=["last-1", "last-2"], batch_size=2, **options
    )


@pytest.mark.parametrize("run", [evaluate, loop])
def test_a_run_that_ends_after_any_batch_continues_to_the_same_rows(
    model: LoadedModel,
    run: Callable[..., Record],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resuming, "WRITE_INTERVAL", 0.0)
    monkeypatch.setattr(resuming, "WRITE_PAUSE", 0.0)
    expected, file, seen = run(model), tmp_path / "parts.json", []

    def end(done: int, total: int) -> None:
        seen.append((done, total))
        raise KilledError

    for _ in range(4):
        with pytest.raises(KilledError):
            run(model, resume=file, progress=end)
    assert seen == [(2, 7), (4, 7), (6, 7), (7, 7)]
    last = run(model, resume=file, progress=end)  # nothing is left to do
    assert last.rows == expected.rows and last.settings == expected.settings


def test_parts_are_written_at_intervals_and_at_the_end(
    model: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, counts = tmp_path / "parts.json", []
    monkeypatch.setattr(resuming, "WRITE_INTERVAL", 3600.0)

    def count(done: int, total: int) -> None:
        counts.append(len(json.loads(file.read_text())["parts"]))

    evaluate(model, resume=file, progress=count)
    assert counts == [1, 1, 1, 1]
    assert len(json.loads(file.read_text())["parts"]) == 4
    assert [path.name for path in tmp_path.iterdir()] == ["parts.json"]


def test_another_run_is_refused_with_the_first_difference(
    model: LoadedModel, tmp_path: Path
) -> None:
    file = tmp_path / "parts.json"
    evaluate(model, resume=file)

    def refused(match: str, **options: Any) -> None:
        settings = {"batch_size": 2, "repeats": 0, "seed": 5, **options}
        with pytest.raises(ValueError, match=match):
            evaluation.run(model, images, methods, resume=file, **settings)

    images, methods = EmbeddedImages(7), METHODS
    refused("belongs to another run: seed was 5 and is 6", seed=6)
    refused("batch_size was 2 and is 3", batch_size=3, seed=6)
    refused('layers was "last-4" and is "last-2"', layers="last-2")
    refused('dtype was "float32" and is "float16"', dtype="float16")
    images = EmbeddedImages(8)
    refused("number of images was 7 and is 8")
    images = EmbeddedImages(7, seed=1)
    refused("names of images was")
    images, methods = EmbeddedImages(7), METHODS[:1]
    refused("methods was .* and is")
    methods = METHODS
    other = load_model("embedded")
    with torch.no_grad():
        other.model.head.bias[0] += 1  # type: ignore[union-attr, index]
    with pytest.raises(ValueError, match="weights was"):
        evaluate(other, resume=file)
    with pytest.raises(ValueError, match='experiment was "evaluate" and is "closed-loop"'):
        loop(model, resume=file)


def probe(**options: Any) -> Record:
    methods = ["gamma:0.005", "random-quadrants:0.5", "optimal-leaves-pooled:0.1"]
    scenes = EmbeddedScenes(images=60)
    return probes.run(scenes, dataset="embedded", mode="image-edge", methods=methods, **options)


def test_a_probe_continues_to_the_same_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resuming, "WRITE_INTERVAL", 0.0)
    monkeypatch.setattr("bmfa.data.probes._PART_INSTANCES", 32)
    expected, file, ends = probe(), tmp_path / "parts.json", []

    def end(done: int, total: int) -> None:
        ends.append(done)
        raise KilledError

    kept = []
    for _ in range(2):
        with pytest.raises(KilledError):
            probe(resume=file, progress=end)
        kept.append(len(json.loads(file.read_text())["parts"]))
    assert kept == [1, 2]
    resumed = probe(resume=file)
    assert len(json.loads(file.read_text())["parts"]) > 3
    assert resumed.rows == expected.rows
    for name in ("faults", "left_out", "instances", "images"):
        assert resumed.settings[name] == expected.settings[name]
    assert probe(resume=file, limit=50).rows == probe(limit=50).rows  # any limit, method or mode
    with pytest.raises(ValueError, match="grid was 16 and is 8"):
        probe(resume=file, settings=ProbeSettings(8, 256))
    content = json.loads(file.read_text())
    content["parts"]["0"]["block"]["edge"] = "damaged"
    file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="part 0 is damaged: it cannot be unpacked"):
        probe(resume=file)


def test_the_parts_of_a_probe_survive_json() -> None:
    part = next(EmbeddedScenes(images=4).parts(1000))
    tally = Tally()
    block = probe_block(part.instances(tally), ProbeSettings(), tally)
    tally.leave_out("too small", "annotation 3")
    tally.fault("torn", "image 4", 2)
    again = unpack_part(json.loads(json.dumps(pack_part((4, block, tally)))))
    assert again[0] == 4 and again[2] == tally and block is not None and again[1] is not None
    for field in fields(block):
        mine, theirs = getattr(block, field.name), getattr(again[1], field.name)
        assert np.array_equal(mine, theirs) if isinstance(mine, np.ndarray) else mine == theirs
    assert unpack_part(pack_part((1, None, Tally())))[1] is None


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "incomplete JSON"),
        ('{"format": "bmfa partial resu', "incomplete JSON"),
        ("[1, 2]", "its format is not"),
        ('{"experiment": "evaluate", "rows": []}', "its format is not"),
        ('{"format": "bmfa partial results 2", "settings": {}}', "digests, parts is missing"),
        ("\x00\xff", "incomplete JSON"),
    ],
)
def test_a_torn_or_foreign_file_is_refused_and_kept(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str, words: str
) -> None:
    file = tmp_path / "parts.json"
    file.write_bytes(content.encode("latin-1"))
    with pytest.raises(SystemExit) as stop:
        main(["evaluate", "--limit", "1", "--method", "full", "--resume", str(file)])
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1
    assert words in error and "delete it to start afresh" in error
    assert file.read_bytes() == content.encode("latin-1")


def test_damaged_parts_and_folders_are_refused(model: LoadedModel, tmp_path: Path) -> None:
    file = tmp_path / "parts.json"
    evaluate(model, resume=file)
    good = json.loads(file.read_text())
    for damage in (
        lambda part: part["sums"].pop("full"),
        lambda part: part["sums"]["full"].pop("images"),
        lambda part: part["sums"]["full"].update(top1="3"),
        lambda part: part["sums"].clear(),
        lambda part: part.update(skipped=[3]),
    ):
        bad = json.loads(json.dumps(good))
        damage(bad["parts"]["1"])
        file.write_text(json.dumps(bad))
        with pytest.raises(ValueError, match="part 1 is damaged"):
            evaluate(model, resume=file)
    with pytest.raises(ValueError, match="is a folder"):
        evaluate(model, resume=tmp_path)


@pytest.mark.parametrize(
    ("column", "value", "accepted"),
    [
        ("agreeing", -7, "0 to 2"),
        ("agreeing", 3, "0 to 2"),
        ("images", 1, "2 to 2"),
        ("labelled", 3, "0 to 2"),
        ("top5", 3, "0 to 2"),
        ("top1", -1, "0 to 2"),
        ("output_kl", -1.0, "-2e-06 to 1.79769e\\+308"),
        ("output_kl", float("nan"), ""),
        ("leaf_ratio", 2.5, "0 to 2"),
    ],
)
def test_the_first_value_out_of_range_is_named(
    model: LoadedModel,
    saved: dict[str, Any],
    tmp_path: Path,
    column: str,
    value: Any,
    accepted: str,
) -> None:
    file, bad = tmp_path / "parts.json", json.loads(json.dumps(saved))
    bad["parts"]["1"]["sums"]["tome:8"][column] = value
    # Another value that cannot be, in a later part: the first is the one to name.
    bad["parts"]["2"]["sums"]["full"]["agreeing"] = -100
    file.write_text(json.dumps(bad))
    words = f"part 1 is damaged: {column} of tome:8 is {value}, outside the range {accepted}"
    with pytest.raises(ValueError, match=words):
        evaluate(model, resume=file)


def test_a_value_that_was_changed_within_its_range_is_noticed(
    model: LoadedModel, saved: dict[str, Any], tmp_path: Path
) -> None:
    file = tmp_path / "parts.json"
    for change in (
        lambda parts: parts["1"]["sums"]["tome:8"].update(output_kl=0.125),
        lambda parts: parts.update({"0": parts["1"], "1": parts["0"]}),
    ):
        bad = json.loads(json.dumps(saved))
        change(bad["parts"])
        file.write_text(json.dumps(bad))
        with pytest.raises(ValueError, match=r"part . is damaged: .* match their fingerprint"):
            evaluate(model, resume=file)


def test_the_closed_loop_checks_its_sums(model: LoadedModel, tmp_path: Path) -> None:
    file = tmp_path / "parts.json"
    loop(model, resume=file)
    good = json.loads(file.read_text())
    key = "optimal:0.01 in last-1"
    for column, value in (("right", 3), ("attention_kl", -0.1), ("agreeing", -7)):
        bad = json.loads(json.dumps(good))
        bad["parts"]["3"]["sums"][key][column] = value
        file.write_text(json.dumps(bad))
        with pytest.raises(ValueError, match=f"{column} of {key} is {value}, outside the range"):
            loop(model, resume=file)


def test_a_probe_checks_its_parts(tmp_path: Path) -> None:
    file = tmp_path / "parts.json"
    probe(resume=file)
    good = json.loads(file.read_text())
    edges = np.full(good["parts"]["0"]["block"]["shape"], 1.5)
    for change, words in (
        (
            lambda part: part["block"].update(edge=_compress(edges)),
            "edge is 1.5, outside the range 0 to 1",
        ),
        (
            lambda part: part["block"]["area"].__setitem__(0, -4.0),
            "area is -4.0, outside the range",
        ),
        (lambda part: part["block"]["size"].__setitem__(0, "huge"), "size is 'huge'"),
        (lambda part: part["block"]["area"].pop(), "area has .* values for .* instances"),
        (lambda part: part.update(images=-1), "the count of images is -1"),
        (lambda part: part["block"]["area"].__setitem__(0, 4.0), "match their fingerprint"),
    ):
        bad = json.loads(json.dumps(good))
        change(bad["parts"]["0"])
        file.write_text(json.dumps(bad))
        with pytest.raises(ValueError, match=f"part 0 is damaged: .*{words}"):
            probe(resume=file)


def write_images(folder: Path, count: int = 6) -> Path:
    for index, image in enumerate(EmbeddedImages(count)):
        place = folder / str(image.label)
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image.pixels).save(place / f"{index}.png")
    return folder


def take_away(root: Path) -> None:
    root.rename(root.with_name("elsewhere"))


def leave_empty(root: Path) -> None:
    """As a disk that is unmounted does."""
    take_away(root)
    root.mkdir()


def bring_back(root: Path) -> None:
    if root.exists():
        root.rmdir()
    root.with_name("elsewhere").rename(root)


COMMANDS = {
    "evaluate": "--method tome:8 --repeats 0 --batch-size 2 --workers 0",
    "closed-loop": "--method global-mean --layers last-1 --batch-size 2 --workers 0",
}


def vanishing(root: Path, vanish: Callable[[Path], None]) -> Callable[[int, int], None]:
    """Progress that takes the images away after the first batch."""
    return lambda done, total: vanish(root) if done == 2 else None


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("vanish", [take_away, leave_empty])
def test_images_that_vanish_stop_the_run_which_continues_when_they_are_back(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    command: str,
    vanish: Callable[[Path], None],
) -> None:
    root, file = write_images(tmp_path / "val"), tmp_path / "parts.json"
    arguments = [command, "--data-dir", str(root), *COMMANDS[command].split(), "--json", "-"]
    main(arguments)
    expected = json.loads(capsys.readouterr().out)
    assert expected["rows"][0]["images"] == 6
    for resume in ([], ["--resume", str(file)]):
        with monkeypatch.context() as patch:
            patch.setattr("bmfa.cli.output.Output.progress", lambda *_: vanishing(root, vanish))
            with pytest.raises(SystemExit) as stop:
                main([*arguments, *resume])
        printed = capsys.readouterr()
        assert stop.value.code == 2 and printed.out == "" and printed.err.count("\n") == 1
        assert str(root) in printed.err and "bring the images back" in printed.err
        saved = f"1 batch is saved in {file}, and --resume {file} continues from there"
        assert (saved if resume else "nothing of this run is saved") in printed.err
        bring_back(root)
    assert list(json.loads(file.read_text())["parts"]) == ["0"]
    main([*arguments, "--resume", str(file)])
    resumed = json.loads(capsys.readouterr().out)
    assert resumed["rows"] == expected["rows"] and resumed["settings"]["skipped"] == 0


def test_links_into_a_disk_that_vanishes_stop_the_run_too(
    model: LoadedModel, tmp_path: Path
) -> None:
    disk, root = write_images(tmp_path / "disk"), tmp_path / "val"
    root.mkdir()
    for file in disk.glob("*/*.png"):
        (root / file.name).symlink_to(file)
    with pytest.raises(ImagesLostError, match="disk"):
        evaluation.run(
            model,
            LabelledImages(root),
            ["full"],
            batch_size=2,
            repeats=0,
            workers=0,
            progress=vanishing(disk, take_away),
        )


@pytest.mark.parametrize("command", COMMANDS)
def test_unreadable_images_are_tried_again(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    command: str,
) -> None:
    root, file = write_images(tmp_path / "val"), tmp_path / "parts.json"
    torn = [root / "2" / "2.png", root / "5" / "5.png"]
    whole = [path.read_bytes() for path in torn]
    arguments = [command, "--data-dir", str(root), *COMMANDS[command].split(), "--json", "-"]
    main(arguments)
    expected = json.loads(capsys.readouterr().out)["rows"]
    for path in torn:
        path.write_bytes(b"\x89PNG\r\n")
    arguments += ["--resume", str(file)]
    main(arguments)
    assert json.loads(capsys.readouterr().out)["settings"]["skipped"] == 2
    torn[0].write_bytes(whole[0])
    main(arguments)
    record = json.loads(capsys.readouterr().out)
    assert record["settings"]["skipped"] == 1 and record["rows"][0]["images"] == 5
    main(arguments)  # the last one is still torn, and its batch is not measured again
    assert json.loads(capsys.readouterr().out)["rows"] == record["rows"]
    torn[1].write_bytes(whole[1])
    main(arguments)
    assert json.loads(capsys.readouterr().out)["rows"] == expected


def test_a_probe_stops_where_its_images_vanish_and_tries_unreadable_ones_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("bmfa.data.probes._PART_INSTANCES", 8)
    annotations, images = write_coco(tmp_path, images=8), tmp_path / "images"
    file = tmp_path / "parts.json"

    def run(**options: Any) -> Record:
        source = InstanceFiles(annotations, images)
        methods = ["gamma:0.005"]
        return probes.run(source, dataset="coco", mode="mask-only", methods=methods, **options)

    expected = run()
    lost: list[int] = []

    def vanish(done: int, total: int) -> None:
        if not lost:
            lost.append(done)
            take_away(images)

    with pytest.raises(ImagesLostError, match=r"1 batch is saved in .*--resume"):
        run(resume=file, progress=vanish)
    bring_back(images)
    lost.clear()
    with pytest.raises(ImagesLostError, match="nothing of this run is saved"):
        run(progress=vanish)
    bring_back(images)

    first, second = sorted(images.iterdir())[-2:]
    kept = second.read_bytes()
    second.write_bytes(b"torn")
    first.rename(tmp_path / first.name)
    resumed = run(resume=file)
    assert resumed.settings["faults"].keys() == {"missing image", "unreadable image"}
    second.write_bytes(kept)
    (tmp_path / first.name).rename(first)
    again = run(resume=file)
    assert again.rows == expected.rows and again.settings["faults"] == {}


def test_a_full_disk_under_the_partial_results_does_not_end_the_run(
    model: LoadedModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(resuming, "WRITE_INTERVAL", 0.0)
    monkeypatch.setattr(resuming, "WRITE_PAUSE", 0.0)
    expected, file = evaluate(model), tmp_path / "parts.json"

    def fill(done: int, total: int) -> None:
        monkeypatch.setattr(resuming, "write_atomic", full_disk)

    def full_disk(path: Path, content: str) -> None:
        raise OSError(28, "No space left on device", str(path))

    assert evaluate(model, resume=file, progress=fill).rows == expected.rows
    assert "partial results are not saved" in caplog.text and str(file) in caplog.text
    monkeypatch.undo()
    assert len(json.loads(file.read_text())["parts"]) == 1
    assert evaluate(model, resume=file).rows == expected.rows


def test_the_numbers_of_a_file_are_exact(tmp_path: Path) -> None:
    first = Checkpoint(tmp_path / "f", "x", {"a": (1, 2)}, lambda number, part: None)
    first.add({10: {"sum": 0.1 + 0.2}, 2: {"sum": 1e-300}})
    first.write()
    again = Checkpoint(tmp_path / "f", "x", {"a": [1, 2]}, lambda number, part: None)
    assert again.parts == first.parts and list(again.parts) == [2, 10]


def test_fingerprints_tell_apart() -> None:
    assert digest(["ab", "c"]) != digest(["a", "bc"])
    layer = torch.nn.Linear(2, 2)
    before = weights_digest(layer)
    assert before == weights_digest(layer)
    with torch.no_grad():
        layer.weight[0, 0] += 1
    assert weights_digest(layer) != before
    assert weights_digest(layer.half()) != before


def test_a_process_killed_mid_run_continues_to_the_same_rows(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = ["evaluate", "--limit", "16", "--batch-size", "1", "--method", "optimal:0.01"]
    arguments += ["--repeats", "0"]
    file, record = tmp_path / "parts.json", tmp_path / "record.json"
    command = [sys.executable, "-m", "bmfa", *arguments, "--resume", str(file)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([*command, "--json", str(record)], env=environment)
    try:
        deadline = time.monotonic() + 120
        # Every state of the file that can be seen is whole.
        while not (file.exists() and json.loads(file.read_text())["parts"]):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.005)
    finally:
        process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    parts = json.loads(file.read_text())["parts"]
    assert 0 < len(parts) < 16 and not record.exists()
    main([*arguments, "--resume", str(file), "--json", "-"])
    resumed = json.loads(capsys.readouterr().out)
    assert {**json.loads(file.read_text())["parts"], **parts} == json.loads(file.read_text())[
        "parts"
    ]
    main([*arguments, "--json", "-"])
    assert resumed["rows"] == json.loads(capsys.readouterr().out)["rows"]
