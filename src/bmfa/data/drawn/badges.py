"""Drawn images for classification and masks: one badge in clutter, partly covered.

A badge is a closed thin outline with a texture inside and short ticks on its rim. Its class is the shape
of the outline (4), the texture (2) and the number of ticks (3): classes differ in a few pixels. Every
image also has a decoy, an outline without texture, and fragments of lines behind and in front.

An image is described in units of 1/128 of its side and evaluated in float32 at pixel centres, so the
same image can be drawn at any size: larger is sharper, and the content is the same.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bmfa.checks import check_integer
from bmfa.data.drawn.raster import (
    LUMA,
    Array,
    blend,
    coverage,
    direction,
    knots,
    noise,
    plane,
    to_pixels,
)
from bmfa.data.drawn.rng import UniformGenerator
from bmfa.data.drawn.shapes import Shape, Stroke

BADGE_IMAGE_SIZE = 128  # pixels along a side: 16 patches of 8 for the embedded model
# Amplitude of the fine noise over the whole image, in levels of 256. It sets the difficulty: a larger
# value lowers the accuracy that a model can reach. It was chosen by that of the full model alone, which
# `tools/train_embedded.py` measures over the grain (tools/train-embedded-h200.json): between 16 and 24.
GRAIN = 20.0
SHAPES = ("triangle", "square", "pentagon", "circle")
TEXTURES = ("striped", "dotted")
TICK_COUNTS = (1, 2, 3)
BADGE_CLASSES = tuple(
    f"{texture} {shape}, {count} tick{'s' if count > 1 else ''}"
    for shape in SHAPES
    for texture in TEXTURES
    for count in TICK_COUNTS
)

_STREAM = 2  # third part of the random key; scenes have 1
_SIDE = float(BADGE_IMAGE_SIZE)  # units along a side
_CORNERS = {"triangle": 3, "square": 4, "pentagon": 5, "circle": 0}
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
    pixels, label, mask, _ = draw_badge_parts(seed, index, size, grain)
    return BadgeImage(pixels, label, mask)


def draw_badge_parts(
    seed: int, index: int, size: int, grain: float
) -> tuple[NDArray[np.uint8], int, NDArray[np.bool_], NDArray[np.bool_]]:
    """Draw an image as `draw_badge` does; return also the mask (size, size) of its visible ticks."""
    check_integer("size", size, low=32)
    rng = UniformGenerator(seed, index, _STREAM)
    label = index % len(BADGE_CLASSES)
    background = _Background.draw(rng)
    canvas = _Canvas(size, background)
    badge = _Badge.from_class(rng, label)
    decoy = _Badge.decoy(rng, badge)
    bar = badge.bar(rng)
    behind, in_front = (_scatter(rng, count) for count in (_BEHIND, _IN_FRONT))
    slots = badge.choose_slots(rng, bar)
    canvas.paint_fragments(rng, behind)
    if decoy is not None:
        decoy.paint(rng, canvas, decoy.choose_slots(rng, None))
    mask, ticks = badge.paint(rng, canvas, slots)
    canvas.paint_fragments(rng, [bar, *in_front], mask)
    if grain:
        canvas.planes += canvas.noise(_knot_values(rng, _GRAIN_CELL), _GRAIN_CELL) * grain
    return to_pixels(canvas.planes), label, mask, ticks & mask


def draw_badge_batch(
    seed: int,
    indices: Iterable[int],
    size: int = BADGE_IMAGE_SIZE,
    *,
    grain: float = GRAIN,
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


def _piece(centre: tuple[float, float], turn: float, half: float, pen: float) -> Stroke:
    """Make a straight piece of half a length around a point."""
    (x, y), (dx, dy) = centre, direction(turn)
    ends = ((x - half * dx, y - half * dy), (x + half * dx, y + half * dy))
    return Stroke(np.array([ends]), pen)


def _scatter(rng: UniformGenerator, count: int) -> list[Stroke]:
    """Place pieces anywhere: two in three are lines as thin as a tick, the others are dots."""
    pieces = []
    for kind, length, weight, x, y, turn in rng.array(count, 6).tolist():
        line = kind < 2 / 3
        half = 2.5 + 7.0 * length if line else 0.0
        pen = 1.3 + 0.9 * weight if line else 2.2 + 3.2 * weight
        pieces.append(_piece((x * _SIDE, y * _SIDE), turn, half, pen))
    return pieces


class _Badge(NamedTuple):
    """An outline and what belongs to it; lengths in units, angles in turns."""

    shape: str
    texture: str | None  # None for a decoy
    ticks: int
    centre: tuple[float, float]
    radius: float
    turn: float
    squash: float  # factor of the first axis of the outline
    tick_length: float

    @classmethod
    def from_class(cls, rng: UniformGenerator, label: int) -> "_Badge":
        """Place the badge of a class; the whole of it is inside the image."""
        shape, rest = divmod(label, len(TEXTURES) * len(TICK_COUNTS))
        texture, ticks = divmod(rest, len(TICK_COUNTS))
        radius = rng.number(14.0, 22.0)
        return cls._placed(rng, SHAPES[shape], TEXTURES[texture], TICK_COUNTS[ticks], radius)

    @classmethod
    def decoy(cls, rng: UniformGenerator, badge: "_Badge") -> "_Badge | None":
        """Place an outline without texture beside the badge; None if four places are not free."""
        shape = SHAPES[rng.integer(0, len(SHAPES) - 1)]
        ticks, radius = rng.integer(0, len(TICK_COUNTS)), rng.number(9.0, 15.0)
        for _ in range(4):
            decoy = cls._placed(rng, shape, None, ticks, radius)
            if math.dist(decoy.centre, badge.centre) > decoy.reach + badge.reach:
                return decoy
        return None

    @classmethod
    def _placed(
        cls, rng: UniformGenerator, shape: str, texture: str | None, ticks: int, radius: float
    ) -> "_Badge":
        turn, squash, length = rng.number(), rng.number(0.88, 1.0), rng.number(6.0, 8.5)
        low = radius + length + 2.0
        centre = (rng.number(low, _SIDE - low), rng.number(low, _SIDE - low))
        return cls(shape, texture, ticks, centre, radius, turn, squash, length)

    @property
    def reach(self) -> float:
        """Largest distance of the badge from its centre."""
        return self.radius + self.tick_length + 1.0

    def bar(self, rng: UniformGenerator) -> Stroke:
        """Place a bar that covers a part of the badge."""
        turn, across, along, length, weight = rng.array(5).tolist()
        x, y = direction(turn)
        offset, shift = (1.1 * across - 0.55) * self.radius, (along - 0.5) * self.radius
        at = (self.centre[0] + (shift * x - offset * y), self.centre[1] + (shift * y + offset * x))
        return _piece(at, turn, self.radius * (0.5 + 0.9 * length), 4.0 + 4.0 * weight)

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
        dx, dy = direction(self.turn + turn)
        rim = self._apothem() / max(u * dx + v * dy for u, v in self._normals(dx, dy))
        x, y = self.centre
        low, high = rim - 1.0, rim + self.tick_length
        ends = ((x + low * dx, y + low * dy), (x + high * dx, y + high * dy))
        return Stroke(np.array([ends]), pen)

    def _apothem(self) -> float:
        corners = _CORNERS[self.shape]
        return self.radius * (math.cos(math.pi / corners) if corners else 0.9)

    def _normals(self, dx: float, dy: float) -> list[tuple[float, float]]:
        """Return the normals of all sides, or of a circle the one in a direction."""
        ax, ay = direction(self.turn)
        corners = _CORNERS[self.shape]
        if corners:
            local = [direction((side + 0.5) / corners) for side in range(corners)]
        else:
            u, v = (dx * ax + dy * ay) / self.squash, dy * ax - dx * ay
            length = math.hypot(u, v)
            local = [(u / length, v / length)]
        # Back from the axes of the badge to those of the image, the first axis squashed.
        return [(u * ax / self.squash - v * ay, u * ay / self.squash + v * ax) for u, v in local]

    def paint(
        self, rng: UniformGenerator, canvas: "_Canvas", slots: list[float]
    ) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Paint the badge and return its mask and that of its ticks, both (size, size)."""
        half = self.reach + 1.5
        columns, rows = (
            slice(max(0, int((at - half) / canvas.unit)), int((at + half) / canvas.unit) + 1)
            for at in self.centre
        )
        columns_at, rows_at = canvas.steps[columns], canvas.steps[rows]
        x, y = columns_at - self.centre[0], rows_at - self.centre[1]
        inside = self._signed_distance(x, y)
        pen = rng.number(1.7, 2.3)
        ink = np.abs(inside)
        ink -= pen / 2
        ticks = np.full_like(ink, self.reach)
        for turn in slots:
            np.minimum(ticks, self._tick(turn, pen).distance(columns_at, rows_at), out=ticks)
        np.minimum(ink, ticks, out=ink)
        shape = np.minimum(inside, ink)  # the filled outline and the ticks
        colour = canvas.contrasting_colour(rng, self.centre, 42.0, 85.0)
        target = canvas.planes[:, rows, columns]
        if self.texture is not None:
            blend(target, coverage(inside, canvas.unit) * 0.22, colour)
            texture = self._texture_distance(rng, x, y)
            np.minimum(ink, np.maximum(texture, inside), out=ink)
        blend(target, coverage(ink, canvas.unit), colour)
        masks = np.zeros((2, canvas.size, canvas.size), dtype=bool)
        masks[0][rows, columns] = shape < 0
        masks[1][rows, columns] = ticks < 0
        return masks[0], masks[1]

    def _signed_distance(self, x: Array, y: Array) -> Array:
        """Return the distance (h, w) to the outline, negative inside."""
        if self.shape == "circle":
            ax, ay = direction(self.turn)
            found = _length(plane(x, y, ax / self.squash, ay / self.squash), plane(x, y, -ay, ax))
        else:
            found, *others = (plane(x, y, *normal) for normal in self._normals(0.0, 0.0))
            for other in others:
                np.maximum(found, other, out=found)
        return found - self._apothem()

    def _texture_distance(self, rng: UniformGenerator, x: Array, y: Array) -> Array:
        """Return the distance (h, w) to the nearest stripe or dot, negative inside it."""
        dx, dy = direction(rng.number())
        period, phase, other = rng.number(4.4, 5.6), rng.number(), rng.number()
        along = _to_nearest(plane(x, y, dx / period, dy / period), phase, period)
        if self.texture == "striped":
            return np.abs(along) - 0.75
        across = _to_nearest(plane(x, y, -dy / period, dx / period), other, period)
        return _length(along, across) - 1.45


