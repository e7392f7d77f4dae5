"""The synthetic stress test: a bright minority of k cells on a 16x16 grid, wherever it lies."""

import math
from collections.abc import Sequence

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
GALLERY_METHODS = ("sparge-mean", "gamma:0.005", "optimal:0.001")


def corner_mask(cells: int) -> np.ndarray:
    """The largest square in the top left corner, then the first free cells in raster order."""
    mask = np.zeros((SIDE, SIDE), dtype=bool)
    square = math.isqrt(cells)
    mask[:square, :square] = True
    mask.ravel()[np.flatnonzero(~mask)[: cells - square * square]] = True
    return mask


def centred_mask(cells: int) -> np.ndarray:
    """A rectangle about the middle, so that the root's four children share it alike."""
    mask = np.zeros((SIDE, SIDE), dtype=bool)
    height = 2 ** (int(math.log2(cells)) // 2)
    width = cells // height
    top, left = SIDE // 2 - height // 2, SIDE // 2 - width // 2
    mask[top : top + height, left : left + width] = True
    return mask


def masks(placement: str, cells: int, seed: int = 0, seeds: int = SCATTER_SEEDS) -> np.ndarray:
    """(m, 16, 16) the minority's cells: one mask, or one for each scatter."""
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
    """The (cells, advantage) whose minority holds at least half of the Gibbs mass."""
    return [
        (cells, advantage)
        for cells in CELLS
        for advantage in ADVANTAGES
        if float(energy.minority_mass(cells / GRID.size, advantage)) >= 0.5
    ]


def score_grids(placement: str, seed: int = 0, seeds: int = SCATTER_SEEDS) -> Tensor:
    """(count, 256) scores: 0 on the majority, the advantage on the minority."""
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
    """Every method on every placement: mean and P95 of the gap F - estimate, and leaves in percent."""
    check_integer("scatter_seeds", scatter_seeds, low=1)
    for method in methods:
        check_method(method, seed)
    rows: list[Row] = []
    for placement in placements:
        scores = score_grids(placement, seed, scatter_seeds).to(device)
        outcomes = estimate_all(methods, scores, GRID, max_depth=max_depth, seed=seed)
        for method, outcome in zip(methods, outcomes, strict=True):
            rows.append({"method": method, "placement": placement, **_summary(outcome)})
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


def _summary(outcome: Estimate) -> Row:
    gap = outcome.gap
    return {
        "count": len(gap),
        "mean_gap": float(gap.mean()),
        "p95_gap": float(quantile(gap, 0.95)),
        "min_gap": float(gap.min()),
        "max_gap": float(gap.max()),
        "leaf_percent": float(outcome.leaf_percent.mean()),
    }


def failure_curve(
    methods: Sequence[str] = DEFAULT_METHODS, cells: Sequence[int] = CURVE_CELLS, seed: int = 0
) -> Record:
    """The gap against the advantage at a fixed minority in the corner, through the critical point."""
    rows: list[Row] = []
    for count in cells:
        check_integer("cells", count, low=1, high=GRID.size - 1)
        advantage = torch.tensor(ADVANTAGES, dtype=torch.float64)
        scores = advantage[:, None] * torch.from_numpy(corner_mask(count).ravel())
        mass = energy.minority_mass(count / GRID.size, advantage)
        for method in methods:
            outcome = estimate(method, scores, GRID, max_depth=4, seed=seed)
            rows += [
                {
                    "method": method,
                    "cells": count,
                    "delta": float(advantage[i]),
                    "minority_mass": float(mass[i]),
                    "gap": float(outcome.gap[i]),
                    "leaf_percent": float(outcome.leaf_percent[i]),
                }
                for i in range(len(advantage))
            ]
    return Record("failure-curve", {"grid": [SIDE, SIDE], "tau": 1.0, "placement": "corner"}, rows)


def gallery(
    placements: Sequence[str] = ("corner", "centred"),
    methods: Sequence[str] = GALLERY_METHODS,
    *,
    cells: int = 4,
    advantage: float = 6.0,
    seed: int = 0,
) -> Record:
    """The same minority in several places under several methods: fields and trees to draw."""
    alpha = cells / GRID.size
    rows: list[Row] = []
    for placement in placements:
        scores = torch.from_numpy(advantage * masks(placement, cells, seed, 1).reshape(1, -1))
        for method in methods:
            outcome = estimate(method, scores, GRID, max_depth=4, seed=seed)
            boxes = (
                [[0, 0, SIDE, SIDE]]
                if outcome.tree is None
                else outcome.tree.leaf_boxes[0].tolist()
            )
            rows.append(
                {
                    "title": f"{placement}, {method}",
                    "method": method,
                    "placement": placement,
                    "height": SIDE,
                    "width": SIDE,
                    "scores": scores[0].tolist(),
                    "boxes": boxes,
                    "gap": float(outcome.gap[0]),
                    "leaf_percent": float(outcome.leaf_percent[0]),
                    "minority_area_percent": 100 * alpha,
                    "gibbs_mass_percent": 100 * float(energy.minority_mass(alpha, advantage)),
                }
            )
    return Record("gallery", {"cells": cells, "advantage": advantage, "tau": 1.0}, rows)
