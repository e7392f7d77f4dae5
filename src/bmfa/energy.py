"""Free energy, mean, gap and their hierarchical lower bounds, as functions of scores."""

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

# Last order of the Taylor series of e^x - 1 - x on [-1, 1]. The remainder, 2 / 19! and 2 / 12!
# relative to the result, is below the unit roundoff of the dtype.
SERIES_ORDER = {torch.float64: 18, torch.float32: 11}
# Distance of the largest score above the mean, in units of tau, beyond which exponentials are taken
# relative to the largest score. It is below the overflow of float32 (88), and above log n of any
# block (22 for 2^32 tokens), so that the gap is then not small and no digits cancel.
STEEP = 32.0
# Advantage, in units of tau, beyond which log(1 + u) is at least 1.6 times alpha x, so that their
# difference loses less than two bits.
LARGE_ADVANTAGE = 4.0


def free_energy(scores: Tensor, *, valid: Tensor | None = None, tau: float = 1.0) -> Tensor:
    """Compute the free energy F = tau log(Z / n), the exact log-mean-exp of the scores.

    Args:
        scores: (..., n) float16, bfloat16, float32 or float64 scores, n >= 1.
        valid: bool tensor that broadcasts to `scores`, True for tokens that exist; None for all.
        tau: Temperature, above 0, in units of the scores.

    Returns:
        (...) F, in units of the scores, in float32, or float64 for float64 scores.

    Raises:
        TypeError: If an argument has the wrong type or dtype.
        ValueError: If a valid score is not finite, a row has no valid token, or tau is out of range.

    Example:
        >>> import torch, bmfa
        >>> bmfa.free_energy(torch.tensor([[0.0, 0.0], [0.0, 2.0]]))
        tensor([0.0000, 1.4338])
    """
    return _free_energy(*_tokens(scores, valid), check_tau(tau))


def mean(scores: Tensor, *, valid: Tensor | None = None) -> Tensor:
    """Compute the mean M = (1 / n) sum_i s_i; exactly the common score if all are equal.

    Args:
        scores: (..., n) float16, bfloat16, float32 or float64 scores, n >= 1.
        valid: bool tensor that broadcasts to `scores`, True for tokens that exist; None for all.

    Returns:
        (...) M, in float32, or float64 for float64 scores.

    Raises:
        TypeError: If an argument has the wrong type or dtype.
        ValueError: If a valid score is not finite, or a row has no valid token.

    Example:
        >>> import torch
        >>> from bmfa import energy
        >>> energy.mean(torch.tensor([0.0, 2.0, 9.0]), valid=torch.tensor([True, True, False]))
        tensor(1.)
    """
    return _center(*_tokens(scores, valid))[1]


def centered(scores: Tensor, *, valid: Tensor | None = None) -> Tensor:
    """Compute s_i - M to within rounding of the difference itself, whatever the offset.

    Args:
        scores: (..., n) float16, bfloat16, float32 or float64 scores, n >= 1.
        valid: bool tensor that broadcasts to `scores`, True for tokens that exist; None for all.

    Returns:
        (..., n) differences, in float32, or float64 for float64 scores; 0 for tokens that are not valid.

    Raises:
        TypeError: If an argument has the wrong type or dtype.
        ValueError: If a valid score is not finite, or a row has no valid token.

    Example:
        >>> import torch
        >>> from bmfa import energy
        >>> energy.centered(torch.tensor([10000.0, 10002.0]))
        tensor([-1.,  1.])
    """
    return _center(*_tokens(scores, valid))[0]


def gap(scores: Tensor, *, valid: Tensor | None = None, tau: float = 1.0) -> Tensor:
    """Compute the gap G = F - M, the free energy that a mean loses.

    G >= 0 is accurate to a few units in the last place however small it is, and exactly 0 if all
    scores are equal.

    Args:
        scores: (..., n) float16, bfloat16, float32 or float64 scores, n >= 1.
        valid: bool tensor that broadcasts to `scores`, True for tokens that exist; None for all.
        tau: Temperature, above 0, in units of the scores.

    Returns:
        (...) G, in units of the scores, in float32, or float64 for float64 scores.

    Raises:
        TypeError: If an argument has the wrong type or dtype.
        ValueError: If a valid score is not finite, a row has no valid token, or tau is out of range.

    Example:
        >>> import torch, bmfa
        >>> bmfa.gap(torch.tensor([[1.0, 1.0], [0.0, 2.0]]))
        tensor([0.0000, 0.4338])
    """
    return _gap(*_tokens(scores, valid), check_tau(tau))


