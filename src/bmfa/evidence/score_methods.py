"""Methods on score grids: the gap between the free energy and what a method estimates of it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bmfa.checks import check_integer, check_scores
from bmfa.evidence.methods import is_kind, names
from bmfa.grid import Grid
from bmfa.trees.build import screen
from bmfa.trees.errors import tree_error
from bmfa.trees.layout import Layout, quadtree_layout
from bmfa.trees.pyramid import Counts, ScorePyramid
from bmfa.trees.rules import Rule, parse
from bmfa.trees.rules.base import Context
from bmfa.trees.tree import Tree

# Grids screened at once, so that their pyramid fits into the processor's cache.
CHUNK = 2048


@dataclass(frozen=True)
class Estimate:
    """Gaps and leaves of one method on a batch of grids.

    Args:
        gap: (B,) F minus the estimate; negative where `mean-variance` overestimates.
        leaf_percent: (B,) leaves in percent of the tokens.
        root_split: (B,) bool, True if the tree has more than its root; None without a tree.
        tree: The trees, if all grids fit into one chunk.
    """

    gap: Tensor
    leaf_percent: Tensor
    root_split: Tensor | None = None
    tree: Tree | None = None


def check_method(name: str, seed: int = 0) -> str:
    """Return the name if it is a summary or a rule; raise ValueError otherwise."""
    if not is_kind(name, "summary") or ":" in name:
        try:
            parse(name, seed)
        except ValueError as error:
            raise ValueError(f"{error}; or one of {', '.join(names(['summary']))}") from None
    return name


def estimate(
    method: str,
    scores: Tensor,
    grid: Grid,
    *,
    tau: float = 1.0,
    max_depth: int | None = None,
    seed: int = 0,
) -> Estimate:
    """Apply one method to a batch of score grids; see `estimate_all`."""
    return estimate_all([method], scores, grid, tau=tau, max_depth=max_depth, seed=seed)[0]


def estimate_all(
    methods: Sequence[str],
    scores: Tensor,
    grid: Grid,
    *,
    tau: float = 1.0,
    max_depth: int | None = None,
    seed: int = 0,
) -> list[Estimate]:
    """Apply several methods to the same score grids, which share one pyramid of block statistics.

    `block-mean` estimates F by the mean, `mean-variance` by mean + variance / (2 tau), and
    `edge-aware` keeps every token and is exact: the paper's full-retention oracle. Every other
    method is a rule.

    Args:
        methods: Names of summaries and rules.
        scores: (B, N) scores, N = H * W tokens in raster order.
        grid: The H x W grid.
        tau: Temperature.
        max_depth: Deepest level of the trees; None splits down to single tokens.
        seed: Seed of random rules.

    Returns:
        One estimate for each method, in their order.

    Raises:
        ValueError: If a method is unknown or does not support the grid.

    Example:
        >>> scores = torch.tensor([[4.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
        >>> mean, exact = estimate_all(["block-mean", "edge-aware"], scores, Grid(2, 2))
        >>> round(float(mean.gap), 4), float(exact.gap)
        (1.6672, 0.0)
    """
    check_scores(scores, grid.size)
    if max_depth is not None:
        check_integer("max_depth", max_depth, low=0)
    rules: dict[str, Rule] = {}
    for method in methods:
        if not is_kind(check_method(method, seed), "summary"):
            rules[method] = parse(method, seed)
            rules[method].check(grid, grid.size)
    parts: dict[str, list[Estimate]] = {method: [] for method in methods}
    pooled = [method for method, rule in rules.items() if rule.needs_all_trees]
    for start in range(0, len(scores), CHUNK):
        chunk = _Chunk(scores[start : start + CHUNK], grid, tau, max_depth)
        for method in parts:
            if method not in pooled:
                parts[method].append(chunk.estimate(method, rules.get(method)))
    for method in pooled:
        tree = screen(scores, grid, rules[method], tau=tau, max_depth=max_depth)
        estimates = Estimate(tree.error(scores), 100 * tree.leaf_ratio, _root_split(tree))
        parts[method].append(estimates)
    return [_concatenate(parts[method]) for method in methods]


class _Chunk:
    """Some of the grids, and the pyramids of their scores that all methods read."""

    def __init__(self, scores: Tensor, grid: Grid, tau: float, max_depth: int | None) -> None:
        self.scores, self.grid, self.tau, self.max_depth = scores, grid, tau, max_depth
        self.pyramids: dict[Layout, ScorePyramid] = {}

    def estimate(self, method: str, rule: Rule | None) -> Estimate:
        if rule is not None:
            return self._estimate_by_tree(rule)
        if method == "edge-aware":
            percent = self.scores.new_full((len(self.scores),), 100.0)
            return Estimate(torch.zeros_like(percent), percent)
        mean = self._estimate_by_tree(parse("global-mean"))
        if method == "block-mean":
            return mean
        variance = self._pyramid(quadtree_layout(self.grid)).variances()[0].squeeze(0)
        return Estimate(mean.gap - variance / (2 * self.tau), mean.leaf_percent)

    def _estimate_by_tree(self, rule: Rule) -> Estimate:
        layout = rule.layout(self.grid)
        pyramid = self._pyramid(layout)
        context = Context(layout, pyramid.counts, self.tau, len(self.scores), self.max_depth)
        decision = vars(rule.screen(pyramid, context))
        shape, name = (context.trees,), str(rule)
        tree = Tree(
            layout, shape=shape, tau=self.tau, rule=name, max_depth=self.max_depth, **decision
        )
        return Estimate(tree_error(tree, pyramid), 100 * tree.leaf_ratio, _root_split(tree), tree)

    def _pyramid(self, layout: Layout) -> ScorePyramid:
        if layout not in self.pyramids:
            counts = Counts.from_mask(layout, self.scores.dtype)
            self.pyramids[layout] = ScorePyramid(layout, counts, self.tau, self.scores.T, None)
        return self.pyramids[layout]


def _root_split(tree: Tree) -> Tensor:
    return tree.split[0] if len(tree.split) else tree.split.any(0)


def _concatenate(estimates: list[Estimate]) -> Estimate:
    if len(estimates) == 1:
        return estimates[0]
    splits = [one.root_split for one in estimates if one.root_split is not None]
    return Estimate(
        torch.cat([one.gap for one in estimates]),
        torch.cat([one.leaf_percent for one in estimates]),
        torch.cat(splits) if splits else None,
    )
