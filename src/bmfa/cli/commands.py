"""What each command does: call one function and hand its record on."""

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from bmfa.cli.output import check_device, finish, progress_line, table_of
from bmfa.files import write_atomic
from bmfa.packages import require_packages
from bmfa.records import Record

if TYPE_CHECKING:
    from bmfa.data import InstanceSource
    from bmfa.evidence.report_models import OwnModel

Options = argparse.Namespace

PROBE_COLUMNS = "method instances mean_gap median_gap p95_gap p99_gap max_gap leaf_percent"


def synthetic(options: Options) -> None:
    """bmfa synthetic."""
    from bmfa.evidence.methods import DEFAULT_METHODS
    from bmfa.evidence.synthetic import run as synthetic

    methods = options.method or DEFAULT_METHODS
    if options.curve:
        record = synthetic.failure_curve(methods, seed=options.seed)
        columns = "method cells delta minority_mass gap leaf_percent"
        finish(record, options, table_of(record, columns))
        return
    record = synthetic.run(
        methods,
        options.placement or synthetic.PLACEMENTS,
        max_depth=options.max_depth,
        seed=options.seed,
        scatter_seeds=options.scatter_seeds,
        device=check_device(options.device),
        progress=progress_line(options),
    )
    columns = "placement method count mean_gap p95_gap leaf_percent"
    finish(record, options, table_of(record, columns))


def probe(options: Options) -> None:
    """bmfa probe."""
    from bmfa.data import ProbeSettings
    from bmfa.evidence.methods import COMPARABLE_METHODS, DEFAULT_METHODS
    from bmfa.evidence.probes import run as probes
    from bmfa.evidence.runner import processes as shards

    source = _source(options)
    with shards.joined() as processes:
        record = probes.run(
            source,
            dataset=options.dataset,
            mode=options.mode,
            methods=options.method or (*DEFAULT_METHODS, *COMPARABLE_METHODS),
            settings=ProbeSettings(options.grid, options.img_size),
            workers=_workers(options),
            limit=options.limit,
            strict=options.strict,
            progress=progress_line(options, "pictures"),
            seed=options.seed,
            resume=options.resume,
        )
        if processes.first:
            table = table_of(record, f"{PROBE_COLUMNS} unsplit_percent", group="all")
            groups = dict.fromkeys(row["group"] for row in record.rows if row["group"] != "all")
            note = f"by group ({', '.join(groups)}): in the record, --json FILE"
            finish(record, options, table, notes=[note], warnings=_left_out(record))


def ablation(options: Options) -> None:
    """bmfa ablation."""
    from bmfa.evidence.ablation import run as ablation

    record = ablation.run(
        _source(options),
        dataset=options.dataset,
        mode=options.mode,
        picture_size=options.img_size,
        limit=options.limit,
        workers=_workers(options),
        progress=progress_line(options, "pictures"),
    )
    columns = "parameter value mean_gap p95_gap leaf_percent unsplit_percent"
    finish(record, options, table_of(record, f"{columns} microseconds_per_instance"))


def train_embedded(options: Options) -> None:
    """bmfa train-embedded."""
    from bmfa.models.embedded import training

    show = progress_line(options, "step")
    training.train(
        options.output,
        seed=training.SEED if options.seed is None else options.seed,
        steps=training.STEPS if options.steps is None else options.steps,
        device=check_device(options.device),
        resume=options.resume,
        progress=None if show is None else lambda step, steps, _: show(step, steps),
    )
    if not options.quiet:
        print(f"weights: {options.output}")


def bench_trees(options: Options) -> None:
    """bmfa bench trees."""
    from bmfa.evidence.bench import trees as bench

    record = bench.trees(
        options.method or bench.TREE_METHODS,
        grids=options.grids,
        batch_size=options.batch_size,
        repeats=options.repeats,
        seed=options.seed,
        device=check_device(options.device),
    )
    columns = "what n dtype method threads milliseconds microseconds_per_grid speedup"
    finish(record, options, table_of(record, f"{columns} multiple_of_softmax leaf_percent"))


def info(options: Options) -> None:
    """bmfa info."""
    from bmfa.environment import describe

    record = describe()
    finish(record, options, table_of(record, "what name status"))


def report(options: Options) -> None:
    """bmfa report."""
    require_packages(("matplotlib", "PIL"), "report")
    if options.coco or options.lvis:
        require_packages(("pycocotools",), "data")
    from bmfa.evidence import page as report
    from bmfa.evidence import report as chain

    folder = Path(options.output)
    if options.records:
        records = [
            Record.from_json(Path(name).read_text("utf-8"), name) for name in options.records
        ]
    else:
        records = []
        for name, record in chain.run(
            seed=options.seed,
            workers=_workers(options),
            coco=options.coco,
            lvis=options.lvis,
            own=_own_model(options),
            device=check_device(options.device),
        ):
            write_atomic(folder / "records" / f"{name}.json", record.to_json())
            records.append(record)
            if not options.quiet:
                print(f"{name}: {len(record.rows)} rows", flush=True)
    write_atomic(folder / "index.html", report.build_page(records))
    if options.png:
        for name, figure in report.figures.ALL.items():
            if figure.drawable(records):
                report.save_png(name, records, folder / "figures" / f"{name}.png")
    if not options.quiet:
        print(f"page: {folder / 'index.html'}")


def _own_model(options: Options) -> "OwnModel | None":
    """A person's model and pictures, both or neither."""
    from bmfa.evidence.report_models import OwnModel

    if options.imagenet is None and options.weights is None:
        return None
    if options.imagenet is None or options.weights is None:
        raise ValueError("--weights FILE and --imagenet DIR go together; pass both, or neither")
    return OwnModel(
        options.weights, options.imagenet, options.model, options.labels, limit=options.limit
    )


def _source(options: Options) -> "InstanceSource":
    """The embedded pictures, or a file of instances with its pictures."""
    from bmfa.data import EmbeddedScenes, InstanceFiles

    require_packages(("PIL",), "data")
    if options.dataset == "embedded":
        if options.annotations or options.images:
            raise ValueError(
                "--annotations and --images go with --dataset coco or lvis, not embedded"
            )
        return EmbeddedScenes(seed=options.seed)
    if not options.annotations or not options.images:
        raise ValueError(
            f"--dataset {options.dataset} needs --annotations FILE and --images DIR; "
            "--dataset embedded needs neither"
        )
    require_packages(("PIL", "pycocotools"), "data")
    return InstanceFiles(options.annotations, options.images)


def _workers(options: Options) -> int:
    if options.workers is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    workers: int = options.workers
    return workers


def _left_out(record: Record) -> list[str]:
    """The instances that were not used."""
    lines = []
    for kind in ("faults", "left_out"):
        for reason, told in record.settings[kind].items():
            names = ", ".join(map(str, told["names"][:3]))
            lines.append(f"{kind.replace('_', ' ')}: {reason}: {told['instances']} (e.g. {names})")
    return lines
