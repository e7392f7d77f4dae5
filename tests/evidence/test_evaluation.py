"""Evaluation: accuracy, cost and speed of every method, and what the command refuses."""

import copy
import json
import os
import pickle
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from bmfa import timing
from bmfa.cli import main
from bmfa.data.classification import EmbeddedImages, LabelledImage
from bmfa.evidence.classification import flops, throughput
from bmfa.evidence.classification import run as evaluation
from bmfa.evidence.closed_loop import run as closed_loop
from bmfa.evidence.model_methods import applied, check_methods
from bmfa.evidence.page import figures
from bmfa.evidence.runner.loop import Subject, observed_trees
from bmfa.models import LoadedModel, load_model, patch
from bmfa.models.screened_layer import screened_layers
from bmfa.models.token_reduction import find_reduction
from bmfa.records import Record

COLUMNS = [
    *("method", "images", "top1_percent", "top5_percent", "drop_pp", "agreement_percent"),
    *("output_kl", "leaf_percent", "final_tokens", "gflops"),
    *("images_per_second", "images_per_second_end_to_end", "speedup", "timed"),
]
TIMED = {"images_per_second", "images_per_second_end_to_end", "speedup"}


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_model("embedded")


def wrong_labels(count: int) -> list[LabelledImage]:
    """Embedded images, every third with the label of another class."""
    return [
        LabelledImage(p.name, p.pixels, (p.label or 0) + (i % 3 == 0) if p.label != 9 else 9)
        for i, p in enumerate(EmbeddedImages(count))
    ]


def test_rows_against_plain_counting(model: LoadedModel) -> None:
    images = wrong_labels(7)
    methods = ["global-mean", "fixed-pool:4"]
    record = evaluation.run(model, images, methods, batch_size=3, repeats=0)
    assert [list(row) for row in record.rows] == [COLUMNS] * 3
    pixels = model.preprocess.batch([image.pixels for image in images])
    labels = np.array([image.label for image in images])
    outputs = {}
    for name in ("full", *methods):
        with applied(model.model, name, "last-4"), torch.inference_mode():
            outputs[name] = model.logits(pixels).double().numpy()
    share = np.exp(outputs["full"]) / np.exp(outputs["full"]).sum(1, keepdims=True)
    for row in record.rows:
        scores = outputs[row["method"]]
        order = (-scores).argsort(1)
        top1 = 100 * (order[:, 0] == labels).mean()
        assert row["images"] == 7
        assert row["top1_percent"] == pytest.approx(top1, abs=1e-9)
        top5 = 100 * (order[:, :5] == labels[:, None]).any(1).mean()
        assert row["top5_percent"] == pytest.approx(top5, abs=1e-9)
        best = 100 * (outputs["full"].argmax(1) == labels).mean()
        assert row["drop_pp"] == pytest.approx(best - top1, abs=1e-9)
        same = 100 * (scores.argmax(1) == outputs["full"].argmax(1)).mean()
        assert row["agreement_percent"] == pytest.approx(same, abs=1e-9)
        other = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
        kl = (share * np.log(share / other)).sum(1).mean()
        # Batches of another size round the float32 outputs differently.
        assert row["output_kl"] == pytest.approx(kl, rel=1e-4, abs=1e-6)
        assert all(row[column] is None for column in TIMED)
    full, mean, pooled = record.rows
    assert full["leaf_percent"] is full["final_tokens"] is None
    assert mean["leaf_percent"] == pytest.approx(100 / 256) and mean["final_tokens"] is None
    assert pooled["final_tokens"] == 1 + 16 and pooled["leaf_percent"] is None
    assert not screened_layers(model.model) and not find_reduction(model.model)


