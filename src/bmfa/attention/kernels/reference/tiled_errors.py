"""The error E of tiled attention, in long double."""

import numpy as np
import numpy.typing as npt

from bmfa.attention.kernels.reference.blocks import Mask
from bmfa.attention.kernels.reference.tiled import tile_members
from bmfa.attention.tiling import Tiling

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
        mass = _log_sum(block)
        gap = _log_sum(block - block.mean(-1, keepdims=True)) - np.log(np.longdouble(len(tokens)))
        gap = np.where(stays[:, tile], np.maximum(gap, 0), 0)
        exact.append(mass)
        coarse.append(mass - gap)
        share = -np.expm1(-gap)
        lost.append(mass + np.log(np.where(share > 0, share, 1)) + np.where(share > 0, 0, -np.inf))
    whole = _log_sum(np.stack(exact, -1))
    total = sum((np.exp(x - whole) for x in lost), np.zeros(len(scores), np.longdouble))
    direct = -np.log1p(-np.minimum(total, 0.5))
    return np.asarray(np.where(total < 0.5, direct, whole - _log_sum(np.stack(coarse, -1))))


def _log_sum(logits: Long) -> Long:
    top = logits.max(-1, keepdims=True)
    return np.asarray(top[..., 0] + np.log(np.exp(logits - top).sum(-1)))
