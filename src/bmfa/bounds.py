"""Bounds on the gap from block statistics, rounded outward so that they hold in floating point."""

import math

import torch
from torch import Tensor

from bmfa.checks import as_tensors, check_elements, check_tau
from bmfa.energy import binary_gap, weighted_gap

# Statistics are rounded themselves. The bounds allow an error in the mean of this many units in the
# last place of the largest of low, high and mean (the sum of scores errs by ulps of the mean |s|, at
# most |mean| + 2 |low| and |mean| + 2 |high|), and as many relative to the variance. A large offset
# makes that allowance wide against a small range: statistics of energy.centered, mean = 0, do not.
STATISTIC_ULPS = 8
# binary_gap and weighted_gap err by a few units in the last place, and so does the gap they bound.
RESULT_ULPS = 16
# Child bounds above this many tau are summed relative to the largest: their masses may underflow.
STEEP = 32.0


def hoeffding(low: float | Tensor, high: float | Tensor, tau: float = 1.0) -> Tensor:
    """G <= (high - low)^2 / (8 tau), rounded up."""
    low, high = as_tensors(low=low, high=high)
    _check_order(low, high)
    spread = high - low
    return _outward(spread * (spread / (8 * check_tau(tau))), spread == 0)


def two_point(
    low: float | Tensor, high: float | Tensor, mean: float | Tensor, tau: float = 1.0
) -> Tensor:
    """G <= tau log[(b e^(a / tau) - a e^(b / tau)) / (b - a)], a = low - mean, b = high - mean.

    The largest gap of any block with these extremes and this mean, rounded up; 0 if low = high.
    """
    low, high, mean = as_tensors(low=low, high=high, mean=mean)
    _check_order(low, high)
    allowance = _allowance(low, high, mean)
    top = (high - mean).clamp(min=0) + allowance
    bottom = (mean - low).clamp(min=0) + allowance
    return _outward(_two_point_gap(top, bottom, tau), low == high)


def bennett(
    high: float | Tensor, mean: float | Tensor, variance: float | Tensor, tau: float = 1.0
) -> Tensor:
    """G <= tau log[(b^2 e^(-v / (b tau)) + v e^(b / tau)) / (b^2 + v)], b = high - mean.

    The largest gap of any block with this maximum, mean and variance v, rounded up; increasing in
    high and in variance, so upper bounds may stand for them; 0 if the variance is 0.
    """
    high, mean, variance = as_tensors(high=high, mean=mean, variance=variance)
    _check_variance(variance)
    # Where the mean rounds to the maximum, b is at most half a step of the grid of numbers on which
    # the scores lie, and v at least a step times b less b^2, that is b^2: sqrt(v) bounds b.
    rounded = torch.where(high > mean, 0.0, variance.sqrt())
    top = (high - mean).clamp(min=0).maximum(rounded) + _allowance(high, mean)
    bottom = _ratio(variance * (1 + _ulps(variance, STATISTIC_ULPS)), top)
    return _outward(_two_point_gap(top, bottom, tau), variance == 0)


def lower(
    low: float | Tensor, mean: float | Tensor, variance: float | Tensor, tau: float = 1.0
) -> Tensor:
    """G >= tau log[(a^2 e^(v / (|a| tau)) + v e^(a / tau)) / (a^2 + v)], a = low - mean.

    The smallest gap of any block with this minimum, mean and variance v, rounded down; increasing
    in low and in variance, so lower bounds may stand for them.
    """
    low, mean, variance = as_tensors(low=low, mean=mean, variance=variance)
    _check_variance(variance)
    allowance = _allowance(low, mean)
    bottom = (mean - low).clamp(min=0) + allowance
    certain = variance * (1 - _ulps(variance, STATISTIC_ULPS)) - allowance**2
    top = _ratio(certain.clamp(min=0), bottom)
    return _two_point_gap(top, bottom, tau) * (1 - _ulps(top, RESULT_ULPS))


def recursive(
    child_means: Tensor, child_weights: Tensor, child_bounds: Tensor, tau: float = 1.0
) -> Tensor:
    """G <= Gamma + tau log sum_C pi_C e^(U_C / tau) over the last dimension, rounded up.

    pi_C is proportional to w_C e^(M_C / tau), and U_C any bound on the gap of child C.

    Args:
        child_means: (..., k) M_C. They count as exact, at any offset: where they are rounded by up
            to delta, add score_margin(delta).
        child_weights: (..., k) at least 0, not all 0: counts will do. A child of weight 0 has no
            effect.
        child_bounds: (..., k) U_C, at least 0.
        tau: The temperature, above 0.

    Returns:
        (...) the bound, in the dtype of the tensors, float32 at least.
    """
    means, weights, bounds = as_tensors(
        child_means=child_means, child_weights=child_weights, child_bounds=child_bounds
    )
    check_elements("child_bounds", bounds, bounds >= 0, "bounds of at least 0")
    tau = check_tau(tau)
    # Relative to the largest, means are exact to rounding of themselves whatever their offset.
    largest = torch.where(weights > 0, means, -torch.inf).amax(-1, keepdim=True)
    means = torch.where(weights > 0, means - largest, 0.0)
    # A little below tau the gap is a little larger, by what rounding M_C / tau may have taken.
    gamma = weighted_gap(means, weights, tau=tau * (1 - _ulps(means, RESULT_ULPS)))
    weights = weights / weights.sum(-1, keepdim=True)
    bounds = torch.where(weights > 0, bounds, 0.0)
    depth = means / tau
    mass = weights * torch.exp(depth)
    rounding = 1 - _ulps(means, STATISTIC_ULPS) * depth.clamp(min=-1000.0)
    residual = certificate(rounding * mass / mass.sum(-1, keepdim=True), bounds, tau)
    steep = bounds.amax(-1) > STEEP * tau
    smooth = _outward(gamma, gamma == 0) + residual
    return torch.where(steep, _steep_recursive(means, weights, bounds, tau), smooth)


