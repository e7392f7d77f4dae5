"""The paper's statements about trees, each as a test named after it."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from bmfa import energy, rules
from bmfa.grid import Grid
from bmfa.trees.build import screen
from bmfa.trees.layout import quadtree_layout
from bmfa.trees.pyramid import Counts, ScorePyramid
from bmfa.trees.tree import Tree
from cases import every_rule, noise, random_case, random_scores
from tree_oracle import Node, Oracle

EXACT = 1e-10
CASES = [random_case(seed) for seed in range(120)]
every_grid = pytest.mark.parametrize(
    "sizes",
    [
        [(1, 1), (1, 7), (14, 14), (37, 37)],
        pytest.param([(16, 25), (33, 64), (256, 256)], marks=pytest.mark.slow),
    ],
    ids=["small", "large"],
)
# Rules by a threshold that nests their trees, and thresholds that matter to them.
GAP_RULES = ("gamma", "gamma-h2", "exact-gap", "certified", "quadrant-gap", "variance")
THRESHOLDS = dict.fromkeys(GAP_RULES, (0.0, 1e-4, 0.02, 0.3, 2.0, 20.0))
THRESHOLDS |= dict.fromkeys(("mass", "optimal"), (0.0, 1e-7, 1e-4, 1e-3, 0.1, 1.0))


def fields(grid: Grid, batch: int = 8, seed: int = 0) -> Tensor:
    """(batch, N) noise, and scores of every kind of tests/cases.py."""
    generator = np.random.default_rng(seed)
    drawn = [random_scores(generator, grid.height, grid.width) for _ in range(batch - 1)]
    return torch.cat((2 * noise(1, grid.size), torch.from_numpy(np.stack(drawn)).flatten(1)))


def divergence(tree: Tree, scores: Tensor) -> Tensor:
    """(...) tau KL(q || p), q the softmax of the leaf means at every token, p that of the scores."""
    outside = tree.leaf_index < 0
    logits = (
        x.masked_fill(outside, -torch.inf) / tree.tau for x in (scores, tree.reconstruct(scores))
    )
    log_p, log_q = (x.log_softmax(-1) for x in logits)
    return tree.tau * (log_q.exp() * (log_q - log_p)).masked_fill(outside, 0.0).sum(-1)


def leaf_tokens(tree: Tree, values: Tensor) -> list[Tensor]:
    """The values of the tokens of each leaf of one tree."""
    return [values[tree.leaf_index == leaf] for leaf in range(int(tree.leaf_count))]


def pyramid_of(grid: Grid, scores: Tensor, tau: float, valid: Tensor | None = None) -> ScorePyramid:
    mask = None if valid is None else valid.view(-1, 1)
    counts = Counts.from_mask(quadtree_layout(grid), torch.float64, mask)
    return ScorePyramid(quadtree_layout(grid), counts, tau, scores.reshape(-1, grid.size).T, mask)


@every_grid
def test_theorem_global_kl_equivalence(sizes):
    for case in CASES:
        error, expected = case.tree().error(case.scores), divergence(case.tree(), case.scores)
        torch.testing.assert_close(error, expected, atol=EXACT, rtol=EXACT)
    for size, tau in itertools.product(sizes, [1.0, 1e-3]):
        grid = Grid(*size)
        scores = fields(grid, 3 if grid.size > 9999 else 8)
        for rule in every_rule(np.random.default_rng(0)):
            tree = screen(scores, grid, rule, tau=tau)
            difference = tree.error(scores) - divergence(tree, scores)
            assert difference.abs().max() <= EXACT, rule
        dense = screen(scores, grid, rules.FixedDepth(grid.depth), tau=tau)
        assert not bool(dense.error(scores).any())


def test_corollary_local_to_global():
    for case in CASES:
        tree, tau = case.tree(), case.tau
        leaves = leaf_tokens(tree, case.scores)
        gaps = torch.stack([energy.gap(tokens, tau=tau) for tokens in leaves])
        peak = max(tokens.max() for tokens in leaves)
        logits = torch.stack([math.log(len(x)) + energy.mean(x - peak) / tau for x in leaves])
        combined = tau * ((logits + gaps / tau).logsumexp(-1) - logits.logsumexp(-1))
        error = tree.error(case.scores)
        torch.testing.assert_close(error, combined, atol=EXACT, rtol=EXACT)
        # A weighted average lies between its extremes: gaps of at most epsilon give E <= epsilon.
        assert gaps.min() - EXACT * (1 + error) <= error <= gaps.max() + EXACT * (1 + error)


def test_corollary_attention_output_bound():
    for seed, case in enumerate(CASES):
        tree, scores = case.tree(), case.scores
        kept = tree.leaf_index >= 0
        p, q = ((x[kept] / case.tau).softmax(-1) for x in (scores, tree.reconstruct(scores)))
        values = noise(case.grid.size, 3, seed=seed)
        # The worst values there are point along the sign of p - q.
        values[kept, 0] = 5.0 * torch.where(p > q, 1.0, -1.0).double()
        distance = ((p - q) @ values[kept]).norm()
        assert distance <= tree.output_bound(scores, values) + EXACT
        ones = torch.ones_like(values[:, :1])
        assert (p - q).abs().sum() <= tree.output_bound(scores, ones) + EXACT


def test_the_output_bound_of_values_as_attention_has_them():
    """Values of each head, (B, heads, N, d), or of each query bound its own queries alone."""
    scores, values = noise(1, 3, 3, 16), noise(1, 3, 16, 4, seed=1)
    values *= torch.tensor([1.0, 10.0, 100.0]).view(1, 3, 1, 1)
    tree = screen(scores, Grid(4, 4), rules.GlobalMean())
    bound = tree.output_bound(scores, values)
    assert bound.shape == (1, 3, 3)
    assert bool((((scores.softmax(-1) - 1 / 16) @ values).norm(dim=-1) <= bound).all())
    expected = values.norm(dim=-1).amax(-1, keepdim=True) * (2 * tree.error(scores)).sqrt()
    torch.testing.assert_close(bound, expected, rtol=1e-12, atol=0)
    assert torch.equal(tree.output_bound(scores, values.unsqueeze(2).expand(1, 3, 3, 16, 4)), bound)
    with pytest.raises(ValueError, match=r"values have shape \(16, 4\) and the trees \(1, 3, 3\)"):
        tree.output_bound(scores, values[0, 0])
    # Values of tokens that do not exist may be anything.
    for valid in (torch.arange(16) % 3 > 0, (torch.arange(48) % 5 > 0).view(1, 3, 1, 16)):
        tree = screen(scores, Grid(4, 4), rules.GlobalMean(), valid=valid)
        gone = ~valid.expand(1, 3, 1, 16).squeeze(2).unsqueeze(-1)
        bound = tree.output_bound(scores, values.masked_fill(gone, torch.nan))
        assert torch.equal(bound, tree.output_bound(scores, values.masked_fill(gone, 0.0)))
    # Two tokens a little apart with opposite values: Pinsker's inequality becomes an equality.
    for tau in [1e-3, 1.0, 30.0]:
        scores = torch.tensor([1.0, -1.0], dtype=torch.float64) * 1e-3 * tau
        tree = screen(scores, Grid(1, 2), rules.GlobalMean(), tau=tau)
        values = torch.tensor([[3.0, 4.0], [-3.0, -4.0]], dtype=torch.float64)
        distance = (((scores / tau).softmax(-1) - 0.5) @ values).norm()
        assert distance <= tree.output_bound(scores, values) <= 1.00001 * distance


def test_theorem_lookahead_consistency():
    for case in CASES:
        pyramid = pyramid_of(case.grid, case.scores, case.tau, case.valid)
        exact = pyramid.gaps()
        slack = 1e-13 * (1 + pyramid.score_bound())
        for depth in range(pyramid.depth):
            before = torch.zeros_like(exact[depth])
            for lookahead in range(1, pyramid.depth - depth + 2):
                score = pyramid.gamma(depth, lookahead)
                assert bool((score >= before - slack).all()), (depth, lookahead)
                assert bool((score <= exact[depth] + slack).all()), (depth, lookahead)
                before = score
            assert torch.equal(before, exact[depth])


def balanced(size: int, height: float, seed: int) -> Tensor:
    """A size x size grid whose quadrants hold +a and -a equally often, in random places."""
    generator = np.random.default_rng(seed)
    half = size // 2
    signs = np.repeat([1.0, -1.0], half * half // 2)
    quadrants = [generator.permutation(signs).reshape(half, half) for _ in range(4)]
    return torch.from_numpy(height * np.block([quadrants[:2], quadrants[2:]])).flatten()


def test_proposition_one_step_incompleteness():
    for tau, size in itertools.product([1e-3, 1.0, 30.0], [4, 8, 16]):
        grid = Grid(size, size)
        for seed, x in enumerate((0.1, 3.7, 1e4)):
            scores = balanced(size, x * tau, seed)
            blind = screen(scores, grid, rules.Gamma(0.0), tau=tau)
            assert blind.leaf_count == 1
            expected = tau * (x + math.log1p(math.expm1(-2 * x) / 2))  # tau log cosh(a / tau)
            assert blind.error(scores).item() == pytest.approx(expected, rel=1e-12)
            seeing = screen(scores, grid, rules.Gamma(0.0, lookahead=grid.depth), tau=tau)
            assert seeing.leaf_count > 4 and seeing.error(scores) <= 1e-12 * tau * x
            assert screen(scores, grid, rules.Mass(0.0), tau=tau).leaf_count == 1
            assert screen(scores, grid, rules.Optimal(1e-9), tau=tau).leaf_count > 4
    for size in [12, 20, 28]:  # thirds round
        scores = torch.stack([balanced(size, 1e3, seed) for seed in range(20)])
        assert bool((screen(scores, Grid(size, size), rules.Gamma(0.0)).leaf_count == 1).all())


@every_grid
def test_proposition_threshold_nesting(sizes):
    """Of thresholds, and of budgets, coins and depths."""
    families = [[f"{name}:{epsilon}" for epsilon in x] for name, x in THRESHOLDS.items()]
    small = [[rules.Optimal(leaves=x) for x in (1.0, 0.3, 0.1, 0.02, 1e-9)]]
    small += [[rules.Optimal(error=x) for x in (0.0, 1e-6, 0.01, 0.2, 50.0)]]
    small += [[rules.RandomQuadrants(x, 1) for x in (1.0, 0.7, 0.3, 0.0)]]
    small += [[rules.FixedDepth(x) for x in (9, 4, 2, 1, 0)]]
    for size in sizes:
        grid = Grid(*size)
        scores = fields(grid)
        for family in families + (small if grid.size < 1000 else []):
            trees = [screen(scores, grid, rule) for rule in family]
            for fine, coarse in itertools.pairwise(trees):
                assert bool(fine.refines(coarse).all()), coarse.rule
                assert bool((fine.leaf_count >= coarse.leaf_count).all())
                assert bool((fine.error(scores) <= coarse.error(scores) + EXACT).all())
            if grid.size >= 196:
                assert bool(trees[0].leaf_count[0] > trees[-1].leaf_count[0]), (
                    "nothing was compared"
                )


@every_grid
def test_proposition_maximum_depth_monotonicity(sizes):
    for size, (name, epsilons) in itertools.product(sizes, THRESHOLDS.items()):
        grid = Grid(*size)
        scores = fields(grid, 3 if grid.size > 9999 else 8)
        rule = f"{name}:{epsilons[1]}"
        trees = [screen(scores, grid, rule, max_depth=limit) for limit in range(grid.depth + 2)]
        proxies = [energy.proxy(scores, tree.leaf_index) for tree in trees]
        for limit, (coarse, fine) in enumerate(itertools.pairwise(trees)):
            assert bool(fine.refines(coarse).all())
            assert bool((proxies[limit + 1] >= proxies[limit] - EXACT).all())
            assert bool((coarse.leaf_count <= min(grid.size, 4**limit)).all())
            # The marks say which trees the limit holds back; Optimal looks further than one level.
            marked, grown = coarse.depth_limited.any(-1), fine.leaf_count > coarse.leaf_count
            assert name == "optimal" or torch.equal(marked, grown)
        free = screen(scores, grid, rule)
        assert torch.equal(trees[-1].split, free.split)
        assert not bool(free.depth_limited.any()) and not bool(trees[-1].depth_limited.any())
        identity = energy.free_energy(scores) - proxies[-1]
        assert (identity - free.error(scores)).abs().max() <= EXACT


def test_theorem_termination_and_worst_case_tree_size():
    for case in CASES:
        tree = case.tree()
        tokens = case.grid.size if case.valid is None else int(case.valid.sum())
        assert 1 <= tree.leaf_count <= tokens
        if isinstance(case.rule, rules.FixedBlocks):
            assert tree.node_count == tree.leaf_count
            continue
        assert tree.leaf_count <= 4 ** (8 if case.max_depth is None else case.max_depth)
        splits = int(tree.node_count - tree.leaf_count)
        if case.valid is None:  # a split makes two, three or four of one
            assert splits <= tree.leaf_count - 1 <= 3 * splits


def test_theorem_visited_nodes_of_a_full_quadtree():
    for side in [1, 2, 4, 8, 16, 256]:
        grid = Grid(side, side)
        scores = fields(grid)
        for rule in ("gamma:0.01", "exact-gap:0.1", "mass:0.0001", "optimal:0.001"):
            for limit in (0, 1, 2, None):
                tree = screen(scores, grid, rule, max_depth=limit)
                assert torch.equal(3 * tree.node_count, 4 * tree.leaf_count - 1)
        full = screen(scores, grid, rules.FixedDepth(99))
        assert bool((full.leaf_count == grid.size).all())


def test_proposition_multiplicity_equivalence():
    for seed, case in enumerate(CASES):
        tree, tau = case.tree(), case.tau
        values = noise(case.grid.size, 3, seed=seed)
        kept, index = tree.leaf_index >= 0, tree.leaf_index.long()
        leaves = leaf_tokens(tree, case.scores - case.scores[kept].max())
        means = torch.stack([tokens.mean() for tokens in leaves]) / tau
        repeated = means[index[kept]].softmax(-1) @ values[kept]
        counts = torch.tensor([float(len(tokens)) for tokens in leaves])
        representatives = torch.stack([rows.mean(0) for rows in leaf_tokens(tree, values)])
        single = (means + counts.double().log()).softmax(-1) @ representatives
        torch.testing.assert_close(repeated, single, atol=1e-10, rtol=0)


def test_proposition_score_stability_of_trees():
    """Scores within delta: trees of epsilon lie between those of epsilon -+ 2 delta."""
    for seed, case in enumerate(CASES):
        generator = np.random.default_rng(seed)
        epsilon = float(generator.choice([0.05, 0.3, 1.0]))
        delta = generator.random() * epsilon / 2.1
        moved = case.scores + delta * torch.from_numpy(generator.uniform(-1, 1, case.grid.size))

        def tree(scores: Tensor, epsilon: float) -> Tree:
            rule = rules.ExactGap(epsilon)
            return screen(scores, case.grid, rule, tau=case.tau, valid=case.valid)

        near, slack = tree(moved, epsilon), 2 * delta + 1e-11
        assert bool(tree(case.scores, epsilon - slack).refines(near))
        assert bool(near.refines(tree(case.scores, epsilon + slack)))


def every_tree(oracle: Oracle, node: Node) -> tuple[np.ndarray, np.ndarray]:
    """Leaf count and share of Z, sum_L n_L exp(M_L / tau) / Z, of every tree below a node."""
    mass = math.exp(oracle.log_weight(node) - oracle.log_z)
    if node.count == 1 or node.depth == oracle.max_depth:
        return np.ones(1), np.array([mass])
    counts, masses = np.zeros(1), np.zeros(1)
    for child in node.children:
        more = every_tree(oracle, child)
        counts = np.add.outer(counts, more[0]).ravel()
        masses = np.add.outer(masses, more[1]).ravel()
    return np.append(counts, 1.0), np.append(masses, mass)


def test_optimal_against_every_tree():
    sizes = [(4, 4), (3, 5), (1, 7), (5, 4), (8, 8), (2, 9)]
    for size, (tau, limit) in itertools.product(sizes, [(0.3, None), (1.0, None), (1.0, 1)]):
        grid, generator = Grid(*size), np.random.default_rng(sum(size))
        batch = 3 if grid.size > 20 else 8
        drawn = np.stack([random_scores(generator, *size) for _ in range(batch)])
        valid = generator.random(drawn.shape) < 0.7
        valid[: batch // 2] = True
        valid[:, 0, 0] = True
        oracles = [Oracle(*row, tau, limit) for row in zip(drawn, valid, strict=True)]
        every = [every_tree(oracle, oracle.root) for oracle in oracles]
        scores, mask = (torch.from_numpy(x).flatten(1) for x in (drawn, valid))

        for penalty in (0.0, 1e-6, 1e-3, 0.01, 0.05, 0.3):
            rule = rules.Optimal(penalty)
            tree = screen(scores, grid, rule, tau=tau, valid=mask, max_depth=limit)
            masses = (-tree.error(scores) / tau).exp()
            pairs = zip(tree.leaf_count.tolist(), masses.tolist(), strict=True)
            for (leaves, mass), (counts, every_mass) in zip(pairs, every, strict=True):
                assert penalty * leaves - mass <= (penalty * counts - every_mass).min() + EXACT


RIVALS = (
    "gamma:0.3 gamma:0.02 gamma-h2:0.02 exact-gap:0.3 exact-gap:1 certified:0.5 mass:0.001 mass:0.01 "
    "mass-coarse:0.001 quadrant-gap:0.5 variance:0.5 random-quadrants:0.5 fixed-depth:1 fixed-depth:3 "
    "global-mean optimal-leaves:0.1 optimal-leaves:5 optimal:0.01"
)


def test_a_pooled_budget_is_never_beaten():
    grid = Grid(14, 14)
    scores = fields(grid, 30)
    pooled = screen(scores, grid, rules.Optimal(leaves=0.1, pooled=True))
    total, missing = pooled.leaf_count.sum(), -(-pooled.error(scores)).expm1().sum()
    rivals = [screen(scores, grid, rule) for rule in RIVALS.split()]
    frugal = [tree for tree in rivals if tree.leaf_count.sum() <= total]
    assert len(frugal) >= 5
    for tree in frugal:
        assert missing <= -(-tree.error(scores)).expm1().sum() + 1e-12, tree.rule


def test_ties_at_epsilon_are_not_split():
    names = ("gamma", "gamma-h2", "exact-gap", "certified", "mass")
    for name, size, seed in itertools.product(names, [(4, 4), (5, 3)], range(10)):
        grid = Grid(*size)
        scores = 2 * noise(grid.size, seed=seed)
        # Gamma decides by another form of its score, equal to within a few roundings of 1.
        rounding = 1e-14 if name == "gamma" else 0.0
        score = rules.parse(f"{name}:1").node_scores(pyramid_of(grid, scores, 1.0))[0].item()
        assert score > 0
        assert screen(scores, grid, f"{name}:{score + rounding!r}").leaf_count == 1
        below = math.nextafter(score, 0.0) - rounding
        assert screen(scores, grid, f"{name}:{below!r}").leaf_count > 1
    grid, scores = Grid(4, 4), 2 * noise(16, seed=1)
    for make in [rules.QuadrantGap, rules.Variance]:
        quadrants = make(1.0).node_scores(pyramid_of(grid, scores, 1.0))[:, 0]
        for score in quadrants.tolist():
            leaves = 4 + 3 * int((quadrants > score).sum())
            assert screen(scores, grid, make(score)).leaf_count == leaves
            assert screen(scores, grid, make(math.nextafter(score, 0.0))).leaf_count == leaves + 3
    scores = torch.tensor([1.0, 3.5], dtype=torch.float64)
    gain = rules.Optimal(1.0).node_scores(pyramid_of(Grid(1, 2), scores, 1.0))[0].item()
    assert screen(scores, Grid(1, 2), rules.Optimal(gain)).leaf_count == 1
    assert screen(scores, Grid(1, 2), rules.Optimal(math.nextafter(gain, 0.0))).leaf_count == 2
