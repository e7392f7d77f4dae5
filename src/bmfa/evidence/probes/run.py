"""Instance probes: how much softmax mass each method loses on the score grids of real objects."""

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from bmfa.data import MODES, EmbeddedScenes, InstanceFiles, ProbeBlock, ProbeSettings, Tally
from bmfa.data.instances import SIZES, InstanceSource
from bmfa.data.probes import Mode, Progress, probe_blocks
from bmfa.evidence.methods import DEFAULT_METHODS, is_kind
from bmfa.evidence.probes import parts as probe_parts
from bmfa.evidence.score_methods import CHUNK, Estimate, check_method, estimate_all
from bmfa.grid import Grid
from bmfa.quantiles import quantile
from bmfa.records import Record, Row
from bmfa.trees.layout import quadtree_layout
from bmfa.trees.rules import parse

DATASETS = ("coco", "lvis", "embedded")
FREQUENCIES = {"f": "frequent", "c": "common", "r": "rare"}
PROTOCOL = "a reconstruction fitted to the paper's published figures, not its own code"
TIMING = "processor time of one thread, from scores to statistics, all methods together"
TAU = 1.0


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

    Grids are built by `workers` processes and screened here, batch by batch in the source's order,
    so the rows are the same for any number of them. Only a few numbers for each instance and method
    are kept; a pooled method spends its budget on all instances at once, so it keeps their grids.
    Processes joined by torch.distributed share the building of grids; `resume` is a file that keeps
    the grids built so far, created where missing.
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
        spread=probe_parts.spread(source, settings, strict, resume),
    )
    probe = Probe(names, Grid(settings.grid, settings.grid), seed)
    for batch in batches(blocks):
        probe.add(batch, mode)
    check_used(len(probe.sizes), tally)
    rows: list[Row] = [{"dataset": dataset, "mode": mode, **row} for row in probe.rows()]
    told = {
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
        **describe(source, tally),
        "instances": len(probe.sizes),
        "timing": TIMING,
        "microseconds_per_instance": 1e6 * probe.seconds / len(probe.sizes),
    }
    return Record("probe", told, rows)


def describe(source: InstanceSource, tally: Tally) -> dict[str, Any]:
    """Where the instances came from, and those not used, by reason and with the first names."""
    origin: dict[str, Any] = {"kind": type(source).__name__}
    if isinstance(source, InstanceFiles):
        origin |= {
            "annotations": str(source.annotations.path),
            "images": str(source.pictures.path),
        }
    elif isinstance(source, EmbeddedScenes):
        origin |= asdict(source)

    def named(counts: dict[str, int]) -> dict[str, Any]:
        return {
            reason: {"instances": count, "names": list(tally.names[reason])}
            for reason, count in counts.items()
        }

    return {
        "source": origin,
        "pictures": len(source),
        "faults": named(tally.faults),
        "left_out": named(tally.left_out),
    }


def batches(blocks: Iterable[ProbeBlock]) -> Iterator[list[ProbeBlock]]:
    """Consecutive blocks, as many as are screened at once."""
    gathered: list[ProbeBlock] = []
    for block in blocks:
        if gathered and sum(map(len, gathered)) + len(block) > CHUNK:
            yield gathered
            gathered = []
        gathered.append(block)
    if gathered:
        yield gathered


def scores_of(batch: Sequence[ProbeBlock], mode: Mode) -> Tensor:
    """(B, N) score grids of several blocks."""
    return torch.cat([torch.from_numpy(block.scores(mode)) for block in batch])


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one thread: worker processes hold the other cores, and there threads that wait for
    each other cost many times what they save. Its processor time is the time on a free core."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@dataclass(frozen=True, eq=False)
