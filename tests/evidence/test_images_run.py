"""One image in a model: attention, tree and certificate against an oracle, and the command."""

import json
import math
import os
import re
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from bmfa.cli import main
from bmfa.data.classification import LabelledImage
from bmfa.data.drawn.badges import BADGE_CLASSES, draw_badge
from bmfa.evidence.images import model_cases
from bmfa.evidence.images import run as image
from bmfa.evidence.images.figures import screen
from bmfa.models import LoadedModel, load_model, patch
from bmfa.models.screened_layer import screened_layers
from bmfa.packages import load_package
from bmfa.records import Record
from tree_oracle import Oracle


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_model("embedded")


def shown(index: int = 3) -> LabelledImage:
    pixels, label, _ = draw_badge(0, index)
    return LabelledImage(f"embedded:{index}", pixels, label)


def products(model: LoadedModel, layer: int, head: int, query: int) -> np.ndarray:
    """The scores of one query over all keys, from the weights themselves, in float64."""
    seen: list[torch.Tensor] = []
    attention = model.model.blocks[layer].attn
    handle = attention.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    with torch.inference_mode():
        model.logits(model.preprocess(shown().pixels)[None])
    handle.remove()
    tokens = seen[0][0].double().numpy()  # (257, 96)
    weight, bias = (p.detach().double().numpy() for p in attention.qkv.parameters())
    q, k, _ = np.split(tokens @ weight.T + bias, 3, axis=1)
    part = slice(head * attention.head_dim, (head + 1) * attention.head_dim)
    return np.asarray(k[:, part] @ q[query, part] * attention.head_dim**-0.5)


def test_attention_tree_and_error_are_the_oracles(model: LoadedModel) -> None:
    for query, index in (("class", 0), ("4,6", 1 + 4 * 16 + 6)):
        view = image.View(layer=5, head=2, query=query)
        (row,) = image.run(model, [shown()], ["optimal:0.002"], view=view).rows
        scores = products(model, 5, 2, index)
        # The layer computes in float32 what the oracle does in float64.
        assert np.allclose(row["scores"], scores[1:], atol=1e-4)
        full = np.exp(scores - np.logaddexp.reduce(scores))
        assert np.allclose(row["attention"], full[1:], atol=1e-4)
        assert row["prefix_percent"] == pytest.approx(100 * full[0], abs=0.01)
        grid = np.asarray(row["scores"]).reshape(16, 16)
        tree = Oracle(grid).tree("optimal:0.002")
        assert {tuple(box) for box in row["boxes"]} == {tuple(box) for box in tree.leaves}
        kept = scores.copy()
        for top, left, bottom, right in row["boxes"]:
            inside = [1 + r * 16 + c for r in range(top, bottom) for c in range(left, right)]
            kept[inside] = scores[inside].mean()
        error = np.logaddexp.reduce(scores) - np.logaddexp.reduce(kept)
        assert row["error"] == pytest.approx(error, abs=1e-4)
        approximate = np.exp(kept - np.logaddexp.reduce(kept))
        assert np.allclose(row["screened_attention"], approximate[1:], atol=1e-4)
        assert row["moved_percent"] == pytest.approx(
            50 * np.abs(full - approximate).sum(), abs=0.01
        )
        spatial = scores[1:]
        gap = np.logaddexp.reduce(spatial) - math.log(len(spatial)) - spatial.mean()
        assert row["gap"] == pytest.approx(gap, abs=1e-4)
        assert row["leaves"] == len(row["boxes"]) == round(row["leaf_percent"] / 100 * 256)


def test_the_figure_names_the_classes(model: LoadedModel) -> None:
    svg = screen(image.run(model, [shown()]))
    assert re.search(r"full: dotted triangle, 1 tick [\d.]+.% · screened: dotted triangle", svg)


def test_the_certificate_bounds_the_error(model: LoadedModel) -> None:
    methods = ["optimal:0.02", "gamma:0.05", "global-mean", "quadrant-gap:0.8"]
    rows = image.run(model, [shown()], methods).rows
    for row in rows:
        assert row["certificate"] >= row["error"] - 1e-12
        assert row["certificate_from"] == "scores"


def test_exact_trees_change_nothing_and_no_patch_is_left(model: LoadedModel) -> None:
    patch(model.model, rule="global-mean", layers="all")
    row = image.run(model, [shown()], ["exact-gap:0"], layers="all").rows[0]
    assert row["error"] < 1e-9 and row["moved_percent"] < 1e-4 and row["output_kl"] < 1e-6
    assert row["full_class"] == row["screened_class"]
    assert row["label"] == BADGE_CLASSES[3]
    assert not screened_layers(model.model)


def test_without_a_word_the_last_layer_and_the_head_that_a_mean_serves_worst(
    model: LoadedModel,
) -> None:
    def look(head: int | None) -> dict:
        view = image.View(head=head)
        return image.run(model, [shown()], ["global-mean"], view=view).rows[0]

    row, gaps = look(None), [look(head)["gap"] for head in range(3)]
    assert row["layer"] == 7 and row["head"] == int(np.argmax(gaps))


def test_the_image_shown_is_what_the_model_sees(model: LoadedModel) -> None:
    import base64
    import io

    (row,) = image.run(model, [shown()], image_bytes=10**6).rows
    data = base64.b64decode(row["image"].partition(",")[2])
    seen = np.asarray(Image.open(io.BytesIO(data)), dtype=float)
    assert seen.shape == (128, 128, 3)
    # JPEG of quality 90 on a noisy texture.
    assert np.abs(seen - shown().pixels).mean() < 8


