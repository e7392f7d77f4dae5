"""A certificate is at least |output - exact| of the output of a call, and at least its E."""

import itertools
import math
import warnings
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from bmfa import Screened, certify, screened_attention
from bmfa.attention.tiling import Tiling, tiles_to_tokens
from bmfa.grid import Grid
from bmfa.trees.rules import parse
from tree_oracle import tree_attention

GRIDS = ((1, 1), (1, 7), (8, 8), (9, 9), (14, 14), (11, 25), (16, 16), (5, 30), (24, 24))
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.float16)
RULES = (
    "gamma:0.05", "optimal-leaves:0.2", "fixed-depth:1", "exact-gap:0", "certified:0.2", "mass:0.005",
    "fixed-blocks:2",
)  # fmt: skip
EPS = float(torch.finfo(torch.float64).eps)
Wide = npt.NDArray[np.longdouble]


@dataclass(frozen=True)
class Problem:
    """q, k, v with settings, and exact attention in extended precision."""

    q: Tensor
    k: Tensor
    v: Tensor
    grid: Grid
    prefix: int = 0
    tau: float = 1.0
    scale: float = 0.25
    valid: Tensor | None = None
    query_grid: Grid | None = None

    @property
    def call(self) -> dict[str, Any]:
        names = ("grid", "prefix", "tau", "scale", "valid", "query_grid")
        return {name: getattr(self, name) for name in names}

    @property
    def tiling(self) -> Tiling:
        return Tiling(self.grid, query_grid=self.query_grid)

    @property
    def query_prefix(self) -> int:
        return self.q.shape[2] - self.tiling.queries.grid.size

    @property
    def seen_keys(self) -> npt.NDArray[np.bool_]:
        """(1, 1, prefix + N), True for keys that exist."""
        seen = np.ones((1, 1, self.prefix + self.grid.size), bool)
        if self.valid is not None:
            seen[0, 0, self.prefix :] = self.valid[0].numpy()
        return seen

    @property
    def seen(self) -> npt.NDArray[np.bool_]:
        """(1, 1, Q), True for queries with a specified output."""
        return self.seen_keys if self.query_grid is None else np.ones((1, 1, self.q.shape[2]), bool)

    def wide(self) -> tuple[Wide, Wide, Wide]:
        q, k, v = (
            np.where(seen[..., None], x.double().numpy(), 0.0).astype(np.longdouble)
            for x, seen in zip(
                (self.q, self.k, self.v), (self.seen, self.seen_keys, self.seen_keys), strict=True
            )
        )
        return q, k, v

    def scores(self) -> Wide:
        """(B, H, Q, prefix + N) scores over tau, -inf for invalid keys."""
        q, k, _ = self.wide()
        # `@` of extended precision takes no BLAS, and is as precise as its inputs.
        scores = np.longdouble(self.scale) * (q @ k.swapaxes(-1, -2)) / np.longdouble(self.tau)
        return np.where(self.seen_keys[:, :, None], scores, -np.inf)

    def exact(self) -> Wide:
        scores = self.scores()
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        return np.asarray(weights @ self.wide()[2] / weights.sum(-1, keepdims=True))

    def distance(self, output: Tensor) -> Wide:
        """|output - exact| of every query, 0 for invalid ones."""
        difference = output.double().numpy().astype(np.longdouble) - self.exact()
        return np.where(self.seen, np.sqrt((difference**2).sum(-1)), 0.0)

    def divergence(self, expanded: Tensor) -> Wide:
        """KL of the attention over tangents from exact attention, by its definition."""
        q, k, _ = self.wide()
        scores = self.scores()
        result = np.zeros(scores.shape[:3], np.longdouble)
        tiles, groups = (
            [[t for t in row if t >= 0 and seen[0, 0, prefix + t]]
             for row in tiling.slot_tokens.tolist()]
            for tiling, prefix, seen in (
                (self.tiling, self.prefix, self.seen_keys),
                (self.tiling.queries, self.query_prefix, self.seen),
            )
        )  # fmt: skip
        factor = np.longdouble(self.scale) / np.longdouble(self.tau)
        for h in range(scores.shape[1]):
            for g, tokens in enumerate(groups):
                if not tokens:
                    continue
                # The same representative as in the certificate: float64 rounds it, and any will do.
                rows = self.query_prefix + np.array(tokens)
                mean = q[0, h, rows].mean(0)
                logits = scores[0, h, rows].copy()  # (n, prefix + N)
                for tile, members in enumerate(tiles):
                    if members and not expanded[0, h, g, tile]:
                        keys = k[0, h, self.prefix + np.array(members)]
                        s = factor * (keys @ mean)
                        log_mass = s.max() + np.log(np.exp(s - s.max()).sum())
                        p = np.exp(s - log_mass)
                        tangent = log_mass + factor * ((q[0, h, rows] - mean) @ (p @ keys))
                        with np.errstate(divide="ignore"):
                            logits[:, self.prefix + np.array(members)] = tangent[:, None] + np.log(
                                p
                            )
                result[0, h, rows] = _divergence(logits, scores[0, h, rows])
        return result


