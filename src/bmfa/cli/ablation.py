"""bmfa ablation."""

from bmfa.cli import options as opt
from bmfa.cli.output import Output

COLUMNS = "parameter value mean_gap p95_gap leaf_percent unsplit_percent microseconds_per_instance"


def ablation(output: Output, instances: opt.Instances) -> None:
    """Epsilon, depth, grid and look-ahead, varied one at a time."""
    source = instances.source(output.seed)
    from bmfa.evidence.ablation import run as experiment

    record = experiment.run(
        source,
        dataset=instances.dataset,
        mode=instances.mode,
        image_size=instances.img_size,
        limit=instances.limit,
        workers=opt.instance_workers(instances.workers),
        progress=output.progress("images"),
    )
    output.finish(record, COLUMNS)
