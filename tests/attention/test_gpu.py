"""The same trees and outputs on a CUDA device."""

import pytest
import torch

from bmfa import Grid, screen, screen_keys, screened_attention
from bmfa.trees.rules import parse

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
RULES = (
    "gamma:0.05",
    "gamma-h2:0.05",
    "exact-gap:0.1",
    "certified:0.1",
    "mass:0.002",
    "mass-coarse:0.002",
    "optimal:0.002",
    "optimal-leaves:0.2",
    "optimal-error:0.05",
    "fixed-depth:2",
    "fixed-blocks:3",
    "quadrant-gap:0.3",
    "variance:0.3",
    "random-quadrants:0.5",
    "global-mean",
)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("size", [(14, 14), (16, 25), (1, 7), (37, 37)])
def test_trees_are_those_of_the_cpu(name, size):
    grid, generator = Grid(*size), torch.Generator().manual_seed(0)
    scores = 2 * torch.randn(3, 5, grid.size, generator=generator, dtype=torch.float64)
    for valid in (None, torch.rand(3, 1, grid.size, generator=generator) < 0.8):
        expected = screen(scores, grid, parse(name), valid=valid)
        moved = None if valid is None else valid.cuda()
        tree = screen(scores.cuda(), grid, parse(name), valid=moved)
        assert tree.device.type == "cuda"
        assert torch.equal(tree.split.cpu(), expected.split)
        torch.testing.assert_close(tree.error(scores.cuda()).cpu(), expected.error(scores))
        assert torch.equal(tree.leaf_index.cpu(), expected.leaf_index)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_attention_is_that_of_the_cpu(name, dtype):
    grid, generator = Grid(9, 8), torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, 3, 73, 16, generator=generator).to(dtype) for _ in range(3))
    common = {"grid": grid, "prefix": 1, "rule": parse(name), "certificate": True, "audit": 0.5}
    expected = screened_attention(q, k, v, **common)
    result = screened_attention(q.cuda(), k.cuda(), v.cuda(), **common)
    same = (result.tree.split.cpu() == expected.tree.split).all(0).view(expected.tree.shape)
    # In the working precision of half types a threshold may fall between two roundings.
    assert same.all() if dtype == torch.float64 else same.double().mean() > 0.97
    tolerance = 8 * torch.finfo(dtype).eps
    difference = (result.output.cpu() - expected.output)[same].double()
    assert difference.norm() <= tolerance * expected.output[same].double().norm()
    assert torch.isfinite(result.stats.certificate).all()


def test_shared_trees_and_keys_on_the_device():
    grid, generator = Grid(14, 14), torch.Generator().manual_seed(2)
    q, k = (torch.randn(2, 4, 196, 32, generator=generator, dtype=torch.float64) for _ in range(2))
    for by in ("max", "mean", 0.9):
        expected = screen_keys(q, k, grid, parse("gamma:0.02"), share=(1, 2), share_by=by)
        tree = screen_keys(q.cuda(), k.cuda(), grid, parse("gamma:0.02"), share=(1, 2), share_by=by)
        assert torch.equal(tree.split.cpu(), expected.split)
