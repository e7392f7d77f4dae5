"""`bmfa bench trees`: time of the vectorised trees against Algorithm 1 in a queue, and softmax."""

import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as functional
from torch import Tensor

from bmfa import timing
from bmfa.checks import check_integer
from bmfa.grid import Grid
from bmfa.records import Record, Row, environment
from bmfa.trees.build import screen
from bmfa.trees.rules import Rule, parse

TREE_METHODS = ("gamma:0.005", "optimal:0.001", "exact-gap:0.005", "mass:0.002", "certified:0.005")
SCORE_METHODS = ("gamma:0.05", "optimal:0.002", "quadrant-gap:0.8")
GRIDS = 36_000
ORACLE_GRIDS = 200
BATCH_SIZE = 64
HEADS, QUERIES = 3, 197  # of DeiT-Tiny at 224 px


def score_fields(count: int, grid: Grid, seed: int = 0) -> Tensor:
    """Return (count, N) float32 scores: smooth fields with noise and one bright token each."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randn(1, count, 5, 5, generator=generator)
    smooth = functional.interpolate(coarse, (grid.height, grid.width), mode="bilinear")
    fields = smooth.view(count, grid.size) + 0.1 * torch.randn(
        count, grid.size, generator=generator
    )
    spot = torch.randint(grid.size, (count, 1), generator=generator)
    return fields.scatter_add_(1, spot, 5 * torch.rand(count, 1, generator=generator))


def run(
    methods: Sequence[str] = TREE_METHODS,
    *,
    grids: int = GRIDS,
    batch_size: int = BATCH_SIZE,
    repeats: int = 7,
    seed: int = 0,
    device: str = "cpu",
) -> Record:
    """Time trees on 16x16 grids against a queue on one core, and screening against softmax.

    Args:
        methods: Names of rules.
        grids: Number of 16x16 grids.
        batch_size: Images of the comparison with softmax, each with the scores of DeiT-Tiny.
        repeats: Timings of which the median counts.
        seed: Seed of the scores.
        device: Device of the vectorised trees.

    Returns:
        A record of rows `trees` (speedup over the oracle) and `softmax` (multiples of softmax).

    Raises:
        ValueError: If a number is below 1 or a method is unknown.

    Example:
        >>> record = run(["gamma:0.005"], grids=2, batch_size=1, repeats=1)
        >>> record.rows[0]["method"]
        'gamma:0.005 (oracle)'
    """
    check_integer("grids", grids, low=1)
    check_integer("batch_size", batch_size, low=1)
    check_integer("repeats", repeats, low=1)
    on_device = torch.device(device)
    rows = [
        *_against_oracle(methods, grids, repeats, seed, on_device),
        *_against_softmax(batch_size, repeats, seed, on_device),
    ]
    settings = {
        "grids": grids,
        "oracle_grids": min(grids, ORACLE_GRIDS),
        "scores": [batch_size, HEADS, QUERIES, 196],
        "repeats": repeats,
        "seed": seed,
    }
    return Record("bench", settings, rows, environment(device))


def _row(
    what: str, scores: Tensor, grid: Grid, method: str, milliseconds: float, base: float
) -> Row:
    """Return the row of a method on (..., N) scores, with the milliseconds of the baseline."""
    count = scores[..., 0].numel()
    return {
        "what": what,
        "n": grid.size,
        "dtype": str(scores.dtype).removeprefix("torch."),
        "method": method,
        "threads": torch.get_num_threads(),
        "grids": count,
        "milliseconds": milliseconds,
        "microseconds_per_grid": 1e3 * milliseconds / count,
        "speedup": base / milliseconds,
    }


def _screened(
    what: str, scores: Tensor, grid: Grid, methods: dict[str, Rule], base: float, repeats: int
) -> Iterator[Row]:
    """Yield the row of every method on (..., N) scores."""
    for method, rule in methods.items():
        work = partial(screen, scores, grid, rule)
        milliseconds = timing.median_milliseconds(work, repeats, scores.device)
        leaves = 100 * float(work().leaf_ratio.mean())
        row = _row(what, scores, grid, method, milliseconds, base)
        yield row | {"leaf_percent": leaves}


def _against_oracle(
    methods: Sequence[str], grids: int, repeats: int, seed: int, device: torch.device
) -> list[Row]:
    """Compare with `grow_tree`, which screens one grid at a time on one core."""
    grid, rules = Grid(16, 16), {name: parse(name, seed) for name in methods}
    scores = score_fields(grids, grid, seed)
    some = scores[:ORACLE_GRIDS].double().view(-1, grid.height, grid.width).numpy()
    start = time.perf_counter()
    for field in some:
        grow_tree(field, 0.005)
    base = 1e3 * (time.perf_counter() - start) * grids / len(some)
    oracle = _row("trees", scores.double(), grid, "gamma:0.005 (oracle)", base, base)
    rows, on_device = [oracle | {"threads": 1}], scores.to(device)
    for threads in sorted({1, torch.get_num_threads()}):
        with timing.threads(threads):
            rows += _screened("trees", on_device, grid, rules, base, repeats)
    return rows


def grow_tree(scores: npt.NDArray[np.float64], epsilon: float) -> int:
    """Count the leaves of Algorithm 1 of the paper on one grid (H, W), with a queue of blocks."""
    # sums[i][j] is the sum of the scores above row i and left of column j.
    sums = np.pad(scores, ((1, 0), (1, 0))).cumsum(0).cumsum(1).tolist()
    blocks, leaves = deque([(0, 0, *scores.shape)]), 0
    while blocks:
        top, left, bottom, right = blocks.popleft()
        size = (bottom - top) * (right - left)
        if size == 1:
            leaves += 1
            continue
        row, column = (top + bottom) // 2, (left + right) // 2
        mean, mass, children = 0.0, 0.0, []
        for north, south in ((top, row), (row, bottom)):
            for west, east in ((left, column), (column, right)):
                if (count := (south - north) * (east - west)) > 0:
                    total = sums[south][east] - sums[north][east]
                    total += sums[north][west] - sums[south][west]
                    mean += total / size
                    mass += count * math.exp(total / count)
                    children.append((north, west, south, east))
        if math.log(mass / size) - mean > epsilon:
            blocks.extend(children)
        else:
            leaves += 1
    return leaves


def _against_softmax(batch_size: int, repeats: int, seed: int, device: torch.device) -> list[Row]:
    """Time the screening of the scores of a DeiT-Tiny batch in multiples of a softmax over them."""
    grid, shape = Grid(14, 14), (batch_size, HEADS, QUERIES)
    fields = score_fields(math.prod(shape), grid, seed).to(device).view(*shape, grid.size)
    rules = {name: parse(name, seed) for name in SCORE_METHODS}
    rows: list[Row] = []
    for scores in (fields, fields.double()):
        base = timing.median_milliseconds(partial(scores.softmax, -1), repeats, device)
        rows.append(_row("softmax", scores, grid, "softmax", base, base))
        for row in _screened("softmax", scores, grid, rules, base, repeats):
            rows.append({**row, "multiple_of_softmax": row["milliseconds"] / base})
    return rows
