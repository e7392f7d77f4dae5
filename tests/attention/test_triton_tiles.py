"""The Triton kernels of tiled attention against the float64 reference, interpreted or on a GPU."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode

from bmfa import Grid, certify, screened_attention
from bmfa.attention.kernels.reference.tiles import ReferenceTiled
from bmfa.attention.tiling import PROBE_SLOTS, TiledAttention, slots_with_tokens
from bmfa.attention.tiling import Tiling as AnyTiling
from bmfa.grid import grid_to_list
from tiled_cases import NAMED_GRIDS, TiledCase, compare, dense_error, tiled_case

triton = pytest.importorskip("triton")

from bmfa.attention.kernels.triton.tiles import launch, operators  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, in the interpreter
Tiling = partial(AnyTiling, probes_per_group=1)

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
SLOW = pytest.mark.slow
# The interpreter computes in NumPy, which has no bfloat16.
HALF_TYPES = (torch.float16, torch.bfloat16) if GPU else (torch.float16,)
DTYPES = (torch.float32, *HALF_TYPES)
PREPARE = launch.prepare_attention
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES)


def draw(seed: int, dtype: torch.dtype = torch.float32, **options: Any) -> TiledCase:
    """Draw a case with tiles of the one size that the kernels take."""
    case = tiled_case(seed, dtype, **options)
    tiling = Tiling(case.tiling.grid, group_tiles=case.tiling.group_tiles)
    settings = dict(case.settings)
    if "expand" in settings:
        settings["expand"] *= tiling.tiles / case.tiling.tiles
    return replace(case, tiling=tiling, settings=settings)


def smooth_case(
    seed: int, shape: tuple[int, int], *, prefix: int = 1, dim: int = 32, heads: int = 1, batch: int = 1,
    dtype: torch.dtype = torch.float32, valid: Tensor | None = None, group_tiles: int = 1,
    **budget: float,
) -> TiledCase:  # fmt: skip
    """Tokens that vary slowly, so that errors of tangents are neither 0 nor 1."""
    generator = torch.Generator().manual_seed(seed)
    tiling = Tiling(Grid(*shape), group_tiles=group_tiles)
    size = (3, batch, heads, prefix + tiling.grid.size, dim)
    q, k, v = (torch.randn(size, generator=generator).cumsum(3) / 6).to(dtype)
    settings = {"prefix": prefix, "scale": dim**-0.5, "tau": 1.0, **budget}
    return TiledCase(q, k, v, tiling, settings, valid)


def run(case: TiledCase, **changes: Any) -> TiledAttention:
    """Run the kernels on `DEVICE`, and return the result on the CPU."""
    q, k, v = (x.to(DEVICE) for x in (case.q, case.k, case.v))
    valid = None if case.valid is None else case.valid.to(DEVICE)
    settings = case.settings | changes
    settings.pop("query_prefix", None)  # the kernels read it off the shapes
    got = operators.tiled_attention(q, k, v, case.tiling, valid=valid, **settings)
    assert got.output.dtype == case.q.dtype and got.probes.dtype == torch.float64
    parts = (got.output, got.expanded_count, got.probes, got.expanded)
    return TiledAttention(*(x.cpu() for x in parts))


def check(case: TiledCase) -> tuple[TiledAttention, ReferenceTiled]:
    """Compare the kernels with the reference; at most 1 of 20 groups may have tied losses."""
    got, want = run(case), case.oracle()
    assert compare(case, got, want) >= 0.95 * got.expanded_count.numel()
    return got, want


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Change constants of the launches, without effect on the launches of other tests."""

    def change(**constants: int) -> None:
        for name, value in constants.items():
            monkeypatch.setattr(launch, name, value)
        PREPARE.cache_clear()

    PREPARE.cache_clear()
    yield change
    PREPARE.cache_clear()


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The launches that calls use, in the order of the calls."""
    seen: list[Any] = []

    def keep(*arguments: Any) -> Any:
        seen.append(PREPARE(*arguments))
        return seen[-1]

    monkeypatch.setattr(launch, "prepare_attention", keep)
    return seen


# The reference


@EVERY_DTYPE
@pytest.mark.parametrize("seed", [*range(8), *(pytest.param(n, marks=SLOW) for n in range(8, 60))])
def test_seeded_shapes_equal_the_reference(seed: int, dtype: torch.dtype) -> None:
    check(draw(seed, dtype))


@pytest.mark.parametrize(
    "shape", [pytest.param(x, marks=SLOW if math.prod(x) > 400 else ()) for x in NAMED_GRIDS]
)
def test_named_grids_equal_the_reference(shape: tuple[int, int]) -> None:
    check(draw(7, shape=shape, kind="noise"))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("group_tiles", [1, 2])
@pytest.mark.parametrize("budget", [{"error": 0.05}, {"expand": 1.7}])
def test_frames(budget: dict[str, float], group_tiles: int, masked: bool) -> None:
    """Tiles inside of frames whose sides are no multiples of 8."""
    case = smooth_case(2, (3 * 11, 13), batch=2, **budget)
    grid = Grid(11, 13, frames=3)
    valid = None
    if masked:
        valid = torch.rand(2, grid.size, generator=torch.Generator().manual_seed(0)) < 0.8
    tiling = Tiling(grid, group_tiles=group_tiles)
    got, _ = check(replace(case, tiling=tiling, valid=valid))
    assert got.expanded_count.shape[-1] == 3 * 2 * (2 // group_tiles)


# Queries with a grid of their own


def cross_case(
    seed: int, grid: Grid, query_grid: Grid, *, prefix: int = 1, query_prefix: int = 1, batch: int = 1,
    heads: int = 1, dim: int = 32, dtype: torch.dtype = torch.float32, masked: bool = False,
    group_tiles: int = 1, **budget: float,
) -> TiledCase:  # fmt: skip
    """Queries and keys on two grids; missing keys hold NaN."""
    generator = torch.Generator().manual_seed(seed)

    def walk(tokens: int) -> Tensor:
        return torch.randn(batch, heads, tokens, dim, generator=generator).cumsum(2) / 6

    k, v = walk(prefix + grid.size), walk(prefix + grid.size)
    q = walk(query_prefix + query_grid.size)
    valid = None
    if masked:
        valid = torch.rand(batch, grid.size, generator=generator) < 0.8
        first = Tiling(grid).slot_tokens[0]
        valid[:, first[first >= 0]] = False  # a tile without a token
        valid[:, -1] = True
        gone = torch.cat((valid.new_zeros(batch, prefix), ~valid), 1)[:, None, :, None]
        k, v = (x.masked_fill(gone, torch.nan) for x in (k, v))
    settings = {"prefix": prefix, "scale": dim**-0.5, "tau": 1.0, **budget}
    settings["query_prefix"] = query_prefix
    tiling = Tiling(grid, query_grid=query_grid, group_tiles=group_tiles)
    return TiledCase(q.to(dtype), k.to(dtype), v.to(dtype), tiling, settings, valid)


QUERY_GRIDS = {
    "fewer": (Grid(16, 18), Grid(8, 9), 1, 1),
    "more": (Grid(9, 13), Grid(20, 17), 0, 3),
    "one group": (Grid(17, 9), Grid(3, 5), 5, 0),
    "one tile": (Grid(6, 7), Grid(16, 16), 1, 2),
    "frames": (Grid(9, 6, frames=2), Grid(5, 11, frames=3), 1, 1),
    "long prefix": (Grid(16, 16), Grid(8, 24), 0, 33),
    "transposed": (Grid(10, 20), Grid(20, 10), 2, 2),
}


@pytest.mark.parametrize(
    ("masked", "budget"),
    [
        (False, {"error": 0.05}),
        (True, {"expand": 1.3}),
        pytest.param(True, {"error": 0.05}, marks=SLOW),
        pytest.param(False, {"expand": 1.3}, marks=SLOW),
    ],
)
@pytest.mark.parametrize("name", QUERY_GRIDS)
def test_query_grids_equal_the_reference(name: str, masked: bool, budget: dict[str, float]) -> None:
    grid, query_grid, prefix, query_prefix = QUERY_GRIDS[name]
    case = cross_case(
        len(name), grid, query_grid, prefix=prefix, query_prefix=query_prefix, batch=2, masked=masked,
        **budget,
    )  # fmt: skip
    got, want = check(case)
    assert got.output.shape == case.q.shape
    assert got.expanded.shape[-2:] == (case.tiling.groups, Tiling(grid).tiles)
    assert np.allclose(got.probes[..., 1:], want.probes[..., 1:], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("dim", [80, *(pytest.param(d, marks=SLOW) for d in (64, 96, 128))])
@pytest.mark.parametrize("group_tiles", [1, 2])
@EVERY_DTYPE
def test_query_grids_of_every_dtype(dim: int, group_tiles: int, dtype: torch.dtype) -> None:
    case = cross_case(
        dim, Grid(16, 18), Grid(9, 19), dim=dim, dtype=dtype, group_tiles=group_tiles, masked=True,
        expand=1.6,
    )  # fmt: skip
    got, _ = check(case)
    assert 0 < int(got.expanded_count.sum()) < got.expanded.numel()


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_exact_heads_of_a_query_grid(
    separate: bool, masked: bool, settings: Callable[..., None], prepared: list[Any]
) -> None:
    """More queries than keys, and fewer: blocks of the exact kernel end at their own numbers."""
    settings(SEPARATE_EXACT_TILES=1 if separate else 10_000)
    for grid, query_grid in ((Grid(9, 16), Grid(13, 24)), (Grid(13, 24), Grid(9, 16))):
        case = cross_case(4, grid, query_grid, heads=2, masked=masked, query_prefix=3, error=0.05)
        q = torch.randn(case.q.shape, generator=torch.Generator().manual_seed(1))
        q[:, 0] *= 0.05  # nothing is expanded in this head
        q[:, 1] *= 12
        case = replace(case, q=q, settings=case.settings | {"dense_threshold": 0.3})
        got, want = check(case)
        assert prepared[-1].separate_exact == separate and want.exact.tolist() == [[False, True]]
        assert bool((got.probes[:, 1, :, 0] < 1e-8).all())


def test_items_and_bands_of_a_query_grid(
    settings: Callable[..., None], prepared: list[Any]
) -> None:
    settings(ROWS_PER_BAND=PROBE_SLOTS, LEAST_DIVIDED_TILES=1, LEAST_ITEM_TILES=2)
    case = cross_case(12, Grid(16, 24), Grid(1, 8 * 66 - 3), expand=3.3)
    got, _ = check(case)
    kernels = [step.kernel for step, _ in prepared[0].sequence.steps]
    assert kernels.count(launch.attention_kernel) == kernels.count(launch.expand_kernel) == 2
    assert num_items(got, prepared[0]) > 0


def test_a_query_grid_that_is_the_grid_of_the_keys_gives_the_same() -> None:
    """Self-attention, computed by the kernels for two grids."""
    case = smooth_case(3, (11, 17), prefix=2, heads=2, expand=1.7)
    own = replace(case, tiling=Tiling(case.tiling.grid, query_grid=case.tiling.grid))
    got, want = run(own), run(case)
    for name in ("output", "expanded", "probes"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name


# Heads that share keys


@pytest.mark.parametrize("key_heads", [1, 2])
@pytest.mark.parametrize("divided", [False, True])
def test_shared_keys_equal_copies_to_the_bit(
    divided: bool, key_heads: int, settings: Callable[..., None], prepared: list[Any]
) -> None:
    """In every kernel that reads keys; the operator is called with as many key heads as there are."""
    if divided:
        settings(LEAST_DIVIDED_TILES=1, LEAST_ITEM_TILES=1, SEPARATE_EXACT_TILES=1)
    budget = {"expand": 1.7, "dense_threshold": 0.5 if divided else 1.0}
    for case in (
        smooth_case(5, (11, 17), heads=4, prefix=2, **budget),
        cross_case(6, Grid(11, 17), Grid(9, 10), batch=2, heads=4, masked=True, **budget),
    ):
        k, v = (x[:, :key_heads] for x in (case.k, case.v))
        got = run(replace(case, k=k, v=v))
        copies = [x.repeat_interleave(4 // key_heads, 1) for x in (k, v)]
        want = run(replace(case, k=copies[0], v=copies[1]))
        assert [x.key.heads_per_key for x in prepared[-2:]] == [4 // key_heads, 1]
        for name in ("output", "expanded", "probes"):
            assert torch.equal(getattr(got, name), getattr(want, name)), name
        assert int(got.expanded_count.sum()) > 0


@pytest.mark.parametrize("dim", [32, 72, 80, 96, *(pytest.param(d, marks=SLOW) for d in (64, 128))])
@pytest.mark.parametrize("group_tiles", [1, 2])
@EVERY_DTYPE
def test_head_dimensions(dim: int, group_tiles: int, dtype: torch.dtype) -> None:
    case = smooth_case(dim, (16, 18), dim=dim, dtype=dtype, group_tiles=group_tiles, expand=1.6)
    got, _ = check(case)
    assert 0 < int(got.expanded_count.sum()) < got.expanded.numel()


@pytest.mark.parametrize("prefix", [0, 1, 5, 33, pytest.param(64, marks=SLOW)])
@pytest.mark.parametrize("budget", [{"error": 0.03}, {"expand": 1.7}])
def test_prefixes(prefix: int, budget: dict[str, float]) -> None:
    if prefix > 33 and "error" in budget:
        budget = {"error": 0.005}  # so many exact tokens leave little to lose
    case = smooth_case(min(prefix, 17), (11, 24), prefix=prefix, **budget)
    got, _ = check(case)
    assert 0 < int(got.expanded_count.sum()) < got.expanded.numel()
    assert (case.tiling.probe_slots(prefix) > PROBE_SLOTS) == (prefix > 32)
    factor = case.settings["scale"]
    exact = scaled_dot_product_attention(case.q[:, :, :prefix], case.k, case.v, scale=factor)
    torch.testing.assert_close(got.output[:, :, :prefix], exact, rtol=1e-5, atol=1e-5)


@EVERY_DTYPE
def test_empty_tiles_and_groups(dtype: torch.dtype) -> None:
    """Tiles without a token, among them the one at the first position and all at odd positions."""
    tiling = Tiling(Grid(14, 24))
    generator = torch.Generator().manual_seed(1)
    valid = torch.rand(3, tiling.grid.size, generator=generator) < 0.8
    slots, order = tiling.slot_tokens, tiling.group_order
    for image, tiles in ((0, order[:1]), (1, order[1::2])):
        gone = slots[tiles]
        valid[image, gone[gone >= 0]] = False
    valid[2] = False
    valid[2, slots[3, 5]] = True  # a single token
    case = smooth_case(2, (14, 24), batch=3, dtype=dtype, valid=valid, error=0.02)
    missing = torch.cat((valid.new_zeros(3, 1), ~valid), 1)[:, None, :, None]
    q, k, v = (x.masked_fill(missing, torch.nan) for x in (case.q, case.k, case.v))
    got, want = check(replace(case, q=q, k=k, v=v))
    empty = torch.tensor([[1, 0], [0, 1]], dtype=torch.bool)
    assert not bool(got.expanded[0, 0, :, order[0]].any())
    assert got.probes[:2, 0, :2, 2].eq(0).equal(empty)
    assert want.expanded.any() and int(got.expanded_count[2].sum()) <= 1


def test_what_missing_tokens_hold_does_not_matter() -> None:
    valid = torch.rand(2, 14 * 14, generator=torch.Generator().manual_seed(3)) > 0.3
    clean = smooth_case(3, (14, 14), prefix=2, batch=2, valid=valid, error=0.01)
    gone = torch.cat((valid.new_zeros(2, 2), ~valid), 1)[:, None, :, None]
    want = run(clean)
    for filling in (torch.nan, torch.inf):
        q, k, v = (x.masked_fill(gone, filling) for x in (clean.q, clean.k, clean.v))
        got = run(replace(clean, q=q, k=k, v=v))
        assert torch.equal(got.output.masked_fill(gone, 0.0), want.output.masked_fill(gone, 0.0))
        assert torch.equal(got.expanded, want.expanded) and torch.equal(got.probes, want.probes)


def test_tiles_with_tokens_are_found() -> None:
    tiling = Tiling(Grid(128, 128))
    for tile in (0, 1, 5, 130, 255):
        valid = torch.zeros(1, tiling.grid.size, dtype=torch.bool)
        tokens = tiling.slot_tokens[tile]
        valid[0, tokens[17]] = True
        found = slots_with_tokens(tiling, valid, valid.device).sum(-1)
        assert found.shape == (1, 256)
        assert found.flatten().nonzero().flatten().tolist() == [tile]


@pytest.mark.parametrize("kind", ["bright", "constant", "offset"])
@EVERY_DTYPE
def test_kinds_of_keys(kind: str, dtype: torch.dtype) -> None:
    case = draw(5, dtype, shape=(16, 17), kind=kind)
    got, _ = check(replace(case, settings=case.settings | {"error": 0.05}))
    if kind == "constant":
        assert int(got.expanded_count.sum()) == 0  # nothing is lost, nothing is expanded


@pytest.mark.parametrize("size", [1e2, 1e4])
@pytest.mark.parametrize("budget", [{"expand": 0.0}, {"expand": 1.3}, {"error": 0.05}])
def test_huge_keys(size: float, budget: dict[str, float]) -> None:
    case = smooth_case(6, (16, 16), **budget)
    case = replace(case, k=case.k * size)
    compare(case, run(case), case.oracle())


def test_scores_beyond_the_precision_give_finite_outputs() -> None:
    """Rounding of such scores exceeds 1, so that the choice of tiles is arbitrary."""
    case = smooth_case(6, (16, 16), error=0.05)
    got = run(replace(case, k=case.k * 1e9))
    # A correction is no longer than the diameter of values, twice their distance from a mean.
    assert float(got.output.norm(dim=-1).max()) <= 5 * float(case.v.norm(dim=-1).max())
    assert bool(got.output.isfinite().all()) and bool(got.probes.isfinite().all())


def test_everything_expanded_is_dense_attention() -> None:
    for budget in ({"error": 0.0}, {"expand": 6.0}):
        case = smooth_case(7, (20, 12), heads=2, **budget)
        got = run(case)
        assert bool(got.expanded.all()) and float(got.probes[..., 0].max()) < 1e-8
        exact = scaled_dot_product_attention(case.q, case.k, case.v)
        torch.testing.assert_close(got.output, exact, rtol=1e-5, atol=1e-5)


# The error of the probes


@pytest.mark.parametrize("size", [1e-30, 1e-24, 1e20, 1e30])
def test_values_whose_squares_are_no_numbers_of_single_precision(size: float) -> None:
    case = smooth_case(8, (16, 24), heads=2, error=0.05)
    got, want = run(replace(case, v=case.v * size)), run(case)
    assert torch.equal(got.expanded, want.expanded)
    squares = got.probes[..., :2] / size**2
    torch.testing.assert_close(squares, want.probes[..., :2], rtol=1e-3, atol=1e-10)
    torch.testing.assert_close(got.output / size, want.output, rtol=1e-5, atol=1e-5)


@EVERY_DTYPE
@pytest.mark.parametrize("budget", [{"error": 0.03}, {"expand": 1.3}, {"expand": 0.0}])
def test_the_probes_are_those_of_the_reference(
    budget: dict[str, float], dtype: torch.dtype
) -> None:
    case = smooth_case(8, (16, 24), heads=2, dtype=dtype, **budget)
    got, want = check(case)
    probes = got.probes.double().numpy()
    assert probes.shape == want.probes.shape and probes[..., 2].min() >= 1.0
    # Each element of an output, and of an exact one, is within `compare`'s tolerance.
    largest = max(float(case.v.abs().max()), abs(want.output).max())
    own = torch.finfo(dtype).eps * case.q.shape[-1] ** 0.5 * largest
    allowed = case.q.shape[-1] ** 0.5 * (2 * dense_error(case) + own)
    for column, share in ((0, 2.0), (1, 1.0)):
        difference = abs(np.sqrt(probes[..., column]) - np.sqrt(want.probes[..., column]))
        assert difference.max() <= share * allowed, (column, difference.max(), allowed)
    # The mean query is rounded, which moves |q - qbar|^4 by 4 times its share.
    moved = case.q.abs().max() / (case.q - case.q.mean(2, keepdim=True)).abs().max()
    weights = 8 * torch.finfo(dtype).eps * (1 + float(moved)) * case.q.shape[-1] ** 0.5
    assert np.allclose(probes[..., 2], want.probes[..., 2], rtol=weights)
    estimates = [
        math.sqrt((x[..., 2] * x[..., 0]).sum() / (x[..., 2] * x[..., 1]).sum())
        for x in (probes, want.probes)
    ]
    assert abs(estimates[0] - estimates[1]) <= 3 * allowed / math.sqrt(want.probes[..., 1].mean())
    assert estimates[1] > 1e-3


# Exact heads


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_heads_above_the_limit_are_exact(
    separate: bool, masked: bool, settings: Callable[..., None], prepared: list[Any]
) -> None:
    """Heads in which too much is expanded, by the attention kernel or by one of their own."""
    settings(SEPARATE_EXACT_TILES=1 if separate else 10_000)
    torch.manual_seed(4)
    q, k, v = torch.randn(3, 1, 3, 1 + 13 * 24, 32)
    q[:, 0] *= 0.1  # nothing is expanded in this head
    q[:, 1:] *= 4
    valid = torch.rand(1, 13 * 24) < 0.7 if masked else None
    budget = {"prefix": 1, "scale": 0.2, "tau": 1.0, "error": 0.05, "dense_threshold": 0.3}
    case = TiledCase(q, k, v, Tiling(Grid(13, 24)), budget, valid)
    got, want = check(case)
    assert prepared[0].separate_exact == separate
    assert want.exact.tolist() == [[False, True, True]]
    assert (
        bool((got.probes[:, 1:, :, 0] < 1e-8).all()) and float(got.probes[:, 0, :, 0].max()) > 1e-8
    )
    mask = None if valid is None else torch.cat((valid.new_ones(1, 1), valid), 1)[:, None, None]
    exact = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.2)
    seen = case.seen.expand(1, 2, -1)
    torch.testing.assert_close(got.output[:, 1:][seen], exact[:, 1:][seen], rtol=1e-5, atol=1e-5)


# Bands, items and memory


@pytest.mark.parametrize(
    ("items", "budget"),
    [pytest.param(False, {"error": 1e-4}, marks=SLOW), (True, {"expand": 4.3})],
)
def test_bands_equal_the_reference(
    items: bool, budget: dict[str, float], settings: Callable[..., None], prepared: list[Any]
) -> None:
    """66 groups in two bands, of which the second has no probes."""
    settings(
        ROWS_PER_BAND=PROBE_SLOTS, LEAST_DIVIDED_TILES=1 if items else 1000, LEAST_ITEM_TILES=2
    )
    case = smooth_case(12, (1, 8 * 66 - 3), **budget)
    got, _ = check(case)
    kernels = [step.kernel for step, _ in prepared[0].sequence.steps]
    for kernel, count in (("attention", 2), ("expand", 2 * items), ("levels", 1)):
        assert kernels.count(getattr(launch, f"{kernel}_kernel")) == count
    second = got.expanded_count[:, :, case.tiling.group_order[PROBE_SLOTS:]]
    assert second.shape[-1] == 2 and int(second.sum()) > 0
    assert not items or num_items(got, prepared[0]) > 0


@SLOW
def test_bands_of_their_own_size(prepared: list[Any]) -> None:
    check(smooth_case(10, (2, 8 * 140), error=0.02))
    assert launch.BLOCK_R <= prepared[0].rows < 140


def num_items(got: TiledAttention, prepared: Any) -> int:
    """Items that the groups ask for: those after the first tiles, which the group itself reads."""
    extra = (got.expanded_count - 1).div(prepared.item_tiles, rounding_mode="floor")
    return int(extra.clamp(min=0).sum())


@pytest.mark.parametrize("item_tiles", [1, 2])
@pytest.mark.parametrize("expand", [2.4, 6.0])
def test_items_equal_the_reference(
    expand: float, item_tiles: int, settings: Callable[..., None], prepared: list[Any]
) -> None:
    """Expanded tiles that are divided among programs. There is room for about two items a group: where
    it does not suffice, a group reads all of its tiles itself."""
    case = smooth_case(11, (16, 22), heads=2, expand=expand)
    whole = run(case)
    settings(LEAST_DIVIDED_TILES=1, LEAST_ITEM_TILES=item_tiles)
    divided, _ = check(case)
    used = prepared[-1]
    assert not prepared[0].has_items and used.has_items and used.item_tiles == item_tiles
    asked = num_items(divided, used)
    assert asked > 0 and (asked > used.item_capacity) == (expand == 6.0)
    assert torch.equal(divided.expanded, whole.expanded)
    torch.testing.assert_close(divided.output, whole.output, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("prefix", [0, 1, 17])
@pytest.mark.parametrize("side", [64, 128, 256, 512])
@pytest.mark.parametrize("dim", operators.DIMS)
def test_scratch_is_at_most_four_times_keys_and_values(side: int, dim: int, prefix: int) -> None:
    tokens, tiling = prefix + side * side, Tiling(Grid(side, side))
    for heads in (3, 6, 12, 16):
        strides = ((tokens * heads * dim, dim, heads * dim),) * 4
        shape = (1, heads, tokens, dim)
        key = launch.CallKey(shape, strides, torch.bfloat16, 0, False, 1, tiling, prefix, 0.125)
        scratch = launch._AttentionLaunch(key, 0.03, 0.0, 0.4).sequence.workspace.bytes
        assert scratch <= 4 * (2 * heads * tokens * dim * 2), scratch / (4 * heads * tokens * dim)


def test_every_element_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scratch that is all ones, NaN in every dtype, changes nothing."""
    valid = torch.ones(1, 9 * 17, dtype=torch.bool)
    cases = [
        smooth_case(13, (9, 17), prefix=2, valid=mask, group_tiles=group_tiles, error=0.03)
        for group_tiles, mask in ((1, None), (2, valid))
    ]
    for query_grid in (Grid(3, 9, frames=2), Grid(17, 19)):
        cases.append(
            cross_case(13, Grid(9, 17), query_grid, query_prefix=2, masked=True, error=0.03)
        )
    for case in cases:
        want = run(case)
        new_empty, filled = torch.Tensor.new_empty, []

        def poisoned(self: Tensor, *args: Any, new: Any = new_empty, **options: Any) -> Tensor:
            fresh = new(self, *args, **options)
            filled.extend([fresh.dtype] * (fresh.numel() > 0))
            return fresh.fill_(math.nan if fresh.is_floating_point() else 255)

        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "new_empty", poisoned)
            got = run(case)
        assert filled.count(torch.uint8) == 1 and case.q.dtype in filled
        assert torch.equal(got.output, want.output) and torch.equal(got.probes, want.probes)
        assert torch.equal(got.expanded, want.expanded)


