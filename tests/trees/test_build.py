"""Screening from scores and from keys: equal trees, sharing, chunks, masks, bad input, memory."""

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

import bmfa.trees.build
import bmfa.trees.keys
from bmfa import energy, rules
from bmfa.grid import Grid
from bmfa.trees.build import screen, screen_keys
from bmfa.trees.tree import Tree
from cases import Largest, noise, random_mask

NAN, INF = float("nan"), float("inf")
NAMES = (
    "gamma:0.02 gamma-h2:0.02 gamma-h9:0.02 exact-gap:0.2 certified:0.2 mass:0.003 mass-coarse:0.003 "
    "optimal:0.003 optimal-leaves:0.4 optimal-leaves:2 optimal-error:0.05 optimal-leaves-pooled:0.4 "
    "optimal-error-pooled:0.05 fixed-depth:1 fixed-blocks:3 quadrant-gap:0.2 variance:0.2 "
    "random-quadrants:0.5 global-mean"
)
RULES = [rules.parse(name, seed=3) for name in NAMES.split()]
# Found by bisection: thousands of small steps, so that fewer cases must do.
SEARCHED = [rule for rule in RULES if isinstance(rule, rules.Optimal) and rule.penalty is None]
SHARED = [rule for rule in RULES if "coarse" not in str(rule)]
# Rules that decide every tree from its own scores.
SEPARATE = [rule for rule in RULES if not rule.needs_all_trees]
# Rules whose trees only grow with the scores of their nodes.
GROWING = [rule for rule in SHARED if rule in SEPARATE and rule.needs != "nothing"]
GROWING = [rule for rule in GROWING if rule not in SEARCHED]


def whole(*shape: int, seed: int = 0, top: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-top, top + 1, shape, generator=generator).double()


def same(first: Tree, second: Tree) -> bool:
    """Whether two batches hold the same trees, with the same marks and labels."""
    for name in ("split", "limited", "labels", "valid"):
        one, other = (getattr(tree.flat()[:], name) for tree in (first, second))
        if (one is None) != (other is None):
            return False
        if one is not None and not torch.equal(*torch.broadcast_tensors(one, other)):
            return False
    return all(
        getattr(first, name) == getattr(second, name) for name in ("shape", "rule", "members")
    )


def test_whole_numbers_give_equal_trees():
    """Means of integers over blocks of 2^n are exact, and so is a scale of 1/2."""
    dtypes = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
    for rule, dtype, size in itertools.product(RULES, dtypes, [(16, 16), (2, 8)]):
        grid = Grid(*size)
        q, k = whole(2, 2, 9, 4, seed=1).to(dtype), whole(2, 2, grid.size, 4, seed=2).to(dtype)
        scores = (q.double() @ k.double().mT) / 2
        exact = scores.to(torch.promote_types(dtype, torch.float32))
        assert torch.equal(exact.double(), scores)
        tree = screen_keys(q.requires_grad_(), k.requires_grad_(), grid, rule)
        assert same(tree, screen(exact, grid, rule)) and not tree.split.requires_grad
        assert tree.labels is None or not tree.labels.requires_grad
        if rule in SEPARATE:
            assert same(screen_keys(q[1, 0], k[1, 0], grid, rule), tree[1, 0])


def test_nodes_reached_alone_or_whole_levels(monkeypatch):
    """However Gamma is computed from keys, for few nodes or for all, the tree is that of the scores."""
    for share, size in itertools.product([0.0, 2.0], [(16, 16), (7, 9), (1, 7)]):
        monkeypatch.setattr(bmfa.trees.keys, "SPARSE_SHARE", share)
        grid = Grid(*size)
        q, k = noise(2, 3, 9, 4, seed=1), noise(2, 3, grid.size, 4, seed=2)
        q *= torch.logspace(-2, 1, 9, dtype=torch.float64).unsqueeze(1)
        for tau, epsilon in ((1.0, 0.01), (0.3, 0.2), (1.0, 1e-14)):
            tree = screen_keys(q, k, grid, rules.Gamma(epsilon), tau=tau)
            expected = screen(q @ k.mT / 2, grid, rules.Gamma(epsilon), tau=tau)
            assert same(tree, expected)
            assert tree.leaf_count.max() > 1


