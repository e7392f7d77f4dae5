"""Rules: what they refuse, what they are called, and what each one promises."""

import dataclasses
import itertools
import math
import re
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from bmfa import rules
from bmfa.grid import Grid
from bmfa.trees.build import screen, screen_keys
from bmfa.trees.rules.base import split_above
from cases import noise, random_mask

NAN, INF = math.nan, math.inf
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
BY_EPSILON = (rules.Gamma, rules.ExactGap, rules.Certified, rules.Mass, rules.QuadrantGap)


def test_a_bad_epsilon_is_refused_when_made():
    bad = [(ValueError, value) for value in (-0.1, -1, NAN, INF)]
    bad += [(TypeError, value) for value in ("0.1", None, True, [0.1], 1j)]
    for make, (error, value) in itertools.product((*BY_EPSILON, rules.Variance), bad):
        received = re.escape(repr(float(value) if error is ValueError else value))
        accepted = r"pass a (finite|real) number in \[0, inf[\])]"
        with pytest.raises(error, match=f"^epsilon is {received}; {accepted}$"):
            make(value)
    with pytest.raises(TypeError, match=r"not a tensor: call \.item\(\)$"):
        rules.Gamma(torch.tensor(0.1))


OUT_OF_RANGE = [
    (rules.Gamma, {"epsilon": 0.1, "lookahead": 0}, "lookahead is 0; pass .* at least 1"),
    (rules.Gamma, {"epsilon": 10**400}, "epsilon is"),
    (rules.FixedDepth, {"depth": -1}, "depth is -1; pass an integer at least 0"),
    (rules.FixedBlocks, {"side": 0}, "side is 0; pass an integer at least 1"),
    (rules.RandomQuadrants, {"p": -0.1}, r"p is -0\.1; pass .* \[0, 1\]"),
    (rules.RandomQuadrants, {"p": 1.5}, r"p is 1\.5; pass .* in \[0, 1\]"),
    (rules.RandomQuadrants, {"p": 0.5, "seed": -1}, "seed is -1; pass .* at least 0"),
    (rules.Optimal, {}, "got nothing; pass exactly one of penalty="),
    (rules.Optimal, {"penalty": 0.1, "leaves": 3}, "got penalty and leaves; pass exactly"),
    (rules.Optimal, {"leaves": 3, "error": 0.1}, "got leaves and error; pass"),
    (rules.Optimal, {"penalty": -0.1}, r"penalty is -0\.1; pass"),
    (rules.Optimal, {"error": -1}, r"error is -1\.0; pass"),
    (rules.Optimal, {"leaves": 0}, "leaves is 0; pass an integer at least 2"),
    (rules.Optimal, {"leaves": 1}, "one leaf or all tokens; pass leaves=1.0"),
    (rules.Optimal, {"leaves": 0.0}, r"leaves is 0\.0; pass .* in \(0, 1\]"),
    (rules.Optimal, {"leaves": 1.5}, r"leaves is 1\.5; pass .* in \(0, 1\]"),
    (rules.Optimal, {"leaves": NAN}, r"leaves is nan; pass .* in \(0, 1\]"),
    (rules.Optimal, {"penalty": 0.1, "pooled": True}, "pooled=True pools a budget"),
]
WRONG_TYPES = [
    (rules.Gamma, {"epsilon": 0.1, "lookahead": 1.0}, r"lookahead is 1\.0; pass an integer"),
    (rules.FixedBlocks, {"side": True}, "side is True; pass an integer"),
    (rules.RandomQuadrants, {"p": "half"}, "p is 'half'; pass"),
    (rules.Optimal, {"penalty": "0.1"}, "penalty is '0.1'; pass"),
    (rules.Optimal, {"leaves": True}, "leaves is True; pass an integer"),
    (rules.Optimal, {"leaves": "3"}, "leaves is '3'; pass an integer"),
    (rules.Optimal, {"leaves": 3, "pooled": "no"}, "pooled is 'no'; pass"),
    (rules.Mass, {"epsilon": 0.1, "coarse": "no"}, "coarse is 'no'; pass"),
    (rules.GlobalMean, {"depth": 2}, "depth"),
]


