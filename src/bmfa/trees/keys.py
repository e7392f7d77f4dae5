"""Pyramids of keys: block means of scores are linear, so mean keys give them without the tokens."""

from dataclasses import dataclass

import torch
from torch import Tensor

from bmfa.trees.layout import Layout
from bmfa.trees.pyramid import Counts, Pyramid, ScorePyramid, child_lift, child_step, pool, settle

# Below this share of blocks reached, gathering their keys costs less than a whole level (measured:
# the break-even lies between 1/64 and 1/16 on 32x32 and 64x64 grids at d = 64).
SPARSE_SHARE = 1 / 32


@dataclass(frozen=True, eq=False)
class KeyLevels:
    """Mean keys of all heads: for each depth the rows [blocks | tokens] of its level, (r, G, d)."""

    layout: Layout
    rows: tuple[Tensor, ...]
    tokens: Tensor  # (N, G, d)
    longest: Tensor  # (G,) the norm of the longest key

    @classmethod
    def of(cls, layout: Layout, keys: Tensor, valid: Tensor | None) -> "KeyLevels":
        """Pool (G, N, d) keys; `valid` is (N, G) or (N, 1)."""
        tokens = keys.transpose(0, 1)  # (N, G, d)
        size, heads, width = tokens.shape
        if valid is not None and valid.shape[1] > 1:
            valid = valid.repeat_interleave(width, dim=1)
        if valid is not None:
            wide = valid if valid.shape[1] == 1 else valid.view(size, heads, width)
            tokens = tokens.where(wide.view(size, -1, 1) if wide.dim() == 2 else wide, 0.0)
        flat = tokens.reshape(size, heads * width)
        means = pool(layout, Counts.of(layout, keys.dtype, valid), flat)
        rows = []
        for depth, level in enumerate(layout.levels):
            ends = tokens[level.tokens]
            blocks = means[depth].view(level.size, heads, width) if level.size else ends[:0]
            rows.append(torch.cat((blocks, ends)))
        longest = torch.linalg.vector_norm(tokens, dim=-1).amax(0)
        return cls(layout, tuple(rows), tokens, longest)


class KeyPyramid(Pyramid):
    """The pyramid of the scores of (g, Q, d) scaled queries against mean keys of g heads.

    A column is a query: B = g Q, heads first.
    """

    def __init__(self, keys: KeyLevels, heads: slice, queries: Tensor, counts: Counts, tau: float):
        super().__init__(keys.layout, counts, tau)
        self.keys = keys
        self.heads = heads
        self.queries = queries

    def magnitude(self) -> Tensor:
        """(B,) |q| max |k|: no score is larger."""
        longest = self.keys.longest[self.heads].unsqueeze(1)
        bound: Tensor = torch.linalg.vector_norm(self.queries, dim=-1) * longest
        return bound.flatten()

    def rows(self, depth: int) -> Tensor:
        """(r, B) means of the blocks and tokens of the level at `depth`."""
        return products(self.keys.rows[depth][:, self.heads], self.queries)

    def children(self, depth: int) -> Tensor:
        """(n, k, B) means of the children, from the mean keys of the level below."""
        level = self.layout.levels[depth]
        rows = self.rows(depth + 1)
        if not level.children_contiguous:
            rows = rows.index_select(0, level.children.flatten())
        return rows.view(*level.children.shape, rows.shape[1])

    def gamma_exceeds(self, depth: int, epsilon: float, reached: Tensor) -> Tensor:
        """(n, B) whether one-step Gamma > epsilon, computed for those reached where they are few."""
        few = bool(reached.sum() < SPARSE_SHARE * reached.numel())
        if not few or self.counts.empty is not None:
            return super().gamma_exceeds(depth, epsilon, reached)
        block, column = reached.nonzero().unbind(-1)
        head, query = column // self.queries.shape[1], column % self.queries.shape[1]
        children = self.layout.levels[depth].children[block]  # (P, k)
        keys = self.keys.rows[depth + 1][:, self.heads][children, head.unsqueeze(1)]  # (P, k, d)
        means = torch.einsum("pkd,pd->pk", keys, self.queries[head, query]).unsqueeze(-1)
        weights = self.counts.weights[depth][block]  # (P, k, 1)
        magnitude = None if depth + 1 == self.depth else self.magnitude()[column].unsqueeze(-1)
        step = child_step(means, weights, None, magnitude)
        gamma = child_lift(step.offset, weights, self.tau).log1p() * self.tau - step.shift
        result = torch.zeros_like(reached)
        result[block, column] = settle(gamma, step.shift).squeeze(-1) > epsilon
        return result

    def tokens(self, valid: Tensor | None) -> ScorePyramid:
        """The pyramid of the exact scores of the same columns."""
        tokens = products(self.keys.tokens[:, self.heads], self.queries)
        return ScorePyramid(self.layout, self.counts, self.tau, tokens, valid)


def products(keys: Tensor, queries: Tensor) -> Tensor:
    """(r, g Q) products of (r, g, d) keys with the (g, Q, d) queries of the same heads."""
    scores = keys.transpose(0, 1) @ queries.transpose(1, 2)  # (g, r, Q)
    return scores.transpose(0, 1).reshape(len(keys), queries.shape[0] * queries.shape[1])