@EVERY_DTYPE
def test_runs_are_equal_to_the_bit(dtype: torch.dtype, settings: Callable[..., None]) -> None:
    settings(LEAST_DIVIDED_TILES=1, LEAST_ITEM_TILES=1)  # with items, some of which do not fit
    case = smooth_case(14, (16, 17), heads=2, dtype=dtype, expand=3.7)
    first, second = run(case), run(case)
    assert torch.equal(first.output, second.output)
    assert torch.equal(first.expanded, second.expanded)
    assert torch.equal(first.probes, second.probes)


def test_strided_inputs_give_the_same() -> None:
    """q, k and v as a model makes them, views of one tensor."""
    case = smooth_case(15, (9, 16), heads=2, expand=1.2)
    packed = torch.stack([x.transpose(1, 2) for x in (case.q, case.k, case.v)], 2)
    q, k, v = (x.transpose(1, 2) for x in packed.unbind(2))
    assert q.stride() != case.q.stride()
    got, want = run(replace(case, q=q, k=k, v=v)), run(case)
    assert torch.equal(got.output, want.output) and torch.equal(got.expanded, want.expanded)


# The operator


def tensors(
    grid: Grid, dim: int = 32, dtype: torch.dtype = torch.float32, prefix: int = 1
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 1, 2, prefix + grid.size, dim, generator=generator)
    return list(x.to(DEVICE, dtype))


