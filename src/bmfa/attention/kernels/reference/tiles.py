"""Tiled attention: queries in groups, whose representative summarises every tile of keys at its tangent.

The scheme, with c = scale / tau. A tile L is a square of the grid with n_L valid tokens. The queries of
one tile, or of `Tiling.group_tiles` tiles side by side, form a group g; they may have a grid of their
own. Squares of numbers of the range of float32 are within the range of float64; an implementation in
float32 divides vectors by a power of two near their largest element before it squares them.

1. Groups. qbar_g is the mean of the valid queries of the group, 0 if there are none, and rho_g the
   geometric mean of the mean and the maximum of |q - qbar_g|^2: few outlying queries have most of the
   error. qhat is the mean of the valid queries of the first PROBE_SLOTS groups in the order of step 5,
   which are spread over the grid. The probes of a group are drawn from its queries (`draw_probes`).
2. Tiles. Under p = softmax over L of c qhat . k_i, k_L and v_L are the means of keys and values, and
   cross_L = sum_{i in L} p_i (k_i - k_L) (v_i - v_L)^T their covariance. kappa_L and lambda_L are the
   mean and the maximum of |k_i - k_L|^2 over the tile, all tokens alike, and diameter = 2 max_L
   max_{i in L} |v_i - v_L|, which is at least the diameter of the values of any tile.
3. Representatives. Under p = softmax over L of c qbar_g . k_i, k_gL and v_gL are the means of keys and
   values, and A_gL = log sum_{i in L} exp(c qbar_g . k_i). m_gL = exp(A_gL) / Z_g is the share of
   the tile, Z_g being the sum over all tiles and the prefix. With h_g = c^2 rho_g / 2d and
   f_gL = min(h_g lambda_L, FARTHEST sqrt(2 h_g lambda_L)), the loss of a tile is
       loss_gL = min(1, m_gL (h_g kappa_L + expm1(f_gL) / n_L)).
   The first term is the share of the mass that a query at the distance sqrt(rho_g) from qbar_g loses to
   second order, on average over all directions. The second one is for a key far from the others: its
   score has the variance 2 h_g lambda_L over the directions, so that its mass grows by exp(h_g lambda_L)
   on average, but by no more than FARTHEST standard deviations. Many of such losses are 1, and
   a budget needs an order of the tiles: without a target for the error, f_gL is 0.
4. Attention of a query q of group g, given the set X of expanded tiles. Tiles outside X have the logit
   A_gL + c (q - qbar_g) . k_gL and the value v_gL; tokens of X and the prefix are exact. A(q) is convex
   and has the gradient c k_gL at qbar_g, so the logit is its tangent: exact at qbar_g, and never above
   A(q). The weights w are a softmax over all of these, and u is their sum over the tiles outside X.
   With
       cross_g = sum_{L not in X} m_gL cross_L / sum_{L not in X} m_gL,
   the output is sum w v + u clip(shrinkage c (q - qbar_g) cross_g), where clip limits the length of a
   vector to the diameter. The first part is an attention: all weights are positive and sum to 1.
5. Threshold. X holds the tiles with loss_gL >= threshold and loss_gL > 0. The groups are taken in the
   order of `Tiling.group_order`; the first `Tiling.probe_groups` have n = `Tiling.probes_per_group`
   probes each, queries of the group that are also attended exactly. Queries far from qbar_g, which have
   most of the error, are drawn more often, by systematic sampling: a query of the probability p for one
   draw is drawn n p times on average, and a probe counts for 1 / (n p). Probe j of the group at position
   r has the index r n + j. At every level, a threshold of `level_thresholds`, the error and the
   correction of each probe are known. The groups at even positions take the threshold and the shrinkage
   (one for each head) that the probes of the groups at odd positions determine, and the other way round,
   so that no probe measures what it has determined; where the probes predict that a target will be
   missed, thresholds are chosen again for a lower aim (`choose`). A head is computed exactly if more
   than `dense_threshold` of its tiles would be expanded, by the share of the probes, interpolated like
   the threshold, in the mean of the two halves.
6. Prefix queries are exact. The outputs of queries that are not valid are undefined (0 here).
"""

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from bmfa.attention.choice import Levels, choose, level_thresholds
from bmfa.attention.tiling import FARTHEST, PROBE_SLOTS, UNIFORM_SHARE, Tiling

