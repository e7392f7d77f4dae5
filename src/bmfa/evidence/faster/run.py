"""The embedded model on large images, patched with several error targets and not patched.

Every image goes through all models in turn, so that other work on the machine slows all of them.
"""

import base64
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bmfa.checks import check_integer, check_number
from bmfa.data.classification import EmbeddedImages, LabelledImage
from bmfa.evidence.bench.methods import missed_targets_ignored
from bmfa.evidence.images.thumbnails import square_uri
from bmfa.evidence.methods import FULL
from bmfa.evidence.metrics import compare, mask_iou, mean_percent
from bmfa.evidence.model_methods import copy_sharing_weights
from bmfa.evidence.runner.loop import Segmenter
from bmfa.models import LoadedModel, patch, summary
from bmfa.models.embedded.model import PATCH_SIZE
from bmfa.models.screened_layer import screened_layers
from bmfa.models.summarizing import LayerSummary
from bmfa.packages import load_package
from bmfa.records import Record, Row, environment
from bmfa.timing import synchronize

SIDE = 64  # tokens along a side
# Targets of the relative L2 error of every attention; 0 is exact attention, by the fastest kernel.
ERRORS = (0.0, 0.01, 0.03, 0.1)
IMAGES = 24  # the first 24 images have one of each class
SHOWN = 3  # images whose masks are kept in the record
MASK_SIDE = 128  # pixels of a mask in the record
IMAGE_BYTES = 9_000
# Passes before the first timing: the first allocates memory and decides how each layer runs.
WARM_UP = 1
PROTOCOL = (
    "one image at a time, preprocessing apart; every image goes through all models in turn; "
    "milliseconds is the median over images, speedup the median of the ratios of the same image; "
    "mask_iou is with the object, full_mask_iou with the mask of the full model; error_percent is the "
    "mean over layers and images of the relative L2 error that patched layers measure of themselves, "
    "feature_error_percent the relative L2 change of the features after the last norm"
)


