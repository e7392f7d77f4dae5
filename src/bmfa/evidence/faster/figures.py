"""Figures of the speed of patched models: times as bars, and masks side by side."""

import base64
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from bmfa.evidence.methods import FULL
from bmfa.evidence.page import panels, plots
from bmfa.evidence.page.formats import format_number
from bmfa.evidence.page.record_set import RecordSet, get_number, get_text
from bmfa.records import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Drawing

Mask = NDArray[np.bool_]
# Columns at the right of the bars: key, heading, decimals.
SETTING_MEASURES = (
    ("mask_iou", "mask IoU", 3),
    ("agreement_percent", "agreement, %", 0),
    ("error_percent", "error, %", 2),
)
MODEL_MEASURES = (("error_l2_percent", "features, %", 2), ("mask_iou", "mask IoU", 3))
MOST_IOU_CHANGE = 0.02  # a mask is called unchanged if its IoU changes by at most this
MODELS = {
    "timm:deit_tiny_patch16_224": "DeiT-Tiny",
    "timm:vit_small_patch14_dinov2": "ViT-S/14, saliency",
}


def cpu_models(records: RecordSet) -> list[list[Row]]:
    """Return the rows of each whole model that was timed on a CPU, one group for each size."""
    rows = [
        {**row, "model": MODELS.get(str(record.settings["model"]), record.settings["model"])}
        for record in records.of("bench")
        if record.environment.get("device") == "cpu"
        for row in record.rows
        if row.get("what") == "model" and not get_text(row, "method").startswith("full-")
    ]
    rows.sort(key=lambda row: (row["method"] != FULL, row["method"]))
    return panels.group(rows, "model", "img_size")


@plots.figure("faster-models", "bench")
def faster_models(records: RecordSet, narrow: bool) -> "Drawing | None":
    """Time of whole models on a CPU with and without the patch, and the change of their output."""
    models = cpu_models(records)
    if not models:
        return None
    drawing, places = plots.panels(len(models), 2, narrow, 175)
    for axes, rows in zip(places, models, strict=True):
        measures = [one for one in MODEL_MEASURES if any(one[0] in row for row in rows)]
        title = f"{rows[0]['model']}, {rows[0]['img_size']:,} px"
        plots.set_axes(axes, title, f"time of an image, {rows[0]['n']:,} tokens")
        _draw_times(axes, rows, [] if narrow else measures, 0.21)
    return drawing


@plots.figure("faster", "faster")
def faster(records: RecordSet, narrow: bool) -> "Drawing":
    """Time of an image with and without the patch, and what it changes."""
    rows = records.rows("faster", what="setting")
    drawing, (axes,) = plots.panels(1, 1, narrow, 80 + 30 * len(rows))
    plots.set_axes(axes, "Time of an image", f"{rows[0]['n']:,} tokens")
    _draw_times(axes, rows, SETTING_MEASURES[:1] if narrow else SETTING_MEASURES, 0.14)
    return drawing


def _draw_times(
    axes: "Axes", rows: Sequence[Row], measures: Sequence[tuple[str, str, int]], step: float
) -> None:
    """Draw a bar of the time of every row, with measures beside it at steps of the width."""
    times = [get_number(row, "milliseconds") or 0.0 for row in rows]
    colours = ["mean" if get_text(row, "method") == FULL else "optimal" for row in rows]
    bars = axes.barh(range(len(rows)), times, 0.6, color=[plots.LIGHT[name] for name in colours])
    labels = []
    for row, time in zip(rows, times, strict=True):
        labels.append(f"{time:.0f} ms" if time < 1000 else f"{time / 1000:.1f} s")
        labels[-1] += "" if get_text(row, "method") == FULL else f"  {row['speedup']:.1f}×"
    axes.bar_label(bars, labels, padding=6, fontsize=plots.SMALL)
    for place, (column, heading, decimals) in enumerate(reversed(measures)):
        numbers = [format_number(get_number(row, column), decimals) for row in rows]
        right: dict[str, Any] = {"x": 1 - step * place, "ha": "right", "fontsize": plots.SMALL}
        for line, number in enumerate(numbers):
            axes.text(y=line, s=number, transform=axes.get_yaxis_transform(), va="center", **right)
        axes.text(y=1, s=heading, transform=axes.transAxes, color=plots.LIGHT["muted"], **right)
    axes.set_yticks(range(len(rows)), [setting_title(row) for row in rows])
    limit = max(times) / (0.72 - step * len(measures))
    axes.set(xticks=[], ylim=(len(rows) - 0.5, -0.5), xlim=(0, limit))
    axes.spines["bottom"].set_visible(False)
    axes.grid(visible=False)


