"""Trees under a mask against the recursive oracle: equal, not close."""

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from bmfa import rules
from bmfa.grid import Grid
from bmfa.trees.build import screen, screen_keys
from bmfa.trees.rules import LABELS
from bmfa.trees.tree import Tree
from tree_oracle import Node, Oracle

# Sides whose quadtrees have strips of one token across among them: 1xn, 2xn, 3x8, 4x16.
SHAPES = (
    (1, 4), (1, 5), (1, 8), (1, 13), (9, 1), (16, 1), (2, 7), (8, 2), (2, 16), (3, 8), (8, 3),
    (3, 5), (3, 13), (4, 16), (5, 5), (5, 13), (6, 7), (7, 3), (4, 4), (8, 8),
)  # fmt: skip
ROWS = 40
# Rounding of a score, in units of the dtype's spacing times the size of what it is computed from.
ROUNDINGS = 64


def every_rule(generator: np.random.Generator) -> list[rules.Rule]:
    """One of each kind, by random thresholds; `leaves` fits every mask of at least one token."""

    def epsilon() -> float:
        return float(generator.choice([0.0, 1e-3, 0.02, 0.3, 1.0, 10.0]))

    def share() -> float:
        return float(generator.choice([1e-6, 1e-4, 1e-3, 1e-2, 0.1]))

    return [
        rules.Gamma(epsilon()),
        rules.Gamma(epsilon(), lookahead=2),
        rules.Gamma(epsilon(), lookahead=3),
        rules.ExactGap(epsilon()),
        rules.Certified(epsilon()),
        rules.Mass(share()),
        rules.Mass(share(), coarse=True),
        rules.Optimal(share()),
        rules.Optimal(leaves=float(generator.choice([0.2, 0.5]))),
        rules.Optimal(error=float(generator.choice([1e-3, 0.05, 0.5]))),
        rules.FixedDepth(int(generator.integers(0, 4))),
        rules.FixedBlocks(int(generator.integers(1, 5))),
        rules.QuadrantGap(epsilon()),
        rules.Variance(epsilon()),
        rules.RandomQuadrants(0.5, int(generator.integers(100))),
        rules.GlobalMean(),
    ]


@dataclass
class Report:
    """How many trees were compared, and how many differ by a tie within rounding."""

    trees: int = 0
    ties: int = 0


@dataclass(frozen=True)
class Batch:
    """Masked grids of one shape: a mask for each, or one for all."""

    grid: Grid
    scores: np.ndarray  # (ROWS, H, W)
    valid: np.ndarray  # (ROWS or 1, H, W)
    tau: float
    max_depth: int | None
    rules: list[rules.Rule]

    @classmethod
    def of(cls, seed: int, rows: int = ROWS, dtype: type = np.float64) -> "Batch":
        generator = np.random.default_rng(seed)
        shape = SHAPES[seed % len(SHAPES)]
        deviation = generator.choice([0.5, 3.0, 10.0, 20.0, 30.0], size=(rows, 1, 1))
        scores = deviation * generator.normal(size=(rows, *shape))
        whole = generator.random(rows) < 0.2  # integers: equal tokens, equal means
        scores[whole] = generator.integers(-1, 2, size=(whole.sum(), *shape))
        offsets = [0.0, 0.0, -1e4, 1e4] if dtype is np.float64 else [0.0, 0.0, -10.0, 10.0]
        scores += generator.choice(offsets, size=(rows, 1, 1))
        masks = rows if seed % 4 else 1
        density = generator.choice([0.3, 0.6, 0.9, 1.0], size=(masks, 1, 1))
        valid = generator.random((masks, *shape)) < density
        valid.reshape(masks, -1)[np.arange(masks), generator.integers(np.prod(shape))] = True
        limit = None if seed % 3 else int(generator.integers(0, 4))
        tau = float(generator.choice([1.0, 0.3, 2.5]))
        return cls(Grid(*shape), scores.astype(dtype), valid, tau, limit, every_rule(generator))

    def tree(self, rule: rules.Rule) -> Tree:
        rows = len(self.scores)
        scores = torch.from_numpy(self.scores).view(rows, -1)
        valid = torch.from_numpy(self.valid).view(len(self.valid), -1)
        spoilt = scores.masked_fill(~valid, torch.nan)  # what does not exist may hold anything
        return screen(spoilt, self.grid, rule, tau=self.tau, max_depth=self.max_depth, valid=valid)

    def oracles(self) -> list[Oracle]:
        masks = np.broadcast_to(self.valid, self.scores.shape)
        pairs = zip(self.scores, masks, strict=True)
        return [Oracle(scores, valid, self.tau, self.max_depth) for scores, valid in pairs]


def split_boxes(tree: Tree) -> list[set[tuple[int, ...]]]:
    """The blocks that each tree of a flat batch splits."""
    boxes = torch.cat([level.boxes for level in tree.layout.levels]).tolist()
    columns = tree.split.T.tolist()
    return [{tuple(boxes[i]) for i, made in enumerate(c) if made} for c in columns]


