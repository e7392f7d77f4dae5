"""What all drawn images share: random numbers, noise, strokes and shapes, textures, painting.

Arrays go through additions, products, quotients, square roots and roundings alone, which IEEE 754
fixes, so equal arguments give equal bits on every platform. Results have the dtype of the arguments:
badges are drawn in float32, everything else in float64.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bmfa.checks import check_integer

Array = NDArray[np.floating[Any]]
Mask = NDArray[np.bool_]

LUMA = np.array([0.299, 0.587, 0.114])  # weights of R, G and B in ITU-R BT.601


class UniformGenerator:
    """Uniform random numbers from PCG64, seeded by a key of non-negative integers.

    It takes uniform doubles only: NumPy fixes the stream of the bit generator across versions and
    platforms, but not its distributions.

    Raises:
        ValueError: a part of the key is negative.
    """

    def __init__(self, *key: int) -> None:
        for part in key:
            check_integer("the seed or the index", part, low=0)
        self._generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence(key)))

    def number(self, low: float = 0.0, high: float = 1.0) -> float:
        """Return a number in [low, high)."""
        return low + (high - low) * self._generator.random()

    def integer(self, low: int, high: int) -> int:
        """Return an integer from low to high, both included."""
        return low + int(self._generator.random() * (high - low + 1))

    def array(self, *shape: int, low: float = 0.0, high: float = 1.0) -> NDArray[np.float64]:
        """Return numbers in [low, high)."""
        return low + (high - low) * self._generator.random(shape)


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
    weight = position - before
    weight = (weight * weight * (3.0 - 2.0 * weight)).astype(values.dtype)
    low, high = values.take(before, axis), values.take(before + 1, axis)
    between: Array = low + (high - low) * (weight if axis else weight[:, None])
    return between


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


def colours(rng: UniformGenerator, luma: Array, tint: float) -> Array:
    """Return random colours (count, 3, 1, 1) with lumas (count,), 0 to 255.

    Their channels differ from the luma by up to about `tint`.
    """
    channels = rng.array(len(luma), 3, low=-tint, high=tint)
    return np.asarray(luma[:, None] + channels - (channels @ LUMA)[:, None])[..., None, None]


def colour(rng: UniformGenerator, luma: float, tint: float) -> Array:
    """Return one colour, (3, 1, 1)."""
    return colours(rng, np.array([luma]), tint).reshape(3, 1, 1)


def luma_at(canvas: Array, centres: Array) -> Array:
    """Return the luma of a canvas (3, height, width) around points (count, 2), mean over 5x5 pixels."""
    height, width = canvas.shape[1:]
    near = (centres.astype(int)[:, :, None] + np.arange(-2, 3)).transpose(1, 0, 2)  # (2, count, 5)
    columns, rows = near[0].clip(0, width - 1), near[1].clip(0, height - 1)
    means: Array = canvas[:, rows[:, :, None], columns[:, None, :]].mean((2, 3))
    return LUMA @ means


def contrasting_colours(
    rng: UniformGenerator, luma: Array, low: float, high: float, tint: float = 35.0
) -> Array:
    """Return colours (count, 3, 1, 1) whose lumas differ from `luma` by low to high, towards grey."""
    step = rng.array(len(luma), low=low, high=high)
    return colours(rng, np.where(luma < 128.0, luma + step, luma - step), tint)


def _noise(rng: UniformGenerator, height: int, width: int, cell: float) -> Array:
    """Return noise (height, width) with features of about `cell` pixels."""
    rows, columns = np.arange(height) / cell, np.arange(width) / cell
    values = rng.array(int(rows[-1]) + 2, int(columns[-1]) + 2, low=-1.0)
    return noise(values, rows, columns)


def texture(rng: UniformGenerator, height: int, width: int) -> Array:
    """Return a texture (height, width) of about -1 to 1: octaves of noise, or stripes bent by noise."""
    coarse = _noise(rng, height, width, 23.0)
    if rng.number() < 0.5:
        fine = _noise(rng, height, width, 9.0)
        octaves: Array = 0.6 * coarse + 0.5 * fine + 0.3 * _noise(rng, height, width, 4.0)
        return octaves
    (dx, dy), period = direction(rng.number(high=0.5)), rng.number(5.0, 14.0)
    x, y = np.arange(width, dtype=float), np.arange(height, dtype=float)
    phase = plane(x, y, dx / period, dy / period) + 0.5 * coarse
    # A wave of period 1 between -1 and 1, made of parabolas, which cost less than a sine.
    phase -= np.floor(phase) + 0.5
    return phase * (8.0 - 16.0 * np.abs(phase)) * 0.6 + 0.4 * coarse


def background(rng: UniformGenerator, height: int, width: int, strength: float = 1.0) -> Array:
    """Return a canvas (3, height, width) of two or three textured regions and grain."""
    luma = rng.number(70.0, 185.0)
    canvas = _region(rng, height, width, luma, strength)
    for _ in range(rng.integer(1, 2)):
        other = _region(rng, height, width, luma + rng.number(-45.0, 45.0), strength)
        canvas += (other - canvas) * coverage(_wavy_line_distance(rng, height, width), -1.0)
    return canvas + rng.array(height, width, low=-7.0, high=7.0)


def _region(rng: UniformGenerator, height: int, width: int, luma: float, strength: float) -> Array:
    amplitude = strength * colour(rng, rng.number(8.0, 22.0), 9.0)
    return texture(rng, height, width) * amplitude + colour(rng, luma, 26.0)


def _wavy_line_distance(rng: UniformGenerator, height: int, width: int) -> Array:
    """Return the approximate signed distance to a wavy line through the middle of the canvas."""
    turn = rng.number()
    x = np.arange(width) - rng.number(0.2, 0.8) * width
    y = np.arange(height) - rng.number(0.2, 0.8) * height
    return plane(x, y, *direction(turn)) + 8.0 * _noise(rng, height, width, 23.0)