class _Background(NamedTuple):
    """Two textured regions with a wavy border, the second one striped; angles in turns."""

    base: NDArray[np.float64]  # (3,) colour of the first region, 0 to 255
    other: NDArray[np.float64]  # (3,) what the second region adds to it
    border: tuple[float, float]  # angle, and the point on the diagonal that it passes, in units
    stripes: tuple[float, float]  # angle, and period in units
    coarse: Array  # (knots, knots) noise
    fine: Array

    @classmethod
    def draw(cls, rng: UniformGenerator) -> "_Background":
        """Choose the colours and lines of an image."""
        base = rng.number(85.0, 170.0) + rng.array(3, low=-25.0, high=25.0)
        other = rng.number(-25.0, 25.0) + rng.array(3, low=-30.0, high=30.0)
        border = (rng.number(), _SIDE * rng.number(0.25, 0.75))
        stripes = (rng.number(), rng.number(5.0, 13.0))
        return cls(
            base, other, border, stripes, _knot_values(rng, _COARSE), _knot_values(rng, _FINE)
        )

    def luma_at(self, point: Sequence[float]) -> float:
        """Return the luma of the plain colour at a point."""
        (turn, at), (x, y) = self.border, point
        dx, dy = direction(turn)
        row, column = np.array([y]) / _COARSE, np.array([x]) / _COARSE
        wave = float(noise(self.coarse.astype(np.float64), row, column)[0, 0])
        side = (x - at) * dx + (y - at) * dy + _WAVE * wave
        return float(LUMA @ (self.base + self.other if side > 0 else self.base))

    def paint(self, canvas: "_Canvas") -> Array:
        """Return the planes (3, size, size)."""
        steps = canvas.steps
        coarse, fine = canvas.noise(self.coarse, _COARSE), canvas.noise(self.fine, _FINE)
        (turn, at), (stripe_turn, period) = self.border, self.stripes
        away = steps - at
        region = coverage(-(plane(away, away, *direction(turn)) + _WAVE * coarse), canvas.unit)
        dx, dy = direction(stripe_turn)
        phase = plane(steps, steps, dx / period, dy / period)
        phase += 0.5 * fine
        texture = np.abs(_to_nearest(phase, 0.0, 56.0))  # 0 to 28 levels
        texture -= 14.0
        texture *= region
        texture += coarse * 13.0
        texture += fine * 9.0
        planes: Array = region * self.other.astype(np.float32)[:, None, None]
        planes += texture
        planes += self.base.astype(np.float32)[:, None, None]
        return planes


