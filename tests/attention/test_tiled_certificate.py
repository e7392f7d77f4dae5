"""The certificate of tiled attention is at least the true error, and above it by rounding only."""

import numpy as np
import pytest
import torch

from bmfa import screened_attention
from bmfa.attention.kernels.eager.tiles import working_precision
from bmfa.attention.kernels.reference import (
    attention_error,
    build_tree,
    tiled_attention,
    tiled_error,
)
from bmfa.attention.tiling import Tiling
from bmfa.grid import Grid
from bmfa.trees.rules import FixedBlocks
from tiled_cases import certificate

GRIDS = ((1, 1), (1, 7), (8, 8), (9, 9), (14, 14), (11, 25), (16, 16), (5, 30))


def adversarial(seed: int) -> tuple[torch.Tensor, torch.Tensor, Tiling, int, torch.Tensor | None]:
    """Return q, k, tiling, prefix and valid of an adversarial case."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    grid = Grid(*GRIDS[seed % len(GRIDS)])
    tiling = Tiling(grid, side=(8, 8, 4, 3)[seed // 8 % 4], group=(2, 1, 3)[seed % 3])
    prefix = (0, 1, 5)[seed // 2 % 3]
    q, k = (normal(1, 2, prefix + grid.size, 16) for _ in range(2))
    spatial = k[:, :, prefix:]
    kind = seed // 5 % 9
    if kind == 0:  # huge keys
        k *= 1e4
    elif kind == 1:  # one bright token
        spatial[:, :, seed % grid.size] = 40 * q[:, :, prefix + seed % grid.size]
    elif kind == 2:  # constant keys
        spatial[:] = spatial[:, :, :1].clone()
    elif kind == 3:  # queries far from their representative, in both directions
        q[:, :, ::2] = 20 * q[:, :, :1].clone()
        q[:, :, 1::2] = -q[:, :, :1]
    elif kind == 4:  # nearly constant keys on a large offset
        spatial[:] = 1e3 + 1e-7 * spatial
    elif kind == 5:  # two-valued keys along the query: the extreme of Hoeffding's bound
        sign = torch.where(normal(1, 2, grid.size, 1) > 0, 1.0, -1.0)
        spatial[:] = 0.3 * sign * normal(1, 2, 1, 16)
    elif kind == 6:  # tiny everything
        q *= 1e-9
    elif kind == 7:  # representative 0, all queries +-a
        q[:, :, prefix:] = 3 * normal(1, 2, 1, 16) * (-1.0) ** torch.arange(grid.size)[:, None]
    valid = None
    if seed % 4 == 0:
        valid = torch.rand(1, grid.size, generator=generator) > 0.4
        valid[:, tiling.slot_tokens[0].clamp(min=0)] = False
        valid[:, -1] = True
        gone = torch.cat((torch.zeros(1, prefix, dtype=torch.bool), ~valid), 1)[:, None, :, None]
        q, k = (x.masked_fill(gone, torch.nan) for x in (q, k))
    return q, k, tiling, prefix, valid


def largest_score(q: torch.Tensor, k: torch.Tensor, factor: float) -> float:
    return factor * float(q.nan_to_num(0).norm(dim=-1).max() * k.nan_to_num(0).norm(dim=-1).max())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("first", range(0, 360, 40))
def test_certificate_is_the_error_rounded_outward(first: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(first)
    for seed in range(first, first + 40):
        q, k, tiling, prefix, valid = adversarial(seed)
        q, k = q.to(dtype), k.to(dtype)
        scale, tau = 0.25, (1.0, 0.3, 4.0)[seed % 3]
        share = (0.0, 0.3, 0.8)[seed // 3 % 3]
        marks = torch.rand(1, 2, tiling.groups, tiling.tiles, generator=generator) < share
        settings = {"prefix": prefix, "scale": scale, "tau": tau}
        bound = certificate("eager", q, k, tiling, marks, valid=valid, **settings)
        wide = q.double().numpy(), k.double().numpy()
        error = tiled_error(*wide, marks.numpy(), tiling, valid=valid, **settings)
        assert bound.dtype == torch.float64 and bound.shape == q.shape[:3]
        assert bool(torch.isfinite(bound).all())
        below = bound.numpy().astype(np.longdouble) < error
        assert not below.any(), (seed, bound.numpy()[below][:3], error[below][:3])
        # A score of 16 terms and a mean of 64 of them, each rounded; nothing worse than that.
        allowed = 2000 * torch.finfo(dtype).eps * (1 + largest_score(q, k, scale / tau)) * tau
        assert float((bound.numpy() - error).max()) < allowed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_does_not_affect_the_certificate(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    q, k, v = (2 * torch.randn(3, 1, 2, 1 + 256, 64)).to(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        result = screened_attention(
            q,
            k,
            v,
            grid=Grid(16, 16),
            prefix=1,
            leaves=0.5,
            form="tiled",
            certificate=True,
            audit=1.0,
        )
    assert result.output.dtype == torch.bfloat16
    tokens = [x.bfloat16().double() for x in (q, k, v)]
    same = screened_attention(
        *tokens, grid=Grid(16, 16), prefix=1, leaves=0.5, form="tiled", certificate=True
    )
    bound = same.stats.certificate
    assert result.stats.certificate is not None and bound is not None
    assert float((result.stats.certificate - bound).min()) > -1e-12
    assert float((result.stats.certificate - bound).max()) < 0.01
    # The audit's exact outputs are exact: nothing but the roundings of the output lies between.
    exact = torch.nn.functional.scaled_dot_product_attention(*tokens)
    apart = (result.output.double() - exact).norm(dim=-1) / exact.norm(dim=-1)
    assert result.stats.audit is not None
    assert result.stats.audit.mean == pytest.approx(float(apart.mean()), rel=1e-3)


def test_reduced_matmul_precision_does_not_affect_the_certificate() -> None:
    before = torch.get_float32_matmul_precision()
    assert working_precision(torch.zeros(1)) == torch.float32
    try:
        torch.set_float32_matmul_precision("high")
        assert working_precision(torch.zeros(1)) == torch.float64
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("size", [1e25, 1e-25])
def test_queries_and_keys_of_any_magnitude(size: float) -> None:
    torch.manual_seed(2)
    q, k = torch.randn(2, 1, 2, 256, 16)
    q, k = size * q, k / size
    tiling, marks = Tiling(Grid(16, 16)), torch.zeros(1, 2, 2, 4, dtype=torch.bool)
    bound = certificate("eager", q, k, tiling, marks, prefix=0, scale=0.25)
    error = tiled_error(q.double().numpy(), k.double().numpy(), marks.numpy(), tiling, scale=0.25)
    assert bool((bound.numpy() >= error).all()) and float((bound.numpy() - error).max()) < 1e-2


def test_a_nan_query_has_an_infinite_certificate() -> None:
    torch.manual_seed(3)
    q, k = torch.randn(2, 1, 1, 256, 16)
    q[:, :, 5] = torch.nan
    marks = torch.zeros(1, 1, 2, 4, dtype=torch.bool)
    bound = certificate("eager", q, k, Tiling(Grid(16, 16)), marks, prefix=0, scale=0.25)
    assert bool(torch.isinf(bound[0, 0, 5])) and not bool(torch.isnan(bound).any())


@pytest.mark.parametrize("seed", range(12))
def test_everything_expanded_is_certified_exactly(seed: int) -> None:
    q, k, tiling, prefix, valid = adversarial(seed)
    marks = torch.ones(1, 2, tiling.groups, tiling.tiles, dtype=torch.bool)
    bound = certificate("eager", q, k, tiling, marks, prefix=prefix, scale=0.25, valid=valid)
    assert not bool(bound.any())


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("order", ["raster", "z"])
def test_certificates_belong_to_their_queries_in_every_order(order: str, masked: bool) -> None:
    torch.manual_seed(7)
    grid, prefix = Grid(11, 13), 2  # Z-order is not its own inverse here
    q, k, v = 2 * torch.randn(3, 1, 2, prefix + grid.size, 8, dtype=torch.float64)
    valid = torch.rand(1, grid.size) < 0.7 if masked else None
    spatial = grid.z_order if order == "z" else torch.arange(grid.size)
    assert order == "raster" or not torch.equal(grid.z_order, grid.z_rank)
    places = torch.cat((torch.arange(prefix), prefix + spatial))
    result = screened_attention(
        *(x[:, :, places] for x in (q, k, v)),
        grid=grid,
        prefix=prefix,
        error=0.3,
        order=order,
        valid=None if valid is None else valid[:, spatial],
        form="tiled",
        backend="eager",
        certificate=True,
    )
    tiling, scale = Tiling(grid), 8**-0.5
    marks = tiled_attention(
        *(x.numpy() for x in (q, k, v)),
        tiling,
        prefix=prefix,
        scale=scale,
        error=0.3,
        valid=None if valid is None else valid.numpy(),
    ).expanded
    assert 0 < marks.mean() < 1
    error = tiled_error(
        q.numpy(), k.numpy(), marks, tiling, prefix=prefix, scale=scale, valid=valid
    )[:, :, places]
    assert error.max() > 0.1 and result.stats.certificate is not None
    apart = result.stats.certificate.numpy() - error
    assert apart.min() >= 0 and apart.max() < 1e-10  # scores below 100, float64


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("order", ["raster", "z"])
def test_fallback_recomputes_the_queries_above_it_and_no_others(order: str, masked: bool) -> None:
    torch.manual_seed(8)
    grid, prefix = Grid(11, 13), 2
    q, k, v = 2 * torch.randn(3, 1, 2, prefix + grid.size, 8, dtype=torch.float64)
    valid = torch.rand(1, grid.size) < 0.7 if masked else None
    call = {"grid": grid, "prefix": prefix, "error": 0.3, "order": order, "valid": valid}
    call |= {"form": "tiled", "backend": "eager"}
    plain = screened_attention(q, k, v, certificate=True, **call)
    bound = plain.stats.certificate
    assert bound is not None
    limit = float(bound[bound > 0].quantile(0.7))
    mended = screened_attention(q, k, v, fallback=limit, **call)
    above = bound > limit
    assert 0 < int(above.sum()) < int((~above).sum())
    assert mended.stats.fallback == int(above.sum())
    mask = None if valid is None else torch.cat((valid.new_ones(1, prefix), valid), 1)
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    assert bool(((plain.output - exact).abs().amax(-1)[above] > 1e-3).all())
    torch.testing.assert_close(mended.output[above], exact[above], rtol=1e-9, atol=1e-9)
    assert torch.equal(mended.output[~above], plain.output[~above])


def test_prefix_queries_have_no_error() -> None:
    q, k = torch.randn(2, 1, 2, 3 + 256, 16)
    marks = torch.zeros(1, 2, 2, 4, dtype=torch.bool)
    bound = certificate("eager", q, k, Tiling(Grid(16, 16)), marks, prefix=3, scale=0.25)
    assert not bool(bound[:, :, :3].any()) and bool((bound[:, :, 3:] > 0).all())


def test_nearly_equal_keys_are_certified_to_be_nearly_exact() -> None:
    """Small deviations leave the bound small: second order in them, as the error is."""
    torch.manual_seed(4)
    q, k = torch.randn(2, 1, 1, 256, 16, dtype=torch.float64)
    marks = torch.zeros(1, 1, 2, 4, dtype=torch.bool)
    for size in (1e-2, 1e-3):
        small = k[:, :, :1] + size * k
        bound = certificate("eager", q, small, Tiling(Grid(16, 16)), marks, prefix=0, scale=0.25)
        error = tiled_error(q, small, marks, Tiling(Grid(16, 16)), scale=0.25)
        assert float(bound.max()) < 100 * size**2
        assert float((bound.numpy() - error).max()) < 1e-11  # scores below 10, float64


def test_error_is_that_of_fixed_blocks() -> None:
    """tiled_error with nothing expanded is E of a tree of blocks of the same side."""
    torch.manual_seed(6)
    q, k = torch.randn(2, 1, 1, 2 + 11 * 13, 16, dtype=torch.float64).numpy()
    tiling = Tiling(Grid(11, 13), side=4)
    marks = np.zeros((1, 1, tiling.groups, tiling.tiles), bool)
    error = tiled_error(q, k, marks, tiling, prefix=2, scale=0.25, tau=0.7)
    scores = 0.25 * q @ k.swapaxes(-1, -2)
    trees = [build_tree(row[2:].reshape(11, 13), FixedBlocks(4), tau=0.7) for row in scores[0, 0]]
    want = attention_error(q, k, [[trees]], prefix=2, scale=0.25, tau=0.7)
    assert np.abs(error[..., 2:] - want[..., 2:]).max() < 1e-13
