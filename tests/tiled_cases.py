"""Seeded problems of tiled attention, the backends that solve them, and the float64 specification."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, TypeVar
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate, scaled_dot_product_attention

from bmfa.attention.kernels import native
from bmfa.attention.kernels.eager.tiles import tiled_attention as eager_attention
from bmfa.attention.kernels.native import library
from bmfa.attention.kernels.reference.tiles import ReferenceTiled, tiled_attention
from bmfa.attention.tiling import MOST_CHOICES, SMALLEST_CORRECTION, TiledAttention, Tiling
from bmfa.grid import Grid, check_grid

NAMED_GRIDS = ((1, 1), (1, 7), (8, 8), (9, 9), (14, 14), (16, 25), (24, 40), (37, 37), (33, 64))
KINDS = ("noise", "smooth", "bright", "constant", "offset")
DIMS = (16, 17, 24, 32, 33, 64, 72, 80, 96, 128, 160, 256)
LAYOUTS = ("contiguous", "packed", "tokens first", "strided", "one image", "one head")
T = TypeVar("T")
BLOCK = 64  # keys of which the native kernels sum the weights one by one
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"  # of the Triton kernels
EPS, EPS64 = (float(torch.finfo(x).eps) for x in (torch.float32, torch.float64))


@dataclass(frozen=True)
class TiledCase:
    """q, k, v on a grid with all settings."""

    q: Tensor
    k: Tensor
    v: Tensor
    tiling: Tiling
    settings: dict[str, Any]  # prefix, scale, tau, error or expand
    valid: Tensor | None = None

    @property
    def factor(self) -> float:
        return float(self.settings["scale"] / self.settings["tau"])

    @property
    def query_prefix(self) -> int:
        return self.q.shape[2] - self.tiling.queries.grid.size

    @property
    def key_mask(self) -> Tensor | None:
        """(B, 1, 1, prefix + N) bool, True for keys that exist."""
        if self.valid is None:
            return None
        before = self.valid.new_ones(len(self.valid), self.settings["prefix"])
        return torch.cat((before, self.valid), 1)[:, None, None]

    @property
    def seen(self) -> Tensor:
        """(B, 1, Q) bool, True for queries with a specified output."""
        if self.key_mask is None or self.tiling.query_grid is not None:
            return torch.ones(len(self.q), 1, self.q.shape[2], dtype=torch.bool)
        return self.key_mask[:, 0].expand(len(self.q), 1, -1)

    def map(self, change: Callable[[Tensor], Tensor]) -> "TiledCase":
        """The same case with a function of q, k and v."""
        return replace(self, q=change(self.q), k=change(self.k), v=change(self.v))

    def set(self, **settings: Any) -> "TiledCase":
        return replace(self, settings=self.settings | settings)

    def masked(self, valid: Tensor, filling: float = torch.nan) -> "TiledCase":
        """The same case with a mask (B, N), and a number in the tokens that do not exist."""
        case = replace(self, valid=valid)
        assert case.key_mask is not None
        gone = ~case.key_mask.mT
        k, v = (x.masked_fill(gone, filling) for x in (self.k, self.v))
        own = self.tiling.query_grid is not None
        return replace(case, q=self.q if own else self.q.masked_fill(gone, filling), k=k, v=v)

    def whole(self) -> "TiledCase":
        """The same case with a copy of its key head for each query head."""
        share = self.q.shape[1] // self.k.shape[1]
        k, v = (x.repeat_interleave(share, 1) for x in (self.k, self.v))
        return replace(self, k=k, v=v)

    def image(self, b: int) -> "TiledCase":
        """One image of the case."""
        one = self.map(lambda x: x[b : b + 1])
        shared = self.valid is None or len(self.valid) == 1
        return one if shared else replace(one, valid=self.valid[b : b + 1])

    def oracle(self) -> ReferenceTiled:
        case = self.whole()
        q, k, v = (x.double().numpy() for x in (case.q, case.k, case.v))
        valid = None if self.valid is None else self.valid.numpy()
        return tiled_attention(q, k, v, self.tiling, valid=valid, **self.settings)

    def dense(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """`scaled_dot_product_attention` in a dtype; invalid queries are 0."""
        case = self.whole().map(lambda x: x.nan_to_num(0.0).to(dtype))
        output = scaled_dot_product_attention(
            case.q, case.k, case.v, attn_mask=self.key_mask, scale=self.factor
        )
        return output.where(self.seen.unsqueeze(-1), 0.0)


def make_case(
    seed: int,
    grid: Grid | tuple[int, int],
    *,
    smooth: bool = True,
    query_grid: Grid | None = None,
    prefix: int = 1,
    query_prefix: int = 1,
    batch: int = 1,
    heads: int = 1,
    dims: tuple[int, int] = (32, 32),
    dtype: torch.dtype = torch.float32,
    masked: bool = False,
    side: int = 8,
    group_tiles: int = 1,
    probes: int = 0,
    **settings: Any,
) -> TiledCase:
    """Tokens that vary slowly, so that errors of tangents are neither 0 nor 1, or normal ones."""
    grid = check_grid(grid)
    tiling = Tiling(grid, side, query_grid, group_tiles, probes_per_group=probes)
    keys, settings = prefix + grid.size, {"prefix": prefix, "tau": 1.0} | settings
    queries = keys
    if query_grid is not None:
        queries, settings["query_prefix"] = query_prefix + query_grid.size, query_prefix
    generator = torch.Generator().manual_seed(seed)
    shapes = (queries, dims[0]), (keys, dims[0]), (keys, dims[1])
    q, k, v = (torch.randn(batch, heads, *shape, generator=generator) for shape in shapes)
    case = TiledCase(q, k, v, tiling, {"scale": dims[0] ** -0.5} | settings)
    case = case.map(lambda x: (x.cumsum(2) / 6 if smooth else x).to(dtype))
    return case.masked(draw_mask(np.random.default_rng(seed), batch, tiling)) if masked else case


def smooth_fields(seed: int, height: int, width: int = 0, heads: int = 3) -> Tensor:
    """Return q, k and v (3, 1, heads, tokens, 64) that vary slowly over a grid, square without a width:
    the example of the manual."""
    size = (height, width or height)
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randn(3 * heads, 64, *(x // 8 for x in size), generator=generator)
    grown = interpolate(coarse, size=size, mode="bicubic")
    return grown.flatten(2).mT.reshape(3, 1, heads, size[0] * size[1], 64)


def draw_case(seed: int, dtype: torch.dtype = torch.float32, **options: Any) -> TiledCase:
    """Draw a case of self-attention or, in a third of the cases, of queries with their own grid.

    k and v may have fewer heads than q. Tokens that do not exist hold NaN.

    Args:
        seed: Seed.
        dtype: Dtype of q, k and v.
        options: What replaces options that are drawn, see `_draw_options`.
    """
    rng = np.random.default_rng([seed, 22])
    drawn = _draw_options(rng) | options
    tiling = Tiling(
        *(drawn[x] for x in ("grid", "side", "query_grid", "group_tiles")),
        probes_per_group=drawn["probes"],
    )
    (d, e), prefix, batch = drawn["dims"], drawn["prefix"], drawn["batch"]
    heads, key_heads = drawn["heads"]
    settings = {"prefix": prefix, "scale": d**-0.5, "tau": drawn["tau"]}
    queries = keys = prefix + tiling.grid.size
    if tiling.query_grid is not None:
        settings["query_prefix"] = drawn["query_prefix"]
        queries = drawn["query_prefix"] + tiling.query_grid.size
    if drawn["error"] is not None:
        settings["error"] = drawn["error"]
    else:  # fractions, because a share that is equal to the budget would be a tie
        settings["expand"] = drawn["expand"] * tiling.tiles
    q = rng.normal(size=(batch, heads, queries, d)) * rng.choice([0.3, 1.0, 2.0])
    k = keys_of_kind(rng, (batch, key_heads, keys, d), prefix, tiling, drawn["kind"])
    v = rng.normal(size=(batch, key_heads, keys, e)) * rng.choice([0.3, 1.0, 2.0])
    case = TiledCase(*(torch.from_numpy(x).to(dtype) for x in (q, k, v)), tiling, settings)
    if drawn["masked"]:
        valid = draw_mask(rng, batch, tiling)
        if drawn["layout"] == "one image":
            valid = valid[:1].repeat(batch, 1)
        case = case.masked(valid)
    return case.map(lambda x: lay_out(x, drawn["layout"]))


def _draw_options(rng: np.random.Generator) -> dict[str, Any]:
    def grid(most: int) -> Grid:
        height, width = (int(x) for x in rng.integers(1, most, 2))
        frames = int(rng.choice([1, 1, 2, 3]))
        return Grid(-(-height // frames), width, frames=frames)

    key_heads, share = (int(x) for x in rng.integers(1, 3, 2))
    error = float(rng.choice([0.0, 1e-3, 0.02, 0.1, 0.5, 5.0]))
    return {
        "grid": grid(25),
        "query_grid": grid(20) if rng.random() < 0.3 else None,
        "side": int(rng.choice([8, 8, 8, 5, 3])),
        "group_tiles": int(rng.integers(1, 3)),
        "probes": int(rng.integers(0, 4)),
        "prefix": int(rng.choice([0, 1, 5])),
        "query_prefix": int(rng.choice([0, 1, 3])),
        "batch": int(rng.integers(1, 3)),
        "heads": (key_heads * share, key_heads),  # of q and of k
        "dims": tuple(int(x) for x in rng.choice(DIMS, 2)),  # of keys and of values
        "kind": str(rng.choice(KINDS)),
        "layout": str(rng.choice(LAYOUTS)),
        "masked": bool(rng.random() < 0.4),
        "tau": float(rng.choice([1.0, 1.0, 0.5, 2.0])),
        "error": error if rng.random() < 0.5 else None,
        "expand": float(rng.choice([0.0, 0.07, 0.19, 0.53, 0.91, 1.0])),  # share of the tiles
    }


def keys_of_kind(
    rng: np.random.Generator, lead: tuple[int, ...], prefix: int, tiling: Tiling, kind: str
) -> np.ndarray:
    """Draw keys of the shape `lead`, one of KINDS."""
    keys = rng.normal(size=lead) * rng.choice([0.5, 1.0, 3.0])
    if kind == "smooth":
        keys[..., prefix:, :] = np.cumsum(keys[..., prefix:, :], -2) / 3
    if kind == "bright":
        keys[..., prefix + rng.integers(tiling.grid.size), :] *= 20
    if kind == "constant":
        keys[..., prefix:, :] = keys[..., prefix : prefix + 1, :]
    if kind == "offset":
        keys += 30.0
    return keys


def draw_mask(rng: np.random.Generator, batch: int, tiling: Tiling) -> Tensor:
    """(B, N): random tokens are missing; often a tile, all but one token, or blocks of tokens, too."""
    valid = torch.from_numpy(rng.random((batch, tiling.grid.size)) < 0.7)
    case = rng.random()
    if case < 0.4:
        gone = tiling.slot_tokens[int(rng.integers(tiling.tiles))]
        valid[:, gone[gone >= 0]] = False
    elif case < 0.5:
        valid[0] = False
    elif case < 0.6:
        valid[:, torch.arange(tiling.grid.size) // BLOCK % 2 == 0] = False
    valid[:, int(rng.integers(tiling.grid.size))] = True
    return valid


def lay_out(x: Tensor, layout: str) -> Tensor:
    """Return a tensor with the values of x (B, H, N, d) in another memory layout; what lies between them
    is NaN. "one image" and "one head" repeat the first one, with a stride of 0."""
    batch, heads, tokens, d = x.shape
    if layout == "contiguous":
        return x
    if layout == "packed":  # part of a projection (B, N, channels), at an odd offset
        storage = x.new_full((batch, tokens, 3 + heads * d + 2), torch.nan)
        view = storage[..., 3 : 3 + heads * d].unflatten(-1, (heads, d)).transpose(1, 2)
        return view.copy_(x)
    if layout == "tokens first":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "strided":  # the channels are not contiguous
        return x.new_full((*x.shape, 2), torch.nan)[..., 1].copy_(x)
    return x[:1].expand_as(x) if layout == "one image" else x[:, :1].expand_as(x)


@dataclass(frozen=True)
class Backend:
    """Kernels of tiled attention, and the cases that they take."""

    name: str
    attend: Callable[[TiledCase, dict[str, Any]], TiledAttention]
    dtypes: tuple[torch.dtype, ...]
    unavailable: str | None = None
    limits: Callable[[int], dict[str, Any]] = lambda seed: {}  # of drawn cases by their seed
    blocks: bool = False  # sums of weights are those of the native kernels
    stores: bool = False  # what it computes is stored in the dtype of q
    choices: int = MOST_CHOICES  # that thresholds for a target are chosen, at most

    def run(self, case: TiledCase, **changes: Any) -> TiledAttention:
        settings = {"error": None, "expand": None, "dense_threshold": 1.0} | case.settings | changes
        return self.attend(case, settings)

    def oracle(self, case: TiledCase) -> ReferenceTiled:
        with patch("bmfa.attention.tiling.MOST_CHOICES", self.choices):
            return case.oracle()

    def draw(self, seed: int, dtype: torch.dtype = torch.float32, **options: Any) -> TiledCase:
        return draw_case(seed, dtype, **self.limits(seed) | options)

    def make(self, seed: int, grid: Any, **options: Any) -> TiledCase:
        probes = self.limits(seed).get("probes", 0)
        return make_case(seed, grid, **{"probes": probes} | options)

    def thin(self, cases: Iterable[T], step: int = 3) -> list[T]:
        """All cases; of those for Triton's interpreter, which is slow, each `step`-th one."""
        return list(cases)[:: step if self.name == "triton" else 1]

    def exact_heads(self, grid: Any = (13, 24), **options: Any) -> TiledCase:
        """Nothing is expanded in the first of three heads, and much in the others."""
        settings = {"scale": 0.2, "error": 0.05, "dense_threshold": 0.3}
        case = self.make(4, grid, smooth=False, heads=3, **settings, **options)
        return replace(case, q=case.q * torch.tensor([0.1, 4, 4]).to(case.q).view(1, 3, 1, 1))

    def sums(self, case: TiledCase) -> float:
        """Relative rounding of a sum of weights, if it is more than that of torch."""
        keys = case.k.shape[2]
        return (min(keys, BLOCK) + keys / BLOCK) * EPS / 2 if self.blocks else 0.0

    def check(
        self, case: TiledCase, amplified: bool = False, **changes: Any
    ) -> tuple[TiledAttention, ReferenceTiled]:
        """Compare with the specification; at most 1 of 20 groups may have tied losses.

        Args:
            case: The problem.
            amplified: True if rounding of scores may be amplified.
            changes: Settings.
        """
        got, want, compared, _ = self._check(case.set(**changes), amplified)
        assert amplified or compared >= 0.95 * got.expanded_count.numel()
        return got, want

    def check_many(self, seeds: range, dtype: torch.dtype, **options: Any) -> None:
        """Compare drawn cases: at most 1 group of 100 has tied losses, and of the native kernels 1 case
        of 50 an amplified error.

        A shrinkage is the quotient of lengths that may be SMALLEST_CORRECTION of the output, so that it
        amplifies rounding, and weights below 1e-38 of all are 0 in float32. Where a predicted error is
        within rounding of its limit, thresholds are chosen once more or less.
        """
        compared = groups = loose = 0
        for seed in seeds:
            case = self.draw(seed, dtype, **options)
            try:
                got, _, count, tight = self._check(case)
            except AssertionError:
                fewer = replace(self, choices=self._choices_of(case))
                got, _, count, tight = *fewer._check(case)[:3], False
            compared, groups = compared + count, groups + got.expanded_count.numel()
            loose += not tight
        assert compared >= 0.99 * groups, (compared, groups)
        assert loose <= 0.02 * len(seeds), loose

    def _choices_of(self, case: TiledCase) -> int:
        """After how many choices of thresholds the result is that of the specification; at most all."""
        count = self.run(case).expanded_count
        for choices in range(1, self.choices):
            want = replace(self, choices=choices).oracle(case)
            if np.array_equal(want.expanded.sum(-1), count.numpy()):
                return choices
        return self.choices

    def _check(
        self, case: TiledCase, amplified: bool = False
    ) -> tuple[TiledAttention, ReferenceTiled, int, bool]:
        """Both results, the number of groups compared, and whether errors are not amplified."""
        got, want, sums = self.run(case), self.oracle(case), self.sums(case)
        assert got.output.dtype == case.q.dtype
        assert got.output.shape == (*case.q.shape[:3], case.v.shape[3])
        if self.blocks:
            assert not got.output.masked_fill(case.seen.unsqueeze(-1), 0.0).any()
        try:
            return got, want, compare(case, got, want, sums, self.stores), True
        except AssertionError:
            if not (amplified or (sums and (want.shrinkage > 0).any())):
                raise
        sums += EPS * (1 + largest_score(case)) / SMALLEST_CORRECTION
        return got, want, compare(case, got, want, sums, self.stores), False


