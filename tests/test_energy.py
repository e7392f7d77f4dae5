"""Free energy, mean, gap and their lower bounds: the paper's statements, and numerical extremes."""

import itertools
import math
from decimal import Context, Decimal, localcontext

import pytest
import torch
from hypothesis import assume
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from bmfa import energy
from cases import EPS, property_test, taus, tensor

# Digits for the difference of terms that agree to 600 places (alpha 1e-300, squared), and 16 more.
EXACT = Context(prec=640, Emax=10**9, Emin=-(10**9))

shares = st.floats(1e-12, 0.5)


@st.composite
def blocks(draw: st.DrawFn, spread: float = 1e4) -> Tensor:
    """Ordinary blocks, one outlier, two values, constants; scales from 1e-6 to `spread`, offsets."""
    size = draw(st.integers(1, 24))
    unit = st.integers(-(2**20), 2**20).map(lambda number: number / 2**20)
    kind = draw(st.sampled_from(["any", "outlier", "two values", "constant"]))
    if kind == "any":
        values = draw(st.lists(unit, min_size=size, max_size=size))
    elif kind == "constant":
        values = [draw(unit)] * size
    else:
        low, high = draw(unit), draw(unit)
        count = 1 if kind == "outlier" else draw(st.integers(0, size))
        values = [high] * count + [low] * (size - count)
    scale = draw(st.sampled_from([1e-6, 1e-2, 1.0, 30.0, spread]))
    return tensor(values) * scale + draw(st.sampled_from([0.0, 0.0, 3.0, -1e4]))


