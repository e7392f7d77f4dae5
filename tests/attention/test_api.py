"""Screened attention: the eager backend against the float64 oracle, forms, errors, gradients."""

import itertools
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch

from bmfa import Grid, certify, rules, screened_attention
from bmfa.attention import result as results
from bmfa.attention.call import Call
from bmfa.attention.kernels.eager import per_query, tiles
from bmfa.attention.result import ErrorEstimate, Stats
from bmfa.attention.tiling import TiledAttention
from bmfa.trees.keys import query_chunks
from bmfa.trees.layout import quadtree_layout, tile_layout
from bmfa.trees.pyramid import _full_counts
from bmfa.trees.rules import parse
from bmfa.trees.tree import Tree
from cases import nudged
from tree_oracle import tree_attention

GRIDS = ((1, 1), (1, 7), (2, 3), (4, 4), (5, 7), (7, 7))
RULES = (
    "gamma:0.05",
    "gamma-h2:0.02",
    "exact-gap:0.1",
    "certified:0.2",
    "mass:0.005",
    "mass-coarse:0.005",
    "optimal:0.003",
    "optimal-leaves:0.3",
    "optimal-error:0.02",
    "fixed-depth:1",
    "fixed-blocks:2",
    "quadrant-gap:0.3",
    "variance:0.3",
    "random-quadrants:0.5",
    "global-mean",
)
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def tensors(seed, grid, prefix=1, batch=2, heads=2, width=8, dtype=torch.float64, sharpness=2.0):
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, heads, prefix + grid.size, width)
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3))
    return (sharpness * q).to(dtype), k.to(dtype), v.to(dtype)


def random_mask(seed, batch, grid):
    mask = torch.rand(batch, grid.size, generator=torch.Generator().manual_seed(seed)) < 0.7
    mask[:, seed % grid.size] = True
    return mask


def equals_oracle(result, oracle, atol=1e-12):
    """True if all trees are those of the oracle; the outputs must then be close."""
    index = result.tree.leaf_index.flatten(0, -2).tolist()
    if index != [tree.leaf_index().ravel().tolist() for tree in oracle.trees]:
        return False
    np.testing.assert_allclose(result.output.numpy(), oracle.output, atol=atol, rtol=atol)
    return True


def test_trees_and_outputs_equal_the_oracle():
    for name, (seed, size) in itertools.product(RULES, enumerate(GRIDS)):
        rule, prefix = parse(name, seed), seed % 3
        q, k, v = tensors(seed, Grid(*size), prefix)
        tau, valid = (1.0, 0.7)[seed % 2], (None, random_mask(seed, 2, Grid(*size)))[seed // 2 % 2]
        common = {"prefix": prefix, "tau": tau, "valid": valid}
        oracle = tree_attention(q, k, v, size, rule, **common)
        result = screened_attention(q, k, v, grid=size, rule=rule, **common)
        assert equals_oracle(result, oracle), (name, size)


@pytest.mark.slow
def test_seeded_cases_equal_the_oracle():
    ties = 0
    for seed in range(1000):
        generator = np.random.default_rng(seed)
        size = tuple(int(side) for side in generator.integers(1, 6, size=2))
        rule, prefix = parse(RULES[seed % len(RULES)], seed), int(generator.integers(0, 3))
        width = int(generator.integers(1, 9))
        q, k, v = tensors(seed, Grid(*size), prefix, batch=1, heads=1, width=width)
        q = q[:, :, :2] if q.shape[2] > 1 else q
        result = screened_attention(q, k, v, grid=size, prefix=prefix, rule=rule)
        if not equals_oracle(result, tree_attention(q, k, v, size, rule, prefix=prefix)):
            around = (
                tree_attention(q, k, v, size, nudged(rule, factor), prefix=prefix)
                for factor in (1 - 1e-9, 1 + 1e-9)
            )
            assert any(equals_oracle(result, one) for one in around), seed
            ties += 1
    assert ties <= 5


@pytest.mark.parametrize("dtype", DTYPES)
def test_exact_gap_zero_is_dense_attention(dtype):
    grid = Grid(5, 7)
    q, k, v = tensors(0, grid, dtype=dtype)
    result = screened_attention(q, k, v, grid=grid, prefix=1, rule=rules.ExactGap(0.0))
    dense = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double())
    assert result.output.dtype == dtype
    eager_error = (
        torch.nn.functional.scaled_dot_product_attention(q, k, v).double() - dense
    ).norm() / dense.norm()
    error = (result.output.double() - dense).norm() / dense.norm()
    # SDPA in float64 is its own reference, so the allowance is a few roundings of what we work in.
    working = torch.float64 if dtype == torch.float64 else torch.float32
    assert error <= 2 * eager_error + 8 * torch.finfo(working).eps


