"""The model at many tokens, patched and not: what the rows say, and that the model is left alone."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from bmfa.attention.kernels.native import library
from bmfa.data.classification import EmbeddedImages
from bmfa.evidence.faster import figures, run
from bmfa.models import LoadedModel, load_model, summary
from bmfa.models.embedded import EmbeddedViT
from bmfa.records import Record

SIDE = 48  # tokens along a side: 2,304, more than the 1,024 from which tiles run on a CPU
METHODS = ["full", "error:0", "error:0.05", "error:0.3"]


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    """A small model, whose attention on many tokens takes little time."""
    torch.manual_seed(0)
    return replace(load_model("embedded"), model=EmbeddedViT(dim=24, depth=2).eval())


@pytest.fixture(scope="module")
def record(model: LoadedModel) -> Record:
    return run.run(model, errors=[0.0, 0.05, 0.3], side=SIDE, images=2, shown=1)


def settings(record: Record) -> dict[str, dict]:
    return {row["method"]: row for row in record.rows if row["what"] == "setting"}


@pytest.mark.skipif(
    library.unavailable_reason() is not None, reason="torch operations gain nothing at this size"
)
def test_rows_of_settings(record: Record) -> None:
    rows = settings(record)
    full, exact = rows["full"], rows["error:0"]
    assert list(rows) == METHODS
    assert exact["feature_error_percent"] < 1e-3 and exact["density_percent"] == 100
    assert exact["error_percent"] is None
    assert full["speedup"] == 1 and full["full_mask_iou"] == 1 and full["agreement_percent"] == 100
    assert full["mask_iou_change"] == 0 and "error_percent" not in full
    for method, target in (("error:0.05", 5.0), ("error:0.3", 30.0)):
        row = rows[method]
        assert row["n"] == SIDE * SIDE and row["images"] == 2
        assert row["dense_layers"] == 0
        assert 0 <= row["error_percent"] <= target
        assert 0 < row["feature_error_percent"] < target
        assert 0 <= row["density_percent"] <= 100
        assert row["milliseconds"] > 0 and row["speedup"] > 0
        low, high = row["mask_iou_change_low"], row["mask_iou_change_high"]
        assert low <= row["mask_iou_change"] <= high
        assert row["mask_iou_change"] == pytest.approx(row["mask_iou"] - full["mask_iou"])


def test_masks_and_classes_are_those_of_the_model_which_is_not_patched_afterwards(
    record: Record, model: LoadedModel
) -> None:
    preprocess = model.preprocess.override(img_size=8 * SIDE)
    network: EmbeddedViT = model.model
    overlaps, right = [], []
    with torch.inference_mode():
        for image in EmbeddedImages(2, 0, 8 * SIDE):
            logits, masks = network.forward_dense(preprocess(image.pixels)[None])
            mask = masks[0].numpy() > 0
            overlaps.append((mask & image.mask).sum() / (mask | image.mask).sum())
            right.append(int(logits.argmax()) == image.label)
    full = settings(record)["full"]
    assert full["mask_iou"] == pytest.approx(np.mean(overlaps), abs=1e-6)
    assert full["top1_percent"] == 100 * np.mean(right)
    assert not network.norm._forward_hooks
    with pytest.raises(ValueError, match="neither patched nor reduced"):
        summary(network)


def test_images_are_shown_with_their_masks(record: Record) -> None:
    rows = [row for row in record.rows if row["what"] == "image"]
    assert [row["method"] for row in rows] == METHODS
    truth = EmbeddedImages(2, 0, 8 * SIDE)[0].mask
    shown = figures.read_mask(rows[0], "true_mask")
    assert shown.shape == (run.MASK_SIDE, run.MASK_SIDE)
    assert shown.mean() == pytest.approx(truth.mean(), abs=0.002)
    assert rows[0]["image"].startswith("data:image/jpeg;base64,")
    assert Record.from_json(record.to_json()).rows == record.rows
    svg = figures.faster(record)
    assert "patch(error=0.3)" in svg and "full model" in svg


def test_bad_settings_are_explained(model: LoadedModel) -> None:
    for changes in ({"images": 0}, {"errors": [-1.0]}, {"shown": 3}):
        given = {"errors": [0.1], "side": 16, "images": 2, "shown": 1} | changes
        with pytest.raises(ValueError, match=next(iter(changes)).removesuffix("s")):
            run.run(model, **given)


def test_the_fastest_setting_that_keeps_the_masks_is_shown() -> None:
    rows = [
        {"method": "full", "speedup": 1.0, "mask_iou_change": 0.0},
        {"method": "error:0.1", "speedup": 2.0, "mask_iou_change": -0.01},
        {"method": "error:0.2", "speedup": 3.0, "mask_iou_change": -0.03},
    ]
    assert figures.best_setting(rows) == "error:0.1"
    assert figures.best_setting(rows[2:]) == "error:0.2"
    # A change that may be larger than the limit is not kept within it.
    unsure = [{**rows[1], "speedup": 4.0, "method": "error:0.3", "mask_iou_change_low": -0.03}]
    assert figures.best_setting([*rows, *unsure]) == "error:0.1"
    assert figures.best_setting(rows[:1]) == "full"
