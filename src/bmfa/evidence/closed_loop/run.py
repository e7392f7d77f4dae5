"""The closed loop: how far screening inside a model moves its outputs, against the leaves left."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from bmfa.evidence.model_methods import Layers
from bmfa.evidence.runner import Progress
from bmfa.evidence.runner.batches import ImageBatches, Images
from bmfa.evidence.runner.loop import Subject, measure_images
from bmfa.models import LoadedModel, layer_indices
from bmfa.models.families import find_vision_transformer
from bmfa.records import Record, Row, environment
from bmfa.trees.rules import parse

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


def run(
    model: LoadedModel,
    images: Images,
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
    cases = {f"{m} in {name}": (m, choices[name]) for name in choices for m in methods}
    settings = {
        "model": model.name,
        "preprocessing": asdict(model.preprocess),
        "methods": list(methods),
        "layers": list(choices),
        "batch_size": batch_size,
        "seed": seed,
        "protocol": PROTOCOL,
    }
    sums, read = measure_images(
        Subject(model, device),
        batches,
        cases,
        {"experiment": "closed-loop", **settings},
        errors=True,
        resume=resume,
        progress=progress,
    )
    rows = [_row(key, total) for key, total in sums.items()]
    return Record("closed-loop", settings | read, rows, environment(device))


def _row(key: str, total: Mapping[str, float]) -> Row:
    """Return the means over images in the units of records; every leaf of the full model is a token."""
    method, _, layers = key.partition(" in ")
    images, labelled = total["images"], total["labelled"]
    row: Row = {
        "method": method,
        "layers": layers or "none",
        "images": images,
        "leaf_percent": 100 * total.get("leaf_ratio", images) / images,
        "agreement_percent": 100 * total["agreeing"] / images,
        "output_kl": total["output_kl"] / images,
        "attention_kl": total.get("attention_kl", 0.0) / images,
    }
    return row | ({"top1_percent": 100 * total["right"] / labelled} if labelled else {})


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
