"""Seeded problems for the native kernels: any grids, heads, dimensions, masks and memory layouts."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from bmfa import Grid
from bmfa.attention.kernels import native
from bmfa.attention.kernels.native import library
from bmfa.attention.kernels.reference.tiles import ReferenceTiled
from bmfa.attention.tiling import SMALLEST_CORRECTION, TiledAttention, Tiling
from tiled_cases import KINDS, TiledCase, allowed_difference, compare, keys_of_kind, largest_score

SETS = library.supported_sets()
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DIMS = (16, 17, 24, 32, 33, 64, 72, 80, 96, 128, 160, 256)
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by their size in bytes
BLOCK = 64  # keys of which the kernel sums the weights one by one
LAYOUTS = ("contiguous", "packed", "tokens first", "strided", "one image", "one head")


def draw_case(seed: int, dtype: torch.dtype = torch.float32, **options: Any) -> TiledCase:
    """Draw a case of self-attention or, in a third of the cases, of queries with their own grid.

    k and v may have fewer heads than q. Tokens that do not exist hold NaN.

    Args:
        seed: Seed.
        dtype: Dtype of q, k and v.
        options: `dims` (d, e), `grid`, `query_grid`, `prefix`, `batch`, `heads` (of q and of k), `kind`,
            `layout`, `masked`, `side`, `group_tiles`, `probes`, `error` and `expand` replace what is
            drawn.
    """
    rng = np.random.default_rng([seed, 22])
    drawn = _draw_options(rng) | options
    tiling = Tiling(
        drawn["grid"], drawn["side"], drawn["query_grid"], drawn["group_tiles"],
        probes_per_group=drawn["probes"],
    )  # fmt: skip
    (d, e), prefix, batch = drawn["dims"], drawn["prefix"], drawn["batch"]
    heads, key_heads = drawn["heads"]
    own_queries = tiling.query_grid is not None
    query_prefix = drawn["query_prefix"] if own_queries else prefix
    queries = query_prefix + tiling.queries.grid.size
    keys = prefix + tiling.grid.size
    q = rng.normal(size=(batch, heads, queries, d)) * rng.choice([0.3, 1.0, 2.0])
    k = keys_of_kind(rng, (batch, key_heads, keys, d), prefix, tiling, drawn["kind"])
    v = rng.normal(size=(batch, key_heads, keys, e)) * rng.choice([0.3, 1.0, 2.0])
    q, k, v = (torch.from_numpy(x).to(dtype) for x in (q, k, v))
    valid = None
    if drawn["masked"]:
        valid = _draw_mask(rng, batch, tiling)
        if drawn["layout"] == "one image":
            valid = valid[:1].repeat(batch, 1)
        gone = torch.cat((valid.new_zeros(batch, prefix), ~valid), 1)[:, None, :, None]
        q = q if own_queries else q.masked_fill(gone, torch.nan)
        k, v = (x.masked_fill(gone, torch.nan) for x in (k, v))
    q, k, v = (lay_out(x, drawn["layout"]) for x in (q, k, v))
    settings = {"prefix": prefix, "scale": d**-0.5, "tau": drawn["tau"]}
    if own_queries:
        settings["query_prefix"] = query_prefix
    if drawn.get("error") is not None:
        settings["error"] = drawn["error"]
    else:  # fractions, because a share that is equal to the budget would be a tie
        settings["expand"] = drawn["expand"] * tiling.tiles
    return TiledCase(q, k, v, tiling, settings, valid)


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
        "heads": (key_heads * share, key_heads),
        "dims": tuple(int(x) for x in rng.choice(DIMS, 2)),
        "kind": str(rng.choice(KINDS)),
        "layout": str(rng.choice(LAYOUTS)),
        "masked": bool(rng.random() < 0.4),
        "tau": float(rng.choice([1.0, 1.0, 0.5, 2.0])),
        "error": error if rng.random() < 0.5 else None,
        "expand": float(rng.choice([0.0, 0.07, 0.19, 0.53, 0.91, 1.0])),
    }


def _draw_mask(rng: np.random.Generator, batch: int, tiling: Tiling) -> Tensor:
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
    if layout == "one image":
        return x[:1].expand_as(x)
    assert layout == "one head"
    return x[:, :1].expand_as(x)


def run(case: TiledCase, **changes: Any) -> TiledAttention:
    """Run the tiled kernel."""
    settings = {"error": None, "expand": None, "dense_threshold": 1.0} | case.settings | changes
    budget = {name: settings.pop(name) for name in ("error", "expand", "dense_threshold")}
    attend = native.prepare_tiles(case.q, case.k, case.v, case.tiling, valid=case.valid, **settings)
    return attend(**budget)


def run_exact(case: TiledCase) -> Tensor:
    """Run the exact kernel."""
    settings = {name: case.settings[name] for name in ("prefix", "scale", "tau")}
    return native.exact_attention(
        case.q, case.k, case.v, valid=case.valid,
        mask_queries=case.tiling.query_grid is None, **settings,
    )  # fmt: skip


def results(case: TiledCase) -> tuple[Tensor, ...]:
    """All results of both kernels."""
    got = run(case)
    return got.output, got.expanded, got.expanded_count, got.probes, run_exact(case)


def equal(got: Sequence[Tensor], want: Sequence[Tensor]) -> bool:
    """True for equal bits. NumPy compares, because operations of torch that run in several threads hang
    in a forked process."""
    return all(np.array_equal(_bits(x), _bits(y)) for x, y in zip(got, want, strict=True))


def _bits(x: Tensor) -> np.ndarray:
    return x.view(torch.uint8 if x.dtype == torch.bool else INTEGERS[x.element_size()]).numpy()


def replace_qkv(case: TiledCase, change: Callable[[Tensor], Tensor]) -> TiledCase:
    """The same case with a function of q, k and v."""
    return replace(case, q=change(case.q), k=change(case.k), v=change(case.v))


def image_of(case: TiledCase, b: int) -> TiledCase:
    """One image of a case."""
    one = replace_qkv(case, lambda x: x[b : b + 1])
    valid = case.valid if case.valid is None or len(case.valid) == 1 else case.valid[b : b + 1]
    return replace(one, valid=valid)


def dense(case: TiledCase, dtype: torch.dtype = torch.float64) -> Tensor:
    """`scaled_dot_product_attention` in a dtype; invalid queries are 0."""
    case = expand_heads(replace_qkv(case, lambda x: x.nan_to_num(0.0).to(dtype)))
    mask = None
    if case.valid is not None:
        before = case.valid.new_ones(len(case.valid), case.settings["prefix"])
        mask = torch.cat((before, case.valid), 1)[:, None, None]
    factor = case.settings["scale"] / case.settings["tau"]
    output = scaled_dot_product_attention(case.q, case.k, case.v, attn_mask=mask, scale=factor)
    if mask is not None and case.tiling.query_grid is None:
        output = output.where(mask.mT, 0.0)
    return output


def check_exact(case: TiledCase) -> None:
    """Assert an error of at most twice that of torch in the same dtype, and the rounding of sums."""
    got, want = run_exact(case), dense(case)
    assert got.dtype == case.q.dtype and got.shape == want.shape
    theirs = float((dense(case, case.q.dtype).double() - want).abs().max())
    ours = float((got.double() - want).abs().max())
    # Partial sums of a score walk to about |q| |k| sqrt(j / d^2) after j of d terms, so that their
    # roundings add up to about |q| |k| eps / 2.
    eps = float(torch.finfo(torch.float32).eps)
    rounding = rounding_of_sums(case) + 2 * eps + eps / 2 * largest_score(case)
    allowed = 2 * theirs + rounding * float(case.v.nan_to_num(0.0).abs().max())
    assert ours <= allowed, (ours, theirs, allowed)


def expand_heads(case: TiledCase) -> TiledCase:
    """The same case with a copy of its key head for each query head."""
    share = case.q.shape[1] // case.k.shape[1]
    k, v = (x.repeat_interleave(share, 1) for x in (case.k, case.v))
    return replace(case, k=k, v=v)


def rounding_of_sums(case: TiledCase) -> float:
    """Relative error of a sum of weights: BLOCK of them one by one, then the blocks one by one."""
    keys = case.k.shape[2]
    return (min(keys, BLOCK) + keys / BLOCK) * float(torch.finfo(torch.float32).eps) / 2


def check(case: TiledCase, **changes: Any) -> tuple[TiledAttention, ReferenceTiled]:
    """Compare the kernel with the specification; at most 1 of 20 groups may have tied losses."""
    got, want, compared, _ = _check(case, **changes)
    assert compared >= 0.95 * got.expanded_count.numel()
    return got, want


def check_many(seeds: range, dtype: torch.dtype = torch.float32, **options: Any) -> None:
    """Compare drawn cases: at most 1 group of 100 has tied losses, and 1 case of 50 an amplified error.

    A shrinkage is the quotient of lengths that may be SMALLEST_CORRECTION of the output, so that it
    amplifies rounding, and weights below 1e-38 of all are 0 in float32.
    """
    compared = groups = amplified = 0
    for seed in seeds:
        got, _, count, tight = _check(draw_case(seed, dtype, **options))
        compared, groups = compared + count, groups + got.expanded_count.numel()
        amplified += not tight
    assert compared >= 0.99 * groups, (compared, groups)
    assert amplified <= 0.02 * len(seeds), amplified


def check_amplified(case: TiledCase) -> None:
    """Compare with the specification, where rounding of scores is amplified."""
    _check(case, amplified=True)


def _check(
    case: TiledCase, amplified: bool = False, **changes: Any
) -> tuple[TiledAttention, ReferenceTiled, int, bool]:
    """Compare with the specification.

    Returns:
        Both results, the number of groups that `compare` could compare, and whether the errors are
        within the tolerance of a kernel, and not only within that of amplified rounding.
    """
    got, whole = run(case, **changes), expand_heads(case)
    whole = replace(whole, settings=whole.settings | changes)
    want = whole.oracle()
    assert got.output.dtype == case.q.dtype and got.output.shape[:3] == case.q.shape[:3]
    if case.valid is not None and case.tiling.query_grid is None:
        assert bool((got.output.masked_fill(whole.seen[..., None], 0.0) == 0).all())
    sums = rounding_of_sums(case)
    try:
        compared = compare(whole, got, want, sums)
        _compare_probes(whole, got, want, sums)
        return got, want, compared, True
    except AssertionError:
        if not amplified and not (want.shrinkage > 0).any():
            raise
    sums += float(torch.finfo(torch.float32).eps) * (1 + largest_score(whole)) / SMALLEST_CORRECTION
    compared = compare(whole, got, want, sums)
    _compare_probes(whole, got, want, sums)
    return got, want, compared, False


def _compare_probes(
    case: TiledCase, got: TiledAttention, want: ReferenceTiled, sums: float
) -> None:
    """Assert the same probes; where rounding moves a draw to another query, at most 1 in 50 differs."""
    probes, wanted = got.probes.double().numpy(), want.probes
    assert probes.shape == wanted.shape
    assert np.array_equal(probes[..., 2] == 0, wanted[..., 2] == 0)  # groups without queries
    # The mean query is rounded, which moves |q - qbar|^4 by 4 times its share of the distance.
    q = case.q.double()
    spread = (q - q.nanmean(2, keepdim=True)).abs().nan_to_num(0.0).max()
    moved = float(q.abs().nan_to_num(0.0).max() / spread) if spread > 0 else np.inf
    eps = float(torch.finfo(torch.float32).eps)
    same = np.isclose(
        probes[..., 2], wanted[..., 2], rtol=min(1.0, 8 * eps * (1 + moved) * q.shape[-1] ** 0.5)
    )
    assert (~same).sum() <= max(1, same.size / 50), (probes[..., 2], wanted[..., 2])
    # Each channel of an output, and of an exact one, is within the tolerance of `compare`.
    allowed = case.v.shape[-1] ** 0.5 * allowed_difference(case, want, sums)
    norms = abs(np.sqrt(probes[..., 1]) - np.sqrt(wanted[..., 1]))[same]
    assert norms.size == 0 or norms.max() <= allowed, (norms.max(), allowed)
    tiling = case.tiling
    order = tiling.group_order.repeat_interleave(tiling.probes_per_group)[: probes.shape[2]]
    same &= (got.expanded.numpy() == want.expanded).all(-1)[:, :, order.numpy()]
    errors = abs(np.sqrt(probes[..., 0]) - np.sqrt(wanted[..., 0]))[same]
    assert errors.size == 0 or errors.max() <= 2 * allowed, (errors.max(), allowed)
