"""A sample of the user's images, from a folder, a DataLoader or tensors, in three parts."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from bmfa.checks import check_integer
from bmfa.data.images import ImageFiles
from bmfa.models.loading import LoadedModel, find_preprocessing

ACCEPTED = (
    "a (N, 3, height, width) tensor, a list of (3, height, width) tensors, a DataLoader or a folder"
)
# Images from which on some of them take no part in the choice.
LEAST_TESTED = 6


def sample_images(
    images: Any,
    model: nn.Module | LoadedModel,
    limit: int,
    seed: int = 0,
    *,
    least: int = 2,
    img_size: int | tuple[int, int] | None = None,
) -> Tensor:
    """Read at most `limit` images in random order.

    Args:
        images: A (N, 3, height, width) tensor, a list of tensors with or without the dimension N, a
            DataLoader of tensors, of tuples that begin with one or of dictionaries with `pixel_values`,
            or the path of a folder or zip.
        model: The model, whose preprocessing images of a folder have.
        limit: The largest number of images. Of a DataLoader they are the first ones, of anything else
            they are drawn.
        seed: Seed of the images that are drawn, and of their order.
        least: The smallest number.
        img_size: The size of the images of a folder; None is that of the model.

    Returns:
        (n, 3, height, width) images.

    Raises:
        TypeError: If `images` is of another type.
        ValueError: If there are fewer than `least` images, they differ in size, or an argument is out of
            range.
        ImageError: If there is no such folder, or an image that is drawn cannot be read.
    """
    limit = check_integer("limit", limit, low=least)
    generator = torch.Generator().manual_seed(check_integer("seed", seed, low=0))
    read: Callable[[Any], Tensor] = lambda image: image  # noqa: E731
    found: Sequence[Any]
    name = "images"
    is_folder = isinstance(images, (str, os.PathLike))
    if img_size is not None and not is_folder:
        raise ValueError(f"img_size is {img_size}; pass tensors of that size without img_size")
    if is_folder:
        files, preprocess = ImageFiles(images), find_preprocessing(model, img_size=img_size)
        if preprocess is None:
            raise ValueError(
                f"images is the folder {images} and the preprocessing of the model is not "
                "known; pass what bmfa.load_model returns as the model, or tensors"
            )
        name = os.fspath(images)
        found, read = files.entries, lambda entry: preprocess(files.read(entry))
    elif isinstance(images, (Tensor, Sequence, DataLoader)):
        batches = [images] if isinstance(images, Tensor) else images
        most = limit if isinstance(images, DataLoader) else None
        found = list(islice(_each_image(batches), most))
    else:
        raise TypeError(f"images is {type(images).__name__}; pass {ACCEPTED}")
    if len(found) < least:
        why = "one"
        if least > 1:
            why = "two, because settings are validated on images on which they were not chosen"
        raise ValueError(f"{name} has {len(found)} images; pass at least {why}: {ACCEPTED}")
    order = torch.randperm(len(found), generator=generator)[:limit]
    found = [read(found[index]) for index in order]
    sizes = [f"{height}x{width}" for height, width in sorted({x.shape[-2:] for x in found})]
    if len(sizes) > 1:
        raise ValueError(
            f"images have different sizes, such as {sizes[0]} and {sizes[1]} pixels; a plan is for one "
            "size: pass images of that size"
        )
    return torch.stack(found)


def divide(images: Tensor) -> dict[str, Tensor]:
    """Divide images: half of them for "calibration", a quarter each for "validation" and "test"."""
    parts = torch.split(images, part_sizes(len(images)))
    return dict(zip(("calibration", "validation", "test"), parts, strict=True))


def part_sizes(images: int) -> list[int]:
    """Return the number of images in each part; a few images have no test images."""
    calibration = (images + 1) // 2
    test = (images - calibration) // 2 if images >= LEAST_TESTED else 0
    return [calibration, images - calibration - test, test]


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
