"""Rules: what they refuse, what they are called, and what each one promises."""

import dataclasses
import itertools
import math
import re

import numpy as np
import pytest
import torch
from torch import Tensor

from bmfa import bounds, energy, rules
from bmfa.grid import Grid
from bmfa.trees.build import screen, screen_keys

NAN, INF = math.nan, math.inf


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


BY_EPSILON = [
    rules.Gamma,
    rules.ExactGap,
    rules.Certified,
    rules.Mass,
    rules.QuadrantGap,
    rules.Variance,
]


def test_a_bad_epsilon_is_refused_when_made():
    for make, (value, error) in itertools.product(
        BY_EPSILON,
        [
            (-0.1, ValueError),
            (-1, ValueError),
            (NAN, ValueError),
            (INF, ValueError),
            ("0.1", TypeError),
            (None, TypeError),
            (True, TypeError),
            ([0.1], TypeError),
            (1j, TypeError),
            (torch.tensor(0.1), TypeError),
        ],
    ):
        received = re.escape(repr(float(value) if error is ValueError else value))
        accepted = r"pass a (finite|real) number in \[0, inf[\])]"
        if isinstance(value, torch.Tensor):
            accepted += r", not a tensor: call \.item\(\)"
        with pytest.raises(error, match=f"^epsilon is {received}; {accepted}$"):
            make(value)


def test_bad_parameters_are_refused_when_made():
    for make, error, message in [
        (lambda: rules.Gamma(0.1, lookahead=0), ValueError, "lookahead is 0; pass .* at least 1"),
        (lambda: rules.Gamma(0.1, lookahead=-2), ValueError, "lookahead is -2; pass"),
        (lambda: rules.Gamma(0.1, lookahead=1.0), TypeError, r"lookahead is 1\.0; pass an integer"),
        (lambda: rules.Gamma(0.1, lookahead=True), TypeError, "lookahead is True; pass an integer"),
        (lambda: rules.FixedDepth(-1), ValueError, "depth is -1; pass an integer at least 0"),
        (lambda: rules.FixedDepth(2.0), TypeError, r"depth is 2\.0; pass an integer"),
        (lambda: rules.FixedDepth("2"), TypeError, "depth is '2'; pass an integer"),
        (lambda: rules.FixedDepth(False), TypeError, "depth is False; pass an integer"),
        (lambda: rules.FixedBlocks(0), ValueError, "side is 0; pass an integer at least 1"),
        (lambda: rules.FixedBlocks(-3), ValueError, "side is -3; pass an integer at least 1"),
        (lambda: rules.FixedBlocks(2.5), TypeError, r"side is 2\.5; pass an integer"),
        (lambda: rules.FixedBlocks(True), TypeError, "side is True; pass an integer"),
        (lambda: rules.RandomQuadrants(-0.1), ValueError, r"p is -0\.1; pass .* \[0, 1\]"),
        (lambda: rules.RandomQuadrants(1.5), ValueError, r"p is 1\.5; pass .* in \[0, 1\]"),
        (lambda: rules.RandomQuadrants(NAN), ValueError, r"p is nan; pass .* in \[0, 1\]"),
        (lambda: rules.RandomQuadrants("half"), TypeError, "p is 'half'; pass"),
        (lambda: rules.RandomQuadrants(True), TypeError, "p is True; pass"),
        (lambda: rules.RandomQuadrants(0.5, -1), ValueError, "seed is -1; pass .* at least 0"),
        (lambda: rules.RandomQuadrants(0.5, 1.0), TypeError, r"seed is 1\.0; pass an integer"),
        (lambda: rules.RandomQuadrants(0.5, None), TypeError, "seed is None; pass an integer"),
        (lambda: rules.Optimal(), ValueError, "got nothing; pass exactly one of penalty="),
        (lambda: rules.Optimal(0.1, leaves=3), ValueError, "got penalty and leaves; pass exactly"),
        (lambda: rules.Optimal(0.1, error=0.1), ValueError, "got penalty and error; pass exactly"),
        (lambda: rules.Optimal(leaves=3, error=0.1), ValueError, "got leaves and error; pass"),
        (lambda: rules.Optimal(0.1, 3, 0.1), ValueError, "got penalty and leaves and error; pass"),
        (lambda: rules.Optimal(-0.1), ValueError, r"penalty is -0\.1; pass"),
        (lambda: rules.Optimal(NAN), ValueError, "penalty is nan; pass"),
        (lambda: rules.Optimal("0.1"), TypeError, "penalty is '0.1'; pass"),
        (lambda: rules.Optimal(True), TypeError, "penalty is True; pass"),
        (lambda: rules.Optimal(error=-1), ValueError, r"error is -1\.0; pass"),
        (lambda: rules.Optimal(error=INF), ValueError, "error is inf; pass"),
        (lambda: rules.Optimal(error="1"), TypeError, "error is '1'; pass"),
        (lambda: rules.Optimal(leaves=0), ValueError, "leaves is 0; pass an integer at least 2"),
        (lambda: rules.Optimal(leaves=-5), ValueError, "leaves is -5; pass an integer at least 2"),
        (lambda: rules.Optimal(leaves=1), ValueError, "one leaf or all tokens; pass leaves=1.0"),
        (lambda: rules.Optimal(leaves=0.0), ValueError, r"leaves is 0\.0; pass .* in \(0, 1\]"),
        (lambda: rules.Optimal(leaves=1.5), ValueError, r"leaves is 1\.5; pass .* in \(0, 1\]"),
        (lambda: rules.Optimal(leaves=NAN), ValueError, r"leaves is nan; pass .* in \(0, 1\]"),
        (lambda: rules.Optimal(leaves=True), TypeError, "leaves is True; pass an integer"),
        (lambda: rules.Optimal(leaves="3"), TypeError, "leaves is '3'; pass an integer"),
        (lambda: rules.Optimal(0.1, pooled=True), ValueError, "pooled=True pools a budget"),
    ]:
        with pytest.raises(error, match=message):
            make()


