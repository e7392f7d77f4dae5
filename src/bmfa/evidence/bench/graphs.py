"""Results and memory of a call in a CUDA graph, where the host may choose another path than outside.

Times are measured in CUDA graphs, so errors and memory are measured there too.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from bmfa.timing import capture_calls

Result = TypeVar("Result")


@dataclass(frozen=True, eq=False)
class Measured(Generic[Result]):
    """The result of a call, and the largest memory it allocated; None for a CPU."""

    result: Result
    peak_bytes: int | None


def capture_once(work: Callable[[], Result], device: torch.device) -> Callable[[], Result]:
    """Capture a call in a CUDA graph, and return a function that replays it.

    Args:
        work: The call. It reads its inputs from the same tensors in every replay.
        device: Device of the call; a call on a CPU, or one that cannot be captured, runs directly.

    Returns:
        A function whose result is valid until its next call.
    """
    if device.type != "cuda":
        return work
    results: list[Result] = []

    def captured() -> None:
        results[:] = [work()]

    graph = capture_calls(captured, 1)
    if graph is None:
        return work

    def replay() -> Result:
        graph.milliseconds()  # waits for the device
        return results[0]

    return replay


def run_as_timed(work: Callable[[], Result], device: torch.device) -> Measured[Result]:
    """Run a call in a CUDA graph if it can be captured, directly otherwise.

    Args:
        work: The call. Its result may be read after the replay, not inside the call.
        device: Device of the call; a call on a CPU runs directly.
    """
    if device.type != "cuda":
        return Measured(work(), None)
    calls: list[Measured[Result]] = []

    def measured() -> None:
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = work()
        peak = int(torch.cuda.max_memory_allocated(device) - before)
        calls[:] = [Measured(result, peak)]

    graph = capture_calls(measured, 1)
    if graph is None:
        calls.clear()
        measured()
    else:
        graph.milliseconds()
    torch.cuda.synchronize(device)
    return calls[0]
