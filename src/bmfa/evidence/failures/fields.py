"""Seeded score fields in which rules can fail: one function for each kind of structure."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from bmfa.data.drawn.painting import UniformGenerator

SIDE = 16  # tokens along a side
_STREAM = 3  # third part of the random key; the drawn images have others

Field = NDArray[np.float64]  # (16, 16) scores


def _lattice(rng: UniformGenerator) -> Field:
    """Make bright tokens at equal distances, and a faint slope elsewhere."""
    step = (2, 4)[rng.integer(0, 1)]
    size = (8, 16)[rng.integer(0, 1)]
    top, left = (rng.integer(0, 1) * 8 if size == 8 else 0 for _ in range(2))
    field = _slope(rng, rng.number(0.2, 3.0))
    field[top : top + size, left : left + size] = 0.0
    rows = slice(top + rng.integer(0, step - 1), top + size, step)
    columns = slice(left + rng.integer(0, step - 1), left + size, step)
    field[rows, columns] = rng.number(3.0, 8.0)
    return field


def _blob(rng: UniformGenerator) -> Field:
    """Make a bright spot with a smooth edge, on noise."""
    y, x = np.mgrid[:SIDE, :SIDE]
    centre = rng.array(2, low=3.0, high=12.0)
    width = rng.number(0.7, 2.5)
    spot = np.exp(-((y - centre[0]) ** 2 + (x - centre[1]) ** 2) / (2 * width**2))
    field: Field = rng.number(4.0, 9.0) * spot + _noise(rng, rng.number(0.0, 0.8))
    return field


def _dark_texture(rng: UniformGenerator) -> Field:
    """Make a smooth bright part that holds the mass, and a strong texture on dark tokens."""
    field = _slope(rng, rng.number(1.0, 4.0))
    rows, columns = _half(rng)
    dark = rng.number(-9.0, -4.0) + _noise(rng, rng.number(1.5, 4.0))
    field[rows, columns] = dark[rows, columns]
    return field


def _low_outliers(rng: UniformGenerator) -> Field:
    """Make a few very low tokens in one quarter, and one or two high tokens in another."""
    field = _noise(rng, 0.2)
    for _ in range(rng.integer(4, 12)):
        field[rng.integer(0, 7), rng.integer(0, 7)] = rng.number(-12.0, -6.0)
    for _ in range(rng.integer(1, 2)):
        field[rng.integer(8, 15), rng.integer(8, 15)] = rng.number(5.0, 8.0)
    return field


def _tiles(rng: UniformGenerator) -> Field:
    """Make constant tiles of three or five tokens, whose borders are not those of a quadtree."""
    side = (3, 5)[rng.integer(0, 1)]
    count = -(-SIDE // side)
    levels = rng.number(3.0, 7.0) * rng.array(count, count)
    field: Field = np.repeat(np.repeat(levels, side, 0), side, 1)[:SIDE, :SIDE].copy()
    return field


def _points(rng: UniformGenerator) -> Field:
    """Make a few bright tokens anywhere on faint noise."""
    field = _noise(rng, rng.number(0.0, 0.6))
    for _ in range(rng.integer(1, 6)):
        field[rng.integer(0, 15), rng.integer(0, 15)] = rng.number(4.0, 9.0)
    return field


def _rough(rng: UniformGenerator) -> Field:
    """Make noise of a width that differs between the quarters."""
    field = _noise(rng, 1.0)
    for rows in (slice(0, 8), slice(8, 16)):
        for columns in (slice(0, 8), slice(8, 16)):
            field[rows, columns] *= rng.number(0.2, 2.5)
    return field


def _slope(rng: UniformGenerator, height: float) -> Field:
    """Return a plane that rises by `height` across the grid, in a random direction."""
    y, x = np.mgrid[:SIDE, :SIDE] / (SIDE - 1) - 0.5
    direction = rng.array(2, low=-1.0)
    plane: Field = height * (direction[0] * y + direction[1] * x)
    return plane


def _noise(rng: UniformGenerator, width: float) -> Field:
    """Return sums of four uniform numbers with a standard deviation of `width`."""
    summed: Field = rng.array(4, SIDE, SIDE, low=-1.0).sum(0) * width * np.sqrt(3.0) / 2
    return summed


def _half(rng: UniformGenerator) -> tuple[slice, slice]:
    """Return rows and columns of a half or of a quarter of the grid."""
    low, high, whole = slice(0, 8), slice(8, 16), slice(0, 16)
    choices = [(low, whole), (high, whole), (whole, low), (whole, high), (low, low), (high, high)]
    return choices[rng.integer(0, len(choices) - 1)]


FIELDS: dict[str, Callable[[UniformGenerator], Field]] = {
    "lattice of bright tokens": _lattice,
    "bright spot": _blob,
    "texture on dark tokens": _dark_texture,
    "low outliers": _low_outliers,
    "tiles": _tiles,
    "bright tokens": _points,
    "rough quarters": _rough,
}


def draw_field(kind: str, seed: int, index: int) -> Field:
    """Return the (16, 16) float64 scores of a kind, a seed and an index.

    Equal arguments give equal bits on every platform.
    """
    rng = UniformGenerator(seed, index, _STREAM, list(FIELDS).index(kind))
    return FIELDS[kind](rng)
