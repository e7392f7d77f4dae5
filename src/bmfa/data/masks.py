"""Decode COCO segmentations to pixel masks: polygons, uncompressed and compressed run lengths."""

import math
import warnings
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bmfa.packages import load_package

DEGENERATE = "degenerate polygon"
MALFORMED_POLYGON = "malformed polygon"
MALFORMED_RUNS = "malformed run lengths"
OUTSIDE = "mask outside the image"
EMPTY = "empty mask"

# Polygons that reach further than this many image sides are refused: pycocotools allocates memory
# for every fifth of a pixel along an edge.
_MAX_SIDES = 16


class MaskError(ValueError):
    """Raised for a segmentation without a usable mask; the message is one of the reasons above."""


def decode_mask(segmentation: Any, height: int, width: int) -> NDArray[np.bool_]:
    """Decode a COCO segmentation.

    Args:
        segmentation: list of polygons, or run lengths {"size", "counts"} as list or string.
        height: height of the image in pixels.
        width: width of the image in pixels.

    Returns:
        (height, width) bool with at least one True.

    Raises:
        MaskError: the segmentation is malformed, empty or outside the image.
    """
    coco = load_package("pycocotools.mask")
    if isinstance(segmentation, list):
        polygons = _check_polygons(segmentation, height, width)
        mask = _decode(coco.merge(coco.frPyObjects(polygons, height, width)))
        if not mask.any():
            raise MaskError(_empty_reason(polygons, height, width))
        return mask
    runs = _check_runs(segmentation, height, width)
    compressed = isinstance(runs["counts"], str)
    mask = _decode(runs if compressed else coco.frPyObjects(runs, height, width))
    if not mask.any():
        raise MaskError(EMPTY)
    return mask


def _decode(runs: dict[str, Any]) -> NDArray[np.bool_]:
    with warnings.catch_warnings():
        # pycocotools 2.0 does not yet take NumPy 2's `copy` argument.
        warnings.simplefilter("ignore", DeprecationWarning)
        mask: NDArray[np.bool_] = load_package("pycocotools.mask").decode(runs).view(bool)
    return mask


def _check_polygons(polygons: list[Any], height: int, width: int) -> list[list[float]]:
    for polygon in polygons:
        if not isinstance(polygon, list) or len(polygon) % 2:
            raise MaskError(MALFORMED_POLYGON)
        if not all(type(number) in (int, float) and math.isfinite(number) for number in polygon):
            raise MaskError(MALFORMED_POLYGON)
    # Fewer than three points enclose nothing, and pycocotools reads four numbers as a box.
    enclosing = [polygon for polygon in polygons if len(polygon) >= 6]
    if not enclosing:
        raise MaskError(DEGENERATE)
    limit = _MAX_SIDES * max(height, width)
    if any(abs(number) > limit for polygon in enclosing for number in polygon):
        raise MaskError(OUTSIDE)
    return enclosing


def _empty_reason(polygons: list[list[float]], height: int, width: int) -> str:
    xs = [x for polygon in polygons for x in polygon[0::2]]
    ys = [y for polygon in polygons for y in polygon[1::2]]
    overlaps = min(xs) < width and max(xs) > 0 and min(ys) < height and max(ys) > 0
    return DEGENERATE if overlaps else OUTSIDE


def _check_runs(segmentation: Any, height: int, width: int) -> dict[str, Any]:
    """Return run lengths that fill the image: pycocotools leaves pixels after short ones unset."""
    size, counts = segmentation.get("size"), segmentation.get("counts")
    if size != [height, width]:
        raise MaskError(OUTSIDE)
    lengths = counts if isinstance(counts, list) else _decompress(counts)
    if not all(type(length) is int and length >= 0 for length in lengths):
        raise MaskError(MALFORMED_RUNS)
    if sum(lengths) != height * width:
        raise MaskError(MALFORMED_RUNS)
    return {"size": size, "counts": counts}


def _decompress(text: Any) -> list[int]:
    """Return run lengths from COCO's string.

    A character has 5 bits and a continuation bit; from the fourth run on, a number is the
    difference to the run before the last.
    """
    if not isinstance(text, str) or not text.isascii():
        raise MaskError(MALFORMED_RUNS)
    lengths: list[int] = []
    value = shift = 0
    for character in text:
        code = ord(character) - 48
        if not 0 <= code < 64 or shift > 30:
            raise MaskError(MALFORMED_RUNS)
        value |= (code & 31) << shift
        shift += 5
        if code & 32:
            continue
        if code & 16:
            value -= 1 << shift
        lengths.append(value + (lengths[-2] if len(lengths) > 2 else 0))
        value = shift = 0
    if shift:
        raise MaskError(MALFORMED_RUNS)
    return lengths
