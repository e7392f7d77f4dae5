"""Parts of a run: killed runs go on, processes give the numbers of one, an outage is not a result."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from bmfa.cli import main
from bmfa.data import EmbeddedScenes, InstanceFiles, ProbeSettings
from bmfa.data import probes as probing
from bmfa.data.classification import EmbeddedImages, LabelledImages
from bmfa.data.images import ImagesLostError
from bmfa.evidence.classification import run as evaluation
from bmfa.evidence.closed_loop import run as closed_loop
from bmfa.evidence.probes import run as probes
from bmfa.evidence.runner import parts as runner
from bmfa.evidence.runner.parts import add, compute_parts, digest, weights_digest
from bmfa.models import LoadedModel, load_model
from bmfa.records import Record
from coco_files import write_coco

METHODS = ["random-quadrants:0.5", "tome:8"]


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_model("embedded")


@pytest.fixture
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)


class KilledError(Exception):
    """Stands for the end of the process."""


def evaluate(model: LoadedModel, images: Any = None, **options: Any) -> Record:
    given: dict[str, Any] = {"methods": METHODS, "batch_size": 2, "repeats": 0, "seed": 5}
    return evaluation.run(model, images or EmbeddedImages(7), **given | options)


def loop(model: LoadedModel, **options: Any) -> Record:
    given: dict[str, Any] = {"layers": ["last-1", "last-2"], "batch_size": 2}
    methods = ["random-quadrants:0.5", "optimal:0.01"]
    return closed_loop.run(model, EmbeddedImages(7), methods, **given | options)


def probe(**options: Any) -> Record:
    methods = ["gamma:0.005", "random-quadrants:0.5", "optimal-leaves-pooled:0.1"]
    given: dict[str, Any] = {"dataset": "embedded", "mode": "image-edge", "methods": methods}
    return probes.run(EmbeddedScenes(images=24), **given | options)


def saved_parts(file: Path) -> dict[int, Any]:
    """The parts of the whole lines of a file."""
    lines = file.read_bytes().rpartition(b"\n")[0].splitlines()[1:]
    return {number: part for number, part, _ in map(json.loads, lines)}


def test_parts_are_added_exactly_in_any_order_and_grouping() -> None:
    parts = [{"a": 0.1, "n": 1, "names": [str(i)]} for i in range(10)]
    assert add(parts) == {"a": 1.0, "n": 10, "names": list("0123456789")}
    assert add([{"a": 1e16, "b": 1}, {"a": 1.0}, {"a": -1e16}]) == {"a": 1.0, "b": 1}
    assert type(add([1, 2])) is int and add([{"x": {"y": 0.5}}] * 2) == {"x": {"y": 1.0}}


def test_a_run_that_ends_after_any_batch_continues_to_the_same_rows(
    model: LoadedModel, tmp_path: Path
) -> None:
    for run in (evaluate, loop):
        expected, file, seen = run(model), tmp_path / run.__name__, []

        def end(done: int, total: int, seen: list[Any] = seen) -> None:
            seen.append((done, total))
            raise KilledError

        for _ in range(4):
            with pytest.raises(KilledError):
                run(model, resume=file, progress=end)
            with file.open("a") as torn:
                torn.write('[3, {"skipped": [')  # as a process that is killed while it writes
        assert seen == [(2, 7), (4, 7), (6, 7), (7, 7)]
        last = run(model, resume=file, progress=end)  # nothing is left to do
        assert last.rows == expected.rows and last.settings == expected.settings


def test_a_probe_continues_to_the_same_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probing, "PART_IMAGES", 4)
    expected, file = probe(), tmp_path / "parts.json"

    def end(done: int, total: int) -> None:
        raise KilledError

    for count in (1, 2):
        with pytest.raises(KilledError):
            probe(resume=file, progress=end)
        assert len(saved_parts(file)) == count
    resumed = probe(resume=file)
    assert len(saved_parts(file)) > 3 and resumed.rows == expected.rows
    for name in ("faults", "left_out", "instances", "images"):
        assert resumed.settings[name] == expected.settings[name]
    assert probe(resume=file, limit=50).rows == probe(limit=50).rows  # any limit and methods
    probe(resume=file, methods=["global-mean"])
    for match, options in (
        ("grid was 16 and is 8", {"settings": ProbeSettings(8, 256)}),
        ('mode was "image-edge" and is "mask-only"', {"mode": "mask-only"}),
    ):
        with pytest.raises(ValueError, match=match):
            probe(resume=file, **options)


def test_another_run_is_refused_with_the_first_difference(
    model: LoadedModel, tmp_path: Path
) -> None:
    file = tmp_path / "parts.json"
    evaluate(model, resume=file)
    other = load_model("embedded")
    with torch.no_grad():
        other.model.head.bias[0] += 1  # type: ignore[union-attr, index]

    run = partial(evaluate, model, resume=file)
    for match, work in (
        ("belongs to another run: seed was 5 and is 6", partial(run, seed=6)),
        ("batch_size was 2 and is 3", partial(run, batch_size=3, seed=6)),
        ('layers was "last-4" and is "last-2"', partial(run, layers="last-2")),
        ('dtype was "float32" and is "float16"', partial(run, dtype="float16")),
        ("number of images was 7 and is 8", partial(run, EmbeddedImages(8))),
        ("names of images was", partial(run, EmbeddedImages(7, seed=1))),
        ("methods was .* and is", partial(run, methods=METHODS[:1])),
        ("weights was", partial(evaluate, other, resume=file)),
        ('experiment was "evaluate" and is "closed-loop"', partial(loop, model, resume=file)),
    ):
        with pytest.raises(ValueError, match=match):
            work()


def test_a_file_that_is_torn_foreign_or_damaged_is_refused_and_kept(
    model: LoadedModel, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "parts.json"
    contents = [
        ("", "is not JSON"),
        ('{"format": "bmfa partial resu', "is not JSON"),
        ("[1, 2]\n", "its format is not"),
        ('{"experiment": "evaluate", "rows": []}\n', "its format is not"),
        ("\x00\xff\n", "is not JSON"),
    ]
    for content, words in contents:
        file.write_bytes(content.encode("latin-1"))
        with pytest.raises(SystemExit) as stop:
            main(["evaluate", "--limit", "1", "--method", "full", "--resume", str(file)])
        error = capsys.readouterr().err
        assert stop.value.code == 2 and error.count("\n") == 1, content
        assert words in error and "delete it to start afresh" in error
        assert file.read_bytes() == content.encode("latin-1")
    file.unlink()
    evaluate(model, resume=file)
    header, first, second, *rest = file.read_text().splitlines()
    for damaged in (
        [header, first.replace('"images": 2', '"images": 3'), second, *rest],
        [header, first.replace("[0,", "[1,"), second.replace("[1,", "[0,"), *rest],
        [header, first, '["1"]', *rest],
    ):
        file.write_text("\n".join(damaged) + "\n")
        with pytest.raises(ValueError, match=r"part .* does not match its fingerprint"):
            evaluate(model, resume=file)
    with pytest.raises(ValueError, match="is a folder"):
        evaluate(model, resume=tmp_path)
    assert digest(["ab", "c"]) != digest(["a", "bc"])
    layer = torch.nn.Linear(2, 2)
    before = weights_digest(layer)
    assert before == weights_digest(layer)
    with torch.no_grad():
        layer.weight[0, 0] += 1
    assert weights_digest(layer) != before
    assert weights_digest(layer.half()) != weights_digest(layer.float())


def test_a_full_disk_under_the_partial_results_does_not_end_the_run(
    model: LoadedModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    expected, file = evaluate(model), tmp_path / "parts.json"

    whole = Path.open

    def full(self: Path, *args: Any, **options: Any) -> Any:
        if self == file:
            raise OSError(28, "No space left on device", str(file))
        return whole(self, *args, **options)

    def fill(done: int, total: int) -> None:
        monkeypatch.setattr(Path, "open", full)

    assert evaluate(model, resume=file, progress=fill).rows == expected.rows
    assert caplog.text.count("partial results are not saved") == 1 and str(file) in caplog.text
    monkeypatch.undo()
    assert list(saved_parts(file)) == [0]
    assert evaluate(model, resume=file).rows == expected.rows


def write_images(folder: Path, count: int = 6) -> Path:
    for index, image in enumerate(EmbeddedImages(count)):
        place = folder / str(image.label)
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image.pixels).save(place / f"{index}.png")
    return folder


def take_away(root: Path, *, empty: bool = False) -> None:
    """As a disk that is unmounted does, which may leave an empty folder."""
    root.rename(root.with_name("elsewhere"))
    if empty:
        root.mkdir()


def bring_back(root: Path) -> None:
    if root.exists():
        root.rmdir()
    root.with_name("elsewhere").rename(root)


COMMANDS = (
    "evaluate --method tome:8 --repeats 0",
    "closed-loop --method global-mean --layers last-1",
)


def test_images_that_vanish_stop_the_run_and_unreadable_ones_are_tried_again(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    root = write_images(tmp_path / "val")
    for number, command in enumerate(COMMANDS):
        file = tmp_path / f"{number}.part"
        arguments = [*command.split(), "--data-dir", str(root), "--batch-size", "2"]
        arguments += ["--workers", "0", "--json", "-"]

        def run(*resume: str, arguments: list[str] = arguments) -> Any:
            main([*arguments, *resume])
            return json.loads(capsys.readouterr().out)

        def vanish(done: int, total: int, empty: bool = bool(number)) -> None:
            if done == 2:
                take_away(root, empty=empty)

        expected = run()["rows"]
        assert expected[0]["images"] == 6
        resume = ["--resume", str(file)]
        for options in ([], resume):
            with monkeypatch.context() as patch:
                patch.setattr("bmfa.cli.output.Output.progress", lambda *_, v=vanish: v)
                with pytest.raises(SystemExit) as stop:
                    main([*arguments, *options])
            printed = capsys.readouterr()
            assert stop.value.code == 2 and printed.out == "" and printed.err.count("\n") == 1
            assert str(root) in printed.err and "bring the images back" in printed.err
            saved = f"1 batch is saved in {file}, and --resume {file} continues from there"
            assert (saved if options else "nothing of this run is saved") in printed.err
            bring_back(root)
        assert list(saved_parts(file)) == [0]
        torn = [root / "2" / "2.png", root / "5" / "5.png"]
        whole = [path.read_bytes() for path in torn]
        for path in torn:
            path.write_bytes(b"\x89PNG\r\n")
        assert run(*resume)["settings"]["skipped"] == 2
        torn[0].write_bytes(whole[0])
        record = run(*resume)
        assert record["settings"]["skipped"] == 1 and record["rows"][0]["images"] == 5
        assert run(*resume)["rows"] == record["rows"]  # the last one is still torn
        torn[1].write_bytes(whole[1])
        resumed = run(*resume)
        assert resumed["rows"] == expected and resumed["settings"]["skipped"] == 0


def test_links_into_a_disk_that_vanishes_stop_the_run_too(
    model: LoadedModel, tmp_path: Path
) -> None:
    disk, root = write_images(tmp_path / "disk"), tmp_path / "val"
    root.mkdir()
    for file in disk.glob("*/*.png"):
        (root / file.name).symlink_to(file)
    with pytest.raises(ImagesLostError, match="disk"):
        evaluate(
            model,
            LabelledImages(root),
            methods=["full"],
            workers=0,
            progress=lambda done, total: take_away(disk) if done == 2 else None,
        )


def test_a_probe_stops_where_its_images_vanish_and_tries_unreadable_ones_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(probing, "PART_IMAGES", 1)
    annotations, images = write_coco(tmp_path, images=8), tmp_path / "images"
    file = tmp_path / "parts.json"

    def run(**options: Any) -> Record:
        source = InstanceFiles(annotations, images)
        given: dict[str, Any] = {"dataset": "coco", "mode": "mask-only", "methods": ["gamma:0.005"]}
        return probes.run(source, **given | options)

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


def launch(processes: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command under torchrun; a free port is chosen."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*launcher, "--nproc-per-node", str(processes), "-m", "bmfa", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def rows_alone(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    main([*arguments, "--json", "-"])
    return json.loads(capsys.readouterr().out)["rows"]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Nine images that do not fill the last batch, and one that cannot be read."""
    folder = write_images(tmp_path / "val", 9)
    (folder / "8" / "torn.png").write_bytes(b"\x89PNG\r\n")
    return folder


