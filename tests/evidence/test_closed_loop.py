"""The closed loop: images with labels, and how far the outputs of a screened model move."""

import json
import os
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from bmfa.data import ImageError, draw_badge_batch
from bmfa.data.classification import LabelledImage, LabelledImages
from bmfa.evidence.closed_loop import run as closed_loop
from bmfa.models import LoadedModel, Preprocessing, load_model, patch
from bmfa.models.embedded import EmbeddedViT
from bmfa.models.screened_layer import screened_layers
from bmfa.records import Record

COLUMNS = [
    *("method", "layers", "images", "leaf_percent"),
    *("agreement_percent", "output_kl", "attention_kl", "top1_percent"),
]


def write_images(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(0).integers(0, 256, (20, 24, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(root / name)
    return root


def labels_of(images: LabelledImages) -> dict[str, int | None]:
    return {image.name: image.label for image in images}


def test_labels_of_folders(tmp_path: Path) -> None:
    images = LabelledImages(write_images(tmp_path / "a", "002/b.png", "002/a.jpg", "010/c.png"))
    assert labels_of(images) == {"002/a.jpg": 2, "002/b.png": 2, "010/c.png": 10}
    assert len(images) == 3 and len(list(LabelledImages(tmp_path / "a", limit=2))) == 2
    assert images[0].pixels.shape == (20, 24, 3)
    images = LabelledImages(write_images(tmp_path / "b", "a.png"))
    assert labels_of(images) == {"a.png": None}
    (tmp_path / "empty").mkdir()
    with pytest.raises(ImageError, match="no images in"):
        LabelledImages(tmp_path / "empty")


@pytest.mark.skipif(find_spec("timm") is None, reason="needs timm: pip install 'bmfa[models]'")
def test_the_wordnet_ids_of_imagenet_are_known(tmp_path: Path) -> None:
    root = write_images(tmp_path, "n01443537/a.png")
    assert labels_of(LabelledImages(root)) == {"n01443537/a.png": 1}
    write_images(tmp_path, "n00000009/a.png")
    with pytest.raises(ImageError, match=r"n00000009 is not a class of ImageNet-1K; .*--class-map"):
        LabelledImages(tmp_path)


def test_labels_of_files(tmp_path: Path) -> None:
    root, file = write_images(tmp_path / "val", "a.png", "b.png"), tmp_path / "labels.txt"
    for text in (
        "a.png 3\nb.png 4\n",
        "ImageId,PredictionString\na,3 1 2 3 4\nb,4 5 6 7 8\n",
        "name label\n\n./nothing.png 9\na.png 3\nb.png 4\n",
    ):
        file.write_text(text)
        assert labels_of(LabelledImages(root, file)) == {"a.png": 3, "b.png": 4}
    for text, match in (
        ("a.png 3\nb.png cat\n", "'b.png cat'"),
        ("x.png 3\n", "names none of the 2 images"),
        ("3\n4\n", "NAME LABEL"),
    ):
        file.write_text(text)
        with pytest.raises(ImageError, match=match):
            LabelledImages(root, file)
    with pytest.raises(ImageError, match="cannot be read"):
        LabelledImages(root, tmp_path / "nowhere.txt")


@pytest.fixture
def model() -> LoadedModel:
    """The embedded architecture with sharp random attention."""
    torch.manual_seed(0)
    vit = EmbeddedViT().eval()
    with torch.no_grad():
        for block in vit.blocks:
            block.attn.qkv.weight.mul_(3.0)
    half = (0.5, 0.5, 0.5)
    return LoadedModel("embedded", vit, Preprocessing((128, 128), 1.0, mean=half, std=half))


def badges(count: int) -> list[LabelledImage]:
    pixels, labels, _ = draw_badge_batch(0, range(count))
    pairs = zip(pixels, labels, strict=True)
    return [LabelledImage(f"{i}", p, int(label)) for i, (p, label) in enumerate(pairs)]


def rows_of(record: Record) -> dict[tuple[str, str], dict[str, float]]:
    return {(row["method"], row["layers"]): row for row in record.rows}


def test_rows_are_complete_and_exact_trees_change_nothing(model: LoadedModel) -> None:
    seen: list[tuple[int, int | None]] = []
    record = closed_loop.run(
        model,
        badges(5),
        ["exact-gap:0", "global-mean", "random-quadrants:0.5"],
        layers=["last-2", "all"],
        batch_size=2,
        progress=lambda done, total: seen.append((done, total)),
    )
    rows = rows_of(record)
    assert [list(row) for row in record.rows] == [COLUMNS] * 7
    assert seen == [(2, 5), (4, 5), (5, 5)]
    full = rows["full", "none"]
    assert full["agreement_percent"] == full["leaf_percent"] == 100.0
    for layers in ("last-2", "all"):
        exact, mean = rows["exact-gap:0", layers], rows["global-mean", layers]
        assert exact["agreement_percent"] == 100.0
        assert abs(exact["output_kl"]) < 1e-6 and abs(exact["attention_kl"]) < 1e-5
        assert mean["leaf_percent"] == pytest.approx(100 / 256)
        assert mean["attention_kl"] > 0 and mean["output_kl"] > 0
        assert rows["random-quadrants:0.5", layers]["leaf_percent"] == pytest.approx(51, abs=2)
    assert not screened_layers(model.model)
    assert Record.from_json(record.to_json()).rows == record.rows
    assert json.loads(record.to_json())["settings"]["layers"] == ["last-2", "all"]


def test_the_result_depends_neither_on_batches_nor_on_a_patch_before(model: LoadedModel) -> None:
    methods = ["quadrant-gap:0.1", "optimal:0.01", "random-quadrants:0.5"]
    one = closed_loop.run(model, badges(4), methods, layers=[6, 7], batch_size=4)
    patch(model.model, rule="global-mean", layers="all")
    other = closed_loop.run(model, badges(4), methods, layers=[6, 7], batch_size=1)
    for mine, theirs in zip(one.rows, other.rows, strict=True):
        assert mine["layers"] in ("none", "6,7")
        for column in COLUMNS[2:]:
            assert mine[column] == pytest.approx(theirs[column], rel=1e-3, abs=1e-6)
    images = [LabelledImage(image.name, image.pixels) for image in badges(2)]
    record = closed_loop.run(model, images, ["global-mean"])
    assert all("top1_percent" not in row for row in record.rows)  # without labels


def test_bad_settings_raise_before_an_image_is_read(model: LoadedModel) -> None:
    def never() -> LabelledImage:
        raise AssertionError("an image was read")

    images = (never() for _ in range(1))
    for match, methods, options in (
        ("is unknown", ["nonsense:1"], {}),
        ("no methods", [], {}),
        ("last-9", ["global-mean"], {"layers": "last-9"}),
        ("batch_size", ["global-mean"], {"batch_size": 0}),
    ):
        with pytest.raises(ValueError, match=match):
            closed_loop.run(model, images, methods, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no image could be read"):
        closed_loop.run(model, [], ["global-mean"])


# Every tenth of the 500 images: leaf %, agreement %, output KL, attention KL.
SUBSET = {
    "quadrant-gap:0.8": (34.75, 96.0, 0.0733, 0.2506),
    "gamma:0.05": (28.36, 94.0, 0.0945, 0.4219),
    "optimal:0.002": (30.60, 98.0, 0.00465, 0.0799),
}


@pytest.mark.slow
@pytest.mark.skipif("BMFA_ASSETS" not in os.environ, reason="BMFA_ASSETS names no folder")
@pytest.mark.skipif(find_spec("timm") is None, reason="needs timm: pip install 'bmfa[models]'")
def test_deit_tiny_on_imagenet_keeps_its_figures() -> None:
    assets = Path(os.environ["BMFA_ASSETS"])
    weights = assets / "weights" / "deit_tiny_patch16_224.fp16.safetensors"
    model = load_model("timm:deit_tiny_patch16_224", weights, crop_pct=0.875)
    images = list(islice(LabelledImages(assets / "imagenet-val"), None, None, 10))
    rows = rows_of(closed_loop.run(model, images, list(SUBSET)))
    assert rows["full", "none"]["top1_percent"] == pytest.approx(70.0, abs=2.1)
    for method, (leaves, agreement, output_kl, attention_kl) in SUBSET.items():
        row = rows[method, "last-4"]
        assert row["leaf_percent"] == pytest.approx(leaves, abs=0.5)
        assert row["agreement_percent"] == pytest.approx(agreement, abs=2.1)  # one image
        assert row["output_kl"] == pytest.approx(output_kl, rel=0.1)
        assert row["attention_kl"] == pytest.approx(attention_kl, rel=0.1)
