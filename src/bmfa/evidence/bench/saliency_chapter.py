"""The chapter on dense prediction: a saliency model at high resolution, patched and as it is."""

from collections.abc import Sequence

from bmfa.evidence.methods import family
from bmfa.evidence.page import style
from bmfa.evidence.page.blocks import (
    METHOD,
    Block,
    Chapter,
    Column,
    Table,
    illustrate,
    paragraph,
)
from bmfa.evidence.page.canvas import Canvas, figure
from bmfa.evidence.page.drawing import add_labels, draw_line, panel_grid, set_log_range
from bmfa.evidence.page.formats import format_number
from bmfa.evidence.page.record_set import RecordSet, get_number, get_points, get_text
from bmfa.records import Record, Row

COMMAND = (
    "bmfa bench model --model timm:vit_small_patch14_dinov2 --weights FILE --decoder FILE "
    "--data-dir DIR"
)
COLUMNS = (
    Column("img_size", "Pixels", 0),
    Column("n", "Tokens", 0),
    METHOD,
    Column("density_percent", "Tiles expanded %", 1),
    Column("mask_iou", "IoU of the mask", 3),
    Column("error_l2_percent", "Error of the features %", 2),
    Column("milliseconds", "ms", 2),
    Column("speedup", "Speed-up", 2),
)
# Settings of one method that a line of the figure joins, with the titles of the legend.
FAMILIES = {
    "leaves": "bmfa, budget of leaves",
    "error": "bmfa, error target",
    "mean-tiles": "mean tiles (historical)",
}
SIMILAR_MASK = 0.95  # IoU from which masks are called alike in the text


def is_dense_prediction(record: Record) -> bool:
    """Return True if a record has the masks of a model."""
    return record.experiment == "bench" and any("mask_iou" in row for row in record.rows)


def dense_prediction_records(records: RecordSet) -> RecordSet:
    """Return the records of dense prediction."""
    return RecordSet([record for record in records.records if is_dense_prediction(record)])


def _rows(records: RecordSet) -> list[Row]:
    """The rows with a mask, one of each size and method, without the other dense paths of full."""
    return [
        row
        for row in dense_prediction_records(records).rows("bench")
        if get_number(row, "mask_iou") is not None
        and get_number(row, "speedup") is not None
        and not get_text(row, "method").startswith("full-")
    ]


def _tiled(rows: Sequence[Row]) -> list[Row]:
    """The rows whose layers attend over tiles; the others ran dense because it is faster."""
    return [row for row in rows if row.get("tiled_layers") != 0]


def _sizes(rows: Sequence[Row]) -> list[int]:
    return sorted({int(row["n"]) for row in _tiled(rows)})


@figure("saliency", needs=("bench",), available=lambda records: bool(_sizes(_rows(records))))
def saliency(records: RecordSet, narrow: bool) -> Canvas:
    """Agreement of the masks of a saliency model against its speed, for every number of tokens."""
    rows = _tiled(_rows(records))
    sizes = _sizes(rows)
    if not sizes:
        raise ValueError(f"no masks of a model among the records; make them with: {COMMAND}")
    present = [
        name for name in FAMILIES if any(family(get_text(r, "method")) == name for r in rows)
    ]
    canvas, panels = panel_grid(
        len(sizes),
        len(sizes),
        narrow=narrow,
        height=200,
        legend={name: FAMILIES[name] for name in present},
        legend_columns=3 if not narrow else 2,
    )
    for n, axes in zip(sizes, panels, strict=True):
        found = [row for row in rows if row["n"] == n]
        speeds = [float(row["speedup"]) for row in found]
        set_log_range(axes, "x", [*speeds, 1.0], 1.15)
        axes.set_ylim(0.45, 1.02)
        axes.axvline(1.0, color=style.INK.light, linewidth=1.0)
        for name in present:
            line = [row for row in found if family(get_text(row, "method")) == name]
            draw_line(axes, name, get_points(line, "speedup", "mask_iou"), filled=True)
        x_label = "speed-up over the dense model, logarithmic"
        add_labels(canvas, axes, f"{n:,} tokens", "IoU with the mask of the dense model", x_label)
    return canvas


def _fastest_with_similar_mask(rows: Sequence[Row], n: int) -> str:
    similar = [
        r for r in rows if r["n"] == n and r["mask_iou"] >= SIMILAR_MASK and r["speedup"] > 1
    ]
    if not similar:
        return f"At {n:,} tokens no setting is faster than the dense model with such a mask."
    best = max(similar, key=lambda row: float(row["speedup"]))
    return (
        f"At {n:,} tokens {best['method']} has an IoU of {format_number(best['mask_iou'])} at "
        f"{format_number(best['speedup'], 2)} times the speed of the dense model."
    )


def _content(records: RecordSet) -> list[Block]:
    rows = _rows(records)
    machines = dict.fromkeys(
        f"{record.environment.get('device_name')}, {dtype}, {record.settings.get('model')}"
        for record in dense_prediction_records(records).records
        for dtype in dict.fromkeys(str(row.get("dtype")) for row in record.rows)
    )
    tokens = sorted({int(row["n"]) for row in rows})
    return [
        *paragraph(
            "A ViT-S/14 with a decoder predicts the mask of the salient object. All layers attend over "
            "tiles; the mask is compared with that of the same model with dense attention "
            "(intersection over union), and the time with the fastest dense path of the same run.",
            f"Masks with an IoU of at least {SIMILAR_MASK:g}:",
            *(_fastest_with_similar_mask(_tiled(rows), n) for n in tokens),
            f"{'; '.join(machines)}. Where a row has 100 % of its tiles expanded, the library ran dense "
            "attention, because it is faster at this size.",
        ),
        *illustrate(
            saliency,
            dense_prediction_records(records),
            "Up and to the right is better; to the left of the line dense attention is faster. A line "
            "joins the settings of one method.",
        ),
        Table("A saliency model, dense and over tiles", COLUMNS, rows),
    ]


DENSE_PREDICTION = Chapter(
    "dense-prediction",
    "Dense prediction",
    "bench",
    _content,
    select=dense_prediction_records,
    command=COMMAND,
)
