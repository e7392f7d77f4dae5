"""The launches and the operator of the Triton kernels, interpreted or on a GPU. test_tiles.py compares
the kernels with the specification."""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode

from bmfa import Grid, certify, screened_attention
from bmfa.attention.tiling import PROBE_SLOTS, TiledAttention, Tiling
from bmfa.grid import grid_to_list
from tiled_cases import DEVICE, GPU, TRITON, TiledCase, same

triton = pytest.importorskip("triton")

from bmfa.attention.kernels.triton import launch as cached_launch  # noqa: E402
from bmfa.attention.kernels.triton.tiles import launch, operators  # noqa: E402
from compile_kernels import SHARED_MEMORY, compile_kernels  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of NumPy, in the interpreter
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of torch.compile
]
SLOW = pytest.mark.slow
PREPARE = launch.prepare_attention


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


def num_items(got: TiledAttention, prepared: Any) -> int:
    """Items that the groups ask for: those after the first tiles, which the group itself reads."""
    extra = (got.expanded_count - 1).div(prepared.item_tiles, rounding_mode="floor")
    return int(extra.clamp(min=0).sum())


@SLOW
def test_large_grids_and_other_dimensions() -> None:
    TRITON.check(TRITON.make(7, (24, 40), expand=1.7))
    TRITON.check(TRITON.make(17, (11, 24), prefix=64, error=0.005))
    grids = {"query_grid": Grid(9, 19), "masked": True}
    TRITON.check(TRITON.make(9, (16, 18), dims=(128, 128), expand=1.6, **grids))
    TRITON.check(
        TRITON.make(9, (16, 18), dims=(64, 64), dtype=torch.float16, group_tiles=2, expand=1.6)
    )


# Exact heads, bands, items and memory


def test_exact_heads_by_a_kernel_of_their_own(settings, prepared):
    """More queries than keys, and fewer: blocks of the kernel end at their own numbers."""
    settings(SEPARATE_EXACT_TILES=1)
    wide, tall = Grid(9, 16), Grid(13, 24)
    for grid, query_grid, masked in ((tall, None, True), (wide, tall, True), (tall, wide, False)):
        case = TRITON.exact_heads(grid=grid, query_grid=query_grid, masked=masked)
        got, want = TRITON.check(case)
        assert prepared[-1].separate_exact and want.exact.tolist() == [[False, True, True]]
        assert float(got.probes[:, 1:, :, 0].max()) < 1e-8 < float(got.probes[:, 0, :, 0].max())
        exact = case.dense()[:, 1:].float()
        got_exact = got.output[:, 1:].where(case.seen.unsqueeze(-1), 0.0)
        torch.testing.assert_close(got_exact, exact, rtol=1e-5, atol=1e-5)


def check_bands(case: TiledCase, items: bool, used: list[Any]) -> None:
    """66 groups in two bands, of which the second has no probes."""
    got, _ = TRITON.check(case)
    kernels = [step.kernel for step, _ in used[-1].sequence.steps]
    for kernel, count in (("attention", 2), ("expand", 2 * items), ("levels", 1)):
        assert kernels.count(getattr(launch, f"{kernel}_kernel")) == count
    second = got.expanded_count[:, :, case.tiling.group_order[PROBE_SLOTS:]]
    assert second.shape[-1] == 2 and int(second.sum()) > 0
    assert not items or num_items(got, used[-1]) > 0


def test_bands(settings: Callable[..., None], prepared: list[Any]) -> None:
    settings(ROWS_PER_BAND=PROBE_SLOTS, LEAST_DIVIDED_TILES=1, LEAST_ITEM_TILES=2)
    row = Grid(1, 8 * 66 - 3)
    check_bands(TRITON.make(12, (16, 24), query_grid=row, expand=3.3), True, prepared)


@SLOW
def test_bands_without_items(settings: Callable[..., None], prepared: list[Any]) -> None:
    settings(ROWS_PER_BAND=PROBE_SLOTS, LEAST_DIVIDED_TILES=1000)
    case = TRITON.make(12, (16, 24), query_grid=Grid(1, 8 * 66 - 3), expand=3.3)
    check_bands(case, False, prepared)


def test_items_equal_the_reference(settings: Callable[..., None], prepared: list[Any]) -> None:
    """Expanded tiles that are divided among programs. There is room for about two items a group: where
    it does not suffice, a group reads all of its tiles itself."""
    for expand, items in ((2.4, (1, 2)), (6.0, (1,))):
        case = TRITON.make(11, (16, 22), expand=expand)
        settings(LEAST_DIVIDED_TILES=1000)
        whole = TRITON.run(case)
        assert not prepared[-1].has_items
        for item_tiles in items:
            settings(LEAST_DIVIDED_TILES=1, LEAST_ITEM_TILES=item_tiles)
            divided, _ = TRITON.check(case)
            used = prepared[-1]
            assert used.has_items and used.item_tiles == item_tiles
            asked = num_items(divided, used)
            assert asked > 0 and (asked > used.item_capacity) == (expand == 6.0)
            assert torch.equal(divided.expanded, whole.expanded)
            torch.testing.assert_close(divided.output, whole.output, rtol=1e-5, atol=1e-5)
    assert same(TRITON.run(case), divided)


