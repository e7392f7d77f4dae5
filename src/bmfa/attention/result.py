"""What screened attention returns: the output, the trees, and what is known of them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor
from torch.nn.functional import pad

from bmfa.attention.tiling import ValidTiles
from bmfa.trees.tree import Tree


@dataclass(frozen=True)
class Audit:
    """Relative L2 error of the output over a random fraction of the queries, recomputed exactly."""

    queries: int
    mean: float
    p95: float
    maximum: float


class Trees:
    """The trees of a call, at hand, or made when first asked for: a kernel marks splits in bits."""

    def __init__(self, make: Callable[[], Tree]) -> None:
        self._make = make

    @cached_property
    def tree(self) -> Tree:
        """The trees."""
        return self._make()


@dataclass(frozen=True)
class Stats:
    """What ran, and what is known of its error."""

    backend: str
    form: str
    rule: str
    why: str
    trees: Trees = field(repr=False)
    certificate: Tensor | None = None  # (B, heads, Q) bound on E over all keys
    certified_by: str | None = None  # "scores" or "keys"
    fallback: int | Tensor = 0  # queries recomputed exactly; a tensor in compiled graphs
    audit: Audit | None = None
    counts: Tensor | None = field(default=None, repr=False)  # (B, heads, groups) tiles expanded
    tiles: int = 0  # of the grid, where there are any
    existing: Callable[[], ValidTiles] | None = field(
        default=None, repr=False
    )  # of a masked tiled call

    @property
    def density(self) -> float | None:
        """Mean share of the tiles that a group of queries expands; waits for the device.

        The mean is over pictures, heads and groups. Under a mask, a tile without a valid token and a
        group without a valid query count nowhere. 1.0 for dense attention, None for trees.
        """
        if self.form == "dense":
            return 1.0
        if self.counts is None:
            return None
        if self.existing is None:
            return float(self.counts.double().mean()) / self.tiles
        existing = self.existing()
        shares = self.counts.double() / (existing.sizes > 0).sum(-1).view(-1, 1, 1)
        return float(shares[existing.groups.unsqueeze(1).expand_as(shares)].mean())

    @property
    def leaf_ratio(self) -> float:
        """Mean number of leaves as a fraction of the valid tokens; waits for the device.

        Prefix tokens are no leaves. The mean is over pictures, heads and queries; in the form "tiled",
        queries that do not exist are left out.
        """
        ratios = self.trees.tree.leaf_ratio  # (B, heads, Q)
        if self.existing is not None:
            exists = self.existing().queries
            exists = pad(exists, (ratios.shape[-1] - exists.shape[-1], 0), value=True)
            ratios = ratios[exists.unsqueeze(1).expand_as(ratios)]
        return float(ratios.mean())


class Screened:
    """What `screened_attention` returns; unpacks into output, tree and stats."""

    def __init__(self, output: Tensor, trees: Trees, stats: Stats) -> None:
        self.output = output
        self.stats = stats
        self._trees = trees

    @property
    def tree(self) -> Tree:
        """The trees of every picture, head and query, (B, heads, Q).

        Those of the form "tiled" are the partition of the keys into tokens of expanded tiles and means
        of the others. The form corrects these means, so that `tree.error` and `tree.reconstruct` speak
        of the partition without the corrections, not of the output.
        """
        return self._trees.tree

    def __iter__(self) -> Iterator[Any]:
        return iter((self.output, self.tree, self.stats))

    def __repr__(self) -> str:
        return f"Screened(output={tuple(self.output.shape)}, stats={self.stats!r})"