@st.composite
def partitioned(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    scores = draw(blocks())
    size = len(scores)
    return scores, torch.tensor(draw(st.lists(st.integers(0, 5), min_size=size, max_size=size)))


def decimal_gap(scores: Tensor, tau: float) -> Decimal:
    """log(mean exp(s / tau)) tau - mean s in 100 digits."""
    with localcontext(Context(prec=100, Emax=10**9, Emin=-(10**9))):
        values, scale = [Decimal(value) for value in scores.tolist()], Decimal(tau)
        top = max(values)
        total = sum((((value - top) / scale).exp() for value in values), Decimal(0))
        return (total / len(values)).ln() * scale + top - sum(values, Decimal(0)) / len(values)


def decimal_binary_gap(alpha: float, delta: float) -> Decimal:
    with localcontext(EXACT):
        share, x = Decimal(alpha), Decimal(delta)
        return (1 - share + share * x.exp()).ln() - share * x


def rounding(scores: Tensor, tau: float = 1.0) -> float:
    """Absolute error of F, M and Phi: ulps of the largest score, and of tau log n."""
    return 8 * EPS * (scores.abs().max().item() + tau * math.log(2 * len(scores)))


def gap_tolerance(scores: Tensor, tau: float) -> float:
    """Relative error of G: ulps of x, times the condition sum_i p_i x_i / G, at most 2 + height.

    The height of the top over the mean matters up to 32 tau, where G itself is of its size.
    """
    height = ((scores.max() - scores.mean()) / tau).clamp(0, 32).item()
    return 8 * EPS * (2 + height)


def children(scores: Tensor, labels: Tensor) -> list[Tensor]:
    return [scores[labels == label] for label in labels.unique()]


@property_test(blocks(), taus)
def test_theorem_systematic_underestimation(scores: Tensor, tau: float) -> None:
    gap, spread = energy.gap(scores, tau=tau), scores.max() - scores.min()
    assert (gap > 0) == (spread > 0)
    if spread == 0:
        assert energy.free_energy(scores, tau=tau) == energy.mean(scores) == scores[0]
    difference = energy.free_energy(scores, tau=tau) - energy.mean(scores)
    assert abs(difference - gap) <= rounding(scores, tau)


@property_test(blocks(spread=100.0), st.sampled_from([0.5, 1.0, 30.0]))
def test_corollary_relative_entropy_representation(scores: Tensor, tau: float) -> None:
    surprise = -(energy.gibbs(scores, tau=tau) * len(scores)).log()
    # Each log p_i is rounded to ulps of itself, and of the scores over tau that it is made from.
    tolerance = 8 * EPS * tau * (1 + surprise.abs().max() + math.log(len(scores)))
    assert abs(tau * surprise.mean() - energy.gap(scores, tau=tau)) <= tolerance


@property_test(blocks(), taus, st.floats(-1e4, 1e4))
def test_proposition_translation_invariance_and_temperature_monotonicity(scores, tau, offset):
    gap = energy.gap(scores, tau=tau)
    moved = scores + offset
    # Rounding the sum moves each score by half an ulp, and the gap by twice that.
    tolerance = EPS * moved.abs().max() + 2 * gap_tolerance(scores, tau) * gap
    assert abs(energy.gap(moved, tau=tau) - gap) <= tolerance

    spread = (scores.max() - scores.min()).item()
    height = scores.max() - energy.mean(scores)
    cold = 1e-9 * max(spread, 1e-9)
    assert abs(energy.gap(scores, tau=cold) - height) <= cold * math.log(24) + rounding(scores)
    hot = 1e9 * max(spread, 1.0)
    assert energy.gap(scores, tau=hot) <= 1e-9 * spread
    if spread / tau > 1e-9:  # so that a ratio of 1.5 in tau shows in the last place of the height
        assert energy.gap(scores, tau=1.5 * tau) < gap


@property_test(st.integers(1, 12), st.integers(12, 24), st.floats(1e-9, 1e3), taus)
def test_lemma_binary_model(minority: int, majority: int, delta: float, tau: float) -> None:
    scores = tensor([delta] * minority + [0.0] * majority)
    alpha = minority / (minority + majority)
    mean = energy.binary_mean(alpha, delta).item()
    assert energy.mean(scores) == pytest.approx(mean, rel=4 * EPS)
    tolerance = 2 * gap_tolerance(scores, tau)
    closed = energy.binary_gap(alpha, delta, tau)
    assert energy.gap(scores, tau=tau) == pytest.approx(closed.item(), rel=tolerance, abs=0)
    mass = energy.gibbs(scores, tau=tau)[:minority].sum()
    rho = energy.minority_mass(alpha, delta, tau)
    assert mass == pytest.approx(rho.item(), rel=8 * EPS, abs=0)


@property_test(shares, st.floats(1e-6, 1 - 1e-6), taus, st.floats(-50, 50))
def test_proposition_critical_condition(alpha, mass, tau, advantage):
    critical = energy.critical_advantage(alpha, mass, tau)
    # rho moves by rho (1 - rho) dx, and x = delta / tau is known to ulps of itself and of the logits.
    tolerance = 8 * EPS * (1 + abs(critical / tau) + 40)
    assert abs(energy.minority_mass(alpha, critical, tau) - mass) <= tolerance * mass
    delta = tau * advantage
    assume(abs(delta - critical) > tau * tolerance)
    assert (energy.minority_mass(alpha, delta, tau) >= mass) == (delta >= critical)
    even = tau * math.log((1 - alpha) / alpha)
    found = energy.critical_advantage(alpha, tau=tau)
    assert found == pytest.approx(even, rel=8 * EPS, abs=8 * EPS * tau)


@property_test(st.floats(-5, 5), taus)
def test_theorem_asymptotic_mean_blindness(shift: float, tau: float) -> None:
    alpha = 10.0 ** -torch.arange(1, 301, dtype=torch.float64)
    delta = energy.critical_advantage(alpha, tau=tau) + tau * shift
    mean, gap = energy.binary_mean(alpha, delta), energy.binary_gap(alpha, delta, tau)
    limit = tau * math.log1p(math.exp(shift))
    # alpha e^x is known to the ulps of x, at most 700.
    tolerance = 8 * EPS * 700
    rho = energy.minority_mass(alpha, delta, tau)
    assert torch.allclose(rho, torch.tensor(shift, dtype=torch.float64).sigmoid(), tolerance, 0)
    # G = limit + tau log(1 - alpha) - M, exactly.
    distance = mean.abs() - tau * torch.log1p(-alpha)
    assert bool(((gap - limit).abs() <= distance + tau * tolerance).all())
    assert mean[-1].abs() < 1e-290 * tau
    assert gap[-1] == pytest.approx(limit, rel=tolerance, abs=tau * tolerance)


@property_test(st.floats(1e-6, 0.5), st.floats(1e-3, 30), taus)
def test_proposition_boundary_regimes(alpha: float, x: float, tau: float) -> None:
    for degenerate in (0.0, 1.0):
        assert energy.binary_gap(degenerate, tau * x, tau) == 0
    assert energy.binary_gap(alpha, 0.0, tau) == 0

    # G - alpha tau phi(x) = tau (log(1 + u) - u), within u^2 / 2, u = alpha (e^x - 1).
    small = alpha * math.exp(-x)
    leading = small * tau * (math.expm1(x) - x)
    gap = energy.binary_gap(small, tau * x, tau)
    excess = tau * (small * math.expm1(x)) ** 2 / 2
    # expm1(x) - x of the test itself loses x / (x^2 / 2).
    assert leading * (1 - 8 * EPS / x) - excess <= gap * (1 + 32 * EPS)
    assert gap <= leading * (1 + 8 * EPS / x) + tau * 32 * EPS * small

    # For large delta the rest is tau log(1 + (1 - alpha) / alpha e^-x).
    delta = tau * (20 + x - math.log(alpha))
    rest = energy.binary_gap(alpha, delta, tau) - (1 - alpha) * delta - tau * math.log(alpha)
    assert -16 * EPS * delta <= rest <= tau * math.exp(-20) + 16 * EPS * delta

    # Steps of 1/16 make first and second differences of at least alpha (1 - alpha) / 256 e^-x.
    grid = energy.binary_gap(alpha, tau * torch.arange(1, 160, dtype=torch.float64) / 16, tau)
    assert bool((grid.diff() > 0).all())
    curvature = grid.diff(n=2)
    assert bool((curvature > -8 * EPS * grid[2:]).all())
    assert bool((curvature[:16] > 0).all())


@property_test(blocks(spread=30.0), st.floats(1e-4, 2.0), taus)
def test_lemma_cumulant_expansion(scores: Tensor, scale: float, tau: float) -> None:
    scores = scale * energy.centered(scores)
    gap = energy.gap(scores, tau=tau)
    spread = ((scores.max() - scores.min()) / tau).item()
    kappa = energy.cumulants(scores)
    # Taylor's remainder: the next cumulant of a tilted law of range R, |k3| <= R^3, |k4| <= R^4,
    # |k5| = |m5 - 10 m3 m2| <= R^5 + 10 R^3 R^2 / 4.
    for order, largest in ((2, 1.0), (3, 1.0), (4, 3.5)):
        remainder = largest * spread ** (order + 1) / math.factorial(order + 1)
        terms = sum(spread**k for k in range(2, order + 1))
        error = energy.cumulant_gap(scores, order, tau=tau) - gap
        assert abs(error) <= tau * (remainder + 32 * EPS * terms)
    expected = kappa[1] / (2 * tau) + kappa[2] / (6 * tau**2) + kappa[3] / (24 * tau**3)
    magnitude = tau * sum(spread**k for k in (2, 3, 4))
    assert abs(energy.cumulant_gap(scores, tau=tau) - expected) <= 8 * EPS * magnitude


def rare_minority(tau: float, shift: float) -> tuple[Tensor, Tensor, Tensor, float]:
    """Shares from 1e-2 to 1e-300 at one softmax mass: alpha, delta, their means, the limit of F."""
    alpha = 10.0 ** -torch.arange(2, 301, 2, dtype=torch.float64)
    delta = energy.critical_advantage(alpha, tau=tau) + tau * shift
    mean, limit = energy.binary_mean(alpha, delta), tau * math.log1p(math.exp(shift))
    assert (mean + energy.binary_gap(alpha, delta, tau))[-1] == pytest.approx(limit, rel=1e-12)
    return alpha, delta, mean, limit


def test_theorem_finite_moment_blindness() -> None:
    for shift in [-1.0, 0.0, 2.0]:
        alpha, delta, mean, limit = rare_minority(1.0, shift)
        for order in range(1, 9):
            moment = (1 - alpha) * mean**order + alpha * (delta - mean) ** order
            assert bool((moment <= 2 * alpha * (alpha.log().abs() + abs(shift)) ** order).all())
            assert moment[-1] < 1e-270
        corrections = []
        for size in (2**8, 2**12, 2**16):
            scores = torch.zeros(size, dtype=torch.float64)
            scores[0] = energy.critical_advantage(1 / size) + shift
            corrected = [energy.mean(scores) + energy.cumulant_gap(scores, k) for k in (2, 3, 4)]
            corrections.append(corrected)
            # F = tau log(1 - alpha) + limit, exactly.
            expected = limit + math.log1p(-1 / size)
            assert energy.free_energy(scores) == pytest.approx(expected, rel=1e-9)
        history = tensor(corrections)
        # Each is at most a multiple of alpha (log 1 / alpha + shift)^order, here with order 4.
        assert bool((history.diff(dim=0) < 0).all())
        assert bool((history[-1] < 2.0**-16 * (16 * math.log(2) + 2) ** 4).all())


def test_corollary_mean_variance_inconsistency() -> None:
    for tau, shift in itertools.product([0.5, 1.0, 3.0], [-1.0, 0.0, 2.0]):
        alpha, delta, mean, _ = rare_minority(tau, shift)
        corrected = mean + alpha * (1 - alpha) * delta**2 / (2 * tau)
        assert bool((corrected.diff() < 0).all())
        assert corrected[-1] < 1e-290
        scores = tensor([float(delta[0])] + 99 * [0.0])  # alpha = 1/100
        estimate = energy.mean(scores) + energy.cumulant_gap(scores, 2, tau=tau)
        assert estimate == pytest.approx(corrected[0].item(), rel=16 * EPS)


@property_test(partitioned(), taus)
def test_lemma_partition_identity(case: tuple[Tensor, Tensor], tau: float) -> None:
    scores, labels = case
    total = energy.free_energy(scores, tau=tau)
    parts = children(scores, labels)
    energies = torch.stack([energy.free_energy(part, tau=tau) for part in parts])
    weights = tensor([len(part) / len(scores) for part in parts])
    combined = tau * torch.logsumexp(weights.log() + energies / tau, -1)
    assert abs(combined - total) <= rounding(scores, tau)


@property_test(partitioned(), taus)
def test_proposition_proxy_bounds(case: tuple[Tensor, Tensor], tau: float) -> None:
    scores, labels = case
    mean, total = energy.mean(scores), energy.free_energy(scores, tau=tau)
    phi = energy.proxy(scores, labels, tau=tau)
    tolerance = rounding(scores, tau)
    assert mean - tolerance <= phi <= total + tolerance
    gamma, gap = (energy.refinement_score(scores, labels, tau=tau), energy.gap(scores, tau=tau))
    assert abs(phi - mean - gamma) <= tolerance
    # Child means err by ulps of the range, which moves Gamma by twice that.
    most = gap * (1 + 2 * gap_tolerance(scores, tau)) + 8 * EPS * scores.std(correction=0)
    assert 0 <= gamma <= most


@property_test(partitioned(), taus)
def test_theorem_partition_monotonicity(case: tuple[Tensor, Tensor], tau: float) -> None:
    scores, labels = case
    tolerance = rounding(scores, tau)
    single = torch.arange(len(scores)).flip(0)
    ladder = [labels * 0, labels // 4, labels // 2, labels, single]
    phis = torch.stack([energy.proxy(scores, each, tau=tau) for each in ladder])
    assert bool((phis.diff() >= -tolerance).all())
    assert abs(phis[-1] - energy.free_energy(scores, tau=tau)) <= tolerance
    assert abs(phis[0] - energy.mean(scores)) <= tolerance
    assert energy.refinement_score(scores, labels * 0, tau=tau) == 0
    gamma, gap = energy.refinement_score(scores, single, tau=tau), energy.gap(scores, tau=tau)
    assert gamma == pytest.approx(gap.item(), rel=2 * gap_tolerance(scores, tau), abs=0)


@property_test(partitioned(), taus)
def test_theorem_recursive_residual(case: tuple[Tensor, Tensor], tau: float) -> None:
    scores, labels = case
    parts = children(scores, labels)
    gaps = torch.stack([energy.gap(part, tau=tau) for part in parts])
    sizes = tensor([float(len(part)) for part in parts])
    means = torch.stack([energy.mean(part) for part in parts])
    log_mass = torch.log_softmax(sizes.log() + (means - means.max()) / tau, -1)
    residual = tau * torch.logsumexp(log_mass + gaps / tau, -1)
    gamma, gap = energy.refinement_score(scores, labels, tau=tau), energy.gap(scores, tau=tau)
    tolerance = rounding(scores, tau)
    assert abs(gamma + residual - gap) <= tolerance
    assert gaps.min() - tolerance <= gap - gamma <= gaps.max() + tolerance
    assert abs(energy.weighted_gap(means, sizes, tau=tau) - gamma) <= tolerance


@property_test(st.floats(1e-8, 1e4), taus)
def test_proposition_one_step_incompleteness(height: float, tau: float) -> None:
    scores = tensor([height, -height, -height, height] * 4)
    labels = torch.arange(16) // 4
    assert energy.refinement_score(scores, labels, tau=tau) == 0
    gap = energy.gap(scores, tau=tau)
    assert gap > 0
    # tau log cosh(a / tau) is the gap of the symmetric binary model.
    symmetric = energy.binary_gap(0.5, 2 * height, tau).item()
    assert gap == pytest.approx(symmetric, rel=gap_tolerance(scores, tau), abs=0)
    x = Decimal(height) / Decimal(tau)
    if 1e-3 < x < 1e5:
        exact = float(((x.exp() + (-x).exp()) / 2).ln() * Decimal(tau))
        assert gap == pytest.approx(exact, rel=gap_tolerance(scores, tau), abs=0)


@property_test(blocks(), taus)
def test_gap_is_relatively_accurate(scores: Tensor, tau: float) -> None:
    exact = float(decimal_gap(scores, tau))
    tolerance = gap_tolerance(scores, tau)
    assert energy.gap(scores, tau=tau) == pytest.approx(exact, rel=tolerance, abs=0)
    single = scores.float()
    exact = float(decimal_gap(single.double(), tau))
    tolerance *= torch.finfo(torch.float32).eps / EPS
    assert energy.gap(single, tau=tau) == pytest.approx(exact, rel=tolerance, abs=1e-37)


def test_constant_blocks_are_exact() -> None:
    for value, size in itertools.product([0.1, 1e4, -1e4, 1e-300, 1e308], [1, 3, 7, 49]):
        scores = torch.full((size,), value, dtype=torch.float64)
        labels = torch.arange(size) % 3
        assert energy.mean(scores) == energy.free_energy(scores, tau=1e-3) == value
        assert energy.proxy(scores, labels, tau=1e-3) == value
        gamma = energy.refinement_score(scores, labels, tau=1e-3)
        assert energy.gap(scores, tau=1e-3) == gamma == 0
        assert energy.cumulants(scores).tolist() == [value, 0, 0, 0]


def test_extreme_scores() -> None:
    scores = tensor([1e4, -1e4, 0.0, 9999.0])
    assert energy.free_energy(scores, tau=1e-3) == pytest.approx(1e4 - 1e-3 * math.log(4), rel=EPS)
    assert energy.gibbs(scores, tau=1e-3).tolist() == [1, 0, 0, 0]
    assert energy.gap(scores, tau=1e-3) == pytest.approx(float(decimal_gap(scores, 1e-3)), rel=EPS)
    for offset in [0.0, 1.0, 1e4]:  # a tiny gap is half the variance
        scores = offset + 1e-9 * tensor([1.0, -2.0, 0.5, 7.0])
        variance = scores.sub(scores[0]).var(correction=0).item()  # exact differences
        # The next term, kappa_3 / 6, is at most 1e-8 of it.
        assert energy.gap(scores) == pytest.approx(variance / 2, rel=1e-8, abs=0)
    ends = [(0.0, 1e6, 0), (1.0, -1e6, 1), (1e-300, 1e6, 1), (0.25, -1e6, 0), (0.25, 0.0, 0.25)]
    for alpha, delta, mass in ends:
        assert energy.minority_mass(alpha, delta) == mass


PARTITION = torch.arange(6) // 2
FUNCTIONS = {
    "free_energy": energy.free_energy,
    "mean": lambda scores, valid, tau: energy.mean(scores, valid=valid),
    "centered": lambda scores, valid, tau: energy.centered(scores, valid=valid),
    "gap": energy.gap,
    "gibbs": energy.gibbs,
    "proxy": lambda scores, **rest: energy.proxy(scores, PARTITION, **rest),
    "refinement_score": lambda scores, **rest: energy.refinement_score(scores, PARTITION, **rest),
    "cumulants": lambda scores, valid, tau: energy.cumulants(scores, valid=valid),
    "cumulant_gap": energy.cumulant_gap,
}


def test_tokens_that_do_not_exist_have_no_effect() -> None:
    for function in FUNCTIONS.values():
        generator = torch.Generator().manual_seed(0)
        scores = torch.randn(2, 3, 6, generator=generator, dtype=torch.float64)
        valid = torch.tensor([[True, True, True, True, False, True], [True] + [False] * 5] * 3)
        valid = valid.view(2, 3, 6)
        poisoned = scores.masked_fill(~valid, math.nan)
        poisoned[0, 1, 5], poisoned[1, 2, 4] = math.inf, -math.inf
        assert not valid[0, 1, 5]
        poisoned.requires_grad_()
        result = function(poisoned, valid=valid, tau=0.7)
        for index in [(0, 0), (0, 1)]:
            kept = scores[index].masked_fill(~valid[index], 5.0)
            expected = function(kept, valid=valid[index], tau=0.7)
            assert torch.equal(result[index].detach(), expected)
        result.square().sum().backward()
        assert bool(torch.isfinite(poisoned.grad).all()) and not bool(poisoned.grad[~valid].any())


def test_masking_equals_leaving_out() -> None:
    scores = tensor([0.3, -1.0, 2.0, 0.7, 9.0, 4.0])
    valid = torch.tensor([True, False, True, True, False, True])
    for name in FUNCTIONS.keys() - {"proxy", "refinement_score"}:
        masked = FUNCTIONS[name](scores, valid=valid, tau=0.5)
        if name in ("gibbs", "centered"):
            assert not bool(masked[~valid].any())
            masked = masked[valid]
        alone = FUNCTIONS[name](scores[valid], valid=None, tau=0.5)
        assert torch.allclose(masked, alone, 8 * EPS, 8 * EPS)  # summed in another order


def test_gradients() -> None:
    valid = torch.tensor([[True] * 6, [True, False] * 3])
    for name, scale in itertools.product(FUNCTIONS, [1e-3, 1.0, 100.0]):
        generator = torch.Generator().manual_seed(1)
        scores = torch.randn(2, 6, generator=generator, dtype=torch.float64) * scale
        scores.requires_grad_()

        def function(values: Tensor) -> Tensor:
            return FUNCTIONS[name](values, valid=valid, tau=1.0)

        # Central differences with a step of 1e-6 of the scale.
        assert gradcheck(function, scores, eps=1e-6 * scale, rtol=1e-5, atol=1e-5)
        assert gradgradcheck(function, scores, eps=1e-6 * scale, rtol=1e-4, atol=1e-4)


@property_test(blocks(), taus)
def test_gradient_of_the_gap(scores: Tensor, tau: float) -> None:
    scores = scores.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(energy.gap(scores, tau=tau), scores)
    expected = energy.gibbs(scores.detach(), tau=tau) - 1 / len(scores)
    # p_i is known to ulps of x_i, beyond 700 it is 0.
    tolerance = 8 * EPS * min(700.0, 1 + float(scores.detach().abs().max()) / tau)
    assert bool(((gradient - expected).abs() <= tolerance).all())


def test_narrow_types_are_computed_in_float32() -> None:
    for dtype, name in itertools.product([torch.float32, torch.bfloat16, torch.float16], FUNCTIONS):
        generator = torch.Generator().manual_seed(2)
        scores = torch.randn(5, 6, generator=generator).to(dtype)
        result = FUNCTIONS[name](scores, valid=None, tau=1.0)
        exact = FUNCTIONS[name](scores.double(), valid=None, tau=1.0)
        assert result.dtype == torch.float32
        # Sums of six terms of size 1 to 100.
        assert torch.allclose(result.double(), exact, rtol=1e-5, atol=1e-5)


def test_leading_dimensions_broadcast() -> None:
    generator = torch.Generator().manual_seed(3)
    scores = torch.randn(2, 3, 8, generator=generator, dtype=torch.float64)
    valid = torch.tensor([True] * 6 + [False] * 2)
    labels = torch.randint(0, 4, (3, 8), generator=generator)
    gamma = energy.refinement_score(scores, labels, valid=valid, tau=0.5)
    assert gamma.shape == (2, 3)
    assert energy.cumulants(scores, 3, valid=valid).shape == (2, 3, 3)
    single = energy.refinement_score(scores[1, 2], labels[2], valid=valid, tau=0.5)
    assert gamma[1, 2] == single
    # Labels of tokens that do not exist, and labels without tokens, do not matter.
    other = torch.where(valid, 3 * labels + 1, -7)
    relabelled = energy.refinement_score(scores, other, valid=valid, tau=0.5)
    torch.testing.assert_close(relabelled, gamma, rtol=8 * EPS, atol=0)
    proxy = energy.proxy(scores, other, valid=valid, tau=0.5)
    expected = energy.mean(scores, valid=valid) + gamma
    torch.testing.assert_close(proxy, expected, rtol=8 * EPS, atol=8 * EPS)


@property_test(
    st.one_of(st.floats(-300, -0.31).map(lambda power: 10**power), st.floats(1e-16, 1 - 1e-16)),
    st.floats(-12, 6).map(lambda power: 10**power),
    st.booleans(),
    examples=100,
)
def test_binary_gap_is_accurate_to_ulps(alpha: float, delta: float, negative: bool) -> None:
    delta = -delta if negative else delta
    exact = decimal_binary_gap(alpha, delta)
    # 1 - alpha, its product with x (condition 4 at most below |x| = 4), e^t and log are rounded
    # once each; subnormal results have only absolute accuracy.
    with localcontext(EXACT):
        error = abs(Decimal(energy.binary_gap(alpha, delta).item()) - exact)
        assert error <= Decimal(8 * EPS) * exact + Decimal(2.0**-1070)


def test_binary_gap_at_the_seams() -> None:
    tiny, most = 1e-300, 1 - 2**-53
    pairs = [(tiny, delta) for delta in (690.0, 1400.0, 1450.0, 1e6)]
    pairs += [(1e-14, 32.3), (0.5, 4.0), (0.5, -1e6), (0.5, 1e-12), (most, -36.0), (most, 1e6)]
    for alpha, delta in [*pairs, (5e-324, 1419.0)]:
        for share, advantage in ((alpha, delta), (1 - alpha, -delta)):
            exact = float(decimal_binary_gap(share, advantage))
            gap = energy.binary_gap(share, advantage)
            assert gap == pytest.approx(exact, rel=8 * EPS, abs=0)


def test_binary_model_in_float32() -> None:
    generator = torch.Generator().manual_seed(4)
    alpha = 10 ** torch.empty(200).uniform_(-37, -0.3, generator=generator)
    delta = 10 ** torch.empty(200).uniform_(-3, 5, generator=generator)
    gap = energy.binary_gap(alpha, delta)
    exact = energy.binary_gap(alpha.double(), delta.double())
    assert gap.dtype == torch.float32
    normal = exact > torch.finfo(torch.float32).tiny
    ulps = ((gap.double() - exact).abs() / exact)[normal] / torch.finfo(torch.float32).eps
    assert ulps.max() <= 8
    assert energy.binary_gap(alpha.half(), 1.0).dtype == torch.float32
    assert energy.binary_gap(0.25, delta).dtype == torch.float32
    assert energy.binary_gap(0.25, 1).dtype == torch.float64


def test_binary_model_scales_and_differentiates() -> None:
    alpha = torch.tensor([0.0, 1e-9, 0.3, 0.5, 0.8, 1.0], dtype=torch.float64, requires_grad=True)
    delta = torch.tensor([[-9.0], [-2.0], [1e-3], [3.0], [40.0]], dtype=torch.float64)
    delta.requires_grad_()
    gap = energy.binary_gap(alpha, delta, tau=2.0)
    assert gap.shape == (5, 6)
    # tau = 2 scales without rounding.
    assert torch.equal(gap, 2 * energy.binary_gap(alpha, delta / 2))
    by_alpha, by_delta = torch.autograd.grad(gap.sum(), (alpha, delta))
    rho = energy.minority_mass(alpha, delta, tau=2.0)
    tolerance = 64 * EPS * math.exp(20)  # the derivative by alpha reaches tau e^20 at alpha = 0
    assert torch.allclose(by_delta, (rho - alpha).sum(-1, keepdim=True), rtol=1e-12, atol=1e-14)
    growth = torch.expm1(delta / 2)
    slope = (2 * growth / (1 + alpha * growth) - delta).sum(0)
    assert torch.allclose(by_alpha, slope, rtol=1e-12, atol=tolerance)
    inside = alpha.detach()[2:-1].requires_grad_()
    assert gradcheck(energy.minority_mass, (inside, delta))
    assert bool(torch.isfinite(energy.binary_gap(alpha, 1e6, tau=1e-300)).all())


SCORES = torch.zeros(2, 4)


def test_bad_input_is_named() -> None:
    for call, error, message in [
        (lambda: energy.gap([0.0]), TypeError, "list"),
        (lambda: energy.gap(torch.arange(4)), TypeError, "int64"),
        (lambda: energy.gap(torch.zeros(3, 0)), ValueError, r"\(3, 0\)"),
        (lambda: energy.gap(SCORES, tau=0.0), ValueError, "tau is 0.0"),
        (lambda: energy.mean(torch.tensor([1.0, math.nan])), ValueError, r"nan at index \(1,\)"),
        (lambda: energy.gibbs(torch.tensor([-math.inf])), ValueError, "-inf at index"),
        (lambda: energy.gap(SCORES, valid=torch.ones(4)), TypeError, "float32"),
        (lambda: energy.gap(SCORES, valid=torch.ones(3, dtype=torch.bool)), ValueError, r"\(3,\)"),
        (lambda: energy.gap(SCORES, valid=SCORES > 0), ValueError, r"leading index \(0,\)"),
        (lambda: energy.proxy(SCORES, torch.zeros(4)), TypeError, "float32"),
        (lambda: energy.proxy(SCORES, [0, 0, 1, 1]), TypeError, "list"),
        (lambda: energy.proxy(SCORES, torch.tensor([0, -3, 1, 1])), ValueError, "holds -3"),
        (lambda: energy.refinement_score(SCORES, torch.zeros(5).int()), ValueError, r"\(5,\)"),
        (lambda: energy.cumulants(SCORES, 5), ValueError, "order is 5"),
        (lambda: energy.cumulant_gap(SCORES, 1), ValueError, "order is 1"),
        (lambda: energy.weighted_gap(SCORES, torch.tensor([1.0, -2, 1, 1])), ValueError, "-2.0"),
        (lambda: energy.weighted_gap(SCORES, SCORES), ValueError, "positive sum"),
        (lambda: energy.binary_gap(1.5, 1.0), ValueError, "alpha holds 1.5"),
        (lambda: energy.binary_gap("a", 1.0), TypeError, "'a'"),
        (lambda: energy.binary_mean(torch.tensor([0.5, -0.5]), 1.0), ValueError, "-0.5"),
        (lambda: energy.binary_gap(0.5, math.inf), ValueError, "delta is inf"),
        (lambda: energy.binary_gap(torch.zeros(2), torch.zeros(3)), ValueError, r"delta \(3,\)"),
        (lambda: energy.critical_advantage(0.0), ValueError, "alpha holds 0.0"),
        (lambda: energy.critical_advantage(0.5, mass=1.0), ValueError, "mass holds 1.0"),
        (lambda: energy.minority_mass(0.5, 1.0, tau=-1.0), ValueError, "tau is -1.0"),
    ]:
        with pytest.raises(error, match=message):
            call()
