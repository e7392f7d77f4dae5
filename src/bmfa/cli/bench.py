"""bmfa bench: trees, attention and models against their baselines, or the tables of old records."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from bmfa.cli import options as opt
from bmfa.cli.output import Output, table_of
from bmfa.packages import require_packages
from bmfa.records import Record

if TYPE_CHECKING:
    from rich.table import Table

# Columns by importance: without --wide, those that exceed the width are left out.
TREE_COLUMNS = (
    "what n dtype method threads microseconds_per_grid speedup multiple_of_softmax leaf_percent "
    "milliseconds"
)
ATTENTION_COLUMNS = (
    "n threads method density_percent error_l2_percent error_p95_query_percent milliseconds speedup ran "
    "heads dim dtype batch e_mean estimated_error_percent target_met_percent milliseconds_eager "
    "speedup_eager own_error_percent peak_mebibytes extra_memory_percent"
)
KERNEL_COLUMNS = (
    "n method kernel launches milliseconds limit_milliseconds limit_percent bytes flops heads dim "
    "dtype batch"
)
MODEL_COLUMNS = (
    "img_size n method density_percent error_l2_percent mask_iou milliseconds speedup tiled_layers "
    "layers speedup_eager milliseconds_eager peak_mebibytes heads dim dtype batch ran"
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
Images = Annotated[
    str | None, opt.option("--data-dir DIR", "Folder of images; embedded ones by default.")
]
Tiles = Annotated[
    list[float] | None, opt.option("--tiles X...", "Fractions of the tiles to expand: 0 0.03 0.1.")
]
Leaves = Annotated[
    list[float] | None, opt.option("--leaves X...", "Budgets: leaves as fractions of the tokens.")
]
Error = Annotated[
    list[float] | None,
    opt.option("--error X...", "Targets for the relative L2 error of the output: 0.03 0.1."),
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
        "--records FILE...",
        "Show the tables and figures of these records without running anything.",
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
    tiles: Tiles = None,
    leaves: Leaves = None,
    error: Error = None,
    dtype: Dtype = None,
    repeats: Repeats = None,
    records: Records = None,
    markdown: Markdown = False,
    figures: Figures = None,
    size: Annotated[
        list[int] | None, opt.option("--size PX...", "Sides of the images in pixels.")
    ] = None,
    tokens: Annotated[
        list[int] | None,
        opt.option(
            "--tokens N...",
            "Numbers of tokens, which must be squares (1024 4096 16384, and 196 65536 on a GPU).",
        ),
    ] = None,
    images: Annotated[
        int | None, opt.option("--images N", "Number of images (4 on a GPU, else 1).")
    ] = None,
    blocks: Annotated[
        str | None, opt.option("--blocks B,B,...", "Blocks of the model, from 0 (2,5,8,11).")
    ] = None,
    head_dim: Annotated[
        int | None,
        opt.option(
            "--head-dim D",
            "Time heads of this dimension, too, on random weights of the same model.",
        ),
    ] = None,
    backend: Annotated[
        Literal["triton", "native", "eager"] | None,
        opt.option(
            "--backend", "Kernels: triton on a GPU, native on a CPU by default, else eager."
        ),
    ] = None,
    threads: Annotated[
        list[int] | None,
        opt.option("--threads N...", "Numbers of threads to time with on a CPU: 1 2."),
    ] = None,
    peer: Annotated[
        list[str] | None,
        opt.option(
            "--peer NAME",
            "sparge, natten, pisa or pisa-0th; by default those that are installed.",
        ),
    ] = None,
) -> None:
    """Tiled attention against the best dense path.

    Queries, keys and values are those of a model on images, at several numbers of tokens.
    """
    from bmfa.evidence.bench import attention as experiment
    from bmfa.evidence.bench import summary
    from bmfa.evidence.bench.inputs import InputSource

    results = _Results(Output(json, quiet, csv), ATTENTION_COLUMNS, wide, markdown, figures)
    if records:
        return results.show_files(records)
    require_packages(("PIL",), "data")
    device = opt.resolve_device(device)
    source = InputSource.open(
        model,
        weights,
        data_dir,
        images=images or (4 if device.startswith("cuda") else 1),
        seed=seed,
        device=device,
    )
    record = experiment.run(
        source,
        tokens=tokens or (),
        sizes=size or (),
        blocks=None if blocks is None else _indices(blocks),
        methods=_method_names(tiles=tiles, leaves=leaves, error=error),
        head_dim=head_dim,
        dtype=dtype,
        backend=backend,
        repeats=_default_repeats(device) if repeats is None else repeats,
        peer=peer or (),
        threads=threads or (),
        progress=results.output.progress("sizes"),
    )
    results.finish(record, [] if markdown else summary.lines(dict(record.settings)))


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
    tiles: Tiles = None,
    leaves: Leaves = None,
    error: Error = None,
    dtype: Dtype = None,
    repeats: Repeats = None,
    records: Records = None,
    markdown: Markdown = False,
    figures: Figures = None,
    img_size: Annotated[
        list[int] | None,
        opt.option(
            "--img-size PX...",
            "Sides of the images in pixels (1024 2048 4096 on a GPU, else 512 1024 2048).",
        ),
    ] = None,
    layers: opt.Layers = "all",
    form: Annotated[
        Literal["tiled"] | None,
        opt.option("--form", "Use tiles even where dense attention is faster."),
    ] = None,
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

    results = _Results(Output(json, quiet, csv), MODEL_COLUMNS, wide, markdown, figures)
    if records:
        return results.show_files(records)
    require_packages(("PIL",), "data")
    device = opt.resolve_device(device)
    settings = experiment.Settings(
        model=model,
        weights=weights,
        data_dir=data_dir,
        decoder=decoder,
        methods=tuple(_method_names(tiles=tiles, leaves=leaves, error=error))
        or experiment.default_methods(device),
        layers=opt.parse_layers(layers),
        form=form,
        batch_size=batch_size,
        images=images,
        dtype=dtype,
        device=device,
        repeats=_default_repeats(device) if repeats is None else repeats,
        seed=seed,
    )
    results.finish(experiment.run(settings, img_size or (), results.output.progress("sizes")))


class _Results:
    """Shows the records of a benchmark: tables as text or Markdown, and figures."""

    def __init__(
        self,
        output: Output,
        columns: str,
        wide: bool,
        markdown: bool,
        figure_folder: str | None,
    ) -> None:
        if figure_folder is not None:
            require_packages(("matplotlib",), "report")
        self.output, self.columns, self.wide = output, columns, wide
        self.markdown, self.figure_folder = markdown, figure_folder

    def show_files(self, paths: Sequence[str]) -> None:
        for path in paths:
            self.finish(Record.from_json(Path(path).read_text("utf-8"), path))

    def finish(self, record: Record, lines: Sequence[str] = ()) -> None:
        from bmfa.evidence.bench.chapter import markdown
        from bmfa.evidence.page import figures

        files: dict[str | Path, Callable[[], bytes]] = {}
        if self.figure_folder is not None:
            for name in ("attention-time", "attention-error"):
                if figures.ALL[name].drawable(record):
                    path = Path(self.figure_folder) / f"{name}.png"
                    files[path] = partial(figures.ALL[name].png, record)
        kernels = [row for row in record.rows if row.get("what") == "kernel"]
        rows = [row for row in record.rows if row.get("what") != "kernel"]
        table = markdown(record) if self.markdown else table_of(rows, self.columns, self.wide)
        notes: list[Table | str] = []
        if kernels and not self.markdown:
            notes += ["\nKernels:\n", table_of(kernels, KERNEL_COLUMNS, self.wide)]
        notes += lines
        self.output.finish(record, table, notes=notes, figures=files, announce=not self.markdown)


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


def _method_names(**values: Sequence[float] | None) -> list[str]:
    """Return the names that rows carry: `tiles:0.1` for the value 0.1 of `--tiles`."""
    return [f"{kind}:{value:g}" for kind, given in values.items() for value in given or ()]


def _default_repeats(device: str) -> int:
    return 5 if device.startswith("cuda") else 3


def _indices(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--blocks is {text!r}; pass indices such as 2,5,8,11") from None
