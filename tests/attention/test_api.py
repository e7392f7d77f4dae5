"""Screened attention: trees against the float64 oracle, gradients, grids of frames and of queries, and
heads that share keys."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import bmfa
from bmfa import Grid, certify, rules, screened_attention
from bmfa.attention.call import Call
from bmfa.attention.kernels.eager import per_query
from bmfa.attention.kernels.eager.tiles.heads import Keys
from bmfa.attention.result import Stats
from bmfa.trees.keys import query_chunks
from bmfa.trees.layout import quadtree_layout, tile_layout
from bmfa.trees.pyramid import _full_counts
from bmfa.trees.rules import parse
from bmfa.trees.tree import Tree
from cases import RULES, noise, nudged, random_mask
from tiled_cases import smooth_fields
from tree_oracle import tree_attention

GRID = Grid(4, 4)
GRIDS = ((1, 1), (1, 7), (2, 3), (4, 4), (5, 7), (7, 7))
DRAWN = (0, 3), (1, 3), (1, 3), (1, 9)  # prefix, batch, heads and head dimension


def tensors(seed, grid, prefix=1, batch=2, heads=2, width=8, sharpness=2.0):
    q, k, v = noise(3, batch, heads, prefix + grid.size, width, seed=seed)
    return sharpness * q, k, v


def seen_queries(valid, prefix=1):
    """(B, 1, Q, 1) bool from a mask (B, N)."""
    return torch.cat((valid.new_ones(len(valid), prefix), valid), 1)[:, None, :, None]


def equals_oracle(result, oracle, atol=1e-12):
    """True if all trees are those of the oracle; the outputs must then be close."""
    index = result.tree.leaf_index.flatten(0, -2).tolist()
    if index != [tree.leaf_index().ravel().tolist() for tree in oracle.trees]:
        return False
    np.testing.assert_allclose(result.output.numpy(), oracle.output, atol=atol, rtol=atol)
    return True


@pytest.mark.parametrize("seeds", [range(90), pytest.param(range(90, 600), marks=pytest.mark.slow)])
def test_trees_and_outputs_equal_the_oracle(seeds):
    """Where a score lies within rounding of a threshold, the tree is that of a threshold nearby."""
    ties = 0
    for seed in seeds:
        generator = np.random.default_rng(seed)
        size = GRIDS[seed % len(GRIDS)] if seed % 3 == 0 else generator.integers(1, 6, 2).tolist()
        prefix, batch, heads, width = (int(generator.integers(*x)) for x in DRAWN)
        grid, rule = Grid(*size), parse(RULES[seed % len(RULES)], seed)
        q, k, v = tensors(seed, grid, prefix, batch, heads, width)
        options = {"prefix": prefix, "tau": (1.0, 0.7)[seed % 2]}
        options["valid"] = random_mask(batch, grid.size, seed=seed) if seed % 4 == 0 else None
        queries = q if seed % 3 == 0 or seed % 4 == 0 else q[:, :, :2]
        result = screened_attention(queries, k, v, grid=grid, rule=rule, **options)
        if not equals_oracle(result, tree_attention(queries, k, v, size, rule, **options)):
            around = (nudged(rule, factor) for factor in (1 - 1e-9, 1 + 1e-9))
            oracles = (tree_attention(queries, k, v, size, near, **options) for near in around)
            assert any(equals_oracle(result, oracle) for oracle in oracles), seed
            ties += 1
    assert ties <= 0.005 * len(seeds)


# Gradients


def test_gradients_by_autograd():
    for name in ("fixed-depth:1", "optimal-leaves:3", "exact-gap:0"):
        inputs = [x.requires_grad_() for x in tensors(1, Grid(2, 3), batch=1, heads=1, width=2)]

        def attend(q, k, v):
            return screened_attention(q, k, v, grid=(2, 3), prefix=1, rule=name).output

        assert torch.autograd.gradcheck(attend, inputs)


def test_an_exact_gap_of_zero_has_the_gradients_of_attention_where_keys_tie():
    """A block of equal keys is one leaf, which loses nothing; the gradients of its keys differ."""
    grid, rule = Grid(8, 8), rules.ExactGap(0.0)
    q, k, v = tensors(3, grid, width=4)
    k[:, :, 1 : 1 + 16] = k[:, :, 1:2]
    k[:, :, 40:44] = k[:, :, 40:41] * (1 + 1e-15)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    for valid in (None, random_mask(2, grid.size)):
        seen = torch.ones(2, 1, 65, 1, dtype=torch.bool) if valid is None else seen_queries(valid)
        got = screened_attention(q, k, v, grid=grid, prefix=1, rule=rule, valid=valid)
        assert int(got.tree.leaf_count.min()) < grid.size
        exact = scaled_dot_product_attention(q, k, v, attn_mask=seen.mT)
        ours, theirs = (
            torch.autograd.grad((x * seen).square().sum(), inputs) for x in (got.output, exact)
        )
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_gradients_with_padding_are_finite_and_zero_on_it():
    q, k, v = (x.requires_grad_() for x in tensors(2, Grid(3, 3), prefix=0, batch=1))
    valid = torch.ones(9, dtype=torch.bool)
    valid[5] = False
    output = screened_attention(q, k, v, grid=(3, 3), valid=valid, rule=rules.FixedDepth(1)).output
    output.square().sum().backward()
    assert all(torch.isfinite(x.grad).all() for x in (q, k, v))
    assert (k.grad[:, :, 5] == 0).all() and (v.grad[:, :, 5] == 0).all()


def test_gradients_after_a_first_call_in_inference_mode():
    for name in ("gamma:0.05", "fixed-blocks:2"):
        for cached in (quadtree_layout, tile_layout, _full_counts):
            cached.cache_clear()  # as in a new process
        grid = Grid(5, 6)
        common = {"grid": grid, "prefix": 1, "rule": name}
        inputs = tensors(4, grid)
        with torch.inference_mode():
            before = screened_attention(*inputs, **common)
            layouts = [before.tree.layout, quadtree_layout(grid)]
            levels = [level for layout in layouts for level in layout.levels]
            cached = [value for level in levels for value in vars(level).values()]
            cached += [layout.token_rank for layout in layouts]
        assert not any(x.is_inference() for x in cached if isinstance(x, torch.Tensor))
        after = screened_attention(*(x.requires_grad_() for x in inputs), **common).output
        after.square().sum().backward()
        torch.testing.assert_close(after, before.output)


# Properties of trees


def test_chunk_size_does_not_change_the_output(monkeypatch):
    chunks = []

    def counted(*sizes):
        chunks.append(list(query_chunks(*sizes)))
        return chunks[-1]

    monkeypatch.setattr(per_query, "query_chunks", counted)
    q, k, v = tensors(9, Grid(6, 6), heads=3)
    common = {"grid": (6, 6), "prefix": 1, "rule": "optimal-leaves:0.3"}
    whole = screened_attention(q, k, v, **common).output
    monkeypatch.setattr(per_query, "CHUNK_ELEMENTS", 200)
    parts = screened_attention(q, k, v, **common).output
    assert len(chunks[0]) == 1 and len(chunks[1]) > 6 * 4  # several of each head's 37 queries
    torch.testing.assert_close(parts, whole)


# Results


def test_results_are_shown_with_their_density_and_error_in_few_characters(recwarn):
    q, k, v = tensors(9, GRID, heads=2)
    tiled = {"grid": (GRID.height, GRID.width), "prefix": 1, "allow_dense": False}
    for setting in ({"error": 0.1}, {"leaves": 0.3}, {"leaves": 1.0}, {"rule": "gamma:0.1"}):
        screened = screened_attention(q, k, v, **tiled, **setting)
        text, html = repr(screened.stats), screened._repr_html_()
        assert repr(screened) == f"Screened(output={tuple(q.shape)}, stats={text})"
        assert len(text) < 300 and "\n" not in text
        assert text.startswith(f"Stats(backend={screened.stats.backend!r}, form=")
        assert html.startswith(f"<p>output {tuple(q.shape)}</p><table>")
        if screened.stats.error is None:
            assert "error=" not in text and "<th>error</th>" not in html
        else:
            error = screened.stats.error
            shown = f"{error.estimate:.3g}, at most {error.upper:.3g}"
            assert f"density='{screened.stats.density:.3g}', error='{shown}'" in text
            assert f"<tr><th>error</th><td>{shown}</td></tr>" in html
    # A missed target warns where `error` is read, not where the result is shown.
    probes = torch.ones(1, 1, 4, 3)
    tiles = replace(screened_attention(q, k, v, **tiled, error=0.1).stats.tiles, probes=probes)
    call = Call(GRID, GRID.size, error=1e-3)
    missed = Stats("eager", "tiled", "<one>", call, tiles=tiles)
    assert "error='1, at most" in repr(missed) and "&lt;one&gt;" in missed._repr_html_()
    assert not recwarn.list


def test_trees_are_built_when_they_are_read(monkeypatch):
    built = []
    init = Tree.__init__

    def counted(self, *args, **kwargs):
        built.append(self)
        init(self, *args, **kwargs)

    monkeypatch.setattr(Tree, "__init__", counted)
    grid = Grid(48, 48)
    q, k, v = (x.float() for x in tensors(15, grid, batch=1, sharpness=0.1))
    for criterion in ({}, {"leaves": 0.1}, {"leaves": 1.0}, {"allow_dense": False}):
        result = screened_attention(q, k, v, grid=grid, prefix=1, **criterion)
        output, stats = result
        assert output.shape == q.shape and 0 < stats.leaf_ratio <= 1 and 0 <= stats.density <= 1
        assert not built
        assert float(result.tree.leaf_ratio.mean()) == pytest.approx(stats.leaf_ratio, rel=1e-5)
        assert built
        built.clear()


def test_some_queries_alone_take_a_rule():
    q, k, v = tensors(15, GRID)
    message = r"takes a query for each of 17 tokens, and q has 5; pass query_grid="
    for criterion in ({}, {"error": 0.1}, {"leaves": 0.3}, {"allow_dense": False}):
        with pytest.raises(ValueError, match=message):
            screened_attention(q[:, :, :5], k, v, grid=GRID, prefix=1, **criterion)
    common = {"grid": GRID, "prefix": 1, "rule": rules.Optimal(error=0.1)}
    few = screened_attention(q[:, :, :5], k, v, **common)
    whole = screened_attention(q, k, v, **common)
    torch.testing.assert_close(few.output, whole.output[:, :, :5])


def smooth(seed: int, *shape: int) -> Tensor:
    """(..., tokens, d) float64 that vary slowly from token to token."""
    return noise(*shape, seed=seed).cumsum(-2) / 6


# Frames


def test_trees_certificates_and_statistics_of_frames() -> None:
    grid = Grid(5, 11, frames=3)
    q, k, v = smooth(3, 3, 1, 2, 1 + grid.size, 32)
    exact = scaled_dot_product_attention(q, k, v)
    result = screened_attention(q, k, v, grid=grid, prefix=1, error=0.05, allow_dense=False)
    distance = (result.output - exact).norm(dim=-1)
    assert (distance <= certify(q, k, v, result).distance).all()
    ratio = result.tree.leaf_ratio.double().mean()
    assert float(ratio) == pytest.approx(result.stats.leaf_ratio)
    index = result.tree.leaf_index
    assert index.shape == (1, 2, 1 + grid.size, grid.size)
    for leaf in index[0, 0, 1].unique():  # no leaf has tokens of two frames
        assert len(((index[0, 0, 1] == leaf).nonzero() // 55).unique()) == 1


def test_rules_and_pyramids_take_one_frame() -> None:
    grid = Grid(4, 4, frames=2)
    q = k = v = torch.randn(1, 1, 32, 8)
    with pytest.raises(ValueError, match="the grid has 2 frames, and a rule takes one"):
        screened_attention(q, k, v, grid=grid, rule="gamma:0.01")
    with pytest.raises(ValueError, match="2 frames, and a quadtree takes one"):
        bmfa.screen(torch.zeros(32), grid, "gamma:0.01")
    with pytest.raises(ValueError, match="frames is 0"):
        Grid(4, 4, frames=0)
    assert repr(grid) == "Grid(height=4, width=4, frames=2)" and str(grid) == "2x4x4"
    assert grid != Grid(8, 4) and grid.size == 32


# Queries with a grid of their own


def test_a_query_grid_meets_its_target_and_reports_it() -> None:
    (q, *_), (_, k, v) = smooth_fields(0, 64, heads=2), smooth_fields(1, 40, 48, heads=2)
    q, k, v = 1.5 * q, 1.5 * k, 1.5 * v
    exact = scaled_dot_product_attention(q.double(), k.double(), v.double())
    grids: dict[str, Any] = {"grid": (40, 48), "query_grid": (64, 64)}
    for target in (0.03, 0.05):
        result = screened_attention(q, k, v, **grids, error=target, allow_dense=False)
        error = float((result.output - exact).norm() / exact.norm())
        assert error <= 1.3 * target and result.stats.error.met
        assert result.stats.error.estimate == pytest.approx(error, rel=0.5)
        assert 0 < result.stats.density < 1
        assert result.tree.shape == (1, 2, 64 * 64)
        ratio = float(result.tree.leaf_ratio.double().mean())
        assert ratio == pytest.approx(result.stats.leaf_ratio)


def test_query_grids_are_checked() -> None:
    k = v = torch.randn(1, 1, 64, 8)
    q = torch.randn(1, 1, 15, 8)
    with pytest.raises(ValueError, match=r"q has 15 queries and the 4x4 query_grid 16"):
        screened_attention(q, k, v, grid=(8, 8), query_grid=(4, 4))
    with pytest.raises(ValueError, match="pass query_grid=, the grid of the queries"):
        screened_attention(q, k, v, grid=(8, 8))
    same = screened_attention(k, k, v, grid=(8, 8), query_grid=(8, 8))
    assert same.tree.shape == (1, 1, 64)  # self-attention


# Heads that share keys


def test_fewer_key_heads_equal_repeated_ones() -> None:
    valid = torch.rand(2, 144, generator=torch.Generator().manual_seed(0)) < 0.9
    mask = torch.cat((valid.new_ones(2, 1), valid), 1)[:, None, None]
    for key_heads in (1, 2):
        q = smooth(0, 2, 4, 1 + 12 * 12, 16).requires_grad_()
        k, v = (x.requires_grad_() for x in smooth(1, 2, 2, key_heads, 1 + 12 * 12, 16))
        copies = [x.repeat_interleave(4 // key_heads, 1) for x in (k, v)]
        exact = scaled_dot_product_attention(q, *copies, attn_mask=mask)
        tiled = [{x: y, "allow_dense": False} for x, y in (("error", 0.05), ("leaves", 0.4))]
        for settings in ({}, {"rule": "optimal:0.01"}, *tiled):
            options: dict[str, Any] = {"grid": (12, 12), "prefix": 1, "valid": valid} | settings
            results = [screened_attention(q, *x, **options) for x in ((k, v), copies)]
            assert results[0].stats.form == results[1].stats.form
            outputs = [x.output * mask.mT for x in results]
            torch.testing.assert_close(*outputs)
            grads = [torch.autograd.grad(x.square().sum(), (q, k, v)) for x in outputs]
            torch.testing.assert_close(*grads)
            bounds = certify(q, k, v, results[0]), certify(q, *copies, results[1])
            for ours, theirs in zip(*bounds, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-11)
            distance = (outputs[0] - exact * mask.mT).norm(dim=-1)
            assert bool((bounds[0].distance >= distance).all())


def test_shared_keys_are_not_copied(monkeypatch) -> None:
    """They are arranged in tiles once, and not for every query head."""
    arranged, arrange = [], Keys.from_tokens

    def counted(*arguments):
        arranged.append(arguments)
        return arrange(*arguments)

    monkeypatch.setattr(Keys, "from_tokens", counted)
    q = smooth(0, 2, 8, 16 * 16, 16).float()
    k, v = smooth(1, 2, 2, 2, 16 * 16, 16).float()
    screened_attention(q, k, v, grid=(16, 16), leaves=0.2, backend="eager")
    assert len(arranged) == 2 * 2  # images and key heads
