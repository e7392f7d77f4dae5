"""The embedded model on large images, patched with several error targets and not patched.

Every image goes through all models in turn, so that other work on the machine slows all of them.
"""

import base64
import copy
import statistics
import time
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bmfa.checks import check_integer, check_number
from bmfa.data.classification import EmbeddedImages, LabelledImage
from bmfa.evidence.bench.measure import mean, percent
from bmfa.evidence.images.thumbnails import square_uri
from bmfa.evidence.methods import FULL
from bmfa.evidence.metrics import agreement, mask_iou, output_kl
from bmfa.evidence.model_methods import Layers
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
    layers: Layers = "all",
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
        layers: Layers that are patched.
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
    for error in errors:
        check_number("error", error, low=0.0)
    models: dict[str, Any] = {FULL: copy.deepcopy(model.model).to(device)}
    for error in errors:
        patched = patch(copy.deepcopy(model.model).to(device), error=error, layers=layers)
        models[f"error:{error:g}"] = patched
    size = side * PATCH_SIZE
    preprocess = model.preprocess.override(img_size=size)
    drawn = list(EmbeddedImages(images, seed, size))
    # What every model gives on every image.
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in models}
    with torch.inference_mode(), warnings.catch_warnings():
        # A missed target warns once; the record has the share of the calls that met it.
        warnings.filterwarnings("ignore", message="screened_attention measured an output error")
        for index, image in enumerate(drawn):
            pixels = preprocess(image.pixels)[None].to(device)
            for name, one in models.items():
                for _ in range(WARM_UP if index == 0 else 0):
                    one.forward_dense(pixels)
                found[name].append(_measure(one, pixels, image))
                found[name][-1] |= _compare(found[name][-1], found[FULL][-1])
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
        "layers": layers,
        "seed": seed,
        "protocol": PROTOCOL,
    }
    return Record("faster", settings, rows, environment(device))


def _measure(model: Any, pixels: Tensor, image: LabelledImage) -> dict[str, Any]:
    """Time a forward pass on one image, and return its outputs."""
    captured: list[Tensor] = []
    handle = model.norm.register_forward_hook(lambda *call: captured.append(call[2]))
    try:
        synchronize(pixels.device)
        start = time.perf_counter()
        logits, mask_logits = model.forward_dense(pixels)
        synchronize(pixels.device)
        milliseconds = 1000 * (time.perf_counter() - start)
    finally:
        handle.remove()
    mask, truth = mask_logits.cpu() > 0, torch.from_numpy(image.mask)[None]
    return {
        "milliseconds": milliseconds,
        "logits": logits.cpu(),
        "mask": mask,
        "features": captured[0].double().cpu(),
        "mask_iou": float(mask_iou(mask, truth)),
        "right": int(logits.argmax()) == image.label,
        "layers": _patched_layers(model),
    }


def _patched_layers(model: nn.Module) -> list[LayerSummary]:
    """Return what the patched layers report of the last pass; nothing if the model is not patched."""
    if not screened_layers(model):
        return []
    rows = summary(model).rows
    return [row for row in rows if isinstance(row, LayerSummary) and row.settings is not None]


def _compare(one: dict[str, Any], full: dict[str, Any]) -> dict[str, Any]:
    """Compare the outputs on one image with those of the full model."""
    distance = (one["features"] - full["features"]).norm() / full["features"].norm()
    return {
        "speedup": full["milliseconds"] / one["milliseconds"],
        "full_mask_iou": float(mask_iou(one["mask"], full["mask"])),
        "agrees": bool(agreement(one["logits"], full["logits"])),
        "output_kl": float(output_kl(full["logits"], one["logits"])),
        "feature_error": float(distance),
    }


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
        "agreement_percent": 100 * statistics.fmean(values("agrees")),
        "output_kl": statistics.fmean(values("output_kl")),
    }
    if name == FULL:
        return row
    layers = [layer for result in results for layer in result["layers"]]
    errors = [layer.error for layer in layers if layer.error is not None]
    last = [layer.form == "dense" for layer in results[-1]["layers"]]
    return row | {
        "error_percent": percent(mean(error.estimate for error in errors)),
        "target_met_percent": percent(mean(bool(error.met) for error in errors)),
        "feature_error_percent": 100 * statistics.fmean(values("feature_error")),
        "density_percent": percent(mean(layer.density for layer in layers)),
        "dense_layers": sum(last),
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
    if name == FULL:
        side = len(image.pixels)
        assert image.mask is not None
        row["image"] = square_uri(image.pixels, (0, 0, side, side), IMAGE_BYTES, side=2 * MASK_SIDE)
        row["true_mask"] = pack_mask(image.mask)
    return row


def pack_mask(mask: np.ndarray) -> str:
    """Return a bool mask as base64 of its bits in raster order, resized to `MASK_SIDE` pixels a side."""
    image = load_package("PIL.Image")
    small = image.fromarray((255 * mask).astype(np.uint8)).resize(
        (MASK_SIDE, MASK_SIDE), image.Resampling.BOX
    )
    return base64.b64encode(np.packbits(np.asarray(small) > 127).tobytes()).decode()
