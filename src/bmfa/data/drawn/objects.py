"""Objects for scenes, of five kinds, as strokes within about the unit circle."""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from bmfa.data.drawn.draws import Draws
from bmfa.data.drawn.shapes import Array, Stroke, arc, polyline


def _thin(draws: Draws) -> list[Stroke]:
    """A wire: a long curve of slowly changing direction."""
    return [Stroke(_curve(draws, pieces=14, bend=0.35), draws.number(0.07, 0.13))]


def _elongated(draws: Draws) -> list[Stroke]:
    """A bar, straight or slightly curved."""
    return [Stroke(_curve(draws, pieces=4, bend=0.18), draws.number(0.25, 0.6))]


def _small(draws: Draws) -> list[Stroke]:
    """A pebble of two or three overlapping discs."""
    count = draws.integer(2, 3)
    places = draws.array(count, 2, low=-0.4, high=0.4)
    return [Stroke(np.stack([place, place])[None], draws.number(0.8, 1.2)) for place in places]


def _ring(draws: Draws) -> list[Stroke]:
    """A closed band, round, oval or dented."""
    pieces = 24
    angle = 2 * math.pi * np.arange(pieces + 1) / pieces
    wave = draws.integer(2, 5)
    radius = 0.85 * (1 - draws.number(0.0, 0.16) * (1 + np.cos(wave * angle)))
    loop = radius[:, None] * arc(pieces) * (1.0, draws.number(0.55, 1.0))
    return [Stroke(polyline(loop), draws.number(0.16, 0.36))]


def _compound(draws: Draws) -> list[Stroke]:
    """A body with limbs, each thin and bent, and often a head."""
    trunk = np.array([[-draws.number(0.1, 0.45), 0.0], [draws.number(0.1, 0.45), 0.0]])
    strokes = [Stroke(trunk[None], draws.number(0.4, 0.8))]
    for _ in range(draws.integer(2, 4)):
        root = trunk[0] + draws.number() * (trunk[1] - trunk[0])
        limb = _curve(draws, pieces=3, bend=0.5)
        limb = (limb - limb[0, 0]) * draws.number(0.3, 0.5)
        strokes.append(Stroke(limb, draws.number(0.1, 0.2)).placed(root, 1.0, draws.number()))
    if draws.number() < 0.6:
        head = trunk[1] + (draws.number(0.2, 0.4), draws.number(-0.2, 0.2))
        strokes.append(Stroke(np.stack([head, head])[None], draws.number(0.3, 0.45)))
    return strokes


def _curve(draws: Draws, pieces: int, bend: float) -> Array:
    """A curve of equal steps, centred, two units from one end of its extent to the other."""
    heading = np.cumsum(np.cumsum(draws.array(pieces, low=-bend, high=bend)) / 2)
    steps = np.stack([np.cos(heading), np.sin(heading)], axis=1)
    points = np.concatenate([np.zeros((1, 2)), np.cumsum(steps, axis=0)])
    low, high = points.min(0), points.max(0)
    return polyline((2 * points - low - high) / math.hypot(*(high - low)))


class Kind(NamedTuple):
    """How an object is made, its share of all objects, and the range of its radius in pixels."""

    make: Callable[[Draws], list[Stroke]]
    share: float
    radius: tuple[float, float]


KINDS: dict[str, Kind] = {
    "thin": Kind(_thin, 0.27, (30.0, 90.0)),
    "elongated": Kind(_elongated, 0.34, (20.0, 120.0)),
    "small": Kind(_small, 0.14, (6.0, 15.0)),
    "ring": Kind(_ring, 0.08, (20.0, 90.0)),
    "compound": Kind(_compound, 0.17, (30.0, 125.0)),
}
