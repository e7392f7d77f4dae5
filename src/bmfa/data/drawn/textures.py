"""Textured backgrounds and colours that stand out from them."""

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from bmfa.data.drawn.draws import Draws
from bmfa.data.drawn.shapes import Array

_LUMA = np.array([0.299, 0.587, 0.114])


def colours(draws: Draws, luma: Array, tint: float) -> Array:
    """Colours (count, 3, 1, 1) of given lumas (count,), 0 to 255, their channels up to about `tint`
    away from them."""
    channels = draws.array(len(luma), 3, low=-tint, high=tint)
    mixed: Array = luma[:, None] + channels - (channels @ _LUMA)[:, None]
    return mixed[..., None, None]


def colour(draws: Draws, luma: float, tint: float) -> Array:
    """One colour, (3, 1, 1)."""
    single: Array = colours(draws, np.array([luma]), tint)[0]
    return single


def luma_at(canvas: Array, centres: Array) -> Array:
    """Luma of the canvas (3, height, width) around points (count, 2), the mean over 5x5 pixels."""
    height, width = canvas.shape[1:]
    steps = np.arange(-2, 3)
    columns = np.clip(centres[:, :1].astype(int) + steps, 0, width - 1)
    rows = np.clip(centres[:, 1:].astype(int) + steps, 0, height - 1)
    means: Array = canvas[:, rows[:, :, None], columns[:, None, :]].mean((2, 3))
    return _LUMA @ means


def contrasting(draws: Draws, luma: Array, low: float, high: float, tint: float = 35.0) -> Array:
    """Colours (count, 3, 1, 1) whose lumas differ from those given by low to high, towards mid-grey."""
    step = draws.array(len(luma), low=low, high=high)
    return colours(draws, np.where(luma < 128.0, luma + step, luma - step), tint)


def noise(draws: Draws, height: int, width: int, cell: float) -> Array:
    """Smooth noise in [-1, 1) with features of about `cell` pixels, (height, width)."""
    (row, row_weight), (column, column_weight) = _knots(height, cell), _knots(width, cell)
    values = draws.array(int(row[-1]) + 2, int(column[-1]) + 2, low=-1.0)
    # Interpolated by hand: as a matrix product, BLAS would start threads for each small picture.
    values = values[row] + (values[row + 1] - values[row]) * row_weight[:, None]
    left, right = values.take(column, axis=1), values.take(column + 1, axis=1)
    right -= left
    right *= column_weight
    right += left
    return right


@lru_cache(maxsize=256)
def _knots(size: int, cell: float) -> tuple[NDArray[np.int64], Array]:
    """For each pixel of a line, the knot before it and the weight of the knot after it."""
    place = np.arange(size) / cell
    before = place.astype(np.int64)
    after = place - before
    return before, after * after * (3.0 - 2.0 * after)


def texture(draws: Draws, height: int, width: int) -> Array:
    """A texture of about -1 to 1: octaves of noise, or stripes bent by noise."""
    coarse = noise(draws, height, width, 23.0)
    if draws.number() < 0.5:
        fine = noise(draws, height, width, 9.0)
        return 0.6 * coarse + 0.5 * fine + 0.3 * noise(draws, height, width, 4.0)
    angle, period = draws.number(high=math.pi), draws.number(5.0, 14.0)
    phase = 0.5 * coarse
    phase += np.arange(width) * (math.cos(angle) / period)
    phase += np.arange(height)[:, None] * (math.sin(angle) / period)
    stripes = _wave(phase)
    stripes *= 0.6
    stripes += 0.4 * coarse
    return stripes


def _wave(phase: Array) -> Array:
    """A wave of period 1 between -1 and 1, of parabolas: much cheaper than a sine, and as smooth to
    the eye."""
    phase = phase - np.floor(phase)
    phase -= 0.5
    return phase * (8.0 - 16.0 * np.abs(phase))


def background(draws: Draws, height: int, width: int, strength: float = 1.0) -> Array:
    """A canvas (3, height, width) of two or three textured regions with wavy borders, and grain."""
    luma = draws.number(70.0, 185.0)
    canvas = _region(draws, height, width, luma, strength)
    for _ in range(draws.integer(1, 2)):
        other = _region(draws, height, width, luma + draws.number(-45.0, 45.0), strength)
        other -= canvas
        other *= np.minimum(np.maximum(_side(draws, height, width) + 0.5, 0.0), 1.0)
        canvas += other
    canvas += draws.array(height, width, low=-7.0, high=7.0)
    return canvas


def _region(draws: Draws, height: int, width: int, luma: float, strength: float) -> Array:
    amplitude = strength * colour(draws, draws.number(8.0, 22.0), 9.0)
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


def finished(canvas: Array) -> NDArray[np.uint8]:
    """A canvas (3, height, width), which it uses up, as an 8-bit picture (height, width, 3)."""
    canvas += 0.5
    np.maximum(canvas, 0.0, out=canvas)
    np.minimum(canvas, 255.0, out=canvas)
    return np.ascontiguousarray(canvas.astype(np.uint8).transpose(1, 2, 0))
