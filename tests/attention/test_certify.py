"""A certificate is at least |output - exact| of the output of a call, and at least its E."""

import itertools
import math
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from bmfa import Screened, certify, rules, screened_attention
from bmfa.attention.tiling import Tiling
from bmfa.grid import Grid
from bmfa.trees.rules import parse
from cases import RULES
from tiled_cases import EPS64, TiledCase, make_case
from tree_oracle import tree_attention

GRIDS = ((1, 1), (1, 7), (8, 8), (9, 9), (14, 14), (11, 25), (16, 16), (5, 30), (24, 24))
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.float16)
Wide = npt.NDArray[np.longdouble]
SLOW = pytest.mark.slow


class Exact:
    """Exact attention of a case of one image in extended precision."""

    def __init__(self, case: TiledCase) -> None:
        self.case = case
        self.seen, mask = case.seen[0].numpy(), case.key_mask
        self.seen_keys = np.ones((1, case.k.shape[2]), bool) if mask is None else mask[0, 0].numpy()
        self.q, self.k, self.v = (
            np.where(seen[..., None], x[0].double().numpy(), 0.0).astype(np.longdouble)
            for x, seen in zip(
                (case.q, case.k, case.v), (self.seen, self.seen_keys, self.seen_keys), strict=True
            )
        )
        self.factor = np.longdouble(case.settings["scale"]) / np.longdouble(case.settings["tau"])
        # `@` of extended precision takes no BLAS, and is as precise as its inputs.
        scores = self.factor * (self.q @ self.k.swapaxes(-1, -2))  # (H, Q, prefix + N)
        self.scores = np.where(self.seen_keys[:, None], scores, -np.inf)
        weights = np.exp(self.scores - self.scores.max(-1, keepdims=True))
        self.output = weights @ self.v / weights.sum(-1, keepdims=True)

    def distance(self, output: Tensor) -> Wide:
        """|output - exact| of every query, 0 for invalid ones."""
        difference = output[0].double().numpy().astype(np.longdouble) - self.output
        return np.where(self.seen, np.sqrt((difference**2).sum(-1)), 0.0)

    def divergence(self, expanded: Tensor) -> Wide:
        """KL of the attention over tangents from exact attention, by its definition."""
        case, result = self.case, np.zeros(self.scores.shape[:2], np.longdouble)
        tiles = _members(case.tiling, case.settings["prefix"], self.seen_keys)
        groups = _members(case.tiling.queries, case.query_prefix, self.seen)
        for h, (g, rows) in itertools.product(range(len(result)), enumerate(groups)):
            if rows:
                # The same representative as in the certificate: float64 rounds it, and any will do.
                mean = self.q[h, rows].mean(0)
                logits = self.scores[h, rows].copy()  # (n, prefix + N)
                for tile, members in enumerate(tiles):
                    if members and not expanded[0, h, g, tile]:
                        keys = self.k[h, members]
                        s = self.factor * (keys @ mean)
                        log_mass = s.max() + np.log(np.exp(s - s.max()).sum())
                        p = np.exp(s - log_mass)
                        tangent = log_mass + self.factor * ((self.q[h, rows] - mean) @ (p @ keys))
                        with np.errstate(divide="ignore"):
                            logits[:, members] = tangent[:, None] + np.log(p)
                result[h, rows] = _divergence(logits, self.scores[h, rows])
        return result


def _members(tiling: Any, before: int, seen: npt.NDArray[np.bool_]) -> list[list[int]]:
    """The tokens of each tile that exist, counted from the first of the prefix."""
    rows = tiling.slot_tokens.tolist()
    return [[before + t for t in row if t >= 0 and seen[0, before + t]] for row in rows]


def _divergence(logits: Wide, scores: Wide) -> Wide:
    a, exact = (x - x.max(-1, keepdims=True) for x in (logits, scores))
    a, exact = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (a, exact))
    weights = np.exp(a)
    with np.errstate(invalid="ignore"):
        return np.where(weights > 0, weights * (a - exact), 0.0).sum(-1)


