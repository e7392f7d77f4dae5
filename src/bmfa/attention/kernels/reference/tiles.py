"""Tiled attention: a representative query for each group of tiles chooses and corrects."""

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from bmfa.attention.kernels.reference.energy import Array
from bmfa.attention.kernels.reference.trees import Mask
from bmfa.attention.tiling import GAP_CAP, Tiling


class ReferenceTiled(NamedTuple):
    """Outputs, the expanded tiles of each group, and the losses that chose them."""

    output: Array  # (B, heads, prefix + N, d)
    expanded: Mask  # (B, heads, R, T)
    losses: Array  # (B, heads, R, T)


class _Screen(NamedTuple):
    """What the representative of one group knows of every tile that exists."""

    query: Array  # (d,) qbar
    gaps: dict[int, float]
    masses: dict[int, float]  # A_L
    losses: dict[int, float]


class _Head:
    """The tiles, keys and values of one head of one picture."""

    def __init__(
        self, q: Array, k: Array, v: Array, members: list[list[int]], prefix: int, factor: float
    ) -> None:
        self.q, self.factor, self.members = q[prefix:], factor, members
        self.k, self.v, self.before = k[prefix:], v[prefix:], (k[:prefix], v[:prefix])
        self.tiles = [index for index, tokens in enumerate(members) if tokens]
        self.size = sum(len(members[tile]) for tile in self.tiles)
        self.key = {tile: self.k[members[tile]].mean(0) for tile in self.tiles}
        self.value = {tile: self.v[members[tile]].mean(0) for tile in self.tiles}
        self.spread = {
            tile: _mean_square(self.k[members[tile]] - self.key[tile]) for tile in self.tiles
        }
        self.cross = np.zeros((k.shape[1], v.shape[1]))
        for tile in self.tiles:
            for token in members[tile]:
                self.cross += np.outer(
                    self.k[token] - self.key[tile], self.v[token] - self.value[tile]
                )

    def screen(self, queries: list[int]) -> _Screen:
        """Step 3, for the mean of the queries (0 where there is none)."""
        query = self.q[queries].mean(0) if queries else np.zeros(self.q.shape[1])
        apart = _mean_square(self.q[queries] - query) if queries else 0.0
        gaps, masses, losses = {}, {}, {}
        for tile in self.tiles:
            scores = self.factor * (self.k[self.members[tile]] @ query)
            centered = scores - scores.mean()
            gap = max(_log_sum(centered) - math.log(len(scores)), 0.0)
            masses[tile] = _log_sum(scores)
            gap += self.factor**2 * apart * self.spread[tile] / (2 * len(query))
            gaps[tile] = min(gap, GAP_CAP)
        before = self.factor * (self.before[0] @ query)
        whole = _log_sum(np.array([*masses.values(), *before]))
        for tile in self.tiles:
            losses[tile] = math.exp(masses[tile] - whole) * -math.expm1(-gaps[tile])
        return _Screen(query, gaps, masses, losses)

    def residual(self, screen: _Screen, chosen: set[int]) -> Array:
        """sum_{L not in X} sum_i exp(s_i) (v_i - vbar_L) / sum_{L not in X} exp(A_L)."""
        total, rest = np.zeros(self.v.shape[1]), [t for t in self.tiles if t not in chosen]
        if not rest:
            return total
        whole = _log_sum(np.array([screen.masses[tile] for tile in rest]))
        for tile in rest:
            scores = self.factor * (self.k[self.members[tile]] @ screen.query)
            total += np.exp(scores - whole) @ (self.v[self.members[tile]] - self.value[tile])
        return total

    def attend(self, token: int, screen: _Screen, chosen: set[int], residual: Array) -> Array:
        """Step 5 for one spatial query."""
        query = self.q[token]
        logits = list(self.factor * (self.before[0] @ query))
        values = list(self.before[1])
        summarised = [False] * len(logits)
        for tile in self.tiles:
            tokens = self.members[tile]
            if tile in chosen:
                logits += list(self.factor * (self.k[tokens] @ query))
                values += list(self.v[tokens])
                summarised += [False] * len(tokens)
            else:
                mean = self.factor * float(self.key[tile] @ query)
                logits.append(mean + math.log(len(tokens)) + screen.gaps[tile])
                values.append(self.value[tile])
                summarised.append(True)
        weights = np.exp(np.array(logits) - max(logits))
        weights /= weights.sum()
        share = float(weights[np.array(summarised, bool)].sum())
        first = self.factor / self.size * ((query - screen.query) @ self.cross)
        return np.asarray(weights @ np.array(values) + share * (residual + first))

    def dense(self, query: Array) -> Array:
        """Step 6: exact attention of a prefix query."""
        tokens = [token for tile in self.tiles for token in self.members[tile]]
        logits = self.factor * (np.concatenate([self.before[0], self.k[tokens]]) @ query)
        weights = np.exp(logits - logits.max())
        values = np.concatenate([self.before[1], self.v[tokens]])
        return np.asarray(weights / weights.sum() @ values)


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
    """Attention over tiles with a representative for each group g of queries; c = scale / tau.

    1. kbar_L, vbar_L, n_L: means and count of the valid tokens of tile L; n = sum_L n_L;
       cross = sum_L sum_{i in L} (k_i - kbar_L) (v_i - vbar_L)^T.
    2. qbar_g: the mean of the valid queries of the group, 0 where there is none;
       rho_g = mean |q - qbar_g|^2 over them, kappa_L = mean |k_i - kbar_L|^2 over a tile.
    3. s_i = c qbar.k_i, A_L = log sum_{i in L} exp s_i, M_L = c qbar.kbar_L,
       spread_L = c^2 rho_g kappa_L / 2d: queries that differ from qbar in all d directions alike raise
       the variance of a tile's scores by c^2 rho kappa / d on average, and its gap by half of that;
       gap_L = min(max(A_L - log n_L - M_L, 0) + spread_L, GAP_CAP),
       Z = sum_L exp A_L + sum_prefix exp(c qbar.k_p), loss_L = exp(A_L) (1 - exp(-gap_L)) / Z.
    4. X, the expanded tiles: with `error`, the fewest, largest loss first and ties together, such
       that the other losses sum to at most 1 - exp(-error / tau); with `expand`, so many of the
       largest above 0 (ties: the first), or every tile where there are no more than that.
    5. Weights w = softmax over tiles outside X (c q.kbar_L + log n_L + gap_L, vbar_L), tokens of X
       and the prefix (both exact); with u = sum of w over the tiles outside X
           o = sum w v + u residual + (u / n) c (q - qbar) cross,
           residual = sum_{L not in X} sum_{i in L} exp(s_i) (v_i - vbar_L) / sum_{L not in X} exp A_L,
       whose denominator keeps the residual among the differences of the values.
    6. Prefix queries are exact; the outputs of queries that are not valid are of no account (0 here).
    """
    queries, keys, values = (np.asarray(x, np.float64) for x in (q, k, v))
    batch, heads, tokens, _ = queries.shape
    grid, groups = tiling.grid, tiling.groups
    exists = np.ones((batch, grid.size), bool) if valid is None else np.asarray(valid, bool)
    output = np.zeros((batch, heads, tokens, values.shape[-1]))
    expanded = np.zeros((batch, heads, groups, tiling.tiles), bool)
    losses = np.zeros(expanded.shape)
    limit = None if error is None else -math.expm1(-error / tau)
    for b, h in np.ndindex(batch, heads):
        members = tile_members(tiling, exists[b])
        head = _Head(queries[b, h], keys[b, h], values[b, h], members, prefix, scale / tau)
        for p in range(prefix):
            output[b, h, p] = head.dense(queries[b, h, p])
        for g in range(groups):
            block = members[g * tiling.group : (g + 1) * tiling.group]
            tokens_of_group = [token for tile in block for token in tile]
            screen = head.screen(tokens_of_group)
            for tile, loss in screen.losses.items():
                losses[b, h, g, tile] = loss
            chosen = _choose(screen.losses, limit, expand, tiling.tiles)
            expanded[b, h, g, sorted(chosen)] = True
            residual = head.residual(screen, chosen)
            for token in tokens_of_group:
                output[b, h, prefix + token] = head.attend(token, screen, chosen, residual)
    return ReferenceTiled(output, expanded, losses)


