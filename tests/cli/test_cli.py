"""The command line: invalid input, files it writes, missing packages, help."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bmfa import __version__
from bmfa.cli import main
from bmfa.evidence.methods import METHODS
from bmfa.files import write_atomic
from bmfa.records import Record


def refused(capsys, *arguments):
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert error.count("\n") == 1 and error.startswith("bmfa: ")
    return error


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["command", "synthetic"]),
        (["nonsense"], ["'nonsense'", "synthetic"]),
        (["synthetic", "--nonsense"], ["--nonsense", "--help"]),
        (["synthetc"], ["'synthetc'", "did you mean 'synthetic'"]),
        (["synthetic", "--plcement", "corner"], ["--plcement", "did you mean --placement"]),
        (["synthetic", "--max-depth", "deep"], ["'deep'", "--max-depth", "integer"]),
        (["synthetic", "--device", "--quiet"], ["--device", "requires an argument"]),
        (["synthetic", "--quiet=yes"], ["--quiet", "does not take a value"]),
        (["probe", "--dataset", "kitti"], ["'kitti'", "embedded", "lvis"]),
        (["report", "--coco", "a.json"], ["--coco", "2 arguments"]),
        (["screen"], ["PICTURE"]),
        (["info", "extra"], ["extra"]),
        (["bench", "attention", "--tokens", "196", "many"], ["'many'", "--tokens"]),
        (["synthetic", "--max-depth", "-1", "--placement", "corner"], ["-1", "at least 0"]),
        (["synthetic", "--placement", "middle"], ["'middle'", "corner"]),
        (["synthetic", "--method", "gamma:much"], ["'gamma:much'", "NAME:VALUE"]),
        (["synthetic", "--method", "gamma:-1"], ["-1", "[0, inf)"]),
        (["synthetic", "--method", "delta:1"], ["'delta:1'", "optimal"]),
        (["synthetic", "--method", "optimal-leaves:999"], ["999", "256"]),
        (["synthetic", "--scatter-seeds", "0"], ["scatter_seeds is 0"]),
        (["probe", "--img-size", "100"], ["--img-size", "is 100", "such as 96 or 112"]),
        (["ablation", "--img-size", "100"], ["--img-size", "is 100", "such as 96 or 128"]),
        (["evaluate", "--img-size", "100"], ["is 100", "such as 96 or 104"]),
        (["closed-loop", "--img-size", "100"], ["is 100", "such as 96 or 104"]),
        (["screen", "embedded:3", "--img-size", "100"], ["is 100", "such as 96 or 104"]),
        (["bench", "model", "--img-size", "100"], ["is 100", "such as 96 or 104"]),
        (["bench", "trees", "--device", "abacus"], ["'abacus'", "cpu"]),
        (["bench", "trees", "--grids", "0"], ["grids is 0"]),
    ],
)
def test_bad_input_is_one_line_and_status_2(capsys, arguments, words):
    error = refused(capsys, *arguments)
    assert all(word in error for word in words), error


def test_a_target_that_cannot_be_written_is_reported_before_the_work(capsys, tmp_path):
    assert "folder" in refused(capsys, "synthetic", "--json", str(tmp_path))
    (tmp_path / "file").write_text("")
    refused(capsys, "synthetic", "--json", str(tmp_path / "file" / "record.json"))


def test_the_record_is_the_only_file_written(capsys, tmp_path):
    path = tmp_path / "deep" / "record.json"
    arguments = ["synthetic", "--placement", "corner", "--method", "gamma:0.005"]
    main([*arguments, "--json", str(path)])
    record = Record.from_json(path.read_text())
    assert record.experiment == "synthetic" and len(record.rows) == 1
    assert {"python", "torch", "device_name"} <= set(record.environment)
    printed = capsys.readouterr().out
    assert "gamma:0.005" in printed and str(path) in printed
    main([*arguments, "--json", str(path), "--quiet"])
    assert capsys.readouterr().out == ""
    assert [file.name for file in path.parent.iterdir()] == ["record.json"]


def test_a_failed_write_leaves_the_older_file_alone(tmp_path, monkeypatch):
    path = tmp_path / "record.json"
    path.write_text("before")
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_atomic(path, "after")
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


full_device = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")


def full_disk(path):
    """A link to the device on which every write fails; writing to a link cannot harm the device."""
    path.symlink_to("/dev/full")
    return path


CORNER = ["synthetic", "--placement", "corner", "--method", "gamma:0.005"]
BENCH_TREES = ["bench", "trees", "--repeats", "1", "--batch-size", "1", "--method", "gamma:0.005"]


@full_device
@pytest.mark.parametrize("quiet", [[], ["--quiet"]])
@pytest.mark.parametrize(
    "arguments",
    [
        CORNER,
        ["probe", "--limit", "5", "--workers", "1", "--method", "gamma:0.005"],
        ["evaluate", "--limit", "2", "--repeats", "0", "--method", "gamma:0.005"],
        [*BENCH_TREES, "--grids", "5"],
    ],
)
def test_a_full_disk_names_the_file_and_the_table_is_printed(capsys, tmp_path, arguments, quiet):
    target = full_disk(tmp_path / "record.json")
    with pytest.raises(SystemExit) as stop:
        main([*arguments, *quiet, "--json", str(target)])
    printed = capsys.readouterr()
    assert stop.value.code == 2 and printed.err.count("\n") == 1
    assert f"{target} cannot be written (No space left on device)" in printed.err
    assert printed.out.startswith(("placement  method", "method", "what"))
    assert "\ngamma:0.005 " in printed.out or " gamma:0.005 " in printed.out
    assert "record:" not in printed.out
    assert target.is_symlink()  # a device is written to, not replaced


@full_device
def test_a_full_disk_under_the_figure_keeps_table_and_record(capsys, tmp_path):
    record, figure = tmp_path / "record.json", full_disk(tmp_path / "figure.png")
    with pytest.raises(SystemExit) as stop:
        main(["screen", "embedded:3", "--output", str(figure), "--json", str(record)])
    printed = capsys.readouterr()
    assert stop.value.code == 2 and "figure.png cannot be written" in printed.err
    assert "optimal:0.002" in printed.out and f"record: {record}" in printed.out
    assert Record.from_json(record.read_text()).experiment == "picture"


@full_device
@pytest.mark.parametrize("target", [[], ["--json", "-"]])
def test_a_full_standard_output_is_reported_once(tmp_path, target):
    record = tmp_path / "record.json"
    command = [sys.executable, "-m", "bmfa", *CORNER, *(target or ["--json", str(record)])]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "standard output cannot be written (No space left on device)" in done.stderr
    assert target or Record.from_json(record.read_text()).rows


def test_a_full_disk_leaves_the_older_file(tmp_path, monkeypatch):
    path = tmp_path / "record.json"
    path.write_text("before")

    class Full(io.BytesIO):
        def write(self, data):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fdopen", lambda handle, mode: Full())
    with pytest.raises(OSError, match=r"record\.json cannot be written \(No space left"):
        write_atomic(path, "after")
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("arguments", "missing", "extra"),
    [
        (["report"], ("matplotlib", "PIL"), "report"),
        (["report"], ("PIL",), "report"),
        (["report", "--coco", "a.json", "b"], ("pycocotools",), "data"),
        (["screen", "embedded:3"], ("matplotlib", "PIL"), "report"),
        (["probe"], ("PIL",), "data"),
        (["ablation"], ("PIL",), "data"),
        (
            ["probe", "--dataset", "coco", "--annotations", "a", "--images", "b"],
            ("pycocotools",),
            "data",
        ),
        (["evaluate", "--data-dir", "pictures"], ("PIL",), "data"),
        (["closed-loop", "--data-dir", "pictures"], ("PIL",), "data"),
        (["bench", "attention"], ("PIL",), "data"),
        (["bench", "model", "--records", "a.json", "--figures", "f"], ("matplotlib",), "report"),
    ],
)
def test_missing_packages_are_reported_before_the_work(
    capsys, monkeypatch, tmp_path, arguments, missing, extra
):
    def work(*_, **__):
        raise AssertionError("work began")

    monkeypatch.chdir(tmp_path)
    for name in missing:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr("bmfa.evidence.synthetic.run.run", work)
    names = {"PIL": "pillow"}
    error = refused(capsys, *arguments)
    assert all(names.get(name, name) in error for name in missing), error
    assert f"pip install 'bmfa[{extra}]'" in error
    assert list(tmp_path.iterdir()) == []


def test_records_survive_json_and_reject_other_files():
    record = Record("x", {"a": 1}, [{"gap": 0.5}, {"gap": None}], {"python": "3"})
    assert Record.from_json(record.to_json()) == record
    with pytest.raises(ValueError, match="is not JSON"):
        Record.from_json('{"experiment": ', "cut.json")
    with pytest.raises(ValueError, match="lacks environment, rows"):
        Record.from_json('{"experiment": "x", "settings": {}}')
    with pytest.raises(ValueError, match="lacks"):
        Record.from_json("[1, 2]")


def test_info_names_backends_and_what_is_missing(capsys):
    main(["info", "--json", "-"])
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {"reference", "eager"} <= {row["name"] for row in rows if row["what"] == "backend"}
    assert any(row["what"] == "device" and row["name"].startswith("cuda") for row in rows)


def test_methods_lists_the_registry(capsys):
    main(["methods", "--json", "-"])
    rows = {row["method"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    names = {name.partition(":")[0] for name in rows}
    assert names == set(METHODS)
    assert rows["gamma:VALUE"]["kind"] == "rule" and "block means" in rows["gamma:VALUE"]["reads"]
    main(["methods"])
    printed = capsys.readouterr().out
    assert all(f"\n{name} " in printed for name in rows)


def test_methods_starts_without_torch():
    code = "import sys; from bmfa.cli import main; main(['methods']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


@pytest.mark.parametrize("separate", [True, False])
def test_an_option_takes_several_values_or_is_repeated(capsys, separate):
    names = ["gamma:0.005", "global-mean"]
    words = (
        [word for name in names for word in ("--method", name)]
        if separate
        else ["--method", *names]
    )
    main(["synthetic", "--placement", "corner", *words, "--json", "-"])
    assert [row["method"] for row in json.loads(capsys.readouterr().out)["rows"]] == names


def test_a_unique_prefix_of_an_option_is_enough(capsys):
    main(["synthetic", "--place", "corner", "--meth=global-mean", "--js", "-"])
    assert json.loads(capsys.readouterr().out)["rows"][0]["method"] == "global-mean"
    assert "no such option: --s" in refused(capsys, "synthetic", "--s", "1")


def test_auto_is_a_device_that_works_and_the_record_names_it(capsys):
    main(["synthetic", "--placement", "corner", "--method", "global-mean", "--json", "-"])
    environment = json.loads(capsys.readouterr().out)["environment"]
    assert environment["device"] == ("cuda" if torch.cuda.is_available() else "cpu")


def test_brackets_in_paths_are_not_markup(capsys, tmp_path):
    path = tmp_path / "[bold]x[/]" / "r[0].json"
    main([*CORNER, "--json", str(path)])
    assert f"record: {path}" in capsys.readouterr().out and path.is_file()


def test_bench_trees_is_a_record_with_its_baselines(capsys):
    main([*BENCH_TREES, "--grids", "50", "--json", "-"])
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert rows[0]["method"] == "gamma:0.005 (oracle)"
    assert {row["what"] for row in rows} == {"trees", "softmax"}
    assert all(row["milliseconds"] > 0 for row in rows)


def test_the_module_is_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "bmfa", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == f"bmfa {__version__}"


@pytest.mark.parametrize(
    "command", [[], ["synthetic"], ["bench"], ["bench", "trees"], ["info"], ["methods"], ["screen"]]
)
def test_every_command_has_help(capsys, command):
    with pytest.raises(SystemExit) as stop:
        main([*command, "--help"])
    assert stop.value.code == 0
    assert "Usage: bmfa" in capsys.readouterr().out
