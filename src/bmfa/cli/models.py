"""The commands that run a model over pictures, in one process or in those that torchrun started."""

import argparse
import os
from typing import TYPE_CHECKING, Any

from bmfa.cli.output import check_device, finish, progress_line, table_of
from bmfa.packages import require_packages
from bmfa.records import Record

if TYPE_CHECKING:
    from bmfa.models import LoadedModel

Options = argparse.Namespace

LOOP_COLUMNS = (
    "method layers images leaf_percent agreement_percent output_kl attention_kl top1_percent"
)
EVALUATION_COLUMNS = (
    "method images top1_percent top5_percent drop_pp agreement_percent leaf_percent final_tokens "
    "gflops images_per_second images_per_second_end_to_end speedup"
)
EMBEDDED_PICTURES = 200


def closed_loop(options: Options) -> None:
    """bmfa closed-loop."""
    from bmfa.evidence.closed_loop import run as closed_loop
    from bmfa.evidence.runner import processes as shards

    device = check_device(shards.own_device(options.device))
    model, pictures = _loaded(options), _pictures(options)
    with shards.joined(device) as processes:
        record = closed_loop.run(
            model,
            pictures,
            options.method or closed_loop.DEFAULT_METHODS,
            layers=[_layers(text) for text in options.layers or ["last-4"]],
            batch_size=options.batch_size,
            seed=options.seed,
            device=device,
            workers=_workers(options, device),
            resume=options.resume,
            progress=progress_line(options, "pictures"),
        )
        if processes.first:
            finish(record, options, table_of(record, LOOP_COLUMNS), warnings=_skipped(record))


def evaluate(options: Options) -> None:
    """bmfa evaluate."""
    from bmfa.evidence.classification import run as evaluation
    from bmfa.evidence.runner import processes as shards

    device = check_device(shards.own_device(options.device))
    model, pictures = _loaded(options), _pictures(options)
    with shards.joined(device) as processes:
        record = evaluation.run(
            model,
            pictures,
            options.method or evaluation.DEFAULT_METHODS,
            layers=_layers(options.layers),
            batch_size=options.batch_size,
            seed=options.seed,
            device=device,
            amp=options.amp,
            dtype=options.dtype,
            repeats=options.repeats,
            workers=_workers(options, device),
            resume=options.resume,
            progress=progress_line(options, "pictures"),
        )
        if processes.first:
            finish(record, options, table_of(record, EVALUATION_COLUMNS), warnings=_skipped(record))


def _loaded(options: Options) -> "LoadedModel":
    from bmfa.models import load_model

    return load_model(
        options.model, options.weights, img_size=options.img_size, crop_pct=options.crop_pct
    )


def _pictures(options: Options) -> Any:
    """The pictures of a folder, or the embedded ones for the embedded model."""
    from bmfa.data.imagenet import ClassPictures, embedded_pictures

    if options.data_dir is not None:
        require_packages(("PIL",), "data")
        return ClassPictures(
            options.data_dir, options.labels, limit=options.limit, strict=options.strict
        )
    if options.model != "embedded":
        raise ValueError(f"--model {options.model} needs --data-dir DIR with pictures")
    if options.labels is not None:
        raise ValueError("--labels goes with --data-dir DIR; the embedded pictures have labels")
    limit = EMBEDDED_PICTURES if options.limit is None else options.limit
    return embedded_pictures(limit, options.seed)


def _layers(text: str) -> str | list[int]:
    """A choice of layers: a word, or indices with commas between."""
    parts = text.split(",")
    return [int(part) for part in parts] if all(part.isdecimal() for part in parts) else text


def _workers(options: Options, device: str) -> int:
    """Threads that read ahead; without a word, as many as a GPU keeps busy, and none beside a CPU."""
    if options.workers is not None:
        workers: int = options.workers
        return workers
    if not device.startswith("cuda"):
        return 0
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(16, (os.cpu_count() or 1) // here))


def _skipped(record: Record) -> list[str]:
    """What could not be read."""
    from bmfa.data.imagenet import Skipped

    return Skipped(record.settings["skipped"], record.settings["skipped_names"]).lines()
