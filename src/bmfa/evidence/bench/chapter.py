"""The chapters on speed and on dense prediction, and the tables of a benchmark as Markdown."""

from typing import Any

from bmfa.evidence.bench import summary
from bmfa.evidence.bench.figures import mask_rows
from bmfa.evidence.page.origins import describe_data
from bmfa.evidence.page.record_set import RecordSet, require_any
from bmfa.evidence.page.rendering import chapter_values, templates
from bmfa.records import Record, Row

SIMILAR_MASK = 0.95  # IoU from which masks are called alike
TABLES = ("attention", "kernel", "model")  # values of `what` with columns in tables.j2


def markdown(record: Record) -> str:
    """Format the attention and model rows of a record as Markdown tables.

    Args:
        record: a record of `bmfa bench attention` or `bmfa bench model`.

    Returns:
        The conditions of the measurement, the tables without empty columns, and the break-even.

    Raises:
        ValueError: if the record has no such rows.
    """
    if not (found := tables(record)):
        raise ValueError(
            "the record has no rows of attention or models; pass one of bmfa bench attention or model"
        )
    lines = summary.lines(record.settings) if "break_even_tokens" in record.settings else []
    template = templates().get_template("bench/markdown.j2")
    return str(template.render(record=record, tables=found, lines=lines)).strip()


def tables(record: Record) -> dict[str, list[Row]]:
    """Return the rows of a record that have a table, by `what`."""
    by_what = {what: [row for row in record.rows if row.get("what") == what] for what in TABLES}
    return {what: rows for what, rows in by_what.items() if rows}


@chapter_values("bench")
def speed(records: RecordSet) -> dict[str, Any]:
    """Return the records without masks, which have a chapter of their own, and their tables."""
    shown = require_any(r for r in records.of("bench") if r.rows and not mask_rows(RecordSet(r)))
    others = [row for record in shown for row in record.rows if row.get("what") not in TABLES]
    functions = {"tables_of": tables, "lines": summary.lines}
    return {"shown": RecordSet(shown), "others": others, **functions}


@chapter_values("dense-prediction")
def dense_prediction(records: RecordSet) -> dict[str, Any]:
    """Return the rows with masks, and the fastest setting with a similar mask at each size."""
    rows = require_any(mask_rows(records))
    shown = RecordSet([record for record in records.of("bench") if mask_rows(RecordSet(record))])
    fastest: dict[tuple[int, str], Row | None] = {}
    for row in sorted(rows, key=lambda row: (row["n"], row["speedup"])):
        fastest.setdefault((row["n"], row["device"]), None)
        if row["mask_iou"] >= SIMILAR_MASK and row["speedup"] > 1 and row["tiled_layers"]:
            fastest[row["n"], row["device"]] = row
    return {"rows": rows, "fastest": fastest, "shown": shown, "data": describe_data(shown.records)}