def test_a_tree_shared_by_max_refines_every_member():
    grid, scores = Grid(5, 6), noise(2, 3, 4, 30) * 2
    for rule, dims in itertools.product(GROWING, [(0,), (2,), (0, 1), (1, 2), (0, 1, 2)]):
        members = screen(scores, grid, rule)
        most = screen(scores, grid, rule, share=dims)
        least = screen(scores, grid, rule, share=dims, share_by=0.0)
        shape = tuple(1 if d in dims else n for d, n in enumerate((2, 3, 4)))
        assert most.shape == least.shape == shape
        assert most.members == least.members == 24 // most.leaf_count.numel()
        assert bool(most.refines(members).all() and members.refines(least).all())
        assert most.leaf_count.max() > 1


def test_what_is_aggregated_is_the_score_of_the_node():
    """On 2x2 the one score is the gap itself."""
    scores, reduced = noise(5, 6, 4, seed=3) * 2, {"max": torch.amax, "mean": torch.mean}
    quantiles = (0.0, 0.1, 0.5, 0.85, 1.0)
    for dim, by, epsilon in itertools.product([0, 1], ["max", "mean", *quantiles], (0.2, 0.5, 1.0)):
        gaps = energy.gap(scores)
        expected = reduced[by](gaps, dim) if by in reduced else gaps.quantile(by, dim)
        tree = screen(scores, Grid(2, 2), rules.Gamma(epsilon), share=dim, share_by=by)
        assert torch.equal(tree.leaf_count.flatten() == 4, expected > epsilon), by


def test_keys_share_as_scores_do():
    for rule, by in itertools.product(SHARED, ["max", "mean", 0.75]):
        grid = Grid(8, 8)
        q, k = whole(2, 3, 6, 4, seed=5), whole(2, 3, 64, 4, seed=6)
        scores = (q @ k.mT) / 2
        for share in ((1, 2), -2):
            tree = screen_keys(q, k, grid, rule, share=share, share_by=by)
            assert same(tree, screen(scores, grid, rule, share=share, share_by=by)), share


def test_budgets_of_shared_trees():
    grid = Grid(8, 8)
    scores = noise(3, 5, 64) * 2
    for leaves, most in ((1e-9, 1), (10, 10), (40, 40), (0.3, 19)):
        tree = screen(scores, grid, rules.Optimal(leaves=leaves), share=1)
        assert bool((tree.leaf_count <= most).all())
    for error in (0.01, 0.2):
        # The largest share a split recovers for any member bounds what each of them misses.
        tree = screen(scores, grid, rules.Optimal(error=error), share=1)
        assert bool((tree.error(scores) <= error + 1e-12).all())
        pooled = screen(scores, grid, rules.Optimal(error=error, pooled=True), share=1)
        assert pooled.error(scores).mean() <= error + 1e-12


def test_shared_trees_and_masks():
    grid = Grid(5, 3)
    scores, valid = noise(2, 4, 15), random_mask(2, 1, 15)
    tree = screen(scores, grid, rules.Gamma(0.01), valid=valid, share=1)
    assert tree.shape == (2, 1)
    assert torch.equal(tree.leaf_index >= 0, valid)
    for row in range(2):
        alone = screen(scores[row], grid, rules.Gamma(0.01), valid=valid[row], share=0)
        assert torch.equal(alone.leaf_index, tree[row].leaf_index)
    with pytest.raises(ValueError, match="differs between query-head pairs that share a tree"):
        screen(scores, grid, rules.Gamma(0.01), valid=valid, share=0)
    # Masks that are alike, given one by one, are no difference.
    again = screen(scores, grid, rules.Gamma(0.01), valid=valid.expand(2, 4, 15), share=1)
    assert torch.equal(again.leaf_index, tree.leaf_index)