@pytest.mark.parametrize("name", ["fixed-depth:1", "optimal-leaves:3", "exact-gap:0"])
def test_gradients_by_autograd(name):
    grid = Grid(2, 3)
    inputs = [t.requires_grad_() for t in tensors(1, grid, batch=1, heads=1, width=2)]

    def attend(q, k, v):
        return screened_attention(q, k, v, grid=grid, prefix=1, rule=parse(name)).output

    assert torch.autograd.gradcheck(attend, inputs)


@pytest.mark.parametrize("masked", [False, True])
def test_an_exact_gap_of_zero_has_the_gradients_of_attention_where_keys_tie(masked):
    """A block of equal keys is one leaf, which loses nothing; the gradients of its keys differ."""
    grid = Grid(8, 8)
    q, k, v = tensors(3, grid, batch=2, heads=2, width=4)
    k[:, :, 1 : 1 + 16] = k[:, :, 1:2]
    k[:, :, 40:44] = k[:, :, 40:41] * (1 + 1e-15)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    valid = mask = None
    if masked:
        valid = torch.rand(2, grid.size, generator=torch.Generator().manual_seed(0)) > 0.2
        mask = torch.cat((valid.new_ones(2, 1), valid), 1)[:, None, None]
    rule = rules.ExactGap(0.0)
    got = screened_attention(q, k, v, grid=grid, prefix=1, rule=rule, valid=valid)
    assert int(got.tree.leaf_count.min()) < grid.size
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    seen = torch.ones_like(q[:, :1, :, :1]) if mask is None else mask.mT.to(q.dtype)
    for grads in zip(
        torch.autograd.grad((got.output * seen).square().sum(), inputs),
        torch.autograd.grad((exact * seen).square().sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-12)


def test_gradients_with_padding_are_finite_and_zero_on_it():
    grid = Grid(3, 3)
    q, k, v = (t.requires_grad_() for t in tensors(2, grid, prefix=0, batch=1))
    valid = torch.ones(9, dtype=torch.bool)
    valid[5] = False
    output = screened_attention(q, k, v, grid=grid, valid=valid, rule=rules.FixedDepth(1)).output
    output.square().sum().backward()
    assert all(torch.isfinite(t.grad).all() for t in (q, k, v))
    assert (k.grad[:, :, 5] == 0).all() and (v.grad[:, :, 5] == 0).all()


@pytest.mark.parametrize("name", ["gamma:0.05", "fixed-blocks:2"])
def test_gradients_after_a_first_call_in_inference_mode(name):
    for cached in (quadtree_layout, tile_layout, _full_counts):
        cached.cache_clear()  # as in a new process
    grid = Grid(5, 6)
    common = {"grid": grid, "prefix": 1, "rule": parse(name)}
    inputs = tensors(4, grid)
    with torch.inference_mode():
        before = screened_attention(*inputs, **common)
        layouts = [before.tree.layout, quadtree_layout(grid)]
        levels = [level for layout in layouts for level in layout.levels]
        cached = [value for level in levels for value in vars(level).values()]
        cached += [layout.token_rank for layout in layouts]
    assert not any(value.is_inference() for value in cached if isinstance(value, torch.Tensor))
    q, k, v = (t.requires_grad_() for t in inputs)
    after = screened_attention(q, k, v, **common).output
    after.square().sum().backward()
    torch.testing.assert_close(after, before.output)


@pytest.mark.parametrize(
    "criterion",
    [{"rule": "optimal-leaves:0.4"}, {"allow_dense": False, "leaves": 0.4}, {"leaves": 0.4}],
    ids=["tree", "tiled", "dense"],
)
def test_padding_may_hold_anything(criterion, request):
    grid = Grid(12, 12)
    q, k, v = tensors(5, grid, prefix=1)
    valid = random_mask(5, 2, grid)
    dirty = [t.clone() for t in (k, v)]
    spatial = [t[:, :, 1:] for t in dirty]
    for tensor in spatial:
        tensor[~valid[:, None].expand(-1, 2, -1)] = 1e30
    common = {"grid": grid, "prefix": 1, "valid": valid, **criterion}
    clean = screened_attention(q, k, v, **common)
    assert clean.stats.form == request.node.callspec.id
    output = screened_attention(q, *dirty, **common).output
    queries = torch.cat((valid.new_ones(2, 1), valid), 1)[:, None, :, None]
    assert torch.equal(output.where(queries, 0.0), clean.output.where(queries, 0.0))
    absent = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    assert not torch.allclose(absent[:, :, 0], clean.output[:, :, 0])  # the mask matters


def test_heads_and_batch_permute_the_result():
    grid = Grid(4, 5)
    q, k, v = tensors(7, grid, batch=3, heads=4)
    whole = screened_attention(q, k, v, grid=grid, prefix=1, rule=rules.Gamma(0.05))
    batch, heads = torch.tensor([2, 0, 1]), torch.tensor([3, 1, 0, 2])
    moved = [t[batch][:, heads] for t in (q, k, v)]
    permuted = screened_attention(*moved, grid=grid, prefix=1, rule=rules.Gamma(0.05))
    torch.testing.assert_close(permuted.output, whole.output[batch][:, heads])
    assert torch.equal(permuted.tree.leaf_count, whole.tree.leaf_count[batch][:, heads])


def test_chunk_size_does_not_change_the_output(monkeypatch):
    chunks = []

    def counted(*sizes):
        chunks.append(list(query_chunks(*sizes)))
        return chunks[-1]

    monkeypatch.setattr(per_query, "query_chunks", counted)
    grid = Grid(6, 6)
    q, k, v = tensors(9, grid, heads=3)
    common = {"grid": grid, "prefix": 1, "rule": "optimal-leaves:0.3"}
    whole = screened_attention(q, k, v, **common).output
    monkeypatch.setattr(per_query, "CHUNK_ELEMENTS", 200)
    parts = screened_attention(q, k, v, **common).output
    assert len(chunks[0]) == 1 and len(chunks[1]) > 6 * 4  # several of each head's 37 queries
    torch.testing.assert_close(parts, whole)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("masked", [False, True])
def test_the_energy_bound_is_never_below_the_error(name, masked):
    for seed, sharpness in enumerate((0.1, 2.0, 30.0)):
        grid = Grid(6, 7)
        q, k, v = tensors(seed, grid, prefix=2, sharpness=sharpness)
        valid = random_mask(seed, 2, grid) if masked else None
        rule = parse(name, seed)
        common = {"grid": grid, "prefix": 2, "rule": rule, "valid": valid}
        result = screened_attention(q, k, v, **common)
        bound = certify(q, k, v, result).energy
        oracle = tree_attention(q, k, v, (6, 7), rule, prefix=2, valid=valid)
        error = torch.from_numpy(oracle.error)
        seen = torch.ones(1, 1, 1) if valid is None else torch.cat((valid.new_ones(2, 2), valid), 1)
        seen = seen.view(-1, 1, seen.shape[-1]).expand_as(error) > 0
        assert (bound >= error)[seen].all()
        torch.testing.assert_close(bound[seen], error[seen], atol=1e-9, rtol=1e-9)


def test_the_error_target_is_met_for_every_query():
    grid = Grid(7, 7)
    q, k, v = tensors(11, grid)
    for target in (0.0, 0.01, 0.2):
        result = screened_attention(q, k, v, grid=grid, prefix=1, rule=rules.Optimal(error=target))
        assert float(certify(q, k, v, result).energy.max()) <= target + 1e-10


def test_the_output_stays_within_its_bound():
    grid = Grid(7, 7)
    q, k, v = tensors(12, grid, prefix=0)
    result = screened_attention(q, k, v, grid=grid, rule=rules.Optimal(leaves=0.2))
    bound, energy = certify(q, k, v, result)
    dense = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    distance = (result.output - dense).norm(dim=-1)
    longest = v.norm(dim=-1).amax(-1, keepdim=True)
    assert (distance <= longest * (2 * energy).sqrt()).all()
    assert (distance <= bound + 1e-12).all()
    diameter = torch.cdist(v, v).amax((-1, -2)).unsqueeze(-1)
    assert (bound <= diameter * (energy / 2).sqrt() + 1e-9).all()  # Pinsker's inequality


def test_the_defaults_report_what_ran():
    grid = Grid(4, 4)
    q, k, v = tensors(15, grid)
    result = screened_attention(q, k, v, grid=grid, prefix=1)
    output, stats = result
    assert output.shape == q.shape
    assert result.tree.shape == (2, 2, 17) and result.tree is result.tree
    assert (stats.backend, stats.form, stats.setting) == ("dense", "dense", "error 0.03")
    assert stats.leaf_ratio == stats.density == 1.0
    assert "16" in stats.reason
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(output, exact)


def probes_of(rows):
    return torch.tensor(rows, dtype=torch.float64).view(1, 1, -1, 3)


def test_the_error_is_a_ratio_of_weighted_sums():
    rows = [[4.0, 100.0, 64.0], [1.0, 25.0, 32.0], [9.0, 1.0, 0.0], [0.0, 4.0, 16.0]]
    got = ErrorEstimate.from_probes(probes_of(rows), 0.2)
    assert got.probes == 3  # a probe of weight 0 stands for no query
    assert got.estimate == pytest.approx(((4 * 64 + 32) / (6400 + 800 + 64)) ** 0.5)
    assert got.p95 == pytest.approx(0.2)
    assert got.met is True
    assert ErrorEstimate.from_probes(probes_of(rows), None).met is None
    with pytest.raises(AttributeError):
        got.estimate = 0.0


def test_the_uncertainty_is_the_spread_of_repeated_estimates():
    """The delta method, against the standard deviation over independent samples."""
    generator = np.random.default_rng(0)
    estimates = []
    for _ in range(400):
        norm = generator.gamma(4.0, size=200)
        error = 0.01 * norm * generator.gamma(2.0, size=200)
        weight = generator.uniform(20, 64, 200)
        rows = np.stack((error, norm, weight), -1)
        estimates.append(ErrorEstimate.from_probes(probes_of(rows.tolist()), None))
    spread = np.std([x.estimate for x in estimates])
    assert np.mean([x.uncertainty for x in estimates]) == pytest.approx(spread, rel=0.1)


def test_probes_of_a_group_are_added_up_before_their_spread_is_measured():
    rows = [[1.0, 4.0, 2.0], [0.0, 4.0, 2.0], [2.0, 4.0, 2.0], [1.0, 4.0, 2.0]]
    got = ErrorEstimate.from_probes(probes_of(rows), None, 2)
    # sum w e = 8 and sum w x = 32; w (e - r x) is -2 in one group and 2 in the other.
    assert got.estimate == 0.5 and got.probes == 4
    assert got.uncertainty == pytest.approx((2 / (2 - 1) * 8) ** 0.5 / 32 / (2 * 0.5))
    assert got.upper == pytest.approx(0.5 * np.exp(2.33 * 0.125 / 0.5))
    alone = ErrorEstimate.from_probes(probes_of(rows), None)
    assert alone.uncertainty == pytest.approx((4 / 3 * 8) ** 0.5 / 32)


def test_p95_is_the_percentile_of_all_queries():
    """A probe counts for as many queries as its weight says."""
    rows = [[9.0, 1.0, 4.0], [1.0, 1.0, 94.0], [4.0, 1.0, 2.0]]
    assert ErrorEstimate.from_probes(probes_of(rows), None).p95 == 2.0


def test_the_upper_bound_holds_in_most_repeated_samples():
    """Of 96 squared errors of a log-normal distribution with sigma 1.2, in 95 % of the samples; 600
    samples leave a standard error of 0.9 %."""
    generator = np.random.default_rng(1)
    held = []
    for _ in range(600):
        error = generator.lognormal(0.0, 1.2, size=96)
        norm, weight = np.full(96, 30.0), np.full(96, 32.0)
        got = ErrorEstimate.from_probes(
            probes_of(np.stack((error, norm, weight), -1).tolist()), 1.0
        )
        held.append(got.upper >= (np.exp(1.2**2 / 2) / 30.0) ** 0.5)
        assert got.upper > got.estimate
    assert 0.93 <= np.mean(held) <= 0.98, np.mean(held)


@pytest.mark.parametrize(
    ("rows", "estimate", "uncertainty"),
    [
        ([[0.0, 1.0, 64.0]], 0.0, 0.0),
        ([[1.0, 4.0, 64.0]], 0.5, float("inf")),
        ([[0.0, 0.0, 0.0]], 0.0, 0.0),
        ([[1.0, 0.0, 64.0], [0.0, 0.0, 64.0]], float("inf"), float("inf")),
    ],
)
def test_the_error_of_few_probes(rows, estimate, uncertainty):
    got = ErrorEstimate.from_probes(probes_of(rows), None)
    assert (got.estimate, got.uncertainty) == (estimate, uncertainty)
    assert got.upper == uncertainty  # 0 or infinity


def test_the_error_of_a_call_is_that_of_its_output():
    grid = Grid(64, 64)
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 1 + grid.size, 32)
    result = screened_attention(0.5 * q, k, v, grid=grid, prefix=1, leaves=0.3, allow_dense=False)
    dense = torch.nn.functional.scaled_dot_product_attention(0.5 * q, k, v)
    true = float((result.output - dense).norm() / dense.norm())
    measured = result.stats.error
    assert measured is result.stats.error and measured.target is None and measured.met is None
    assert measured.probes > 90 and 0 < measured.uncertainty < 0.3 * measured.estimate
    assert abs(measured.estimate - true) < 4 * measured.uncertainty
    assert measured.estimate < measured.p95


