"""What the figures are made of: headings, labels at the ends of lines, fields and trees."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from bmfa.evidence.page import style
from bmfa.evidence.page.sheet import Sheet, load

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Array = NDArray[np.float64]

LEVELS = 16
LIGHT_LINE, DARK_LINE = "#ffffff", "#000000"
LABEL_HEIGHT = 15.0
LEGEND_ROW = 20.0
NAME_LENGTH = 21


def heading(sheet: Sheet, axes: "Axes", title: str, below: str = "", indent: float = 34) -> None:
    """The panel's title, and under it what its vertical axis shows."""
    left, top, _, _ = sheet.box(axes)
    sheet.text(left - indent, top - 29, title, fontsize=style.TITLE, fontweight="bold")
    sheet.text(left - indent, top - 11, below, fontsize=style.SMALL, color=style.MUTED.light)


def foot(sheet: Sheet, axes: "Axes", words: str) -> None:
    """What the horizontal axis shows, under its middle."""
    left, top, width, height = sheet.box(axes)
    sheet.text(
        left + width / 2,
        top + height + 34,
        words,
        ha="center",
        fontsize=style.SMALL,
        color=style.MUTED.light,
    )


def log_ticks(axis: Any, ticks: Sequence[float]) -> None:
    """Ticks of a logarithmic axis, written as plain numbers."""
    axis.set_ticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.set_minor_locator(load("matplotlib.ticker").NullLocator())


def spread(places: Sequence[float], distance: float, low: float, high: float) -> list[float]:
    """Move ascending places as little as needed to keep them `distance` apart inside the range."""
    blocks: list[tuple[float, int]] = []
    for index, place in enumerate(places):
        total, count = place - index * distance, 1
        while blocks and blocks[-1][0] / blocks[-1][1] > total / count:
            before, members = blocks.pop()
            total, count = total + before, count + members
        blocks.append((total, count))
    flat = [total / count for total, count in blocks for _ in range(count)]
    last = high - (len(flat) - 1) * distance
    return [max(low, min(one, last)) + index * distance for index, one in enumerate(flat)]


def end_labels(sheet: Sheet, axes: "Axes", ends: Mapping[str, float], reach: float = 16) -> None:
    """Name every line at its right end, names pushed apart and tied to their lines."""
    left, top, width, height = sheet.box(axes)
    right = left + width
    axes.autoscale_view()  # limits that are not set yet would move the ends afterwards

    def pixel(value: float) -> float:
        return sheet.height - float(axes.transData.transform((0, value))[1])

    order = sorted(ends, key=lambda name: (pixel(ends[name]), list(ends).index(name)))
    places = spread([pixel(ends[n]) for n in order], LABEL_HEIGHT, top - 2, top + height + 4)
    for name, place in zip(order, places, strict=True):
        colour = style.method_style(name).colour.light
        xs = [right + 2, right + reach - 4]
        sheet.line(xs, [pixel(ends[name]), place], color=colour, linewidth=0.8)
        sheet.text(right + reach, place + 4, _short(name), fontsize=style.SMALL, color=colour)


