"""The synthetic stress test: a minority of high scores on a 16x16 grid, in several placements."""

import math
from collections.abc import Sequence
from itertools import product

import numpy as np
import torch
from torch import Tensor

from bmfa import energy
from bmfa.checks import check_integer
from bmfa.evidence.methods import DEFAULT_METHODS
from bmfa.evidence.runner import Progress
from bmfa.evidence.score_methods import Estimate, check_method, estimate, estimate_all
from bmfa.grid import Grid
from bmfa.quantiles import quantile
from bmfa.records import Record, Row, environment

SIDE = 16
GRID = Grid(SIDE, SIDE)
CELLS = (1, 2, 4, 8, 16, 32, 64)
ADVANTAGES = tuple(step / 10 for step in range(91))
PLACEMENTS = ("corner", "shifted-1-1", "shifted-4-4", "centred", "scattered")
SCATTER_SEEDS = 200
CURVE_CELLS = (4, 1)
GALLERY_MINORITY = 4, 6.0  # tokens, and their score above the majority
GALLERY_METHODS = ("block-mean", "gamma:0.005", "optimal:0.001")


def corner_mask(cells: int) -> np.ndarray:
    """Return the largest square in the top left corner, then the first free cells in raster order."""
    mask = np.zeros((SIDE, SIDE), dtype=bool)
    square = math.isqrt(cells)
    mask[:square, :square] = True
    mask.ravel()[np.flatnonzero(~mask)[: cells - square * square]] = True
    return mask


