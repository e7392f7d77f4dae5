"""One look for every figure: roles of colour, and a colour, marker and line for each method."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from zlib import crc32

FONT = '-apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif'
MONO = 'ui-monospace, "SF Mono", Menlo, Consolas, "Liberation Mono", monospace'

TITLE, TEXT, SMALL = 14.0, 13.0, 12.0
WIDE, NARROW = 880, 360

Dashes = tuple[float, tuple[float, ...]] | str
SOLID: Dashes = "-"


@dataclass(frozen=True)
class Colour:
    """A role of colour: drawn as `light`, replaced in a page by the variable `--name`."""

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
    """How a method is drawn in every figure; a hollow marker is filled with the surface."""

    colour: Colour
    marker: str
    dashes: Dashes = SOLID
    width: float = 1.4
    hollow: bool = False
    size: float = 6.0

    @property
    def line(self) -> dict[str, Any]:
        """Matplotlib's words for the line."""
        return {"color": self.colour.light, "linestyle": self.dashes, "linewidth": self.width}

    @property
    def mark(self) -> dict[str, Any]:
        """Matplotlib's words for the marker."""
        return {
            "marker": self.marker,
            "markersize": self.size,
            "markerfacecolor": (SURFACE if self.hollow else self.colour).light,
            "markeredgecolor": (self.colour if self.hollow else SURFACE).light,
            "markeredgewidth": 1.3 if self.hollow else 0.6,
        }

    @property
    def open_mark(self) -> dict[str, Any]:
        """The marker, a hollow one transparent, so that a point behind it shows."""
        return self.mark | ({"markerfacecolor": "none"} if self.hollow else {})


DOTTED: Dashes = (0, (1, 1.6))
DASHED: Dashes = (0, (5, 2))
LONG: Dashes = (0, (9, 2.5))
DASH_DOT: Dashes = (0, (6, 2, 1, 2))
DASH_DOT_DOT: Dashes = (0, (6, 2, 1, 2, 1, 2))

METHODS: Mapping[str, MethodStyle] = {
    "sparge-mean": MethodStyle(MEAN, "o"),
    "global-mean": MethodStyle(MEAN, "o"),
    "mean-variance": MethodStyle(VARIANCE, "v", DASH_DOT),
    "fixed-depth:1": MethodStyle(FIXED, "s", DOTTED, hollow=True, size=5.5),
    "fixed-depth": MethodStyle(FIXED, "s", DASHED, size=5.5),
    "fixed-blocks": MethodStyle(FIXED, "p", DASHED),
    "gamma": MethodStyle(GAMMA, "D", width=2.2, size=5.5),
    "gamma-h2": MethodStyle(LOOKAHEAD, "^", LONG, size=6.5),
    "exact-gap": MethodStyle(EXACT, "P", DASH_DOT_DOT, size=7.0),
    "certified": MethodStyle(CERTIFIED, "h", DASHED, hollow=True, size=9.0),
    "mass": MethodStyle(MASS, "<", DOTTED, size=6.5),
    "optimal": MethodStyle(OPTIMAL, "*", width=2.2, size=10.0),
    "edge-aware": MethodStyle(INK, "X", DOTTED, size=6.5),
    "full": MethodStyle(INK, "X", size=6.5),
    "quadrant-gap": MethodStyle(EXACT, ">", DASH_DOT),
    "random-quadrants": MethodStyle(RANDOM, "d", DOTTED, hollow=True),
    "variance": MethodStyle(VARIANCE, "v", DASHED, hollow=True),
    "free-energy": MethodStyle(CERTIFIED, "*", width=2.2, size=10.0),
    "tome": MethodStyle(GAMMA, "o", DASHED),
    "pitome": MethodStyle(LOOKAHEAD, "^", DASH_DOT, hollow=True),
    "tofu": MethodStyle(VARIANCE, "s", DOTTED, size=5.5),
    "diffrate": MethodStyle(EXACT, "X", DASHED, size=6.5),
    "crossget": MethodStyle(FIXED, "D", DASH_DOT, hollow=True, size=5.5),
    "dct": MethodStyle(MASS, "p", DOTTED, hollow=True),
    "evit": MethodStyle(OPTIMAL, "P", DASH_DOT_DOT, hollow=True),
    "random-pool": MethodStyle(RANDOM, "<", DOTTED, hollow=True),
    "fixed-pool": MethodStyle(MEAN, ">", DASHED, hollow=True),
    "dense": MethodStyle(INK, "X", size=6.5),
    "tiles": MethodStyle(OPTIMAL, "s", DASHED, size=5.5),
    "error": MethodStyle(CERTIFIED, "^", DASH_DOT),
    "at-error": MethodStyle(OPTIMAL, "*", width=2.2, size=10.0),
    "sparge": MethodStyle(GAMMA, "v", DOTTED),
    "natten": MethodStyle(LOOKAHEAD, "p", DOTTED, hollow=True),
    "pisa": MethodStyle(EXACT, "D", DOTTED, size=5.5),
    "pisa-0th": MethodStyle(MASS, "o", DOTTED, hollow=True),
    "flex": MethodStyle(VARIANCE, "D", DOTTED, hollow=True, size=5.5),
    "paper": MethodStyle(INK, "o", "none", hollow=True, size=12.0),
}

OTHER_MARKERS = ("o", "s", "^", "D", "v", "p", "h", "<", ">", "P")
OTHER_DASHES = (SOLID, DASHED, DASH_DOT, DOTTED)


def method_style(method: str) -> MethodStyle:
    """The style of a method, by its whole name, then by its family; any other name has one too."""
    family = method.partition(":")[0]
    for name in (method, family):
        if name in METHODS:
            return METHODS[name]
    if family.startswith("gamma-h"):
        return METHODS["gamma-h2"]
    number = crc32(family.encode())
    marker = OTHER_MARKERS[number % len(OTHER_MARKERS)]
    dashes = OTHER_DASHES[number // len(OTHER_MARKERS) % len(OTHER_DASHES)]
    return MethodStyle(MUTED, marker, dashes, hollow=True)


def css_variables() -> str:
    """The colours as variables: light, and dark where the reader prefers it."""
    light = "".join(f"--{colour.name}:{colour.light};" for colour in COLOURS)
    dark = "".join(f"--{colour.name}:{colour.dark};" for colour in COLOURS)
    return (
        f":root{{{light}--font:{FONT};--mono:{MONO};}}\n"
        f"@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}\n"
    )


def settings() -> dict[str, Any]:
    """Matplotlib's settings for every figure. Text from data is never read as mathematics."""
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
