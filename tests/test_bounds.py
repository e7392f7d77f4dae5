"""Bounds on the gap: they hold without tolerance, in their order, and are attained."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from bmfa import bounds, energy
from cases import EPS, property_test, taus, tensor

DTYPES = [torch.float64, torch.float32]

seeds = st.integers(0, 2**32 - 1)


def random_blocks(seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """64 blocks of one size and one shape of law, on scales from 1e-8 to 1e4 and offsets to 1e4."""
    generator = torch.Generator().manual_seed(seed)
    size = int(torch.randint(1, 65, (), generator=generator))
    noise = torch.randn(64, size, generator=generator, dtype=torch.float64)
    spike = torch.zeros_like(noise)
    spike[:, 0] = 1
    laws = [noise, noise.round(), (noise > 1).double(), noise.exp().square(), spike, -spike]
    laws += [spike + 1e-9 * noise, torch.zeros_like(noise)]
    law = laws[int(torch.randint(len(laws), (), generator=generator))]
    uniform = torch.rand(2, 64, 1, generator=generator, dtype=torch.float64)
    offset = torch.where(uniform[1] < 0.5, 0.0, 10 ** (8 * uniform[1] - 4))
    return (law * 10 ** (12 * uniform[0] - 8) + offset).to(dtype)


def statistics(scores: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Low, high, mean and variance, in the dtype of the scores."""
    mean, variance = energy.cumulants(scores, 2).unbind(-1)
    return scores.amin(-1), scores.amax(-1), mean, variance


def holds(bound: Tensor, gap: Tensor) -> bool:
    return bool((bound.double() >= gap).all())


def slack(dtype: torch.dtype, condition: float) -> float:
    """How far a bound that is attained may lie above: its margins, times the gap's condition."""
    ulps = bounds.RESULT_ULPS + 3 * bounds.STATISTIC_ULPS * condition
    return 2 * ulps * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", DTYPES)
@property_test(seed=seeds, tau=taus)
def test_theorem_range_upper_bound(dtype: torch.dtype, seed: int, tau: float) -> None:
    scores = random_blocks(seed, dtype)
    gap = energy.gap(scores.double(), tau=tau)
    low, high, *_ = statistics(scores)
    bound = bounds.hoeffding(low, high, tau)
    assert bound.dtype == dtype
    assert holds(bound, gap)
    spread = high.double() - low.double()
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(bound.double(), spread**2 / (8 * tau), rtol=32 * eps, atol=1e-37)


@pytest.mark.parametrize("dtype", DTYPES)
@property_test(seed=seeds, tau=taus)
def test_bounds_enclose_the_gap_without_tolerance(dtype, seed, tau):
    scores = random_blocks(seed, dtype)
    gap = energy.gap(scores.double(), tau=tau)
    low, high, mean, variance = statistics(scores)
    centered = energy.centered(scores)
    for a, b, m in ((low, high, mean), (centered.amin(-1), centered.amax(-1), 0.0)):
        assert holds(bounds.bennett(b, m, variance, tau), gap)
        least = bounds.lower(a, m, variance, tau).double()
        assert bool((least >= 0).all())
        assert bool((least <= gap).all())


@property_test(seed=seeds, tau=taus)
def test_bennett_below_hoeffding(seed: int, tau: float) -> None:
    centered = energy.centered(random_blocks(seed))
    low, high, _, variance = statistics(centered)
    hoeffding = bounds.hoeffding(low, high, tau)
    bennett = bounds.bennett(high, 0.0, variance, tau)
    # Each is raised by its margins, and the gap's condition in x is at most its height.
    height = (high / tau).clamp(max=32).max().item()
    outward = 1 + slack(torch.float64, 2 + height)
    tiny = 8 * torch.finfo(torch.float64).tiny
    assert bool((bennett <= hoeffding * outward + tiny).all())