def rounding(oracle: Oracle, dtype: torch.dtype) -> float:
    """How near a score may lie to its threshold, relative to it, and be on either side by rounding.

    Means are rounded to the size of the scores, and enter exponentials over tau.
    """
    size = max(abs(float(score)) for score in oracle.root.scores)
    return ROUNDINGS * torch.finfo(dtype).eps * (1 + size / oracle.tau)


def is_tie(
    oracle: Oracle,
    rule: rules.Rule,
    got: set[tuple[int, ...]],
    expected: dict[Node, tuple[bool, float]],
    near: float,
) -> bool:
    """Whether rounding explains another tree: the topmost decisions that differ are all near ties."""
    if isinstance(rule, rules.Optimal) and rule.penalty is None:
        return oracle.breaks_a_tie(rule, {node for node in oracle.blocks if node.box in got})
    wrong = [node for node, (split, _) in expected.items() if (node.box in got) != split]
    return bool(wrong) and all(expected[node][1] < near for node in wrong)


def check_batch(
    batch: Batch, tree: Tree, rule: rules.Rule, oracles: list[Oracle], report: Report
) -> None:
    """One batch of trees: leaves, labels, ratio and error of each as the oracle has them."""
    dtype = torch.from_numpy(batch.scores).dtype
    coins: list[list[bool] | None] = [None] * len(oracles)
    if isinstance(rule, rules.RandomQuadrants):
        sides = [min(side, 2) for side in (batch.grid.height, batch.grid.width)]
        coins = rule.draw(len(oracles), sides[0] * sides[1]).tolist()
    index, found = tree.leaf_index, split_boxes(tree)
    count, ratio = tree.leaf_count, tree.leaf_ratio
    labels = tree.leaf_labels if isinstance(rule, rules.Certified) else None
    errors = tree.error(torch.from_numpy(batch.scores).flatten(1))
    for row, (oracle, coin) in enumerate(zip(oracles, coins, strict=True)):
        expected, near = oracle.splits(rule, coin), rounding(oracle, dtype)
        made = {node for node, (split, _) in expected.items() if split}
        report.trees += 1
        if found[row] != {node.box for node in made}:
            assert is_tie(oracle, rule, found[row], expected, near), (batch.grid, rule, row)
            report.ties += 1
            continue
        leaves = oracle.leaves(made)
        want = np.full(oracle.valid.shape, -1)
        for number, leaf in enumerate(leaves):
            top, left, bottom, right = leaf.box
            want[top:bottom, left:right] = number
        want = np.where(oracle.valid, want, -1)
        assert index[row].tolist() == want.ravel().tolist()
        assert int(count[row]) == len(leaves)
        assert float(ratio[row]) == pytest.approx(len(leaves) / oracle.root.count)
        error = oracle.error(made)
        assert float(errors[row]) == pytest.approx(error, abs=near * max(oracle.tau, error))
        if labels is not None:
            for number, leaf in enumerate(leaves):
                label, distance = oracle.label(leaf, rule.epsilon)
                if LABELS[labels[row, number]] != label:
                    assert distance < near
                    report.ties += 1


def check_blocks(batch: Batch, tree: Tree, side: int) -> None:
    """Tiles are no quadtree nodes: the leaves are the tiles that hold a valid token."""
    height, width = batch.grid.height, batch.grid.width
    masks = np.broadcast_to(batch.valid, batch.scores.shape)
    for row, valid in enumerate(masks):
        boxes = [
            (top, left, min(top + side, height), min(left + side, width))
            for top in range(0, height, side)
            for left in range(0, width, side)
            if valid[top : top + side, left : left + side].any()
        ]
        got = tree.leaf_boxes[row, : int(tree.leaf_count[row])].tolist()
        assert [tuple(box) for box in got] == boxes


@pytest.mark.parametrize(
    ("batches", "rows"), [(20, 5), pytest.param(50, ROWS, marks=pytest.mark.slow)]
)
def test_masked_grids_equal_the_oracle(batches: int, rows: int) -> None:
    report = Report()
    for seed in range(batches):
        batch = Batch.of(seed, rows)
        oracles = batch.oracles()
        for rule in batch.rules:
            if isinstance(rule, rules.FixedBlocks):
                check_blocks(batch, batch.tree(rule), rule.side)
            else:
                check_batch(batch, batch.tree(rule), rule, oracles, report)
    assert report.trees == 15 * batches * rows
    assert report.ties <= report.trees // 1000, report


@pytest.mark.parametrize("rows", [3, pytest.param(10, marks=pytest.mark.slow)])
def test_masked_grids_in_single_precision_equal_the_oracle(rows: int) -> None:
    report = Report()
    for seed in range(100, 120):
        batch = Batch.of(seed, rows=rows, dtype=np.float32)
        oracles = batch.oracles()
        for rule in batch.rules:
            # A budget is searched among gains down to 1e-30 of Z, and these grids have smaller ones.
            budget = isinstance(rule, rules.Optimal) and rule.penalty is None
            if not budget and not isinstance(rule, rules.FixedBlocks):
                check_batch(batch, batch.tree(rule), rule, oracles, report)
    assert report.trees == 13 * 20 * rows
    assert report.ties <= report.trees // 100, report


