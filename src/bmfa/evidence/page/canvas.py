"""Figures: a canvas laid out in CSS pixels, and named figures drawn from records."""

import base64
import binascii
import io
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from bmfa.evidence.page import style
from bmfa.evidence.page.record_set import RecordSet
from bmfa.evidence.page.svg import MARGIN, Image, clean_svg
from bmfa.packages import load_package
from bmfa.records import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes

IMAGE_URI = re.compile(r"data:image/(?:png|jpeg);base64,[A-Za-z0-9+/]+={0,2}")
MAX_URI_LENGTH = 2_000_000  # characters; a longer image is left out of the figure


class Canvas:
    """A matplotlib figure whose positions are CSS pixels from the top left corner.

    Args:
        width: in CSS pixels.
        height: in CSS pixels.
    """

    def __init__(self, width: float, height: float) -> None:
        self.width, self.height = width, height
        self.figure = load_package("matplotlib.figure").Figure(figsize=(width / 72, height / 72))
        self._images: dict[str, Image] = {}

    def add_axes(self, left: float, top: float, width: float, height: float) -> "Axes":
        """Add axes in a rectangle."""
        bottom = self.height - top - height
        box = (left / self.width, bottom / self.height, width / self.width, height / self.height)
        axes: Axes = self.figure.add_axes(box)
        return axes

    def add_pixel_axes(self, left: float, top: float, width: float, height: float) -> "Axes":
        """Add invisible axes whose data coordinates are pixels from their top left corner."""
        axes = self.add_axes(left, top, width, height)
        axes.set(xlim=(0, width), ylim=(height, 0))
        axes.set_axis_off()
        return axes

    def bounds(self, axes: "Axes") -> tuple[float, float, float, float]:
        """Return left, top, width and height of axes."""
        box = axes.get_position()
        top = (1 - box.y1) * self.height
        return box.x0 * self.width, top, box.width * self.width, box.height * self.height

    def add_text(self, x: float, y: float, text: str, **options: Any) -> None:
        """Add text, by default with the left end of its baseline at the point."""
        options = {"fontsize": style.TEXT, "va": "baseline", **options}
        self.figure.text(x / self.width, 1 - y / self.height, text, **options)

    def add_note(self, x: float, y: float, text: str, **options: Any) -> None:
        """Add small text in the muted colour."""
        self.add_text(x, y, text, fontsize=style.SMALL, color=style.MUTED.light, **options)

    def add_title(self, x: float, y: float, text: str, size: float = style.TITLE) -> None:
        """Add bold text."""
        self.add_text(x, y, text, fontsize=size, fontweight="bold")

    def add_line(self, xs: Sequence[float], ys: Sequence[float], **options: Any) -> None:
        """Add a line or markers, independent of any axes."""
        line = load_package("matplotlib.lines").Line2D(
            [x / self.width for x in xs],
            [1 - y / self.height for y in ys],
            transform=self.figure.transFigure,
            **options,
        )
        self.figure.add_artist(line)

    def add_image(self, left: float, top: float, side: float, uri: str) -> bool:
        """Add an image from a data URI in a square; return False if it holds no PNG or JPEG."""
        pixels = _decode_image(uri)
        if pixels is None:
            return False
        name = f"image-{len(self._images)}"
        image = self.add_pixel_axes(left, top, side, side).imshow(
            pixels, extent=(0, side, side, 0), aspect="auto"
        )
        image.set_gid(name)
        self._images[name] = Image(uri, left, top, side)
        return True

    def to_svg(self, name: str, label: str, inline: bool = False) -> str:
        """Return the canvas as SVG; an inline SVG takes colours and font from the page around it."""
        buffer = io.StringIO()
        metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        with load_package("matplotlib").rc_context({"svg.hashsalt": name}):
            self.figure.savefig(buffer, format="svg", metadata=metadata)
        return clean_svg(buffer.getvalue(), name, label, self._images, inline)

    def to_png(self, scale: float = 2.0) -> bytes:
        """Return the canvas as PNG in the light colours, `scale` pixels for each CSS pixel."""
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


def _decode_image(uri: str) -> Any:
    """Return the (height, width, 3) pixels of a data URI, or None if it is not an image."""
    if len(uri) > MAX_URI_LENGTH or not IMAGE_URI.fullmatch(uri):
        return None
    try:
        data = base64.b64decode(uri.partition(",")[2], validate=True)
        with load_package("PIL.Image").open(io.BytesIO(data), formats=("PNG", "JPEG")) as image:
            return np.asarray(image.convert("RGB"))
    except (binascii.Error, OSError, ValueError, SyntaxError):
        return None


@dataclass(frozen=True)
class Figure:
    """A figure that is drawn from records alone.

    Attributes:
        name: its name in `figures.ALL` and its file name.
        label: its description for screen readers.
        needs: the experiments whose rows it shows.
        draw: draws it on a canvas, for a wide or a narrow screen.
        available: returns True if the rows hold what it shows; by default, if all experiments have rows.
    """

    name: str
    label: str
    needs: tuple[str, ...]
    draw: Callable[[RecordSet, bool], Canvas]
    available: Callable[[RecordSet], bool]

    def drawable(self, records: Record | Sequence[Record]) -> bool:
        """Return True if the records hold the data of this figure."""
        found = RecordSet(records)
        return all(map(found.has, self.needs)) and self.available(found)

    def __call__(
        self, records: Record | Sequence[Record], *, narrow: bool = False, inline: bool = False
    ) -> str:
        """Draw the figure as SVG.

        Args:
            records: one or more records.
            narrow: True for a layout 360 CSS pixels wide instead of 880.
            inline: True for an SVG inside a page, which supplies margin, colours and font.

        Returns:
            The SVG element as text.

        Raises:
            ValueError: if the records do not hold the data; the message names the command.
        """
        name = f"{self.name}-narrow" if narrow else self.name
        with _matplotlib_style():
            return self.draw(RecordSet(records), narrow).to_svg(name, self.label, inline)

    def png(
        self, records: Record | Sequence[Record], *, narrow: bool = False, scale: float = 2.0
    ) -> bytes:
        """Draw the figure as PNG in the light colours, `scale` pixels for each CSS pixel."""
        with _matplotlib_style():
            return self.draw(RecordSet(records), narrow).to_png(scale)


def figure(
    name: str,
    *,
    needs: tuple[str, ...],
    available: Callable[[RecordSet], bool] | None = None,
) -> Callable[[Callable[[RecordSet, bool], Canvas]], Figure]:
    """Decorate a function that draws on a canvas; its docstring becomes the label of the figure."""

    def has_rows(records: RecordSet) -> bool:
        return all(map(records.has, needs))

    return lambda draw: Figure(name, draw.__doc__ or name, needs, draw, available or has_rows)


@contextmanager
def _matplotlib_style() -> Iterator[None]:
    with load_package("matplotlib").rc_context(style.rc_params()), warnings.catch_warnings():
        # Browsers substitute fonts for any script; the font that matplotlib measures with lacks some.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield
