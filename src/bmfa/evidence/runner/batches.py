"""Batches of images, read and preprocessed by worker processes ahead of the model."""

from collections.abc import Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import Dataset

from bmfa.checks import check_integer
from bmfa.data.classification import LabelledImage, LabelledImages, SkippedImages
from bmfa.data.images import ImageError, ImagesLostError
from bmfa.data.workers import iterate, make_loader
from bmfa.evidence.runner.processes import cores_per_process
from bmfa.evidence.runner.resume import digest
from bmfa.models import Preprocessing

MAX_WORKERS = 16
# Images that a worker reads at a time: a large batch is split between workers, and the shared
# memory in use stays below workers * PREFETCH * READ_SIZE images (PREFETCH of `bmfa.data.workers`).
READ_SIZE = 32


class ImageSource(Protocol):
    """Images by index: those of a folder, the embedded ones, or a list."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> LabelledImage:
        """Return one image; raise ImageError if it cannot be read."""
        ...

    def names(self) -> list[tuple[str, int | None]]:
        """Return all names, with the labels that are known without reading."""
        ...


@dataclass(frozen=True)
class ImageList:
    """A `ImageSource` of images in memory."""

    images: Sequence[LabelledImage]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> LabelledImage:
        return self.images[index]

    def names(self) -> list[tuple[str, int | None]]:
        """Return names, each with a digest of its pixels, and labels."""
        return [(f"{p.name} {digest([p.pixels.tobytes()])}", p.label) for p in self.images]


@dataclass(frozen=True, eq=False)
class Batch:
    """Images that run through the model together.

    Args:
        indices: Indices of the images that could be read.
        pixels: Their preprocessed pixels, each (b, 3, H, W) float32, together B images.
        labels: Their labels, None where unknown.
        errors: One error for each image that could not be read.
    """

    indices: list[int]
    pixels: tuple[Tensor, ...]
    labels: list[int | None]
    errors: list[Exception]

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def skipped(self) -> list[str]:
        """Reasons why images could not be read."""
        return [str(error) for error in self.errors]

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> Tensor:
        """Return the pixels, (B, 3, H, W), on a device; copies from pinned memory do not block."""
        moved = [part.to(device, dtype, non_blocking=True) for part in self.pixels]
        return moved[0] if len(moved) == 1 else torch.cat(moved)

    def pin_memory(self) -> "Batch":
        """Called by DataLoader."""
        pinned = tuple(part.pin_memory() for part in self.pixels)
        return Batch(self.indices, pinned, self.labels, self.errors)

    @classmethod
    def join(cls, parts: Sequence["Batch"]) -> "Batch":
        """Concatenate the parts that workers read."""
        return cls(
            [index for part in parts for index in part.indices],
            tuple(pixels for part in parts for pixels in part.pixels),
            [label for part in parts for label in part.labels],
            [error for part in parts for error in part.errors],
        )


class ImageBatches:
    """The images of a source in batches that depend on the batch size alone.

    Args:
        images: Images in memory, or a source that reads them by index.
        preprocess: Preprocessing of the model.
        size: Images in a batch.
        workers: Worker processes that read ahead; 0 reads in this process, None chooses
            `default_workers`.
        device: Device of the model; its copies are pinned for CUDA.
    """

    def __init__(
        self,
        images: Iterable[LabelledImage] | ImageSource,
        preprocess: Preprocessing,
        size: int,
        *,
        workers: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.size = check_integer("batch_size", size, low=1)
        self.source: ImageSource = (
            images if hasattr(images, "names") else ImageList(list(images))  # type: ignore[assignment]
        )
        self.workers = default_workers(self.source) if workers is None else workers
        check_integer("workers", self.workers, low=0)
        self.strict = bool(getattr(images, "strict", False))
        self.preprocess = preprocess
        self.pin_memory = torch.device(device).type == "cuda"

    def __len__(self) -> int:
        return -(-len(self.source) // self.size)

    def indices(self, number: int) -> range:
        """Return the indices of the images of a batch."""
        return range(number * self.size, min((number + 1) * self.size, len(self.source)))

    def read(self, numbers: Iterable[int], *, keep_workers: bool = False) -> "BatchReader":
        """Return the batches of these numbers, in this order.

        Args:
            numbers: Numbers of batches.
            keep_workers: True to keep the worker processes for further iterations.
        """
        return BatchReader(self, list(numbers), keep_workers)

    def first(self) -> Tensor:
        """Return the first image that can be read, (1, 3, H, W), without starting workers.

        Raises:
            ValueError: If no image can be read.
        """
        dataset, skipped = _PreprocessedImages(self.source, self.preprocess), SkippedImages()
        for index in range(len(dataset)):
            batch = self.checked(_collate([dataset[index]]))
            if len(batch):
                return batch.to("cpu")
            skipped.add(*batch.skipped)
        raise no_images_error(skipped)

    def checked(self, batch: Batch) -> Batch:
        """Return the batch; raise if the images have vanished, or for any error if `strict`."""
        for error in batch.errors:
            if self.strict or isinstance(error, ImagesLostError):
                raise error
        return batch

    def digest(self) -> str:
        """Return a digest of the images' names and labels."""
        return digest(f"{name}\n{label}" for name, label in self.source.names())


