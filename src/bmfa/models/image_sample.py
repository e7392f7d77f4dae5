"""A sample of the user's images as one tensor, from a folder, a DataLoader or tensors."""

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from bmfa.data.images import ImageError, ImageFiles
from bmfa.models import embedded
from bmfa.models.loading import LoadedModel, check_img_size
from bmfa.models.preprocessing import Preprocessing
from bmfa.packages import load_package

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
        return _from_folder(images, preprocess, limit, generator)
    if isinstance(images, DataLoader):
        first = _stack(_first_images(images, limit))
        return first[_order(len(first), limit, generator)]
    if isinstance(images, Tensor):
        tensor = _checked(images)
    elif isinstance(images, Sequence):
        tensor = _stack([image for part in images for image in _checked(part)])
    else:
        raise TypeError(f"images is {type(images).__name__}; pass {ACCEPTED}")
    if len(tensor) == 0:
        raise ValueError(f"images is empty; pass {ACCEPTED} with at least two images")
    return tensor[_order(len(tensor), limit, generator)]


def find_preprocessing(
    model: LoadedModel | nn.Module,
    preprocess: Preprocessing | None,
    img_size: int | tuple[int, int] | None,
) -> Preprocessing | None:
    """Return the preprocessing for images of a folder, None if it is not known.

    Raises:
        ValueError: If the model does not accept `img_size`.
    """
    module = model.model if isinstance(model, LoadedModel) else model
    if preprocess is None:
        if isinstance(model, LoadedModel):
            preprocess = model.preprocess
        elif isinstance(model, embedded.EmbeddedViT):
            side, mean, std = embedded.IMAGE_SIZE, embedded.MEAN, embedded.STD
            preprocess = Preprocessing((side, side), 1.0, mean=(mean,) * 3, std=(std,) * 3)
        elif hasattr(model, "pretrained_cfg"):
            settings = load_package("timm.data").resolve_data_config({}, model=model)
            preprocess = Preprocessing.of_timm(settings)
        else:
            return None
    if img_size is not None:
        preprocess = preprocess.override(img_size=img_size)
        check_img_size(type(module).__name__, module, preprocess.size)
    return preprocess


def _from_folder(
    path: str | os.PathLike[str],
    preprocess: Preprocessing | None,
    limit: int,
    generator: torch.Generator,
) -> Tensor:
    if preprocess is None:
        raise ValueError(
            f"images is the folder {os.fspath(path)} and the preprocessing of the model is not known; "
            "pass what bmfa.load_model returns as the model, preprocess=bmfa.models.Preprocessing(...), "
            "or tensors"
        )
    files = ImageFiles(path)
    if not files.entries:
        raise ImageError(f"{path} has no images; pass a folder with at least two JPEG or PNG files")
    order = _order(len(files.entries), limit, generator)
    return torch.stack([preprocess(files.read(files.entries[index])) for index in order])


def _first_images(batches: Iterable[Any], limit: int) -> list[Tensor]:
    images: list[Tensor] = []
    for batch in batches:
        part = batch[0] if isinstance(batch, (tuple, list)) and len(batch) > 0 else batch
        part = part.get("pixel_values") if isinstance(part, Mapping) else part
        images += list(_checked(part))
        if len(images) >= limit:
            break
    return images[:limit]


def _checked(images: Any) -> Tensor:
    """Return (N, 3, height, width) from a tensor with or without the first dimension."""
    if not isinstance(images, Tensor):
        raise TypeError(f"images has {type(images).__name__} elements; pass {ACCEPTED}")
    images = images.unsqueeze(0) if images.dim() == 3 else images
    if images.dim() != 4 or not images.is_floating_point():
        raise ValueError(
            f"images has a tensor of shape {tuple(images.shape)} and dtype {images.dtype}; pass "
            "preprocessed images, (N, 3, height, width) of a floating-point dtype"
        )
    detached: Tensor = images.detach()
    return detached


def _stack(images: list[Tensor]) -> Tensor:
    if not images:
        raise ValueError(f"images is empty; pass {ACCEPTED} with at least two images")
    sizes = sorted({tuple(image.shape[-2:]) for image in images})
    if len(sizes) > 1:
        first, second = (f"{height}x{width}" for height, width in sizes[:2])
        raise ValueError(
            f"images have different sizes, such as {first} and {second} pixels; a plan is for one "
            "size: pass images of that size"
        )
    return torch.stack(images)


def _order(count: int, limit: int, generator: torch.Generator) -> list[int]:
    order: list[int] = torch.randperm(count, generator=generator)[:limit].tolist()
    return order
