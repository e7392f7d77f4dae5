"""Every rule on one grid: Algorithm 1 by a queue, the optimal tree by its exact breakpoints."""

import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import mul

import numpy as np
import numpy.typing as npt

from bmfa.attention.kernels.reference.energy import (
    LARGEST_EXPONENT,
    Array,
    centred,
    gap,
    log_mean_exp,
    log_sum_exp,
    lower_bound,
    proxy,
    upper_bound,
)
from bmfa.trees import rules

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


Decision = Callable[[Node, list[Node], int], bool]  # (node, its children, its depth) -> split?


def _grow(blocks: Blocks, splits: Decision, max_depth: int | None) -> ReferenceTree:
    """Algorithm 1; children go to the front of the queue, so leaves come in depth-first order."""
    queue = deque([(blocks.root, 0)])
    leaves, depths, limited = [], [], []
    visited = 0
    while queue:
        node, depth = queue.popleft()
        visited += 1
        children = blocks.children(node)
        wanted = bool(children) and splits(node, children, depth)
        if wanted and depth != max_depth:
            queue.extendleft([(child, depth + 1) for child in reversed(children)])
        else:
            leaves.append(node[0])
            depths.append(depth)
            limited.append(wanted)
    return ReferenceTree(leaves, depths, limited, visited, blocks.valid)


def _coarse_mass(blocks: Blocks, epsilon: float, max_depth: int | None) -> Decision:
    """Mass with Z~_d: leaves so far, and the children of all nodes of depth d that have any."""
    chosen: set[Box] = set()
    settled: list[float] = []
    level, depth = [blocks.root], 0
    while level:
        families = [(node, blocks.children(node)) for node in level]
        settled += [blocks.log_weight(node) for node, children in families if not children]
        families = [(node, children) for node, children in families if children]
        finer = [blocks.log_weight(child) for _, children in families for child in children]
        log_z = log_sum_exp(settled + finer)
        level = []
        for node, children in families:
            if blocks.gain(node, children, log_z) > epsilon:
                chosen.add(node[0])
                level += children if depth != max_depth else []
            else:
                settled.append(blocks.log_weight(node))
        depth += 1
    return lambda node, children, depth: node[0] in chosen


Step = tuple[float, float, int]  # on the penalty path: penalty, gain of mass, leaves added


def _critical_penalties(
    blocks: Blocks, max_depth: int | None
) -> tuple[dict[Box, float], list[Step]]:
    """For each node the penalty from which on it is a leaf, and the steps of the root's path.

    With delta_B = sum_C pi_C - pi_B and k_B children, a node is split at a penalty where
    delta_B - penalty (k_B - 1) + sum_C A_C > 0, A_C being the same for C, and 0 where negative.
    Unrolled, some subtree S with B at its top has sum_S delta > penalty sum_S (k - 1), so the
    critical penalty is the largest gain per added leaf, max_S sum_S delta / sum_S (k - 1). The
    maximum is reached by taking up the children's own best subtrees while they raise the ratio.
    """
    critical: dict[Box, float] = {}

    def visit(node: Node, depth: int) -> list[Step]:
        children = blocks.children(node)
        if not children:
            return []
        steps = [step for child in children for step in visit(child, depth + 1)]
        steps.sort()
        gain, added = blocks.gain(node, children, blocks.log_z), len(children) - 1
        while steps and (added == 0 or steps[-1][0] * added > gain):
            _, more_gain, more_added = steps.pop()
            gain += more_gain
            added += more_added
        critical[node[0]] = gain / added if added else 0.0
        if depth == max_depth or not added:
            return []
        return [*steps, (critical[node[0]], gain, added)]

    return critical, visit(blocks.root, 0)


def _optimal(blocks: Blocks, rule: rules.Optimal, max_depth: int | None) -> ReferenceTree:
    """The tree of least penalised error, at the penalty given or at the breakpoint of a budget.

    Along the path the leaf count falls and E grows with the penalty, so a search among the
    breakpoints is exact: a budget of leaves takes the smallest penalty that fits, one of error the
    largest. An error out of reach of `max_depth` gives the finest tree of the path.
    """
    if rule.pooled:
        raise NotImplementedError("pooled budgets belong to a batch; the reference builds one tree")
    critical, steps = _critical_penalties(blocks, max_depth)

    def tree(penalty: float) -> ReferenceTree:
        return _grow(blocks, lambda node, children, depth: critical[node[0]] > penalty, max_depth)

    if rule.penalty is not None:
        return tree(rule.penalty)
    path = sorted({0.0, *(penalty for penalty, _, _ in steps)})
    if rule.leaves is not None:
        budget = rule.leaves
        if isinstance(budget, float):
            budget = max(1, math.floor(budget * blocks.root[1]))
        return tree(path[bisect_left(path, -budget, key=lambda p: -len(tree(p).leaves))])
    if rule.error is None:
        raise ValueError(f"{rule!r} has no penalty, leaves or error; give one of them")
    fitting = bisect_right(path, rule.error, key=lambda p: tree(p).error(blocks.scores, blocks.tau))
    if fitting == 0:
        return tree(0.0)
    # The largest penalty that fits lies just below the next breakpoint: of note for the marks alone.
    above = path[fitting] if fitting < len(path) else math.inf
    return _grow(blocks, lambda node, children, depth: critical[node[0]] >= above, max_depth)


