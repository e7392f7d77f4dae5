"""Median times of calls, with and without CUDA graphs, and peaks of device memory."""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

Work = Callable[[], object]
# A graph holds about 20 ms of calls, so that the launch of the graph (some 10 us) is below 0.1 %, and
# at most 20 calls, which bounds its memory.
GRAPH_MILLISECONDS, MOST_CALLS = 20.0, 20
# Calls before a measurement: the first compiles and fills caches, two more reach steady clocks.
WARM_UP = 3


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Let torch, and the native kernels, run with a number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def median_milliseconds(work: Work, repeats: int, device: torch.device) -> float:
    """Return the median time of a call in milliseconds, after one warm-up call."""
    return time_alternating({"work": work}, repeats, device)["work"]


def time_call(work: Work, repeats: int, device: torch.device) -> tuple[float, float | None]:
    """Time a call, on CUDA with and without a graph.

    Args:
        work: Function to call.
        repeats: Number of measurements.
        device: Device on which the function runs.

    Returns:
        The median in milliseconds, on CUDA from a graph, and on CUDA the median without a graph,
        which includes the time of the host. Both are the same if the call cannot be captured.
    """
    if device.type != "cuda":
        return median_milliseconds(work, repeats, device), None
    for _ in range(WARM_UP):
        work()
    eager = median_milliseconds(work, repeats, device)
    calls = max(1, min(MOST_CALLS, round(GRAPH_MILLISECONDS / max(eager, 1e-3))))
    graph = capture_calls(work, calls)
    return (eager if graph is None else graph.median_milliseconds(repeats)), eager


class CapturedCalls:
    """Several calls of a function in one CUDA graph."""

    def __init__(self, graph: torch.cuda.CUDAGraph, calls: int) -> None:
        self.graph, self.calls = graph, calls

    def milliseconds(self) -> float:
        """Return the time of a call, from one replay."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        self.graph.replay()
        end.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end)) / self.calls

    def median_milliseconds(self, repeats: int) -> float:
        """Return the median time of a call over several replays, after one warm-up replay."""
        self.milliseconds()
        return statistics.median(self.milliseconds() for _ in range(repeats))


def capture_calls(work: Work, calls: int) -> CapturedCalls | None:
    """Capture calls in a CUDA graph; return None if the function synchronizes with the device."""
    side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            work()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            for _ in range(calls):
                work()
    except RuntimeError:
        torch.cuda.synchronize()
        return None
    return CapturedCalls(graph, calls)


def time_alternating(
    works: Mapping[str, Work],
    repeats: int,
    device: torch.device,
    least_seconds: float = 0.0,
    most_calls: int = 1,
) -> dict[str, float]:
    """Return the median milliseconds of calls that take turns, so that drift affects all alike.

    Args:
        works: Functions to call.
        repeats: Number of samples of each.
        device: Device on which the functions run.
        least_seconds: Duration of a sample: as many calls in a row as that takes.
        most_calls: Most calls in a sample.
    """
    samples: dict[str, list[float]] = {name: [] for name in works}
    calls = dict.fromkeys(works, 1)
    for name, work in works.items():
        work()
        if most_calls > 1:
            once = _seconds(work, device, 1)
            calls[name] = max(1, min(most_calls, int(least_seconds / max(once, 1e-9)) + 1))
    for _ in range(repeats):
        for name, work in works.items():
            samples[name].append(1e3 * _seconds(work, device, calls[name]) / calls[name])
    return {name: statistics.median(times) for name, times in samples.items()}


def _seconds(work: Work, device: torch.device, calls: int) -> float:
    synchronize(device)
    start = time.perf_counter()
    for _ in range(calls):
        work()
    synchronize(device)
    return time.perf_counter() - start


def synchronize(device: torch.device) -> None:
    """Wait for a CUDA device; others have nothing to wait for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
