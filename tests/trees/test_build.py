"""Screening from scores and from keys: equal trees, sharing, chunks, masks, bad input, memory."""

import itertools
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import bmfa.trees.build
import bmfa.trees.keys
from bmfa import energy, rules
from bmfa.grid import Grid
from bmfa.trees.build import screen, screen_keys
from bmfa.trees.tree import Tree
from cases import nudged

NAN, INF = float("nan"), float("inf")
RULES = [
    rules.Gamma(0.02),
    rules.Gamma(0.02, lookahead=2),
    rules.Gamma(0.02, lookahead=9),
    rules.ExactGap(0.2),
    rules.Certified(0.2),
    rules.Mass(0.003),
    rules.Mass(0.003, coarse=True),
    rules.Optimal(0.003),
    rules.Optimal(leaves=0.4),
    rules.Optimal(leaves=2),
    rules.Optimal(error=0.05),
    rules.Optimal(leaves=0.4, pooled=True),
    rules.Optimal(error=0.05, pooled=True),
    rules.FixedDepth(1),
    rules.FixedBlocks(3),
    rules.QuadrantGap(0.2),
    rules.Variance(0.2),
    rules.RandomQuadrants(0.5, seed=3),
    rules.GlobalMean(),
]
# Found by bisection: thousands of small steps, so that fewer cases must do.
SEARCHED = [rule for rule in RULES if isinstance(rule, rules.Optimal) and rule.penalty is None]
SHARED = [rule for rule in RULES if not getattr(rule, "coarse", False)]
# Rules that decide every tree from its own scores, and those that read the batch as a whole.
SEPARATE = [rule for rule in RULES if not rule.needs_all_trees]
POOLED = [rule for rule in RULES if getattr(rule, "pooled", False)]
# Rules whose trees only grow with the scores of their nodes.
GROWING = [rule for rule in SHARED if isinstance(rule, rules.Gamma | rules.ExactGap | rules.Mass)]
GROWING += [rules.Certified(0.2), rules.Optimal(0.003), rules.QuadrantGap(0.2), rules.Variance(0.2)]


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def whole(*shape: int, seed: int = 0, top: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-top, top + 1, shape, generator=generator).double()


def mask(*shape: int, seed: int = 0) -> Tensor:
    valid = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.7
    valid[..., seed % shape[-1]] = True
    valid[..., -1] = True
    return valid


def same(first: Tree, second: Tree) -> bool:
    """Whether two batches hold the same trees, with the same marks and labels."""
    if first.shape != second.shape or not torch.equal(first.split, second.split):
        return False
    for name in ("limited", "labels", "valid"):
        one, other = (getattr(tree.flat()[:], name) for tree in (first, second))
        if (one is None) != (other is None):
            return False
        if one is not None and not torch.equal(*torch.broadcast_tensors(one, other)):
            return False
    return first.rule == second.rule and first.members == second.members


def differing(tree: Tree, expected: Tree) -> Tensor:
    """(...) trees that are not those expected."""
    assert tree.shape == expected.shape and tree.layout is expected.layout
    return (tree.split != expected.split).any(0).view(tree.shape)


GRIDS = [(1, 1), (1, 7), (4, 4), (5, 3), (14, 14), (7, 9)]
MASKS = {
    "none": lambda batch, heads, size, seed: None,
    "one": lambda batch, heads, size, seed: mask(size, seed=seed),
    "batch": lambda batch, heads, size, seed: mask(batch, 1, 1, size, seed=seed),
    "head": lambda batch, heads, size, seed: mask(batch, heads, 1, size, seed=seed),
}


@pytest.mark.parametrize(
    "masks", [("none", "head"), pytest.param(("one", "batch"), marks=pytest.mark.slow)]
)
def test_keys_give_the_trees_of_the_scores(masks):
    for rule, masked in itertools.product(RULES, masks):
        check_keys(rule, masked)


