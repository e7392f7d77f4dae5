"""Trees of one grid under every rule: Algorithm 1 by a queue, optimal trees by exact breakpoints."""

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
    centered,
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
Node = tuple[Box, int, int]  # a block, its number of valid tokens, and the sum of their ticks


@dataclass(frozen=True)
class ReferenceTree:
    """A partition of one grid into leaves, in depth-first order of children (FixedBlocks: row-major)."""

    leaves: list[Box]
    depths: list[int]  # of each leaf
    depth_limited: list[bool]  # True for leaves that the rule would split without max_depth
    node_count: int  # leaves and split nodes
    valid: Mask = field(compare=False, repr=False)  # (H, W)
    labels: list[str] | None = None  # of each leaf, for Certified

    def leaf_index(self) -> npt.NDArray[np.int64]:
        """Return (H, W), the index in `leaves` of the leaf of each token, -1 for invalid tokens."""
        index = np.full(self.valid.shape, -1, np.int64)
        for position, (top, left, bottom, right) in enumerate(self.leaves):
            index[top:bottom, left:right] = position
        return np.where(self.valid, index, -1)

    def leaf_values(self, scores: npt.NDArray[np.float64]) -> list[Array]:
        """Return the entries of the valid tokens of each leaf; `scores` is (H, W) or (H, W, d)."""
        return [
            scores[top:bottom, left:right][self.valid[top:bottom, left:right]]
            for top, left, bottom, right in self.leaves
        ]

    def reconstruct(self, scores: npt.ArrayLike) -> Array:
        """Return (H, W) scores s~_i = M(L) for i in L; invalid tokens keep their scores."""
        values = np.array(scores, np.float64)
        index = self.leaf_index()
        for position, leaf in enumerate(self.leaf_values(values)):
            values[index == position] = leaf.mean()
        return values

    def proxy_free_energy(self, scores: npt.ArrayLike, tau: float = 1.0) -> float:
        """Return F~ = tau log(1/N sum_L n_L exp(M(L) / tau))."""
        leaves = self.leaf_values(np.asarray(scores, np.float64))
        return proxy([leaf.mean() for leaf in leaves], [leaf.size for leaf in leaves], tau)

    def error(self, scores: npt.ArrayLike, tau: float = 1.0, prefix: npt.ArrayLike = ()) -> float:
        """Return E = F - F~ = tau log sum_L pi~_L exp(G_L / tau), pi~_L = n_L exp(M_L / tau) / Z~.

        Args:
            scores: (H, W).
            tau: Temperature.
            prefix: Scores of tokens outside the grid, which are exact leaves.
        """
        grid, outside = np.asarray(scores, np.float64), np.asarray(prefix, np.float64)
        parts = [*self.leaf_values(grid), *outside.reshape(-1, 1)]
        largest = max(part.max() for part in parts)
        logits = np.array([(part - largest).mean() / tau + math.log(part.size) for part in parts])
        gaps = np.array([gap(part, tau) / tau for part in parts])
        log_z = log_sum_exp(logits)
        if gaps.max() < LARGEST_EXPONENT:
            return tau * math.log1p((np.exp(logits - log_z) * np.expm1(gaps)).sum())
        return tau * (log_sum_exp(logits + gaps) - log_z)


def quadrants(box: Box) -> list[Box]:
    """Return top-left, top-right, bottom-left and bottom-right, without those of no area."""
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
    """Return sums over [0, i) x [0, j), from which the sum of any block takes four look-ups."""
    table: list[list[int]] = np.pad(grid.cumsum(0).cumsum(1), ((1, 0), (1, 0))).tolist()
    return table