def test_dense_attention_has_no_error_and_trees_have_no_estimate():
    q, k, v = tensors(15, GRID)
    stats = screened_attention(q, k, v, grid=GRID, prefix=1).stats
    assert stats.error == ErrorEstimate(0.03, 0.0, 0.0, 0.0, 0) and stats.error.met
    stats = screened_attention(q, k, v, grid=GRID, prefix=1, rule="gamma:0.05").stats
    assert stats.error is None


def tiled_stats(error: float, *, target: float = 0.05, heads: int = 1, grid=(8, 8)):
    """Stats of a call by Triton whose single probe has this relative error."""
    rows = [[error**2 * 4.0, 4.0, 64.0], [0.0, 0.0, 64.0]]
    probes = probes_of(rows).expand(1, heads, 2, 3)
    call = Call(Grid(*grid), grid[0] * grid[1], error=target, backend="triton")
    none = torch.empty(0)
    return Stats("triton", "tiled", "", call, tiles=TiledAttention(none, none, probes, none))


def test_a_missed_target_warns_once_for_calls_of_one_kind(monkeypatch):
    monkeypatch.setattr(results, "_warned", set())
    with pytest.warns(UserWarning, match=r"output error of 0\.05, and the target is 0\.01"):
        assert tiled_stats(0.05, target=0.01).error.met is False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tiled_stats(0.05, target=0.01).error.met is False
        assert tiled_stats(0.05, target=0.05).error.met is True
    # Another target, and other models.
    for other in ({"target": 0.02}, {"heads": 2}, {"grid": (8, 16)}):
        with pytest.warns(UserWarning, match="the target is 0"):
            assert tiled_stats(0.05, **{"target": 0.01, **other}).error.met is False