def check_keys(rule, masked):
    ties = trees = 0
    for seed, size in enumerate(GRIDS[2::2] if rule in SEARCHED else GRIDS + GRIDS[-2:]):
        grid = Grid(*size)
        q, k = noise(2, 3, 6, 5, seed=seed) * 2, noise(2, 3, grid.size, 5, seed=100 + seed)
        scale = (None, 0.7)[seed % 2]
        settings = {
            "tau": (1.0, 0.4)[seed % 2],
            "max_depth": (None, 2)[seed // 2 % 2],
            "valid": MASKS[masked](2, 3, grid.size, seed),
        }
        scores = (q @ k.mT) * (5**-0.5 if scale is None else scale)
        tree = screen_keys(q, k, grid, rule, scale=scale, **settings)
        expected = screen(scores, grid, rule, **settings)
        assert tree.shape == (2, 3, 6)
        wrong = differing(tree, expected)
        trees += wrong.numel()
        if wrong.any():  # within rounding of the threshold, where the tree itself is not settled
            around = [
                screen(scores, grid, nudged(rule, f), **settings) for f in (1 - 1e-9, 1 + 1e-9)
            ]
            unsettled = differing(*around)
            assert bool((unsettled | ~wrong).all()), (seed, wrong.sum())
            ties += int(wrong.sum())
    assert ties <= trees / 100, "ties within rounding should be rare"


def test_whole_numbers_give_equal_trees():
    """Means of integers over blocks of 2^n are exact, and so is a scale of 1/2."""
    for rule in RULES:
        for dtype in [torch.float16, torch.bfloat16, torch.float32, torch.float64]:
            for size in [(16, 16), (2, 8)]:
                grid = Grid(*size)
                q, k = (
                    whole(2, 2, 9, 4, seed=1).to(dtype),
                    whole(2, 2, grid.size, 4, seed=2).to(dtype),
                )
                scores = (q.double() @ k.double().mT) / 2
                exact = scores.to(torch.promote_types(dtype, torch.float32))
                assert torch.equal(exact.double(), scores)
                assert same(screen_keys(q, k, grid, rule), screen(exact, grid, rule))


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


def test_keys_without_leading_heads():
    for rule in RULES:
        grid = Grid(4, 4)
        q, k = whole(9, 4, seed=1), whole(16, 4, seed=2)
        tree = screen_keys(q.unsqueeze(0), k.unsqueeze(0), grid, rule)
        assert same(tree, screen((q @ k.mT).unsqueeze(0) / 2, grid, rule))


def test_queries_of_two_dimensions():
    q, k = whole(9, 4, seed=1), whole(16, 4, seed=2)
    tree = screen_keys(q, k, Grid(4, 4), rules.Gamma(0.1))
    assert same(tree, screen((q @ k.mT) / 2, Grid(4, 4), rules.Gamma(0.1)))


def test_masks_that_differ_between_queries_are_refused():
    for rule in [rules.Gamma(0.01), rules.ExactGap(0.01), rules.Optimal(0.01)]:
        grid = Grid(4, 4)
        q, k = noise(2, 3, 5, 8), noise(2, 3, 16, 8, seed=1)
        with pytest.raises(ValueError, match="valid differs between queries of a head; pass"):
            screen_keys(q, k, grid, rule, valid=mask(2, 3, 5, 16))
        # Masks given for each query that are equal within a head are obeyed.
        valid = mask(2, 3, 1, 16)
        tree = screen_keys(q, k, grid, rule, valid=valid.expand(2, 3, 5, 16))
        expected = screen((q @ k.mT) * 8**-0.5, grid, rule, valid=valid)
        assert torch.equal(tree.leaf_index, expected.leaf_index)
        assert bool((tree.leaf_index.ge(0) == valid).all())


def test_keys_of_tokens_that_do_not_exist_may_hold_anything():
    for rule in [rules.Gamma(0.01), rules.Optimal(0.01)]:
        grid = Grid(4, 4)
        q, k = whole(2, 5, 4), whole(2, 16, 4, seed=1)
        valid = mask(16)
        expected = screen_keys(q, k, grid, rule, valid=valid)
        k[:, ~valid] = NAN
        assert same(screen_keys(q, k, grid, rule, valid=valid), expected)


def test_scores_of_tokens_that_do_not_exist_may_hold_anything():
    for rule in RULES:
        grid = Grid(5, 7)
        scores, valid = noise(4, 3, 35), mask(4, 1, 35)
        expected = screen(scores, grid, rule, valid=valid)
        for value in (NAN, INF, -INF, 1e300):
            spoilt = scores.where(valid, value)
            tree = screen(spoilt, grid, rule, valid=valid)
            assert same(tree, expected)
            torch.testing.assert_close(
                tree.error(spoilt), expected.error(scores), atol=1e-14, rtol=0
            )


def test_masks_of_every_shape():
    """One mask for all, masks for some dimensions, a mask for each row: the trees of each row alone."""
    for rule in SEPARATE:
        grid = Grid(5, 3)
        scores = noise(2, 3, 15)
        for shape in [(15,), (3, 15), (2, 1, 15), (2, 3, 15)]:
            valid = mask(*shape, seed=len(shape))
            tree = screen(scores, grid, rule, valid=valid)
            rows = valid.expand(2, 3, 15)
            for i, j in ((0, 0), (1, 2)):
                alone = screen(scores[i, j], grid, rule, valid=rows[i, j])
                assert torch.equal(tree[i, j].leaf_index, alone.leaf_index)
        full = screen(scores, grid, rule, valid=torch.ones(15, dtype=torch.bool))
        assert torch.equal(full.leaf_index, screen(scores, grid, rule).leaf_index)


def test_masks_of_every_shape_of_a_batch_decided_together():
    """Each mask, in the shape that broadcasts and row by row, gives the same trees on valid tokens."""
    for rule in [r for r in RULES if r.needs_all_trees]:
        grid = Grid(5, 3)
        scores = noise(2, 3, 15)
        for shape in [(15,), (3, 15), (2, 1, 15)]:
            valid = mask(*shape, seed=len(shape))
            tree = screen(scores, grid, rule, valid=valid)
            assert torch.equal(tree.leaf_index >= 0, valid.expand(2, 3, 15))
            rows = screen(scores, grid, rule, valid=valid.expand(2, 3, 15).contiguous())
            assert torch.equal(tree.leaf_index, rows.leaf_index)
            spoilt = screen(scores.where(valid, 99.0), grid, rule, valid=valid)
            assert torch.equal(tree.leaf_index, spoilt.leaf_index)


def test_a_tree_shared_by_max_refines_every_member():
    for rule, share in itertools.product(GROWING, [0, 1, 2, (0, 1), (1, 2), (0, 2), (0, 1, 2)]):
        grid = Grid(5, 6)
        scores = noise(2, 3, 4, 30) * 2
        members = screen(scores, grid, rule)
        most = screen(scores, grid, rule, share=share)
        least = screen(scores, grid, rule, share=share, share_by=0.0)
        dims = (share,) if isinstance(share, int) else share
        shape = tuple(1 if d in dims else n for d, n in enumerate((2, 3, 4)))
        assert most.shape == least.shape == shape
        assert most.members == least.members == 24 // most.leaf_count.numel()
        for index in itertools.product(range(2), range(3), range(4)):
            group = tuple(0 if d in dims else i for d, i in enumerate(index))
            assert bool(most[group].refines(members[index]))
            assert bool(members[index].refines(least[group]))
        assert most.leaf_count.max() > 1


def test_quantiles_zero_and_one_are_minimum_and_maximum():
    for rule in SHARED:
        grid = Grid(5, 6)
        scores = noise(4, 5, 30) * 2
        for share in (0, 1, (0, 1)):
            most = screen(scores, grid, rule, share=share, share_by="max")
            assert same(screen(scores, grid, rule, share=share, share_by=1.0), most)
            assert same(screen(scores, grid, rule, share=share, share_by=1), most)
            if rule in GROWING:
                least = screen(scores, grid, rule, share=share, share_by=0)
                half = screen(scores, grid, rule, share=share, share_by=0.5)
                assert bool(most.refines(half).all()) and bool(half.refines(least).all())
                assert bool(
                    most.refines(screen(scores, grid, rule, share=share, share_by="mean")).all()
                )


def test_what_is_aggregated_is_the_score_of_the_node():
    """On 2x2 the one score is the gap itself."""
    for share in [0, 1, (0, 1)]:
        scores = noise(5, 6, 4, seed=3) * 2
        gaps = energy.gap(scores)
        dims = (share,) if isinstance(share, int) else share
        flat = gaps.movedim(dims, tuple(range(-len(dims), 0))).flatten(-len(dims))
        for epsilon in (0.2, 0.5, 1.0):
            for by in ("max", "mean", 0.0, 0.1, 0.5, 0.85, 1.0):
                if by == "max":
                    expected = flat.amax(-1)
                else:
                    expected = flat.mean(-1) if by == "mean" else flat.quantile(by, dim=-1)
                tree = screen(scores, Grid(2, 2), rules.Gamma(epsilon), share=share, share_by=by)
                assert torch.equal(tree.leaf_count.flatten() == 4, expected.flatten() > epsilon), by


def test_keys_share_as_scores_do():
    for rule, by in itertools.product(SHARED, ["max", "mean", 0.75]):
        grid = Grid(8, 8)
        q, k = whole(2, 3, 6, 4, seed=5), whole(2, 3, 64, 4, seed=6)
        scores = (q @ k.mT) / 2
        for share in ((1, 2), -2):
            tree = screen_keys(q, k, grid, rule, share=share, share_by=by)
            assert same(tree, screen(scores, grid, rule, share=share, share_by=by)), share


def test_sharing_among_equals_changes_nothing():
    for rule in [r for r in SHARED if r in SEPARATE]:
        grid = Grid(7, 5)
        scores = noise(3, 1, 35) * 2
        alone = screen(scores, grid, rule)
        for by in ("max", 0.3):
            shared = screen(scores.expand(3, 4, 35), grid, rule, share=1, share_by=by)
            assert torch.equal(shared.split, alone.split) and shared.members == 4
        nobody = screen(scores, grid, rule, share=())
        assert torch.equal(nobody.split, alone.split) and nobody.members == 1


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
    scores, valid = noise(2, 4, 15), mask(2, 1, 15)
    tree = screen(scores, grid, rules.Gamma(0.01), valid=valid, share=1)
    assert tree.shape == (2, 1)
    assert torch.equal(tree.leaf_index >= 0, valid)
    for row in range(2):
        alone = screen(scores[row], grid, rules.Gamma(0.01), valid=valid[row], share=0)
        assert torch.equal(alone.leaf_index, tree[row].leaf_index)
    with pytest.raises(
        ValueError, match="valid differs between query-head pairs that share a tree"
    ):
        screen(scores, grid, rules.Gamma(0.01), valid=valid, share=0)
    # Masks that are alike, given one by one, are no difference.
    again = screen(scores, grid, rules.Gamma(0.01), valid=valid.expand(2, 4, 15), share=1)
    assert torch.equal(again.leaf_index, tree.leaf_index)


def test_a_rule_that_follows_its_own_splits_cannot_be_shared():
    with pytest.raises(ValueError, match=r"mass-coarse:0\.1 .* cannot be shared; use coarse=False"):
        screen(noise(3, 16), Grid(4, 4), rules.Mass(0.1, coarse=True), share=0)


def test_sharing_warns_of_nothing():
    """A user's first shared tree must not come with a warning about the library's insides."""
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for by in ("max", "mean", 0.5):
                screen(noise(3, 16), Grid(4, 4), rules.Gamma(0.1), share=0, share_by=by)
    finally:
        torch.set_warn_always(False)
    assert not [str(warning.message) for warning in caught]


def test_permuting_the_batch_permutes_the_trees():
    for rule in SEPARATE + POOLED:
        grid = Grid(7, 9)
        scores, valid = noise(6, 5, 63) * 2, mask(6, 1, 63)
        order, heads = torch.tensor([3, 0, 5, 1, 4, 2]), torch.tensor([4, 2, 0, 1, 3])
        tree = screen(scores, grid, rule, valid=valid)
        moved = screen(scores[order][:, heads], grid, rule, valid=valid[order])
        assert same(moved, tree[order][:, heads])


def test_permuting_heads_and_queries_permutes_the_trees():
    for rule in SEPARATE + POOLED:
        grid = Grid(5, 6)
        q, k = noise(2, 4, 7, 6), noise(2, 4, 30, 6, seed=1)
        heads, queries = torch.tensor([2, 0, 3, 1]), torch.tensor([6, 2, 0, 4, 1, 5, 3])
        tree = screen_keys(q, k, grid, rule)
        moved = screen_keys(q[:, heads][:, :, queries], k[:, heads], grid, rule)
        assert torch.equal(moved.leaf_index, tree[:, heads][:, :, queries].leaf_index)


def test_random_quadrants_belong_to_positions_of_the_batch():
    """Trees drawn at random do not move with the scores: a permuted batch has the same trees."""
    rule, scores = rules.RandomQuadrants(0.5, seed=3), noise(6, 5, 63)
    tree = screen(scores, Grid(7, 9), rule)
    moved = screen(scores.flip(0), Grid(7, 9), rule)
    assert torch.equal(moved.split, tree.split)
    assert not torch.equal(tree.split, tree[torch.arange(5, -1, -1)].split)


def test_chunks_change_nothing(monkeypatch):
    for rule in RULES:
        grid = Grid(7, 5)
        q, k = noise(2, 2, 4, 4, seed=1) * 2, noise(2, 2, 35, 4, seed=2)
        scores, valid = q @ k.mT / 2, mask(2, 2, 1, 35)
        calls = [
            lambda: screen(scores, grid, rule),
            lambda: screen(scores, grid, rule, valid=valid, max_depth=2),
            lambda: screen_keys(q, k, grid, rule),
            lambda: screen_keys(q, k, grid, rule, valid=valid, max_depth=2),
        ]
        if rule in SEARCHED:
            calls = calls[1:3]
        elif rule in SHARED:
            calls += [
                lambda: screen(scores, grid, rule, share=1),
                lambda: screen(scores, grid, rule, share=(0, 2), share_by="mean"),
                lambda: screen_keys(q, k, grid, rule, share=(0, 1), share_by=0.6),
            ]
        at_once = [call() for call in calls]
        sizes = (1, 35 * 3, 35 * 12)  # one row, some rows of a head, some heads
        for elements in sizes[1:] if rule in SEARCHED else sizes:
            with monkeypatch.context() as patch:
                patch.setattr(bmfa.trees.build, "CHUNK_ELEMENTS", elements)
                for number, (call, expected) in enumerate(zip(calls, at_once, strict=True)):
                    assert same(call(), expected), (rule, elements, number)


def test_an_empty_batch_of_fixed_trees():
    for rule in [
        rules.FixedDepth(1),
        rules.FixedBlocks(3),
        rules.RandomQuadrants(0.5),
        rules.GlobalMean(),
    ]:
        for shape in ((0,), (2, 0, 3)):
            tree = screen(torch.zeros(*shape, 16), Grid(4, 4), rule)
            assert tree.shape == shape and tree.leaf_count.shape == shape
            assert tree.leaf_index.shape == (*shape, 16)


def test_an_empty_batch_of_trees():
    for rule, keys in itertools.product([r for r in RULES if r.needs != "nothing"], [False, True]):
        grid = Grid(4, 4)
        for batch, queries in ((0, 5), (2, 0)):
            if keys:
                tree = screen_keys(
                    torch.zeros(batch, queries, 3), torch.zeros(batch, 16, 3), grid, rule
                )
            else:
                tree = screen(torch.zeros(batch, queries, 16), grid, rule)
            assert tree.shape == (batch, queries) and tree.leaf_count.shape == (batch, queries)
            assert tree.leaf_index.shape == (batch, queries, 16)


def test_an_empty_batch_under_masks():
    for shape in [(0, 5), (2, 0)]:
        valid = mask(*shape, 16)
        tree = screen(torch.zeros(*shape, 16), Grid(4, 4), rules.Gamma(0.1), valid=valid)
        assert tree.shape == shape and tree.leaf_index.shape == (*shape, 16)


def test_a_tree_shared_by_nobody_is_refused():
    for by in ["max", 0.5]:
        with pytest.raises(ValueError, match="share"):
            screen(torch.zeros(0, 5, 16), Grid(4, 4), rules.Gamma(0.1), share=0, share_by=by)


def test_half_precision_is_computed_in_float32():
    for rule in RULES:
        for dtype in [torch.float16, torch.bfloat16]:
            grid = Grid(7, 9)
            scores = (noise(20, 63) * 3).to(dtype)
            assert same(screen(scores, grid, rule), screen(scores.float(), grid, rule))
            q, k = noise(2, 5, 8).to(dtype), noise(2, 63, 8, seed=1).to(dtype)
            assert same(
                screen_keys(q, k, grid, rule), screen_keys(q.float(), k.float(), grid, rule)
            )


def test_gradients_are_neither_needed_nor_kept():
    for rule in RULES:
        grid = Grid(4, 4)
        scores = noise(3, 16).requires_grad_()
        q, k = noise(3, 5, 4).requires_grad_(), noise(3, 16, 4, seed=1).requires_grad_()
        for tree in (screen(scores, grid, rule), screen_keys(q, k, grid, rule)):
            assert not tree.split.requires_grad
            assert tree.labels is None or not tree.labels.requires_grad
        assert same(screen(scores, grid, rule), screen(scores.detach(), grid, rule))


def test_strides_do_not_matter():
    for rule in RULES:
        grid = Grid(5, 6)
        scores = noise(30, 4, 3)
        views = scores.permute(2, 1, 0), scores.permute(2, 1, 0).contiguous()
        assert same(*(screen(view, grid, rule) for view in views))
        wide = noise(3, 4, 60)
        assert same(
            screen(wide[..., ::2], grid, rule), screen(wide[..., ::2].contiguous(), grid, rule)
        )


def test_inputs_are_left_as_they_were():
    grid = Grid(5, 3)
    scores, valid = noise(4, 15), mask(4, 15)
    q, k = noise(4, 6, 3), noise(4, 15, 3)
    copies = [t.clone() for t in (scores, valid, q, k)]
    for rule in RULES:
        screen(scores, grid, rule, valid=valid)
        screen_keys(q, k, grid, rule, valid=valid.unsqueeze(1))
    assert all(torch.equal(*pair) for pair in zip((scores, valid, q, k), copies, strict=True))


SCORES, GRID, RULE = torch.zeros(2, 16), Grid(4, 4), rules.Gamma(0.1)


def spoilt(value: float, *place: int, dtype: torch.dtype = torch.float32) -> Tensor:
    scores = torch.zeros(2, 3, 16, dtype=dtype)
    scores[place] = value
    return scores


BAD = {
    "nan": (
        lambda: screen(spoilt(NAN, 1, 2, 7), GRID, RULE),
        ValueError,
        r"scores hold nan at index \(1, 2, 7\) \(1 such.*use valid=",
    ),
    "inf": (
        lambda: screen(spoilt(INF, 0, 1, 3), GRID, rules.FixedDepth(1)),
        ValueError,
        r"scores hold inf at index \(0, 1, 3\)",
    ),
    "minus inf in half": (
        lambda: screen(spoilt(-INF, 1, 0, 0, dtype=torch.float16), GRID, RULE),
        ValueError,
        r"scores hold -inf at index \(1, 0, 0\)",
    ),
    "inf and minus inf": (
        lambda: screen(torch.tensor([[INF, -INF] * 8]), GRID, RULE),
        ValueError,
        r"scores hold inf at index \(0, 0\) \(16 such entries\)",
    ),
    "nan at a valid token": (
        lambda: screen(spoilt(NAN, 1, 2, 7), GRID, RULE, valid=torch.arange(16) == 7),
        ValueError,
        r"scores hold nan at index \(1, 2, 7\)",
    ),
    "integers": (
        lambda: screen(SCORES.long(), GRID, RULE),
        TypeError,
        r"dtype torch\.int64; pass one",
    ),
    "booleans": (
        lambda: screen(SCORES.bool(), GRID, RULE),
        TypeError,
        r"dtype torch\.bool; pass one",
    ),
    "complex": (
        lambda: screen(SCORES + 0j, GRID, RULE),
        TypeError,
        r"dtype torch\.complex64; pass",
    ),
    "an array": (
        lambda: screen(SCORES.numpy(), GRID, RULE),
        TypeError,
        "scores is ndarray; pass a torch",
    ),
    "a list": (lambda: screen([0.0] * 16, GRID, RULE), TypeError, "scores is list; pass a torch"),
    "a class token": (
        lambda: screen(torch.zeros(2, 17), GRID, RULE),
        ValueError,
        "scores end in 17 tokens and the grid has 16; .* without prefix tokens",
    ),
    "an image": (
        lambda: screen(torch.zeros(2, 4, 4), GRID, RULE),
        ValueError,
        "scores end in 4 tokens and the grid has 16",
    ),
    "a number": (
        lambda: screen(torch.tensor(1.0), GRID, RULE),
        ValueError,
        r"scores have shape \(\)",
    ),
    "no tokens": (
        lambda: screen(torch.zeros(2, 0), GRID, RULE),
        ValueError,
        r"shape \(2, 0\); pass",
    ),
    "tau 0": (
        lambda: screen(SCORES, GRID, RULE, tau=0),
        ValueError,
        r"tau is 0\.0; pass .*\(0, inf",
    ),
    "tau -1": (lambda: screen(SCORES, GRID, RULE, tau=-1.0), ValueError, r"tau is -1\.0; pass"),
    "tau nan": (lambda: screen(SCORES, GRID, RULE, tau=NAN), ValueError, "tau is nan; pass"),
    "tau inf": (lambda: screen(SCORES, GRID, RULE, tau=INF), ValueError, "tau is inf; pass"),
    "tau text": (lambda: screen(SCORES, GRID, RULE, tau="1"), TypeError, "tau is '1'; pass"),
    "tau True": (lambda: screen(SCORES, GRID, RULE, tau=True), TypeError, "tau is True; pass"),
    "rule text": (
        lambda: screen(SCORES, GRID, "gama:0.1"),
        ValueError,
        r"rule 'gama:0\.1' is unknown; pass NAME:VALUE with a name of gamma,",
    ),
    "rule class": (
        lambda: screen(SCORES, GRID, rules.Gamma),
        TypeError,
        r"rule is <class .*; pass one",
    ),
    "rule None": (lambda: screen(SCORES, GRID, None), TypeError, "rule is None; pass one"),
    "depth -1": (
        lambda: screen(SCORES, GRID, RULE, max_depth=-1),
        ValueError,
        "max_depth is -1; pass an integer at least 0",
    ),
    "depth 1.5": (
        lambda: screen(SCORES, GRID, RULE, max_depth=1.5),
        TypeError,
        r"max_depth is 1\.5; pass an integer",
    ),
    "mask of numbers": (
        lambda: screen(SCORES, GRID, RULE, valid=torch.ones(16)),
        TypeError,
        r"valid is torch\.float32; pass a torch\.bool tensor",
    ),
    "mask of another size": (
        lambda: screen(SCORES, GRID, RULE, valid=torch.ones(15, dtype=torch.bool)),
        ValueError,
        r"valid has shape \(15,\); pass one that broadcasts to \(2, 16\)",
    ),
    "mask of more rows": (
        lambda: screen(SCORES, GRID, RULE, valid=torch.ones(3, 2, 16, dtype=torch.bool)),
        ValueError,
        r"valid has shape \(3, 2, 16\)",
    ),
    "mask of one token": (
        lambda: screen(SCORES, GRID, RULE, valid=torch.ones(2, 1, dtype=torch.bool)),
        ValueError,
        r"valid has shape \(2, 1\)",
    ),
    "mask of nothing": (
        lambda: screen(SCORES, GRID, RULE, valid=torch.zeros(16, dtype=torch.bool)),
        ValueError,
        "valid leaves no token",
    ),
    "a row of nothing": (
        lambda: screen(SCORES, GRID, RULE, valid=torch.tensor([[True], [False]]).expand(2, 16)),
        ValueError,
        r"valid leaves no token at leading index \(1,\)",
    ),
    "share 1 of (2,)": (
        lambda: screen(SCORES, GRID, RULE, share=1),
        ValueError,
        r"share names dimension 1 of scores with leading dimensions \(2,\); pass",
    ),
    "share the tokens": (lambda: screen(SCORES, GRID, RULE, share=-1), ValueError, "dimension -1"),
    "share -3": (lambda: screen(SCORES, GRID, RULE, share=(0, -3)), ValueError, "dimension -3"),
    "share_by text": (
        lambda: screen(SCORES, GRID, RULE, share=0, share_by="median"),
        ValueError,
        r"share_by is 'median'; pass 'max', 'mean' or a quantile in \[0, 1\]",
    ),
    "share_by 1.5": (
        lambda: screen(SCORES, GRID, RULE, share=0, share_by=1.5),
        ValueError,
        r"share_by is 1\.5; pass",
    ),
    "share_by nan": (
        lambda: screen(SCORES, GRID, RULE, share_by=NAN),
        ValueError,
        "share_by is nan",
    ),
    "share_by True": (
        lambda: screen(SCORES, GRID, RULE, share_by=True),
        TypeError,
        "share_by is True",
    ),
    "share_by None": (
        lambda: screen(SCORES, GRID, RULE, share_by=None),
        TypeError,
        "share_by is None",
    ),
}


def test_bad_scores_and_settings_are_named():
    for name in BAD:
        call, error, message = BAD[name]
        with pytest.raises(error, match=message):
            call()


def keys(*shape: int) -> Tensor:
    return torch.zeros(shape)


BAD_KEYS = {
    "prefix in the keys": (
        lambda: screen_keys(keys(2, 17, 8), keys(2, 17, 8), GRID, RULE),
        ValueError,
        "k has 17 tokens and the 4x4 grid 16; pass the spatial keys alone",
    ),
    "widths": (
        lambda: screen_keys(keys(2, 5, 8), keys(2, 16, 4), GRID, RULE),
        ValueError,
        r"q has shape \(2, 5, 8\) and k \(2, 16, 4\); pass",
    ),
    "heads": (
        lambda: screen_keys(keys(2, 4, 5, 8), keys(2, 2, 16, 8), GRID, RULE),
        ValueError,
        r"q has shape \(2, 4, 5, 8\) and k \(2, 2, 16, 8\)",
    ),
    "dimensions": (
        lambda: screen_keys(keys(2, 5, 8), keys(16, 8), GRID, RULE),
        ValueError,
        r"k \(16, 8\); pass \(\.\.\., Q, d\) and \(\.\.\., N, d\)",
    ),
    "no width": (
        lambda: screen_keys(keys(2, 5, 0), keys(2, 16, 0), GRID, RULE),
        ValueError,
        r"q has shape \(2, 5, 0\)",
    ),
    "one dimension": (
        lambda: screen_keys(keys(8), keys(8), GRID, RULE),
        ValueError,
        r"q has shape \(8,\)",
    ),
    "dtypes": (
        lambda: screen_keys(keys(2, 5, 8), keys(2, 16, 8).half(), GRID, RULE),
        TypeError,
        r"q is torch\.float32 on cpu and k torch\.float16 on cpu; pass one dtype",
    ),
    "integers": (
        lambda: screen_keys(keys(2, 5, 8).int(), keys(2, 16, 8).int(), GRID, RULE),
        TypeError,
        r"q has dtype torch\.int32; pass one of",
    ),
    "nan queries": (
        lambda: screen_keys(keys(2, 5, 8) * NAN, keys(2, 16, 8), GRID, RULE),
        ValueError,
        r"queries hold nan at index \(0, 0, 0\) \(80 such entries\)",
    ),
    "inf keys": (
        lambda: screen_keys(
            keys(2, 5, 8), keys(2, 16, 8).index_fill(1, torch.tensor(3), INF), GRID, RULE
        ),
        ValueError,
        r"keys hold inf at index \(0, 3, 0\)",
    ),
    "nan for a fixed rule": (
        lambda: screen_keys(keys(2, 5, 8) * NAN, keys(2, 16, 8), GRID, rules.GlobalMean()),
        ValueError,
        "queries hold nan",
    ),
    "scale nan": (
        lambda: screen_keys(keys(2, 5, 8), keys(2, 16, 8), GRID, RULE, scale=NAN),
        ValueError,
        "scale is nan; pass",
    ),
    "scale text": (
        lambda: screen_keys(keys(2, 5, 8), keys(2, 16, 8), GRID, RULE, scale="auto"),
        TypeError,
        "scale is 'auto'; pass",
    ),
    "tau": (
        lambda: screen_keys(keys(2, 5, 8), keys(2, 16, 8), GRID, RULE, tau=0.0),
        ValueError,
        r"tau is 0\.0; pass",
    ),
    "rule": (
        lambda: screen_keys(keys(2, 5, 8), keys(2, 16, 8), GRID, "gamma"),
        ValueError,
        "rule 'gamma' has no value; rules read NAME:VALUE",
    ),
    "mask": (
        lambda: screen_keys(
            keys(2, 5, 8), keys(2, 16, 8), GRID, RULE, valid=torch.ones(2, 16, dtype=torch.bool)
        ),
        ValueError,
        r"valid has shape \(2, 16\); pass one that broadcasts to \(2, 5, 16\)",
    ),
    "empty mask": (
        lambda: screen_keys(
            keys(2, 5, 8), keys(2, 16, 8), GRID, RULE, valid=torch.zeros(2, 1, 16, dtype=torch.bool)
        ),
        ValueError,
        r"valid leaves no token at leading index \(0, 0\)",
    ),
    "share": (
        lambda: screen_keys(keys(2, 5, 8), keys(2, 16, 8), GRID, RULE, share=2),
        ValueError,
        r"share names dimension 2 of scores with leading dimensions \(2, 5\)",
    ),
    "leaves": (
        lambda: screen_keys(keys(2, 5, 8), keys(2, 16, 8), GRID, rules.Optimal(leaves=17)),
        ValueError,
        "leaves is 17 and the 4x4 grid has 16 valid tokens",
    ),
}


def test_bad_keys_are_named():
    for name in BAD_KEYS:
        call, error, message = BAD_KEYS[name]
        with pytest.raises(error, match=message):
            call()


def test_products_that_overflow_are_refused():
    for rule in [rules.Gamma(0.1), rules.ExactGap(0.1)]:
        q, k = noise(2, 5, 8).float() * 1e30, noise(2, 16, 8, seed=1).float() * 1e30
        with pytest.raises(ValueError, match=r"hold -?inf|overflow"):
            screen_keys(q, k, GRID, rule)


def test_wrong_types_are_named():
    for call in [
        lambda: screen(SCORES, {4}, RULE),
        lambda: screen(SCORES, GRID, RULE, share="0"),
        lambda: screen(SCORES, GRID, RULE, share=0.0),
        lambda: screen(SCORES, GRID, RULE, share=False),
    ]:
        with pytest.raises(TypeError, match=r"(grid|share) is .*; pass"):
            call()


class Largest(TorchDispatchMode):
    """The most elements any tensor made meanwhile has memory for: all of them, and floats alone."""

    def __init__(self) -> None:
        super().__init__()
        self.any = self.floating = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                elements = tensor.untyped_storage().nbytes() // tensor.element_size()
                self.any = max(self.any, elements)
                if tensor.is_floating_point():
                    self.floating = max(self.floating, elements)
        return result


LARGE_RULES = [rules.Gamma(0.005), rules.Gamma(0.005, lookahead=2), rules.ExactGap(0.1)]
LARGE_RULES += [rules.Mass(1e-3), rules.Mass(1e-3, coarse=True), rules.Optimal(1e-3)]
LARGE_RULES += [rules.Certified(0.5), rules.FixedDepth(2), rules.FixedBlocks(3)]


def test_no_tensor_is_as_large_as_the_score_matrix(monkeypatch):
    shared = [(rule, 2) for rule in LARGE_RULES if "coarse" not in str(rule)]
    for rule, share in [*((rule, None) for rule in LARGE_RULES), *shared]:
        monkeypatch.setattr(bmfa.trees.build, "CHUNK_ELEMENTS", 1 << 15)
        grid = Grid(16, 20)
        q, k = noise(1, 2, 320, 8), noise(1, 2, 320, 8, seed=1)
        with Largest() as largest:
            screen_keys(q, k, grid, rule, share=share)
            screen_keys(q, k, grid, rule, share=share, valid=mask(320))
        # The splits themselves take a byte for each block of each tree, two fifths of N x N a head.
        assert largest.floating < 320 * 320 / 2
        assert largest.any < 2 * 320 * 320


def test_a_coarse_mass_is_not_shared():
    with pytest.raises(ValueError, match="trees cannot be shared; use coarse=False or share=None"):
        screen(noise(3, 16), Grid(4, 4), rules.Mass(1e-3, coarse=True), share=0)


def test_a_mask_for_each_image_stays_small(monkeypatch):
    monkeypatch.setattr(bmfa.trees.build, "CHUNK_ELEMENTS", 1 << 14)
    q, k = noise(2, 2, 576, 8), noise(2, 2, 576, 8, seed=1)
    with Largest() as largest:
        screen_keys(q, k, Grid(24, 24), rules.Gamma(0.005), valid=mask(2, 1, 1, 576))
    assert largest.any < 4 * 576 * 576


MEMORY = """
import resource, sys
import torch
from bmfa import rules
from bmfa.grid import Grid
from bmfa.trees.build import screen_keys
torch.set_num_threads(1)
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
heads, rule = int(sys.argv[1]), rules.parse(sys.argv[2])
generator = torch.Generator().manual_seed(0)
y, x = torch.meshgrid(torch.arange(64.0), torch.arange(64.0), indexing="ij")
centres = torch.rand(64, 2, 1, 1, generator=generator) * 64
bumps = torch.exp(-((y - centres[:, 0]) ** 2 + (x - centres[:, 1]) ** 2) / 60)  # (64, 64, 64)
k = 4 * bumps.flatten(1).T.expand(1, heads, 4096, 64).contiguous()
q = 2 * torch.randn(1, heads, 4096, 64, generator=generator)
before = peak()
tree = screen_keys(q, k, Grid(64, 64), rule)
print(peak() - before, tree.leaf_count.double().mean().item())
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in other units")
def test_all_queries_of_a_large_grid_take_little_memory():
    """64x64 tokens, all 4,096 queries, d = 64: the score matrix alone would take 768 MiB for 12 heads.

    With 3 heads of the 12 the streamed part is measured in full: a chunk holds queries of one head.
    """
    for heads, rule in [(12, "gamma:0.02"), (3, "optimal:0.0005")]:
        command = [sys.executable, "-c", MEMORY, str(heads), rule]
        shown = subprocess.run(command, capture_output=True, text=True)
        assert shown.returncode == 0, shown.stderr
        grown, leaves = map(float, shown.stdout.split())
        assert grown < 2**30, "half of the 2 GiB allowed"
        assert 10 < leaves < 3000, "trees that ask something of the screening"


def test_shared_dimensions_may_be_numpy_integers() -> None:
    for share in [np.int64(1), np.array([1])]:
        scores = torch.randn(2, 3, 16, dtype=torch.float64)
        expected = screen(scores, Grid(4, 4), rules.Gamma(0.01), share=1)
        tree = screen(scores, Grid(4, 4), rules.Gamma(0.01), share=share)  # type: ignore[arg-type]
        assert torch.equal(tree.leaf_index, expected.leaf_index)
