"""bmfa tune: its table, its files, and input that is refused."""

import json
import shlex
from dataclasses import replace
from unittest import mock

import pytest
import torch
from tests.models.tuned_models import plan_for

from bmfa.cli import main
from bmfa.models import Plan, ReductionPlan, load_model, reduce, tune_reduction
from bmfa.models.tuning_run import Run

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


def test_an_interrupted_run_is_kept_beside_the_plan_and_goes_on(capsys, tmp_path):
    save, part = tmp_path / "plan.json", tmp_path / "plan.json.part"
    words = [*QUICK, *f"--img-size 64 --minutes 9 --save {save} --device cpu".split()]
    left, advance = iter(range(12)), Run.advance

    def stop(*args, **options) -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt
        advance(*args, **options)

    with mock.patch.object(Run, "advance", stop), pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 130 and list(tmp_path.iterdir()) == [part]
    line = capsys.readouterr().err.strip()
    assert f"partial results are in {part}; go on with: bmfa tune" in line
    command = shlex.split(line.partition("go on with: bmfa ")[2])
    assert command == [*words, "--resume", str(part)]
    main(command)
    assert list(tmp_path.iterdir()) == [save] and Plan.load(save).img_size == (64, 64)
    assert "9 minutes: 2 of 2 error targets on 4 images, which is all" in capsys.readouterr().out


def test_a_plan_is_evaluated_and_timed_like_a_method(capsys, tmp_path):
    model, record = load_model("embedded").model, tmp_path / "record.json"
    attention, merging = tmp_path / "plan.json", tmp_path / "merging.json"
    plan_for(model, {2: 0.2, 5: 0.2}, (32, 32)).save(attention)
    tune_reduction(model, torch.rand(4, 3, 128, 128), gflops=0.5, progress=False).save(merging)
    for plan, size in ((attention, "256"), (merging, "128")):
        words = f"evaluate --limit 2 --repeats 0 --img-size {size} --plan {plan} --json {record}"
        main(words.split())
        full, row = json.loads(record.read_text())["rows"]
        assert (full["method"], row["method"]) == ("full", f"plan:{plan}")
        assert row["output_kl"] > 0.0 and (row["gflops"] is None) == (plan == attention)
    assert row["gflops"] < full["gflops"]
    main(f"bench model --plan {attention} --repeats 1 --device cpu --json {record}".split())
    (row,) = (row for row in json.loads(record.read_text())["rows"] if "plan:" in row["method"])
    assert (row["img_size"], row["tiled_layers"]) == (256, 2) and row["error_l2_percent"] > 0.0
    capsys.readouterr()
    for words in (f"evaluate --plan {record}", f"bench model --plan {merging}"):
        assert "is not a plan" in refused(capsys, *words.split())


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
    ("--tolerance 5", ["tolerance is 5", "0.03 is 3 %"]),
    ("--error 3", ["errors is 3", "0.03 is 3 %"]),
    ("--minutes 0", ["minutes is 0"]),
    ("--data-dir no-such-folder", ["no-such-folder"]),
    ("--model timm:vit_tiny_patch16_224", ["needs --data-dir DIR"]),
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
