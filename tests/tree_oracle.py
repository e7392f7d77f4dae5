"""Trees of one masked grid by plain recursion in float64: an oracle that shares no code with bmfa.

A node holds the scores of its valid tokens, and nothing else is stored: means are exact fractions,
and every quantity is computed from the tokens by its definition.
"""

import math
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np

from bmfa import rules

# Ratios this close, relative to their size, are equal but for rounding.
SAME = 1e-9
Box = tuple[int, int, int, int]  # top, left, bottom, right; half open


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


def gap(values: list[Fraction], weights: list[int], tau: float) -> float:
    """tau log sum_i w_i exp((x_i - x) / tau) of weighted values with mean x; 0 if all are equal."""
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


def build(scores: np.ndarray, valid: np.ndarray, box: Box, depth: int = 0) -> Node | None:
    """The node of a block with all its descendants; None where no token is valid."""
    top, left, bottom, right = box
    inside = scores[top:bottom, left:right][valid[top:bottom, left:right]]
    if inside.size == 0:
        return None
    node = Node(box, depth, [Fraction(float(score)) for score in inside])
    if node.count > 1:
        parts = (build(scores, valid, part, depth + 1) for part in quadrants(box))
        node.children = [part for part in parts if part is not None]
    return node


class Oracle:
    """One grid of scores (H, W) under a mask, and the tree of any rule on it."""

    def __init__(self, scores: np.ndarray, valid: np.ndarray, tau: float, max_depth: int | None):
        self.tau, self.max_depth = tau, max_depth
        self.scores, self.valid = scores, valid
        root = build(scores, valid, (0, 0, *scores.shape))
        assert root is not None
        self.root = root
        self.nodes = root.all()
        self.blocks = [node for node in self.nodes if node.count > 1]
        self.peak = max(root.scores)
        terms = (math.exp(float(score - self.peak) / tau) for score in root.scores)
        self.log_z = math.log(math.fsum(terms))
        # log of n exp(M / tau), relative to exp(peak / tau)
        self.log_weight = {
            node: math.log(node.count) + float(node.mean - self.peak) / tau for node in self.nodes
        }
        self.gaps = {node: gap(node.scores, [1] * node.count, tau) for node in self.nodes}
        self.gammas = {node: self.gamma(node, 1) for node in self.blocks}

    def gamma(self, node: Node, lookahead: int) -> float:
        parts = node.below(lookahead)
        return gap([part.mean for part in parts], [part.count for part in parts], self.tau)

    def log_gain(self, node: Node) -> float:
        """log of the mass that a split recovers, n exp(M / tau) (exp(Gamma / tau) - 1)."""
        gamma = self.gammas[node] / self.tau
        if gamma == 0.0:
            return -math.inf
        return self.log_weight[node] + gamma + math.log(-math.expm1(-gamma))

    def gain(self, node: Node) -> float:
        return math.exp(self.log_gain(node) - self.log_z)

    def judged(self, rule: rules.Rule) -> dict[Node, tuple[float, float]]:
        """The score of every block that the rule may ask about, and the threshold it must exceed."""
        if isinstance(rule, rules.Gamma):
            value = {n: self.gamma(n, rule.lookahead) for n in self.blocks}
        elif isinstance(rule, rules.ExactGap):
            value = self.gaps
        elif isinstance(rule, rules.Certified):
            value = {n: self.upper(n) for n in self.blocks}
        elif isinstance(rule, rules.Mass):
            if rule.coarse:
                return self.coarse_mass(rule.epsilon)
            value = {n: self.gain(n) for n in self.blocks}
        else:
            raise TypeError(f"{rule!r} is judged by another function of the oracle")
        return {node: (value[node], rule.epsilon) for node in self.blocks}

    def upper(self, node: Node) -> float:
        """Bennett's two-point law: mean 0, maximum b and variance v of the block."""
        apart = [score - node.mean for score in node.scores]
        high = max(apart)
        variance = sum(x * x for x in apart) / node.count
        if variance == 0:
            return 0.0
        low = -variance / high
        return gap([high, low], [float(-low), float(high)], self.tau)

    def lower(self, node: Node) -> float:
        """The mirrored law: mean 0, minimum a and variance v of the block."""
        apart = [score - node.mean for score in node.scores]
        low = min(apart)
        variance = sum(x * x for x in apart) / node.count
        if variance == 0:
            return 0.0
        high = variance / -low
        return gap([high, low], [float(-low), float(high)], self.tau)

    def label(self, leaf: Node, epsilon: float) -> tuple[str, float]:
        """The label of a leaf of a certified tree, and how near to another one it is."""
        if leaf.count == 1:
            return "safe", math.inf
        upper, lower = self.upper(leaf), max(self.gammas[leaf], self.lower(leaf))
        label = "safe" if upper <= epsilon else "must-refine" if lower > epsilon else "undecided"
        return label, min(_distance(upper, epsilon), _distance(lower, epsilon))

    def coarse_mass(self, epsilon: float) -> dict[Node, tuple[float, float]]:
        """Shares of Z~: the leaves so far, and the children of all nodes of the level."""
        judged: dict[Node, tuple[float, float]] = {}
        settled: list[float] = []
        level = [self.root]
        while level:
            open_ = [node for node in level if node.children]
            settled += [self.log_weight[node] for node in level if not node.children]
            finer = [self.log_weight[child] for node in open_ for child in node.children]
            top = max(settled + finer)
            log_z = top + math.log(math.fsum(math.exp(x - top) for x in settled + finer))
            level = []
            for node in open_:
                judged[node] = (math.exp(self.log_gain(node) - log_z), epsilon)
                if judged[node][0] > epsilon:
                    level += node.children
                else:
                    settled.append(self.log_weight[node])
        return judged

    def quadrant_scores(
        self, rule: rules.Rule, coins: list[bool] | None = None
    ) -> dict[Box, float]:
        """What decides whether a child of the root is kept, by its box."""
        scores = {}
        for position, box in enumerate(quadrants(self.root.box)):
            for node in self.root.children:
                if node.box == box:
                    if coins is not None:
                        scores[box] = math.inf if coins[position] else -math.inf
                    elif isinstance(rule, rules.Variance):
                        squares = sum((s - node.mean) ** 2 for s in node.scores)
                        scores[box] = float(squares / node.count) / (2 * self.tau)
                    else:
                        scores[box] = self.gaps[node]
        return scores

    def splits(
        self, rule: rules.Rule, coins: list[bool] | None = None
    ) -> dict[Node, tuple[bool, float]]:
        """Every block that the tree reaches: whether it is split, and how near the threshold lies.

        The distance is relative to the larger of score and threshold, infinite where no number
        decides.
        """
        if isinstance(rule, rules.FixedDepth):
            return self._walk(lambda node: (node.depth < rule.depth, math.inf))
        if isinstance(rule, rules.QuadrantGap | rules.RandomQuadrants):
            scores = self.quadrant_scores(rule, coins)
            epsilon = getattr(rule, "epsilon", 0.0)

            def kept(node: Node) -> tuple[bool, float]:
                if node.depth != 1:
                    return True, math.inf
                return scores[node.box] > epsilon, _distance(scores[node.box], epsilon)

            return self._walk(kept)
        if isinstance(rule, rules.Optimal):
            return self.optimal(rule)
        judged = self.judged(rule)
        return self._walk(lambda n: (judged[n][0] > judged[n][1], _distance(*judged[n])))

    def _walk(self, decide) -> dict[Node, tuple[bool, float]]:
        reached, found = [self.root], {}
        while reached:
            node = reached.pop()
            if node.count == 1:
                continue
            split, distance = decide(node)
            if split and node.depth == self.max_depth:
                split = False
            found[node] = (split, distance)
            reached += node.children if split else []
        return found

    def optimal(self, rule: rules.Optimal) -> dict[Node, tuple[bool, float]]:
        """The tree on the convex hull of (leaves, mass) that meets the penalty or the budget.

        Every node has a path of steps (mass gained, leaves added) from one leaf to its full subtree,
        in decreasing order of mass per leaf. A node's own split comes first, with as many of its
        children's steps as raise its ratio; the rest of these follow in order.
        """
        members: dict[int, list[Node]] = {}
        steps = [step for step in self._path(self.root, members) if step[0] > 0]
        if rule.penalty is not None:
            distance = min((_distance(s[0], rule.penalty) for s in steps), default=math.inf)
            made = self._made([s for s in steps if s[0] > rule.penalty], members)
            return self._walk(lambda node: (node in made, distance))
        # A tree of a budget is one of some penalty: steps of one ratio are made together.
        ends = [0, *(i for i in range(1, len(steps)) if steps[i][0] < steps[i - 1][0] * (1 - SAME))]
        trees = [self._made(steps[:end], members) for end in (*ends, len(steps))]
        if rule.leaves is not None:
            budget = self.budget(rule)
            chosen = max((tree for tree in trees if len(self.leaves(tree)) <= budget), key=len)
        else:
            met = [tree for tree in trees if self.error(tree) <= rule.error]
            chosen = min(met, key=len) if met else trees[-1]
        return self._walk(lambda node: (node in chosen, math.inf))

    def budget(self, rule: rules.Optimal) -> int:
        """The number of leaves that a rule allows."""
        if isinstance(rule.leaves, float):
            return max(1, math.floor(rule.leaves * self.root.count * (1 + 1e-9)))
        return rule.leaves

    def breaks_a_tie(self, rule: rules.Optimal, made: set[Node]) -> bool:
        """Whether a tree meets the budget of `rule` by some, not all, of several steps of one ratio."""
        members: dict[int, list[Node]] = {}
        steps = [step for step in self._path(self.root, members) if step[0] > 0]
        taken = [step for step in steps if made.issuperset(members[step[3]])]
        left = [step for step in steps if step not in taken]
        if self._made(taken, members) != made or not taken or not left:
            return False
        if min(s[0] for s in taken) < max(s[0] for s in left) * (1 - SAME):
            return False
        wanted = {node for node, (split, _) in self.optimal(rule).items() if split}
        if (
            rule.leaves is not None
        ):  # larger than without the part of the tie, and within the budget
            return made > wanted and len(self.leaves(made)) <= self.budget(rule)
        return made < wanted and self.error(made) <= rule.error

    def _made(self, taken, members: dict[int, list[Node]]) -> set[Node]:
        return {node for step in taken for node in members[step[3]]}

    def _path(self, node: Node, members: dict[int, list[Node]]):
        """Steps (mass per leaf, mass, leaves, key of the nodes that split), best first."""
        if node.count == 1:
            return []
        rest = sorted(step for child in node.children for step in self._path(child, members))
        mass, leaves, made = self.gain(node), len(node.children) - 1, [node]
        while rest and (leaves == 0 or rest[-1][0] * leaves > mass):
            _, more, added, key = rest.pop()
            mass, leaves, made = mass + more, leaves + added, made + members[key]
        if node.depth == self.max_depth or not leaves:
            return []
        members[id(node)] = made
        return [(mass / leaves, mass, leaves, id(node)), *reversed(rest)]

    def leaves(self, split: set[Node]) -> list[Node]:
        """The leaves of a tree, depth first."""

        def visit(node: Node) -> list[Node]:
            if node not in split:
                return [node]
            return [leaf for child in node.children for leaf in visit(child)]

        return visit(self.root)

    def error(self, split: set[Node]) -> float:
        """E = F - F~, from the leaves' gaps: every leaf's mass grows by exp(G / tau)."""
        leaves = self.leaves(split)
        if not any(self.gaps[leaf] for leaf in leaves):
            return 0.0
        coarse = [self.log_weight[leaf] for leaf in leaves]
        top = max(coarse)
        held = math.fsum(math.exp(x - top) for x in coarse)
        lost = math.fsum(
            math.exp(x + self.gaps[leaf] / self.tau - self.log_z)
            * -math.expm1(-self.gaps[leaf] / self.tau)
            for x, leaf in zip(coarse, leaves, strict=True)
        )
        if lost < 0.5:
            return -self.tau * math.log1p(-lost)
        return self.tau * (self.log_z - top - math.log(held))


def _distance(score: float, threshold: float) -> float:
    if math.isinf(score):
        return math.inf
    largest = max(score, threshold)
    return abs(score - threshold) / largest if largest > 0 else math.inf
