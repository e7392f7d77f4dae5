"""Medians of times with and without CUDA graphs, and peaks of device memory."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

Work = Callable[[], object]
# A graph holds so many milliseconds of calls, so that starting it does not count.
GRAPH_MILLISECONDS, MOST_CALLS = 20.0, 20
WARM_UP = 3


def median_milliseconds(work: Work, repeats: int, device: torch.device) -> float:
    """The median time of a warmed-up call."""
    work()
    times = []
    for _ in range(repeats):
        _synchronise(device)
        start = time.perf_counter()
        work()
        _synchronise(device)
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def milliseconds(work: Work, repeats: int, device: torch.device) -> tuple[float, float | None]:
    """Median of a call, and on CUDA median without a graph too: with what the host adds.

    Where a call cannot be captured in a graph, both are the time without one.
    """
    if device.type != "cuda":
        return median_milliseconds(work, repeats, device), None
    for _ in range(WARM_UP):
        work()
    eager = median_milliseconds(work, repeats, device)
    graph = captured(work, max(1, min(MOST_CALLS, round(GRAPH_MILLISECONDS / max(eager, 1e-3)))))
    return (eager if graph is None else graph.median(repeats)), eager


class Captured:
    """Some calls in a CUDA graph."""

    def __init__(self, graph: torch.cuda.CUDAGraph, calls: int) -> None:
        self.graph, self.calls = graph, calls

    def once(self) -> float:
        """Milliseconds of a call, from one replay."""
        start, end = _event(), _event()
        start.record()
        self.graph.replay()
        end.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end)) / self.calls

    def median(self, repeats: int) -> float:
        """Median of some replays, after one."""
        self.once()
        return statistics.median(self.once() for _ in range(repeats))


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def captured(work: Work, calls: int) -> Captured | None:
    """Calls in a graph; None where something in them waits for the device."""
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
    return Captured(graph, calls)


def alternating(works: Mapping[str, Work], repeats: int, device: torch.device) -> dict[str, float]:
    """Medians of calls that take turns, so that a machine that slows down slows all of them."""
    samples: dict[str, list[float]] = {name: [] for name in works}
    for work in works.values():
        work()
    for _ in range(repeats):
        for name, work in works.items():
            _synchronise(device)
            start = time.perf_counter()
            work()
            _synchronise(device)
            samples[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(times) for name, times in samples.items()}


def alternating_graphs(works: Mapping[str, Work], repeats: int) -> dict[str, float] | None:
    """The same with every call in a CUDA graph; None where one of them cannot be captured."""
    graphs = {}
    for name, work in works.items():
        graph = captured(work, 1)
        if graph is None:
            return None
        graph.once()
        graphs[name] = graph
    samples: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(repeats):
        for name, graph in graphs.items():
            samples[name].append(graph.once())
    return {name: statistics.median(times) for name, times in samples.items()}


def peak_bytes(work: Work, device: torch.device) -> int | None:
    """Most that a call holds beyond what was held before it; None where that is not counted."""
    if device.type != "cuda":
        return None
    work()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    work()
    torch.cuda.synchronize(device)
    return int(torch.cuda.max_memory_allocated(device) - before)


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
