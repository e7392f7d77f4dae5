"""Textured backgrounds, and colours that contrast with them."""

import numpy as np

from bmfa.data.drawn.raster import LUMA, Array, coverage, direction, noise, plane
from bmfa.data.drawn.rng import UniformGenerator


def colours(rng: UniformGenerator, luma: Array, tint: float) -> Array:
    """Return random colours (count, 3, 1, 1) with lumas (count,), 0 to 255.

    Their channels differ from the luma by up to about `tint`.
    """
    channels = rng.array(len(luma), 3, low=-tint, high=tint)
    return np.asarray(luma[:, None] + channels - (channels @ LUMA)[:, None])[..., None, None]


def colour(rng: UniformGenerator, luma: float, tint: float) -> Array:
    """Return one colour, (3, 1, 1)."""
    return colours(rng, np.array([luma]), tint).reshape(3, 1, 1)


def luma_at(canvas: Array, centres: Array) -> Array:
    """Return the luma of a canvas (3, height, width) around points (count, 2), mean over 5x5 pixels."""
    height, width = canvas.shape[1:]
    steps = np.arange(-2, 3)
    columns = (centres[:, :1].astype(int) + steps).clip(0, width - 1)
    rows = (centres[:, 1:].astype(int) + steps).clip(0, height - 1)
    means: Array = canvas[:, rows[:, :, None], columns[:, None, :]].mean((2, 3))
    return LUMA @ means


def contrasting_colours(
    rng: UniformGenerator, luma: Array, low: float, high: float, tint: float = 35.0
) -> Array:
    """Return colours (count, 3, 1, 1) whose lumas differ from `luma` by low to high, towards grey."""
    step = rng.array(len(luma), low=low, high=high)
    return colours(rng, np.where(luma < 128.0, luma + step, luma - step), tint)


def _noise(rng: UniformGenerator, height: int, width: int, cell: float) -> Array:
    """Return noise (height, width) with features of about `cell` pixels."""
    rows, columns = np.arange(height) / cell, np.arange(width) / cell
    values = rng.array(int(rows[-1]) + 2, int(columns[-1]) + 2, low=-1.0)
    return noise(values, rows, columns)


def texture(rng: UniformGenerator, height: int, width: int) -> Array:
    """Return a texture (height, width) of about -1 to 1: octaves of noise, or stripes bent by noise."""
    coarse = _noise(rng, height, width, 23.0)
    if rng.number() < 0.5:
        fine = _noise(rng, height, width, 9.0)
        octaves: Array = 0.6 * coarse + 0.5 * fine + 0.3 * _noise(rng, height, width, 4.0)
        return octaves
    (dx, dy), period = direction(rng.number(high=0.5)), rng.number(5.0, 14.0)
    x, y = np.arange(width, dtype=float), np.arange(height, dtype=float)
    phase = plane(x, y, dx / period, dy / period) + 0.5 * coarse
    # A wave of period 1 between -1 and 1, made of parabolas, which cost less than a sine.
    phase -= np.floor(phase) + 0.5
    return phase * (8.0 - 16.0 * np.abs(phase)) * 0.6 + 0.4 * coarse


def background(rng: UniformGenerator, height: int, width: int, strength: float = 1.0) -> Array:
    """Return a canvas (3, height, width) of two or three textured regions and grain."""
    luma = rng.number(70.0, 185.0)
    canvas = _region(rng, height, width, luma, strength)
    for _ in range(rng.integer(1, 2)):
        other = _region(rng, height, width, luma + rng.number(-45.0, 45.0), strength)
        canvas += (other - canvas) * coverage(_wavy_line_distance(rng, height, width), -1.0)
    return canvas + rng.array(height, width, low=-7.0, high=7.0)


def _region(rng: UniformGenerator, height: int, width: int, luma: float, strength: float) -> Array:
    amplitude = strength * colour(rng, rng.number(8.0, 22.0), 9.0)
    return texture(rng, height, width) * amplitude + colour(rng, luma, 26.0)


def _wavy_line_distance(rng: UniformGenerator, height: int, width: int) -> Array:
    """Return the approximate signed distance to a wavy line through the middle of the canvas."""
    turn = rng.number()
    x = np.arange(width) - rng.number(0.2, 0.8) * width
    y = np.arange(height) - rng.number(0.2, 0.8) * height
    return plane(x, y, *direction(turn)) + 8.0 * _noise(rng, height, width, 23.0)