def run(
    model: LoadedModel,
    *,
    errors: Sequence[float] = ERRORS,
    side: int = SIDE,
    images: int = IMAGES,
    shown: int = SHOWN,
    seed: int = 0,
    device: str = "cpu",
) -> Record:
    """Time the embedded model at `side` x `side` tokens, and measure what patching changes.

    Args:
        model: The embedded model; copies of it are patched.
        errors: Error targets, `patch(error=...)`.
        side: Tokens along a side of the images.
        images: Number of images.
        shown: Number of images whose masks are in the record, at equal distances.
        seed: Seed of the images.
        device: Device of the models.

    Returns:
        A record of one row for the full model and for each target with `what` "setting", then rows of
        the images that are shown with `what` "image".

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> from bmfa.models import load_model
        >>> record = run(load_model("embedded"), errors=[0.1], side=16, images=1, shown=1)
        >>> [(row["what"], row["method"]) for row in record.rows]
        [('setting', 'full'), ('setting', 'error:0.1'), ('image', 'full'), ('image', 'error:0.1')]
    """
    check_integer("side", side, low=4)
    check_integer("images", images, low=1)
    check_integer("shown", shown, low=0, high=images)
    subjects = {FULL: TimedModel(model, device)}
    for error in errors:
        subjects[f"error:{error:g}"] = timed = TimedModel(model, device)
        patch(timed.model.model, error=check_number("error", error, low=0.0))
    preprocess = model.preprocess.override(img_size=side * PATCH_SIZE)
    drawn = list(EmbeddedImages(images, seed, side * PATCH_SIZE))
    # What every model gives on every image.
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in subjects}
    # A missed target warns once; the record has the share of the calls that met it.
    with torch.inference_mode(), missed_targets_ignored():
        for image in drawn:
            pixels = preprocess(image.pixels)[None].to(device)
            for name, subject in subjects.items():
                for _ in range(0 if found[name] else WARM_UP):
                    subject.logits(pixels)
                full = None if name == FULL else found[FULL][-1]
                found[name].append(subject.measure(pixels, image, full))
            for results in found.values():
                del results[-1]["features"]  # the largest of them
    rows = [_setting(name, results, found[FULL], side) for name, results in found.items()]
    for index in (number * images // shown for number in range(shown)):
        for name, results in found.items():
            rows.append(_example(name, results[index], drawn[index]))
    settings = {
        "model": model.name,
        "errors": list(errors),
        "side": side,
        "tokens": side * side,
        "images": images,
        "layers": "all",
        "seed": seed,
        "protocol": PROTOCOL,
    }
    return Record("faster", settings, rows, environment(device))


class TimedModel(Segmenter):
    """A copy of the model that shares its weights; `features` are those of the last call."""

    def __init__(self, model: LoadedModel, device: str) -> None:
        super().__init__(replace(model, model=copy_sharing_weights(model.model)), device)
        self.features = torch.empty(0)
        norm: Any = self.model.model.norm
        norm.register_forward_hook(self._keep_features)

    def _keep_features(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        self.features = output

    def measure(
        self, pixels: Tensor, image: LabelledImage, full: dict[str, Any] | None
    ) -> dict[str, Any]:
        """Time a call on one image, and compare its outputs with those of the full model."""
        synchronize(pixels.device)
        start = time.perf_counter()
        logits = self.logits(pixels)
        synchronize(pixels.device)
        found: dict[str, Any] = {
            "milliseconds": 1000 * (time.perf_counter() - start),
            "logits": logits.cpu(),
            "mask": self.masks,
            "features": self.features.double().cpu(),
        }
        full = full or found
        columns = compare(full["logits"], found["logits"], [image.label])
        columns["mask_iou"] = mask_iou(self.masks, torch.from_numpy(image.mask)[None])
        columns["full_mask_iou"] = mask_iou(self.masks, full["mask"])
        distance = (found["features"] - full["features"]).norm() / full["features"].norm()
        return found | {
            **{name: values.item() for name, values in columns.items()},
            "speedup": full["milliseconds"] / found["milliseconds"],
            "feature_error": float(distance),
            "layers": self.patched_layers(),
        }

    def patched_layers(self) -> list[LayerSummary]:
        """Return what the patched layers report of the last call; nothing without a patch."""
        if not screened_layers(self.model.model):
            return []
        rows = summary(self.model.model).rows
        return [row for row in rows if isinstance(row, LayerSummary) and row.settings is not None]


def _setting(
    name: str, results: Sequence[dict[str, Any]], full: Sequence[dict[str, Any]], side: int
) -> Row:
    """Return the row of one model over all images."""

    def values(column: str) -> list[float]:
        return [result[column] for result in results]

    change = np.array(values("mask_iou")) - [result["mask_iou"] for result in full]
    # Two standard errors of the mean; the distribution of a mean of images is close to normal.
    spread = 2 * float(change.std(ddof=1)) / len(change) ** 0.5 if len(change) > 1 else 0.0
    row: Row = {
        "what": "setting",
        "method": name,
        "images": len(results),
        "n": side * side,
        "milliseconds": statistics.median(values("milliseconds")),
        "speedup": statistics.median(values("speedup")),
        "mask_iou": statistics.fmean(values("mask_iou")),
        "mask_iou_change": float(change.mean()),
        "mask_iou_change_low": float(change.mean()) - spread,
        "mask_iou_change_high": float(change.mean()) + spread,
        "full_mask_iou": statistics.fmean(values("full_mask_iou")),
        "top1_percent": 100 * statistics.fmean(values("right")),
        "agreement_percent": 100 * statistics.fmean(values("agreeing")),
        "output_kl": statistics.fmean(values("output_kl")),
    }
    if name == FULL:
        return row
    layers = [layer for result in results for layer in result["layers"]]
    errors = [layer.error for layer in layers if layer.error is not None]
    return row | {
        "error_percent": mean_percent(error.estimate for error in errors),
        "target_met_percent": mean_percent(bool(error.met) for error in errors),
        "feature_error_percent": 100 * statistics.fmean(values("feature_error")),
        "density_percent": mean_percent(layer.density for layer in layers),
        "dense_layers": sum(layer.form == "dense" for layer in results[-1]["layers"]),
    }


def _example(name: str, result: dict[str, Any], image: LabelledImage) -> Row:
    """Return the row of one image that is shown: its masks, small, and its numbers."""
    columns = ("milliseconds", "speedup", "mask_iou", "full_mask_iou")
    row: Row = {
        "what": "image",
        "method": name,
        "title": image.name,
        "label": image.label_name,
        **{column: result[column] for column in columns},
        "mask_side": MASK_SIDE,
        "mask": pack_mask(result["mask"][0].numpy()),
    }
    if name == FULL and image.mask is not None:
        box = (0, 0, *image.pixels.shape[1::-1])
        row["image"] = square_uri(image.pixels, box, IMAGE_BYTES, side=2 * MASK_SIDE)
        row["true_mask"] = pack_mask(image.mask)
    return row


def pack_mask(mask: np.ndarray) -> str:
    """Return a bool mask as base64 of its bits in raster order, resized to `MASK_SIDE` pixels a side."""
    image = load_package("PIL.Image")
    small = image.fromarray((255 * mask).astype(np.uint8)).resize(
        (MASK_SIDE, MASK_SIDE), image.Resampling.BOX
    )
    return base64.b64encode(np.packbits(np.asarray(small) > 127).tobytes()).decode()
