"""Tiled attention and its error: a representative query of each group selects and corrects tiles."""

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from bmfa.attention.kernels.reference.energy import Array, log_sum_exp
from bmfa.attention.kernels.reference.trees import Mask
from bmfa.attention.tiling import GAP_CAP, Tiling

Long = npt.NDArray[np.longdouble]


class ReferenceTiled(NamedTuple):
    """Result of `tiled_attention`."""

    output: Array  # (B, H, prefix + N, e)
    expanded: Mask  # (B, H, R, T) tiles that a group reads token by token
    losses: Array  # (B, H, R, T) by which the tiles were chosen


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
    expand: int | None = None,
    valid: npt.ArrayLike | None = None,
) -> ReferenceTiled:
    """Compute attention over tiles, with one representative for each group g of queries.

    With c = scale / tau:

    1. kbar_L, vbar_L and n_L are the means and the count of the valid tokens of tile L; n = sum_L n_L;
       cross = sum_L sum_{i in L} (k_i - kbar_L) (v_i - vbar_L)^T.
    2. qbar_g is the mean of the valid queries of the group, 0 if there are none;
       rho_g = mean |q - qbar_g|^2 over them, kappa_L = mean |k_i - kbar_L|^2 over a tile.
    3. s_i = c qbar.k_i, A_L = log sum_{i in L} exp s_i, M_L = c qbar.kbar_L,
       spread_L = c^2 rho_g kappa_L / 2d: queries that differ from qbar equally in all d directions raise
       the variance of the scores of a tile by c^2 rho kappa / d on average, and its gap by half of that;
       gap_L = min(max(A_L - log n_L - M_L, 0) + spread_L, GAP_CAP),
       Z = sum_L exp A_L + sum_prefix exp(c qbar.k_p), loss_L = exp(A_L) (1 - exp(-gap_L)) / Z.
    4. X is the set of expanded tiles. With `error`, it is the smallest set of largest losses, ties
       together, such that the other losses sum to at most 1 - exp(-error / tau). With `expand`, it holds
       that many of the largest losses above 0, ties by index, or every tile if there are no more.
    5. The weights w are a softmax over tiles outside X (logit c q.kbar_L + log n_L + gap_L, value
       vbar_L), tokens of X and the prefix (both exact). With u the sum of w over the tiles outside X,
           o = sum w v + u residual + (u / n) c (q - qbar) cross,
           residual = sum_{L not in X} sum_{i in L} exp(s_i) (v_i - vbar_L) / sum_{L not in X} exp A_L.
       The denominator keeps the residual within the differences of values.
    6. Prefix queries are exact. The outputs of queries that are not valid are undefined (0 here).

    Args:
        q, k: (B, H, prefix + N, d), spatial tokens in raster order.
        v: (B, H, prefix + N, e).
        tiling: Tiles of the grid of N spatial tokens, and groups of queries.
        prefix: Number of tokens before the grid.
        scale: Factor of q . k.
        tau: Temperature.
        error: Target for the mean E of every group; one of `error` and `expand` is given.
        expand: Number of tiles that every group expands.
        valid: bool (B, N), the spatial tokens that exist.

    Returns:
        Output, expanded tiles and losses.
    """
    queries, keys, values = (np.asarray(x, np.float64) for x in (q, k, v))
    batch, heads, tokens, _ = queries.shape
    exists = np.ones((batch, tiling.grid.size), bool) if valid is None else np.asarray(valid, bool)
    output = np.zeros((batch, heads, tokens, values.shape[-1]))
    expanded = np.zeros((batch, heads, tiling.groups, tiling.tiles), bool)
    losses = np.zeros(expanded.shape)
    max_loss = None if error is None else -math.expm1(-error / tau)
    for b, h in np.ndindex(batch, heads):
        members = _tile_members(tiling, exists[b])
        head = _Head(queries[b, h], keys[b, h], values[b, h], members, prefix, scale / tau)
        for p in range(prefix):
            output[b, h, p] = head.dense_output(queries[b, h, p])
        for g in range(tiling.groups):
            group_tiles = members[g * tiling.group : (g + 1) * tiling.group]
            group_tokens = [token for tile in group_tiles for token in tile]
            scores = head.score_tiles(group_tokens)
            for tile, loss in scores.losses.items():
                losses[b, h, g, tile] = loss
            chosen = _choose_tiles(scores.losses, max_loss, expand, tiling.tiles)
            expanded[b, h, g, sorted(chosen)] = True
            residual = head.residual(scores, chosen)
            for token in group_tokens:
                output[b, h, prefix + token] = head.output(token, scores, chosen, residual)
    return ReferenceTiled(output, expanded, losses)


