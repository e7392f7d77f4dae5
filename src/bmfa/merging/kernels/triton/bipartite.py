"""Bipartite matching and merging of tokens in one Triton kernel, one program a picture."""

# Triton's language has no types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,import"

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from bmfa.attention.kernels.triton.launch import CachedLaunch
from bmfa.merging.kernels.triton.features import feature_rows, load_rows, statistics, store_rows

# (destinations a step of the matching, channels a step, warps, stages, registers a thread), pinned.
# 128 registers let two programs share a multiprocessor; long lists of edges and float32 need more.
CONFIGURATION = (32, 64, 8, 1, 128)

# Above every finite cost that is compared: also what an overflowing cost becomes.
HIGHEST = tl.constexpr(3.0e38)


@triton.jit
def _weights(weight, rows, T, PARTS: tl.constexpr, ROWS: tl.constexpr):
    """The weights of chosen tokens, added up from their parts (PARTS, T)."""
    part = tl.arange(0, ROWS)
    address = weight + part[:, None] * T + rows[None, :]
    inside = (part < PARTS)[:, None] & (rows < T)[None, :]
    return tl.sum(tl.load(address, mask=inside, other=0.0), 0)


@triton.jit
def _cheapest(
    features, weight, T, prefix, f_h, f_t, f_c,
    F: tl.constexpr, KIND: tl.constexpr, HEADS: tl.constexpr, PAIR: tl.constexpr,
    PARTS: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr, STEP: tl.constexpr,
    BLOCK_F: tl.constexpr,
):  # fmt: skip
    """For each a its cheapest b: cost and index among the odd positions, ties to the lowest."""
    a = 2 * tl.arange(0, HALF)
    shift_a = tl.zeros((HALF,), tl.float32)
    factor_a = shift_a
    if KIND != "given":
        shift_a, factor_a = statistics(features, a, a < T, f_h, f_t, f_c, F, KIND, HEADS, BLOCK_F)
    if PAIR != "none":
        weight_a = _weights(weight, a, T, PARTS, ROWS)
    best = tl.full((HALF,), float("inf"), tl.float32)
    choice = tl.zeros((HALF,), tl.int32)
    for step in range(0, HALF, STEP):
        index = step + tl.arange(0, STEP)
        b = 2 * index + 1
        product = tl.zeros((HALF, STEP), tl.float32)
        norm_a = tl.zeros((HALF,), tl.float32)
        norm_b = tl.zeros((STEP,), tl.float32)
        shift_b = norm_b
        factor_b = norm_b
        if KIND != "given":
            shift_b, factor_b = statistics(
                features, b, b < T, f_h, f_t, f_c, F, KIND, HEADS, BLOCK_F
            )
        for first in range(0, F, BLOCK_F):
            f_a = feature_rows(
                features, a, a < T, shift_a, factor_a, first, f_h, f_t, f_c, F, KIND, HEADS, BLOCK_F
            )
            f_b = feature_rows(
                features, b, b < T, shift_b, factor_b, first, f_h, f_t, f_c, F, KIND, HEADS, BLOCK_F
            )
            product = tl.dot(f_a, tl.trans(f_b), product, input_precision="ieee")
            norm_a += tl.sum(f_a.to(tl.float32) * f_a.to(tl.float32), 1)
            norm_b += tl.sum(f_b.to(tl.float32) * f_b.to(tl.float32), 1)
        cost = norm_a[:, None] + norm_b[None, :] - 2.0 * product
        if PAIR != "none":
            weight_b = _weights(weight, b, T, PARTS, ROWS)
            both = weight_a[:, None] + weight_b[None, :]
            if PAIR == "sum":
                cost *= both
            else:
                cost *= weight_a[:, None] * weight_b[None, :] / tl.where(both > 0.0, both, 1.0)
        # A cost that overflowed stays below the infinity of tokens that may not merge.
        cost = tl.where(cost < HIGHEST, cost, HIGHEST)
        cost = tl.where(((b >= prefix) & (b < T))[None, :], cost, float("inf"))
        least = tl.min(cost, 1)
        where = tl.min(tl.where(cost == least[:, None], index[None, :], HALF), 1)
        choice = tl.where(least < best, where, choice)
        best = tl.minimum(least, best)
    return tl.where((a >= prefix) & (a < T), best, float("inf")), choice