def test_a_batch_is_each_of_its_rows(monkeypatch):
    """Whatever its shape, strides, dtype, masks and chunks; half precision is computed in float32."""
    chunks, dtypes = (1, 35 * 3, 1 << 20), (torch.float64, torch.float16, torch.bfloat16)
    for seed, (rule, elements) in enumerate(itertools.product(SEPARATE, chunks)):
        monkeypatch.setattr(bmfa.trees.build, "CHUNK_ELEMENTS", elements)
        generator = np.random.default_rng(seed)
        lead = tuple(generator.integers(1, 3, size=generator.integers(0, 4)).tolist())
        dtype = dtypes[generator.integers(3)]
        scores = (3 * noise(35, *lead, seed=seed)).to(dtype).movedim(0, -1).requires_grad_()
        masks = random_mask(*lead, 35, seed=seed)
        for dim in range(len(lead)):  # the same mask along some dimensions
            masks = masks if generator.random() < 0.5 else masks.narrow(dim, 0, 1)
        if masks.dim() > 1 and len(masks) == 1:
            masks = masks.squeeze(0)
        valid, limit = (None, masks, masks)[seed % 3], (None, 2)[seed % 2]
        before = scores.detach().clone()
        tree = screen(scores, Grid(7, 5), rule, valid=valid, max_depth=limit)
        assert torch.equal(scores, before) and not tree.split.requires_grad and tree.shape == lead
        for index in np.ndindex(lead):
            row = before[index].to(torch.promote_types(dtype, torch.float32))
            mask = None if valid is None else valid.expand(*lead, 35)[index]
            alone = screen(row, Grid(7, 5), rule, valid=mask, max_depth=limit)
            assert same(tree[index], alone), (rule, seed, index)
            assert tree.leaf_ratio[index] == alone.leaf_ratio
            assert mask is None or torch.equal(alone.leaf_index >= 0, mask)


def test_chunks_change_nothing(monkeypatch):
    grid, valid = Grid(7, 5), random_mask(2, 2, 1, 35)
    q, k = noise(2, 2, 4, 4, seed=1) * 2, noise(2, 2, 35, 4, seed=2)
    scores = q @ k.mT / 2
    inputs = (q, k, scores, valid)
    copies = [tensor.clone() for tensor in inputs]
    for rule in RULES:
        calls = [lambda: screen_keys(q, k, grid, rule, valid=valid, max_depth=2)]
        if rule in SHARED and rule not in SEARCHED:
            calls += [
                lambda: screen(scores, grid, rule, share=(0, 2), share_by="mean"),
                lambda: screen_keys(q, k, grid, rule, share=(0, 1), share_by=0.6),
            ]
        at_once = [call() for call in calls]
        for elements in (35 * 3, 35 * 12):  # some rows of a head, some heads
            with monkeypatch.context() as patch:
                patch.setattr(bmfa.trees.build, "CHUNK_ELEMENTS", elements)
                for number, (call, expected) in enumerate(zip(calls, at_once, strict=True)):
                    assert same(call(), expected), (rule, elements, number)
    assert all(torch.equal(*pair) for pair in zip(inputs, copies, strict=True))


def spoilt(value: float, *place: int) -> Tensor:
    scores = torch.zeros(2, 3, 16)
    scores[place] = value
    return scores


def test_empty_batches():
    for rule, (batch, queries) in itertools.product(RULES, [(0, 5), (2, 0)]):
        scores, valid = torch.zeros(batch, queries, 16), random_mask(batch, queries, 16)
        q, k = torch.zeros(batch, queries, 3), torch.zeros(batch, 16, 3)
        trees = [screen(scores, Grid(4, 4), rule), screen_keys(q, k, Grid(4, 4), rule)]
        if not rule.needs_all_trees and rule.needs != "nothing":
            trees.append(screen(scores, Grid(4, 4), rule, valid=valid))
        for tree in trees:
            assert tree.shape == tree.leaf_count.shape == (batch, queries)
            assert tree.leaf_index.shape == (batch, queries, 16)


def test_sharing_among_equals_changes_nothing():
    grid, scores = Grid(7, 5), noise(3, 1, 35) * 2
    for rule in [r for r in SHARED if r in SEPARATE]:
        alone = screen(scores, grid, rule)
        for by in ("max", 0.3):
            for share in (1, np.int64(1), np.array([1])):
                shared = screen(scores.expand(3, 4, 35), grid, rule, share=share, share_by=by)
                assert torch.equal(shared.split, alone.split) and shared.members == 4
                assert alone.labels is None or torch.equal(shared.labels, alone.labels)
        nobody = screen(scores, grid, rule, share=())
        assert torch.equal(nobody.split, alone.split) and nobody.members == 1