def test_bad_flags_are_refused_when_made():
    for make in [
        lambda: rules.Mass(0.1, coarse="no"),
        lambda: rules.Optimal(leaves=3, pooled="no"),
    ]:
        with pytest.raises(TypeError, match="'no'; pass"):
            make()


def test_the_global_mean_has_no_depth():
    with pytest.raises(TypeError):
        rules.GlobalMean(2)


def test_a_number_beyond_all_floats_is_refused():
    with pytest.raises(ValueError, match="epsilon is"):
        rules.Gamma(10**400)


def test_rules_are_immutable_values():
    for rule in [
        rules.Gamma(0.1),
        rules.Optimal(0.1),
        rules.FixedBlocks(2),
        rules.RandomQuadrants(0.5),
    ]:
        for field in dataclasses.fields(rule):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(rule, field.name, 1)
        assert dataclasses.replace(rule) == rule and hash(dataclasses.replace(rule)) == hash(rule)
        assert rules.Gamma(0.1) != rules.ExactGap(0.1) and rules.Variance(0.1) != rules.QuadrantGap(
            0.1
        )


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


def test_tree_functions_take_rules_by_name():
    for name in NAMES:
        assert rules.as_rule(name) == NAMES[name] and rules.as_rule(NAMES[name]) is NAMES[name]
        q, k = noise(2, 3, 5), noise(2, 64, 5, seed=1)
        scores = q @ k.transpose(1, 2) / math.sqrt(5)
        by_name, by_rule = (screen(scores, Grid(8, 8), rule) for rule in (name, NAMES[name]))
        assert torch.equal(by_name.split, by_rule.split) and by_name.rule == name
        by_name, by_rule = (screen_keys(q, k, Grid(8, 8), rule) for rule in (name, NAMES[name]))
        assert torch.equal(by_name.split, by_rule.split)


