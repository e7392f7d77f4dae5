"""Drawn images for classification and masks: one badge in clutter, partly covered.

A badge is a closed thin outline with a texture inside and short ticks on its rim. Its class is the shape
of the outline (4), the texture (2) and the number of ticks (3): classes differ in a few pixels. Every
image also has a decoy, an outline without texture, and fragments of lines behind and in front.

An image is described in units of 1/128 of its side and evaluated at pixel centres, so the same image
can be drawn at any size: larger is sharper, and the content is the same. Arrays go through additions,
products, quotients, square roots and roundings alone, which IEEE 754 fixes, so equal arguments give
equal bits on every platform.
"""

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bmfa.checks import check_integer
from bmfa.data.drawn.rng import UniformGenerator

Array = NDArray[np.float32]

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
_LUMA = (0.299, 0.587, 0.114)  # weights of R, G and B in ITU-R BT.601


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
    background = _Background.of(rng)
    canvas = _Canvas(size, background)
    badge = _Badge.of_class(rng, label)
    decoy = _Badge.decoy(rng, badge)
    bar = _Fragments.bar_over(rng, badge)
    behind, in_front = (_Fragments.scattered(rng, count) for count in (_BEHIND, _IN_FRONT))
    slots = badge.choose_slots(rng, bar)
    canvas.paint_fragments(rng, behind)
    if decoy is not None:
        decoy.paint(rng, canvas, decoy.choose_slots(rng, None))
    mask, ticks = badge.paint(rng, canvas, slots)
    for fragments in (bar, in_front):
        canvas.paint_fragments(rng, fragments, mask)
    return canvas.to_pixels(rng, grain), label, mask, ticks & mask


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


