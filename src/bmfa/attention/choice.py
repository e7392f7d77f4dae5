"""Step 5 of tiled attention: thresholds, shrinkage and exact heads, from what the probes found.

`bmfa.attention.kernels.reference.tiles` has the other steps. The kernels on a CPU and the torch form
measure the levels; the choice is made here. Triton makes it on the device, in the same way.
"""

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from bmfa.attention.tiling import (
    LARGEST_SHRINKAGE,
    LEVEL_RATIO,
    NUM_LEVELS,
    SMALLEST_CORRECTION,
    STEEP_FALL,
    STEEP_RISE,
)

Array = npt.NDArray[np.float64]


class Levels(NamedTuple):
    """What the probes of one image find at every level; (H, P, levels) each but for `norm`."""

    error: Array  # |output - exact|^2 without the correction
    product: Array  # (exact - output) . correction, with a shrinkage of 1
    correction: Array  # |correction|^2
    share: Array  # of the tiles that are expanded
    norm: Array  # (H, P) |exact|^2
    weight: Array  # (H, P) 0 in a group without a valid query


class Choice(NamedTuple):
    """What the probes of an image determine for all groups."""

    thresholds: Array  # (2,) of the groups at even and odd positions; 0 expands every tile
    shrinkage: Array  # (H, 2)
    exact: npt.NDArray[np.bool_]  # (H,) heads in which every tile is expanded

    @classmethod
    def everything(cls, heads: int) -> "Choice":
        """Expand every tile."""
        return cls(np.zeros(2), np.zeros((heads, 2)), np.ones(heads, bool))


def level_thresholds() -> Array:
    """Thresholds of all levels; at the last one, 0, every tile is expanded."""
    thresholds = LEVEL_RATIO ** np.arange(NUM_LEVELS, dtype=np.float64)
    thresholds[-1] = 0.0
    return thresholds


@np.errstate(invalid="ignore", over="ignore", divide="ignore")  # NaN and infinity expand everything
def choose(
    levels: Levels,
    probes_per_group: int,
    aim: float | None,
    share: float | None,
    exact_above: float,
) -> Choice:
    """Choose thresholds, shrinkage and exact heads of an image.

    The probes of the groups at positions of one parity determine what the groups at the others use.

    Args:
        levels: What the probes find; those of a group one after the other.
        probes_per_group: Number of probes of a group.
        aim: Error to aim at, or None.
        share: Mean share of the tiles that a group expands, if `aim` is None.
        exact_above: Share of expanded tiles above which a head is computed exactly.
    """
    heads, probes = levels.norm.shape
    odd = np.arange(probes) // probes_per_group % 2
    thresholds, shrinkage, shares = np.zeros(2), np.zeros((heads, 2)), np.zeros((heads, 2))
    for half in range(2):
        weight = np.where(odd != half, levels.weight, 0.0)
        if not weight.any():
            weight = levels.weight  # a single group
        total, dot, square, expanded = (np.einsum("hp,hpl->hl", weight, x) for x in levels[:4])
        norms = (weight * levels.norm).sum(1)
        known = square > SMALLEST_CORRECTION**2 * norms[:, None]
        factor = np.where(known, dot / np.where(known, square, 1.0), 0.0)
        factor = np.clip(factor, 0.0, LARGEST_SHRINKAGE)
        squares = (total - 2 * factor * dot + factor**2 * square).sum(0)
        norm = norms.sum()
        errors = np.sqrt(np.maximum(squares, 0.0) / (norm if norm > 0 else 1.0))
        # A mean of ones may round up.
        expanded = np.minimum(expanded / np.maximum(weight.sum(1), 1e-300)[:, None], 1.0)
        if aim is not None:
            level, part = interpolate_down(errors, aim)
        else:
            assert share is not None
            level, part = interpolate_up(expanded.mean(0), share)
        # Level 0 expands tiles with a loss of 1, and a budget without room none.
        none = level == 0 and aim is None
        thresholds[half] = math.inf if none else threshold_at(level, part)
        shrinkage[:, half] = factor[:, level]
        shares[:, half] = (1 - part) * expanded[:, max(level - 1, 0)] + part * expanded[:, level]
    return Choice(thresholds, shrinkage, shares.mean(1) > exact_above)


def interpolate_down(errors: Array, target: float) -> tuple[int, float]:
    """Return where falling errors reach the target: a level, and the part of the step to it.

    Between two levels, log error is linear in log threshold. If the error falls to less than STEEP_FALL
    of the target at once, the losses are too much alike for that, and the step is complete.
    """
    last = len(errors) - 1
    if target <= 0.0:
        return last, 1.0
    level = next((j for j, value in enumerate(errors) if value <= target), last)
    if level in (0, last) or errors[level] < STEEP_FALL * target:
        return level, 1.0
    ratio = math.log(errors[level - 1] / errors[level])
    part = math.log(errors[level - 1] / target) / ratio if ratio != 0.0 else 1.0
    return level, min(max(part, 0.0), 1.0)


def interpolate_up(shares: Array, target: float) -> tuple[int, float]:
    """Return where growing shares reach the target: a level, and the part of the step to it.

    Between two levels, the share is linear in log threshold. If it grows beyond STEEP_RISE times the
    target at once, the step is not taken.
    """
    last = len(shares) - 1
    if target >= 1.0:
        return last, 1.0
    # Weights round, so that a share that is equal to the target may be above it.
    level = next((j for j, value in enumerate(shares) if value > target * (1 + 1e-9)), last)
    if target <= 0.0 or level == 0:
        return 0, 1.0
    if level == last or shares[level] > STEEP_RISE * target:
        return level - 1, 1.0
    return level, float((target - shares[level - 1]) / (shares[level] - shares[level - 1]))


def threshold_at(level: int, part: float) -> float:
    """Return the threshold between a level and the one before it."""
    thresholds = level_thresholds()
    if level == 0 or part == 1.0:
        return float(thresholds[level])
    return float(thresholds[level - 1] ** (1 - part) * thresholds[level] ** part)
