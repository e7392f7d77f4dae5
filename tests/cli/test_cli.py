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

CORNER = ["synthetic", "--placement", "corner", "--method", "gamma:0.005"]


def stopped(capsys, *arguments, status=2):
    """The standard error and output of a command that ends with a status and one line."""
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    printed = capsys.readouterr()
    assert stop.value.code == status
    assert printed.err.count("\n") == 1 and printed.err.startswith("bmfa: ")
    return printed.err, printed.out


def record_of(capsys, *arguments):
    main([*arguments, "--json", "-"])
    return json.loads(capsys.readouterr().out)


def fresh(*arguments, **options):
    """A command in a process of its own."""
    return subprocess.run(
        [sys.executable, *arguments], text=True, stderr=subprocess.PIPE, **options
    )


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
    "evaluate --labels x.txt": ["--labels needs --data-dir"],
    "evaluate --method tome:fast": ["'fast'"],
    "evaluate --workers -1 --limit 1": ["workers is -1"],
    "bench trees --device abacus": ["'abacus'", "cpu"],
    "bench trees --grids 0": ["grids is 0"],
}


def test_bad_input_is_one_line_and_status_2(capsys, tmp_path):
    for line, words in BAD_INPUT.items():
        error, _ = stopped(capsys, *line.split())
        assert all(word in error for word in words), (line, error)
    # Targets that cannot be written are reported before the work.
    (tmp_path / "file").write_text("")
    stopped(capsys, "synthetic", "--json", str(tmp_path / "file" / "record.json"))
    for option in ("--json", "--csv"):
        assert (
            f"{option} {tmp_path} is a folder" in stopped(capsys, *CORNER, option, str(tmp_path))[0]
        )
    error, _ = stopped(capsys, *CORNER, "--csv", "-", "--json", "-")
    assert "both go to standard output" in error


def test_the_record_is_the_only_file_written(capsys, tmp_path):
    path = tmp_path / "[bold]x[/]" / "record[0].json"  # brackets are not markup
    main([*CORNER, "--json", str(path)])
    record = Record.from_json(path.read_text())
    assert record.experiment == "synthetic" and len(record.rows) == 1
    assert {"python", "torch", "device_name"} <= set(record.environment)
    printed = capsys.readouterr().out
    assert "gamma:0.005" in printed and f"record: {path}" in printed
    main([*CORNER, "--json", str(path), "--quiet"])
    assert capsys.readouterr().out == ""
    assert list(path.parent.iterdir()) == [path]


def test_a_failed_write_leaves_the_older_file_alone(tmp_path, monkeypatch):
    path = tmp_path / "record.json"
    path.write_text("before")

    def full(*_):
        raise OSError(28, "No space left on device")

    for function in ("os.replace", "os.fdopen"):
        with monkeypatch.context() as patch:
            patch.setattr(function, full)
            with pytest.raises(OSError, match="No space left"):
                write_atomic(path, "after")
        assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_names_the_file_and_the_table_is_printed(capsys, tmp_path):
    # A link to the device on which every write fails; writing to a link cannot harm the device.
    full, record = tmp_path / "full.png", tmp_path / "record.json"
    full.symlink_to("/dev/full")
    for arguments in (CORNER, [*CORNER, "--quiet"]):
        error, out = stopped(capsys, *arguments, "--json", str(full))
        assert f"{full} cannot be written (No space left on device)" in error
        assert out.startswith("placement  method")
        assert "gamma:0.005 " in out and "record:" not in out
        assert full.is_symlink()  # a device is written to, not replaced
    words = ["screen", "embedded:3", "--output", str(full), "--json", str(record)]
    error, out = stopped(capsys, *words)
    assert "full.png cannot be written" in error
    assert "optimal:0.002" in out and f"record: {record}" in out
    assert Record.from_json(record.read_text()).experiment == "image"
    record.unlink()
    for target in (str(record), "-"):
        with open("/dev/full", "w") as device:
            done = fresh("-m", "bmfa", *CORNER, "--json", target, stdout=device)
        assert done.returncode == 2 and done.stderr.count("\n") == 1
        assert "standard output cannot be written (No space left on device)" in done.stderr
    assert Record.from_json(record.read_text()).experiment == "synthetic"


