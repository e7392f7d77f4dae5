"""The images of the training of the embedded model: drawn, kept in a buffer, and augmented."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from bmfa.data.drawn.badges import draw_badge_parts
from bmfa.models.embedded.model import IMAGE_SIZE, MASK_CELLS, PATCH_SIZE

RATIOS = (1, 2, 4)  # sides of the images, relative to 128 pixels
# Ratio of each batch of new images, in turn: three quarters have the own size, so that drawing, which
# takes longer for larger images, spends most of its time on these.
_DRAWN_RATIOS = (1, 2, 4, 1, 1, 1, 2, 1, 1, 1, 1, 2, 1, 1, 1, 1)


class NewImages(Dataset[tuple[Tensor, ...]]):
    """Batches of new images without grain: pixels, labels and pixels inside each mask cell."""

    def __init__(self, seed: int, start: int, images: int) -> None:
        self.seed, self.start, self.images = seed, start, images

    def __len__(self) -> int:
        return 2**31 - 1

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        number = self.start + index
        ratio = _DRAWN_RATIOS[number % len(_DRAWN_RATIOS)]
        first, size = number * self.images, ratio * IMAGE_SIZE
        indices = range(first, first + max(1, self.images // ratio**2))
        drawn = [draw_badge_parts(self.seed, index, size, 0.0) for index in indices]
        pixels = np.stack([one[0].transpose(2, 0, 1) for one in drawn])
        labels = np.array([one[1] for one in drawn])
        masks = np.stack([np.stack(one[2:]) for one in drawn])  # (B, 2, size, size)
        cell = PATCH_SIZE // MASK_CELLS
        cells = masks.reshape(len(masks), 2, size // cell, cell, size // cell, cell)
        counts = cells.sum((3, 5), dtype=np.uint8)  # 0 to 4 pixels
        return torch.from_numpy(pixels), torch.from_numpy(labels), torch.from_numpy(counts)


class ImageBuffer:
    """Images of one size on the device; the oldest are replaced when it is full."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.parts: list[Tensor] = []
        self.count, self.next = 0, 0

    def add(self, batch: Sequence[Tensor], capacity: int) -> None:
        """Add images, up to a capacity that is a multiple of their number."""
        size = len(batch[0])
        allocated = len(self.parts[0]) if self.parts else 0
        if self.next + size > allocated and allocated < capacity:
            # Doubled, so that the copies take little time in all.
            wanted = min(capacity, max(2 * allocated, size))
            grown = [p.new_empty(wanted, *p.shape[1:], device=self.device) for p in batch]
            for new, old in zip(grown, self.parts, strict=False):
                new[:allocated] = old
            self.parts, allocated = grown, wanted
        if self.next + size > allocated:
            self.next = 0
        for part, new in zip(self.parts, batch, strict=True):
            part[self.next : self.next + size].copy_(new, non_blocking=True)
        self.next += size
        self.count = max(self.count, self.next)

    def take(self, chosen: Tensor) -> list[Tensor]:
        """Return copies of the chosen images."""
        return [part[chosen] for part in self.parts]


def augment(images: Tensor, flags: Tensor, *, invert: bool = True) -> Tensor:
    """Flip, transpose and invert images.

    These operations keep all classes: a mirrored shape, texture or set of ticks is of the same class,
    and a badge may be lighter or darker than its background.

    Args:
        images: (B, C, S, S) preprocessed images, or masks.
        flags: (4, B, 1, 1, 1) torch.bool: which images to flip horizontally, to flip vertically, to
            transpose and to invert.
        invert: False ignores the last flags, for masks.

    Returns:
        (B, C, S, S) tensor.
    """
    horizontal, vertical, transpose, inverted = flags
    images = torch.where(horizontal, images.flip(-1), images)
    images = torch.where(vertical, images.flip(-2), images)
    images = torch.where(transpose, images.transpose(-1, -2), images)
    return torch.where(inverted, -images, images) if invert else images
