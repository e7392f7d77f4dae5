"""The embedded model on large images, patched with several error targets and not patched.

Every image goes through all models in turn, so that other work on the machine slows all of them.
"""

import base64
import copy
import statistics
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bmfa.checks import check_integer, check_number
from bmfa.data.classification import EmbeddedImages, LabelledImage
from bmfa.evidence.bench.saliency import intersection_over_union
from bmfa.evidence.images.thumbnails import square_uri
from bmfa.evidence.methods import FULL
from bmfa.evidence.model_methods import Layers
from bmfa.models import LoadedModel, patch, summary
from bmfa.models.embedded.model import PATCH_SIZE
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
    runs = {FULL: _Run(copy.deepcopy(model.model).to(device))}
    for error in errors:
        patched = patch(copy.deepcopy(model.model).to(device), error=error, layers=layers)
        runs[f"error:{error:g}"] = _Run(patched)
    size = side * PATCH_SIZE
    drawn = EmbeddedImages(images, seed, size)
    preprocess = model.preprocess.override(img_size=size)
    chosen = [number * images // shown for number in range(shown)]
    examples: dict[int, LabelledImage] = {}
    with torch.inference_mode(), warnings.catch_warnings():
        # A missed target warns once; the record has the share of the calls that met it.
        warnings.filterwarnings("ignore", message="screened_attention measured an output error")
        for index, image in enumerate(drawn):
            pixels = preprocess(image.pixels)[None].to(device)
            for one in runs.values():
                one.measure(pixels, image, warm_up=WARM_UP if index == 0 else 0)
            if index in chosen:
                examples[index] = image
    full = runs[FULL]
    rows = [_setting(name, one, full, side) for name, one in runs.items()]
    for index, image in examples.items():
        for name, one in runs.items():
            rows.append(_example(name, one, full, image, index))
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


@dataclass(eq=False)
class _Run:
    """One model, and what it computed of every image."""

    model: nn.Module
    milliseconds: list[float] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)  # (classes,) each
    masks: list[Tensor] = field(default_factory=list)  # (height, width) bool each
    features: list[Tensor] = field(default_factory=list)  # (tokens, dim) each
    mask_iou: list[float] = field(default_factory=list)
    right: list[bool] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)  # of patched layers
    met: list[bool] = field(default_factory=list)
    densities: list[float] = field(default_factory=list)
    dense_layers: int = 0

    def measure(self, pixels: Tensor, image: LabelledImage, warm_up: int) -> None:
        """Time a forward pass and keep its outputs."""
        model: Any = self.model
        captured: list[Tensor] = []
        handle = model.norm.register_forward_hook(
            lambda module, inputs, output: captured.append(output)
        )
        try:
            for _ in range(warm_up):
                model.forward_dense(pixels)
            captured.clear()
            synchronize(pixels.device)
            start = time.perf_counter()
            logits, mask_logits = model.forward_dense(pixels)
            synchronize(pixels.device)
            self.milliseconds.append(1000 * (time.perf_counter() - start))
        finally:
            handle.remove()
        assert image.mask is not None
        mask = mask_logits[0].cpu() > 0
        self.logits.append(logits[0].double().cpu())
        self.masks.append(mask)
        self.features.append(captured[0][0].cpu())
        truth = torch.from_numpy(image.mask)
        self.mask_iou.append(float(intersection_over_union(mask[None], truth[None])))
        self.right.append(int(logits[0].argmax()) == image.label)
        self._note_layers()

    def _note_layers(self) -> None:
        """Keep the error and the density that the patched layers report of the last pass."""
        try:
            rows = summary(self.model).rows
        except ValueError:  # the model is not patched
            return
        layers = [row for row in rows if isinstance(row, LayerSummary) and row.settings is not None]
        for row in layers:
            if row.error is not None:
                self.errors.append(row.error.estimate)
                self.met.append(bool(row.error.met))
            if row.density is not None:
                self.densities.append(row.density)
        self.dense_layers = sum(row.form == "dense" for row in layers)


def _setting(name: str, one: _Run, full: _Run, side: int) -> Row:
    """Return the row of one model over all images."""
    logits, before = torch.stack(one.logits), torch.stack(full.logits)
    change = _iou_interval(one, full)
    row: Row = {
        "what": "setting",
        "method": name,
        "images": len(one.logits),
        "n": side * side,
        "milliseconds": statistics.median(one.milliseconds),
        "speedup": statistics.median(
            a / b for a, b in zip(full.milliseconds, one.milliseconds, strict=True)
        ),
        "mask_iou": statistics.fmean(one.mask_iou),
        "mask_iou_change": change[0],
        "mask_iou_change_low": change[1],
        "mask_iou_change_high": change[2],
        "full_mask_iou": statistics.fmean(_mask_agreement(one, full)),
        "top1_percent": 100 * statistics.fmean(one.right),
        "agreement_percent": 100 * float((logits.argmax(1) == before.argmax(1)).double().mean()),
        "output_kl": _mean_kl(before, logits),
    }
    if name != FULL:
        row |= {
            "error_percent": 100 * statistics.fmean(one.errors) if one.errors else None,
            "target_met_percent": 100 * statistics.fmean(one.met) if one.met else None,
            "feature_error_percent": 100 * statistics.fmean(_feature_errors(one, full)),
            "density_percent": 100 * statistics.fmean(one.densities) if one.densities else None,
            "dense_layers": one.dense_layers,
        }
    return row


def _mask_agreement(one: _Run, full: _Run) -> list[float]:
    return [
        float(intersection_over_union(a[None], b[None]))
        for a, b in zip(one.masks, full.masks, strict=True)
    ]


def _feature_errors(one: _Run, full: _Run) -> list[float]:
    return [
        float((a.double() - b.double()).norm() / b.double().norm())
        for a, b in zip(one.features, full.features, strict=True)
    ]


def _mean_kl(before: Tensor, after: Tensor) -> float:
    full, changed = before.log_softmax(-1), after.log_softmax(-1)
    return float((full.exp() * (full - changed)).sum(-1).mean())


def _iou_interval(one: _Run, full: _Run) -> tuple[float, float, float]:
    """Return the mean change of the IoU and a 95 % interval of it over images."""
    change = np.array(one.mask_iou) - np.array(full.mask_iou)
    mean = float(change.mean())
    # Two standard errors of the mean; the distribution of a mean of images is close to normal.
    spread = 2 * float(change.std(ddof=1)) / len(change) ** 0.5 if len(change) > 1 else 0.0
    return mean, mean - spread, mean + spread


def _example(name: str, one: _Run, full: _Run, image: LabelledImage, index: int) -> Row:
    """Return the row of one image that is shown: its masks, small, and its numbers."""
    row: Row = {
        "what": "image",
        "method": name,
        "title": image.name,
        "label": image.label_name,
        "milliseconds": one.milliseconds[index],
        "speedup": full.milliseconds[index] / one.milliseconds[index],
        "mask_iou": one.mask_iou[index],
        "full_mask_iou": _mask_agreement(one, full)[index],
        "mask_side": MASK_SIDE,
        "mask": pack_mask(one.masks[index].numpy()),
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