def test_rows_do_not_depend_on_labels_or_on_a_patch_before_and_are_those_of_the_closed_loop(
    model: LoadedModel,
) -> None:
    images, methods = EmbeddedImages(5), ["optimal:0.002", "random-quadrants:0.5"]
    ours = evaluation.run(model, images, methods, batch_size=2, seed=3, repeats=0)
    theirs = closed_loop.run(model, images, methods, batch_size=2, seed=3)
    for mine, other in zip(ours.rows[1:], theirs.rows[1:], strict=True):
        assert mine["leaf_percent"] == pytest.approx(other["leaf_percent"], rel=1e-9)
        assert mine["output_kl"] == other["output_kl"]
    unlabelled = [LabelledImage(p.name, p.pixels) for p in EmbeddedImages(2)]
    row = evaluation.run(model, unlabelled, ["full"], repeats=0).rows[0]
    assert row["top1_percent"] is row["top5_percent"] is row["drop_pp"] is None
    assert row["agreement_percent"] == 100.0
    patch(model.model, rule="global-mean", layers="all")
    assert evaluation.run(model, unlabelled, ["full"], repeats=0).rows == [row]


def model_flops(attended: list[int], processed: list[int]) -> int:
    """The embedded model by hand: 8 blocks of width 96 with these tokens in attention and MLP."""
    total = 2 * 256 * 96 * 3 * 8 * 8 + 2 * 96 * (4 + 2 + 3)  # patches, and scores of three factors
    total += 2 * 256 * 112 * (3 * 16 * 16 + 96) + 2 * 256 * 96 * 96  # context and positions
    for tokens, behind in zip(attended, processed, strict=True):
        total += 2 * tokens * 96 * 4 * 96 + 4 * tokens * tokens * 96  # projections, attention
        total += 2 * behind * 96 * 8 * 96
    return total


def test_operations_against_counting_by_hand(model: LoadedModel) -> None:
    pixels = model.preprocess.batch([p.pixels for p in EmbeddedImages(1)])
    methods = ["full", "fixed-depth:4", "global-mean", "optimal:0.002", "random-pool:8", "tome:8"]
    costs = flops.costs(model, pixels, methods, "last-4")
    whole = model_flops([257] * 8, [257] * 8)
    assert costs["full"] == {"final_tokens": None, "gflops": whole / 1e9}
    assert costs["fixed-depth:4"]["gflops"] == whole / 1e9  # every token is a leaf
    # 3 heads and 257 queries in 4 layers: of 257 products with keys and with values, 2 are left.
    left = whole - 4 * 2 * 2 * 96 * 257 * (257 - 2)
    assert costs["global-mean"]["gflops"] == left / 1e9
    optimal = applied(model.model, "optimal:0.002", "last-4")
    with torch.inference_mode(), optimal, observed_trees(model.model) as trees:
        model.logits(pixels)
    # The leaves of all trees.
    kept = round(256 * float(trees()["leaf_ratio"].sum()) * 4 * 3 * 257)
    left = whole - 2 * 32 * (4 * 3 * 257 * 256 - kept)
    assert costs["optimal:0.002"]["gflops"] == left / 1e9
    fewer = [257 - 8 * block for block in range(9)]
    merged = model_flops(fewer[:8], fewer[1:])
    # Pairs cost no products.
    assert costs["random-pool:8"] == {"final_tokens": 257 - 64, "gflops": merged / 1e9}
    matching = sum(2 * 32 * (tokens // 2 + 1) ** 2 for tokens in fewer[:8])
    assert merged < 1e9 * costs["tome:8"]["gflops"] <= merged + matching
    assert costs["tome:8"]["final_tokens"] == 257 - 64


def test_samples_take_turns_short_calls_are_timed_together_and_the_median_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, seen = [0.0], []

    def work(name: str, seconds: float) -> None:
        seen.append(name)
        late = 100.0 if len(seen) == 6 else 1.0  # one sample meets a hitch
        clock[0] += late * seconds

    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])
    works = {"full": partial(work, "full", 0.5), "slow": partial(work, "slow", 2.0)}
    times = throughput.model_times(works, torch.device("cpu"), 3)
    assert seen == ["full"] * 2 + ["slow"] * 2 + ["full", "slow"] * 3
    assert [timed for _, timed in times.values()] == ["eager", "eager"]
    assert [ms for ms, _ in times.values()] == [pytest.approx(500.0), pytest.approx(2000.0)]
    before = len(seen)
    times = throughput.model_times({"short": partial(work, "short", 0.01)}, torch.device("cpu"), 2)
    assert times["short"][0] == pytest.approx(10.0, rel=0.2)
    assert len(seen) - before >= 2 + 2 * 10