def _run_eager(case: TiledCase, settings: dict[str, Any]) -> TiledAttention:
    got = eager_attention(case.q, case.k, case.v, case.tiling, valid=case.valid, **settings)
    assert got is not None
    return got


def _run_native(case: TiledCase, settings: dict[str, Any]) -> TiledAttention:
    budget = {name: settings[name] for name in ("error", "expand", "dense_threshold")}
    rest = {x: settings[x] for x in ("prefix", "scale", "tau", "query_prefix") if x in settings}
    prepared = native.prepare_tiles(case.q, case.k, case.v, case.tiling, valid=case.valid, **rest)
    return prepared(**budget)


def _run_triton(case: TiledCase, settings: dict[str, Any]) -> TiledAttention:
    """Run on `DEVICE`, and return the result on the CPU."""
    from bmfa.attention.kernels.triton.tiles import operators

    q, k, v = (x.to(DEVICE) for x in (case.q, case.k, case.v))
    valid = None if case.valid is None else case.valid.to(DEVICE)
    settings = {x: settings[x] for x in settings if x != "query_prefix"}  # read off the shapes
    got = operators.tiled_attention(q, k, v, case.tiling, valid=valid, **settings)
    parts = (got.output, got.expanded_count, got.probes, got.expanded)
    return TiledAttention(*(x.cpu() for x in parts))


