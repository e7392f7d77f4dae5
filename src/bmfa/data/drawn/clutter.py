"""Distractors: line fragments and blobs, which are no figures and form none together."""

import math

import numpy as np

from bmfa.data.drawn.draws import Draws
from bmfa.data.drawn.shapes import Array, Shape, segment_distance
from bmfa.data.drawn.textures import contrasting, luma_at

Disc = tuple[float, float, float]
# Every piece fits a window of this many pixels around its centre.
_WINDOW = 33


def is_free(disc: Disc, taken: list[Disc]) -> bool:
    """Whether a disc (x, y, radius) keeps clear of all those taken."""
    x, y, radius = disc
    return all(math.hypot(x - a, y - b) > radius + other for a, b, other in taken)


def add_clutter(draws: Draws, canvas: Array, taken: list[Disc], tries: int) -> None:
    """Paint distractors over a canvas (3, height, width) where their discs are free."""
    height, width = canvas.shape[1:]
    centres = draws.array(tries, 2) * (width, height)
    reach, pen, bend = _sizes(draws, tries)
    occupied, kept = list(taken), []
    for index, disc in enumerate(np.column_stack([centres, reach + pen / 2 + 1]).tolist()):
        if is_free(disc, occupied):
            occupied.append(disc)
            kept.append(index)
    segments = _segments(draws, centres[kept], reach[kept], bend[kept])
    colours = contrasting(draws, luma_at(canvas, centres[kept]), 70.0, 120.0)
    for shape, colour in zip(_shapes(segments, pen[kept], height, width), colours, strict=True):
        shape.paint(canvas, colour)


def _sizes(draws: Draws, count: int) -> tuple[Array, Array, Array]:
    """Half length, width and bend of lines (seven in ten) and of blobs."""
    line = draws.array(count) < 0.7
    size, weight, bend = draws.array(3, count)
    reach = np.where(line, 5.0 + 8.0 * size, 3.0 * size)
    pen = np.where(line, 1.7 + 1.1 * weight, 3.0 + 6.0 * weight)
    return reach, pen, np.where(line, 0.7 * bend - 0.35, 0.0)


def _segments(draws: Draws, centres: Array, reach: Array, bend: Array) -> Array:
    """Two segments for each piece, (count, 2, 2, 2), bent in the middle and turned at random."""
    angle = draws.array(len(centres), high=2 * math.pi)
    along = reach[:, None] * np.stack([np.cos(angle), np.sin(angle)], axis=1)
    middle = centres + bend[:, None] * along[:, ::-1] * (-1.0, 1.0)
    points = np.stack([centres - along, middle, centres + along], axis=1)
    return np.stack([points[:, :2], points[:, 1:]], axis=2)


def _shapes(segments: Array, pen: Array, height: int, width: int) -> list[Shape]:
    """All pieces at once, in windows of one size that are moved to lie inside the canvas."""
    corner = segments[:, 0, 1].round().astype(int) - _WINDOW // 2
    left = np.clip(corner[:, 0], 0, width - _WINDOW)
    top = np.clip(corner[:, 1], 0, height - _WINDOW)
    steps = np.arange(_WINDOW)
    distance = segment_distance(left[:, None] + steps, top[:, None] + steps, segments)
    distance -= pen[:, None, None] / 2
    return [
        Shape(slice(row, row + _WINDOW), slice(column, column + _WINDOW), window)
        for row, column, window in zip(top.tolist(), left.tolist(), distance, strict=True)
    ]