def weighted_gap(values: Tensor, weights: Tensor, *, tau: float = 1.0) -> Tensor:
    """Compute the gap of weighted values, tau log sum_C w_C exp(M_C / tau) - sum_C w_C M_C.

    With the means and token counts of the children of a block, this is the refinement score Gamma.

    Args:
        values: (..., k) floating-point values M_C.
        weights: (..., k) floating-point weights, at least 0, not all 0 in a row; they are divided by
            their sum. A value of weight 0 has no effect.
        tau: Temperature, above 0, in units of the values.

    Returns:
        (...) gap, in units of the values, in the promoted dtype of the two, at least float32.

    Raises:
        TypeError: If an argument has the wrong type or dtype.
        ValueError: If a value is not finite, a weight is negative, all weights of a row are 0, the
            shapes do not broadcast, or tau is out of range.

    Example:
        >>> import torch
        >>> from bmfa import energy
        >>> energy.weighted_gap(torch.tensor([0.0, 2.0]), torch.tensor([3.0, 1.0]))
        tensor(0.4545)
    """
    values, weights = as_tensors(values=values, weights=weights)
    check_elements("weights", weights, weights >= 0, "weights of at least 0")
    total = weights.sum(-1)
    check_elements("weights", total, total > 0, "weights with a positive sum over the last dim")
    return _gap(values, weights, check_tau(tau))


def gibbs(scores: Tensor, *, valid: Tensor | None = None, tau: float = 1.0) -> Tensor:
    """Compute the Gibbs distribution p_i = exp(s_i / tau) / Z, the attention weights.

    Args:
        scores: (..., n) float16, bfloat16, float32 or float64 scores, n >= 1.
        valid: bool tensor that broadcasts to `scores`, True for tokens that exist; None for all.
        tau: Temperature, above 0, in units of the scores.

    Returns:
        (..., n) probabilities, in float32, or float64 for float64 scores; 0 for tokens that are not
        valid.

    Raises:
        TypeError: If an argument has the wrong type or dtype.
        ValueError: If a valid score is not finite, a row has no valid token, or tau is out of range.

    Example:
        >>> import torch
        >>> from bmfa import energy
        >>> energy.gibbs(torch.tensor([0.0, 0.0, 1.0]), valid=torch.tensor([True, True, False]))
        tensor([0.5000, 0.5000, 0.0000])
    """
    values, counts = _tokens(scores, valid)
    depth, _ = _depth(values, counts)
    mass = counts * torch.exp(depth / check_tau(tau))
    return mass / mass.sum(-1, keepdim=True)


def proxy(
    scores: Tensor, partition: Tensor, *, valid: Tensor | None = None, tau: float = 1.0
) -> Tensor:
    """Compute the proxy Phi = tau log sum_C (n_C / n) exp(M(C) / tau) from the means of children.

    Args:
        scores: (..., n) float16, bfloat16, float32 or float64 scores, n >= 1.
        partition: (n,) integer label >= 0 of the child of each token, or a shape that broadcasts to
            `scores`, such as `bmfa.Grid(height, width).partition(1)`.
        valid: bool tensor that broadcasts to `scores`, True for tokens that exist; None for all.
        tau: Temperature, above 0, in units of the scores.

    Returns:
        (...) Phi, in units of the scores, in float32, or float64 for float64 scores; M <= Phi <= F.

    Raises:
        TypeError: If an argument has the wrong type or dtype.
        ValueError: If a valid score is not finite, a label is negative, a shape does not fit, a row
            has no valid token, or tau is out of range.

    Example:
        >>> import torch, bmfa
        >>> from bmfa import energy
        >>> scores = torch.tensor([0.0, 0.0, 2.0, 2.0])
        >>> energy.proxy(scores, torch.tensor([0, 0, 1, 1]))  # the children are constant
        tensor(1.4338)
        >>> bmfa.free_energy(scores)
        tensor(1.4338)
    """
    values, counts = _tokens(scores, valid)
    deviation, center = _center(values, counts)
    return center + _free_energy(*_children(deviation, counts, partition), check_tau(tau))


