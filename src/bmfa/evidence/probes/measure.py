"""Shared by the experiments on instances: score grids, statistics of gaps, checks and timing."""

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any, TypeVar

import torch
from torch import Tensor

from bmfa.data import MODES, EmbeddedScenes, InstanceFiles, ProbeBlock, Tally
from bmfa.data.instances import InstanceSource
from bmfa.data.probes import Mode
from bmfa.evidence.methods import is_kind
from bmfa.evidence.score_methods import Estimate
from bmfa.grid import Grid
from bmfa.quantiles import quantile
from bmfa.records import Row
from bmfa.timing import threads
from bmfa.trees.layout import quadtree_layout
from bmfa.trees.rules import parse

PROTOCOL = "a reconstruction fitted to the paper's published figures, not its own code"
TAU = 1.0

Result = TypeVar("Result")


def read_scores(blocks: Iterable[ProbeBlock], mode: Mode) -> Tensor:
    """Return the (B, N) float64 score grids of all instances."""
    parts = [torch.from_numpy(block.scores(mode)) for block in blocks]
    return torch.cat(parts) if parts else torch.empty(0, 0, dtype=torch.float64)


def gap_row(
    method: str, estimate: Estimate, grid: Grid, instances: Tensor | slice = slice(None)
) -> Row:
    """Return statistics of the gaps of some instances; quantiles are interpolated linearly.

    `unsplit_percent` counts the roots that are leaves; summaries and fixed blocks have none to split.
    """
    gap, split = estimate.gap[instances], estimate.root_split
    quantiles = quantile(gap, torch.linspace(0, 1, 101, dtype=torch.float64)).tolist()
    unsplit = None
    if not is_kind(method, "summary") and parse(method).layout(grid) is quadtree_layout(grid):
        unsplit = 100 * float((~split[instances]).double().mean())
    return {
        "instances": len(gap),
        "mean_gap": float(gap.mean()),
        "median_gap": quantiles[50],
        "p95_gap": quantiles[95],
        "p99_gap": quantiles[99],
        "max_gap": quantiles[100],
        "min_gap": quantiles[0],
        "leaf_percent": float(estimate.leaf_percent[instances].mean()),
        "unsplit_percent": unsplit,
        "gap_quantiles": quantiles,
    }


def time_on_one_thread(work: Callable[[], Result]) -> tuple[Result, float]:
    """Return the result of a call on one thread, and its processor time in seconds.

    Worker processes occupy the other cores, where threads that wait for each other take many times
    longer. The processor time of one thread is the wall-clock time on a free core.
    """
    with threads(1):
        start = time.thread_time()
        result = work()
        return result, time.thread_time() - start


def describe_source(source: InstanceSource, tally: Tally) -> dict[str, Any]:
    """Return the origin of the instances, and those not used by reason, for a record."""
    origin: dict[str, Any] = {"kind": type(source).__name__}
    if isinstance(source, InstanceFiles):
        origin |= {
            # File names alone: a record is passed on, and holds no folder of this machine.
            "annotations": source.annotations.name,
            "images": source.images.path.name,
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
            "20 square pixels that are not crowds"
        )
