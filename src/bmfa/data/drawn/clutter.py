"""Clutter of the scenes: line fragments and blobs."""

import math

import numpy as np

from bmfa.data.drawn.raster import Array
from bmfa.data.drawn.rng import UniformGenerator
from bmfa.data.drawn.shapes import Shape, Stroke
from bmfa.data.drawn.textures import contrasting_colours, luma_at

Disc = tuple[float, float, float]  # x, y, radius in pixels


def is_free(disc: Disc, taken: list[Disc]) -> bool:
    """Return True if a disc touches none of the discs that are taken."""
    x, y, radius = disc
    return all(math.hypot(x - a, y - b) > radius + other for a, b, other in taken)


def add_clutter(rng: UniformGenerator, canvas: Array, tries: int) -> None:
    """Paint at most `tries` pieces on a canvas (3, height, width), where their discs are free."""
    height, width = canvas.shape[1:]
    x, y = np.arange(width), np.arange(height)
    centres = rng.array(tries, 2) * (width, height)
    reach, pen, bend = _sizes(rng, tries)
    occupied: list[Disc] = []
    painted: list[int] = []
    for index, disc in enumerate(np.column_stack([centres, reach + pen / 2 + 1]).tolist()):
        if is_free(disc, occupied):
            occupied.append(disc)
            painted.append(index)
    segments = _segments(rng, centres[painted], reach[painted], bend[painted])
    colours = contrasting_colours(rng, luma_at(canvas, centres[painted]), 70.0, 120.0)
    for piece, width_of_pen, colour in zip(segments, pen[painted].tolist(), colours, strict=True):
        Shape.from_strokes([Stroke(piece, width_of_pen)], x, y).paint(canvas, colour)


def _sizes(rng: UniformGenerator, count: int) -> tuple[Array, Array, Array]:
    """Return half length, pen width and bend of the pieces: seven in ten lines, the others blobs."""
    line = rng.array(count) < 0.7
    size, weight, bend = rng.array(3, count)
    reach = np.where(line, 5.0 + 8.0 * size, 3.0 * size)
    pen = np.where(line, 1.7 + 1.1 * weight, 3.0 + 6.0 * weight)
    return reach, pen, np.where(line, 0.7 * bend - 0.35, 0.0)


def _segments(rng: UniformGenerator, centres: Array, reach: Array, bend: Array) -> Array:
    """Return two segments per piece, (count, 2, 2, 2), bent in the middle and rotated at random."""
    angle = rng.array(len(centres), high=2 * math.pi)
    along = reach[:, None] * np.stack([np.cos(angle), np.sin(angle)], axis=1)
    middle = centres + bend[:, None] * along[:, ::-1] * (-1.0, 1.0)
    points = np.stack([centres - along, middle, centres + along], axis=1)
    return np.stack([points[:, :2], points[:, 1:]], axis=2)
