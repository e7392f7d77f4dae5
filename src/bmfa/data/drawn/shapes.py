"""Shapes made of strokes: signed distances, masks and painting."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


class Stroke(NamedTuple):
    """Segments (count, 2 ends, 2 coordinates x and y), drawn with a round pen of a width."""

    segments: Array
    width: float

    def placed(self, centre: Array, scale: float, turn: float) -> "Stroke":
        """Return the stroke scaled with its width, rotated by `turn` full turns, moved to `centre`."""
        cosine, sine = math.cos(2 * math.pi * turn), math.sin(2 * math.pi * turn)
        rotated = self.segments @ np.array([[cosine, sine], [-sine, cosine]])
        return Stroke(scale * rotated + centre, scale * self.width)


def reach(strokes: Sequence[Stroke]) -> float:
    """Return the largest distance of the strokes from the origin."""
    return max(float(np.hypot(*s.segments.T).max()) + s.width / 2 for s in strokes)


def polyline(points: Array) -> Array:
    """Return the segments between consecutive points, (count, 2, 2)."""
    return np.stack([points[:-1], points[1:]], axis=1)


def arc(pieces: int, turns: float = 1.0) -> Array:
    """Return points at equal angles on the unit circle, (pieces + 1, 2)."""
    angles = 2 * math.pi * turns * np.arange(pieces + 1) / pieces
    return np.stack([np.cos(angles), np.sin(angles)], axis=1)


class Shape(NamedTuple):
    """A window of a canvas and the signed distance of its pixels to a contour, negative inside.

    The centre of a pixel has integer coordinates.
    """

    rows: slice
    columns: slice
    distance: Array

    @classmethod
    def of(cls, strokes: Sequence[Stroke], height: int, width: int) -> "Shape":
        """Return the union of strokes on a canvas, clipped to it."""
        low = np.min([s.segments.min((0, 1)) - s.width / 2 - 1 for s in strokes], axis=0)
        high = np.max([s.segments.max((0, 1)) + s.width / 2 + 1 for s in strokes], axis=0)
        left, right = _clip(low[0], high[0], width)
        top, bottom = _clip(low[1], high[1], height)
        x, y = np.arange(left, right), np.arange(top, bottom)
        distances = [segment_distance(x, y, s.segments) - s.width / 2 for s in strokes]
        return cls(slice(top, bottom), slice(left, right), np.minimum.reduce(distances))

    def mask(self, height: int, width: int) -> NDArray[np.bool_]:
        """Return (height, width) bool, True inside the shape."""
        mask = np.zeros((height, width), dtype=bool)
        mask[self.rows, self.columns] = self.distance < 0
        return mask

    def paint(self, canvas: Array, colour: Array) -> None:
        """Blend a colour (3, 1, 1) or (3, rows, columns) into a canvas (3, height, width), in place.

        The contour is antialiased over one pixel.
        """
        cover = np.minimum(np.maximum(0.5 - self.distance, 0.0), 1.0)
        target = canvas[:, self.rows, self.columns]
        target += cover * (colour - target)


def _clip(low: float, high: float, size: int) -> tuple[int, int]:
    first = min(max(0, math.floor(low)), size)
    return first, max(first, min(size, math.ceil(high) + 1))


def segment_distance(x: NDArray[Any], y: NDArray[Any], segments: Array) -> Array:
    """Return the distance (..., h, w) of pixels to the nearest of some segments.

    Args:
        x: (..., w) columns of the pixels.
        y: (..., h) rows of the pixels.
        segments: (..., count, 2, 2).
    """
    start, end = segments[..., 0, :], segments[..., 1, :]
    along = end - start
    length = np.sqrt((along**2).sum(-1, keepdims=True))
    unit = along / np.maximum(length, 1e-9)
    from_x = x[..., None, :] - start[..., :1]  # (..., count, w)
    from_y = y[..., None, :] - start[..., 1:]  # (..., count, h)
    foot = (from_x * unit[..., :1])[..., None, :] + (from_y * unit[..., 1:])[..., None]
    nearest = np.minimum(np.maximum(foot, 0.0), length[..., None])
    # |p - a|^2 - 2 t s + t^2, where s and t are the perpendicular foot and the nearest point along
    # a.
    foot *= -2.0
    foot += nearest
    foot *= nearest
    foot += (from_x * from_x)[..., None, :]
    foot += (from_y * from_y)[..., None]
    squared: Array = foot.min(-3)
    return np.sqrt(np.maximum(squared, 0.0))
