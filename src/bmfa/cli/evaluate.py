"""bmfa evaluate."""

from typing import Annotated

from bmfa.cli import options as opt
from bmfa.cli.output import Output, table_of

# By importance: without --wide, those that exceed the width are left out.
COLUMNS = (
    "method images top1_percent drop_pp agreement_percent leaf_percent gflops speedup output_kl "
    "final_tokens top5_percent images_per_second images_per_second_end_to_end"
)


def evaluate(
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
    layers: opt.Layers = "last-4",
    amp: Annotated[bool, opt.option("--amp", "Run the model under autocast.")] = False,
    dtype: Annotated[
        str | None, opt.option("--dtype NAME", "Cast the model: float32, float16 or bfloat16.")
    ] = None,
    repeats: Annotated[
        int, opt.option("--repeats N", "Timings; their median counts. 0 for none.")
    ] = 5,
) -> None:
    """Accuracy, cost and speed of a model, method by method."""
    from bmfa.evidence.classification import run as experiment
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
            layers=opt.parse_layers(layers),
            batch_size=batch_size,
            seed=seed,
            device=device,
            amp=amp,
            dtype=dtype,
            repeats=repeats,
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
