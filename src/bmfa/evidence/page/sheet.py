"""A figure laid out in CSS pixels from its top left corner, and its SVG and PNG."""

import base64
import binascii
import io
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from bmfa.evidence.page import style
from bmfa.evidence.page.svg import MARGIN, Placed, clean

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PICTURE = re.compile(r"data:image/(?:png|jpeg);base64,[A-Za-z0-9+/]+={0,2}")
PICTURE_CHARACTERS = 2_000_000


@dataclass(frozen=True)
class Margins:
    """Room around the axes of a panel, for its headings, ticks and labels."""

    left: float = 38
    right: float = 14
    top: float = 50
    bottom: float = 40


def load(module: str) -> Any:
    """Import a module of matplotlib, or say how to install it."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "matplotlib":
            raise
        raise ModuleNotFoundError(
            "figures need the package matplotlib; run: pip install 'bmfa[report]'", name=error.name
        ) from None


@contextmanager
def styled() -> Iterator[None]:
    """The style of all figures, for drawing and for writing."""
    with load("matplotlib").rc_context(style.settings()), warnings.catch_warnings():
        # A browser has fonts for the signs of any script; the one that measures here has not.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield


class Sheet:
    """One figure; positions are pixels from the top left, whatever the resolution."""

    def __init__(self, width: float, height: float) -> None:
        self.width, self.height = width, height
        self.figure = load("matplotlib.figure").Figure(figsize=(width / 72, height / 72))
        self._pictures: dict[str, Placed] = {}

    def axes(self, left: float, top: float, width: float, height: float) -> "Axes":
        """Axes in a rectangle."""
        bottom = self.height - top - height
        box = (left / self.width, bottom / self.height, width / self.width, height / self.height)
        axes: Axes = self.figure.add_axes(box)
        return axes

    def plain_axes(self, left: float, top: float, width: float, height: float) -> "Axes":
        """Axes without ticks and lines, one unit a pixel, from the top left."""
        axes = self.axes(left, top, width, height)
        axes.set(xlim=(0, width), ylim=(height, 0))
        axes.set_axis_off()
        return axes

    def box(self, axes: "Axes") -> tuple[float, float, float, float]:
        """Left, top, width and height of axes."""
        box = axes.get_position()
        top = (1 - box.y1) * self.height
        return box.x0 * self.width, top, box.width * self.width, box.height * self.height

    def text(self, x: float, y: float, words: str, **options: Any) -> None:
        """Words at a point, by default from their left end, on their base line."""
        options = {"fontsize": style.TEXT, "va": "baseline", **options}
        self.figure.text(x / self.width, 1 - y / self.height, words, **options)

    def line(self, xs: Sequence[float], ys: Sequence[float], **options: Any) -> None:
        """A line, or a marker, anywhere on the sheet."""
        line = load("matplotlib.lines").Line2D(
            [x / self.width for x in xs],
            [1 - y / self.height for y in ys],
            transform=self.figure.transFigure,
            **options,
        )
        self.figure.add_artist(line)

    def picture(self, left: float, top: float, side: float, uri: str) -> bool:
        """A picture from a data URI in a square; False, and nothing drawn, where it is none."""
        pixels = _pixels(uri)
        if pixels is None:
            return False
        name = f"picture-{len(self._pictures)}"
        image = self.plain_axes(left, top, side, side).imshow(
            pixels, extent=(0, side, side, 0), aspect="auto"
        )
        image.set_gid(name)
        self._pictures[name] = Placed(uri, left, top, side, side)
        return True

    def to_svg(self, name: str, label: str, inline: bool = False) -> str:
        """The sheet as SVG; inline, it follows the colours and the font of the page around it."""
        buffer = io.StringIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        with load("matplotlib").rc_context({"svg.hashsalt": name}):
            self.figure.savefig(buffer, format="svg", metadata=nothing)
        return clean(buffer.getvalue(), name, label, self._pictures, inline)

    def to_png(self, scale: float = 2.0) -> bytes:
        """The sheet as PNG in the light colours, `scale` pixels for each of its own."""
        buffer = io.BytesIO()
        self.figure.savefig(
            buffer,
            format="png",
            dpi=72 * scale,
            bbox_inches=self.figure.bbox_inches.padded(MARGIN / 72),
            facecolor=style.SURFACE.light,
            metadata={"Software": None},
        )
        return buffer.getvalue()


def panels(
    count: int, columns: int, width: float, height: float, margins: Margins, foot: float = 0
) -> tuple[Sheet, list["Axes"]]:
    """A sheet of panels in rows, each with axes of the same height, and room at its foot."""
    rows = -(-count // columns)
    cell_width, cell_height = width / columns, margins.top + height + margins.bottom
    sheet = Sheet(width, rows * cell_height + foot)
    axes_width = cell_width - margins.left - margins.right
    axes = [
        sheet.axes(
            index % columns * cell_width + margins.left,
            index // columns * cell_height + margins.top,
            axes_width,
            height,
        )
        for index in range(count)
    ]
    return sheet, axes


def _pixels(uri: str) -> Any:
    """The pixels of a data URI; None where it is none, or holds no picture."""
    if len(uri) > PICTURE_CHARACTERS or not PICTURE.fullmatch(uri):
        return None
    pillow, numpy = import_module("PIL.Image"), import_module("numpy")
    try:
        data = base64.b64decode(uri.partition(",")[2], validate=True)
        with pillow.open(io.BytesIO(data), formats=("PNG", "JPEG")) as picture:
            return numpy.asarray(picture.convert("RGB"))
    except (binascii.Error, OSError, ValueError, SyntaxError):
        return None