def _divergence(logits: Wide, scores: Wide) -> Wide:
    def normalise(x: Wide) -> Wide:
        x = x - x.max(-1, keepdims=True)
        return np.asarray(x - np.log(np.exp(x).sum(-1, keepdims=True)))

    a, exact = normalise(logits), normalise(scores)
    weights = np.exp(a)
    with np.errstate(invalid="ignore"):
        terms = np.where(weights > 0, weights * (a - exact), 0.0)
    return np.asarray(terms.sum(-1))


def adversarial(seed: int) -> Problem:
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
        spatial[:, :, flat] = 0.05 * spatial[:, :, flat]
        spatial[:, :, ~flat] *= 4
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
        spatial[:] = 1e3 + spatial
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
    dtype = DTYPES[seed // 5 % 4]
    valid = None
    if seed % 4 == 0:
        valid = torch.rand(1, grid.size, generator=generator) > 0.4
        valid[:, Tiling(grid).slot_tokens[0].clamp(min=0)] = False
        valid[:, -1] = True
        gone = torch.cat((torch.zeros(1, prefix, dtype=torch.bool), ~valid), 1)[:, None, :, None]
        q, k, v = (x.masked_fill(gone, torch.nan) for x in (q, k, v))
    q, k, v = (x.to(dtype) for x in (q, k, v))
    return Problem(q, k, v, grid, prefix, (1.0, 0.3, 4.0)[seed % 3], 0.25, valid)


QUERY_GRIDS = (Grid(1, 1), Grid(3, 5), Grid(8, 8), Grid(9, 17), Grid(13, 6, frames=2), Grid(16, 20))


def adversarial_cross(seed: int) -> Problem:
    """Draw a problem of `adversarial`, and queries on a grid of their own with a prefix of their own.

    They are rows of those of the problem, so that they are as far from each other and as close to keys.
    """
    problem = adversarial(seed)
    generator = torch.Generator().manual_seed(seed)
    query_grid = QUERY_GRIDS[seed // 2 % len(QUERY_GRIDS)]
    grid = problem.grid
    if seed % 5 == 3 and grid.height % 2 == 0:
        grid = Grid(grid.height // 2, grid.width, frames=2)
    rows = torch.randint(problem.q.shape[2], (seed % 4 + query_grid.size,), generator=generator)
    q = problem.q[:, :, rows.sort().values].nan_to_num(0.5)
    return replace(problem, q=q, grid=grid, query_grid=query_grid)


def run(problem: Problem, **options: Any) -> Screened:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "screened_attention measured", UserWarning)
        return screened_attention(
            problem.q, problem.k, problem.v, **({"allow_dense": False} | problem.call | options)
        )


def certificate(problem: Problem, result: Screened) -> tuple[Wide, Wide]:
    """Certify a result: NumPy bounds on its distance and on E."""
    found = certify(problem.q, problem.k, problem.v, result)
    assert all(x.dtype == torch.float64 and x.shape == problem.q.shape[:3] for x in found)
    distance, energy = (x.numpy().astype(np.longdouble) for x in found)
    return distance, energy


def with_result(problem: Problem, output: Tensor, expanded: Tensor) -> Screened:
    """The result of a backend that had expanded these tiles and returned this output."""
    ones = {name: torch.ones_like(getattr(problem, name)) for name in "qkv"}
    result = run(replace(problem, **ones), leaves=0.3, backend="eager")
    assert result.stats.tiles is not None
    tiles = replace(result.stats.tiles, expanded_or_make=expanded)
    return Screened(output, replace(result.stats, tiles=tiles, valid=problem.valid))


def expanded_tiles(result: Screened) -> Tensor:
    assert result.stats.tiles is not None
    return result.stats.tiles.expanded


def check(problem: Problem, result: Screened, expanded: Tensor) -> None:
    """Compare both bounds with extended precision."""
    distance, energy = certificate(problem, result)
    assert (distance >= problem.distance(result.output)).all()
    divergence = problem.tau * problem.divergence(expanded)
    assert (energy >= divergence - _representative_rounding(problem)).all()


def _representative_rounding(problem: Problem) -> float:
    """What the definition in this file may differ by: it rounds the representative in other bits."""
    q, k, _ = problem.wide()
    largest = (q**2).sum(-1).max() * (k**2).sum(-1).max()
    return float(64 * 1e-19 * problem.scale * (1 + largest**0.5))


def check_adversarial(seeds: range) -> None:
    for seed in seeds:
        for problem in (adversarial(seed), adversarial_cross(seed)):
            result = run(problem, error=(0.02, 0.1, 0.5)[seed % 3])
            check(problem, result, expanded_tiles(result))


def test_no_adversarial_query_is_further_from_exact_than_its_certificate() -> None:
    check_adversarial(range(0, 126, 6))


@pytest.mark.slow
def test_more_than_ten_thousand_adversarial_queries() -> None:
    check_adversarial(range(126))


def test_any_output_and_any_expanded_tiles_are_bounded() -> None:
    """The bound is on what is passed, whatever a kernel has made of it."""
    for seed in range(0, 126, 9):
        for problem in (adversarial(seed), adversarial_cross(seed)):
            generator = torch.Generator().manual_seed(seed)
            shape = (1, 2, problem.tiling.groups, problem.tiling.tiles)
            expanded = torch.rand(shape, generator=generator) < (0.0, 0.3, 0.8)[seed // 9 % 3]
            exact = torch.from_numpy(problem.exact().astype(np.float64))
            noise = torch.randn(exact.shape, dtype=torch.float64, generator=generator)
            size = (0.0, 1e-3, 10.0)[seed // 3 % 3]
            output = (exact + size * noise).to(problem.q.dtype)
            check(problem, with_result(problem, output, expanded), expanded)


def test_weights_that_underflow() -> None:
    """A bright token in a merged tile: what is exact is at most exp(-100) or exp(-740) of it."""
    grid, prefix = Grid(8, 16), 2
    expanded = torch.zeros(1, 2, 2, 2, dtype=torch.bool)
    expanded[..., 1] = True
    for dtype in (torch.float32, torch.float64):
        generator = torch.Generator().manual_seed(0)
        q, k, v = torch.randn(3, 1, 2, prefix + grid.size, 16, generator=generator).to(dtype)
        # Two opposite queries of a group see a key that their representative does not see.
        q[..., 0] = 0.0
        q[:, :, 40, 0], q[:, :, 41, 0] = 1.0, -1.0
        k[:, :, prefix] = 0.0
        for size in np.linspace(0.8, 1.3, 5) * -math.log(torch.finfo(dtype).tiny):
            k[:, :, prefix, 0] = 4 * float(size)
            problem = Problem(q, k, v, grid, prefix)
            assert problem.divergence(expanded)[:, :, 40].min() > 0.5 * size
            check(problem, with_result(problem, v, expanded), expanded)


def test_the_bound_is_the_distance_up_to_rounding() -> None:
    for seed in range(0, 126, 5):
        problem = adversarial(seed)
        result = run(problem, leaves=0.3)
        distance, _ = certificate(problem, result)
        q, k, v = problem.wide()
        score = problem.scale / problem.tau * np.sqrt((q**2).sum(-1).max() * (k**2).sum(-1).max())
        # A score is a sum of 16 products, the output a sum of all values.
        allowed = 64 * EPS * (4 * score + problem.grid.size) * np.sqrt((v**2).sum(-1)).max()
        assert (distance - problem.distance(result.output)).max() <= allowed + 1e-12


def smooth(size: float, side: int = 32) -> Problem:
    """The q, k, v of the README, smooth over the grid, times `size`."""
    generator = torch.Generator().manual_seed(0)
    coarse = torch.randn(3, 6, 32, side // 8, side // 8, generator=generator)
    field = torch.nn.functional.interpolate(coarse.flatten(0, 1), (side, side), mode="bicubic")
    q, k, v = (size * field).view(3, 1, 6, 32, side * side).transpose(3, 4)[:, :, :2]
    return Problem(q, k, v, Grid(side, side), scale=32**-0.5)


def test_the_example_of_the_readme_scaled() -> None:
    for size in (1, 3, 8):
        problem = smooth(float(size))
        result = run(problem, error=0.05)
        check(problem, result, expanded_tiles(result))


def test_queries_and_keys_of_any_magnitude() -> None:
    expanded = torch.zeros(1, 2, 4, 4, dtype=torch.bool)
    for size in (1e25, 1e-25):
        torch.manual_seed(2)
        q, k, v = torch.randn(3, 1, 2, 256, 16)
        problem = Problem(size * q, k / size, v, Grid(16, 16))
        distance, _ = certificate(problem, with_result(problem, v, expanded))
        assert (distance >= problem.distance(v)).all()
        assert float((distance - problem.distance(v)).max()) < 1e-10


def test_a_nan_query_has_an_infinite_certificate() -> None:
    torch.manual_seed(3)
    q, k, v = torch.randn(3, 1, 1, 256, 16)
    q[:, :, 5] = torch.nan
    expanded = torch.zeros(1, 1, 4, 4, dtype=torch.bool)
    problem = Problem(q, k, v, Grid(16, 16))
    distance, energy = certificate(problem, with_result(problem, v, expanded))
    assert np.isinf(distance[0, 0, 5]) and not (np.isnan(distance).any() or np.isnan(energy).any())
    q[:, :, 5] = 0.0
    output = v.clone()
    output[:, :, 7, 0] = torch.nan
    distance, _ = certificate(problem, with_result(problem, output, expanded))
    assert np.isinf(distance[0, 0, 7]) and np.isfinite(distance[0, 0, 6])


def test_exact_attention_has_no_energy() -> None:
    """Dense attention, and tiles that are all expanded; the distance is the rounding of the kernel."""
    for seed in range(12):
        problem = adversarial(seed)
        for options in ({"error": 0.0}, {"leaves": 1.0, "backend": "eager"}, {"allow_dense": True}):
            result = run(problem, **options)
            distance, energy = certificate(problem, result)
            assert not energy.any()
            assert (distance >= problem.distance(result.output)).all()


def test_chunks_do_not_change_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = adversarial(8)
    result = run(problem, leaves=0.5)
    whole = certify(problem.q, problem.k, problem.v, result)
    monkeypatch.setattr("bmfa.attention.kernels.eager.tiles.heads.CHUNK_ELEMENTS", 1)
    for got, want in zip(certify(problem.q, problem.k, problem.v, result), whole, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, in the interpreter
def test_every_backend_is_certified() -> None:
    """Triton rounds what it stores to the dtype."""
    pytest.importorskip("triton")
    torch.manual_seed(11)
    grid, prefix, dim = Grid(16, 32), 2, 32
    q, k, v = torch.randn(3, 1, 2, prefix + grid.size, dim)
    k[:, :, prefix:] *= torch.linspace(0.1, 2, grid.size).view(-1, 1)
    for dtype, backend in itertools.product((torch.float32, torch.float16), ("triton", "eager")):
        problem = Problem(*(x.to(dtype) for x in (q, k, v)), grid, prefix, scale=dim**-0.5)
        result = run(problem, leaves=0.5, backend=backend)
        assert 0 < (result.stats.density or 0.0) < 1
        check(problem, result, expanded_tiles(result))
        distance, _ = certificate(problem, result)
        exact = problem.distance(result.output)
        assert (distance - exact).max() < 1e-9 and exact.max() > 0.05  # queries are not mixed up


def test_trees_for_each_query_are_certified_too() -> None:
    grid, prefix = Grid(6, 7), 2
    for number, rule in enumerate(RULES):
        torch.manual_seed(10)
        dtype = DTYPES[number % len(DTYPES)]
        q, k, v = (2 * torch.randn(3, 1, 2, prefix + grid.size, 8)).to(dtype)
        valid = torch.rand(1, grid.size) < 0.7 if number % 2 else None
        problem = Problem(q, k, v, grid, prefix, tau=0.7, scale=8**-0.5, valid=valid)
        result = run(problem, rule=rule)
        distance, energy = certificate(problem, result)
        assert (distance >= problem.distance(result.output)).all()
        exact = tree_attention(
            *(x.double() for x in (q, k, v)), (6, 7), parse(rule), prefix=prefix, tau=0.7,
            scale=8**-0.5, valid=valid,
        )  # fmt: skip
        seen = np.broadcast_to(problem.seen, energy.shape)
        assert (energy >= exact.error - 1e-6 * (dtype != torch.float64))[seen].all(), rule
        np.testing.assert_allclose(energy[seen], exact.error[seen], atol=1e-6, rtol=1e-3)


def test_a_certificate_takes_the_tensors_of_the_call() -> None:
    problem = adversarial(1)
    q, k, v = problem.q, problem.k, problem.v
    result = run(problem, leaves=0.5)
    with pytest.raises(ValueError, match=r"pass the tensors of the call"):
        certify(q, k[:, :, 1:], v[:, :, 1:], result)
    with pytest.raises(ValueError, match="values cannot be read"):
        certify(q.to("meta"), k.to("meta"), v.to("meta"), result)
    empty = screened_attention(q[:0], k[:0], v[:0], **(problem.call | {"valid": None}))
    assert certify(q[:0], k[:0], v[:0], empty).distance.shape == (0, *q.shape[1:3])


def test_groups_of_the_truth_are_those_of_the_tiling() -> None:
    """`tiles_to_tokens` undoes the order in which the certificate visits queries."""
    tiling = Tiling(Grid(9, 17))
    slots = tiling.slot_tokens.view(1, tiling.tiles, tiling.slots, 1)
    assert torch.equal(tiles_to_tokens(slots, tiling)[0, :, 0], torch.arange(9 * 17))
