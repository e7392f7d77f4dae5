"""What all drawn images share: planes of distances and smooth noise, painting, rounding to pixels.

Arrays go through additions, products, quotients, square roots and roundings alone, which IEEE 754
fixes, so equal arguments give equal bits on every platform. Results have the dtype of the arguments:
badges are drawn in float32, everything else in float64.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.floating[Any]]
Mask = NDArray[np.bool_]

LUMA = np.array([0.299, 0.587, 0.114])  # weights of R, G and B in ITU-R BT.601


def direction(turn: float) -> tuple[float, float]:
    """Return the unit vector at an angle in full turns."""
    return math.cos(2 * math.pi * turn), math.sin(2 * math.pi * turn)


def plane(x: Array, y: Array, a: float, b: float) -> Array:
    """Return a x + b y, (h, w) for x (w,) and y (h,)."""
    return x * a + (y * b)[:, None]


def length(x: Array, y: Array) -> Array:
    """Return the length of vectors; `np.hypot` would differ between platforms."""
    return np.asarray(np.sqrt(x * x + y * y))


def segment_distance(x: Array, y: Array, start: Sequence[float], end: Sequence[float]) -> Array:
    """Return the distance (h, w) of pixels in columns x (w,) and rows y (h,) to a segment."""
    (ax, ay), (bx, by) = start, end
    extent = math.hypot(bx - ax, by - ay)
    ux, uy = ((bx - ax) / extent, (by - ay) / extent) if extent else (1.0, 0.0)
    x, y = x - ax, y - ay
    along = plane(x, y, ux, uy)
    along -= along.clip(0.0, extent)
    return length(along, plane(x, y, -uy, ux))


def interpolate(values: Array, position: Array, axis: int) -> Array:
    """Interpolate knots smoothly along one of two axes; positions are in units of knots."""
    # Not a matrix product, for which BLAS would start threads on every small image.
    before = position.astype(np.int64)
    after = position - before
    weight = (after * after * (3.0 - 2.0 * after)).astype(values.dtype)
    low, high = values.take(before, axis), values.take(before + 1, axis)
    high -= low
    high *= weight if axis else weight[:, None]
    high += low
    return high


def noise(values: Array, rows: Array, columns: Array) -> Array:
    """Interpolate knots smoothly in both directions.

    Args:
        values: (m, n) values of the knots, in [-1, 1).
        rows: (h,) positions in units of knots, less than m - 1.
        columns: (w,) positions in units of knots, less than n - 1.

    Returns:
        (h, w) noise in [-1, 1).
    """
    return interpolate(interpolate(values, rows, 0), columns, 1)


def coverage(distance: Array, unit: float = 1.0) -> Array:
    """Return the part of each pixel of a side inside a contour, 0 to 1; contours are a pixel soft."""
    return (distance * (-1.0 / unit) + 0.5).clip(0.0, 1.0)


def blend(target: Array, cover: Array, colour: Array) -> None:
    """Mix a colour (3, 1, 1) or (3, h, w) into planes (3, h, w), in place, by its cover (h, w)."""
    target += cover * (colour - target)


def to_pixels(planes: Array) -> NDArray[np.uint8]:
    """Round planes (3, height, width) to an image (height, width, 3) uint8."""
    rounded = (planes + 0.5).clip(0.0, 255.0).astype(np.uint8)
    return np.ascontiguousarray(rounded.transpose(1, 2, 0))
