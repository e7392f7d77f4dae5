"""Accuracy, cost and speed of a model under every method, on pictures with labels."""

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bmfa.checks import check_integer
from bmfa.data.imagenet import LabelledPicture
from bmfa.environment import amx_refused
from bmfa.evidence.classification import flops, throughput
from bmfa.evidence.methods import FULL
from bmfa.evidence.model_methods import Layers, applied, check_methods, count_leaves, parse
from bmfa.evidence.runner import processes as shards
from bmfa.evidence.runner.batches import (
    Batch,
    Batches,
    Progress,
    Source,
    Sums,
    check_part,
    collect,
    identity,
    skipped_in,
)
from bmfa.evidence.runner.outputs import ROUNDING, Reference, add_up, check_labels, check_outputs
from bmfa.evidence.runner.resume import lost_pictures_explained, open_checkpoint
from bmfa.models import LoadedModel, unpatch
from bmfa.records import Record, Row, environment

DEFAULT_METHODS = (
    FULL,
    "quadrant-gap:0.8",
    "gamma:0.02",
    "exact-gap:0.5",
    "optimal:0.002",
    "tome:8",
    "pitome:0.95",
    "tofu:0.95",
    "diffrate:8",
    "crossget:0.95",
    "dct:0.95",
    "evit:0.7",
    "random-pool:8",
    "fixed-pool:2",
    "free-energy:8",
    "free-energy:12",
)
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
TIMING = (
    "images_per_second: one warm batch that is on the device, median of alternating repeats, one "
    "process, nothing recorded, in a CUDA graph where timed is graph; end to end: the first batches "
    "read, prepared, moved and classified; speedup: images_per_second over that of full in this run"
)
_TOP = 5


@dataclass
class Total:
    """Sums over the pictures of one method."""

    images: int = 0
    labelled: int = 0
    agreeing: int = 0
    top1: int = 0
    top5: int = 0
    output_kl: float = 0.0
    leaf_ratio: float = 0.0

    def add(self, reference: Reference, logits: Tensor, leaf_ratio: float) -> None:
        """Outputs (B, classes) of some pictures, and their leaf ratios added up."""
        self.images += len(reference)
        self.labelled += reference.labelled
        self.agreeing += reference.agreeing(logits)
        self.top1 += reference.right(logits)
        self.top5 += reference.among(logits, _TOP)
        self.output_kl += reference.output_kl(logits)
        self.leaf_ratio += leaf_ratio

    def ranges(self) -> dict[str, tuple[float, float]]:
        """The least and the largest value of every sum, given how many pictures were counted."""
        return {
            "labelled": (0, self.images),
            "agreeing": (0, self.images),
            "top5": (0, self.labelled),
            "top1": (0, self.top5),
            "output_kl": (-ROUNDING * self.images, sys.float_info.max),
            "leaf_ratio": (0, (1 + ROUNDING) * self.images),
        }

    def percent(self, right: int) -> float | None:
        """Of the pictures with labels; None without any."""
        return 100 * right / self.labelled if self.labelled else None


@dataclass(frozen=True)
class Speed:
    """Pictures per second by method; empty where nothing was timed."""

    model: dict[str, throughput.Rate]
    end_to_end: dict[str, float]


class Evaluation:
    """A model on its device, in its precision, and the methods that are applied to it."""

    def __init__(
        self,
        model: LoadedModel,
        layers: Layers,
        seed: int,
        device: str,
        amp: bool,
        dtype: str | None,
    ) -> None:
        self.layers, self.seed, self.amp = layers, seed, amp
        self.device, self.dtype = torch.device(device), _dtype(dtype, amp)
        _check_products(self.device, amp or dtype == "bfloat16")
        unpatch(model.model)
        if self.dtype is not None:
            # The caller's model keeps its own precision.
            model = replace(model, model=deepcopy(model.model).to(self.device, self.dtype))
        model.model.to(self.device)
        self.model = model

    def logits(self, pixels: Tensor) -> Tensor:
        """Outputs of pictures on the device."""
        with self._autocast():
            return self.model.logits(pixels)

    def moved(self, batch: Batch) -> Tensor:
        """The pictures of a batch on the device."""
        assert batch.pixels is not None
        return batch.pixels.to(self.device, self.dtype)

    def reference(self, batch: Batch) -> Reference:
        """A batch with the outputs of the full model."""
        pixels = self.moved(batch)
        full = check_outputs(self.logits(pixels).float(), self.model.name)
        check_labels(batch.labels, full.shape[-1])
        return Reference(pixels, batch.places, batch.labels, full)

    def measure(self, reference: Reference, name: str) -> Total:
        """One method on one batch; coins are drawn picture by picture, so that no batching shows."""
        random, total = parse(name).random, Total()
        for part in reference.single() if random else [reference]:
            seed = self.seed + (part.places[0] if random else 0)
            with (
                applied(self.model.model, name, self.layers, seed),
                count_leaves(self.model.model) as leaves,
            ):
                logits = check_outputs(self.logits(part.pixels).float(), name)
            total.add(part, logits, leaves.sum)
        return total

    def speed(self, batches: Batches, methods: Sequence[str], repeats: int) -> Speed:
        """Pictures per second of every method; nothing is timed with 0 repeats."""
        if repeats == 0:
            return Speed({}, {})
        first = next(
            batch for batch in batches.read(range(len(batches))) if batch.pixels is not None
        )
        pixels = throughput.filled(self.moved(first), batches.size)
        return Speed(
            throughput.model_rates(self.model, self.logits, pixels, methods, self.layers, repeats),
            throughput.end_to_end_rates(
                self.model,
                lambda batch: self.logits(self.moved(batch)),
                batches,
                methods,
                self.layers,
            ),
        )

    def _autocast(self) -> AbstractContextManager[Any]:
        kind = self.device.type
        half = torch.bfloat16 if kind == "cpu" else torch.float16
        return torch.autocast(kind, dtype=half, enabled=self.amp)