@plots.figure("masks", "faster")
def masks(records: RecordSet, narrow: bool) -> "Drawing":
    """Images with the masks that the full and the patched model predict, and their difference."""
    best = best_setting(records.rows("faster", what="setting"))
    images = panels.group(records.rows("faster", what="image"), "title")
    return panels.draw_strips(
        [panels.Strip(_mask_panels(rows, best)) for rows in images], narrow, 3
    )


def best_setting(settings: Sequence[Row]) -> str:
    """Return the fastest patched setting that changes the IoU by at most `MOST_IOU_CHANGE`.

    The whole 95 % interval of the change counts, if the rows have it. Without such a setting, it is the
    one with the smallest change of the IoU.
    """
    patched = [row for row in settings if get_text(row, "method") != FULL]

    def change(row: Row) -> float:
        names = ("mask_iou_change", "mask_iou_change_low", "mask_iou_change_high")
        return max(abs(get_number(row, name) or 0.0) for name in names)

    close = [row for row in patched if change(row) <= MOST_IOU_CHANGE]
    if close:
        return get_text(max(close, key=lambda row: get_number(row, "speedup") or 0.0), "method")
    return get_text(min(patched, key=change, default={"method": FULL}), "method")


def setting_title(row: Row) -> str:
    """Return the call that makes a setting."""
    name, _, value = get_text(row, "method").partition(":")
    return f"patch(error={value})" if name == "error" else "full model"


def _mask_panels(rows: Sequence[Row], best: str) -> list[panels.Panel]:
    """The image, the object, the masks of the full and the patched model, and their difference."""
    by_method = {get_text(row, "method"): row for row in rows}
    full = by_method.get(FULL, rows[0])
    patched = by_method.get(best, full)
    truth, before = read_mask(full, "true_mask"), read_mask(full, "mask")
    after = read_mask(patched, "mask")
    added, removed = after & ~before, before & ~after
    changed = f"{100 * float((added | removed).mean()):.2f} % of the pixels"

    def panel(title: str, notes: Sequence[str], *shown: tuple[Mask, str]) -> panels.Panel:
        return panels.Panel(title, partial(_draw_masks, get_text(full, "image"), shown), notes)

    return [
        panels.photograph_panel(full, notes=[get_text(full, "label")]),
        panel("Object", (), (truth, plots.YELLOW)),
        panel("Full model", _numbers(full), (before, plots.YELLOW)),
        panel(setting_title(patched), _numbers(patched), (after, plots.YELLOW)),
        panel("Difference", [changed], (added, plots.ORANGE), (removed, plots.BLUE)),
    ]


def _numbers(row: Row) -> list[str]:
    time, iou = get_number(row, "milliseconds") or 0.0, get_number(row, "mask_iou") or 0.0
    return [f"{time:.0f} ms", f"IoU {iou:.3f}"]


def _draw_masks(uri: str, masks: Sequence[tuple[Mask, str]], axes: "Axes") -> None:
    """Draw an image, darkened outside of the masks, with the masks in colours over it."""
    panels.photograph(axes, uri)
    covered = np.any([mask for mask, _ in masks], axis=0)
    panels.overlay(axes, np.where(covered, 0.0, 0.72), plots.DARK)
    for mask, colour in masks:
        panels.overlay(axes, np.where(mask, 0.85, 0.0), colour)


def read_mask(row: Row, column: str) -> Mask:
    """Return a mask of a row, (side, side) bool; raise ValueError if its length does not fit."""
    side = int(get_number(row, "mask_side") or 0)
    data = base64.b64decode(get_text(row, column))
    if side < 1 or len(data) != -(-side * side // 8):
        raise ValueError(
            f"{get_text(row, 'title') or 'a row'} holds {len(data)} bytes of {column} for {side}x{side} "
            "pixels; pass base64 of one bit for each pixel in raster order"
        )
    bits = np.unpackbits(np.frombuffer(data, dtype=np.uint8), count=side * side)
    return bits.reshape(side, side).astype(bool)
