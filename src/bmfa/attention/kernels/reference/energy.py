"""Energies and bounds of one block in float64, with relative errors of a few roundings down to 0.

A block has n scores s_i with mean M, at temperature tau.
"""

import math
from collections.abc import Sequence
from operator import mul

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

LARGEST_EXPONENT = 700.0  # exp overflows in float64 beyond 709.78
# Below this, the terms of the series that are left out, x^7 / 5040 and so on, are less than a rounding.
SERIES_RADIUS = 0.001


def _exp_minus_linear(x: float) -> float:
    """Return exp(x) - 1 - x >= 0, by its series where the difference would cancel."""
    if -SERIES_RADIUS < x < SERIES_RADIUS:
        return x * x * (0.5 + x * (1 / 6 + x * (1 / 24 + x * (1 / 120 + x / 720))))
    return math.expm1(x) - x


def log_mean_exp(weights: Sequence[float], deviations: Sequence[float]) -> float:
    """Return log sum_c w_c exp(x_c), where sum_c w_c = 1 and sum_c w_c x_c = 0.

    It equals log(1 + sum_c w_c (exp(x_c) - 1 - x_c)), whose terms have one sign, so that the relative
    error is a few roundings however small the result.
    """
    largest = max(deviations)
    if largest < LARGEST_EXPONENT:
        return math.log1p(math.fsum(map(mul, weights, map(_exp_minus_linear, deviations))))
    shifted = [math.exp(x - largest) for x in deviations]
    return largest + math.log(math.fsum(map(mul, weights, shifted)))


def log_sum_exp(logits: npt.ArrayLike) -> float:
    """Return log sum_i exp(a_i)."""
    values = np.asarray(logits, np.float64)
    largest = values.max()
    return float(largest + np.log(np.exp(values - largest).sum()))


def centered(scores: npt.ArrayLike, tau: float) -> Array:
    """Return (s_i - M) / tau. The maximum is subtracted first, so a constant block is exactly 0."""
    values = np.asarray(scores, np.float64).ravel()
    shifted = (values - values.max()) / tau
    return np.asarray(shifted - math.fsum(shifted) / shifted.size)


def gap(scores: npt.ArrayLike, tau: float = 1.0) -> float:
    """Return G = F - M = tau log(1/n sum_i exp((s_i - M) / tau)), exactly 0 for a constant block."""
    deviations = centered(scores, tau).tolist()
    return tau * log_mean_exp([1 / len(deviations)] * len(deviations), deviations)


def proxy(means: npt.ArrayLike, counts: npt.ArrayLike, tau: float = 1.0) -> float:
    """Return Phi = tau log sum_C (n_C / n) exp(M_C / tau).

    Args:
        means: Mean score M_C of each part C of the block.
        counts: Number of tokens n_C of each part.
        tau: Temperature.
    """
    values, weights = np.asarray(means, np.float64), np.asarray(counts, np.float64)
    largest = float(values.max())
    logits = (values - largest) / tau + np.log(weights)
    return largest + tau * (log_sum_exp(logits) - math.log(weights.sum()))


def free_energy(scores: npt.ArrayLike, tau: float = 1.0) -> float:
    """Return F = tau log(1/n sum_i exp(s_i / tau)), the proxy whose parts are single tokens."""
    return proxy(np.ravel(scores), np.ones(np.size(scores)), tau)


def refinement_score(means: npt.ArrayLike, counts: npt.ArrayLike, tau: float = 1.0) -> float:
    """Return Gamma = Phi - M, from the means and counts of the parts of a block; see `proxy`."""
    weights = np.asarray(counts, np.float64) / np.sum(counts)
    shifted = (np.asarray(means, np.float64) - np.max(means)) / tau
    deviations = shifted - math.fsum(weights * shifted)
    return tau * log_mean_exp(weights.tolist(), deviations.tolist())


def _two_point(edge: float, variance: float) -> float:
    """Return log E exp(X) for X of mean 0 and variance v on the two points {e, -v/e}.

    P(X = e) = v / (e^2 + v), so this is log[(e^2 exp(-v/e) + v exp(e)) / (e^2 + v)].
    """
    if edge == 0.0:
        return 0.0
    ratio = variance / edge / edge
    return log_mean_exp([1 / (1 + ratio), ratio / (1 + ratio)], [-edge * ratio, edge])


def upper_bound(scores: npt.ArrayLike, tau: float = 1.0) -> float:
    """Return Bennett's two-point bound U >= G, from the maximum and the population variance."""
    deviations = centered(scores, tau)
    return tau * _two_point(float(deviations.max()), float(deviations.var()))


def lower_bound(scores: npt.ArrayLike, tau: float = 1.0) -> float:
    """Return the two-point bound L <= G, from the minimum and the population variance."""
    deviations = centered(scores, tau)
    return tau * _two_point(float(deviations.min()), float(deviations.var()))
