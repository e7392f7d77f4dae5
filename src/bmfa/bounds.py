"""Bounds on the gap from block statistics, rounded outward so that they hold in floating point."""

import math

import torch
from torch import Tensor

from bmfa.checks import as_tensors, check_elements, check_tau
from bmfa.energy import binary_gap, weighted_gap

# Allowance for the rounding of statistics, in units in the last place: of the mean, relative to the
# largest of |low|, |high| and |mean|, and of the variance, relative to itself. A pairwise sum of
# scores errs by a few ulps of the mean |s|, which is at most |mean| + 2 |low| and |mean| + 2 |high|.
# With a large offset the allowance may exceed a small range; statistics of `energy.centered` scores,
# whose mean is 0, avoid this.
STATISTIC_ULPS = 8
# Rounding of results, in units in the last place: `binary_gap` and `weighted_gap` err by at most 8
# (tests/test_energy.py), and so does the gap they bound.
RESULT_ULPS = 16
# Child bounds, in units of tau, beyond which masses are summed relative to the largest, because they
# may overflow: e^32 times the 2^64 tokens of any block is within float32.
STEEP = 32.0


def hoeffding(low: float | Tensor, high: float | Tensor, tau: float = 1.0) -> Tensor:
    """Bound the gap by the range: G <= (high - low)^2 / (8 tau), rounded up.

    Args:
        low: Smallest score of the block, or a lower bound on it; a number or a tensor.
        high: Largest score, or an upper bound on it.
        tau: Temperature, above 0, in units of the scores.

    Returns:
        Upper bound of the broadcast shape, in the promoted dtype of the tensors, at least float32;
        float64 for numbers.

    Raises:
        TypeError: If an argument has the wrong type or dtype.
        ValueError: If low exceeds high, a value is not finite, the shapes do not
            broadcast, or tau is out of range.

    Example:
        >>> import torch, bmfa
        >>> from bmfa import bounds
        >>> scores = torch.tensor([0.0, 1.0, 3.0])
        >>> bounds.hoeffding(scores.amin(), scores.amax()), bmfa.gap(scores)
        (tensor(1.1250), tensor(0.7379))
    """
    low, high = as_tensors(low=low, high=high)
    check_elements("high - low", high - low, low <= high, "low no larger than high")
    spread = high - low
    return _outward(spread * (spread / (8 * check_tau(tau))), spread == 0)


def bennett(
    high: float | Tensor, mean: float | Tensor, variance: float | Tensor, tau: float = 1.0
) -> Tensor:
    """Bound the gap by maximum, mean and variance (Bennett), rounded up.

    G <= tau log[(b^2 e^(-v / (b tau)) + v e^(b / tau)) / (b^2 + v)] with b = high - mean, the largest
    gap of any block with this maximum, mean and variance v; 0 if the variance is 0. The bound
    increases with `high` and `variance`, so that upper bounds may replace them.

    Args:
        high: Largest score of the block; a number or a tensor.
        mean: Mean score. Its rounding is allowed for, see `STATISTIC_ULPS`.
        variance: Population variance of the scores, at least 0.
        tau: Temperature, above 0, in units of the scores.

    Returns:
        Upper bound of the broadcast shape, in the promoted dtype of the tensors, at least float32;
        float64 for numbers.

    Raises:
        TypeError: If an argument has the wrong type or dtype.
        ValueError: If the variance is negative, a value is not finite, the shapes do not
            broadcast, or tau is out of range.

    Example:
        >>> from bmfa import bounds
        >>> bounds.bennett(3.0, 1.0, 2.0)
        tensor(0.9963, dtype=torch.float64)
    """
    high, mean, variance = as_tensors(high=high, mean=mean, variance=variance)
    _check_variance(variance)
    # If the mean rounds to the maximum, b is at most half the spacing of floating-point numbers near
    # it, and v is at least spacing * b - b^2 >= b^2: sqrt(v) bounds b.
    rounded = torch.where(high > mean, 0.0, variance.sqrt())
    top = (high - mean).clamp(min=0).maximum(rounded) + _allowance(high, mean)
    bottom = _ratio(variance * (1 + _ulps(variance, STATISTIC_ULPS)), top)
    return _outward(_two_point_gap(top, bottom, tau), variance == 0)


