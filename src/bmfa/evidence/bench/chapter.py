"""The chapter on speed, and its tables as Markdown."""

from typing import Any

from bmfa.evidence.bench import figures, summary
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
from bmfa.evidence.page.formats import format_number
from bmfa.evidence.page.record_set import RecordSet, get_number
from bmfa.records import Record

# Key and column, by the value of `what` in the rows.
COLUMNS: dict[str, tuple[tuple[str, Column], ...]] = {
    "attention": (
        ("n", Column("N", 0)),
        ("dim", Column("d", 0)),
        ("method", Column("method", code=True)),
        ("density_percent", Column("tiles expanded, %", 1)),
        ("e_mean", Column("E, mean over queries", 3)),
        ("error_l2_percent", Column("error, %", 2)),
        ("error_p95_query_percent", Column("P95 over queries, %", 1)),
        ("milliseconds", Column("ms", 3)),
        ("speedup", Column("speed", 2)),
        ("extra_memory_percent", Column("extra memory, % of K and V", 1)),
    ),
    "model": (
        ("img_size", Column("pixels", 0)),
        ("n", Column("N", 0)),
        ("method", Column("method", code=True)),
        ("tiled_layers", Column("tiled layers", 0)),
        ("error_l2_percent", Column("error of the features, %", 2)),
        ("milliseconds", Column("ms", 2)),
        ("speedup", Column("speed", 2)),
        ("peak_mebibytes", Column("peak MiB", 0)),
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
    """Return the device, versions, dtype, model, pictures and dense path of a measurement."""
    environment, settings = record.environment, record.settings
    dtypes = dict.fromkeys(str(row["dtype"]) for row in record.rows if "dtype" in row)
    paths = dict.fromkeys(str(row["path"]) for row in record.rows if "path" in row)
    on_cuda = str(environment.get("device")).startswith("cuda")
    threads = None if on_cuda else environment.get("threads")
    pictures = len(settings.get("pictures") or [])
    return (
        f"{environment.get('device_name')}{'' if threads is None else f', {threads} threads'}, torch "
        f"{environment.get('torch')}, {', '.join(dtypes)}; {settings.get('model')} (weights: "
        f"{settings.get('weights')}), {pictures} {'picture' if pictures == 1 else 'pictures'}; dense is "
        f"the fastest path of the same run ({', '.join(paths)})."
    )


def _tables(record: Record) -> list[Table]:
    """A table for the attention rows and one for the model rows, without empty columns."""
    tables = []
    for what, every_column in COLUMNS.items():
        rows = [row for row in record.rows if row.get("what") == what]
        columns = [c for c in every_column if any(row.get(c[0]) is not None for row in rows)]
        body = [[row.get(key) for key, _ in columns] for row in rows]
        if rows:
            title = f"Speed and error: {what}"
            tables.append(Table(title, [column for _, column in columns], body))
    return tables


def _markdown_table(table: Table) -> str:
    def cell(value: Any, column: Column) -> str:
        if value is None:
            return ""
        return f"`{value}`" if column.code else format_number(value, column.decimals)

    lines = [
        [column.title for column in table.columns],
        ["---" if column.decimals is None else "---:" for column in table.columns],
        *([cell(*pair) for pair in zip(row, table.columns, strict=True)] for row in table.rows),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _content(records: RecordSet) -> list[Block]:
    blocks: list[Block] = []
    for record in records.of("bench"):
        if tables := _tables(record):
            blocks += [*tables, *paragraph(conditions(record))]
    if blocks:
        blocks = [
            *illustrate(
                figures.attention_time,
                records,
                "Time per picture; dense attention has an exponent of 2.",
            ),
            *illustrate(
                figures.attention_error,
                records,
                "To the left of the line dense attention is faster.",
            ),
            *blocks,
            *paragraph(*_break_even(records)),
            Commands(records.commands("bench")),
        ]
    others = [row for row in records.rows("bench") if row.get("what") not in COLUMNS]
    if others:
        blocks += [generic_table("Bench", others), Commands(records.commands("bench"))]
    return [
        *blocks,
        *paragraph("Times are medians of one run on the machines named at the end of this page."),
    ]


def _break_even(records: RecordSet) -> list[str]:
    return [
        f"{record.environment.get('device_name')}: "
        f"{'; '.join(summary.lines(dict(record.settings)))}."
        for record in records.records
        if get_number(dict(record.settings), "break_even_error_percent") is not None
    ]


SPEED = Chapter("bench", "Speed", "bench", _content)