def _quadrant_decision(blocks: Blocks, keeps: Callable[[int, Array], bool]) -> Decision:
    """The root is split; a child of the root is token by token where kept, else a leaf.

    A child is known by its position among the quadrants of some area, valid tokens or not.
    """
    boxes = quadrants(blocks.root[0]) if blocks.children(blocks.root) else []
    nodes = [blocks.node(box) for box in boxes]
    kept = [node[0] for i, node in enumerate(nodes) if node[1] and keeps(i, blocks.values(node))]

    def splits(node: Node, children: list[Node], depth: int) -> bool:
        top, left, bottom, right = node[0]
        return depth == 0 or any(
            box[0] <= top and box[1] <= left and bottom <= box[2] and right <= box[3]
            for box in kept
        )

    return splits


def _decision(
    blocks: Blocks, rule: rules.Rule, max_depth: int | None, keep: Sequence[bool] | None
) -> Decision:
    """The rule's condition for a split, strictly above its threshold."""
    tau = blocks.tau
    if isinstance(rule, rules.Gamma):
        epsilon, deeper = rule.epsilon, rule.lookahead - 1
        return lambda node, parts, _: (
            tau * blocks.refinement(node, blocks.descend(parts, deeper)) > epsilon
        )
    if isinstance(rule, rules.ExactGap):
        return lambda node, parts, _: gap(blocks.values(node), tau) > rule.epsilon
    if isinstance(rule, rules.Certified):
        return lambda node, parts, _: upper_bound(blocks.values(node), tau) > rule.epsilon
    if isinstance(rule, rules.Mass):
        if rule.coarse:
            return _coarse_mass(blocks, rule.epsilon, max_depth)
        return lambda node, parts, _: blocks.gain(node, parts, blocks.log_z) > rule.epsilon
    if isinstance(rule, rules.GlobalMean):
        return lambda node, parts, _: False
    if isinstance(rule, rules.FixedDepth):
        return lambda node, parts, depth: depth < rule.depth
    if isinstance(rule, rules.Variance):
        return _quadrant_decision(
            blocks, lambda _, values: tau / 2 * float(centred(values, tau).var()) > rule.epsilon
        )
    if isinstance(rule, rules.QuadrantGap):
        return _quadrant_decision(blocks, lambda _, values: gap(values, tau) > rule.epsilon)
    if isinstance(rule, rules.RandomQuadrants):
        if keep is None:
            raise ValueError(f"{rule!r} was given no coins; pass keep=, a bool for each quadrant")
        return _quadrant_decision(blocks, lambda position, _: bool(keep[position]))
    raise NotImplementedError(f"the reference builds no tree of {rule!r}")


def _tiles(blocks: Blocks, side: int) -> ReferenceTree:
    """Tiles from the top left in row-major order: no quadtree, so no node is split."""
    height, width = blocks.scores.shape
    boxes = [
        (top, left, min(top + side, height), min(left + side, width))
        for top in range(0, height, side)
        for left in range(0, width, side)
    ]
    depth = int(len(boxes) > 1)
    leaves = [box for box in boxes if blocks.node(box)[1]]
    size = len(leaves)
    return ReferenceTree(leaves, [depth] * size, [False] * size, size, blocks.valid)


def _labels(blocks: Blocks, tree: ReferenceTree, epsilon: float) -> list[str]:
    """Safe where U <= epsilon, must-refine where L > epsilon, undecided between."""
    labels = []
    for box in tree.leaves:
        node = blocks.node(box)
        values, parts = blocks.values(node), blocks.children(node)
        if upper_bound(values, blocks.tau) <= epsilon:
            labels.append("safe")
            continue
        score = blocks.tau * blocks.refinement(node, parts)
        proven = max(score, lower_bound(values, blocks.tau)) > epsilon
        labels.append("must-refine" if proven else "undecided")
    return labels


def build_tree(
    scores: npt.ArrayLike,
    rule: rules.Rule | str,
    *,
    tau: float = 1.0,
    max_depth: int | None = None,
    valid: npt.ArrayLike | None = None,
    keep: Sequence[bool] | None = None,
) -> ReferenceTree:
    """The tree of one grid of scores (H, W) under a rule; `keep` holds RandomQuadrants' coins.

    A leaf at `max_depth` that the rule would have split is marked depth-limited. FixedBlocks is no
    quadtree, and `max_depth` does not touch it.
    """
    blocks, rule = Blocks(scores, tau, valid), rules.as_rule(rule)
    if isinstance(rule, rules.FixedBlocks):
        return _tiles(blocks, rule.side)
    if isinstance(rule, rules.Optimal):
        return _optimal(blocks, rule, max_depth)
    tree = _grow(blocks, _decision(blocks, rule, max_depth, keep), max_depth)
    if isinstance(rule, rules.Certified):
        return replace(tree, labels=_labels(blocks, tree, rule.epsilon))
    return tree
