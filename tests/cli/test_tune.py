"""bmfa tune: its table, its files, and input that is refused."""

import json
from dataclasses import replace

import pytest

from bmfa.cli import main
from bmfa.models import Plan, ReductionPlan, load_model, reduce

QUICK = ("tune", "--repeats", "1", "--limit", "4", "--error", "0.1", "--error", "0.2")


def refused(capsys, *arguments: str) -> str:
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert error.count("\n") == 1 and error.startswith("bmfa: ")
    return error


def test_the_table_is_printed_and_the_files_are_written(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    plan_file, record_file, figure = (tmp_path / n for n in ("plan.json", "record.json", "a.png"))
    files = f"--save {plan_file} --json {record_file} --figure {figure}"
    main([*QUICK, *f"{files} --tolerance 0.05 --device cpu".split()])
    printed = capsys.readouterr().out
    plan, record = Plan.load(plan_file), json.loads(record_file.read_text())
    assert plan.tolerance == 0.05 and len(plan.layers) == 8
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert record["experiment"] == "tune" and len(record["rows"]) == len(plan.candidates)
    heading = "layer setting change_alone milliseconds dense_milliseconds speedup"
    assert printed.splitlines()[0].split() == heading.split()
    assert "tolerance 5.00 %" in printed and "measured on 2 validation images" in printed
    for line in (f"plan: {plan_file}\n", f"record: {record_file}\n", f"figure: {figure}\n"):
        assert line in printed


def test_logits_and_dtypes_reach_the_plan(capsys, tmp_path):
    save = tmp_path / "plan.json"
    words = f"--measure logits --dtype float32 --layers last-2 --quiet --save {save}"
    main([*QUICK, *words.split()])
    plan = Plan.load(save)
    assert plan.measure == "logits" and plan.model.dtype == "float32"
    assert {s.layer for s in plan.candidates if s.error is not None} == {6, 7}
    assert capsys.readouterr().out == ""


MERGING = ("tune", "--limit", "6", "--batch-size", "6", "--device", "cpu")


def test_a_plan_of_merging_is_printed_and_saved(capsys, tmp_path):
    save, record = tmp_path / "plan.json", tmp_path / "record.json"
    main([*MERGING, *f"--gflops 0.5 --policy tome --save {save} --json {record}".split()])
    printed, plan = capsys.readouterr().out, ReductionPlan.load(save)
    assert plan.policy == "tome" and plan.gflops <= 0.5 < plan.full_gflops
    heading, _, *lines = printed.splitlines()
    assert heading.split() == ["block", "removed", "tokens_left"]
    for row, line in zip(plan.table(), lines, strict=False):
        assert line.split() == [str(cell) for cell in row.values()]
    for part in (
        f"operations: {plan.gflops:.4g} of {plan.full_gflops:.4g} GFLOPs",
        *("3 calibration images: ", "3 test images: ", f"plan: {save}\n", f"record: {record}\n"),
    ):
        assert part in printed
    data = json.loads(record.read_text())
    assert data["experiment"] == "tune-reduction" and len(data["rows"]) == 8
    assert data["settings"]["schedule"] == list(plan.schedule)
    reduce(load_model("embedded").model, plan=save)


def test_an_agreement_is_checked_and_reported_on_unseen_images(capsys, tmp_path):
    save = tmp_path / "plan.json"
    main([*MERGING, "--agreement", "0.5", "--quiet", "--save", str(save)])
    assert capsys.readouterr().out == ""
    plan = ReductionPlan.load(save)
    (check,) = (check for check in plan.checks if check.chosen)
    assert check.validation_change <= 0.5
    assert (plan.calibration_images, plan.validation_images, plan.test_images) == (3, 2, 1)
    for changes, parts in (
        ({}, ("for an agreement of 50.0 %", "1 test images: ")),
        ({"agreement": 0.4}, ("target is missed",)),
        (
            {"test_images": 0, "schedule": (0,) * 8},
            ("px for an agreement of 50.0 %: 0 of", "2 validation images: "),
        ),
    ):
        assert all(part in "\n".join(replace(plan, **changes).notes()) for part in parts)


REFUSED = [
    ("--tolerance 5", ["tolerance is 5", "0.05 is 5 %"]),
    ("--images no-such-folder", ["no-such-folder"]),
    ("--model timm:vit_tiny_patch16_224", ["needs --images DIR"]),
    ("--save plan.txt", ["--save plan.txt", "FILE.json"]),
    ("--figure plan.gif", ["--figure plan.gif", "FILE.png"]),
    ("--measure psnr", ["'psnr'", "features"]),
    ("--dtype int8", ["'int8'", "bfloat16"]),
    ("--limit 1", ["limit is 1"]),
    ("--seed -1", ["seed is -1"]),
    ("--batch-size 8 --limit 4", ["batch_size is 8", "smaller batch_size"]),
    ("--layers last-9", ["'last-9'"]),
    ("--gflops 0.4 --agreement 0.9", ["gflops and agreement are given"]),
    ("--gflops 0.01 --limit 2", ["gflops is 0.01", "needs at least", "pass more"]),
    ("--gflops 0.4 --tolerance 0.1", ["--tolerance is for plans of attention"]),
    ("--agreement 0.9 --error 0.1", ["--error is for plans of attention"]),
    ("--gflops 0.4 --figure plan.png", ["--figure is for plans of attention"]),
    ("--policy tome", ["--policy tome", "--gflops X or --agreement X"]),
    ("--gflops 0.4 --policy dct", ["policy is 'dct'", "free-energy"]),
]


def test_bad_input_ends_with_one_line(capsys):
    for arguments, words in REFUSED:
        error = refused(capsys, "tune", *arguments.split())
        assert all(word in error for word in words), error
