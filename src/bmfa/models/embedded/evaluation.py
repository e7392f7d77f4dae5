"""Accuracy and mask IoU of the embedded model on drawn images that it was not trained on."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from bmfa.data.drawn.badges import GRAIN, draw_badge_batch
from bmfa.models.embedded.model import IMAGE_SIZE, PATCH_SIZE, EmbeddedViT, preprocess
from bmfa.records import Row

HELD_OUT_SEED = 7


def mask_iou(logits: Tensor, masks: Tensor) -> Tensor:
    """Compute the intersection over union of predicted and true masks.

    Args:
        logits: (B, H, W) logits; positive is inside.
        masks: (B, H, W) torch.bool.

    Returns:
        (B,) float64; 1 if both masks are empty.
    """
    inside = logits > 0
    both, either = ((inside & masks).sum((1, 2)), (inside | masks).sum((1, 2)))
    return torch.where(either > 0, both.double() / either.clamp(min=1), 1.0)


def evaluate(
    model: EmbeddedViT,
    *,
    images: int,
    size: int = IMAGE_SIZE,
    seed: int = HELD_OUT_SEED,
    grain: float = GRAIN,
    batch_size: int = 32,
    workers: int = 0,
) -> Mapping[str, float]:
    """Measure top-1 accuracy and mask IoU on drawn images.

    Args:
        model: The model; its device and dtype are used.
        images: Number of images.
        size: Side of the images in pixels.
        seed: Seed of the images.
        grain: Amplitude of their grain.
        batch_size: Images in a batch.
        workers: Processes that draw; 0 draws in this one.

    Returns:
        `top1_percent` and `mask_iou`.

    Example:
        >>> sorted(evaluate(EmbeddedViT().eval(), images=2))
        ['mask_iou', 'top1_percent']
    """
    weight = model.head.weight
    right, overlap = 0, 0.0
    batches = _HeldOut(seed, images, size, grain, batch_size)
    for pixels, labels, masks in DataLoader(batches, batch_size=None, num_workers=workers):
        with torch.inference_mode():
            inputs = preprocess(pixels.to(weight.device)).to(weight.dtype)
            logits, found = model.forward_dense(inputs)
        right += int((logits.argmax(1).cpu() == labels).sum())
        overlap += float(mask_iou(found.cpu(), masks).sum())
    return {
        "top1_percent": round(100.0 * right / images, 3),
        "mask_iou": round(overlap / images, 4),
    }


def held_out_row(model: EmbeddedViT, ratio: int, images: int, grain: float, workers: int) -> Row:
    """Return the row of a record that measures the model on held-out images.

    Args:
        model: The model.
        ratio: Side of the images relative to 128 pixels.
        images: Number of images.
        grain: Amplitude of their grain.
        workers: Processes that draw; 0 draws in this one.
    """
    size = ratio * IMAGE_SIZE
    measured = evaluate(
        model, images=images, size=size, grain=grain, batch_size=32 // ratio, workers=workers
    )
    frame: Row = {"what": "held-out", "img_size": size, "tokens": (size // PATCH_SIZE) ** 2}
    return frame | {"grain": grain, "images": images} | dict(measured)


class _HeldOut(Dataset[tuple[Tensor, ...]]):
    """Batches of images of a seed as the task has them."""

    def __init__(self, seed: int, images: int, size: int, grain: float, batch: int) -> None:
        self.seed, self.images, self.size, self.grain = seed, images, size, grain
        self.batch = batch

    def __len__(self) -> int:
        return -(-self.images // self.batch)

    def __getitem__(self, number: int) -> tuple[Tensor, ...]:
        if not 0 <= number < len(self):
            raise IndexError(number)
        first = number * self.batch
        indices = range(first, min(first + self.batch, self.images))
        drawn = draw_badge_batch(self.seed, indices, self.size, grain=self.grain)
        pixels, labels, masks = map(torch.from_numpy, drawn)
        return pixels, labels, masks
