"""Energies and bounds of one block in float64, accurate down to 0."""

import math
from collections.abc import Sequence
from operator import mul

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

LARGEST_EXPONENT = 700.0  # exp overflows in float64 beyond 709


def _excess(x: float) -> float:
    """exp(x) - 1 - x >= 0, by its series where the difference would cancel."""
    if -0.001 < x < 0.001:
        return x * x * (0.5 + x * (1 / 6 + x * (1 / 24 + x * (1 / 120 + x / 720))))
    return math.expm1(x) - x


def log_mean_exp(weights: Sequence[float], deviations: Sequence[float]) -> float:
    """log sum_c w_c exp(x_c) = log(1 + sum_c w_c (exp(x_c) - 1 - x_c)), where sum_c w_c x_c = 0.

    The second form adds terms of one sign, so its relative error stays at rounding down to 0.
    """
    peak = max(deviations)
    if peak < LARGEST_EXPONENT:
        return math.log1p(math.fsum(map(mul, weights, map(_excess, deviations))))
    return peak + math.log(math.fsum(map(mul, weights, [math.exp(x - peak) for x in deviations])))


def log_sum_exp(logits: npt.ArrayLike) -> float:
    """log sum_i exp(a_i)."""
    values = np.asarray(logits, np.float64)
    peak = values.max()
    return float(peak + np.log(np.exp(values - peak).sum()))


def centred(scores: npt.ArrayLike, tau: float) -> Array:
    """(s_i - M) / tau; taking the maximum off first makes a constant block exactly 0."""
    values = np.asarray(scores, np.float64).ravel()
    below = (values - values.max()) / tau
    return np.asarray(below - math.fsum(below) / below.size)


def gap(scores: npt.ArrayLike, tau: float = 1.0) -> float:
    """G = F - M = tau log(1/n sum_i exp((s_i - M) / tau)), exactly 0 for a constant block."""
    deviations = centred(scores, tau).tolist()
    return tau * log_mean_exp([1 / len(deviations)] * len(deviations), deviations)


def proxy(means: npt.ArrayLike, counts: npt.ArrayLike, tau: float = 1.0) -> float:
    """Phi = tau log sum_C (n_C / n_B) exp(M(C) / tau)."""
    values, weights = np.asarray(means, np.float64), np.asarray(counts, np.float64)
    peak = float(values.max())
    logits = (values - peak) / tau + np.log(weights)
    return peak + tau * (log_sum_exp(logits) - math.log(weights.sum()))


def free_energy(scores: npt.ArrayLike, tau: float = 1.0) -> float:
    """F = tau log(1/n sum_i exp(s_i / tau)), the proxy of single tokens."""
    return proxy(np.ravel(scores), np.ones(np.size(scores)), tau)


def refinement_score(means: npt.ArrayLike, counts: npt.ArrayLike, tau: float = 1.0) -> float:
    """Gamma = Phi - M(B), accurate near 0, from the means and counts of the parts of B."""
    weights = np.asarray(counts, np.float64) / np.sum(counts)
    below = (np.asarray(means, np.float64) - np.max(means)) / tau
    deviations = below - math.fsum(weights * below)
    return tau * log_mean_exp(weights.tolist(), deviations.tolist())


def _two_point(edge: float, variance: float) -> float:
    """log E exp(X) for X of mean 0 and variance v on the two points {e, -v/e}.

    P(X = e) = v / (e^2 + v), so this is log[(e^2 exp(-v/e) + v exp(e)) / (e^2 + v)].
    """
    if edge == 0.0:
        return 0.0
    ratio = variance / edge / edge
    return log_mean_exp([1 / (1 + ratio), ratio / (1 + ratio)], [-edge * ratio, edge])


def upper_bound(scores: npt.ArrayLike, tau: float = 1.0) -> float:
    """Bennett's two-point bound G <= U, from the maximum and the population variance."""
    deviations = centred(scores, tau)
    return tau * _two_point(float(deviations.max()), float(deviations.var()))


def lower_bound(scores: npt.ArrayLike, tau: float = 1.0) -> float:
    """The two-point bound from below, from the minimum and the population variance."""
    deviations = centred(scores, tau)
    return tau * _two_point(float(deviations.min()), float(deviations.var()))
