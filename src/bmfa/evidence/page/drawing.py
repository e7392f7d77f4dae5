"""What the figures have in common: panel titles, axis labels, ticks, legends and heat maps."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from bmfa.evidence.page import style
from bmfa.evidence.page.canvas import Canvas
from bmfa.evidence.page.record_set import get_number, get_text, points, unique
from bmfa.packages import load_package
from bmfa.records import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Array = NDArray[np.float64]
Box = tuple[int, int, int, int]  # top, left, bottom, right in tokens

COLOUR_LEVELS = 16  # few levels keep the SVG small
LIGHT_LINE, DARK_LINE = "#ffffff", "#000000"
TITLE_INDENT = 40.0  # pixels that a panel's title starts to the left of its axes
LABEL_DISTANCE = 15.0  # pixels between the baselines of two labels
LEGEND_ROW = 20.0  # pixels
MAX_NAME_LENGTH = 21  # characters of a method's name in a figure


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
        look = style.method_style(method)
        marker = look.filled_marker if filled else look.open_marker
        xs, ys = zip(*line, strict=True)
        axes.plot(xs, ys, clip_on=False, **(look.line | marker | options))


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
        line = points([row for row in rows if get_text(row, "method") == method], x, y)
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
        colour = style.method_style(name).colour.light
        canvas.add_line(
            [right + 2, right + reach - 4], [pixels[name], y], color=colour, linewidth=0.8
        )
        text = _shorten(name)
        canvas.add_text(right + reach, y + 4, text, fontsize=style.SMALL, color=colour)


def legend_height(count: int, columns: int) -> float:
    """Return the height of a legend in pixels."""
    return -(-count // columns) * LEGEND_ROW + 12


def draw_legend(
    canvas: Canvas, names: Sequence[str], columns: int, titles: Mapping[str, str] | None = None
) -> None:
    """Draw the marker and the name of every method at the bottom of the canvas."""
    rows = -(-len(names) // columns)
    top = canvas.height - legend_height(len(names), columns) + 8
    for index, name in enumerate(names):
        x = 4 + index // rows * canvas.width / columns
        y = top + index % rows * LEGEND_ROW + 8
        canvas.add_line([x + 6], [y], linestyle="none", **style.method_style(name).filled_marker)
        text = (titles or {}).get(name) or _shorten(name)
        canvas.add_text(x + 20, y + 4, text, fontsize=style.SMALL)


def _shorten(name: str) -> str:
    return name if len(name) <= MAX_NAME_LENGTH else f"{name[: MAX_NAME_LENGTH - 1]}…"


def draw_heatmap(axes: "Axes", values: Array, low: float, high: float) -> None:
    """Draw (H, W) values as colours; each colour level is one path of thick horizontal lines."""
    height, width = values.shape
    share = (values - low) / ((high - low) or 1.0)
    levels = np.clip((share * (COLOUR_LEVELS - 1)).round(), 0, COLOUR_LEVELS - 1).astype(int)
    colours = load_package("matplotlib").colormaps["cividis"].resampled(COLOUR_LEVELS)
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.set_axis_off()
    # The most frequent level fills the background, which leaves no seams between the lines.
    background = np.bincount(levels.ravel()).argmax()
    everything = np.array([[0.0, 0.0, height, width]])
    _add_boxes(axes, everything, facecolor=colours(background), linewidth=0, antialiased=False)
    path = load_package("matplotlib.path").Path
    for level in np.unique(levels[levels != background]):
        row, start, end = _runs(levels == level).T
        ends = np.stack((start, row, end, row), -1).reshape(-1, 2)  # (2 * runs, x and y)
        line = path(ends, [path.MOVETO, path.LINETO] * len(row))
        patch = load_package("matplotlib.patches").PathPatch(
            line,
            fill=False,
            capstyle="butt",
            antialiased=False,
            edgecolor=colours(level),
            linewidth=axes.get_window_extent().height / height,
        )
        axes.add_artist(patch)


def draw_leaves(axes: "Axes", boxes: Sequence[Box], dark_lines: NDArray[np.bool_]) -> None:
    """Draw the borders of leaves over a heat map, dark where `dark_lines` is True, else light."""
    corners = np.asarray(boxes, dtype=float).reshape(-1, 4)
    line = {"facecolor": "none", "linewidth": 0.8, "alpha": 0.75, "clip_on": False}
    _add_boxes(axes, corners[~dark_lines], edgecolor=LIGHT_LINE, **line)
    _add_boxes(axes, corners[dark_lines], edgecolor=DARK_LINE, **line)


def outline_boxes(
    axes: "Axes", boxes: Sequence[Box], colour: str = LIGHT_LINE, alpha: float = 0.9
) -> None:
    """Draw boxes over a photograph with a line that shows on bright and on dark pixels."""
    corners = np.asarray(boxes, dtype=float).reshape(-1, 4)
    _add_boxes(axes, corners, facecolor="none", edgecolor=DARK_LINE, linewidth=2.4, alpha=0.4)
    _add_boxes(axes, corners, facecolor="none", edgecolor=colour, linewidth=1.0, alpha=alpha)


def draw_overlay(axes: "Axes", opacity: Array, colour: str) -> None:
    """Cover the tokens of a photograph with a colour of (H, W) opacities from 0 to 1."""
    levels = np.clip((opacity * COLOUR_LEVELS).round(), 0, COLOUR_LEVELS).astype(int)
    for level in np.unique(levels[levels > 0]):
        row, start, end = _runs(levels == level).T
        boxes = np.stack((row - 0.5, start, row + 0.5, end), -1)
        alpha = float(level) / COLOUR_LEVELS
        _add_boxes(axes, boxes, facecolor=colour, alpha=alpha, linewidth=0, antialiased=False)


def _runs(mask: NDArray[np.bool_]) -> Array:
    """Return (n, 3): the middle of the row, the start and the end of every horizontal run."""
    change = np.diff(np.pad(mask, ((0, 0), (1, 1))).astype(int), axis=1)
    rows, starts = np.nonzero(change == 1)
    ends = np.nonzero(change == -1)[1]
    return np.stack((rows + 0.5, starts, ends), -1)


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
