"""Shapes made of strokes: signed distances, masks and painting."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bmfa.data.drawn.raster import Array, blend, coverage, direction, segment_distance


class Stroke(NamedTuple):
    """Segments (count, 2 ends, 2 coordinates x and y), drawn with a round pen of a width."""

    segments: Array
    width: float

    def placed(self, centre: Array, scale: float, turn: float) -> "Stroke":
        """Return the stroke scaled with its width, rotated by `turn` full turns, moved to `centre`."""
        cosine, sine = direction(turn)
        rotated = self.segments @ np.array([[cosine, sine], [-sine, cosine]])
        return Stroke(scale * rotated + centre, scale * self.width)

    def distance(self, x: Array, y: Array) -> Array:
        """Return the signed distance (h, w) of pixels in columns x (w,) and rows y (h,)."""
        found = stroke_distance(x, y, self.segments)
        found -= self.width / 2
        return found


def reach(strokes: Sequence[Stroke]) -> float:
    """Return the largest distance of the strokes from the origin."""
    return max(float(np.hypot(*s.segments.T).max()) + s.width / 2 for s in strokes)


def polyline(points: Array) -> Array:
    """Return the segments between consecutive points, (count, 2, 2)."""
    return np.stack([points[:-1], points[1:]], axis=1)


def dot(point: Array) -> Array:
    """Return a point as one segment without length, (1, 2, 2)."""
    return np.stack([point, point])[None]


def arc(pieces: int, turns: float = 1.0) -> Array:
    """Return points at equal angles on the unit circle, (pieces + 1, 2)."""
    angles = 2 * math.pi * turns * np.arange(pieces + 1) / pieces
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
        columns, rows = _clip(low[0], high[0], len(x)), _clip(low[1], high[1], len(y))
        distances = [s.distance(x[columns], y[rows]) for s in strokes]
        return cls(rows, columns, np.minimum.reduce(distances))

    def mask(self, height: int, width: int) -> NDArray[np.bool_]:
        """Return (height, width) bool, True inside the shape."""
        mask = np.zeros((height, width), dtype=bool)
        mask[self.rows, self.columns] = self.distance < 0
        return mask

    def paint(self, canvas: Array, colour: Array, unit: float = 1.0) -> None:
        """Blend a colour (3, 1, 1) or (3, rows, columns) into a canvas (3, height, width), in place."""
        blend(canvas[:, self.rows, self.columns], coverage(self.distance, unit), colour)


def _clip(low: float, high: float, size: int) -> slice:
    first = min(max(0, math.floor(low)), size)
    return slice(first, max(first, min(size, math.ceil(high) + 1)))


def stroke_distance(x: Array, y: Array, segments: Array) -> Array:
    """Return the distance (h, w) of pixels to the nearest of some segments (count, 2, 2)."""
    nearest = np.full((len(y), len(x)), np.inf, np.result_type(x, np.float32))
    for start, end in segments.tolist():
        np.minimum(nearest, segment_distance(x, y, start, end), out=nearest)
    return nearest
