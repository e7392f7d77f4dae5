"""The per-query kernel against the eager path: trees, outputs and limits, interpreted on a CPU."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from bmfa import Grid, load_model, patch, record, rules, screened_attention
from bmfa.data.drawn.badges import draw_badge
from bmfa.trees.rules import parse
from cases import nudged

pytest.importorskip("triton")
from bmfa.attention.kernels.triton.per_query import operators

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GRIDS = ((14, 14), (16, 16), (5, 7), (1, 7), (12, 9), (3, 3), (7, 2))
RULES = (
    "gamma:0.05",
    "gamma:0",
    "exact-gap:0.1",
    "exact-gap:0",
    "mass:0.002",
    "optimal:0.002",
    "optimal:0",
    "quadrant-gap:0.3",
    "quadrant-gap:0",
    "variance:0.3",
    "fixed-depth:2",
    "random-quadrants:0.5",
    "global-mean",
)


def tensors(seed, grid, prefix=1, batch=1, heads=1, queries=20, width=16, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, heads, prefix + grid.size, width)
    q, k, v = (torch.randn(shape, generator=generator) for _ in range(3))
    q = 2 * q[:, :, :queries]
    return [t.to(DEVICE, dtype) for t in (q, k, v)]


def expected(q, k, v, *, rule, **options):
    """Return the eager result in float64, and which trees survive small threshold changes.

    The kernel decides on scores and exponentials of float32: a tree that a change of 5e-4 of the
    threshold alters may rightly differ.
    """
    doubles = [t.double() for t in (q, k, v)]
    result = screened_attention(*doubles, rule=rule, backend="eager", **options)
    settled = torch.ones(result.tree.split.shape[1], dtype=torch.bool, device=q.device)
    for factor in (1 - 5e-4, 1 + 5e-4):
        around = screened_attention(*doubles, rule=nudged(rule, factor), backend="eager", **options)
        settled &= (around.tree.split == result.tree.split).all(0)
    return result, settled


def allowance(q, k, v, *, scale=None, tau=1.0):
    """Return (B, H, 1, 1) bounds on rounding: of weights and outputs in the dtype, of scores in float32.

    A score is a sum of d products of float32 of at most |q| |k|; its error multiplies its share. A
    share below the least normal half number is off by up to 2^-25.
    """
    width = q.shape[-1]
    factor = (width**-0.5 if scale is None else scale) / tau
    score = q.double().norm(dim=-1).amax(-1) * k.double().norm(dim=-1).amax(-1) * abs(factor)
    relative = 2 * (torch.finfo(q.dtype).eps + (width + 8) * 2**-24 * (1 + score))
    largest, total = v.double().abs().amax((-2, -1)), v.double().abs().sum(-2).amax(-1)
    small = 2**-25 * total if q.dtype == torch.float16 else 0.0
    return (relative * largest + small)[..., None, None]


@pytest.mark.parametrize("name", RULES)
def test_trees_and_outputs_are_those_of_the_eager_path(name):
    unsettled = 0
    for seed, size in enumerate(GRIDS):
        grid, rule = Grid(*size), parse(name, seed)
        dtype = (torch.float32, torch.float16)[(seed + len(name)) % 2]
        prefix, tau = (1, 0, 5)[seed % 3], (1.0, 0.7)[seed % 2]
        options = {
            "grid": grid,
            "prefix": prefix,
            "tau": tau,
            "max_depth": (None, None, 1)[seed % 3],
        }
        q, k, v = tensors(seed, grid, prefix, dtype=dtype)
        result = screened_attention(q, k, v, rule=rule, backend="triton", **options)
        oracle, settled = expected(q, k, v, rule=rule, **options)
        assert torch.equal(result.tree.split[:, settled], oracle.tree.split[:, settled]), size
        if oracle.tree.limited is not None:
            assert torch.equal(result.tree.limited[:, settled], oracle.tree.limited[:, settled])
        difference = (result.output.double() - oracle.output).abs()
        within = (difference <= allowance(q, k, v, tau=tau)).all(-1)
        assert within.flatten()[settled].all(), size
        unsettled += int((~settled).sum())
    assert unsettled <= 3  # of 140


def test_the_oracle_agrees():
    grid = Grid(4, 5)
    q, k, v = tensors(1, grid, queries=6)
    for name in ("gamma:0.05", "exact-gap:0.1", "mass:0.01", "optimal:0.01"):
        common = {"grid": grid, "prefix": 1, "rule": parse(name)}
        oracle = screened_attention(q, k, v, backend="reference", **common)
        result = screened_attention(q, k, v, backend="triton", **common)
        assert torch.equal(result.tree.leaf_index, oracle.tree.leaf_index)
        torch.testing.assert_close(result.output, oracle.output, atol=2e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_exact_gap_zero_is_dense_attention(dtype):
    q, k, v = tensors(2, Grid(7, 6), prefix=2, dtype=dtype)
    result = screened_attention(
        q, k, v, grid=Grid(7, 6), prefix=2, rule=rules.ExactGap(0.0), backend="triton"
    )
    dense = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double())
    assert ((result.output.double() - dense).abs() <= allowance(q, k, v)).all()


@pytest.mark.parametrize("name", ["gamma:0", "exact-gap:0", "mass:0", "optimal:0", "variance:0"])
@pytest.mark.parametrize("size", [(6, 6), (14, 3)])
def test_constant_grids_are_not_split_in_vain(name, size):
    grid = Grid(*size)
    q, k, v = tensors(3, grid)
    q, k = q.round(), (99 * k).round()  # exact products: equal keys have equal scores
    k[:, :, 1:] = k[:, :, 1:2]
    tree = screened_attention(q, k, v, grid=grid, prefix=1, rule=parse(name), backend="triton").tree
    whole = screened_attention(q, k, v, grid=grid, prefix=1, rule=parse(name), backend="eager").tree
    assert torch.equal(tree.leaf_count, whole.leaf_count)
    if name != "variance:0":
        assert (tree.leaf_count == 1).all()


def test_a_large_offset_does_not_split_a_constant_half():
    grid = Grid(8, 8)
    q = torch.ones(1, 1, 1, 16, device=DEVICE)
    k = torch.full((1, 1, 64, 16), 625.0 + 1 / 64, device=DEVICE)
    k.view(8, 8, 16)[:, 4:] += 1.0
    result = screened_attention(
        q, k, k, grid=grid, scale=1.0, rule=rules.Gamma(0.0), backend="triton"
    )
    assert int(result.tree.leaf_count) == 4


def test_batch_and_heads_permute_the_result():
    grid = Grid(5, 4)
    q, k, v = tensors(4, grid, batch=2, heads=3, queries=4)
    common = {"grid": grid, "prefix": 1, "rule": rules.Mass(0.01), "backend": "triton"}
    whole = screened_attention(q, k, v, **common)
    batch, heads = torch.tensor([1, 0]), torch.tensor([2, 0, 1])
    moved = screened_attention(*(t[batch][:, heads] for t in (q, k, v)), **common)
    assert torch.equal(moved.output, whole.output[batch][:, heads])
    assert torch.equal(moved.tree.leaf_count, whole.tree.leaf_count[batch][:, heads])


@pytest.mark.parametrize("key_heads", [1, 2])
def test_shared_keys_equal_copies_to_the_bit(key_heads):
    q, k, v = tensors(4, Grid(7, 6), batch=2, heads=4)
    k, v = k[:, :key_heads], v[:, :key_heads]
    options = {"grid": Grid(7, 6), "prefix": 1, "rule": "gamma:0.05", "backend": "triton"}
    got = screened_attention(q, k, v, **options)
    want = screened_attention(
        q, *(x.repeat_interleave(4 // key_heads, 1) for x in (k, v)), **options
    )
    assert torch.equal(got.output, want.output) and torch.equal(got.tree.split, want.tree.split)


def test_strided_inputs_and_z_order():
    grid, rule = Grid(5, 6), rules.Optimal(0.002)
    mixed = torch.randn(2, 32, 3, 2, 24, generator=torch.Generator().manual_seed(5)).to(DEVICE)
    q, k, v = mixed.permute(2, 0, 3, 1, 4)  # as hosts split one projection
    common = {"grid": grid, "prefix": 2, "rule": rule, "backend": "triton"}
    raster = screened_attention(q, k, v, **common).output
    same = screened_attention(*(t.contiguous() for t in (q, k, v)), **common).output
    assert torch.equal(raster, same)
    assert raster.transpose(1, 2).is_contiguous()
    order = torch.cat((torch.arange(2), 2 + grid.z_order)).to(DEVICE)
    z = screened_attention(*(t[:, :, order] for t in (q, k, v)), order="z", **common).output
    torch.testing.assert_close(z, raster[:, :, order], atol=1e-6, rtol=1e-6)
    spread = mixed.transpose(3, 4).contiguous().transpose(3, 4)  # channels are not neighbours
    again = screened_attention(*spread.permute(2, 0, 3, 1, 4), **common).output
    assert torch.equal(raster, again)


@pytest.mark.parametrize("limit", [None, 0, 2, 9])
def test_every_element_is_written_and_nothing_beyond(limit, monkeypatch):
    made = []
    real = operators._empty_outputs

    def poisoned(*settings):
        made.append(
            [t.fill_(float("nan") if t.is_floating_point() else -7) for t in real(*settings)]
        )
        return made[-1]

    monkeypatch.setattr(operators, "_empty_outputs", poisoned)
    grid = Grid(9, 4)
    q, k, v = tensors(6, grid, heads=2, queries=5, width=10)
    result = screened_attention(
        q, k, v, grid=grid, prefix=1, rule=rules.FixedDepth(1), max_depth=limit, backend="triton"
    )
    assert torch.isfinite(result.output).all()
    assert (made[-1][1][:, 0] == 1).all()  # the root alone asks
    assert (made[-1][1][:, 1:] == 0).all()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, in the interpreter
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_show_in_the_outputs_that_read_them(value):
    grid = Grid(6, 6)
    q, k, v = (t.abs() for t in tensors(7, grid, heads=2))
    clean = screened_attention(
        q, k, v, grid=grid, prefix=1, rule=rules.Gamma(0.05), backend="triton"
    )
    k[:, 1, 9] = value
    for name in RULES:
        common = {"grid": grid, "prefix": 1, "rule": parse(name), "backend": "triton"}
        output = screened_attention(q, k, v, **common).output
        assert output[:, 1].isnan().all(), name
        assert output[:, 0].isfinite().all(), name
    q[:, 0, 3] = value
    output = screened_attention(q, k, v, **{**common, "rule": rules.Gamma(0.05)}).output
    assert output[:, 0, 3].isnan().all()
    assert torch.equal(output[:, 0, 4:], clean.output[:, 0, 4:])


def test_trees_are_made_on_demand_and_serve_all_that_reads_them(monkeypatch):
    grid = Grid(6, 6)
    q, k, v = tensors(8, grid)
    common = {"grid": grid, "prefix": 1, "rule": rules.Optimal(0.01)}
    result = screened_attention(q, k, v, backend="triton", **common)
    output, stats, tree = *result, result.tree
    assert output is result.output and tree is result.tree and stats is result.stats
    eager = screened_attention(q, k, v, backend="eager", **common)
    assert stats.leaf_ratio == pytest.approx(eager.stats.leaf_ratio)
    assert (stats.backend, stats.form, stats.why) == ("triton", "repeated", "requested")
    more = {"certificate": True, "audit": 1.0, "fallback": 0.02}
    checked = screened_attention(q, k, v, backend="triton", **common, **more)
    other = screened_attention(q, k, v, backend="eager", **common, **more)
    torch.testing.assert_close(checked.stats.certificate, other.stats.certificate)
    assert checked.stats.fallback == other.stats.fallback > 0
    assert checked.stats.audit.maximum == pytest.approx(other.stats.audit.maximum, rel=1e-2)


GRID = Grid(4, 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rule": parse("gamma-h2:0.1")}, "the rule is gamma-h2:0.1; the kernel looks one level"),
        ({"rule": parse("certified:0.1")}, "the rule is certified:0.1; the kernel takes ExactGap"),
        ({"rule": parse("fixed-blocks:2")}, "the rule is fixed-blocks:2"),
        ({"rule": parse("mass-coarse:0.1")}, "the kernel takes the exact Z"),
        (
            {"rule": rules.Optimal(error=0.1)},
            "the rule is optimal-error:0.1; the kernel takes a penalty",
        ),
        ({"rule": rules.Optimal(leaves=3)}, "the rule is optimal-leaves:3"),
        (
            {"rule": parse("gamma:0.1"), "valid": torch.ones(16, dtype=torch.bool)},
            "takes no padding",
        ),
    ],
)
def test_what_is_not_served_is_refused_with_the_reason_and_taken_by_auto(change, message):
    q, k, v = tensors(0, GRID)
    change = {n: t.to(DEVICE) if isinstance(t, torch.Tensor) else t for n, t in change.items()}
    common = {"grid": GRID, "prefix": 1, **change}
    with pytest.raises(ValueError, match=message):
        screened_attention(q, k, v, backend="triton", **common)
    stats = screened_attention(q, k, v, **common).stats
    assert stats.backend == "eager" and stats.why.startswith("auto: eager")
    if DEVICE == "cuda":
        assert message.split(";")[0] in stats.why


def test_inputs_that_are_not_served_are_refused_with_the_reason():
    common = {"rule": rules.Gamma(0.1), "backend": "triton", "prefix": 1}
    for grid, words in (
        (Grid(2, 2), "2x2; the kernel takes a longer side of 3 to 16"),
        (Grid(17, 4), "17x4"),
    ):
        with pytest.raises(ValueError, match=words):
            screened_attention(*tensors(0, grid), grid=grid, **common)
    q, k, v = tensors(0, GRID)
    with pytest.raises(ValueError, match="float64; the kernel takes float16"):
        screened_attention(q.double(), k.double(), v.double(), grid=GRID, **common)
    with pytest.raises(ValueError, match="gradients are required"):
        screened_attention(q.requires_grad_(), k, v, grid=GRID, **common)
    with torch.no_grad():
        assert screened_attention(q, k, v, grid=GRID, **common).output.isfinite().all()
    with pytest.raises(ValueError, match="head dimension is 200"):
        screened_attention(*tensors(0, GRID, width=200), grid=GRID, **common)
    with pytest.raises(ValueError, match="max_depth is -1"):
        screened_attention(q, k, v, grid=GRID, max_depth=-1, **common)


@pytest.mark.skipif(DEVICE == "cuda", reason="auto takes the kernel on CUDA")
def test_auto_never_takes_the_interpreter():
    q, k, v = tensors(0, GRID)
    assert (
        screened_attention(q, k, v, grid=GRID, prefix=1, rule=rules.Gamma(0.1)).stats.backend
        == "eager"
    )


def test_the_operator_is_known_to_compilers_and_flop_counters():
    q, k, v = tensors(9, GRID, heads=2, queries=5)
    slots, table = operators.quadtree_tables(GRID, 1, "raster", q.device)
    settings = (q, k, v, slots, table, None, "gamma", 0.1, False, 0.25, 1, 2, 2)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.bmfa.screen.default, settings, test_utils=checks)
    with FlopCounterMode(display=False) as counter:
        screened_attention(q, k, v, grid=GRID, prefix=1, rule=rules.Gamma(0.1), backend="triton")
    assert counter.get_total_flops() == 2 * 2 * 5 * 17 * (16 + 16)


@pytest.mark.slow
def test_a_patched_model_runs_on_the_kernel():
    model, logits = load_model("embedded"), {}
    model.model.to(DEVICE)
    pixels = model.preprocess(draw_badge(0, 3).pixels)[None].to(DEVICE)
    for backend in ("eager", "triton"):
        patch(model.model, rule="optimal:0.002", layers="last-1", backend=backend)
        with torch.no_grad(), record(model.model) as recording:
            logits[backend] = model.model(pixels)
        (layer,) = recording.layers.values()
        assert layer.stats[0].backend == backend
        assert 0.02 < recording.leaf_ratio < 0.9
    torch.testing.assert_close(logits["triton"], logits["eager"], atol=1e-3, rtol=1e-3)
