"""Pictures per second: of the model alone, and end to end with reading and preparing them."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from typing import Literal

import torch
from torch import Tensor

from bmfa.evidence.model_methods import Layers, applied
from bmfa.evidence.runner.batches import Batch, Batches
from bmfa.models import LoadedModel
from bmfa.timing import Work, captured

# A sample lasts at least so many seconds, so that starting and stopping the clock does not count.
SAMPLE_SECONDS = 0.1
MOST_CALLS = 50
END_TO_END_BATCHES = 2

Call = Callable[[Tensor], Tensor]  # pixels on the device to outputs
Timed = Literal["graph", "eager"]


@dataclass(frozen=True)
class Rate:
    """Pictures per second, and whether the host launched every kernel or a CUDA graph did."""

    images_per_second: float
    timed: Timed


def filled(pixels: Tensor, size: int) -> Tensor:
    """A batch of so many pictures, those at hand repeated."""
    return pixels[list(islice(cycle(range(len(pixels))), size))]


def model_rates(
    model: LoadedModel,
    call: Call,
    pixels: Tensor,
    methods: Sequence[str],
    layers: Layers,
    repeats: int,
) -> dict[str, Rate]:
    """Pictures per second of every method on one batch that is on the device already.

    All methods are warmed up, then timed in turn, `repeats` times over: a machine that slows down
    slows all of them. The median counts. Nothing is recorded meanwhile. On CUDA a method runs in a
    graph, as launching takes longer than small models do; one that waits for the device cannot.
    """
    calls: dict[str, int] = {}
    timed: dict[str, Timed] = {}
    for name in methods:
        with applied(model.model, name, layers):
            _seconds(partial(call, pixels), pixels.device, 1)
            work, timed[name] = _work(call, pixels, "graph" if pixels.is_cuda else "eager")
            once = _seconds(work, pixels.device, 1)
        calls[name] = max(1, min(MOST_CALLS, int(SAMPLE_SECONDS / max(once, 1e-9)) + 1))
    samples: dict[str, list[float]] = {name: [] for name in methods}
    for _ in range(repeats):
        for name in methods:
            with applied(model.model, name, layers):
                work, timed[name] = _work(call, pixels, timed[name])
                if pixels.is_cuda:
                    _seconds(work, pixels.device, 1)  # clocks, and what a fresh patch sets up
                samples[name].append(_seconds(work, pixels.device, calls[name]) / calls[name])
    return {
        name: Rate(len(pixels) / statistics.median(times), timed[name])
        for name, times in samples.items()
    }


def end_to_end_rates(
    model: LoadedModel,
    run: Callable[[Batch], Tensor],
    batches: Batches,
    methods: Sequence[str],
    layers: Layers,
) -> dict[str, float]:
    """Pictures per second of every method over the first batches, read and prepared anew.

    The files were read before, so they come from memory where it holds them; `run` moves a batch to
    the device and gives its outputs.
    """
    rates = {}
    numbers = range(min(END_TO_END_BATCHES, len(batches)))
    for name in methods:
        with applied(model.model, name, layers):
            count, start = 0, time.perf_counter()
            for batch in batches.read(numbers):
                if batch.pixels is not None:
                    run(batch).cpu()
                    count += len(batch.pixels)
            rates[name] = count / (time.perf_counter() - start)
    return rates


def _work(call: Call, pixels: Tensor, wanted: Timed) -> tuple[Work, Timed]:
    """A call of the model as it is now, in a graph where that is wanted and works."""
    work = partial(call, pixels)
    graph = captured(work, 1) if wanted == "graph" else None
    return (work, "eager") if graph is None else (graph.graph.replay, "graph")


def _seconds(work: Work, device: torch.device, calls: int) -> float:
    """The time of some calls in a row."""
    _synchronise(device)
    start = time.perf_counter()
    for _ in range(calls):
        work()
    _synchronise(device)
    return time.perf_counter() - start


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