def test_methods_are_timed_on_copies_that_share_the_weights(model: LoadedModel) -> None:
    subject = Subject(model)
    copies = {n: throughput.changed_copy(subject, n, "last-4") for n in ("global-mean", "tome:8")}
    assert not screened_layers(model.model) and not find_reduction(model.model)
    assert len(screened_layers(copies["global-mean"].model.model)) == 4
    assert find_reduction(copies["tome:8"].model.model)
    for one in copies.values():
        pairs = zip(one.model.model.parameters(), model.model.parameters(), strict=True)
        assert all(mine is theirs for mine, theirs in pairs)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_graphs_are_timed_where_they_can_be_captured(model: LoadedModel) -> None:
    subject = Subject(replace(model, model=copy.deepcopy(model.model)), "cuda")
    pixels = torch.zeros(2, 3, 112, 112, device="cuda")
    works = {
        "waits": lambda: float(subject.logits(pixels).sum()),
        "full": partial(subject.logits, pixels),
    }
    with torch.inference_mode():
        times = throughput.model_times(works, subject.device, 2)
    assert times["waits"][1] == "eager" and times["full"][1] == "graph" and times["full"][0] > 0


def test_timed_rows_and_their_figure(model: LoadedModel) -> None:
    record = evaluation.run(
        model, EmbeddedImages(3), ["fixed-pool:7", "evit:0.7"], batch_size=2, repeats=1
    )
    full = record.rows[0]
    for row in record.rows:
        assert all(row[column] > 0 for column in TIMED)
        ratio = row["images_per_second"] / full["images_per_second"]
        assert row["speedup"] == pytest.approx(ratio)
    assert Record.from_json(record.to_json()).rows == record.rows
    accuracy = figures.ALL["accuracy"]
    drawn = accuracy(record)
    assert "fixed-pool" in drawn and "evit" in drawn and "Embedded model, 3 images" in drawn
    untimed = evaluation.run(model, EmbeddedImages(1), ["full", "evit:0.7"], repeats=0)
    assert accuracy.drawable(record) and not accuracy.drawable(untimed)
    assert accuracy(untimed) == ""


def test_half_precision_leaves_the_callers_model_alone(model: LoadedModel) -> None:
    images = EmbeddedImages(4)
    single = evaluation.run(model, images, ["tome:8"], repeats=0).rows
    half = evaluation.run(model, images, ["tome:8"], repeats=0, dtype="bfloat16").rows
    mixed = evaluation.run(model, images, ["tome:8"], repeats=0, amp=True).rows
    assert next(model.model.parameters()).dtype == torch.float32
    for mine, other, third in zip(single, half, mixed, strict=True):
        assert mine["top1_percent"] == other["top1_percent"] == third["top1_percent"]
        assert mine["gflops"] == other["gflops"] == third["gflops"]
    assert half[1]["output_kl"] != single[1]["output_kl"]


def test_bad_settings_raise_before_the_work(model: LoadedModel) -> None:
    image = next(iter(EmbeddedImages(1)))
    broken = load_model("embedded")
    with torch.no_grad():
        broken.model.head.bias.fill_(torch.inf)  # type: ignore[union-attr]
    for match, methods, options in (
        (r"'delta:1' is unknown; pass full, a rule .*optimal.* or .* reduction .*tome", "delta:1", {}),
        ("last-9", "full", {"layers": "last-9"}),
        ("batch_size is 0", "full", {"batch_size": 0}),
        ("dtype is 'int8'", "full", {"dtype": "int8"}),
        ("amp and dtype float16", "full", {"dtype": "float16", "amp": True}),
        ("at most 128", "tome:129", {}),
        ("197 tokens in 12 blocks", "diffrate:0.8g", {}),
        ("repeats is -1", "full", {"repeats": -1}),
        ("class 207, and the model 24 classes", "full",
         {"images": [LabelledImage("far", image.pixels, 207)]}),
        ("no image could be read", "full", {"images": []}),
        ("not finite; try --dtype bfloat16", "full", {"model": broken}),
    ):  # fmt: skip
        given = {"model": model, "images": EmbeddedImages(1), "repeats": 0} | options
        with pytest.raises(ValueError, match=match):
            evaluation.run(methods=[methods], **given)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no methods"):
        evaluation.run(model, EmbeddedImages(1), [])
    assert check_methods(["tome:8", "full", "tome:8"], model.model, "all") == ["full", "tome:8"]


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert error.count("\n") == 1 and error.startswith("bmfa: ")
    return error


