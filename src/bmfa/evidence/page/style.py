"""Colours, fonts and sizes of the page and its figures, and the line style of every method."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from zlib import crc32

from bmfa.evidence.methods import family, find_mark

FONT = '-apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif'
MONO = 'ui-monospace, "SF Mono", Menlo, Consolas, "Liberation Mono", monospace'

TITLE, TEXT, SMALL = 14.0, 13.0, 12.0  # font sizes in CSS pixels
WIDE, NARROW = 880, 360  # widths of a figure in CSS pixels

Dashes = tuple[float, tuple[float, ...]] | str  # a line style of matplotlib


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
MEAN = Colour("mean", "#686e76", "#aab1b9")
VARIANCE = Colour("variance", "#a3468a", "#e391cb")
FIXED = Colour("fixed", "#1f78ab", "#7cc4f0")
GAMMA = Colour("gamma", "#c24a00", "#ff9352")
LOOKAHEAD = Colour("lookahead", "#946500", "#ebbb4c")
EXACT = Colour("exact", "#6a4fc4", "#b6a6ff")
CERTIFIED = Colour("certified", "#007d68", "#45d0b3")
MASS = Colour("mass", "#6f6f16", "#c8c865")
OPTIMAL = Colour("optimal", "#0a4da6", "#6faaff")
RANDOM = Colour("random", "#8a5a44", "#d6a489")

COLOURS = (
    *(INK, MUTED, AXIS, GRID, SURFACE, MEAN, VARIANCE, FIXED, GAMMA, LOOKAHEAD, EXACT),
    *(CERTIFIED, MASS, OPTIMAL, RANDOM),
)


@dataclass(frozen=True)
class MethodStyle:
    """The colour, marker and line of a method in every figure."""

    colour: Colour
    marker: str
    dashes: Dashes = "-"
    width: float = 1.4
    hollow: bool = False
    size: float = 6.0

    @property
    def line(self) -> dict[str, Any]:
        """Matplotlib's options for the line."""
        return {"color": self.colour.light, "linestyle": self.dashes, "linewidth": self.width}

    @property
    def filled_marker(self) -> dict[str, Any]:
        """Matplotlib's options for the marker; a hollow one is filled with the background."""
        return {
            "marker": self.marker,
            "markersize": self.size,
            "markerfacecolor": (SURFACE if self.hollow else self.colour).light,
            "markeredgecolor": (self.colour if self.hollow else SURFACE).light,
            "markeredgewidth": 1.3 if self.hollow else 0.6,
        }

    @property
    def open_marker(self) -> dict[str, Any]:
        """The same with hollow markers transparent, which leaves points behind them visible."""
        return self.filled_marker | ({"markerfacecolor": "none"} if self.hollow else {})


LINES: Mapping[str, Dashes] = {
    "solid": "-",
    "dotted": (0, (1, 1.6)),
    "dashed": (0, (5, 2)),
    "long-dashed": (0, (9, 2.5)),
    "dash-dot": (0, (6, 2, 1, 2)),
    "dash-dot-dot": (0, (6, 2, 1, 2, 1, 2)),
}
# The paper's numbers are drawn as rings around ours.
PAPER = MethodStyle(INK, "o", "none", hollow=True, size=12.0)
# Methods without a mark in the registry get one of these markers and lines, chosen by their name.
OTHER_MARKERS = ("o", "s", "^", "D", "v", "p", "h", "<", ">", "P")
OTHER_LINES = ("solid", "dashed", "dash-dot", "dotted")


def method_style(method: str) -> MethodStyle:
    """Return the style of a method by its name in records; "paper" is the style of its numbers."""
    if method == "paper":
        return PAPER
    mark = find_mark(method)
    if mark is not None:
        colour = next(colour for colour in COLOURS if colour.name == mark.colour)
        return MethodStyle(
            colour, mark.marker, LINES[mark.line], mark.width, mark.hollow, mark.size
        )
    number = crc32(family(method).encode())
    marker = OTHER_MARKERS[number % len(OTHER_MARKERS)]
    line = OTHER_LINES[number // len(OTHER_MARKERS) % len(OTHER_LINES)]
    return MethodStyle(MUTED, marker, LINES[line], hollow=True)


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
