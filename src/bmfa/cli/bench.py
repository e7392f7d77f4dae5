"""The benchmarks of attention and of models: run them, or show the records of runs again."""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from bmfa.cli.output import check_device, finish, progress_line, table_of
from bmfa.packages import require_packages
from bmfa.records import Record

Options = argparse.Namespace

ATTENTION_COLUMNS = (
    "n heads dim dtype batch method density_percent e_mean error_l2_percent error_p95_query_percent "
    "milliseconds milliseconds_eager speedup speedup_eager added_milliseconds own_error_percent "
    "peak_mebibytes extra_memory_percent ran"
)
MODEL_COLUMNS = (
    "img_size n heads dim dtype batch method tiled_layers layers density_percent error_l2_percent "
    "milliseconds milliseconds_eager speedup speedup_eager peak_mebibytes"
)


def attention(options: Options) -> None:
    """bmfa bench attention."""
    from bmfa.evidence.bench import attention as attention_bench
    from bmfa.evidence.bench import attention_summary
    from bmfa.evidence.bench.qkv import Source

    _require(options)
    if options.records:
        _show(options, ATTENTION_COLUMNS)
        return
    device = check_device(options.device)
    pictures = options.pictures or (4 if device.startswith("cuda") else 1)
    source = Source.of(
        options.model,
        options.weights,
        options.data_dir,
        pictures=pictures,
        seed=options.seed,
        device=device,
    )
    record = attention_bench.run(
        source,
        tokens=options.tokens or (),
        sizes=options.size or (),
        blocks=None if options.blocks is None else _numbers(options.blocks),
        methods=_methods(options),
        head_dim=options.head_dim,
        dtype=options.dtype,
        backend=options.backend,
        repeats=_repeats(options, device),
        peer=options.peer or (),
        certificate=not options.no_certificate,
        progress=progress_line(options, "sizes"),
    )
    notes = [] if options.markdown else attention_summary.lines(dict(record.settings))
    _finish(record, options, ATTENTION_COLUMNS, notes)


def model(options: Options) -> None:
    """bmfa bench model."""
    from bmfa.evidence.bench import model as model_bench

    _require(options)
    if options.records:
        _show(options, MODEL_COLUMNS)
        return
    device = check_device(options.device)
    settings = model_bench.Settings(
        options.model,
        options.weights,
        options.data_dir,
        tuple(_methods(options) or model_bench.METHODS),
        _layers(options.layers),
        options.form,
        options.batch_size,
        options.dtype,
        device,
        _repeats(options, device),
        options.seed,
    )
    record = model_bench.run(settings, options.img_size or (), progress_line(options, "sizes"))
    _finish(record, options, MODEL_COLUMNS)


def _require(options: Options) -> None:
    """Raise before the work unless the packages for pictures and figures are installed."""
    if options.figures is not None:
        require_packages(("matplotlib",), "report")
    if not options.records:
        require_packages(("PIL",), "data")


def _show(options: Options, columns: str) -> None:
    """Tables and figures of records at hand."""
    for name in options.records:
        record = Record.from_json(Path(name).read_text("utf-8"), name)
        _finish(record, options, columns)


def _finish(record: Record, options: Options, columns: str, notes: Sequence[str] = ()) -> None:
    """The record, its table as text or Markdown, and its figures where asked."""
    from bmfa.evidence.bench import chapter as bench_tables
    from bmfa.evidence.page import figures

    made: dict[str | Path, Callable[[], bytes]] = {}
    for name in ("attention-time", "attention-error") if options.figures is not None else ():
        if figures.ALL[name].drawable(record):
            path = Path(options.figures) / f"{name}.png"
            made[path] = partial(figures.ALL[name].png, record)
    table = bench_tables.markdown(record) if options.markdown else table_of(record, columns)
    finish(record, options, table, notes=notes, figures=made, announce=not options.markdown)


def _methods(options: Options) -> list[str]:
    """The settings that were asked for, by their names in rows."""
    kinds: dict[str, Sequence[float] | None] = {
        "tiles": options.tiles,
        "leaves": options.leaves,
        "error": options.error,
    }
    return [f"{kind}:{value:g}" for kind, values in kinds.items() for value in values or ()]


def _repeats(options: Options, device: str) -> int:
    usual = 5 if device.startswith("cuda") else 3
    return usual if options.repeats is None else int(options.repeats)


def _numbers(words: str) -> list[int]:
    try:
        return [int(word) for word in words.split(",")]
    except ValueError:
        raise ValueError(f"--blocks is {words!r}; pass indices with commas, as 2,5,8,11") from None


def _layers(words: str) -> str | list[int]:
    parts = words.split(",")
    return [int(part) for part in parts] if all(part.isdecimal() for part in parts) else words