class _TileScores(NamedTuple):
    """Step 3 for one group: what the representative finds in every tile that has tokens."""

    q_mean: Array  # (d,) qbar
    gaps: dict[int, float]
    log_masses: dict[int, float]  # A_L
    losses: dict[int, float]


class _Head:
    """Tiles, keys and values of one head of one sequence."""

    def __init__(
        self, q: Array, k: Array, v: Array, members: list[list[int]], prefix: int, factor: float
    ) -> None:
        self.factor, self.members = factor, members
        self.q, self.k, self.v = q[prefix:], k[prefix:], v[prefix:]
        self.prefix_k, self.prefix_v = k[:prefix], v[:prefix]
        self.tiles = [index for index, tokens in enumerate(members) if tokens]
        self.size = sum(len(members[tile]) for tile in self.tiles)
        self.k_mean = {tile: self.k[members[tile]].mean(0) for tile in self.tiles}
        self.v_mean = {tile: self.v[members[tile]].mean(0) for tile in self.tiles}
        self.k_spread = {
            tile: _mean_square(self.k[members[tile]] - self.k_mean[tile]) for tile in self.tiles
        }
        self.cross = np.zeros((k.shape[1], v.shape[1]))
        for tile in self.tiles:
            for token in members[tile]:
                self.cross += np.outer(
                    self.k[token] - self.k_mean[tile], self.v[token] - self.v_mean[tile]
                )

    def score_tiles(self, queries: list[int]) -> _TileScores:
        """Step 3, for the mean of the queries."""
        q_mean = self.q[queries].mean(0) if queries else np.zeros(self.q.shape[1])
        q_spread = _mean_square(self.q[queries] - q_mean) if queries else 0.0
        gaps, log_masses, losses = {}, {}, {}
        for tile in self.tiles:
            scores = self.factor * (self.k[self.members[tile]] @ q_mean)
            gap = max(log_sum_exp(scores - scores.mean()) - math.log(len(scores)), 0.0)
            log_masses[tile] = log_sum_exp(scores)
            gap += self.factor**2 * q_spread * self.k_spread[tile] / (2 * len(q_mean))
            gaps[tile] = min(gap, GAP_CAP)
        prefix_scores = self.factor * (self.prefix_k @ q_mean)
        log_z = log_sum_exp(np.array([*log_masses.values(), *prefix_scores]))
        for tile in self.tiles:
            losses[tile] = math.exp(log_masses[tile] - log_z) * -math.expm1(-gaps[tile])
        return _TileScores(q_mean, gaps, log_masses, losses)

    def residual(self, scores: _TileScores, expanded: set[int]) -> Array:
        """The residual of step 5."""
        total = np.zeros(self.v.shape[1])
        coarse = [tile for tile in self.tiles if tile not in expanded]
        if not coarse:
            return total
        log_mass = log_sum_exp(np.array([scores.log_masses[tile] for tile in coarse]))
        for tile in coarse:
            tokens = self.members[tile]
            weights = np.exp(self.factor * (self.k[tokens] @ scores.q_mean) - log_mass)
            total += weights @ (self.v[tokens] - self.v_mean[tile])
        return total

    def output(self, token: int, scores: _TileScores, expanded: set[int], residual: Array) -> Array:
        """Step 5 for one spatial query."""
        query = self.q[token]
        logits = list(self.factor * (self.prefix_k @ query))
        values = list(self.prefix_v)
        is_coarse = [False] * len(logits)
        for tile in self.tiles:
            tokens = self.members[tile]
            if tile in expanded:
                logits += list(self.factor * (self.k[tokens] @ query))
                values += list(self.v[tokens])
                is_coarse += [False] * len(tokens)
            else:
                mean = self.factor * float(self.k_mean[tile] @ query)
                logits.append(mean + math.log(len(tokens)) + scores.gaps[tile])
                values.append(self.v_mean[tile])
                is_coarse.append(True)
        weights = np.exp(np.array(logits) - max(logits))
        weights /= weights.sum()
        coarse_weight = float(weights[np.array(is_coarse, bool)].sum())  # u
        first_order = self.factor / self.size * ((query - scores.q_mean) @ self.cross)
        return np.asarray(weights @ np.array(values) + coarse_weight * (residual + first_order))

    def dense_output(self, query: Array) -> Array:
        """Step 6: exact attention of a prefix query."""
        tokens = [token for tile in self.tiles for token in self.members[tile]]
        logits = self.factor * (np.concatenate([self.prefix_k, self.k[tokens]]) @ query)
        weights = np.exp(logits - logits.max())
        values = np.concatenate([self.prefix_v, self.v[tokens]])
        return np.asarray(weights / weights.sum() @ values)


def _tile_members(tiling: Tiling, exists: Mask) -> list[list[int]]:
    """Return the raster indices of the valid tokens of each tile."""
    return [
        [token for token in slots if token >= 0 and exists[token]]
        for slots in tiling.slot_tokens.tolist()
    ]


