"""bmfa ablation."""

from bmfa.cli import options as opt
from bmfa.cli.output import Output, table_of

COLUMNS = "parameter value mean_gap p95_gap leaf_percent unsplit_percent microseconds_per_instance"


def ablation(
    *,
    json: opt.Json = None,
    csv: opt.Csv = None,
    seed: opt.Seed = 0,
    device: opt.Device = "auto",
    quiet: opt.Quiet = False,
    dataset: opt.Dataset = "embedded",
    mode: opt.Mode = "image-edge",
    annotations: opt.Annotations = None,
    images: opt.Images = None,
    img_size: opt.CropSize = 256,
    limit: opt.InstanceLimit = None,
    workers: opt.Workers = None,
) -> None:
    """Epsilon, depth, grid and look-ahead, varied one at a time."""
    source = opt.instance_source(dataset, annotations, images, seed)
    from bmfa.evidence.ablation import run as experiment

    output = Output(json, quiet, csv)
    record = experiment.run(
        source,
        dataset=dataset,
        mode=mode,
        image_size=img_size,
        limit=limit,
        workers=opt.instance_workers(workers),
        progress=output.progress("images"),
    )
    output.finish(record, table_of(record.rows, COLUMNS))
