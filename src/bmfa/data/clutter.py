"""Distractors: line fragments and blobs, which are no figures and form none together."""

import math

import numpy as np

from bmfa.data.draws import Draws
from bmfa.data.shapes import Array, Shape, Stroke, polyline
from bmfa.data.textures import contrasting

Disc = tuple[float, float, float]


def is_free(disc: Disc, taken: list[Disc]) -> bool:
    """Whether a disc (x, y, radius) keeps clear of all those taken."""
    x, y, radius = disc
    return all(math.hypot(x - a, y - b) > radius + other for a, b, other in taken)


def add_clutter(draws: Draws, canvas: Array, taken: list[Disc], tries: int) -> None:
    """Paint distractors over a canvas (3, height, width) where discs are free, and take those."""
    height, width = canvas.shape[1:]
    for _ in range(tries):
        x, y = draws.number(high=width), draws.number(high=height)
        radius, stroke = _fragment(draws) if draws.number() < 0.7 else _blob(draws)
        disc = (x, y, radius + stroke.width / 2 + 1)
        if is_free(disc, taken):
            taken.append(disc)
            stroke = stroke.placed(np.array([x, y]), 1.0, draws.number())
            shape = Shape.of([stroke], height, width)
            shape.paint(canvas, contrasting(draws, canvas, shape, 70.0, 120.0))


def _fragment(draws: Draws) -> tuple[float, Stroke]:
    """A line, straight or slightly bent."""
    radius = draws.number(5.0, 13.0)
    bend = draws.number(-0.35, 0.35) * radius
    points = np.array([[-radius, 0.0], [0.0, bend], [radius, 0.0]])
    return radius, Stroke(polyline(points), draws.number(1.7, 2.8))


def _blob(draws: Draws) -> tuple[float, Stroke]:
    """A disc or a short sausage."""
    radius = draws.number(0.0, 3.0)
    return radius, Stroke(np.array([[[-radius, 0.0], [radius, 0.0]]]), draws.number(3.0, 9.0))
