"""Trees of one grid by plain recursion in float64: an oracle that shares no code with bmfa.

A node holds the scores of its valid tokens, and nothing else is stored: means are exact fractions,
and every quantity is computed from the tokens by its definition.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np

from bmfa import rules

Box = tuple[int, int, int, int]  # top, left, bottom, right; half open
# The score of a block and the threshold that it must exceed to be split; infinite scores decide alone.
Verdict = tuple[float, float]


@dataclass(eq=False)
class Node:
    """A block with at least one valid token; `children` are its parts that have one."""

    box: Box
    depth: int
    scores: list[Fraction]
    children: list["Node"] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.count = len(self.scores)
        self.mean = sum(self.scores) / self.count

    def below(self, levels: int) -> list["Node"]:
        """The descendants so many levels below; a single token stands for itself."""
        if levels == 0 or not self.children:
            return [self]
        return [node for child in self.children for node in child.below(levels - 1)]

    def all(self) -> list["Node"]:
        return [self, *(node for child in self.children for node in child.all())]


def gap(values: Sequence, weights: Sequence | None = None, tau: float = 1.0) -> float:
    """tau log sum_i w_i exp((x_i - x) / tau) of weighted values with mean x; 0 if all are equal."""
    values = [Fraction(float(x)) if not isinstance(x, Fraction) else x for x in values]
    weights = [1] * len(values) if weights is None else weights
    total = sum(weights)
    mean = sum(w * x for w, x in zip(weights, values, strict=True)) / total
    apart = [float(x - mean) / tau for x in values]
    if not any(apart):
        return 0.0
    top = max(apart)
    if top > 30:
        terms = (w * math.exp(x - top) for w, x in zip(weights, apart, strict=True))
        return tau * (top + math.log(math.fsum(terms) / total))
    terms = (w * (math.expm1(x) - x) for w, x in zip(weights, apart, strict=True))
    return tau * math.log1p(math.fsum(terms) / total)


def extreme_gap(scores: Sequence[Fraction], pick: Callable, tau: float) -> float:
    """The gap of the law on two values with the mean, the variance and one extreme of the scores.

    With the maximum this is Bennett's upper bound on the gap, with the minimum the lower bound.
    """
    mean = sum(scores) / len(scores)
    edge = pick(scores) - mean
    variance = sum((score - mean) ** 2 for score in scores) / len(scores)
    if variance == 0:
        return 0.0
    other = -variance / edge
    return gap([edge, other], [abs(float(other)), abs(float(edge))], tau)


def quadrants(box: Box) -> list[Box]:
    """The parts of a block: a side n splits into floor(n / 2) and the rest, a side of 1 does not."""
    top, left, bottom, right = box
    rows = [(top, bottom)]
    if bottom - top > 1:
        rows = [(top, (top + bottom) // 2), ((top + bottom) // 2, bottom)]
    columns = [(left, right)]
    if right - left > 1:
        columns = [(left, (left + right) // 2), ((left + right) // 2, right)]
    return [(r[0], c[0], r[1], c[1]) for r in rows for c in columns]


def log_sum(logits: Sequence[float]) -> float:
    top = max(logits)
    return top + math.log(math.fsum(math.exp(x - top) for x in logits))


def distance(verdict: Verdict) -> float:
    """How near a score lies to its threshold, relative to the larger of them."""
    largest = max(verdict)
    return abs(verdict[0] - verdict[1]) / largest if 0 < largest < math.inf else math.inf


@dataclass(frozen=True, eq=False)
class OracleTree:
    """A tree: the verdict of every block that it reaches, and its leaves depth first."""

    oracle: "Oracle"
    rule: rules.Rule
    verdicts: dict[Node, Verdict]
    leaf_nodes: list[Node]

    @property
    def leaves(self) -> list[Box]:
        return [leaf.box for leaf in self.leaf_nodes]

    @property
    def split(self) -> set[Box]:
        """The blocks that are split: all that were reached and are no leaves."""
        return {node.box for node in self.verdicts} - set(self.leaves)

    @property
    def node_count(self) -> int:
        return len(self.leaf_nodes) + len(self.split)

    @property
    def depth_limited(self) -> list[bool]:
        verdicts = (self.verdicts.get(leaf, (0.0, 0.0)) for leaf in self.leaf_nodes)
        return [score > threshold for score, threshold in verdicts]

    def labels(self) -> list[tuple[str, float]]:
        """The label of each leaf of a certified tree, and how near to another one it is."""
        found, epsilon = [], self.rule.epsilon
        for leaf in self.leaf_nodes:
            upper = extreme_gap(leaf.scores, max, self.oracle.tau)
            lower = extreme_gap(leaf.scores, min, self.oracle.tau)
            lower = max(lower, self.oracle.gamma(leaf, 1))
            label = (
                "safe" if upper <= epsilon else "must-refine" if lower > epsilon else "undecided"
            )
            found.append((label, min(distance((upper, epsilon)), distance((lower, epsilon)))))
        return found

    def leaf_index(self) -> np.ndarray:
        """(H, W) position in `leaves` of the leaf of each token, -1 for tokens that are not valid."""
        index = np.full(self.oracle.valid.shape, -1)
        for position, (top, left, bottom, right) in enumerate(self.leaves):
            index[top:bottom, left:right] = position
        return np.where(self.oracle.valid, index, -1)

    def reconstruct(self) -> np.ndarray:
        """(H, W) mean score of the leaf of each token; tokens that are not valid keep their score."""
        means = np.array([float(leaf.mean) for leaf in self.leaf_nodes])
        index = self.leaf_index()
        return np.where(index >= 0, means[index], self.oracle.scores)

    def error(self, prefix: Sequence[float] = ()) -> float:
        """E = F - F~ with exact scores of a prefix: the mass of every leaf grows by exp(G / tau)."""
        oracle, tau = self.oracle, self.oracle.tau
        gaps = [oracle.gap(leaf) / tau for leaf in self.leaf_nodes] + [0.0] * len(prefix)
        coarse = [oracle.log_weight(leaf) for leaf in self.leaf_nodes]
        coarse += [(float(score) - float(oracle.peak)) / tau for score in prefix]
        log_z = log_sum([x + g for x, g in zip(coarse, gaps, strict=True)])
        pairs = zip(coarse, gaps, strict=True)
        lost = math.fsum(math.exp(x + g - log_z) * -math.expm1(-g) for x, g in pairs)
        return -tau * math.log1p(-lost) if lost < 0.5 else tau * (log_z - log_sum(coarse))


class Oracle:
    """One grid of scores (H, W) under a mask, and the tree of any rule on it."""

    def __init__(self, scores, valid=None, tau: float = 1.0, max_depth: int | None = None) -> None:
        self.scores = np.asarray(scores, np.float64)
        self.valid = np.ones(self.scores.shape, bool) if valid is None else np.array(valid)
        self.tau, self.max_depth = tau, max_depth
        root = self._build((0, 0, *self.scores.shape), 0, True)
        assert root is not None
        self.root = root
        self.blocks = [node for node in root.all() if node.count > 1]
        self.peak = max(root.scores)
        self.log_z = log_sum([float(score - self.peak) / tau for score in root.scores])
        self.gammas: dict[tuple[Node, int], float] = {}
        self.gaps: dict[Node, float] = {}

    def _build(self, box: Box, depth: int, deeper: bool) -> Node | None:
        """The node of a block, with all its descendants; None where no token is valid."""
        top, left, bottom, right = box
        inside = self.scores[top:bottom, left:right][self.valid[top:bottom, left:right]]
        if inside.size == 0:
            return None
        node = Node(box, depth, [Fraction(float(score)) for score in inside])
        if deeper and node.count > 1:
            parts = (self._build(part, depth + 1, True) for part in quadrants(box))
            node.children = [part for part in parts if part is not None]
        return node

    def log_weight(self, node: Node) -> float:
        """log of n exp(M / tau), relative to exp(peak / tau)."""
        return math.log(node.count) + float(node.mean - self.peak) / self.tau

    def gamma(self, node: Node, lookahead: int) -> float:
        if (node, lookahead) not in self.gammas:
            parts = node.below(lookahead)
            means, counts = [part.mean for part in parts], [part.count for part in parts]
            self.gammas[node, lookahead] = gap(means, counts, self.tau)
        return self.gammas[node, lookahead]

    def gap(self, node: Node) -> float:
        if node not in self.gaps:
            self.gaps[node] = gap(node.scores, tau=self.tau)
        return self.gaps[node]

    def log_gain(self, node: Node) -> float:
        """log of the mass that a split recovers, n exp(M / tau) (exp(Gamma / tau) - 1)."""
        gamma = self.gamma(node, 1) / self.tau
        if gamma == 0.0:
            return -math.inf
        return self.log_weight(node) + gamma + math.log(-math.expm1(-gamma))

    def gain(self, node: Node) -> float:
        return math.exp(self.log_gain(node) - self.log_z)

    def tree(self, rule: rules.Rule | str, coins: Sequence[bool] | None = None) -> OracleTree:
        """The tree of a rule; `coins` has a bool for each quadrant, for `RandomQuadrants`."""
        rule = rules.as_rule(rule)
        if isinstance(rule, rules.FixedBlocks):
            return OracleTree(self, rule, {}, self._tiles(rule.side))
        return self._grow(rule, self.judge(rule, coins))

    def _grow(self, rule: rules.Rule, judge: Callable[[Node], Verdict]) -> OracleTree:
        verdicts: dict[Node, Verdict] = {}

        def visit(node: Node) -> list[Node]:
            if node.count == 1:
                return [node]
            score, threshold = verdicts[node] = judge(node)
            if score <= threshold or node.depth == self.max_depth:
                return [node]
            return [leaf for child in node.children for leaf in visit(child)]

        return OracleTree(self, rule, verdicts, visit(self.root))

    def judge(
        self, rule: rules.Rule, coins: Sequence[bool] | None = None
    ) -> Callable[[Node], Verdict]:
        match rule:
            case rules.Gamma():
                return lambda node: (self.gamma(node, rule.lookahead), rule.epsilon)
            case rules.ExactGap():
                return lambda node: (self.gap(node), rule.epsilon)
            case rules.Certified():
                return lambda node: (extreme_gap(node.scores, max, self.tau), rule.epsilon)
            case rules.Mass(coarse=True):
                return self._coarse_mass(rule.epsilon).__getitem__
            case rules.Mass():
                return lambda node: (self.gain(node), rule.epsilon)
            case rules.Optimal():
                return self._optimal(rule)
            case rules.FixedDepth():
                return lambda node: _always(node.depth < rule.depth)
            case rules.QuadrantGap() | rules.RandomQuadrants():
                return lambda node: self._quadrant(node, rule, coins)
        raise TypeError(f"the oracle has no tree for {rule!r}")

    def _quadrant(self, node: Node, rule: rules.Rule, coins: Sequence[bool] | None) -> Verdict:
        if node.depth != 1:
            return _always(True)
        if isinstance(rule, rules.RandomQuadrants):
            return _always(bool(coins[quadrants(self.root.box).index(node.box)]))
        if isinstance(rule, rules.Variance):
            squares = sum((score - node.mean) ** 2 for score in node.scores)
            return float(squares / node.count) / (2 * self.tau), rule.epsilon
        return self.gap(node), rule.epsilon

    def _coarse_mass(self, epsilon: float) -> dict[Node, Verdict]:
        """Shares of Z~: the leaves so far, and the children of all nodes of the level."""
        judged: dict[Node, Verdict] = {}
        settled: list[float] = []
        level = [self.root]
        while level:
            settled += [self.log_weight(node) for node in level if not node.children]
            level = [node for node in level if node.children]
            finer = [self.log_weight(child) for node in level for child in node.children]
            log_z = log_sum(settled + finer)
            judged |= {node: (math.exp(self.log_gain(node) - log_z), epsilon) for node in level}
            chosen = [node for node in level if judged[node][0] > epsilon]
            settled += [self.log_weight(node) for node in level if node not in chosen]
            level = [child for node in chosen for child in node.children]
        return judged

    def _optimal(self, rule: rules.Optimal) -> Callable[[Node], Verdict]:
        """Blocks are split whose best subtree gains more mass per leaf than the penalty.

        Every node has a path of steps (mass per leaf, mass, leaves) from one leaf to its full subtree,
        best first. A node's own split comes first, with as many of its children's steps as raise its
        ratio. A budget selects the penalty among the ratios of the root's path.
        """
        ratio: dict[Node, float] = {}

        def path(node: Node) -> list[tuple[float, float, int]]:
            if node.count == 1:
                return []
            steps = sorted(step for child in node.children for step in path(child))
            mass, leaves = self.gain(node), len(node.children) - 1
            while steps and (leaves == 0 or steps[-1][0] * leaves > mass):
                _, more, added = steps.pop()
                mass, leaves = mass + more, leaves + added
            ratio[node] = mass / leaves if leaves else 0.0
            if node.depth == self.max_depth or not leaves:
                return []
            return [*steps, (ratio[node], mass, leaves)]

        def tree(penalty: float) -> OracleTree:
            return self._grow(rule, lambda node: (ratio[node], penalty))

        penalties = sorted({0.0, *(step[0] for step in path(self.root))})
        if rule.penalty is not None:
            penalty = rule.penalty
        elif rule.leaves is not None:
            most = leaf_budget(rule, self.root.count)
            fits = bisect_left(penalties, -most, key=lambda p: -len(tree(p).leaves))
            penalty = penalties[fits]
        else:  # just below the first penalty whose tree misses more
            fits = bisect_right(penalties, rule.error, key=lambda p: tree(p).error())
            above = penalties[fits] if fits < len(penalties) else math.inf
            penalty = math.nextafter(above, 0.0) if fits else 0.0
        return lambda node: (ratio[node], penalty)

    def _tiles(self, side: int) -> list[Node]:
        """Tiles from the top left that hold a valid token, row by row."""
        height, width = self.scores.shape
        tiles = (
            self._build((top, left, min(top + side, height), min(left + side, width)), 1, False)
            for top in range(0, height, side)
            for left in range(0, width, side)
        )
        return [tile for tile in tiles if tile is not None]


@dataclass(frozen=True, eq=False)
class OracleAttention:
    """Attention with the tree of each query, in float64."""

    output: np.ndarray  # (B, H, Q, e)
    error: np.ndarray  # (B, H, Q), E over all keys; the prefix is exact
    trees: list[OracleTree]  # of all batches, heads and queries


def tree_attention(
    q, k, v, shape, rule, *, prefix=0, tau=1.0, scale=None, valid=None, max_depth=None
) -> OracleAttention:
    """The softmax over exact scores of the prefix and mean scores of leaves, query by query."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    scores = (q.shape[-1] ** -0.5 if scale is None else scale) * (q @ k.swapaxes(-1, -2))
    masks = np.ones((len(q), *shape), bool)
    if valid is not None:
        masks &= np.asarray(valid).reshape(-1, *shape)
    coins: Sequence[list[bool] | None] = [None] * scores[..., 0].size
    if isinstance(rule, rules.RandomQuadrants):
        coins = rule.draw(len(coins), len(quadrants((0, 0, *shape)))).tolist()
    output, error = np.empty((*scores.shape[:3], v.shape[-1])), np.empty(scores.shape[:3])
    trees = []
    for index, coin in zip(np.ndindex(error.shape), coins, strict=True):
        outside, inside = scores[index][:prefix], scores[index][prefix:].reshape(shape)
        mask = masks[index[0]]
        tree = Oracle(inside, mask, tau, max_depth).tree(rule, coin)
        logits = np.concatenate([outside, tree.reconstruct()[mask]]) / tau
        weights = np.exp(logits - logits.max())
        values = v[index[:2]]
        values = np.concatenate([values[:prefix], values[prefix:][mask.ravel()]])
        output[index], error[index] = weights @ values / weights.sum(), tree.error(outside)
        trees.append(tree)
    return OracleAttention(output, error, trees)


def leaf_budget(rule: rules.Optimal, tokens: int) -> int:
    """The number of leaves that a rule allows."""
    if isinstance(rule.leaves, float):
        return max(1, math.floor(rule.leaves * tokens * (1 + 1e-9)))
    return rule.leaves


def _always(split: bool) -> Verdict:
    return (math.inf if split else -math.inf), 0.0