def test_the_warning_and_met_agree(monkeypatch):
    """However uncertain the estimate is."""
    for error in (0.0, 0.049, 0.05, 0.0501, 0.06, 1.0, float("inf"), float("nan")):
        warned = []
        for read in (lambda x: x.error, lambda x: results.warn_if_missed(x.tiles.probes, x.call)):
            monkeypatch.setattr(results, "_warned", set())
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                read(tiled_stats(error))
            warned.append(len(caught))
        measured = tiled_stats(error).measure_error()
        assert measured.met is (error <= 0.05)
        assert warned == [0 if measured.met else 1] * 2


def call_with_errors(monkeypatch, *errors):
    """Attend with a kernel whose probes measure these errors one after the other.

    An error is a number, or the errors of the probes at groups in turn.
    """
    compute, targets = tiles.tiled_attention, []

    def with_errors(*args, **kwargs):
        found = compute(*args, **{**kwargs, "dense_threshold": 1.0})
        tiling, probes = args[3], torch.ones_like(found.probes)
        error = torch.tensor(errors[len(targets)]).square().flatten()
        groups = error.repeat(tiling.groups)[: tiling.groups]
        probes[..., 0] = groups.repeat_interleave(tiling.probes_per_group)
        targets.append(kwargs["error"])
        return replace(found, output=found.output + 1.0, probes=probes)

    monkeypatch.setattr(tiles, "tiled_attention", with_errors)
    q, k, v = tensors(3, Grid(16, 16))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = screened_attention(
            q, k, v, grid=(16, 16), prefix=1, error=0.05, allow_dense=False, backend="eager"
        )
        assert got.stats.error.met
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    return got, targets, torch.allclose(got.output, exact, atol=1e-12)