def operator_arguments(masked: bool, query_grid: Grid | None = None) -> tuple[Any, ...]:
    q, k, v = tensors(Grid(9, 16))
    k, v = k[:, :1], v[:, :1]
    valid = torch.rand(1, 144, device=DEVICE) < 0.7 if masked else None
    if query_grid is not None:
        q = tensors(query_grid, prefix=3)[0]
    grids = ([9, 16, 1], grid_to_list(query_grid))
    return q, k, v, valid, *grids, 2, 1, 0.2, 0.1, 0.0, 1.0


@pytest.mark.parametrize("query_grid", [None, Grid(5, 9, frames=2)])
@pytest.mark.parametrize("masked", [False, True])
def test_the_operator_passes_opcheck(masked: bool, query_grid: Grid | None) -> None:
    torch.library.opcheck(
        operators.operator, operator_arguments(masked, query_grid),
        test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"),
    )  # fmt: skip


@pytest.mark.parametrize("query_grid", [None, Grid(5, 9, frames=2)])
def test_fake_tensors_have_the_shapes_of_results(query_grid: Grid | None) -> None:
    arguments = operator_arguments(False, query_grid)
    real = operators.operator(*arguments)
    with torch._subclasses.FakeTensorMode() as mode:
        fake = operators.operator(*map(mode.from_tensor, arguments[:3]), *arguments[3:])
    for ours, theirs in zip(fake, real, strict=True):
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
        assert ours.stride() == theirs.stride()


