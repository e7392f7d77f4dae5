"""What the figures have in common: panel titles, axis labels, ticks, legends and heat maps."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from bmfa.evidence.page import style
from bmfa.evidence.page.canvas import Canvas
from bmfa.evidence.page.record_set import get_number, get_points, get_text, unique
from bmfa.packages import load_package
from bmfa.records import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Array = NDArray[np.float64]
Box = tuple[int, int, int, int]  # top, left, bottom, right in tokens

LIGHT_LINE, DARK_LINE = "#ffffff", "#000000"
TITLE_INDENT = 40.0  # pixels that a panel's title starts to the left of its axes
LABEL_DISTANCE = 15.0  # pixels between the baselines of two labels
LEGEND_ROW = 20.0  # pixels
MAX_NAME_LENGTH = 21  # characters of a method's name in a figure


@dataclass(frozen=True)
class Margins:
    """Space around the axes of a panel for its title, ticks and labels, in CSS pixels."""

    left: float = 44
    right: float = 14
    top: float = 50
    bottom: float = 40


MARGINS = Margins()


def panel_grid(
    count: int,
    columns: int,
    *,
    narrow: bool,
    height: float,
    margins: Margins = MARGINS,
    legend: Sequence[str] | Mapping[str, str] = (),
    legend_columns: int = 4,
) -> tuple[Canvas, list["Axes"]]:
    """Return a canvas with rows of equal axes and a legend.

    Args:
        count: number of axes.
        columns: axes in a row on a wide screen; a narrow screen has one.
        narrow: True for a narrow screen.
        height: height of each axes in CSS pixels.
        margins: space around each axes.
        legend: methods in the legend under the panels, or their titles by method.
        legend_columns: columns of the legend on a wide screen; a narrow screen has half of them.
    """
    width, columns = (style.NARROW, 1) if narrow else (style.WIDE, columns)
    cell_width, cell_height = width / columns, margins.top + height + margins.bottom
    legend_columns = legend_columns // 2 if narrow else legend_columns
    legend_rows = -(-len(legend) // legend_columns)
    bottom = legend_rows * LEGEND_ROW + 12 if legend else 0
    canvas = Canvas(width, -(-count // columns) * cell_height + bottom)
    axes = [
        canvas.add_axes(
            index % columns * cell_width + margins.left,
            index // columns * cell_height + margins.top,
            cell_width - margins.left - margins.right,
            height,
        )
        for index in range(count)
    ]
    for index, name in enumerate(legend):
        x = 4 + index // legend_rows * width / legend_columns
        y = canvas.height - bottom + 16 + index % legend_rows * LEGEND_ROW
        text = legend[name] if isinstance(legend, Mapping) else _shorten(name)
        marker = style.marker_options(style.method_mark(name))
        canvas.add_line([x + 6], [y], linestyle="none", **marker)
        canvas.add_text(x + 20, y + 4, text, fontsize=style.SMALL)
    return canvas, axes


def add_labels(canvas: Canvas, axes: "Axes", title: str, y_label: str, x_label: str = "") -> None:
    """Add the title of a panel, its vertical axis label under the title, and the horizontal one."""
    left, top, width, height = canvas.bounds(axes)
    canvas.add_title(left - TITLE_INDENT, top - 29, title)
    canvas.add_note(left - TITLE_INDENT, top - 11, y_label)
    if x_label:
        canvas.add_note(left + width / 2, top + height + 34, x_label, ha="center")


def set_ticks(axis: Any, ticks: Sequence[float], labels: Sequence[str] | None = None) -> None:
    """Set the ticks of an axis, by default labelled with plain numbers, without minor ticks."""
    axis.set_ticks(ticks, labels or [f"{tick:g}" for tick in ticks])
    axis.set_minor_locator(load_package("matplotlib.ticker").NullLocator())


def set_log_range(axes: "Axes", which: str, values: Sequence[float], factor: float) -> None:
    """Make the x or y axis logarithmic, with a range around positive values and round ticks."""
    low, high = min(values) / factor, max(values) * factor
    axes.set(**{f"{which}scale": "log", f"{which}lim": (low, high)})
    set_ticks(axes.xaxis if which == "x" else axes.yaxis, round_ticks(low, high))


def round_ticks(low: float, high: float) -> list[float]:
    """Return at most seven round numbers in a positive range."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    chosen: list[float] = []
    for steps in ((1.0,), (1.0, 3.0), (1.0, 2.0, 5.0), (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)):
        ticks = [step * 10.0**power for power in powers for step in steps]
        inside = [tick for tick in ticks if low <= tick <= high]
        if len(inside) <= 7:
            chosen = inside
    return chosen or [low, high]


def draw_line(
    axes: "Axes",
    method: str,
    line: Sequence[tuple[float, float]],
    *,
    filled: bool = False,
    **options: Any,
) -> None:
    """Draw the points of a method, joined by a line; `filled` fills hollow markers."""
    if line:
        mark = style.method_mark(method)
        options = style.line_options(mark) | style.marker_options(mark, filled) | options
        xs, ys = zip(*line, strict=True)
        axes.plot(xs, ys, clip_on=False, **options)


def draw_point(axes: "Axes", method: str, x: float | None, y: float | None) -> None:
    """Draw the marker of a method, if both coordinates are known."""
    if x is not None and y is not None:
        draw_line(axes, method, [(x, y)], linestyle="none", filled=method == "paper")


