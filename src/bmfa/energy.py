"""Free energy, mean, gap and their hierarchical lower bounds: pure functions of scores."""

import math
from typing import Any

import torch
from torch import Tensor

from bmfa.checks import (
    as_tensors,
    check_elements,
    check_finite,
    check_integer,
    check_scores,
    check_tau,
    check_valid,
)

# Last order of the Taylor series of e^x - 1 - x on [-1, 1]: what it leaves out, 2 / 19! and 2 / 12!
# of the result, is below the unit roundoff.
SERIES_ORDER = {torch.float64: 18, torch.float32: 11}
# Height of the top over the mean, in units of tau, from which exponentials are taken relative to
# the top: below the overflow of float32 (88), and above log n of any block: the gap is not small.
STEEP = 32.0
# Advantage, in units of tau, from which log(1 + u) is at least 1.6 times alpha x: little cancels.
WIDE = 4.0


def log_partition(scores: Tensor, *, valid: Tensor | None = None, tau: float = 1.0) -> Tensor:
    """log Z = log sum_i exp(s_i / tau), without overflow."""
    values, counts = _tokens(scores, valid)
    tau = check_tau(tau)
    return _free_energy(values, counts, tau) / tau + counts.sum(-1).log()


def partition(scores: Tensor, *, valid: Tensor | None = None, tau: float = 1.0) -> Tensor:
    """Z = sum_i exp(s_i / tau); infinite where it overflows."""
    values, counts = _tokens(scores, valid)
    values = torch.where(counts > 0, values, 0.0)
    return torch.where(counts > 0, torch.exp(values / check_tau(tau)), 0.0).sum(-1)


def free_energy(scores: Tensor, *, valid: Tensor | None = None, tau: float = 1.0) -> Tensor:
    """F = tau log(Z / n)."""
    return _free_energy(*_tokens(scores, valid), check_tau(tau))


def mean(scores: Tensor, *, valid: Tensor | None = None) -> Tensor:
    """M = (1 / n) sum_i s_i; the common score itself where all are equal."""
    return _center(*_tokens(scores, valid))[1]


def centered(scores: Tensor, *, valid: Tensor | None = None) -> Tensor:
    """s_i - M to within rounding of itself, whatever the offset; 0 on tokens that are not valid."""
    return _center(*_tokens(scores, valid))[0]


def gap(scores: Tensor, *, valid: Tensor | None = None, tau: float = 1.0) -> Tensor:
    """G = F - M >= 0, relatively accurate however small; exactly 0 where all scores are equal."""
    return _gap(*_tokens(scores, valid), check_tau(tau))


def weighted_gap(values: Tensor, weights: Tensor, *, tau: float = 1.0) -> Tensor:
    """tau log sum_C w_C exp(M_C / tau) - sum_C w_C M_C over the last dimension, w = weights / sum.

    Gamma, given the means and counts of children. A value of weight 0 has no effect.
    """
    values, weights = as_tensors(values=values, weights=weights)
    check_elements("weights", weights, weights >= 0, "weights of at least 0")
    total = weights.sum(-1)
    check_elements("weights", total, total > 0, "weights with a positive sum over the last dim")
    return _gap(values, weights, check_tau(tau))


def gibbs(scores: Tensor, *, valid: Tensor | None = None, tau: float = 1.0) -> Tensor:
    """p_i = exp(s_i / tau) / Z, of the shape of the scores; 0 on tokens that are not valid."""
    values, counts = _tokens(scores, valid)
    depth, _ = _depth(values, counts)
    mass = counts * torch.exp(depth / check_tau(tau))
    return mass / mass.sum(-1, keepdim=True)


def proxy(
    scores: Tensor, partition: Tensor, *, valid: Tensor | None = None, tau: float = 1.0
) -> Tensor:
    """Phi = tau log sum_C (n_C / n) exp(M(C) / tau) over the children named by integer labels.

    `partition` holds a label >= 0 for each token, (n,) or broadcasting to the scores.
    """
    values, counts = _tokens(scores, valid)
    deviation, center = _center(values, counts)
    return center + _free_energy(*_children(deviation, counts, partition), check_tau(tau))


def refinement_score(
    scores: Tensor, partition: Tensor, *, valid: Tensor | None = None, tau: float = 1.0
) -> Tensor:
    """Gamma = Phi - M >= 0, as accurate as `gap`; exactly 0 where all scores are equal."""
    values, counts = _tokens(scores, valid)
    deviation, _ = _center(values, counts)
    return _gap(*_children(deviation, counts, partition), check_tau(tau))


