"""Step 5 of tiled attention: thresholds, shrinkage and exact heads, from what the probes found.

`bmfa.attention.kernels.reference.tiles` has the other steps. The kernels on a CPU and the torch form
measure the levels; the choice is made here. Triton makes it on the device,
once: it does not choose again where the probes predict a miss.
"""

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from bmfa.attention import tiling

Array = npt.NDArray[np.float64]
# Standard errors of the logarithm of an estimate in its upper bound. Squared errors have heavy tails, of
# which few probes see too little: a factor of 1.645 would hold in 95 % of normal samples, and this one
# does in 95 % of samples of 96 log-normal squared errors with sigma 1.2 (test_error_estimate.py), and in
# 99 % of calls on real q, k, v.
UPPER_FACTOR = 2.33
# Relative error that is the rounding of float32: of it no bound is asked, and no less is aimed at.
SMALLEST_ERROR = 1e-5


class Levels(NamedTuple):
    """What the probes of one image find at every level."""

    # (H, P, 4, levels): |output - exact|^2 without the correction; (exact - output) . correction with a
    # shrinkage of 1; |correction|^2; and the share of the tiles that are expanded.
    found: Array
    norm: Array  # (H, P) |exact|^2
    weight: Array  # (H, P) 0 in a group without a valid query


class Choice(NamedTuple):
    """What the probes of an image determine for all groups."""

    thresholds: Array  # (2,) of the groups at even and odd positions; 0 expands every tile
    shrinkage: Array  # (H, 2)
    exact: npt.NDArray[np.bool_]  # (H,) heads in which every tile is expanded


def level_thresholds() -> Array:
    """Thresholds of all levels; at the last one, 0, every tile is expanded."""
    thresholds = tiling.LEVEL_RATIO ** np.arange(tiling.NUM_LEVELS, dtype=np.float64)
    thresholds[-1] = 0.0
    return thresholds


def relative_error(probes: Array) -> tuple[float, float]:
    """Estimate a relative L2 error, and the standard error of the estimate, from probes.

    With squared errors e, squared norms x and weights w, the estimate is the root of the ratio
    r = sum w e / sum w x. Its standard error is that of the linearised ratio (the delta method), between
    groups: with u = sum w (e - r x) over the probes of each of n groups, it is
    sqrt(n / (n - 1) sum u^2) / sum w x, over 2 sqrt(r) for the root. The draws of a group are not
    independent, and have no variance of their own; that between groups includes it, and is too large
    rather than too small where every group has probes.

    Args:
        probes: (groups, n, 3) |output - exact|^2, |exact|^2 and weight of the n probes of each group.
            Groups with weights of 0 do not count.
    """
    error, norm, weight = probes[probes[:, 0, 2] > 0].transpose(2, 0, 1)
    weighted = float((weight * error).sum())
    if weighted == 0.0:
        return 0.0, 0.0
    total, count = float((weight * norm).sum()), len(error)
    ratio = weighted / total if total > 0 else math.inf
    estimate, uncertainty = math.sqrt(ratio), math.inf
    if count > 1 and math.isfinite(ratio):
        residual = (weight * (error - ratio * norm)).sum(1)
        variance = float(residual @ residual) * count / (count - 1) / total**2
        uncertainty = math.sqrt(variance) / (2 * estimate)
    return estimate, uncertainty


def upper_bound(estimate: float, uncertainty: float) -> float:
    """Return an upper bound on an error for a confidence of 95 %, from `relative_error`."""
    if estimate == 0.0 or not math.isfinite(uncertainty):
        return uncertainty
    # Errors have a long tail above, so that their logarithms are closer to a normal distribution.
    return estimate * math.exp(min(UPPER_FACTOR * uncertainty / estimate, 700.0))


def excess(estimate: float, uncertainty: float, target: float) -> float:
    """Return by what factor a measured error misses what a target asks for; at most 1 if it does not.

    The estimate must be at most the target, and its upper bound at most MOST_UPPER times the target.
    """
    upper = estimate if estimate < SMALLEST_ERROR else upper_bound(estimate, uncertainty)
    found = max(estimate, upper / tiling.MOST_UPPER)
    if target == 0.0:
        return 0.0 if found == 0.0 else math.inf
    return math.inf if math.isnan(found) else found / target


def choose(
    levels: Levels,
    probes_per_group: int,
    *,
    target: float | None,
    aim: float = 1.0,
    share: float | None,
    dense_threshold: float,
) -> Choice:
    """Choose thresholds, shrinkage and exact heads of an image.

    The probes of the groups at positions of one parity determine what the groups at the others use. The
    error that these others then have at their own probes is known, too, between two levels by
    interpolation. If it misses the target, thresholds are chosen again for a lower aim, before anything
    is attended.

    Args:
        levels: What the probes find; those of a group one after the other.
        probes_per_group: Number of probes of a group.
        target: Target for the error, or None.
        aim: Share of the target to aim at.
        share: Mean share of the tiles that a group expands, if there is no target.
        dense_threshold: Share of expanded tiles above which a head is computed exactly.
    """
    curves = _Curves.from_levels(levels, probes_per_group)
    if target is None:
        assert share is not None
        return curves.choose(None, share, dense_threshold)[0]
    aim *= target
    for _ in range(tiling.MOST_CHOICES):
        choice, squares = curves.choose(aim, None, dense_threshold)
        probes = np.stack((squares, levels.norm, levels.weight), -1)
        predicted = excess(*relative_error(probes.reshape(-1, probes_per_group, 3)), target)
        if predicted <= tiling.MOST_PREDICTED or aim < SMALLEST_ERROR:
            break
        aim *= tiling.CHOICE_AIM * tiling.MOST_PREDICTED / predicted
    return choice


