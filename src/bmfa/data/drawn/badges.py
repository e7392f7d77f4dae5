"""Drawn images for classification and masks: one badge in clutter, partly covered.

A badge is a closed thin outline with a texture inside and short ticks on its rim. Its class is the shape
of the outline (4), the texture (2) and the number of ticks (3): classes differ in a few pixels. Every
image also has a decoy, an outline without texture, and fragments of lines behind and in front.

An image is described in units of 1/128 of its side and evaluated in float32 at pixel centres, so the
same image can be drawn at any size: larger is sharper, and the content is the same.
"""

import math
from collections.abc import Iterable, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bmfa.checks import check_integer
from bmfa.data.drawn import painting
from bmfa.data.drawn.painting import Array, Mask, Shape, Stroke, UniformGenerator, direction, plane

BADGE_IMAGE_SIZE = 128  # pixels along a side: 16 patches of 8 for the embedded model
# Amplitude of the fine noise over the whole image, in levels of 256. It sets the difficulty: a larger
# value lowers the accuracy that a model can reach. It was chosen by that of the full model alone, which
# `tools/train_embedded.py` measures over the grain (tools/train-embedded-h200.json): between 16 and 24.
GRAIN = 20.0
_CORNERS = {"triangle": 3, "square": 4, "pentagon": 5, "circle": 0}
SHAPES = tuple(_CORNERS)
TEXTURES = ("striped", "dotted")
TICK_COUNTS = (1, 2, 3)
_CLASSES = tuple(product(SHAPES, TEXTURES, TICK_COUNTS))
BADGE_CLASSES = tuple(
    f"{texture} {shape}, {count} tick{'s' if count > 1 else ''}"
    for shape, texture, count in _CLASSES
)

_STREAM = 2  # third part of the random key; scenes have 1
_SIDE = float(BADGE_IMAGE_SIZE)  # units along a side
_SLOTS = 6  # directions, equally spaced, in which a badge may have ticks
_BEHIND, _IN_FRONT = 10, 4  # fragments of lines and dots behind and in front of the badge
_COARSE, _FINE = 26.0, 8.0  # units between the knots of the background's noise
_WAVE = 9.0  # units by which the border between two regions waves to each side
_GRAIN_CELL = 1.7  # units between the knots of the grain


class BadgeImage(NamedTuple):
    """Pixels (size, size, 3) uint8 RGB, class 0 to 23, and mask (size, size) of the visible badge."""

    pixels: NDArray[np.uint8]
    label: int
    mask: NDArray[np.bool_]


def draw_badge(
    seed: int, index: int, size: int = BADGE_IMAGE_SIZE, *, grain: float = GRAIN
) -> BadgeImage:
    """Draw the image of a seed and an index.

    Args:
        seed: seed of the set, at least 0.
        index: index in the set, at least 0; the class is index modulo 24.
        size: side in pixels, at least 32; the content does not depend on it.
        grain: amplitude of the fine noise in levels of 256; the task has `GRAIN`.

    Returns:
        The image; equal arguments give equal bits on every platform.

    Raises:
        ValueError: the seed or the index is negative, or the size too small.

    Example:
        >>> from bmfa.data import BADGE_CLASSES, draw_badge
        >>> BADGE_CLASSES[draw_badge(0, 7).label]
        'striped square, 2 ticks'
    """
    return BadgeImage(*draw_badge_parts(seed, index, size, grain)[:3])


def draw_badge_parts(
    seed: int, index: int, size: int, grain: float
) -> tuple[NDArray[np.uint8], int, Mask, Mask]:
    """Draw an image as `draw_badge` does; return also the mask (size, size) of its visible ticks."""
    check_integer("size", size, low=32)
    rng = UniformGenerator(seed, index, _STREAM)
    label = index % len(_CLASSES)
    canvas = _Canvas(rng, size)
    badge = _Badge(rng, *_CLASSES[label], rng.number(14.0, 22.0))
    decoy = badge.decoy(rng)
    bar = badge.bar(rng)
    behind, in_front = (_scatter(rng, count) for count in (_BEHIND, _IN_FRONT))
    slots = badge.choose_slots(rng, bar)
    canvas.paint_fragments(rng, behind)
    if decoy is not None:
        decoy.paint(rng, canvas, decoy.choose_slots(rng, None))
    mask, ticks = badge.paint(rng, canvas, slots)
    for shape in canvas.paint_fragments(rng, [bar, *in_front]):
        mask[shape.rows, shape.columns] &= shape.distance >= 0
    if grain:
        canvas.planes += _noise(_knot_values(rng, _GRAIN_CELL), size, _GRAIN_CELL) * grain
    return painting.to_pixels(canvas.planes), label, mask, ticks & mask


