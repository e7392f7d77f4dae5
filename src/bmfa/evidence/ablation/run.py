"""Ablations of Algorithm 1 on instance probes: threshold, depth, grid and look-ahead."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from bmfa.checks import check_integer
from bmfa.data import ProbeBlock, ProbeSettings, Tally
from bmfa.data.instances import InstanceSource
from bmfa.data.probes import Mode, multiples, probe_blocks
from bmfa.evidence.probes.measure import (
    PROTOCOL,
    TAU,
    GapStatistics,
    ThreadTimer,
    batch_blocks,
    check_any_instances,
    check_mode,
    describe_source,
    score_grids,
)
from bmfa.evidence.runner import Progress
from bmfa.evidence.score_methods import estimate
from bmfa.grid import Grid
from bmfa.records import Record, Row
from bmfa.trees.rules import Gamma

REPEATS = 3  # timings of which the best counts
TIMING = "processor time of one thread, from scores to errors, the best of the repeats"
COLUMNS = ("instances", "mean_gap", "p95_gap", "leaf_percent", "unsplit_percent")


@dataclass(frozen=True)
class Setting:
    """Parameters of Algorithm 1; a depth of None splits down to single tokens."""

    epsilon: float = 0.005
    depth: int | None = None
    grid: int = 16
    lookahead: int = 1

    def __post_init__(self) -> None:
        Gamma(self.epsilon, self.lookahead)  # raises if one of them is not valid
        if self.depth is not None:
            check_integer("depth", self.depth, low=1)
        check_integer("grid", self.grid, low=2)

    def measure(self, scores: Tensor) -> tuple[GapStatistics, float]:
        """Return the gaps on (B, N) scores, and the seconds of screening and error."""
        best = math.inf
        grid, method = Grid(self.grid, self.grid), f"gamma-h{self.lookahead}:{self.epsilon!r}"
        for _ in range(REPEATS):
            timer = ThreadTimer()
            with timer.measure():
                found = estimate(method, scores, grid, tau=TAU, max_depth=self.depth)
            best = min(best, timer.seconds)
        return GapStatistics.of(method, found, grid), best


@dataclass
class Total:
    """The statistics and the time of one setting over all batches."""

    parts: list[GapStatistics] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, statistics: GapStatistics, seconds: float) -> None:
        self.parts.append(statistics)
        self.seconds += seconds

    def row(self) -> Row:
        row = GapStatistics.join(self.parts).row()
        microseconds = 1e6 * self.seconds / row["instances"]
        return {name: row[name] for name in COLUMNS} | {"microseconds_per_instance": microseconds}


def run(
    source: InstanceSource,
    *,
    dataset: str | None = None,
    mode: Mode = "image-edge",
    epsilons: Sequence[float] = (0.05, 0.02, 0.01, 0.005, 0.002, 0.001),
    depths: Sequence[int] = (2, 3, 4, 5),
    grids: Sequence[int] = (8, 16, 32),
    lookaheads: Sequence[int] = (1, 2, 3, 4),
    image_size: int = 256,
    limit: int | None = None,
    workers: int = 1,
    progress: Progress | None = None,
) -> Record:
    """Vary one parameter at a time around epsilon 0.005, full depth, grid 16 and look-ahead 1.

    Args:
        source: Annotated images, which are read once for every grid.
        dataset: Name of the source for the record.
        mode: How scores are built: `"image-edge"` or `"mask-only"`.
        epsilons: Thresholds.
        depths: Depth limits.
        grids: Sides of the grid in tokens.
        lookaheads: Levels below a block that Gamma reads.
        image_size: Side of a resized crop in pixels, a multiple of every grid.
        limit: Number of instances after which a reading ends.
        workers: Worker processes; 1 builds the grids in this process.
        progress: Called with the images done and their number over all readings.

    Returns:
        A record of one row for each parameter and value, with the time for an instance.

    Raises:
        ValueError: If a value is out of range, or no instance can be probed.

    Example:
        >>> from bmfa.data import EmbeddedScenes
        >>> record = run(EmbeddedScenes(images=2), epsilons=[0.01], depths=[], grids=[],
        ...              lookaheads=[])
        >>> record.rows[0]["parameter"], record.rows[0]["value"]
        ('epsilon', 0.01)
    """
    check_mode(mode)
    planned = _plan(epsilons, depths, grids, lookaheads)
    totals = {setting: Total() for _, _, setting in planned}
    grids_read = list(dict.fromkeys(setting.grid for setting in totals))
    ProbeSettings(1, image_size)  # raises if the size is not valid
    if image_size % (step := math.lcm(*grids_read)):
        raise ValueError(
            f"image_size (--img-size) is {image_size}, which grids of "
            f"{', '.join(map(str, sorted(grids_read)))} cells do not all divide; "
            f"pass {multiples(image_size, step)}"
        )
    readings = [ProbeSettings(grid, image_size) for grid in grids_read]
    tally = Tally()
    for number, reading in enumerate(readings):
        shown = progress and _part_of(progress, number, len(readings))
        tally = Tally()
        blocks = probe_blocks(
            source, reading, workers=workers, limit=limit, tally=tally, progress=shown
        )
        of_grid = {s: total for s, total in totals.items() if s.grid == reading.grid}
        check_any_instances(_measure(blocks, mode, of_grid), tally)
    settings = {
        "dataset": dataset,
        "mode": mode,
        "epsilons": list(epsilons),
        "depths": list(depths),
        "grids": list(grids),
        "lookaheads": list(lookaheads),
        "image_size": image_size,
        "tau": TAU,
        "repeats": REPEATS,
        "timing": TIMING,
        "limit": limit,
        "workers": workers,
        "protocol": PROTOCOL,
        **describe_source(source, tally),
    }
    rows = [
        {"parameter": name, "value": v, **totals[setting].row()} for name, v, setting in planned
    ]
    return Record("ablation", settings, rows)


def _plan(
    epsilons: Sequence[float],
    depths: Sequence[int],
    grids: Sequence[int],
    lookaheads: Sequence[int],
) -> list[tuple[str, float, Setting]]:
    """Return parameter, value and setting of every row; equal settings are measured once."""
    planned: list[tuple[str, float, Setting]] = []
    planned += [("epsilon", value, Setting(epsilon=value)) for value in epsilons]
    planned += [("depth", value, Setting(depth=value)) for value in depths]
    planned += [("grid", value, Setting(grid=value)) for value in grids]
    planned += [("lookahead", value, Setting(lookahead=value)) for value in lookaheads]
    if not planned:
        raise ValueError("no parameter has a value; pass epsilons, depths, grids or lookaheads")
    return planned


def _measure(blocks: Iterable[ProbeBlock], mode: Mode, totals: dict[Setting, Total]) -> int:
    """Measure every setting on all blocks and return the number of instances."""
    instances = 0
    for batch in batch_blocks(blocks):
        scores = score_grids(batch, mode)
        instances += len(scores)
        for setting, total in totals.items():
            total.add(*setting.measure(scores))
    return instances


def _part_of(progress: Progress, reading: int, readings: int) -> Progress:
    """Return the progress of one reading as a part of all readings."""
    return lambda done, images: progress(reading * images + done, readings * images)