Array = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
Indices = npt.NDArray[np.int64]


class Probe(NamedTuple):
    """A query that is attended exactly."""

    token: int
    weight: float  # number of queries that it stands for, 1 / (n p)


class ReferenceTiled(NamedTuple):
    """Result of `tiled_attention`."""

    output: Array  # (B, H, prefix + N, e)
    expanded: Mask  # (B, H, R, T) tiles that a group reads token by token
    losses: Array  # (B, H, R, T)
    thresholds: Array  # (B, 2) of the groups at even and odd positions
    shrinkage: Array  # (B, H, 2)
    exact: Mask  # (B, H) heads in which every tile is expanded
    probes: Array  # (B, H, P, 3): |output - exact|^2, |exact|^2, and the weight of the probe


def tiled_attention(
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    v: npt.ArrayLike,
    tiling: Tiling,
    *,
    prefix: int = 0,
    scale: float,
    tau: float = 1.0,
    error: float | None = None,
    expand: float | None = None,
    valid: npt.ArrayLike | None = None,
    dense_threshold: float = 1.0,
    query_prefix: int | None = None,
) -> ReferenceTiled:
    """Compute tiled attention as the module describes it.

    Args:
        q: (B, H, query_prefix + queries, d), in raster order.
        k: (B, H, prefix + N, d), spatial tokens in raster order.
        v: (B, H, prefix + N, e).
        tiling: Tiles of the grid of N spatial tokens, and groups of the queries.
        prefix: Number of keys before the grid.
        scale: Factor of q . k.
        tau: Temperature.
        error: Target for the relative L2 error of the output; one of `error` and `expand` is given.
        expand: Mean number of tiles that a group expands.
        valid: bool (B, N), the spatial tokens that exist.
        dense_threshold: Share of expanded tiles above which a head is computed exactly.
        query_prefix: Number of queries before the grid, if it is not that of the keys.

    Returns:
        The output, and how it was found.
    """
    queries, keys, values = (np.asarray(x, np.float64) for x in (q, k, v))
    batch, heads, tokens, _ = queries.shape
    exists = np.ones((batch, tiling.grid.size), bool) if valid is None else np.asarray(valid, bool)
    query_prefix = prefix if query_prefix is None else query_prefix
    groups, probe_groups = tiling.groups, tiling.probe_groups(query_prefix)
    result = ReferenceTiled(
        np.zeros((batch, heads, tokens, values.shape[-1])),
        np.zeros((batch, heads, groups, tiling.tiles), bool),
        np.zeros((batch, heads, groups, tiling.tiles)),
        np.zeros((batch, 2)),
        np.zeros((batch, heads, 2)),
        np.zeros((batch, heads), bool),
        np.zeros((batch, heads, tiling.probes(query_prefix), 3)),
    )
    farthest = 0.0 if error is None else FARTHEST
    order = tiling.group_order.numpy()
    parity = np.empty(groups, np.int64)
    parity[order] = np.arange(groups) % 2  # of the position of each group
    for b in range(batch):
        tiles = group_queries = tile_members(tiling, exists[b])
        if tiling.separate_groups:
            queries_exist = exists[b]
            if tiling.query_grid is not None:
                queries_exist = np.ones(tiling.queries.grid.size, bool)
            group_queries = tile_members(tiling.queries, queries_exist)
        image = [
            Head(q, k, v, tiles, prefix, scale / tau, order, group_queries, farthest)
            for q, k, v in zip(queries[b, :, query_prefix:], keys[b], values[b], strict=True)
        ]
        drawn = [
            [p for g in order[:probe_groups] for p in draw_probes(head, tiling, int(g), h)]
            for h, head in enumerate(image)
        ]
        thresholds = level_thresholds()
        probe_order = order[:probe_groups].repeat(tiling.probes_per_group)
        levels = measure_levels(image, probe_order, drawn, thresholds)
        chosen, shrinkage, exact = choose(
            levels,
            tiling.probes_per_group,
            target=error,
            aim=tiling.error_aim,
            share=None if expand is None else expand / tiling.tiles,
            dense_threshold=dense_threshold,
        )
        result.thresholds[b], result.shrinkage[b], result.exact[b] = chosen, shrinkage, exact
        for h, head in enumerate(image):
            result.losses[b, h] = head.losses
            expanded = (head.losses >= chosen[parity][:, None]) & (head.losses > 0)
            expanded |= exact[h] | (chosen[parity] == 0.0)[:, None]
            expanded &= head.counts > 0
            result.expanded[b, h] = expanded
            for p in range(query_prefix):
                result.output[b, h, p] = head.exact_output(queries[b, h, p])
            for g in range(groups):
                for token in group_queries[g]:
                    coarse, correction = head.output(token, g, expanded[g], shrinkage[h, parity[g]])
                    result.output[b, h, query_prefix + token] = coarse + correction
            result.probes[b, h] = _probe_errors(head, result.output[b, h, query_prefix:], drawn[h])
    return result