class Measured:
    """A few numbers for each instance: gap, leaves, and whether the root was never split."""

    gap: Tensor  # (B,)
    leaf_percent: Tensor  # (B,)
    unsplit: Tensor | None = None  # (B,) bool

    @classmethod
    def of(cls, method: str, outcome: Estimate, grid: Grid) -> "Measured":
        """The numbers of an outcome; summaries have no root to split, and neither have tiles."""
        split = outcome.root_split
        rooted = not is_kind(method, "summary") and parse(method).layout(grid) is quadtree_layout(
            grid
        )
        unsplit = ~split if rooted and split is not None else None
        return cls(outcome.gap, outcome.leaf_percent, unsplit)

    @classmethod
    def joined(cls, parts: Sequence["Measured"]) -> "Measured":
        """The numbers of several batches."""
        unsplit = [part.unsplit for part in parts if part.unsplit is not None]
        return cls(
            torch.cat([part.gap for part in parts]),
            torch.cat([part.leaf_percent for part in parts]),
            torch.cat(unsplit) if unsplit else None,
        )

    def row(self, chosen: Tensor | slice = slice(None)) -> Row:
        """Statistics of the instances chosen; percentiles interpolate linearly."""
        gap = self.gap[chosen]
        quantiles = quantile(gap, torch.linspace(0, 1, 101, dtype=torch.float64)).tolist()
        unsplit = None if self.unsplit is None else self.unsplit[chosen].double().mean()
        return {
            "instances": len(gap),
            "mean_gap": float(gap.mean()),
            "median_gap": quantiles[50],
            "p95_gap": quantiles[95],
            "p99_gap": quantiles[99],
            "max_gap": quantiles[100],
            "min_gap": quantiles[0],
            "leaf_percent": float(self.leaf_percent[chosen].mean()),
            "unsplit_percent": None if unsplit is None else 100 * float(unsplit),
            "gap_quantiles": quantiles,
        }


class Probe:
    """The numbers of all instances so far, method by method, and the time they took."""

    def __init__(self, methods: Sequence[str], grid: Grid, seed: int) -> None:
        self.grid, self.seed, self.seconds = grid, seed, 0.0
        self.sizes: list[str] = []
        self.frequencies: list[str | None] = []
        self._measured: dict[str, list[Measured]] = {name: [] for name in methods}
        self._pooled = [name for name in methods if _is_pooled(name)]
        self._apart = [name for name in methods if name not in self._pooled]
        self._scores: list[Tensor] = []
        # What is built once for a grid is no instance's time.
        estimate_all(methods, torch.zeros(1, grid.size, dtype=torch.float64), grid)

    def add(self, batch: Sequence[ProbeBlock], mode: Mode) -> None:
        """Screen a batch; methods that decide all instances together wait for the whole."""
        scores = scores_of(batch, mode)
        self._screen(self._apart, scores)
        if self._pooled:
            self._scores.append(scores)
        self.sizes += [size for block in batch for size in block.size]
        self.frequencies += [one for block in batch for one in block.frequency]

    def rows(self) -> list[Row]:
        """One row for each method and group; the quantiles of all instances in full."""
        if self._pooled:
            self._screen(self._pooled, torch.cat(self._scores))
        groups, rows = list(self._groups()), []
        with self._timed():
            for name, parts in self._measured.items():
                measured = Measured.joined(parts)
                for group, chosen in groups:
                    row = {"method": name, "group": group, **measured.row(chosen)}
                    if group != "all":
                        del row["gap_quantiles"]
                    rows.append(row)
        return rows

    def _screen(self, methods: Sequence[str], scores: Tensor) -> None:
        with self._timed():
            outcomes = estimate_all(methods, scores, self.grid, tau=TAU, seed=self.seed)
        for name, outcome in zip(methods, outcomes, strict=True):
            self._measured[name].append(Measured.of(name, outcome, self.grid))

    @contextmanager
    def _timed(self) -> Iterator[None]:
        with one_thread():
            start = time.thread_time()
            yield
            self.seconds += time.thread_time() - start

    def _groups(self) -> Iterator[tuple[str, Tensor | slice]]:
        """`all`, then the sizes and frequencies that occur."""
        yield "all", slice(None)
        for size in SIZES:
            yield from _group(size, [one == size for one in self.sizes])
        for key, name in FREQUENCIES.items():
            yield from _group(name, [one == key for one in self.frequencies])


def _group(name: str, members: list[bool]) -> Iterator[tuple[str, Tensor]]:
    if any(members):
        yield name, torch.tensor(members)


def _is_pooled(method: str) -> bool:
    return not is_kind(method, "summary") and parse(method).needs_all_trees


def check_probe(
    dataset: str, mode: str, methods: Sequence[str], settings: ProbeSettings, seed: int
) -> tuple[str, ...]:
    """The methods, each once; errors before the work begins."""
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


def check_mode(mode: str) -> None:
    """One of the two ways to build scores."""
    if mode not in MODES:
        raise ValueError(f"mode is {mode!r}; pass one of {', '.join(MODES)}")


def check_used(instances: int, tally: Tally) -> None:
    """Raise where not one instance was used, and say why."""
    if not instances:
        reasons = "; ".join(tally.lines()) or "the source has none"
        raise ValueError(
            f"no instance can be probed: {reasons}; pass annotations with objects of at least "
            "20 square pixels that are no crowds"
        )
