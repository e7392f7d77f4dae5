"""The loop of the benchmarks: sizes one after the other; times and memory of named calls."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from statistics import fmean
from typing import TypeVar

import torch

from bmfa import timing
from bmfa.evidence.bench import dense
from bmfa.evidence.metrics import mean
from bmfa.evidence.runner import Progress
from bmfa.records import Row

INTERRUPTED = "interrupted by the keyboard or SIGINT; later sizes are absent, too"
TIMING = {
    "cuda": "median; calls in a CUDA graph where they can be captured (milliseconds), and one by one "
    "(milliseconds_eager); dense paths are chosen before the clock starts, speedup_eager is against the "
    "fastest one by one",
    "cpu": "median of calls that take turns",
}

Result = TypeVar("Result")
Times = tuple[float, float | None]  # milliseconds in a CUDA graph, and of single calls on CUDA


def each_size(
    sizes: Sequence[int], measure: Callable[[int], list[Row]], progress: Progress | None
) -> tuple[list[Row], dict[str, str]]:
    """Measure images of several sizes.

    Args:
        sizes: Sides of the images in pixels.
        measure: Returns the rows of a size.
        progress: Called with the sizes done and their number.

    Returns:
        The rows, and a note if an interruption left out the later sizes.

    Raises:
        KeyboardInterrupt: If no size is complete.
    """
    rows: list[Row] = []
    for done, size in enumerate(sizes, 1):
        try:
            rows += measure(size)
        except KeyboardInterrupt:
            if not rows:
                raise
            return rows, {f"{size} pixels": INTERRUPTED}
        if progress is not None:
            progress(done, len(sizes))
    return rows, {}


def path_of(name: str) -> str | None:
    """Return the dense path that a row such as `dense-flash` or `full-cudnn` is named for."""
    kind, _, path = name.partition("-")
    return path if kind in ("dense", "full") and path else None


def on_path(name: str) -> AbstractContextManager[None]:
    """Let attention take the path that a row is named for; other names change nothing."""
    return dense.preferring(path) if (path := path_of(name)) in dense.PATHS else nullcontext()


def mean_times(
    cases: Iterable[Mapping[str, timing.Work]], repeats: int, device: torch.device
) -> dict[str, Times]:
    """Time calls by name on every case, and return the mean over the cases that have a name."""
    samples: dict[str, list[Times]] = {}
    for works in cases:
        found: dict[str, Times] = {}
        if device.type == "cuda":
            for name, work in works.items():
                with on_path(name):
                    found[name] = timing.time_call(work, repeats, device)
        else:  # dense paths have no choice there
            medians = timing.time_alternating(works, repeats, device)
            found = {name: (milliseconds, None) for name, milliseconds in medians.items()}
        for name, times in found.items():
            samples.setdefault(name, []).append(times)
    return {
        name: (fmean(graph for graph, _ in times), mean(eager for _, eager in times))
        for name, times in samples.items()
    }


def compared_rows(rows: Mapping[str, Row], times: Mapping[str, Times]) -> list[Row]:
    """Add times and speeds to the rows of calls, and put the fastest dense path first.

    Args:
        rows: A row for each name; those of dense paths are `dense-PATH` or `full-PATH`.
        times: The times by name.
    """
    paths = [name for name in rows if path_of(name)]
    best = min(paths, key=lambda name: times[name][0])
    single = [time for name in paths if (time := times[name][1]) is not None]
    timed: dict[str, Row] = {}
    for name, row in rows.items():
        milliseconds, eager = times[name]
        timed[name] = {
            **row,
            "milliseconds": milliseconds,
            "milliseconds_eager": eager,
            "speedup": times[best][0] / milliseconds,
            "speedup_eager": None if eager is None else min(single) / eager,
        }
    method = best.partition("-")[0]
    return [{**timed[best], "method": method, "path": path_of(best)}, *timed.values()]


def run_as_timed(work: Callable[[], Result], device: torch.device) -> tuple[Result, int | None]:
    """Run a call in a CUDA graph if it can be captured, directly otherwise.

    Times are those of CUDA graphs, in which the host may choose another path than outside, so errors
    and memory are measured there too.

    Args:
        work: The call. Its result may be read after the replay, not inside the call.
        device: Device of the call; a call on a CPU runs directly.

    Returns:
        The result of the call, and the largest memory it allocated in bytes; None for a CPU.
    """
    if device.type != "cuda":
        return work(), None
    calls: list[tuple[Result, int]] = []

    def measured() -> None:
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = work()
        calls[:] = [(result, torch.cuda.max_memory_allocated(device) - before)]

    graph = timing.capture_calls(measured, 1)
    if graph is None:
        measured()
    else:
        graph.replay()
    torch.cuda.synchronize(device)
    return calls[0]
