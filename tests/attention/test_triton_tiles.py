"""The Triton kernels of tiled attention against the float64 oracle: in the interpreter, or on a GPU."""

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from bmfa import Grid, screened_attention
from bmfa.attention.kernels import reference
from bmfa.attention.tiling import GAP_CAP, Tiling
from tiled_cases import certificate

triton = pytest.importorskip("triton")

from bmfa.attention.kernels.triton.tiles import operators  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, in the interpreter

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
CASES = 12 if GPU else 40  # every shape of kernel is compiled first on a GPU
# Gaps are kept in half precision: losses so near to each other may change places.
NEAR = 2e-3


def tensors(seed, grid, prefix=1, dim=32, heads=2, batch=1, dtype=torch.float32, spread=1.5):
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, heads, prefix + grid.size, dim)
    return tuple(
        (spread * torch.randn(shape, generator=generator)).to(dtype).to(DEVICE) for _ in range(3)
    )


def run(q, k, v, tiling, *, prefix, valid=None, **asked):
    scale = q.shape[-1] ** -0.5
    result = operators.tiled_attention(
        q, k, v, tiling, prefix=prefix, scale=scale, valid=valid, **asked
    )
    assert result.output.dtype == q.dtype
    oracle = reference.tiled_attention(
        *(x.double().cpu().numpy() for x in (q, k, v)),
        tiling,
        prefix=prefix,
        scale=scale,
        valid=None if valid is None else valid.cpu().numpy(),
        **asked,
    )
    return result, oracle


