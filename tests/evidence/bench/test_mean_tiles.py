"""The baseline of mean tiles against its float64 reference, eager and in Triton."""

import math

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from bmfa import Grid
from bmfa.evidence.bench.mean_tiles import eager, mean_tile_attention
from bmfa.evidence.bench.mean_tiles.tiling import GroupedTiling
from evidence.bench.mean_tiles_reference import mean_tile_attention as reference

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
# Gaps are stored in float16: losses this near to each other may change places.
NEAR = 2e-3
# Height, width, prefix, head dimension and expanded tiles.
CASES = [
    (16, 16, 1, 32, 0),
    (16, 16, 0, 64, 2),
    (13, 21, 5, 32, 3),
    (8, 9, 1, 32, 1),
    (24, 8, 1, 32, 3),
    (1, 7, 0, 32, 0),
]


def tensors(seed, grid, prefix, dim, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    shape = (3, 1, 2, prefix + grid.size, dim)
    return (1.5 * torch.randn(shape, generator=generator)).to(dtype).to(DEVICE).unbind()


def agreeing_queries(expanded, oracle, tiling, prefix):
    """Return (B, H, prefix + N): queries of groups that expand the tiles of the reference.

    Other groups may differ in tiles whose losses are within rounding of the smallest expanded one.
    """
    same = (expanded == oracle.expanded).all(-1)
    for index in zip(*np.nonzero(~same), strict=True):
        losses = oracle.losses[index]
        near = losses[expanded[index] != oracle.expanded[index]]
        threshold = losses[oracle.expanded[index]].min()
        assert abs(near - threshold).max() <= NEAR * threshold
    assert same.mean() >= 0.9
    flags = np.ones((*same.shape[:2], prefix + tiling.grid.size), bool)
    for tile, tokens in enumerate(tiling.slot_tokens.numpy()):
        flags[..., prefix + tokens[tokens >= 0]] = same[..., tile // tiling.group, None]
    return flags


def distance(output, oracle, queries):
    return float(abs(output.double().cpu().numpy() - oracle.output).max(-1)[queries].max())


def dense_error(q, k, v):
    """Largest error of dense attention in the dtype of q against float64."""
    exact = scaled_dot_product_attention(q.double(), k.double(), v.double())
    return float((scaled_dot_product_attention(q, k, v).double() - exact).abs().max())


@pytest.mark.parametrize(("height", "width", "prefix", "dim", "expand"), CASES)
def test_eager_is_the_reference(height, width, prefix, dim, expand):
    grid = Grid(height, width)
    q, k, v = tensors(height, grid, prefix, dim)
    wide = [x.double().cpu().numpy() for x in (q, k, v)]
    oracle = reference(*wide, GroupedTiling(grid), prefix=prefix, expand=expand)
    output, expanded = eager.attention(q, k, v, grid, prefix, expand)
    queries = agreeing_queries(expanded.cpu().numpy(), oracle, GroupedTiling(grid), prefix)
    largest_value = max(float(v.abs().max()), abs(oracle.output).max())
    # Twice the error of dense attention, and a sum of d products off by about sqrt(d) roundings.
    allowed = 2 * dense_error(q, k, v)
    allowed += torch.finfo(torch.float32).eps * math.sqrt(dim) * largest_value
    assert distance(output, oracle, queries) <= allowed


def expanded_tiles(words, tiles):
    """Return bool (B * H, R, T) from words whose bits mark the tiles that are not expanded."""
    bits = torch.arange(32, device=words.device, dtype=torch.int32)
    coarse = (words.unsqueeze(-1) >> bits) & 1
    return (coarse.flatten(-2)[..., :tiles] == 0).cpu().numpy()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, in the interpreter
@pytest.mark.parametrize(("height", "width", "prefix", "dim", "expand"), CASES)
def test_kernels_are_the_reference(height, width, prefix, dim, expand):
    pytest.importorskip("triton")
    from bmfa.evidence.bench.mean_tiles import launch

    grid, tiling = Grid(height, width), GroupedTiling(Grid(height, width))
    q, k, v = tensors(height, grid, prefix, dim)
    wide = [x.double().cpu().numpy() for x in (q, k, v)]
    oracle = reference(*wide, tiling, prefix=prefix, expand=expand)
    rounded = reference(*wide, tiling, prefix=prefix, expand=expand, gap_dtype=np.float16)
    output, counts, words = launch.attention(q, k, v, grid, prefix, expand)
    expanded = expanded_tiles(words, tiling.tiles)[None]
    assert np.array_equal(counts.cpu().numpy(), expanded.sum(-1)[0])
    queries = agreeing_queries(expanded, oracle, tiling, prefix)
    queries &= agreeing_queries(rounded.expanded, oracle, tiling, prefix)
    eager_output, _ = eager.attention(q, k, v, grid, prefix, expand)
    largest_value = max(float(v.abs().max()), abs(oracle.output).max())
    # Twice the error of eager. The float16 gaps may be a rounding apart: 2^-11 of a weight.
    allowed = 2 * distance(eager_output, oracle, queries) + 2.0**-11 * largest_value
    assert distance(output, rounded, queries) <= allowed


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_all_tiles_expanded_is_dense_attention(backend):
    if backend == "triton":
        pytest.importorskip("triton")
    grid = Grid(16, 16)
    q, k, v = tensors(0, grid, 1, 32)
    output = mean_tile_attention(q, k, v, grid=grid, prefix=1, expand=4, backend=backend)
    torch.testing.assert_close(output, scaled_dot_product_attention(q, k, v), atol=2e-5, rtol=2e-5)
