"""Ablations of Algorithm 1 on instance probes: threshold, depth, grid and look-ahead."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from bmfa.data import ProbeSettings, Tally
from bmfa.data.instances import InstanceSource
from bmfa.data.probes import Mode, probe_blocks
from bmfa.evidence.probes.measure import (
    PROTOCOL,
    TAU,
    check_any_instances,
    check_mode,
    describe_source,
    gap_row,
    read_scores,
    time_on_one_thread,
)
from bmfa.evidence.runner import Progress
from bmfa.evidence.score_methods import estimate
from bmfa.grid import Grid
from bmfa.records import Record, Row

REPEATS = 3  # timings of which the best counts
TIMING = "processor time of one thread, from scores to errors, the best of the repeats"
COLUMNS = ("instances", "mean_gap", "p95_gap", "leaf_percent", "unsplit_percent")


# The values of each parameter of Algorithm 1; a depth of None splits down to single tokens.
VALUES: dict[str, tuple[Any, ...]] = {
    "epsilon": (0.05, 0.02, 0.01, 0.005, 0.002, 0.001),
    "depth": (2, 3, 4, 5),
    "grid": (8, 16, 32),
    "lookahead": (1, 2, 3, 4),
}


@dataclass(frozen=True)
class Setting:
    """Parameters of Algorithm 1."""

    epsilon: float = 0.005
    depth: int | None = None
    grid: int = 16
    lookahead: int = 1

    def row(self, scores: Tensor) -> Row:
        """Return the gaps on (B, N) scores, and the time of screening and error for an instance."""
        grid, method = Grid(self.grid, self.grid), f"gamma-h{self.lookahead}:{self.epsilon!r}"
        screen = partial(estimate, method, scores, grid, tau=TAU, max_depth=self.depth)
        found, times = zip(*(time_on_one_thread(screen) for _ in range(REPEATS)), strict=True)
        row = gap_row(method, found[0], grid)
        microseconds = 1e6 * min(times) / len(scores)
        return {name: row[name] for name in COLUMNS} | {"microseconds_per_instance": microseconds}


def run(
    source: InstanceSource,
    *,
    dataset: str | None = None,
    mode: Mode = "image-edge",
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
        >>> record = run(EmbeddedScenes(images=1))
        >>> record.rows[0]["parameter"], record.rows[0]["value"]
        ('epsilon', 0.05)
    """
    check_mode(mode)
    ProbeSettings(max(VALUES["grid"]), image_size)  # raises if the largest grid does not divide it
    planned: list[tuple[str, float, Setting]] = [
        (name, value, Setting(**{name: value}))
        for name, values in VALUES.items()
        for value in values
    ]
    grids_read = list(dict.fromkeys(setting.grid for _, _, setting in planned))
    measured: dict[Setting, Row] = {}  # equal settings are measured once
    for number, side in enumerate(grids_read):
        tally = Tally()
        blocks = probe_blocks(
            source,
            ProbeSettings(side, image_size),
            workers=workers,
            limit=limit,
            tally=tally,
            progress=progress and partial(_of_all_readings, progress, number, len(grids_read)),
        )
        scores = read_scores(blocks, mode)
        check_any_instances(len(scores), tally)
        for _, _, setting in planned:
            if setting.grid == side and setting not in measured:
                measured[setting] = setting.row(scores)
    settings = {
        "dataset": dataset,
        "mode": mode,
        **{f"{name}s": list(values) for name, values in VALUES.items()},
        "image_size": image_size,
        "tau": TAU,
        "repeats": REPEATS,
        "timing": TIMING,
        "limit": limit,
        "workers": workers,
        "protocol": PROTOCOL,
        **describe_source(source, tally),
    }
    rows = [{"parameter": name, "value": v, **measured[setting]} for name, v, setting in planned]
    return Record("ablation", settings, rows)


def _of_all_readings(
    progress: Progress, reading: int, readings: int, done: int, images: int
) -> None:
    progress(reading * images + done, readings * images)
