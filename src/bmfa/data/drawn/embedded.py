"""The embedded picture set, seen as classification: one small thin figure in textured clutter."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bmfa.data.drawn.clutter import add_clutter
from bmfa.data.drawn.draws import Draws
from bmfa.data.drawn.figures import CLASSES, FIGURES
from bmfa.data.drawn.shapes import Array, Shape, Stroke
from bmfa.data.drawn.textures import background, contrasting, finished, luma_at

FIGURE_SIZE = 112
_VIEW = 0


class FigurePicture(NamedTuple):
    """Pixels (112, 112, 3) RGB in 8 bits, the class 0 to 9, and the figure's mask (112, 112)."""

    pixels: NDArray[np.uint8]
    label: int
    mask: NDArray[np.bool_]


def figure_picture(seed: int, index: int) -> FigurePicture:
    """The picture of (seed, index); the class is index modulo 10, so any run of tens is balanced."""
    draws = Draws(seed, index, _VIEW)
    label = index % len(CLASSES)
    canvas = background(draws, FIGURE_SIZE, FIGURE_SIZE)
    radius = draws.number(10.0, 17.0)
    centre = draws.array(2, low=radius + 2, high=FIGURE_SIZE - radius - 3)
    add_clutter(draws, canvas, [(centre[0], centre[1], radius + 3)], tries=24)
    figure = _figure(draws, label, centre, radius)
    figure.paint(canvas, contrasting(draws, luma_at(canvas, centre[None]), 75.0, 120.0)[0])
    return FigurePicture(finished(canvas), label, figure.mask(FIGURE_SIZE, FIGURE_SIZE))


def figure_batch(seed: int, indices: Iterable[int]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Pictures (count, 112, 112, 3) and classes (count,) of several indices."""
    pictures = [figure_picture(seed, index) for index in indices]
    pixels = np.stack([picture.pixels for picture in pictures])
    return pixels, np.array([picture.label for picture in pictures], dtype=np.int64)


def _figure(draws: Draws, label: int, centre: Array, radius: float) -> Shape:
    pen = draws.number(2.0, 2.8) / radius
    stroke = Stroke(FIGURES[CLASSES[label]], pen).placed(centre, radius, draws.number())
    return Shape.of([stroke], FIGURE_SIZE, FIGURE_SIZE)
