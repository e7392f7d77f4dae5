"""Drawn images of the four objects that the paper shows: a kite, a person, a book and a spoon."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bmfa.data.drawn.raster import Array, to_pixels
from bmfa.data.drawn.rng import UniformGenerator
from bmfa.data.drawn.shapes import Shape, Stroke, arc, dot, polyline, stroke_distance
from bmfa.data.drawn.textures import background, colour, luma_at
from bmfa.data.instances import Instance, InstanceImage, Tally

OBJECT_IMAGE_SIZE = 256  # pixels along a side
_STREAM = 4  # third part of the random key; other drawn sets have smaller ones


class _Part(NamedTuple):
    """One colour of an object: filled polygons (n, 2) and strokes, in units of its radius.

    `shade` is added to the luma of the object.
    """

    polygons: Sequence[Array] = ()
    strokes: Sequence[Stroke] = ()
    shade: float = 0.0


def _kite(rng: UniformGenerator) -> list[_Part]:
    """Make a sail of four corners with two spars, and a tail with bows."""
    width = rng.number(0.3, 0.42)
    top, bottom, left, right = (0.0, -0.95), (0.0, 0.15), (-width, -0.55), (width, -0.55)
    sail = np.array([top, right, bottom, left])
    sway = rng.number(0.1, 0.22) * (1 if rng.number() < 0.5 else -1)
    down = np.linspace(0.15, 0.95, 13)
    along = sway * np.sin(2.2 * math.pi * (down - 0.15))
    tail = np.stack([along, down], axis=1)
    bows = [_bow(tail[index], tail[index + 1] - tail[index - 1]) for index in (5, 10)]
    spars = [np.array([top, bottom]), np.array([left, right])]
    return [
        _Part([sail, *bows], [Stroke(polyline(tail), 0.035)]),
        _Part(strokes=[Stroke(polyline(spar), 0.025) for spar in spars], shade=-60.0),
    ]


def _bow(centre: Array, direction: Array) -> Array:
    """Return two triangles that meet at a point of the tail, as one polygon."""
    unit = direction / np.hypot(*direction)
    across = np.array([-unit[1], unit[0]])
    corners = [(0.13, 0.06), (0.13, -0.06), (-0.13, 0.06), (-0.13, -0.06)]
    return np.array([centre + a * across + b * unit for a, b in corners])


def _person(rng: UniformGenerator) -> list[_Part]:
    """Make a standing figure: head, trunk, two arms and two legs."""
    stride, swing = rng.number(0.04, 0.13), rng.number(-0.12, 0.12)
    hip, neck = np.array([0.0, 0.12]), np.array([0.0, -0.5])
    head = np.array([swing / 3, -0.78])
    legs = [np.array([hip, (side * stride, 0.55), (side * stride * 1.5, 0.95)]) for side in (-1, 1)]
    arms = [np.array([neck, (side * 0.17, -0.2), (side * 0.15 + swing, 0.08)]) for side in (-1, 1)]
    trunk = np.array([neck, hip])
    return [
        _Part(strokes=[Stroke(polyline(leg), 0.13) for leg in legs], shade=-25.0),
        _Part(
            strokes=[
                Stroke(polyline(trunk), 0.26),
                *(Stroke(polyline(arm), 0.095) for arm in arms),
            ]
        ),
        _Part(strokes=[Stroke(dot(head), 0.29)], shade=18.0),
    ]


def _book(rng: UniformGenerator) -> list[_Part]:
    """Make the spine of a standing book, with two bands across it."""
    half = rng.number(0.13, 0.22)
    cover = np.array([(-half, -0.95), (half, -0.95), (half, 0.95), (-half, 0.95)])
    bands = [np.array([(-half * 0.96, y), (half * 0.96, y)]) for y in (-0.62, 0.6)]
    return [
        _Part([cover]),
        _Part(strokes=[Stroke(polyline(band), 0.035) for band in bands], shade=45.0),
    ]


def _spoon(rng: UniformGenerator) -> list[_Part]:
    """Make an oval bowl on a tapered handle, with a highlight in the bowl."""
    width = rng.number(0.17, 0.23)
    bowl = arc(28) * (width, 0.32) + (0.0, -0.63)
    handle = np.array([(-0.045, -0.35), (0.045, -0.35), (0.075, 0.92), (-0.075, 0.92)])
    shine = np.array([(-width * 0.45, -0.78), (-width * 0.5, -0.55)])
    return [
        _Part([bowl, handle]),
        _Part(strokes=[Stroke(polyline(shine), 0.04)], shade=25.0),
    ]


class _Kind(NamedTuple):
    """How an object is made, and the largest rotation to either side in full turns."""

    make: Callable[[UniformGenerator], list[_Part]]
    turn: float


_KINDS: dict[str, _Kind] = {
    "kite": _Kind(_kite, 0.14),
    "person": _Kind(_person, 0.02),
    "book": _Kind(_book, 0.08),
    "spoon": _Kind(_spoon, 0.12),
}
OBJECT_CATEGORIES = tuple(_KINDS)  # in the order of the paper's figure


def draw_object(category: str, seed: int, index: int) -> Instance:
    """Draw one object of a category on a plain background.

    Args:
        category: one of `OBJECT_CATEGORIES`.
        seed: seed of the set, at least 0.
        index: index in the set, at least 0; it determines pose, colours and background.

    Returns:
        The instance; its mask is the whole object. Equal arguments give equal bits on every platform.

    Raises:
        ValueError: the category is unknown, or the seed or the index is negative.

    Example:
        >>> from bmfa.data import draw_object
        >>> kite = draw_object("kite", 0, 0)
        >>> kite.category, kite.image.pixels.shape
        ('kite', (256, 256, 3))
    """
    if category not in _KINDS:
        raise ValueError(f"category is {category!r}; pass one of {', '.join(_KINDS)}")
    number = OBJECT_CATEGORIES.index(category)
    rng = UniformGenerator(seed, index, _STREAM, number)
    canvas = background(rng, OBJECT_IMAGE_SIZE, OBJECT_IMAGE_SIZE, strength=0.35)
    radius = rng.number(72.0, 84.0)
    room = OBJECT_IMAGE_SIZE / 2 - radius * 1.5
    centre = OBJECT_IMAGE_SIZE / 2 + rng.array(2, low=-room, high=room)
    mask = _paint(rng, canvas, category, centre, radius)
    identity = number * 100_000 + index
    image = InstanceImage(identity, f"{category}-{index}.png", to_pixels(canvas))
    return Instance(image, identity, category, None, float(mask.sum()), False, mask)


def draw_kite_flyer(seed: int, index: int) -> tuple[Instance, Instance]:
    """Draw a kite at the top left and a person at the bottom right of one image.

    Args:
        seed: seed of the set, at least 0.
        index: index in the set, at least 0.

    Returns:
        The two instances; equal arguments give equal bits on every platform.

    Example:
        >>> from bmfa.data.drawn.objects import draw_kite_flyer
        >>> [one.category for one in draw_kite_flyer(0, 0)]
        ['kite', 'person']
    """
    rng = UniformGenerator(seed, index, _STREAM, len(OBJECT_CATEGORIES))
    size = OBJECT_IMAGE_SIZE
    canvas = background(rng, size, size, strength=0.35)
    placed = {}
    # Centres and radii as shares of the side, so that the crops of the two do not overlap.
    for category, middle in (("kite", 0.28), ("person", 0.72)):
        centre = size * (middle + rng.array(2, low=-0.03, high=0.03))
        placed[category] = _paint(rng, canvas, category, centre, 0.17 * size)
    image = InstanceImage(index, f"kite-flyer-{index}.png", to_pixels(canvas))
    kite, person = (
        Instance(image, 2 * index + number, category, None, float(mask.sum()), False, mask)
        for number, (category, mask) in enumerate(placed.items())
    )
    return kite, person


def _paint(
    rng: UniformGenerator, canvas: Array, category: str, centre: Array, radius: float
) -> NDArray[np.bool_]:
    """Paint an object on a canvas (3, side, side), in place; return its mask (side, side)."""
    kind, side = _KINDS[category], canvas.shape[1]
    parts, turn = kind.make(rng), kind.turn * rng.number(-1.0)
    luma = float(luma_at(canvas, centre[None])[0])
    luma += rng.number(75.0, 95.0) * (1 if luma < 128.0 else -1)
    tint = colour(rng, 0.0, 40.0)
    mask = np.zeros((side, side), dtype=bool)
    for part in parts:
        shape = _shape(part, centre, radius, turn, side)
        shape.paint(canvas, luma + part.shade + tint)
        mask |= shape.mask(side, side)
    return mask


def _shape(part: _Part, centre: Array, radius: float, turn: float, size: int) -> Shape:
    """Return the union of the polygons and strokes of a part, placed on a canvas of `size`."""
    strokes = [stroke.placed(centre, radius, turn) for stroke in part.strokes]
    # The outline of a polygon as a stroke without width, so that both are placed alike.
    outlines = [
        Stroke(polyline(np.concatenate([polygon, polygon[:1]])), 0.0).placed(centre, radius, turn)
        for polygon in part.polygons
    ]
    steps = np.arange(size)
    shape = Shape.from_strokes([*strokes, *outlines], steps, steps)
    x, y = steps[shape.columns], steps[shape.rows]
    for outline in outlines:
        inside = _inside(x, y, outline.segments)
        distance = stroke_distance(x, y, outline.segments)
        np.minimum(shape.distance, np.where(inside, -distance, distance), out=shape.distance)
    return shape


def _inside(x: Array, y: Array, segments: Array) -> Array:
    """Return (h, w) bool, True where a ray to the right crosses an odd number of segments."""
    crossings = np.zeros((len(y), len(x)), dtype=bool)
    for (x0, y0), (x1, y1) in segments:
        between = (y0 > y) != (y1 > y)  # (h,)
        rise = y1 - y0 if y1 != y0 else 1.0
        at = x0 + (y - y0) * (x1 - x0) / rise
        crossings ^= between[:, None] & (x[None] < at[:, None])
    return crossings


@dataclass(frozen=True)
class EmbeddedObjects:
    """Images of the paper's four objects as a source of instances, drawn when they are read.

    Args:
        poses: number of images of each category.
        seed: seed of the set.
        start: index of the first image; the category of image i is i modulo 4.
        stop: index after the last image; None for all.

    Example:
        >>> from bmfa.data import EmbeddedObjects
        >>> [one.category for one in EmbeddedObjects(poses=1).instances()]
        ['kite', 'person', 'book', 'spoon']
    """

    poses: int = 32
    seed: int = 0
    start: int = 0
    stop: int | None = None

    def __len__(self) -> int:
        return self._end - self.start

    @property
    def _end(self) -> int:
        return self.poses * len(OBJECT_CATEGORIES) if self.stop is None else self.stop

    def parts(self, instances: int = 128) -> Iterator["EmbeddedObjects"]:
        """Yield the images in order as sources of so many instances."""
        for first in range(self.start, self._end, instances):
            yield EmbeddedObjects(self.poses, self.seed, first, min(first + instances, self._end))

    def instances(self, tally: Tally | None = None) -> Iterator[Instance]:
        """Yield every instance, one in each image; all are usable."""
        for number in range(self.start, self._end):
            index, category = divmod(number, len(OBJECT_CATEGORIES))
            yield draw_object(OBJECT_CATEGORIES[category], self.seed, index)
