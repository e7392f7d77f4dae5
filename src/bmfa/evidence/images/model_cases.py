"""Four embedded images with the model's attention: small, centred, cluttered, and a failure."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from bmfa.checks import check_integer
from bmfa.data.classification import LabelledImage
from bmfa.data.drawn.badges import BADGE_CLASSES, BADGE_IMAGE_SIZE, BadgeImage, draw_badge
from bmfa.evidence.images import run as images
from bmfa.evidence.metrics import output_kl
from bmfa.evidence.model_methods import applied
from bmfa.models import LoadedModel, unpatch
from bmfa.records import Record

METHODS = ("quadrant-gap:0.8", "gamma:0.05", "optimal:0.002")
# The failure case is the worst image of the paper's algorithm at about 15 % leaves.
FAILING_METHOD = "gamma:0.05"
IMAGE_BYTES = 7000
BATCH_SIZE = 25


def run(
    model: LoadedModel,
    *,
    count: int = 100,
    seed: int = 0,
    device: str = "cpu",
) -> Record:
    """Choose four of the first `count` images and record the trees of several rules on them.

    Args:
        model: The embedded model.
        count: Number of images to choose from, at least 4.
        seed: Seed of the images.
        device: Device of the model.

    Returns:
        A record of one row for each image and rule.

    Raises:
        ValueError: If `count` is below 4.
    """
    check_integer("count", count, low=4)
    drawn = [draw_badge(seed, index) for index in range(count)]
    moved = _output_kl(model, drawn, device)
    chosen = _choose(drawn, moved)
    shown = []
    for title, index in chosen.items():
        pixels, label, _ = drawn[index]
        shown.append(LabelledImage(f"{title}: {BADGE_CLASSES[label]}", pixels, label))
    record = images.run(model, shown, METHODS, image_bytes=IMAGE_BYTES, seed=seed, device=device)
    choice = {"chosen_from": count, "failure": f"the output that {FAILING_METHOD} moves most"}
    return replace(record, settings={**record.settings, **choice, "command": "bmfa report"})


def _choose(drawn: list[BadgeImage], moved: Tensor) -> dict[str, int]:
    """Return the index of each case, none twice."""
    wanted: dict[str, Callable[[int], float]] = {
        "Failure": lambda index: float(moved[index]),
        "Small badge": lambda index: -float(drawn[index].mask.mean()),
        "Centred badge": lambda index: -_distance_from_centre(drawn[index]),
        "Clutter": lambda index: _clutter(drawn[index]),
    }
    chosen: dict[str, int] = {}
    for title, score in wanted.items():
        free = [index for index in range(len(drawn)) if index not in chosen.values()]
        chosen[title] = max(free, key=score)
    return {title: chosen[title] for title in (*list(wanted)[1:], "Failure")}


def _output_kl(model: LoadedModel, drawn: list[BadgeImage], device: str) -> Tensor:
    """Return (count,) KL of the outputs between the full model and `FAILING_METHOD`."""
    unpatch(model.model).to(device)
    pixels = model.preprocess.batch([one.pixels for one in drawn])
    parts = []
    with torch.inference_mode():
        for batch in torch.split(pixels, BATCH_SIZE):
            full = model.logits(batch.to(device))
            with applied(model.model, FAILING_METHOD, images.LAYERS):
                parts.append(output_kl(full, model.logits(batch.to(device))).cpu())
    return torch.cat(parts)


def _distance_from_centre(one: BadgeImage) -> float:
    """Return the distance between the centres of the badge and of the image, in pixels."""
    middle = np.argwhere(one.mask).mean(0) - (BADGE_IMAGE_SIZE - 1) / 2
    return float(np.hypot(*middle))


def _clutter(one: BadgeImage) -> float:
    """Return the mean difference of neighbouring pixels outside of the badge."""
    luma = one.pixels.astype(np.float64).mean(-1)
    steps = np.abs(np.diff(luma, axis=1))[~one.mask[:, 1:]]
    return float(steps.mean())