def centred_mask(cells: int) -> np.ndarray:
    """Return a centred rectangle, of which every child of the root holds the same part."""
    mask = np.zeros((SIDE, SIDE), dtype=bool)
    height = 2 ** (int(math.log2(cells)) // 2)
    width = cells // height
    top, left = SIDE // 2 - height // 2, SIDE // 2 - width // 2
    mask[top : top + height, left : left + width] = True
    return mask


def masks(placement: str, cells: int, seed: int = 0, seeds: int = SCATTER_SEEDS) -> np.ndarray:
    """Return (m, 16, 16) masks of the minority: one, or `seeds` for `scattered`."""
    if placement == "corner":
        return corner_mask(cells)[None]
    if placement == "centred":
        return centred_mask(cells)[None]
    if placement.startswith("shifted-"):
        down, right = map(int, placement.split("-")[1:])
        return np.roll(corner_mask(cells), (down, right), axis=(0, 1))[None]
    if placement == "scattered":
        order = np.stack(
            [np.random.default_rng([seed, draw]).permutation(SIDE * SIDE) for draw in range(seeds)]
        )
        return (order < cells).reshape(seeds, SIDE, SIDE)
    raise ValueError(f"placement {placement!r} is unknown; pass one of {', '.join(PLACEMENTS)}")


def settings() -> list[tuple[int, float]]:
    """Return the pairs (cells, advantage) whose minority holds at least half of the Gibbs mass."""
    return [
        (cells, advantage)
        for cells in CELLS
        for advantage in ADVANTAGES
        if float(energy.minority_mass(cells / GRID.size, advantage)) >= 0.5
    ]


def score_grids(placement: str, seed: int = 0, seeds: int = SCATTER_SEEDS) -> Tensor:
    """Return (count, 256) float64 scores: 0 on the majority, the advantage on the minority."""
    drawn = {cells: masks(placement, cells, seed, seeds) for cells in CELLS}
    fields = [advantage * drawn[cells] for cells, advantage in settings()]
    return torch.from_numpy(np.concatenate(fields).reshape(-1, GRID.size))


def run(
    methods: Sequence[str] = DEFAULT_METHODS,
    placements: Sequence[str] = PLACEMENTS,
    *,
    max_depth: int | None = 4,
    seed: int = 0,
    scatter_seeds: int = SCATTER_SEEDS,
    device: str = "cpu",
    progress: Progress | None = None,
) -> Record:
    """Apply every method to every placement of the minority.

    Args:
        methods: Names of summaries and rules.
        placements: Names of `PLACEMENTS`.
        max_depth: Depth limit of the trees; None splits down to single tokens.
        seed: Seed of scattered minorities and random rules.
        scatter_seeds: Number of scattered minorities for each setting.
        device: Device of the computation.
        progress: Called with the rows done and their number.

    Returns:
        A record of one row for each placement and method: mean, P95 and range of the gap F minus
        estimate, and leaves in percent.

    Raises:
        ValueError: If a method or a placement is unknown.

    Example:
        >>> record = run(["block-mean"], ["corner"])
        >>> record.rows[0]["count"], round(record.rows[0]["mean_gap"], 3)
        (396, 2.582)
    """
    check_integer("scatter_seeds", scatter_seeds, low=1)
    for method in methods:
        check_method(method, seed)
    rows: list[Row] = []
    for placement in placements:
        scores = score_grids(placement, seed, scatter_seeds).to(device)
        estimates = estimate_all(methods, scores, GRID, max_depth=max_depth, seed=seed)
        for method, found in zip(methods, estimates, strict=True):
            rows.append({"method": method, "placement": placement, **_summary(found)})
        if progress is not None:
            progress(len(rows), len(placements) * len(methods))
    return Record(
        "synthetic",
        {
            "grid": [SIDE, SIDE],
            "tau": 1.0,
            "max_depth": max_depth,
            "settings": len(settings()),
            "scatter_seeds": scatter_seeds,
            "seed": seed,
            "mean_variance": "signed: a negative gap is an overestimate",
        },
        rows,
        environment(device),
    )


def _summary(found: Estimate) -> Row:
    gap = found.gap
    return {
        "count": len(gap),
        "mean_gap": float(gap.mean()),
        "p95_gap": float(quantile(gap, 0.95)),
        "min_gap": float(gap.min()),
        "max_gap": float(gap.max()),
        "leaf_percent": float(found.leaf_percent.mean()),
    }


def failure_curve(methods: Sequence[str] = DEFAULT_METHODS, seed: int = 0) -> Record:
    """Sweep the advantage of a minority in the corner through the critical point.

    Args:
        methods: Names of summaries and rules.
        seed: Seed of random rules.

    Returns:
        A record of one row for each size, method and advantage.

    Example:
        >>> record = failure_curve(["block-mean"])
        >>> record.rows[0]["delta"], record.rows[0]["gap"]
        (0.0, 0.0)
    """
    rows: list[Row] = []
    for count in CURVE_CELLS:
        advantage = torch.tensor(ADVANTAGES, dtype=torch.float64)
        scores = advantage[:, None] * torch.from_numpy(corner_mask(count).ravel())
        mass = energy.minority_mass(count / GRID.size, advantage)
        for method in methods:
            found = estimate(method, scores, GRID, max_depth=4, seed=seed)
            columns = zip(advantage, mass, found.gap, found.leaf_percent, strict=True)
            names = ("delta", "minority_mass", "gap", "leaf_percent")
            for values in columns:
                row = dict(zip(names, map(float, values), strict=True))
                rows.append({"method": method, "cells": count, **row})
    return Record("failure-curve", {"grid": [SIDE, SIDE], "tau": 1.0, "placement": "corner"}, rows)


def gallery(seed: int = 0) -> Record:
    """Record scores and trees of one minority in the corner and in the centre, to draw them.

    Args:
        seed: Seed of random rules.

    Returns:
        A record of one row for each placement and method.

    Example:
        >>> [row["title"] for row in gallery().rows][:2]
        ['corner, block-mean', 'corner, gamma:0.005']
    """
    cells, advantage = GALLERY_MINORITY
    rows: list[Row] = []
    for placement, method in product(("corner", "centred"), GALLERY_METHODS):
        scores = torch.from_numpy(advantage * masks(placement, cells).reshape(1, -1))
        found = estimate(method, scores, GRID, max_depth=4, seed=seed)
        whole = [[0, 0, SIDE, SIDE]]
        rows.append(
            {
                "title": f"{placement}, {method}",
                "method": method,
                "placement": placement,
                "height": SIDE,
                "width": SIDE,
                "scores": scores[0].tolist(),
                "boxes": whole if found.tree is None else found.tree.leaf_boxes[0].tolist(),
                "gap": float(found.gap[0]),
                "leaf_percent": float(found.leaf_percent[0]),
                "minority_area_percent": 100 * cells / GRID.size,
                "gibbs_mass_percent": 100
                * float(energy.minority_mass(cells / GRID.size, advantage)),
            }
        )
    return Record("gallery", {"cells": cells, "advantage": advantage, "tau": 1.0}, rows)