class _Fragments(NamedTuple):
    """Straight pieces, each from one end to the other with a round pen; all lengths in units."""

    start: NDArray[np.float64]  # (count, 2), x and y
    end: NDArray[np.float64]  # (count, 2)
    pen: NDArray[np.float64]  # (count,) widths

    @classmethod
    def scattered(cls, rng: UniformGenerator, count: int) -> "_Fragments":
        """Place pieces anywhere: two in three are lines as thin as a tick, the others are dots."""
        random = rng.array(count, 6)
        line = random[:, 0] < 2 / 3
        half = np.where(line, 2.5 + 7.0 * random[:, 1], 0.0)
        pen = np.where(line, 1.3 + 0.9 * random[:, 2], 2.2 + 3.2 * random[:, 2])
        centre = random[:, 3:5] * _SIDE
        turns = random[:, 5].tolist()
        along = np.array([_direction(turn) for turn in turns]).reshape(-1, 2) * half[:, None]
        return cls(centre - along, centre + along, pen)

    @classmethod
    def bar_over(cls, rng: UniformGenerator, badge: "_Badge") -> "_Fragments":
        """Place a bar that covers a part of the badge."""
        random = rng.array(5).tolist()
        x, y = _direction(random[0])
        offset, shift = (1.1 * random[1] - 0.55) * badge.radius, (random[2] - 0.5) * badge.radius
        half, pen = badge.radius * (0.5 + 0.9 * random[3]), 4.0 + 4.0 * random[4]
        middle_x, middle_y = badge.centre
        middle_x += shift * x - offset * y
        middle_y += shift * y + offset * x
        centre = np.array([[middle_x, middle_y]])
        along = np.array([[half * x, half * y]])
        return cls(centre - along, centre + along, np.array([pen]))


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
    def of_class(cls, rng: UniformGenerator, label: int) -> "_Badge":
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
            apart = math.dist(decoy.centre, badge.centre)
            if apart > decoy.reach + badge.reach:
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

    def choose_slots(self, rng: UniformGenerator, bar: "_Fragments | None") -> list[float]:
        """Return the directions of the ticks in turns, those farthest from the bar if it is near."""
        jitter = rng.array(_SLOTS, low=-0.03, high=0.03)
        order = np.argsort(rng.array(_SLOTS), kind="stable")
        turns = [float(slot / _SLOTS + jitter[slot]) for slot in order]
        if bar is not None:
            free = [self._is_free(turn, bar) for turn in turns]
            turns = [turns[i] for i in sorted(range(_SLOTS), key=lambda i: not free[i])]
        return turns[: self.ticks]

    def _is_free(self, turn: float, bar: "_Fragments") -> bool:
        """Return True if no part of a tick is within one unit of the bar."""
        start, end = self._tick(turn)
        margin = float(bar.pen[0]) / 2 + 2.0
        points = [
            [s + share * (e - s) for s, e in zip(start, end, strict=True)]
            for share in (0.2, 0.6, 1)
        ]
        ends = bar.start[0].tolist(), bar.end[0].tolist()
        return all(_point_distance(point, *ends) > margin for point in points)

    def _tick(self, turn: float) -> tuple[tuple[float, float], tuple[float, float]]:
        """Return the ends of a tick; it starts one unit inside the rim."""
        dx, dy = _direction(self.turn + turn)
        rim = self._apothem() / max(u * dx + v * dy for u, v in self._normals(dx, dy))
        x, y = self.centre
        low, high = rim - 1.0, rim + self.tick_length
        return (x + low * dx, y + low * dy), (x + high * dx, y + high * dy)

    def _apothem(self) -> float:
        corners = _CORNERS[self.shape]
        return self.radius * (math.cos(math.pi / corners) if corners else 0.9)

    def _normals(self, dx: float, dy: float) -> list[tuple[float, float]]:
        """Return the normals of all sides, or of a circle the one in a direction."""
        ax, ay = _direction(self.turn)
        corners = _CORNERS[self.shape]
        if corners:
            local = [_direction((side + 0.5) / corners) for side in range(corners)]
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
        rows, columns = canvas.window(self.centre, self.reach + 1.5)
        x, y = canvas.steps[columns] - self.centre[0], canvas.steps[rows] - self.centre[1]
        inside = self._signed_distance(x, y)
        pen = rng.number(1.7, 2.3)
        ink = np.abs(inside)
        ink -= np.float32(pen / 2)
        ticks = np.full_like(ink, self.reach)
        for turn in slots:
            np.minimum(ticks, self._tick_distance(canvas, rows, columns, turn, pen), out=ticks)
        np.minimum(ink, ticks, out=ink)
        shape = np.minimum(inside, ink)  # the filled outline and the ticks
        colour = canvas.contrasting_colour(rng, self.centre, 42.0, 85.0)
        if self.texture is not None:
            tint = canvas.cover(inside)
            tint *= np.float32(0.22)
            canvas.blend(rows, columns, tint, colour)
            texture = self._texture_distance(rng, x, y)
            np.minimum(ink, np.maximum(texture, inside), out=ink)
        canvas.blend(rows, columns, canvas.cover(ink), colour)
        masks = np.zeros((2, canvas.size, canvas.size), dtype=bool)
        masks[0, rows, columns] = shape < 0
        masks[1, rows, columns] = ticks < 0
        return masks[0], masks[1]

    def _signed_distance(self, x: Array, y: Array) -> Array:
        """Return the distance (h, w) to the outline, negative inside."""
        ax, ay = _direction(self.turn)
        if self.shape == "circle":
            u = _plane(x, y, ax / self.squash, ay / self.squash)
            v = _plane(x, y, -ay, ax)
            u *= u
            v *= v
            u += v
            distance: Array = np.sqrt(u)
            return distance - np.float32(self._apothem())
        first, *others = (_plane(x, y, *normal) for normal in self._normals(0.0, 0.0))
        for plane in others:
            np.maximum(first, plane, out=first)
        return first - np.float32(self._apothem())

    def _tick_distance(
        self, canvas: "_Canvas", rows: slice, columns: slice, turn: float, pen: float
    ) -> Array:
        start, end = self._tick(turn)
        return _segment_distance(canvas.steps[columns], canvas.steps[rows], start, end, pen)

    def _texture_distance(self, rng: UniformGenerator, x: Array, y: Array) -> Array:
        """Return the distance (h, w) to the nearest stripe or dot, negative inside it."""
        dx, dy = _direction(rng.number())
        period, phase, other = rng.number(4.4, 5.6), rng.number(), rng.number()
        along = _to_nearest(_plane(x, y, dx / period, dy / period), phase, period)
        if self.texture == "striped":
            return np.abs(along) - np.float32(0.75)
        across = _to_nearest(_plane(x, y, -dy / period, dx / period), other, period)
        along *= along
        across *= across
        along += across
        distance: Array = np.sqrt(along)
        return distance - np.float32(1.45)


