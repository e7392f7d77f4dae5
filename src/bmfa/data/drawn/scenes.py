"""Embedded scenes: several objects with masks on a textured background with clutter."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from bmfa.data.drawn.clutter import Disc, add_clutter, is_free
from bmfa.data.drawn.raster import Array, to_pixels
from bmfa.data.drawn.rng import UniformGenerator
from bmfa.data.drawn.shapes import Shape, Stroke, arc, dot, polyline, reach
from bmfa.data.drawn.textures import background, contrasting_colours, luma_at, texture
from bmfa.data.instances import Instance, InstanceImage, Tally

SCENE_HEIGHT, SCENE_WIDTH = 288, 384  # pixels
_STREAM = 1  # third part of the random key; badges have 2
_MAX_OBJECTS = 8  # per scene
_POSITION_TRIES = 12  # positions that an object tries before it is left out


def _thin(rng: UniformGenerator) -> list[Stroke]:
    """Make a wire: a long curve of slowly changing direction."""
    return [Stroke(_curve(rng, pieces=14, bend=0.35), rng.number(0.07, 0.13))]


def _elongated(rng: UniformGenerator) -> list[Stroke]:
    """Make a bar, straight or slightly curved."""
    return [Stroke(_curve(rng, pieces=4, bend=0.18), rng.number(0.25, 0.6))]


def _small(rng: UniformGenerator) -> list[Stroke]:
    """Make a pebble of two or three overlapping discs."""
    count = rng.integer(2, 3)
    centres = rng.array(count, 2, low=-0.4, high=0.4)
    return [Stroke(dot(point), rng.number(0.8, 1.2)) for point in centres]


def _ring(rng: UniformGenerator) -> list[Stroke]:
    """Make a closed band, round, oval or dented."""
    pieces = 24
    angle = 2 * math.pi * np.arange(pieces + 1) / pieces
    wave = rng.integer(2, 5)
    radius = 0.85 * (1 - rng.number(0.0, 0.16) * (1 + np.cos(wave * angle)))
    loop = radius[:, None] * arc(pieces) * (1.0, rng.number(0.55, 1.0))
    return [Stroke(polyline(loop), rng.number(0.16, 0.36))]


def _compound(rng: UniformGenerator) -> list[Stroke]:
    """Make a body with two to four thin bent limbs, and often a head."""
    trunk = np.array([[-rng.number(0.1, 0.45), 0.0], [rng.number(0.1, 0.45), 0.0]])
    strokes = [Stroke(trunk[None], rng.number(0.4, 0.8))]
    for _ in range(rng.integer(2, 4)):
        root = trunk[0] + rng.number() * (trunk[1] - trunk[0])
        limb = _curve(rng, pieces=3, bend=0.5)
        limb = (limb - limb[0, 0]) * rng.number(0.3, 0.5)
        strokes.append(Stroke(limb, rng.number(0.1, 0.2)).placed(root, 1.0, rng.number()))
    if rng.number() < 0.6:
        head = trunk[1] + (rng.number(0.2, 0.4), rng.number(-0.2, 0.2))
        strokes.append(Stroke(dot(head), rng.number(0.3, 0.45)))
    return strokes


def _curve(rng: UniformGenerator, pieces: int, bend: float) -> Array:
    """Return a curve of equal steps; its bounding box is centred, with a diagonal of two units."""
    heading = np.cumsum(np.cumsum(rng.array(pieces, low=-bend, high=bend)) / 2)
    steps = np.stack([np.cos(heading), np.sin(heading)], axis=1)
    points = np.concatenate([np.zeros((1, 2)), np.cumsum(steps, axis=0)])
    low, high = points.min(0), points.max(0)
    return polyline((2 * points - low - high) / math.hypot(*(high - low)))


class ObjectKind(NamedTuple):
    """A function that makes strokes in the unit circle, fraction of all objects, radii in pixels."""

    make: Callable[[UniformGenerator], list[Stroke]]
    fraction: float
    radius: tuple[float, float]


OBJECT_KINDS: dict[str, ObjectKind] = {
    "thin": ObjectKind(_thin, 0.27, (30.0, 90.0)),
    "elongated": ObjectKind(_elongated, 0.34, (20.0, 120.0)),
    "small": ObjectKind(_small, 0.14, (6.0, 15.0)),
    "ring": ObjectKind(_ring, 0.08, (20.0, 90.0)),
    "compound": ObjectKind(_compound, 0.17, (30.0, 125.0)),
}


class _Object(NamedTuple):
    """A shape, its kind, and a disc (x, y, radius) that contains it."""

    kind: str
    disc: Disc
    shape: Shape


def draw_scene(seed: int, index: int) -> list[Instance]:
    """Draw the scene of a seed and an index.

    Args:
        seed: seed of the set, at least 0.
        index: index in the set, at least 0.

    Returns:
        Its instances, whose masks are disjoint; equal arguments give equal bits on every platform.

    Raises:
        ValueError: the seed or the index is negative.

    Example:
        >>> from bmfa.data import draw_scene
        >>> draw_scene(0, 0)[0].image.pixels.shape
        (288, 384, 3)
    """
    rng = UniformGenerator(seed, index, _STREAM)
    canvas = background(rng, SCENE_HEIGHT, SCENE_WIDTH, strength=2.0)
    objects = _place_objects(rng)
    add_clutter(rng, canvas, tries=130)
    for one in objects:
        one.shape.paint(canvas, _surface(rng, canvas, one))
    image = InstanceImage(index, f"{index:012d}.png", to_pixels(canvas))
    return [_instance(image, number, one) for number, one in enumerate(objects)]


def _place_objects(rng: UniformGenerator) -> list[_Object]:
    """Place objects in disjoint discs; those that find no free position are left out."""
    planned = [_choose_kind_and_radius(rng) for _ in range(_MAX_OBJECTS)]
    objects: list[_Object] = []
    # The largest first, while there is room for them.
    for kind, radius in sorted(planned, key=lambda plan: -plan[1]):
        strokes, turn = OBJECT_KINDS[kind].make(rng), rng.number()
        disc = _free_disc(rng, radius * reach(strokes), [one.disc for one in objects])
        if disc is not None:
            placed = [stroke.placed(np.array(disc[:2]), radius, turn) for stroke in strokes]
            shape = Shape.from_strokes(placed, np.arange(SCENE_WIDTH), np.arange(SCENE_HEIGHT))
            objects.append(_Object(kind, disc, shape))
    return objects


def _choose_kind_and_radius(rng: UniformGenerator) -> tuple[str, float]:
    """Return a kind with the probability of its fraction, and a radius, uniform on a log scale."""
    position, size = rng.number(), rng.number()
    bounds = np.cumsum([kind.fraction for kind in OBJECT_KINDS.values()])
    kind = tuple(OBJECT_KINDS)[int((position >= bounds[:-1]).sum())]
    low, high = OBJECT_KINDS[kind].radius
    return kind, low * (high / low) ** size


def _free_disc(rng: UniformGenerator, radius: float, taken: list[Disc]) -> Disc | None:
    """Return a free disc whose centre is at least two thirds of the radius from the border, or None."""
    margin = radius / 1.5
    for x, y in rng.array(_POSITION_TRIES, 2).tolist():
        disc = (
            margin + x * (SCENE_WIDTH - 2 * margin),
            margin + y * (SCENE_HEIGHT - 2 * margin),
            radius + 2,
        )
        if is_free(disc, taken):
            return disc
    return None


def _surface(rng: UniformGenerator, canvas: Array, one: _Object) -> Array:
    """Return the colours of an object, (3, rows, columns): contrast, texture and shading."""
    rows, columns = one.shape.distance.shape
    colour = contrasting_colours(rng, luma_at(canvas, np.array([one.disc[:2]])), 8.0, 80.0)[0]
    relief = rng.number(10.0, 50.0) * texture(rng, rows, columns)
    relief += rng.number(-14.0, 14.0) * np.linspace(-1.0, 1.0, columns)
    relief += rng.number(-14.0, 14.0) * np.linspace(-1.0, 1.0, rows)[:, None]
    surface: Array = colour + relief
    return surface


def _instance(image: InstanceImage, number: int, one: _Object) -> Instance:
    mask = one.shape.mask(SCENE_HEIGHT, SCENE_WIDTH)
    identity = image.id * _MAX_OBJECTS + number + 1
    return Instance(image, identity, one.kind, None, float(mask.sum()), False, mask)


@dataclass(frozen=True)
class EmbeddedScenes:
    """Scenes of one seed as a source of instances, drawn when they are read.

    Args:
        images: number of scenes; 120 have about 600 instances.
        seed: seed of the set.
        start: index of the first scene.

    Example:
        >>> from bmfa.data import EmbeddedScenes
        >>> len(EmbeddedScenes(images=3))
        3
    """

    images: int = 120
    seed: int = 0
    start: int = 0

    def __len__(self) -> int:
        return self.images

    def parts(self, instances: int = 128) -> Iterator["EmbeddedScenes"]:
        """Yield the scenes in order as sources of about so many instances."""
        step = max(1, instances // _MAX_OBJECTS)
        for first in range(0, self.images, step):
            images = min(step, self.images - first)
            yield EmbeddedScenes(images, self.seed, self.start + first)

    def instances(self, tally: Tally | None = None) -> Iterator[Instance]:
        """Yield every instance, image by image; all are usable."""
        for index in range(self.start, self.start + self.images):
            yield from draw_scene(self.seed, index)