def test_a_call_that_misses_its_target_is_computed_again(monkeypatch):
    got, targets, exact = call_with_errors(monkeypatch, 0.06, 0.0499)
    assert targets == pytest.approx([0.05, 0.95 * 0.05**2 / 0.06])
    assert not exact and got.stats.error.estimate == pytest.approx(0.0499)
    assert got.stats.error.target == 0.05 and got.stats.setting == "error 0.05"


def test_a_call_that_may_be_far_above_its_target_is_computed_again(monkeypatch):
    """All of the squared error is in a quarter of the groups."""
    # In 4 of 16 groups: with squares of 4 and 0 times their mean, its standard error is 3**0.5 of it
    # over sqrt(15), and that of the root half as much.
    estimate = 0.096 / 4**0.5
    upper = estimate * np.exp(2.33 * (3 / 15) ** 0.5 / 2)
    assert estimate < 0.05 and upper > 1.3 * 0.05
    _, targets, exact = call_with_errors(monkeypatch, (0.0, 0.0, 0.0, 0.096), 0.03)
    assert targets == pytest.approx([0.05, 0.95 * 0.05 * 1.3 * 0.05 / upper])
    assert not exact


@pytest.mark.parametrize(
    "errors",
    [(0.076,), (0.06, 0.051), (0.06, (0.0, 0.0, 0.0, 0.096)), (float("nan"),), (float("inf"),)],
)
def test_a_call_that_misses_its_target_by_far_or_again_is_exact(errors, monkeypatch):
    got, targets, exact = call_with_errors(monkeypatch, *errors)
    assert exact and len(targets) == len(errors)
    assert got.stats.error.estimate == 0.0 and got.stats.density == 1.0
    assert "tiles missed error 0.05" in got.stats.reason


