"""The chapters on speed and on dense prediction, and the tables of a benchmark as Markdown."""

from typing import Any

from bmfa.evidence.bench import summary
from bmfa.evidence.bench.figures import mask_rows
from bmfa.evidence.page.chapter import Chapter
from bmfa.evidence.page.origins import describe_data
from bmfa.evidence.page.record_set import MissingValueError, RecordSet, require_any
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
    from bmfa.evidence.page import build  # it imports this module

    if not (found := tables(record)):
        raise ValueError(
            "the record has no rows of attention or models; pass one of bmfa bench attention or model"
        )
    lines = summary.lines(record.settings) if "break_even_tokens" in record.settings else []
    template = build._templates().get_template("bench/markdown.j2")
    return str(template.render(record=record, tables=found, lines=lines)).strip()


def tables(record: Record) -> dict[str, list[Row]]:
    """Return the rows of a record that have a table, by `what`."""
    by_what = {what: [row for row in record.rows if row.get("what") == what] for what in TABLES}
    return {what: rows for what, rows in by_what.items() if rows}


def speed(records: RecordSet) -> dict[str, Any]:
    """Return the records without masks, which have a chapter of their own, and their tables."""
    found = [r for r in records.of("bench") if r.rows and not mask_rows(RecordSet(r))]
    return {
        "shown": RecordSet(require_any(found)),
        "tables_of": tables,
        "lines": summary.lines,
        "others": [row for r in found for row in r.rows if row.get("what") not in TABLES],
    }


def dense_prediction(records: RecordSet) -> dict[str, Any]:
    """Return the rows with masks, and the fastest setting with a similar mask at each size."""
    rows = mask_rows(records)
    found = RecordSet([r for r in records.of("bench") if mask_rows(RecordSet(r))])
    if not rows:
        raise MissingValueError("mask_iou")
    fastest: dict[tuple[int, str], Row | None] = {}
    for row in sorted(rows, key=lambda row: (row["n"], row["speedup"])):
        fastest.setdefault((row["n"], row["device"]), None)
        if row["mask_iou"] >= SIMILAR_MASK and row["speedup"] > 1 and row["tiled_layers"]:
            fastest[row["n"], row["device"]] = row
    return {"rows": rows, "fastest": fastest, "shown": found, "data": describe_data(found.records)}


SPEED = Chapter("bench", "Speed", "bench/speed.html.j2", "bench", values=speed)
DENSE_PREDICTION = Chapter(
    "dense-prediction",
    "Dense prediction",
    "bench/dense_prediction.html.j2",
    "bench",
    values=dense_prediction,
    command="bmfa bench model --model timm:vit_small_patch14_dinov2 --weights FILE --decoder FILE "
    "--data-dir DIR",
)
