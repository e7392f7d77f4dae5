"""Figure of the speed of a patched model: times and measures as bars, and masks side by side."""

import base64
import binascii
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from bmfa.evidence.methods import FULL
from bmfa.evidence.page import style
from bmfa.evidence.page.canvas import Canvas, figure
from bmfa.evidence.page.drawing import Array, draw_overlay
from bmfa.evidence.page.formats import format_number
from bmfa.evidence.page.record_set import RecordSet, get_number, get_text, unique
from bmfa.evidence.page.score_maps import Panel, ScoreMap, draw_row
from bmfa.records import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DARK, MASK, ORANGE, BLUE = "#0a0d12", "#ffd23f", "#ff9352", "#6faaff"
GAP = 12.0  # pixels between panels
BAR_ROW = 30.0  # pixels
# Columns at the right of the bars: key, heading, decimals.
NUMBERS = (
    ("mask_iou", "mask IoU", 3),
    ("agreement_percent", "agreement", 0),
    ("error_percent", "error, %", 2),
)


@figure("faster", needs=("faster",))
def faster(records: RecordSet, narrow: bool) -> Canvas:
    """Time of an image with and without the patch, and the masks that both predict."""
    rows = records.require("faster")
    settings = [row for row in rows if get_text(row, "what") == "setting"]
    examples = [row for row in rows if get_text(row, "what") == "image"]
    groups = [
        [row for row in examples if get_text(row, "title") == title]
        for title in unique(examples, "title")
    ]
    best = best_setting(settings)
    width, columns = (style.NARROW, 3) if narrow else (style.WIDE, 5)
    side = (width - (columns - 1) * GAP) / columns
    lines = -(-5 // columns)
    bars = 40 + BAR_ROW * len(settings)
    step = side + 62
    canvas = Canvas(width, bars + 26 + len(groups) * (lines * step))
    _draw_bars(canvas, settings, narrow)
    for number, group in enumerate(groups):
        panels = _mask_panels(group, best)
        for line in range(lines):
            top = bars + 56 + (number * lines + line) * step
            draw_row(canvas, 0, top, side, GAP, panels[line * columns : (line + 1) * columns])
    return canvas


def best_setting(settings: Sequence[Row], most_iou: float = 0.02) -> str:
    """Return the fastest patched setting whose IoU is surely within `most_iou` of the full model's.

    The whole 95 % interval of the change counts, if the rows have it.

    Without one, the setting with the smallest change of the IoU.
    """
    patched = [row for row in settings if get_text(row, "method") != FULL]
    if not patched:
        return FULL

    def change(row: Row) -> float:
        names = ("mask_iou_change", "mask_iou_change_low", "mask_iou_change_high")
        return max(abs(get_number(row, name) or 0.0) for name in names)

    close = [row for row in patched if change(row) <= most_iou]
    if close:
        return get_text(max(close, key=lambda row: get_number(row, "speedup") or 0.0), "method")
    return get_text(min(patched, key=change), "method")


def setting_title(row: Row) -> str:
    """Return the call that makes a setting."""
    name, _, value = get_text(row, "method").partition(":")
    return f"patch(error={value})" if name == "error" else "full model"


def _draw_bars(canvas: Canvas, settings: Sequence[Row], narrow: bool) -> None:
    """Draw a bar of the time of every setting, with its measures beside it."""
    slowest = max((get_number(row, "milliseconds") or 0.0 for row in settings), default=1.0) or 1.0
    name_width, number_width = (104.0, 52.0) if narrow else (150.0, 92.0)
    numbers = NUMBERS[:1] if narrow else NUMBERS
    left = name_width
    width = canvas.width - left - number_width * len(numbers) - 10
    canvas.add_title(0, 14, "Time of an image")
    tokens = get_number(settings[0], "n") if settings else None
    if tokens is not None:
        canvas.add_note(0, 32, f"{tokens:,.0f} tokens")
    for index, (_, heading, _) in enumerate(numbers):
        x = canvas.width - (len(numbers) - index) * number_width + number_width - 4
        canvas.add_note(x, 32, heading, ha="right")
    axes = canvas.add_pixel_axes(left, 40, width, BAR_ROW * len(settings))
    for line, row in enumerate(settings):
        time, speedup = get_number(row, "milliseconds") or 0.0, get_number(row, "speedup")
        full = get_text(row, "method") == FULL
        y = line * BAR_ROW + BAR_ROW / 2
        colour = style.LIGHT["mean"] if full else style.LIGHT["optimal"]
        length = max(1.0, (width - 112) * time / slowest)
        axes.barh(y, length, 18, left=0, color=colour)
        baseline = 40 + y + 4
        canvas.add_text(0, baseline, setting_title(row), fontsize=style.SMALL)
        label = f"{time:.0f} ms" + ("" if full or speedup is None else f"  {speedup:.1f}×")
        canvas.add_text(left + length + 6, baseline, label, fontsize=style.SMALL)
        for index, (column, _, decimals) in enumerate(numbers):
            x = canvas.width - (len(numbers) - index) * number_width + number_width - 4
            shown = format_number(get_number(row, column), decimals)
            canvas.add_text(x, baseline, shown, fontsize=style.SMALL, ha="right")


def _mask_panels(group: Sequence[Row], best: str) -> list[Panel]:
    """The image, the object, the masks of the full and the patched model, and their difference."""
    by_method = {get_text(row, "method"): row for row in group}
    full = by_method.get(FULL, group[0])
    patched = by_method.get(best, full)
    truth, before, after = (
        read_mask(row, column)
        for row, column in ((full, "true_mask"), (full, "mask"), (patched, "mask"))
    )
    image = ScoreMap(group, np.zeros((1, 1))).image_panel("Image")
    difference = np.abs(before.astype(int) - after.astype(int))
    changed = f"{100 * float(difference.mean()):.2f} % of the pixels"
    return [
        Panel("Image", image.draw, [get_text(full, "label")]),
        _overlay_panel(full, "Object", [(truth, MASK)]),
        _overlay_panel(full, "Full model", [(before, MASK)], _numbers(full)),
        _overlay_panel(full, setting_title(patched), [(after, MASK)], _numbers(patched)),
        _overlay_panel(
            full,
            "Difference",
            [(after & ~before, ORANGE), (before & ~after, BLUE)],
            [changed],
        ),
    ]


def _numbers(row: Row) -> list[str]:
    iou, time = get_number(row, "mask_iou"), get_number(row, "milliseconds")
    return [
        *([] if time is None else [f"{time:.0f} ms"]),
        *([] if iou is None else [f"IoU {iou:.3f}"]),
    ]


def _overlay_panel(
    row: Row, title: str, masks: Sequence[tuple["np.ndarray", str]], notes: Sequence[str] = ()
) -> Panel:
    """A panel of the image, darkened, with masks in colours over it."""

    def draw(canvas: Canvas, left: float, top: float, side: float) -> None:
        if not canvas.add_image(left, top, side, get_text(row, "image")):
            canvas.add_pixel_axes(left, top, side, side).barh(side / 2, side, side, color=DARK)
        axes: Axes = canvas.add_axes(left, top, side, side)
        height, width = masks[0][0].shape
        axes.set(xlim=(0, width), ylim=(height, 0))
        axes.set_axis_off()
        covered: Array = np.zeros((height, width))
        for mask, _ in masks:
            covered = np.maximum(covered, mask)
        draw_overlay(axes, 0.72 * (1 - covered), DARK)
        for mask, colour in masks:
            draw_overlay(axes, 0.85 * mask.astype(float), colour)

    return Panel(title, draw, notes)


def read_mask(row: Row, column: str) -> "np.ndarray":
    """Return a mask of a row, (side, side) bool; raise ValueError if its length does not fit."""
    side = int(get_number(row, "mask_side") or 0)
    try:
        data = base64.b64decode(get_text(row, column), validate=True)
    except (binascii.Error, ValueError):
        data = b""
    if side < 1 or len(data) != -(-side * side // 8):
        raise ValueError(
            f"{get_text(row, 'title') or 'a row'} holds {len(data)} bytes of {column} for {side}x{side} "
            "pixels; pass base64 of one bit for each pixel in raster order"
        )
    bits = np.unpackbits(np.frombuffer(data, dtype=np.uint8))[: side * side]
    return bits.reshape(side, side).astype(bool)