class _Background(NamedTuple):
    """Two textured regions with a wavy border, the second one striped; angles in turns."""

    base: NDArray[np.float64]  # (3,) colour of the first region, 0 to 255
    other: NDArray[np.float64]  # (3,) what the second region adds to it
    border: tuple[float, float]  # angle, and the point on the diagonal that it passes, in units
    stripes: tuple[float, float]  # angle, and period in units
    coarse: Array  # (knots, knots) noise
    fine: Array

    @classmethod
    def of(cls, rng: UniformGenerator) -> "_Background":
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
        turn, at = self.border
        (dx, dy), (x, y) = _direction(turn), point
        side = (x - at) * dx + (y - at) * dy + _WAVE * _noise_at(self.coarse, _COARSE, x, y)
        colour = (self.base + self.other if side > 0 else self.base).tolist()
        return float(sum(weight * value for weight, value in zip(_LUMA, colour, strict=True)))

    def paint(self, canvas: "_Canvas") -> Array:
        """Return the planes (3, size, size)."""
        steps = canvas.steps
        coarse, fine = (
            _noise(self.coarse, canvas.size, _COARSE),
            _noise(self.fine, canvas.size, _FINE),
        )
        (turn, at), (stripe_turn, period) = self.border, self.stripes
        away = steps - np.float32(at)
        border = _plane(away, away, *_direction(turn))
        border += np.float32(_WAVE) * coarse
        border *= np.float32(-1.0)
        region = canvas.cover(border)
        dx, dy = _direction(stripe_turn)
        phase = _plane(steps, steps, dx / period, dy / period)
        phase += np.float32(0.5) * fine
        texture = np.abs(_to_nearest(phase, 0.0, 56.0))  # 0 to 28 levels
        texture -= np.float32(14.0)
        texture *= region
        coarse *= np.float32(13.0)
        fine *= np.float32(9.0)
        texture += coarse
        texture += fine
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

    def window(self, centre: tuple[float, float], half: float) -> tuple[slice, slice]:
        """Return the rows and columns within `half` units of a point, along each axis."""
        bounds = [
            (max(0, int((at - half) / self.unit)), min(self.size, int((at + half) / self.unit) + 1))
            for at in centre
        ]
        (left, right), (top, bottom) = bounds
        return slice(top, bottom), slice(left, right)

    def cover(self, distance: Array) -> Array:
        """Return the part of each pixel inside a contour, 0 to 1; contours are one pixel soft."""
        covered: Array = distance * np.float32(-1.0 / self.unit)
        covered += np.float32(0.5)
        np.maximum(covered, np.float32(0.0), out=covered)
        return np.minimum(covered, np.float32(1.0), out=covered)

    def blend(self, rows: slice, columns: slice, cover: Array, colour: Array) -> None:
        """Mix a colour (3, 1, 1) into a window by its cover (h, w)."""
        target = self.planes[:, rows, columns]
        target += cover * (colour - target)

    def contrasting_colour(
        self, rng: UniformGenerator, centre: Sequence[float], low: float, high: float
    ) -> Array:
        """Return a colour (3, 1, 1) whose luma differs from the background's by low to high."""
        luma, step = self.background.luma_at(centre), rng.number(low, high)
        luma += step if luma < 128.0 else -step
        return (luma + rng.array(3, low=-30.0, high=30.0)).astype(np.float32)[:, None, None]

    def paint_fragments(
        self, rng: UniformGenerator, fragments: _Fragments, mask: NDArray[np.bool_] | None = None
    ) -> None:
        """Paint fragments and remove them from a mask."""
        for start, end, pen in zip(
            fragments.start.tolist(), fragments.end.tolist(), fragments.pen.tolist(), strict=True
        ):
            centre = ((start[0] + end[0]) / 2, (start[1] + end[1]) / 2)
            half = max(abs(start[0] - end[0]), abs(start[1] - end[1])) / 2 + pen / 2 + 1.0
            rows, columns = self.window(centre, half)
            distance = _segment_distance(self.steps[columns], self.steps[rows], start, end, pen)
            colour = self.contrasting_colour(rng, centre, 35.0, 85.0)
            self.blend(rows, columns, self.cover(distance), colour)
            if mask is not None:
                mask[rows, columns] &= distance >= 0

    def to_pixels(self, rng: UniformGenerator, grain: float) -> NDArray[np.uint8]:
        """Add grain of an amplitude and round to (size, size, 3) uint8."""
        if grain:
            noise = _noise(_knot_values(rng, _GRAIN_CELL), self.size, _GRAIN_CELL)
            noise *= np.float32(grain)
            self.planes += noise
        self.planes += np.float32(0.5)
        np.maximum(self.planes, np.float32(0.0), out=self.planes)
        np.minimum(self.planes, np.float32(255.0), out=self.planes)
        return np.ascontiguousarray(self.planes.astype(np.uint8).transpose(1, 2, 0))


