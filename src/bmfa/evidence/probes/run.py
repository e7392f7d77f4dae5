"""Instance probes: the softmax mass that each method loses on the score grids of real objects."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict

import torch
from torch import Tensor

from bmfa.data import ProbeBlock, ProbeSettings, Tally
from bmfa.data.instances import SIZES, InstanceSource
from bmfa.data.probes import Mode, probe_blocks
from bmfa.evidence.methods import DEFAULT_METHODS, is_kind
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
from bmfa.evidence.probes.parts import resumable
from bmfa.evidence.runner import Progress
from bmfa.evidence.score_methods import check_method, estimate_all
from bmfa.grid import Grid
from bmfa.records import Record, Row
from bmfa.trees.rules import parse

DATASETS = ("coco", "lvis", "embedded")
FREQUENCIES = {"f": "frequent", "c": "common", "r": "rare"}
TIMING = "processor time of one thread, from scores to statistics, all methods together"


def run(
    source: InstanceSource,
    *,
    dataset: str,
    mode: Mode,
    methods: Sequence[str] = DEFAULT_METHODS,
    settings: ProbeSettings | None = None,
    workers: int = 1,
    limit: int | None = None,
    strict: bool = False,
    progress: Progress | None = None,
    seed: int = 0,
    resume: str | os.PathLike[str] | None = None,
) -> Record:
    """Probe every instance of a source with every method.

    Score grids are built by worker processes and screened in this one, batch by batch in the order
    of the source, so the rows are the same for any number of workers. Processes joined by
    torch.distributed share the building of grids. Only a few numbers are kept for each instance and
    method, except for pooled methods, which need all grids at once.

    Args:
        source: Annotated images.
        dataset: `"coco"`, `"lvis"` or `"embedded"`.
        mode: How scores are built: `"image-edge"` or `"mask-only"`.
        methods: Names of summaries and rules.
        settings: Grid and image size.
        workers: Worker processes; 1 builds the grids in this process.
        limit: Number of instances after which the probe ends.
        strict: True to raise at the first faulty instance instead of counting it.
        progress: Called with the images done and their number.
        seed: Seed of random rules.
        resume: File of the grids built so far, created if missing.

    Returns:
        A record of one row for each method and group: all instances, sizes and frequencies.

    Raises:
        ValueError: If an argument is unknown or no instance can be probed.

    Example:
        >>> from bmfa.data import EmbeddedScenes
        >>> scenes = EmbeddedScenes(images=2)
        >>> record = run(scenes, dataset="embedded", mode="mask-only", methods=["edge-aware"])
        >>> record.rows[0]["group"], record.rows[0]["mean_gap"]
        ('all', 0.0)
    """
    settings = settings or ProbeSettings()
    names = check_probe(dataset, mode, methods, settings, seed)
    tally = Tally(strict)
    blocks = probe_blocks(
        source,
        settings,
        workers=workers,
        limit=limit,
        tally=tally,
        progress=progress,
        spread=resumable(source, settings, strict, resume),
    )
    probe = Probe(names, Grid(settings.grid, settings.grid), seed)
    for batch in batch_blocks(blocks):
        probe.add(batch, mode)
    check_any_instances(len(probe.sizes), tally)
    rows: list[Row] = [{"dataset": dataset, "mode": mode, **row} for row in probe.rows()]
    recorded = {
        "dataset": dataset,
        "mode": mode,
        "methods": list(names),
        **asdict(settings),
        "tau": TAU,
        "workers": workers,
        "limit": limit,
        "strict": strict,
        "seed": seed,
        "protocol": PROTOCOL,
        **describe_source(source, tally),
        "instances": len(probe.sizes),
        "timing": TIMING,
        "microseconds_per_instance": 1e6 * probe.timer.seconds / len(probe.sizes),
    }
    return Record("probe", recorded, rows)


class Probe:
    """The statistics of all instances so far by method, and the time they took."""

    def __init__(self, methods: Sequence[str], grid: Grid, seed: int) -> None:
        self.grid, self.seed, self.timer = grid, seed, ThreadTimer()
        self.sizes: list[str] = []
        self.frequencies: list[str | None] = []
        self._statistics: dict[str, list[GapStatistics]] = {name: [] for name in methods}
        self._pooled = [name for name in methods if _needs_all_instances(name)]
        self._scores: list[Tensor] = []  # (B, N), for pooled methods alone
        # Builds the tables of the grid, which are not part of the time of an instance.
        estimate_all(methods, torch.zeros(1, grid.size, dtype=torch.float64), grid)

    def add(self, batch: Sequence[ProbeBlock], mode: Mode) -> None:
        """Screen a batch by all methods but the pooled ones, which `rows` applies at the end."""
        scores = score_grids(batch, mode)
        self._screen([name for name in self._statistics if name not in self._pooled], scores)
        if self._pooled:
            self._scores.append(scores)
        self.sizes += [size for block in batch for size in block.size]
        self.frequencies += [frequency for block in batch for frequency in block.frequency]

    def rows(self) -> list[Row]:
        """Return one row for each method and group; all 101 quantiles for all instances alone."""
        if self._pooled:
            self._screen(self._pooled, torch.cat(self._scores))
        groups, rows = list(self._groups()), []
        with self.timer.measure():
            for name, parts in self._statistics.items():
                statistics = GapStatistics.join(parts)
                for group, instances in groups:
                    row = {"method": name, "group": group, **statistics.row(instances)}
                    if group != "all":
                        del row["gap_quantiles"]
                    rows.append(row)
        return rows

    def _screen(self, methods: Sequence[str], scores: Tensor) -> None:
        with self.timer.measure():
            estimates = estimate_all(methods, scores, self.grid, tau=TAU, seed=self.seed)
        for name, estimate in zip(methods, estimates, strict=True):
            self._statistics[name].append(GapStatistics.of(name, estimate, self.grid))

    def _groups(self) -> Iterator[tuple[str, Tensor | slice]]:
        """Yield all instances, then each size and frequency that occurs."""
        yield "all", slice(None)
        members = {size: [one == size for one in self.sizes] for size in SIZES}
        members |= {
            name: [one == key for one in self.frequencies] for key, name in FREQUENCIES.items()
        }
        yield from ((name, torch.tensor(mask)) for name, mask in members.items() if any(mask))


def _needs_all_instances(method: str) -> bool:
    return not is_kind(method, "summary") and parse(method).needs_all_trees


def check_probe(
    dataset: str, mode: str, methods: Sequence[str], settings: ProbeSettings, seed: int
) -> tuple[str, ...]:
    """Return every method once; raise ValueError for arguments that are not valid."""
    if dataset not in DATASETS:
        raise ValueError(f"dataset is {dataset!r}; pass one of {', '.join(DATASETS)}")
    check_mode(mode)
    if not methods:
        raise ValueError("methods is empty; pass at least one name, such as gamma:0.005")
    if settings.grid < 2:
        raise ValueError(
            f"grid is {settings.grid}, which leaves no block to screen; pass 2 or more"
        )
    return tuple(dict.fromkeys(check_method(name, seed) for name in methods))
