"""Figures of the comparison: rules at equal leaves, and merging policies at equal operations."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from bmfa.evidence.methods import family, find_method
from bmfa.evidence.page import style
from bmfa.evidence.page.canvas import Canvas, figure
from bmfa.evidence.page.drawing import Margins, add_labels, draw_line, panel_grid
from bmfa.evidence.page.formats import format_number
from bmfa.evidence.page.record_set import RecordSet, get_number, get_text
from bmfa.records import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

EXPERIMENT = "comparison"
# Columns of the rows with their axis labels.
MEASURES = (
    ("agreement_percent", "agreement with the full model, %"),
    ("top1_percent", "top-1, %; the line is the full model"),
    ("mask_iou", "mask IoU; the line is the full model"),
)
ROW_HEIGHT = 19.0  # pixels of a method in a panel
MARGINS = Margins(left=112)


def full_row(records: RecordSet, rows: Sequence[Row]) -> Row:
    """Return the row of the full model on the images of other rows, or an empty row."""
    images = next((row.get("images") for row in rows), None)
    return next(iter(records.rows(EXPERIMENT, kind="full", images=images)), {})


def rules_by_leaves(records: RecordSet) -> dict[float, list[Row]]:
    """Return the rows of rules by their share of leaves in percent, those with most agreement first."""
    return _grouped(records.rows(EXPERIMENT, kind="rule"), "target_percent")


def policies_by_baseline(records: RecordSet) -> dict[str, list[Row]]:
    """Return the rows of policies by their baseline, those with most agreement first."""
    return _grouped(records.rows(EXPERIMENT, kind="reduction"), "baseline")


def _grouped(rows: Sequence[Row], key: str) -> dict:  # type: ignore[type-arg]
    groups: dict[object, list[Row]] = {}
    for row in rows:
        if get_number(row, "agreement_percent") is not None:
            groups.setdefault(row.get(key), []).append(row)
    for found in groups.values():
        found.sort(
            key=lambda row: (-(get_number(row, "agreement_percent") or 0.0), row["output_kl"])
        )
    return groups


@figure(
    "equal-leaves", needs=(EXPERIMENT,), available=lambda records: bool(rules_by_leaves(records))
)
def equal_leaves(records: RecordSet, narrow: bool) -> Canvas:
    """Agreement, top-1 and IoU of the mask of every rule at equal leaves."""
    records.require(EXPERIMENT)
    groups = rules_by_leaves(records)
    panels = [(share, rows, m) for share, rows in groups.items() for m in MEASURES]
    height = ROW_HEIGHT * max(len(rows) for rows in groups.values())
    canvas, axes = panel_grid(len(panels), 3, narrow=narrow, height=height, margins=MARGINS)
    for ax, (share, rows, (column, label)) in zip(axes, panels, strict=True):
        full = (
            None if column == "agreement_percent" else get_number(full_row(records, rows), column)
        )
        _draw_rows(ax, rows, column, full)
        add_labels(canvas, ax, f"{format_number(share, 2)} % leaves", label)
    return canvas


@figure(
    "equal-operations",
    needs=(EXPERIMENT,),
    available=lambda records: bool(policies_by_baseline(records)),
)
def equal_operations(records: RecordSet, narrow: bool) -> Canvas:
    """Agreement and IoU of the mask of every merging policy at the operations of ToMe."""
    records.require(EXPERIMENT)
    groups = policies_by_baseline(records)
    measures = (("gain_pp", "agreement minus that of ToMe, points, 95 % interval"), MEASURES[2])
    panels = [(name, rows, m) for name, rows in groups.items() for m in measures]
    height = ROW_HEIGHT * max(len(rows) for rows in groups.values())
    canvas, axes = panel_grid(len(panels), 2, narrow=narrow, height=height, margins=MARGINS)
    for ax, (name, rows, (column, label)) in zip(axes, panels, strict=True):
        full = 0.0 if column == "gain_pp" else get_number(full_row(records, rows), column)
        _draw_rows(ax, rows, column, full)
        share = _share_of_operations(rows, full_row(records, rows))
        add_labels(canvas, ax, f"{name}: {share} of the operations", label)
    return canvas


def _title(row: Row) -> str:
    """Return the short title of the method of a row; its value is in the table."""
    method = find_method(get_text(row, "method"))
    return get_text(row, "method") if method is None else method.title


def _share_of_operations(rows: Sequence[Row], full: Row) -> str:
    ours, whole = get_number(rows[0], "gflops"), get_number(full, "gflops")
    return "–" if ours is None or not whole else f"{100 * ours / whole:.0f} %"


def _draw_rows(axes: "Axes", rows: Sequence[Row], column: str, full: float | None) -> None:
    """Draw one marker for each row from top to bottom, with its interval if it has one."""
    if full is not None:
        axes.axvline(full, color=style.INK.light, linewidth=1.0)
    for index, row in enumerate(rows):
        value = get_number(row, column)
        if value is None:
            continue
        name = family(get_text(row, "method"))
        low, high = get_number(row, "gain_low_pp"), get_number(row, "gain_high_pp")
        if column == "gain_pp" and low is not None and high is not None:
            colour = style.LIGHT[style.method_mark(name).colour]
            axes.plot([low, high], [index, index], color=colour, linewidth=1.6)
        draw_line(axes, name, [(value, index)], linestyle="none")
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_yticks(range(len(rows)), [_title(row) for row in rows])
    axes.margins(x=0.08)