def test_what_is_no_rule_is_refused_with_the_way_out():
    for rule in [None, 0.005, rules.Gamma, ("gamma", 0.005)]:
        message = rf"^rule is {re.escape(repr(rule))}; pass one of bmfa.rules.*'gamma:0.005'"
        for call in (
            lambda: rules.as_rule(rule),
            lambda: screen(torch.zeros(4), Grid(2, 2), rule),
            lambda: screen_keys(torch.zeros(3, 5), torch.zeros(4, 5), Grid(2, 2), rule),
        ):
            with pytest.raises(TypeError, match=message):
                call()


def test_rules_say_their_command_line_name_and_are_read_from_it():
    for name in NAMES:
        assert str(NAMES[name]) == name
        assert rules.parse(name) == NAMES[name]
        assert screen(torch.zeros(256), Grid(16, 16), NAMES[name]).rule == name


def test_no_two_rules_have_one_name():
    for rule in [
        rules.Optimal(leaves=1.0),
        rules.Optimal(leaves=1234567),
        rules.Gamma(0.12345678),
        rules.RandomQuadrants(1 / 3),
    ]:
        assert repr(rules.parse(str(rule))) == repr(rule)


def test_the_seed_of_coins_comes_beside_the_name():
    assert rules.parse("random-quadrants:0.25", seed=7) == rules.RandomQuadrants(0.25, 7)


def test_names_of_no_rule_are_refused():
    for text in [
        "",
        "gamma",
        "gamma:",
        "gamma:x",
        "gamma:-1",
        "gamma:nan",
        "gamma-h0:0.1",
        "gamma-h:0.1",
        "Gamma:0.1",
        "fixed-depth:2.5",
        "fixed-blocks:0",
        "random-quadrants:2",
        "random-quadrants",
        "global-mean:3",
        "optimal-leaves:0",
        "optimal-leaves:1.5",
        "sparge:1",
    ]:
        with pytest.raises(ValueError, match=rf"^rule '{re.escape(text)}'.*NAME:VALUE"):
            rules.parse(text)


THRESHOLD_RULES = [
    rules.Gamma(0.0),
    rules.Gamma(0.0, lookahead=2),
    rules.Gamma(0.0, lookahead=9),
    rules.ExactGap(0.0),
    rules.Certified(0.0),
    rules.Mass(0.0),
    rules.Mass(0.0, coarse=True),
    rules.Optimal(0.0),
    rules.Optimal(error=0.0),
]


def test_a_constant_grid_is_one_leaf():
    for rule, dtype in itertools.product(
        THRESHOLD_RULES, [torch.float16, torch.bfloat16, torch.float32, torch.float64]
    ):
        constants = torch.tensor([0.1, 3.7, 1e4, -1e4, 0.0, 1 / 3, 6e-5], dtype=torch.float64).to(
            dtype
        )
        for size in [(1, 1), (1, 7), (5, 3), (14, 14), (37, 37)]:
            grid = Grid(*size)
            scores = constants.unsqueeze(1).expand(-1, grid.size)
            for tau in (1.0, 1e-3):
                tree = screen(scores, grid, rule, tau=tau)
                assert tree.leaf_count.tolist() == [1] * 7, (size, tau)
                assert not bool(tree.error(scores).any())
        valid = torch.arange(15 * 11) % 3 > 0
        spoilt = constants.unsqueeze(1).expand(-1, 165).clone()
        spoilt[:, ~valid] = torch.tensor([NAN, INF, -INF, 5.0, 1e3], dtype=dtype).repeat(11)
        assert screen(spoilt, Grid(15, 11), rule, valid=valid).leaf_count.tolist() == [1] * 7