@pytest.mark.parametrize("dtype", DTYPES)
@property_test(
    minority=st.integers(1, 8),
    majority=st.integers(8, 32),
    delta=st.floats(2**-20, 100, width=32),
    negative=st.booleans(),
    tau=st.sampled_from([0.1, 1.0, 30.0]),
)
def test_two_values_attain_supremum_and_infimum(dtype, minority, majority, delta, negative, tau):
    delta = -delta if negative else delta
    scores = torch.tensor([delta] * minority + [0.0] * majority, dtype=dtype)
    gap = energy.gap(scores.double(), tau=tau)
    centered = energy.centered(scores)
    low, high, _, variance = statistics(centered)
    height = min(32.0, abs(delta) / tau)
    # The rarer value lies off the mean by up to 32 times the commoner: its ulps weigh as much.
    tolerance = slack(dtype, 2 + height) * 33
    upper = bounds.bennett(high, 0.0, variance, tau).double()
    assert gap <= upper <= gap * (1 + tolerance)
    least = bounds.lower(low, 0.0, variance, tau).double()
    assert gap * (1 - tolerance) <= least <= gap


@property_test(seed=seeds, tau=taus)
def test_bounds_are_monotone(seed: int, tau: float) -> None:
    low, high, _, variance = statistics(energy.centered(random_blocks(seed)))
    # A step of 1e-9 moves a bound by more than the 1e-12 that its rounding does.
    more, rounded = 1 + 1e-9, 1 - 1e-12
    upper = bounds.bennett(high, 0.0, variance, tau) * rounded
    assert holds(bounds.bennett(high * more, 0.0, variance, tau), upper)
    assert holds(bounds.bennett(high, 0.0, variance * more, tau), upper)
    least = bounds.lower(low, 0.0, variance, tau)
    assert holds(least, bounds.lower(low * more, 0.0, variance, tau) * rounded)
    assert holds(least, bounds.lower(low, 0.0, variance / more, tau) * rounded)


def test_degenerate_blocks() -> None:
    for dtype in DTYPES:
        value, zero = torch.tensor([0.0, 0.1, -1e4], dtype=dtype), torch.zeros(3, dtype=dtype)
        for bound in (
            bounds.hoeffding(value, value),
            bounds.bennett(value + 1, value, zero),
            bounds.lower(value - 1, value, zero),
            bounds.lower(zero, zero, zero + 1),
        ):
            assert torch.equal(bound, zero)
    # A variance may exceed its greatest value by rounding.
    low, high = tensor([-2.0, -3.0, -1e4]), tensor([1.0, 1e-3, 1.0])
    attained = energy.binary_gap(high / (high - low), low - high)  # the low value is the rarer
    assert holds(bounds.bennett(high, 0.0, -low * high * (1 + 4 * EPS)), attained)


def test_mean_that_rounds_to_the_maximum() -> None:
    for steps, size, top in itertools.product([1, 5, 1000], [2, 64, 4096], [1.0, 1e4]):
        ulp = math.ulp(top) * 2**29  # of float32
        scores = torch.full((size,), top)
        scores[0] -= steps * ulp
        gap = energy.gap(scores.double(), tau=1e-3)
        assert gap > 0
        high, mean = scores.max(), scores.mean()
        variance = (scores - mean).square().mean()
        assert holds(bounds.bennett(high, mean, variance, 1e-3), gap)
        if mean == high:
            # The differences of such statistics hide the offset that explains them.
            assert holds(bounds.bennett(0.0, 0.0, variance, 1e-3), gap)
        assert bounds.lower(scores.min(), mean, variance, 1e-3).double() <= gap


def test_extreme_ranges() -> None:
    for tau in [1e-3, 1.0, 1e3]:
        low, high = tensor([-1e4, -1e-9, -1e-160, -1e300]), tensor([1e4, 1e-9, 1e-160, 1e300])
        variance = tensor([1e8, 1e-18, 1e-320, 1e200])
        bennett = bounds.bennett(high, 0.0, variance, tau)
        for bound in (bennett, bounds.lower(low, 0.0, variance, tau)):
            assert bool(torch.isfinite(bound).all())
        assert bool((bennett > 0).all())
        # The gap of a block of -a and a.
        symmetric = energy.binary_gap(0.5, tensor([2e4, 2e-9]), tau)
        torch.testing.assert_close(bennett[:2], symmetric, rtol=slack(torch.float64, 34), atol=0)
        assert bounds.bennett(1e-300, 0.0, 1e100) == pytest.approx(1e-300, rel=1e-14)


