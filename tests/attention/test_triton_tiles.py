"""The Triton kernels of tiled attention against the float64 reference, interpreted or on a GPU."""

import math

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from bmfa import Grid, screened_attention
from bmfa.attention.kernels import reference
from bmfa.attention.kernels.eager.tiles import tiled_attention
from bmfa.attention.kernels.reference import tiles as reference_tiles
from bmfa.attention.tiling import GAP_CAP, Tiling
from tiled_cases import certificate

triton = pytest.importorskip("triton")

from bmfa.attention.kernels.triton.tiles import operators  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, in the interpreter

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
SLOW = pytest.mark.slow
# Seeds and largest sides. Each shape is compiled first on a GPU; the interpreter is slow on a CPU.
CASES = [(seed, 48) for seed in range(12)]
if not GPU:
    CASES = [*((n, 18) for n in range(8)), *(pytest.param(n, 26, marks=SLOW) for n in range(40))]
# Gaps are stored in float16: losses this near to each other may change places.
NEAR = 2e-3


def tensors(seed, grid, prefix=1, dim=32, heads=2, batch=1, dtype=torch.float32, spread=1.5):
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, heads, prefix + grid.size, dim)
    return tuple(
        (spread * torch.randn(shape, generator=generator)).to(dtype).to(DEVICE) for _ in range(3)
    )


class HalfPrecisionGaps(reference_tiles._Head):
    """The reference with gaps rounded as the kernels store them, in float16 before and after spread."""

    def score_tiles(self, queries):
        scores = super().score_tiles(queries)
        q_spread = reference_tiles._mean_square(self.q[queries] - scores.q_mean) if queries else 0.0
        for tile, gap in scores.gaps.items():
            if gap < GAP_CAP:
                spread = self.factor**2 * q_spread * self.k_spread[tile] / (2 * self.q.shape[1])
                rounded = float(np.float16(gap - spread)) + spread
                scores.gaps[tile] = float(np.float16(min(max(rounded, 0.0), GAP_CAP)))
        return scores


def run(q, k, v, tiling, *, prefix, valid=None, **budget):
    """Return the result of the kernels, the reference with and without rounded gaps, and eager."""
    common = {"prefix": prefix, "scale": q.shape[-1] ** -0.5, **budget}
    result = operators.tiled_attention(q, k, v, tiling, valid=valid, **common)
    assert result.output.dtype == q.dtype
    wide = [x.double().cpu().numpy() for x in (q, k, v)]
    mask = None if valid is None else valid.cpu().numpy()
    exact = reference.tiled_attention(*wide, tiling, valid=mask, **common)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference_tiles, "_Head", HalfPrecisionGaps)
        rounded = reference.tiled_attention(*wide, tiling, valid=mask, **common)
    eager = tiled_attention(q, k, v, tiling, valid=valid, **common)
    return result, rounded, exact, eager


def same_choice(result, oracle):
    """Return (B, H, R): groups that expand the tiles of the reference.

    Others may differ in tiles whose losses are within rounding of the smallest expanded one.
    """
    expanded, expected = result.expanded.cpu(), torch.from_numpy(oracle.expanded)
    losses = torch.from_numpy(oracle.losses)
    same = (expanded == expected).all(-1)
    for batch, head, group in (~same).nonzero().tolist():
        changed = expanded[batch, head, group] != expected[batch, head, group]
        near = losses[batch, head, group][changed]
        chosen = losses[batch, head, group][expected[batch, head, group]]
        threshold = chosen.min() if len(chosen) else near.max()
        assert (near - threshold).abs().max() <= NEAR * threshold
    return same


