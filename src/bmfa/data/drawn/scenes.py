"""Embedded scenes: several objects with masks on a textured background with clutter."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from bmfa.data.drawn import painting
from bmfa.data.drawn.painting import Array, Shape, Stroke, UniformGenerator, dot, luma_at, polyline
from bmfa.data.instances import Instance, InstanceImage, InstanceSource, Tally

SCENE_HEIGHT, SCENE_WIDTH = 288, 384  # pixels
_STREAM = 1  # third part of the random key; badges have 2
_MAX_OBJECTS = 8  # per scene
_POSITION_TRIES = 12  # positions that an object tries before it is left out
_CLUTTER_TRIES = 130  # pieces of clutter, of which those that touch others are left out
_ROWS, _COLUMNS = np.arange(SCENE_HEIGHT, dtype=float), np.arange(SCENE_WIDTH, dtype=float)

Disc = tuple[float, float, float]  # x, y, radius in pixels


def _thin(rng: UniformGenerator) -> list[Stroke]:
    """Make a wire: a long curve of slowly changing direction."""
    return [polyline(_curve(rng, pieces=14, bend=0.35), rng.number(0.07, 0.13))]


def _elongated(rng: UniformGenerator) -> list[Stroke]:
    """Make a bar, straight or slightly curved."""
    return [polyline(_curve(rng, pieces=4, bend=0.18), rng.number(0.25, 0.6))]


def _small(rng: UniformGenerator) -> list[Stroke]:
    """Make a pebble of two or three overlapping discs."""
    count = rng.integer(2, 3)
    centres = rng.array(count, 2, low=-0.4, high=0.4)
    return [dot(point, rng.number(0.8, 1.2)) for point in centres]


def _ring(rng: UniformGenerator) -> list[Stroke]:
    """Make a closed band, round, oval or dented."""
    pieces = 24
    angle = 2 * math.pi * np.arange(pieces + 1) / pieces
    wave = rng.integer(2, 5)
    radius = 0.85 * (1 - rng.number(0.0, 0.16) * (1 + np.cos(wave * angle)))
    loop = radius[:, None] * painting.circle(pieces) * (1.0, rng.number(0.55, 1.0))
    return [polyline(loop, rng.number(0.16, 0.36))]


def _compound(rng: UniformGenerator) -> list[Stroke]:
    """Make a body with two to four thin bent limbs, and often a head."""
    trunk = np.array([[-rng.number(0.1, 0.45), 0.0], [rng.number(0.1, 0.45), 0.0]])
    strokes = [polyline(trunk, rng.number(0.4, 0.8))]
    for _ in range(rng.integer(2, 4)):
        root = trunk[0] + rng.number() * (trunk[1] - trunk[0])
        limb = _curve(rng, pieces=3, bend=0.5)
        limb = (limb - limb[0]) * rng.number(0.3, 0.5)
        strokes.append(polyline(limb, rng.number(0.1, 0.2)).placed(root, 1.0, rng.number()))
    if rng.number() < 0.6:
        head = trunk[1] + (rng.number(0.2, 0.4), rng.number(-0.2, 0.2))
        strokes.append(dot(head, rng.number(0.3, 0.45)))
    return strokes


def _curve(rng: UniformGenerator, pieces: int, bend: float) -> Array:
    """Return a curve of equal steps; its bounding box is centred, with a diagonal of two units."""
    heading = np.cumsum(np.cumsum(rng.array(pieces, low=-bend, high=bend)) / 2)
    steps = np.stack([np.cos(heading), np.sin(heading)], axis=1)
    points = np.concatenate([np.zeros((1, 2)), np.cumsum(steps, axis=0)])
    low, high = points.min(0), points.max(0)
    return np.asarray((2 * points - low - high) / math.hypot(*(high - low)))


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
    canvas = painting.background(rng, SCENE_HEIGHT, SCENE_WIDTH, strength=2.0)
    objects = _place_objects(rng)
    _add_clutter(rng, canvas)
    for _, disc, shape in objects:
        shape.paint(canvas, _surface(rng, canvas, disc, shape))
    image = InstanceImage(index, f"{index:012d}.png", painting.to_pixels(canvas))
    masks = ((kind, shape.mask(SCENE_HEIGHT, SCENE_WIDTH)) for kind, _, shape in objects)
    return image.instances(index * _MAX_OBJECTS + 1, masks)


def _place_objects(rng: UniformGenerator) -> list[tuple[str, Disc, Shape]]:
    """Place objects in disjoint discs; those that find no free position are left out."""
    planned = [_choose_kind_and_radius(rng) for _ in range(_MAX_OBJECTS)]
    objects: list[tuple[str, Disc, Shape]] = []
    # The largest first, while there is room for them.
    for kind, radius in sorted(planned, key=lambda plan: -plan[1]):
        strokes, turn = OBJECT_KINDS[kind].make(rng), rng.number()
        disc = _free_disc(rng, radius * painting.reach(strokes), [disc for _, disc, _ in objects])
        if disc is not None:
            placed = [stroke.placed(np.array(disc[:2]), radius, turn) for stroke in strokes]
            objects.append((kind, disc, Shape.from_strokes(placed, _COLUMNS, _ROWS)))
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
    width, height = SCENE_WIDTH - 2 * margin, SCENE_HEIGHT - 2 * margin
    positions = rng.array(_POSITION_TRIES, 2).tolist()
    discs = ((margin + x * width, margin + y * height, radius + 2) for x, y in positions)
    return next((disc for disc in discs if _is_free(disc, taken)), None)


def _is_free(disc: Disc, taken: list[Disc]) -> bool:
    """Return True if a disc touches none of the discs that are taken."""
    x, y, radius = disc
    return all(math.hypot(x - a, y - b) > radius + other for a, b, other in taken)


def _add_clutter(rng: UniformGenerator, canvas: Array) -> None:
    """Paint fragments of lines and blobs on a canvas (3, height, width), where their discs are free."""
    centres = rng.array(_CLUTTER_TRIES, 2) * (SCENE_WIDTH, SCENE_HEIGHT)
    line = rng.array(_CLUTTER_TRIES) < 0.7
    size, weight, bend = rng.array(3, _CLUTTER_TRIES)
    length = np.where(line, 5.0 + 8.0 * size, 3.0 * size)  # half of it
    pen = np.where(line, 1.7 + 1.1 * weight, 3.0 + 6.0 * weight)
    bend = np.where(line, 0.7 * bend - 0.35, 0.0)
    discs, painted = np.column_stack([centres, length + pen / 2 + 1]).tolist(), list[int]()
    for index, disc in enumerate(discs):
        if _is_free(disc, [discs[other] for other in painted]):
            painted.append(index)
    centres, length, pen, bend = (x[painted] for x in (centres, length, pen, bend))
    angle = rng.array(len(painted), high=2 * math.pi)
    along = length[:, None] * np.stack([np.cos(angle), np.sin(angle)], axis=1)
    middle = centres + bend[:, None] * along[:, ::-1] * (-1.0, 1.0)
    points = np.stack([centres - along, middle, centres + along], axis=1)
    colours = painting.contrasting_colours(rng, luma_at(canvas, centres), 70.0, 120.0)
    for bent, width, colour in zip(points, pen.tolist(), colours, strict=True):
        Shape.from_strokes([polyline(bent, width)], _COLUMNS, _ROWS).paint(canvas, colour)


def _surface(rng: UniformGenerator, canvas: Array, disc: Disc, shape: Shape) -> Array:
    """Return the colours of an object, (3, rows, columns): contrast, texture and shading."""
    rows, columns = shape.distance.shape
    colour = painting.contrasting_colours(rng, luma_at(canvas, np.array([disc[:2]])), 8.0, 80.0)[0]
    relief = rng.number(10.0, 50.0) * painting.texture(rng, rows, columns)
    relief += rng.number(-14.0, 14.0) * np.linspace(-1.0, 1.0, columns)
    relief += rng.number(-14.0, 14.0) * np.linspace(-1.0, 1.0, rows)[:, None]
    return np.asarray(colour + relief)


@dataclass(frozen=True)
class EmbeddedScenes(InstanceSource):
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

    def read(self, index: int, tally: Tally) -> Iterator[Instance]:
        """Yield every instance of an image; all are usable."""
        yield from draw_scene(self.seed, self.start + index)
