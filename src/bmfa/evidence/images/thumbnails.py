"""Small JPEG images inside records."""

import base64
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from bmfa.data import InstanceSource, ProbeBlock
from bmfa.data.instances import InstanceImage, Tally
from bmfa.models.preprocessing import Preprocessing
from bmfa.packages import load_package

QUALITIES = (90, 80, 70, 60, 50, 40, 30, 20)
IMAGE_SIDE = 160  # pixels


def jpeg_uri(image: Any, max_bytes: int) -> str:
    """Return a Pillow image as a JPEG data URI of the best quality within `max_bytes`, or the least."""
    data = b""
    for quality in QUALITIES:
        buffer = io.BytesIO()
        image.save(buffer, format="JPEG", quality=quality)
        data = buffer.getvalue()
        if len(data) <= max_bytes:
            break
    return f"data:image/jpeg;base64,{base64.b64encode(data).decode()}"


def seen_image(preprocess: Preprocessing, pixels: Tensor) -> Any:
    """Return preprocessed pixels as a Pillow image: resized, cropped, without the normalisation."""
    mean, std = (np.asarray(v, np.float32) for v in (preprocess.mean, preprocess.std))
    colours: NDArray[np.float32] = pixels.cpu().numpy().transpose(1, 2, 0) * std + mean
    eight_bits = (255 * colours).round().clip(0, 255).astype(np.uint8)
    return load_package("PIL.Image").fromarray(eight_bits)


def square_uri(
    pixels: NDArray[np.uint8], box: Sequence[int], max_bytes: int, side: int = IMAGE_SIDE
) -> str:
    """Return the part of an image in a box (left, top, right, bottom), resized to a square JPEG."""
    image = load_package("PIL.Image")
    crop = image.fromarray(pixels).crop(tuple(box))
    return jpeg_uri(crop.resize((side, side), image.Resampling.BILINEAR), max_bytes)


def crop_uri(source: InstanceSource, probes: ProbeBlock, index: int, max_bytes: int) -> str:
    """Return the crop of one probe; its image is read again from the source."""
    image = read_image(source, int(probes.image_id[index]))
    return square_uri(image.pixels, probes.box[index].tolist(), max_bytes)


def read_image(source: InstanceSource, identity: int) -> InstanceImage:
    """Return an image of a source by its id; raise LookupError if no instance is in it."""
    for index in range(len(source)):
        first = next(source.read(index, Tally()), None)
        if first is not None and first.image.id == identity:
            return first.image
    raise LookupError(f"no instance is in image {identity}")