@triton.jit
def _rank(cost, HALF: tl.constexpr):
    """How many costs come before each, ties to the lowest index."""
    index = tl.arange(0, HALF)
    other = cost[None, :]
    mine = cost[:, None]
    before = (other < mine) | ((other == mine) & (index[None, :] < index[:, None]))
    return tl.sum(before.to(tl.int32), 1)


@triton.jit(do_not_specialize=["T", "r", "prefix"])
def merge_kernel(
    x, size, features, weight, x_new, size_new, target,
    T, r, prefix, x_b, x_t, x_c, f_b, f_h, f_t, f_c,
    C: tl.constexpr, F: tl.constexpr, KIND: tl.constexpr, HEADS: tl.constexpr, PAIR: tl.constexpr,
    PARTS: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr, STEP: tl.constexpr,
    R: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """One picture: match even with odd positions, merge the r cheapest edges, write the new tokens.

    The features are given, or the layer norm of the tokens themselves ("normal"), or the unit mean
    over heads of keys ("keys"). R is a power of two with R >= r, or 0: the edges that merge, in order
    of cost, form a short list; everything that is not touched by one of them is copied.
    """
    picture = tl.program_id(0).to(tl.int64)
    x += picture * x_b
    features += picture * f_b
    size += picture * T
    weight += picture * PARTS * T
    target += picture * T
    size_new += picture * (T - r)
    x_new += picture * (T - r) * C

    index = tl.arange(0, HALF)
    a = 2 * index
    b = a + 1
    # Destinations follow the prefix and the sources that stay.
    offset = prefix + (T + 1) // 2 - (prefix + 1) // 2 - r - prefix // 2
    place_b = tl.where(b < prefix, b, offset + index)
    stays_a = a < T
    stays_b = b < T
    if R > 0:
        cost, choice = _cheapest(
            features, weight, T, prefix, f_h, f_t, f_c,
            F, KIND, HEADS, PAIR, PARTS, ROWS, HALF, STEP, BLOCK_F,
        )  # fmt: skip
        rank = _rank(cost, HALF)
        merges = rank < r
        size_a = tl.load(size + a, mask=a < T, other=0.0)

        # The list of edges: source, destination and size of the source.
        edge = tl.arange(0, R)
        alive = edge < r
        hit = edge[:, None] == rank[None, :]
        source = tl.sum(tl.where(hit, a[None, :], 0), 1)
        chosen = tl.sum(tl.where(hit, choice[None, :], 0), 1)
        source_size = tl.sum(tl.where(hit, size_a[None, :], 0.0), 1)
        chosen = tl.where(alive, chosen, -1)
        same = (chosen[:, None] == chosen[None, :]) & alive[:, None]
        share = tl.where(same, source_size[None, :], 0.0)
        # Edges with one destination compute the same token; the cheapest of them writes it.
        writes = alive & (tl.sum((same & (edge[None, :] < edge[:, None])).to(tl.int32), 1) == 0)
        goal = 2 * chosen + 1
        goal_size = tl.load(size + goal, mask=alive, other=1.0)
        total = goal_size + tl.sum(share, 1)
        place = offset + chosen
        tl.store(size_new + place, total, mask=writes)
        for first in range(0, C, BLOCK_C):
            x_source = load_rows(x, source, alive, first, C, x_t, x_c, BLOCK_C).to(tl.float32)
            x_goal = load_rows(x, goal, alive, first, C, x_t, x_c, BLOCK_C).to(tl.float32)
            mixed = tl.dot(share, x_source, x_goal * goal_size[:, None], input_precision="tf32x3")
            store_rows(x_new, place, writes, first, C, mixed / total[:, None], BLOCK_C)

        touched = tl.max((chosen[:, None] == index[None, :]).to(tl.int32), 0)
        stays_a = stays_a & (rank >= r)
        stays_b = stays_b & (touched == 0)
        free = (stays_a & (a >= prefix)).to(tl.int32)
        place_a = tl.where(a < prefix, a, prefix + tl.cumsum(free, 0) - free)
        tl.store(target + a, tl.where(merges, offset + choice, place_a), mask=a < T)
    else:
        free = (stays_a & (a >= prefix)).to(tl.int32)
        place_a = tl.where(a < prefix, a, prefix + tl.cumsum(free, 0) - free)
        tl.store(target + a, place_a, mask=a < T)
    tl.store(target + b, place_b, mask=b < T)

    tl.store(size_new + place_a, tl.load(size + a, mask=stays_a, other=0.0), mask=stays_a)
    tl.store(size_new + place_b, tl.load(size + b, mask=stays_b, other=0.0), mask=stays_b)
    for first in range(0, C, BLOCK_C):
        even = load_rows(x, a, stays_a, first, C, x_t, x_c, BLOCK_C)
        odd = load_rows(x, b, stays_b, first, C, x_t, x_c, BLOCK_C)
        store_rows(x_new, place_a, stays_a, first, C, even, BLOCK_C)
        store_rows(x_new, place_b, stays_b, first, C, odd, BLOCK_C)


def launch_merge(
    x: Tensor,
    size: Tensor,
    features: Tensor | None,
    weight: Tensor | None,
    r: int,
    prefix: int,
    pair: str,
    configuration: tuple[int, int, int, int, int] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """New tokens, new sizes and the new position of every old token."""
    batch, tokens, channels = x.shape
    x_new = torch.empty((batch, tokens - r, channels), dtype=x.dtype, device=x.device)
    size_new = torch.empty((batch, tokens - r), dtype=torch.float32, device=x.device)
    target = torch.empty((batch, tokens), dtype=torch.int32, device=x.device)
    if batch > 0:
        given = x if features is None else features
        parts = 1 if weight is None else weight.shape[1:-1].numel()
        key = (
            x.get_device(), x.dtype, x.shape, x.stride(),
            features is None, given.dtype, given.shape, given.stride(),
            parts, r, prefix, pair, configuration,
        )  # fmt: skip
        plan = _PLANS.get(key)
        if plan is None:
            plan = _PLANS[key] = _plan(x, features, parts, r, prefix, pair, configuration)
        plan(x, size, given, size if weight is None else weight, x_new, size_new, target)
    return x_new, size_new, target


_PLANS: dict[Any, CachedLaunch] = {}


def _plan(
    x: Tensor,
    features: Tensor | None,
    parts: int,
    r: int,
    prefix: int,
    pair: str,
    configuration: tuple[int, int, int, int, int] | None,
) -> CachedLaunch:
    batch, tokens, channels = x.shape
    step, block, warps, stages, registers = configuration or CONFIGURATION
    half = max(16, triton.next_power_of_2((tokens + 1) // 2))
    edges = 0 if r == 0 else max(16, triton.next_power_of_2(r))
    given = x if features is None else features
    kind = "normal" if features is None else "keys" if given.ndim == 4 else "given"
    heads = given.shape[1] if kind == "keys" else 1
    width = given.shape[-1]
    f_b, *f_h, f_t, f_c = given.stride()
    numbers = (tokens, r, prefix, *x.stride(), f_b, f_h[0] if f_h else 0, f_t, f_c)
    constants = (
        channels, width, kind, heads, pair, parts, triton.next_power_of_2(parts),
        half, min(step, half), edges,
        min(64, max(16, triton.next_power_of_2(width))),
        min(block, max(16, triton.next_power_of_2(channels))),
    )  # fmt: skip
    capped = edges <= 32 and given.element_size() == 2
    return CachedLaunch(
        merge_kernel,
        batch,
        numbers + constants,
        num_warps=warps if tokens <= 256 else 2 * warps,
        num_stages=stages,
        maxnreg=registers if capped else None,
    )