def folder(tmp_path: Path, count: int = 2) -> Path:
    """Images of classes 0 to 9 in folders by class index."""
    for image in EmbeddedImages(count):
        class_folder = tmp_path / "val" / f"{image.label:03}"
        class_folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image.pixels).save(class_folder / f"{image.name.partition(':')[2]}.png")
    return tmp_path / "val"


def test_the_command_names_what_it_skipped(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    data = folder(tmp_path, 3)
    whole = next(data.glob("*/*.png")).read_bytes()
    (data / "000").mkdir(exist_ok=True)
    (data / "000" / "torn.png").write_bytes(whole[: len(whole) // 2])
    Image.new("1", (10_000, 10_000)).save(data / "000" / "bomb.png")
    arguments = ["evaluate", "--data-dir", str(data), "--method", "full", "--repeats", "0"]
    main([*arguments, "--json", str(tmp_path / "r.json")])
    record = json.loads((tmp_path / "r.json").read_text())
    assert record["rows"][0]["images"] == 3 and record["settings"]["skipped"] == 2
    assert "bomb" in record["settings"]["skipped_names"][0]
    printed = capsys.readouterr()
    assert "2 unreadable images skipped" in printed.out and "torn.png" in printed.out
    main([*arguments, "--json", "-"])
    printed = capsys.readouterr()
    assert json.loads(printed.out)["rows"] == record["rows"] and "torn.png" in printed.err
    main([*arguments, "--quiet"])
    assert capsys.readouterr() == ("", "")
    assert "bomb.png cannot be decoded" in refused(capsys, *arguments, "--strict")


def test_the_command_refuses_weights(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    state, path = load_model("embedded").model.state_dict(), tmp_path / "other.pt"

    def refusal() -> str:
        return refused(capsys, "evaluate", "--weights", str(path))

    assert "does not exist; pass a safetensors" in refusal()
    state["extra"] = state.pop("head.bias")
    torch.save(state, path)
    error = refusal()
    assert 'Missing key(s) in state_dict: "head.bias"' in error
    assert 'Unexpected key(s) in state_dict: "extra"' in error
    path.write_bytes(pickle.dumps(print))
    assert "is refused" in refusal()
    torch.save({"model": Path("x")}, path)
    assert "is refused" in refusal()
    for content in (b"", b"root:x:0:0:root:/root", b"PK\x03\x04torn", b"\x80\x02}q\x00."):
        path.write_bytes(content)
        assert "other.pt" in refusal()


@pytest.mark.slow
@pytest.mark.skipif("BMFA_ASSETS" not in os.environ, reason="BMFA_ASSETS names no folder")
@pytest.mark.skipif(find_spec("timm") is None, reason="needs timm: pip install 'bmfa[models]'")
def test_deit_tiny_keeps_its_accuracy(capsys: pytest.CaptureFixture[str]) -> None:
    assets = Path(os.environ["BMFA_ASSETS"])
    weights = assets / "weights" / "deit_tiny_patch16_224.fp16.safetensors"
    main(
        f"evaluate --model timm:deit_tiny_patch16_224 --weights {weights} --crop-pct 0.875 "
        f"--data-dir {assets / 'imagenet-val'} --method full --repeats 0 --json -".split()
    )
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["images"] == 500
    assert row["top1_percent"] == pytest.approx(69.2)
    assert row["top5_percent"] == pytest.approx(90.6)
    assert row["gflops"] == pytest.approx(2.51, abs=0.01)  # 1.25 G multiply-adds, as published
