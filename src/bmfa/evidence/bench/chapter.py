"""The chapters on speed and on dense prediction, and the tables of a benchmark as Markdown."""

from typing import Any

from bmfa.evidence.bench import summary
from bmfa.evidence.bench.figures import mask_rows
from bmfa.evidence.page.chapter import Chapter
from bmfa.evidence.page.formats import format_number
from bmfa.evidence.page.origins import describe_data
from bmfa.evidence.page.record_set import MissingValueError, RecordSet, require_any
from bmfa.records import Record, Row

SIMILAR_MASK = 0.95  # IoU from which masks are called alike
# Columns by the value of `what` in the rows: key, heading, and decimals or "code".
COLUMNS: dict[str, tuple[tuple[str, str, Any], ...]] = {
    "attention": (
        ("n", "N", 0),
        ("threads", "threads", 0),
        ("dim", "d", 0),
        ("method", "method", "code"),
        ("density_percent", "tiles expanded, %", 1),
        ("e_mean", "E, mean over queries", 3),
        ("error_l2_percent", "error, %", 2),
        ("error_p95_query_percent", "P95 over queries, %", 1),
        ("milliseconds", "ms", 3),
        ("speedup", "speed", 2),
        ("extra_memory_percent", "extra memory, % of K and V", 1),
    ),
    "kernel": (
        ("n", "N", 0),
        ("method", "method", "code"),
        ("kernel", "kernel", "code"),
        ("launches", "launches", 0),
        ("milliseconds", "ms", 4),
        ("bytes", "bytes", 0),
        ("flops", "flops", 0),
        ("limit_milliseconds", "limit, ms", 4),
        ("limit_percent", "limit, % of the time", 1),
    ),
    "model": (
        ("img_size", "pixels", 0),
        ("n", "N", 0),
        ("method", "method", "code"),
        ("tiled_layers", "tiled layers", 0),
        ("density_percent", "tiles expanded, %", 1),
        ("error_l2_percent", "error of the features, %", 2),
        ("mask_iou", "IoU of the masks", 3),
        ("milliseconds", "ms", 2),
        ("speedup", "speed", 2),
        ("speedup_eager", "speed, eager calls", 2),
        ("peak_mebibytes", "peak MiB", 0),
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
    tables = [_markdown_table(what, rows) for what, rows in _known_rows(record).items()]
    if not tables:
        raise ValueError(
            "the record has no rows of attention or models; pass one of bmfa bench attention or model"
        )
    parts = [conditions(record), *tables]
    if "break_even_tokens" in record.settings:
        parts.append("; ".join(summary.lines(dict(record.settings))) + ".")
    return "\n\n".join(parts)


def _known_rows(record: Record) -> dict[str, list[Row]]:
    """The rows of a record with columns in `COLUMNS`, by `what`."""
    by_what = {what: [row for row in record.rows if row.get("what") == what] for what in COLUMNS}
    return {what: rows for what, rows in by_what.items() if rows}


def _markdown_table(what: str, rows: list[Row]) -> str:
    columns = [c for c in COLUMNS[what] if any(row.get(c[0]) is not None for row in rows)]
    lines = [
        [heading for _, heading, _ in columns],
        ["---" if form == "code" else "---:" for _, _, form in columns],
    ]
    for row in rows:
        cells = []
        for key, _, form in columns:
            value = row.get(key)
            shown = f"`{value}`" if form == "code" else format_number(value, form)
            cells.append("" if value is None else shown)
        lines.append(cells)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def conditions(record: Record) -> str:
    """Return the device, versions, dtype, model, images and dense path of a measurement."""
    environment, settings = record.environment, record.settings
    dtypes = dict.fromkeys(str(row["dtype"]) for row in record.rows if "dtype" in row)
    paths = dict.fromkeys(str(row["path"]) for row in record.rows if "path" in row)
    parts = [str(environment.get("device_name"))]
    if not str(environment.get("device")).startswith("cuda"):
        counts = settings.get("threads") or [environment.get("threads")]
        parts += [] if None in counts else [f"{' and '.join(map(str, counts))} threads"]
        native = environment.get("instruction_set")
        parts += [] if native is None else [f"native kernels {native}"]
    images = len(settings.get("images") or [])
    return (
        f"{', '.join(parts)}, torch {environment.get('torch')}, {', '.join(dtypes)}; "
        f"{settings.get('model')} (weights: {settings.get('weights')}), {images} "
        f"{'image' if images == 1 else 'images'}; dense is the fastest path of the same run "
        f"({', '.join(paths)})."
    )


def speed(records: RecordSet) -> dict[str, Any]:
    """Return the records without masks, which have a chapter of their own, and their tables."""
    found = [r for r in records.of("bench") if r.rows and not mask_rows(RecordSet(r))]
    return {
        "shown": RecordSet(require_any(found)),
        "tables": [(_known_rows(record), conditions(record)) for record in found],
        "columns": COLUMNS,
        "others": [row for r in found for row in r.rows if row.get("what") not in COLUMNS],
        "break_even": [
            f"{record.environment.get('device_name')}: {'; '.join(lines)}."
            for record in found
            if (lines := summary.lines(dict(record.settings)))
        ],
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
