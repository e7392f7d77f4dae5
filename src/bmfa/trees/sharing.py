"""One tree for several query-head pairs: which pairs share a tree, and their aggregated scores."""

from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from bmfa.checks import check_number
from bmfa.quantiles import quantile

ShareBy = Literal["max", "mean"] | float


def check_share_by(share_by: object) -> ShareBy:
    """Return "max", "mean" or a quantile in [0, 1]; raise for anything else."""
    if share_by == "max" or share_by == "mean":
        return share_by
    if isinstance(share_by, str):
        raise ValueError(f"share_by is {share_by!r}; pass 'max', 'mean' or a quantile in [0, 1]")
    return check_number("share_by", share_by, low=0.0, high=1.0)


def assign_trees(
    lead: tuple[int, ...], share: int | Sequence[int], device: torch.device
) -> tuple[tuple[int, ...], Tensor]:
    """Assign the members of a batch to trees shared over some dimensions.

    Args:
        lead: Leading dimensions of the scores.
        share: Dimensions of the scores over which one tree serves all; -1 is the last, that of the
            tokens, which cannot be shared.
        device: Device of the result.

    Returns:
        The shape of the trees, and the (members,) tree of every member of the flat batch.

    Raises:
        TypeError: If `share` is neither an integer nor a sequence of integers.
        ValueError: If a dimension does not exist or is empty.
    """
    shared = set()
    for dim in _check_dims(share):
        index = dim + len(lead) + 1 if dim < 0 else dim
        if not 0 <= index < len(lead):
            raise ValueError(
                f"share names dimension {dim} of scores with leading dimensions {lead}; "
                f"pass dimensions from 0 to {len(lead) - 1}"
            )
        shared.add(index)
        if lead[index] == 0:
            raise ValueError(
                f"share names dimension {dim}, which has size 0; pass a dimension that is not empty"
            )
    shape = tuple(1 if index in shared else size for index, size in enumerate(lead))
    trees = torch.arange(int(torch.Size(shape).numel()), device=device).view(shape)
    return shape, trees.expand(lead).flatten()


def _check_dims(share: int | Sequence[int]) -> list[int]:
    value = share.tolist() if isinstance(share, (np.ndarray, np.integer)) else share
    dims = [value] if isinstance(value, int) else value
    is_sequence = isinstance(dims, Sequence) and not isinstance(dims, str)
    if not is_sequence or any(isinstance(d, bool) or not isinstance(d, int) for d in dims):
        raise TypeError(f"share is {share!r}; pass a dimension or several, as integers")
    return list(dims)


def aggregate_scores(
    parts: Iterable[tuple[slice, Tensor]], groups: Tensor | None, trees: int, share_by: ShareBy
) -> Tensor:
    """Aggregate the node scores of the members of each tree.

    Args:
        parts: Slices of the flat batch with their (rows, b) node scores, in order.
        groups: (members,) tree of every member; None for one tree each.
        trees: Number of trees.
        share_by: "max", "mean" or a quantile.

    Returns:
        (rows, trees) node scores.
    """
    if groups is None:
        return torch.cat([scores for _, scores in parts], dim=1)
    if isinstance(share_by, float):
        scores = torch.cat([scores for _, scores in parts], dim=1)
        members = scores[:, groups.argsort(stable=True)].view(len(scores), trees, -1)
        return quantile(members, share_by)
    total = torch.empty(0)
    for part, scores in parts:
        if part.start == 0:
            total = scores.new_full((len(scores), trees), -torch.inf if share_by == "max" else 0.0)
        if share_by == "max":
            total.scatter_reduce_(1, groups[part].expand_as(scores), scores, "amax")
        else:
            total.index_add_(1, groups[part], scores)
    return total if share_by == "max" else total / (len(groups) // trees)