def test_the_text_of_stats_reads_no_tensor():
    meta = torch.empty(1, 2, 9, device="meta")
    call = Call(GRID, GRID.size, error=0.1)
    stats = Stats("triton", "tiled", "", call, tiles=TiledAttention(meta, meta, meta, meta))
    assert "setting='error 0.1'" in repr(stats)
    assert "expanded_count=tensor(1, 2, 9)" in repr(stats)


def test_trees_are_built_when_they_are_read(monkeypatch):
    built = []
    init = Tree.__init__

    def counted(self, *args, **kwargs):
        built.append(self)
        init(self, *args, **kwargs)

    monkeypatch.setattr(Tree, "__init__", counted)
    grid = Grid(48, 48)
    q, k, v = (x.float() for x in tensors(15, grid, sharpness=0.1))
    for criterion in ({}, {"leaves": 0.1}, {"leaves": 1.0}, {"allow_dense": False}):
        result = screened_attention(q, k, v, grid=grid, prefix=1, **criterion)
        output, stats = result
        assert output.shape == q.shape and 0 < stats.leaf_ratio <= 1 and 0 <= stats.density <= 1
        assert not built
        assert float(result.tree.leaf_ratio.mean()) == pytest.approx(stats.leaf_ratio, rel=1e-5)
        assert built
        built.clear()