def draw_badge_batch(
    seed: int, indices: Iterable[int], size: int = BADGE_IMAGE_SIZE, *, grain: float = GRAIN
) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.bool_]]:
    """Draw several images: pixels (B, size, size, 3), classes (B,) and masks (B, size, size).

    Args:
        seed: seed of the set, at least 0.
        indices: indices in the set.
        size: side in pixels.
        grain: amplitude of the fine noise.

    Example:
        >>> from bmfa.data import draw_badge_batch
        >>> pixels, labels, masks = draw_badge_batch(0, [3, 25])
        >>> pixels.shape, labels.tolist(), masks.shape
        ((2, 128, 128, 3), [3, 1], (2, 128, 128))
    """
    images = [draw_badge(seed, index, size, grain=grain) for index in indices]
    pixels, labels, masks = zip(*images, strict=True)
    return np.stack(pixels), np.array(labels, dtype=np.int64), np.stack(masks)


def _piece(centre: Sequence[float], turn: float, start: float, end: float, pen: float) -> Stroke:
    """Make a straight piece between two distances from a point in a direction."""
    return painting.polyline(np.array([(start, 0.0), (end, 0.0)]), pen).placed(
        np.array(centre), 1.0, turn
    )


def _scatter(rng: UniformGenerator, count: int) -> list[Stroke]:
    """Place pieces anywhere: two in three are lines as thin as a tick, the others are dots."""
    pieces = []
    for kind, length, weight, x, y, turn in rng.array(count, 6).tolist():
        line = kind < 2 / 3
        half = 2.5 + 7.0 * length if line else 0.0
        pen = 1.3 + 0.9 * weight if line else 2.2 + 3.2 * weight
        pieces.append(_piece((x * _SIDE, y * _SIDE), turn, -half, half, pen))
    return pieces


