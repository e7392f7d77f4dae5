"""Drawn images of the four objects that the paper shows: a kite, a person, a book and a spoon."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from bmfa.data.drawn import painting
from bmfa.data.drawn.painting import Array, Mask, Shape, Stroke, UniformGenerator, polygon, polyline
from bmfa.data.instances import Instance, InstanceImage, InstanceSource, Tally

OBJECT_IMAGE_SIZE = 256  # pixels along a side
_STREAM = 4  # third part of the random key; other drawn sets have smaller ones

# One colour of an object: what is added to the luma of the object, and strokes in units of its radius.
Part = tuple[float, list[Stroke]]


def _kite(rng: UniformGenerator) -> list[Part]:
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
        (0.0, [polyline(tail, 0.035), *map(polygon, [sail, *bows])]),
        (-60.0, [polyline(spar, 0.025) for spar in spars]),
    ]


def _bow(centre: Array, direction: Array) -> Array:
    """Return two triangles that meet at a point of the tail, as one polygon."""
    unit = direction / np.hypot(*direction)
    across = np.array([-unit[1], unit[0]])
    corners = [(0.13, 0.06), (0.13, -0.06), (-0.13, 0.06), (-0.13, -0.06)]
    return np.array([centre + a * across + b * unit for a, b in corners])


def _person(rng: UniformGenerator) -> list[Part]:
    """Make a standing figure: head, trunk, two arms and two legs."""
    stride, swing = rng.number(0.04, 0.13), rng.number(-0.12, 0.12)
    hip, neck = np.array([0.0, 0.12]), np.array([0.0, -0.5])
    head = np.array([swing / 3, -0.78])
    legs = [np.array([hip, (side * stride, 0.55), (side * stride * 1.5, 0.95)]) for side in (-1, 1)]
    arms = [np.array([neck, (side * 0.17, -0.2), (side * 0.15 + swing, 0.08)]) for side in (-1, 1)]
    trunk = np.array([neck, hip])
    return [
        (-25.0, [polyline(leg, 0.13) for leg in legs]),
        (0.0, [polyline(trunk, 0.26), *(polyline(arm, 0.095) for arm in arms)]),
        (18.0, [painting.dot(head, 0.29)]),
    ]


def _book(rng: UniformGenerator) -> list[Part]:
    """Make the spine of a standing book, with two bands across it."""
    half = rng.number(0.13, 0.22)
    cover = np.array([(-half, -0.95), (half, -0.95), (half, 0.95), (-half, 0.95)])
    bands = [np.array([(-half * 0.96, y), (half * 0.96, y)]) for y in (-0.62, 0.6)]
    return [(0.0, [polygon(cover)]), (45.0, [polyline(band, 0.035) for band in bands])]


def _spoon(rng: UniformGenerator) -> list[Part]:
    """Make an oval bowl on a tapered handle, with a highlight in the bowl."""
    width = rng.number(0.17, 0.23)
    bowl = painting.circle(28) * (width, 0.32) + (0.0, -0.63)
    handle = np.array([(-0.045, -0.35), (0.045, -0.35), (0.075, 0.92), (-0.075, 0.92)])
    shine = np.array([(-width * 0.45, -0.78), (-width * 0.5, -0.55)])
    return [(0.0, [polygon(bowl), polygon(handle)]), (25.0, [polyline(shine, 0.04)])]


# How each object is made, and its largest rotation to either side in full turns.
_KINDS: dict[str, tuple[Callable[[UniformGenerator], list[Part]], float]] = {
    "kite": (_kite, 0.14),
    "person": (_person, 0.02),
    "book": (_book, 0.08),
    "spoon": (_spoon, 0.12),
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
    rng, size = UniformGenerator(seed, index, _STREAM, number), OBJECT_IMAGE_SIZE
    canvas = painting.background(rng, size, size, strength=0.35)
    radius = rng.number(72.0, 84.0)
    room = size / 2 - radius * 1.5
    mask = _paint(rng, canvas, category, size / 2 + rng.array(2, low=-room, high=room), radius)
    identity = number * 100_000 + index
    image = InstanceImage(identity, f"{category}-{index}.png", painting.to_pixels(canvas))
    return image.instances(identity, [(category, mask)])[0]


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
    rng, size = UniformGenerator(seed, index, _STREAM, len(_KINDS)), OBJECT_IMAGE_SIZE
    canvas, masks = painting.background(rng, size, size, strength=0.35), []
    # Centres and radii as shares of the side, so that the crops of the two do not overlap.
    for category, middle in (("kite", 0.28), ("person", 0.72)):
        centre = size * (middle + rng.array(2, low=-0.03, high=0.03))
        masks.append((category, _paint(rng, canvas, category, centre, 0.17 * size)))
    image = InstanceImage(index, f"kite-flyer-{index}.png", painting.to_pixels(canvas))
    kite, person = image.instances(2 * index, masks)
    return kite, person


def _paint(
    rng: UniformGenerator, canvas: Array, category: str, centre: Array, radius: float
) -> Mask:
    """Paint an object on a canvas (3, side, side), in place; return its mask (side, side)."""
    (make, largest_turn), side = _KINDS[category], canvas.shape[1]
    parts, turn = make(rng), largest_turn * rng.number(-1.0)
    luma = float(painting.luma_at(canvas, centre[None])[0])
    luma += rng.number(75.0, 95.0) * (1 if luma < 128.0 else -1)
    tint, mask = painting.colour(rng, 0.0, 40.0), np.zeros((side, side), dtype=bool)
    steps = np.arange(side, dtype=float)
    for shade, strokes in parts:
        placed = [stroke.placed(centre, radius, turn) for stroke in strokes]
        shape = Shape.from_strokes(placed, steps, steps)
        shape.paint(canvas, luma + shade + tint)
        mask |= shape.mask(side, side)
    return mask


@dataclass(frozen=True)
class EmbeddedObjects(InstanceSource):
    """Images of the paper's four objects as a source of instances, drawn when they are read.

    Args:
        poses: number of images of each category; the category of image i is i modulo 4.
        seed: seed of the set.

    Example:
        >>> from bmfa.data import EmbeddedObjects
        >>> [one.category for one in EmbeddedObjects(poses=1).instances()]
        ['kite', 'person', 'book', 'spoon']
    """

    poses: int = 32
    seed: int = 0

    def __len__(self) -> int:
        return self.poses * len(OBJECT_CATEGORIES)

    def read(self, index: int, tally: Tally) -> Iterator[Instance]:
        """Yield every instance of an image; all are usable."""
        pose, category = divmod(index, len(OBJECT_CATEGORIES))
        yield draw_object(OBJECT_CATEGORIES[category], self.seed, pose)