@pytest.mark.parametrize("criterion", [{}, {"error": 0.1}, {"leaves": 0.3}, {"allow_dense": False}])
def test_some_queries_alone_take_a_rule(criterion):
    q, k, v = tensors(15, GRID)
    message = r"takes a query for each of 17 tokens, and q has 5; pass query_grid="
    with pytest.raises(ValueError, match=message):
        screened_attention(q[:, :, :5], k, v, grid=GRID, prefix=1, **criterion)
    few = screened_attention(q[:, :, :5], k, v, grid=GRID, prefix=1, rule=rules.Optimal(error=0.1))
    whole = screened_attention(q, k, v, grid=GRID, prefix=1, rule=rules.Optimal(error=0.1))
    torch.testing.assert_close(few.output, whole.output[:, :, :5])


def test_a_depth_limit_takes_a_rule():
    q, k, v = tensors(15, GRID)
    with pytest.raises(
        ValueError, match="max_depth is 2, which limits trees, and no rule is given"
    ):
        screened_attention(q, k, v, grid=GRID, prefix=1, max_depth=2)


GRID = Grid(4, 4)


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (
            {"backend": "cuda"},
            ValueError,
            "pass one of auto, native, eager, triton$",
        ),
        ({"allow_dense": None}, TypeError, "allow_dense is None; pass True or False"),
        ({"prefix": 0}, ValueError, "k has 17 tokens"),
        ({"prefix": -1}, ValueError, "prefix is -1"),
        ({"tau": 0.0}, ValueError, "tau is 0.0"),
        ({"scale": float("nan")}, ValueError, "scale is nan"),
        ({"error": -1.0}, ValueError, "error is -1.0"),
        ({"error": 3}, ValueError, "error is 3; pass a fraction: 0.03 is 3 %"),
        ({"leaves": 0}, ValueError, "leaves is 0"),
        ({"leaves": 17}, ValueError, "leaves is 17"),
        ({"leaves": 1.5}, ValueError, "leaves is 1.5"),
        ({"error": 0.1, "leaves": 3}, ValueError, "error and leaves are given"),
        ({"rule": "gamma"}, ValueError, "rule 'gamma'"),
        ({"rule": 0.005}, TypeError, "rule is 0.005; pass one of bmfa.rules"),
        ({"grid": 16}, TypeError, r"grid is 16; did you mean Grid\(4, 4\)?"),
        ({"valid": torch.zeros(16, dtype=torch.bool)}, ValueError, "leaves no token"),
        ({"valid": torch.ones(9, dtype=torch.bool)}, ValueError, r"valid has shape \(9,\)"),
        ({"max_depth": -1}, ValueError, "max_depth is -1"),
    ],
)
def test_bad_settings_are_refused_with_the_value(change, kind, message):
    q, k, v = tensors(0, GRID)
    with pytest.raises(kind, match=message):
        screened_attention(q, k, v, **{"grid": GRID, "prefix": 1, **change})


def test_bad_tensors_are_refused_with_the_value():
    q, k, v = tensors(0, GRID)
    common = {"grid": GRID, "prefix": 1}
    with pytest.raises(TypeError, match="int64"):
        screened_attention(q.long(), k, v, **common)
    with pytest.raises(ValueError, match=r"pass \(B, heads, tokens, d\)"):
        screened_attention(q[0], k[0], v[0], **common)
    with pytest.raises(TypeError, match="one dtype"):
        screened_attention(q.float(), k, v, **common)
    with pytest.raises(ValueError, match="same batch, heads"):
        screened_attention(q, k, v[:, :, :5], **common)
    broken = k.clone()
    broken[1, 0, 3, 2] = float("nan")
    with pytest.raises(ValueError, match=r"keys hold nan at index \(1, 0, 3, 2\)"):
        screened_attention(q, broken, v, **common)