@pytest.mark.parametrize("one_mask", [False, True])
@pytest.mark.parametrize("step", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_masked_trees_from_keys_equal_the_oracle(one_mask: bool, step: int) -> None:
    report = Report()
    for seed in range(0, len(SHAPES), step):
        height, width = SHAPES[seed]
        generator = np.random.default_rng(seed)
        q, k = generator.normal(size=(4, 3, 6)), generator.normal(size=(4, height * width, 6))
        q *= generator.choice([0.3, 3.0, 12.0], size=(4, 1, 1))
        k += generator.choice([0.0, 100.0], size=(4, 1, 1))
        valid = generator.random((1 if one_mask else 4, 1, height * width)) < 0.7
        valid[..., seed % valid.shape[-1]] = True
        scores = (q @ k.swapaxes(1, 2)).reshape(12, height, width)
        masks = np.broadcast_to(valid, (4, 3, height * width)).reshape(scores.shape)
        batch = Batch(Grid(height, width), scores, masks, 0.7, None, every_rule(generator))
        oracles = batch.oracles()
        spoilt = np.where(valid.swapaxes(1, 2), k, np.nan)
        tensors = (torch.from_numpy(x) for x in (q, spoilt, valid))
        queries, keys, mask = tensors
        for rule in batch.rules:
            if rule.needs == "nothing":
                continue
            tree = screen_keys(
                queries, keys, batch.grid, rule, scale=1.0, tau=batch.tau, valid=mask
            )
            check_batch(batch, tree.flat(), rule, oracles, report)
    assert report.trees == 12 * 12 * len(SHAPES[::step])
    assert report.ties <= report.trees // 1000, report


def test_a_mask_of_all_tokens_changes_nothing() -> None:
    for shape in [(1, 4), (3, 8), (4, 16), (24, 64)]:
        generator = np.random.default_rng(0)
        grid = Grid(*shape)
        scores = 20 * torch.from_numpy(generator.normal(size=(8, grid.size)))
        everything = torch.ones(grid.size, dtype=torch.bool)
        for rule in (*every_rule(generator), rules.ExactGap(0.0), rules.Gamma(0.0, lookahead=9)):
            for tau in (0.3, 1.0):
                plain = screen(scores, grid, rule, tau=tau)
                masked = screen(scores, grid, rule, tau=tau, valid=everything)
                assert torch.equal(plain.split, masked.split), rule


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


def test_masked_trees_that_are_shared_equal_the_oracle() -> None:
    """The largest score of a block among those that share a tree decides on its split."""
    for seed in range(60):
        generator = np.random.default_rng(seed)
        shape = SHAPES[seed % len(SHAPES)]
        scores = 30 * generator.normal(size=(2, *shape))
        valid = generator.random(shape) < 0.9
        valid[0, 0] = True
        oracles = [Oracle(row, valid, 0.3, None) for row in scores]
        flat, mask = torch.from_numpy(scores).flatten(1), torch.from_numpy(valid).flatten()
        for rule in (rules.ExactGap(3.0), rules.Gamma(3.0, lookahead=2), rules.Mass(1e-3)):
            tree = screen(flat, Grid(*shape), rule, tau=0.3, valid=mask, share=0)
            judged = [{n.box: s for n, (s, _) in o.judged(rule).items()} for o in oracles]
            worst = {box: max(scores[box] for scores in judged) for box in judged[0]}
            want, reached = set(), [oracles[0].root]
            while reached:
                node = reached.pop()
                if node.count > 1 and worst[node.box] > rule.epsilon:
                    want.add(node.box)
                    reached += node.children
            assert split_boxes(tree) == [want]


def test_the_output_bound_takes_no_value_that_does_not_exist() -> None:
    torch.manual_seed(0)
    scores, values = torch.randn(2, 3, 4, 16), torch.randn(2, 3, 16, 5)
    valid = torch.rand(2, 1, 1, 16) < 0.6
    valid[..., 0] = True
    tree = screen(scores, Grid(4, 4), rules.GlobalMean(), valid=valid)
    gone = ~valid.squeeze(2).unsqueeze(-1)
    bound = tree.output_bound(scores, values.masked_fill(gone, torch.nan))
    want = tree.output_bound(scores, values.masked_fill(gone, 0.0))
    assert torch.equal(bound, want) and bool((bound > 0).all())
    one = screen(scores, Grid(4, 4), rules.GlobalMean(), valid=valid[0])
    bound = one.output_bound(scores, values.masked_fill(gone[0], torch.nan))
    assert torch.equal(bound, one.output_bound(scores, values.masked_fill(gone[0], 0.0)))
