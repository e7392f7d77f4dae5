"""Mean tiles in NumPy and float64: the specification of the baseline `mean-tiles:SHARE`."""

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from bmfa.evidence.bench.mean_tiles.tiling import GAP_CAP, GroupedTiling

Array = npt.NDArray[np.float64]


class ReferenceTiled(NamedTuple):
    """Result of `mean_tile_attention`."""

    output: Array  # (B, H, prefix + N, d)
    expanded: npt.NDArray[np.bool_]  # (B, H, R, T) tiles that a group reads token by token
    losses: Array  # (B, H, R, T) by which the tiles were chosen


def mean_tile_attention(
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    v: npt.ArrayLike,
    tiling: GroupedTiling,
    *,
    prefix: int,
    expand: int,
    gap_dtype: npt.DTypeLike = np.float64,
) -> ReferenceTiled:
    """Compute attention over mean tiles, with one representative for each group g of queries.

    With c = 1 / sqrt(d):

    1. kbar_L, vbar_L and n_L are the means and the count of the tokens of tile L; n = sum_L n_L;
       cross = sum_L sum_{i in L} (k_i - kbar_L) (v_i - vbar_L)^T.
    2. qbar_g is the mean of the queries of the group; rho_g = mean |q - qbar_g|^2 over them,
       kappa_L = mean |k_i - kbar_L|^2 over a tile.
    3. s_i = c qbar.k_i, A_L = log sum_{i in L} exp s_i, M_L = c qbar.kbar_L,
       spread_L = c^2 rho_g kappa_L / 2d,
       gap_L = min(max(A_L - log n_L - M_L, 0) + spread_L, GAP_CAP),
       Z = sum_L exp A_L + sum_prefix exp(c qbar.k_p), loss_L = exp(A_L) (1 - exp(-gap_L)) / Z.
    4. X, the set of expanded tiles, holds the `expand` largest losses above 0, ties by index, or
       every tile if there are no more.
    5. The weights w are a softmax over tiles outside X (logit c q.kbar_L + log n_L + gap_L, value
       vbar_L), tokens of X and the prefix (both exact). With u the sum of w over the tiles outside X,
           o = sum w v + u residual + (u / n) c (q - qbar) cross,
           residual = sum_{L not in X} sum_{i in L} exp(s_i) (v_i - vbar_L) / sum_{L not in X} exp A_L.
    6. Prefix queries are exact.

    Args:
        q, k, v: (B, H, prefix + N, d), spatial tokens in raster order.
        tiling: Tiles of the grid of N spatial tokens, and groups of queries.
        prefix: Number of tokens before the grid.
        expand: Number of tiles that every group expands.
        gap_dtype: Dtype to which gaps are rounded before and after the spread is added.
    """
    queries, keys, values = (np.asarray(x, np.float64) for x in (q, k, v))
    batch, heads = queries.shape[:2]
    output = np.zeros(queries.shape)
    expanded = np.zeros((batch, heads, tiling.groups, tiling.tiles), bool)
    losses = np.zeros(expanded.shape)
    members = [
        [token for token in slots if token >= 0] for slots in tiling.slot_tokens.tolist()
    ]  # raster indices of the tokens of each tile
    for b, h in np.ndindex(batch, heads):
        head = _Head(queries[b, h], keys[b, h], values[b, h], members, prefix, gap_dtype)
        for p in range(prefix):
            output[b, h, p] = head.dense_output(queries[b, h, p])
        for g in range(tiling.groups):
            tiles = members[g * tiling.group : (g + 1) * tiling.group]
            tokens = [token for tile in tiles for token in tile]
            scores = head.score_tiles(tokens)
            losses[b, h, g] = scores.losses
            chosen = _choose_tiles(scores.losses, expand)
            expanded[b, h, g, sorted(chosen)] = True
            residual = head.residual(scores, chosen)
            for token in tokens:
                output[b, h, prefix + token] = head.output(token, scores, chosen, residual)
    return ReferenceTiled(output, expanded, losses)


class _TileScores(NamedTuple):
    """Step 3 for one group: what the representative finds in every tile."""

    q_mean: Array  # (d,) qbar
    gaps: list[float]
    log_masses: list[float]  # A_L
    losses: list[float]


