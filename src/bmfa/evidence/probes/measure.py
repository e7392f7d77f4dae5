"""Shared by the experiments on instances: score grids, statistics of gaps, checks and timing."""

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bmfa.data import MODES, EmbeddedScenes, InstanceFiles, ProbeBlock, Tally
from bmfa.data.instances import InstanceSource
from bmfa.data.probes import Mode
from bmfa.evidence.methods import is_kind
from bmfa.evidence.score_methods import CHUNK, Estimate
from bmfa.grid import Grid
from bmfa.quantiles import quantile
from bmfa.records import Row
from bmfa.trees.layout import quadtree_layout
from bmfa.trees.rules import parse

PROTOCOL = "a reconstruction fitted to the paper's published figures, not its own code"
TAU = 1.0


def batch_blocks(blocks: Iterable[ProbeBlock]) -> Iterator[list[ProbeBlock]]:
    """Group consecutive blocks into batches of at most `CHUNK` instances."""
    batch: list[ProbeBlock] = []
    for block in blocks:
        if batch and sum(map(len, batch)) + len(block) > CHUNK:
            yield batch
            batch = []
        batch.append(block)
    if batch:
        yield batch


def score_grids(batch: Sequence[ProbeBlock], mode: Mode) -> Tensor:
    """Return the (B, N) float64 score grids of several blocks."""
    return torch.cat([torch.from_numpy(block.scores(mode)) for block in batch])


@dataclass(frozen=True, eq=False)
class GapStatistics:
    """The gap and the leaves of every instance under one method."""

    gap: Tensor  # (B,)
    leaf_percent: Tensor  # (B,)
    unsplit: Tensor | None = None  # (B,) bool, True if the root is a leaf; None without a quadtree

    @classmethod
    def of(cls, method: str, estimate: Estimate, grid: Grid) -> "GapStatistics":
        """Take the statistics of an estimate; summaries and fixed blocks have no root to split."""
        split = estimate.root_split
        is_tree = not is_kind(method, "summary")
        is_quadtree = is_tree and parse(method).layout(grid) is quadtree_layout(grid)
        unsplit = ~split if is_quadtree and split is not None else None
        return cls(estimate.gap, estimate.leaf_percent, unsplit)

    @classmethod
    def join(cls, parts: Sequence["GapStatistics"]) -> "GapStatistics":
        """Concatenate the statistics of several batches."""
        unsplit = [part.unsplit for part in parts if part.unsplit is not None]
        return cls(
            torch.cat([part.gap for part in parts]),
            torch.cat([part.leaf_percent for part in parts]),
            torch.cat(unsplit) if unsplit else None,
        )

    def row(self, instances: Tensor | slice = slice(None)) -> Row:
        """Return the statistics of some instances; quantiles are interpolated linearly."""
        gap = self.gap[instances]
        quantiles = quantile(gap, torch.linspace(0, 1, 101, dtype=torch.float64)).tolist()
        unsplit = None if self.unsplit is None else self.unsplit[instances].double().mean()
        return {
            "instances": len(gap),
            "mean_gap": float(gap.mean()),
            "median_gap": quantiles[50],
            "p95_gap": quantiles[95],
            "p99_gap": quantiles[99],
            "max_gap": quantiles[100],
            "min_gap": quantiles[0],
            "leaf_percent": float(self.leaf_percent[instances].mean()),
            "unsplit_percent": None if unsplit is None else 100 * float(unsplit),
            "gap_quantiles": quantiles,
        }


@dataclass
class ThreadTimer:
    """Adds up the processor time of blocks that run on one thread.

    Worker processes occupy the other cores, where threads that wait for each other take many times
    longer. The processor time of one thread is the wall-clock time on a free core.
    """

    seconds: float = 0.0

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Run the block on one thread and add its processor time."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        start = time.thread_time()
        try:
            yield
            self.seconds += time.thread_time() - start
        finally:
            torch.set_num_threads(threads)


def describe_source(source: InstanceSource, tally: Tally) -> dict[str, Any]:
    """Return the origin of the instances, and those not used by reason, for a record."""
    origin: dict[str, Any] = {"kind": type(source).__name__}
    if isinstance(source, InstanceFiles):
        origin |= {
            # File names alone: a record is passed on, and holds no folder of this machine.
            "annotations": Path(source.annotations.path).name,
            "images": Path(source.images.path).name,
        }
    elif isinstance(source, EmbeddedScenes):
        origin |= asdict(source)

    def with_names(counts: dict[str, int]) -> dict[str, Any]:
        return {
            reason: {"instances": count, "names": list(tally.names[reason])}
            for reason, count in counts.items()
        }

    return {
        "source": origin,
        "images": len(source),
        "faults": with_names(tally.faults),
        "left_out": with_names(tally.left_out),
    }


def check_mode(mode: str) -> None:
    """Raise ValueError if the mode of building scores is unknown."""
    if mode not in MODES:
        raise ValueError(f"mode is {mode!r}; pass one of {', '.join(MODES)}")


def check_any_instances(instances: int, tally: Tally) -> None:
    """Raise ValueError with the reasons if no instance was used."""
    if not instances:
        reasons = "; ".join(tally.lines()) or "the source has none"
        raise ValueError(
            f"no instance can be probed: {reasons}; pass annotations with objects of at least "
            "20 square pixels that are no crowds"
        )
