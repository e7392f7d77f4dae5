"""Attention with a tree for each query in torch operations: any device, autograd.

Shapes: G = B * H heads, Q queries, N spatial tokens in raster order after the prefix, d and e channels
of keys and values. Trees are a flat batch of G * Q, heads first.
"""

import torch
from torch import Tensor

from bmfa.attention.tiling import unflatten
from bmfa.trees.keys import KeyLevels, query_chunks
from bmfa.trees.pyramid import Counts
from bmfa.trees.tree import Tree

# Logits in memory at once, 16 MB in float32.
CHUNK_ELEMENTS = 1 << 22


def tree_attention(
    q: Tensor, k: Tensor, v: Tensor, tree: Tree, *, prefix: int, scale: float
) -> Tensor:
    """Compute softmax over the prefix and one token a leaf, with logit M + tau log n and mean value.

    M is the score of the mean key. The logits of all nodes are computed and those of nodes that are not
    leaves are masked: this is simple and differentiable, not sparse.

    Args:
        q: (G, Q, d).
        k: (G, prefix + N, d).
        v: (G, prefix + N, e).
        tree: G * Q trees, which also hold tau and the mask of valid tokens.
        prefix: The number of tokens before the grid.
        scale: The factor of q . k.

    Returns:
        (G, Q, e).
    """
    if len(q) == 0:
        return _join([], q, v)
    valid = tree.mask_of_heads(len(q))
    keys, counts = _with_blocks(k, tree, prefix, valid)
    values, _ = _with_blocks(v, tree, prefix, valid)
    log_counts = counts.log()  # (1 or G, rows)

    outputs = []
    for heads, queries, pairs in query_chunks(len(q), q.shape[1], keys.shape[1], CHUNK_ELEMENTS):
        logits = q[heads, queries] @ keys[heads].transpose(1, 2) * (scale / tree.tau)
        logits = logits + (log_counts if len(log_counts) == 1 else log_counts[heads])[:, None]
        leaves = unflatten(tree[pairs].leaf_nodes().T, 0, logits.shape[:2])
        spatial = logits[..., prefix:].masked_fill(~leaves, -torch.inf)
        weights = torch.cat((logits[..., :prefix], spatial), -1).softmax(-1)
        outputs.append((weights @ values[heads]).flatten(0, 1))
    return _join(outputs, q, v)


def dense_attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, tau: float, valid: Tensor | None
) -> Tensor:
    """Compute exact attention of (G, Q, d) queries; `valid` is bool (1 or G, prefix + N)."""
    if valid is not None:
        v = v.where(valid.unsqueeze(-1), 0.0)
    outputs = []
    for heads, queries, _ in query_chunks(len(q), q.shape[1], k.shape[1], CHUNK_ELEMENTS):
        logits = q[heads, queries] @ k[heads].transpose(1, 2) * (scale / tau)
        if valid is not None:
            mask = valid if len(valid) == 1 else valid[heads]
            logits = logits.masked_fill(~mask.unsqueeze(1), -torch.inf)
        outputs.append((logits.softmax(-1) @ v[heads]).flatten(0, 1))
    return _join(outputs, q, v)


def _join(outputs: list[Tensor], q: Tensor, v: Tensor) -> Tensor:
    if not outputs:  # an empty batch still has gradients
        return q[..., :1] * v[:, :1]
    return torch.cat(outputs).view(*q.shape[:2], v.shape[-1])


def _with_blocks(
    tokens: Tensor, tree: Tree, prefix: int, valid: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return rows (G, prefix + blocks + N, d) of all nodes, and counts (1 or G, rows) of tokens."""
    levels = KeyLevels.from_keys(tree.layout, tokens[:, prefix:], valid)
    blocks = [
        rows[: level.size] for rows, level in zip(levels.rows, tree.layout.levels, strict=True)
    ]
    rows = torch.cat((tokens[:, :prefix].transpose(0, 1), *blocks, levels.tokens)).transpose(0, 1)
    counts = Counts.from_mask(tree.layout, tokens.dtype, valid).blocks
    sizes = torch.cat(counts).T if counts else tokens.new_ones(1, 0)  # (1 or G, blocks)
    ones = tokens.new_ones(len(sizes), tokens.shape[1])
    return rows, torch.cat((ones[:, :prefix], sizes, ones[:, prefix:]), 1)