def _direction(turn: float) -> tuple[float, float]:
    """Return the unit vector at an angle in turns."""
    return math.cos(2 * math.pi * turn), math.sin(2 * math.pi * turn)


def _plane(x: Array, y: Array, a: float, b: float) -> Array:
    """Return a x + b y, (h, w) for x (w,) and y (h,)."""
    return x * np.float32(a) + (y * np.float32(b))[:, None]


def _to_nearest(phase: Array, shift: float, period: float) -> Array:
    """Return the signed distance to the nearest whole phase, in units of `period`."""
    phase += np.float32(shift + 0.5)
    phase -= np.floor(phase)
    phase -= np.float32(0.5)
    phase *= np.float32(period)
    return phase


def _segment_distance(
    x: Array, y: Array, start: Iterable[float], end: Iterable[float], pen: float
) -> Array:
    """Return the distance (h, w) of pixels to a segment drawn with a round pen, negative inside."""
    (ax, ay), (bx, by) = start, end
    length = math.hypot(bx - ax, by - ay)
    ux, uy = ((bx - ax) / length, (by - ay) / length) if length else (1.0, 0.0)
    x, y = x - np.float32(ax), y - np.float32(ay)
    along = _plane(x, y, ux, uy)
    nearest = np.maximum(along, np.float32(0.0))
    np.minimum(nearest, np.float32(length), out=nearest)
    along -= nearest
    across = _plane(x, y, -uy, ux)
    along *= along
    across *= across
    along += across
    distance: Array = np.sqrt(along, out=along)
    distance -= np.float32(pen / 2)
    return distance


def _point_distance(point: list[float], start: list[float], end: list[float]) -> float:
    """Return the distance of a point to a segment."""
    along = [e - s for s, e in zip(start, end, strict=True)]
    away = [p - s for s, p in zip(start, point, strict=True)]
    square = along[0] ** 2 + along[1] ** 2
    share = (away[0] * along[0] + away[1] * along[1]) / square if square else 0.0
    share = min(max(share, 0.0), 1.0)
    return math.hypot(away[0] - share * along[0], away[1] - share * along[1])


def _knot_values(rng: UniformGenerator, cell: float) -> Array:
    """Return random values (knots, knots) in [-1, 1), one every `cell` units."""
    count = int(_SIDE / cell) + 2
    return rng.array(count, count, low=-1.0).astype(np.float32)


def _noise(values: Array, size: int, cell: float) -> Array:
    """Return smooth noise (size, size) in [-1, 1) between knots every `cell` units."""
    before, weight = _knots(size, cell)
    rows = values[before]
    rows += (values[before + 1] - rows) * weight[:, None]
    left, right = rows.take(before, axis=1), rows.take(before + 1, axis=1)
    right -= left
    right *= weight
    right += left
    return right


def _noise_at(values: Array, cell: float, x: float, y: float) -> float:
    """Return the noise at one point."""
    column, row = int(x / cell), int(y / cell)
    s, t = (at / cell - knot for at, knot in ((x, column), (y, row)))
    s, t = s * s * (3.0 - 2.0 * s), t * t * (3.0 - 2.0 * t)
    (a, b), (c, d) = values[row : row + 2, column : column + 2].tolist()
    top, bottom = a + (b - a) * s, c + (d - c) * s
    return float(top + (bottom - top) * t)


def grain_weights(size: int) -> Array:
    """Return (size, knots) weights: the grain is `weights @ values @ weights.T` of its knots."""
    before, weight = _knots(size, _GRAIN_CELL)
    weights = np.zeros((size, int(_SIDE / _GRAIN_CELL) + 2), np.float32)
    weights[np.arange(size), before] = 1 - weight
    weights[np.arange(size), before + 1] = weight
    return weights


@lru_cache(maxsize=64)
def _knots(size: int, cell: float) -> tuple[NDArray[np.int64], Array]:
    """Return, for each pixel of a line, the knot before it and the weight of the knot after it."""
    position = (np.arange(size) + 0.5) * (_SIDE / size / cell)
    before = position.astype(np.int64)
    after = position - before
    return before, (after * after * (3.0 - 2.0 * after)).astype(np.float32)
