"""Embedded pictures for classification: one small thin glyph on a textured background with clutter.

The ten glyphs are thin, fit the unit circle, and differ under every rotation.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bmfa.data.drawn.clutter import add_clutter
from bmfa.data.drawn.rng import UniformGenerator
from bmfa.data.drawn.shapes import Array, Shape, Stroke, arc, polyline
from bmfa.data.drawn.textures import background, contrasting_colours, luma_at, to_pixels

GLYPH_PICTURE_SIZE = 112  # pixels along a side: 14 patches of 8 for the embedded model
_STREAM = 0  # third part of the random key: scenes have another, so that they share no numbers


def _star() -> Array:
    radius = np.where(np.arange(11) % 2, 0.42, 1.0)
    return polyline(radius[:, None] * arc(10))


def _spiral() -> Array:
    pieces = 30
    radius = np.linspace(0.08, 1.0, pieces + 1)
    return polyline(radius[:, None] * arc(pieces, turns=1.9))


def _zigzag() -> Array:
    return polyline(np.array([[-0.9, 0.43], [-0.45, -0.43], [0, 0.43], [0.45, -0.43], [0.9, 0.43]]))


def _arrow() -> Array:
    head = polyline(np.array([[0.3, -0.62], [1.0, 0.0], [0.3, 0.62]]))
    return np.concatenate([head, [[[-1, 0], [1, 0]]]])


def _eight() -> Array:
    loop, right = 0.5 * arc(16), np.array([0.5, 0.0])
    return np.concatenate([polyline(loop + right), polyline(loop - right)])


def _ladder() -> Array:
    rails = [[[-0.88, y], [0.88, y]] for y in (-0.45, 0.45)]
    rungs = [[[x, -0.45], [x, 0.45]] for x in (-0.4, 0.4)]
    return np.array(rails + rungs)


# Segments of each glyph, (count, 2 ends, 2 coordinates x and y).
GLYPHS: dict[str, Array] = {
    "ring": polyline(arc(24)),
    "cross": np.array([[[-1.0, 0], [1, 0]], [[0, -1], [0, 1]]]),
    "triangle": polyline(arc(3)),
    "square": polyline(arc(4)),
    "star": _star(),
    "spiral": _spiral(),
    "zigzag": _zigzag(),
    "arrow": _arrow(),
    "eight": _eight(),
    "ladder": _ladder(),
}
GLYPH_CLASSES = tuple(GLYPHS)


class GlyphPicture(NamedTuple):
    """Pixels (112, 112, 3) uint8 RGB, class 0 to 9, and mask (112, 112) of the glyph's pixels."""

    pixels: NDArray[np.uint8]
    label: int
    mask: NDArray[np.bool_]


def draw_glyph(seed: int, index: int) -> GlyphPicture:
    """Draw the picture of a seed and an index.

    Args:
        seed: seed of the set, at least 0.
        index: index in the set, at least 0; the class is index modulo 10.

    Returns:
        The picture; equal arguments give equal bits on every platform.

    Raises:
        ValueError: the seed or the index is negative.

    Example:
        >>> from bmfa.data import draw_glyph
        >>> draw_glyph(0, 7).label
        7
    """
    rng = UniformGenerator(seed, index, _STREAM)
    label = index % len(GLYPH_CLASSES)
    canvas = background(rng, GLYPH_PICTURE_SIZE, GLYPH_PICTURE_SIZE)
    radius = rng.number(10.0, 17.0)
    centre = rng.array(2, low=radius + 2, high=GLYPH_PICTURE_SIZE - radius - 3)
    add_clutter(rng, canvas, [(centre[0], centre[1], radius + 3)], tries=24)
    pen_width = rng.number(2.0, 2.8) / radius
    stroke = Stroke(GLYPHS[GLYPH_CLASSES[label]], pen_width).placed(centre, radius, rng.number())
    glyph = Shape.of([stroke], GLYPH_PICTURE_SIZE, GLYPH_PICTURE_SIZE)
    colour = contrasting_colours(rng, luma_at(canvas, centre[None]), 75.0, 120.0)[0]
    glyph.paint(canvas, colour)
    mask = glyph.mask(GLYPH_PICTURE_SIZE, GLYPH_PICTURE_SIZE)
    return GlyphPicture(to_pixels(canvas), label, mask)


def draw_glyph_batch(
    seed: int, indices: Iterable[int]
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Draw several pictures: pixels (count, 112, 112, 3) uint8 and classes (count,) int64.

    Args:
        seed: seed of the set, at least 0.
        indices: indices in the set.

    Example:
        >>> from bmfa.data import draw_glyph_batch
        >>> pixels, labels = draw_glyph_batch(0, [3, 14])
        >>> pixels.shape, labels.tolist()
        ((2, 112, 112, 3), [3, 4])
    """
    pictures = [draw_glyph(seed, index) for index in indices]
    pixels = np.stack([picture.pixels for picture in pictures])
    return pixels, np.array([picture.label for picture in pictures], dtype=np.int64)
