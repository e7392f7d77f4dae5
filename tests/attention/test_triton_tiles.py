"""The Triton kernels of tiled attention against the float64 reference, interpreted or on a GPU."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode

from bmfa import Grid, screened_attention
from bmfa.attention.kernels.reference.tiles import ReferenceTiled
from bmfa.attention.tiling import PROBE_SLOTS, TiledAttention, Tiling
from tiled_cases import NAMED_GRIDS, TiledCase, compare, dense_error, tiled_case

triton = pytest.importorskip("triton")

from bmfa.attention.kernels.triton.tiles import launch, operators  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, in the interpreter

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
SLOW = pytest.mark.slow
# The interpreter computes in NumPy, which has no bfloat16.
HALF_TYPES = (torch.float16, torch.bfloat16) if GPU else (torch.float16,)
DTYPES = (torch.float32, *HALF_TYPES)
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES)


def draw(seed: int, dtype: torch.dtype = torch.float32, **options: Any) -> TiledCase:
    """Draw a case with tiles of the one size that the kernels take."""
    case = tiled_case(seed, dtype, **options)
    tiling, settings = Tiling(case.tiling.grid), dict(case.settings)
    if "expand" in settings:
        settings["expand"] *= tiling.tiles / case.tiling.tiles
    return replace(case, tiling=tiling, settings=settings)


def smooth_case(
    seed: int, shape: tuple[int, int], *, prefix: int = 1, dim: int = 32, heads: int = 1, batch: int = 1,
    dtype: torch.dtype = torch.float32, valid: Tensor | None = None, **budget: float,
) -> TiledCase:  # fmt: skip
    """Tokens that vary slowly, so that errors of tangents are neither 0 nor 1."""
    generator = torch.Generator().manual_seed(seed)
    tiling = Tiling(Grid(*shape))
    size = (3, batch, heads, prefix + tiling.grid.size, dim)
    q, k, v = (torch.randn(size, generator=generator).cumsum(3) / 6).to(dtype)
    settings = {"prefix": prefix, "scale": dim**-0.5, "tau": 1.0, **budget}
    return TiledCase(q, k, v, tiling, settings, valid)


def run(case: TiledCase, **changes: Any) -> TiledAttention:
    """Run the kernels on `DEVICE`, and return the result on the CPU."""
    q, k, v = (x.to(DEVICE) for x in (case.q, case.k, case.v))
    valid = None if case.valid is None else case.valid.to(DEVICE)
    settings = case.settings | changes
    got = operators.tiled_attention(q, k, v, case.tiling, valid=valid, **settings)
    assert got.output.dtype == case.q.dtype and got.probes.dtype == torch.float32
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
        launch.prepare_attention.cache_clear()

    launch.prepare_attention.cache_clear()
    yield change
    launch.prepare_attention.cache_clear()


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The launches that calls use, in the order of the calls."""
    seen: list[Any] = []
    prepare = launch.prepare_attention

    def keep(*arguments: Any) -> Any:
        seen.append(prepare(*arguments))
        return seen[-1]

    monkeypatch.setattr(launch, "prepare_attention", keep)
    return seen


# The reference


@EVERY_DTYPE
@pytest.mark.parametrize("seed", [*range(10), *(pytest.param(n, marks=SLOW) for n in range(10, 60))])
def test_seeded_shapes_equal_the_reference(seed: int, dtype: torch.dtype) -> None:
    check(draw(seed, dtype))
