"""The chapter on speed, and its tables as Markdown."""

from collections.abc import Mapping
from typing import Any

from bmfa.evidence.bench import figures, summary
from bmfa.evidence.bench.saliency_chapter import is_dense_prediction
from bmfa.evidence.page.blocks import (
    Block,
    Chapter,
    Column,
    Commands,
    Table,
    generic_table,
    illustrate,
    paragraph,
)
from bmfa.evidence.page.record_set import RecordSet, get_number
from bmfa.records import Record

# Columns by the value of `what` in the rows.
COLUMNS: dict[str, tuple[Column, ...]] = {
    "attention": (
        Column("n", "N", 0),
        Column("threads", "threads", 0),
        Column("dim", "d", 0),
        Column("method", "method", code=True),
        Column("density_percent", "tiles expanded, %", 1),
        Column("e_mean", "E, mean over queries", 3),
        Column("error_l2_percent", "error, %", 2),
        Column("error_p95_query_percent", "P95 over queries, %", 1),
        Column("milliseconds", "ms", 3),
        Column("speedup", "speed", 2),
        Column("extra_memory_percent", "extra memory, % of K and V", 1),
    ),
    "kernel": (
        Column("n", "N", 0),
        Column("method", "method", code=True),
        Column("kernel", "kernel", code=True),
        Column("launches", "launches", 0),
        Column("milliseconds", "ms", 4),
        Column("bytes", "bytes", 0),
        Column("flops", "flops", 0),
        Column("limit_milliseconds", "limit, ms", 4),
        Column("limit_percent", "limit, % of the time", 1),
    ),
    "model": (
        Column("img_size", "pixels", 0),
        Column("n", "N", 0),
        Column("method", "method", code=True),
        Column("tiled_layers", "tiled layers", 0),
        Column("density_percent", "tiles expanded, %", 1),
        Column("error_l2_percent", "error of the features, %", 2),
        Column("mask_iou", "IoU of the masks", 3),
        Column("milliseconds", "ms", 2),
        Column("speedup", "speed", 2),
        Column("speedup_eager", "speed, eager calls", 2),
        Column("peak_mebibytes", "peak MiB", 0),
    ),
}


def markdown(record: Record) -> str:
    """Format the attention and model rows of a record as Markdown tables.

    Args:
        record: a record of `bmfa bench attention` or `bmfa bench model`.

    Returns:
        The conditions of the measurement, the tables without empty columns, and the break-even.

    Raises:
        ValueError: if the record has no such rows.
    """
    tables = _tables(record)
    if not tables:
        raise ValueError(
            "the record has no rows of attention or models; pass one of bmfa bench attention or model"
        )
    parts = [conditions(record), *(_markdown_table(table) for table in tables)]
    if "break_even_tokens" in record.settings:
        parts.append("; ".join(summary.lines(dict(record.settings))) + ".")
    return "\n\n".join(parts)


def conditions(record: Record) -> str:
    """Return the device, versions, dtype, model, images and dense path of a measurement."""
    environment, settings = record.environment, record.settings
    dtypes = dict.fromkeys(str(row["dtype"]) for row in record.rows if "dtype" in row)
    paths = dict.fromkeys(str(row["path"]) for row in record.rows if "path" in row)
    on_cuda = str(environment.get("device")).startswith("cuda")
    counts = settings.get("threads") or [environment.get("threads")]
    threads = None if on_cuda or None in counts else " and ".join(map(str, counts))
    native = environment.get("instruction_set")
    images = len(settings.get("images") or [])
    return (
        f"{environment.get('device_name')}{'' if threads is None else f', {threads} threads'}"
        f"{'' if native is None or on_cuda else f', native kernels {native}'}, torch "
        f"{environment.get('torch')}, {', '.join(dtypes)}; {settings.get('model')} (weights: "
        f"{settings.get('weights')}), {images} {'image' if images == 1 else 'images'}; dense is "
        f"the fastest path of the same run ({', '.join(paths)})."
    )


def _tables(record: Record) -> list[Table]:
    """A table for the attention rows and one for the model rows, without empty columns."""
    tables = []
    for what, every_column in COLUMNS.items():
        rows = [row for row in record.rows if row.get("what") == what]
        columns = [c for c in every_column if any(row.get(c.key) is not None for row in rows)]
        if rows:
            tables.append(Table(f"Speed and error: {what}", columns, rows))
    return tables


def _markdown_table(table: Table) -> str:
    def cell(row: Mapping[str, Any], column: Column) -> str:
        value = row.get(column.key)
        text = f"`{value}`" if column.code else column.format(value)
        return "" if value is None else text

    lines = [
        [column.title for column in table.columns],
        ["---" if column.decimals is None else "---:" for column in table.columns],
        *([cell(row, column) for column in table.columns] for row in table.rows),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _content(records: RecordSet) -> list[Block]:
    attention = figures.attention_records(records)
    others = [row for row in records.rows("bench") if row.get("what") not in COLUMNS]
    return [
        *illustrate(
            figures.attention_time,
            attention,
            "Time per image; dense attention has an exponent of 2.",
        ),
        *illustrate(
            figures.attention_error,
            attention,
            "To the left of the line dense attention is faster.",
        ),
        *(
            block
            for record in records.of("bench")
            if (tables := _tables(record))
            for block in (*tables, *paragraph(conditions(record)))
        ),
        *paragraph(*_break_even(records)),
        *([generic_table("Bench", others)] if others else []),
        Commands(records.commands("bench")),
        *paragraph("Times are medians of one run on the machines named at the end of this page."),
    ]


def _break_even(records: RecordSet) -> list[str]:
    return [
        f"{record.environment.get('device_name')}: "
        f"{'; '.join(summary.lines(dict(record.settings)))}."
        for record in records.records
        if get_number(dict(record.settings), "break_even_error_percent") is not None
    ]


def _without_masks(records: RecordSet) -> RecordSet:
    """The records without those of dense prediction, which has a chapter of its own."""
    return RecordSet([record for record in records.records if not is_dense_prediction(record)])


SPEED = Chapter("bench", "Speed", "bench", _content, select=_without_masks)