class _Badge:
    """An outline of a shape and a radius, placed at random so that the whole of it is in the image.

    Lengths are in units, angles in turns. A decoy has no texture.
    """

    def __init__(
        self, rng: UniformGenerator, shape: str, texture: str, ticks: int, radius: float
    ) -> None:
        self.corners, self.texture = _CORNERS[shape], texture
        self.ticks, self.radius = ticks, radius
        self.turn, self.squash = rng.number(), rng.number(0.88, 1.0)  # of the first axis
        self.tick_length = rng.number(6.0, 8.5)
        self.reach = radius + self.tick_length + 1.0  # largest distance from the centre
        low = radius + self.tick_length + 2.0
        self.centre = rng.number(low, _SIDE - low), rng.number(low, _SIDE - low)
        self.apothem = radius * (math.cos(math.pi / self.corners) if self.corners else 0.9)

    def decoy(self, rng: UniformGenerator) -> "_Badge | None":
        """Place an outline without texture beside the badge; None if four places are not free."""
        shape = SHAPES[rng.integer(0, len(SHAPES) - 1)]
        ticks, radius = rng.integer(0, len(TICK_COUNTS)), rng.number(9.0, 15.0)
        for _ in range(4):
            decoy = _Badge(rng, shape, "", ticks, radius)
            if math.dist(decoy.centre, self.centre) > decoy.reach + self.reach:
                return decoy
        return None

    def bar(self, rng: UniformGenerator) -> Stroke:
        """Place a bar that covers a part of the badge."""
        turn, across, along, length, weight = rng.array(5).tolist()
        x, y = direction(turn)
        offset, shift = (1.1 * across - 0.55) * self.radius, (along - 0.5) * self.radius
        at = (self.centre[0] + (shift * x - offset * y), self.centre[1] + (shift * y + offset * x))
        half = self.radius * (0.5 + 0.9 * length)
        return _piece(at, turn, -half, half, 4.0 + 4.0 * weight)

    def choose_slots(self, rng: UniformGenerator, bar: Stroke | None) -> list[float]:
        """Return the directions of the ticks in turns, those farthest from the bar if it is near."""
        jitter = rng.array(_SLOTS, low=-0.03, high=0.03)
        order = np.argsort(rng.array(_SLOTS), kind="stable")
        turns = [float(slot / _SLOTS + jitter[slot]) for slot in order]
        if bar is not None:
            turns.sort(key=lambda turn: not self._is_free(turn, bar))
        return turns[: self.ticks]

    def _is_free(self, turn: float, bar: Stroke) -> bool:
        """Return True if no part of a tick is within one unit of the bar."""
        start, end = self._tick(turn, 0.0).segments[0]
        x, y = np.transpose([start + share * (end - start) for share in (0.2, 0.6, 1.0)])
        return bool(bar.distance(x, y).diagonal().min() > 2.0)

    def _tick(self, turn: float, pen: float) -> Stroke:
        """Return a tick; it starts one unit inside the rim."""
        x, y = direction(self.turn + turn)
        rim = self.apothem / float(self._scale(np.array([x]), np.array([y]))[0, 0])
        return _piece(self.centre, self.turn + turn, rim - 1.0, rim + self.tick_length, pen)

    def _scale(self, x: Array, y: Array) -> Array:
        """Return (h, w): the outline is where it equals `apothem`, and it grows linearly outwards.

        Args:
            x: (w,) columns relative to the centre.
            y: (h,) rows relative to the centre.
        """
        ax, ay = direction(self.turn)
        if not self.corners:
            along = plane(x, y, ax / self.squash, ay / self.squash)
            return painting.length(along, plane(x, y, -ay, ax))
        sides = []
        for side in range(self.corners):
            u, v = direction((side + 0.5) / self.corners)
            # From the axes of the badge to those of the image, the first axis squashed.
            u, v = u * ax / self.squash - v * ay, u * ay / self.squash + v * ax
            sides.append(plane(x, y, u, v))
        farthest: Array = np.maximum.reduce(sides)
        return farthest

    def paint(
        self, rng: UniformGenerator, canvas: "_Canvas", slots: list[float]
    ) -> tuple[Mask, Mask]:
        """Paint the badge and return its mask and that of its ticks, both (size, size)."""
        half, unit = self.reach + 1.5, canvas.unit
        columns, rows = (
            painting.window((at - half) / unit, (at + half) / unit, canvas.size)
            for at in self.centre
        )
        columns_at, rows_at = canvas.steps[columns], canvas.steps[rows]
        x, y = columns_at - self.centre[0], rows_at - self.centre[1]
        inside = self._scale(x, y) - self.apothem
        pen = rng.number(1.7, 2.3)
        tick_distances = [self._tick(turn, pen).distance(columns_at, rows_at) for turn in slots]
        ticks = np.minimum.reduce([np.full_like(inside, self.reach), *tick_distances])
        ink = np.minimum(np.abs(inside) - pen / 2, ticks)
        colour = canvas.contrasting_colour(rng, self.centre, 42.0, 85.0)
        target = canvas.planes[:, rows, columns]
        masks = np.zeros((2, canvas.size, canvas.size), dtype=bool)
        masks[:, rows, columns] = np.minimum(inside, ink) < 0, ticks < 0
        if self.texture:
            painting.blend(target, painting.coverage(inside, unit) * 0.22, colour)
            texture = self._texture_distance(rng, x, y)
            np.minimum(ink, np.maximum(texture, inside), out=ink)
        painting.blend(target, painting.coverage(ink, unit), colour)
        return masks[0], masks[1]

    def _texture_distance(self, rng: UniformGenerator, x: Array, y: Array) -> Array:
        """Return the distance (h, w) to the nearest stripe or dot, negative inside it."""
        dx, dy = direction(rng.number())
        period, phase, other = rng.number(4.4, 5.6), rng.number(), rng.number()
        along = _to_nearest(plane(x, y, dx / period, dy / period), phase, period)
        if self.texture == "striped":
            return np.abs(along) - 0.75
        across = _to_nearest(plane(x, y, -dy / period, dx / period), other, period)
        return painting.length(along, across) - 1.45


