"""Batches of images, read and preprocessed by worker processes ahead of the model."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from bmfa.checks import check_integer
from bmfa.data.classification import LabelledImage, LabelledImages
from bmfa.data.images import ImageError, ImagesLostError
from bmfa.data.workers import iterate, make_loader
from bmfa.evidence.runner.parts import cores_per_process
from bmfa.models import Preprocessing

MAX_WORKERS = 16
MAX_REASONS = 5  # why images could not be read, in a record
# Images in memory, or a source that reads them by index.
Images = Iterable[LabelledImage] | LabelledImages


class Batch(NamedTuple):
    """Images that run through the model together."""

    indices: list[int]  # of the images that could be read
    pixels: Tensor  # (B, 3, H, W) float32, preprocessed
    labels: list[int | None]
    errors: list[Exception]  # one for each image that could not be read


class ImageBatches(Dataset[Any]):
    """The images of a source in batches that depend on the batch size alone.

    Args:
        images: Images in memory, or a source that reads them by index.
        preprocess: Preprocessing of the model.
        size: Images in a batch.
        workers: Worker processes that read ahead; 0 reads in this process, None chooses 0 for images
            that are drawn or in memory, and otherwise one for each core.
        device: Device of the model; batches for CUDA are pinned.
    """

    def __init__(
        self,
        images: Images,
        preprocess: Preprocessing,
        size: int,
        *,
        workers: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.size = check_integer("batch_size", size, low=1)
        self.images: Any = images if hasattr(images, "names") else list(images)
        cores = cores_per_process()
        if workers is None:
            several = isinstance(images, LabelledImages) and cores > 1
            workers = min(MAX_WORKERS, cores) if several else 0
        self.workers = check_integer("workers", workers, low=0)
        self.preprocess, self.pin_memory = preprocess, torch.device(device).type == "cuda"

    @property
    def sizes(self) -> list[int]:
        """The number of images in every batch."""
        starts = range(0, len(self.images), self.size)
        return [min(self.size, len(self.images) - start) for start in starts]

    def __getitem__(self, index: int) -> tuple[int, Tensor | Exception, int | None]:
        """Return index, preprocessed pixels and label of one image, or the error in their place."""
        try:
            image = self.images[index]
        except (ImageError, ImagesLostError) as error:
            # Returned, not raised: DataLoader would put a traceback into the message.
            return index, error, None
        return index, self.preprocess(image.pixels), image.label

    def loader(self, numbers: Iterable[int], **options: Any) -> DataLoader[Batch]:
        """Return a DataLoader of the batches of these numbers, in this order."""
        count = len(self.images)
        indices = [range(n * self.size, min((n + 1) * self.size, count)) for n in numbers]
        options |= {"batch_sampler": indices, "collate_fn": _collate, "pin_memory": self.pin_memory}
        return make_loader(self, self.workers, **options)

    def read(self, numbers: Iterable[int]) -> Iterator[Batch]:
        """Yield the batches of these numbers; raise if the images vanish, or for any error if strict."""
        with closing(iterate(self.loader(numbers))) as batches:
            for batch in batches:
                for error in batch.errors:
                    if isinstance(error, ImagesLostError) or getattr(self.images, "strict", False):
                        raise error
                yield batch

    def first(self) -> Tensor:
        """Return the first image that can be read, (1, 3, H, W), without starting workers.

        Raises:
            ValueError: If no image can be read.
        """
        skipped = []
        alone = ImageBatches(self.images, self.preprocess, 1, workers=0)
        for batch in alone.read(range(len(self.images))):
            if batch.indices:
                return batch.pixels
            skipped.append(str(batch.errors[0]))
        raise no_images_error(skipped)

    def identity(self) -> dict[str, Any]:
        """Return the number of images and a digest of their names, or of their pixels, and labels."""
        total = hashlib.sha256()
        if hasattr(self.images, "names"):
            total.update(repr(self.images.names()).encode())
        else:
            for image in self.images:
                total.update(repr((image.name, image.label, image.pixels.shape)).encode())
                total.update(image.pixels.tobytes())
        return {"number of images": len(self.images), "names of images": total.hexdigest()[:16]}


def _collate(items: Sequence[tuple[int, Tensor | Exception, int | None]]) -> Batch:
    read = [(index, pixels, label) for index, pixels, label in items if isinstance(pixels, Tensor)]
    return Batch(
        [index for index, _, _ in read],
        torch.stack([pixels for _, pixels, _ in read]) if read else torch.empty(0),
        [label for _, _, label in read],
        [error for _, error, _ in items if isinstance(error, Exception)],
    )


def image_settings(batches: ImageBatches, skipped: Sequence[str]) -> dict[str, Any]:
    """Return what a record says of its images: how classes were found, and which were not read."""
    found = getattr(batches.images, "label_source", None)
    labels = {} if found is None else {"labels": found}
    return {**labels, "skipped": len(skipped), "skipped_names": list(skipped[:MAX_REASONS])}


def no_images_error(skipped: Sequence[str]) -> ValueError:
    """Return the error of a run that could not read any image."""
    reason = f" ({skipped[0]})" if skipped else ""
    return ValueError(f"no image could be read{reason}; pass images as JPEG, PNG, WEBP or BMP")
