"""The command line: invalid input, files it writes, missing packages, help."""

import csv
import inspect
import io
import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bmfa import __version__
from bmfa.attention.kernels.native import library
from bmfa.cli import app, groups, main
from bmfa.cli.output import MAX_WIDTH
from bmfa.data import EmbeddedImages
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


BAD_INPUT = {
    "": ["command", "synthetic"],
    "nonsense": ["'nonsense'", "synthetic"],
    "synthetic --nonsense": ["--nonsense", "bmfa synthetic --help"],
    "synthetc": ["'synthetc'", "did you mean 'synthetic'"],
    "synthetic --plcement corner": ["--plcement", "did you mean --placement"],
    "synthetic --max-depth deep": ["'deep'", "--max-depth", "integer"],
    "synthetic --quiet --device": ["--device", "requires an argument", "bmfa synthetic --help"],
    "synthetic --device --quiet": ["'--quiet'", "cpu"],
    "synthetic --quiet=yes": ["--quiet", "does not take a value"],
    "probe --dataset kitti": ["'kitti'", "embedded", "lvis"],
    "report --coco a.json": ["--coco", "2 arguments"],
    "screen": ["IMAGE"],
    "info extra": ["extra"],
    "bench attention --tokens many": ["'many'", "--tokens"],
    "synthetic --method global-mean gamma:1": ["unexpected extra argument", "gamma:1"],
    "synthetic --max-depth -1 --placement corner": ["-1", "at least 0"],
    "synthetic --placement middle": ["'middle'", "corner"],
    "synthetic --method gamma:much": ["'gamma:much'", "NAME:VALUE"],
    "synthetic --method gamma:-1": ["-1", "[0, inf)"],
    "synthetic --method delta:1": ["'delta:1'", "optimal"],
    "synthetic --method optimal-leaves:999": ["999", "256"],
    "synthetic --scatter-seeds 0": ["scatter_seeds is 0"],
    "probe --img-size 100": ["--img-size", "is 100", "such as 96 or 112"],
    "ablation --img-size 100": ["--img-size", "is 100", "such as 96 or 128"],
    "evaluate --img-size 100": ["is 100", "such as 96 or 104"],
    "closed-loop --img-size 100": ["is 100", "such as 96 or 104"],
    "screen embedded:3 --img-size 100": ["is 100", "such as 96 or 104"],
    "bench model --img-size 100": ["is 100", "such as 96 or 104"],
    "bench trees --device abacus": ["'abacus'", "cpu"],
    "bench trees --grids 0": ["grids is 0"],
}


def test_bad_input_is_one_line_and_status_2(capsys):
    for line, words in BAD_INPUT.items():
        error = refused(capsys, *line.split())
        assert all(word in error for word in words), (line, error)


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
def test_a_full_disk_names_the_file_and_the_table_is_printed(capsys, tmp_path):
    target = full_disk(tmp_path / "record.json")
    evaluate = ["evaluate", "--limit", "2", "--repeats", "0", "--method", "gamma:0.005"]
    for arguments in (CORNER, [*CORNER, "--quiet"], evaluate):
        with pytest.raises(SystemExit) as stop:
            main([*arguments, "--json", str(target)])
        printed = capsys.readouterr()
        assert stop.value.code == 2 and printed.err.count("\n") == 1
        assert f"{target} cannot be written (No space left on device)" in printed.err
        assert printed.out.startswith(("placement  method", "method"))
        assert "gamma:0.005 " in printed.out and "record:" not in printed.out
        assert target.is_symlink()  # a device is written to, not replaced


@full_device
def test_a_full_disk_under_the_figure_keeps_table_and_record(capsys, tmp_path):
    record, figure = tmp_path / "record.json", full_disk(tmp_path / "figure.png")
    with pytest.raises(SystemExit) as stop:
        main(["screen", "embedded:3", "--output", str(figure), "--json", str(record)])
    printed = capsys.readouterr()
    assert stop.value.code == 2 and "figure.png cannot be written" in printed.err
    assert "optimal:0.002" in printed.out and f"record: {record}" in printed.out
    assert Record.from_json(record.read_text()).experiment == "image"


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


MISSING = {
    "report": (("matplotlib", "PIL"), "report"),
    "report --coco a.json b": (("pycocotools",), "data"),
    "screen embedded:3": (("matplotlib", "PIL"), "report"),
    "explore embedded:3": (("jinja2",), "report"),
    "probe": (("PIL",), "data"),
    "ablation": (("PIL",), "data"),
    "probe --dataset coco --annotations a --images b": (("pycocotools",), "data"),
    "evaluate --data-dir images": (("PIL",), "data"),
    "closed-loop --data-dir images": (("PIL",), "data"),
    "bench attention": (("PIL",), "data"),
    "bench model --records a.json --figures f": (("matplotlib",), "report"),
}