class Head:
    """One head of one image: steps 1 to 4.

    Args:
        q: (queries, d), those of the prefix excepted.
        k: (prefix + N, d).
        v: (prefix + N, e).
        members: Valid tokens of each tile.
        prefix: Number of keys before the grid.
        factor: Factor of q . k, scale / tau.
        order: Groups in the order of their positions; None for that of their numbers.
        queries: Valid queries of each group; None for those of the tiles.
    """

    def __init__(
        self,
        q: Array,
        k: Array,
        v: Array,
        members: list[list[int]],
        prefix: int,
        factor: float,
        order: Indices | None = None,
        queries: list[list[int]] | None = None,
        farthest: float = FARTHEST,
    ) -> None:
        self.farthest = farthest
        self.factor, self.members = factor, members
        self.queries = members if queries is None else queries
        self.order = np.arange(len(self.queries)) if order is None else order
        self.q, self.k, self.v = q, k[prefix:], v[prefix:]
        self.prefix_k, self.prefix_v = k[:prefix], v[:prefix]
        self.counts = np.array([len(tokens) for tokens in members])
        self._summarise_groups()
        self._summarise_tiles()
        self._represent()

    def _summarise_groups(self) -> None:
        groups, dim = len(self.queries), self.q.shape[1]
        self.q_mean = np.zeros((groups, dim))
        self.q_spread = np.zeros(groups)  # rho
        for g, tokens in enumerate(self.queries):
            if tokens:
                self.q_mean[g] = self.q[tokens].mean(0)
                squares = ((self.q[tokens] - self.q_mean[g]) ** 2).sum(-1)
                self.q_spread[g] = math.sqrt(squares.mean()) * math.sqrt(squares.max())
        sample = self.order[:PROBE_SLOTS]
        counts = np.array([len(self.queries[g]) for g in sample])
        self.q_head = (counts[:, None] * self.q_mean[sample]).sum(0) / max(1, counts.sum())

    def _summarise_tiles(self) -> None:
        tiles, dim = len(self.members), self.k.shape[1]
        self.k_spread = np.zeros(tiles)  # kappa
        self.k_farthest = np.zeros(tiles)  # lambda
        self.diameter = 0.0
        self.cross = np.zeros((tiles, dim, self.v.shape[1]))
        for tile, tokens in enumerate(self.members):
            if tokens:
                keys, values = self.k[tokens], self.v[tokens]
                p = softmax(self.factor * (keys @ self.q_head))
                keys, values = keys - p @ keys, values - p @ values
                squares = (keys**2).sum(-1)
                self.k_spread[tile], self.k_farthest[tile] = squares.mean(), squares.max()
                self.cross[tile] = (p[:, None] * keys).T @ values
                self.diameter = max(self.diameter, 2 * float(np.linalg.norm(values, axis=-1).max()))

    def _represent(self) -> None:
        groups, tiles, dim = len(self.queries), len(self.members), self.k.shape[1]
        self.log_mass = np.full((groups, tiles), -np.inf)  # A
        self.k_tangent = np.zeros((groups, tiles, dim))
        self.v_tangent = np.zeros((groups, tiles, self.v.shape[1]))
        for tile, tokens in enumerate(self.members):
            if tokens:
                scores = self.factor * (self.q_mean @ self.k[tokens].T)  # (R, n)
                self.log_mass[:, tile] = log_sum_exp(scores)
                p = np.exp(scores - self.log_mass[:, tile : tile + 1])
                self.k_tangent[:, tile] = p @ self.k[tokens]
                self.v_tangent[:, tile] = p @ self.v[tokens]
        prefix_scores = self.factor * (self.q_mean @ self.prefix_k.T)
        log_z = log_sum_exp(np.concatenate((self.log_mass, prefix_scores), -1))
        log_share = self.log_mass - log_z[:, None]
        self.mass = np.exp(log_share)  # m
        spread = self.factor**2 * self.q_spread / (2 * dim)  # h
        far = np.outer(spread, self.k_farthest)
        far = np.minimum(far, self.farthest * np.sqrt(2 * far))  # f
        # m expm1(f) / n, limited to 1 before it overflows
        grown = np.exp(np.minimum(log_share + far - np.log(np.maximum(self.counts, 1)), 0.0))
        grown *= -np.expm1(-far)
        self.losses = np.minimum(self.mass * np.outer(spread, self.k_spread) + grown, 1.0)

    def logits(self, token: int, g: int, expanded: Mask) -> tuple[Array, Array, Mask]:
        """Return logits, values and a mask of those of tiles, for one query of group g."""
        query = self.q[token]
        coarse = np.flatnonzero(~expanded & (self.counts > 0))
        exact = [t for tile in np.flatnonzero(expanded) for t in self.members[tile]]
        tangent = self.log_mass[g, coarse] + self.factor * (
            self.k_tangent[g, coarse] @ (query - self.q_mean[g])
        )
        keys = np.concatenate((self.k[exact], self.prefix_k))
        logits = np.concatenate((tangent, self.factor * (keys @ query)))
        values = np.concatenate((self.v_tangent[g, coarse], self.v[exact], self.prefix_v))
        return logits, values, np.arange(len(logits)) < len(coarse)

    def output(
        self, token: int, g: int, expanded: Mask, shrinkage: float = 1.0
    ) -> tuple[Array, Array]:
        """Step 4 for one query: the attention, and its correction."""
        logits, values, is_tile = self.logits(token, g, expanded)
        weights = softmax(logits)
        mass = np.where(expanded, 0.0, self.mass[g])
        total = mass.sum()
        cross = np.tensordot(mass / total, self.cross, 1) if total > 0 else 0 * self.cross[0]
        correction = shrinkage * self.factor * ((self.q[token] - self.q_mean[g]) @ cross)
        length = float(np.linalg.norm(correction))
        if length > self.diameter:
            correction *= self.diameter / length
        return weights @ values, weights[is_tile].sum() * correction

    def exact_output(self, query: Array) -> Array:
        """Exact attention of any query."""
        present = [token for tokens in self.members for token in tokens]
        keys = np.concatenate([self.prefix_k, self.k[present]])
        values = np.concatenate([self.prefix_v, self.v[present]])
        return np.asarray(softmax(self.factor * (keys @ query)) @ values)


