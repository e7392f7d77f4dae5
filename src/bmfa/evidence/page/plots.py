"""Figures from records: matplotlib with the style of `bmfa.mplstyle`, as SVG for the page or as PNG."""

import io
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from bmfa.evidence.methods import Line, Mark, family, find_mark
from bmfa.evidence.page.record_set import (
    MissingValueError,
    RecordSet,
    get_number,
    get_points,
    get_text,
    unique,
)
from bmfa.packages import load_package
from bmfa.records import Record, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Drawing

Array = NDArray[np.float64]
WIDE, NARROW = 880, 360  # widths of a figure in CSS pixels
SMALL = 12.0  # font size of notes

# The page's colours and fonts as CSS variables, and the colours of its light theme by name.
STYLE_SHEET = Path(__file__).with_name("templates").joinpath("colours.css").read_text("utf-8")
LIGHT = dict(re.findall(r"--(\w+): (#\w{6})", STYLE_SHEET.partition("@media")[0]))
# Colours over photographs, the same in both themes.
DARK, ORANGE, BLUE, YELLOW = "#0a0d12", "#ff9352", "#6faaff", "#ffd23f"

# The axis of leaf ratios.
LEAF_AXIS: dict[str, Any] = {
    "x_label": "leaf ratio, % of tokens, logarithmic",
    "x_ticks": (0.5, 1, 3, 10, 30, 100),
    "xscale": "log",
    "xlim": (0.35, 140),
}
LINES: Mapping[Line, Any] = {
    "solid": "-",
    "dotted": (0, (1, 1.6)),
    "dashed": (0, (5, 2)),
    "long-dashed": (0, (9, 2.5)),
    "dash-dot": (0, (6, 2, 1, 2)),
    "dash-dot-dot": (0, (6, 2, 1, 2, 1, 2)),
}
# The paper's numbers are drawn as rings around ours.
PAPER = Mark("ink", "o", hollow=True, size=12.0)
PAPER_TITLE = "rings: the paper"
OTHER_MARKERS = "os^Dvph<>P"  # of methods without a mark in the registry, chosen by their name
MAX_NAME = 21  # characters of a method's name in a figure
LABEL_DISTANCE = 15.0  # pixels between the baselines of two labels
# What matplotlib writes beyond the drawing: metadata, a style sheet for the whole page, names of groups,
# a font, no rotation, and line breaks.
SUPERFLUOUS = re.compile(
    r"<metadata>.*?</metadata>|<style type=.*?</style>|(?<=<g) id=\"[^\"]*\"| id=\"image[^\"]*\""
    r"|(?<=\d)pt(?=\")| font-family: 'DejaVu Sans';| transform=\"rotate\(-0 [^\"]*\""
    r"|\n *(?=<|\")",
    re.S,
)
# Coordinates have six decimals, of which the first is kept; numbers outside of attributes are text.
ATTRIBUTE, DECIMALS = re.compile(r'"[^"<>]*"'), re.compile(r"(?<=\.\d)\d{5}(?=\D)")


# Figures


@contextmanager
def _style() -> Iterator[None]:
    style = str(Path(__file__).with_name("bmfa.mplstyle"))
    with load_package("matplotlib.style").context(style), warnings.catch_warnings():
        # Browsers substitute fonts for any script; the font that matplotlib measures with lacks some.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield


@dataclass(frozen=True)
class Figure:
    """A figure that is drawn from records alone.

    Attributes:
        name: its name in `FIGURES` and its file name.
        label: its description for screen readers.
        experiments: the experiments whose rows it shows.
        draw: draws it for a wide or a narrow screen; raises MissingValueError without its data.
    """

    name: str
    label: str
    experiments: tuple[str, ...]
    draw: Callable[[RecordSet, bool], "Drawing | None"]

    @_style()
    def drawable(self, records: Record | Sequence[Record]) -> bool:
        """Return True if the records hold the data of this figure."""
        return self._draw(RecordSet(records)) is not None

    @_style()
    def __call__(
        self, records: RecordSet | Record | Sequence[Record], *, narrow: bool = False
    ) -> str:
        """Draw the figure as SVG for a page, which supplies colours and font; "" without its data."""
        drawing = self._draw(RecordSet(records), narrow)
        name = f"{self.name}-narrow" if narrow else self.name
        return "" if drawing is None else _to_svg(drawing, name, self.label)

    @_style()
    def png(self, records: Record | Sequence[Record], *, scale: float = 2.0) -> bytes:
        """Draw the figure as PNG in the light colours, `scale` pixels for each CSS pixel.

        Raises:
            ValueError: if the records do not hold the data; the message names the command.
        """
        drawing = self._draw(RecordSet(records))
        if drawing is None:
            commands = ", ".join(RecordSet(records).commands(*self.experiments))
            raise ValueError(
                f"the records do not hold the figure {self.name}; make them with: {commands}"
            )
        buffer = io.BytesIO()
        options: dict[str, Any] = {"dpi": 72 * scale, "bbox_inches": "tight", "pad_inches": 0.2}
        drawing.savefig(buffer, facecolor=LIGHT["surface"], metadata={"Software": None}, **options)
        return buffer.getvalue()

    def _draw(self, records: RecordSet, narrow: bool = False) -> "Drawing | None":
        try:
            return self.draw(records, narrow) if all(map(records.has, self.experiments)) else None
        except MissingValueError:
            return None


