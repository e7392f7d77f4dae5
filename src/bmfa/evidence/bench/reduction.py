"""Merging schedules on images that did not choose them: tuned, fixed, and another policy.

The images are divided into two halves, those of even and of odd index. On each half a schedule is
chosen for the operations of every baseline, and all methods are compared on the other half. Gains are of
the same images, and their intervals are from the bootstrap over images.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bmfa.evidence.metrics import RESAMPLES, compare, gain_columns
from bmfa.evidence.runner.batches import ImageBatches, Images
from bmfa.merging import parse
from bmfa.models import LoadedModel, reduce
from bmfa.models.flops import count_flops
from bmfa.models.measures import MEASURES
from bmfa.models.tuning_reduction import ReductionTuner, Schedule
from bmfa.records import Record, Row, environment

BASELINES = ("tome:8", "tome:12")


def run(
    model: LoadedModel,
    images: Images,
    baselines: Sequence[str] = BASELINES,
    *,
    policy: str = "free-energy",
    batch_size: int = 25,
    seed: int = 0,
    device: str = "cpu",
    workers: int = 1,
    choosing: int | None = None,
    rounds: int = 1,
    progress: bool = False,
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
    batches = ImageBatches(images, model.preprocess, batch_size, workers=0)
    read = [b.pixels for b in batches.read(range(len(batches.sizes))) if b.indices]
    tensors = torch.cat(read) if read else torch.empty(0)
    if len(tensors) < 4:
        raise ValueError(f"{len(tensors)} images can be read; pass at least four")
    model.model.to(device)
    halves = {"even": tensors[0::2], "odd": tensors[1::2]}
    pairs = (("even", "odd"), ("odd", "even"))  # the half that chooses, and the other one
    options: dict[str, Any] = {"baselines": list(baselines), "policy": policy}
    options |= {"rounds": rounds, "batch_size": batch_size}
    compare_all = partial(_compare_all, model, options)
    arguments = [(halves[chosen][:choosing], halves[reported]) for chosen, reported in pairs]
    if workers > 1:
        # New processes: a fork of one that has run kernels in threads may hang.
        with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
            jobs = [pool.submit(compare_all, False, *some) for some in arguments]
            results = [job.result() for job in jobs]
    else:
        results = [compare_all(progress, *some) for some in arguments]
    rows: list[Row] = []
    for (chosen, reported), result in zip(pairs, results, strict=True):
        for name, found in result.items():
            rows += _rows(name, found, chosen, reported, seed)
    for name in baselines:
        first, second = (result[name] for result in results)
        pooled = {kind: _pooled(first[kind], second[kind]) for kind in first if kind in second}
        rows += _rows(name, pooled, "the other half", "both", seed)
    settings = {
        "model": model.name,
        "preprocessing": asdict(model.preprocess),
        **options,
        "images": len(tensors),
        "choosing": min(len(tensors) // 2, choosing or len(tensors)),
        "seed": seed,
        "halves": "images of even and of odd index in the order of their names",
        "resamples": RESAMPLES,
        "interval": "95 %, bootstrap over images of the difference of agreement on the same images",
    }
    return Record("reduction", settings, rows, environment(device))


@dataclass(frozen=True)
class Outcome:
    """What a schedule, or a reduction, gives on some images."""

    method: str
    gflops: float
    agreeing: NDArray[np.float64]  # (images,)
    output_kl: NDArray[np.float64]  # (images,)


def _compare_all(
    model: LoadedModel, options: dict[str, Any], progress: bool, choosing: Tensor, reporting: Tensor
) -> dict[str, dict[str, Outcome]]:
    """Compare every baseline with schedules of its operations, chosen on some images, on others."""
    images = {"calibration": choosing, "test": reporting}
    policy, rounds, size = (options[name] for name in ("policy", "rounds", "batch_size"))
    tuner = ReductionTuner(model, images, None, size, policy=policy, rounds=rounds)
    with tuner.running(progress):
        reference = _logits(tuner)
        return {name: _compare(tuner, name, reference) for name in options["baselines"]}


def _logits(tuner: ReductionTuner, schedule: Schedule = ()) -> Tensor:
    """Return the logits of the images that are reported with a schedule, or of the model as it is."""
    logits = torch.cat(list(tuner.outputs(MEASURES["logits"], "test", schedule)))
    return logits.double().cpu()


def _compare(tuner: ReductionTuner, name: str, reference: Tensor) -> dict[str, Outcome]:
    def outcome(method: str, flops: int, logits: Tensor) -> Outcome:
        columns = compare(reference, logits, [None] * len(logits))
        agreeing, kl = (columns[key].double().cpu().numpy() for key in ("agreeing", "output_kl"))
        return Outcome(method, flops / 1e9, agreeing, kl)

    reduce(tuner.counted, name)
    pixels = tuner.images["test"][:1].to("cpu", torch.float32)
    flops = count_flops(tuner.counted, pixels, tuner.options)
    reduce(tuner.model, name)
    found = {"baseline": outcome(name, flops, _logits(tuner))}
    tuner.measure_alone()
    tuned = tuner.best_schedule(flops)
    for kind, schedule in (("fixed", tuner.schedules.even(2, flops)), ("tuned", tuned)):
        if schedule is not None:
            method = f"{tuner.policy}:{','.join(map(str, schedule))}"
            found[kind] = outcome(method, tuner.count(schedule), _logits(tuner, schedule))
    return found


def _pooled(first: Outcome, second: Outcome) -> Outcome:
    return Outcome(
        " and ".join(dict.fromkeys((first.method, second.method))),
        (first.gflops + second.gflops) / 2,
        np.concatenate([first.agreeing, second.agreeing]),
        np.concatenate([first.output_kl, second.output_kl]),
    )


def _rows(
    baseline: str, outcomes: Mapping[str, Outcome], chosen: str, reported: str, seed: int
) -> list[Row]:
    return [
        {
            "baseline": baseline,
            "schedule": kind,
            "chosen_on": chosen if kind == "tuned" else None,
            "reported_on": reported,
            "images": len(outcome.agreeing),
            "method": outcome.method,
            "gflops": outcome.gflops,
            "agreement_percent": 100 * float(outcome.agreeing.mean()),
            "output_kl": float(outcome.output_kl.mean()),
            **gain_columns(outcome.agreeing, outcomes["baseline"].agreeing, seed),
        }
        for kind, outcome in outcomes.items()
    ]