class Blocks:
    """Counts, means and refinement scores of the blocks of one grid in O(1), in units of tau.

    Scores are stored as integer multiples of a tick: x = (s - max s) / tau, and the tick is the smallest
    power of two for which sums over the grid fit in 62 bits. Sums are then exact, and equal blocks have
    equal means whatever surrounds them. With eps the float64 epsilon, a mean is off by at most half a
    tick, plus eps max|x| for the two roundings of x and eps/2 max|x| for the division. `rounding` is
    twice that, the error of a difference of two means.
    """

    def __init__(self, scores: npt.ArrayLike, tau: float, valid: npt.ArrayLike | None) -> None:
        self.scores: Array = np.asarray(scores, np.float64)
        if self.scores.ndim != 2 or self.scores.size == 0:
            raise ValueError(f"scores have shape {self.scores.shape}; pass (H, W) with H, W >= 1")
        self.valid: Mask = np.ones(self.scores.shape, bool)
        if valid is not None:
            self.valid = np.asarray(valid, bool)
        tokens = self.scores[self.valid]
        if tokens.size == 0 or not np.isfinite(tokens).all():
            raise ValueError(
                "scores have no valid token, or one that is not finite; change scores or valid"
            )
        self.tau = tau
        largest = tokens.max()
        self.shifted = (np.where(self.valid, self.scores, largest) - largest) / tau
        magnitude = -float(self.shifted.min())
        exponent = 62 - math.frexp(tokens.size * magnitude)[1]
        self.tick = math.ldexp(1.0, -exponent)
        self.rounding = self.tick + 3 * float(np.finfo(np.float64).eps) * magnitude
        ticks = np.rint(np.ldexp(self.shifted, exponent)).astype(np.int64)
        self.sums = _prefix_sums(ticks)
        self.counts = None if self.valid.all() else _prefix_sums(self.valid.astype(np.int64))
        self.root = self.node((0, 0, *self.scores.shape))

    @cached_property
    def log_z(self) -> float:
        """log Z = log sum_i exp(x_i) over the valid tokens."""
        return log_sum_exp(self.shifted[self.valid])

    def node(self, box: Box) -> Node:
        """Return the block with its number of valid tokens and the sum of their ticks."""
        top, left, bottom, right = box
        upper, lower = self.sums[top], self.sums[bottom]
        total = lower[right] - lower[left] - upper[right] + upper[left]
        if self.counts is None:
            return box, (bottom - top) * (right - left), total
        upper, lower = self.counts[top], self.counts[bottom]
        return box, lower[right] - lower[left] - upper[right] + upper[left], total

    def children(self, node: Node) -> list[Node]:
        """Return the quadrants with valid tokens, or none if the node has a single token."""
        box, count, _ = node
        if count == 1:
            return []
        parts = [self.node(quadrant) for quadrant in quadrants(box)]
        return parts if self.counts is None else [node for node in parts if node[1]]

    def descend(self, nodes: list[Node], levels: int) -> list[Node]:
        """Return the descendants a number of levels below; a single token is its own descendant."""
        for _ in range(levels):
            nodes = [part for node in nodes for part in self.children(node) or [node]]
        return nodes

    def values(self, node: Node) -> Array:
        """Return the scores of the valid tokens of a block."""
        top, left, bottom, right = node[0]
        return self.scores[top:bottom, left:right][self.valid[top:bottom, left:right]]

    def refinement(self, node: Node, parts: list[Node]) -> float:
        """Return Gamma / tau = log sum_C w_C exp(x_C), x_C = M(C) - M(B), w_C = n_C / n_B.

        To first order an error of `rounding` in every x_C changes it by rounding sum_C w_C |x_C|, since
        sum_C w_C x_C = 0. A score up to that counts as 0.
        """
        _, count, total = node
        mean, tick = total / count, self.tick
        weights = [n / count for _, n, _ in parts]
        deviations = [(t / n - mean) * tick for _, n, t in parts]
        spread = sum(map(mul, weights, map(abs, deviations)))
        score = log_mean_exp(weights, deviations) if spread else 0.0
        return score if score > self.rounding * spread else 0.0

    def log_weight(self, node: Node) -> float:
        """Return log(n_B exp(M_B / tau)), up to the constant that log_z has too."""
        _, count, total = node
        return math.log(count) + total / count * self.tick

    def gain(self, node: Node, parts: list[Node], log_z: float) -> float:
        """Return pi_B (exp(Gamma_B / tau) - 1) = sum_C pi_C - pi_B, pi_B = n_B exp(M_B / tau) / Z."""
        score = self.refinement(node, parts)
        return -math.expm1(-score) * math.exp(self.log_weight(node) + score - log_z)


Decision = Callable[[Node, list[Node], int], bool]  # (node, its children, its depth) -> split?


def _grow(blocks: Blocks, splits: Decision, max_depth: int | None) -> ReferenceTree:
    """Run Algorithm 1. Children go to the front of the queue, so leaves are in depth-first order."""
    queue = deque([(blocks.root, 0)])
    leaves, depths, limited = [], [], []
    visited = 0
    while queue:
        node, depth = queue.popleft()
        visited += 1
        children = blocks.children(node)
        wants_split = bool(children) and splits(node, children, depth)
        if wants_split and depth != max_depth:
            queue.extendleft([(child, depth + 1) for child in reversed(children)])
        else:
            leaves.append(node[0])
            depths.append(depth)
            limited.append(wants_split)
    return ReferenceTree(leaves, depths, limited, visited, blocks.valid)


def _coarse_mass(blocks: Blocks, epsilon: float, max_depth: int | None) -> Decision:
    """Mass with Z~_d: the leaves so far, and the children of the nodes of depth d that have any."""
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


