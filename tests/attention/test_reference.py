"""The float64 specification: hand-checked cases, the paper's theorems, and brute force."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bmfa import rules
from bmfa.attention.kernels import reference
from bmfa.attention.kernels.reference import build_tree

SHAPES = [(1, 1), (1, 7), (7, 1), (14, 14), (16, 25), (37, 37)]
THRESHOLD_RULES = [
    rules.Gamma(0.0),
    rules.Gamma(0.0, lookahead=3),
    rules.ExactGap(0.0),
    rules.Certified(0.0),
    rules.Mass(0.0),
    rules.Mass(0.0, coarse=True),
    rules.Optimal(penalty=0.0),
]
ALL_RULES = [
    rules.Gamma(0.05),
    rules.Gamma(0.05, lookahead=2),
    rules.ExactGap(0.2),
    rules.Certified(0.2),
    rules.Mass(0.002),
    rules.Mass(0.002, coarse=True),
    rules.Optimal(penalty=0.002),
    rules.Optimal(leaves=0.3),
    rules.Optimal(error=0.05),
    rules.FixedDepth(2),
    rules.FixedBlocks(3),
    rules.QuadrantGap(0.5),
    rules.Variance(0.5),
    rules.RandomQuadrants(0.5),
    rules.GlobalMean(),
]
# Rules that decide on a block without regard to max_depth.
TOP_DOWN_RULES = [r for r in ALL_RULES if not isinstance(r, (rules.Optimal, rules.FixedBlocks))]
COINS = [True, False, False, True]
sweep = settings(deadline=None, derandomize=True, max_examples=60)


def random_case(seed, largest=12):
    """A grid of structured noise with a mask (every third without) and a temperature."""
    generator = np.random.default_rng(seed)
    height, width = generator.integers(1, largest + 1, 2)
    scores = generator.normal(size=(height, width)) * generator.choice([0.3, 2.0, 8.0])
    scores[: height // 2] += generator.choice([0.0, 3.0])
    valid = None
    if seed % 3:
        valid = generator.random((height, width)) < generator.choice([0.2, 0.8])
        valid[generator.integers(height), generator.integers(width)] = True
    return scores, valid, float(generator.choice([0.25, 1.0, 3.0]))


def tokens_of(scores, valid):
    return scores[np.ones(scores.shape, bool) if valid is None else valid]


def kl_divergence(approximate, exact, tau):
    """KL(q || p) of the softmax distributions of two sets of scores."""
    log_q = (approximate - approximate.max()) / tau
    log_p = (exact - exact.max()) / tau
    log_q -= np.log(np.exp(log_q).sum())
    log_p -= np.log(np.exp(log_p).sum())
    return float((np.exp(log_q) * (log_q - log_p)).sum())


def refines(finer, coarser):
    """Return True if every leaf of `finer` is inside one leaf of `coarser`."""
    coarse = coarser.leaf_index()
    return all(np.unique(leaf).size == 1 for leaf in finer.leaf_values(coarse))


def block_values(scores, valid, box):
    top, left, bottom, right = box
    return scores[top:bottom, left:right][valid[top:bottom, left:right]]


def split(valid, box):
    """The children of a block that hold valid tokens."""
    top, left, bottom, right = box
    if block_values(valid, valid, box).size == 1:
        return []
    middle, centre = top + (bottom - top) // 2, left + (right - left) // 2
    boxes = [
        (north, west, south, east)
        for north, south in ((top, middle), (middle, bottom))
        for west, east in ((left, centre), (centre, right))
    ]
    return [child for child in boxes if block_values(valid, valid, child).size]


def test_a_side_splits_into_its_floored_half_and_the_rest():
    assert build_tree(np.zeros((1, 7)), rules.FixedDepth(1)).leaves == [(0, 0, 1, 3), (0, 3, 1, 7)]
    assert build_tree(np.zeros((3, 5)), rules.FixedDepth(1)).leaves == [
        (0, 0, 1, 2),
        (0, 2, 1, 5),
        (1, 0, 3, 2),
        (1, 2, 3, 5),
    ]


def test_leaves_come_in_depth_first_child_order():
    tree = build_tree(np.zeros((4, 4)), rules.FixedDepth(2))
    assert tree.leaf_index().tolist() == [
        [0, 1, 4, 5],
        [2, 3, 6, 7],
        [8, 9, 12, 13],
        [10, 11, 14, 15],
    ]


def test_tiles_leave_remainders_at_the_right_and_bottom():
    tree = build_tree(np.zeros((3, 5)), rules.FixedBlocks(2))
    assert tree.leaves[2] == (0, 4, 2, 5)
    assert tree.leaf_index().tolist() == [[0, 0, 1, 1, 2], [0, 0, 1, 1, 2], [3, 3, 4, 4, 5]]
    assert build_tree(np.zeros((3, 5)), rules.FixedBlocks(9)).leaves == [(0, 0, 3, 5)]


@pytest.mark.parametrize("rule", ALL_RULES, ids=repr)
@pytest.mark.parametrize("shape", SHAPES)
def test_leaves_partition_the_grid(shape, rule):
    scores = np.random.default_rng(7).normal(size=shape) * 2
    tree = build_tree(scores, rule, coins=COINS)
    covered = np.zeros(shape, int)
    for top, left, bottom, right in tree.leaves:
        covered[top:bottom, left:right] += 1
    assert (covered == 1).all()
    assert len(tree.leaves) == len(tree.depths) == len(tree.depth_limited)
    assert not any(tree.depth_limited)


@sweep
@given(st.integers(0, 10**6), st.sampled_from(ALL_RULES), st.sampled_from([None, 0, 1, 3]))
def test_leaves_partition_the_valid_tokens(seed, rule, max_depth):
    scores, valid, tau = random_case(seed)
    tree = build_tree(scores, rule, tau=tau, max_depth=max_depth, valid=valid, coins=COINS)
    index = tree.leaf_index()
    assert ((index >= 0) == (True if valid is None else valid)).all()
    assert set(index[index >= 0]) == set(range(len(tree.leaves)))
    if max_depth is not None and not isinstance(rule, rules.FixedBlocks):
        assert max(tree.depths) <= max_depth
    reconstructed = tree.reconstruct(scores)
    assert np.isclose(tokens_of(reconstructed, valid).sum(), tokens_of(scores, valid).sum())


def test_padding_is_never_read():
    scores, valid = np.random.default_rng(3).normal(size=(9, 6)), np.zeros((9, 6), bool)
    valid[2:7, 1:5] = True
    poisoned = np.where(valid, scores, np.nan)
    for rule in ALL_RULES:
        tree = build_tree(scores, rule, valid=valid, coins=COINS)
        assert tree == build_tree(poisoned, rule, valid=valid, coins=COINS)
        assert tree.error(poisoned) == tree.error(scores)


def test_a_node_with_one_valid_token_is_a_leaf():
    valid = np.zeros((4, 4), bool)
    valid[3, 3] = valid[0, 0] = True
    tree = build_tree(np.arange(16.0).reshape(4, 4), rules.ExactGap(0.0), valid=valid)
    assert tree.leaves == [(0, 0, 2, 2), (2, 2, 4, 4)]
    assert tree.node_count == 3


def test_nodes_are_reached_through_a_single_child():
    scores, valid = np.zeros((8, 8)), np.zeros((8, 8), bool)
    scores[0, 0], valid[:2, :2] = 5.0, True
    for rule in (rules.ExactGap(0.1), rules.Optimal(penalty=0.01), rules.Optimal(leaves=4)):
        tree = build_tree(scores, rule, valid=valid)
        assert tree.leaves == [(0, 0, 1, 1), (0, 1, 1, 2), (1, 0, 2, 1), (1, 1, 2, 2)]
        assert tree.depths == [3] * 4
    assert len(build_tree(scores, rules.Gamma(0.0), valid=valid).leaves) == 1


def test_energies_of_two_tokens():
    tau = 0.5
    assert reference.free_energy([1.0, -1.0], tau) == pytest.approx(tau * math.log(math.cosh(2.0)))
    assert reference.gap([1.0, -1.0], tau) == pytest.approx(tau * math.log(math.cosh(2.0)))
    assert reference.proxy([1.0, -2.0], [1, 3]) == pytest.approx(
        math.log((math.e + 3 * math.exp(-2)) / 4)
    )
    assert reference.refinement_score([1.0, -2.0], [1, 3]) == pytest.approx(
        math.log((math.e + 3 * math.exp(-2)) / 4) + 1.25
    )


@pytest.mark.parametrize("spread", [1e-160, 1e-100, 1e-12, 1e-7, 1e-5, 1e-3, 0.0011, 0.1])
def test_gap_near_zero_follows_the_cumulant_expansion(spread):
    scores = np.array([3.0, -1.0, -1.0, -1.0]) * spread
    expansion = 3 / 2 * spread**2 + 6 / 6 * spread**3 - 6 / 24 * spread**4 - 120 / 120 * spread**5
    assert reference.gap(scores) == pytest.approx(expansion, rel=max(1e-12, spread**4))


def test_energies_at_large_scores_and_low_temperature():
    scores = 1e4 + np.array([0.0, 1.0, 7.0, -1e4])
    assert reference.gap(scores, 1e-3) == pytest.approx(7 - scores.mean() + 1e4 - 1e-3 * np.log(4))
    assert reference.free_energy(scores, 1e-3) == pytest.approx(1e4 + 7 - 1e-3 * np.log(4))


@sweep
@given(st.integers(0, 10**6), st.sampled_from([1e-9, 1e-4, 0.1, 1.0, 30.0, 3e3]))
def test_two_point_bounds_enclose_the_gap(seed, spread):
    generator = np.random.default_rng(seed)
    scores = generator.normal(size=generator.integers(2, 60)) ** 3 * spread
    tau = float(generator.choice([0.1, 1.0]))
    gap = reference.gap(scores, tau)
    assert reference.lower_bound(scores, tau) <= gap * (1 + 1e-12)
    assert gap <= reference.upper_bound(scores, tau) * (1 + 1e-12)
    assert reference.upper_bound(scores, tau) <= np.ptp(scores) ** 2 / (8 * tau) * (1 + 1e-12)


def test_two_point_bounds_are_tight_on_two_points():
    scores = [0.0] * 9 + [4.0]
    assert reference.upper_bound(scores) == pytest.approx(reference.gap(scores), rel=1e-13)
    assert reference.lower_bound(scores) == pytest.approx(reference.gap(scores), rel=1e-13)


@sweep
@given(st.integers(0, 10**6), st.sampled_from(ALL_RULES))
def test_global_kl_equivalence(seed, rule):
    scores, valid, tau = random_case(seed)
    tree = build_tree(scores, rule, tau=tau, valid=valid, coins=COINS)
    exact, approximate = tokens_of(scores, valid), tokens_of(tree.reconstruct(scores), valid)
    error = tree.error(scores, tau)
    assert error == pytest.approx(tau * kl_divergence(approximate, exact, tau), abs=1e-10)
    difference = reference.free_energy(exact, tau) - tree.proxy_free_energy(scores, tau)
    assert error == pytest.approx(difference, abs=1e-10)
    assert error >= 0.0


@pytest.mark.parametrize("rule", THRESHOLD_RULES, ids=repr)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_constant_grid_is_one_leaf(shape, rule):
    for value in (0.0, 0.1, -1e4 / 3):
        tree = build_tree(np.full(shape, value), rule, tau=1e-3)
        assert tree.leaves == [(0, 0, *shape)]
        assert tree.error(np.full(shape, value), 1e-3) == 0.0


@pytest.mark.parametrize("rule", THRESHOLD_RULES, ids=repr)
def test_a_constant_quadrant_is_one_leaf_whatever_surrounds_it(rule):
    scores = np.random.default_rng(5).normal(size=(37, 37)) * 3
    scores[:18, 18:] = 0.1
    tree = build_tree(scores, rule)
    assert (0, 18, 18, 37) in tree.leaves
    assert len(tree.leaves) == 37 * 37 - 18 * 19 + 1


def test_children_of_equal_mean_score_zero():
    generator = np.random.default_rng(11)
    for _ in range(50):
        quadrant = generator.normal(size=(4, 4))
        flips = [quadrant, quadrant[::-1], quadrant[:, ::-1], quadrant.T]
        scores = np.block([flips[:2], flips[2:]]) + generator.normal() * 100
        assert len(build_tree(scores, rules.Gamma(0.0)).leaves) == 1
        nearly = scores + np.kron(np.eye(2), np.full((4, 4), 1e-9))
        assert len(build_tree(nearly, rules.Gamma(0.0)).leaves) > 1


def test_incompleteness_of_the_one_step_score():
    scores = np.where(np.indices((4, 4)).sum(0) % 2, 2.0, -2.0)
    assert len(build_tree(scores, rules.Gamma(0.0)).leaves) == 1
    assert len(build_tree(scores, rules.ExactGap(0.5)).leaves) == 16
    assert len(build_tree(scores, rules.Gamma(0.5, lookahead=2)).leaves) == 16
    assert reference.gap(scores) == pytest.approx(math.log(math.cosh(2.0)))


def test_lookahead_does_not_stop_at_the_depth_limit():
    scores = np.where(np.indices((4, 4)).sum(0) % 2, 2.0, -2.0)
    tree = build_tree(scores, rules.Gamma(0.5, lookahead=2), max_depth=1)
    assert tree.depths == [1] * 4
    assert tree.depth_limited == [True] * 4


def test_gamma_at_the_threshold_keeps_the_node():
    scores = np.array([[1.0, 0.0], [0.0, 0.0]])
    score = reference.refinement_score([1.0, 0.0, 0.0, 0.0], [1, 1, 1, 1])
    assert len(build_tree(scores, rules.Gamma(score * (1 + 1e-12))).leaves) == 1
    assert len(build_tree(scores, rules.Gamma(score * (1 - 1e-12))).leaves) == 4


def gamma_by_definition(scores, valid, tau, lookahead, epsilon, box):
    """Leaves of the Gamma rule below a block, by slices and the plain formula."""
    parts = descendants = split(valid, box)
    if not parts:
        return [box]
    for _ in range(lookahead - 1):
        descendants = [deeper for part in descendants for deeper in split(valid, part) or [part]]
    values = [block_values(scores, valid, part) for part in descendants]
    whole = np.concatenate(values)
    mass = sum(part.size * np.exp(part.mean() / tau) for part in values)
    if tau * np.log(mass / whole.size) - whole.mean() <= epsilon:
        return [box]
    arguments = scores, valid, tau, lookahead, epsilon
    return [leaf for part in parts for leaf in gamma_by_definition(*arguments, part)]


@sweep
@given(st.integers(0, 10**6), st.integers(1, 3))
def test_gamma_agrees_with_its_definition(seed, lookahead):
    scores, valid, tau = random_case(seed)
    tree = build_tree(scores, rules.Gamma(0.05, lookahead), tau=tau, valid=valid)
    everything = np.ones(scores.shape, bool) if valid is None else valid
    root = (0, 0, *scores.shape)
    assert tree.leaves == gamma_by_definition(scores, everything, tau, lookahead, 0.05, root)


@sweep
@given(st.integers(0, 10**6))
def test_lookahead_and_threshold_nesting(seed):
    scores, valid, tau = random_case(seed)
    deeper = [build_tree(scores, rules.Gamma(0.05, h), tau=tau, valid=valid) for h in (1, 2, 3)] + [
        build_tree(scores, rules.ExactGap(0.05), tau=tau, valid=valid)
    ]
    for coarse, fine in itertools.pairwise(deeper):
        assert refines(fine, coarse)
    for kind in (rules.Gamma, rules.ExactGap, rules.Certified, rules.Mass):
        fine, coarse = (
            build_tree(scores, kind(epsilon), tau=tau, valid=valid) for epsilon in (0.02, 0.1)
        )
        assert refines(fine, coarse)
        assert fine.error(scores, tau) <= coarse.error(scores, tau) + 1e-12


@sweep
@given(st.integers(0, 10**6), st.integers(0, 3), st.sampled_from(TOP_DOWN_RULES))
def test_depth_limited_leaves_are_those_one_more_level_splits(seed, depth, rule):
    scores, valid, tau = random_case(seed)
    shallow, deep = (
        build_tree(scores, rule, tau=tau, max_depth=limit, valid=valid, coins=COINS)
        for limit in (depth, depth + 1)
    )
    stopped = {
        box for box, limited in zip(shallow.leaves, shallow.depth_limited, strict=True) if limited
    }
    assert stopped == set(shallow.leaves) - set(deep.leaves)
    assert shallow.proxy_free_energy(scores, tau) <= deep.proxy_free_energy(scores, tau) + 1e-12


@sweep
@given(st.integers(0, 10**6), st.sampled_from([None, 1, 2]))
def test_certified_labels_tell_the_truth(seed, max_depth):
    scores, valid, tau = random_case(seed)
    tree = build_tree(scores, rules.Certified(0.1), tau=tau, max_depth=max_depth, valid=valid)
    assert tree.labels is not None
    gaps = [reference.gap(leaf, tau) for leaf in tree.leaf_values(scores)]
    for label, limited, gap in zip(tree.labels, tree.depth_limited, gaps, strict=True):
        assert limited == (label != "safe")
        if label == "safe":
            assert gap <= 0.1 * (1 + 1e-12)
        if label == "must-refine":
            assert gap > 0.1 * (1 - 1e-12)
    if set(tree.labels) == {"safe"}:
        assert tree.error(scores, tau) <= 0.1 * (1 + 1e-12)


def test_certified_labels_by_hand():
    high, flat = np.array([[8.0, 0.0], [0.0, 0.0]]), np.full((2, 2), 0.3)
    mixed = np.array([[1.0, -1.0], [-1.0, 1.0]])  # two points: L = G = U = log cosh 1 = 0.434
    scores = np.block([[high, flat], [mixed, flat - 1.0]])
    tree = build_tree(scores, rules.Certified(0.43), max_depth=1)
    assert tree.labels == ["must-refine", "safe", "must-refine", "safe"]
    assert tree.depth_limited == [True, False, True, False]
    rows = np.array([[3.0, 0.0, -3.0, 0.0]])
    lower, upper = reference.lower_bound(rows), reference.upper_bound(rows)
    middle = build_tree(rows, rules.Certified((lower + upper) / 2), max_depth=0)
    assert middle.labels == ["undecided"]
    assert build_tree(scores, rules.Gamma(0.1)).labels is None


def test_mass_by_hand():
    scores = np.zeros((4, 4))
    scores[0, 0], scores[3, 3] = 5.0, 1.0
    z = np.exp(scores).sum()
    root = 16 * (math.exp(6 / 16)) / z
    children = (4 * math.exp(5 / 4) + 4 * math.exp(1 / 4) + 8) / z
    corner = (math.exp(5) + 3 - 4 * math.exp(5 / 4)) / z
    small = (math.e + 3 - 4 * math.exp(1 / 4)) / z
    assert small < children - root < corner
    for epsilon, leaves in [
        (small * 0.999, 10),
        (small * 1.001, 7),
        (children - root, 7),
        (0.05, 1),
    ]:
        assert len(build_tree(scores, rules.Mass(epsilon * (1 - 1e-12))).leaves) == leaves


def test_coarse_mass_normalises_by_what_it_has_seen():
    scores = np.zeros((4, 4))
    scores[0, 0], scores[3, 3] = 5.0, 1.0
    seen = 4 * math.exp(5 / 4) + 4 * math.exp(1 / 4) + 8  # Z~_0; Z~_1 counts every token
    split = (seen - 16 * math.exp(6 / 16)) / seen
    small = (math.e + 3 - 4 * math.exp(1 / 4)) / np.exp(scores).sum()
    for epsilon, leaves in [(split * 1.001, 1), (split * 0.999, 7), (small * 0.999, 10)]:
        assert len(build_tree(scores, rules.Mass(epsilon, coarse=True)).leaves) == leaves


def test_coarse_mass_keeps_the_leaves_of_earlier_levels_in_the_sum():
    scores = np.zeros((8, 8))
    scores[0, 0], scores[3, 3] = 8.0, 2.0
    scores[4:, 4:] = np.where(np.indices((4, 4)).sum(0) % 2, 6.0, -6.0)  # a leaf at depth 1
    seen = math.exp(8) + math.exp(2) + 14 + 48
    score = (math.exp(2) + 3 - 4 * math.exp(2 / 4)) / seen
    assert len(build_tree(scores, rules.Mass(score * 1.001, coarse=True)).leaves) == 10
    assert len(build_tree(scores, rules.Mass(score * 0.999, coarse=True)).leaves) == 13


def test_quadrants_are_kept_token_by_token_or_as_a_mean():
    scores = np.zeros((6, 6))
    scores[0, 0], scores[5, 5] = 9.0, 1.0
    gaps = [reference.gap(scores[:3, :3]), reference.gap(scores[3:, 3:])]
    assert len(build_tree(scores, rules.QuadrantGap(gaps[1] * 1.01)).leaves) == 9 + 3
    assert len(build_tree(scores, rules.QuadrantGap(gaps[1] * 0.99)).leaves) == 18 + 2
    variance = scores[3:, 3:].var()
    assert len(build_tree(scores, rules.Variance(variance / 4 * 1.01), tau=2.0).leaves) == 9 + 3
    assert len(build_tree(scores, rules.Variance(variance / 4 * 0.99), tau=2.0).leaves) == 18 + 2
    assert len(build_tree(scores, rules.QuadrantGap(9.0)).leaves) == 4


def test_coins_count_the_quadrants_of_some_area():
    def kept(shape, coins, valid=None):
        rule = rules.RandomQuadrants(0.5)
        return build_tree(np.zeros(shape), rule, coins=coins, valid=valid).leaves

    assert kept((1, 4), [False, True]) == [(0, 0, 1, 2), (0, 2, 1, 3), (0, 3, 1, 4)]
    assert kept((4, 4), [False, False, True, False])[2:6] == [
        (2, 0, 3, 1),
        (2, 1, 3, 2),
        (3, 0, 4, 1),
        (3, 1, 4, 2),
    ]
    valid = np.ones((4, 4), bool)
    valid[:2, :2] = False
    assert len(kept((4, 4), [True, False, False, True], valid)) == 2 + 4
    assert kept((1, 1), []) == [(0, 0, 1, 1)]


def all_trees_of_depth_two(scores):
    """The 17 trees on a 4x4 grid as (leaf boxes, leaf count, mass kept)."""
    valid = np.ones((4, 4), bool)
    root = (0, 0, 4, 4)
    choices = [([block], split(valid, block)) for block in split(valid, root)]
    partitions = [[root], *([*itertools.chain(*choice)] for choice in itertools.product(*choices))]
    mass = {
        box: values.size * math.exp(values.mean()) / np.exp(scores).sum()
        for box in set(itertools.chain(*partitions))
        for values in [block_values(scores, valid, box)]
    }
    return [(set(boxes), len(boxes), sum(mass[box] for box in boxes)) for boxes in partitions]


def hull_of(trees):
    """Trees that are best at some penalty, from few leaves to many."""
    best = {}
    for tree in trees:
        if tree[1] not in best or tree[2] > best[tree[1]][2]:
            best[tree[1]] = tree
    hull = []
    for tree in sorted(best.values(), key=lambda tree: tree[1]):
        while len(hull) > 1 and (tree[2] - hull[-1][2]) * (hull[-1][1] - hull[-2][1]) >= (
            hull[-1][2] - hull[-2][2]
        ) * (tree[1] - hull[-1][1]):
            hull.pop()
        hull.append(tree)
    return hull


@sweep
@given(st.integers(0, 10**6))
def test_optimal_agrees_with_brute_force(seed):
    generator = np.random.default_rng(seed)
    scores = generator.normal(size=(4, 4)) * generator.choice([0.5, 2.0, 4.0])
    trees = all_trees_of_depth_two(scores)
    assert len(trees) == 17
    for penalty in np.exp(generator.uniform(-9, -1, 8)):
        boxes, *_ = max(trees, key=lambda tree: tree[2] - penalty * tree[1])
        assert set(build_tree(scores, rules.Optimal(penalty=float(penalty))).leaves) == boxes
    hull = hull_of(trees)
    for budget in range(2, 17):
        boxes, *_ = [tree for tree in hull if tree[1] <= budget][-1]
        assert set(build_tree(scores, rules.Optimal(leaves=budget)).leaves) == boxes
    fraction = build_tree(scores, rules.Optimal(leaves=0.45))
    assert fraction.leaves == build_tree(scores, rules.Optimal(leaves=7)).leaves
    for error in np.exp(generator.uniform(-6, 0, 8)):
        boxes, *_ = next(tree for tree in hull if -math.log(tree[2]) <= error)
        assert set(build_tree(scores, rules.Optimal(error=float(error))).leaves) == boxes


def optimal_by_recursion(scores, valid, tau, penalty, max_depth):
    """(leaf, depth-limited) of the tree by the advantage A_B of every node."""
    total = np.exp(scores[valid] / tau).sum()

    def mass(box):
        values = block_values(scores, valid, box)
        return values.size * math.exp(values.mean() / tau) / total

    def advantage(box, depth, limit):
        parts = split(valid, box)
        if not parts or depth == limit:
            return 0.0
        inner = sum(map(mass, parts)) - mass(box) - penalty * (len(parts) - 1)
        return max(0.0, inner + sum(advantage(part, depth + 1, limit) for part in parts))

    def walk(box, depth):
        if advantage(box, depth, max_depth) > 1e-13:
            return [leaf for part in split(valid, box) for leaf in walk(part, depth + 1)]
        return [(box, depth == max_depth and advantage(box, 0, None) > 1e-13)]

    return walk((0, 0, *scores.shape), 0)


@sweep
@given(st.integers(0, 10**6), st.sampled_from([None, 0, 1, 2]))
def test_optimal_agrees_with_the_recursion(seed, max_depth):
    scores, valid, tau = random_case(seed, largest=9)
    everything = np.ones(scores.shape, bool) if valid is None else valid
    penalty = float(np.exp(np.random.default_rng(seed).uniform(-9, -2)))
    tree = build_tree(
        scores, rules.Optimal(penalty=penalty), tau=tau, max_depth=max_depth, valid=valid
    )
    expected = optimal_by_recursion(scores, everything, tau, penalty, max_depth)
    assert list(zip(tree.leaves, tree.depth_limited, strict=True)) == expected


@sweep
@given(st.integers(0, 10**6), st.sampled_from([None, 2]))
def test_budgets_hold_and_are_used(seed, max_depth):
    scores, valid, tau = random_case(seed)
    count = tokens_of(scores, valid).size

    def tree(**rule):
        return build_tree(scores, rules.Optimal(**rule), tau=tau, max_depth=max_depth, valid=valid)

    finest = tree(penalty=0.0)
    assert tree(leaves=1.0).leaves == finest.leaves
    if count > 1:  # an integer of 1 is refused
        assert tree(leaves=count).leaves == finest.leaves
    assert tree(error=0.0).leaves == finest.leaves
    previous = 1
    for budget in range(2, count + 1):
        leaves = len(tree(leaves=budget).leaves)
        assert previous <= leaves <= budget
        previous = leaves
    limited = tree(error=0.1)
    assert limited.error(scores, tau) <= max(0.1, finest.error(scores, tau))


def test_symmetric_gains_enter_the_path_together():
    generator = np.random.default_rng(2)
    quadrant = generator.normal(size=(8, 8))
    scores = np.block([[quadrant, quadrant[::-1]], [quadrant[:, ::-1], quadrant.T]])
    counts = {len(build_tree(scores, rules.Optimal(leaves=n)).leaves) for n in range(2, 257)}
    assert all((count - 4) % 12 == 0 for count in counts - {1})  # a split in all four quadrants


def corner_settings():
    """Minority of k tokens in the top-left corner, of at least half the Gibbs mass."""
    for k in (1, 2, 4, 8, 16, 32, 64):
        mask = np.zeros((16, 16), bool)
        side = math.isqrt(k)
        mask[:side, :side] = True
        mask.flat[np.flatnonzero(~mask)[: k - side * side]] = True
        for step in range(91):
            scores = np.where(mask, step / 10, 0.0)
            if k * math.exp(step / 10) >= 256 - k:
                yield scores


def test_synthetic_sweep_of_the_paper():
    grids = list(corner_settings())
    trees = [build_tree(grid, rules.Gamma(0.005), max_depth=4) for grid in grids]
    gaps = [tree.error(grid) for tree, grid in zip(trees, grids, strict=True)]
    assert len(grids) == 396
    assert sum(len(tree.leaves) for tree in trees) == 5874
    assert round(float(np.mean(gaps)), 5) == 0.26061
    assert round(float(np.percentile(gaps, 95)), 5) == 2.03472


def test_synthetic_sweep_of_the_optimal_tree():
    grids = list(corner_settings())
    trees = [build_tree(grid, rules.Optimal(penalty=0.001)) for grid in grids]
    gaps = [tree.error(grid) for tree, grid in zip(trees, grids, strict=True)]
    assert np.mean(gaps) <= 0.002
    assert sum(len(tree.leaves) for tree in trees) / (256 * 396) <= 0.065


def test_translation_leaves_every_tree_alone():
    scores = np.round(np.random.default_rng(4).normal(size=(14, 14)) * 64) / 64
    for rule in ALL_RULES:
        tree = build_tree(scores, rule, coins=COINS)
        assert tree == build_tree(scores + 2.0**13, rule, coins=COINS)


@pytest.mark.parametrize("rule", ALL_RULES, ids=repr)
def test_large_scores_at_low_temperature(rule):
    scores = np.random.default_rng(8).uniform(-1e4, 1e4, (14, 14))
    tree = build_tree(scores, rule, tau=1e-3, coins=COINS)
    error = tree.error(scores, 1e-3)
    assert np.isfinite(error)
    approximate = tree.reconstruct(scores)
    assert error == pytest.approx(
        1e-3 * kl_divergence(approximate, scores, 1e-3), rel=1e-9, abs=1e-9
    )


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
def test_termination_and_worst_case_tree_size(size):
    scores = np.random.default_rng(size).normal(size=(size, size))
    tree = build_tree(scores, rules.ExactGap(0.0))
    assert len(tree.leaves) == size * size
    assert tree.node_count == (4 * len(tree.leaves) - 1) // 3


def qkv(seed, batch, heads, tokens, d=5):
    generator = np.random.default_rng(seed)
    return [generator.normal(size=(batch, heads, tokens, d)) * 2 for _ in range(3)]


@pytest.mark.parametrize(("height", "width", "prefix"), [(1, 1, 0), (1, 7, 2), (5, 4, 1)])
@pytest.mark.parametrize("masked", [False, True])
def test_exact_gap_zero_is_dense_attention(height, width, prefix, masked):
    q, k, v = qkv(1, 2, 2, prefix + height * width)
    valid = None
    if masked:
        valid = np.random.default_rng(2).random((2, height * width)) < 0.6
        valid[:, 0] = True
    options = {"prefix": prefix, "tau": 0.7, "scale": 0.3, "valid": valid}
    output, trees = reference.per_query_attention(
        q, k, v, height, width, rules.ExactGap(0.0), **options
    )
    np.testing.assert_allclose(output, reference.dense_attention(q, k, v, **options), atol=1e-12)
    assert len(trees) == len(trees[0]) == 2
    assert len(trees[0][0]) == prefix + height * width


def test_dense_attention_by_hand():
    q, k, v = (
        np.ones((1, 1, 2, 1)),
        np.array([[[[0.0], [math.log(3)]]]]),
        np.array([[[[0.0], [4.0]]]]),
    )
    np.testing.assert_allclose(reference.dense_attention(q, k, v), [[[[3.0], [3.0]]]])
    output, _ = reference.per_query_attention(q, k, v, 1, 2, rules.GlobalMean())
    np.testing.assert_allclose(output, [[[[2.0], [2.0]]]])


@pytest.mark.parametrize("rule", [rules.Gamma(0.1), rules.Optimal(leaves=6)], ids=repr)
def test_attention_error_is_the_divergence_over_all_keys(rule):
    q, k, v = qkv(5, 1, 2, 2 + 25)
    output, trees = reference.per_query_attention(q, k, v, 5, 5, rule, prefix=2, tau=1.5)
    errors = reference.attention_error(q, k, trees, prefix=2, tau=1.5)
    exact = reference.dense_attention(q, k, v, prefix=2, tau=1.5)
    longest = np.linalg.norm(v, axis=-1).max()
    for h, i in np.ndindex(2, 27):
        scores = q[0, h, i] @ k[0, h].T / math.sqrt(5)
        approximate = scores.copy()
        approximate[2:] = trees[0][h][i].reconstruct(scores[2:].reshape(5, 5)).ravel()
        expected = 1.5 * kl_divergence(approximate, scores, 1.5)
        assert errors[0, h, i] == pytest.approx(expected, abs=1e-10)
        moved = np.linalg.norm(output[0, h, i] - exact[0, h, i])
        assert moved <= longest * math.sqrt(2 * errors[0, h, i] / 1.5) + 1e-12


def test_coins_reach_their_own_trees():
    q, k, v = qkv(6, 1, 2, 16)
    coins = np.random.default_rng(7).random((1, 2, 16, 4)) < 0.5
    _, trees = reference.per_query_attention(q, k, v, 4, 4, rules.RandomQuadrants(0.5), coins=coins)
    for h, i in np.ndindex(2, 16):
        assert len(trees[0][h][i].leaves) == 4 + 3 * coins[0, h, i].sum()


def test_refusals_teach():
    with pytest.raises(NotImplementedError, match="batch"):
        build_tree(np.zeros((2, 2)), rules.Optimal(leaves=2, pooled=True))
    with pytest.raises(ValueError, match="coins="):
        build_tree(np.zeros((2, 2)), rules.RandomQuadrants(0.5))
    with pytest.raises(ValueError, match="finite"):
        build_tree(np.full((2, 2), np.inf), rules.GlobalMean())
    with pytest.raises(ValueError, match="shape"):
        build_tree(np.zeros(4), rules.GlobalMean())
    with pytest.raises(TypeError, match=r"rule is 3; pass one of bmfa\.rules"):
        build_tree(np.zeros((2, 2)), 3)
    with pytest.raises(ValueError, match=r"rule 'gamma'.*NAME:VALUE"):
        build_tree(np.zeros((2, 2)), "gamma")
