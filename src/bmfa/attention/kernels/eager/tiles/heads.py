"""Tokens of all heads in tiles, and what does not depend on a group: steps 1 and 2 of the reference."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from bmfa.attention.tiling import (
    PROBE_SLOTS,
    UNIFORM_SHARE,
    Tiling,
    tokens_to_tiles,
    unflatten,
    valid_slots,
)

# Scores in memory at once. On a CPU they stay in the cache; an accelerator has none that large, and
# its launches cost more. `bmfa bench attention` measures both.
CHUNK_ELEMENTS = 1 << 20
DEVICE_CHUNK_ELEMENTS = 1 << 24


@dataclass(frozen=True, eq=False)
class Heads:
    """Steps 1 and 2 of the specification: tokens in tiles, and what does not depend on a group."""

    tiling: Tiling
    prefix: int  # of the keys
    query_prefix: int
    shape: tuple[int, int]  # B, H
    share: int  # consecutive query heads that share a key head; K = G / share key heads
    order: Tensor  # (R,) group at each position
    group_tokens: Tensor  # (R, S) raster index of the query in each slot of these groups, or -1
    q: Tensor  # (G, R, S, d) times scale / tau, as is q_mean; groups in `order`
    q_mean: Tensor  # (G, R, d) representatives
    q_deviation: Tensor  # (G, R, S, d) differences of the queries from them, 0 in empty slots
    q_spread: Tensor  # (G, R) rho (scale / tau)^2 / 2d
    probe_slot: Tensor  # (G, P) slot of the query that probes each of the first groups
    probe_weight: Tensor  # (G, P) inverse of its probability, 0 for a group without queries
    k: Tensor  # (K, T, S, d), 0 in empty slots
    v: Tensor  # (K, T, S, e)
    prefix_k: Tensor  # (K, prefix, d)
    prefix_v: Tensor  # (K, prefix, e)
    cross: Tensor  # (G, T, d, e) covariance of keys and values under the mean query of the head
    k_spread: Tensor  # (G, T) mean squared distance of keys from their mean
    diameter: Tensor  # (G,) at least the largest distance of two values of a tile
    exists: Tensor | None  # (K, T, S) bool; None if every slot holds a token
    counts: Tensor  # (1 or K, T) int64, tokens of each tile

    @classmethod
    def of(
        cls, q: Tensor, k: Tensor, v: Tensor, tiling: Tiling, prefix: int, query_prefix: int,
        factor: float, valid: Tensor | None,
    ) -> "Heads":  # fmt: skip
        """Arrange tokens in tiles, in at least float32, and compute means."""
        dtype = torch.promote_types(q.dtype, torch.float32)
        shape, share = (q.shape[0], q.shape[1]), q.shape[1] // k.shape[1]
        separate = tiling.separate_groups or share > 1
        exists = valid_slots(tiling, valid, k)
        q_exists = exists
        if separate:
            q_valid = valid if tiling.query_grid is None else None
            q_exists = valid_slots(tiling.queries, q_valid, q)
        prefix_k, prefix_v = (x[:, :, :prefix].to(dtype).flatten(0, 1) for x in (k, v))
        order = tiling.group_order.to(q.device)
        group_tokens = tiling.queries.slot_tokens.to(q.device).index_select(0, order)
        q = tokens_to_tiles(q[:, :, query_prefix:], tiling.queries, dtype)
        q = (q * factor).index_select(1, order)  # (G, R, S, d)
        k, v = (tokens_to_tiles(x[:, :, prefix:], tiling, dtype) for x in (k, v))
        counts = _token_counts(exists, tiling, q.device)
        if exists is not None:
            k, v = (x.masked_fill(~exists.unsqueeze(-1), 0.0) for x in (k, v))
        q_count = counts
        if separate:
            q_count = _token_counts(q_exists, tiling.queries, q.device)
        q_count = q_count.index_select(1, order)
        if q_exists is not None:
            q_exists = q_exists.index_select(1, order)
            q = q.masked_fill(~q_exists.unsqueeze(-1), 0.0)
        q_mean = _tile_means(q, q_count)
        q_deviation = _deviations(q, q_mean, q_exists)
        sample = q_count[:, :PROBE_SLOTS].to(dtype)  # (1 or G, groups)
        q_head = (q_mean[:, :PROBE_SLOTS] * sample.unsqueeze(-1)).sum(1)
        q_head = q_head / sample.sum(-1, keepdim=True).clamp(min=1)
        # The heads of each key head one after the other: no tensor has a copy of it for each of them.
        statistics = [
            _tile_statistics(k, v, x, exists, counts)
            for x in unflatten(q_head, 0, (-1, share)).unbind(1)
        ]
        cross, k_spread, diameter = (
            x[0] if share == 1 else torch.stack(x, 1).flatten(0, 1)
            for x in zip(*statistics, strict=True)
        )
        with torch.no_grad():
            q_distance = torch.linalg.vector_norm(q_deviation, dim=-1)
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
        return cls(
            tiling=tiling,
            prefix=prefix,
            query_prefix=query_prefix,
            shape=shape,
            share=share,
            order=order,
            group_tokens=group_tokens,
            q=q,
            q_mean=q_mean,
            q_deviation=q_deviation,
            q_spread=q_spread / (2 * q.shape[-1]),
            probe_slot=probe_slot,
            probe_weight=probe_weight,
            k=k,
            v=v,
            prefix_k=prefix_k,
            prefix_v=prefix_v,
            cross=cross,
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
        """(K, prefix + T S, d), the keys of the prefix before those of the tiles."""
        return torch.cat((self.prefix_k, self.k.flatten(1, 2)), 1)

    @cached_property
    def values(self) -> Tensor:
        """(K, prefix + T S, e), like `keys`."""
        return torch.cat((self.prefix_v, self.v.flatten(1, 2)), 1)

    def of_keys(self, x: Tensor, heads: slice) -> Tensor:
        """(g, ...) view of a tensor (K, ...) of key heads, for g query heads; one if they share keys."""
        if self.share == 1:
            return x[heads]
        assert heads.stop - heads.start == 1
        return x[heads.start // self.share : heads.start // self.share + 1]

    def counts_of(self, heads: slice) -> Tensor:
        """(1 or g, T) tokens of each tile."""
        return self.counts if len(self.counts) == 1 else self.of_keys(self.counts, heads)

    def see_tiles(self, queries: Tensor, heads: slice) -> tuple[Tensor, Tensor]:
        """Return what queries (g, n, d) see in every tile.

        Returns:
            log_mass (g, n, T), -inf for a tile without tokens, and weights (g, T, n, S), the softmax
            within each tile.
        """
        n, tiles = queries.shape[1], self.of_keys(self.k, heads)
        # A batch of tiles, so that the weights are laid out for the means of keys and values.
        q = queries.unsqueeze(1).expand(-1, tiles.shape[1], n, -1)
        scores = matmul(q, tiles.transpose(2, 3))  # (g, T, n, S)
        exists = None if self.exists is None else self.of_keys(self.exists, heads).unsqueeze(2)
        counts = self.counts_of(heads).unsqueeze(2)  # (1 or g, T, 1)
        scores = _mask_scores(scores, exists, counts)
        weights = scores.softmax(-1)
        log_mass = log_sum_exp(scores, weights).masked_fill(counts == 0, -torch.inf)
        return log_mass.transpose(1, 2), weights

    def prefix_scores(self, queries: Tensor, heads: slice) -> Tensor:
        """Return scores (g, n, prefix) of queries (g, n, d)."""
        return queries @ self.of_keys(self.prefix_k, heads).transpose(1, 2)


def _tile_statistics(
    k: Tensor, v: Tensor, q_head: Tensor, exists: Tensor | None, counts: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return cross (K, T, d, e), k_spread (K, T) and diameter (K,) at one mean query (K, d) each."""
    # One row: a product with one column is several times slower on a CPU.
    scores = (q_head.unsqueeze(1) @ k.flatten(1, 2).transpose(1, 2)).view(k.shape[:3])  # (K, T, S)
    p = _mask_scores(scores, exists, counts).softmax(-1).unsqueeze(-1)
    k_deviation = _deviations(k, (p.transpose(2, 3) @ k).squeeze(2), exists)
    v_deviation = _deviations(v, (p.transpose(2, 3) @ v).squeeze(2), exists)
    with torch.no_grad():
        diameter = 2 * torch.linalg.vector_norm(v_deviation, dim=-1).amax((1, 2))  # (K,)
        k_spread = _mean_squares(k_deviation, counts)
    return (p * k_deviation).transpose(2, 3) @ v_deviation, k_spread, diameter


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


def matmul(x: Tensor, y: Tensor) -> Tensor:
    """Multiply (g, T, n, m) by (g, T, m, p), on a CPU without copies of expanded operands."""
    if x.shape[0] == 1:
        return torch.bmm(x[0], y[0]).unsqueeze(0)
    has_gradient = torch.is_grad_enabled() and (x.requires_grad or y.requires_grad)
    if x.device.type != "cpu" or has_gradient:
        return x @ y
    product = x.new_empty(*x.shape[:3], y.shape[-1])
    for head in range(len(x)):
        torch.bmm(x[head], y[head], out=product[head])
    return product


def log_sum_exp(logits: Tensor, weights: Tensor) -> Tensor:
    """Log-sum-exp over the last dimension, given the softmax.

    Without a gradient, two maxima are cheaper than a second exponential. Where two weights are equal
    within rounding and their logits are not, the gradient of that would be wrong.
    """
    if torch.is_grad_enabled() and logits.requires_grad:
        return logits.logsumexp(-1)
    return logits.amax(-1) - weights.amax(-1).log()