def _choose_tiles(
    losses: dict[int, float], max_loss: float | None, expand: int | None, tiles: int
) -> set[int]:
    """Step 4."""
    ranked = sorted((tile for tile in losses if losses[tile] > 0), key=lambda t: (-losses[t], t))
    if expand is not None:
        return set(losses) if expand >= tiles else set(ranked[:expand])
    if max_loss is None:
        raise ValueError("error and expand are both None; pass one of them")
    count = len(ranked)
    while count and math.fsum(losses[tile] for tile in ranked[count - 1 :]) <= max_loss:
        count -= 1
    if count == 0:
        return set()
    return {tile for tile in ranked if losses[tile] >= losses[ranked[count - 1]]}


def _mean_square(vectors: Array) -> float:
    return float((vectors**2).sum(-1).mean())


def tiled_error(
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    expanded: npt.ArrayLike,
    tiling: Tiling,
    *,
    prefix: int = 0,
    scale: float,
    tau: float = 1.0,
    valid: npt.ArrayLike | None = None,
) -> Long:
    """Compute E = -tau log(1 - sum_{L not in X} P_L (1 - exp(-G_L / tau))) of every query.

    P_L is the share of tile L in Z over all keys, G_L / tau = log mean exp(s_i - M_L), and X the
    expanded tiles of the query's group. If half of the mass or more is lost, E = tau log(Z / Z~).

    Args:
        q, k: (B, H, prefix + N, d), spatial tokens in raster order.
        expanded: bool (B, H, R, T), the expanded tiles of each group.
        tiling: Tiles of the grid of N spatial tokens, and groups of queries.
        prefix: Number of tokens before the grid.
        scale: Factor of q . k.
        tau: Temperature.
        valid: bool (B, N), the spatial tokens that exist.

    Returns:
        (B, H, prefix + N) in long double; 0 for prefix queries and for queries that are not valid.
    """
    queries, keys = (np.asarray(x, np.longdouble) for x in (q, k))
    batch, heads, tokens, _ = queries.shape
    expanded_tiles = np.asarray(expanded, bool)
    exists = np.ones((batch, tiling.grid.size), bool) if valid is None else np.asarray(valid, bool)
    factor = np.longdouble(scale) / np.longdouble(tau)
    errors = np.zeros((batch, heads, tokens), np.longdouble)
    for b, h in np.ndindex(batch, heads):
        members = _tile_members(tiling, exists[b])
        present = [token for tile in members for token in tile]
        groups = [tile // tiling.group for tile, some in enumerate(members) for _ in some]
        scaled = queries[b, h, prefix:][present] * factor
        scores = scaled @ keys[b, h, prefix:].T
        prefix_scores = scaled @ keys[b, h, :prefix].T
        coarse = ~expanded_tiles[b, h][groups]
        errors[b, h, prefix + np.array(present)] = tau * _query_errors(
            scores, prefix_scores, members, coarse
        )
    return errors


def _query_errors(
    scores: Long, prefix_scores: Long, members: list[list[int]], coarse: Mask
) -> Long:
    """Return E / tau (Q,) from scores (Q, N) and (Q, prefix), and a mask (Q, T) of mean tiles."""
    log_masses, coarse_log_masses = list(prefix_scores.T), list(prefix_scores.T)
    log_losses = []
    for tile, tokens in enumerate(members):
        if not tokens:
            continue
        block = scores[:, tokens]
        log_mass = _log_sum_exp_rows(block)
        gap = _log_sum_exp_rows(block - block.mean(-1, keepdims=True))
        gap = gap - np.log(np.longdouble(len(tokens)))
        gap = np.where(coarse[:, tile], np.maximum(gap, 0), 0)
        log_masses.append(log_mass)
        coarse_log_masses.append(log_mass - gap)
        lost = -np.expm1(-gap)
        log_lost = np.log(np.where(lost > 0, lost, 1)) + np.where(lost > 0, 0, -np.inf)
        log_losses.append(log_mass + log_lost)
    log_z = _log_sum_exp_rows(np.stack(log_masses, -1))
    coarse_log_z = _log_sum_exp_rows(np.stack(coarse_log_masses, -1))
    loss = sum((np.exp(x - log_z) for x in log_losses), np.zeros(len(scores), np.longdouble))
    small = -np.log1p(-np.minimum(loss, 0.5))
    return np.asarray(np.where(loss < 0.5, small, log_z - coarse_log_z))


def _log_sum_exp_rows(logits: Long) -> Long:
    largest = logits.max(-1, keepdims=True)
    return np.asarray(largest[..., 0] + np.log(np.exp(logits - largest).sum(-1)))
