"""Merging schedules on images that did not choose them: tuned, fixed, and another policy.

The images are divided into two halves, those of even and of odd index. On each half a schedule is
chosen for the operations of every baseline, and all methods are compared on the other half. Gains are of
the same images, and their intervals are from the bootstrap over images.
"""

from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bmfa.data.classification import LabelledImage
from bmfa.evidence.runner.batches import ImageBatches, ImageSource
from bmfa.merging import parse
from bmfa.models import LoadedModel, reduce, unpatch
from bmfa.models.families import find_vision_transformer
from bmfa.models.flops import count_flops
from bmfa.models.tuning_reduction import Progress, ReductionTuner, fixed_schedule
from bmfa.records import Record, Row, environment

BASELINES = ("tome:8", "tome:12")
RESAMPLES = 10_000  # of the bootstrap: the ends of a 95 % interval repeat to a tenth of a point
HALVES = ("even", "odd")


def run(
    model: LoadedModel,
    images: Iterable[LabelledImage] | ImageSource,
    baselines: Sequence[str] = BASELINES,
    *,
    policy: str = "free-energy",
    batch_size: int = 25,
    seed: int = 0,
    device: str = "cpu",
    workers: int = 1,
    choosing: int | None = None,
    rounds: int = 1,
    progress: Progress | bool = False,
) -> Record:
    """Compare tuned and fixed schedules with baselines of the same operations.

    Args:
        model: A classifier.
        images: The images; labels are not read.
        baselines: Names of reductions, e.g. `"tome:8"`.
        policy: The policy whose schedules are tuned.
        batch_size: Images in a batch.
        seed: Seed of the bootstrap.
        device: Device of the model.
        workers: 2 runs the halves in two processes.
        choosing: The first so many images of a half choose; None for all.
        rounds: As in `bmfa.tune_reduction`.
        progress: As in `bmfa.tune_reduction`.

    Returns:
        A record. `reported_on` is the half that a row is measured on, or `"both"`: then every image
        has the schedule that the other half chose.

    Raises:
        ValueError: If a name is unknown or fewer than four images can be read.
    """
    for name in baselines:
        parse(name)
    tensors = _read(model, images, batch_size)
    if len(tensors) < 4:
        raise ValueError(f"{len(tensors)} images can be read; pass at least four")
    model.model.to(device)
    halves = [tensors[0::2], tensors[1::2]]
    pairs = ((0, 1), (1, 0))
    arguments = [
        (
            model,
            policy,
            list(baselines),
            halves[chosen][:choosing],
            halves[reported],
            batch_size,
            rounds,
        )
        for chosen, reported in pairs
    ]
    if workers > 1:
        # New processes: a fork of one that has run kernels in threads may hang.
        with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
            jobs = [pool.submit(_compare_all, *some, False) for some in arguments]
            results = [job.result() for job in jobs]
    else:
        results = [_compare_all(*some, progress) for some in arguments]
    rows: list[Row] = []
    outcomes: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for (chosen, reported), result in zip(pairs, results, strict=True):
        for name, found in result.items():
            for outcome in found:
                outcomes.setdefault((name, outcome["kind"]), []).append(outcome)
            rows += _rows(name, found, HALVES[chosen], HALVES[reported], seed)
    for name in baselines:
        pooled = [
            _pooled(outcomes[name, kind])
            for kind in ("baseline", "fixed", "tuned")
            if (name, kind) in outcomes
        ]
        rows += _rows(name, pooled, "the other half", "both", seed)
    settings = {
        "model": model.name,
        "preprocessing": asdict(model.preprocess),
        "baselines": list(baselines),
        "policy": policy,
        "images": len(tensors),
        "choosing": min(len(tensors) // 2, choosing or len(tensors)),
        "rounds": rounds,
        "batch_size": batch_size,
        "seed": seed,
        "halves": "images of even and of odd index in the order of their names",
        "resamples": RESAMPLES,
        "interval": "95 %, bootstrap over images of the difference of agreement on the same images",
    }
    return Record("reduction", settings, rows, environment(device))


def _read(
    model: LoadedModel, images: Iterable[LabelledImage] | ImageSource, batch_size: int
) -> Tensor:
    batches = ImageBatches(images, model.preprocess, batch_size, workers=0)
    numbers = range(len(batches.sizes))
    parts = [batch.pixels for batch in batches.read(numbers) if batch.indices]
    return torch.cat(parts) if parts else torch.empty(0, 3, 1, 1)


def _compare_all(
    model: LoadedModel,
    policy: str,
    baselines: Sequence[str],
    choosing: Tensor,
    reporting: Tensor,
    batch_size: int,
    rounds: int,
    progress: Progress | bool,
) -> dict[str, list[dict[str, Any]]]:
    """Compare schedules chosen on some images with every baseline, on other images."""
    depth = len(find_vision_transformer(model.model).blocks)
    tuner = ReductionTuner(
        model.model, dict(model.options), policy, choosing, batch_size, depth, progress, rounds
    )
    with tuner:
        reference = tuner.logits(reporting)
        return {name: _compare(tuner, name, reporting, reference) for name in baselines}


def _compare(
    tuner: ReductionTuner, name: str, images: Tensor, reference: Tensor
) -> list[dict[str, Any]]:
    """Measure a baseline, and schedules of its operations, on images that did not choose."""
    reduce(tuner.counted, name)
    flops = count_flops(tuner.counted, images[:1].to("cpu", torch.float32), tuner.options)
    reduce(tuner.model, name)
    try:
        logits = tuner.logits(images)
    finally:
        unpatch(tuner.model)
    found = [_outcome("baseline", name, flops, reference, logits)]
    tuned = tuner.best_schedule(flops)
    schedules = {"fixed": fixed_schedule(tuner.search, flops), "tuned": tuned}
    for kind, schedule in schedules.items():
        if schedule is not None:
            method = f"{tuner.policy}:{','.join(map(str, schedule))}"
            logits = tuner.reduced_logits(schedule, images)
            found.append(_outcome(kind, method, tuner.count(schedule), reference, logits))
    return found


def _outcome(
    kind: str, method: str, flops: int, reference: Tensor, logits: Tensor
) -> dict[str, Any]:
    p, q = reference.log_softmax(-1), logits.log_softmax(-1)
    return {
        "kind": kind,
        "method": method,
        "gflops": flops / 1e9,
        "agrees": (logits.argmax(-1) == reference.argmax(-1)).double().numpy(),
        "kl": (p.exp() * (p - q)).sum(-1).numpy(),
    }


def _pooled(outcomes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        "kind": outcomes[0]["kind"],
        "method": " and ".join(dict.fromkeys(outcome["method"] for outcome in outcomes)),
        "gflops": sum(outcome["gflops"] for outcome in outcomes) / len(outcomes),
        "agrees": np.concatenate([outcome["agrees"] for outcome in outcomes]),
        "kl": np.concatenate([outcome["kl"] for outcome in outcomes]),
    }


def _rows(
    baseline: str, outcomes: Sequence[dict[str, Any]], chosen: str, reported: str, seed: int
) -> list[Row]:
    first = outcomes[0]
    rows: list[Row] = []
    for outcome in outcomes:
        gain = outcome["agrees"] - first["agrees"]
        low, high = _interval(gain, seed)
        kind = outcome["kind"]
        rows.append(
            {
                "baseline": baseline,
                "schedule": kind,
                "chosen_on": chosen if kind == "tuned" else None,
                "reported_on": reported,
                "images": len(gain),
                "method": outcome["method"],
                "gflops": outcome["gflops"],
                "agreement_percent": 100 * float(outcome["agrees"].mean()),
                "output_kl": float(outcome["kl"].mean()),
                "gain_pp": 100 * float(gain.mean()),
                "gain_low_pp": 100 * low,
                "gain_high_pp": 100 * high,
            }
        )
    return rows


def _interval(gain: Any, seed: int) -> tuple[float, float]:
    """Return the 95 % interval of the mean of paired differences, by resampling the images."""
    random = np.random.default_rng(seed)
    means = [gain[random.integers(0, len(gain), len(gain))].mean() for _ in range(RESAMPLES)]
    low, high = np.quantile(means, (0.025, 0.975))
    return float(low), float(high)
