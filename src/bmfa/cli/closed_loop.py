"""bmfa closed-loop."""

from typing import Annotated

from bmfa.cli import options as opt
from bmfa.cli.output import Output, table_of

COLUMNS = "method layers images leaf_percent agreement_percent output_kl attention_kl top1_percent"


def closed_loop(
    *,
    json: opt.Json = None,
    csv: opt.Csv = None,
    wide: opt.Wide = False,
    seed: opt.Seed = 0,
    device: opt.Device = "auto",
    quiet: opt.Quiet = False,
    method: opt.Methods = None,
    model: opt.Model = "embedded",
    weights: opt.Weights = None,
    data_dir: opt.DataDir = None,
    labels: opt.Labels = None,
    class_map: opt.ClassMap = None,
    crop_pct: opt.CropPct = None,
    img_size: opt.ImgSize = None,
    batch_size: opt.BatchSize = 25,
    limit: opt.Limit = None,
    strict: opt.Strict = False,
    workers: opt.Workers = None,
    resume: opt.Resume = None,
    layers: Annotated[
        list[str] | None,
        opt.option(
            "--layers CHOICE",
            "Screened layers: all, last-K or indices such as 8,9,10; repeat for several "
            "choices.  [default: last-4]",
        ),
    ] = None,
) -> None:
    """A model's outputs with its attention screened."""
    from bmfa.evidence.closed_loop import run as experiment
    from bmfa.evidence.runner.parts import joined, rank
    from bmfa.models import load_model

    output = Output(json, quiet, csv)
    device = opt.resolve_device(device, multi_process=True)
    loaded = load_model(model, weights, img_size=img_size, crop_pct=crop_pct)
    images = opt.labelled_images(
        data_dir,
        model=loaded,
        labels=labels,
        class_map=class_map,
        limit=limit,
        strict=strict,
        seed=seed,
    )
    toy = opt.toy_model_warning(model, weights, "the images were") if data_dir else []
    with joined(device):
        record = experiment.run(
            loaded,
            images,
            method or experiment.DEFAULT_METHODS,
            layers=[opt.parse_layers(text) for text in layers or ["last-4"]],
            batch_size=batch_size,
            seed=seed,
            device=device,
            workers=workers,
            resume=resume,
            progress=output.progress("images"),
        )
        if rank() == 0:
            output.finish(
                record,
                table_of(record.rows, COLUMNS, wide),
                notes=opt.image_notes(images),
                warnings=[*opt.image_warnings(record.settings, images), *toy],
            )
