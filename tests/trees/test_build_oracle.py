"""The vectorised trees against the float64 oracle: equal, not close."""

import numpy as np
import pytest
import torch

from bmfa.trees.build import screen
from bmfa.trees.rules import LABELS
from cases import boxes, flat_valid, nudged, random_case, reference_tree

BATCHES = 20
SEEDS = 1000
QUICK = 4  # batches of the default run


def is_tie(case, expected) -> bool:
    """Whether a threshold moved by rounding gives the oracle itself another tree."""
    around = [reference_tree(case, nudged(case.rule, 1 + step)).leaves for step in (-1e-9, 1e-9)]
    return any(leaves != expected.leaves for leaves in around)


@pytest.mark.parametrize(
    "batches",
    [range(QUICK), pytest.param(range(QUICK, BATCHES), marks=pytest.mark.slow)],
    ids=["few", "all"],
)
def test_trees_equal_the_oracle(batches):
    for batch in batches:
        check_batch(batch)


def check_batch(batch):
    ties = 0
    for seed in range(batch, SEEDS, BATCHES):
        case = random_case(seed)
        expected = reference_tree(case)
        scores = torch.from_numpy(case.scores.ravel())
        tree = screen(
            scores,
            case.grid,
            case.rule,
            tau=case.tau,
            max_depth=case.max_depth,
            valid=flat_valid(case),
        )
        if boxes(tree) != expected.leaves and is_tie(case, expected):
            ties += 1
            continue
        assert boxes(tree) == expected.leaves, (seed, case.rule)
        assert tree.leaf_count == len(expected.leaves)
        assert tree.depth_limited.tolist() == expected.depth_limited, (seed, case.rule)
        assert tree.leaf_index.view(case.grid.height, case.grid.width).tolist() == (
            expected.leaf_index().tolist()
        )
        assert tree.node_count == expected.node_count, (seed, case.rule)
        if expected.labels is not None:
            assert [LABELS[label] for label in tree.leaf_labels] == expected.labels, seed
        scale = max(1.0, np.abs(case.scores).max())
        np.testing.assert_allclose(
            tree.error(scores).item(), expected.error(case.scores, case.tau), atol=1e-10 * scale
        )
        valid = np.ones_like(case.scores, bool) if case.valid is None else case.valid
        np.testing.assert_allclose(
            tree.reconstruct(scores).view(case.scores.shape).numpy()[valid],
            expected.reconstruct(case.scores)[valid],
            atol=1e-12 * scale,
        )
    assert ties <= SEEDS // BATCHES // 10, "ties within rounding should be rare"
