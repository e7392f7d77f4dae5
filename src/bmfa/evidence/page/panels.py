"""Strips of square panels: photographs, scores, attention, and the trees of methods over them."""

import base64
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import numpy as np

from bmfa.evidence.methods import find_method
from bmfa.evidence.page import plots
from bmfa.evidence.page.record_set import get_text
from bmfa.packages import load_package
from bmfa.records import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Drawing

Box = tuple[float, float, float, float]  # top, left, bottom, right in tokens
# Pixels: height of a line of notes, average width of a character in them, and space between panels.
LINE, CHARACTER, GAP = 16.0, 6.2, 10.0
TITLE = 26.0  # pixels above a panel for its title
HEADING = {"fontweight": "bold", "color": plots.LIGHT["ink"]}
IMAGE_URI = re.compile(r"data:image/(?:png|jpeg);base64,[A-Za-z0-9+/]+={0,2}")


@dataclass(frozen=True)
class Panel:
    """A square drawing with a title above it and notes below."""

    title: str
    draw: Callable[["Axes"], None]
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Strip:
    """Panels in a line, with a title and notes above them or at their left."""

    panels: Sequence[Panel]
    title: str = ""
    notes: Sequence[str] = ()


def draw_strips(
    strips: Sequence[Strip],
    narrow: bool,
    narrow_columns: int | None = None,
    *,
    aside: float = 0.0,
    across: int = 1,
) -> "Drawing":
    """Draw strips below each other.

    Args:
        strips: the strips; their notes are wrapped.
        narrow: True for a narrow screen.
        narrow_columns: panels in a line on a narrow screen; all of them by default, as on a wide one.
        aside: width of the text at the left of the panels on a wide screen; 0 for text above them.
        across: strips beside each other on a wide screen.
    """
    width, columns = plots.WIDE, max(len(strip.panels) for strip in strips)
    if narrow:
        width, columns, aside, across = plots.NARROW, narrow_columns or columns, 0.0, 1
    cell = (width - (across - 1) * 3 * GAP) / across
    side = (cell - aside - (columns - 1) * GAP) / columns
    characters = int((aside or cell) / CHARACTER)
    texts = [[line for note in strip.notes for line in wrap(note, characters)] for strip in strips]
    notes = max(len(panel.notes) for strip in strips for panel in strip.panels)
    step = TITLE + side + notes * LINE + 8
    heights, words = [], []
    for strip, text in zip(strips, texts, strict=True):
        words.append((len(text) + 1.4) * LINE if strip.title else 0.0)
        lines = -(-len(strip.panels) // columns) * step
        heights.append(max(lines, words[-1]) if aside else lines + words[-1])
    rows = [max(heights[first : first + across]) + 14 for first in range(0, len(strips), across)]
    drawing: Drawing = load_package("matplotlib.figure").Figure(
        figsize=(width / 72, sum(rows) / 72), layout="none"
    )
    for index, strip in enumerate(strips):
        left, top = index % across * (cell + 3 * GAP), sum(rows[: index // across])
        write(drawing, left, top + 14, [strip.title], **HEADING, fontsize=14)
        write(drawing, left, top + 15 + LINE, texts[index])
        top += 0.0 if aside else words[index]
        for place, panel in enumerate(strip.panels):
            x = left + aside + place % columns * (side + GAP)
            draw_panel(drawing, panel, x, top + TITLE + place // columns * step, side)
    return drawing


def draw_panel(drawing: "Drawing", panel: Panel, left: float, top: float, side: float) -> None:
    """Draw a panel whose square starts at a place in pixels from the top left corner."""
    width, height = drawing.get_size_inches() * 72
    axes = drawing.add_axes((left / width, 1 - (top + side) / height, side / width, side / height))
    axes.set_axis_off()
    panel.draw(axes)
    most = max(8, int(side / CHARACTER))
    short = len(panel.title) <= most
    title = panel.title if short else f"{panel.title[: most - 1].strip()}…"
    write(drawing, left, top - 7, [title], **HEADING)
    joined = " · ".join(panel.notes)
    notes = [joined] if len(joined) * CHARACTER < side else panel.notes
    write(drawing, left, top + side + 15, notes)


def write(
    drawing: "Drawing", left: float, top: float, lines: Sequence[str], **options: Any
) -> None:
    """Write small lines of text; `top` is the baseline of the first in pixels."""
    width, height = drawing.get_size_inches() * 72
    options = {"fontsize": plots.SMALL, "color": plots.LIGHT["muted"], **options}
    for index, line in enumerate(lines):
        drawing.text(left / width, 1 - (top + index * LINE) / height, line, **options)


# What a panel shows


def photograph(axes: "Axes", uri: str) -> None:
    """Draw a PNG or JPEG from a data URI over the whole square; "no image" if it holds none."""
    try:
        # The URI becomes part of the page, so it must have no other characters.
        data = base64.b64decode(uri.partition(",")[2] if IMAGE_URI.fullmatch(uri) else "")
        with load_package("PIL.Image").open(io.BytesIO(data), formats=("PNG", "JPEG")) as image:
            pixels = np.asarray(image.convert("RGB"))
    except (OSError, ValueError, SyntaxError):
        axes.text(0.5, 0.5, "no image", ha="center", transform=axes.transAxes, fontsize=plots.SMALL)
        return
    height, width, _ = pixels.shape
    shown = axes.imshow(pixels, extent=(0, width, height, 0), aspect="auto")
    setattr(shown, "source_uri", uri)  # noqa: B010 - the SVG holds these bytes
    shown.set_gid(f"photograph-{len(axes.figure.axes)}")


def heatmap(axes: "Axes", values: plots.Array, low: float, high: float) -> None:
    """Draw (H, W) values as colours from `low` to `high`."""
    height, width = values.shape
    axes.imshow(values, vmin=low, vmax=high, extent=(0, width, height, 0))
    axes.set(xlim=(0, max(values.shape)), ylim=(max(values.shape), 0))
    axes.set_axis_off()


def overlay(axes: "Axes", opacity: plots.Array, colour: str) -> None:
    """Cover a photograph with a colour of (H, W) opacities from 0 to 1."""
    pixels = np.empty((*opacity.shape, 4))
    pixels[..., :3] = load_package("matplotlib.colors").to_rgb(colour)
    pixels[..., 3] = opacity
    axes.imshow(pixels, extent=(*axes.get_xlim(), *axes.get_ylim()), aspect="auto")


def outlines(axes: "Axes", boxes: Sequence[Box], grid: Sequence[int], **options: Any) -> None:
    """Draw the borders of boxes, in tokens of a grid (H, W) that fills the square."""
    if len(boxes) == 0:
        return
    path, patches = load_package("matplotlib.path").Path, load_package("matplotlib.patches")
    down, across = np.divide(np.ptp([axes.get_ylim(), axes.get_xlim()], axis=1), grid)
    top, left, bottom, right = np.multiply(boxes, (down, across, down, across)).T
    corners = np.array(
        [[left, top], [right, top], [right, bottom], [left, bottom]]
    )  # (4, 2, boxes)
    joined = path.make_compound_path_from_polys(corners.transpose(2, 0, 1))
    options = {"facecolor": "none", "linewidth": 0.8, "clip_on": False, **options}
    axes.add_artist(patches.PathPatch(joined, **options))


def outlines_on_photograph(
    axes: "Axes",
    boxes: Sequence[Box],
    grid: Sequence[int],
    colour: str = "white",
    alpha: float = 0.9,
) -> None:
    """Draw borders that show on bright and on dark pixels."""
    outlines(axes, boxes, grid, edgecolor="black", linewidth=2.4, alpha=0.4)
    outlines(axes, boxes, grid, edgecolor=colour, linewidth=1.0, alpha=alpha)


def photograph_panel(row: Row, title: str = "Image", notes: Sequence[str] = ()) -> Panel:
    """Return a panel of the photograph of a row."""
    return Panel(title, lambda axes: photograph(axes, get_text(row, "image")), notes)


def values_panel(
    values: plots.Array,
    title: str = "Scores",
    notes: Sequence[str] = (),
    like: plots.Array | None = None,
) -> Panel:
    """Return a panel of (H, W) values, in the colours of the range of other values."""
    like = values if like is None else like
    low, high = float(like.min()), float(like.max())
    return Panel(title, lambda axes: heatmap(axes, values, low, high), notes)


def tree_panel(
    row: Row, scores: plots.Array, title: str = "", notes: Sequence[str] | None = None
) -> Panel:
    """Return a panel of the mean score of every leaf, with the gap and the leaf ratio below."""
    means, middle = np.zeros_like(scores), (scores.min() + scores.max()) / 2
    edges: dict[str, list[Box]] = {"white": [], "black": []}  # on dark and on bright leaves
    for top, left, bottom, right in row["boxes"]:
        mean = scores[top:bottom, left:right].mean()
        means[top:bottom, left:right] = mean
        edges["black" if mean > middle else "white"].append((top, left, bottom, right))

    def draw(axes: "Axes") -> None:
        heatmap(axes, means, float(scores.min()), float(scores.max()))
        for colour, boxes in edges.items():
            outlines(axes, boxes, (max(scores.shape),) * 2, edgecolor=colour, alpha=0.75)

    return Panel(title or method_title(row), draw, tree_notes(row) if notes is None else notes)


def tree_notes(row: Row) -> list[str]:
    """Return gap and leaf ratio of a tree. In a row with an error, `gap` is that of one mean."""
    return [f"gap {row.get('error', row['gap']):.3f}", f"{row['leaf_percent']:.1f} % leaves"]


def method_title(row: Row) -> str:
    """Return the short title of the method of a row."""
    name = get_text(row, "method")
    method = find_method(name)
    return method.title if method else name


def minority_shares(row: Row) -> list[str]:
    """Return the minority's shares of area and softmax mass in words."""
    area, mass = row["minority_area_percent"], row["gibbs_mass_percent"]
    return [f"{area:.1f} % of the area", f"{mass:.1f} % of the mass"]


# Rows


def group(rows: Sequence[Row], *columns: str) -> list[list[Row]]:
    """Group rows that have the same values in these columns."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(get_text(row, column) for column in columns), []).append(row)
    return list(groups.values())


def read_grid(row: Row, column: str) -> plots.Array:
    """Return a column of a row as (H, W); raise ValueError if its length is not H * W."""
    values, height, width = row[column], row["height"], row["width"]
    if len(values) != height * width:
        raise ValueError(
            f"{get_text(row, 'title') or 'a row'} holds {len(values)} values of {column} for a grid "
            f"of {height}x{width}; pass height * width values in raster order"
        )
    return np.array(values, dtype=float).reshape(height, width)