FIGURES: dict[str, Figure] = {}  # filled by the modules that draw them


def figure(
    name: str, *experiments: str
) -> Callable[[Callable[[RecordSet, bool], "Drawing | None"]], Figure]:
    """Decorate a function that draws a figure; its docstring becomes the label."""

    def register(draw: Callable[[RecordSet, bool], "Drawing | None"]) -> Figure:
        FIGURES[name] = Figure(name, draw.__doc__ or name, experiments, draw)
        return FIGURES[name]

    return register


def _to_svg(drawing: "Drawing", name: str, label: str) -> str:
    """Return SVG in the colours of the page; photographs keep their original bytes."""
    buffer = io.StringIO()
    with load_package("matplotlib").rc_context({"svg.hashsalt": name}):
        drawing.savefig(buffer, format="svg", metadata=dict.fromkeys(("Date", "Creator")))
    text = buffer.getvalue()
    text = SUPERFLUOUS.sub("", text[text.index("<svg") :])
    text = ATTRIBUTE.sub(lambda found: DECIMALS.sub("", found[0]), text)
    for colour, light in LIGHT.items():
        text = text.replace(light, f"var(--{colour})")
    photographs: list[Any] = [i for axes in drawing.axes for i in axes.images if i.get_gid()]
    for image in photographs:
        box = image.axes.get_window_extent()
        place = f'x="{box.x0:.1f}" y="{drawing.bbox.height - box.y1:.1f}"'
        place += f' width="{box.width:.1f}" height="{box.height:.1f}" preserveAspectRatio="none"'
        shown = f'<image xlink:href="{image.source_uri}" {place}/>'
        text = re.sub(f'<image [^>]*id="{image.get_gid()}"[^>]*/>', shown, text)
    return text.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)


# Axes