def test_means_that_differ_by_rounding_are_equal():
    """Quadrants of the same values in other orders: their means are one number, to rounding."""
    for dtype, offset in itertools.product([torch.float32, torch.float64], [3.7, -100.0]):
        for side in (4, 7, 10):
            values = noise(40, 1, side * side) + offset
            order = torch.rand(
                40, 4, side * side, generator=torch.Generator().manual_seed(side)
            ).argsort(-1)
            quadrants = values.expand(40, 4, -1).gather(-1, order).view(40, 2, 2, side, side)
            scores = quadrants.transpose(2, 3).reshape(40, -1).to(dtype)
            for rule in (rules.Gamma(0.0), rules.Mass(0.0), rules.Mass(0.0, coarse=True)):
                assert bool((screen(scores, Grid(2 * side, 2 * side), rule).leaf_count == 1).all())


def test_the_smallest_step_in_a_constant_grid_is_told_or_lost_in_rounding():
    """One token a rounding above the rest: whatever is decided, the error is rounding."""
    for rule in THRESHOLD_RULES:
        scores = torch.full((4, 64), 3.7, dtype=torch.float64)
        for row, step in enumerate((1e-15, 1e-12, 1e-8, 1e-4)):
            scores[row, 27] += step
        tree = screen(scores, Grid(8, 8), rule)
        assert tree.error(scores).max() < 1e-9  # no rule may hide the step of 1e-4: E = 7.7e-11
        if not isinstance(rule, rules.Optimal) or rule.error is None:
            assert tree.leaf_count[3] > 1


def test_exact_gap_zero_is_dense():
    for dtype in [torch.float32, torch.float64]:
        scores = noise(20, 14 * 14).to(dtype)
        tree = screen(scores, Grid(14, 14), rules.ExactGap(0.0))
        assert bool((tree.leaf_count == 196).all())
        assert torch.equal(tree.reconstruct(scores), scores)


def test_random_quadrants_are_those_of_the_seed():
    grid = Grid(14, 14)
    scores = noise(3, 5, 196)

    def split(seed: int, p: float = 0.5) -> Tensor:
        return screen(scores, grid, rules.RandomQuadrants(p, seed)).split

    assert torch.equal(split(1), split(1))
    assert not torch.equal(split(1), split(2))
    torch.manual_seed(0)
    before = torch.rand(3)
    torch.manual_seed(0)
    split(3)
    assert torch.equal(torch.rand(3), before), "the global generator is not touched"
    # An independent coin for every tree and quadrant: all 16 outcomes occur in 15 x 20 trees.
    kept = {
        tuple(column)
        for seed in range(20)
        for column in split(seed)[1:5].T.tolist()  # the root, then its four quadrants
    }
    assert len(kept) == 16
    other = screen(noise(3, 5, 196, seed=9), grid, rules.RandomQuadrants(0.5, 1))
    assert torch.equal(other.split, split(1)), "a coin reads no score"


def test_random_quadrants_leave_the_expected_share():
    for p in [0.0, 0.25, 0.5, 1.0]:
        tree = screen(torch.zeros(20000, 196), Grid(14, 14), rules.RandomQuadrants(p, seed=5))
        expected = p + 4 * (1 - p) / 196
        spread = math.sqrt(4 * p * (1 - p)) * 48 / 196 / math.sqrt(20000)
        assert tree.leaf_ratio.double().mean().item() == pytest.approx(
            expected, abs=5 * spread + 1e-7
        )
        assert set(tree.leaf_count.unique().tolist()) <= {4 + 48 * k for k in range(5)}


def test_quadrants_are_whole_or_token_by_token():
    for size, rule in itertools.product(
        [(1, 1), (1, 2), (1, 3), (2, 2), (3, 1), (3, 3), (14, 14), (5, 8)],
        [rules.QuadrantGap(0.0), rules.Variance(0.0)],
    ):
        grid = Grid(*size)
        quadrant = grid.partition(1)
        scores = torch.zeros(16, grid.size, dtype=torch.float64)
        # Row r of the batch has spread in the quadrants of its bits.
        lively = torch.tensor([[bool(r >> (3 - i) & 1) for i in range(4)] for r in range(16)])
        scores = torch.where(lively[:, quadrant], noise(16, grid.size), scores)
        tree = screen(scores, grid, rule)
        sizes = quadrant.bincount(minlength=4)
        expected = torch.where(lively, sizes, sizes.clamp(max=1)).sum(-1)
        assert tree.leaf_count.tolist() == expected.tolist()
        assert (tree.leaf_index[:, 0] == 0).all()


