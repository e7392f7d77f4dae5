"""Tables of the benchmarks of attention and models: Markdown from a record, and the page's chapter."""

from collections.abc import Sequence
from typing import Any

from bmfa.evidence.bench import attention_summary
from bmfa.evidence.page import figures
from bmfa.evidence.page.markup import Column, decimal, figure, made_by, paragraph, table
from bmfa.evidence.page.records import Evidence, number
from bmfa.records import Record, Row

# Key, head and decimals (None for text) of every column.
ATTENTION = (
    ("n", "N", 0),
    ("dim", "d", 0),
    ("method", "method", None),
    ("density_percent", "tiles expanded, %", 1),
    ("e_mean", "E, mean of queries", 3),
    ("error_l2_percent", "error, %", 2),
    ("error_p95_query_percent", "P95 of queries, %", 1),
    ("milliseconds", "ms", 3),
    ("speedup", "speed", 2),
    ("extra_memory_percent", "extra memory, % of K and V", 1),
)
MODEL = (
    ("img_size", "pixels", 0),
    ("n", "N", 0),
    ("method", "method", None),
    ("tiled_layers", "tiled layers", 0),
    ("error_l2_percent", "error of the features, %", 2),
    ("milliseconds", "ms", 2),
    ("speedup", "speed", 2),
    ("peak_mebibytes", "peak MiB", 0),
)
KINDS = {"attention": ATTENTION, "model": MODEL}


def markdown(record: Record) -> str:
    """The tables of a record with their frame, columns that say nothing left out."""
    parts = [frame(record)]
    for kind, columns in KINDS.items():
        rows = [row for row in record.rows if row.get("what") == kind]
        if rows:
            parts.append(_markdown_table(rows, columns))
    if len(parts) == 1:
        raise ValueError("the record has no rows of attention or models; pass one of bmfa bench")
    if "break_even_tokens" in record.settings:
        parts.append("; ".join(attention_summary.lines(dict(record.settings))) + ".")
    return "\n\n".join(parts)


def frame(record: Record) -> str:
    """Device, versions, dtype, model, pictures and what dense means: what every claim must carry."""
    place, settings = record.environment, record.settings
    dtypes = dict.fromkeys(str(row["dtype"]) for row in record.rows if "dtype" in row)
    paths = dict.fromkeys(str(row["path"]) for row in record.rows if "path" in row)
    threads = None if str(place.get("device")).startswith("cuda") else place.get("threads")
    cores = "" if threads is None else f", {threads} threads"
    names = settings.get("pictures") or []
    return (
        f"{place.get('device_name')}{cores}, torch {place.get('torch')}, {', '.join(dtypes)}; "
        f"{settings.get('model')} (weights: {settings.get('weights')}), {len(names)} "
        f"{'picture' if len(names) == 1 else 'pictures'}; dense is the best path of the same run "
        f"({', '.join(paths)})."
    )


def _shown(rows: Sequence[Row], columns: Sequence[tuple[str, str, int | None]]) -> list[Any]:
    return [column for column in columns if any(row.get(column[0]) is not None for row in rows)]


def _markdown_table(rows: Sequence[Row], columns: Sequence[tuple[str, str, int | None]]) -> str:
    shown = _shown(rows, columns)
    lines = [
        [head for _, head, _ in shown],
        ["---" if decimals is None else "---:" for _, _, decimals in shown],
    ]
    for row in rows:
        cells = []
        for key, _, decimals in shown:
            value = row.get(key)
            text = f"`{value}`" if decimals is None else decimal(value, decimals)
            cells.append("" if value is None else text)
        lines.append(cells)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def chapter(evidence: Evidence) -> str:
    """Attention and models on the page; empty where neither was measured."""
    records = [record for record in evidence.records if record.experiment == "bench"]
    parts = [_tables(record) for record in records]
    if not any(parts):
        return ""
    shown_figures = "".join(
        figure(plot, evidence, caption)
        for plot, caption in (
            (
                figures.attention_time,
                "Time for one picture; an exponent of 2 is dense attention's.",
            ),
            (
                figures.attention_error,
                "Left of the line dense attention is faster: losses count too.",
            ),
        )
        if plot.drawable(evidence.records)
    )
    return shown_figures + "".join(parts) + _finding(evidence) + made_by(evidence, "bench")


def _tables(record: Record) -> str:
    """What one run measured, with its frame; empty where it was something else."""
    parts = []
    for kind, columns in KINDS.items():
        rows = [row for row in record.rows if row.get("what") == kind]
        if rows:
            shown = _shown(rows, columns)
            heads = [Column(head, decimals, code=key == "method") for key, head, decimals in shown]
            body = [[row.get(key) for key, _, _ in shown] for row in rows]
            parts.append(table(f"Speed and error: {kind}", heads, body))
    return "".join((*parts, paragraph(frame(record)))) if parts else ""


def _finding(evidence: Evidence) -> str:
    """Break-even and exponents of every record that has them."""
    sentences = []
    for record in evidence.records:
        if number(dict(record.settings), "break_even_error_percent") is not None:
            told = attention_summary.lines(dict(record.settings))
            sentences.append(f"{record.environment.get('device_name')}: {'; '.join(told)}.")
    return paragraph(*sentences)
