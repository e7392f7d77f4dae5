"""bmfa tune: its table, its files, and input that is refused."""

import json
from dataclasses import replace

import pytest
from tests.models.test_plan import plan_for, small_model

from bmfa.cli import main
from bmfa.cli.tune import format_change, layer_rows, reduction_lines, total_lines
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
    assert "tolerance 5.00 %" in printed and "measured on 2 other images" in printed
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
    assert "unseen images: 1.67 % expected, 1.80 % measured on 1" in text
    assert "exceeds the tolerance" in " ".join(total_lines(replace(plan, measured_change=0.031)))
    assert "fewer than six" in " ".join(total_lines(replace(plan, confirming=0)))


MERGING = ("tune", "--limit", "6", "--batch-size", "6", "--device", "cpu")


def test_a_plan_of_merging_is_printed_and_saved(capsys, tmp_path):
    save, record = tmp_path / "plan.json", tmp_path / "record.json"
    main(
        [
            *MERGING,
            "--gflops",
            "0.5",
            "--policy",
            "tome",
            "--save",
            str(save),
            "--json",
            str(record),
        ]
    )
    printed = capsys.readouterr().out
    plan = ReductionPlan.load(save)
    assert plan.policy == "tome" and plan.gflops <= 0.5 < plan.full_gflops
    lines = printed.splitlines()
    assert lines[0].split() == ["block", "removed", "tokens_left"]
    left = 256
    for block, (removed, line) in enumerate(zip(plan.schedule, lines[2:], strict=False)):
        left -= removed
        assert line.split() == [str(block), str(removed), str(left)]
    assert f"operations: {plan.gflops:.4g} of {plan.full_gflops:.4g} GFLOPs" in printed
    assert "3 images that chose: " in printed and "3 unseen images: " in printed
    assert f"plan: {save}\n" in printed and f"record: {record}\n" in printed
    data = json.loads(record.read_text())
    assert data["experiment"] == "tune-reduction" and len(data["rows"]) == 8
    assert data["settings"]["schedule"] == list(plan.schedule)
    reduce(load_model("embedded").model, plan=save)


def test_an_agreement_is_checked_and_reported_on_unseen_images(capsys, tmp_path):
    save = tmp_path / "plan.json"
    main([*MERGING, "--agreement", "0.5", "--quiet", "--save", str(save)])
    assert capsys.readouterr().out == ""
    plan = ReductionPlan.load(save)
    assert plan.checks[-1]["agreement"] >= 0.5
    assert (plan.choosing, plan.checking, plan.confirming) == (3, 2, 1)
    text = "\n".join(reduction_lines(plan))
    assert "for an agreement of 50.0 %" in text and "1 unseen image: " in text
    assert "2 images that checked" in text
    missed = replace(plan, agreement=0.4, confirming=1)
    assert "miss the target" in "\n".join(reduction_lines(missed))
    few = replace(plan, confirming=0, schedule=(0,) * 8)
    for part in ("fewer than six", "stays as it is"):
        assert part in "\n".join(reduction_lines(few))


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
        (["--limit", "0"], ["limit is 0"]),
        (["--seed", "-1"], ["seed is -1"]),
        (["--batch-size", "8", "--limit", "4"], ["batch_size is 8", "smaller batch_size"]),
        (["--layers", "last-9"], ["'last-9'"]),
        (["--gflops", "0.4", "--agreement", "0.9"], ["gflops and agreement are given"]),
        (["--gflops", "0"], ["gflops is 0"]),
        (["--agreement", "2"], ["agreement is 2"]),
        (["--gflops", "0.01", "--limit", "2"], ["gflops is 0.01", "needs at least", "pass more"]),
        (["--gflops", "0.4", "--tolerance", "0.1"], ["--tolerance is for plans of attention"]),
        (["--agreement", "0.9", "--error", "0.1"], ["--error is for plans of attention"]),
        (["--gflops", "0.4", "--figure", "plan.png"], ["--figure is for plans of attention"]),
        (["--policy", "tome"], ["--policy tome", "--gflops X or --agreement X"]),
        (["--gflops", "0.4", "--policy", "dct"], ["policy is 'dct'", "free-energy"]),
    ],
)
def test_bad_input_ends_with_one_line(arguments, words, capsys):
    error = refused(capsys, "tune", *arguments)
    assert all(word in error for word in words), error


def test_a_folder_with_one_or_no_image_is_refused(capsys, tmp_path):
    image = pytest.importorskip("PIL.Image")
    assert "has no images" in refused(capsys, "tune", "--images", str(tmp_path))
    image.new("RGB", (120, 112)).save(tmp_path / "one.png")
    assert "at least two" in refused(capsys, "tune", "--images", str(tmp_path))
    (tmp_path / "two.png").write_bytes(b"damaged")
    assert "two.png" in refused(capsys, "tune", "--images", str(tmp_path))