def test_the_command_draws_a_figure_and_writes_a_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, figure, record = (tmp_path / name for name in ("in.png", "made/out.png", "out.json"))
    Image.fromarray(draw_badge(0, 3)[0]).resize((150, 130)).save(file)
    arguments = ["screen", str(file), "--query", "4,6", "--method", "gamma:0.05"]
    main([*arguments, "--output", str(figure), "--json", str(record)])
    told = capsys.readouterr().out
    assert (
        "gamma:0.05" in told and f"figure: {figure}" in told and "certificate from scores" in told
    )
    with Image.open(figure) as image:
        assert image.format == "PNG" and image.size[0] > 2 * 880
        assert len(image.convert("RGB").getcolors(1 << 24)) > 500
    assert [path.name for path in figure.parent.iterdir()] == ["out.png"]
    (row,) = Record.from_json(record.read_text()).rows
    assert row["query"] == "4,6" and row["title"] == "in.png" and "label" not in row


def test_the_embedded_images_need_no_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    main(["screen", "embedded:3", "--json", "-"])
    record = json.loads(capsys.readouterr().out)
    assert record["experiment"] == "image" and record["rows"][0]["label"] == BADGE_CLASSES[3]
    assert [path.name for path in tmp_path.iterdir()] == ["screen.png"]


def test_bad_input_is_one_line_and_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (64, 64)).save("whole.png")
    Path("torn.png").write_bytes(Path("whole.png").read_bytes()[:60])
    for arguments, words in (
        ("nowhere.png", "nowhere.png is no file; pass an image file, or embedded:N"),
        (".", "is a folder"),
        ("torn.png", "torn.png cannot be decoded"),
        ("embedded:x", "e.g. embedded:3"),
        ("embedded:1 --query 20,1", "outside the 16x16 grid"),
        ("embedded:1 --query cls", "query is 'cls'; pass class, or ROW,COLUMN"),
        ("embedded:1 --query 1,2,3", "ROW,COLUMN"),
        ("embedded:1 --layer -1", "layer is -1"),
        ("embedded:1 --head -1", "head is -1"),
        ("embedded:1 --layer 99", "layers 0 to 7"),
        ("embedded:1 --head 99", "heads 0 to 2"),
        ("embedded:1 --layers last-99", "last-99"),
        ("embedded:1 --method tree:1", "rule 'tree:1' is unknown"),
        ("embedded:1 --output figure.jpg", "pass FILE.png"),
        ("embedded:1 --model nothing", "model 'nothing' is unknown"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["screen", *arguments.split()])
        told = capsys.readouterr()
        assert ended.value.code == 2 and told.out == ""
        assert told.err.startswith("bmfa: ") and told.err.count("\n") == 1 and words in told.err
        assert not list(tmp_path.glob("screen*"))


def test_the_four_cases_are_different_images_of_the_kinds_they_name(model: LoadedModel) -> None:
    record = model_cases.run(model, count=12)
    titles = list(dict.fromkeys(row["title"] for row in record.rows))
    kinds = [title.partition(":")[0] for title in titles]
    assert kinds == ["Small badge", "Centred badge", "Clutter", "Failure"]
    assert len({row["image"] for row in record.rows}) == 4
    assert len(record.rows) == 4 * len(model_cases.METHODS)
    smallest = min(range(12), key=lambda index: draw_badge(0, index).mask.sum())
    small = record.rows[0]
    if not titles[3].endswith(BADGE_CLASSES[smallest % 24]):  # the failure case is chosen first
        assert small["label"] == BADGE_CLASSES[smallest % 24]
    assert record.settings["chosen_from"] == 12 and record.settings["command"] == "bmfa report"
    with pytest.raises(ValueError, match="count is 3"):
        model_cases.run(model, count=3)


@pytest.mark.skipif(find_spec("timm") is None, reason="needs timm: pip install 'bmfa[models]'")
def test_the_label_of_an_embedded_image_is_its_own_whatever_model_looks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, weights = "vit_tiny_patch16_224", tmp_path / "weights.pt"
    torch.save(load_package("timm").create_model(name).state_dict(), weights)
    arguments = ["screen", "embedded:3", "--model", f"timm:{name}", "--weights", str(weights)]
    main([*arguments, "--output", str(tmp_path / "out.png")])
    assert "labelled dotted triangle, 1 tick\n" in capsys.readouterr().out
    main(["screen", "embedded:3", "--output", str(tmp_path / "out.png")])
    assert "labelled dotted triangle, 1 tick" in capsys.readouterr().out


@pytest.mark.skipif("BMFA_ASSETS" not in os.environ, reason="BMFA_ASSETS names no real images")
@pytest.mark.skipif(find_spec("timm") is None, reason="needs timm: pip install 'bmfa[models]'")
def test_deit_tiny_on_a_photograph(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assets = Path(os.environ["BMFA_ASSETS"])
    weights = assets / "weights" / "deit_tiny_patch16_224.fp16.safetensors"
    arguments = ["screen", str(assets / "photos" / "shih-tzu.jpg"), "--weights", str(weights)]
    arguments += ["--model", "timm:deit_tiny_patch16_224", "--layer", "9", "--query", "5,6"]
    main([*arguments, "--output", str(tmp_path / "out.png"), "--json", "-"])
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["full_class"] == row["screened_class"] == "Shih-Tzu"
    assert row["error"] <= row["certificate"] and row["leaf_percent"] < 60
