"""Runs that were killed: they continue to the result of one that was not."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bmfa.cli import main
from bmfa.data import EmbeddedScenes, ProbeSettings, Tally
from bmfa.data.imagenet import embedded_pictures
from bmfa.data.probes import probe_block
from bmfa.experiments import closed_loop, evaluation, probes, resuming
from bmfa.experiments.probe_parts import packed, unpacked
from bmfa.experiments.resuming import Checkpoint, digest, weights_digest
from bmfa.models import LoadedModel, load_model
from bmfa.records import Record

METHODS = ["random-quadrants:0.5", "tome:8"]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """As in the processes that are started here; and small tensors are faster so."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_model("embedded")


class KilledError(Exception):
    """Stands for the end of the process."""


def evaluate(model: LoadedModel, **options: Any) -> Record:
    return evaluation.run(
        model, embedded_pictures(7), METHODS, batch_size=2, repeats=0, seed=5, **options
    )


def loop(model: LoadedModel, **options: Any) -> Record:
    methods = ["random-quadrants:0.5", "optimal:0.01"]
    return closed_loop.run(
        model, embedded_pictures(7), methods, layers=["last-1", "last-2"], batch_size=2, **options
    )


@pytest.mark.parametrize("run", [evaluate, loop])
def test_a_run_that_ends_after_any_batch_continues_to_the_same_rows(
    model: LoadedModel,
    run: Callable[..., Record],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resuming, "INTERVAL", 0.0)
    monkeypatch.setattr(resuming, "LEISURE", 0.0)
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
    monkeypatch.setattr(resuming, "INTERVAL", 3600.0)

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
            evaluation.run(model, pictures, methods, resume=file, **settings)

    pictures, methods = embedded_pictures(7), METHODS
    refused("belongs to another run: seed was 5 and is 6", seed=6)
    refused("batch_size was 2 and is 3", batch_size=3, seed=6)
    refused('layers was "last-4" and is "last-2"', layers="last-2")
    refused('dtype was "float32" and is "float16"', dtype="float16")
    pictures = embedded_pictures(8)
    refused("number of pictures was 7 and is 8")
    pictures = embedded_pictures(7, seed=1)
    refused("names of pictures was")
    pictures, methods = embedded_pictures(7), METHODS[:1]
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
    scenes = EmbeddedScenes(pictures=60)
    return probes.run(scenes, dataset="embedded", mode="image-edge", methods=methods, **options)


def test_a_probe_continues_to_the_same_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resuming, "INTERVAL", 0.0)
    monkeypatch.setattr("bmfa.data.probe_stream._PART_INSTANCES", 32)
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
    for name in ("faults", "left_out", "instances", "pictures"):
        assert resumed.settings[name] == expected.settings[name]
    assert probe(resume=file, limit=50).rows == probe(limit=50).rows  # any limit, method or mode
    with pytest.raises(ValueError, match="grid was 16 and is 8"):
        probe(resume=file, settings=ProbeSettings(8, 256))
    content = json.loads(file.read_text())
    content["parts"]["0"]["block"]["edge"] = "damaged"
    file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="a part is damaged"):
        probe(resume=file)


def test_the_parts_of_a_probe_survive_json() -> None:
    part = next(EmbeddedScenes(pictures=4).parts(1000))
    tally = Tally()
    block = probe_block(part.instances(tally), ProbeSettings(), tally)
    tally.leave_out("too small", "annotation 3")
    tally.fault("torn", "picture 4", 2)
    again = unpacked(json.loads(json.dumps(packed((4, block, tally)))))
    assert again[0] == 4 and again[2] == tally and block is not None and again[1] is not None
    for field in fields(block):
        mine, theirs = getattr(block, field.name), getattr(again[1], field.name)
        assert np.array_equal(mine, theirs) if isinstance(mine, np.ndarray) else mine == theirs
    assert unpacked(packed((1, None, Tally())))[1] is None


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "no whole JSON"),
        ('{"format": "bmfa partial resu', "no whole JSON"),
        ("[1, 2]", "no format"),
        ('{"experiment": "evaluate", "rows": []}', "no format"),
        ('{"format": "bmfa partial results 1", "settings": {}}', "settings or parts are missing"),
        ("\x00\xff", "no whole JSON"),
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
        with pytest.raises(ValueError, match="a part is damaged"):
            evaluate(model, resume=file)
    with pytest.raises(ValueError, match="is a folder"):
        evaluate(model, resume=tmp_path)


def test_the_numbers_of_a_file_are_exact(tmp_path: Path) -> None:
    first = Checkpoint(tmp_path / "f", "x", {"a": (1, 2)}, lambda part: True)
    first.keep({10: {"sum": 0.1 + 0.2}, 2: {"sum": 1e-300}})
    first.write()
    again = Checkpoint(tmp_path / "f", "x", {"a": [1, 2]}, lambda part: True)
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
    arguments = ["evaluate", "--limit", "30", "--batch-size", "1", "--method", "optimal:0.01"]
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
    assert 0 < len(parts) < 30 and not record.exists()
    main([*arguments, "--resume", str(file), "--json", "-"])
    resumed = json.loads(capsys.readouterr().out)
    assert {**json.loads(file.read_text())["parts"], **parts} == json.loads(file.read_text())[
        "parts"
    ]
    main([*arguments, "--json", "-"])
    assert resumed["rows"] == json.loads(capsys.readouterr().out)["rows"]
