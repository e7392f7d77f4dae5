"""Every rule on one grid: Algorithm 1 by a queue, the optimal tree by its exact breakpoints."""

import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy.typing as npt

from bmfa.attention.kernels.reference.blocks import Blocks, Box, Node, ReferenceTree, quadrants
from bmfa.attention.kernels.reference.energies import (
    Array,
    centred,
    gap,
    log_sum_exp,
    lower_bound,
    upper_bound,
)
from bmfa.trees import rules

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