def settled_queries(result, oracle, tiling, prefix):
    """Which queries' groups chose the oracle's tiles; the others' differ only in near losses."""
    marks, expected = result.expanded.cpu(), torch.from_numpy(oracle.expanded)
    losses = torch.from_numpy(oracle.losses)
    same = (marks == expected).all(-1)
    for place in (~same).nonzero().tolist():
        batch, head, group = place
        changed = marks[batch, head, group] != expected[batch, head, group]
        near = losses[batch, head, group][changed]
        chosen = losses[batch, head, group][expected[batch, head, group]]
        threshold = chosen.min() if len(chosen) else near.max()
        assert (near - threshold).abs().max() <= NEAR * threshold
    groups = torch.empty(tiling.grid.size, dtype=torch.int64)
    slots = tiling.slot_tokens
    of_tile = (torch.arange(tiling.tiles) // tiling.group).unsqueeze(1).expand_as(slots)
    groups[slots[slots >= 0]] = of_tile[slots >= 0]
    return torch.cat((same.new_ones(*same.shape[:2], prefix), same[:, :, groups]), 2)


def compare(result, oracle, tiling, prefix, tolerance, valid=None):
    settled = settled_queries(result, oracle, tiling, prefix)
    if valid is not None:
        before = valid.new_ones(len(valid), prefix)
        settled = settled & torch.cat((before, valid), 1).cpu()[:, None]
    expected = torch.from_numpy(oracle.output)
    gap = (result.output.double().cpu() - expected).abs().amax(-1)
    assert settled.float().mean() > 0.5
    # NaN never passes.
    assert bool((gap[settled] <= tolerance * (1 + expected.abs().amax())).all())


def drawn(seed):
    """A grid, prefix, head dim and question, from the number of the case."""
    generator = torch.Generator().manual_seed(seed)

    def pick(*values):
        return values[int(torch.randint(len(values), (1,), generator=generator))]

    side = 48 if GPU else 26
    height, width = (int(torch.randint(1, side, (1,), generator=generator)) for _ in "hw")
    tiling = Tiling(Grid(height, width))
    asked = {"error": pick(0.02, 0.1, 0.3)}
    if pick(True, False):
        asked = {"expand": pick(0, 1, 2, tiling.tiles // 2, tiling.tiles)}
    valid = None
    if pick(True, False):
        valid = torch.rand((1, tiling.grid.size), generator=generator) < 0.7
        valid[:, int(torch.randint(tiling.grid.size, (1,), generator=generator))] = True
        valid = valid.to(DEVICE)
    return tiling, pick(0, 1, 5), pick(32, 64, 80), asked, valid


@pytest.mark.parametrize("seed", range(CASES))
def test_seeded_shapes(seed):
    tiling, prefix, dim, asked, valid = drawn(seed)
    q, k, v = tensors(seed, tiling.grid, prefix, dim)
    if valid is not None:
        hidden = torch.cat((valid.new_ones(1, prefix), valid), 1)[:, None, :, None]
        k, v = (x.where(hidden, math.nan) for x in (k, v))  # what does not exist may hold anything
        q = q.where(hidden, math.nan)
    # Single precision: products of about 10 and sums of exponentials, of relative error 2^-22 each.
    result, oracle = run(q, k, v, tiling, prefix=prefix, valid=valid, **asked)
    compare(result, oracle, tiling, prefix, 2e-4, valid)


@pytest.mark.parametrize("dim", [32, 64, 80, 96, 128])
def test_half_precision(dim):
    tiling = Tiling(Grid(16, 24))
    q, k, v = tensors(dim, tiling.grid, 1, dim, dtype=torch.float16, spread=1.0)
    result, oracle = run(q, k, v, tiling, prefix=1, expand=2)
    exact = screened_attention(
        *(x.float() for x in (q, k, v)), grid=tiling.grid, prefix=1, form="tiled", backend="eager",
        leaves=float((2 * 63 + tiling.tiles + 0.5) / tiling.grid.size),
    ).output.half()  # fmt: skip
    rounding = (exact.double().cpu() - torch.from_numpy(oracle.output)).abs().max()
    # The mean keys, values and weights are rounded too, each by 2^-11 of values of a few units.
    compare(result, oracle, tiling, 1, max(2 * float(rounding), 8 * 2.0**-11))


def test_every_element_is_written(monkeypatch):
    tiling = Tiling(Grid(13, 21))
    q, k, v = tensors(1, tiling.grid, 2)
    new_empty = torch.Tensor.new_empty

    def poisoned(self, *args, **kwargs):
        fresh = new_empty(self, *args, **kwargs)
        return fresh.fill_(math.nan) if fresh.is_floating_point() else fresh.fill_(255)

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
    result, oracle = run(q, k, v, tiling, prefix=2, expand=1)
    compare(result, oracle, tiling, 2, 2e-4)


@pytest.mark.parametrize("seed", range(CASES // 2))
def test_certificate_is_the_error_rounded_outward(seed):
    tiling, prefix, dim, _, valid = drawn(seed)
    spread = 1.5 if seed % 4 else 40.0  # beyond what needs no maximum
    dtype = (torch.float32, torch.float16, torch.bfloat16 if GPU else torch.float16)[seed // 2 % 3]
    q, k, _ = tensors(seed, tiling.grid, prefix, dim, dtype=dtype, spread=spread)
    if valid is not None:
        hidden = torch.cat((valid.new_ones(1, prefix), valid), 1)[:, None, :, None]
        q, k = (x.where(hidden, math.nan) for x in (q, k))
    share = (0.0, 0.4, 1.0)[seed % 3]
    generator = torch.Generator().manual_seed(seed)
    marks = torch.rand(1, 2, tiling.groups, tiling.tiles, generator=generator) < share
    settings = {"prefix": prefix, "scale": dim**-0.5, "tau": 0.7}
    bound = certificate("triton", q, k, tiling, marks.to(DEVICE), valid=valid, **settings)
    wide = (x.double().cpu().numpy() for x in (q, k))
    mask = None if valid is None else valid.cpu()
    error = reference.tiled_error(*wide, marks.numpy(), tiling, valid=mask, **settings)
    above = bound.cpu().numpy() - error
    # Scores of up to |q| |k|, each a sum of at most 80 products and 64 of them in a mean.
    norms = [float(x.float().nan_to_num(0.0).norm(dim=-1).max()) for x in (q, k)]
    largest = math.prod(norms) * dim**-0.5
    assert (above >= 0).all() and above.max() < 4 * (largest + 1) * (80 + 64 + 16) * 2.0**-22
    assert share < 1.0 or not bool(bound.any())


def test_what_is_no_number_is_certified_as_unknown():
    tiling = Tiling(Grid(8, 9))
    q, k, _ = tensors(0, tiling.grid, 0)
    marks = torch.zeros(1, 2, 1, 2, dtype=torch.bool, device=DEVICE)
    for size in (1e25, 1e-25):
        bound = certificate("triton", size * q, k / size, tiling, marks, prefix=0, scale=0.2)
        assert not bool(bound.isnan().any()) and bool((bound > 0).all())


def test_full_list_is_dense_attention():
    grid = Grid(20, 12)
    q, k, v = tensors(2, grid)
    dense = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    whole = screened_attention(
        q, k, v, grid=grid, prefix=1, leaves=1.0, backend="triton", form="tiled"
    )
    assert whole.stats.density == 1.0 and whole.stats.leaf_ratio == 1.0
    torch.testing.assert_close(whole.output, dense, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("size", [0.0, 300.0])
def test_constant_and_huge_keys_stay_finite(size):
    tiling = Tiling(Grid(16, 16))
    q, k, v = tensors(3, tiling.grid)
    k = torch.ones_like(k) if size == 0.0 else size * k
    result, oracle = run(q, k, v, tiling, prefix=1, expand=1)
    assert bool(result.output.isfinite().all())
    if size == 0.0:
        assert int(result.expanded_count.sum()) == 0  # nothing is lost, nothing is expanded
        compare(result, oracle, tiling, 1, 2e-4)


def test_tiles_in_z_order_are_contiguous():
    grid = Grid(32, 32)
    q, k, v = tensors(4, grid)
    raster = screened_attention(q, k, v, grid=grid, prefix=1, leaves=0.2, backend="triton")
    place = torch.cat((torch.zeros(1, dtype=torch.int64), 1 + grid.z_order)).to(DEVICE)
    turned = (x[:, :, place] for x in (q, k, v))
    z = screened_attention(*turned, grid=grid, prefix=1, leaves=0.2, backend="triton", order="z")
    torch.testing.assert_close(z.output, raster.output[:, :, place], atol=1e-5, rtol=1e-5)
    assert torch.equal(z.tree.split, raster.tree[:, :, place.cpu()].split)


def test_runs_are_equal_to_the_bit():
    grid = Grid(24, 17)
    q, k, v = tensors(5, grid)
    first, second = (
        screened_attention(q, k, v, grid=grid, prefix=1, error=0.1, backend="triton").output
        for _ in "ab"
    )
    assert torch.equal(first, second)


def test_error_is_met_by_every_representative():
    tiling = Tiling(Grid(24, 24))
    q, k, v = tensors(6, tiling.grid, 0)
    for target in (0.01, 0.1, 0.5):
        result, oracle = run(q, k, v, tiling, prefix=0, error=target)
        kept = torch.from_numpy(oracle.losses).masked_fill(result.expanded.cpu(), 0.0).sum(-1)
        assert bool((kept <= -math.expm1(-target) * (1 + NEAR)).all())
    assert GAP_CAP == 4.0


def test_flops_and_fake_tensors():
    grid = Grid(32, 32)
    q, k, v = tensors(7, grid)
    with FlopCounterMode(display=False) as counter:
        screened_attention(q, k, v, grid=grid, prefix=1, leaves=0.1, backend="triton")
    dense = 4 * q.numel() * q.shape[2]
    assert 0 < counter.get_total_flops() < dense
    with torch._subclasses.FakeTensorMode():
        fakes = (torch.empty(1, 2, 1025, 32) for _ in "qkv")
        output, counts, words = operators.operator(
            *fakes, None, 32, 32, 1, 0.2, None, 1, False
        )  # fmt: skip
    assert output.shape == (1, 2, 1025, 32) and counts.shape == (2, 8) and words.shape == (2, 8, 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dim": 48}, "head dimension is 48"),
        ({"dtype": torch.float64}, "float64"),
        ({"strided": True}, "not contiguous"),
        ({"order": "z"}, "Z-order"),
        ({"grad": True}, "gradients"),
    ],
)
def test_refusals_say_why(change, message):
    grid = Grid(16, 24)
    q, k, v = tensors(8, grid, dim=change.get("dim", 32), dtype=change.get("dtype", torch.float32))
    if "strided" in change:
        q = q.transpose(2, 3).contiguous().transpose(2, 3)
    if "grad" in change:
        q.requires_grad_()
    options = {"grid": grid, "prefix": 1, "error": 0.1, "order": change.get("order", "raster")}
    with pytest.raises(ValueError, match=message):
        screened_attention(q, k, v, backend="triton", **options)
    ran = screened_attention(q, k, v, **options)
    assert ran.stats.backend != "triton" and ran.output.isfinite().all()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiles_into_one_graph():
    grid = Grid(16, 16)
    q, k, v = tensors(9, grid)

    def attend(q, k, v):
        return screened_attention(q, k, v, grid=grid, prefix=1, leaves=0.4, backend="triton").output

    compiled = torch.compile(attend, fullgraph=True, backend="inductor" if GPU else "aot_eager")
    assert torch.equal(compiled(q, k, v), attend(q, k, v))


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
def test_cuda_graph_gives_the_same():
    grid = Grid(64, 64)
    q, k, v = tensors(9, grid, dim=64, dtype=torch.bfloat16)

    def attend():
        return screened_attention(q, k, v, grid=grid, prefix=1, leaves=0.1, backend="triton").output

    expected = attend()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attend()
    graph.replay()
    assert torch.equal(captured, expected)
