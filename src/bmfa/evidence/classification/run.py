"""Classification: accuracy, cost and speed of a model under every method, on labelled images."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from bmfa.checks import check_integer
from bmfa.evidence.classification import flops, throughput
from bmfa.evidence.methods import FULL, is_kind
from bmfa.evidence.model_methods import Layers, check_methods
from bmfa.evidence.runner import Progress
from bmfa.evidence.runner.batches import ImageBatches, Images
from bmfa.evidence.runner.loop import Subject, measure_images
from bmfa.evidence.runner.parts import count, from_first
from bmfa.models import LoadedModel
from bmfa.records import Record, Row, environment

DEFAULT_METHODS = (
    *(FULL, "quadrant-gap:0.8", "gamma:0.02", "exact-gap:0.5", "optimal:0.002"),
    *("tome:8", "pitome:0.95", "tofu:0.95", "diffrate:8", "crossget:0.95", "dct:0.95", "evit:0.7"),
    *("random-pool:8", "fixed-pool:2", "free-energy:8", "free-energy:12"),
)


def run(
    model: LoadedModel,
    images: Images,
    methods: Sequence[str] = DEFAULT_METHODS,
    *,
    layers: Layers = "last-4",
    batch_size: int = 25,
    seed: int = 0,
    device: str = "cpu",
    amp: bool = False,
    dtype: str | None = None,
    repeats: int = 5,
    workers: int | None = None,
    resume: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Record:
    """Evaluate every method on the same images.

    Processes joined by torch.distributed share the batches and all return the same rows as one
    process; the first process alone is timed. The model has no patch afterwards.

    Args:
        model: The model.
        images: Images with or without labels.
        methods: `full`, names of rules and names of reductions.
        layers: Layers that rules screen: `"all"`, `"last-K"` or indices.
        batch_size: Images in a batch.
        seed: Seed of random methods.
        device: Device of the model.
        amp: True to run the model under autocast.
        dtype: Name of a dtype that a copy of the model is cast to.
        repeats: Timings of which the median counts; 0 times nothing.
        workers: Worker processes that read images; None chooses by source and cores.
        resume: File of partial results, created if missing, from which a killed run continues.
        progress: Called with the images done and their number.

    Returns:
        A record of one row for each method, the full model first. A number that a method does not
        have is None.

    Raises:
        ValueError: If a method, a layer or the dtype is unknown, or no image can be read.

    Example:
        >>> from bmfa.data.classification import EmbeddedImages
        >>> from bmfa.models import load_model
        >>> record = run(load_model("embedded"), EmbeddedImages(2), ["tome:8"], repeats=0)
        >>> [(row["method"], row["images"]) for row in record.rows]
        [('full', 2), ('tome:8', 2)]
    """
    check_integer("repeats", repeats, low=0)
    names = check_methods(methods, model.model, layers)
    subject = Subject(model, device, amp=amp, dtype=dtype)
    batches = ImageBatches(images, model.preprocess, batch_size, workers=workers, device=device)
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
    # Before the long work, because this raises if a method does not support the model.
    costs = flops.costs(subject.model, batches.first(), names, layers, seed)
    sums, read = measure_images(
        subject,
        batches,
        {name: (name, layers) for name in names[1:]},
        {"experiment": "evaluate", **settings},
        resume=resume,
        progress=progress,
    )
    timed = from_first(lambda: throughput.measure(subject, batches, names, layers, repeats))
    settings |= {
        **read,
        "processes": count(),
        "repeats": repeats,
        "workers": batches.workers,
        "gflops": flops.COUNTING,
        "timing": throughput.TIMING,
    }
    best = _top1(sums[FULL])
    rows = [_row(name, sums[name], best) | costs[name] | timed[name] for name in names]
    return Record("evaluate", settings, rows, environment(device))


def _row(name: str, total: Mapping[str, float], best: float | None) -> Row:
    images, labelled, top1 = total["images"], total["labelled"], _top1(total)
    return {
        "method": name,
        "images": images,
        "top1_percent": top1,
        "top5_percent": 100 * total["top5"] / labelled if labelled else None,
        "drop_pp": None if top1 is None or best is None else best - top1,
        "agreement_percent": 100 * total["agreeing"] / images,
        "output_kl": total["output_kl"] / images,
        "leaf_percent": 100 * total["leaf_ratio"] / images if is_kind(name, "rule") else None,
    }


def _top1(total: Mapping[str, float]) -> float | None:
    """Return the accuracy in percent of the labelled images; None if none has a label."""
    return 100 * total["right"] / total["labelled"] if total["labelled"] else None