def test_bad_parameters_are_refused_when_made():
    for error, cases in ((ValueError, OUT_OF_RANGE), (TypeError, WRONG_TYPES)):
        for rule, parameters, message in cases:
            with pytest.raises(error, match=message):
                rule(**parameters)


NAMES = {
    "gamma:0.005": rules.Gamma(0.005),
    "gamma:0": rules.Gamma(0),
    "gamma:1e-09": rules.Gamma(1e-9),
    "gamma-h2:0.005": rules.Gamma(0.005, lookahead=2),
    "gamma-h12:1": rules.Gamma(1.0, lookahead=12),
    "exact-gap:0.5": rules.ExactGap(0.5),
    "certified:0.5": rules.Certified(0.5),
    "mass:0.002": rules.Mass(0.002),
    "mass-coarse:0.002": rules.Mass(0.002, coarse=True),
    "optimal:0.002": rules.Optimal(0.002),
    "optimal-leaves:30": rules.Optimal(leaves=30),
    "optimal-leaves:0.25": rules.Optimal(leaves=0.25),
    "optimal-error:0.1": rules.Optimal(error=0.1),
    "optimal-leaves-pooled:0.25": rules.Optimal(leaves=0.25, pooled=True),
    "optimal-error-pooled:0.1": rules.Optimal(error=0.1, pooled=True),
    "fixed-depth:2": rules.FixedDepth(2),
    "fixed-blocks:2": rules.FixedBlocks(2),
    "quadrant-gap:0.8": rules.QuadrantGap(0.8),
    "variance:0.5": rules.Variance(0.5),
    "random-quadrants:0.25": rules.RandomQuadrants(0.25),
    "global-mean": rules.GlobalMean(),
}


def test_rules_are_immutable_and_read_from_the_names_they_print():
    q, k = noise(2, 3, 5), noise(2, 64, 5, seed=1)
    scores = q @ k.mT / math.sqrt(5)
    for name, rule in NAMES.items():
        assert str(rule) == name and rules.as_rule(name) == rule and rules.as_rule(rule) is rule
        assert dataclasses.replace(rule) == rule and hash(dataclasses.replace(rule)) == hash(rule)
        for field in dataclasses.fields(rule):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(rule, field.name, 1)
        tree = screen(scores, Grid(8, 8), name)
        assert torch.equal(tree.split, screen(scores, Grid(8, 8), rule).split) and tree.rule == name
        of_keys = (screen_keys(q, k, Grid(8, 8), one).split for one in (name, rule))
        assert torch.equal(*of_keys)
    assert len(set(NAMES.values())) == len(NAMES)
    long = [rules.Optimal(leaves=1.0), rules.Optimal(leaves=1234567), rules.Gamma(0.12345678)]
    for rule in (*long, rules.RandomQuadrants(1 / 3)):
        assert repr(rules.parse(str(rule))) == repr(rule)
    assert rules.parse("random-quadrants:0.25", seed=7) == rules.RandomQuadrants(0.25, 7)


def test_anything_but_a_rule_is_refused_with_the_way_out():
    for rule in [None, 0.005, rules.Gamma, ("gamma", 0.005)]:
        message = rf"^rule is {re.escape(repr(rule))}; pass one of bmfa.rules.*'gamma:0.005'"
        for call in (
            lambda: rules.as_rule(rule),
            lambda: screen(torch.zeros(4), Grid(2, 2), rule),
            lambda: screen_keys(torch.zeros(3, 5), torch.zeros(4, 5), Grid(2, 2), rule),
        ):
            with pytest.raises(TypeError, match=message):
                call()
    texts = "gamma gamma: gamma:x gamma:-1 gamma:nan gamma-h0:0.1 gamma-h:0.1 Gamma:0.1 sparge:1"
    texts += " fixed-depth:2.5 random-quadrants:2 random-quadrants global-mean:3 optimal-leaves:1.5"
    for text in ["", *texts.split()]:
        with pytest.raises(ValueError, match=rf"^rule '{re.escape(text)}'.*NAME:VALUE"):
            rules.parse(text)


ZERO_THRESHOLDS = "gamma:0 gamma-h2:0 gamma-h9:0 exact-gap:0 certified:0 mass:0 mass-coarse:0"
ZERO_THRESHOLDS += " optimal:0 optimal-error:0"