def test_quadrant_gap_and_variance_read_what_they_say():
    grid = Grid(14, 14)
    scores = noise(50, 196) * torch.linspace(0.1, 2, 50, dtype=torch.float64).unsqueeze(1)
    parts = scores.view(50, 2, 7, 2, 7).transpose(2, 3).reshape(50, 4, 49)
    for tau in (0.5, 1.0):
        exact = energy.gap(parts, tau=tau)
        second = parts.var(-1, unbiased=False) / (2 * tau)
        for values, make in ((exact, rules.QuadrantGap), (second, rules.Variance)):
            tree = screen(scores, grid, make(0.4), tau=tau)
            assert torch.equal(tree.split[1:5].T, values > 0.4)
            assert torch.equal(tree.leaf_count, 4 + 48 * (values > 0.4).sum(-1))


def test_fixed_rules_read_no_score():
    grid = Grid(9, 7)
    for rule in (
        rules.FixedDepth(2),
        rules.FixedBlocks(4),
        rules.GlobalMean(),
        rules.FixedDepth(0),
    ):
        first, second = (screen(noise(3, 63, seed=seed), grid, rule) for seed in range(2))
        assert torch.equal(first.leaf_index, second.leaf_index)
    for depth in range(grid.depth + 2):
        tree = screen(noise(63), grid, rules.FixedDepth(depth))
        assert torch.equal(tree.leaf_index.long(), grid.partition(depth))


def test_coarse_mass_never_splits_less():
    """Z~ <= Z, so the share a split recovers is never smaller."""
    for seed in range(6):
        grid = Grid(*[(16, 16), (14, 14), (5, 13)][seed % 3])
        scores = noise(40, grid.size, seed=seed) * 3
        for epsilon in (1e-4, 1e-3, 0.01, 0.1):
            exact = screen(scores, grid, rules.Mass(epsilon))
            coarse = screen(scores, grid, rules.Mass(epsilon, coarse=True))
            assert bool(coarse.refines(exact).all())


def test_labels_of_shared_trees_are_those_of_the_bounds():
    scores = noise(5, 64) * 2
    grid = Grid(8, 8)
    alone = screen(scores, grid, rules.Certified(0.5), max_depth=2)
    shared = screen(scores.unsqueeze(1), grid, rules.Certified(0.5), max_depth=2, share=1)
    assert torch.equal(shared.flat().leaf_labels, alone.leaf_labels)
    assert torch.equal(shared.flat().leaf_boxes, alone.leaf_boxes)


def test_certified_keeps_its_promise_without_tolerance():
    for dtype, offset in itertools.product(
        [torch.float16, torch.bfloat16, torch.float32, torch.float64], [0.0, 100.0, 1e4]
    ):
        for size in [(1, 7), (14, 14), (16, 25)]:
            grid = Grid(*size)
            scores = (noise(24, grid.size) * 3 + offset).to(dtype)
            scores[::3] = scores[::3].round()  # ties and constant blocks
            scores[1::3, 0] += 9
            for tau, epsilon in itertools.product((1e-3, 1.0), (1e-6, 0.01, 0.5)):
                tree = screen(scores, grid, rules.Certified(epsilon), tau=tau)
                assert bool((tree.error(scores.double()) <= epsilon).all()), (size, tau, epsilon)
                assert not bool(tree.leaf_labels.any())


