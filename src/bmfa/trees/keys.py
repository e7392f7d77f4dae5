"""Pyramids of keys: the mean score of a block is the product of the query with its mean key."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from bmfa.trees.layout import Layout
from bmfa.trees.pyramid import (
    ChildOffsets,
    Counts,
    Pyramid,
    ScorePyramid,
    child_offsets,
    computed_once,
    pool,
    weighted_expm1,
    zero_below_rounding,
)

# Share of blocks reached below which gathering their keys is faster than computing the level. The
# break-even is between 1/64 and 1/16 on 32x32 and 64x64 grids at d = 64 (timeit of `screen_keys`
# with this constant at 0 and at 1).
SPARSE_SHARE = 1 / 32


@dataclass(frozen=True, eq=False)
class KeyLevels:
    """Mean keys of all heads by depth: rows [blocks | tokens] of each level, (r, G, d)."""

    layout: Layout
    rows: tuple[Tensor, ...]
    tokens: Tensor  # (N, G, d)
    longest: Tensor  # (G,) largest norm of a key

    @classmethod
    def from_keys(cls, layout: Layout, keys: Tensor, valid: Tensor | None) -> "KeyLevels":
        """Pool (G, N, d) keys; `valid` is (N, G) or (N, 1)."""
        tokens = keys.transpose(0, 1)  # (N, G, d)
        size, heads, dim = tokens.shape
        if valid is not None:
            tokens = tokens.where(valid.unsqueeze(-1), 0.0)
            if valid.shape[1] > 1:
                valid = valid.repeat_interleave(dim, dim=1)  # (N, G d)
        flat = tokens.reshape(size, heads * dim)
        means = pool(layout, Counts.from_mask(layout, keys.dtype, valid), flat)
        rows = []
        for depth, level in enumerate(layout.levels):
            singles = tokens[level.tokens]  # (t, G, d)
            blocks = means[depth].view(level.size, heads, dim) if level.size else singles[:0]
            rows.append(torch.cat((blocks, singles)))
        longest = torch.linalg.vector_norm(tokens, dim=-1).amax(0)
        return cls(layout, tuple(rows), tokens, longest)


class KeyPyramid(Pyramid):
    """Pyramid of the scores of (g, Q, d) scaled queries against the mean keys of g heads.

    A column is a query: B = g Q, heads first.
    """

    def __init__(
        self, keys: KeyLevels, heads: slice, queries: Tensor, counts: Counts, tau: float
    ) -> None:
        super().__init__(keys.layout, counts, tau)
        self.keys = keys
        self.heads = heads
        self.queries = queries

    def score_bound(self) -> Tensor:
        """(B,) |q| max |k|."""
        return score_bounds(self.keys.longest[self.heads], self.queries)

    @computed_once
    def offsets(self, depth: int) -> ChildOffsets:
        """Child means relative to the largest child, from the mean keys of the level below."""
        level = self.layout.levels[depth]
        rows = key_scores(self.keys.rows[depth + 1][:, self.heads], self.queries)  # (r, B)
        if not level.children_contiguous:
            rows = rows.index_select(0, level.children.flatten())
        return self._offsets_from(depth, rows.view(*level.children.shape, rows.shape[1]))

    def gamma_exceeds(self, depth: int, epsilon: float, reached: Tensor) -> Tensor:
        """(n, B) bool: one-step Gamma > epsilon, computed for the reached blocks if they are few."""
        few = bool(reached.sum() < SPARSE_SHARE * reached.numel())
        if not few or self.counts.empty is not None:
            return super().gamma_exceeds(depth, epsilon, reached)
        block, column = reached.nonzero().unbind(-1)  # P pairs
        head, query = column // self.queries.shape[1], column % self.queries.shape[1]
        children = self.layout.levels[depth].children[block]  # (P, k)
        keys = self.keys.rows[depth + 1][:, self.heads][children, head.unsqueeze(1)]  # (P, k, d)
        means = torch.einsum("pkd,pd->pk", keys, self.queries[head, query]).unsqueeze(-1)
        weights = self.counts.weights[depth][block]  # (P, k, 1)
        bound = None if depth + 1 == self.depth else self.score_bound()[column].unsqueeze(-1)
        offsets = child_offsets(means, weights, None, bound)
        log_mass = weighted_expm1(offsets.offset, weights, self.tau).log1p()
        gamma = zero_below_rounding(log_mass * self.tau - offsets.shift, offsets.shift)
        result = torch.zeros_like(reached)
        result[block, column] = gamma.squeeze(-1) > epsilon
        return result

    def exact_scores(self, valid: Tensor | None) -> ScorePyramid:
        """Return the pyramid of the exact scores of the same columns."""
        tokens = key_scores(self.keys.tokens[:, self.heads], self.queries)
        return ScorePyramid(self.layout, self.counts, self.tau, tokens, valid)


def key_scores(keys: Tensor, queries: Tensor) -> Tensor:
    """(r, g Q) products of (r, g, d) keys with the (g, Q, d) queries of the same heads."""
    scores = keys.transpose(0, 1) @ queries.transpose(1, 2)  # (g, r, Q)
    return scores.transpose(0, 1).reshape(len(keys), queries.shape[0] * queries.shape[1])


def score_bounds(longest: Tensor, queries: Tensor) -> Tensor:
    """(g Q,) |q| max |k| of (g, Q, d) queries, from the largest norms (g,) of the keys."""
    bound: Tensor = torch.linalg.vector_norm(queries, dim=-1) * longest.unsqueeze(1)
    return bound.flatten()


def query_chunks(
    heads: int, queries: int, size: int, elements: int
) -> Iterator[tuple[slice, slice, slice]]:
    """Split (heads, queries) pairs into chunks of about `elements` scores.

    Args:
        heads: Number of heads, batch included.
        queries: Number of queries of each head.
        size: Number of keys of each query.
        elements: Largest number of scores of a chunk, unless one query has more keys.

    Yields:
        A slice of heads and a slice of queries, several complete heads or queries of one head, and the
        slice of these pairs among all pairs, heads first.
    """
    step = max(1, elements // size)
    several = max(1, step // max(1, queries))  # heads
    for head in range(0, heads, several):
        last = min(head + several, heads)
        for query in range(0, max(1, queries), step):
            stop = min(query + step, queries)
            pairs = slice(head * queries + query, (last - 1) * queries + stop)
            yield slice(head, last), slice(query, stop), pairs
