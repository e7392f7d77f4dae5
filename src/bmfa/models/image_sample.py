"""A sample of the user's images as one tensor, from a folder, a DataLoader or tensors."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from bmfa.data.images import ImageError, ImageFiles
from bmfa.models.preprocessing import Preprocessing

ACCEPTED = (
    "a (N, 3, height, width) tensor, a list of (3, height, width) tensors, a DataLoader or a folder"
)

# Images from which on some of them take no part in the choice.
LEAST_TESTED = 6


def split_images(images: Tensor, batch_size: int = 1) -> list[Tensor]:
    """Divide images: a half for calibration, the others for validation and, if enough, for test."""
    count = len(images)
    if count < 2:
        raise ValueError(
            "there is only 1 image; pass at least two, because the settings are validated on images "
            "on which they were not chosen"
        )
    calibration = (count + 1) // 2
    if batch_size > calibration:
        raise ValueError(
            f"batch_size is {batch_size} and {calibration} of {count} images calibrate; pass at least "
            f"{2 * batch_size} images (and limit), or a smaller batch_size"
        )
    test = (count - calibration) // 2 if count >= LEAST_TESTED else 0
    return list(torch.split(images, [calibration, count - calibration - test, test]))


def sample_images(
    images: Any,
    preprocess: Preprocessing | None,
    limit: int,
    generator: torch.Generator,
) -> Tensor:
    """Read at most `limit` images in random order.

    Args:
        images: A (N, 3, height, width) tensor, a list of tensors with or without the dimension N, a
            DataLoader of tensors, of tuples that begin with one or of dictionaries with `pixel_values`,
            or the path of a folder or zip.
        preprocess: The preprocessing for images of a folder.
        limit: The largest number of images. Of a DataLoader they are the first ones, of anything else
            they are drawn.
        generator: Draws and shuffles the images.

    Returns:
        (n, 3, height, width) tensor.

    Raises:
        TypeError: If `images` is of another type.
        ValueError: If there are no images, or they differ in size.
        ImageError: If a folder has no images, or one of those drawn cannot be read.
    """
    if isinstance(images, (str, os.PathLike)):
        if preprocess is None:
            raise ValueError(
                f"images is the folder {os.fspath(images)} and the preprocessing of the model is not "
                "known; pass what bmfa.load_model returns as the model, "
                "preprocess=bmfa.models.Preprocessing(...), or tensors"
            )
        files = ImageFiles(images)
        order = torch.randperm(len(files.entries), generator=generator)[:limit].tolist()
        found = [preprocess(files.read(files.entries[index])) for index in order]
        if not found:
            raise ImageError(
                f"{images} has no images; pass a folder with at least two JPEG or PNG files"
            )
        return torch.stack(found)
    if isinstance(images, DataLoader):
        found = list(islice(_each_image(images), limit))
    elif isinstance(images, (Tensor, Sequence)):
        found = list(_each_image([images] if isinstance(images, Tensor) else images))
    else:
        raise TypeError(f"images is {type(images).__name__}; pass {ACCEPTED}")
    if not found:
        raise ValueError(f"images is empty; pass {ACCEPTED} with at least two images")
    sizes = [f"{height}x{width}" for height, width in sorted({x.shape[-2:] for x in found})]
    if len(sizes) > 1:
        raise ValueError(
            f"images have different sizes, such as {sizes[0]} and {sizes[1]} pixels; a plan is for one "
            "size: pass images of that size"
        )
    order = torch.randperm(len(found), generator=generator)[:limit].tolist()
    return torch.stack([found[index] for index in order])


def _each_image(batches: Iterable[Any]) -> Iterator[Tensor]:
    """Yield (3, height, width) images from tensors, tuples and dictionaries of batches."""
    for batch in batches:
        images = batch[0] if isinstance(batch, (tuple, list)) and len(batch) > 0 else batch
        images = images.get("pixel_values") if isinstance(images, Mapping) else images
        if not isinstance(images, Tensor):
            raise TypeError(f"images has {type(images).__name__} elements; pass {ACCEPTED}")
        images = images.unsqueeze(0) if images.dim() == 3 else images
        if images.dim() != 4 or not images.is_floating_point():
            raise ValueError(
                f"images has a tensor of shape {tuple(images.shape)} and dtype {images.dtype}; pass "
                "preprocessed images, (N, 3, height, width) of a floating-point dtype"
            )
        yield from images.detach()
