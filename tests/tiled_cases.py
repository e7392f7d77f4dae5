"""Seeded problems of tiled attention, and their comparison with the reference."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from bmfa.attention.kernels.reference.tiles import ReferenceTiled, tiled_attention
from bmfa.attention.tiling import SMALLEST_CORRECTION, TiledAttention, Tiling
from bmfa.grid import Grid

NAMED_GRIDS = (
    (1, 1),
    (1, 7),
    (8, 8),
    (9, 9),
    (14, 14),
    (16, 25),
    (24, 40),
    (37, 37),
    (33, 64),
)
KINDS = ("noise", "smooth", "bright", "constant", "offset")


@dataclass(frozen=True)
class TiledCase:
    """q, k, v on a grid with all settings."""

    q: Tensor
    k: Tensor
    v: Tensor
    tiling: Tiling
    settings: dict[str, Any]  # prefix, scale, tau, error or expand
    valid: Tensor | None

    def oracle(self) -> ReferenceTiled:
        q, k, v = (x.double().numpy() for x in (self.q, self.k, self.v))
        valid = None if self.valid is None else self.valid.numpy()
        return tiled_attention(q, k, v, self.tiling, valid=valid, **self.settings)

    @property
    def seen(self) -> Tensor:
        """(B, 1, prefix + N) bool, True for queries with a specified output."""
        batch, prefix = len(self.q), self.settings["prefix"]
        seen = torch.ones(batch, 1, self.q.shape[2], dtype=torch.bool)
        if self.valid is not None and self.tiling.query_grid is None:
            seen[:, 0, prefix:] = self.valid
        return seen


def tiled_case(
    seed: int,
    dtype: torch.dtype = torch.float64,
    shape: tuple[int, int] | None = None,
    kind: str | None = None,
    poison: bool = True,
) -> TiledCase:
    """Draw a case of any size up to 20x20, or of a given shape."""
    generator = np.random.default_rng(seed)
    height, width = shape or (int(x) for x in generator.integers(1, 21, 2))
    tiling = Tiling(
        Grid(height, width),
        side=8 if generator.random() < 0.5 else int(generator.integers(2, 6)),
        group_tiles=1 + seed % 2,
    )
    prefix = int(generator.choice([0, 1, 5]))
    batch, heads = (int(x) for x in generator.integers(1, 3, 2))
    dim = int(generator.choice([32, 64, 80]))
    lead = (batch, heads, prefix + tiling.grid.size, dim)
    q, v = (generator.normal(size=lead) * generator.choice([0.3, 1.0, 2.0]) for _ in range(2))
    k = keys_of_kind(generator, lead, prefix, tiling, kind or str(generator.choice(KINDS)))
    q, k, v = (torch.from_numpy(x).to(dtype) for x in (q, k, v))
    valid = _mask(generator, batch, tiling) if generator.random() < 0.4 else None
    if valid is not None and poison:
        missing = torch.cat((valid.new_zeros(batch, prefix), ~valid), 1)[:, None, :, None]
        q, k, v = (x.masked_fill(missing, torch.nan) for x in (q, k, v))
    tau = float(generator.choice([1.0, 1.0, 0.5, 2.0]))
    settings = {"prefix": prefix, "scale": dim**-0.5, "tau": tau}
    return TiledCase(q, k, v, tiling, settings | _mode(generator, tiling), valid)


def keys_of_kind(
    generator: np.random.Generator, lead: tuple[int, ...], prefix: int, tiling: Tiling, kind: str
) -> np.ndarray:
    """Draw keys of the shape `lead`, one of KINDS."""
    keys = generator.normal(size=lead) * generator.choice([0.5, 1.0, 3.0])
    if kind == "smooth":
        keys[..., prefix:, :] = np.cumsum(keys[..., prefix:, :], -2) / 3
    if kind == "bright":
        keys[..., prefix + generator.integers(tiling.grid.size), :] *= 20
    if kind == "constant":
        keys[..., prefix:, :] = keys[..., prefix : prefix + 1, :]
    if kind == "offset":
        keys += 30.0
    return keys


def _mask(generator: np.random.Generator, batch: int, tiling: Tiling) -> Tensor:
    """Remove random tokens, and in half of the cases a tile; leave at least one token."""
    valid = torch.from_numpy(generator.random((batch, tiling.grid.size)) < 0.7)
    if generator.random() < 0.5:
        gone = tiling.slot_tokens[int(generator.integers(tiling.tiles))]
        valid[:, gone[gone >= 0]] = False
    valid[:, int(generator.integers(tiling.grid.size))] = True
    return valid


def _mode(generator: np.random.Generator, tiling: Tiling) -> dict[str, Any]:
    if generator.random() < 0.5:
        return {"error": float(generator.choice([0.0, 1e-3, 0.02, 0.1, 0.5, 5.0]))}
    # A fraction, because a mean share that is equal to the budget would be a tie.
    share = float(generator.choice([0.0, 0.07, 0.19, 0.53, 0.91, 1.0]))
    return {"expand": share * tiling.tiles}


def compare(case: TiledCase, got: TiledAttention, want: ReferenceTiled, sums: float = 0.0) -> int:
    """Assert equal expanded tiles and outputs within rounding; return the number of groups compared.

    A group may differ in tiles whose loss is within rounding of the threshold. The outputs of such a
    group follow other tiles and are not compared.

    Args:
        case: The problem.
        got: Result of a kernel.
        want: Result of the specification.
        sums: Relative rounding of a sum of weights by the kernel, if it is more than that of torch.
    """
    # A score of size s is off by about eps s. That changes losses and weights by the same share.
    rounding = float(torch.finfo(case.q.dtype).eps) * (1 + largest_score(case))
    expanded = got.expanded.numpy()
    assert got.expanded_count.dtype == torch.int32
    assert np.array_equal(got.expanded_count.numpy(), expanded.sum(-1))
    same = (expanded == want.expanded).all(-1)  # (B, H, R)
    thresholds = group_thresholds(case, want)
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
    return int(same.sum())


def allowed_difference(case: TiledCase, want: ReferenceTiled, sums: float = 0.0) -> float:
    """Largest accepted difference of an element of an output; see `compare`."""
    # The first-order correction may exceed the values.
    largest_value = max(abs(np.nan_to_num(case.v.double().numpy())).max(), abs(want.output).max())
    if case.q.dtype == torch.float64:
        # The reference rounds too, so its errors are no yardstick. The shrinkage is the quotient of
        # lengths that may be SMALLEST_CORRECTION of the output, which amplifies rounding.
        rounding = float(torch.finfo(case.q.dtype).eps) * (1 + largest_score(case))
        return rounding / SMALLEST_CORRECTION * largest_value
    # A sum of d products is off by about sqrt(d) roundings. The correction is one such sum times a
    # quotient of two others, its shrinkage, which a single probe may determine.
    own = torch.finfo(case.q.dtype).eps * case.q.shape[-1] ** 0.5 * largest_value
    own = own * (2 if (want.shrinkage > 0).any() else 1) + sums * largest_value
    return 2 * dense_error(case) + own


def group_thresholds(case: TiledCase, want: ReferenceTiled) -> np.ndarray:
    """(B, R) threshold of each group."""
    parity = np.empty(case.tiling.groups, int)
    parity[case.tiling.group_order.numpy()] = np.arange(case.tiling.groups) % 2
    return want.thresholds[:, parity]


def dense_error(case: TiledCase) -> float:
    """Largest error of dense attention in the dtype of the case, against float64."""
    q, k, v = (x.nan_to_num(0.0) for x in (case.q, case.k, case.v))
    mask = None
    if case.valid is not None:
        before = case.valid.new_ones(len(case.valid), case.settings["prefix"])
        mask = torch.cat((before, case.valid), 1)[:, None, None]
    scale = case.settings["scale"] / case.settings["tau"]
    got, exact = (
        scaled_dot_product_attention(*(x.to(dtype) for x in (q, k, v)), attn_mask=mask, scale=scale)
        for dtype in (case.q.dtype, torch.float64)
    )
    error = (got.double() - exact).abs().amax(-1)
    return float(error[case.seen.expand_as(error)].max())


def largest_score(case: TiledCase) -> float:
    """Upper bound |q| |k| scale / tau on the absolute scores."""
    q, k = (x.nan_to_num(0.0).double().norm(dim=-1).amax() for x in (case.q, case.k))
    return float(q * k) * case.settings["scale"] / case.settings["tau"]


def _queries_of(case: TiledCase, groups: np.ndarray) -> np.ndarray:
    """Return (B, H, Q) from a flag for each group; True for the prefix."""
    tiling = case.tiling.queries
    prefix = case.q.shape[2] - tiling.grid.size
    flags = np.ones((*groups.shape[:2], prefix + tiling.grid.size), bool)
    for tile, tokens in enumerate(tiling.slot_tokens.numpy()):
        flags[..., prefix + tokens[tokens >= 0]] = groups[..., tile, None]
    return flags
