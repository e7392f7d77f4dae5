"""Methods on score grids: the gap between the free energy and what a method estimates of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from bmfa.checks import check_integer, check_scores
from bmfa.evidence.methods import is_kind, names
from bmfa.grid import Grid
from bmfa.records import Row
from bmfa.trees.build import screen
from bmfa.trees.errors import tree_error
from bmfa.trees.layout import Layout
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
        root_split: (B,) bool, True if the tree has more than its root.
        tree: The trees, if all grids fit into one chunk.
    """

    gap: Tensor
    leaf_percent: Tensor
    root_split: Tensor
    tree: Tree | None = None


def tree_columns(tree: Tree, scores: Tensor) -> Row:
    """Return the columns of a row that describe one tree: leaves, E and their number."""
    return {
        "boxes": tree.leaf_boxes.tolist(),
        "error": float(tree.error(scores)),
        "leaves": int(tree.leaf_count),
        "leaf_percent": 100 * float(tree.leaf_ratio),
    }


def check_method(name: str, seed: int = 0) -> str:
    """Return the name if it is a summary or a rule; raise ValueError otherwise."""
    if not is_kind(name, "summary") or ":" in name:
        try:
            parse(name, seed)
        except ValueError as error:
            raise ValueError(f"{error}; or one of {', '.join(names(['summary']))}") from None
    return name


def estimate(method: str, scores: Tensor, grid: Grid, **options: Any) -> Estimate:
    """Apply one method to a batch of score grids; see `estimate_all`."""
    return estimate_all([method], scores, grid, **options)[0]


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
        summary = is_kind(check_method(method, seed), "summary")
        rules[method] = parse("global-mean" if summary else method, seed)
        rules[method].check(grid, grid.size)
    parts: dict[str, list[Estimate]] = {method: [] for method in methods}
    for chunk in torch.split(scores, CHUNK):
        pyramid_of = cache(partial(_pyramid, chunk, tau))
        for method, rule in rules.items():
            if not rule.needs_all_trees:
                pyramid = pyramid_of(rule.layout(grid))
                context = Context(pyramid.layout, pyramid.counts, tau, len(chunk), max_depth)
                options: dict[str, Any] = {"tau": tau, "rule": str(rule), "max_depth": max_depth}
                options |= vars(rule.screen(pyramid, context))
                tree = Tree(pyramid.layout, shape=(len(chunk),), **options)
                found = _from_tree(tree, tree_error(tree, pyramid))
                parts[method].append(_summary(method, found, pyramid))
    for method, rule in rules.items():
        if rule.needs_all_trees:
            tree = screen(scores, grid, rule, tau=tau, max_depth=max_depth)
            parts[method].append(_from_tree(tree, tree.error(scores)))
    return [_concatenate(parts[method]) for method in methods]


def _pyramid(scores: Tensor, tau: float, layout: Layout) -> ScorePyramid:
    return ScorePyramid(layout, Counts.from_mask(layout, scores.dtype), tau, scores.T, None)


def _from_tree(tree: Tree, error: Tensor) -> Estimate:
    split = tree.split[0] if len(tree.split) else tree.split.any(0)
    return Estimate(error, 100 * tree.leaf_ratio, split, tree)


def _summary(method: str, found: Estimate, pyramid: ScorePyramid) -> Estimate:
    """Return the estimate of a method that is not that of its tree, or else the given one."""
    if method == "edge-aware":
        exact = torch.zeros_like(found.gap)
        return Estimate(exact, torch.full_like(found.leaf_percent, 100.0), found.root_split)
    if method == "mean-variance":
        variance = pyramid.variances()[0].squeeze(0)
        gap = found.gap - variance / (2 * pyramid.tau)
        return Estimate(gap, found.leaf_percent, found.root_split)
    return found


def _concatenate(estimates: list[Estimate]) -> Estimate:
    if len(estimates) == 1:
        return estimates[0]
    parts = ((one.gap, one.leaf_percent, one.root_split) for one in estimates)
    gap, leaf_percent, root_split = map(torch.cat, zip(*parts, strict=True))
    return Estimate(gap, leaf_percent, root_split)