def lower(
    low: float | Tensor, mean: float | Tensor, variance: float | Tensor, tau: float = 1.0
) -> Tensor:
    """Bound the gap from below by minimum, mean and variance, rounded down.

    G >= tau log[(a^2 e^(v / (|a| tau)) + v e^(a / tau)) / (a^2 + v)] with a = low - mean, the smallest
    gap of any block with this minimum, mean and variance v. The bound increases with `low` and
    `variance`, so that lower bounds may replace them.

    Args:
        low: Smallest score of the block; a number or a tensor.
        mean: Mean score. Its rounding is allowed for, see `STATISTIC_ULPS`.
        variance: Population variance of the scores, at least 0.
        tau: Temperature, above 0, in units of the scores.

    Returns:
        Lower bound of the broadcast shape, at least 0, in the promoted dtype of the tensors, at
        least float32; float64 for numbers.

    Raises:
        TypeError: If an argument has the wrong type or dtype.
        ValueError: If the variance is negative, a value is not finite, the shapes do not
            broadcast, or tau is out of range.

    Example:
        >>> from bmfa import bounds
        >>> bounds.lower(0.0, 1.0, 2.0)
        tensor(0.9963, dtype=torch.float64)
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
    """Bound the gap of a block by bounds on the gaps of its children, rounded up.

    G <= Gamma + tau log sum_C pi_C e^(U_C / tau) over the last dimension, where pi_C is proportional
    to w_C e^(M_C / tau) and U_C is any upper bound on the gap of child C.

    Args:
        child_means: (..., k) M_C, taken as exact at any offset. If they are rounded by up to delta,
            add `score_margin(delta)` to the result.
        child_weights: (..., k) weights, at least 0 and not all 0, such as token counts. A child of
            weight 0 has no effect.
        child_bounds: (..., k) U_C, at least 0.
        tau: Temperature, above 0, in units of the scores.

    Returns:
        (...) upper bound in the promoted dtype of the tensors, at least float32.

    Raises:
        TypeError: If an argument has the wrong type or dtype.
        ValueError: If a weight or bound is negative, all weights of a row are 0,
            a value is not finite, the shapes do not broadcast, or tau is out of range.

    Example:
        >>> import torch
        >>> from bmfa import bounds
        >>> bounds.recursive(torch.tensor([0.0, 2.0]), torch.ones(2), torch.tensor([0.1, 0.2]))
        tensor(0.6224)
    """
    means, weights, bounds = as_tensors(
        child_means=child_means, child_weights=child_weights, child_bounds=child_bounds
    )
    check_elements("child_bounds", bounds, bounds >= 0, "bounds of at least 0")
    tau = check_tau(tau)
    # Relative to the largest mean, means are exact to their own rounding, whatever their offset.
    largest = torch.where(weights > 0, means, -torch.inf).amax(-1, keepdim=True)
    means = torch.where(weights > 0, means - largest, 0.0)
    # A slightly smaller tau enlarges the gap by at least the rounding of M_C / tau.
    gamma = weighted_gap(means, weights, tau=tau * (1 - _ulps(means, RESULT_ULPS)))
    weights = weights / weights.sum(-1, keepdim=True)
    bounds = torch.where(weights > 0, bounds, 0.0)
    depth = means / tau
    mass = weights * torch.exp(depth)
    # A mass errs by ulps of its depth, and every share by those of the deepest child with a mass.
    deepest = depth.clamp(min=-1000.0).amin(-1, keepdim=True)
    rounding = 1 - _ulps(means, STATISTIC_ULPS) * deepest
    residual = certificate(rounding * mass / mass.sum(-1, keepdim=True), bounds, tau)
    steep = bounds.amax(-1) > STEEP * tau
    smooth = _outward(gamma, gamma == 0) + residual
    return torch.where(steep, _steep_recursive(means, weights, bounds, tau), smooth)


def score_margin(delta: float | Tensor) -> Tensor:
    """Bound the change of the gap if every score changes by at most delta: 2 delta.

    Args:
        delta: Largest change of a score, at least 0; a number or a tensor.

    Returns:
        Upper bound on |G(s) - G(s')| of the shape of `delta`, in units of the scores.

    Raises:
        TypeError: If `delta` has the wrong type or dtype.
        ValueError: If `delta` is negative or not finite.

    Example:
        >>> from bmfa import bounds
        >>> bounds.score_margin(0.25)
        tensor(0.5000, dtype=torch.float64)
    """
    (delta,) = as_tensors(delta=delta)
    check_elements("delta", delta, delta >= 0, "a distance of at least 0")
    return 2 * delta


def output_bound(error: float | Tensor, value_norm: float | Tensor, tau: float = 1.0) -> Tensor:
    """Bound the change of an attention output by its free-energy error, rounded up.

    |o - o~| <= V_max sqrt(2 E / tau), by Pinsker's inequality.

    Args:
        error: Free-energy error E, at least 0, in units of the scores; a number or a tensor.
        value_norm: Largest L2 norm V_max of a value vector, at least 0.
        tau: Temperature, above 0, in units of the scores.

    Returns:
        Upper bound on the L2 distance, of the broadcast shape, in units of `value_norm`.

    Raises:
        TypeError: If an argument has the wrong type or dtype.
        ValueError: If `error` or `value_norm` is negative, a value is not finite, the shapes do not
            broadcast, or tau is out of range.

    Example:
        >>> from bmfa import bounds
        >>> bounds.output_bound(0.02, 3.0)
        tensor(0.6000, dtype=torch.float64)
    """
    error, value_norm = as_tensors(error=error, value_norm=value_norm)
    check_elements("error", error, error >= 0, "a free-energy error of at least 0")
    check_elements("value_norm", value_norm, value_norm >= 0, "a norm of at least 0")
    bound = value_norm * error.sqrt() * math.sqrt(2 / check_tau(tau))
    return _outward(bound, (error == 0) | (value_norm == 0))


def certificate(leaf_mass: Tensor, leaf_bound: Tensor, tau: float = 1.0) -> Tensor:
    """Bound the free-energy error of a tree by bounds on the gaps of its leaves, rounded up.

    E <= tau log(1 + sum_L pi~_L (e^(U_L / tau) - 1)) over the last dimension.

    Args:
        leaf_mass: (..., L) share pi~_L of each leaf in the coarse partition function Z~, at least 0.
            A share of 0 may have underflowed, and counts as the smallest normal number if its bound
            is above 0.
        leaf_bound: (..., L) upper bound U_L on the gap of each leaf, at least 0; 0 for a leaf that is
            expanded, and for padding.
        tau: Temperature, above 0, in units of the scores.

    Returns:
        (...) upper bound on E, in units of the scores, in the promoted dtype of the tensors, at least
        float32.

    Raises:
        TypeError: If an argument has the wrong type or dtype.
        ValueError: If a mass or bound is negative, a value is not finite, the shapes do not
            broadcast, or tau is out of range.

    Example:
        >>> import torch
        >>> from bmfa import bounds
        >>> bounds.certificate(torch.tensor([0.5, 0.5]), torch.tensor([0.1, 0.0]))
        tensor(0.0512)
    """
    mass, bound = as_tensors(leaf_mass=leaf_mass, leaf_bound=leaf_bound)
    check_elements("leaf_mass", mass, mass >= 0, "masses of at least 0")
    check_elements("leaf_bound", bound, bound >= 0, "bounds of at least 0")
    tau = check_tau(tau)
    margin = 1 + _ulps(mass, STATISTIC_ULPS)
    mass = (margin * mass).clamp(min=torch.finfo(mass.dtype).tiny)
    ratio = margin * (bound / tau)
    # e^y - 1 = h (h + 2) with h = e^(y / 2) - 1. A tiny mass is multiplied by the first factor before
    # the second, so that the product overflows only if the logarithm of the sum is that of one term.
    root = torch.expm1(ratio / 2)
    excess = (mass * root * (root + 2)).sum(-1)
    dominant = torch.logsumexp(mass.log() + ratio, -1)
    logarithm = torch.where(torch.isinf(excess), dominant, torch.log1p(excess))
    return _outward(tau * logarithm, (bound == 0).all(-1))


def _two_point_gap(top: Tensor, bottom: Tensor, tau: float) -> Tensor:
    """Gap of the distribution of mean 0 on {top, -bottom}, the rarer value as binary minority."""
    spread = top + bottom
    share = _ratio(torch.minimum(top, bottom), spread)
    return binary_gap(share, torch.where(bottom <= top, spread, -spread), tau)


def _steep_recursive(means: Tensor, weights: Tensor, bounds: Tensor, tau: float) -> Tensor:
    """tau log sum_C w_C e^((M_C + U_C) / tau) - sum_C w_C M_C, rounded up.

    Means are relative to the largest. M_C + U_C is rounded up for every child; the bound increases
    with it.
    """
    margin = _ulps(means, RESULT_ULPS)
    raised = (1 + margin) * bounds + (1 - margin) * means
    raised = torch.where(weights > 0, raised, -torch.inf)
    top = raised.amax(-1, keepdim=True)  # at least 0
    height = (weights * (top - means)).sum(-1)
    below = (raised - top) / tau
    lift = (weights * torch.expm1(below)).sum(-1)
    mass = (weights * torch.exp(below)).sum(-1)
    # log(mass) = log(1 + lift), from the form that keeps more digits.
    loss = tau * torch.where(lift > -0.5, torch.log1p(lift), mass.log())
    return (1 + margin) * height + (1 - margin) * loss


def _ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Quotient; 0 if both are 0, and a quarter of the largest number if it overflows."""
    quotient = numerator / torch.where(denominator > 0, denominator, 1.0)
    return quotient.clamp(max=torch.finfo(quotient.dtype).max / 4)


def _ulps(like: Tensor, count: int) -> float:
    return count * torch.finfo(like.dtype).eps


def _allowance(*statistics: Tensor) -> Tensor:
    return _ulps(statistics[0], STATISTIC_ULPS) * torch.stack(statistics).abs().amax(0)


def _outward(bound: Tensor, zero: Tensor) -> Tensor:
    """Round up by RESULT_ULPS, and by the smallest normal number in case of underflow."""
    raised = bound * (1 + _ulps(bound, RESULT_ULPS)) + torch.finfo(bound.dtype).tiny
    return torch.where(zero, 0.0, raised)


def _check_variance(variance: Tensor) -> None:
    check_elements("variance", variance, variance >= 0, "a variance of at least 0")