def panels(
    count: int,
    columns: int,
    narrow: bool,
    height: float,
    legend: Sequence[str] | Mapping[str, str] = (),
    legend_columns: int = 4,
) -> tuple["Drawing", list["Axes"]]:
    """Return a drawing with rows of equal axes, and a legend under them.

    Args:
        count: number of axes.
        columns: axes in a row on a wide screen; a narrow screen has one.
        narrow: True for a narrow screen.
        height: height of each axes in CSS pixels, with title and labels.
        legend: methods in the legend, or their titles by method.
        legend_columns: columns of the legend on a wide screen; a narrow screen has half of them.
    """
    columns = 1 if narrow else min(columns, count)
    legend_columns = -(-legend_columns // 2) if narrow else legend_columns
    rows, width = -(-count // columns), NARROW if narrow else WIDE
    total = rows * height + 20 * -(-len(legend) // legend_columns)
    drawing: Drawing = load_package("matplotlib.figure").Figure(figsize=(width / 72, total / 72))
    axes = list(drawing.subplots(rows, columns, squeeze=False).flat)
    for empty in axes[count:]:
        empty.set_axis_off()
    if legend:
        line = load_package("matplotlib.lines").Line2D
        handles = [line([], [], linestyle="none", **marker(name)) for name in legend]
        titles = legend.values() if isinstance(legend, Mapping) else map(_shorten, legend)
        drawing.legend(handles, list(titles), loc="outside lower left", ncols=legend_columns)
    return drawing, axes[:count]


def set_axes(
    axes: "Axes",
    title: str,
    y_label: str,
    x_label: str = "",
    *,
    x_ticks: Sequence[float] = (),
    y_ticks: Sequence[float] = (),
    **settings: Any,
) -> None:
    """Set the title, the labels (the vertical one is under the title), ticks, scales and limits."""
    axes.set(xlabel=x_label, **settings)
    axes.set_title(title)
    place: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points"}
    axes.annotate(y_label, (0, 1), (0, 8), **place, fontsize=SMALL, color=LIGHT["muted"])
    for axis, ticks in ((axes.xaxis, x_ticks), (axes.yaxis, y_ticks)):
        if len(ticks):
            set_ticks(axis, ticks)


def annotate(axes: "Axes", text: str, point: tuple[float, float], **options: Any) -> None:
    """Write small text beside a point, on a background that hides lines."""
    background = {"facecolor": LIGHT["surface"], "edgecolor": "none", "pad": 1.0}
    options = {"textcoords": "offset points", "fontsize": SMALL, "bbox": background, **options}
    axes.annotate(text, point, **options)


def set_ticks(axis: Any, ticks: Sequence[float], labels: Sequence[str] | None = None) -> None:
    """Set the ticks of an axis, by default labelled with plain numbers, without minor ticks."""
    axis.set_ticks(ticks, labels or [f"{tick:g}" for tick in ticks])
    axis.set_minor_locator(load_package("matplotlib.ticker").NullLocator())


def set_log_range(axes: "Axes", which: str, values: Sequence[float], factor: float) -> None:
    """Make the x or y axis logarithmic, with a range around positive values and round ticks."""
    low, high = min(values) / factor, max(values) * factor
    axes.set(**{f"{which}scale": "log", f"{which}lim": (low, high)})
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    chosen = [low, high]
    for steps in ((1.0,), (1.0, 3.0), (1.0, 2.0, 5.0), (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)):
        ticks = [step * 10.0**power for power in powers for step in steps]
        inside = [tick for tick in ticks if low <= tick <= high]
        chosen = inside if 2 <= len(inside) <= 7 else chosen
    set_ticks(axes.xaxis if which == "x" else axes.yaxis, chosen)


# Methods


def method_mark(method: str) -> Mark:
    """Return the mark of a method by its name in records; "paper" is that of the paper's numbers."""
    other = OTHER_MARKERS[crc32(family(method).encode()) % len(OTHER_MARKERS)]
    return PAPER if method == "paper" else find_mark(method) or Mark("muted", other, hollow=True)


def marker(method: str, filled: bool = True) -> dict[str, Any]:
    """Return matplotlib's options for the marker of a method; `filled` fills hollow ones."""
    mark = method_mark(method)
    colour, background = LIGHT[mark.colour], LIGHT["surface"]
    return {
        "marker": mark.marker,
        "markersize": mark.size,
        "markerfacecolor": (background if filled else "none") if mark.hollow else colour,
        "markeredgecolor": colour if mark.hollow else background,
        "markeredgewidth": 1.3 if mark.hollow else 0.6,
    }


def draw_line(
    axes: "Axes",
    method: str,
    line: Sequence[tuple[float, float]],
    filled: bool = False,
    **options: Any,
) -> None:
    """Draw the points of a method, joined by a line."""
    mark = method_mark(method)
    style = {"color": LIGHT[mark.colour], "linestyle": LINES[mark.line], "linewidth": mark.width}
    options = {"clip_on": False, **style, **marker(method, filled), **options}
    if line:
        axes.plot(*zip(*line, strict=True), **options)


def draw_point(axes: "Axes", method: str, x: float | None, y: float | None) -> None:
    """Draw the marker of a method, if both coordinates are known."""
    if x is not None and y is not None:
        draw_line(axes, method, [(x, y)], filled=method == "paper", linestyle="none")


def mark_level(
    axes: "Axes", x: float | None = None, y: float | None = None, **options: Any
) -> None:
    """Draw a vertical line at x and a horizontal one at y, where these are known."""
    for value, draw in ((x, axes.axvline), (y, axes.axhline)):
        if value is not None:
            draw(value, **{"color": LIGHT["ink"], "linewidth": 1.0, **options})


def draw_methods(
    axes: "Axes", rows: Sequence[Row], x: str, y: str, height: float, marker_step: int = 1
) -> None:
    """Draw a line with its name for each method, its markers shifted; axes are `height` pixels high."""
    ends, methods = {}, unique(rows, "method")
    for index, method in enumerate(methods):
        line = get_points([row for row in rows if get_text(row, "method") == method], x, y)
        start = index * marker_step // len(methods)
        draw_line(axes, method, line, filled=True, markevery=(start, marker_step))
        if line:
            ends[method] = line[-1][1]
    label_ends(axes, ends, height)


def label_ends(axes: "Axes", ends: Mapping[str, float], height: float) -> None:
    """Write the name of every method beside the right end of its line; axes are `height` pixels high."""
    axes.autoscale_view()  # otherwise the limits could still change
    to_axes = axes.transScale + axes.transLimits
    places = {name: float(to_axes.transform((0, y))[1]) for name, y in ends.items()}
    order = sorted(places, key=lambda name: places[name])
    spread = spread_labels([places[n] for n in order], LABEL_DISTANCE / height, -0.05, 1.05)
    text = {"xycoords": "axes fraction", "textcoords": "axes fraction", "va": "center"}
    line = {"arrowstyle": "-", "linewidth": 0.8, "relpos": (0, 0.5), "shrinkA": 0, "shrinkB": 0}
    for name, y in zip(order, spread, strict=True):
        colour = LIGHT[method_mark(name).colour]
        style = {
            **text,
            "fontsize": SMALL,
            "color": colour,
            "arrowprops": {**line, "color": colour},
        }
        axes.annotate(_shorten(name), (1.01, places[name]), (1.06, y), **style)


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


def value_range(rows: Sequence[Row], column: str) -> tuple[float, float]:
    """Return axis limits slightly beyond the smallest and the largest value."""
    values = [value for row in rows if (value := get_number(row, column)) is not None]
    highest = max(values, default=0.0) or 1.0
    return min(values, default=0.0) - 0.04 * highest, 1.15 * highest


def _shorten(name: str) -> str:
    """Return a method's name as figures show it; "paper" is that of the paper's numbers."""
    if name == "paper":
        return PAPER_TITLE
    return name if len(name) <= MAX_NAME else f"{name[: MAX_NAME - 1]}…"