def test_missing_packages_are_reported_before_the_work(capsys, monkeypatch, tmp_path):
    def work(*_, **__):
        raise AssertionError("work began")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("bmfa.evidence.synthetic.run.run", work)
    for line, (missing, extra) in MISSING.items():
        with monkeypatch.context() as patch:
            for name in missing:
                patch.setitem(sys.modules, name, None)
            error = refused(capsys, *line.split())
        assert all({"PIL": "pillow"}.get(name, name) in error for name in missing), error
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
    assert {"eager", "native"} <= {row["name"] for row in rows if row["what"] == "backend"}
    assert any(row["what"] == "device" and row["name"].startswith("cuda") for row in rows)


def native_status(capsys) -> str:
    main(["info", "--json", "-"])
    rows = json.loads(capsys.readouterr().out)["rows"]
    (status,) = (row["status"] for row in rows if row["name"] == "native")
    return status


def test_info_says_which_native_kernels_run_or_why_none_does(capsys, monkeypatch):
    for setting in ("off", "nonsense", "avx2", ""):
        monkeypatch.setenv("BMFA_NATIVE", setting)
        status, reason = native_status(capsys), library.unavailable_reason()
        if reason is None:
            assert status.startswith(f"available: {library.instruction_set()} (compiled: ")
            assert setting in ("", library.instruction_set())
        else:
            assert status.startswith(f"unavailable: {reason} (compiled: ")
            assert setting not in ("off", "nonsense") or "BMFA_NATIVE" in reason
        assert ", ".join(library.built_sets()) in status
        recorded = Record("x", {}, []).environment.get("instruction_set")
        assert recorded == library.instruction_set()


def test_info_says_how_to_compile_native_kernels(capsys, monkeypatch):
    reason = "the kernels for avx512 have not been compiled; run python -m there"
    monkeypatch.setattr(library, "_select", lambda setting: library.Selection(reason=reason))
    monkeypatch.setattr(library, "built_sets", tuple)
    assert native_status(capsys) == f"unavailable: {reason} (compiled: none)"


