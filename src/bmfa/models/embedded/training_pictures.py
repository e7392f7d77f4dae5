"""The pictures of the training of the embedded model: drawn, kept in a buffer, and augmented."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from bmfa.data.drawn.badges import draw_badge_parts
from bmfa.models.embedded.model import IMAGE_SIZE, MASK_CELLS, PATCH_SIZE

RATIOS = (1, 2, 4)  # sides of the pictures, relative to 128 pixels
# Ratio of each batch of new pictures, in turn: three quarters have the own size, so that drawing, which
# takes longer for larger pictures, spends most of its time on these.
_DRAWN_RATIOS = (1, 2, 4, 1, 1, 1, 2, 1, 1, 1, 1, 2, 1, 1, 1, 1)


class NewPictures(Dataset[tuple[Tensor, ...]]):
    """Batches of new pictures without grain: pixels, labels and pixels inside each mask cell."""

    def __init__(self, seed: int, start: int, pictures: int) -> None:
        self.seed, self.start, self.pictures = seed, start, pictures

    def __len__(self) -> int:
        return 2**31 - 1

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        number = self.start + index
        ratio = _DRAWN_RATIOS[number % len(_DRAWN_RATIOS)]
        first, size = number * self.pictures, ratio * IMAGE_SIZE
        indices = range(first, first + max(1, self.pictures // ratio**2))
        drawn = [draw_badge_parts(self.seed, index, size, 0.0) for index in indices]
        pixels = np.stack([one[0].transpose(2, 0, 1) for one in drawn])
        labels = np.array([one[1] for one in drawn])
        masks = np.stack([np.stack(one[2:]) for one in drawn])  # (B, 2, size, size)
        cell = PATCH_SIZE // MASK_CELLS
        cells = masks.reshape(len(masks), 2, size // cell, cell, size // cell, cell)
        counts = cells.sum((3, 5), dtype=np.uint8)  # 0 to 4 pixels
        return torch.from_numpy(pixels), torch.from_numpy(labels), torch.from_numpy(counts)


class PictureBuffer:
    """Pictures of one size on the device; the oldest are replaced when it is full."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.parts: list[Tensor] = []
        self.count, self.next = 0, 0

    def add(self, batch: Sequence[Tensor], capacity: int) -> None:
        """Add pictures, up to a capacity that is a multiple of their number."""
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
        """Return copies of the chosen pictures."""
        return [part[chosen] for part in self.parts]


def augment(pictures: Tensor, flags: Tensor, *, invert: bool = True) -> Tensor:
    """Flip, transpose and invert pictures.

    These operations keep all classes: a mirrored shape, texture or set of ticks is of the same class,
    and a badge may be lighter or darker than its background.

    Args:
        pictures: (B, C, S, S) preprocessed pictures, or masks.
        flags: (4, B, 1, 1, 1) torch.bool: which pictures to flip horizontally, to flip vertically, to
            transpose and to invert.
        invert: False ignores the last flags, for masks.

    Returns:
        (B, C, S, S) tensor.
    """
    horizontal, vertical, transpose, inverted = flags
    pictures = torch.where(horizontal, pictures.flip(-1), pictures)
    pictures = torch.where(vertical, pictures.flip(-2), pictures)
    pictures = torch.where(transpose, pictures.transpose(-1, -2), pictures)
    return torch.where(inverted, -pictures, pictures) if invert else pictures
