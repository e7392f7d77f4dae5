"""Trees against the recursive oracle in exact means: equal, not close."""

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from bmfa import rules
from bmfa.grid import Grid
from bmfa.trees.build import screen, screen_keys
from bmfa.trees.rules import LABELS
from bmfa.trees.tree import Tree
from cases import every_rule, random_scores
from tree_oracle import Oracle, OracleTree, distance, leaf_budget

# Sides whose quadtrees have strips of one token across among them: 1xn, 2xn, 3x8, 4x16.
SHAPES = (
    (1, 4), (14, 14), (1, 8), (1, 13), (9, 1), (16, 16), (2, 7), (8, 2), (2, 16), (3, 8), (8, 3),
    (3, 5), (12, 9), (4, 16), (1, 1), (5, 13), (6, 7), (7, 3), (2, 2), (8, 8),
)  # fmt: skip
# Rounding of a score, in units of the dtype's spacing times the size of what it is computed from.
ROUNDINGS = 64


@dataclass
class Report:
    """How many trees were compared, and how many differ by a tie within rounding."""

    trees: int = 0
    ties: int = 0


def random_batch(
    seed: int, rows: int, offset: float
) -> tuple[np.ndarray, np.ndarray, float, int | None]:
    """Scores (rows, H, W), masks (rows or 1, H, W), a temperature and a depth limit."""
    generator = np.random.default_rng(seed)
    shape = SHAPES[seed % len(SHAPES)]
    deviation = generator.choice([0.5, 3.0, 10.0, 20.0, 30.0], size=(rows, 1, 1))
    scores = deviation * generator.normal(size=(rows, *shape))
    for row in range(0, rows, 2):  # ties, minorities, constant blocks
        scores[row] = random_scores(generator, *shape, offset=offset)
    masks = rows if seed % 4 else 1
    density = generator.choice([0.3, 0.6, 0.9, 1.0], size=(masks, 1, 1))
    valid = generator.random((masks, *shape)) < density
    valid.reshape(masks, -1)[np.arange(masks), generator.integers(np.prod(shape))] = True
    if seed % 3 == 2:
        valid = np.ones((1, *shape), bool)
    limit = None if seed % 3 else int(generator.integers(0, 4))
    return scores, valid, float(generator.choice([1.0, 0.3, 2.5])), limit


def split_boxes(tree: Tree) -> list[set[tuple[int, ...]]]:
    """The blocks that each tree of a flat batch splits."""
    boxes = torch.cat([level.boxes for level in tree.layout.levels])
    return [set(map(tuple, boxes[column].tolist())) for column in tree.split.T]


def is_tie(tree: Tree, split: set[tuple[int, ...]], expected: OracleTree, near: float) -> bool:
    """Whether rounding explains another tree: the topmost decisions that differ are all near ties.

    Steps of a budget that tie may be made in part, as long as the budget holds.
    """
    rule, within = expected.rule, True
    reached = expected.verdicts.items()
    wrong = [v for node, v in reached if (node.box in split) != (node.box in expected.split)]
    if isinstance(rule, rules.Optimal) and rule.leaves is not None:
        within = int(tree.leaf_count) <= leaf_budget(rule, expected.oracle.root.count)
    elif isinstance(rule, rules.Optimal) and rule.error is not None:
        within = float(tree.error(torch.from_numpy(expected.oracle.scores).flatten())) <= rule.error
    return within and bool(wrong) and all(distance(verdict) < near for verdict in wrong)