def refinement_score(
    scores: Tensor, partition: Tensor, *, valid: Tensor | None = None, tau: float = 1.0
) -> Tensor:
    """Compute the refinement score Gamma = Phi - M, the part of the gap that a split recovers.

    Gamma >= 0 is as accurate as `gap`, and exactly 0 if all scores are equal.

    Args:
        scores: (..., n) float16, bfloat16, float32 or float64 scores, n >= 1.
        partition: (n,) integer label >= 0 of the child of each token, or a shape that broadcasts to
            `scores`, such as `bmfa.Grid(height, width).partition(1)`.
        valid: bool tensor that broadcasts to `scores`, True for tokens that exist; None for all.
        tau: Temperature, above 0, in units of the scores.

    Returns:
        (...) Gamma, in units of the scores, in float32, or float64 for float64 scores; 0 <= Gamma <= G.

    Raises:
        TypeError: If an argument has the wrong type or dtype.
        ValueError: If a valid score is not finite, a label is negative, a shape does not fit, a row
            has no valid token, or tau is out of range.

    Example:
        >>> import torch, bmfa
        >>> scores = torch.zeros(16)
        >>> scores[0] = 4.0
        >>> bmfa.refinement_score(scores, bmfa.Grid(4, 4).partition(1))
        tensor(0.1074)
        >>> bmfa.gap(scores)
        tensor(1.2201)
    """
    values, counts = _tokens(scores, valid)
    deviation, _ = _center(values, counts)
    return _gap(*_children(deviation, counts, partition), check_tau(tau))


def cumulants(scores: Tensor, order: int = 4, *, valid: Tensor | None = None) -> Tensor:
    """Compute the first cumulants of each row of scores.

    kappa_1 = M, kappa_2 = m_2, kappa_3 = m_3 and kappa_4 = m_4 - 3 m_2^2, where m_r = (1 / n)
    sum_i (s_i - M)^r is the central moment of the row itself, without Bessel's correction.

    Args:
        scores: (..., n) float16, bfloat16, float32 or float64 scores, n >= 1.
        order: Number of cumulants, 1 to 4.
        valid: bool tensor that broadcasts to `scores`, True for tokens that exist; None for all.

    Returns:
        (..., order) cumulants, in float32, or float64 for float64 scores.

    Raises:
        TypeError: If an argument has the wrong type or dtype.
        ValueError: If `order` is out of range, a valid score is not finite, or a row has no valid
            token.

    Example:
        >>> import torch
        >>> from bmfa import energy
        >>> energy.cumulants(torch.tensor([0.0, 2.0]))
        tensor([ 1.,  1.,  0., -2.])
    """
    order = check_integer("order", order, low=1, high=4)
    values, counts = _tokens(scores, valid)
    deviation, center = _center(values, counts)
    second, third, fourth = (_average(deviation**power, counts) for power in (2, 3, 4))
    return torch.stack([center, second, third, fourth - 3 * second**2][:order], -1)


