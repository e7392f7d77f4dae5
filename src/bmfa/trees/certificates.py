"""The error E of trees on queries and keys: exact from the scores, bounded from key metadata.

Shapes as in kernels.eager: q (G, Q, d) already scaled, keys (G, N, d), trees a flat batch of G Q.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from bmfa import bounds
from bmfa.trees.keys import KeyLevels, KeyPyramid, key_scores, query_chunks
from bmfa.trees.pyramid import Counts, ScorePyramid, machine_epsilon
from bmfa.trees.tree import Tree

CHUNK_ELEMENTS = 1 << 20


def exact_error(q: Tensor, keys: Tensor, tree: Tree, prefix_keys: Tensor) -> Tensor:
    """(G, Q) E over all keys, the prefix tokens being exact leaves; rounded up.

    With the spatial error E_s and the share r of the spatial keys in the whole mass,
    E = -tau log(1 - r (1 - exp(-E_s / tau))); where that loses more than half of the mass, the
    logarithms of the two partition functions are compared instead.
    """
    errors = []
    for heads, queries, part in _parts(q, tree):
        scores = key_scores(keys[heads].transpose(0, 1), q[heads, queries])  # (N, B)
        spatial = part.error(scores.T) / tree.tau
        masked = scores if part.valid is None else scores.masked_fill(~part.valid, -torch.inf)
        within = (masked / tree.tau).logsumexp(0)
        before = key_scores(prefix_keys[heads].transpose(0, 1), q[heads, queries]) / tree.tau
        before = before.logsumexp(0)  # -inf without a prefix
        whole = torch.logaddexp(before, within)
        lost = (within - whole).exp() * -torch.expm1(-spatial)
        compared = whole - torch.logaddexp(before, within - spatial)
        error = torch.where(lost < 0.5, -torch.log1p(-lost.clamp(max=0.5)), compared) * tree.tau
        # Scores are rounded; F and F~ move by no more than they do.
        rounding = 4 * q.shape[-1] * machine_epsilon(q) * _largest(keys[heads], q[heads, queries])
        errors.append(error * (1 + 64 * machine_epsilon(q)) + rounding)
    return torch.cat(errors).view(q.shape[:2])


def key_certificate(q: Tensor, keys: Tensor, tree: Tree, prefix_keys: Tensor) -> Tensor:
    """(G, Q) a bound on E over all keys that visits no token of an unexpanded leaf.

    A leaf's scores lie above their mean by at most relu(q) . high - relu(-q) . low, `high` and `low`
    the extremes of its keys less their mean, dimension by dimension, and below it likewise; the
    two-point bound turns that range into a bound on the leaf's gap. Proven, and loose at large d.
    """
    layout, valid = tree.layout, tree.mask_of_heads(len(q))
    levels = KeyLevels.of(layout, keys, valid)
    boxes = _key_boxes(levels, keys.dtype, valid)
    certificates = []
    for heads, queries, part in _parts(q, tree):
        some = q[heads, queries]
        counts = Counts.of(layout, q.dtype, part.valid)
        pyramid = KeyPyramid(levels, heads, some, counts, tree.tau)
        before = key_scores(prefix_keys[heads].transpose(0, 1), some)
        logits, upper = [before / tree.tau], [torch.zeros_like(before)]
        for depth, (low, high) in enumerate(boxes):
            logits.append(pyramid.mean(depth) / tree.tau + counts.blocks[depth].log())
            upper.append(_leaf_bound(some, low[:, heads], high[:, heads], tree.tau))
        tokens = key_scores(levels.tokens[:, heads], some)
        logits.append(tokens / tree.tau)
        upper.append(torch.zeros_like(tokens))
        leaves = torch.cat((part.split.new_ones(before.shape), part.leaf_nodes()))
        mass = torch.cat(logits).masked_fill(~leaves, -torch.inf).softmax(0)
        bound = torch.cat(upper).where(leaves, 0.0)
        certificates.append(bounds.certificate(mass.T, bound.T, tau=tree.tau))
    return torch.cat(certificates).view(q.shape[:2])


def _parts(q: Tensor, tree: Tree) -> Iterator[tuple[slice, slice, Tree]]:
    """Chunks of heads and queries with their trees."""
    for heads, queries in query_chunks(len(q), q.shape[1], tree.grid.size, CHUNK_ELEMENTS):
        start = heads.start * q.shape[1] + queries.start
        count = (heads.stop - heads.start) * (queries.stop - queries.start)
        yield heads, queries, tree[start : start + count]


def _key_boxes(
    levels: KeyLevels, dtype: torch.dtype, valid: Tensor | None
) -> list[tuple[Tensor, Tensor]]:
    """For each depth, (n, G, d) lowest and highest difference of a block's keys from their mean."""
    size, heads, width = levels.tokens.shape
    wide = valid
    if valid is not None and valid.shape[1] > 1:
        wide = valid.repeat_interleave(width, 1)
    counts = Counts.of(levels.layout, dtype, wide)
    flat = levels.tokens.reshape(size, heads * width)
    pyramid = ScorePyramid(levels.layout, counts, 1.0, flat, wide)
    pairs = zip(pyramid.minima(), pyramid.maxima(), strict=True)
    return [
        tuple((edge - pyramid.mean(depth)).view(-1, heads, width) for edge in pair)  # type: ignore[misc]
        for depth, pair in enumerate(pairs)
    ]


def _leaf_bound(q: Tensor, low: Tensor, high: Tensor, tau: float) -> Tensor:
    """(n, B) the two-point bound over the range that (n, g, d) key boxes allow."""
    up, down = q.clamp(min=0), q.clamp(max=0)
    above = key_scores(high, up) + key_scores(low, down)
    below = key_scores(low, up) + key_scores(high, down)
    return bounds.two_point(
        below.clamp(max=0), above.clamp(min=0), torch.zeros_like(above), tau=tau
    )


def _largest(keys: Tensor, q: Tensor) -> Tensor:
    """(B,) |q| max |k|: no score is larger."""
    longest = torch.linalg.vector_norm(keys, dim=-1).amax(-1, keepdim=True)
    bound: Tensor = torch.linalg.vector_norm(q, dim=-1) * longest
    return bound.flatten()