class _Canvas:
    """Three planes (3, size, size) of colours from 0 to 255; `steps` are pixel centres in units."""

    def __init__(self, size: int, background: "_Background") -> None:
        self.size, self.background = size, background
        self.unit = _SIDE / size
        self.steps: Array = ((np.arange(size) + 0.5) * self.unit).astype(np.float32)
        self.planes = background.paint(self)

    def noise(self, values: Array, cell: float) -> Array:
        """Return smooth noise (size, size) between knots every `cell` units."""
        at = _knot_positions(self.size, cell)
        return noise(values, at, at)

    def contrasting_colour(
        self, rng: UniformGenerator, centre: Sequence[float], low: float, high: float
    ) -> Array:
        """Return a colour (3, 1, 1) whose luma differs from the background's by low to high."""
        luma, step = self.background.luma_at(centre), rng.number(low, high)
        luma += step if luma < 128.0 else -step
        return (luma + rng.array(3, low=-30.0, high=30.0)).astype(np.float32)[:, None, None]

    def paint_fragments(
        self,
        rng: UniformGenerator,
        fragments: Iterable[Stroke],
        mask: NDArray[np.bool_] | None = None,
    ) -> None:
        """Paint fragments and remove them from a mask."""
        for fragment in fragments:
            shape = Shape.from_strokes([fragment], self.steps, self.steps, self.unit)
            (a, b) = fragment.segments[0]
            colour = self.contrasting_colour(rng, (a + b) / 2, 35.0, 85.0)
            shape.paint(self.planes, colour, self.unit)
            if mask is not None:
                mask[shape.rows, shape.columns] &= shape.distance >= 0