def cumulant_gap(
    scores: Tensor, order: int = 4, *, valid: Tensor | None = None, tau: float = 1.0
) -> Tensor:
    """Compute the cumulant expansion of the gap.

    kappa_2 / (2 tau) + kappa_3 / (6 tau^2) + kappa_4 / (24 tau^3), truncated after kappa_order.

    Args:
        scores: (..., n) float16, bfloat16, float32 or float64 scores, n >= 1.
        order: Last cumulant, 2 to 4.
        valid: bool tensor that broadcasts to `scores`, True for tokens that exist; None for all.
        tau: Temperature, above 0, in units of the scores.

    Returns:
        (...) approximate gap, in units of the scores, in float32, or float64 for float64 scores.

    Raises:
        TypeError: If an argument has the wrong type or dtype.
        ValueError: If `order` or tau is out of range, a valid score is not finite, or a row has no
            valid token.

    Example:
        >>> import torch
        >>> from bmfa import energy
        >>> scores = torch.tensor([0.0, 0.2])
        >>> energy.cumulant_gap(scores), energy.gap(scores)
        (tensor(0.0050), tensor(0.0050))
    """
    order, tau = check_integer("order", order, low=2, high=4), check_tau(tau)
    kappa = cumulants(scores, order, valid=valid)[..., 1:]
    factors = [tau / (tau**power * math.factorial(power)) for power in range(2, order + 1)]
    return (kappa * kappa.new_tensor(factors)).sum(-1)


def binary_mean(alpha: float | Tensor, delta: float | Tensor) -> Tensor:
    """Compute M = alpha delta of the binary model: a share alpha of scores delta, others 0.

    Args:
        alpha: Share of the minority in [0, 1], a number or a floating-point tensor.
        delta: Advantage of the minority score over 0, a number or a floating-point tensor.

    Returns:
        Mean of the broadcast shape, in the promoted dtype of the tensors, at least float32; float64
        for numbers.

    Raises:
        TypeError: If an argument has the wrong type or dtype.
        ValueError: If alpha is out of range, a value is not finite, or the shapes do not broadcast.

    Example:
        >>> from bmfa import energy
        >>> energy.binary_mean(0.25, 8.0)
        tensor(2., dtype=torch.float64)
    """
    alpha, delta = _binary(alpha, delta)
    return alpha * delta


def binary_gap(alpha: float | Tensor, delta: float | Tensor, tau: float = 1.0) -> Tensor:
    """Compute the gap of the binary model: a share alpha of scores delta, others 0.

    G = tau log(1 - alpha + alpha e^(delta / tau)) - alpha delta, to a few units in the last place
    everywhere. With alpha <= 1/2 (the other state is the minority otherwise), x = delta / tau and
    phi(t) = e^t - 1 - t, two forms have no cancellation:

        G / tau = log(1 + (1 - alpha) phi(-alpha x) + alpha phi((1 - alpha) x))     for small |x|
        G = tau log(1 + alpha (e^x - 1)) - alpha delta                              for large |x|

    Args:
        alpha: Share of the minority in [0, 1], a number or a floating-point tensor.
        delta: Advantage of the minority score over 0, a number or a floating-point tensor.
        tau: Temperature, above 0, in units of delta.

    Returns:
        Gap of the broadcast shape, in units of delta, in the promoted dtype of the tensors, at least
        float32; float64 for numbers.

    Raises:
        TypeError: If an argument has the wrong type or dtype.
        ValueError: If alpha or tau is out of range, a value is not finite, or the shapes do not
            broadcast.

    Example:
        >>> from bmfa import energy
        >>> energy.binary_gap(0.01, 8.0)
        tensor(3.3475, dtype=torch.float64)
    """
    alpha, delta = _binary(alpha, delta)
    tau = check_tau(tau)
    flip = alpha > 0.5
    alpha, delta = torch.where(flip, 1 - alpha, alpha), torch.where(flip, -delta, delta)
    x = delta / tau
    large = x.abs() > LARGE_ADVANTAGE
    small_x = torch.where(large, 0.0, x)
    excess = (1 - alpha) * _excess(-alpha * small_x) + alpha * _excess((1 - alpha) * small_x)
    return torch.where(large, _large_binary_gap(alpha, delta, tau), tau * torch.log1p(excess))


