"""Methods by name: what each one estimates of the free energy of a batch of grids, and at what size."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bmfa.checks import check_integer, check_scores
from bmfa.grid import Grid
from bmfa.trees.build import screen
from bmfa.trees.layout import Layout, quadtree_layout
from bmfa.trees.pyramid import Counts, ScorePyramid
from bmfa.trees.rules import Context, parse
from bmfa.trees.tree import Tree

# The paper's six, then what goes past them.
DEFAULT_METHODS = (
    "sparge-mean",
    "mean-variance",
    "fixed-depth:1",
    "fixed-depth:2",
    "gamma:0.005",
    "edge-aware",
    "gamma-h2:0.005",
    "exact-gap:0.005",
    "certified:0.005",
    "mass:0.002",
    "optimal:0.001",
)
# On instances, the rules past the paper at about the leaves of gamma:0.005, so that gaps compare.
COMPARABLE_METHODS = (
    "gamma-h2:0.2",
    "exact-gap:1.2",
    "certified:1.3",
    "mass:0.0004",
    "optimal:0.005",
)
# Grids at once: their pyramid stays near the processor.
CHUNK = 2048
SUMMARIES = ("sparge-mean", "mean-variance", "edge-aware")


@dataclass(frozen=True)
class Outcome:
    """Gap F - estimate of every grid (mean-variance may overestimate), and its leaves in percent."""

    gap: Tensor  # (B,)
    leaf_percent: Tensor  # (B,)
    root_split: Tensor | None = None  # (B,) whether the tree is more than its root
    tree: Tree | None = None  # of one chunk alone


def check_method(name: str, seed: int = 0) -> str:
    """The name, if it is one of the summaries or of a rule."""
    if name not in SUMMARIES:
        try:
            parse(name, seed)
        except ValueError as error:
            raise ValueError(f"{error}; or one of {', '.join(SUMMARIES)}") from None
    return name


def apply(
    method: str,
    scores: Tensor,
    grid: Grid,
    *,
    tau: float = 1.0,
    max_depth: int | None = None,
    seed: int = 0,
) -> Outcome:
    """Run one method on (B, N) scores."""
    return apply_all([method], scores, grid, tau=tau, max_depth=max_depth, seed=seed)[0]


def apply_all(
    methods: Sequence[str],
    scores: Tensor,
    grid: Grid,
    *,
    tau: float = 1.0,
    max_depth: int | None = None,
    seed: int = 0,
) -> list[Outcome]:
    """Run many methods on the same (B, N) scores, chunk by chunk over one pyramid for all.

    sparge-mean summarises the grid by its mean, mean-variance by mean + variance / (2 tau), signed,
    and edge-aware keeps every position and is exact: the paper's full-retention oracle.
    """
    check_scores(scores, grid.size)
    if max_depth is not None:
        check_integer("max_depth", max_depth, low=0)
    for method in methods:
        if check_method(method, seed) not in SUMMARIES:
            parse(method, seed).check(grid, grid.size)
    parts: list[list[Outcome]] = [[] for _ in methods]
    pooled = {m for m in methods if m not in SUMMARIES and parse(m, seed).together}
    for start in range(0, len(scores), CHUNK):
        chunk = _Chunk(scores[start : start + CHUNK], grid, tau, max_depth, seed)
        for method, outcomes in zip(methods, parts, strict=True):
            if method not in pooled:
                outcomes.append(chunk.apply(method))
    for method, outcomes in zip(methods, parts, strict=True):
        if method in pooled:
            tree = screen(scores, grid, parse(method, seed), tau=tau, max_depth=max_depth)
            outcomes.append(Outcome(tree.error(scores), 100 * tree.leaf_ratio, _root_split(tree)))
    return [_joined(outcomes) for outcomes in parts]


class _Chunk:
    """Some grids, and the pyramids of their scores that all methods read."""

    def __init__(
        self, scores: Tensor, grid: Grid, tau: float, max_depth: int | None, seed: int
    ) -> None:
        self.scores, self.grid, self.tau = scores, grid, tau
        self.max_depth, self.seed = max_depth, seed
        self.pyramids: dict[Layout, ScorePyramid] = {}

    def pyramid(self, layout: Layout) -> ScorePyramid:
        if layout not in self.pyramids:
            counts = Counts.of(layout, self.scores.dtype)
            self.pyramids[layout] = ScorePyramid(layout, counts, self.tau, self.scores.T, None)
        return self.pyramids[layout]

    def apply(self, method: str) -> Outcome:
        whole = self.scores.new_full((len(self.scores),), 100.0)
        if method == "edge-aware":
            return Outcome(torch.zeros_like(whole), whole)
        if method == "sparge-mean":
            return self.tree("global-mean")
        if method == "mean-variance":
            mean = self.tree("global-mean")
            variance = self.pyramid(quadtree_layout(self.grid)).variances()[0].squeeze(0)
            return Outcome(mean.gap - variance / (2 * self.tau), mean.leaf_percent)
        return self.tree(method)

    def tree(self, name: str) -> Outcome:
        rule = parse(name, self.seed)
        layout = rule.layout(self.grid)
        pyramid = self.pyramid(layout)
        context = Context(layout, pyramid.counts, self.tau, len(self.scores), self.max_depth)
        tree = Tree.decided(rule.screen(pyramid, context), context, str(rule))
        return Outcome(tree.error_on(pyramid), 100 * tree.leaf_ratio, _root_split(tree), tree)


def _root_split(tree: Tree) -> Tensor:
    return tree.split[0] if len(tree.split) else tree.split.any(0)


def _joined(outcomes: list[Outcome]) -> Outcome:
    if len(outcomes) == 1:
        return outcomes[0]
    splits = [outcome.root_split for outcome in outcomes]
    return Outcome(
        torch.cat([outcome.gap for outcome in outcomes]),
        torch.cat([outcome.leaf_percent for outcome in outcomes]),
        None if splits[0] is None else torch.cat([split for split in splits if split is not None]),
    )