def tile_members(tiling: Tiling, exists: Mask) -> list[list[int]]:
    """The valid tokens of each tile, as raster indices."""
    height, width, side = tiling.grid.height, tiling.grid.width, tiling.side
    members = []
    for top in range(0, height, side):
        for left in range(0, width, side):
            block = [
                row * width + column
                for row in range(top, min(top + side, height))
                for column in range(left, min(left + side, width))
            ]
            members.append([token for token in block if exists[token]])
    return members


def _choose(
    losses: dict[int, float], limit: float | None, expand: int | None, tiles: int
) -> set[int]:
    """Step 4."""
    ranked = sorted((tile for tile in losses if losses[tile] > 0), key=lambda t: (-losses[t], t))
    if expand is not None:
        return set(losses) if expand >= tiles else set(ranked[:expand])
    if limit is None:
        raise ValueError("neither error nor expand is given; pass one")
    count = len(ranked)
    while count and math.fsum(losses[tile] for tile in ranked[count - 1 :]) <= limit:
        count -= 1
    if count == 0:
        return set()
    return {tile for tile in ranked if losses[tile] >= losses[ranked[count - 1]]}


def _mean_square(vectors: Array) -> float:
    """The mean of their squared lengths."""
    return float((vectors**2).sum(-1).mean())