def test_shared_keys_equal_copies_to_the_bit(settings, prepared):
    """In every kernel that reads keys; the operator is called with as many key heads as there are."""
    own_grid = {"query_grid": Grid(9, 10), "masked": True}
    for divided, grids in ((False, {}), (True, {}), (True, own_grid)):
        limit = 1 if divided else 10_000
        settings(LEAST_DIVIDED_TILES=limit, LEAST_ITEM_TILES=1, SEPARATE_EXACT_TILES=limit)
        budget = {"expand": 1.7, "dense_threshold": 0.5 if divided else 1.0}
        case = TRITON.make(5, (9, 10), heads=2, prefix=2, **grids, **budget)
        case = replace(case, k=case.k[:, :1], v=case.v[:, :1])
        got, want = TRITON.run(case), TRITON.run(case.whole())
        assert [x.key.heads_per_key for x in prepared[-2:]] == [2, 1]
        assert same(got, want, case) and int(got.expanded_count.sum()) > 0


def test_scratch_is_at_most_four_times_keys_and_values() -> None:
    """Where it would be more, fewer groups are in a band."""
    rows = set()
    for prefix, side, dim, heads in itertools.product(
        (0, 1, 17), (64, 128, 256, 512), operators.DIMS, (3, 6, 12, 16)
    ):
        tokens, tiling = prefix + side * side, Tiling(Grid(side, side), probes_per_group=1)
        strides = ((tokens * heads * dim, dim, heads * dim),) * 4
        rest = (torch.bfloat16, 0, False, 1, tiling, prefix, 0.125)
        key = launch.CallKey((1, heads, tokens, dim), strides, *rest)
        made = launch._AttentionLaunch(key, 0.03, 0.0, 0.4)
        scratch = made.sequence.workspace.bytes
        rows.add(made.rows)
        assert scratch <= 4 * (2 * heads * tokens * dim * 2), scratch / (4 * heads * tokens * dim)
    assert launch.BLOCK_R <= min(rows) < launch.ROWS_PER_BAND


