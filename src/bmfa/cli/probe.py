"""bmfa probe."""

from typing import Any

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
    output: Output,
    instances: opt.Instances,
    method: opt.Methods = None,
    grid: int = 16,
    strict: bool = False,
    resume: str | None = None,
    cases: bool = False,
) -> None:
    """The mass each method loses on instances of real images.

    Args:
        method (NAME:VALUE): Method such as gamma:0.005; repeat for several. Without this option, a
            default list runs. The methods are listed at the end of this page.
        grid (N): Cells along a side of the grid.
        strict: Stop at the first bad instance.
        resume (FILE): Partial results to continue from; the file is created if it does not exist.
        cases: Record a kite, a person, a book and a spoon with their trees instead, without images.
    """
    source = instances.source(output.seed)
    from bmfa.data import EmbeddedObjects, ProbeSettings
    from bmfa.evidence.images import cases as four_objects
    from bmfa.evidence.methods import COMPARABLE_METHODS, DEFAULT_METHODS
    from bmfa.evidence.probes import run as experiment
    from bmfa.evidence.runner.parts import joined, rank

    options: dict[str, Any] = {
        "dataset": instances.dataset,
        "mode": instances.mode,
        "limit": instances.limit,
        "workers": opt.instance_workers(instances.workers),
        "progress": output.progress("images"),
        "seed": output.seed,
    }
    if cases:
        drawn = EmbeddedObjects(seed=output.seed) if instances.dataset == "embedded" else source
        record = four_objects.run(drawn, images=False, **options)
        return output.finish(record, CASE_COLUMNS, warnings=_unused_instances(record))
    with joined():
        record = experiment.run(
            source,
            methods=method or (*DEFAULT_METHODS, *COMPARABLE_METHODS),
            settings=ProbeSettings(grid, instances.img_size),
            strict=strict,
            resume=resume,
            **options,
        )
        if rank() == 0:
            groups = dict.fromkeys(row["group"] for row in record.rows if row["group"] != "all")
            note = f"by group ({', '.join(groups)}): in the record, --json FILE"
            shown = [row for row in record.rows if row["group"] == "all"]
            table = table_of(shown, COLUMNS, output.wide)
            warnings = _unused_instances(record)
            output.finish(record, COLUMNS, table=table, notes=[note], warnings=warnings)


def _unused_instances(record: Record) -> list[str]:
    """Describe the instances that the experiment left out."""
    lines = []
    for kind in ("faults", "left_out"):
        for reason, found in record.settings[kind].items():
            names = ", ".join(map(str, found["names"][:3]))
            lines.append(f"{kind.replace('_', ' ')}: {reason}: {found['instances']} (e.g. {names})")
    return lines