def test_a_constant_grid_is_one_leaf():
    values = torch.tensor([0.1, 3.7, 1e4, -1e4, 0.0, 1 / 3, 6e-5], dtype=torch.float64)
    valid = torch.arange(15 * 11) % 3 > 0
    for rule, dtype in itertools.product(ZERO_THRESHOLDS.split(), DTYPES):
        constants = values.to(dtype).unsqueeze(1)
        for size, tau in itertools.product([(1, 1), (1, 7), (5, 3), (37, 37)], [1.0, 1e-3]):
            scores = constants.expand(-1, size[0] * size[1])
            tree = screen(scores, Grid(*size), rule, tau=tau)
            assert tree.leaf_count.tolist() == [1] * 7, (size, tau)
            assert not bool(tree.error(scores).any())
        spoilt = constants.expand(-1, 165).clone()
        spoilt[:, ~valid] = torch.tensor([NAN, INF, -INF, 5.0, 1e3], dtype=dtype).repeat(11)
        assert screen(spoilt, Grid(15, 11), rule, valid=valid).leaf_count.tolist() == [1] * 7
        if dtype == torch.float64:  # one token a step above the rest: what is hidden is rounding
            scores = torch.full((4, 64), 3.7, dtype=torch.float64)
            scores[:, 27] += torch.tensor([1e-15, 1e-12, 1e-8, 1e-4], dtype=torch.float64)
            tree = screen(scores, Grid(8, 8), rule)
            assert tree.error(scores).max() < 1e-9  # E of the step of 1e-4 is 7.7e-11
            assert tree.leaf_count[3] > 1 or "optimal" in rule


def test_means_that_differ_by_rounding_are_equal():
    """Quadrants of the same values in other orders: their means are one number, to rounding."""
    for dtype, offset, side in itertools.product(DTYPES[2:], [3.7, -100.0], (4, 7, 10)):
        values = noise(40, 1, side * side) + offset
        order = noise(40, 4, side * side, seed=side).argsort(-1)
        quadrants = values.expand(40, 4, -1).gather(-1, order).view(40, 2, 2, side, side)
        scores = quadrants.transpose(2, 3).reshape(40, -1).to(dtype)
        for rule in ("gamma:0", "mass:0", "mass-coarse:0"):
            assert bool((screen(scores, Grid(2 * side, 2 * side), rule).leaf_count == 1).all())


def test_random_quadrants_are_those_of_the_seed():
    grid = Grid(14, 14)
    scores = noise(3, 5, 196)

    def split(seed: int, p: float = 0.5) -> Tensor:
        return screen(scores, grid, rules.RandomQuadrants(p, seed)).split

    assert torch.equal(split(1), split(1))
    assert not torch.equal(split(1), split(2))
    state = torch.get_rng_state()
    split(3)
    assert torch.equal(torch.get_rng_state(), state), "the global generator is not touched"
    # An independent coin for every tree and quadrant: all 16 outcomes occur in 15 x 20 trees.
    drawn = torch.cat([split(seed)[1:5] for seed in range(20)], 1)  # the four quadrants of the root
    assert drawn.unique(dim=1).shape[1] == 16
    other = screen(noise(3, 5, 196, seed=9), grid, rules.RandomQuadrants(0.5, 1))
    assert torch.equal(other.split, split(1)), "a coin reads no score"
    for p in [0.0, 0.25, 0.5, 1.0]:
        tree = screen(torch.zeros(20000, 196), grid, rules.RandomQuadrants(p, seed=5))
        expected = p + 4 * (1 - p) / 196
        spread = math.sqrt(4 * p * (1 - p)) * 48 / 196 / math.sqrt(20000)
        mean = tree.leaf_ratio.double().mean().item()
        assert mean == pytest.approx(expected, abs=5 * spread + 1e-7)
        assert set(tree.leaf_count.unique().tolist()) <= {4 + 48 * k for k in range(5)}


