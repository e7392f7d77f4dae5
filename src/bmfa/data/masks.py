"""Decode COCO segmentations to pixel masks: polygons, uncompressed and compressed run lengths."""

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
        runs = coco.merge(coco.frPyObjects(polygons, height, width))
    else:
        runs = _check_runs(segmentation, height, width)
        if isinstance(runs["counts"], list):
            runs = coco.frPyObjects(runs, height, width)
    with warnings.catch_warnings():
        # pycocotools 2.0 does not yet take NumPy 2's `copy` argument.
        warnings.simplefilter("ignore", DeprecationWarning)
        mask: NDArray[np.bool_] = coco.decode(runs).view(bool)
    if not mask.any():
        outline = isinstance(segmentation, list)
        raise MaskError(_empty_reason(segmentation, height, width) if outline else EMPTY)
    return mask


def _check_polygons(polygons: list[Any], height: int, width: int) -> list[list[float]]:
    """Return the polygons that enclose something; pycocotools ends the process at some others."""
    for polygon in polygons:
        even = isinstance(polygon, list) and len(polygon) % 2 == 0
        if not even or not all(type(number) in (int, float) for number in polygon):
            raise MaskError(MALFORMED_POLYGON)
    # Fewer than three points enclose nothing, and pycocotools reads four numbers as a box.
    enclosing = [polygon for polygon in polygons if len(polygon) >= 6]
    if not enclosing:
        raise MaskError(DEGENERATE)
    numbers = np.abs(np.concatenate(enclosing))
    if not np.isfinite(numbers).all():
        raise MaskError(MALFORMED_POLYGON)
    if numbers.max() > _MAX_SIDES * max(height, width):
        raise MaskError(OUTSIDE)
    return enclosing


def _empty_reason(polygons: list[list[float]], height: int, width: int) -> str:
    x, y = np.concatenate([np.reshape(polygon, (-1, 2)) for polygon in polygons]).T
    overlaps = x.min() < width and x.max() > 0 and y.min() < height and y.max() > 0
    return DEGENERATE if overlaps else OUTSIDE


def _check_runs(segmentation: Any, height: int, width: int) -> dict[str, Any]:
    """Return run lengths that fill the image: pycocotools leaves pixels after short ones unset."""
    counts = segmentation.get("counts")
    if segmentation.get("size") != [height, width]:
        raise MaskError(OUTSIDE)
    lengths = counts if isinstance(counts, list) else _decompress(counts)
    valid = all(type(length) is int and length >= 0 for length in lengths)
    if not valid or sum(lengths) != height * width:
        raise MaskError(MALFORMED_RUNS)
    return {"size": [height, width], "counts": counts}


def _decompress(text: Any) -> list[int]:
    """Return run lengths from COCO's string.

    A character has 5 bits and a continuation bit; from the fourth run on, a number is the
    difference to the run before the last.
    """
    if not isinstance(text, str) or not all("0" <= character < "p" for character in text):
        raise MaskError(MALFORMED_RUNS)
    lengths: list[int] = []
    value = shift = 0
    for code in (ord(character) - 48 for character in text):
        value |= (code & 31) << shift
        shift += 5
        if not code & 32:
            value -= (code & 16) << (shift - 4)
            lengths.append(value + (lengths[-2] if len(lengths) > 2 else 0))
            value = shift = 0
    if shift:
        raise MaskError(MALFORMED_RUNS)
    return lengths
