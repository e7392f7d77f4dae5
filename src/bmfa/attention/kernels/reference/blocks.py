"""One tree, and the blocks of one grid with exact sums."""

import math
from dataclasses import dataclass, field
from functools import cached_property
from operator import mul

import numpy as np
import numpy.typing as npt

from bmfa.attention.kernels.reference.energies import (
    LARGEST_EXPONENT,
    Array,
    gap,
    log_mean_exp,
    log_sum_exp,
    proxy,
)

Mask = npt.NDArray[np.bool_]
Box = tuple[int, int, int, int]  # (top, left, bottom, right), half open
Node = tuple[Box, int, int]  # a block, its valid tokens, and the sum of their scores in ticks


@dataclass(frozen=True)
class ReferenceTree:
    """A partition of one grid; leaves in depth-first child order (FixedBlocks: row-major).

    `depth_limited` marks the leaves that the rule would split if `max_depth` let it; `labels` are
    those of Certified, else None; `node_count` is the number of leaves and split nodes.
    """

    leaves: list[Box]
    depths: list[int]
    depth_limited: list[bool]
    node_count: int
    valid: Mask = field(compare=False, repr=False)
    labels: list[str] | None = None

    def leaf_index(self) -> npt.NDArray[np.int64]:
        """(H, W): the position in `leaves` of each token's leaf, -1 on invalid tokens."""
        index = np.full(self.valid.shape, -1, np.int64)
        for position, (top, left, bottom, right) in enumerate(self.leaves):
            index[top:bottom, left:right] = position
        return np.where(self.valid, index, -1)

    def leaf_values(self, scores: npt.NDArray[np.float64]) -> list[Array]:
        """The entries of each leaf's valid tokens; `scores` is (H, W) or (H, W, d)."""
        return [
            scores[top:bottom, left:right][self.valid[top:bottom, left:right]]
            for top, left, bottom, right in self.leaves
        ]

    def reconstruct(self, scores: npt.ArrayLike) -> Array:
        """s~_i = M(L) for i in L; invalid tokens keep the value they came with."""
        values = np.array(scores, np.float64)
        index = self.leaf_index()
        for position, leaf in enumerate(self.leaf_values(values)):
            values[index == position] = leaf.mean()
        return values

    def proxy_free_energy(self, scores: npt.ArrayLike, tau: float = 1.0) -> float:
        """F~ = tau log(1/N sum_L n_L exp(M(L) / tau))."""
        leaves = self.leaf_values(np.asarray(scores, np.float64))
        return proxy([leaf.mean() for leaf in leaves], [leaf.size for leaf in leaves], tau)

    def error(self, scores: npt.ArrayLike, tau: float = 1.0, prefix: npt.ArrayLike = ()) -> float:
        """E = F - F~ = tau log sum_L pi~_L exp(G_L / tau), pi~_L = n_L exp(M_L / tau) / Z~.

        The scores of `prefix` tokens are exact leaves outside the grid.
        """
        grid, outside = np.asarray(scores, np.float64), np.asarray(prefix, np.float64)
        parts = [*self.leaf_values(grid), *outside.reshape(-1, 1)]
        peak = max(part.max() for part in parts)
        logits = np.array([(part - peak).mean() / tau + math.log(part.size) for part in parts])
        gaps = np.array([gap(part, tau) / tau for part in parts])
        log_z = log_sum_exp(logits)
        if gaps.max() < LARGEST_EXPONENT:
            return tau * math.log1p((np.exp(logits - log_z) * np.expm1(gaps)).sum())
        return tau * (log_sum_exp(logits + gaps) - log_z)


def quadrants(box: Box) -> list[Box]:
    """Top-left, top-right, bottom-left, bottom-right, without those of no area."""
    top, left, bottom, right = box
    middle, centre = (top + bottom) // 2, (left + right) // 2
    quadrants = [
        (top, left, middle, centre),
        (top, centre, middle, right),
        (middle, left, bottom, centre),
        (middle, centre, bottom, right),
    ]
    if top < middle and left < centre:
        return quadrants
    return [box for box in quadrants if box[0] < box[2] and box[1] < box[3]]


def _prefix_sums(grid: npt.NDArray[np.int64]) -> list[list[int]]:
    """Sums over [0, i) x [0, j): any block's sum then takes four look-ups."""
    table: list[list[int]] = np.pad(grid.cumsum(0).cumsum(1), ((1, 0), (1, 0))).tolist()
    return table


