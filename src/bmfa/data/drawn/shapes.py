"""Shapes made of strokes and polygons: signed distances, masks and painting."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bmfa.data.drawn.raster import Array, Mask, blend, coverage, direction, segment_distance


class Stroke(NamedTuple):
    """Segments (count, 2 ends, 2 coordinates x and y), drawn with a round pen of a width.

    If the stroke is filled, its segments are the outline of a polygon.
    """

    segments: Array
    width: float
    filled: bool = False

    def placed(self, centre: Array, scale: float, turn: float) -> "Stroke":
        """Return the stroke scaled with its width, rotated by `turn` full turns, moved to `centre`."""
        cosine, sine = direction(turn)
        rotated = self.segments @ np.array([[cosine, sine], [-sine, cosine]])
        return Stroke(scale * rotated + centre, scale * self.width, self.filled)

    def distance(self, x: Array, y: Array) -> Array:
        """Return the signed distance (h, w) of pixels in columns x (w,) and rows y (h,)."""
        segments = self.segments.tolist()
        distances = [segment_distance(x, y, start, end) for start, end in segments]
        nearest: Array = np.minimum.reduce(distances)
        if self.filled:
            nearest[_inside(x, y, segments)] *= -1.0
        return nearest - self.width / 2


def _inside(x: Array, y: Array, segments: Sequence[Sequence[Sequence[float]]]) -> Mask:
    """Return (h, w) bool, True where a ray to the right crosses an odd number of segments."""
    crossings = np.zeros((len(y), len(x)), dtype=bool)
    for (x0, y0), (x1, y1) in segments:
        at = x0 + (y - y0) * (x1 - x0) / (y1 - y0 or 1.0)
        crossings ^= ((y0 > y) != (y1 > y))[:, None] & (x[None] < at[:, None])
    return crossings


def reach(strokes: Sequence[Stroke]) -> float:
    """Return the largest distance of the strokes from the origin."""
    return max(float(np.hypot(*s.segments.T).max()) + s.width / 2 for s in strokes)


def polyline(points: Array, width: float) -> Stroke:
    """Return a stroke through points (count, 2)."""
    return Stroke(np.stack([points[:-1], points[1:]], axis=1), width)


def dot(point: Array, width: float) -> Stroke:
    """Return a disc around a point."""
    return polyline(np.stack([point, point]), width)


def polygon(points: Array) -> Stroke:
    """Return a filled polygon with corners (count, 2)."""
    return Stroke(np.stack([points, np.roll(points, -1, axis=0)], axis=1), 0.0, filled=True)


def circle(pieces: int) -> Array:
    """Return points at equal angles on the unit circle, (pieces + 1, 2)."""
    angles = 2 * math.pi * np.arange(pieces + 1) / pieces
    return np.stack([np.cos(angles), np.sin(angles)], axis=1)


class Shape(NamedTuple):
    """A window of a canvas and the signed distance of its pixels to a contour, negative inside."""

    rows: slice
    columns: slice
    distance: Array

    @classmethod
    def from_strokes(
        cls, strokes: Sequence[Stroke], x: Array, y: Array, unit: float = 1.0
    ) -> "Shape":
        """Return the union of strokes on a canvas, clipped to it.

        Args:
            strokes: strokes, at least one.
            x: (width,) coordinates of the centres of the columns.
            y: (height,) coordinates of the centres of the rows.
            unit: side of a pixel.
        """
        low = np.min([s.segments.min((0, 1)) - s.width / 2 - 1 for s in strokes], axis=0) / unit
        high = np.max([s.segments.max((0, 1)) + s.width / 2 + 1 for s in strokes], axis=0) / unit
        columns, rows = map(window, low, high, (len(x), len(y)))
        distances = [s.distance(x[columns], y[rows]) for s in strokes]
        return cls(rows, columns, np.minimum.reduce(distances))

    def mask(self, height: int, width: int) -> Mask:
        """Return (height, width) bool, True inside the shape."""
        mask = np.zeros((height, width), dtype=bool)
        mask[self.rows, self.columns] = self.distance < 0
        return mask

    def paint(self, canvas: Array, colour: Array, unit: float = 1.0) -> None:
        """Blend a colour (3, 1, 1) or (3, rows, columns) into a canvas (3, height, width), in place."""
        blend(canvas[:, self.rows, self.columns], coverage(self.distance, unit), colour)


def window(low: float, high: float, size: int) -> slice:
    """Return the pixels of a line of `size` pixels from low to high, rounded outward."""
    first, last = np.clip((math.floor(low), math.ceil(high) + 1), 0, size).tolist()
    return slice(first, last)
