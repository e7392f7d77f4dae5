"""What screened attention returns: the output, the trees, and what is known of them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor

from bmfa.tree import Tree


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

    @property
    def density(self) -> float | None:
        """Mean fraction of the tiles that are expanded; waits for the device, None without tiles."""
        if self.form == "dense":
            return 1.0
        if self.counts is None:
            return None
        return float(self.counts.double().mean()) / self.tiles

    @property
    def leaf_ratio(self) -> float:
        """The mean fraction of the valid tokens, prefix tokens not counted; waits for the device."""
        return float(self.trees.tree.leaf_ratio.mean())


class Screened:
    """What `screened_attention` returns; unpacks into output, tree and stats."""

    def __init__(self, output: Tensor, trees: Trees, stats: Stats) -> None:
        self.output = output
        self.stats = stats
        self._trees = trees

    @property
    def tree(self) -> Tree:
        """The trees of every picture, head and query."""
        return self._trees.tree

    def __iter__(self) -> Iterator[Any]:
        return iter((self.output, self.tree, self.stats))

    def __repr__(self) -> str:
        return f"Screened(output={tuple(self.output.shape)}, stats={self.stats!r})"
