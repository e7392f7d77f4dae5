"""The closed loop: how far screening inside a model moves its outputs, against the leaves left."""

import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from bmfa.data.classification import LabelledImage
from bmfa.evidence.methods import FULL
from bmfa.evidence.model_methods import Layers
from bmfa.evidence.runner import Progress
from bmfa.evidence.runner.batches import Batch, ImageBatches, ImageSource, label_settings
from bmfa.evidence.runner.resume import open_checkpoint
from bmfa.evidence.runner.totals import (
    ROUNDING,
    Reference,
    Sums,
    check_part,
    run_identity,
    sum_over_images,
)
from bmfa.models import LoadedModel, layer_indices, patch, record, unpatch
from bmfa.models.families import find_vision_transformer
from bmfa.records import Record, Row, environment
from bmfa.trees.rules import RandomQuadrants, parse

# Rules of the paper's tables without its variance-only row (quadrant-gap is our fit of its rule), then
# further rules. `bmfa report` adds the rows with printed thresholds.
DEFAULT_METHODS = (
    *("fixed-blocks:2", "global-mean", "random-quadrants:0.25", "random-quadrants:0.5"),
    *("quadrant-gap:0.8", "quadrant-gap:0.5", "gamma:0.05", "gamma:0.02"),
    *("exact-gap:0.5", "exact-gap:0.2", "mass:0.005", "mass:0.002", "mass:0.001"),
    *("optimal:0.005", "optimal:0.002", "optimal:0.001"),
)
PROTOCOL = (
    "one tree for each query and head over the spatial keys, prefix keys exact, every query screened; "
    "output_kl is KL(full || approximate); attention_kl is the mean of F - F~ over the spatial keys"
)


@dataclass
class Total:
    """Sums over the images of one method in one choice of layers."""

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
        """Add the (B, classes) outputs of some images, their mean leaf ratio and attention KL."""
        size = len(reference)
        self.images += size
        self.labelled += reference.labelled
        self.agreeing += reference.count_agreeing(logits)
        self.right += reference.count_correct(logits)
        self.output_kl += reference.sum_output_kl(logits)
        self.leaf_ratio += size * leaf_ratio
        self.attention_kl += size * attention_kl

    def ranges(self) -> dict[str, tuple[float, float]]:
        """Return the least and the largest possible value of every sum for `images` images."""
        non_negative = (-ROUNDING * self.images, sys.float_info.max)
        return {
            "labelled": (0, self.images),
            "agreeing": (0, self.images),
            "right": (0, self.labelled),
            "output_kl": non_negative,
            "leaf_ratio": (0, (1 + ROUNDING) * self.images),
            "attention_kl": non_negative,
        }

    def row(self, method: str, layers: str) -> Row:
        """Return the means in the units of records."""
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
    images: Iterable[LabelledImage] | ImageSource,
    methods: Sequence[str] = DEFAULT_METHODS,
    *,
    layers: Layers | Sequence[Layers] = "last-4",
    batch_size: int = 25,
    seed: int = 0,
    device: str = "cpu",
    workers: int | None = None,
    resume: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Record:
    """Compare the model screened by every rule, in every choice of layers, with the full model.

    Processes joined by torch.distributed share the batches and all return the same rows as one
    process. The model is patched during the run and has no patch afterwards.

    Args:
        model: The model.
        images: Images with or without labels.
        methods: Names of rules.
        layers: One choice of layers (`"all"`, `"last-K"` or indices), or a list of choices.
        batch_size: Images in a batch.
        seed: Seed of random rules.
        device: Device to run on; the model is moved to it.
        workers: Worker processes that read images; None chooses by source and cores.
        resume: File of partial results, created if missing, from which a killed run continues.
        progress: Called with the images done and their number.

    Returns:
        A record of one row for the full model, then one for each method and choice of layers.

    Raises:
        ValueError: If a method or a layer is unknown, or no image can be read.

    Example:
        >>> from bmfa.data.classification import EmbeddedImages
        >>> from bmfa.models import load_model
        >>> model = load_model("embedded")
        >>> record = run(model, EmbeddedImages(2), ["exact-gap:0"], layers="last-1")
        >>> [row["agreement_percent"] for row in record.rows]
        [100.0, 100.0]
    """
    choices = _layer_choices(layers)
    _check(model, methods, choices)
    batches = ImageBatches(images, model.preprocess, batch_size, workers=workers, device=device)
    cases = {f"{m} in {name}": (m, name) for name in choices for m in dict.fromkeys(methods)}
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

    def measure(batch: Batch) -> Sums:
        pixels = batch.to(device)
        reference = Reference(pixels, batch.indices, batch.labels, model.logits(pixels))
        full = Total()
        full.add(reference, reference.full, 1.0, 0.0)
        totals = {FULL: full}
        for case, (method, name) in cases.items():
            totals[case] = _measure(model, reference, method, choices[name], seed)
        return {key: asdict(total) for key, total in totals.items()}

    checkpoint = open_checkpoint(
        resume,
        "closed-loop",
        lambda: {**settings, **run_identity(model, batches, device)},
        check_part(batches, [FULL, *cases], Total),
    )
    with torch.inference_mode(), checkpoint as saved:
        totals, skipped = sum_over_images(batches, measure, Total, saved, progress)
    rows = [totals[FULL].row(FULL, "none"), *(totals[case].row(*cases[case]) for case in cases)]
    settings |= {
        **label_settings(batches.source),
        "skipped": skipped.count,
        "skipped_names": skipped.reasons,
    }
    return Record("closed-loop", settings, rows, environment(device))


def _measure(
    model: LoadedModel, reference: Reference, method: str, layers: Layers, seed: int
) -> Total:
    """Measure one method; random rules draw for each image alone, independent of its batch."""
    random, total = isinstance(parse(method), RandomQuadrants), Total()
    for part in reference.single() if random else [reference]:
        patch(model.model, rule=parse(method, seed + part.indices[0]), layers=layers)
        try:
            with record(model.model) as recording:
                logits = model.logits(part.pixels)
        finally:
            unpatch(model.model)
        total.add(part, logits, recording.leaf_ratio, recording.error)
    return total


def _layer_choices(layers: Layers | Sequence[Layers]) -> dict[str, Layers]:
    """Return the choices of layers by their names in rows."""
    single = isinstance(layers, str) or all(isinstance(part, int) for part in layers)
    choices: list[Any] = [layers] if single else list(layers)
    return {c if isinstance(c, str) else ",".join(map(str, c)): c for c in choices}


def _check(model: LoadedModel, methods: Sequence[str], choices: dict[str, Layers]) -> None:
    if not methods:
        raise ValueError(f"no methods; pass some, e.g. {', '.join(DEFAULT_METHODS[:3])}")
    for method in methods:
        parse(method)
    depth = len(find_vision_transformer(model.model).attentions)
    for layers in choices.values():
        layer_indices(layers, depth)
