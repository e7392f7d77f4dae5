"""The ten figures that carry a class: thin, within the unit circle, told apart under any rotation."""

import numpy as np

from bmfa.data.drawn.shapes import Array, arc, polyline


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


FIGURES: dict[str, Array] = {
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
CLASSES = tuple(FIGURES)