def draw_method_lines(
    axes: "Axes", rows: Sequence[Row], x: str, y: str, marker_step: int
) -> dict[str, float]:
    """Draw a line for each method and return the y value at the end of each line.

    The markers of the methods are shifted against each other, so that lines that coincide do not
    hide each other's markers.
    """
    ends = {}
    methods = unique(rows, "method")
    for index, method in enumerate(methods):
        line = get_points([row for row in rows if get_text(row, "method") == method], x, y)
        start = index * marker_step // len(methods)
        draw_line(axes, method, line, filled=True, markevery=(start, marker_step))
        if line:
            ends[method] = line[-1][1]
    return ends


def value_range(rows: Sequence[Row], column: str) -> tuple[float, float]:
    """Return axis limits slightly beyond the smallest and the largest value."""
    values = [value for row in rows if (value := get_number(row, column)) is not None]
    highest = max(values, default=0.0) or 1.0
    return min(values, default=0.0) - 0.04 * highest, 1.15 * highest


def spread_labels(
    positions: Sequence[float], distance: float, low: float, high: float
) -> list[float]:
    """Move ascending positions as little as possible until they are `distance` apart."""
    groups: list[tuple[float, int]] = []  # sum and number of positions that move together
    for index, position in enumerate(positions):
        total, count = position - index * distance, 1
        while groups and groups[-1][0] / groups[-1][1] > total / count:
            previous, members = groups.pop()
            total, count = total + previous, count + members
        groups.append((total, count))
    moved = [total / count for total, count in groups for _ in range(count)]
    last = high - (len(moved) - 1) * distance
    return [max(low, min(one, last)) + index * distance for index, one in enumerate(moved)]


def label_line_ends(canvas: Canvas, axes: "Axes", ends: Mapping[str, float]) -> None:
    """Write the name of every method beside the right end of its line.

    Args:
        canvas: the canvas of the axes.
        axes: axes with space for the names at their right.
        ends: the y value at the end of each line, by method.
    """
    left, top, width, height = canvas.bounds(axes)
    right, reach = left + width, 16
    axes.autoscale_view()  # otherwise the limits could still change
    pixels = {
        name: canvas.height - float(axes.transData.transform((0, value))[1])
        for name, value in ends.items()
    }
    order = sorted(ends, key=lambda name: pixels[name])
    labels = spread_labels([pixels[n] for n in order], LABEL_DISTANCE, top - 2, top + height + 4)
    for name, y in zip(order, labels, strict=True):
        colour = style.LIGHT[style.method_mark(name).colour]
        canvas.add_line(
            [right + 2, right + reach - 4], [pixels[name], y], color=colour, linewidth=0.8
        )
        text = _shorten(name)
        canvas.add_text(right + reach, y + 4, text, fontsize=style.SMALL, color=colour)


def _shorten(name: str) -> str:
    return name if len(name) <= MAX_NAME_LENGTH else f"{name[: MAX_NAME_LENGTH - 1]}…"


def draw_heatmap(axes: "Axes", values: Array, low: float, high: float) -> None:
    """Draw (H, W) values as colours from `low` to `high`."""
    height, width = values.shape
    extent = (0, width, height, 0)
    axes.imshow(values, "cividis", vmin=low, vmax=high, interpolation="none", extent=extent)
    axes.set_aspect("auto")
    axes.set_axis_off()


def draw_leaves(axes: "Axes", boxes: Sequence[Box], dark_lines: NDArray[np.bool_]) -> None:
    """Draw the borders of leaves over a heat map, dark where `dark_lines` is True, else light."""
    corners = np.asarray(boxes, dtype=float).reshape(-1, 4)
    line = {"facecolor": "none", "linewidth": 0.8, "alpha": 0.75, "clip_on": False}
    _add_boxes(axes, corners[~dark_lines], edgecolor=LIGHT_LINE, **line)
    _add_boxes(axes, corners[dark_lines], edgecolor=DARK_LINE, **line)


def outline_boxes(
    axes: "Axes",
    boxes: Sequence[tuple[float, float, float, float]],
    colour: str = LIGHT_LINE,
    alpha: float = 0.9,
) -> None:
    """Draw boxes over a photograph with a line that shows on bright and on dark pixels."""
    corners = np.asarray(boxes, dtype=float).reshape(-1, 4)
    _add_boxes(axes, corners, facecolor="none", edgecolor=DARK_LINE, linewidth=2.4, alpha=0.4)
    _add_boxes(axes, corners, facecolor="none", edgecolor=colour, linewidth=1.0, alpha=alpha)


def draw_overlay(axes: "Axes", opacity: Array, colour: str) -> None:
    """Cover the tokens of a photograph with a colour of (H, W) opacities from 0 to 1."""
    height, width = opacity.shape
    pixels = np.empty((height, width, 4))
    pixels[..., :3] = load_package("matplotlib.colors").to_rgb(colour)
    pixels[..., 3] = opacity
    axes.imshow(pixels, interpolation="none", extent=(0, width, height, 0), aspect="auto")


def _add_boxes(axes: "Axes", boxes: Array, **options: Any) -> None:
    """Add (n, 4) boxes as one path."""
    if len(boxes) == 0:
        return
    top, left, bottom, right = boxes.T
    corners = ((left, top), (right, top), (right, bottom), (left, bottom), (left, top))
    vertices = np.stack([np.stack(corner, -1) for corner in corners], 1)  # (n, 5, 2)
    path = load_package("matplotlib.path").Path
    codes = [path.MOVETO, *[path.LINETO] * 3, path.CLOSEPOLY] * len(boxes)
    outline = path(vertices.reshape(-1, 2), codes)
    axes.add_artist(load_package("matplotlib.patches").PathPatch(outline, **options))
