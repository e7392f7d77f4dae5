"""Screened attention, query by query."""

import math

import numpy as np
import numpy.typing as npt

from bmfa.attention.kernels.reference.energy import Array
from bmfa.attention.kernels.reference.trees import Mask, ReferenceTree, build_tree
from bmfa.trees import rules

Trees = list[list[list[ReferenceTree]]]  # [batch][head][query]


def _attention_scores(q: npt.ArrayLike, k: npt.ArrayLike, scale: float | None) -> Array:
    """s = scale q k^T, (B, heads, queries, keys); the scale is 1/sqrt(d) unless given."""
    queries, keys = np.asarray(q, np.float64), np.asarray(k, np.float64)
    factor = 1 / math.sqrt(queries.shape[-1]) if scale is None else scale
    return np.asarray(factor * (queries @ keys.swapaxes(-1, -2)))


def _softmax_mean(logits: Array, values: Array) -> Array:
    """sum_i p_i v_i with p = softmax(logits), over the second last axis of the values."""
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return np.asarray((weights / weights.sum(-1, keepdims=True)) @ values)


def _spatial_mask(valid: npt.ArrayLike | None, batch: int, tokens: int) -> Mask:
    """(B, H*W) from a mask of (H*W,) or (B, H*W)."""
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
    """o = sum_i p_i v_i with p = softmax(s / tau) over the prefix and the valid spatial keys."""
    scores = _attention_scores(q, k, scale)
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
    keep: npt.ArrayLike | None = None,
    form: str = "repeated",
) -> tuple[Array, Trees]:
    """o~ = sum_i q_i v_i with q = softmax(s~ / tau), and the trees as [batch][head][query].

    q, k, v are (B, heads, prefix + H*W, d). Every query, those of the prefix included, has its own
    tree on the spatial keys; prefix keys are exact. "repeated" puts M(L) at every token of L;
    "representative" uses one token a leaf, of logit M(L) + tau log n_L and mean value. `keep`
    broadcasts to (B, heads, queries, quadrants).
    """
    if form not in ("repeated", "representative"):
        raise ValueError(f"form is {form!r}; pass 'repeated' or 'representative'")
    scores, values = _attention_scores(q, k, scale), np.asarray(v, np.float64)
    leading = scores.shape[:3]  # (B, heads, queries)
    masks = _spatial_mask(valid, leading[0], height * width).reshape(-1, height, width)
    coins = None if keep is None else np.broadcast_to(keep, (*leading, np.shape(keep)[-1]))
    output = np.empty((*leading, values.shape[-1]))
    trees: Trees = [[[] for _ in range(leading[1])] for _ in range(leading[0])]
    for b, h, i in np.ndindex(leading):
        exact, grid = scores[b, h, i, :prefix], scores[b, h, i, prefix:].reshape(height, width)
        tree = build_tree(
            grid,
            rule,
            tau=tau,
            max_depth=max_depth,
            valid=masks[b],
            keep=None if coins is None else coins[b, h, i].tolist(),
        )
        spatial = values[b, h, prefix:].reshape(height, width, -1)
        if form == "repeated":
            logits, tokens = tree.reconstruct(grid)[masks[b]] / tau, spatial[masks[b]]
        else:
            logits = np.array([x.mean() / tau + math.log(x.size) for x in tree.leaf_values(grid)])
            tokens = np.array([leaf.mean(0) for leaf in tree.leaf_values(spatial)])
        output[b, h, i] = _softmax_mean(
            np.concatenate([exact / tau, logits]), np.concatenate([values[b, h, :prefix], tokens])
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
    """E of every query over all keys, (B, heads, queries): prefix keys are exact leaves."""
    scores = _attention_scores(q, k, scale)
    errors = np.empty(scores.shape[:3])
    for b, h, i in np.ndindex(errors.shape):
        tree, row = trees[b][h][i], scores[b, h, i]
        grid = row[prefix:].reshape(tree.valid.shape)
        errors[b, h, i] = tree.error(grid, tau, prefix=row[:prefix])
    return errors
