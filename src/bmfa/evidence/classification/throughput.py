"""Images per second: of the model alone, and end to end with reading and preprocessing."""

import time
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from itertools import cycle, islice

import torch

from bmfa.data.workers import iterate
from bmfa.evidence.model_methods import Layers, apply, copy_sharing_weights
from bmfa.evidence.runner.batches import ImageBatches
from bmfa.evidence.runner.loop import Subject
from bmfa.records import Row
from bmfa.timing import Work, time_alternating, time_call

TIMING = (
    "images_per_second: one warm batch that is on the device, median of repeats that take turns on a "
    "CPU, one process, nothing recorded, in a CUDA graph where timed is graph; end to end: the first "
    "batches read, prepared, moved and classified; speedup: images_per_second over that of full in this "
    "run"
)
# A sample lasts at least 0.1 s or 50 calls, so that the clock's own time does not count.
SAMPLE_SECONDS = 0.1
END_TO_END_BATCHES = 2


@torch.inference_mode()
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
    subjects = {name: changed_copy(subject, name, layers) for name in methods}
    first = next(batch for batch in batches.read(range(len(batches.sizes))) if batch.indices)
    pixels = subject.load(first)
    pixels = pixels[list(islice(cycle(range(len(pixels))), batches.size))]  # a whole batch
    works = {name: partial(one.logits, pixels) for name, one in subjects.items()}
    times = model_times(works, subject.device, repeats)
    end_to_end = end_to_end_rates(subjects, batches)
    found: dict[str, Row] = {}
    for name, (milliseconds, timed) in times.items():
        rate, speedup = 1e3 * batches.size / milliseconds, times[methods[0]][0] / milliseconds
        found[name] = dict(zip(columns, (rate, end_to_end[name], speedup, timed), strict=True))
    return found


def changed_copy(subject: Subject, name: str, layers: Layers) -> Subject:
    """Return the model under a method, a copy that shares the weights."""
    found = copy(subject)
    found.model = replace(subject.model, model=copy_sharing_weights(subject.model.model))
    apply(found.model.model, name, layers)
    return found


def model_times(
    works: Mapping[str, Work], device: torch.device, repeats: int
) -> dict[str, tuple[float, str]]:
    """Return the median milliseconds of every call, and "graph" or "eager".

    Calls on a CPU take turns, so that a machine that slows down slows all of them. On CUDA a call runs
    in a graph, because launching takes longer than small models do, unless it waits for the device.
    """
    if device.type != "cuda":
        medians = time_alternating(works, repeats, device, SAMPLE_SECONDS)
        return {name: (milliseconds, "eager") for name, milliseconds in medians.items()}
    times = {name: time_call(work, repeats, device) for name, work in works.items()}
    return {name: (ms, "eager" if ms == eager else "graph") for name, (ms, eager) in times.items()}


def end_to_end_rates(subjects: Mapping[str, Subject], batches: ImageBatches) -> dict[str, float]:
    """Return the images per second of every method over the first batches, read anew for each.

    The files have been read before, so they usually come from the page cache.
    """
    numbers = range(min(END_TO_END_BATCHES, len(batches.sizes)))
    loader, rates = batches.loader(numbers, persistent_workers=True), {}
    for _ in iterate(loader):
        pass  # starts the worker processes
    for name, subject in subjects.items():
        images, start = 0, time.perf_counter()
        for batch in iterate(loader):
            if batch.indices:
                subject.logits(subject.load(batch)).cpu()
                images += len(batch.indices)
        rates[name] = images / (time.perf_counter() - start)
    return rates
