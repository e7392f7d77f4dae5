"""Screened attention in torch operations: any device, gradients by autograd.

q is (G, Q, d); k and v are (G, prefix + N, *), the spatial tokens in raster order; trees are a flat
batch of G Q, heads first.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from bmfa.attention.tiling import unflatten
from bmfa.trees.keys import query_chunks
from bmfa.trees.pyramid import Counts, pool
from bmfa.trees.tree import Tree

# Logits held at once.
CHUNK_ELEMENTS = 1 << 22


def representative_attention(
    q: Tensor, k: Tensor, v: Tensor, tree: Tree, *, prefix: int, scale: float
) -> Tensor:
    """(G, Q, *) softmax over prefix tokens and leaves: logit M + tau log n, mean value.

    M comes from mean keys. The logits of all nodes are computed and those that are no leaves
    dropped: this is the plain form that the faster kernels are judged by, not a sparse one.
    """
    if len(q) == 0:
        return _joined([], q, v)
    valid = tree.mask_of_heads(len(q))
    keys, counts = _with_blocks(k, tree, prefix, valid)
    values, _ = _with_blocks(v, tree, prefix, valid)
    multiplicity = counts.log()  # (1 or G, nodes)

    def attend(heads: slice, queries: slice, part: Tree) -> Tensor:
        logits = q[heads, queries] @ keys[heads].transpose(1, 2) * (scale / tree.tau)
        logits = logits + (multiplicity if len(multiplicity) == 1 else multiplicity[heads])[:, None]
        leaves = unflatten(part.leaf_nodes().T, 0, logits.shape[:2])
        spatial = logits[..., prefix:].masked_fill(~leaves, -torch.inf)
        weights = torch.cat((logits[..., :prefix], spatial), -1).softmax(-1)
        return weights @ values[heads]

    return _chunked(q, v, tree, keys.shape[1], attend)


def repeated_attention(
    q: Tensor, k: Tensor, v: Tensor, tree: Tree, *, prefix: int, scale: float
) -> Tensor:
    """(G, Q, *) softmax over all tokens, the scores of a leaf replaced by their mean."""
    if len(q) == 0:
        return _joined([], q, v)
    valid = tree.mask_of_heads(len(q))
    if valid is not None:
        v = torch.cat((v[:, :prefix], v[:, prefix:].where(valid.T.unsqueeze(-1), 0.0)), 1)

    def attend(heads: slice, queries: slice, part: Tree) -> Tensor:
        scores = q[heads, queries] @ k[heads].transpose(1, 2) * scale
        spatial = part.reconstruct(scores[..., prefix:].flatten(0, 1)).view_as(scores[..., prefix:])
        if valid is not None:
            mask = valid.T if valid.shape[1] == 1 else valid.T[heads]
            spatial = spatial.masked_fill(~mask.unsqueeze(1), -torch.inf)
        logits = torch.cat((scores[..., :prefix], spatial), -1) / tree.tau
        return logits.softmax(-1) @ v[heads]

    return _chunked(q, v, tree, k.shape[1], attend)


def dense_attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, tau: float, valid: Tensor | None
) -> Tensor:
    """(G, Q, *) exact attention; `valid` is (1 or G, prefix + N)."""
    if valid is not None:
        v = v.where(valid.unsqueeze(-1), 0.0)
    outputs = []
    for heads, queries in query_chunks(len(q), q.shape[1], k.shape[1], CHUNK_ELEMENTS):
        logits = q[heads, queries] @ k[heads].transpose(1, 2) * (scale / tau)
        if valid is not None:
            mask = valid if len(valid) == 1 else valid[heads]
            logits = logits.masked_fill(~mask.unsqueeze(1), -torch.inf)
        outputs.append((logits.softmax(-1) @ v[heads]).flatten(0, 1))
    return _joined(outputs, q, v)


def _chunked(
    q: Tensor, v: Tensor, tree: Tree, rows: int, attend: Callable[[slice, slice, Tree], Tensor]
) -> Tensor:
    """Attend with so many queries at once that their logits stay small."""
    outputs = []
    for heads, queries in query_chunks(len(q), q.shape[1], rows, CHUNK_ELEMENTS):
        start = heads.start * q.shape[1] + queries.start
        count = (heads.stop - heads.start) * (queries.stop - queries.start)
        outputs.append(attend(heads, queries, tree[start : start + count]).flatten(0, 1))
    return _joined(outputs, q, v)


def _joined(outputs: list[Tensor], q: Tensor, v: Tensor) -> Tensor:
    """(G, Q, *) from the outputs of chunks."""
    if not outputs:  # an empty batch, which still has gradients
        return q[..., :1] * v[:, :1]
    return torch.cat(outputs).view(*q.shape[:2], v.shape[-1])


def _with_blocks(
    tokens: Tensor, tree: Tree, prefix: int, valid: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(G, prefix + blocks + N, *) rows of all nodes, and (1 or G, rows) tokens each stands for."""
    heads, _, width = tokens.shape
    spatial = tokens[:, prefix:].transpose(0, 1)  # (N, G, *)
    wide = valid
    if valid is not None:
        spatial = spatial.where(valid.unsqueeze(-1), 0.0)
        wide = valid if valid.shape[1] == 1 else valid.repeat_interleave(width, 1)
    counts = Counts.of(tree.layout, tokens.dtype, wide)
    means = pool(tree.layout, counts, spatial.flatten(1))
    blocks = [unflatten(level, 1, (heads, width)).transpose(0, 1) for level in means]
    rows = torch.cat((tokens[:, :prefix], *blocks, spatial.transpose(0, 1)), 1)
    per_head = Counts.of(tree.layout, tokens.dtype, valid).blocks
    sizes = torch.cat(per_head).T if per_head else tokens.new_ones(1, 0)  # (1 or G, blocks)
    ones = tokens.new_ones(len(sizes), prefix + len(spatial))
    return rows, torch.cat((ones[:, :prefix], sizes, ones[:, prefix:]), 1)