def adversarial(seed: int) -> TiledCase:
    """Draw a problem of every kind, dtype, grid, prefix, temperature and mask in turn."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    grid = Grid(*GRIDS[seed % len(GRIDS)])
    prefix = (0, 1, 5)[seed // 2 % 3]
    q, k, v = (normal(1, 2, prefix + grid.size, 16) for _ in range(3))
    spatial = k[:, :, prefix:]
    kind = seed // 3 % 14
    if kind == 0:  # three quarters flat and one quarter textured
        flat = torch.arange(grid.size) < 3 * grid.size // 4
        spatial *= torch.where(flat, 0.05, 4.0).unsqueeze(1)
    elif kind == 1:  # one bright token
        spatial[:, :, seed % grid.size] = 10 * q[:, :, prefix + seed % grid.size]
    elif kind == 2:  # all keys are equal
        spatial[:] = spatial[:, :, :1].clone()
    elif kind == 3:  # queries far from their representative, in both directions
        q[:, :, ::2] = 5 * q[:, :, :1].clone()
        q[:, :, 1::2] = -q[:, :, :1]
    elif kind == 4:  # offsets of keys and queries
        spatial += 30.0
    elif kind == 5:
        spatial += 1e3
    elif kind == 6:  # nearly constant keys on a large offset
        spatial[:] = 1e3 + 1e-7 * spatial
    elif kind == 7:  # two-valued keys along the query: the extreme of Hoeffding's lemma
        sign = torch.where(normal(1, 2, grid.size, 1) > 0, 1.0, -1.0)
        spatial[:] = 0.3 * sign * normal(1, 2, 1, 16)
    elif kind == 8:  # tiny everything
        q, k, v = 1e-3 * q, 1e-3 * k, 1e-3 * v
    elif kind == 9:  # large scores
        q, k = 20 * q, 20 * k
    elif kind == 10:  # representative 0, all queries +-a
        q[:, :, prefix:] = 3 * normal(1, 2, 1, 16) * (-1.0) ** torch.arange(grid.size)[:, None]
    elif kind == 11:  # a large offset of the values
        v = v + 1e3
    elif kind == 12:  # smooth keys, scaled
        spatial[:] = spatial.cumsum(2) / 8 * (1 + seed % 8)
    settings = {"prefix": prefix, "tau": (1.0, 0.3, 4.0)[seed % 3], "scale": 0.25}
    dtype = DTYPES[seed // 5 % 4]
    case = TiledCase(q, k, v, Tiling(grid), settings).map(lambda x: x.to(dtype))
    if seed % 4:
        return case
    valid = torch.rand(1, grid.size, generator=generator) > 0.4
    valid[:, case.tiling.slot_tokens[0].clamp(min=0)] = False
    valid[:, -1] = True
    return case.masked(valid)


QUERY_GRIDS = (Grid(1, 1), Grid(3, 5), Grid(8, 8), Grid(9, 17), Grid(13, 6, frames=2), Grid(16, 20))


def adversarial_cross(seed: int) -> TiledCase:
    """Draw a problem of `adversarial`, and queries on a grid of their own with a prefix of their own.

    They are rows of those of the problem, so that they are as far from each other and as close to keys.
    """
    case = adversarial(seed)
    generator = torch.Generator().manual_seed(seed)
    query_grid, grid = QUERY_GRIDS[seed // 2 % len(QUERY_GRIDS)], case.tiling.grid
    if seed % 5 == 3 and grid.height % 2 == 0:
        grid = Grid(grid.height // 2, grid.width, frames=2)
    rows = torch.randint(case.q.shape[2], (seed % 4 + query_grid.size,), generator=generator)
    q = case.q[:, :, rows.sort().values].nan_to_num(0.5)
    return replace(case, q=q, tiling=Tiling(grid, query_grid=query_grid))


def run(case: TiledCase, **options: Any) -> Screened:
    grids = {"grid": case.tiling.grid, "query_grid": case.tiling.query_grid, "valid": case.valid}
    settings = {"allow_dense": False} | grids | case.settings | options
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "screened_attention measured", UserWarning)
        return screened_attention(case.q, case.k, case.v, **settings)


def certificate(case: TiledCase, result: Screened) -> tuple[Wide, Wide]:
    """Certify a result: bounds (H, Q) on its distance and on E."""
    found = certify(case.q, case.k, case.v, result)
    assert all(x.dtype == torch.float64 and x.shape == case.q.shape[:3] for x in found)
    distance, energy = (x[0].numpy().astype(np.longdouble) for x in found)
    return distance, energy


def with_result(case: TiledCase, output: Tensor, expanded: Tensor) -> Screened:
    """The result of a backend that had expanded these tiles and returned this output."""
    result = run(case.map(torch.ones_like), leaves=0.3, backend="eager")
    assert result.stats.tiles is not None
    tiles = replace(result.stats.tiles, expanded_or_make=expanded)
    return Screened(output, replace(result.stats, tiles=tiles, valid=case.valid))


def check(case: TiledCase, result: Screened, expanded: Tensor | None = None) -> None:
    """Compare both bounds with extended precision."""
    if expanded is None:
        assert result.stats.tiles is not None
        expanded = result.stats.tiles.expanded
    exact, (distance, energy) = Exact(case), certificate(case, result)
    assert (distance >= exact.distance(result.output)).all()
    # The definition in this file rounds the representative in other bits.
    largest = (exact.q**2).sum(-1).max() * (exact.k**2).sum(-1).max()
    rounding = float(64 * 1e-19 * case.settings["scale"] * (1 + largest**0.5))
    assert (energy >= case.settings["tau"] * exact.divergence(expanded) - rounding).all()


@pytest.mark.parametrize("seeds", [range(0, 126, 6), pytest.param(range(126), marks=SLOW)])
def test_no_adversarial_query_is_further_from_exact_than_its_certificate(seeds: range) -> None:
    for seed in seeds:
        for case in (adversarial(seed), adversarial_cross(seed)):
            check(case, run(case, error=(0.02, 0.1, 0.5)[seed % 3]))


def test_any_output_and_any_expanded_tiles_are_bounded() -> None:
    """The bound is on what is passed, whatever a kernel has made of it."""
    for seed, draw in itertools.product(range(0, 126, 9), (adversarial, adversarial_cross)):
        case, generator = draw(seed), torch.Generator().manual_seed(seed)
        shape = (1, 2, case.tiling.groups, case.tiling.tiles)
        expanded = torch.rand(shape, generator=generator) < (0.0, 0.3, 0.8)[seed // 9 % 3]
        exact = torch.from_numpy(Exact(case).output.astype(np.float64))[None]
        noise = torch.randn(exact.shape, dtype=torch.float64, generator=generator)
        output = (exact + (0.0, 1e-3, 10.0)[seed // 3 % 3] * noise).to(case.q.dtype)
        check(case, with_result(case, output, expanded), expanded)


def test_weights_that_underflow() -> None:
    """A bright token in a merged tile: what is exact is at most exp(-100) or exp(-740) of it."""
    expanded = torch.zeros(1, 2, 2, 2, dtype=torch.bool)
    expanded[..., 1] = True
    for dtype in (torch.float32, torch.float64):
        case = make_case(0, (8, 16), smooth=False, heads=2, dims=(16, 16), prefix=2, dtype=dtype)
        # Two opposite queries of a group see a key that their representative does not see.
        case.q[..., 0] = 0.0
        case.q[:, :, 40, 0], case.q[:, :, 41, 0] = 1.0, -1.0
        case.k[:, :, 2] = 0.0
        for size in np.linspace(0.8, 1.3, 5) * -math.log(torch.finfo(dtype).tiny):
            case.k[:, :, 2, 0] = 4 * float(size)
            assert Exact(case).divergence(expanded)[:, 40].min() > 0.5 * size
            check(case, with_result(case, case.v, expanded), expanded)


def test_the_bound_is_the_distance_up_to_rounding() -> None:
    for seed in range(0, 126, 5):
        case = adversarial(seed)
        result, exact = run(case, leaves=0.3), Exact(case)
        squares = [(x**2).sum(-1).max() for x in (exact.q, exact.k, exact.v)]
        score = exact.factor * np.sqrt(squares[0] * squares[1])
        # A score is a sum of 16 products, the output a sum of all values.
        allowed = 64 * EPS64 * (4 * score + case.tiling.grid.size) * np.sqrt(squares[2])
        difference = certificate(case, result)[0] - exact.distance(result.output)
        assert difference.max() <= allowed + 1e-12


def test_queries_and_keys_of_any_magnitude_and_nan() -> None:
    expanded = torch.zeros(1, 2, 4, 4, dtype=torch.bool)
    drawn = make_case(2, (16, 16), smooth=False, heads=2, prefix=0, dims=(16, 16))
    for size in (1e25, 1e-25):
        case = replace(drawn, q=size * drawn.q, k=drawn.k / size)
        distance, _ = certificate(case, with_result(case, case.v, expanded))
        difference = distance - Exact(case).distance(case.v)
        assert 0 <= float(difference.min()) and float(difference.max()) < 1e-10
    q, output = drawn.q.clone(), drawn.v.clone()
    q[:, :, 5], output[:, :, 7, 0] = torch.nan, torch.nan
    case = replace(drawn, q=q)
    distance, energy = certificate(case, with_result(case, drawn.v, expanded))
    assert np.isinf(distance[0, 5]) and not (np.isnan(distance).any() or np.isnan(energy).any())
    distance, _ = certificate(drawn, with_result(drawn, output, expanded))
    assert np.isinf(distance[0, 7]) and np.isfinite(distance[0, 6])


def test_exact_attention_has_no_energy() -> None:
    """Dense attention, and tiles that are all expanded; the distance is the rounding of the kernel."""
    for seed in range(12):
        case = adversarial(seed)
        for options in ({"error": 0.0}, {"leaves": 1.0, "backend": "eager"}, {"allow_dense": True}):
            result = run(case, **options)
            distance, energy = certificate(case, result)
            assert not energy.any()
            assert (distance >= Exact(case).distance(result.output)).all()


def test_chunks_do_not_change_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    case = adversarial(8)
    result = run(case, leaves=0.5)
    whole = certificate(case, result)
    monkeypatch.setattr("bmfa.attention.kernels.eager.tiles.heads.CHUNK_ELEMENTS", 1)
    for got, want in zip(certificate(case, result), whole, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-12)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, in the interpreter
def test_every_backend_is_certified() -> None:
    """Triton rounds what it stores to the dtype."""
    pytest.importorskip("triton")
    drawn = make_case(11, (9, 30), smooth=False, heads=2, prefix=2)
    drawn.k[:, :, 2:] *= torch.linspace(0.1, 2, 9 * 30).view(-1, 1)
    for dtype, backend in ((torch.float32, "eager"), (torch.float16, "triton")):
        case = drawn.map(lambda x, to=dtype: x.to(to))
        result = run(case, leaves=0.5, backend=backend)
        assert 0 < (result.stats.density or 0.0) < 1
        check(case, result)
        exact = Exact(case).distance(result.output)
        assert (certificate(case, result)[0] - exact).max() < 1e-9 and exact.max() > 0.05


def test_trees_for_each_query_are_certified_too() -> None:
    """The energy is that of the oracle, and by Pinsker's inequality it bounds the distance."""
    for number, rule in enumerate(RULES):
        masked = number % 2 == 1
        dtype = DTYPES[number // 2 % 4] if masked else torch.float64
        options = {"heads": 2, "dims": (8, 8), "prefix": 2, "tau": 0.7, "dtype": dtype}
        case = make_case(number, (6, 7), smooth=False, masked=masked, **options)
        case = replace(case, q=(0.1, 2.0, 30.0)[number % 3] * case.q).map(torch.nan_to_num)
        result = run(case, rule=parse(rule, number))
        distance, energy = certificate(case, result)
        true = Exact(case).distance(result.output)
        assert (distance >= true).all()
        q, k, v = (x.double() for x in (case.q, case.k, case.v))
        settings = case.settings | {"valid": case.valid}
        want = tree_attention(q, k, v, (6, 7), parse(rule, number), **settings).error[0]
        seen = np.broadcast_to(case.seen[0], energy.shape)
        tight = dtype == torch.float64
        assert (energy >= want - 1e-6 * (not tight))[seen].all(), rule
        close = {"atol": 1e-9, "rtol": 1e-9} if tight else {"atol": 1e-6, "rtol": 1e-3}
        np.testing.assert_allclose(energy[seen].astype(float), want[seen], **close)
        diameter = torch.cdist(v, v).amax().item()
        assert tight is False or (true <= diameter * np.sqrt(energy / 1.4) + 1e-9)[seen].all()
    for target in (0.0, 0.01, 0.2):
        result = run(case, rule=rules.Optimal(error=target))
        assert float(certificate(case, result)[1].max()) <= target + 1e-10


def test_a_certificate_takes_the_tensors_of_the_call() -> None:
    case = adversarial(1)
    q, k, v = case.q, case.k, case.v
    result = run(case, leaves=0.5)
    with pytest.raises(ValueError, match=r"pass the tensors of the call"):
        certify(q, k[:, :, 1:], v[:, :, 1:], result)
    with pytest.raises(ValueError, match="values cannot be read"):
        certify(q.to("meta"), k.to("meta"), v.to("meta"), result)
    empty = case.map(lambda x: x[:0])
    found = certify(empty.q, empty.k, empty.v, run(empty, valid=None))
    assert found.distance.shape == (0, *q.shape[1:3])