def _log_sum(logits: Array) -> float:
    top = logits.max()
    return float(top + np.log(np.exp(logits - top).sum()))


Long = npt.NDArray[np.longdouble]


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
    """E = -tau log(1 - sum_{L not in X} P_L (1 - exp(-G_L / tau))) of every query over all keys.

    P_L is the share of tile L in Z, G_L / tau = log mean exp(s_i - M_L), and X the tiles that `expanded`
    (B, heads, R, T) marks for the query's group. Where half of the mass is lost, tau log(Z / Z~).
    Prefix queries and those that are not valid have E = 0.
    """
    queries, keys = (np.asarray(x, np.longdouble) for x in (q, k))
    batch, heads, tokens, _ = queries.shape
    marks = np.asarray(expanded, bool)
    size = tiling.grid.size
    exists = np.ones((batch, size), bool) if valid is None else np.asarray(valid, bool)
    factor = np.longdouble(scale) / np.longdouble(tau)
    errors = np.zeros((batch, heads, tokens), np.longdouble)
    for b, h in np.ndindex(batch, heads):
        members = tile_members(tiling, exists[b])
        inside = [token for tile in members for token in tile]
        groups = [tile // tiling.group for tile, some in enumerate(members) for _ in some]
        some = queries[b, h, prefix:][inside] * factor
        scores = some @ keys[b, h, prefix:].T
        before = some @ keys[b, h, :prefix].T
        errors[b, h, prefix + np.array(inside)] = tau * _errors(
            scores, before, members, ~marks[b, h][groups]
        )
    return errors


def _errors(scores: Long, before: Long, members: list[list[int]], stays: Mask) -> Long:
    """(Q,) E / tau from (Q, N) scores, (Q, prefix) scores, and (Q, T) which tiles are means."""
    exact, coarse = list(before.T), list(before.T)
    lost = []  # logarithms
    for tile, tokens in enumerate(members):
        if not tokens:
            continue
        block = scores[:, tokens]
        mass = _log_sum_rows(block)
        gap = _log_sum_rows(block - block.mean(-1, keepdims=True)) - np.log(
            np.longdouble(len(tokens))
        )
        gap = np.where(stays[:, tile], np.maximum(gap, 0), 0)
        exact.append(mass)
        coarse.append(mass - gap)
        share = -np.expm1(-gap)
        lost.append(mass + np.log(np.where(share > 0, share, 1)) + np.where(share > 0, 0, -np.inf))
    whole = _log_sum_rows(np.stack(exact, -1))
    total = sum((np.exp(x - whole) for x in lost), np.zeros(len(scores), np.longdouble))
    direct = -np.log1p(-np.minimum(total, 0.5))
    return np.asarray(np.where(total < 0.5, direct, whole - _log_sum_rows(np.stack(coarse, -1))))


def _log_sum_rows(logits: Long) -> Long:
    top = logits.max(-1, keepdims=True)
    return np.asarray(top[..., 0] + np.log(np.exp(logits - top).sum(-1)))
