"""bmfa bench: trees, attention and models against their baselines, or the tables of old records."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

from bmfa.cli import options as opt
from bmfa.cli.output import Output, table_of
from bmfa.packages import require_packages
from bmfa.records import Record

# Columns by importance: without --wide, those that exceed the width are left out.
TREE_COLUMNS = (
    "what n dtype method threads microseconds_per_grid speedup multiple_of_softmax leaf_percent "
    "milliseconds"
)
ATTENTION_COLUMNS = (
    "n threads method density_percent error_l2_percent error_p95_query_percent milliseconds speedup ran "
    "heads dim dtype batch estimated_error_percent target_met_percent milliseconds_eager speedup_eager "
    "peak_mebibytes extra_memory_percent"
)
MODEL_COLUMNS = (
    "img_size n method density_percent error_l2_percent mask_iou milliseconds speedup tiled_layers "
    "layers speedup_eager milliseconds_eager peak_mebibytes heads dim dtype batch"
)
REDUCTION_COLUMNS = (
    "baseline schedule chosen_on reported_on images gflops agreement_percent output_kl gain_pp "
    "gain_low_pp gain_high_pp"
)

BenchModel = Annotated[
    str,
    opt.option(
        "--model NAME",
        "embedded or timm:NAME, with random weights unless --weights is given; bench attention "
        "also takes random: normal q, k, v without a model.",
    ),
]
BenchMethods = Annotated[
    list[str] | None,
    opt.option(
        "--method NAME:VALUE",
        "tiles:SHARE of the tiles to expand, error:TARGET or leaves:SHARE of the tokens; may be "
        "repeated. A default list without it.",
    ),
]
Images = Annotated[
    str | None, opt.option("--data-dir DIR", "Folder of images; embedded ones by default.")
]
Dtype = Annotated[
    str | None,
    opt.option(
        "--dtype NAME",
        "bfloat16 (the default on a GPU), float16 or float32 (the default elsewhere).",
    ),
]
Repeats = Annotated[
    int | None, opt.option("--repeats N", "Timings; their median counts (5 on a GPU, 3 elsewhere).")
]
Records = Annotated[
    list[str] | None,
    opt.option(
        "--records FILE",
        "Show the tables and figures of this record without running anything; may be repeated.",
    ),
]
Markdown = Annotated[bool, opt.option("--markdown", "Print the table as Markdown.")]
Figures = Annotated[str | None, opt.option("--figures DIR", "Write the figures to DIR as PNG.")]


def trees(
    *,
    json: opt.Json = None,
    csv: opt.Csv = None,
    wide: opt.Wide = False,
    seed: opt.Seed = 0,
    device: opt.Device = "auto",
    quiet: opt.Quiet = False,
    method: opt.Methods = None,
    grids: Annotated[int, opt.option("--grids N", "Number of 16x16 grids.")] = 36_000,
    batch_size: Annotated[
        int, opt.option("--batch-size N", "Images in a batch of the softmax part.")
    ] = 64,
    repeats: Annotated[int, opt.option("--repeats N", "Timings; their median counts.")] = 7,
) -> None:
    """Trees against the queue-based oracle, and against softmax."""
    from bmfa.evidence.bench import trees as experiment

    record = experiment.run(
        method or experiment.TREE_METHODS,
        grids=grids,
        batch_size=batch_size,
        repeats=repeats,
        seed=seed,
        device=opt.resolve_device(device),
    )
    Output(json, quiet, csv).finish(record, table_of(record.rows, TREE_COLUMNS, wide))


def attention(
    *,
    json: opt.Json = None,
    csv: opt.Csv = None,
    wide: opt.Wide = False,
    seed: opt.Seed = 0,
    device: opt.Device = "auto",
    quiet: opt.Quiet = False,
    model: BenchModel = "embedded",
    weights: opt.Weights = None,
    data_dir: Images = None,
    method: BenchMethods = None,
    dtype: Dtype = None,
    repeats: Repeats = None,
    records: Records = None,
    markdown: Markdown = False,
    figures: Figures = None,
    tokens: Annotated[
        list[int] | None,
        opt.option(
            "--tokens N",
            "Number of tokens, a square; may be repeated (1024, 4096 and 16384, and 196 and 65536 on a "
            "GPU).",
        ),
    ] = None,
    images: Annotated[
        int | None, opt.option("--images N", "Number of images (4 on a GPU, else 1).")
    ] = None,
    threads: Annotated[
        list[int] | None,
        opt.option("--threads N", "Number of threads to time with on a CPU; may be repeated."),
    ] = None,
) -> None:
    """Tiled attention against the best dense path.

    Queries, keys and values are those of a model on images, at several numbers of tokens.
    """
    from bmfa.evidence.bench import attention as experiment
    from bmfa.evidence.bench import summary
    from bmfa.evidence.bench.inputs import InputSource

    if figures is not None:
        require_packages(("matplotlib",), "report")
    output = Output(json, quiet, csv)
    show = partial(_show, output, ATTENTION_COLUMNS, wide, markdown, figures)
    if records:
        return _show_files(show, records)
    require_packages(("PIL",), "data")
    device = opt.resolve_device(device)
    cuda = device.startswith("cuda")
    record = experiment.run(
        InputSource.open(
            model, weights, data_dir, images=images or (4 if cuda else 1), seed=seed, device=device
        ),
        tokens=tokens or (),
        methods=method or (),
        dtype=dtype,
        repeats=(5 if cuda else 3) if repeats is None else repeats,
        threads=threads or (),
        progress=output.progress("sizes"),
    )
    show(record, [] if markdown else summary.lines(dict(record.settings)))


def model(
    *,
    json: opt.Json = None,
    csv: opt.Csv = None,
    wide: opt.Wide = False,
    seed: opt.Seed = 0,
    device: opt.Device = "auto",
    quiet: opt.Quiet = False,
    model: BenchModel = "embedded",
    weights: opt.Weights = None,
    data_dir: Images = None,
    method: BenchMethods = None,
    dtype: Dtype = None,
    repeats: Repeats = None,
    records: Records = None,
    markdown: Markdown = False,
    figures: Figures = None,
    img_size: Annotated[
        list[int] | None,
        opt.option(
            "--img-size PX",
            "Side of the images in pixels; may be repeated (1024, 2048 and 4096 on a GPU, else 512, "
            "1024 and 2048).",
        ),
    ] = None,
    layers: opt.Layers = "all",
    tiled: Annotated[
        bool, opt.option("--tiled", "Use tiles even where dense attention is faster.")
    ] = False,
    batch_size: opt.BatchSize = 1,
    images: Annotated[
        int | None,
        opt.option("--images N", "Images to average over; those of one batch by default."),
    ] = None,
    decoder: Annotated[
        str | None,
        opt.option(
            "--decoder FILE",
            "Weights of the saliency decoder of the model; adds the agreement of the masks.",
        ),
    ] = None,
) -> None:
    """A model at high resolution, screened and dense, end to end."""
    from bmfa.evidence.bench import model as experiment

    if figures is not None:
        require_packages(("matplotlib",), "report")
    output = Output(json, quiet, csv)
    show = partial(_show, output, MODEL_COLUMNS, wide, markdown, figures)
    if records:
        return _show_files(show, records)
    require_packages(("PIL",), "data")
    device = opt.resolve_device(device)
    settings = experiment.Settings(
        model=model,
        weights=weights,
        data_dir=data_dir,
        decoder=decoder,
        methods=tuple(method or ()),
        layers=opt.parse_layers(layers),
        allow_dense=not tiled,
        batch_size=batch_size,
        images=images,
        dtype=dtype,
        device=device,
        repeats=(5 if device.startswith("cuda") else 3) if repeats is None else repeats,
        seed=seed,
    )
    show(experiment.run(settings, img_size or (), output.progress("sizes")))


def _show_files(show: Callable[[Record], None], paths: Sequence[str]) -> None:
    for path in paths:
        show(Record.from_json(Path(path).read_text("utf-8"), path))


def _show(
    output: Output,
    columns: str,
    wide: bool,
    markdown: bool,
    folder: str | None,
    record: Record,
    notes: Sequence[str] = (),
) -> None:
    """Print the table of a benchmark as text or Markdown, and write its figures."""
    from bmfa.evidence.bench import chapter
    from bmfa.evidence.page import figures

    files: dict[str | Path, Callable[[], bytes]] = {}
    if folder is not None:
        for name in ("attention-time", "attention-error"):
            if figures.ALL[name].drawable(record):
                files[Path(folder) / f"{name}.png"] = partial(figures.ALL[name].png, record)
    rows = [row for row in record.rows if row.get("what") != "kernel"]
    table = chapter.markdown(record) if markdown else table_of(rows, columns, wide)
    output.finish(record, table, notes=notes, figures=files, announce=not markdown)


def reduction(
    *,
    json: opt.Json = None,
    csv: opt.Csv = None,
    wide: opt.Wide = False,
    seed: opt.Seed = 0,
    device: opt.Device = "auto",
    quiet: opt.Quiet = False,
    model: opt.Model = "embedded",
    weights: opt.Weights = None,
    data_dir: opt.DataDir = None,
    crop_pct: opt.CropPct = None,
    img_size: opt.ImgSize = None,
    batch_size: opt.BatchSize = 25,
    limit: opt.Limit = None,
    workers: Annotated[
        int, opt.option("--workers N", "2 runs the two halves in processes of their own.")
    ] = 1,
    choosing: Annotated[
        int | None, opt.option("--choosing N", "Images of a half that choose; all by default.")
    ] = None,
    rounds: Annotated[
        int, opt.option("--rounds N", "Rounds of exchanges of tokens between blocks.")
    ] = 1,
    policy: Annotated[
        str, opt.option("--policy NAME", "The policy whose schedules are tuned.")
    ] = "free-energy",
    baseline: Annotated[
        list[str] | None,
        opt.option("--baseline NAME:VALUE", "Reduction to compare with: tome:8; may be repeated."),
    ] = None,
) -> None:
    """Token merging with tuned and with fixed schedules.

    A schedule is tuned on one half of the images and measured on the other.
    """
    from bmfa.evidence.bench import reduction as experiment
    from bmfa.models import load_model

    output = Output(json, quiet, csv)
    device = opt.resolve_device(device)
    loaded = load_model(model, weights, img_size=img_size, crop_pct=crop_pct)
    images = opt.labelled_images(
        data_dir, model=loaded, labels=None, limit=limit, strict=False, seed=seed
    )
    record = experiment.run(
        loaded,
        images,
        baseline or experiment.BASELINES,
        policy=policy,
        batch_size=batch_size,
        seed=seed,
        device=device,
        workers=workers,
        choosing=choosing,
        rounds=rounds,
        progress=not quiet,
    )
    output.finish(record, table_of(record.rows, REDUCTION_COLUMNS, wide))