def draw_probes(head: Head, tiling: Tiling, g: int, h: int) -> list[Probe | None]:
    """Draw the probes of group g of head h among its valid queries; None if there are none.

    A draw takes a query with the probability p = UNIFORM_SHARE / n + (1 - UNIFORM_SHARE) |q - qbar|^4 /
    sum |q - qbar|^4, of n queries: the first one at which the sum of p exceeds `Tiling.probe_quantile`.
    """
    draws, tokens = tiling.probes_per_group, head.queries[g]
    if not tokens:
        return [None] * draws
    squares = ((head.q[tokens] - head.q_mean[g]) ** 2).sum(-1)
    p = np.full(len(tokens), 1 / len(tokens))
    if squares.max() > 0:
        fourth = (squares / squares.max()) ** 2
        p = UNIFORM_SHARE * p + (1 - UNIFORM_SHARE) * fourth / fourth.sum()
    probes: list[Probe | None] = []
    for draw in range(draws):
        below = int((np.cumsum(p) <= tiling.probe_quantile(g, h, draw)).sum())
        index = min(below, len(tokens) - 1)
        probes.append(Probe(tokens[index], 1 / (draws * p[index])))
    return probes


def measure_levels(
    image: list[Head], groups: Indices, probes: list[list[Probe | None]], thresholds: Array
) -> Levels:
    """Evaluate every probe at every level.

    Args:
        image: The heads.
        groups: (P,) group of each probe.
        probes: (H, P).
        thresholds: (levels,)
    """
    shape = (len(image), len(groups))
    found = np.zeros((*shape, 4, len(thresholds)))
    norm, weight = np.zeros(shape), np.zeros(shape)
    for h, head in enumerate(image):
        for p, (g, probe) in enumerate(zip(groups, probes[h], strict=True)):
            if probe is None:
                continue
            exact = head.exact_output(head.q[probe.token])
            norm[h, p], weight[h, p] = exact @ exact, probe.weight
            for level, threshold in enumerate(thresholds):
                expanded = (head.losses[g] >= threshold) & (head.losses[g] > 0)
                expanded |= threshold == 0.0
                expanded &= head.counts > 0
                coarse, term = head.output(probe.token, int(g), expanded)
                difference = exact - coarse
                found[h, p, :, level] = (
                    difference @ difference,
                    difference @ term,
                    term @ term,
                    expanded.sum() / (head.counts > 0).sum(),
                )
    return Levels(found, norm, weight)