class _Curves(NamedTuple):
    """Errors and shares at every level, as the probes of each half of the groups have them."""

    found: Array  # (H, P, 4, levels)
    odd: npt.NDArray[np.int64]  # (P,) parity of the position of the group of each probe
    errors: Array  # (2, levels) relative errors for the groups at even and odd positions
    shares: Array  # (H, 2, levels) of expanded tiles
    shrinkage: Array  # (H, 2, levels)

    @classmethod
    def from_levels(cls, levels: Levels, probes_per_group: int) -> "_Curves":
        heads, probes = levels.norm.shape
        odd = np.arange(probes) // probes_per_group % 2
        weight = levels.weight[:, None] * (odd != np.arange(2)[:, None])  # (H, 2, P)
        alone = ~weight.any((0, 2))  # there is a single group
        weight[:, alone] = levels.weight[:, None]
        # NaN and infinity expand everything.
        with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
            sums = (weight @ levels.found.reshape(heads, probes, -1)).reshape(heads, 2, 4, -1)
            total, dot, square, expanded = np.moveaxis(sums, 2, 0)  # (H, 2, levels)
            norm = (weight * levels.norm[:, None]).sum(2)
            known = square > tiling.SMALLEST_CORRECTION**2 * norm[..., None]
            factor = np.where(known, dot / np.where(known, square, 1.0), 0.0)
            factor = np.clip(factor, 0.0, tiling.LARGEST_SHRINKAGE)
            squares = (total - 2 * factor * dot + factor**2 * square).sum(0)
            norm = norm.sum(0)[:, None]
            errors = np.sqrt(np.maximum(squares, 0.0) / np.where(norm > 0, norm, 1.0))
        # A mean of ones may round up.
        shares = np.minimum(expanded / np.maximum(weight.sum(2), 1e-300)[..., None], 1.0)
        return cls(levels.found, odd, errors, shares, factor)

    def choose(
        self, aim: float | None, share: float | None, dense_threshold: float
    ) -> tuple[Choice, Array]:
        """Return a choice, and the squared errors (H, P) that the probes have with it.

        Args:
            aim: Error to aim at, or None.
            share: Mean share of the tiles that a group expands, if `aim` is None.
            dense_threshold: Share of expanded tiles above which a head is computed exactly.
        """
        heads, probes = self.found.shape[:2]
        thresholds, shrinkage = np.zeros(2), np.zeros((heads, 2))
        shares, squares = np.zeros((heads, 2)), np.zeros((heads, probes))
        for half in range(2):
            if aim is not None:
                level, part = interpolate_down(self.errors[half], aim)
            else:
                assert share is not None
                level, part = interpolate_up(self.shares[:, half].mean(0), share)
            # Level 0 expands tiles with a loss of 1, and a budget without room none.
            none = level == 0 and aim is None
            thresholds[half] = math.inf if none else threshold_at(level, part)
            shrinkage[:, half] = self.shrinkage[:, half, level]
            ends = slice(max(level - 1, 0), level + 1)  # one level or two
            between = self.shares[:, half, ends]
            shares[:, half] = between[:, 0] * (1 - part) + between[:, -1] * part
            of_half = self.odd == half
            error, dot, square = np.moveaxis(self.found[:, :, :3, ends][:, of_half], 2, 0)
            factor = shrinkage[:, half, None, None]
            errors = np.maximum(error - 2 * factor * dot + factor**2 * square, 0.0)
            above, below = errors[..., 0], errors[..., -1]
            # Interpolated geometrically, errors are too small, and arithmetically they are too large.
            geometric = above ** (1 - part) * below**part
            squares[:, of_half] = (geometric + (1 - part) * above + part * below) / 2
        exact = shares.mean(1) > dense_threshold
        squares[exact] = 0.0
        return Choice(thresholds, shrinkage, exact), squares


def interpolate_down(errors: Array, target: float) -> tuple[int, float]:
    """Return where falling errors reach the target: a level, and the part of the step to it.

    Between two levels, log error is linear in log threshold. If the error falls to less than STEEP_FALL
    of the target at once, the losses are too much alike for that, and the step is complete.
    """
    last = len(errors) - 1
    if target <= 0.0:
        return last, 1.0
    level = next((j for j, value in enumerate(errors) if value <= target), last)
    if level in (0, last) or errors[level] < tiling.STEEP_FALL * target:
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
    if level == last or shares[level] > tiling.STEEP_RISE * target:
        return level - 1, 1.0
    return level, float((target - shares[level - 1]) / (shares[level] - shares[level - 1]))


def threshold_at(level: int, part: float) -> float:
    """Return the threshold between a level and the one before it."""
    thresholds = level_thresholds()
    if level == 0 or part == 1.0:
        return float(thresholds[level])
    return float(thresholds[level - 1] ** (1 - part) * thresholds[level] ** part)