def check_trees(
    trees: Tree, rule: rules.Rule, scores: Tensor, oracles: list[Oracle], report: Report
) -> None:
    """Leaves, marks, labels, means and errors of each tree are those of the oracle."""
    coins: list[list[bool] | None] = [None] * len(oracles)
    if isinstance(rule, rules.RandomQuadrants):
        sides = [min(side, 2) for side in (trees.grid.height, trees.grid.width)]
        coins = rule.draw(len(oracles), sides[0] * sides[1]).tolist()
    found, errors, rebuilt = split_boxes(trees), trees.error(scores), trees.reconstruct(scores)
    for row, (oracle, coin) in enumerate(zip(oracles, coins, strict=True)):
        expected, tree = oracle.tree(rule, coin), trees[row]
        # Means are rounded to the size of the scores, and enter exponentials over tau.
        size = max(abs(float(score)) for score in oracle.root.scores)
        near = ROUNDINGS * torch.finfo(scores.dtype).eps * (1 + size / oracle.tau)
        report.trees += 1
        if found[row] != expected.split and not isinstance(rule, rules.FixedBlocks):
            assert is_tie(tree, found[row], expected, near), (trees.grid, rule, row)
            report.ties += 1
            continue
        assert tree.leaf_index.tolist() == expected.leaf_index().ravel().tolist()
        assert int(tree.node_count) == expected.node_count
        assert float(tree.leaf_ratio) == pytest.approx(len(expected.leaves) / oracle.root.count)
        assert [tuple(box) for box in tree.leaf_boxes.tolist()] == expected.leaves
        if tree.depth_limited.tolist() != expected.depth_limited:
            reached = [expected.verdicts.get(leaf) for leaf in expected.leaf_nodes]
            assert any(verdict and distance(verdict) < near for verdict in reached)
        error = expected.error()
        assert float(errors[row]) == pytest.approx(error, abs=near * max(oracle.tau, error))
        means = torch.from_numpy(expected.reconstruct()).flatten()
        valid = torch.from_numpy(oracle.valid).flatten()
        assert bool(((rebuilt[row] - means)[valid].abs() <= near * oracle.tau).all())
        if isinstance(rule, rules.Certified):
            for label, (other, apart) in zip(tree.leaf_labels, expected.labels(), strict=True):
                report.ties += LABELS[label] != other
                assert LABELS[label] == other or apart < near


def check_batches(batches: range, rows: int, dtype: torch.dtype) -> None:
    report, single = Report(), dtype == torch.float32
    for seed in batches:
        scores, valid, tau, limit = random_batch(seed, rows, 10.0 if single else 1e4)
        grid, scores = Grid(*scores.shape[1:]), torch.from_numpy(scores).to(dtype)
        masks = np.broadcast_to(valid, scores.shape)
        oracles = [Oracle(*pair, tau, limit) for pair in zip(scores.numpy(), masks, strict=True)]
        mask = torch.from_numpy(valid).flatten(1)
        flat = scores.flatten(1).masked_fill(~mask, torch.nan)  # may hold anything
        unmasked = bool(mask.all()) and seed % 2 == 0
        options = {"tau": tau, "max_depth": limit, "valid": None if unmasked else mask}
        for rule in every_rule(np.random.default_rng(seed)):
            # A budget is searched among gains down to 1e-30 of Z; some grids have smaller ones.
            if not (single and isinstance(rule, rules.Optimal) and rule.penalty is None):
                check_trees(screen(flat, grid, rule, **options), rule, flat, oracles, report)
    assert report.trees == len(batches) * rows * (14 if single else 16)
    assert report.ties <= report.trees // (100 if single else 1000) + 1, report


@pytest.mark.parametrize(
    ("count", "rows", "first"), [(20, 3, 0), pytest.param(30, 8, 20, marks=pytest.mark.slow)]
)
def test_trees_equal_the_oracle(count: int, rows: int, first: int) -> None:
    check_batches(range(first, first + count), rows, torch.float64)
    check_batches(range(100 + first, 100 + first + count), rows - 1, torch.float32)


