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
MOST_IN_ROW = 50  # calls in a sample of a CPU, at most
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
    if graph is None:
        return eager, eager
    times = [_replay_milliseconds(graph) / calls for _ in range(1 + repeats)]
    return statistics.median(times[1:]), eager


def _replay_milliseconds(graph: torch.cuda.CUDAGraph) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end))


def capture_calls(work: Work, calls: int) -> torch.cuda.CUDAGraph | None:
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
    return graph


def time_alternating(
    works: Mapping[str, Work], repeats: int, device: torch.device, least_seconds: float = 0.0
) -> dict[str, float]:
    """Return the median milliseconds of calls that take turns, so that drift affects all alike.

    Args:
        works: Functions to call.
        repeats: Number of samples of each.
        device: Device on which the functions run.
        least_seconds: Duration of a sample: as many calls in a row as that takes, at most MOST_IN_ROW.
    """
    samples: dict[str, list[float]] = {name: [] for name in works}
    calls = dict.fromkeys(works, 1)
    for name, work in works.items():
        work()
        if least_seconds:
            once = max(clock(work, device)[0], 1e-9)
            calls[name] = min(MOST_IN_ROW, int(least_seconds / once) + 1)
    for _ in range(repeats):
        for name, work in works.items():
            samples[name].append(1e3 * clock(work, device, calls[name])[0])
    return {name: statistics.median(times) for name, times in samples.items()}


def clock(work: Callable[[], Any], device: torch.device, calls: int = 1) -> tuple[float, Any]:
    """Return the seconds of a call, the mean of several in a row, and what the last one returned."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(calls):
        result = work()
    synchronize(device)
    return (time.perf_counter() - start) / calls, result


def synchronize(device: torch.device) -> None:
    """Wait for a CUDA device; others have nothing to wait for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