Step = tuple[float, float, int]  # penalty, gain of mass and added leaves of a step of the path


def _critical_penalties(
    blocks: Blocks, max_depth: int | None
) -> tuple[dict[Box, float], list[Step]]:
    """Return the penalty from which on each node is a leaf, and the steps of the root's path.

    With delta_B = sum_C pi_C - pi_B and k_B children, a node is split at a penalty if
    A_B = delta_B - penalty (k_B - 1) + sum_C max(A_C, 0) > 0. Unrolled, some subtree S with root B has
    sum_S delta > penalty sum_S (k - 1), so the critical penalty is the largest gain per added leaf,
    max_S sum_S delta / sum_S (k - 1). The maximum is reached by adding the best subtrees of the
    children as long as they raise the ratio.
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
    """Return the tree of least penalised error, at a penalty or at the breakpoint of a budget.

    With the penalty the leaf count falls and E grows, so a search among the breakpoints is exact: a
    budget of leaves takes the smallest penalty that fits, a budget of error the largest. If `max_depth`
    does not allow the error, the result is the finest tree of the path.
    """
    if rule.pooled:
        raise NotImplementedError(
            "pooled budgets are for a batch of trees; the reference builds one tree"
        )
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
        raise ValueError(f"{rule!r} has no penalty, leaves or error; pass one of them")
    fitting = bisect_right(path, rule.error, key=lambda p: tree(p).error(blocks.scores, blocks.tau))
    if fitting == 0:
        return tree(0.0)
    # The largest penalty that fits is just below the next breakpoint; only `depth_limited` differs.
    above = path[fitting] if fitting < len(path) else math.inf
    return _grow(blocks, lambda node, children, depth: critical[node[0]] >= above, max_depth)


def _quadrant_decision(blocks: Blocks, expands: Callable[[int, Array], bool]) -> Decision:
    """Split the root, and a child of the root down to tokens if `expands(index, values)` is True.

    The index counts the quadrants with some area, whether or not they have valid tokens.
    """
    boxes = quadrants(blocks.root[0]) if blocks.children(blocks.root) else []
    nodes = [blocks.node(box) for box in boxes]
    expanded = [
        node[0] for i, node in enumerate(nodes) if node[1] and expands(i, blocks.values(node))
    ]

    def splits(node: Node, children: list[Node], depth: int) -> bool:
        top, left, bottom, right = node[0]
        return depth == 0 or any(
            box[0] <= top and box[1] <= left and bottom <= box[2] and right <= box[3]
            for box in expanded
        )

    return splits


def _decision(
    blocks: Blocks, rule: rules.Rule, max_depth: int | None, coins: Sequence[bool] | None
) -> Decision:
    """Return the condition of a rule for a split, strictly above its threshold."""
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
            blocks, lambda _, values: tau / 2 * float(centered(values, tau).var()) > rule.epsilon
        )
    if isinstance(rule, rules.QuadrantGap):
        return _quadrant_decision(blocks, lambda _, values: gap(values, tau) > rule.epsilon)
    if isinstance(rule, rules.RandomQuadrants):
        if coins is None:
            raise ValueError(f"{rule!r} needs coins; pass coins=, a bool for each quadrant")
        return _quadrant_decision(blocks, lambda index, _: bool(coins[index]))
    raise NotImplementedError(f"the reference has no tree for {rule!r}")


def _tiles(blocks: Blocks, side: int) -> ReferenceTree:
    """Return tiles from the top left in row-major order. They are no quadtree: no node is split."""
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
    """Label leaves: "safe" if U <= epsilon, "must-refine" if L > epsilon, else "undecided"."""
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
    coins: Sequence[bool] | None = None,
) -> ReferenceTree:
    """Build the tree of one grid.

    Args:
        scores: (H, W).
        rule: Rule, or its name.
        tau: Temperature.
        max_depth: Depth at which no block is split, or None. FixedBlocks ignores it.
        valid: bool (H, W), the tokens that exist.
        coins: For RandomQuadrants, a bool for each quadrant with some area: True expands it.
    """
    blocks, rule = Blocks(scores, tau, valid), rules.as_rule(rule)
    if isinstance(rule, rules.FixedBlocks):
        return _tiles(blocks, rule.side)
    if isinstance(rule, rules.Optimal):
        return _optimal(blocks, rule, max_depth)
    tree = _grow(blocks, _decision(blocks, rule, max_depth, coins), max_depth)
    if isinstance(rule, rules.Certified):
        return replace(tree, labels=_labels(blocks, tree, rule.epsilon))
    return tree
