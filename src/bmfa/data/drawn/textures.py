"""Textured backgrounds, and colours that contrast with them."""

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from bmfa.data.drawn.rng import UniformGenerator
from bmfa.data.drawn.shapes import Array

_LUMA = np.array([0.299, 0.587, 0.114])  # weights of R, G and B in ITU-R BT.601


def colours(rng: UniformGenerator, luma: Array, tint: float) -> Array:
    """Return random colours (count, 3, 1, 1) with lumas (count,), 0 to 255.

    Their channels differ from the luma by up to about `tint`.
    """
    channels = rng.array(len(luma), 3, low=-tint, high=tint)
    mixed: Array = luma[:, None] + channels - (channels @ _LUMA)[:, None]
    return mixed[..., None, None]


def colour(rng: UniformGenerator, luma: float, tint: float) -> Array:
    """Return one colour, (3, 1, 1)."""
    single: Array = colours(rng, np.array([luma]), tint)[0]
    return single


def luma_at(canvas: Array, centres: Array) -> Array:
    """Return the luma of a canvas (3, height, width) around points (count, 2), mean over 5x5 pixels."""
    height, width = canvas.shape[1:]
    steps = np.arange(-2, 3)
    columns = np.clip(centres[:, :1].astype(int) + steps, 0, width - 1)
    rows = np.clip(centres[:, 1:].astype(int) + steps, 0, height - 1)
    means: Array = canvas[:, rows[:, :, None], columns[:, None, :]].mean((2, 3))
    return _LUMA @ means


def contrasting_colours(
    rng: UniformGenerator, luma: Array, low: float, high: float, tint: float = 35.0
) -> Array:
    """Return colours (count, 3, 1, 1) whose lumas differ from `luma` by low to high, towards grey."""
    step = rng.array(len(luma), low=low, high=high)
    return colours(rng, np.where(luma < 128.0, luma + step, luma - step), tint)


def noise(rng: UniformGenerator, height: int, width: int, cell: float) -> Array:
    """Return smooth noise (height, width) in [-1, 1) with features of about `cell` pixels."""
    (row, row_weight), (column, column_weight) = _knots(height, cell), _knots(width, cell)
    values = rng.array(int(row[-1]) + 2, int(column[-1]) + 2, low=-1.0)
    # Not a matrix product, for which BLAS would start threads on every small image.
    values = values[row] + (values[row + 1] - values[row]) * row_weight[:, None]
    left, right = values.take(column, axis=1), values.take(column + 1, axis=1)
    right -= left
    right *= column_weight
    right += left
    return right


@lru_cache(maxsize=256)
def _knots(size: int, cell: float) -> tuple[NDArray[np.int64], Array]:
    """Return, for each pixel of a line, the knot before it and the weight of the knot after it."""
    position = np.arange(size) / cell
    before = position.astype(np.int64)
    after = position - before
    return before, after * after * (3.0 - 2.0 * after)


def texture(rng: UniformGenerator, height: int, width: int) -> Array:
    """Return a texture (height, width) of about -1 to 1: octaves of noise, or stripes bent by noise."""
    coarse = noise(rng, height, width, 23.0)
    if rng.number() < 0.5:
        fine = noise(rng, height, width, 9.0)
        return 0.6 * coarse + 0.5 * fine + 0.3 * noise(rng, height, width, 4.0)
    angle, period = rng.number(high=math.pi), rng.number(5.0, 14.0)
    phase = 0.5 * coarse
    phase += np.arange(width) * (math.cos(angle) / period)
    phase += np.arange(height)[:, None] * (math.sin(angle) / period)
    stripes = _wave(phase)
    stripes *= 0.6
    stripes += 0.4 * coarse
    return stripes


def _wave(phase: Array) -> Array:
    """Return a wave of period 1 between -1 and 1, made of parabolas, which cost less than a sine."""
    phase = phase - np.floor(phase)
    phase -= 0.5
    return phase * (8.0 - 16.0 * np.abs(phase))


def background(rng: UniformGenerator, height: int, width: int, strength: float = 1.0) -> Array:
    """Return a canvas (3, height, width) of two or three textured regions and grain."""
    luma = rng.number(70.0, 185.0)
    canvas = _region(rng, height, width, luma, strength)
    for _ in range(rng.integer(1, 2)):
        other = _region(rng, height, width, luma + rng.number(-45.0, 45.0), strength)
        other -= canvas
        other *= np.minimum(np.maximum(_wavy_line_distance(rng, height, width) + 0.5, 0.0), 1.0)
        canvas += other
    canvas += rng.array(height, width, low=-7.0, high=7.0)
    return canvas


def _region(rng: UniformGenerator, height: int, width: int, luma: float, strength: float) -> Array:
    amplitude = strength * colour(rng, rng.number(8.0, 22.0), 9.0)
    region = texture(rng, height, width) * amplitude
    region += colour(rng, luma, 26.0)
    return region


def _wavy_line_distance(rng: UniformGenerator, height: int, width: int) -> Array:
    """Return the approximate signed distance to a wavy line through the middle of the canvas."""
    angle = rng.number(high=2 * math.pi)
    x = np.arange(width) - rng.number(0.2, 0.8) * width
    y = np.arange(height) - rng.number(0.2, 0.8) * height
    wave = 8.0 * noise(rng, height, width, 23.0)
    wave += x * math.cos(angle)
    wave += y[:, None] * math.sin(angle)
    return wave


def to_pixels(canvas: Array) -> NDArray[np.uint8]:
    """Round a canvas (3, height, width) in place; return an image (height, width, 3) uint8."""
    canvas += 0.5
    np.maximum(canvas, 0.0, out=canvas)
    np.minimum(canvas, 255.0, out=canvas)
    return np.ascontiguousarray(canvas.astype(np.uint8).transpose(1, 2, 0))