@pytest.mark.slow
@pytest.mark.usefixtures("_one_thread")
def test_several_processes_give_the_rows_of_one(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, data: Path
) -> None:
    methods = "--method random-quadrants:0.5 --method optimal:0.01 --method tome:8 --repeats 0"
    arguments = f"evaluate --data-dir {data} --batch-size 2 {methods}".split()
    done = launch(2, *arguments, "--json", str(tmp_path / "r.json"))
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "r.json").read_text())
    assert record["rows"] == rows_alone(capsys, *arguments)
    assert record["rows"][0]["images"] == 9 and record["settings"]["skipped"] == 1
    assert record["settings"]["processes"] == 2
    # One process prints.
    assert done.stdout.count("optimal:0.01") == 1 and done.stdout.count("torn.png") == 1


@pytest.mark.slow
@pytest.mark.usefixtures("_one_thread")
def test_two_processes_continue_run_other_commands_and_tell_an_error_once(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, data: Path
) -> None:
    file, method = tmp_path / "parts.json", "--method random-quadrants:0.5"
    loop = f"closed-loop --data-dir {data} --batch-size 2 --layers last-1 {method}".split()
    resume = [*loop, "--resume", str(file)]
    rows_alone(capsys, *resume)
    lines = file.read_text().splitlines()
    assert len(lines) == 6
    file.write_text("\n".join([*lines[:2], *lines[3:5]]) + "\n")
    probing = f"probe --limit 300 --workers 1 {method}".split()
    for alone, arguments in ((loop, resume), (probing, probing)):
        done = launch(2, *arguments, "--json", str(tmp_path / "r.json"))
        assert done.returncode == 0, done.stderr
        rows = json.loads((tmp_path / "r.json").read_text())["rows"]
        assert rows == rows_alone(capsys, *alone)
    assert done.stdout.count("random-quadrants:0.5") == 1
    assert sorted(saved_parts(file)) == [0, 1, 2, 3, 4]
    file.write_text("torn")
    done = launch(2, *resume)
    assert done.returncode != 0
    assert done.stderr.count("holds no usable partial results") == 1