def _limits_of_triton(seed: int) -> dict[str, Any]:
    dim = (32, 64, 80)[seed % 3]
    sizes = {"side": 8, "probes": 1, "dims": (dim, dim), "batch": 1, "heads": (2, 1 + seed % 2)}
    return sizes | {"layout": LAYOUTS[seed % 3]}


EAGER = Backend("eager", _run_eager, (torch.float64, torch.float32, torch.float16, torch.bfloat16))
HALF_TYPES = (torch.bfloat16, torch.float16)
NATIVE = Backend(
    "native", _run_native, (torch.float32, *HALF_TYPES), library.unavailable_reason(), blocks=True
)
TRITON = Backend(
    "triton",
    _run_triton,
    # The interpreter computes in NumPy, which has no bfloat16.
    (torch.float32, torch.float16, *([torch.bfloat16] if GPU else [])),
    None if find_spec("triton") else "needs triton",
    _limits_of_triton,
    stores=True,
    choices=1,
)


def compare(
    case: TiledCase,
    got: TiledAttention,
    want: ReferenceTiled,
    sums: float = 0.0,
    stores: bool = False,
) -> int:
    """Assert equal expanded tiles, outputs and probes within rounding; return the groups compared.

    A group may differ in tiles whose loss is within rounding of the threshold. The outputs of such a
    group follow other tiles and are not compared.

    Args:
        case: The problem.
        got: Result of a kernel.
        want: Result of the specification.
        sums: Relative rounding of a sum of weights by the kernel, if it is more than that of torch.
        stores: True if the kernel stores mean queries in the dtype of q.
    """
    # A score of size s is off by about eps s. That changes losses and weights by the same share.
    rounding = float(torch.finfo(case.q.dtype).eps) * (1 + largest_score(case))
    expanded = got.expanded.numpy()
    assert got.expanded_count.dtype == torch.int32
    assert np.array_equal(got.expanded_count.numpy(), expanded.sum(-1))
    same = (expanded == want.expanded).all(-1)  # (B, H, R)
    parity = case.tiling.group_order.argsort().numpy() % 2
    thresholds = want.thresholds[:, parity]  # (B, R)
    for index in zip(*np.nonzero(~same), strict=True):
        moved = want.losses[index][expanded[index] != want.expanded[index]]
        threshold = thresholds[index[0], index[2]]
        # The threshold follows from errors of probes, whose differences amplify rounding.
        assert np.isfinite(threshold), moved  # nothing is expanded
        assert (abs(moved - threshold) <= 100 * rounding * threshold).all(), (moved, threshold)
    output, seen = got.output.detach().double().numpy(), case.seen.numpy()
    compared = _queries_of(case, same) & seen
    assert np.isfinite(output[np.broadcast_to(seen, compared.shape)]).all()
    allowed = allowed_difference(case, want, sums)
    difference = abs(output - want.output).max(-1)[compared]
    assert difference.size == 0 or difference.max() <= allowed, (difference.max(), allowed)
    unit = torch.finfo(case.q.dtype).eps if stores else EPS
    _compare_probes(case, got.probes, want, same, allowed, float(unit))
    return int(same.sum())