def score_margin(delta: float | Tensor) -> Tensor:
    """|G(s) - G(s')| <= 2 delta where no score differs by more than delta."""
    (delta,) = as_tensors(delta=delta)
    check_elements("delta", delta, delta >= 0, "a distance of at least 0")
    return 2 * delta


def output_bound(error: float | Tensor, value_norm: float | Tensor, tau: float = 1.0) -> Tensor:
    """|o - o~| <= V_max sqrt(2 E / tau), rounded up."""
    error, value_norm = as_tensors(error=error, value_norm=value_norm)
    check_elements("error", error, error >= 0, "a free-energy error of at least 0")
    check_elements("value_norm", value_norm, value_norm >= 0, "a norm of at least 0")
    bound = value_norm * error.sqrt() * math.sqrt(2 / check_tau(tau))
    return _outward(bound, (error == 0) | (value_norm == 0))


def certificate(leaf_mass: Tensor, leaf_bound: Tensor, tau: float = 1.0) -> Tensor:
    """E <= tau log(1 + sum_L pi~_L (e^(U_L / tau) - 1)) over the last dimension, rounded up.

    pi~ are masses relative to the coarse Z~ and U bounds on the gaps, of the unexpanded leaves: a
    leaf that is exact, or none, has bound 0. A mass of 0 may have underflowed, so under a bound
    above 0 it counts as the smallest normal number.
    """
    mass, bound = as_tensors(leaf_mass=leaf_mass, leaf_bound=leaf_bound)
    check_elements("leaf_mass", mass, mass >= 0, "masses of at least 0")
    check_elements("leaf_bound", bound, bound >= 0, "bounds of at least 0")
    tau = check_tau(tau)
    margin = 1 + _ulps(mass, STATISTIC_ULPS)
    mass = (margin * mass).clamp(min=torch.finfo(mass.dtype).tiny)
    ratio = margin * (bound / tau)
    # e^y - 1 = h (h + 2) with h = e^(y / 2) - 1: a tiny mass meets the first factor before the
    # second, so that the product overflows only where its logarithm is all that matters.
    root = torch.expm1(ratio / 2)
    excess = (mass * root * (root + 2)).sum(-1)
    dominant = torch.logsumexp(mass.log() + ratio, -1)
    logarithm = torch.where(torch.isinf(excess), dominant, torch.log1p(excess))
    return _outward(tau * logarithm, (bound == 0).all(-1))


def _two_point_gap(top: Tensor, bottom: Tensor, tau: float) -> Tensor:
    """Gap of the law of mean 0 on {top, -bottom}, the rarer of the two as the binary minority."""
    spread = top + bottom
    share = _ratio(torch.minimum(top, bottom), spread)
    return binary_gap(share, torch.where(bottom <= top, spread, -spread), tau)


def _steep_recursive(means: Tensor, weights: Tensor, bounds: Tensor, tau: float) -> Tensor:
    """tau log sum_C w_C e^((M_C + U_C) / tau) - sum_C w_C M_C, rounded up.

    Means are relative to the largest. M_C + U_C is rounded up for every child, and the bound increases
    in it.
    """
    margin = _ulps(means, RESULT_ULPS)
    raised = (1 + margin) * bounds + (1 - margin) * means
    raised = torch.where(weights > 0, raised, -torch.inf)
    top = raised.amax(-1, keepdim=True)  # at least 0
    height = (weights * (top - means)).sum(-1)
    below = (raised - top) / tau
    lift = (weights * torch.expm1(below)).sum(-1)
    mass = (weights * torch.exp(below)).sum(-1)
    # The logarithm of 1 + lift = mass, from whichever keeps its digits.
    loss = tau * torch.where(lift > -0.5, torch.log1p(lift), mass.log())
    return (1 + margin) * height + (1 - margin) * loss


def _ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """The quotient, 0 where both vanish, and finite (with room for a sum) where it overflows."""
    quotient = numerator / torch.where(denominator > 0, denominator, 1.0)
    return quotient.clamp(max=torch.finfo(quotient.dtype).max / 4)


def _ulps(like: Tensor, count: int) -> float:
    return count * torch.finfo(like.dtype).eps


def _allowance(*statistics: Tensor) -> Tensor:
    return _ulps(statistics[0], STATISTIC_ULPS) * torch.stack(statistics).abs().amax(0)


def _outward(bound: Tensor, zero: Tensor) -> Tensor:
    """The bound and RESULT_ULPS more; the smallest normal number more, as it may underflow."""
    raised = bound * (1 + _ulps(bound, RESULT_ULPS)) + torch.finfo(bound.dtype).tiny
    return torch.where(zero, 0.0, raised)


def _check_order(low: Tensor, high: Tensor) -> None:
    check_elements("high - low", high - low, low <= high, "low no larger than high")


def _check_variance(variance: Tensor) -> None:
    check_elements("variance", variance, variance >= 0, "a variance of at least 0")