def queries_of(groups, tiling, prefix, valid):
    """Return (B, H, prefix + N) from (B, H, R) flags; prefix queries are in, missing ones are not."""
    slots = tiling.slot_tokens
    group = torch.empty(tiling.grid.size, dtype=torch.int64)
    of_tile = (torch.arange(tiling.tiles) // tiling.group).unsqueeze(1).expand_as(slots)
    group[slots[slots >= 0]] = of_tile[slots >= 0]
    spatial = groups[:, :, group]
    if valid is not None:
        spatial = spatial & valid.cpu()[:, None]
    return torch.cat((spatial.new_ones(*spatial.shape[:2], prefix), spatial), 2)


def compare(run_results, q, k, v, tiling, prefix, valid=None):
    """Assert that the kernels are at most twice as far from the reference as eager is."""
    result, rounded, exact, eager = run_results
    same = same_choice(result, exact)
    # Losses that are this near are rare: a choice that is wrong in other groups fails above.
    assert same.double().mean() >= 0.9
    queries = queries_of(same & same_choice(eager, exact), tiling, prefix, valid)
    error = errors(result.output, rounded)[queries]
    largest_value = float(v.nan_to_num(0.0).abs().max())
    allowed = 2 * float(errors(eager.output, exact)[queries].max())
    allowed += torch.finfo(torch.float32).eps * largest_value
    if q.dtype != torch.float32:
        allowed += half_rounding(q, k, v, exact)
    assert bool((error <= allowed).all()), (float(error.max()), allowed)  # NaN never passes


def errors(output, oracle):
    return (output.double().cpu() - torch.from_numpy(oracle.output)).abs().amax(-1)


def half_rounding(q, k, v, exact):
    """Bound on the error of what the kernels round to half precision, which eager keeps in float32.

    Mean keys and differences of queries from their mean change a score by eps / 2 of its size each;
    weights, mean values and the first-order matrix change the output by eps / 2 of the values each. The
    residual is stored in bfloat16, of 2^-9 of its size, which is at most that of the values.
    """
    eps = torch.finfo(q.dtype).eps
    score = float(q.norm(dim=-1).max() * k.norm(dim=-1).max()) * q.shape[-1] ** -0.5
    largest_value = float(v.abs().max())
    return (eps / 2 * (3 + 2 * score) + 2.0**-9) * largest_value


def draw(seed, side):
    """Draw a tiling of a grid with sides below `side`, a prefix, a head dimension, a budget, a mask."""
    generator = torch.Generator().manual_seed(seed)

    def pick(*values):
        return values[int(torch.randint(len(values), (1,), generator=generator))]

    height, width = (int(torch.randint(1, side, (1,), generator=generator)) for _ in "hw")
    tiling = Tiling(Grid(height, width))
    budget = {"error": pick(0.02, 0.1, 0.3)}
    if pick(True, False):
        budget = {"expand": pick(0, 1, 2, tiling.tiles // 2, tiling.tiles)}
    valid = None
    if pick(True, False):
        valid = torch.rand((1, tiling.grid.size), generator=generator) < 0.7
        valid[:, int(torch.randint(tiling.grid.size, (1,), generator=generator))] = True
        valid = valid.to(DEVICE)
    return tiling, pick(0, 1, 5), pick(32, 64, 80), budget, valid


def poison(valid, prefix, *tensors):
    """Put NaN into tokens that do not exist."""
    if valid is None:
        return tensors
    exists = torch.cat((valid.new_ones(1, prefix), valid), 1)[:, None, :, None]
    return [x.where(exists, math.nan) for x in tensors]


@pytest.mark.parametrize(("seed", "side"), CASES)
def test_seeded_shapes(seed, side):
    tiling, prefix, dim, budget, valid = draw(seed, side)
    q, k, v = poison(valid, prefix, *tensors(seed, tiling.grid, prefix, dim))
    results = run(q, k, v, tiling, prefix=prefix, valid=valid, **budget)
    compare(results, *poison_free(q, k, v), tiling, prefix, valid)


def poison_free(*tensors):
    return [x.nan_to_num(0.0) for x in tensors]


@pytest.mark.parametrize("dim", [32, 80, *(pytest.param(d, marks=SLOW) for d in (64, 96, 128))])
def test_half_precision(dim):
    tiling = Tiling(Grid(16, 16))
    q, k, v = tensors(dim, tiling.grid, 1, dim, dtype=torch.float16, spread=1.0)
    compare(run(q, k, v, tiling, prefix=1, expand=2), q, k, v, tiling, 1)


def test_every_element_is_written(monkeypatch):
    tiling = Tiling(Grid(13, 21))
    q, k, v = tensors(1, tiling.grid, 2)
    new_empty = torch.Tensor.new_empty

    def poisoned(self, *args, **kwargs):
        fresh = new_empty(self, *args, **kwargs)
        return fresh.fill_(math.nan) if fresh.is_floating_point() else fresh.fill_(255)

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
    results = run(q, k, v, tiling, prefix=2, expand=1)
    compare(results, q, k, v, tiling, 2)


@pytest.mark.parametrize(("seed", "side"), CASES)
def test_certificate_is_the_error_rounded_outward(seed, side):
    tiling, prefix, dim, _, valid = draw(seed, side)
    spread = 1.5 if seed % 4 else 40.0  # scores too large for exponentials without a maximum
    dtype = (torch.float32, torch.float16, torch.bfloat16 if GPU else torch.float16)[seed // 2 % 3]
    q, k, _ = tensors(seed, tiling.grid, prefix, dim, dtype=dtype, spread=spread)
    q, k = poison(valid, prefix, q, k)
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
def test_constant_and_huge_keys(size):
    tiling = Tiling(Grid(16, 16))
    q, k, v = tensors(3, tiling.grid)
    k = torch.ones_like(k) if size == 0.0 else size * k
    results = run(q, k, v, tiling, prefix=1, expand=1)
    compare(results, q, k, v, tiling, 1)
    if size == 0.0:
        assert int(results[0].expanded_count.sum()) == 0  # nothing is lost, nothing is expanded


def test_tiles_in_z_order_are_contiguous():
    grid = Grid(16, 16)
    q, k, v = tensors(4, grid)
    raster = screened_attention(q, k, v, grid=grid, prefix=1, leaves=0.3, backend="triton")
    place = torch.cat((torch.zeros(1, dtype=torch.int64), 1 + grid.z_order)).to(DEVICE)
    turned = (x[:, :, place] for x in (q, k, v))
    z = screened_attention(*turned, grid=grid, prefix=1, leaves=0.3, backend="triton", order="z")
    torch.testing.assert_close(z.output, raster.output[:, :, place], atol=1e-5, rtol=1e-5)
    assert torch.equal(z.tree.split, raster.tree[:, :, place.cpu()].split)


def test_runs_are_equal_to_the_bit():
    grid = Grid(16, 9)
    q, k, v = tensors(5, grid)
    first, second = (
        screened_attention(q, k, v, grid=grid, prefix=1, error=0.1, backend="triton").output
        for _ in "ab"
    )
    assert torch.equal(first, second)


@pytest.mark.parametrize("target", [0.01, 0.1, 0.5])
def test_the_fewest_tiles_that_meet_the_error_are_expanded(target):
    tiling = Tiling(Grid(16, 24))
    q, k, v = tensors(6, tiling.grid, 0, heads=1)
    result, _, oracle, _ = run(q, k, v, tiling, prefix=0, error=target)
    losses, expanded = torch.from_numpy(oracle.losses), result.expanded.cpu()
    limit = -math.expm1(-target)
    coarse_loss = losses.masked_fill(expanded, 0.0).sum(-1)
    assert bool((coarse_loss <= limit * (1 + NEAR)).all())
    smallest = losses.masked_fill(~expanded, math.inf).amin(-1)  # inf where nothing is expanded
    assert bool((coarse_loss + smallest > limit * (1 - NEAR)).all())
    assert bool((smallest >= losses.masked_fill(expanded, 0.0).amax(-1) * (1 - NEAR)).all())


def test_other_tile_sizes_are_refused_with_the_reason():
    q, k, v = tensors(6, Grid(16, 16))
    for tiling in (Tiling(Grid(16, 16), side=4), Tiling(Grid(16, 16), group=1)):
        reason = operators.unsupported_reason(q, k, v, tiling, 1, "raster")
        assert reason is not None and "tiles of 8x8 in groups of 2" in reason
    assert operators.unsupported_reason(q, k, v, Tiling(Grid(16, 16)), 1, "raster") is None


def test_flops_and_fake_tensors():
    grid = Grid(16, 16)
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


@pytest.mark.parametrize("order", ["raster", "z"])
def test_tiles_with_tokens_are_numbered_in_the_order_of_the_tokens(order):
    tiling = Tiling(Grid(128, 128))
    for tile in (0, 1, 5, 130, 255):
        valid = torch.zeros(1, tiling.grid.size, dtype=torch.bool)
        tokens = tiling.slot_tokens[tile]
        if order == "z":
            tokens = torch.arange(tile * tiling.slots, (tile + 1) * tiling.slots)
        valid[0, tokens[17]] = True
        found = operators._tiles_with_tokens(tiling, valid, order, valid)
        assert found.shape == (1, 1, 1, 256)
        assert found.flatten().nonzero().flatten().tolist() == [tile]