def _compare_probes(
    case: TiledCase,
    found: Tensor,
    want: ReferenceTiled,
    same: np.ndarray,
    allowed: float,
    unit: float,
) -> None:
    """Assert the same probes; where rounding moves a draw to another query, at most 1 in 50 differs."""
    probes, wanted = found.detach().numpy(), want.probes
    assert probes.dtype == np.float64 and probes.shape == wanted.shape
    assert np.array_equal(probes[..., 2] == 0, wanted[..., 2] == 0)  # groups without queries
    # The mean query is rounded, which moves |q - qbar|^4 by 4 times its share of the distance.
    q = case.q.double()
    spread = (q - q.nanmean(2, keepdim=True)).abs().nan_to_num(0.0).max()
    moved = float(q.abs().nan_to_num(0.0).max() / spread) if spread > 0 else np.inf
    weights = min(1.0, 8 * unit * (1 + moved) * q.shape[-1] ** 0.5)
    drawn = np.isclose(probes[..., 2], wanted[..., 2], rtol=weights)
    assert (~drawn).sum() <= max(1, drawn.size / 50), (probes[..., 2], wanted[..., 2])
    # Each channel of an output, and of an exact one, is within the tolerance of `compare`.
    allowed *= case.v.shape[-1] ** 0.5
    order = case.tiling.group_order.repeat_interleave(case.tiling.probes_per_group)
    in_groups = drawn & same[:, :, order[: probes.shape[2]].numpy()]
    for column, compared, limit in ((1, drawn, allowed), (0, in_groups, 2 * allowed)):
        difference = abs(np.sqrt(probes[..., column]) - np.sqrt(wanted[..., column]))[compared]
        assert difference.size == 0 or difference.max() <= limit, (difference.max(), limit)