class _Head:
    """Tiles, keys and values of one head of one sequence."""

    def __init__(
        self,
        q: Array,
        k: Array,
        v: Array,
        members: list[list[int]],
        prefix: int,
        gap_dtype: npt.DTypeLike,
    ) -> None:
        self.factor, self.members = q.shape[-1] ** -0.5, members
        self.q, self.k, self.v = q[prefix:], k[prefix:], v[prefix:]
        self.prefix_k, self.prefix_v = k[:prefix], v[:prefix]
        self.round_gap = np.dtype(gap_dtype).type
        self.k_mean = [self.k[tokens].mean(0) for tokens in members]
        self.v_mean = [self.v[tokens].mean(0) for tokens in members]
        self.k_spread = [
            _mean_square(self.k[tokens] - mean)
            for tokens, mean in zip(members, self.k_mean, strict=True)
        ]
        self.cross = np.zeros((k.shape[1], v.shape[1]))
        for tile, tokens in enumerate(members):
            for token in tokens:
                self.cross += np.outer(
                    self.k[token] - self.k_mean[tile], self.v[token] - self.v_mean[tile]
                )

    def score_tiles(self, queries: list[int]) -> _TileScores:
        """Step 3, for the mean of the queries."""
        q_mean = self.q[queries].mean(0)
        q_spread = _mean_square(self.q[queries] - q_mean)
        gaps, log_masses = [], []
        for tile, tokens in enumerate(self.members):
            scores = self.factor * (self.k[tokens] @ q_mean)
            gap = max(_log_sum_exp(scores - scores.mean()) - math.log(len(scores)), 0.0)
            log_masses.append(_log_sum_exp(scores))
            spread = self.factor**2 * q_spread * self.k_spread[tile] / (2 * len(q_mean))
            gaps.append(float(self.round_gap(min(float(self.round_gap(gap)) + spread, GAP_CAP))))
        prefix_scores = self.factor * (self.prefix_k @ q_mean)
        log_z = _log_sum_exp(np.array([*log_masses, *prefix_scores]))
        losses = [
            math.exp(mass - log_z) * -math.expm1(-gap)
            for mass, gap in zip(log_masses, gaps, strict=True)
        ]
        return _TileScores(q_mean, gaps, log_masses, losses)

    def residual(self, scores: _TileScores, expanded: set[int]) -> Array:
        """The residual of step 5."""
        total = np.zeros(self.v.shape[1])
        coarse = [tile for tile in range(len(self.members)) if tile not in expanded]
        if not coarse:
            return total
        log_mass = _log_sum_exp(np.array([scores.log_masses[tile] for tile in coarse]))
        for tile in coarse:
            tokens = self.members[tile]
            weights = np.exp(self.factor * (self.k[tokens] @ scores.q_mean) - log_mass)
            total += weights @ (self.v[tokens] - self.v_mean[tile])
        return total

    def output(self, token: int, scores: _TileScores, expanded: set[int], residual: Array) -> Array:
        """Step 5 for one spatial query."""
        query = self.q[token]
        logits, values = list(self.factor * (self.prefix_k @ query)), list(self.prefix_v)
        is_coarse = [False] * len(logits)
        for tile, tokens in enumerate(self.members):
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
        first_order = self.factor / len(self.q) * ((query - scores.q_mean) @ self.cross)
        return np.asarray(weights @ np.array(values) + coarse_weight * (residual + first_order))

    def dense_output(self, query: Array) -> Array:
        """Step 6: exact attention of a prefix query."""
        logits = self.factor * (np.concatenate([self.prefix_k, self.k]) @ query)
        weights = np.exp(logits - logits.max())
        return np.asarray(weights / weights.sum() @ np.concatenate([self.prefix_v, self.v]))


def _choose_tiles(losses: list[float], expand: int) -> set[int]:
    """Step 4."""
    if expand >= len(losses):
        return set(range(len(losses)))
    ranked = sorted((t for t in range(len(losses)) if losses[t] > 0), key=lambda t: (-losses[t], t))
    return set(ranked[:expand])


def _mean_square(vectors: Array) -> float:
    return float((vectors**2).sum(-1).mean())


def _log_sum_exp(logits: Array) -> float:
    largest = float(logits.max())
    return largest + math.log(float(np.exp(logits - largest).sum()))
