"""Ablations of Algorithm 1 on probe grids: threshold, depth, grid and look-ahead, with their time."""

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from bmfa.checks import check_integer
from bmfa.data import ProbeBlock, ProbeSettings, Tally
from bmfa.data.instances import InstanceSource
from bmfa.data.probes import Mode, Progress, multiples, probe_blocks
from bmfa.evidence.probes.run import (
    PROTOCOL,
    TAU,
    Measured,
    batches,
    check_mode,
    check_used,
    describe,
    one_thread,
    scores_of,
)
from bmfa.evidence.score_methods import estimate
from bmfa.grid import Grid
from bmfa.records import Record, Row
from bmfa.trees.rules import Gamma

REPEATS = 3
TIMING = "processor time of one thread, from scores to errors, the best of the repeats"
COLUMNS = ("instances", "mean_gap", "p95_gap", "leaf_percent", "unsplit_percent")


@dataclass(frozen=True)
class Setting:
    """Algorithm 1 with one choice of its parameters; depth None goes down to single cells."""

    epsilon: float = 0.005
    depth: int | None = None
    grid: int = 16
    lookahead: int = 1

    def __post_init__(self) -> None:
        Gamma(self.epsilon, self.lookahead)  # checks both
        if self.depth is not None:
            check_integer("depth", self.depth, low=1)
        check_integer("grid", self.grid, low=2)

    def measure(self, scores: Tensor) -> tuple[Measured, float]:
        """What the trees estimate, and the seconds of screening and error: the best of a few."""
        best = math.inf
        grid, method = Grid(self.grid, self.grid), f"gamma-h{self.lookahead}:{self.epsilon!r}"
        for _ in range(REPEATS):
            with one_thread():
                start = time.thread_time()
                outcome = estimate(method, scores, grid, tau=TAU, max_depth=self.depth)
                best = min(best, time.thread_time() - start)
        return Measured.of(method, outcome, grid), best


@dataclass
class Total:
    """The measurements of one setting, batch after batch."""

    parts: list[Measured] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, measured: Measured, seconds: float) -> None:
        """One batch more."""
        self.parts.append(measured)
        self.seconds += seconds

    def row(self) -> Row:
        """The statistics of all batches."""
        row = Measured.joined(self.parts).row()
        each = 1e6 * self.seconds / row["instances"]
        return {name: row[name] for name in COLUMNS} | {"microseconds_per_instance": each}


def run(
    source: InstanceSource,
    *,
    dataset: str | None = None,
    mode: Mode = "image-edge",
    epsilons: Sequence[float] = (0.05, 0.02, 0.01, 0.005, 0.002, 0.001),
    depths: Sequence[int] = (2, 3, 4, 5),
    grids: Sequence[int] = (8, 16, 32),
    lookaheads: Sequence[int] = (1, 2, 3, 4),
    picture_size: int = 256,
    limit: int | None = None,
    workers: int = 1,
    progress: Progress | None = None,
) -> Record:
    """Vary one parameter at a time around epsilon 0.005, full depth, grid 16, look-ahead 1.

    The source is read once for every grid; `progress` counts the pictures of all readings.
    """
    check_mode(mode)
    planned = _planned(epsilons, depths, grids, lookaheads)
    totals = {setting: Total() for _, _, setting in planned}
    grids_read = list(dict.fromkeys(setting.grid for setting in totals))
    ProbeSettings(1, picture_size)  # checks the size by itself
    if picture_size % (step := math.lcm(*grids_read)):
        raise ValueError(
            f"picture_size (--img-size) is {picture_size}, which grids of "
            f"{', '.join(map(str, sorted(grids_read)))} cells do not all divide; "
            f"pass {multiples(picture_size, step)}"
        )
    readings = [ProbeSettings(grid, picture_size) for grid in grids_read]
    tally = Tally()
    for number, reading in enumerate(readings):
        told = progress and _later(progress, number, len(readings))
        tally = Tally()
        blocks = probe_blocks(
            source, reading, workers=workers, limit=limit, tally=tally, progress=told
        )
        here = {s: total for s, total in totals.items() if s.grid == reading.grid}
        check_used(_measure(blocks, mode, here), tally)
    settings = {
        "dataset": dataset,
        "mode": mode,
        "epsilons": list(epsilons),
        "depths": list(depths),
        "grids": list(grids),
        "lookaheads": list(lookaheads),
        "picture_size": picture_size,
        "tau": TAU,
        "repeats": REPEATS,
        "timing": TIMING,
        "limit": limit,
        "workers": workers,
        "protocol": PROTOCOL,
        **describe(source, tally),
    }
    rows = [
        {"parameter": name, "value": v, **totals[setting].row()} for name, v, setting in planned
    ]
    return Record("ablation", settings, rows)


def _planned(
    epsilons: Sequence[float],
    depths: Sequence[int],
    grids: Sequence[int],
    lookaheads: Sequence[int],
) -> list[tuple[str, float, Setting]]:
    """Parameter, value and setting of every row; equal settings are measured once."""
    planned: list[tuple[str, float, Setting]] = []
    planned += [("epsilon", value, Setting(epsilon=value)) for value in epsilons]
    planned += [("depth", value, Setting(depth=value)) for value in depths]
    planned += [("grid", value, Setting(grid=value)) for value in grids]
    planned += [("lookahead", value, Setting(lookahead=value)) for value in lookaheads]
    if not planned:
        raise ValueError("no parameter has a value; pass epsilons, depths, grids or lookaheads")
    return planned


def _measure(blocks: Iterable[ProbeBlock], mode: Mode, totals: dict[Setting, Total]) -> int:
    """Measure every setting on all blocks; returns the number of instances."""
    instances = 0
    for batch in batches(blocks):
        scores = scores_of(batch, mode)
        instances += len(scores)
        for setting, total in totals.items():
            total.add(*setting.measure(scores))
    return instances


def _later(progress: Progress, reading: int, readings: int) -> Progress:
    """Progress of one reading as a part of all."""
    return lambda done, pictures: progress(reading * pictures + done, readings * pictures)
