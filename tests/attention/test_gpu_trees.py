"""The per-query kernel on a CUDA device: sizes, dtypes, and no synchronization with the host."""

import pytest
import torch

from bmfa import Grid, screened_attention
from bmfa.trees.rules import parse
from cases import nudged

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
RULES = (
    "gamma:0.005",
    "gamma:0",
    "exact-gap:0.1",
    "exact-gap:0",
    "mass:0.002",
    "optimal:0.002",
    "optimal:0",
    "quadrant-gap:0.3",
    "variance:0.3",
    "fixed-depth:2",
    "random-quadrants:0.5",
    "global-mean",
)


def tensors(seed, batch, heads, tokens, width, dtype):
    """Return q, k, v as views of one projection, as models have them."""
    generator = torch.Generator("cuda").manual_seed(seed)
    shape = (batch, tokens, 3, heads, width)
    mixed = torch.randn(shape, device="cuda", generator=generator).to(dtype)
    q, k, v = mixed.permute(2, 0, 3, 1, 4)
    return 2 * q, k, v


def check(q, k, v, rule, **options):
    """Trees equal to those of float64 where the threshold may move, outputs as good as dense ones."""
    result = screened_attention(q, k, v, rule=rule, backend="triton", **options)
    doubles = [t.double() for t in (q, k, v)]
    exact = screened_attention(*doubles, rule=rule, backend="eager", **options)
    settled = torch.ones(exact.tree.split.shape[1], dtype=torch.bool, device="cuda")
    for factor in (1 - 5e-4, 1 + 5e-4):
        around = screened_attention(*doubles, rule=nudged(rule, factor), backend="eager", **options)
        settled &= (around.tree.split == exact.tree.split).all(0)
    assert settled.double().mean() > 0.95
    different = (result.tree.split != exact.tree.split).any(0)
    # At a threshold of 0 a spread within the rounding of float32 is none, and moving it shows nothing.
    zero = str(rule).endswith(":0")
    assert int((different & settled).sum()) <= (1e-3 * len(settled) if zero else 0)
    attend = torch.nn.functional.scaled_dot_product_attention
    dense = attend(*doubles)
    allowed = (attend(q, k, v).double() - dense).norm() / dense.norm()
    same = ~different.view(exact.tree.shape)
    error = (result.output.double() - exact.output)[same].norm() / exact.output[same].norm()
    # Products of float32 are three of TF32, which leave out 2^-22; scores go up to about 16.
    assert error <= 2 * allowed + (16 * 2**-22 if q.dtype == torch.float32 else 0.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", RULES)
def test_trees_and_outputs_at_the_size_of_deit(name, dtype):
    check(*tensors(0, 2, 3, 197, 64, dtype), parse(name), grid=Grid(14, 14), prefix=1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("size", [(3, 3), (4, 3), (7, 7), (8, 8), (12, 9), (16, 16)])
@pytest.mark.parametrize("name", [*RULES, "mass:0.02", "optimal:0.02"])
def test_every_rule_at_every_depth(name, size, dtype):
    """A compiler may lay out each number of levels in its own way, and get one of them wrong."""
    grid = Grid(*size)
    check(*tensors(5, 2, 2, 3 + grid.size, 64, dtype), parse(name), grid=grid, prefix=3)


@pytest.mark.parametrize("size", [(16, 16), (7, 7), (12, 9), (1, 13), (3, 3), (16, 2)])
@pytest.mark.parametrize("name", ["gamma:0.02", "optimal:0.002", "quadrant-gap:0.3"])
def test_other_grids_prefixes_widths_and_limits(name, size):
    grid = Grid(*size)
    for seed, (prefix, width, limit) in enumerate(((0, 32, None), (5, 48, 1), (20, 128, None))):
        tokens = tensors(seed, 2, 2, prefix + grid.size, width, torch.float16)
        options = {"grid": grid, "prefix": prefix, "max_depth": limit, "tau": 0.8}
        if size == (7, 7) and width == 32:
            with pytest.raises(ValueError, match="mixes up"):
                screened_attention(*tokens, rule=parse(name), backend="triton", **options)
        else:
            check(*tokens, parse(name), **options)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_auto_takes_the_kernel_and_waits_for_nothing():
    q, k, v = tensors(1, 4, 3, 197, 64, torch.float16)
    common = {"grid": Grid(14, 14), "prefix": 1, "rule": parse("gamma:0.005")}
    assert screened_attention(q, k, v, **common).stats.backend == "triton"
    try:
        torch.cuda.set_sync_debug_mode("error")
        screened_attention(q, k, v, **common)
    finally:
        torch.cuda.set_sync_debug_mode("default")