def test_flops() -> None:
    grid = Grid(128, 128)
    arguments = (None, grid_to_list(grid), [], 2, 1, 0.125, None)
    flops = []
    with torch._subclasses.FakeTensorMode():
        q, k, v = (torch.empty(2, 3, 1 + grid.size, 64, device=DEVICE) for _ in "qkv")
        for share in (0.0, 0.1, 1.0):
            with FlopCounterMode(display=False) as counter:
                operators.operator(q, k, v, *arguments, share, 1.0)
            flops.append(counter.get_total_flops())
    dense = 4 * q.numel() * q.shape[2]
    # T / 2 representatives read keys once for scores and once for means, and values once; N queries read
    # T tangents; 64 exact queries read all tokens; expanded tiles are a share of dense attention.
    least = 4 * 6 * 64 * (1.5 * 128 + 256 + 64) * grid.size
    assert least < flops[0] < 1.5 * least < flops[1] < dense < flops[2]
    assert flops[2] - flops[0] == pytest.approx(4 * 6 * 64 * grid.size**2, rel=1e-6)
    assert flops[1] - flops[0] == pytest.approx(0.1 * (flops[2] - flops[0]), rel=1e-6)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiles_into_one_graph() -> None:
    grid = Grid(16, 16)
    qkv = tensors(grid)

    def attend(*qkv: Tensor) -> Tensor:
        return screened_attention(
            *qkv, grid=grid, prefix=1, leaves=0.4, backend="triton", allow_dense=False
        ).output

    compiled = torch.compile(attend, fullgraph=True, backend="inductor" if GPU else "aot_eager")
    assert torch.equal(compiled(*qkv), attend(*qkv))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_query_grid_compiles_into_one_graph() -> None:
    grid, query_grid = Grid(16, 16), Grid(9, 12)
    (q, *_), (_, k, v) = tensors(query_grid, prefix=2), tensors(grid)

    def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        return screened_attention(
            q, k, v, grid=grid, query_grid=query_grid, prefix=1, leaves=0.4, backend="triton",
            allow_dense=False, **options,
        )  # fmt: skip

    def output(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v).output

    compiled = torch.compile(output, fullgraph=True, backend="inductor" if GPU else "aot_eager")
    assert torch.equal(compiled(q, k, v), output(q, k, v))
    result = attend(q, k, v)
    exact = scaled_dot_product_attention(q.double(), k.double(), v.double())
    distance = (result.output.double() - exact).norm(dim=-1)
    assert result.stats.density < 1 and bool((certify(q, k, v, result).distance >= distance).all())