def test_methods_lists_the_registry(capsys):
    main(["methods", "--json", "-"])
    rows = {row["method"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    names = {name.partition(":")[0] for name in rows}
    assert names == set(METHODS)
    assert rows["gamma:VALUE"]["kind"] == "rule" and "block means" in rows["gamma:VALUE"]["reads"]
    for words in ([], ["--wide"]):
        main(["methods", *words])
        printed = capsys.readouterr().out
        assert all(f"\n{name} " in printed for name in rows)
    assert max(map(len, printed.splitlines())) > MAX_WIDTH  # --wide: a line for each method
    main(["methods"])
    printed = " ".join(capsys.readouterr().out.split())
    for row in rows.values():
        assert row["description"] in printed and row["parameter"] in printed


def test_the_earlier_name_of_a_method_still_works(capsys):
    main(["synthetic", "--placement", "corner", "--method", "sparge-mean", "--json", "-"])
    assert json.loads(capsys.readouterr().out)["rows"][0]["method"] == "block-mean"


HELP = {
    "evaluate": ({"full", "optimal:VALUE", "tome:VALUE"}, {"block-mean", "tiles:VALUE"}),
    "closed-loop": ({"optimal:VALUE", "global-mean"}, {"tome:VALUE", "full"}),
    "probe": ({"optimal:VALUE", "block-mean"}, {"tome:VALUE"}),
    "synthetic": ({"optimal:VALUE", "block-mean"}, {"tome:VALUE"}),
    "screen": ({"optimal:VALUE"}, {"tome:VALUE"}),
}


def test_help_lists_the_methods_of_a_command_and_their_parameters(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for command, (present, absent) in HELP.items():
        with pytest.raises(SystemExit):
            main([command, "--help"])
        lines = capsys.readouterr().out.partition("Methods for --method")[2].splitlines()
        names = {line.split()[0] for line in lines if line.strip() and line[:9].strip()}
        assert present <= names and not absent & names, command
        (line,) = (line for line in lines if line.startswith("    optimal:VALUE"))
        assert line.split(maxsplit=1)[1] == METHODS["optimal"].parameter


EVALUATE = ["evaluate", "--limit", "2", "--repeats", "1"]
EVALUATE += ["--method", "tome:8", "--method", "optimal:0.002"]


def test_evaluate_fits_into_120_columns_and_wide_has_all(capsys):
    main([*EVALUATE])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= MAX_WIDTH
    (more,) = (line for line in lines if line.startswith("more with --wide: "))
    main([*EVALUATE, "--wide"])
    header = capsys.readouterr().out.splitlines()[0].split()
    hidden = more.removeprefix("more with --wide: ").split(", ")
    assert header == [*lines[0].split(), *hidden]


def test_csv_has_the_rows_of_the_record(capsys, tmp_path):
    record = tmp_path / "a.json"
    main([*CORNER, "--csv", "-", "--json", str(record)])
    read = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    rows = json.loads(record.read_text("utf-8"))["rows"]
    assert [row["method"] for row in read] == [row["method"] for row in rows]
    assert [float(row["mean_gap"]) for row in read] == [row["mean_gap"] for row in rows]
    main([*CORNER, "--csv", str(tmp_path / "deep" / "a.csv")])
    assert f"rows: {tmp_path / 'deep' / 'a.csv'}" in capsys.readouterr().out
    assert "both go to standard output" in refused(capsys, *CORNER, "--csv", "-", "--json", "-")
    assert f"--csv {tmp_path} is a folder" in refused(capsys, *CORNER, "--csv", str(tmp_path))


def test_an_interruption_names_the_command_that_goes_on(capsys, monkeypatch, tmp_path):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("bmfa.evidence.classification.run.run", interrupted)
    file, missing = str(tmp_path / "my part.json"), str(tmp_path / "none")
    Path(file).write_text("{}")
    for words, saved in (
        ([], "nothing of this run is saved"),
        (["--resume", file], f"partial results are in {file}"),
        ([f"--resume={file}"], f"partial results are in {file}"),
        (["--resume", missing], "nothing is saved yet"),
    ):
        typed = ["evaluate", "--limit", "2", *words]
        with pytest.raises(SystemExit) as stop:
            main(typed)
        error = capsys.readouterr().err
        assert stop.value.code == 130 and error.count("\n") == 1
        assert error.startswith(f"bmfa: interrupted; {saved}")
        command = shlex.split(error.rpartition(": ")[2])
        assert command == ["bmfa", *typed, *([] if words else ["--resume", "evaluate.part"])]


def test_a_command_that_cannot_resume_is_interrupted_without_advice(capsys, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("bmfa.evidence.synthetic.run.run", interrupted)
    with pytest.raises(SystemExit) as stop:
        main(["synthetic"])
    assert stop.value.code == 130 and capsys.readouterr().err == "bmfa: interrupted\n"


def test_images_of_the_user_in_the_toy_model_are_said(capsys, tmp_path):
    pixels = EmbeddedImages(1)[0].pixels
    image = pytest.importorskip("PIL.Image")
    for name in ("left", "right"):
        (tmp_path / "data" / name).mkdir(parents=True)
        image.fromarray(pixels).save(tmp_path / "data" / name / "[b]1.png")
    figure = str(tmp_path / "a.png")
    main(["screen", str(tmp_path / "data/left/[b]1.png"), "--output", figure])
    assert "warning: this image was seen by the embedded toy model" in capsys.readouterr().out
    main(["screen", "embedded:0", "--output", figure])
    assert "toy" not in capsys.readouterr().out
    main(["closed-loop", "--data-dir", str(tmp_path / "data"), "--method", "global-mean"])
    out = capsys.readouterr().out
    assert "labels: folders in sorted order: left 0, right 1\n" in out
    assert "warning: 2 folders in sorted order are taken as classes 0 to 1" in out
    assert "warning: the images were seen by the embedded toy model" in out


def test_methods_starts_without_torch():
    code = "import sys; from bmfa.cli import main; main(['methods']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


def test_records_may_follow_one_option_as_a_shell_writes_them(capsys):
    folder = Path(__file__).parents[2] / "records"
    names = [str(folder / f"model-{name}.json") for name in ("cpu", "saliency-cpu")]
    main(["bench", "model", "--records", *names])
    together = capsys.readouterr().out
    main(["bench", "model", "--records", names[0], "--records", names[1]])
    assert capsys.readouterr().out == together and together.count("img_size") == 2


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


def test_every_command_has_help(capsys):
    for line in (
        "",
        "synthetic",
        "bench",
        "bench trees",
        "bench model",
        "info",
        "methods",
        "screen",
    ):
        with pytest.raises(SystemExit) as stop:
            main([*line.split(), "--help"])
        assert stop.value.code == 0 and f"Usage: bmfa {line}".strip() in capsys.readouterr().out


def test_every_option_has_help_and_no_docstring_describes_another():
    for command in (*app.COMMANDS, *app.bench_app.registered_commands):
        run = getattr(command, "callback", command)
        shown = inspect.signature(run if command is not run else groups.expanded(run)).parameters
        for name, parameter in shown.items():
            (info,) = parameter.annotation.__metadata__
            assert info.help and not info.help.endswith(".."), (run.__name__, name)
        described = groups._entries(inspect.unwrap(run))
        assert described.keys() <= shown.keys(), run.__name__
