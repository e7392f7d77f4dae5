"""bmfa probe."""

from typing import Annotated

from bmfa.cli import options as opt
from bmfa.cli.output import Output, table_of
from bmfa.records import Record

COLUMNS = (
    "method instances mean_gap median_gap p95_gap p99_gap max_gap leaf_percent unsplit_percent"
)

CASE_COLUMNS = (
    "category instances minority_area_percent gibbs_mass_percent gap method error leaves "
    "unsplit_percent"
)


def probe(
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
    method: opt.Methods = None,
    grid: Annotated[int, opt.option("--grid N", "Cells along a side of the grid.")] = 16,
    strict: Annotated[bool, opt.option("--strict", "Stop at the first bad instance.")] = False,
    resume: opt.Resume = None,
    cases: Annotated[
        bool,
        opt.option(
            "--cases",
            "Record a kite, a person, a book and a spoon with their trees instead, without images.",
        ),
    ] = False,
) -> None:
    """The mass each method loses on instances of real images."""
    if cases:
        _run_cases(Output(json, quiet), dataset, mode, annotations, images, limit, workers, seed)
        return
    source = opt.instance_source(dataset, annotations, images, seed)
    from bmfa.data import ProbeSettings
    from bmfa.evidence.methods import COMPARABLE_METHODS, DEFAULT_METHODS
    from bmfa.evidence.probes import run as experiment
    from bmfa.evidence.runner.parts import joined, rank

    output = Output(json, quiet, csv)
    with joined():
        record = experiment.run(
            source,
            dataset=dataset,
            mode=mode,
            methods=method or (*DEFAULT_METHODS, *COMPARABLE_METHODS),
            settings=ProbeSettings(grid, img_size),
            workers=opt.instance_workers(workers),
            limit=limit,
            strict=strict,
            progress=output.progress("images"),
            seed=seed,
            resume=resume,
        )
        if rank() == 0:
            rows = [row for row in record.rows if row["group"] == "all"]
            groups = dict.fromkeys(row["group"] for row in record.rows if row["group"] != "all")
            note = f"by group ({', '.join(groups)}): in the record, --json FILE"
            table = table_of(rows, COLUMNS)
            output.finish(record, table, notes=[note], warnings=_unused_instances(record))


def _run_cases(
    output: Output,
    dataset: str,
    mode: opt.Mode,
    annotations: str | None,
    images: str | None,
    limit: int | None,
    workers: int | None,
    seed: int,
) -> None:
    """Record the paper's four objects; the embedded ones are drawn."""
    from bmfa.data import EmbeddedObjects, InstanceSource
    from bmfa.evidence.images import cases as experiment

    source: InstanceSource = opt.instance_source(dataset, annotations, images, seed)
    if dataset == "embedded":
        source = EmbeddedObjects(seed=seed)
    record = experiment.run(
        source,
        dataset=dataset,
        mode=mode,
        images=False,
        limit=limit,
        workers=opt.instance_workers(workers),
        progress=output.progress("images"),
        seed=seed,
    )
    output.finish(record, table_of(record.rows, CASE_COLUMNS), warnings=_unused_instances(record))


def _unused_instances(record: Record) -> list[str]:
    """Describe the instances that the experiment left out."""
    lines = []
    for kind in ("faults", "left_out"):
        for reason, found in record.settings[kind].items():
            names = ", ".join(map(str, found["names"][:3]))
            lines.append(f"{kind.replace('_', ' ')}: {reason}: {found['instances']} (e.g. {names})")
    return lines