REFUSED = {
    "dtype": ({"dtype": torch.float64}, "float64"),
    "dim": ({"dim": 48}, "the head dimension is 48"),
    "strides": ({"strided": True}, "not contiguous"),
    "gradients": ({"grad": True}, "gradients are required"),
    "prefix": ({"prefix": 65}, "the prefix has 65 tokens; the kernels take up to 64"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_say_why(name: str) -> None:
    change, message = REFUSED[name]
    grid, prefix = Grid(16, 24), change.get("prefix", 1)
    q, k, v = tensors(grid, change.get("dim", 32), change.get("dtype", torch.float32), prefix)
    if "strided" in change:
        q = q.transpose(2, 3).contiguous().transpose(2, 3)
    if "grad" in change:
        q.requires_grad_()
    reason = operators.unsupported_reason(q, k, v, Tiling(grid), prefix)
    assert reason is not None and message in reason
    options = {"grid": grid, "prefix": prefix, "error": 0.1}
    with pytest.raises(ValueError, match=message):
        screened_attention(q, k, v, backend="triton", allow_dense=False, **options)
    ran = screened_attention(q, k, v, **options)
    assert ran.stats.backend != "triton" and ran.output.isfinite().all()


def test_what_the_kernels_cannot_take_is_refused_before_they_run() -> None:
    q, k, v = tensors(Grid(16, 16))
    assert operators.unsupported_reason(q, k, v, Tiling(Grid(16, 16)), 1) is None
    cases = {
        "the tiles have 4x4 tokens; the kernels take 8x8": (q, k, v, Tiling(Grid(16, 16), side=4)),
        "values 16": (q, k, v[..., :16], Tiling(Grid(16, 16))),
        "there are no queries": (q[:0], k[:0], v[:0], Tiling(Grid(16, 16))),
        "the grid is 8x520; the kernels take sides up to 512": (q, k, v, Tiling(Grid(8, 520))),
        "the query_grid is 8x520; the kernels take sides up to 512": (
            q, k, v, Tiling(Grid(16, 16), query_grid=Grid(8, 520)),
        ),
        "the prefix of q has 241 tokens; the kernels take up to 64": (
            q, k, v, Tiling(Grid(16, 16), query_grid=Grid(4, 4)),
        ),
        "k is torch.float16": (q, k.half(), v, Tiling(Grid(16, 16))),
    }  # fmt: skip
    for message, arguments in cases.items():
        reason = operators.unsupported_reason(*arguments, 1)
        assert reason is not None and message in reason
    own = Tiling(Grid(16, 16), query_grid=Grid(16, 15))
    assert operators.unsupported_reason(q, k, v, own, 1) is None