# What screen refuses: the changed argument and the start of the message. Values that a number may
# not have are those of tests/trees/test_rules.py and tests/test_energy.py.
GRID, RULE = Grid(4, 4), rules.Gamma(0.1)
ONES = torch.ones(2, 16, dtype=torch.bool)
SEVENTH = torch.arange(16) == 7
BAD_VALUES = [
    ({"scores": spoilt(NAN, 1, 2, 7)}, r"hold nan at index \(1, 2, 7\) \(1 such.*use valid="),
    ({"scores": spoilt(INF, 0, 1, 3), "rule": "global-mean"}, r"hold inf at index \(0, 1, 3\)"),
    ({"scores": spoilt(-INF, 1, 0, 0).half()}, r"scores hold -inf at index \(1, 0, 0\)"),
    ({"scores": torch.tensor([[INF, -INF] * 8])}, r"inf at index \(0, 0\) \(16 such entries\)"),
    ({"scores": spoilt(NAN, 1, 2, 7), "valid": SEVENTH}, "scores hold nan at index"),
    ({"scores": torch.zeros(2, 17)}, "in 17 tokens and the grid has 16; .* without prefix tokens"),
    ({"scores": torch.tensor(1.0)}, r"scores have shape \(\)"),
    ({"scores": torch.zeros(2, 0)}, r"shape \(2, 0\); pass"),
    ({"tau": 0}, r"tau is 0\.0; pass .*\(0, inf"),
    ({"rule": "gama:0.1"}, r"rule 'gama:0\.1' is unknown; pass NAME:VALUE with a name of gamma,"),
    ({"max_depth": -1}, "max_depth is -1; pass an integer at least 0"),
    ({"valid": ONES[0, :15]}, r"valid has shape \(15,\); pass one that broadcasts to \(2, 16\)"),
    ({"valid": ONES.expand(3, 2, 16)}, r"valid has shape \(3, 2, 16\)"),
    ({"valid": ONES[:, :1]}, r"valid has shape \(2, 1\)"),
    ({"valid": ~ONES[0]}, "valid leaves no token"),
    ({"valid": torch.tensor([[True], [False]]) & ONES}, r"no token at leading index \(1,\)"),
    ({"share": 1}, r"share names dimension 1 of scores with leading dimensions \(2,\); pass"),
    ({"share": -1}, "dimension -1"),
    ({"share": (0, -3)}, "dimension -3"),
    ({"scores": torch.zeros(0, 5, 16), "share": 0}, "share names dimension 0, which has size 0"),
    ({"share": 0, "share_by": "median"}, r"share_by is 'median'; pass 'max', 'mean' or a quantile"),
    ({"share_by": 1.5}, r"share_by is 1\.5; pass"),
    ({"rule": "mass-coarse:0.1", "share": 0}, "cannot be shared; use coarse=False or share=None"),
]
BAD_TYPES = [
    ({"scores": torch.zeros(2, 16).long()}, r"dtype torch\.int64; pass one"),
    ({"scores": torch.zeros(2, 16) + 0j}, r"dtype torch\.complex64; pass"),
    ({"scores": np.zeros((2, 16))}, "scores is ndarray; pass a torch"),
    ({"grid": {4}}, "grid is .*; pass"),
    ({"tau": "1"}, "tau is '1'; pass"),
    ({"max_depth": 1.5}, r"max_depth is 1\.5; pass an integer"),
    ({"valid": torch.ones(16)}, r"valid is torch\.float32; pass a torch\.bool tensor"),
    *(({"share": value}, "share is .*; pass") for value in ("0", 0.0, False)),
    *(({"share_by": value}, f"share_by is {value}") for value in (True, None)),
]
Q, K = torch.zeros(2, 5, 8), torch.zeros(2, 16, 8)
BAD_KEYS = [
    ({"k": torch.zeros(2, 17, 8)}, "k has 17 tokens and the 4x4 grid 16; pass the spatial keys"),
    ({"k": K[..., :4]}, r"q has shape \(2, 5, 8\) and k \(2, 16, 4\); pass"),
    ({"q": torch.zeros(2, 4, 5, 8), "k": torch.zeros(2, 2, 16, 8)}, r"and k \(2, 2, 16, 8\)"),
    ({"k": K[0]}, r"k \(16, 8\); pass \(\.\.\., Q, d\) and \(\.\.\., N, d\)"),
    ({"q": Q[..., :0], "k": K[..., :0]}, r"q has shape \(2, 5, 0\)"),
    ({"q": torch.zeros(8), "k": torch.zeros(8)}, r"q has shape \(8,\)"),
    ({"q": Q * NAN}, r"queries hold nan at index \(0, 0, 0\) \(80 such entries\)"),
    ({"q": Q * NAN, "rule": "global-mean"}, "queries hold nan"),
    ({"k": K.index_fill(1, torch.tensor(3), INF)}, r"keys hold inf at index \(0, 3, 0\)"),
    ({"q": Q + 1e30, "k": K + 1e30}, "scores of up to .* overflow torch.float32; pass float64"),
    ({"q": Q + 1e30, "k": K + 1e30, "rule": "exact-gap:1"}, "scores of up to .* overflow"),
    ({"scale": NAN}, "scale is nan; pass"),
    ({"tau": 0.0}, r"tau is 0\.0; pass"),
    ({"valid": ONES}, r"valid has shape \(2, 16\); pass one that broadcasts to \(2, 5, 16\)"),
    ({"valid": ~ONES[:, None]}, r"valid leaves no token at leading index \(0, 0\)"),
    ({"valid": random_mask(2, 5, 16)}, "valid differs between queries of a head; pass"),
    ({"share": 2}, r"share names dimension 2 of scores with leading dimensions \(2, 5\)"),
    ({"rule": rules.Optimal(leaves=17)}, "leaves is 17 and the 4x4 grid has 16 valid tokens"),
]
BAD_KEY_TYPES = [
    ({"k": K.half()}, r"q is torch\.float32 on cpu and k torch\.float16 on cpu; pass one dtype"),
    ({"q": Q.int(), "k": K.int()}, r"q has dtype torch\.int32; pass one of"),
    ({"scale": "auto"}, "scale is 'auto'; pass"),
]