def _probe_errors(head: Head, output: Array, probes: list[Probe | None]) -> Array:
    """Return (P, 3) rows: |output - exact|^2, |exact|^2 and the weight of the probe."""
    errors = np.zeros((len(probes), 3))
    for p, probe in enumerate(probes):
        if probe is not None:
            exact = head.exact_output(head.q[probe.token])
            difference = output[probe.token] - exact
            errors[p] = difference @ difference, exact @ exact, probe.weight
    return errors


def tile_members(tiling: Tiling, exists: Mask) -> list[list[int]]:
    """Return the raster indices of the valid tokens of each tile."""
    return [
        [token for token in slots if token >= 0 and exists[token]]
        for slots in tiling.slot_tokens.tolist()
    ]


def softmax(logits: Array) -> Array:
    """Softmax of a vector."""
    weights = np.exp(logits - logits.max())
    return np.asarray(weights / weights.sum())


def log_sum_exp(logits: Array) -> Array:
    """Log-sum-exp over the last dimension, -inf where all logits are."""
    largest = logits.max(-1, keepdims=True)
    shift = np.where(np.isfinite(largest), largest, 0.0)
    with np.errstate(divide="ignore"):
        return np.asarray(shift[..., 0] + np.log(np.exp(logits - shift).sum(-1)))