class Blocks:
    """O(1) counts, means and refinement scores of the blocks of one grid, in units of tau.

    Scores are held as x = (s - max s) / tau in ticks, the smallest power of two for which sums
    over the grid fit in 62 bits. Sums are then exact, and equal blocks have equal means whatever
    surrounds them. With eps the float64 epsilon, a mean is off by at most half a tick, plus
    eps max|x| for the two roundings of x and eps/2 max|x| for the division; `doubt` is twice
    that, the error of a difference of two means.
    """

    def __init__(self, scores: npt.ArrayLike, tau: float, valid: npt.ArrayLike | None) -> None:
        self.scores: Array = np.asarray(scores, np.float64)
        if self.scores.ndim != 2 or self.scores.size == 0:
            raise ValueError(f"scores have shape {self.scores.shape}; pass (H, W) with H, W >= 1")
        everything = np.ones(self.scores.shape, bool)
        self.valid: Mask = everything if valid is None else np.asarray(valid, bool)
        tokens = self.scores[self.valid]
        if tokens.size == 0 or not np.isfinite(tokens).all():
            raise ValueError(
                "scores hold no valid token, or one that is not finite; mend scores or valid"
            )
        self.tau = tau
        peak = tokens.max()
        below = (np.where(self.valid, self.scores, peak) - peak) / tau
        reach = -float(below.min())
        exponent = 62 - math.frexp(tokens.size * reach)[1]
        self.tick = math.ldexp(1.0, -exponent)
        self.doubt = self.tick + 3 * float(np.finfo(np.float64).eps) * reach
        ticks = np.rint(np.ldexp(below, exponent)).astype(np.int64)
        self.sums = _prefix_sums(ticks)
        self.counts = None if self.valid.all() else _prefix_sums(self.valid.astype(np.int64))
        self.root = self.node((0, 0, *self.scores.shape))
        self.below = below

    @cached_property
    def log_z(self) -> float:
        """log sum_i exp(x_i) over the valid tokens."""
        return log_sum_exp(self.below[self.valid])

    def node(self, box: Box) -> Node:
        """The block with its number of valid tokens and the sum of its ticks."""
        top, left, bottom, right = box
        upper, lower = self.sums[top], self.sums[bottom]
        total = lower[right] - lower[left] - upper[right] + upper[left]
        if self.counts is None:
            return box, (bottom - top) * (right - left), total
        upper, lower = self.counts[top], self.counts[bottom]
        return box, lower[right] - lower[left] - upper[right] + upper[left], total

    def children(self, node: Node) -> list[Node]:
        """The quadrants with valid tokens; none where the node holds a single token."""
        box, count, _ = node
        if count == 1:
            return []
        parts = [self.node(quadrant) for quadrant in quadrants(box)]
        return parts if self.counts is None else [node for node in parts if node[1]]

    def descend(self, nodes: list[Node], levels: int) -> list[Node]:
        """The descendants so many levels below, a single token standing for itself."""
        for _ in range(levels):
            nodes = [part for node in nodes for part in self.children(node) or [node]]
        return nodes

    def values(self, node: Node) -> Array:
        """The scores of the block's valid tokens."""
        top, left, bottom, right = node[0]
        return self.scores[top:bottom, left:right][self.valid[top:bottom, left:right]]

    def refinement(self, node: Node, parts: list[Node]) -> float:
        """Gamma / tau = log sum_C w_C exp(x_C), x_C = M(C) - M(B), w_C = n_C / n_B.

        To first order an error of `doubt` in every x_C moves it by doubt sum_C w_C |x_C|, since
        sum_C w_C x_C = 0; a score no larger than that counts as 0.
        """
        _, count, total = node
        mean, tick = total / count, self.tick
        weights = [n / count for _, n, _ in parts]
        deviations = [(t / n - mean) * tick for _, n, t in parts]
        spread = sum(map(mul, weights, map(abs, deviations)))
        score = log_mean_exp(weights, deviations) if spread else 0.0
        return score if score > self.doubt * spread else 0.0

    def log_weight(self, node: Node) -> float:
        """log(n_B exp(M_B / tau)), up to the constant that log_z shares."""
        _, count, total = node
        return math.log(count) + total / count * self.tick

    def gain(self, node: Node, parts: list[Node], log_z: float) -> float:
        """pi_B (exp(Gamma_B / tau) - 1) = sum_C pi_C - pi_B, pi_B = n_B exp(M_B / tau) / Z."""
        score = self.refinement(node, parts)
        return -math.expm1(-score) * math.exp(self.log_weight(node) + score - log_z)