class _Canvas:
    """Three planes (3, size, size) of colours from 0 to 255; `steps` are pixel centres in units.

    They begin as two textured regions with a wavy border, the second one striped.
    """

    def __init__(self, rng: UniformGenerator, size: int) -> None:
        self.size, self.unit = size, _SIDE / size
        self.steps: Array = ((np.arange(size) + 0.5) * self.unit).astype(np.float32)
        # The colour of the first region, and what the second one adds to it.
        self.base = rng.number(85.0, 170.0) + rng.array(3, low=-25.0, high=25.0)
        self.other = rng.number(-25.0, 25.0) + rng.array(3, low=-30.0, high=30.0)
        # The direction across the border, and the point on the diagonal that the border passes.
        self.across, self.at = direction(rng.number()), _SIDE * rng.number(0.25, 0.75)
        (dx, dy), period = direction(rng.number()), rng.number(5.0, 13.0)
        self.knots, fine_knots = _knot_values(rng, _COARSE), _knot_values(rng, _FINE)
        coarse, fine = _noise(self.knots, size, _COARSE), _noise(fine_knots, size, _FINE)
        away = self.steps - self.at
        region = painting.coverage(-(plane(away, away, *self.across) + _WAVE * coarse), self.unit)
        phase = plane(self.steps, self.steps, dx / period, dy / period) + 0.5 * fine
        stripes = np.abs(_to_nearest(phase, 0.0, 56.0)) - 14.0  # levels
        texture = stripes * region + coarse * 13.0 + fine * 9.0
        base, other = self.base.astype(np.float32), self.other.astype(np.float32)
        self.planes: Array = region * other[:, None, None] + texture + base[:, None, None]

    def contrasting_colour(
        self, rng: UniformGenerator, centre: Sequence[float], low: float, high: float
    ) -> Array:
        """Return a colour (3, 1, 1) whose luma differs from the plain background by low to high."""
        (x, y), (dx, dy) = centre, self.across
        row, column = np.array([y]) / _COARSE, np.array([x]) / _COARSE
        wave = float(painting.noise(self.knots.astype(np.float64), row, column)[0, 0])
        beyond = (x - self.at) * dx + (y - self.at) * dy + _WAVE * wave > 0
        luma = float(painting.LUMA @ (self.base + self.other if beyond else self.base))
        step = rng.number(low, high)
        luma += step if luma < 128.0 else -step
        return (luma + rng.array(3, low=-30.0, high=30.0)).astype(np.float32)[:, None, None]

    def paint_fragments(self, rng: UniformGenerator, fragments: Iterable[Stroke]) -> list[Shape]:
        """Paint fragments and return their shapes."""
        shapes = []
        for fragment in fragments:
            shape = Shape.from_strokes([fragment], self.steps, self.steps, self.unit)
            colour = self.contrasting_colour(rng, fragment.segments[0].sum(0) / 2, 35.0, 85.0)
            shape.paint(self.planes, colour, self.unit)
            shapes.append(shape)
        return shapes


def _to_nearest(phase: Array, shift: float, period: float) -> Array:
    """Return the signed distance to the nearest whole phase, in units of `period`."""
    phase = phase + (shift + 0.5)
    return (phase - np.floor(phase) - 0.5) * period


def _knot_values(rng: UniformGenerator, cell: float) -> Array:
    """Return random values (knots, knots) in [-1, 1), one every `cell` units."""
    count = int(_SIDE / cell) + 2
    return rng.array(count, count, low=-1.0).astype(np.float32)


def _noise(values: Array, size: int, cell: float) -> Array:
    """Return smooth noise (size, size) between knots every `cell` units."""
    at = (np.arange(size) + 0.5) * (_SIDE / size / cell)
    return painting.noise(values, at, at)


def grain_weights(size: int) -> Array:
    """Return (size, knots) weights: the grain is `weights @ values @ weights.T` of its knots."""
    knots = np.eye(int(_SIDE / _GRAIN_CELL) + 2, dtype=np.float32)
    at = (np.arange(size) + 0.5) * (_SIDE / size / _GRAIN_CELL)
    return painting.interpolate(knots, at, 0)