def test_certified_needs_no_more_than_the_range_bound():
    """U is below Hoeffding's bound: a block whose range is small enough is never split."""
    scores = noise(200, 64, seed=4)
    tree = screen(scores, Grid(8, 8), rules.Certified(0.5))
    whole = bounds.hoeffding(scores.amin(-1), scores.amax(-1)) <= 0.5
    calm = screen(scores / 2, Grid(8, 8), rules.Certified(0.5))
    within = bounds.hoeffding(scores.amin(-1) / 2, scores.amax(-1) / 2) <= 0.5
    assert bool((tree.leaf_count[whole] == 1).all()) and bool(within.any())
    assert bool((calm.leaf_count[within] == 1).all())


BUDGET_GRIDS = [(1, 1), (1, 7), (5, 3), (14, 14)]


def masks(grid: Grid, batch: int) -> Tensor:
    valid = torch.rand(batch, grid.size, generator=torch.Generator().manual_seed(2)) < 0.7
    valid[:, 0] = True
    return valid


def test_a_budget_of_leaves_holds_for_each_tree():
    for size in BUDGET_GRIDS:
        for dtype, masked in [(torch.float32, False), (torch.float64, True)]:
            grid = Grid(*size)
            scores = noise(16, grid.size).to(dtype) * 2
            valid = masks(grid, 16) if masked else torch.ones(16, grid.size, dtype=torch.bool)
            tokens = valid.sum(-1)
            fewest = int(tokens.min())
            for count in sorted({2, max(2, fewest // 3), fewest} - {1}) if fewest > 1 else ():
                tree = screen(scores, grid, rules.Optimal(leaves=count), valid=valid)
                assert bool((tree.leaf_count <= count).all())
            for share in (0.01, 0.3, 0.5, 1.0):
                tree = screen(scores, grid, rules.Optimal(leaves=share), valid=valid)
                allowed = (tokens * share + 1e-9).floor().clamp(min=1)
                assert bool((tree.leaf_count <= allowed).all())
            assert torch.equal(tree.leaf_count, tokens), "a share of 1.0 is every token"


def test_a_share_of_a_whole_count_is_that_count():
    """0.3 of 10 is 3, not 2.9999999999999996."""
    scores = torch.tensor([0.0, 9.0] + [0.0] * 8, dtype=torch.float64)
    tree = screen(scores, Grid(1, 10), rules.Optimal(leaves=0.3))
    counted = screen(scores, Grid(1, 10), rules.Optimal(leaves=3))
    assert torch.equal(tree.split, counted.split)


def test_a_budget_of_error_holds_for_each_tree():
    for size in BUDGET_GRIDS:
        for masked, tau in [(False, 0.1), (True, 1.0)]:
            grid = Grid(*size)
            scores = (
                noise(16, grid.size)
                * tau
                * torch.linspace(0.1, 4, 16, dtype=torch.float64)[:, None]
            )
            valid = masks(grid, 16) if masked else None
            for error in (0.0, 1e-6, 0.1, 1.0):
                tree = screen(scores, grid, rules.Optimal(error=error), tau=tau, valid=valid)
                assert bool((tree.error(scores) <= error * (1 + 1e-9) + 1e-14).all())
                narrow = screen(
                    scores.float(), grid, rules.Optimal(error=error), tau=tau, valid=valid
                )
                rounding = 1e-6 * tau
                assert bool(
                    (narrow.error(scores.float().double()) <= error * (1 + 1e-5) + rounding).all()
                )


def test_a_large_budget_of_error_holds_for_each_tree():
    for (dtype, budget), tau in itertools.product(
        [(torch.float64, 40.0), (torch.float32, 18.0)], [1e-3, 1.0]
    ):
        scores = noise(64, 64).to(dtype) * 60 * tau
        tree = screen(scores, Grid(8, 8), rules.Optimal(error=budget * tau), tau=tau)
        assert bool((tree.error(scores.double()) <= 1.001 * budget * tau).all())


def all_trees(scores: np.ndarray) -> list[tuple[int, float]]:
    """Leaves and E of the 17 trees on a 4x4 grid: one leaf, or four quarters, each split or not."""
    quarters = [scores[y : y + 2, x : x + 2] for y in (0, 2) for x in (0, 2)]
    trees = [(1, 16 * np.exp(scores.mean()))]
    for splits in itertools.product((False, True), repeat=4):
        held = sum(
            np.exp(quarter).sum() if split else 4 * np.exp(quarter.mean())
            for quarter, split in zip(quarters, splits, strict=True)
        )
        trees.append((4 + 3 * sum(splits), held))
    return [(leaves, -math.log(held / np.exp(scores).sum())) for leaves, held in trees]


def test_a_budget_takes_the_best_tree_of_the_path_and_not_of_all_trees():
    """No tree with as many leaves has less error; one with fewer may meet the same budget."""
    better = {"error": 0, "leaves": 0}
    for seed in range(40):
        scores = noise(16, seed=seed)
        trees = all_trees(scores.view(4, 4).numpy())
        for budget in (0.05, 0.1, 0.2, 4, 7):
            by_error = isinstance(budget, float)
            rule = rules.Optimal(error=budget) if by_error else rules.Optimal(leaves=budget)
            tree = screen(scores, Grid(4, 4), rule)
            leaves, error = int(tree.leaf_count), float(tree.error(scores))
            assert (error <= budget + 1e-12) if by_error else (leaves <= budget)
            assert all(other >= error - 1e-12 for count, other in trees if count <= leaves)
            if by_error:
                better["error"] += any(n < leaves and e <= budget for n, e in trees)
            else:
                better["leaves"] += any(n <= budget and e < error - 1e-12 for n, e in trees)
    assert better["error"] and better["leaves"]  # as the documentation of Optimal says


def test_pooled_budgets_hold_on_average():
    for dtype in [torch.float32, torch.float64]:
        grid = Grid(14, 14)
        scores = (
            noise(3, 8, 196) * torch.linspace(0.2, 4, 24, dtype=torch.float64).view(3, 8, 1)
        ).to(dtype)
        for leaves in (2, 20, 196, 0.02, 0.25, 1.0):
            tree = screen(scores, grid, rules.Optimal(leaves=leaves, pooled=True))
            budget = 196 * leaves if isinstance(leaves, float) else leaves
            assert tree.leaf_count.double().mean() <= budget + 1e-6
        spread = screen(scores, grid, rules.Optimal(leaves=0.25, pooled=True)).leaf_count
        assert spread.min() < 49 < spread.max(), "one penalty spends the budget where it pays"
        for error in (0.0, 1e-3, 0.1):
            tree = screen(scores, grid, rules.Optimal(error=error, pooled=True))
            assert tree.error(scores.double()).mean() <= error + 1e-6


def test_pooled_trees_share_one_penalty():
    grid = Grid(14, 14)
    scores = noise(24, 196) * torch.linspace(0.2, 4, 24, dtype=torch.float64).view(24, 1)
    leaves = screen(scores, grid, rules.Optimal(3e-3)).leaf_count.sum()
    pooled = screen(scores, grid, rules.Optimal(leaves=leaves.item() / 196 / 24, pooled=True))
    same = screen(scores, grid, rules.Optimal(3e-3))
    assert torch.equal(pooled.split, same.split)


def test_a_leaf_budget_above_the_tokens_is_refused():
    for rule in [rules.Optimal(leaves=17), rules.Optimal(leaves=17, pooled=True)]:
        with pytest.raises(
            ValueError, match=r"leaves is 17 and the 4x4 grid has 16 .* from 2 to 16"
        ):
            screen(torch.zeros(16), Grid(4, 4), rule)
        valid = torch.ones(3, 36, dtype=torch.bool)
        valid[1, 10:] = False
        with pytest.raises(
            ValueError, match=r"leaves is 17 and the 6x6 grid has 10 valid .* 2 to 10"
        ):
            screen(torch.zeros(3, 36), Grid(6, 6), rule, valid=valid)
        assert screen(torch.zeros(36), Grid(6, 6), rule).leaf_count == 1
