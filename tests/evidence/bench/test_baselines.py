"""Keep-or-drop attention, Monarch attention and the names of the baselines."""

from itertools import pairwise

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from bmfa import Grid
from bmfa.evidence.bench import baselines, topk
from bmfa.evidence.bench.monarch import monarch_attention, monarch_factors
from bmfa.evidence.methods import find_mark, find_method

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"


def tensors(seed, tokens, dim=32, dtype=torch.float64, heads=2):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, 1, heads, tokens, dim, generator=generator).to(dtype).to(DEVICE).unbind()


def kept_tiles(q, k, grid, prefix, kept):
    """Return bool (B, H, N, prefix + N): what keep-or-drop attention reads, in raster order."""
    row, column = (x.flatten() for x in torch.meshgrid(
        torch.arange(grid.height), torch.arange(grid.width), indexing="ij"
    ))  # fmt: skip
    tile = (row // 8 * (grid.width // 8) + column // 8).to(q.device)
    of_tile = torch.nn.functional.one_hot(tile).to(q.dtype)  # (N, T)
    q_mean = of_tile.T @ q[:, :, prefix:] / 64
    weights = (q_mean @ k[:, :, prefix:].transpose(2, 3) * q.shape[-1] ** -0.5).exp()
    masses = weights @ of_tile  # (B, H, T, T)
    listed = torch.zeros_like(masses).scatter(-1, masses.topk(kept, -1).indices, 1.0)
    spatial = of_tile @ listed @ of_tile.T > 0
    return torch.cat((spatial.new_ones(*spatial.shape[:3], prefix), spatial), -1)


@pytest.mark.parametrize(
    ("grid", "prefix", "share"),
    [(Grid(16, 24), 1, 0.3), (Grid(16, 16), 0, 0.5), (Grid(24, 16), 5, 0.01), (Grid(8, 8), 1, 1.0)],
)
def test_topk_drops_all_but_the_tiles_with_most_mass(grid, prefix, share):
    # The kernels that run on a GPU take no float64.
    dtype = torch.float32 if GPU else torch.float64
    q, k, v = tensors(grid.width + prefix, prefix + grid.size, dtype=dtype)
    baseline = baselines.make(f"topk:{share}", grid, prefix, "eager")
    kept = max(1, round(share * grid.size / 64))
    assert baseline.density == kept / (grid.size // 64)
    reads = kept_tiles(q, k, grid, prefix, kept)
    every_key = reads.new_ones(*reads.shape[:2], prefix, reads.shape[-1])
    expected = scaled_dot_product_attention(q, k, v, attn_mask=torch.cat((every_key, reads), 2))
    tolerance = 1e-5 if GPU else 1e-12
    torch.testing.assert_close(
        baseline.attention(q, k, v), expected, atol=tolerance, rtol=tolerance
    )


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, in the interpreter
@pytest.mark.parametrize(("prefix", "dim", "kept"), [(1, 32, 2), (0, 80, 1), (5, 64, 6)])
def test_topk_kernels_are_the_torch_operations(prefix, dim, kept):
    pytest.importorskip("triton")
    from bmfa.evidence.bench.topk import kernels

    tiles = 6
    q, k, v = tensors(dim, tiles * 64 + prefix, dim, torch.float32)
    q_mean = q[:, :, : tiles * 64].unflatten(2, (tiles, 64)).mean(3)
    masses = kernels.tile_masses(q_mean, k, tiles)
    torch.testing.assert_close(masses, topk.tile_masses(q_mean, k, tiles), atol=1e-5, rtol=1e-5)
    chosen = masses.topk(kept, -1).indices
    torch.testing.assert_close(
        kernels.attend_to_tiles(q, k, v, chosen),
        topk.attend_to_tiles(q, k, v, chosen),
        atol=1e-5,
        rtol=1e-5,
    )


def test_topk_refuses_ragged_grids():
    with pytest.raises(ValueError, match=r"14x14.*multiples of 8"):
        baselines.make("topk:0.1", Grid(14, 14), 1, "eager")


@pytest.mark.parametrize("grid", [Grid(1, 40), Grid(40, 1)])
@pytest.mark.parametrize("prefix", [0, 1, 3])
def test_monarch_is_exact_where_one_factor_is_a_whole_row_or_column(grid, prefix):
    q, k, v = tensors(prefix, prefix + grid.size)
    output = monarch_attention(q, k, v, grid=grid, prefix=prefix, steps=1)
    torch.testing.assert_close(
        output, scaled_dot_product_attention(q, k, v), atol=1e-12, rtol=1e-12
    )


def monarch_matrix(left, right, rows):
    """Return (B, H, N, prefix + N): the attention matrix of the factors."""
    spatial = torch.einsum("bhjlk,bhkji->bhljki", left[..., :rows], right)
    prefix = left[..., rows:].transpose(2, 3).flatten(2, 3)
    return torch.cat((prefix, spatial.flatten(4, 5).flatten(2, 3)), -1)


@pytest.mark.parametrize(("grid", "prefix"), [(Grid(6, 9), 1), (Grid(8, 5), 0)])
def test_monarch_steps_never_lower_the_objective_of_softmax(grid, prefix):
    q, k, v = tensors(7, prefix + grid.size)
    scores = q[:, :, prefix:] @ k.transpose(2, 3) * q.shape[-1] ** -0.5
    log_z = scores.logsumexp(-1).sum()
    gaps = []
    for steps in (1, 2, 3, 6):
        left, right, _ = monarch_factors(q, k, v, grid=grid, prefix=prefix, steps=steps)
        matrix = monarch_matrix(left, right, grid.height)
        torch.testing.assert_close(
            matrix.sum(-1), torch.ones_like(matrix[..., 0]), atol=1e-5, rtol=0
        )
        entropy = -torch.special.xlogy(matrix, matrix).sum()
        gaps.append(float(log_z - (matrix * scores).sum() - entropy))
        spatial = monarch_attention(q, k, v, grid=grid, prefix=prefix, steps=steps)[:, :, prefix:]
        torch.testing.assert_close(spatial, matrix @ v, atol=1e-12, rtol=1e-12)
    # Softmax itself has gap 0. In float64, sums over some 10^4 entries are off by 1e-11 or less.
    rounding = 1e-10
    assert all(gap > -rounding for gap in gaps)
    assert all(after <= before + rounding for before, after in pairwise(gaps))
    assert gaps[-1] < gaps[0]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("sparse:0.1", "unknown; pass mean-tiles:SHARE"),
        ("topk", "has no number"),
        ("topk:0", "topk:0"),
        ("mean-tiles:2", "mean-tiles:2"),
        ("monarch:1.5", "monarch:1.5"),
        ("monarch:0", "monarch:0"),
    ],
)
def test_bad_names_are_refused(name, message):
    with pytest.raises((ValueError, TypeError), match=message):
        baselines.parse(name)


def test_baselines_are_registered_with_a_mark():
    for names in baselines.DEFAULT_BASELINES.values():
        for name in names:
            baselines.parse(name)
            assert find_method(name) is not None and find_mark(name) is not None