def test_every_part_is_computed_once_and_yielded_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of several processes, which is given the parts of the others."""
    for count in (1, 2, 3, 7, 9):
        for rank in range(count):
            starts = iter(range(0, 100, count))

            def gather_object(
                outcomes: list[Any], mine: Any, rank: int = rank, starts: Any = starts
            ) -> None:
                start = next(starts)
                outcomes[:] = [({"n": start + place}, None) for place in range(len(outcomes))]
                outcomes[rank] = mine

            def compute(numbers: Any, rank: int = rank, count: int = count) -> Iterator[Any]:
                assert list(numbers) == list(range(rank, 7, count))
                yield from ({"n": number} for number in numbers)

            monkeypatch.setattr(runner, "rank", partial(int, rank))
            monkeypatch.setattr(runner, "count", partial(int, count))
            monkeypatch.setattr(runner.distributed, "all_gather_object", gather_object)
            found = list(compute_parts([1] * 7, compute))
            assert found == [{"n": number} for number in range(7)], (rank, count)


def test_an_error_of_one_process_is_raised_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    failure = None, ValueError("part 3 failed")
    for mine, others in ((failure, (1, None)), ((1, None), failure)):

        def gather_object(outcomes: list[Any], outcome: Any, others: Any = others) -> None:
            outcomes[:] = [outcome, others]

        def work(mine: Any = mine) -> Any:
            if mine[1] is not None:
                raise mine[1]
            return mine[0]

        monkeypatch.setattr(runner, "count", lambda: 2)
        monkeypatch.setattr(runner.distributed, "all_gather_object", gather_object)
        with pytest.raises(ValueError, match="part 3 failed"):
            runner.gather(work)


def test_processes_and_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"RANK": "5", "WORLD_SIZE": "8", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
    for name in (*settings, "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert not runner.launched() and runner.own_device("cuda") == "cuda"
    with runner.joined():
        assert (runner.rank(), runner.count()) == (0, 1)
        assert runner.gather(lambda: "x") == ["x"] and runner.from_first(lambda: 3) == 3
    with monkeypatch.context() as patch:
        patch.setattr(runner, "rank", lambda: 1)
        assert runner.from_first(lambda: 1 / 0) is None  # the first process alone works
    for name, value in {**settings, "LOCAL_RANK": "5"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    with pytest.raises(ValueError, match="finds 4 CUDA devices; start at most 4"):
        runner.own_device("cuda")
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert runner.own_device("cuda") == "cuda:3" and runner.own_device("cpu") == "cpu"


def test_sums_do_not_depend_on_threads_and_other_commands_run_in_the_first_process_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MKL_CBWR", "")
    monkeypatch.delenv("MKL_CBWR")
    with pytest.raises(SystemExit):
        main(["evaluate", "--limit", "0"])
    assert "count is 0" in capsys.readouterr().err
    assert os.environ["MKL_CBWR"] == "AUTO,STRICT"  # torchrun gives each process one thread
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    main(["synthetic", "--placement", "corner", "--method", "gamma:0.005"])
    assert capsys.readouterr() == ("", "")