def same(got: TiledAttention, want: TiledAttention, case: TiledCase | None = None) -> bool:
    """True for equal bits, those of the outputs of missing queries of a case apart."""
    outputs = [x.output for x in (got, want)]
    if case is not None:
        outputs = [x.where(case.seen.unsqueeze(-1), 0.0) for x in outputs]
    pairs = (outputs, (got.expanded, want.expanded), (got.probes, want.probes))
    return all(torch.equal(*pair) for pair in pairs)


def allowed_difference(case: TiledCase, want: ReferenceTiled, sums: float = 0.0) -> float:
    """Largest accepted difference of an element of an output; see `compare`."""
    # The first-order correction may exceed the values.
    largest_value = max(float(case.v.nan_to_num(0.0).abs().max()), abs(want.output).max())
    eps = float(torch.finfo(case.q.dtype).eps)
    if case.q.dtype == torch.float64:
        # The reference rounds too, so its errors are no yardstick. The shrinkage is the quotient of
        # lengths that may be SMALLEST_CORRECTION of the output, which amplifies rounding.
        return eps * (1 + largest_score(case)) / SMALLEST_CORRECTION * largest_value
    # A sum of d products is off by about sqrt(d) roundings. The correction is one such sum times a
    # quotient of two others, its shrinkage, which a single probe may determine.
    own = eps * case.q.shape[-1] ** 0.5 * (2 if (want.shrinkage > 0).any() else 1) + sums
    dense_error = float((case.dense(case.q.dtype).double() - case.dense()).abs().max())
    return 2 * dense_error + own * largest_value


def largest_score(case: TiledCase) -> float:
    """Upper bound |q| |k| scale / tau on the absolute scores."""
    q, k = (x.nan_to_num(0.0).double().norm(dim=-1).amax() for x in (case.q, case.k))
    return float(q * k) * case.factor


def _queries_of(case: TiledCase, groups: np.ndarray) -> np.ndarray:
    """Return (B, H, Q) from a flag for each group; True for the prefix."""
    flags = np.ones((*groups.shape[:2], case.q.shape[2]), bool)
    for group, tokens in enumerate(case.tiling.queries.slot_tokens.numpy()):
        flags[..., case.query_prefix + tokens[tokens >= 0]] = groups[..., group, None]
    return flags
