"""What a tree says of itself: leaves, counts, order, reconstruction, indexing, size."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

import bmfa.trees.tree
from bmfa import rules
from bmfa.grid import Grid
from bmfa.trees.build import screen
from bmfa.trees.tree import Tree
from cases import Largest, every_rule, noise, random_case, random_mask

RULES = every_rule(np.random.default_rng(1))


def test_leaf_nodes_are_the_leaves():
    for case in map(random_case, range(60)):
        tree, tokens = case.tree(), torch.arange(case.grid.size)
        top, left = tokens // case.grid.width, tokens % case.grid.width
        boxes = [level.boxes for level in tree.layout.levels]
        nodes = torch.cat((*boxes, torch.stack((top, left, top + 1, left + 1), -1)))
        of_nodes = nodes[tree.flat().leaf_nodes().squeeze(1)].tolist()
        assert sorted(of_nodes) == sorted(tree.leaf_boxes.tolist())


def test_masked_tokens_belong_to_no_leaf():
    valid = torch.tensor([[True, False, False, False], [False, False, True, True]]).flatten()
    tree = screen(torch.zeros(8), Grid(2, 4), rules.FixedDepth(1), valid=valid)
    assert tree.leaf_count == 2 and tree.leaf_ratio == 2 / 3
    # Columns split 2 | 2, rows 1 | 1: a quadrant without valid tokens is not a leaf.
    assert tree.leaf_boxes.tolist() == [[0, 0, 1, 2], [1, 2, 2, 4]]
    assert tree.leaf_index.tolist() == [0, -1, -1, -1, -1, -1, 1, 1]
    # 4x4 in tiles of 3, row by row: the remainder in the corner is a token of its own.
    valid = torch.ones(2, 16, dtype=torch.bool)
    valid[1, 15] = False
    tree = screen(torch.zeros(2, 16), Grid(4, 4), rules.FixedBlocks(3), valid=valid)
    assert tree.leaf_count.tolist() == tree.node_count.tolist() == [4, 3]
    assert tree.leaf_boxes[:, 3].tolist() == [[3, 3, 4, 4], [0, 0, 0, 0]]
    alone = screen(torch.zeros(16), Grid(4, 4), rules.FixedBlocks(1), valid=valid[1])
    assert alone.leaf_count == 15 and alone.leaf_ratio == 1


def test_depth_limited_marks_and_labels_have_a_place_for_every_leaf():
    for rule in RULES:
        tree = screen(noise(3, 14 * 14) * 3, Grid(14, 14), rule, max_depth=1)
        assert tree.depth_limited.shape == tree.leaf_boxes.shape[:-1]
        assert tree.depth_limited.dtype == torch.bool
        if isinstance(rule, rules.Certified):
            assert tree.leaf_labels.shape == tree.depth_limited.shape
            continue
        with pytest.raises(ValueError, match=r"labels no leaves; screen with rules\.Certified"):
            _ = tree.leaf_labels


def test_refines_broadcasts_and_explains_what_does_not_fit():
    grid = Grid(8, 8)
    trees = screen(noise(2, 3, 64), grid, rules.ExactGap(0.4))
    whole = screen(noise(64), grid, rules.GlobalMean())
    rows = screen(noise(2, 1, 64), grid, rules.FixedDepth(9))
    assert 1 < trees.leaf_count.max() < 64 and bool(trees.refines(whole).all())
    assert torch.equal(whole.refines(trees), trees.leaf_count == 1)
    assert rows.refines(trees).tolist() == [[True] * 3] * 2
    assert trees.refines(rows).tolist() == [[False] * 3] * 2
    tiles = screen(torch.zeros(64), grid, rules.FixedBlocks(2), valid=torch.arange(64) > 0)
    for other, message in (
        (screen(noise(3, 2, 64), grid, "gamma:0.1"), r"shapes \(2, 3\) and \(3, 2\)"),
        (screen(noise(64), Grid(4, 16), "global-mean"), r"8x8 and 4x16; compare on one grid"),
        (tiles, "different hierarchies have masks"),
    ):
        with pytest.raises(ValueError, match=message):
            trees.refines(other)


def test_refines_agrees_with_the_leaves():
    """Of quadtrees and of tiles, whose leaves a quadtree may cut: against the definition."""
    names = "gamma:0.3 gamma:0.05 fixed-depth:1 exact-gap:0 fixed-blocks:2 fixed-blocks:3 fixed-blocks:4"
    for size in [(1, 1), (1, 7), (2, 2), (5, 3), (14, 14), (16, 16), (9, 6)]:
        grid = Grid(*size)
        trees = [screen(noise(3, grid.size) * 2, grid, name) for name in names.split()]
        for fine, coarse in itertools.product(trees, trees):
            pairs = zip(fine.leaf_index.tolist(), coarse.leaf_index.tolist(), strict=True)
            distinct = [len(set(zip(*pair, strict=True))) for pair in pairs]
            assert torch.equal(fine.refines(coarse), fine.leaf_count == torch.tensor(distinct))


def test_half_precision_scores_are_taken_in_float32():
    for dtype in [torch.float16, torch.bfloat16, torch.float32, torch.float64]:
        scores = noise(3, 64).to(dtype)
        tree = screen(scores, Grid(8, 8), rules.Gamma(0.1))
        wide = torch.promote_types(dtype, torch.float32)
        assert tree.reconstruct(scores).dtype == tree.error(scores).dtype == wide
        assert torch.equal(tree.error(scores), tree.error(scores.to(wide)))


def test_the_gradient_of_the_error_is_what_the_attention_misses():
    """dE / ds = p - q."""
    scores = noise(3, 5, 21).requires_grad_()
    tree = screen(scores, Grid(3, 7), rules.Gamma(0.2))
    assert tree.leaf_count.max() > 1
    tree.error(scores).sum().backward()
    p, q = scores.detach().softmax(-1), tree.reconstruct(scores.detach()).softmax(-1)
    torch.testing.assert_close(scores.grad, p - q, atol=1e-12, rtol=0)


def example() -> tuple[Tree, Tensor]:
    """(2, 3, 4) certified trees under masks and a depth limit: every field is there."""
    scores, valid = noise(2, 3, 4, 30) * 2, random_mask(2, 3, 4, 30)
    tree = screen(scores, Grid(5, 6), rules.Certified(0.1), valid=valid, max_depth=2)
    return tree, scores


MASK = torch.tensor([[True, False, True], [False, True, False]])
INDICES = [
    *(0, -1, (1, 2), (1, 2, 3), slice(1, None), (slice(None), slice(None, None, 2)), ..., (..., 1)),
    *((0, ..., slice(1, 3)), None, MASK, torch.tensor([1, 0, 1]), ([0, 1], [2, 0])),
    *((slice(None), [2, 0, 1]), slice(0, 0)),
]


def test_indexing_is_that_of_the_leading_dimensions():
    tree, scores = example()
    for index in INDICES:
        part, place = tree[index], torch.arange(24).view(2, 3, 4)[index]
        assert part.shape == tuple(place.shape)

        def picked(values: Tensor) -> Tensor:
            return values.flatten(0, 2)[place]

        for name in ("leaf_count", "node_count", "leaf_ratio", "leaf_index"):
            assert torch.equal(getattr(part, name), picked(getattr(tree, name))), name
        error = picked(tree.error(scores))
        torch.testing.assert_close(part.error(picked(scores)), error, atol=1e-14, rtol=1e-13)
        most = int(part.leaf_count.max()) if place.numel() else 0
        for name in ("leaf_boxes", "leaf_labels", "depth_limited"):
            expected = picked(getattr(tree, name)).narrow(len(part.shape), 0, most)
            assert torch.equal(getattr(part, name), expected), name


def test_indexing_one_tree_and_trees_with_one_mask():
    tree = screen(noise(16), Grid(4, 4), rules.Gamma(0.1))
    assert tree.shape == () and tree[...].shape == () and tree[None].shape == (1,)
    assert torch.equal(tree[None].leaf_index[0], tree.leaf_index)
    for trees, index in ((tree, 0), *((example()[0], i) for i in (2, (0, 0, 0, 0), (0, 3), -3))):
        with pytest.raises(IndexError):
            trees[index]
    valid = torch.arange(16) % 3 > 0
    trees = screen(noise(4, 16), Grid(4, 4), rules.Gamma(0.1), valid=valid)
    assert trees.valid.shape == (16, 1)
    for part in (trees[1], trees[1:2], trees[:0]):
        assert torch.equal(part.leaf_index >= 0, valid.expand(*part.shape, 16))
    assert torch.equal(trees[1:2][0].leaf_index, trees.leaf_index[1])


def test_moving_keeps_everything():
    tree, _ = example()
    assert tree.to("cpu").layout is tree.layout
    far = tree.to("meta")
    held = (far, far.layout, far.split, far.valid, far.limited, far.labels)
    assert all(one.device.type == "meta" for one in held)
    assert far.shape == tree.shape and far.rule == tree.rule


def test_repr_is_short_and_says_the_rule():
    tree, _ = example()
    text = repr(tree)
    assert text.startswith("Tree(24 trees (2, 3, 4) on 5x6, certified:0.1: ") and "\n" not in text
    assert f"{tree.leaf_count.double().mean():.4g} leaves" in text
    assert len(text) < 120
    one = screen(torch.zeros(16), Grid(4, 4), rules.GlobalMean())
    assert repr(one) == "Tree(one tree on 4x4, global-mean: 1 leaves, 6.25 % of tokens)"
    shared = screen(torch.zeros(6, 16), Grid(4, 4), rules.FixedDepth(1), share=0)
    assert "each for 6 query-head pairs" in repr(shared) and shared.members == 6


def test_shared_trees_spread_over_the_scores_they_serve():
    scores, grid = noise(2, 3, 4, 30), Grid(5, 6)
    tree = screen(scores, grid, rules.FixedDepth(1), share=(1, 2))
    assert tree.shape == (2, 1, 1)
    every = screen(scores, grid, rules.FixedDepth(1))
    assert tree.error(scores).shape == (2, 3, 4)
    assert torch.equal(tree.error(scores), every.error(scores))
    assert torch.equal(tree.reconstruct(scores), every.reconstruct(scores))
    one = screen(scores[0, 0, 0], grid, rules.FixedDepth(1))
    assert torch.equal(one.error(scores), every.error(scores))


def test_scores_of_other_trees_are_refused():
    tree = screen(noise(2, 3, 16), Grid(4, 4), rules.Gamma(0.1))
    for shape in [(3,), (2, 4), (4, 2), ()]:
        with pytest.raises(ValueError, match=r"leading dimensions .* and the trees \(2, 3\); pass"):
            tree.error(noise(*shape, 16))
    with pytest.raises(ValueError, match="scores end in 15 tokens and the grid has 16"):
        tree.reconstruct(noise(2, 3, 15))
    with pytest.raises(TypeError, match=r"dtype torch\.int64"):
        tree.error(torch.zeros(2, 3, 16, dtype=torch.int64))


def test_chunks_change_nothing(monkeypatch):
    names = ("leaf_count", "node_count", "leaf_ratio", "leaf_index", "leaf_boxes", "depth_limited")
    scores, valid = noise(2, 4, 35), random_mask(4, 35)
    for rule in RULES:
        tree = screen(scores, Grid(7, 5), rule, valid=valid, max_depth=2)

        def values() -> list[Tensor]:
            labelled = ("leaf_labels",) if isinstance(rule, rules.Certified) else ()
            exact = [getattr(tree, name) for name in (*names, *labelled)]
            return [*exact, tree.error(scores), tree.reconstruct(scores)]

        whole = values()
        for elements in (1, 35 * 4):
            with monkeypatch.context() as patch:
                patch.setattr(bmfa.trees.tree, "CHUNK_ELEMENTS", elements)
                torch.testing.assert_close(values(), whole, atol=1e-14, rtol=1e-13)


def test_an_empty_batch_of_trees():
    trees = screen(noise(2, 3, 16), Grid(4, 4), rules.Gamma(0.1))
    for tree in (trees[0, :0], trees[:, :0]):
        scores = noise(*tree.shape, 16)
        for name in ("leaf_count", "node_count", "leaf_ratio"):
            assert getattr(tree, name).shape == tree.error(scores).shape == tree.shape
        assert tree.leaf_index.shape == tree.reconstruct(scores).shape == (*tree.shape, 16)
        assert tree.leaf_boxes.shape == (*tree.shape, 0, 4)
        assert tree.depth_limited.shape == (*tree.shape, 0)
        assert "0 trees" in repr(tree)


def test_a_million_trees_fit_in_a_gibibyte():
    """A thousand trees a thousand times, with all a tree may hold: certified, limited, masked."""
    scores, valid = noise(1000, 256), random_mask(1000, 256)
    plain = screen(scores, Grid(16, 16), rules.Gamma(0.02))
    full = screen(scores, Grid(16, 16), rules.Certified(0.1), valid=valid, max_depth=3)
    held = (full.split, full.valid, full.limited, full.labels)
    assert 1000 * plain.split.untyped_storage().nbytes() <= 100e6
    assert 1000 * sum(x.untyped_storage().nbytes() for x in held) < 2**30


def test_ratios_of_masked_trees_take_little_memory():
    valid = random_mask(100, 256)
    base = screen(noise(100, 256), Grid(16, 16), rules.Gamma(0.02), valid=valid)
    split, masks = (x.repeat(1, 100) for x in (base.split, base.valid))
    tree = replace(base, split=split, valid=masks, shape=(10000,))
    with Largest() as largest:
        assert torch.equal(tree.leaf_ratio[:100], base.leaf_ratio)
    assert largest.bytes <= 2 * (tree.split.numel() + tree.valid.numel())