def test_bad_arguments_are_named():
    of_scores = {"scores": torch.zeros(2, 16), "grid": GRID, "rule": RULE}
    of_keys = {"q": Q, "k": K, "grid": GRID, "rule": RULE}
    for call, usual, error, cases in (
        (screen, of_scores, ValueError, BAD_VALUES),
        (screen, of_scores, TypeError, BAD_TYPES),
        (screen_keys, of_keys, ValueError, BAD_KEYS),
        (screen_keys, of_keys, TypeError, BAD_KEY_TYPES),
    ):
        for changes, message in cases:
            with pytest.raises(error, match=message):
                call(**(usual | changes))


def test_no_tensor_is_as_large_as_the_score_matrix(monkeypatch):
    monkeypatch.setattr(bmfa.trees.build, "CHUNK_ELEMENTS", 1 << 15)
    q, k = noise(1, 2, 320, 8), noise(1, 2, 320, 8, seed=1)
    names = "gamma:0.005 gamma-h2:0.005 exact-gap:0.1 mass:0.001 mass-coarse:0.001 optimal:0.001"
    names += " certified:0.5 fixed-depth:2 fixed-blocks:3"
    for rule, share in itertools.product(names.split(), (None, 2)):
        if share is None or "coarse" not in rule:
            with Largest() as largest:
                for valid in (None, random_mask(320)):
                    screen_keys(q, k, Grid(16, 20), rule, share=share, valid=valid)
            # The splits themselves take a byte for each block of each tree, two fifths of N x N a head.
            assert largest.floating < 8 * 320 * 320 / 2
            assert largest.bytes < 8 * 2 * 320 * 320
    monkeypatch.setattr(bmfa.trees.build, "CHUNK_ELEMENTS", 1 << 14)
    q, k = noise(2, 2, 576, 8), noise(2, 2, 576, 8, seed=1)
    with Largest() as largest:
        screen_keys(q, k, Grid(24, 24), rules.Gamma(0.005), valid=random_mask(2, 1, 1, 576))
    assert largest.bytes < 4 * 576 * 576