MISSING = {
    "report": ("matplotlib PIL", "report"),
    "report --coco a.json b": ("pycocotools", "data"),
    "screen embedded:3": ("matplotlib PIL", "report"),
    "explore embedded:3": ("jinja2", "report"),
    "probe": ("PIL", "images"),
    "ablation": ("PIL", "images"),
    "probe --dataset coco --annotations a --images b": ("pycocotools", "data"),
    "evaluate --data-dir images": ("PIL", "images"),
    "closed-loop --data-dir images": ("PIL", "images"),
    "bench attention": ("PIL", "images"),
    "bench model --records a.json --figures f": ("matplotlib", "report"),
}


def test_missing_packages_are_reported_before_the_work(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("bmfa.evidence.synthetic.run.run", None)
    for line, (missing, extra) in MISSING.items():
        with monkeypatch.context() as patch:
            for name in missing.split():
                patch.setitem(sys.modules, name, None)
            error, _ = stopped(capsys, *line.split())
        packages = missing.replace("PIL", "pillow")
        assert f"run: pip install {packages}, or in a checkout" in error, error
        assert f"pip install '.[{extra}]'" in error
        assert list(tmp_path.iterdir()) == []


OWN_RULE = """
from dataclasses import dataclass
import torch
from bmfa.rules import Rule
from bmfa.trees.rules.base import split_above

@dataclass(frozen=True)
class Range(Rule):
    epsilon: float

    def node_scores(self, pyramid):
        return torch.cat([high - low for high, low in zip(pyramid.maxima(), pyramid.minima())])

    def decide(self, scores, context):
        return split_above(scores, self.epsilon, context)
"""


def test_a_rule_of_a_file_runs_in_experiments(capsys, tmp_path):
    path = tmp_path / "own.py"
    path.write_text(OWN_RULE)
    method = f"{path}:Range:0.5"
    (row,) = record_of(capsys, "synthetic", "--placement", "corner", "--method", method)["rows"]
    assert row["method"] == "Range:0.5" and row["mean_gap"] < 1e-3 and row["count"] == 396
    figure = tmp_path / "figure.png"
    words = ["closed-loop", "--limit", "2", "--layers", "7", "--figure", str(figure)]
    row = record_of(capsys, *words, "--method", method)["rows"][-1]
    assert row["method"] == "Range:0.5" and 0 < row["leaf_percent"] < 100
    assert figure.read_bytes()[:4] == b"\x89PNG"
    words = ["evaluate", "--limit", "2", "--repeats", "1", "--figure", str(figure)]
    rows = record_of(capsys, *words, "--method", method)["rows"]
    assert [row["method"] for row in rows] == ["full", "Range:0.5"] and rows[1]["leaf_percent"] > 0
    for bad, message in (
        (f"{path}:Rang:1", "has no subclass of bmfa.rules.Rule of the name 'Rang'"),
        (f"{path}:torch:1", "has no subclass of bmfa.rules.Rule of the name 'torch'"),
        (f"{tmp_path}/none.py:Range:1", "none.py"),
        (f"{path}:Range:x", "'x' is not a number"),
    ):
        assert message in stopped(capsys, "synthetic", "--method", bad)[0]
    for words in ("closed-loop --figure f.svg", "evaluate --repeats 0 --figure f.png"):
        assert "--figure" in stopped(capsys, *words.split())[0]


def test_records_survive_json_and_reject_other_files():
    record = Record("x", {"a": 1}, [{"gap": 0.5}, {"gap": None}], {"python": "3"})
    assert Record.from_json(record.to_json()) == record
    for text, message in (
        ('{"experiment": ', "is not JSON"),
        ('{"experiment": "x", "settings": {}}', "lacks environment, rows"),
        ("[1, 2]", "lacks"),
    ):
        with pytest.raises(ValueError, match=message):
            Record.from_json(text, "cut.json")


def native_status(capsys):
    rows = record_of(capsys, "info")["rows"]
    assert {"eager", "native"} <= {row["name"] for row in rows if row["what"] == "backend"}
    assert any(row["what"] == "device" and row["name"].startswith("cuda") for row in rows)
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
    reason = "the kernels for avx512 have not been compiled; run python -m there"
    monkeypatch.setattr(library, "_select", lambda setting: library.Selection(reason=reason))
    monkeypatch.setattr(library, "built_sets", tuple)
    assert native_status(capsys) == f"unavailable: {reason} (compiled: none)"


def test_methods_lists_the_registry(capsys):
    rows = {row["method"]: row for row in record_of(capsys, "methods")["rows"]}
    assert {name.partition(":")[0] for name in rows} == set(METHODS)
    assert rows["gamma:VALUE"]["kind"] == "rule" and "block means" in rows["gamma:VALUE"]["reads"]
    for words in (["--wide"], []):
        main(["methods", *words])
        printed = capsys.readouterr().out
        assert all(f"\n{name} " in printed for name in rows)
        # --wide has a line for each method
        assert (max(map(len, printed.splitlines())) > MAX_WIDTH) == bool(words)
    printed = " ".join(printed.split())
    for row in rows.values():
        assert row["description"] in printed and row["parameter"] in printed


HELP = {
    "evaluate": ({"full", "optimal:VALUE", "tome:VALUE"}, {"block-mean", "tiles:VALUE"}),
    "closed-loop": ({"optimal:VALUE", "global-mean"}, {"tome:VALUE", "full"}),
    "probe": ({"optimal:VALUE", "block-mean"}, {"tome:VALUE"}),
    "synthetic": ({"optimal:VALUE", "block-mean"}, {"tome:VALUE"}),
    "screen": ({"optimal:VALUE"}, {"tome:VALUE"}),
}


def test_every_command_has_help_which_lists_its_methods(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for line in ("", "bench", "bench trees", "bench model", "info", "methods", *HELP):
        with pytest.raises(SystemExit) as stop:
            main([*line.split(), "--help"])
        printed = capsys.readouterr().out
        assert stop.value.code == 0 and f"Usage: bmfa {line}".strip() in printed
        if line in HELP:
            lines = printed.partition("Methods for --method")[2].splitlines()
            names = {line.split()[0] for line in lines if line.strip() and line[:9].strip()}
            present, absent = HELP[line]
            assert present <= names and not absent & names, line
            (optimal,) = (line for line in lines if line.startswith("    optimal:VALUE"))
            assert optimal.split(maxsplit=1)[1] == METHODS["optimal"].parameter


def test_evaluate_fits_into_120_columns_and_wide_has_all(capsys):
    words = ["evaluate", "--limit", "2", "--batch-size", "2", "--repeats", "1"]
    words += ["--method", "tome:8", "--method", "optimal:0.01"]
    main(words)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= MAX_WIDTH
    (more,) = (line for line in lines if line.startswith("more with --wide: "))
    main([*words, "--wide"])
    header = capsys.readouterr().out.splitlines()[0].split()
    assert header == [*lines[0].split(), *more.removeprefix("more with --wide: ").split(", ")]


def test_csv_has_the_rows_of_the_record(capsys, tmp_path):
    main([*CORNER, "--csv", "-", "--json", str(tmp_path / "a.json")])
    read = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    rows = json.loads((tmp_path / "a.json").read_text("utf-8"))["rows"]
    assert [row["method"] for row in read] == [row["method"] for row in rows]
    assert [float(row["mean_gap"]) for row in read] == [row["mean_gap"] for row in rows]
    main([*CORNER, "--csv", str(tmp_path / "deep" / "a.csv")])
    assert f"rows: {tmp_path / 'deep' / 'a.csv'}" in capsys.readouterr().out


def test_an_interruption_names_the_command_that_goes_on(capsys, monkeypatch, tmp_path):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("bmfa.evidence.classification.run.run", interrupted)
    monkeypatch.setattr("bmfa.evidence.synthetic.run.run", interrupted)
    file, missing = str(tmp_path / "my part.json"), str(tmp_path / "none")
    Path(file).write_text("{}")
    for words, saved in (
        ([], "nothing of this run is saved"),
        (["--resume", file], f"partial results are in {file}"),
        ([f"--resume={file}"], f"partial results are in {file}"),
        (["--resume", missing], "nothing is saved yet"),
    ):
        typed = ["evaluate", "--limit", "2", *words]
        error, _ = stopped(capsys, *typed, status=130)
        assert error.startswith(f"bmfa: interrupted; {saved}")
        command = shlex.split(error.rpartition(": ")[2])
        assert command == ["bmfa", *typed, *([] if words else ["--resume", "evaluate.part"])]
    assert stopped(capsys, "synthetic", status=130)[0] == "bmfa: interrupted\n"  # it cannot resume


def test_images_of_the_user_in_the_toy_model_are_said(capsys, tmp_path):
    image = pytest.importorskip("PIL.Image").fromarray(EmbeddedImages(1)[0].pixels)
    for name in ("left", "right"):
        (tmp_path / "data" / name).mkdir(parents=True)
        image.save(tmp_path / "data" / name / "[b]1.png")
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


def test_the_module_is_the_command_and_methods_starts_without_torch():
    done = fresh("-m", "bmfa", "--version", stdout=subprocess.PIPE)
    assert done.stdout.strip() == f"bmfa {__version__}"
    code = "import sys; from bmfa.cli import main; main(['methods']); print('torch' in sys.modules)"
    assert fresh("-c", code, stdout=subprocess.PIPE).stdout.splitlines()[-1] == "False"


def test_records_may_follow_one_option_as_a_shell_writes_them(capsys):
    folder = Path(__file__).parents[2] / "records"
    names = [str(folder / f"model-{name}.json") for name in ("cpu", "saliency-cpu")]
    main(["bench", "model", "--records", *names])
    together = capsys.readouterr().out
    main(["bench", "model", "--records", names[0], "--records", names[1]])
    assert capsys.readouterr().out == together and together.count("img_size") == 2


def test_auto_is_a_device_that_works_and_the_earlier_name_of_a_method_too(capsys):
    record = record_of(capsys, "synthetic", "--placement", "corner", "--method", "sparge-mean")
    assert record["environment"]["device"] == ("cuda" if torch.cuda.is_available() else "cpu")
    assert record["rows"][0]["method"] == "block-mean"


def test_bench_trees_is_a_record_with_its_baselines(capsys):
    words = "bench trees --repeats 1 --batch-size 1 --method gamma:0.005 --grids 50"
    rows = record_of(capsys, *words.split())["rows"]
    assert rows[0]["method"] == "gamma:0.005 (oracle)"
    assert {row["what"] for row in rows} == {"trees", "softmax"}
    assert all(row["milliseconds"] > 0 for row in rows)


def test_every_option_has_help_and_no_docstring_describes_another():
    for command in (*app.COMMANDS, *app.bench_app.registered_commands):
        run = getattr(command, "callback", command)
        shown = inspect.signature(run if command is not run else groups.expanded(run)).parameters
        for name, parameter in shown.items():
            (info,) = parameter.annotation.__metadata__
            assert info.help and not info.help.endswith(".."), (run.__name__, name)
        described = groups._entries(inspect.unwrap(run))
        assert described.keys() <= shown.keys(), run.__name__
