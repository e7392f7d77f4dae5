"""Screening inside a model: how far its outputs move, against the leaves that are left."""

import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from bmfa.data.imagenet import LabelledPicture
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
    nothing_read,
    skipped_in,
)
from bmfa.evidence.runner.outputs import ROUNDING, Reference, add_up
from bmfa.evidence.runner.resume import lost_pictures_explained, open_checkpoint
from bmfa.models import LoadedModel, layer_indices, patch, record, unpatch
from bmfa.models.hosts import find_host
from bmfa.records import Record, Row, environment
from bmfa.trees.rules import RandomQuadrants, parse

# The paper's rules at its settings, then what goes past them.
DEFAULT_METHODS = (
    "fixed-blocks:2",
    "global-mean",
    "random-quadrants:0.25",
    "random-quadrants:0.5",
    "quadrant-gap:0.8",
    "quadrant-gap:0.5",
    "gamma:0.05",
    "gamma:0.02",
    "exact-gap:0.5",
    "exact-gap:0.2",
    "mass:0.005",
    "mass:0.002",
    "mass:0.001",
    "optimal:0.005",
    "optimal:0.002",
    "optimal:0.001",
)
FULL = "full"
PROTOCOL = (
    "one tree for each query and head over the spatial keys, prefix keys exact, every query screened; "
    "output_kl is KL(full || approximate); attention_kl is the mean of F - F~ over the spatial keys"
)
Layers = str | Sequence[int]


@dataclass
class Total:
    """Sums over the pictures of one method in one choice of layers."""

    images: int = 0
    labelled: int = 0
    agreeing: int = 0
    right: int = 0
    output_kl: float = 0.0
    leaf_ratio: float = 0.0
    attention_kl: float = 0.0

    def add(
        self, reference: Reference, logits: Tensor, leaf_ratio: float, attention_kl: float
    ) -> None:
        """Outputs (B, classes) of some pictures, their mean leaf ratio and mean attention KL."""
        size = len(reference)
        self.images += size
        self.labelled += reference.labelled
        self.agreeing += reference.agreeing(logits)
        self.right += reference.right(logits)
        self.output_kl += reference.output_kl(logits)
        self.leaf_ratio += size * leaf_ratio
        self.attention_kl += size * attention_kl

    def ranges(self) -> dict[str, tuple[float, float]]:
        """The least and the largest value of every sum, given how many pictures were counted."""
        unlimited = (-ROUNDING * self.images, sys.float_info.max)
        return {
            "labelled": (0, self.images),
            "agreeing": (0, self.images),
            "right": (0, self.labelled),
            "output_kl": unlimited,
            "leaf_ratio": (0, (1 + ROUNDING) * self.images),
            "attention_kl": unlimited,
        }

    def row(self, method: str, layers: str) -> Row:
        """The means, in the units of the records."""
        row: Row = {
            "method": method,
            "layers": layers,
            "images": self.images,
            "leaf_percent": 100 * self.leaf_ratio / self.images,
            "agreement_percent": 100 * self.agreeing / self.images,
            "output_kl": self.output_kl / self.images,
            "attention_kl": self.attention_kl / self.images,
        }
        if self.labelled:
            row["top1_percent"] = 100 * self.right / self.labelled
        return row


def run(
    model: LoadedModel,
    pictures: Iterable[LabelledPicture] | Source,
    methods: Sequence[str] = DEFAULT_METHODS,
    *,
    layers: Layers | Sequence[Layers] = "last-4",
    batch_size: int = 25,
    seed: int = 0,
    device: str = "cpu",
    workers: int = 0,
    resume: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Record:
    """Every method in every choice of layers, against the full model on the same pictures.

    `layers` is one choice ("all", "last-K", a list of indices) or a list of such choices. The first
    row is the full model's. The model is patched while this runs and left without any patch.

    Processes joined by torch.distributed share the batches and all return the rows of one process,
    bit for bit. `resume` is a file of partial results, created where missing: a run that was killed
    continues from it to the same rows.
    """
    choices = _choices(layers)
    _check(model, methods, choices)
    batches = Batches(pictures, model.preprocess, batch_size, workers)
    keys = [(method, name) for name in choices for method in dict.fromkeys(methods)]
    settings = {
        "model": model.name,
        "preprocessing": asdict(model.preprocess),
        "methods": list(methods),
        "layers": list(choices),
        "batch_size": batch_size,
        "seed": seed,
        "protocol": PROTOCOL,
    }
    unpatch(model.model).to(device)
    processes = shards.current()
    checkpoint = open_checkpoint(
        resume,
        "closed-loop",
        lambda: {**settings, **identity(model, batches, device)},
        check_part(batches, [FULL, *map(_key, keys)], Total),
        processes,
    )

    def measure(batch: Batch) -> Sums:
        reference = _reference(model, batch, device)
        whole = Total()
        whole.add(reference, reference.full, 1.0, 0.0)
        found = {
            _key(key): _measure(model, reference, key[0], choices[key[1]], seed) for key in keys
        }
        return {key: asdict(total) for key, total in {FULL: whole, **found}.items()}

    with torch.inference_mode(), lost_pictures_explained(resume, checkpoint):
        parts = collect(batches, measure, processes, checkpoint, progress)
    read = [part["sums"] for part in parts if part["sums"]]
    if not read:
        raise nothing_read(skipped_in(parts))

    def total(key: str) -> Total:
        return Total(**add_up([sums[key] for sums in read]))  # type: ignore[arg-type]

    rows = [total(FULL).row(FULL, "none"), *(total(_key(key)).row(*key) for key in keys)]
    skipped = skipped_in(parts)
    settings |= {"skipped": skipped.count, "skipped_names": skipped.reasons}
    return Record("closed-loop", settings, rows, environment(device))


def _reference(model: LoadedModel, batch: Batch, device: str) -> Reference:
    assert batch.pixels is not None
    pixels = batch.pixels.to(device)
    return Reference(pixels, batch.places, batch.labels, model.logits(pixels))


def _measure(
    model: LoadedModel, reference: Reference, method: str, layers: Layers, seed: int
) -> Total:
    """One method on one batch; coins are drawn picture by picture, so that no batching shows."""
    alone, total = isinstance(parse(method), RandomQuadrants), Total()
    for part in reference.single() if alone else [reference]:
        patch(model.model, rule=parse(method, seed + part.places[0]), layers=layers)
        try:
            with record(model.model) as recording:
                logits = model.logits(part.pixels)
        finally:
            unpatch(model.model)
        total.add(part, logits, recording.leaf_ratio, recording.error)
    return total


def _key(key: tuple[str, str]) -> str:
    return " in ".join(key)


def _choices(layers: Layers | Sequence[Layers]) -> dict[str, Layers]:
    """The choices of layers by the name that rows give them."""
    single = isinstance(layers, str) or all(isinstance(part, int) for part in layers)
    choices: list[Any] = [layers] if single else list(layers)
    return {c if isinstance(c, str) else ",".join(map(str, c)): c for c in choices}


def _check(model: LoadedModel, methods: Sequence[str], choices: dict[str, Layers]) -> None:
    """Raise before any picture is read."""
    if not methods:
        raise ValueError(f"no methods; pass some, e.g. {', '.join(DEFAULT_METHODS[:3])}")
    for method in methods:
        parse(method)
    depth = len(find_host(model.model).attentions)
    for layers in choices.values():
        layer_indices(layers, depth)