def cumulants(scores: Tensor, order: int = 4, *, valid: Tensor | None = None) -> Tensor:
    """(..., order): kappa_1 = M, kappa_2 = m_2, kappa_3 = m_3, kappa_4 = m_4 - 3 m_2^2.

    m_r = (1 / n) sum_i (s_i - M)^r is the central moment of the block itself, without Bessel's
    correction.
    """
    order = check_integer("order", order, low=1, high=4)
    values, counts = _tokens(scores, valid)
    deviation, center = _center(values, counts)
    second, third, fourth = (_average(deviation**power, counts) for power in (2, 3, 4))
    return torch.stack([center, second, third, fourth - 3 * second**2][:order], -1)


def cumulant_gap(
    scores: Tensor, order: int = 4, *, valid: Tensor | None = None, tau: float = 1.0
) -> Tensor:
    """kappa_2 / (2 tau) + kappa_3 / (6 tau^2) + kappa_4 / (24 tau^3), cut after kappa_order."""
    order, tau = check_integer("order", order, low=2, high=4), check_tau(tau)
    kappa = cumulants(scores, order, valid=valid)[..., 1:]
    factors = [tau / (tau**power * math.factorial(power)) for power in range(2, order + 1)]
    return (kappa * kappa.new_tensor(factors)).sum(-1)


def binary_mean(alpha: float | Tensor, delta: float | Tensor) -> Tensor:
    """M = alpha delta, for a share alpha of scores delta among scores 0."""
    alpha, delta = _binary(alpha, delta)
    return alpha * delta


def binary_gap(alpha: float | Tensor, delta: float | Tensor, tau: float = 1.0) -> Tensor:
    """G = tau log(1 - alpha + alpha e^(delta / tau)) - alpha delta, to a few ulp everywhere.

    With alpha <= 1/2 (the other state is the minority otherwise), x = delta / tau and
    phi(t) = e^t - 1 - t, two forms without cancellation:

        G / tau = log(1 + (1 - alpha) phi(-alpha x) + alpha phi((1 - alpha) x))     for small |x|
        G = tau log(1 + alpha (e^x - 1)) - alpha delta                              for large |x|
    """
    alpha, delta = _binary(alpha, delta)
    tau = check_tau(tau)
    flip = alpha > 0.5
    alpha, delta = torch.where(flip, 1 - alpha, alpha), torch.where(flip, -delta, delta)
    x = delta / tau
    wide = x.abs() > WIDE
    narrow = torch.where(wide, 0.0, x)
    excess = (1 - alpha) * _excess(-alpha * narrow) + alpha * _excess((1 - alpha) * narrow)
    return torch.where(wide, _wide_binary_gap(alpha, delta, tau), tau * torch.log1p(excess))


def minority_mass(alpha: float | Tensor, delta: float | Tensor, tau: float = 1.0) -> Tensor:
    """rho = alpha e^(delta / tau) / (1 - alpha + alpha e^(delta / tau))."""
    alpha, delta = _binary(alpha, delta)
    tau = check_tau(tau)
    top = delta.clamp(min=0).detach()
    minority = alpha * torch.exp((delta - top) / tau)
    total = minority + (1 - alpha) * torch.exp(-top / tau)
    # Both terms vanish only where alpha is 0 or 1, and the other state underflows.
    return torch.where(total > 0, minority / torch.where(total > 0, total, 1.0), alpha)


def critical_advantage(
    alpha: float | Tensor, mass: float | Tensor = 0.5, tau: float = 1.0
) -> Tensor:
    """tau log[r (1 - alpha) / ((1 - r) alpha)], the least delta at which rho reaches r = mass."""
    alpha, mass = as_tensors(alpha=alpha, mass=mass)
    for name, share in (("alpha", alpha), ("mass", mass)):
        check_elements(name, share, (share > 0) & (share < 1), "a share in (0, 1)")
    return check_tau(tau) * (torch.logit(mass) - torch.logit(alpha))