def run(
    model: LoadedModel,
    pictures: Iterable[LabelledPicture] | Source,
    methods: Sequence[str] = DEFAULT_METHODS,
    *,
    layers: Layers = "last-4",
    batch_size: int = 25,
    seed: int = 0,
    device: str = "cpu",
    amp: bool = False,
    dtype: str | None = None,
    repeats: int = 5,
    workers: int = 0,
    resume: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Record:
    """Every method on the same pictures; the first row is the full model's.

    A method is `full`, a rule (in `layers`) or a reduction. `amp` runs the model under autocast,
    `dtype` casts a copy of it; `repeats` timings of which the median counts, 0 for none. A number
    that a method does not have is None. Processes and `resume` as in `closed_loop.run`; the first
    process alone is timed.
    """
    check_integer("repeats", repeats, low=0)
    names = check_methods(methods, model.model, layers)
    evaluation = Evaluation(model, layers, seed, device, amp, dtype)
    batches = Batches(pictures, model.preprocess, batch_size, workers)
    settings = {
        "model": model.name,
        "preprocessing": asdict(model.preprocess),
        "methods": names,
        "layers": layers if isinstance(layers, str) else list(layers),
        "batch_size": batch_size,
        "seed": seed,
        "amp": amp,
        "dtype": dtype or "float32",
    }
    # Before the long work, as this finds out that a method does not serve the model.
    first = batches.first()
    assert first.pixels is not None
    costs = flops.costs(evaluation.model, first.pixels, names, layers, seed)
    processes = shards.current()
    checkpoint = open_checkpoint(
        resume,
        "evaluate",
        lambda: {**settings, **identity(evaluation.model, batches, device)},
        check_part(batches, names, Total),
        processes,
    )
    with torch.inference_mode(), lost_pictures_explained(resume, checkpoint):
        parts = collect(batches, _measure_all(evaluation, names), processes, checkpoint, progress)
        speed = processes.from_first(lambda: evaluation.speed(batches, names, repeats))
    sums = [part["sums"] for part in parts if part["sums"]]
    totals = {name: Total(**add_up([one[name] for one in sums])) for name in names}  # type: ignore[arg-type]
    skipped = skipped_in(parts)
    settings |= {
        "skipped": skipped.count,
        "skipped_names": skipped.reasons,
        "processes": processes.count,
        "repeats": repeats,
        "workers": workers,
        "gflops": flops.COUNTING,
        "timing": TIMING,
    }
    rows = [_row(name, totals, costs[name], speed) for name in names]
    return Record("evaluate", settings, rows, environment(device))


def _measure_all(evaluation: Evaluation, names: Sequence[str]) -> Callable[[Batch], Sums]:
    def measure(batch: Batch) -> Sums:
        reference = evaluation.reference(batch)
        whole = Total()
        whole.add(reference, reference.full, 0.0)
        found = {name: evaluation.measure(reference, name) for name in names if name != FULL}
        return {name: asdict(total) for name, total in {FULL: whole, **found}.items()}

    return measure


def _row(name: str, totals: dict[str, Total], cost: flops.Cost, speed: Speed) -> Row:
    total, full = totals[name], totals[FULL]
    top1, best = total.percent(total.top1), full.percent(full.top1)
    rate, base = speed.model.get(name), speed.model.get(FULL)
    ruled = parse(name).rule is not None
    return {
        "method": name,
        "images": total.images,
        "top1_percent": top1,
        "top5_percent": total.percent(total.top5),
        "drop_pp": None if top1 is None or best is None else best - top1,
        "agreement_percent": 100 * total.agreeing / total.images,
        "output_kl": total.output_kl / total.images,
        "leaf_percent": 100 * total.leaf_ratio / total.images if ruled else None,
        "final_tokens": cost.final_tokens,
        "gflops": cost.flops / 1e9,
        "images_per_second": None if rate is None else rate.images_per_second,
        "images_per_second_end_to_end": speed.end_to_end.get(name),
        "speedup": None
        if rate is None or base is None
        else rate.images_per_second / base.images_per_second,
        "timed": None if rate is None else rate.timed,
    }


def _check_products(device: torch.device, bf16: bool) -> None:
    """Raise where oneDNN would end the process: it trusts an AMX that is advertised, not granted."""
    if bf16 and device.type == "cpu" and "ONEDNN_MAX_CPU_ISA" not in os.environ and amx_refused():
        raise ValueError(
            "bfloat16 products are unsafe here: AMX is advertised but refused; "
            "set ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 in the environment"
        )


def _dtype(name: str | None, amp: bool) -> torch.dtype | None:
    if name is None:
        return None
    if name not in DTYPES:
        raise ValueError(f"dtype is {name!r}; pass one of {', '.join(DTYPES)}")
    if amp and name != "float32":
        raise ValueError(f"amp and dtype {name} are given; pass one of them")
    return DTYPES[name]
