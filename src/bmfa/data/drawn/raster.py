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

Array = NDArray[Any]

LUMA = np.array([0.299, 0.587, 0.114])  # weights of R, G and B in ITU-R BT.601


def direction(turn: float) -> tuple[float, float]:
    """Return the unit vector at an angle in full turns."""
    return math.cos(2 * math.pi * turn), math.sin(2 * math.pi * turn)


def plane(x: Array, y: Array, a: float, b: float) -> Array:
    """Return a x + b y, (h, w) for x (w,) and y (h,)."""
    return x * a + (y * b)[:, None]


def segment_distance(x: Array, y: Array, start: Sequence[float], end: Sequence[float]) -> Array:
    """Return the distance (h, w) of pixels in columns x (w,) and rows y (h,) to a segment."""
    (ax, ay), (bx, by) = start, end
    length = math.hypot(bx - ax, by - ay)
    ux, uy = ((bx - ax) / length, (by - ay) / length) if length else (1.0, 0.0)
    x, y = x - ax, y - ay
    along = plane(x, y, ux, uy)
    along -= np.clip(along, 0.0, length)
    across = plane(x, y, -uy, ux)
    along *= along
    across *= across
    along += across
    distance: Array = np.sqrt(along, out=along)
    return distance


def noise(values: Array, rows: Array, columns: Array) -> Array:
    """Interpolate knots smoothly.

    Args:
        values: (m, n) values of the knots, in [-1, 1).
        rows: (h,) positions in units of knots, at most m - 1.
        columns: (w,) positions in units of knots, at most n - 1.

    Returns:
        (h, w) noise in [-1, 1).
    """
    (row, row_weight), (column, column_weight) = knots(rows), knots(columns)
    # Not a matrix product, for which BLAS would start threads on every small image.
    found = values[row]
    found += (values[row + 1] - found) * row_weight.astype(values.dtype)[:, None]
    left, right = found.take(column, axis=1), found.take(column + 1, axis=1)
    right -= left
    right *= column_weight.astype(values.dtype)
    right += left
    return right


def knots(position: Array) -> tuple[NDArray[np.int64], Array]:
    """Return the knot before each position, and the weight of the knot after it."""
    before = position.astype(np.int64)
    after = position - before
    return before, after * after * (3.0 - 2.0 * after)


def coverage(distance: Array, unit: float = 1.0) -> Array:
    """Return the part of each pixel of a side inside a contour, 0 to 1; contours are a pixel soft."""
    covered: Array = distance * (-1.0 / unit)
    covered += 0.5
    return np.clip(covered, 0.0, 1.0, out=covered)


def blend(target: Array, cover: Array, colour: Array) -> None:
    """Mix a colour (3, 1, 1) or (3, h, w) into planes (3, h, w), in place, by its cover (h, w)."""
    target += cover * (colour - target)


def to_pixels(planes: Array) -> NDArray[np.uint8]:
    """Round planes (3, height, width) in place; return an image (height, width, 3) uint8."""
    planes += 0.5
    np.clip(planes, 0.0, 255.0, out=planes)
    return np.ascontiguousarray(planes.astype(np.uint8).transpose(1, 2, 0))