def test_certified_keeps_its_promise_without_tolerance():
    for dtype, offset, size in itertools.product(
        DTYPES, [0.0, 100.0, 1e4], [(1, 7), (14, 14), (16, 25)]
    ):
        grid = Grid(*size)
        scores = (noise(24, grid.size) * 3 + offset).to(dtype)
        scores[::3] = scores[::3].round()  # ties and constant blocks
        scores[1::3, 0] += 9
        for tau, epsilon in itertools.product((1e-3, 1.0), (1e-6, 0.01, 0.5)):
            tree = screen(scores, grid, rules.Certified(epsilon), tau=tau)
            assert bool((tree.error(scores.double()) <= epsilon).all()), (size, tau, epsilon)
            assert not bool(tree.leaf_labels.any())


BUDGET_GRIDS = [(1, 1), (1, 7), (5, 3), (14, 14)]


def test_a_budget_of_leaves_holds_for_each_tree():
    for size, masked in itertools.product(BUDGET_GRIDS, [False, True]):
        grid = Grid(*size)
        scores = noise(16, grid.size).to(DTYPES[2 + masked]) * 2
        valid = random_mask(16, grid.size) | torch.tensor(not masked)
        tokens = valid.sum(-1)
        fewest = int(tokens.min())
        for leaves in (0.01, 0.3, 0.5, 1.0, *{2, max(2, fewest // 3), fewest} - {1}):
            if leaves > 1 and fewest == 1:
                continue
            tree = screen(scores, grid, rules.Optimal(leaves=leaves), valid=valid)
            share = (tokens * leaves + 1e-9).floor().clamp(min=1)
            assert bool((tree.leaf_count <= (leaves if leaves > 1 else share)).all())
            assert leaves != 1.0 or torch.equal(tree.leaf_count, tokens)


def test_a_share_of_a_whole_count_is_that_count():
    """0.3 of 10 is 3, not 2.9999999999999996, and a product in float32 loses no leaf either."""
    scores = torch.tensor([0.0, 9.0] + [0.0] * 8, dtype=torch.float64)
    tree = screen(scores, Grid(1, 10), rules.Optimal(leaves=0.3))
    assert torch.equal(tree.split, screen(scores, Grid(1, 10), rules.Optimal(leaves=3)).split)
    pairs = ((tokens, count) for tokens in range(20, 80) for count in range(2, tokens))
    lossy = [
        (n, count) for n, count in pairs if float(torch.tensor(float(n)) * (count / n)) < count
    ]
    full = 0
    for tokens, count in lossy[:20]:
        scores, grid = noise(4, tokens).float(), Grid(1, tokens)
        tree = screen(scores, grid, rules.Optimal(leaves=count / tokens))
        assert torch.equal(tree.split, screen(scores, grid, rules.Optimal(leaves=count)).split)
        full += int((tree.leaf_count == count).sum())
    assert full, "no tree needs the slack"


def test_a_budget_of_error_holds_for_each_tree():
    factors = torch.linspace(0.1, 4, 16, dtype=torch.float64)[:, None]
    for size, (masked, tau) in itertools.product(BUDGET_GRIDS, [(False, 0.1), (True, 1.0)]):
        grid = Grid(*size)
        scores = noise(16, grid.size) * tau * factors
        valid = random_mask(16, grid.size) if masked else None
        for error in (0.0, 1e-6, 0.1, 1.0):
            rule = rules.Optimal(error=error)
            tree = screen(scores, grid, rule, tau=tau, valid=valid)
            assert bool((tree.error(scores) <= error * (1 + 1e-9) + 1e-14).all())
            narrow = scores.float()
            tree = screen(narrow, grid, rule, tau=tau, valid=valid)
            allowed = error * (1 + 1e-5) + 1e-6 * tau
            assert bool((tree.error(narrow.double()) <= allowed).all())
    for dtype, tau in itertools.product(DTYPES[2:], [1e-3, 1.0]):
        scores = noise(64, 64).to(dtype) * 60 * tau
        tree = screen(scores, Grid(8, 8), rules.Optimal(error=18.0 * tau), tau=tau)
        assert bool((tree.error(scores.double()) <= 1.001 * 18.0 * tau).all())


def test_pooled_budgets_hold_on_average():
    grid = Grid(14, 14)
    spread = torch.linspace(0.2, 4, 24, dtype=torch.float64).view(3, 8, 1)
    for dtype in DTYPES[2:]:
        scores = (noise(3, 8, 196) * spread).to(dtype)
        for leaves in (2, 20, 196, 0.02, 0.25, 1.0):
            tree = screen(scores, grid, rules.Optimal(leaves=leaves, pooled=True))
            budget = 196 * leaves if isinstance(leaves, float) else leaves
            assert tree.leaf_count.double().mean() <= budget + 1e-6
        counts = screen(scores, grid, rules.Optimal(leaves=0.25, pooled=True)).leaf_count
        assert counts.min() < 49 < counts.max(), "one penalty spends the budget where it pays"
        for error in (0.0, 1e-3, 0.1):
            tree = screen(scores, grid, rules.Optimal(error=error, pooled=True))
            assert tree.error(scores.double()).mean() <= error + 1e-6
    same = screen(scores, grid, rules.Optimal(3e-3))  # the trees of one penalty
    share = same.leaf_count.sum().item() / 196 / 24
    pooled = screen(scores, grid, rules.Optimal(leaves=share, pooled=True))
    assert torch.equal(pooled.split, same.split)


def test_a_leaf_budget_above_the_tokens_is_refused():
    valid = torch.ones(3, 36, dtype=torch.bool)
    valid[1, 10:] = False
    for rule in [rules.Optimal(leaves=17), rules.Optimal(leaves=17, pooled=True)]:
        with pytest.raises(ValueError, match=r"17 and the 4x4 grid has 16 .* from 2 to 16"):
            screen(torch.zeros(16), Grid(4, 4), rule)
        with pytest.raises(ValueError, match=r"17 and the 6x6 grid has 10 valid .* 2 to 10"):
            screen(torch.zeros(3, 36), Grid(6, 6), rule, valid=valid)
        assert screen(torch.zeros(36), Grid(6, 6), rule).leaf_count == 1
    for rule in (rules.Optimal(leaves=2), rules.Optimal(leaves=2, pooled=True)):
        assert screen(torch.zeros(1), Grid(1, 1), rule).leaf_count == 1, (
            "the least budget always fits"
        )


def test_values_that_are_not_numbers_are_named():
    for name, message in (
        ("optimal-leaves:²", "'²' is not a number"),
        ("gamma:x", "'x' is not a number"),
        ("fixed-depth:2.0", "depth is 2.0; pass an integer"),
        ("optimal-leaves:-1", "leaves is -1; pass an integer at least 2"),
    ):
        with pytest.raises(ValueError, match=f"rule '{name}': {message}"):
            rules.parse(name)
    assert rules.parse("optimal-leaves:٨") == rules.Optimal(leaves=8)


@dataclass(frozen=True)
class Range(rules.Rule):
    """Split while the scores of a block differ by more than epsilon."""

    epsilon: float

    def node_scores(self, pyramid):
        pairs = zip(pyramid.maxima(), pyramid.minima(), strict=True)
        return torch.cat([high - low for high, low in pairs])

    def decide(self, scores, context):
        return split_above(scores, self.epsilon, context)


def test_an_own_rule_runs_by_its_name():
    with pytest.raises(ValueError, match=r"'Range:0\.5' is unknown"):
        rules.parse("Range:0.5")
    rules.register("Range", Range)
    assert rules.parse("Range:0.5") == Range(0.5) and str(Range(0.5)) == "Range:0.5"
    scores = torch.zeros(64)
    scores[9] = 6.0
    assert screen(scores, Grid(8, 8), "Range:0.5").leaf_count == 10
    rules.register("Range", lambda value=2.0: Range(2 * value))
    assert rules.parse("Range:0.5") == Range(1.0) and rules.parse("Range") == Range(4.0)
    rules.register("broken", lambda value: value)
    for name, message in (("broken:1", "rule is 1; pass one of"), ("Range:-", "'-' is not")):
        with pytest.raises(ValueError, match=message):
            rules.parse(name)
    for name in ("gamma", "gamma-h7", "global-mean", "random-quadrants", "a:b", ""):
        with pytest.raises(ValueError, match="pass one without a colon that no rule of bmfa has"):
            rules.register(name, Range)
