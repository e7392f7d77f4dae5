"""Colours, fonts and sizes of the page and its figures, and the line style of every method."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from zlib import crc32

from bmfa.evidence.methods import Line, Mark, family, find_mark

FONT = '-apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif'
MONO = 'ui-monospace, "SF Mono", Menlo, Consolas, "Liberation Mono", monospace'

TITLE, TEXT, SMALL = 14.0, 13.0, 12.0  # font sizes in CSS pixels
WIDE, NARROW = 880, 360  # widths of a figure in CSS pixels


@dataclass(frozen=True)
class Colour:
    """A colour of the light and the dark theme; on a page it is the CSS variable `--name`."""

    name: str
    light: str
    dark: str


INK = Colour("ink", "#1b1f24", "#e8eaed")
MUTED = Colour("muted", "#59616c", "#a0a8b2")
AXIS = Colour("axis", "#8b939d", "#6d7682")
GRID = Colour("grid", "#e3e6ea", "#2c323a")
SURFACE = Colour("surface", "#fefefe", "#14171b")
COLOURS = (
    *(INK, MUTED, AXIS, GRID, SURFACE),
    # Colours of methods, named in the registry `bmfa.evidence.methods`.
    Colour("mean", "#686e76", "#aab1b9"),
    Colour("variance", "#a3468a", "#e391cb"),
    Colour("fixed", "#1f78ab", "#7cc4f0"),
    Colour("gamma", "#c24a00", "#ff9352"),
    Colour("lookahead", "#946500", "#ebbb4c"),
    Colour("exact", "#6a4fc4", "#b6a6ff"),
    Colour("certified", "#007d68", "#45d0b3"),
    Colour("mass", "#6f6f16", "#c8c865"),
    Colour("optimal", "#0a4da6", "#6faaff"),
    Colour("random", "#8a5a44", "#d6a489"),
)
LIGHT = {colour.name: colour.light for colour in COLOURS}

# Line styles of matplotlib by their names in the registry.
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
# Methods without a mark in the registry get one of these markers and lines, chosen by their name.
OTHER_MARKERS = ("o", "s", "^", "D", "v", "p", "h", "<", ">", "P")
OTHER_LINES: tuple[Line, ...] = ("solid", "dashed", "dash-dot", "dotted")


def method_mark(method: str) -> Mark:
    """Return the mark of a method by its name in records; "paper" is that of the paper's numbers."""
    if method == "paper":
        return PAPER
    number = crc32(family(method).encode())
    marker = OTHER_MARKERS[number % len(OTHER_MARKERS)]
    line = OTHER_LINES[number // len(OTHER_MARKERS) % len(OTHER_LINES)]
    return find_mark(method) or Mark("muted", marker, line, hollow=True)


def line_options(mark: Mark) -> dict[str, Any]:
    """Return matplotlib's options for the line of a mark."""
    return {"color": LIGHT[mark.colour], "linestyle": LINES[mark.line], "linewidth": mark.width}


def marker_options(mark: Mark, filled: bool = True) -> dict[str, Any]:
    """Return matplotlib's options for a marker.

    Args:
        mark: the mark of a method.
        filled: True to fill a hollow marker with the background, False to leave points behind it
            visible.
    """
    colour, background = LIGHT[mark.colour], SURFACE.light
    hollow_face = background if filled else "none"
    return {
        "marker": mark.marker,
        "markersize": mark.size,
        "markerfacecolor": hollow_face if mark.hollow else colour,
        "markeredgecolor": colour if mark.hollow else background,
        "markeredgewidth": 1.3 if mark.hollow else 0.6,
    }


def css_variables() -> str:
    """Return the colours as CSS variables for the light and the dark theme."""
    light = "".join(f"--{colour.name}:{colour.light};" for colour in COLOURS)
    dark = "".join(f"--{colour.name}:{colour.dark};" for colour in COLOURS)
    return (
        f":root{{{light}--font:{FONT};--mono:{MONO};}}\n"
        f"@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}\n"
    )


def rc_params() -> dict[str, Any]:
    """Return matplotlib's settings for every figure; text from records is never parsed as math."""
    return {
        "figure.dpi": 72,
        "figure.facecolor": "none",
        "axes.facecolor": "none",
        "savefig.facecolor": "none",
        "font.family": "DejaVu Sans",
        "font.size": TEXT,
        "text.color": INK.light,
        "text.parse_math": False,
        "axes.edgecolor": AXIS.light,
        "axes.linewidth": 1.0,
        "axes.labelcolor": MUTED.light,
        "axes.axisbelow": True,
        "axes.spines.left": False,
        "axes.spines.right": False,
        "axes.spines.top": False,
        "axes.grid": True,
        "axes.grid.axis": "y",
        "grid.color": GRID.light,
        "grid.linewidth": 1.0,
        "lines.dash_capstyle": "butt",
        "lines.scale_dashes": False,
        "xtick.labelsize": SMALL,
        "ytick.labelsize": SMALL,
        "xtick.labelcolor": MUTED.light,
        "ytick.labelcolor": MUTED.light,
        "xtick.color": AXIS.light,
        "xtick.major.size": 4.0,
        "xtick.minor.size": 0.0,
        "ytick.major.size": 0.0,
        "ytick.minor.size": 0.0,
        "svg.fonttype": "none",
    }