def test_every_element_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scratch that is all ones, NaN in every dtype, changes nothing."""
    new_empty, filled = torch.Tensor.new_empty, []

    def poisoned(self: Tensor, *args: Any, **options: Any) -> Tensor:
        fresh = new_empty(self, *args, **options)
        filled.extend([fresh.dtype] * (fresh.numel() > 0))
        return fresh.fill_(math.nan if fresh.is_floating_point() else 255)

    for group_tiles, query_grid, masked in (
        (1, None, False),
        (2, None, True),
        (1, Grid(3, 9, frames=2), True),
        (1, Grid(17, 10), True),
    ):
        options = {"group_tiles": group_tiles, "query_grid": query_grid, "query_prefix": 2}
        case = TRITON.make(13, (9, 10), prefix=2, masked=masked, error=0.03, **options)
        want = TRITON.run(case)
        filled.clear()
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "new_empty", poisoned)
            got = TRITON.run(case)
        assert filled.count(torch.uint8) == 1 and case.q.dtype in filled
        assert same(got, want, case)


# The operator


def tensors(
    grid: Grid, dim: int = 32, dtype: torch.dtype = torch.float32, prefix: int = 1
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 1, 2, prefix + grid.size, dim, generator=generator)
    return list(x.to(DEVICE, dtype))


def operator_arguments(masked: bool, query_grid: Grid | None = None) -> tuple[Any, ...]:
    q, k, v = tensors(Grid(8, 9))
    if query_grid is not None:
        q = tensors(query_grid, prefix=3)[0]
    valid = torch.rand(1, 72, device=DEVICE) < 0.7 if masked else None
    rest = (valid, [8, 9, 1], grid_to_list(query_grid), 2, 1, 0.2, 0.1, 0.0, 1.0)
    return q, k[:, :1], v[:, :1], *rest


def test_the_operator_passes_opcheck_and_fake_tensors_have_the_shapes_of_results() -> None:
    utilities = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    for masked, query_grid in ((False, None), (True, Grid(5, 9, frames=2))):
        arguments = operator_arguments(masked, query_grid)
        torch.library.opcheck(operators.operator, arguments, test_utils=utilities)
        real = operators.operator(*arguments)
        with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
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


def test_compiles_into_one_graph() -> None:
    grid = Grid(16, 16)
    for query_grid in (None, Grid(9, 12)):
        q, k, v = tensors(grid)
        if query_grid is not None:
            q = tensors(query_grid, prefix=2)[0]
        options = {"backend": "triton", "allow_dense": False, "leaves": 0.4, "prefix": 1}

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
            return screened_attention(q, k, v, grid=grid, query_grid=query_grid, **options)

        def output(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend(q, k, v).output

        compiled = torch.compile(output, fullgraph=True, backend="inductor" if GPU else "aot_eager")
        result = attend(q, k, v)
        assert torch.equal(compiled(q, k, v), result.output)
        whole = torch.compile(attend, backend="eager")(q, k, v)
        assert torch.equal(whole.tree.leaf_index, result.tree.leaf_index)
        assert whole.stats.error == result.stats.error
        torch.testing.assert_close(
            certify(q, k, v, whole), certify(q, k, v, result), rtol=0, atol=0
        )
        exact = scaled_dot_product_attention(q.double(), k.double(), v.double())
        distance = (result.output.double() - exact).norm(dim=-1)
        assert result.stats.density < 1
        assert bool((certify(q, k, v, result).distance >= distance).all())


def test_refusals_say_why() -> None:
    grid = Grid(16, 24)
    strided = tensors(grid)
    strided[0] = strided[0].transpose(2, 3).contiguous().transpose(2, 3)
    trained = tensors(grid)
    trained[0].requires_grad_()
    for qkv, prefix, message in (
        (tensors(grid, dtype=torch.float64), 1, "float64"),
        (tensors(grid, 48), 1, "the head dimension is 48"),
        (strided, 1, "not contiguous"),
        (trained, 1, "gradients are required"),
        (tensors(grid, prefix=65), 65, "the prefix has 65 tokens; the kernels take up to 64"),
    ):
        assert message in str(operators.unsupported_reason(*qkv, Tiling(grid), prefix))
        options = {"grid": grid, "prefix": prefix, "error": 0.1}
        with pytest.raises(ValueError, match=message):
            screened_attention(*qkv, backend="triton", allow_dense=False, **options)
        ran = screened_attention(*qkv, **options)
        assert ran.stats.backend != "triton" and ran.output.isfinite().all()
    grid = Grid(16, 16)
    q, k, v = tensors(grid)
    for message, *arguments in (
        ("None", q, k, v, Tiling(grid)),
        ("None", q, k, v, Tiling(grid, query_grid=Grid(16, 15))),
        ("the tiles have 4x4 tokens; the kernels take 8x8", q, k, v, Tiling(grid, side=4)),
        ("values 16", q, k, v[..., :16], Tiling(grid)),
        ("there are no queries", q[:0], k[:0], v[:0], Tiling(grid)),
        ("the grid is 8x520; the kernels take sides up to 512", q, k, v, Tiling(Grid(8, 520))),
        ("the query_grid is 8x520; the", q, k, v, Tiling(grid, query_grid=Grid(8, 520))),
        ("the prefix of q has 241 tokens", q, k, v, Tiling(grid, query_grid=Grid(4, 4))),
        ("k is torch.float16", q, k.half(), v, Tiling(grid)),
    ):
        assert message in str(operators.unsupported_reason(*arguments, 1))


# Launches and compiled kernels


class Compiled:
    """Stands in for triton.compiler.CompiledKernel."""

    function, packed_metadata = "function", "metadata"

    def __init__(self) -> None:
        self.runs: list[tuple[object, ...]] = []

    def run(self, *arguments: object) -> None:
        self.runs.append(arguments)


def test_a_cached_launch_starts_only_what_was_compiled_for_it(monkeypatch):
    compiled, looked_up = Compiled(), []

    class Kernel:
        def __getitem__(self, grid: tuple[int]) -> object:
            return lambda *a, **options: looked_up.append((grid, a, options)) or compiled

    stream = SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda device: 7))
    hooks = SimpleNamespace(calls=[])
    runtime = SimpleNamespace(launch_enter_hook=hooks, launch_exit_hook=hooks)
    monkeypatch.setattr(cached_launch, "driver", stream)
    monkeypatch.setattr(cached_launch.triton, "knobs", SimpleNamespace(runtime=runtime))
    monkeypatch.setattr(cached_launch, "CompiledKernel", Compiled)
    monkeypatch.setattr(cached_launch, "_DIRECT", True)
    x = torch.zeros(64)
    current = x.get_device()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    cached = cached_launch.CachedLaunch(Kernel(), 5, (3, "constant"), num_warps=4)
    cached(x[1:])  # unaligned: a kernel compiled for it does not fit others
    cached(x)
    assert [entry[2] for entry in looked_up] == [{"num_warps": 4}] * 2 and not compiled.runs
    cached(x)
    assert len(looked_up) == 2
    expected = (5, 1, 1, 7, "function", "metadata", None, None, None, x.data_ptr(), 3, "constant")
    assert compiled.runs == [expected]
    cached(x[1:])
    hooks.calls.append(print)
    cached(x)
    hooks.calls.clear()
    current = 1
    cached(x)
    assert len(looked_up) == 5 and len(compiled.runs) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs the kernels themselves")
@pytest.mark.parametrize("more", [False, pytest.param(True, marks=SLOW)])
def test_kernels_compile_for_hopper(tmp_path: Path, more: bool) -> None:
    built = compile_kernels("more tiles" if more else "tiles", tmp_path)
    kernels = {name for name in vars(launch) if name.endswith("_kernel")}
    for dim in (64, 128) if more else (80,):
        assert {x.kernel for x in built if x.dim == dim} == kernels
    assert len(kernels) == 9 and max(x.shared for x in built) <= SHARED_MEMORY
