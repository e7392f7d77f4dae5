"""Textured backgrounds and colours that stand out from them."""

import math
from functools import lru_cache

import numpy as np

from bmfa.data.draws import Draws
from bmfa.data.shapes import Array, Shape

_LUMA = np.array([0.299, 0.587, 0.114])


def colour(draws: Draws, luma: float, tint: float) -> Array:
    """A colour (3, 1, 1) of a given luma, 0 to 255, its channels up to about `tint` away from it."""
    channels = draws.array(3, low=-tint, high=tint)
    return (luma + channels - channels @ _LUMA)[:, None, None]


def contrasting(draws: Draws, canvas: Array, shape: Shape, low: float, high: float) -> Array:
    """A colour whose luma differs from the canvas under a shape by low to high, towards mid-grey."""
    under = float(canvas[:, shape.rows, shape.columns].mean((1, 2)) @ _LUMA)
    step = draws.number(low, high)
    return colour(draws, under + step if under < 128 else under - step, 35.0)


def noise(draws: Draws, height: int, width: int, cell: float) -> Array:
    """Smooth noise in [-1, 1) with features of about `cell` pixels, (height, width)."""
    rows, columns = _knot_weights(height, cell), _knot_weights(width, cell)
    return rows @ draws.array(rows.shape[1], columns.shape[1], low=-1.0) @ columns.T


@lru_cache(maxsize=256)
def _knot_weights(size: int, cell: float) -> Array:
    """Weights (size, knots) that spread values at knots `cell` pixels apart over the pixels."""
    place = np.arange(size) / cell
    knots = np.arange(int(size / cell) + 2)
    near = np.maximum(0.0, 1.0 - np.abs(place[:, None] - knots))
    return near * near * (3.0 - 2.0 * near)


def texture(draws: Draws, height: int, width: int) -> Array:
    """A texture of about -1 to 1: octaves of noise, or stripes bent by noise."""
    coarse = noise(draws, height, width, 23.0)
    if draws.number() < 0.5:
        fine = noise(draws, height, width, 9.0)
        return 0.6 * coarse + 0.5 * fine + 0.3 * noise(draws, height, width, 4.0)
    angle, period = draws.number(high=math.pi), draws.number(5.0, 14.0)
    phase = 3.0 * coarse
    phase += np.arange(width) * (2 * math.pi * math.cos(angle) / period)
    phase += np.arange(height)[:, None] * (2 * math.pi * math.sin(angle) / period)
    return 0.6 * np.sin(phase) + 0.4 * coarse


def background(draws: Draws, height: int, width: int) -> Array:
    """A canvas (3, height, width) of two or three textured regions with wavy borders, and grain."""
    luma = draws.number(70.0, 185.0)
    canvas = _region(draws, height, width, luma)
    for _ in range(draws.integer(1, 2)):
        other = _region(draws, height, width, luma + draws.number(-45.0, 45.0))
        other -= canvas
        other *= np.minimum(np.maximum(_side(draws, height, width) + 0.5, 0.0), 1.0)
        canvas += other
    canvas += draws.array(height, width, low=-7.0, high=7.0)
    return canvas


def _region(draws: Draws, height: int, width: int, luma: float) -> Array:
    amplitude = colour(draws, draws.number(8.0, 22.0), 9.0)
    region = texture(draws, height, width) * amplitude
    region += colour(draws, luma, 26.0)
    return region


def _side(draws: Draws, height: int, width: int) -> Array:
    """Signed distance, roughly, to a wavy line through the middle part of the canvas."""
    angle = draws.number(high=2 * math.pi)
    x = np.arange(width) - draws.number(0.2, 0.8) * width
    y = np.arange(height) - draws.number(0.2, 0.8) * height
    wave = 8.0 * noise(draws, height, width, 23.0)
    wave += x * math.cos(angle)
    wave += y[:, None] * math.sin(angle)
    return wave
