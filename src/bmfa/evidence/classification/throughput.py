"""Images per second: of the model alone, and end to end with reading and preprocessing."""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle, islice
from typing import Literal

import torch
from torch import Tensor

from bmfa.data.workers import iterate
from bmfa.evidence.model_methods import Layers, applied
from bmfa.evidence.runner.batches import ImageBatches
from bmfa.evidence.runner.loop import Subject
from bmfa.records import Row
from bmfa.timing import Work, capture_calls, synchronize

# A sample lasts at least 0.1 s or 50 calls, so that the clock's own time does not count.
SAMPLE_SECONDS = 0.1
MAX_CALLS = 50
END_TO_END_BATCHES = 2

Forward = Callable[[Tensor], Tensor]  # pixels on the device to outputs
Timed = Literal["graph", "eager"]  # whether a CUDA graph or the host launched the kernels


def measure(
    subject: Subject, batches: ImageBatches, methods: Sequence[str], layers: Layers, repeats: int
) -> dict[str, Row]:
    """Time every method on one batch on the device, and end to end; 0 repeats time nothing.

    Returns:
        The columns of speed by method, None for what was not timed.
    """
    columns = ("images_per_second", "images_per_second_end_to_end", "speedup", "timed")
    if repeats == 0:
        return {name: dict.fromkeys(columns) for name in methods}
    numbers = range(len(batches.sizes))
    first = next(batch for batch in batches.read(numbers) if batch.indices)
    pixels = repeat_to_size(subject.load(first), batches.size)
    rates = model_rates(subject, subject.logits, pixels, methods, layers, repeats)
    end_to_end = end_to_end_rates(subject, batches, methods, layers)
    full = rates[methods[0]][0]
    found: dict[str, Row] = {}
    for name, (rate, timed) in rates.items():
        values = (rate, end_to_end[name], rate / full, timed)
        found[name] = dict(zip(columns, values, strict=True))
    return found


def repeat_to_size(pixels: Tensor, size: int) -> Tensor:
    """Return a batch of `size` images, repeating those given."""
    return pixels[list(islice(cycle(range(len(pixels))), size))]


def model_rates(
    subject: Subject,
    forward: Forward,
    pixels: Tensor,
    methods: Sequence[str],
    layers: Layers,
    repeats: int,
) -> dict[str, tuple[float, Timed]]:
    """Return the images per second of every method on one batch that is on the device.

    All methods are warmed up and then timed in turn, `repeats` times over, so that a machine that
    slows down slows all of them; the median counts. On CUDA a method runs in a graph, because
    launching takes longer than small models do, unless it waits for the device.
    """
    calls: dict[str, int] = {}
    timed: dict[str, Timed] = {}
    for name in methods:
        with applied(subject.model.model, name, layers):
            _seconds(partial(forward, pixels), pixels.device, 1)
            work, timed[name] = _capture(forward, pixels, "graph" if pixels.is_cuda else "eager")
            once = _seconds(work, pixels.device, 1)
        calls[name] = max(1, min(MAX_CALLS, int(SAMPLE_SECONDS / max(once, 1e-9)) + 1))
    samples: dict[str, list[float]] = {name: [] for name in methods}
    for _ in range(repeats):
        for name in methods:
            with applied(subject.model.model, name, layers):
                work, timed[name] = _capture(forward, pixels, timed[name])
                if pixels.is_cuda:
                    _seconds(work, pixels.device, 1)  # raises the clocks, sets up the fresh patch
                samples[name].append(_seconds(work, pixels.device, calls[name]) / calls[name])
    return {
        name: (len(pixels) / statistics.median(times), timed[name])
        for name, times in samples.items()
    }


def end_to_end_rates(
    subject: Subject, batches: ImageBatches, methods: Sequence[str], layers: Layers
) -> dict[str, float]:
    """Return the images per second of every method over the first batches, read anew for each.

    The files have been read before, so they usually come from the page cache.
    """
    numbers = range(min(END_TO_END_BATCHES, len(batches.sizes)))
    loader, rates = batches.loader(numbers, persistent_workers=True), {}
    for _ in iterate(loader):
        pass  # starts the worker processes
    for name in methods:
        with applied(subject.model.model, name, layers):
            images, start = 0, time.perf_counter()
            for batch in iterate(loader):
                if batch.indices:
                    subject.logits(subject.load(batch)).cpu()
                    images += len(batch.indices)
            rates[name] = images / (time.perf_counter() - start)
    return rates


def _capture(forward: Forward, pixels: Tensor, wanted: Timed) -> tuple[Work, Timed]:
    """Return a call of the model as it is patched now, in a CUDA graph if wanted and possible."""
    work = partial(forward, pixels)
    graph = capture_calls(work, 1) if wanted == "graph" else None
    return (work, "eager") if graph is None else (graph.graph.replay, "graph")


def _seconds(work: Work, device: torch.device, calls: int) -> float:
    """Return the duration of several calls in a row."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(calls):
        work()
    synchronize(device)
    return time.perf_counter() - start