def minority_mass(alpha: float | Tensor, delta: float | Tensor, tau: float = 1.0) -> Tensor:
    """Compute the softmax mass of the minority of the binary model.

    rho = alpha e^(delta / tau) / (1 - alpha + alpha e^(delta / tau)).

    Args:
        alpha: Share of the minority in [0, 1], a number or a floating-point tensor.
        delta: Advantage of the minority score over 0, a number or a floating-point tensor.
        tau: Temperature, above 0, in units of delta.

    Returns:
        Mass in [0, 1] of the broadcast shape, in the promoted dtype of the tensors, at least float32;
        float64 for numbers.

    Raises:
        TypeError: If an argument has the wrong type or dtype.
        ValueError: If alpha or tau is out of range, a value is not finite, or the shapes do not
            broadcast.

    Example:
        >>> from bmfa import energy
        >>> energy.minority_mass(0.01, 8.0)
        tensor(0.9679, dtype=torch.float64)
    """
    alpha, delta = _binary(alpha, delta)
    tau = check_tau(tau)
    top = delta.clamp(min=0).detach()
    minority = alpha * torch.exp((delta - top) / tau)
    total = minority + (1 - alpha) * torch.exp(-top / tau)
    # Both terms are 0 only if alpha is 0 or 1 and the other state underflows.
    return torch.where(total > 0, minority / torch.where(total > 0, total, 1.0), alpha)


def critical_advantage(
    alpha: float | Tensor, mass: float | Tensor = 0.5, tau: float = 1.0
) -> Tensor:
    """Compute the least advantage at which the minority holds a given softmax mass.

    delta = tau log[r (1 - alpha) / ((1 - r) alpha)] with r = mass.

    Args:
        alpha: Share of the minority in (0, 1), a number or a floating-point tensor.
        mass: Softmax mass r of the minority in (0, 1).
        tau: Temperature, above 0.

    Returns:
        Advantage of the broadcast shape, in units of tau, in the promoted dtype of the tensors, at
        least float32; float64 for numbers.

    Raises:
        TypeError: If an argument has the wrong type or dtype.
        ValueError: If an argument is out of range, or the shapes do not broadcast.

    Example:
        >>> from bmfa import energy
        >>> energy.critical_advantage(0.01)
        tensor(4.5951, dtype=torch.float64)
    """
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
    """Check scores; return them in at least float32, with a count of 1 or, if not valid, 0."""
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
    """Values minus the largest counted one (0 if not counted), and that largest value, (...)."""
    top = torch.where(counts > 0, values, -math.inf).amax(-1, keepdim=True).detach()
    return torch.where(counts > 0, values - top, 0.0), top.squeeze(-1)


def _center(values: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Values minus their average (0 if not counted), and that average, (...).

    The second average removes the rounding of the first. The first is clamped between the extremes,
    and so is exact for equal values.
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
    """tau log(1 + E phi(x / tau)) with x = s - M: no term is negative, so that nothing cancels.

    If the largest x is steep, F of x instead, whose mean is 0.
    """
    deviation, _ = _center(values, counts)
    sharp = _free_energy(deviation, counts, tau)
    steep = deviation.amax(-1) > STEEP * tau
    x = torch.where(steep[..., None], 0.0, deviation / tau)
    return torch.where(steep, sharp, tau * torch.log1p(_average(_excess(x), counts)))


def _children(deviation: Tensor, counts: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """(..., m) means and counts of the labels 0 to m - 1; a label without tokens has count 0."""
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.dtype == torch.bool:
        received = labels.dtype if isinstance(labels, Tensor) else type(labels).__name__
        raise TypeError(
            f"partition is {received}; pass an integer tensor, one label for each token"
        )
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


def _large_binary_gap(alpha: Tensor, delta: Tensor, tau: float) -> Tensor:
    """tau log(1 + alpha (e^x - 1)) - alpha delta, for alpha <= 1/2.

    e^x enters as two factors e^(x / 2), because alpha e^x may be moderate when e^x overflows. If
    alpha e^x overflows too, log(alpha e^x) is exact to rounding.
    """
    half = delta / (2 * tau)
    limit = math.log(torch.finfo(half.dtype).max)
    root = torch.exp(half.clamp(max=limit))
    huge = (alpha > 0) & ((half > limit) | torch.isinf(alpha * root * root))
    root = torch.exp(torch.where(huge, 0.0, half.clamp(max=limit)))
    moderate = tau * torch.log1p(alpha * root * root - alpha) - alpha * delta
    extreme = tau * torch.where(huge, alpha, 1.0).log() + (1 - alpha) * delta
    return torch.where(huge, extreme, moderate)
