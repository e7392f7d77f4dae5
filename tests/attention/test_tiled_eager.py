"""Tiled attention in torch against the float64 reference, and properties that must hold."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from bmfa.attention.kernels.eager.tiles import attention
from bmfa.attention.kernels.eager.tiles import heads as eager_heads
from bmfa.attention.kernels.eager.tiles import tiled_attention as attend
from bmfa.attention.kernels.reference import tiled_attention as reference_attention
from bmfa.attention.kernels.reference.tiles import Head, tile_members
from bmfa.attention.tiling import UNIFORM_SHARE, TiledAttention, Tiling
from bmfa.grid import Grid
from tiled_cases import NAMED_GRIDS, TiledCase, compare, largest_score, tiled_case


def run(case: TiledCase, **changes: Any) -> TiledAttention:
    settings = case.settings | changes
    got = attend(case.q, case.k, case.v, case.tiling, valid=case.valid, **settings)
    assert got is not None
    return got


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "first", [*range(0, 80, 20), *(pytest.param(n, marks=SLOW) for n in range(80, 1000, 20))]
)
def test_seeded_shapes_equal_the_reference(first: int) -> None:
    groups = compared = 0
    for seed in range(first, first + 20):
        case = tiled_case(seed)
        want = case.oracle()
        compared += compare(case, run(case), want)
        groups += want.expanded[..., 0].size
    assert compared > 0.95 * groups


@pytest.mark.parametrize(
    "seed", [*range(12), *(pytest.param(n, marks=SLOW) for n in range(12, 40))]
)
def test_single_precision_equals_the_reference(seed: int) -> None:
    case = tiled_case(1000 + seed, torch.float32)
    compare(case, run(case), case.oracle())


@pytest.mark.parametrize("shape", NAMED_GRIDS)
@pytest.mark.parametrize("kind", ["noise", pytest.param("bright", marks=SLOW)])
def test_named_grids_equal_the_reference(shape: tuple[int, int], kind: str) -> None:
    case = tiled_case(7, shape=shape, kind=kind)
    compare(case, run(case), case.oracle())


@pytest.mark.parametrize("seed", range(10))
def test_everything_expanded_is_dense_attention(seed: int) -> None:
    case = tiled_case(2000 + seed, poison=False)
    got = run(case, error=None, expand=case.tiling.tiles)
    mask = None
    if case.valid is not None:
        before = case.valid.new_ones(len(case.valid), case.settings["prefix"])
        mask = torch.cat((before, case.valid), 1)[:, None, None]
    factor = case.settings["scale"] / case.settings["tau"]
    exact = scaled_dot_product_attention(case.q, case.k, case.v, attn_mask=mask, scale=factor)
    seen = case.seen.expand(exact.shape[:3])
    assert torch.allclose(got.output[seen], exact[seen], rtol=1e-10, atol=1e-11)


def test_an_error_of_zero_is_exact() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 256, 32, dtype=torch.float64)
    options = {"prefix": 0, "scale": 0.2, "error": 0.0}
    got = attend(q, k, v, Tiling(Grid(16, 16)), **options)
    assert bool(got.expanded.all())
    exact = scaled_dot_product_attention(q, k, v, scale=0.2)
    assert torch.allclose(got.output, exact, rtol=1e-11, atol=1e-12)
    assert attend(q, k, v, Tiling(Grid(16, 16)), dense_threshold=0.5, **options) is None


def test_probes_report_the_error_of_the_returned_output() -> None:
    case = tiled_case(5, torch.float32, shape=(24, 40), kind="noise", poison=False)
    tiling, prefix = case.tiling, case.settings["prefix"]
    q, k, v = case.q, case.k, case.v
    got = attend(q, k, v, tiling, valid=None, **(case.settings | {"error": None, "expand": 1.5}))
    factor = case.settings["scale"] / case.settings["tau"]
    exact = scaled_dot_product_attention(q, k, v, scale=factor)
    squares = (got.output - exact).square().sum(-1)[:, :, prefix:]
    groups = tiling.group_order[: tiling.probe_groups(prefix)]
    assert tiling.probes_per_group > 1
    slots = tiling.queries.slot_tokens[groups.repeat_interleave(tiling.probes_per_group)]
    squares = torch.where(slots >= 0, squares[:, :, slots.clamp(min=0)], torch.inf)
    # The probe is one query of its group.
    difference = (squares - got.probes[..., :1]).abs().amin(-1)
    scale = exact.square().sum(-1).mean()
    assert got.probes[..., 0].mean() > 1e-4 * scale
    assert bool((difference < 1e-6 * scale).all())
    sizes = (slots >= 0).sum(-1)
    weight = got.probes[..., 2]
    largest = sizes / (UNIFORM_SHARE * tiling.probes_per_group)
    assert bool((weight > 0).all()) and bool((weight <= largest * (1 + 1e-6)).all())


def smooth(factor: float) -> tuple[torch.Tensor, ...]:
    """The example of the manual, with queries multiplied by a factor."""
    generator = torch.Generator().manual_seed(0)
    coarse = torch.randn(9, 64, 8, 8, generator=generator)
    grown = torch.nn.functional.interpolate(coarse, size=64, mode="bicubic")
    q, k, v = grown.reshape(3, 1, 3, 64, 64 * 64).transpose(-1, -2)
    return q * factor, k, v


@pytest.mark.parametrize("factor", [1.0, 2.0, 3.0, 4.0])
@pytest.mark.parametrize("error", [0.05, 0.1])
def test_the_error_is_within_its_target(factor: float, error: float) -> None:
    q, k, v = smooth(factor)
    got = attend(q, k, v, Tiling(Grid(64, 64)), prefix=0, scale=0.125, error=error)
    exact = scaled_dot_product_attention(q, k, v)
    relative = float((got.output - exact).norm() / exact.norm())
    assert relative <= 1.3 * error
    if int(got.expanded_count.sum()):
        assert relative >= 0.5 * error


def test_a_budget_is_the_mean_number_of_expanded_tiles() -> None:
    q, k, v = smooth(3.0)
    for expand in (2.0, 8.0, 30.0):
        got = attend(q, k, v, Tiling(Grid(64, 64)), prefix=0, scale=0.125, expand=expand)
        mean = float(got.expanded_count.float().mean())
        assert 0.75 * expand <= mean <= 1.25 * expand


def test_heads_above_the_limit_are_exact() -> None:
    torch.manual_seed(4)
    q, k, v = torch.randn(3, 1, 3, 1 + 24 * 24, 32)
    q[:, 0] *= 0.1  # nothing is expanded in this head
    q[:, 1:] *= 4
    options = {"prefix": 1, "scale": 0.2, "error": 0.05, "dense_threshold": 0.3}
    tiling = Tiling(Grid(24, 24))
    got = attend(q, k, v, tiling, **options)
    want = reference_attention(q.numpy(), k.numpy(), v.numpy(), tiling, **options)
    assert want.exact.tolist() == [[False, True, True]]
    assert np.array_equal(got.expanded.numpy(), want.expanded)
    exact = scaled_dot_product_attention(q, k, v, scale=0.2)
    assert torch.allclose(got.output[:, 1:], exact[:, 1:], atol=1e-5)
    assert not torch.allclose(got.output[:, 0], exact[:, 0], atol=1e-5)
    assert attend(q[:, 1:], k[:, 1:], v[:, 1:], tiling, **options) is None


@pytest.mark.parametrize("mode", [{"expand": 3.0}, {"error": 0.05}])
def test_calls_are_repeatable_to_the_bit(mode: dict[str, Any]) -> None:
    q, k, v = smooth(2.0)
    first, second = (
        attend(q, k, v, Tiling(Grid(64, 64)), prefix=0, scale=0.125, **mode) for _ in range(2)
    )
    assert torch.equal(first.output, second.output)
    assert torch.equal(first.expanded, second.expanded)
    assert torch.equal(first.probes, second.probes)


@pytest.mark.parametrize("seed", range(6))
def test_tangents_equal_the_reference(seed: int) -> None:
    case = tiled_case(6000 + seed, shape=(17, 19), poison=False)
    prefix, factor = case.settings["prefix"], case.settings["scale"] / case.settings["tau"]
    images = attention._arrange(
        case.q, case.k, case.v, case.tiling, prefix, prefix, factor, case.valid
    )
    exists = np.ones((len(case.q), case.tiling.grid.size), bool)
    if case.valid is not None:
        exists = case.valid.numpy()
    order = case.tiling.group_order.numpy()
    for b, h in np.ndindex(case.q.shape[:2]):
        eager, unit = images[b][h], images[b][h].keys.unit
        tangents = eager.tangents(slice(0, case.tiling.groups))
        q, k, v = (x[b, h].numpy() for x in (case.q, case.k, case.v))
        members = tile_members(case.tiling, exists[b])
        queries = tile_members(case.tiling.queries, exists[b])
        head = Head(q[prefix:], k, v, members, prefix, factor, order, queries)
        tolerance = {
            "rtol": 1e-9,
            "atol": 1e-11 * (1 + np.abs(head.log_mass[head.log_mass > -np.inf]).max()),
        }
        for got, want in (
            (tangents.log_mass, head.log_mass),
            (tangents.k, head.k_tangent),
            (tangents.v * unit, head.v_tangent),
            (tangents.loss, head.losses),
        ):
            assert np.allclose(got.numpy(), want[order], **tolerance)
        assert np.allclose((eager.cross * unit).numpy(), head.cross, **tolerance)
        assert np.isclose(float(eager.diameter * unit), head.diameter)


@pytest.mark.parametrize("mode", [{"expand": 0}, {"expand": 2}, {"error": 0.1}, {"error": 0.0}])
def test_constant_keys_lose_nothing(mode: dict[str, Any]) -> None:
    torch.manual_seed(1)
    q, k, v = torch.randn(3, 1, 2, 3 + 14 * 14, 32, dtype=torch.float64)
    k[:, :, 3:] = k[:, :, 3:4]
    got = attend(q, k, v, Tiling(Grid(14, 14)), prefix=3, scale=0.3, **mode).output
    exact = scaled_dot_product_attention(q, k, v, scale=0.3)
    assert (got - exact).abs().max() < 1e-13


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("size", [1e2, 1e4, 1e6])
@pytest.mark.parametrize("mode", [{"expand": 0}, {"expand": 1}, {"error": 0.05}])
def test_huge_keys_give_the_outputs_of_the_reference(
    size: float, mode: dict[str, Any], dtype: torch.dtype
) -> None:
    torch.manual_seed(2)
    q, k, v = torch.randn(3, 1, 2, 1 + 16 * 25, 32, dtype=dtype)
    settings = {"prefix": 1, "scale": 0.2, "tau": 1.0, **mode}
    case = TiledCase(q, k * size, v, Tiling(Grid(16, 25)), settings, None)
    # A score is off by half an eps of |q| |k|, and its weight by the same share of itself.
    sums = torch.finfo(dtype).eps / 2 * largest_score(case)
    compare(case, run(case), case.oracle(), sums)


def test_one_token_far_above_its_tile_moves_the_output_by_no_more_than_the_values() -> None:
    q = torch.ones(1, 1, 128, 32)
    k, v = torch.zeros(1, 1, 128, 32), torch.rand(1, 1, 128, 32)
    k[:, :, 5] = 50.0
    got = attend(q, k, v, Tiling(Grid(8, 16)), prefix=0, scale=1.0, expand=0)
    assert float(got.output.abs().max()) <= 2.0


@pytest.mark.parametrize("seed", range(10))
def test_permuting_images_permutes_the_result(seed: int) -> None:
    case = tiled_case(3000 + seed, poison=False)
    batch = torch.arange(len(case.q)).flip(0)
    q, k, v = (x[batch] for x in (case.q, case.k, case.v))
    valid = None if case.valid is None else case.valid[batch]
    got = attend(q, k, v, case.tiling, valid=valid, **case.settings)
    want = run(case)
    assert torch.equal(got.expanded, want.expanded[batch])
    seen = case.seen.expand(want.output.shape[:3])[batch]
    assert torch.allclose(got.output[seen], want.output[batch][seen], rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("seed", range(12))
def test_small_chunks_give_the_same(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = tiled_case(4000 + seed, shape=(20, 23))
    whole = run(case)
    monkeypatch.setattr(eager_heads, "CHUNK_ELEMENTS", 1)
    parts = run(case)
    assert torch.equal(whole.expanded, parts.expanded)
    seen = case.seen.expand(whole.output.shape[:3])
    assert torch.allclose(whole.output[seen], parts.output[seen], rtol=1e-11, atol=1e-12)


def test_what_missing_tokens_hold_does_not_matter() -> None:
    generator = torch.Generator().manual_seed(3)
    q, k, v = torch.randn(3, 2, 2, 2 + 14 * 14, 32, generator=generator)
    valid = torch.rand(2, 14 * 14, generator=generator) > 0.3
    valid[0, Tiling(Grid(14, 14)).slot_tokens[1].clamp(min=0)] = False
    settings = {"prefix": 2, "scale": 0.2, "error": 0.01, "valid": valid}
    clean = attend(q, k, v, Tiling(Grid(14, 14)), **settings)
    gone = torch.cat((valid.new_zeros(2, 2), ~valid), 1)[:, None, :, None]
    for filling in (torch.nan, torch.inf, 1e30):
        dirty = [x.masked_fill(gone, filling) for x in (q, k, v)]
        got = attend(*dirty, Tiling(Grid(14, 14)), **settings)
        seen = ~gone[..., 0].expand(2, 2, -1)
        assert torch.equal(got.output[seen], clean.output[seen])
        assert torch.equal(got.expanded, clean.expanded)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_are_computed_in_single_precision(dtype: torch.dtype) -> None:
    case = tiled_case(11, dtype, shape=(14, 14), kind="noise")
    got = run(case).output
    assert got.dtype == dtype
    single = attend(
        *(x.float() for x in (case.q, case.k, case.v)),
        case.tiling, valid=case.valid, **case.settings,
    )  # fmt: skip
    seen = case.seen.expand(got.shape[:3])
    assert torch.equal(got[seen], single.output.to(dtype)[seen])


@pytest.mark.parametrize("mode", [{"expand": 0}, {"expand": 1}, {"error": 0.02}])
@pytest.mark.parametrize("masked", [False, True])
def test_gradients(mode: dict[str, Any], masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(5)
    shape = (1, 1, 1 + 4 * 5, 3)
    inputs = [torch.randn(*shape, dtype=torch.float64, generator=generator) for _ in range(3)]
    valid = torch.rand(1, 20, generator=generator) > 0.3 if masked else None
    tiling = Tiling(Grid(4, 5), side=3)
    choices = []

    def output(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        got = attend(q, k, v, tiling, prefix=1, scale=0.5, valid=valid, **mode).output
        return got if valid is None else got[:, :, torch.cat((torch.ones(1).bool(), valid[0]))]

    # What the probes choose is a constant of the gradient, so finite differences must keep it.
    choose = attention.choose
    monkeypatch.setattr(
        attention, "choose", lambda *a, **k: choices.append(choose(*a, **k)) or choices[0]
    )
    assert torch.autograd.gradcheck(output, [x.requires_grad_() for x in inputs])
    assert len(choices) > 60  # of every finite difference


def test_no_tensor_of_tokens_by_tokens() -> None:
    """The largest tensor made is far below N x N."""
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                largest = max(largest, result.numel())
            return result

    q, k, v = torch.randn(3, 1, 1, 64 * 64, 32)
    with torch.no_grad(), Watch():
        attend(q, k, v, Tiling(Grid(64, 64)), prefix=0, scale=0.2, expand=4)
    assert largest <= 2 * eager_heads.CHUNK_ELEMENTS


@pytest.mark.parametrize("common", [1e3, 1e4])
def test_what_all_queries_share_is_no_spread(common: float) -> None:
    torch.manual_seed(6)
    q, k, v = torch.randn(3, 1, 1, 256, 32)
    q[..., 0], k[..., 0] = common, 1.0
    options = {"prefix": 0, "scale": 0.2, "expand": 1}
    got = attend(q, k, v, Tiling(Grid(16, 16)), **options)
    want = reference_attention(q.numpy(), k.numpy(), v.numpy(), Tiling(Grid(16, 16)), **options)
    assert np.array_equal(got.expanded.numpy(), want.expanded)
    assert np.abs(got.output.numpy() - want.output).max() < 1e-7 * common


@pytest.mark.parametrize(("queries", "keys"), [(0.0, 1e20), (1e-30, 1e30), (0.0, 0.0)])
def test_spreads_whose_squares_overflow_count_as_none(queries: float, keys: float) -> None:
    torch.manual_seed(7)
    q, k, v = torch.randn(3, 1, 1, 256, 32)
    got = attend(q * queries, k * keys, v, Tiling(Grid(16, 16)), prefix=0, scale=0.2, error=3.0)
    exact = scaled_dot_product_attention(q * queries, k * keys, v, scale=0.2)
    assert int(got.expanded_count.sum()) == 0
    assert float((got.output - exact).norm()) <= 3.0 * float(exact.norm())


@pytest.mark.parametrize("size", [1e-30, 1e-24, 1e20, 1e30])
def test_values_whose_squares_are_no_numbers_of_single_precision(size: float) -> None:
    """An estimate of 0 would hide any error, and be met."""
    q, k, v = smooth(2.0)
    options = {"prefix": 0, "scale": 0.125, "error": 0.05}
    want, got = (attend(q, k, x, Tiling(Grid(64, 64)), **options) for x in (v, v * size))
    assert torch.equal(got.expanded, want.expanded) and int(want.expanded_count.sum())
    torch.testing.assert_close(got.output / size, want.output, rtol=1e-5, atol=1e-6)
    squares = got.probes[..., :2] / size**2
    torch.testing.assert_close(squares, want.probes[..., :2], rtol=1e-3, atol=1e-9)


@pytest.mark.parametrize("size", [1e-25, 1e25])
def test_queries_whose_squares_are_no_numbers_of_single_precision(size: float) -> None:
    q, k, v = smooth(2.0)
    options = {"prefix": 0, "scale": 0.125, "error": 0.05}
    want = attend(q, k, v, Tiling(Grid(64, 64)), **options)
    got = attend(q * size, k / size, v, Tiling(Grid(64, 64)), **options)
    assert float((got.expanded != want.expanded).double().mean()) < 1e-3  # of rounding
    torch.testing.assert_close(got.probes[..., 2], want.probes[..., 2], rtol=1e-4, atol=0.0)


def test_a_budget_is_not_spent_on_constant_tiles() -> None:
    torch.manual_seed(8)
    q, k, v = torch.randn(3, 1, 1, 256, 32)
    got = attend(
        q, k[:, :, :1].expand_as(k), v, Tiling(Grid(16, 16)), prefix=0, scale=0.2, expand=2
    )
    assert int(got.expanded_count.sum()) == 0


def test_second_derivatives_are_numbers_where_a_tile_has_one_token() -> None:
    torch.manual_seed(9)
    q, k, v = (torch.randn(1, 1, 81, 8, dtype=torch.float64).requires_grad_() for _ in "qkv")
    output = attend(q, k, v, Tiling(Grid(9, 9)), prefix=0, scale=0.3, error=0.1).output
    (first,) = torch.autograd.grad(output.square().sum(), k, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), k)
    assert bool(torch.isfinite(second).all())


def test_one_target_is_given() -> None:
    q = torch.zeros(1, 1, 64, 4)
    for mode in ({}, {"error": 0.1, "expand": 2}):
        with pytest.raises(ValueError, match="exactly one"):
            attend(q, q, q, Tiling(Grid(8, 8)), prefix=0, scale=1.0, **mode)
