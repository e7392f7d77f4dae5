"""Attention with a tree for each query, one query at a time."""

import math

import numpy as np
import numpy.typing as npt

from bmfa.attention.kernels.reference.energy import Array
from bmfa.attention.kernels.reference.trees import Mask, ReferenceTree, build_tree
from bmfa.trees import rules

Trees = list[list[list[ReferenceTree]]]  # [batch][head][query]


def _scores(q: npt.ArrayLike, k: npt.ArrayLike, scale: float | None) -> Array:
    """Return s = scale q k^T, (B, H, Q, keys), with scale 1 / sqrt(d) by default."""
    queries, keys = np.asarray(q, np.float64), np.asarray(k, np.float64)
    factor = 1 / math.sqrt(queries.shape[-1]) if scale is None else scale
    return np.asarray(factor * (queries @ keys.swapaxes(-1, -2)))


def _softmax_mean(logits: Array, values: Array) -> Array:
    """Return sum_i p_i v_i with p = softmax(logits), over the second to last axis of the values."""
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return np.asarray((weights / weights.sum(-1, keepdims=True)) @ values)


def _spatial_mask(valid: npt.ArrayLike | None, batch: int, tokens: int) -> Mask:
    """Return a mask (B, N) from None, (N,) or (B, N)."""
    return np.broadcast_to(True if valid is None else np.asarray(valid, bool), (batch, tokens))


def dense_attention(
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    v: npt.ArrayLike,
    *,
    prefix: int = 0,
    tau: float = 1.0,
    scale: float | None = None,
    valid: npt.ArrayLike | None = None,
) -> Array:
    """Compute o = sum_i p_i v_i with p = softmax(s / tau) over the prefix and the valid spatial keys.

    Args:
        q: (B, H, Q, d).
        k: (B, H, prefix + N, d).
        v: (B, H, prefix + N, e).
        prefix: Number of tokens before the grid.
        tau: Temperature.
        scale: Factor of q . k, 1 / sqrt(d) by default.
        valid: bool (N,) or (B, N), the spatial tokens that exist.

    Returns:
        (B, H, Q, e).
    """
    scores = _scores(q, k, scale)
    batch, *_, keys = scores.shape
    mask = np.ones((batch, 1, 1, keys), bool)
    mask[..., prefix:] = _spatial_mask(valid, batch, keys - prefix)[:, None, None]
    values = np.where(mask.swapaxes(-1, -2), np.asarray(v, np.float64), 0.0)
    return _softmax_mean(np.where(mask, scores / tau, -np.inf), values)


def per_query_attention(
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    v: npt.ArrayLike,
    height: int,
    width: int,
    rule: rules.Rule | str,
    *,
    prefix: int = 0,
    tau: float = 1.0,
    scale: float | None = None,
    max_depth: int | None = None,
    valid: npt.ArrayLike | None = None,
    coins: npt.ArrayLike | None = None,
) -> tuple[Array, Trees]:
    """Compute o~ = sum_i p~_i v_i with p~ = softmax(s~ / tau).

    Every query, those of the prefix included, has its own tree over the spatial keys. Prefix keys are
    exact, and s~_i = M(L) for every token i of a leaf L. A leaf as one token with the logit
    M(L) / tau + log n_L and the mean value has the same output.

    Args:
        q: (B, H, Q, d).
        k: (B, H, prefix + N, d) with N = height * width in raster order.
        v: (B, H, prefix + N, e).
        height: Rows of the grid.
        width: Columns of the grid.
        rule: Rule of the trees, or its name.
        prefix: Number of tokens before the grid.
        tau: Temperature.
        scale: Factor of q . k, 1 / sqrt(d) by default.
        max_depth: Depth at which no block is split, or None.
        valid: bool (N,) or (B, N), the spatial tokens that exist.
        coins: bool, broadcast to (B, H, Q, quadrants), for RandomQuadrants.

    Returns:
        Outputs (B, H, Q, e), and the trees as [batch][head][query].
    """
    scores, values = _scores(q, k, scale), np.asarray(v, np.float64)
    leading = scores.shape[:3]  # (B, H, Q)
    masks = _spatial_mask(valid, leading[0], height * width).reshape(-1, height, width)
    if coins is not None:
        coins = np.broadcast_to(coins, (*leading, np.shape(coins)[-1]))
    output = np.empty((*leading, values.shape[-1]))
    trees: Trees = [[[] for _ in range(leading[1])] for _ in range(leading[0])]
    for b, h, i in np.ndindex(leading):
        prefix_scores = scores[b, h, i, :prefix]
        grid = scores[b, h, i, prefix:].reshape(height, width)
        tree = build_tree(
            grid,
            rule,
            tau=tau,
            max_depth=max_depth,
            valid=masks[b],
            coins=None if coins is None else np.asarray(coins)[b, h, i].tolist(),
        )
        spatial = values[b, h, prefix:].reshape(height, width, -1)
        logits, tokens = tree.reconstruct(grid)[masks[b]] / tau, spatial[masks[b]]
        output[b, h, i] = _softmax_mean(
            np.concatenate([prefix_scores / tau, logits]),
            np.concatenate([values[b, h, :prefix], tokens]),
        )
        trees[b][h].append(tree)
    return output, trees


def attention_error(
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    trees: Trees,
    *,
    prefix: int = 0,
    tau: float = 1.0,
    scale: float | None = None,
) -> Array:
    """Compute E of every query over all keys, where prefix keys are exact leaves.

    Args:
        q: (B, H, Q, d).
        k: (B, H, prefix + N, d).
        trees: The trees of `per_query_attention`.
        prefix: Number of tokens before the grid.
        tau: Temperature.
        scale: Factor of q . k, 1 / sqrt(d) by default.

    Returns:
        (B, H, Q).
    """
    scores = _scores(q, k, scale)
    errors = np.empty(scores.shape[:3])
    for b, h, i in np.ndindex(errors.shape):
        tree, row = trees[b][h][i], scores[b, h, i]
        grid = row[prefix:].reshape(tree.valid.shape)
        errors[b, h, i] = tree.error(grid, tau, prefix=row[:prefix])
    return errors