@property_test(seed=seeds, tau=taus)
def test_theorem_recursive_residual_as_a_bound(seed: int, tau: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    scale = 2.0 ** int(torch.randint(-20, 14, (), generator=generator))
    # Dyadic scores and children of 4 tokens: their means are exact.
    scores = torch.randint(-8, 9, (16, 4, 4), generator=generator).double() * scale
    gap = energy.gap(scores.flatten(1), tau=tau)
    low, high, mean, variance = statistics(scores)
    count = torch.full_like(mean, 4.0)
    exact = bounds.recursive(mean, count, energy.gap(scores, tau=tau), tau)
    assert holds(exact, gap)
    # Both summands are raised, and M_C + U_C may lie 34 tau above the mean before the gap shows.
    # A steep child bound is added as logarithms, to ulps of the largest M_C + U_C.
    tolerance = slack(torch.float64, 36)
    torch.testing.assert_close(exact, gap, rtol=tolerance, atol=1e-300)
    for child in (bounds.hoeffding(low, high, tau), bounds.bennett(high, mean, variance, tau)):
        assert holds(bounds.recursive(mean, count, child, tau), gap)


def recursive_gap(means: Tensor, weights: Tensor, gaps: Tensor, tau: float) -> np.ndarray:
    """The gap of a block from those of its children, in extended precision."""
    if np.finfo(np.longdouble).eps > 1e-18:
        pytest.skip("needs extended precision to judge float64")
    m, w, g = (x.double().numpy().astype(np.longdouble) for x in (means, weights, gaps))
    counted, w = w > 0, w / w.sum(-1, keepdims=True)
    m = np.where(counted, m, m.min())
    depth = m - m.max(-1, keepdims=True)  # the differences of floats of one size are exact
    raised = np.where(counted, depth + g, -np.inf) / np.longdouble(tau)
    top = raised.max(-1, keepdims=True)
    mass = (w * np.exp(raised - top)).sum(-1)
    lift = (w * np.expm1(raised - top)).sum(-1)
    log = np.where(lift > -0.5, np.log1p(np.maximum(lift, -0.5)), np.log(mass))
    gap: np.ndarray = tau * (top[..., 0] + log) - (w * depth).sum(-1)
    return gap


def test_recursive_bound_is_rounded_up_at_every_offset() -> None:
    for dtype, offset in itertools.product(DTYPES, [0.0, 1e4, -1e6]):
        generator = torch.Generator().manual_seed(0)
        eps = torch.finfo(dtype).eps
        for tau, spread, size in itertools.product(
            (1e-3, 1.0), (1e-2, 1.0, 100.0), (1e-4, 1.0, 30.0, 1e3)
        ):
            noise = torch.randn(4000, 4, generator=generator)
            means = (offset + spread * noise).to(dtype)
            weights = torch.randint(0, 65, (4000, 4), generator=generator).to(dtype)
            weights[:, 0] += 1
            weights[:1000, 0] *= 1e6  # the others may hold the mass, and hardly any tokens
            gaps = (size * torch.rand(4000, 4, generator=generator)).to(dtype)
            bound = bounds.recursive(means, weights, gaps, tau).double().numpy()
            gap = recursive_gap(means, weights, gaps, tau)
            reach = (means.amax(-1) - means.amin(-1) + gaps.amax(-1)).double().numpy()
            # The judge rounds, too: terms of that size cancel.
            below = bound < gap - 8 * np.finfo(np.longdouble).eps * reach
            assert not below.any(), (tau, spread, size, int(below.sum()))
            # The margins of both terms: of the gap, of U_C - D_C, and of exponents up to STEEP.
            steps = 8 * bounds.RESULT_ULPS * (1 + bounds.STEEP)
            assert bool((bound - gap <= steps * eps * (gap + reach)).all()), (tau, spread, size)


def test_recursive_bound_where_child_masses_underflow() -> None:
    # The child of mean -1000 has no mass beside the other, and yet the only tokens that matter.
    bound = bounds.recursive(tensor([0.0, -1000.0]), tensor([1.0, 1.0]), tensor([0.0, 2000.0]))
    assert bound == pytest.approx(1500 - math.log(2), rel=slack(torch.float64, 1))
    assert bounds.recursive(tensor([5.0, 5.0]), tensor([3.0, 1.0]), tensor([0.0, 0.0])) == 0
    # A child without weight does not count, whatever its bound.
    two = bounds.recursive(tensor([1.0, 1.0]), tensor([3.0, 1.0]), tensor([1e-8, 0.0]))
    three = [tensor(x) for x in ([1.0, 1.0, 9.0], [3.0, 1.0, 0.0], [1e-8, 0.0, 1e6])]
    assert bounds.recursive(*three) == pytest.approx(two.item(), rel=1e-13)


@property_test(seed=seeds, tau=taus, delta=st.floats(0, 10))
def test_proposition_score_stability(seed: int, tau: float, delta: float) -> None:
    scores = random_blocks(seed)
    generator = torch.Generator().manual_seed(seed)
    noise = torch.rand(scores.shape, generator=generator, dtype=torch.float64).mul(2).sub(1).sign()
    moved = scores + delta * noise
    gap = energy.gap(scores, tau=tau)
    # The sum may move a score by half an ulp more than delta; the gap is computed to its ulps.
    tolerance = EPS * moved.abs().amax(-1) + 8 * EPS * 34 * gap
    difference = (energy.gap(moved, tau=tau) - gap).abs()
    assert bool((difference <= bounds.score_margin(delta) + tolerance).all())


@property_test(seed=seeds, tau=taus)
def test_certificate_bounds_the_global_error(seed: int, tau: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    scale = 10 ** (6 * torch.rand((), generator=generator, dtype=torch.float64) - 4)
    leaves = scale * torch.randn(8, 6, 4, generator=generator, dtype=torch.float64)
    leaves[:, :2] = leaves[:, :2, :1]  # constant leaves, as good as expanded
    labels = torch.arange(24) // 4
    error = energy.gap(leaves.flatten(1), tau=tau) - energy.refinement_score(
        leaves.flatten(1), labels, tau=tau
    )
    mass = torch.softmax(energy.mean(leaves) / tau, -1)
    exact = bounds.certificate(mass[:, 2:], energy.gap(leaves[:, 2:], tau=tau), tau)
    # The difference of two gaps is known to ulps of the larger.
    tolerance = 8 * EPS * 34 * (energy.gap(leaves.flatten(1), tau=tau) + tau)
    assert bool((exact - error >= -tolerance).all())
    normal = (mass > torch.finfo(mass.dtype).tiny).all(-1)
    assert bool(((exact - error)[normal] <= tolerance[normal]).all())
    _, high, mean, variance = statistics(leaves)
    upper = bounds.bennett(high, mean, variance, tau)
    assert torch.equal(bounds.certificate(mass[:, 2:], upper[:, 2:], tau) >= exact, exact >= 0)
    # Leaves of bound 0 add nothing.
    whole = bounds.certificate(mass, upper, tau)
    torch.testing.assert_close(
        whole, bounds.certificate(mass[:, 2:], upper[:, 2:], tau), rtol=8 * EPS, atol=0
    )


def test_certificate_is_rounded_up() -> None:
    """In float32, judged in float64, where its terms have all their digits."""
    for tau in [0.3, 1.0]:
        generator = torch.Generator().manual_seed(0)
        for size in (1e-6, 1.0, 20.0, 60.0):
            bound = size * tau * torch.rand(4000, 5, generator=generator)
            # The masses of steep leaves are tiny: the exponential alone is off by more than the result.
            mass = torch.rand(4000, 5, generator=generator) * 10 ** torch.empty(4000, 1).uniform_(
                -25, 0, generator=generator
            )
            excess = (mass.double() * torch.expm1(bound.double() / tau)).sum(-1)
            exact = tau * torch.log1p(excess)
            got = bounds.certificate(mass, bound, tau).double()
            assert bool((got >= exact).all()), (size, int((got < exact).sum()))
            steps = 4 * (bounds.RESULT_ULPS + bounds.STATISTIC_ULPS * (1 + size))
            assert bool((got <= exact * (1 + steps * torch.finfo(torch.float32).eps) + 1e-37).all())


def test_a_certificate_that_underflows_is_not_zero() -> None:
    for dtype in DTYPES:
        tiny = torch.finfo(dtype).tiny
        small = torch.tensor([tiny, 1e3 * tiny], dtype=dtype)
        assert bounds.certificate(small, small) > 0


def test_bounds_from_the_variance_are_rounded_by_their_margins() -> None:
    """With a variance off by its allowance, the results keep their own margin, in float32.

    On two values the bounds are the gap itself. At heights far below tau the variance decides alone:
    the gap is v / 2 tau, and the allowance for the mean adds next to nothing.
    """
    eps = torch.finfo(torch.float32).eps
    for tau in [0.1, 1.0, 30.0]:
        generator = torch.Generator().manual_seed(0)
        high = 1e-2 * tau * (0.1 + torch.rand(4000, generator=generator))
        low = -high * (0.1 + torch.rand(4000, generator=generator))
        exact_high, exact_low = high.double(), low.double()
        share = exact_high / (exact_high - exact_low)  # of the low value: the mean is 0
        exact = energy.binary_gap(share, exact_low - exact_high, tau)
        variance = -exact_high * exact_low
        allowance, computed = bounds.STATISTIC_ULPS * eps, 6  # ulps: of v's own step, of binary_gap
        margin = (bounds.RESULT_ULPS - computed) * eps
        small = torch.nextafter((variance * (1 - allowance)).float(), torch.tensor(0.0))
        assert bool((bounds.bennett(high, 0.0, small, tau).double() >= exact * (1 + margin)).all())
        large = torch.nextafter((variance * (1 + allowance)).float(), torch.tensor(torch.inf))
        assert bool((bounds.lower(low, 0.0, large, tau).double() <= exact * (1 - margin)).all())


def test_certificate_in_the_log_domain() -> None:
    def certificate(mass: float, bound: float, tau: float = 1.0) -> float:
        return bounds.certificate(tensor([mass, 0.5]), tensor([bound, 0.0]), tau).item()

    assert bounds.certificate(tensor([]), tensor([])) == certificate(0.0, 0.0) == 0
    assert certificate(0.0, 1.0) < 1e-300
    # 700 units of x are known to 8 ulps each, by the outward margin.
    tolerance = slack(torch.float64, 1400)
    for mass, bound, tau, expected, rel in (
        (0.0, 1e6, 1.0, 1e6, 1e-3),  # a mass that underflowed may hide a bound that did not
        (1e-300, 1e4, 1.0, 1e4 - 300 * math.log(10), 1e-6),
        (1e-300, 700.0, 1.0, math.log1p(math.exp(700 - 300 * math.log(10))), tolerance),
        (1e-305, 715.0, 1.0, math.log1p(math.exp(715 - 305 * math.log(10))), tolerance),
        (1.0, 1e6, 1e-3, 1e6, tolerance),
        (1e-12, 1e-9, 1.0, 1e-21, 1e-8),
    ):
        assert certificate(mass, bound, tau) == pytest.approx(expected, rel=rel)
    assert certificate(1.0, 0.5) >= 0.5


@property_test(st.floats(0, 1e4), st.floats(0, 1e4), taus)
def test_output_bound(error: float, value_norm: float, tau: float) -> None:
    bound = bounds.output_bound(error, value_norm, tau).item()
    exact = value_norm * math.sqrt(error) * math.sqrt(2 / tau)  # error / tau may be subnormal
    assert exact <= bound <= exact * (1 + 32 * EPS) + 1e-300
    assert (bound == 0) == (error == 0 or value_norm == 0)


def test_numbers_and_tensors_broadcast() -> None:
    low = torch.zeros(3, 1)
    assert bounds.hoeffding(low, torch.ones(4)).shape == (3, 4)
    assert bounds.bennett(1.0, 0.0, 1.0).dtype == torch.float64
    assert bounds.lower(low.half() - 1, 0.0, 1.0).dtype == torch.float32
    assert bounds.recursive(low.new_zeros(2, 4), torch.ones(4), torch.ones(4)).shape == (2,)


ONE = torch.ones(2)


def test_bad_input_is_named() -> None:
    for call, error, message in [
        (lambda: bounds.hoeffding(2.0, 1.0), ValueError, r"holds -1\.0.*low no larger than high"),
        (lambda: bounds.hoeffding("low", 1.0), TypeError, "'low'"),
        (lambda: bounds.hoeffding(torch.arange(2), 1.0), TypeError, "int64"),
        (lambda: bounds.hoeffding(0.0, 1.0, tau=0.0), ValueError, r"tau is 0\.0"),
        (lambda: bounds.bennett(1.0, 0.5, 0.1, tau=-2.0), ValueError, r"tau is -2\.0"),
        (lambda: bounds.bennett(1.0, 0.0, -0.5), ValueError, r"variance holds -0\.5"),
        (lambda: bounds.lower(-1.0, 0.0, -0.5), ValueError, r"variance holds -0\.5"),
        (lambda: bounds.bennett(torch.tensor([1.0, math.nan]), 0.0, 1.0), ValueError, "nan"),
        (lambda: bounds.recursive(ONE, -ONE, ONE), ValueError, r"weights holds -1\.0"),
        (lambda: bounds.recursive(ONE, ONE, -ONE), ValueError, r"child_bounds holds -1\.0"),
        (lambda: bounds.recursive(ONE, torch.ones(3), ONE), ValueError, r"child_weights \(3,\)"),
        (lambda: bounds.score_margin(-1.0), ValueError, r"delta holds -1\.0"),
        (lambda: bounds.output_bound(-1.0, 1.0), ValueError, r"error holds -1\.0"),
        (lambda: bounds.output_bound(1.0, -2.0), ValueError, r"value_norm holds -2\.0"),
        (lambda: bounds.certificate(-ONE, ONE), ValueError, r"leaf_mass holds -1\.0"),
        (lambda: bounds.certificate(ONE, -ONE), ValueError, r"leaf_bound holds -1\.0"),
    ]:
        with pytest.raises(error, match=message):
            call()


def test_recursive_bound_where_few_tokens_hold_a_small_mass() -> None:
    """A child far above the others, with so few tokens that its bound decides: M_C / tau is rounded."""
    generator = torch.Generator().manual_seed(0)
    uniform = torch.rand(3, 4000, generator=generator, dtype=torch.float64)
    distance, bound = 100 + 500 * uniform[0], 20 + 12 * uniform[1]
    means = torch.stack((torch.zeros_like(distance), -distance), -1)
    for bounded in (bound, torch.zeros_like(bound)):
        # The mass e^U of the few is near that of all the others.
        few = torch.exp(-distance - bounded + 2 * uniform[2])
        weights = torch.stack((few, torch.ones_like(few)), -1)
        gaps = torch.stack((bounded, torch.zeros_like(bound)), -1)
        for tau in (1.0, 1e-3):
            found = bounds.recursive(means * tau, weights, gaps * tau, tau).double().numpy()
            exact = recursive_gap(means * tau, weights, gaps * tau, tau)
            assert not (found < exact).any()
            assert (found <= exact * (1 + 1e-10)).all()
