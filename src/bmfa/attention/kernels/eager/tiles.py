"""The tiled form in torch operations: gathers and batched products, any device, autograd.

`bmfa.attention.kernels.reference.tiles` specifies what is computed. Shapes here: G = B * H heads,
T tiles of S = side * side slots, R groups of queries in the order of `Tiling.group_order`, P probes,
d and e channels of keys and values. A chunk has some groups of one head, or all groups of g heads.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from bmfa.attention.tiling import (
    ERROR_AIM,
    LARGEST_SHRINKAGE,
    LEVEL_RATIO,
    NUM_LEVELS,
    PROBE_SLOTS,
    SMALLEST_CORRECTION,
    STEEP_FALL,
    STEEP_RISE,
    UNIFORM_SHARE,
    TiledAttention,
    Tiling,
    tiles_to_tokens,
    tokens_to_tiles,
    unflatten,
    valid_slots,
)
from bmfa.trees.keys import query_chunks

# Scores in memory at once. On a CPU they stay in the cache; an accelerator has none that large, and
# its launches cost more. `bmfa bench attention` measures both.
CHUNK_ELEMENTS = 1 << 20
DEVICE_CHUNK_ELEMENTS = 1 << 24
# Tangents of all groups are kept from the probes' pass to the groups' if they have at most so many
# elements (16 MiB in float32) and the probes use at least half of them; otherwise they are made twice.
KEPT_ELEMENTS = 1 << 22


def tiled_attention(
    q: Tensor, k: Tensor, v: Tensor, tiling: Tiling, *, prefix: int, scale: float, tau: float = 1.0,
    error: float | None = None, expand: float | None = None, valid: Tensor | None = None,
    exact_above: float = 1.0, query_prefix: int | None = None,
) -> TiledAttention | None:  # fmt: skip
    """Compute tiled attention as specified by `bmfa.attention.kernels.reference.tiled_attention`.

    Half precision is computed in float32. Thresholds, shrinkage, the diameter of the values and the
    choice of the expanded tiles are constants of the gradient; everything else is differentiated.

    Args:
        q: (B, H, query_prefix + queries, d), in raster order.
        k: (B, H, prefix + N, d), spatial tokens in raster order.
        v: (B, H, prefix + N, e).
        tiling: The tiles of the grid of N spatial tokens, and the groups of the queries.
        prefix: The number of keys before the grid.
        scale: The factor of q . k.
        tau: The temperature.
        error: The target for the relative L2 error of the output; one of `error` and `expand` is given.
        expand: The mean number of tiles that a group expands.
        valid: bool (B or 1, N), the spatial tokens that exist.
        exact_above: The share of expanded tiles above which a head is computed exactly.
        query_prefix: The number of queries before the grid, if it is not that of the keys.

    Returns:
        Output, expanded tiles of each group and errors of the probes; None if every head would be
        computed exactly because it expands more than `exact_above` of the tiles.
    """
    if (error is None) == (expand is None):
        raise ValueError(f"error is {error!r} and expand is {expand!r}; pass exactly one of them")
    query_prefix = prefix if query_prefix is None else query_prefix
    if q.numel() == 0:  # an empty batch still has gradients
        expanded = q.new_zeros(*q.shape[:2], tiling.groups, tiling.tiles, dtype=torch.bool)
        probes = q.new_zeros(*q.shape[:2], tiling.probes(query_prefix), 3, dtype=torch.float32)
        counts = expanded.sum(-1, dtype=torch.int32)
        return TiledAttention(q[..., :1] * v[:, :, :1], counts, probes, expanded)
    everything = error == 0.0 or (expand is not None and expand >= tiling.tiles)
    if everything and exact_above < 1.0:
        return None
    heads = _Heads.of(q, k, v, tiling, prefix, query_prefix, scale / tau, valid)
    representatives = _Representatives(heads)
    if everything:
        choice, exact_probes = _Choice.everything(heads), None
    else:
        with torch.no_grad():
            levels = _measure_levels(heads, representatives)
            share = None if expand is None else expand / tiling.tiles
            choice = _choose(heads, levels, error, share, exact_above)
            exact_probes = levels.exact
    if exact_above < 1.0 and bool(choice.exact.all()):
        return None
    tiles, expanded = _attend(heads, representatives, choice)
    spatial = unflatten(tiles_to_tokens(tiles, tiling.queries), 0, q.shape[:2]).to(q.dtype)
    output = spatial
    if query_prefix:
        output = torch.cat((_prefix_outputs(q, heads, scale / tau).to(q.dtype), spatial), 2)
    with torch.no_grad():
        probes = _probe_errors(heads, tiles.to(q.dtype), exact_probes)
    return TiledAttention(
        output,
        unflatten(expanded.sum(-1, dtype=torch.int32), 0, q.shape[:2]),
        unflatten(probes, 0, q.shape[:2]),
        unflatten(expanded, 0, q.shape[:2]),
    )


@dataclass(frozen=True, eq=False)
class _Heads:
    """Steps 1 and 2 of the specification: tokens in tiles, and what does not depend on a group."""

    tiling: Tiling
    prefix: int  # of the keys
    query_prefix: int
    shape: tuple[int, int]  # B, H
    order: Tensor  # (R,) group at each position
    q: Tensor  # (G, R, S, d) times scale / tau, as is q_mean; groups in `order`
    q_mean: Tensor  # (G, R, d) representatives
    q_spread: Tensor  # (G, R) rho (scale / tau)^2 / 2d
    probe_slot: Tensor  # (G, P) slot of the query that probes each of the first groups
    probe_weight: Tensor  # (G, P) inverse of its probability, 0 for a group without queries
    k: Tensor  # (G, T, S, d), 0 in empty slots
    v: Tensor  # (G, T, S, e)
    prefix_k: Tensor  # (G, prefix, d)
    prefix_v: Tensor  # (G, prefix, e)
    cross: Tensor  # (G, T, d, e) covariance of keys and values under the mean query of the head
    k_spread: Tensor  # (G, T) mean squared distance of keys from their mean
    diameter: Tensor  # (G,) at least the largest distance of two values of a tile
    exists: Tensor | None  # (G, T, S) bool; None if every slot holds a token
    counts: Tensor  # (1 or G, T) int64, tokens of each tile

    @classmethod
    def of(
        cls, q: Tensor, k: Tensor, v: Tensor, tiling: Tiling, prefix: int, query_prefix: int,
        factor: float, valid: Tensor | None,
    ) -> "_Heads":  # fmt: skip
        """Arrange tokens in tiles, in at least float32, and compute means."""
        dtype = torch.promote_types(q.dtype, torch.float32)
        shape = (q.shape[0], q.shape[1])
        exists = valid_slots(tiling, valid, q)
        q_exists = exists if tiling.query_grid is None else valid_slots(tiling.queries, None, q)
        prefix_k, prefix_v = (x[:, :, :prefix].to(dtype).flatten(0, 1) for x in (k, v))
        q = tokens_to_tiles(q[:, :, query_prefix:], tiling.queries, dtype)
        k, v = (tokens_to_tiles(x[:, :, prefix:], tiling, dtype) for x in (k, v))
        order = tiling.group_order.to(q.device)
        q = (q * factor).index_select(1, order)  # (G, R, S, d)
        counts = _token_counts(exists, tiling, q.device)
        if exists is not None:
            k, v = (x.masked_fill(~exists.unsqueeze(-1), 0.0) for x in (k, v))
        q_count = counts
        if tiling.query_grid is not None:
            q_count = _token_counts(q_exists, tiling.queries, q.device)
        q_count = q_count.index_select(1, order)
        if q_exists is not None:
            q_exists = q_exists.index_select(1, order)
            q = q.masked_fill(~q_exists.unsqueeze(-1), 0.0)
        q_mean = _tile_means(q, q_count)
        sample = q_count[:, :PROBE_SLOTS].to(dtype)  # (1 or G, groups)
        q_head = (q_mean[:, :PROBE_SLOTS] * sample.unsqueeze(-1)).sum(1)
        q_head = q_head / sample.sum(-1, keepdim=True).clamp(min=1)
        scores = (k @ q_head[:, None, :, None]).squeeze(-1)  # (G, T, S)
        p = _mask_scores(scores, exists, counts).softmax(-1).unsqueeze(-1)
        k_deviation = _deviations(k, (p.transpose(2, 3) @ k).squeeze(2), exists)
        v_deviation = _deviations(v, (p.transpose(2, 3) @ v).squeeze(2), exists)
        with torch.no_grad():
            diameter = 2 * torch.linalg.vector_norm(v_deviation, dim=-1).amax((1, 2))  # (G,)
            q_distance = torch.linalg.vector_norm(_deviations(q, q_mean, q_exists), dim=-1)
            q_squares = q_distance.square()  # (G, R, S)
            # Roots first: their product overflows no earlier than the squares.
            q_mean_square = q_squares.sum(-1) / q_count.clamp(min=1)
            q_spread = q_mean_square.sqrt() * q_distance.amax(-1)
            probes = tiling.probes(query_prefix)
            probe_slot, probe_weight = _draw_probes(
                q_squares[:, :probes],
                None if q_exists is None else q_exists[:, :probes],
                q_count[:, :probes],
                _probe_quantiles(tiling, order[:probes], shape),
            )
            k_spread = _mean_squares(k_deviation, counts)
        return cls(
            tiling=tiling,
            prefix=prefix,
            query_prefix=query_prefix,
            shape=shape,
            order=order,
            q=q,
            q_mean=q_mean,
            q_spread=q_spread / (2 * q.shape[-1]),
            probe_slot=probe_slot,
            probe_weight=probe_weight,
            k=k,
            v=v,
            prefix_k=prefix_k,
            prefix_v=prefix_v,
            cross=(p * k_deviation).transpose(2, 3) @ v_deviation,
            k_spread=k_spread,
            diameter=diameter,
            exists=exists,
            counts=counts,
        )

    @property
    def probes(self) -> int:
        return self.tiling.probes(self.query_prefix)

    @property
    def chunk_elements(self) -> int:
        return CHUNK_ELEMENTS if self.q.device.type == "cpu" else DEVICE_CHUNK_ELEMENTS

    @cached_property
    def keys(self) -> Tensor:
        """(G, prefix + T S, d), the keys of the prefix before those of the tiles."""
        return torch.cat((self.prefix_k, self.k.flatten(1, 2)), 1)

    @cached_property
    def values(self) -> Tensor:
        """(G, prefix + T S, e), like `keys`."""
        return torch.cat((self.prefix_v, self.v.flatten(1, 2)), 1)

    def counts_of(self, heads: slice) -> Tensor:
        """(1 or g, T) tokens of each tile."""
        return self.counts if len(self.counts) == 1 else self.counts[heads]

    def see_tiles(self, queries: Tensor, heads: slice) -> tuple[Tensor, Tensor]:
        """Return what queries (g, n, d) see in every tile.

        Returns:
            log_mass (g, n, T), -inf for a tile without tokens, and weights (g, T, n, S), the softmax
            within each tile.
        """
        n, tiles = queries.shape[1], self.k[heads]
        # A batch of tiles, so that the weights are laid out for the means of keys and values.
        q = queries.unsqueeze(1).expand(-1, tiles.shape[1], n, -1)
        scores = _matmul(q, tiles.transpose(2, 3))  # (g, T, n, S)
        exists = None if self.exists is None else self.exists[heads].unsqueeze(2)
        counts = self.counts_of(heads).unsqueeze(2)  # (1 or g, T, 1)
        scores = _mask_scores(scores, exists, counts)
        weights = scores.softmax(-1)
        log_mass = _log_sum_exp(scores, weights).masked_fill(counts == 0, -torch.inf)
        return log_mass.transpose(1, 2), weights

    def prefix_scores(self, queries: Tensor, heads: slice) -> Tensor:
        """Return scores (g, n, prefix) of queries (g, n, d)."""
        return queries @ self.prefix_k[heads].transpose(1, 2)


@dataclass(frozen=True, eq=False)
class _Tangents:
    """Step 3 of the specification: tiles as the representatives of a chunk see them."""

    log_mass: Tensor  # (g, r, T), -inf without tokens
    k: Tensor  # (g, r, T, d)
    v: Tensor  # (g, r, T, e)
    loss: Tensor  # (g, r, T)

    def __getitem__(self, index: tuple[slice, slice]) -> "_Tangents":
        return _Tangents(self.log_mass[index], self.k[index], self.v[index], self.loss[index])


class _Representatives:
    """Makes the tangents of chunks."""

    def __init__(self, heads: _Heads) -> None:
        self.heads, self.with_grad = heads, torch.is_grad_enabled()
        groups, tiles = heads.tiling.groups, heads.tiling.tiles
        elements = len(heads.q) * groups * tiles * (heads.k.shape[-1] + heads.v.shape[-1])
        self.keep = groups <= 2 * heads.probes and elements <= KEPT_ELEMENTS
        self.kept: dict[int, _Tangents] = {}  # of all groups, by the first head of a chunk

    def tangents(self, heads: slice, groups: slice) -> _Tangents:
        """Return the tangents of groups of heads."""
        if not self.keep:
            return self._compute(heads, groups)
        found = self.kept.get(heads.start)
        if found is None or found.log_mass.shape[0] != heads.stop - heads.start:
            with torch.set_grad_enabled(self.with_grad):
                found = self._compute(heads, slice(0, self.heads.tiling.groups))
            self.kept[heads.start] = found
        return found[:, groups]

    def _compute(self, heads: slice, groups: slice) -> _Tangents:
        all_heads = self.heads
        q_mean = all_heads.q_mean[heads, groups]  # (g, r, d)
        log_mass, weights = all_heads.see_tiles(q_mean, heads)
        k, v = (_matmul(weights, x[heads]) for x in (all_heads.k, all_heads.v))  # (g, T, r, *)
        with torch.no_grad():
            prefix_scores = all_heads.prefix_scores(q_mean, heads)
            log_z = torch.cat((log_mass, prefix_scores), -1).logsumexp(-1, keepdim=True)
            spread = all_heads.q_spread[heads, groups].unsqueeze(-1)
            spread = spread * all_heads.k_spread[heads].unsqueeze(1)
            loss = _loss((log_mass - log_z).exp(), spread)
        return _Tangents(log_mass, k.transpose(1, 2), v.transpose(1, 2), loss)


def _loss(mass: Tensor, spread: Tensor) -> Tensor:
    """Loss of tiles from their mass and c^2 rho kappa / 2d."""
    return (mass * spread).nan_to_num(0.0).clamp(max=1.0)  # 0 * inf where squares overflow


class _Levels(NamedTuple):
    """What the probes find at every level; (G, P, levels) each but for `exact`."""

    error: Tensor  # |output - exact|^2 without the correction
    product: Tensor  # (exact - output) . correction, with a shrinkage of 1
    correction: Tensor  # |correction|^2
    share: Tensor  # of the tiles that are expanded
    exact: Tensor  # (G, P, e) exact outputs


@dataclass(frozen=True, eq=False)
class _Choice:
    """What the probes determine for all groups."""

    thresholds: Tensor  # (G, 2) of the groups at even and odd positions; 0 expands every tile
    shrinkage: Tensor  # (G, 2)
    exact: Tensor  # (G,) bool, heads in which every tile is expanded

    @classmethod
    def everything(cls, heads: _Heads) -> "_Choice":
        """Expand every tile."""
        zeros = heads.diameter.new_zeros(len(heads.diameter), 2)
        return cls(zeros, zeros, zeros.new_ones(len(zeros), dtype=torch.bool))


def _measure_levels(heads: _Heads, representatives: _Representatives) -> _Levels:
    """Evaluate every probe at every level."""
    chunks = [_measure_chunk(heads, part, representatives) for part in _head_chunks(heads)]
    return _Levels(*(torch.cat(field) for field in zip(*chunks, strict=True)))


def _measure_chunk(heads: _Heads, part: slice, representatives: _Representatives) -> _Levels:
    """Evaluate the probes of g heads."""
    probes = slice(0, heads.probes)
    tangents = representatives.tangents(part, probes)
    index = heads.probe_slot[part, :, None, None].expand(-1, -1, 1, heads.q.shape[-1])
    q = heads.q[part, probes].gather(2, index)  # (g, P, 1, d)
    deviation = q - heads.q_mean[part, probes].unsqueeze(2)
    prefix_scores = heads.prefix_scores(q.squeeze(2), part)
    exact_mass, within = heads.see_tiles(q.squeeze(2), part)  # (g, P, T), (g, T, P, S)
    exact_values = _matmul(within, heads.v[part]).transpose(1, 2)  # (g, P, T, e)
    counts = heads.counts_of(part)
    empty = (counts == 0).unsqueeze(1)
    tangent_mass = (deviation @ tangents.k.transpose(2, 3)).squeeze(2) + tangents.log_mass
    # (g, P, levels, T); at the last level everything is expanded
    expanded = tangents.loss.unsqueeze(2) >= _level_thresholds(q).to(q.dtype).unsqueeze(-1)
    expanded &= (tangents.loss > 0).unsqueeze(2)
    expanded[:, :, -1] = True
    expanded &= ~empty.unsqueeze(2)
    logits = torch.where(expanded, exact_mass.unsqueeze(2), tangent_mass.unsqueeze(2))
    prefix_logits = prefix_scores.unsqueeze(2).expand(-1, -1, NUM_LEVELS, -1)
    weights = torch.cat((logits, prefix_logits), -1).softmax(-1)
    prefix_weights = weights[..., logits.shape[-1] :]
    weights = weights[..., : logits.shape[-1]]
    coarse_weights = weights.masked_fill(expanded, 0.0)
    output = coarse_weights @ tangents.v + (weights - coarse_weights) @ exact_values
    output = output + prefix_weights @ heads.prefix_v[part].unsqueeze(1)
    moved = deviation.transpose(1, 2).expand(-1, heads.tiling.tiles, -1, -1)
    first_order = _matmul(moved, heads.cross[part]).transpose(1, 2)  # (g, P, T, e)
    shares = _coarse_bias(tangents.log_mass.unsqueeze(2), expanded | empty.unsqueeze(2)).softmax(-1)
    term = _clip(shares @ first_order, heads.diameter[part].view(-1, 1, 1, 1))
    term = term * coarse_weights.sum(-1, keepdim=True)
    exact = output[:, :, -1]
    difference = exact.unsqueeze(2) - output
    return _Levels(
        error=difference.square().sum(-1),
        product=(difference * term).sum(-1),
        correction=term.square().sum(-1),
        share=expanded.sum(-1).double() / (counts > 0).sum(-1).view(-1, 1, 1),
        exact=exact,
    )


def _level_thresholds(like: Tensor) -> Tensor:
    """(levels,) float64 on the device of a tensor; at the last one, 0, every tile is expanded."""
    powers = torch.arange(NUM_LEVELS, device=like.device, dtype=torch.float64)
    return (LEVEL_RATIO**powers).masked_fill(powers == NUM_LEVELS - 1, 0.0)


def _probe_quantiles(tiling: Tiling, groups: Tensor, shape: tuple[int, int]) -> Tensor:
    """(G, P) float64 numbers in (0, 1) that draw the probes of groups of B, H heads."""
    head = torch.arange(shape[1], device=groups.device).repeat(shape[0])
    return tiling.probe_quantile(groups, head.unsqueeze(1))


def _draw_probes(
    squares: Tensor, exists: Tensor | None, counts: Tensor, quantiles: Tensor
) -> tuple[Tensor, Tensor]:
    """Draw a query of each group; return its slot (G, P) and the inverse of its probability.

    Args:
        squares: (G, P, S) squared distances from the mean query, 0 in empty slots.
        exists: (G, P, S) bool, the slots with a query; None if all have one.
        counts: (1 or G, P) queries of each group.
        quantiles: (G, P) numbers in (0, 1).
    """
    largest = squares.amax(-1, keepdim=True).double()
    fourth = (squares / largest.where(largest > 0, 1.0)).square()
    total = fourth.sum(-1, keepdim=True)
    uniform = (1.0 / counts.clamp(min=1).double()).unsqueeze(-1).expand_as(fourth)
    p = UNIFORM_SHARE * uniform + (1 - UNIFORM_SHARE) * fourth / total.where(total > 0, 1.0)
    p = torch.where(total > 0, p, uniform)
    if exists is not None:
        p = p.masked_fill(~exists, 0.0)
    slot = (p.cumsum(-1) <= quantiles.unsqueeze(-1)).sum(-1).clamp(max=p.shape[-1] - 1)
    drawn = p.gather(-1, slot.unsqueeze(-1)).squeeze(-1)
    return slot, torch.where(drawn > 0, 1 / drawn, 0.0)


def _choose(
    heads: _Heads, levels: _Levels, error: float | None, share: float | None, exact_above: float
) -> _Choice:
    """Step 5 of the specification, from what the probes found."""
    shape = heads.shape
    probe_weight = unflatten(heads.probe_weight, 0, shape).unsqueeze(-1)  # (B, H, P, 1)
    position = torch.arange(heads.probes, device=probe_weight.device).view(-1, 1)
    fields = (levels.error, levels.product, levels.correction, levels.share)
    squares, product, correction, shares = (unflatten(x.double(), 0, shape) for x in fields)
    norms = unflatten(levels.exact.double().square().sum(-1), 0, shape).unsqueeze(-1)
    thresholds, shrinkages, chosen_shares = [], [], []
    for half in range(2):
        # Half of the probes determines what the groups at positions of the other parity use.
        weight = probe_weight * (position % 2 != half)
        found = (weight > 0).any(2, keepdim=True).any(1, keepdim=True)
        weight = torch.where(found, weight, probe_weight)  # a single group
        total, dot, square, count = (
            (weight * x).sum(2) for x in (squares, product, correction, shares)
        )  # (B, H, levels)
        norm = (weight * norms).sum(2)  # (B, H, 1)
        known = square > SMALLEST_CORRECTION**2 * norm
        factor = (dot / square.where(known, 1.0)).where(known, 0.0).clamp(0.0, LARGEST_SHRINKAGE)
        total = (total - 2 * factor * dot + factor.square() * square).sum(1)
        norm = norm.sum(1)
        errors = (total.clamp(min=0.0) / norm.where(norm > 0, 1.0)).sqrt()
        count = (count / weight.sum(2).clamp(min=1e-300)).clamp(max=1.0)  # ones may round up
        if error is not None:
            level, part = _interpolate_down(errors, ERROR_AIM * error)
        else:
            assert share is not None
            level, part = _interpolate_up(count.mean(1), share)
        threshold = _threshold_at(_level_thresholds(errors), level, part)
        thresholds.append(threshold[:, None].expand(shape))
        index = level[:, None, None].expand(-1, shape[1], 1)
        shrinkages.append(factor.gather(2, index).squeeze(2))
        below, above = (count.gather(2, x).squeeze(2) for x in (index, (index - 1).clamp(min=0)))
        chosen_shares.append(torch.lerp(above, below, part.unsqueeze(1)))
    exact = torch.stack(chosen_shares).mean(0) > exact_above
    dtype = heads.q.dtype
    return _Choice(
        torch.stack(thresholds, -1).flatten(0, 1).to(dtype),
        torch.stack(shrinkages, -1).flatten(0, 1).to(dtype),
        exact.flatten(),
    )


def _interpolate_down(errors: Tensor, target: float) -> tuple[Tensor, Tensor]:
    """Return where falling errors (B, levels) reach the target: levels and parts of the steps (B,)."""
    level = _first(errors <= target) if target > 0.0 else _first(errors < 0.0)
    before, after = _step(errors.clamp(min=1e-30), level)
    ratio = (before / after).log()
    part = (before / max(target, 1e-30)).log() / ratio.where(ratio != 0.0, 1.0)
    part = part.clamp(0.0, 1.0).where(ratio != 0.0, 1.0)
    complete = (level == 0) | (level == errors.shape[1] - 1) | (after < STEEP_FALL * target)
    return level, part.where(~complete, 1.0)


def _interpolate_up(shares: Tensor, target: float) -> tuple[Tensor, Tensor]:
    """Return where growing shares (B, levels) reach the target: levels and parts of the steps (B,)."""
    last = shares.shape[1] - 1
    level = _first(shares > target)
    if target >= 1.0 or target <= 0.0:
        return torch.full_like(level, last if target >= 1.0 else 0), shares.new_ones(level.shape)
    before, after = _step(shares, level)
    part = (target - before) / (after - before).where(after > before, 1.0)
    steep = (level > 0) & ((level == last) | (after > STEEP_RISE * target))
    return level - steep.long(), part.where(~(steep | (level == 0)), 1.0)


def _threshold_at(thresholds: Tensor, level: Tensor, part: Tensor) -> Tensor:
    """Return the thresholds (B,) between levels and those before; infinity expands nothing."""
    before, after = _step(thresholds.expand(len(level), -1), level)
    between = torch.where(part == 1.0, after, before ** (1 - part) * after**part)
    return between.where(level > 0, torch.inf)


def _step(values: Tensor, level: Tensor) -> tuple[Tensor, Tensor]:
    """Return the values (B, levels) before and at the levels (B,)."""
    after = level.unsqueeze(1)
    before = (after - 1).clamp(min=0)
    return values.gather(1, before).squeeze(1), values.gather(1, after).squeeze(1)


def _first(flags: Tensor) -> Tensor:
    """(B,) index of the first True of (B, levels), the last index if there is none."""
    flags = flags.clone()
    flags[:, -1] = True
    return flags.to(torch.uint8).argmax(-1)


def _attend(
    heads: _Heads, representatives: _Representatives, choice: _Choice
) -> tuple[Tensor, Tensor]:
    """Return outputs (G, R, S, e) and expanded tiles (G, R, T), groups in raster order."""
    device = heads.order.device
    rows, outputs, expanded = [], [], []
    for part, positions, exact in _group_chunks(heads, choice):
        if exact:
            output = _exact_chunk(heads, part, positions)
            has_tokens = (heads.counts_of(part) > 0).unsqueeze(1)
            chosen = has_tokens.expand(*output.shape[:2], -1).flatten(0, 1)
            output = output.flatten(0, 1)
        else:
            tangents = representatives.tangents(part, positions)
            output, chosen = _attend_chunk(heads, part, positions, tangents, choice)
        outputs.append(output)
        expanded.append(chosen)
        head = torch.arange(part.start, part.stop, device=device).unsqueeze(1)
        rows.append((head * heads.tiling.groups + heads.order[positions]).flatten())
    inverse = torch.cat(rows).argsort()
    shape = (len(heads.q), heads.tiling.groups)
    output, chosen = (torch.cat(x).index_select(0, inverse) for x in (outputs, expanded))
    return unflatten(output, 0, shape), unflatten(chosen, 0, shape)


def _group_chunks(heads: _Heads, choice: _Choice) -> Iterator[tuple[slice, slice, bool]]:
    """Yield slices of heads, slices of positions, and whether all of their tiles are expanded."""
    groups = heads.tiling.groups
    full = ((choice.thresholds == 0) | choice.exact.unsqueeze(1)).tolist()
    for (even, odd), members in groupby(range(len(full)), key=full.__getitem__):
        run = list(members)
        if even == odd:
            halves = [(slice(0, groups, 1), even)]
        else:
            halves = [(slice(0, groups, 2), even), (slice(1, groups, 2), odd)]
        for half, exact in halves:
            count = len(range(groups)[half])
            if exact and count:
                yield slice(run[0], run[-1] + 1), half, True
                continue
            # On a CPU one head at a time: batches of several heads would be copied.
            step = 1 if heads.q.device.type == "cpu" else len(run)
            tokens = heads.tiling.tiles * heads.tiling.slots
            for first in range(run[0], run[-1] + 1, step):
                for part, r in query_chunks(step, count, tokens, heads.chunk_elements):
                    start = half.start + half.step * r.start
                    stop = half.start + half.step * (r.stop - 1) + 1
                    part = slice(first + part.start, first + part.stop)
                    yield part, slice(start, stop, half.step), False


def _head_chunks(heads: _Heads) -> Iterator[slice]:
    """Yield slices of heads whose probes have about `chunk_elements` scores."""
    step = max(1, heads.chunk_elements // (heads.probes * heads.tiling.tiles * heads.tiling.slots))
    step = 1 if heads.q.device.type == "cpu" else step
    for start in range(0, len(heads.q), step):
        yield slice(start, min(start + step, len(heads.q)))


def _exact_chunk(heads: _Heads, part: slice, positions: slice) -> Tensor:
    """Return exact outputs (g, r, S, e) of groups of heads."""
    q = heads.q[part, positions]
    mask = None
    if heads.exists is not None:
        mask = pad(heads.exists[part].flatten(1), (heads.prefix, 0), value=True)[:, None, None]
    output = scaled_dot_product_attention(
        q.flatten(1, 2).unsqueeze(1),
        heads.keys[part].unsqueeze(1),
        heads.values[part].unsqueeze(1),
        attn_mask=mask,
        scale=1.0,
    )
    return unflatten(output.squeeze(1), 1, q.shape[1:3])


def _attend_chunk(
    heads: _Heads, part: slice, positions: slice, tangents: _Tangents, choice: _Choice
) -> tuple[Tensor, Tensor]:
    """Step 4 of the specification for n = g r groups: outputs (n, S, e), expanded tiles (n, T)."""
    q = heads.q[part, positions]
    deviation = (q - heads.q_mean[part, positions].unsqueeze(2)).flatten(0, 1)  # (n, S, d)
    parity = torch.arange(heads.tiling.groups, device=q.device)[positions] % 2
    threshold, shrinkage = (
        x[part].index_select(1, parity) for x in (choice.thresholds, choice.shrinkage)
    )  # (g, r)
    with torch.no_grad():
        loss = tangents.loss
        expanded = (loss >= threshold.unsqueeze(-1)) & (loss > 0)
        hidden = expanded | (heads.counts_of(part) == 0).unsqueeze(1)
    bias = _coarse_bias(tangents.log_mass, hidden)  # (g, r, T)
    cross = bias.softmax(-1) @ heads.cross[part].flatten(2)
    cross = unflatten(cross, 2, heads.cross.shape[2:]).flatten(0, 1)  # (n, d, e)
    diameter = heads.diameter[part].unsqueeze(1).expand(q.shape[:2]).reshape(-1, 1, 1)
    correction = _clip(deviation @ cross, diameter, shrinkage.reshape(-1, 1, 1))
    k, v = tangents.k.flatten(0, 1), tangents.v.flatten(0, 1)
    logits = torch.baddbmm(bias.flatten(0, 1).unsqueeze(1), deviation, k.transpose(1, 2))
    weights = logits.softmax(-1)  # (n, S, T)
    output = torch.baddbmm(correction, weights, v)
    log_coarse = _log_sum_exp(logits, weights)
    log_coarse = log_coarse.masked_fill(hidden.all(-1).view(-1, 1), -torch.inf)
    expanded = expanded.flatten(0, 1)
    exact = _ExpandedTiles(heads, part, q.flatten(0, 1), expanded).attend()
    if exact is not None:
        exact_output, log_exact = exact
        coarse_share = (log_coarse - log_exact).sigmoid().unsqueeze(-1)  # u
        output = torch.lerp(exact_output, output, coarse_share)
    return output, expanded


class _ExpandedTiles:
    """Attention of n groups over the tokens of the tiles that they expand, and the prefix."""

    def __init__(self, heads: _Heads, part: slice, q: Tensor, expanded: Tensor) -> None:
        self.heads, self.q = heads, q  # (n, S, d)
        self.head = torch.arange(part.start, part.stop, device=q.device)
        self.head = self.head.repeat_interleave(len(q) // len(self.head))  # (n,)
        row, tile = expanded.nonzero(as_tuple=True)
        counts = expanded.sum(-1)
        self.order = counts.argsort(stable=True)
        self.counts = counts[self.order].tolist()
        rank = torch.arange(len(row), device=q.device) - (counts.cumsum(0) - counts)[row]
        self.tiles = tile.new_full((len(q), self.counts[-1]), -1)  # the expanded ones, then -1
        self.tiles[row, rank] = tile
        self.slots = torch.arange(heads.tiling.slots, device=q.device)
        self.prefix = torch.arange(heads.prefix, device=q.device)

    def attend(self) -> tuple[Tensor, Tensor] | None:
        """Return outputs (n, S, e), and the logarithm (n, S) of their sums of exponentials.

        None if there is nothing to attend to in any group. Groups with as many tiles are computed
        together.
        """
        heads, counts = self.heads, self.counts
        slots, elements = len(self.slots), heads.chunk_elements
        all_equal = counts[0] == counts[-1]
        outputs, logs, start = [], [], 0
        if not heads.prefix:
            start = counts.count(0)
            if start == len(counts):
                return None
            if start:
                outputs.append(heads.v.new_zeros(start, slots, heads.v.shape[-1]))
                logs.append(heads.v.new_full((start, slots), -torch.inf))
        while start < len(counts):
            stop = start + 1
            while stop < len(counts):
                keys = heads.prefix + counts[stop] * slots
                if (stop + 1 - start) * slots * keys > elements:
                    break
                stop += 1
            rows = slice(start, stop) if all_equal else self.order[start:stop]
            output, log = self._attend_rows(rows, counts[stop - 1])
            outputs.append(output)
            logs.append(log)
            start = stop
        output, log = (x[0] if len(x) == 1 else torch.cat(x) for x in (outputs, logs))
        if all_equal:  # the order is that of the groups
            return output, log
        inverse = self.order.argsort()
        return output.index_select(0, inverse), log.index_select(0, inverse)

    def _attend_rows(self, groups: Tensor | slice, max_count: int) -> tuple[Tensor, Tensor]:
        heads, head = self.heads, self.head[groups]
        tiles = self.tiles[groups, :max_count]  # (n, max_count)
        if max_count == 0:
            logits = self.q[groups] @ heads.prefix_k[head].transpose(1, 2)
            weights = logits.softmax(-1)
            return weights @ heads.prefix_v[head], _log_sum_exp(logits, weights)
        rows = heads.prefix + tiles.clamp(min=0).unsqueeze(-1) * len(self.slots) + self.slots
        rows = torch.cat((self.prefix.expand(len(tiles), -1), rows.flatten(1)), 1)
        rows = (rows + head.unsqueeze(1) * heads.keys.shape[1]).flatten()
        keys, values = (
            unflatten(x.flatten(0, 1).index_select(0, rows), 0, (len(tiles), -1))
            for x in (heads.keys, heads.values)
        )
        logits = self.q[groups] @ keys.transpose(1, 2)  # (n, S, prefix + tokens)
        padding = tiles < 0
        if heads.exists is not None:
            exists = heads.exists[head.unsqueeze(1), tiles.clamp(min=0)]  # (n, max_count, S)
            missing = (padding.unsqueeze(-1) | ~exists).flatten(1)
        elif bool(padding.any()):
            missing = padding.repeat_interleave(len(self.slots), 1)
        else:
            missing = None
        if missing is not None:
            missing = pad(missing, (heads.prefix, 0), value=False).unsqueeze(1)
            logits = logits.masked_fill(missing, -torch.inf)
        weights = logits.softmax(-1)
        return weights @ values, _log_sum_exp(logits, weights)


def _prefix_outputs(q: Tensor, heads: _Heads, factor: float) -> Tensor:
    """Return exact outputs (B, H, prefix, e) of the prefix queries."""
    queries = q[:, :, : heads.query_prefix].to(heads.q.dtype).flatten(0, 1) * factor
    scores = queries @ heads.k.flatten(1, 2).transpose(1, 2)  # (G, n, T S)
    if heads.exists is not None:
        scores = scores.masked_fill(~heads.exists.flatten(1).unsqueeze(1), -torch.inf)
    prefix_scores = heads.prefix_scores(queries, slice(None))
    weights = torch.cat((prefix_scores, scores), -1).softmax(-1)
    output = weights[..., : heads.prefix] @ heads.prefix_v
    output = output + weights[..., heads.prefix :] @ heads.v.flatten(1, 2)
    return unflatten(output, 0, heads.shape)


def _probe_errors(heads: _Heads, output: Tensor, exact: Tensor | None) -> Tensor:
    """Return (G, P, 3) float32: |output - exact|^2, |exact|^2, weight of the probe.

    Args:
        output: (G, R, S, e).
        exact: (G, P, e); None if the output is exact.
    """
    index = heads.probe_slot[..., None, None].expand(-1, -1, 1, output.shape[-1])
    got = output.index_select(1, heads.order[: heads.probes]).gather(2, index).squeeze(2)
    got = got.to(heads.q.dtype)
    exact = got if exact is None else exact
    weight = heads.probe_weight
    fields = ((got - exact).square().sum(-1), exact.square().sum(-1), weight)
    found = torch.stack([x.to(torch.float32) for x in fields], -1)
    return found.where(weight.unsqueeze(-1) > 0, 0.0)


def _matmul(x: Tensor, y: Tensor) -> Tensor:
    """Multiply (g, T, n, m) by (g, T, m, p), without copies of expanded operands if g is 1."""
    if x.shape[0] == 1:
        return torch.bmm(x[0], y[0]).unsqueeze(0)
    return x @ y


def _token_counts(exists: Tensor | None, tiling: Tiling, device: torch.device) -> Tensor:
    """(1 or G, T) int64 tokens of each tile."""
    if exists is None:
        return torch.full((1, tiling.tiles), tiling.slots, device=device)
    return exists.sum(-1)


def _tile_means(tokens: Tensor, counts: Tensor) -> Tensor:
    """(G, T, *) means of (G, T, S, *) tokens that are 0 in empty slots."""
    return tokens.sum(2) / counts.clamp(min=1).unsqueeze(-1)


def _deviations(tokens: Tensor, means: Tensor, exists: Tensor | None) -> Tensor:
    """(G, T, S, *) differences from the means (G, T or 1, *), 0 in empty slots."""
    deviations = tokens - means.unsqueeze(2)
    return deviations if exists is None else deviations * exists.unsqueeze(-1)


def _mean_squares(deviations: Tensor, counts: Tensor) -> Tensor:
    """(G, T) means of the squared lengths of (G, T, S, d), without a tensor of squares."""
    row = deviations.flatten(2).unsqueeze(2)
    return (row @ row.transpose(2, 3)).flatten(1) / counts.clamp(min=1)


def _mask_scores(scores: Tensor, exists: Tensor | None, counts: Tensor) -> Tensor:
    """Set scores (..., T, S) of empty slots to -inf, but leave tiles without any token."""
    if exists is None:
        return scores
    return scores.masked_fill(~exists & (counts > 0).unsqueeze(-1), -torch.inf)


def _log_sum_exp(logits: Tensor, weights: Tensor) -> Tensor:
    """Log-sum-exp over the last dimension, given the softmax.

    Without a gradient, two maxima are cheaper than a second exponential. Where two weights are equal
    within rounding and their logits are not, the gradient of that would be wrong.
    """
    if torch.is_grad_enabled() and logits.requires_grad:
        return logits.logsumexp(-1)
    return logits.amax(-1) - weights.amax(-1).log()


def _coarse_bias(log_mass: Tensor, hidden: Tensor) -> Tensor:
    """Set log_mass (..., T) of hidden tiles to -inf; all to 0 where every tile is hidden."""
    bias = log_mass.masked_fill(hidden, -torch.inf)
    return bias.masked_fill(hidden.all(-1, keepdim=True), 0.0)


def _clip(vectors: Tensor, length: Tensor, factor: Tensor | None = None) -> Tensor:
    """Multiply vectors (..., e) by a factor from 0 on, and limit their lengths."""
    length = length.where(length > 0, 1.0)  # of values that are all equal, which need no correction
    if torch.is_grad_enabled() and vectors.requires_grad:  # a norm has no second derivative at 0
        vectors = vectors if factor is None else vectors * factor
        return vectors * (vectors / length).square().sum(-1, keepdim=True).clamp(min=1.0).rsqrt()
    # Squares of float32 may overflow, those of float64 do not.
    norm = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True, dtype=torch.float64)
    most = length / norm.clamp(min=torch.finfo(torch.float64).tiny)
    scale = most.clamp(max=1.0) if factor is None else torch.minimum(most, factor)
    return vectors * scale.to(vectors.dtype)
