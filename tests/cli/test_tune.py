"""bmfa tune: its table, its files, and input that is refused."""

import json
from dataclasses import replace

import pytest
from tests.models.test_plan import plan_for, small_model

from bmfa.cli import main
from bmfa.cli.tune import format_change, layer_rows, total_lines
from bmfa.models import Plan

QUICK = ("tune", "--repeats", "1", "--limit", "4", "--error", "0.1", "0.2")


def refused(capsys, *arguments: str) -> str:
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert error.count("\n") == 1 and error.startswith("bmfa: ")
    return error


def test_the_table_is_printed_and_the_files_are_written(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    files = {name: tmp_path / name for name in ("plan.json", "record.json", "plan.png")}
    main([
        *QUICK,
        *("--save", str(files["plan.json"]), "--json", str(files["record.json"])),
        *("--figure", str(files["plan.png"]), "--tolerance", "0.05", "--device", "cpu"),
    ])  # fmt: skip
    printed = capsys.readouterr().out
    plan = Plan.load(files["plan.json"])
    assert plan.tolerance == 0.05 and len(plan.layers) == 8 and len(plan.times) == 8
    assert files["plan.png"].read_bytes().startswith(b"\x89PNG")
    record = json.loads(files["record.json"].read_text())
    assert record["experiment"] == "tune" and len(record["rows"]) == len(plan.candidates)
    assert printed.splitlines()[0].split() == [
        *("layer", "setting", "change_alone", "milliseconds", "dense_milliseconds", "speedup")
    ]
    assert "tolerance 5.00 %" in printed and "measured on 2 other pictures" in printed
    for kind, name in (("plan", "plan.json"), ("record", "record.json"), ("figure", "plan.png")):
        assert f"{kind}: {files[name]}\n" in printed


def test_logits_and_dtypes_reach_the_plan(capsys, tmp_path):
    save = tmp_path / "plan.json"
    words = ("--measure", "logits", "--dtype", "float32", "--layers", "last-2", "--quiet")
    main([*QUICK, *words, "--save", str(save)])
    plan = Plan.load(save)
    assert plan.measure == "logits" and plan.model.dtype == "float32"
    assert {s.layer for s in plan.candidates if s.error is not None} == {6, 7}
    assert capsys.readouterr().out == ""


def test_rows_and_totals_say_what_was_chosen():
    plan = plan_for(small_model(), {0: 0.3})
    rows = layer_rows(plan)
    assert [row["setting"] for row in rows] == ["error=0.3", "dense", "dense"]
    assert rows[0]["speedup"] == "2.00x" and rows[0]["change_alone"] == "1.00 %"
    text = " ".join(total_lines(plan))
    for part in ("1 of 3 layers", "1.70 % predicted", "1.60 % measured", "(1.60x)", "(1.33x)"):
        assert part in text
    assert "unseen pictures: 1.67 % expected, 1.80 % measured on 1" in text
    assert "exceeds the tolerance" in " ".join(total_lines(replace(plan, measured_change=0.031)))
    assert "fewer than six" in " ".join(total_lines(replace(plan, confirming=0)))


def test_changes_have_the_unit_of_their_measure():
    assert format_change("features", 0.0123) == "1.23 %"
    assert format_change("logits", 0.00123) == "0.00123 nats"
    assert format_change("depth", None) == "none"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tolerance", "0"], ["tolerance is 0", "above 0"]),
        (["--tolerance", "nan"], ["tolerance is nan"]),
        (["--images", "no-such-folder"], ["no-such-folder"]),
        (["--model", "timm:vit_tiny_patch16_224"], ["needs --images DIR"]),
        (["--save", "plan.txt"], ["--save plan.txt", "FILE.json"]),
        (["--figure", "plan.gif"], ["--figure plan.gif", "FILE.png"]),
        (["--measure", "psnr"], ["'psnr'", "features"]),
        (["--dtype", "int8"], ["'int8'", "bfloat16"]),
        (["--limit", "1"], ["limit is 1"]),
        (["--batch-size", "8", "--limit", "4"], ["batch_size is 8", "smaller batch_size"]),
        (["--layers", "last-9"], ["'last-9'"]),
    ],
)
def test_bad_input_ends_with_one_line(arguments, words, capsys):
    error = refused(capsys, "tune", *arguments)
    assert all(word in error for word in words), error


def test_a_folder_with_one_or_no_picture_is_refused(capsys, tmp_path):
    image = pytest.importorskip("PIL.Image")
    assert "has no pictures" in refused(capsys, "tune", "--images", str(tmp_path))
    image.new("RGB", (120, 112)).save(tmp_path / "one.png")
    assert "at least two" in refused(capsys, "tune", "--images", str(tmp_path))
    (tmp_path / "two.png").write_bytes(b"damaged")
    assert "two.png" in refused(capsys, "tune", "--images", str(tmp_path))