@pytest.mark.parametrize("step", [5, pytest.param(2, marks=pytest.mark.slow)])
def test_trees_from_keys_equal_the_oracle(step: int) -> None:
    """With a mask for each image, or one for each head that is repeated for its queries."""
    report = Report()
    for seed, masked_heads in itertools.product(range(0, len(SHAPES), step), [1, 2]):
        shape = SHAPES[seed]
        tokens, generator = shape[0] * shape[1], np.random.default_rng(seed)
        q, k = generator.normal(size=(2, 2, 3, 6)), generator.normal(size=(2, 2, tokens, 6))
        q *= generator.choice([0.3, 3.0, 12.0], size=(2, 2, 1, 1))
        k += generator.choice([0.0, 100.0], size=(2, 2, 1, 1))
        valid = generator.random((2, masked_heads, 1, tokens)) < 0.7
        valid[..., seed % tokens] = True
        scores, masks = q @ k.swapaxes(-1, -2), np.broadcast_to(valid, (2, 2, 3, tokens))
        rows = (x.reshape(12, *shape) for x in (scores, masks))
        oracles = [Oracle(*pair, 0.7) for pair in zip(*rows, strict=True)]
        spoilt = np.where(valid.swapaxes(-1, -2), k, np.nan)  # what does not exist may be anything
        mask = np.ascontiguousarray(valid if masked_heads == 1 else masks)
        queries, keys, mask = (torch.from_numpy(x) for x in (q, spoilt, mask))
        for rule in every_rule(generator):
            if rule.needs != "nothing":
                options = {"scale": 1.0, "tau": 0.7, "valid": mask}
                tree = screen_keys(queries, keys, Grid(*shape), rule, **options)
                flat = torch.from_numpy(scores).flatten(0, 2)
                check_trees(tree.flat(), rule, flat, oracles, report)
    assert report.trees == 2 * 12 * 12 * len(SHAPES[::step])
    assert report.ties <= report.trees // 500, report


def test_trees_that_are_shared_equal_the_oracle() -> None:
    """The largest score of a block among those that share a tree decides on its split."""
    for seed in range(20):
        generator = np.random.default_rng(seed)
        shape = SHAPES[seed % len(SHAPES)]
        scores = 30 * generator.normal(size=(2, *shape))
        valid = generator.random(shape) < 0.9
        valid[0, 0] = True
        oracles = [Oracle(row, valid, 0.3) for row in scores]
        flat, mask = torch.from_numpy(scores).flatten(1), torch.from_numpy(valid).flatten()
        for rule in (rules.ExactGap(3.0), rules.Gamma(3.0, lookahead=2), rules.Mass(1e-3)):
            tree = screen(flat, Grid(*shape), rule, tau=0.3, valid=mask, share=0)
            blocks = [{node.box: node for node in oracle.blocks} for oracle in oracles]
            judges = [oracle.judge(rule) for oracle in oracles]
            want, reached = set(), [oracles[0].root]
            while reached:
                node = reached.pop()
                if node.count > 1:
                    pairs = zip(judges, blocks, strict=True)
                    if max(judge(nodes[node.box])[0] for judge, nodes in pairs) > rule.epsilon:
                        want.add(node.box)
                        reached += node.children
            assert split_boxes(tree) == [want]


def test_a_mask_of_all_tokens_changes_nothing() -> None:
    for shape, tau in itertools.product([(1, 4), (3, 8), (24, 64)], (0.3, 1.0)):
        generator, everything = np.random.default_rng(0), torch.ones(np.prod(shape)).bool()
        scores = 20 * torch.from_numpy(generator.normal(size=(8, len(everything))))
        for rule in (*every_rule(generator), rules.ExactGap(0.0), rules.Gamma(0.0, lookahead=9)):
            masks = (None, everything)
            trees = [screen(scores, Grid(*shape), rule, tau=tau, valid=x) for x in masks]
            assert torch.equal(trees[0].split, trees[1].split), rule


def test_a_missing_child_does_not_dominate() -> None:
    scores, everything = torch.tensor([-50.0, 0.0, 1.0, 0.0]), torch.ones(4, dtype=torch.bool)
    tree = screen(scores, Grid(1, 4), rules.ExactGap(0.0), tau=0.3, valid=everything)
    assert tree.leaf_count == 4


def test_a_variance_beyond_all_numbers_is_above_every_threshold() -> None:
    for masked, shape in itertools.product([False, True], [(1, 16), (2, 8), (4, 4)]):
        scores = 1e25 * torch.randn(3, 16, generator=torch.Generator().manual_seed(0))
        valid = torch.ones(16, dtype=torch.bool) if masked else None
        tree = screen(scores, Grid(*shape), rules.Variance(1.0), valid=valid)
        assert tree.leaf_count.tolist() == [16, 16, 16]