def _length(x: Array, y: Array) -> Array:
    """Return the length (h, w) of vectors; x and y are overwritten."""
    x *= x
    y *= y
    x += y
    length: Array = np.sqrt(x)
    return length


def _to_nearest(phase: Array, shift: float, period: float) -> Array:
    """Return the signed distance to the nearest whole phase, in units of `period`."""
    phase += shift + 0.5
    phase -= np.floor(phase)
    phase -= 0.5
    phase *= period
    return phase


def _knot_values(rng: UniformGenerator, cell: float) -> Array:
    """Return random values (knots, knots) in [-1, 1), one every `cell` units."""
    count = int(_SIDE / cell) + 2
    return rng.array(count, count, low=-1.0).astype(np.float32)


def _knot_positions(size: int, cell: float) -> Array:
    """Return the position of each pixel of a line, in units of knots every `cell` units."""
    positions: Array = (np.arange(size) + 0.5) * (_SIDE / size / cell)
    return positions


def grain_weights(size: int) -> Array:
    """Return (size, knots) weights: the grain is `weights @ values @ weights.T` of its knots."""
    before, weight = knots(_knot_positions(size, _GRAIN_CELL))
    weights = np.zeros((size, int(_SIDE / _GRAIN_CELL) + 2), np.float32)
    weights[np.arange(size), before] = 1 - weight.astype(np.float32)
    weights[np.arange(size), before + 1] = weight
    return weights