def legend(
    sheet: Sheet,
    names: Sequence[str],
    top: float,
    columns: int,
    words: Mapping[str, str] | None = None,
) -> None:
    """Marker and name of every method, or the words for it, in rows."""
    rows = -(-len(names) // columns)
    for index, name in enumerate(names):
        x, y = 4 + index // rows * sheet.width / columns, top + index % rows * LEGEND_ROW + 8
        sheet.line([x + 6], [y], linestyle="none", **style.method_style(name).mark)
        said = _short(name) if words is None else words.get(name, name)
        sheet.text(x + 20, y + 4, said, fontsize=style.SMALL)


def _short(name: str) -> str:
    return name if len(name) <= NAME_LENGTH else f"{name[: NAME_LENGTH - 1]}…"


def field(axes: "Axes", values: Array, low: float, high: float) -> None:
    """A field of scores in steps of colour, each step one path of lines as thick as a token."""
    height, width = values.shape
    share = (values - low) / ((high - low) or 1.0)
    steps = np.clip((share * (LEVELS - 1)).round(), 0, LEVELS - 1).astype(int)
    colours = load("matplotlib").colormaps["cividis"].resampled(LEVELS)
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.set_axis_off()
    # The commonest step lies under all others, so that no seam shows what is behind the field.
    commonest = np.bincount(steps.ravel()).argmax()
    whole = np.array([[0.0, 0.0, height, width]])
    _boxes(axes, whole, facecolor=colours(commonest), linewidth=0, antialiased=False)
    thick = axes.get_window_extent().height / height
    for step in np.unique(steps[steps != commonest]):
        _thick_lines(axes, _runs(steps == step), edgecolor=colours(step), linewidth=thick)


def leaves(axes: "Axes", boxes: Sequence[Sequence[int]], means: Array, middle: float) -> None:
    """The leaves of a tree over a field: light lines around dark leaves, dark around bright."""
    corners = np.asarray(boxes, dtype=float).reshape(-1, 4)
    for chosen, colour in ((means <= middle, LIGHT_LINE), (means > middle, DARK_LINE)):
        _boxes(
            axes,
            corners[chosen],
            facecolor="none",
            edgecolor=colour,
            linewidth=0.8,
            alpha=0.75,
            clip_on=False,
        )


def outline(
    axes: "Axes", boxes: Sequence[Sequence[int]], colour: str = LIGHT_LINE, strength: float = 0.9
) -> None:
    """Boxes over a picture: a line that shows on bright and on dark ground."""
    corners = np.asarray(boxes, dtype=float).reshape(-1, 4)
    for line, width, alpha in ((DARK_LINE, 2.4, 0.4), (colour, 1.0, strength)):
        _boxes(axes, corners, facecolor="none", edgecolor=line, linewidth=width, alpha=alpha)


def veil(axes: "Axes", cover: Array, colour: str) -> None:
    """Cover tokens with a colour, each in steps of opacity from 0 (open) to 1."""
    steps = np.clip((cover * LEVELS).round(), 0, LEVELS).astype(int)
    for step in np.unique(steps[steps > 0]):
        middle, start, end = _runs(steps == step).T
        corners = np.stack((middle - 0.5, start, middle + 0.5, end), -1)
        alpha = float(step) / LEVELS
        _boxes(axes, corners, facecolor=colour, alpha=alpha, linewidth=0, antialiased=False)


def leaf_means(values: Array, boxes: Sequence[Sequence[int]]) -> Array:
    """The mean score of every leaf."""
    return np.array([values[t:b, left:r].mean() for t, left, b, r in boxes])


def reconstruct(values: Array, boxes: Sequence[Sequence[int]]) -> Array:
    """What a tree keeps of a field: the mean of its leaf at every token."""
    kept = np.zeros_like(values)
    for (top, left, bottom, right), mean in zip(boxes, leaf_means(values, boxes), strict=True):
        kept[top:bottom, left:right] = mean
    return kept


def _runs(mask: NDArray[np.bool_]) -> Array:
    """(n, 3) middle of the row, start and end of every run of tokens in a row."""
    change = np.diff(np.pad(mask, ((0, 0), (1, 1))).astype(int), axis=1)
    rows, starts = np.nonzero(change == 1)
    ends = np.nonzero(change == -1)[1]
    return np.stack((rows + 0.5, starts, ends), -1)


def _thick_lines(axes: "Axes", runs: Array, **options: Any) -> None:
    """All runs as one path, each a line without caps."""
    path = load("matplotlib.path").Path
    ends = np.stack((runs[:, [1, 0]], runs[:, [2, 0]]), 1).reshape(-1, 2)
    drawn = path(ends, [path.MOVETO, path.LINETO] * len(runs))
    options |= {"fill": False, "capstyle": "butt", "antialiased": False}
    axes.add_artist(load("matplotlib.patches").PathPatch(drawn, **options))


def _boxes(axes: "Axes", boxes: Array, **options: Any) -> None:
    """All boxes (top, left, bottom, right) as one path."""
    if len(boxes) == 0:
        return
    top, left, bottom, right = boxes.T
    corners = ((left, top), (right, top), (right, bottom), (left, bottom), (left, top))
    points = np.stack([np.stack(corner, -1) for corner in corners], 1)  # (n, 5, 2)
    path = load("matplotlib.path").Path
    codes = [path.MOVETO, *[path.LINETO] * 3, path.CLOSEPOLY] * len(boxes)
    patch = load("matplotlib.patches").PathPatch(path(points.reshape(-1, 2), codes), **options)
    axes.add_artist(patch)
