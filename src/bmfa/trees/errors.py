"""The error of trees on the scores of a pyramid, and the scores they reconstruct."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bmfa.trees.pyramid import ScorePyramid

if TYPE_CHECKING:
    from bmfa.trees.tree import Tree

# Share of Z below which a sum of shares has lost digits to underflow, well above the smallest normal
# float32 (1e-38); logarithms of masses are added instead.
LEAST_SHARE = 1e-30


def tree_error(tree: "Tree", pyramid: ScorePyramid) -> Tensor:
    """(B,) E of a flat batch of trees on the scores of a pyramid.

    E = -tau log(1 - lost), where `lost` is the share of Z that further splits would recover. If more
    than half is lost, 1 - lost has few digits, and the mass that the leaves hold is summed instead.
    """
    lost = torch.zeros_like(pyramid.log_partition())
    for depth, split in enumerate(tree.level_splits()):
        lost += (pyramid.gain(depth) * ~split).sum(0)
    error = lost.clamp(max=0.5).neg_().log1p_().neg_()
    if bool((lost > 0.5).any()):
        error = torch.where(lost > 0.5, -_log_held_share(tree, pyramid), error)
    return error * tree.tau


def _log_held_share(tree: "Tree", pyramid: ScorePyramid) -> Tensor:
    """(B,) log of the share of Z that the leaves hold: that of the roots, plus that of the splits."""
    first, log_partition = tree.layout.levels[0], pyramid.log_partition()
    held = pyramid.root_share()
    if len(first.tokens):
        singles = (pyramid.tokens[first.tokens] / tree.tau - log_partition).exp_()
        held += (singles if tree.valid is None else singles * tree.valid[first.tokens]).sum(0)
    for depth, split in enumerate(tree.level_splits()):
        held += (pyramid.gain(depth) * split).sum(0)
    if bool((held < LEAST_SHARE).any()):
        return _log_leaf_mass(tree, pyramid) - log_partition
    return held.log_()


def _log_leaf_mass(tree: "Tree", pyramid: ScorePyramid) -> Tensor:
    """(B,) log of the sum over the leaves of n exp(M / tau)."""
    rows = []
    for depth, leaves in enumerate(tree.level_leaves()):
        level = tree.layout.levels[depth]
        logits = pyramid.tokens[level.tokens] / tree.tau
        if level.size:
            mean, counts = pyramid.mean(depth), pyramid.counts.blocks[depth]
            logits = torch.cat((mean / tree.tau + counts.log(), logits))
        rows.append(logits.masked_fill(~leaves, -torch.inf))
    return torch.cat(rows).logsumexp(0)


def leaf_means(tree: "Tree", pyramid: ScorePyramid) -> Tensor:
    """(B, N) mean score of the leaf of every token."""
    tokens = pyramid.tokens.clone()
    held = pyramid.mean(0) if pyramid.depth else tokens[:0]  # mean of the leaf above
    for depth, split in enumerate(tree.level_splits()):
        below = tree.layout.levels[depth + 1]
        tokens[below.tokens] = torch.where(
            split[below.token_parents], pyramid.tokens[below.tokens], held[below.token_parents]
        )
        if below.size:
            held = torch.where(split[below.parents], pyramid.mean(depth + 1), held[below.parents])
    return tokens.T.contiguous()