class _Excess(torch.autograd.Function):
    """phi(x) = e^x - 1 - x, by its Taylor series on [-1, 1]; phi' = e^x - 1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        near = x.clamp(-1, 1)
        one = near.new_ones(())
        series = torch.ones_like(near)
        for order in range(SERIES_ORDER[x.dtype], 2, -1):
            series = torch.addcmul(one, near, series, value=1 / order)
        return torch.where(x.abs() <= 1, near * near / 2 * series, torch.expm1(x) - x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * torch.expm1(x)


def _excess(x: Tensor) -> Tensor:
    result: Tensor = _Excess.apply(x)  # type: ignore[no-untyped-call]
    return result


def _tokens(scores: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    """Scores in at least float32, and the count of each token: 1, or 0 where it is not valid."""
    scores = check_scores(scores)
    if valid is not None:
        valid = check_valid(valid, scores.shape)
    check_finite("scores", scores, valid)
    values = scores.to(torch.promote_types(scores.dtype, torch.float32))
    counts = values.new_ones(values.shape[-1]) if valid is None else valid.to(values.dtype)
    return values, counts


def _average(values: Tensor, counts: Tensor) -> Tensor:
    return (counts * values).sum(-1) / counts.sum(-1)


def _depth(values: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Values less the largest that counts (0 where the count is 0), and that largest, (...)."""
    top = torch.where(counts > 0, values, -math.inf).amax(-1, keepdim=True).detach()
    return torch.where(counts > 0, values - top, 0.0), top.squeeze(-1)


def _center(values: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Values less their average (0 where the count is 0), and that average, (...).

    The second average removes the rounding of the first; kept between the extremes, the first is
    exact for equal values.
    """
    counted = counts > 0
    low = torch.where(counted, values, math.inf).amin(-1)
    high = torch.where(counted, values, -math.inf).amax(-1)
    first = _average(torch.where(counted, values, 0.0), counts).clamp(low, high).detach()
    deviation = torch.where(counted, values - first[..., None], 0.0)
    second = _average(deviation, counts)
    return torch.where(counted, deviation - second[..., None], 0.0), first + second


def _free_energy(values: Tensor, counts: Tensor, tau: float) -> Tensor:
    depth, top = _depth(values, counts)
    return top + tau * _average(torch.exp(depth / tau), counts).log()


def _gap(values: Tensor, counts: Tensor, tau: float) -> Tensor:
    """tau log(1 + E phi(x / tau)), x = s - M: no term is negative, so nothing cancels.

    Where the top is steep, F of x instead: its mean is 0.
    """
    deviation, _ = _center(values, counts)
    sharp = _free_energy(deviation, counts, tau)
    steep = deviation.amax(-1) > STEEP * tau
    x = torch.where(steep[..., None], 0.0, deviation / tau)
    return torch.where(steep, sharp, tau * torch.log1p(_average(_excess(x), counts)))


def _children(deviation: Tensor, counts: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Means and counts (..., m) of the labels 0 to m - 1; a label without tokens counts 0."""
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.dtype == torch.bool:
        received = labels.dtype if isinstance(labels, Tensor) else type(labels).__name__
        raise TypeError(f"partition is {received}; pass an integer tensor, one label a token")
    shape = deviation.shape
    try:
        labels = labels.to(torch.int64).expand(shape)
    except RuntimeError:
        raise ValueError(
            f"partition has shape {tuple(labels.shape)}; pass one that broadcasts to {tuple(shape)}"
        ) from None
    counts = counts.expand(shape)
    labels = torch.where(counts > 0, labels, 0)
    check_elements("partition", labels, labels >= 0, "labels of at least 0")
    children = counts.new_zeros(*shape[:-1], int(labels.max()) + 1)
    sizes = children.scatter_add(-1, labels, counts)
    return children.scatter_add(-1, labels, deviation) / sizes.clamp(min=1), sizes


def _binary(alpha: float | Tensor, delta: float | Tensor) -> list[Tensor]:
    alpha, delta = as_tensors(alpha=alpha, delta=delta)
    check_elements("alpha", alpha, (alpha >= 0) & (alpha <= 1), "a share in [0, 1]")
    return [alpha, delta]


def _wide_binary_gap(alpha: Tensor, delta: Tensor, tau: float) -> Tensor:
    """tau log(1 + alpha (e^x - 1)) - alpha delta, for alpha <= 1/2.

    e^x enters as two factors e^(x / 2), because alpha e^x may be moderate where e^x overflows;
    where alpha e^x overflows too, log(alpha e^x) is exact enough.
    """
    half = delta / (2 * tau)
    limit = math.log(torch.finfo(half.dtype).max)
    root = torch.exp(half.clamp(max=limit))
    huge = (alpha > 0) & ((half > limit) | torch.isinf(alpha * root * root))
    root = torch.exp(torch.where(huge, 0.0, half.clamp(max=limit)))
    moderate = tau * torch.log1p(alpha * root * root - alpha) - alpha * delta
    extreme = tau * torch.where(huge, alpha, 1.0).log() + (1 - alpha) * delta
    return torch.where(huge, extreme, moderate)