class BatchReader:
    """An iterable of some batches, which can be iterated several times."""

    def __init__(self, batches: ImageBatches, numbers: Sequence[int], keep_workers: bool) -> None:
        self.batches = batches
        self.parts = [_split(batches.indices(number)) for number in numbers]
        self.loader = make_loader(
            _PreprocessedImages(batches.source, batches.preprocess),
            batches.workers,
            batch_sampler=[indices for parts in self.parts for indices in parts],
            collate_fn=_collate,
            pin_memory=batches.pin_memory,
            persistent_workers=keep_workers,
        )

    def __iter__(self) -> Generator[Batch, None, None]:
        with closing(iterate(self.loader)) as read:
            for parts in self.parts:
                yield self.batches.checked(Batch.join(list(islice(read, len(parts)))))


class _PreprocessedImages(Dataset[tuple[int, Any, int | None]]):
    """Index, pixels and label of every image, with an error instead of pixels not readable."""

    def __init__(self, source: ImageSource, preprocess: Preprocessing) -> None:
        self.source, self.preprocess = source, preprocess

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> tuple[int, Tensor | Exception, int | None]:
        try:
            image = self.source[index]
        except (ImageError, ImagesLostError) as error:
            # Returned, not raised: DataLoader would put a traceback into the message.
            return index, error, None
        return index, self.preprocess(image.pixels), image.label


def _collate(items: Sequence[tuple[int, Tensor | Exception, int | None]]) -> Batch:
    read = [(index, pixels, label) for index, pixels, label in items if isinstance(pixels, Tensor)]
    return Batch(
        [index for index, _, _ in read],
        (torch.stack([pixels for _, pixels, _ in read]),) if read else (),
        [label for _, _, label in read],
        [error for _, error, _ in items if isinstance(error, Exception)],
    )


def _split(indices: range) -> list[list[int]]:
    return [list(indices[start : start + READ_SIZE]) for start in range(0, len(indices), READ_SIZE)]


def default_workers(source: ImageSource) -> int:
    """Return the number of worker processes: 0 for images that are drawn or in memory, or if this
    process has one core; otherwise one for each core, at most `MAX_WORKERS`."""
    cores = cores_per_process()
    return min(MAX_WORKERS, cores) if isinstance(source, LabelledImages) and cores > 1 else 0


def label_settings(source: ImageSource) -> dict[str, str]:
    """Return the setting `labels` of a record: how the classes of folders were found."""
    found = getattr(source, "label_source", None)
    return {} if found is None else {"labels": found}


def no_images_error(skipped: SkippedImages) -> ValueError:
    """Return the error of a run that could not read any image."""
    reason = f" ({skipped.reasons[0]})" if skipped.reasons else ""
    return ValueError(f"no image could be read{reason}; pass images as JPEG, PNG, WEBP or BMP")
