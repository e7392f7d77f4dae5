"""One tree for many query-head pairs: which pairs share, and how their node scores become one."""

import warnings
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from bmfa.checks import check_number
from bmfa.quantiles import quantile

ShareBy = str | float  # "max", "mean" or a quantile


def check_share_by(share_by: ShareBy) -> ShareBy:
    """How node scores are aggregated, if it is a way there is."""
    if share_by in ("max", "mean"):
        return share_by
    if isinstance(share_by, str):
        raise ValueError(f"share_by is {share_by!r}; pass 'max', 'mean' or a quantile in [0, 1]")
    return check_number("share_by", share_by, low=0.0, high=1.0)


def groups_of(
    lead: tuple[int, ...],
    dimensions: int,
    share: int | Sequence[int] | None,
    device: torch.device,
) -> tuple[tuple[int, ...], Tensor | None]:
    """The shape of the trees, and the tree of every member of the flat batch."""
    if share is None:
        return lead, None
    shared = set()
    for dimension in _dimensions(share):
        place = dimension + dimensions if dimension < 0 else dimension
        if not 0 <= place < len(lead):
            raise ValueError(
                f"share names dimension {dimension} of scores with leading dimensions {lead}; "
                f"pass dimensions from 0 to {len(lead) - 1}"
            )
        shared.add(place)
        if lead[place] == 0:
            raise ValueError(f"share names dimension {dimension} of size 0: nobody shares a tree")
    shape = tuple(1 if place in shared else size for place, size in enumerate(lead))
    trees = torch.arange(int(torch.Size(shape).numel()), device=device).view(shape)
    return shape, trees.expand(lead).flatten()


def _dimensions(share: int | Sequence[int]) -> list[int]:
    given = share.tolist() if isinstance(share, (np.ndarray, np.integer)) else share
    dimensions = [given] if isinstance(given, int) else given
    integers = isinstance(dimensions, Sequence) and not isinstance(dimensions, str)
    if not integers or any(isinstance(d, bool) or not isinstance(d, int) for d in dimensions):
        raise TypeError(f"share is {share!r}; pass a dimension or several, as integers")
    return list(dimensions)


class Reducer:
    """Node scores of many members to those of the trees they share."""

    def __init__(self, groups: Tensor | None, trees: int, by: ShareBy) -> None:
        self.groups = groups
        self.trees = trees
        self.by = "collect" if groups is None or isinstance(by, float) else by
        self.quantile = by
        self.total: Tensor | None = None
        self.parts: list[Tensor] = []

    def add(self, part: slice, scores: Tensor) -> None:
        """Take in the (rows, b) scores of a part of the flat batch."""
        if self.by == "collect" or self.groups is None:
            self.parts.append(scores)
            return
        if self.total is None:
            start = -torch.inf if self.by == "max" else 0.0
            self.total = scores.new_full((scores.shape[0], self.trees), start)
        groups = self.groups[part]
        if self.by == "max":
            with warnings.catch_warnings():  # some versions of torch call it beta, each time
                warnings.simplefilter("ignore", UserWarning)
                self.total.index_reduce_(1, groups, scores, "amax")
        else:
            self.total.index_add_(1, groups, scores)

    def result(self) -> Tensor:
        """(rows, trees) what the members of each tree come to."""
        if self.total is not None and self.groups is not None:
            members = len(self.groups) // self.trees
            return self.total if self.by == "max" else self.total / members
        scores = torch.cat(self.parts, dim=1)
        if self.groups is None:
            return scores
        grouped = scores[:, self.groups.argsort(stable=True)].view(len(scores), self.trees, -1)
        return quantile(grouped, float(self.quantile))
