"""Classification: accuracy, cost and speed of a model under every method, on labelled images."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict

import torch

from bmfa.checks import check_integer
from bmfa.data.classification import LabelledImage
from bmfa.evidence.classification import flops, throughput
from bmfa.evidence.classification.evaluator import Evaluator, Total
from bmfa.evidence.methods import FULL, is_kind
from bmfa.evidence.model_methods import Layers, check_methods
from bmfa.evidence.runner import Progress
from bmfa.evidence.runner.batches import ImageBatches, ImageSource, label_settings
from bmfa.evidence.runner.resume import open_checkpoint
from bmfa.evidence.runner.totals import check_part, run_identity, sum_over_images
from bmfa.models import LoadedModel
from bmfa.records import Record, Row, environment

DEFAULT_METHODS = (
    *(FULL, "quadrant-gap:0.8", "gamma:0.02", "exact-gap:0.5", "optimal:0.002"),
    *("tome:8", "pitome:0.95", "tofu:0.95", "diffrate:8", "crossget:0.95", "dct:0.95", "evit:0.7"),
    *("random-pool:8", "fixed-pool:2", "free-energy:8", "free-energy:12"),
)
TIMING = (
    "images_per_second: one warm batch that is on the device, median of alternating repeats, one "
    "process, nothing recorded, in a CUDA graph where timed is graph; end to end: the first batches "
    "read, prepared, moved and classified; speedup: images_per_second over that of full in this run"
)


def run(
    model: LoadedModel,
    images: Iterable[LabelledImage] | ImageSource,
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
    evaluator = Evaluator(model, layers, seed=seed, device=device, amp=amp, dtype=dtype)
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
    costs = flops.costs(evaluator.model, batches.first(), names, layers, seed)
    checkpoint = open_checkpoint(
        resume,
        "evaluate",
        lambda: {**settings, **run_identity(evaluator.model, batches, device)},
        check_part(batches, names, Total),
    )
    with torch.inference_mode(), checkpoint as saved:
        totals, skipped = sum_over_images(
            batches, lambda batch: evaluator.measure_all(batch, names), Total, saved, progress
        )
        speed = saved.processes.from_first(
            lambda: throughput.measure(evaluator, batches, names, repeats)
        )
    settings |= {
        **label_settings(batches.source),
        "skipped": skipped.count,
        "skipped_names": skipped.reasons,
        "processes": saved.processes.count,
        "repeats": repeats,
        "workers": batches.workers,
        "gflops": flops.COUNTING,
        "timing": TIMING,
    }
    rows = [_row(name, totals, costs[name], speed) for name in names]
    return Record("evaluate", settings, rows, environment(device))


def _row(
    name: str, totals: dict[str, Total], cost: flops.Cost, speed: throughput.Throughput
) -> Row:
    total, full = totals[name], totals[FULL]
    top1, full_top1 = total.percent(total.top1), full.percent(full.top1)
    rate, full_rate = speed.model.get(name), speed.model.get(FULL)
    return {
        "method": name,
        "images": total.images,
        "top1_percent": top1,
        "top5_percent": total.percent(total.top5),
        "drop_pp": None if top1 is None or full_top1 is None else full_top1 - top1,
        "agreement_percent": 100 * total.agreeing / total.images,
        "output_kl": total.output_kl / total.images,
        "leaf_percent": 100 * total.leaf_ratio / total.images if is_kind(name, "rule") else None,
        "final_tokens": cost.final_tokens,
        "gflops": cost.flops / 1e9,
        "images_per_second": None if rate is None else rate.images_per_second,
        "images_per_second_end_to_end": speed.end_to_end.get(name),
        "speedup": rate.images_per_second / full_rate.images_per_second
        if rate is not None and full_rate is not None
        else None,
        "timed": None if rate is None else rate.timed,
    }
