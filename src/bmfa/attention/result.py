"""The result of `screened_attention`: the output, and statistics and trees on demand."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor

from bmfa.attention.tiling import TiledAttention
from bmfa.trees.tree import Tree


@dataclass(frozen=True)
class Audit:
    """Relative L2 error of the output at a random sample of the queries.

    Attributes:
        queries: Number of (picture, head, query) triples that were recomputed exactly.
        mean: Mean of |output - exact| / |exact|.
        p95: 95th percentile.
        maximum: Largest value.
    """

    queries: int
    mean: float
    p95: float
    maximum: float


@dataclass(frozen=True)
class Stats:
    """What ran, why, and what is known of its error.

    Attributes:
        backend: `"eager"`, `"triton"`, `"reference"` or `"dense"`.
        form: `"tiled"`, `"representative"`, `"repeated"` or `"dense"`.
        rule: The rule or the budget, as text.
        why: Why this backend ran.
        certificate: (B, H, Q) float64 upper bound on E of every query over all keys, or None. It bounds
            E of the partition; the form "tiled" adds corrections to the output that it does not cover.
        certified_by: `"scores"` (E itself, rounded up) or `"keys"` (a bound from key statistics).
        fallback: Number of queries that were recomputed exactly. A tensor in compiled graphs.
        audit: Measured error at a sample of the queries, or None.
        expanded_count: (B, H, groups) int32 expanded tiles of each group of queries, or None.

    Example:
        >>> import torch, bmfa
        >>> q, k, v = torch.randn(3, 1, 2, 196, 16, generator=torch.Generator().manual_seed(0))
        >>> stats = bmfa.screened_attention(q, k, v, grid=(14, 14)).stats
        >>> stats.backend, stats.why
        ('dense', 'auto: dense attention is as fast below 2048 tokens, and there are 196')
    """

    backend: str
    form: str
    rule: str
    why: str
    certificate: Tensor | None = None
    certified_by: str | None = None
    fallback: int | Tensor = 0
    audit: Audit | None = None
    expanded_count: Tensor | None = field(default=None, repr=False)
    # Computed on demand by `_density` and `_leaf_ratio` of tiles.py and per_query.py.
    measure_density: Callable[[], float] | None = field(default=None, repr=False)
    measure_leaf_ratio: Callable[[], float] | None = field(default=None, repr=False)

    @property
    def density(self) -> float | None:
        """Mean share of the tiles that a group of queries expands. Waits for the device.

        The mean is over pictures, heads and groups. Tiles without a valid token and groups without a
        valid query do not count. 1.0 for dense attention, None for a tree for each query.
        """
        if self.form == "dense":
            return 1.0
        return None if self.measure_density is None else self.measure_density()

    @property
    def leaf_ratio(self) -> float:
        """Mean number of leaves as a fraction of the valid tokens. Waits for the device.

        The mean is over pictures, heads and queries; in the form "tiled", invalid queries do not
        count. Prefix tokens are not leaves. 1.0 for dense attention.
        """
        return 1.0 if self.measure_leaf_ratio is None else self.measure_leaf_ratio()


class Screened:
    """The result of `screened_attention`. It unpacks as `output, stats`.

    Attributes:
        output: (B, H, Q, e) output in the dtype of q.
        stats: What ran, why, and what is known of its error.

    Example:
        >>> import torch, bmfa
        >>> q, k, v = torch.randn(3, 1, 2, 64, 16, generator=torch.Generator().manual_seed(0))
        >>> output, stats = bmfa.screened_attention(q, k, v, grid=(8, 8), rule="gamma:0.1")
        >>> output.shape, stats.form
        (torch.Size([1, 2, 64, 16]), 'representative')
    """

    def __init__(self, output: Tensor, stats: Stats, make_tree: Callable[[], Tree]) -> None:
        self.output = output
        self.stats = stats
        self._make_tree = make_tree

    @cached_property
    def tree(self) -> Tree:
        """The partition of the spatial keys of every picture, head and query, (B, H, Q).

        Trees are built when this property is first read, and take much more memory than the output:
        a boolean for every query and block. In the form "tiled" a leaf is a token of an expanded tile
        or an unexpanded tile. The form corrects unexpanded tiles, so `tree.error` and
        `tree.reconstruct` describe the partition without the corrections, not the output.

        Returns:
            A `Tree` of shape (B, H, Q).

        Example:
            >>> import torch, bmfa
            >>> q, k, v = torch.randn(3, 1, 2, 64, 16, generator=torch.Generator().manual_seed(0))
            >>> bmfa.screened_attention(q, k, v, grid=(8, 8), rule="fixed-depth:1").tree
            Tree(128 trees (1, 2, 64) on 8x8, fixed-depth:1: 4 leaves, 6.25 % of tokens)
        """
        return self._make_tree()

    def __iter__(self) -> Iterator[Any]:
        return iter((self.output, self.stats))

    def __repr__(self) -> str:
        return f"Screened(output={tuple(self.output.shape)}, stats={self.stats!r})"


@dataclass(eq=False)
class Computed:
    """What a form returns before it becomes a `Screened`."""

    output: Tensor  # (B, H, Q, e)
    make_tree: Callable[[], Tree]
    certificate: Tensor | None = None  # (B, H, Q) float64
    fallback: int | Tensor = 0
    tiled: TiledAttention | None = None  # result of the kernel of the form "tiled"
    measure_density: Callable[[], float] | None = None
    measure_leaf_ratio: Callable[[], float] | None = None
