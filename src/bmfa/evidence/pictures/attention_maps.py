"""Pictures as a model attends to them: trees and attention drawn over the picture itself."""

from collections.abc import Callable, Sequence
from textwrap import shorten
from typing import TYPE_CHECKING

import numpy as np

from bmfa.evidence.page import style
from bmfa.evidence.page.marks import Array, outline, veil
from bmfa.evidence.page.records import Evidence, number, text
from bmfa.evidence.page.sheet import Sheet
from bmfa.evidence.pictures.plates import Panel, Scene, checked_boxes, strip
from bmfa.records import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

VEIL = "#0a0d12"
COVER = 0.82  # how much of the picture is hidden where nothing is attended to
MORE, LESS, MARKED = "#ff9352", "#6faaff", "#ffd23f"
GAP = 12.0


class View(Scene):
    """One picture, one query of one head, and the trees that were built for it."""

    def attention(self, row: Row, column: str) -> Array:
        """A distribution over the tokens; an error where it does not fill the grid."""
        values = np.asarray(row.get(column, ()), dtype=float)
        if values.size != self.values.size:
            raise ValueError(
                f"{text(row, 'title') or 'a row'} holds {values.size} numbers of {column} for a grid "
                f"of {self.values.shape[0]}x{self.values.shape[1]}; pass one for each token"
            )
        return values.reshape(self.values.shape)

    def tree_over_picture(self, row: Row, title: str, notes: Sequence[str] = ()) -> Panel:
        """The leaves over the picture, and the query where it is a token."""
        boxes = checked_boxes(row, self.values.shape)

        def draw(sheet: Sheet, left: float, top: float, side: float) -> None:
            self._over(sheet, left, top, side, lambda axes: outline(axes, boxes))
            self._mark_query(sheet)

        return Panel(title, tuple(notes), draw)

    def map_over_picture(
        self,
        values: Array,
        title: str,
        notes: Sequence[str],
        most: float,
        tree: Row | None = None,
    ) -> Panel:
        """The picture, darker the less a token is attended to; `most` is fully open."""
        boxes = [] if tree is None else checked_boxes(tree, self.values.shape)
        # Eyes see small differences of darkness better than of brightness.
        seen = np.clip(values / (most or 1.0), 0.0, 1.0) ** 0.45

        def draw(sheet: Sheet, left: float, top: float, side: float) -> None:
            self._over(sheet, left, top, side, lambda axes: veil(axes, COVER * (1 - seen), VEIL))
            if boxes:
                outline(sheet.figure.axes[-1], boxes, strength=0.5)
            self._mark_query(sheet)

        return Panel(title, tuple(notes), draw)

    def difference_panel(self, difference: Array, title: str, notes: Sequence[str]) -> Panel:
        """Where attention grows (orange) and where it shrinks (blue)."""
        most = float(np.abs(difference).max()) or 1.0

        def draw(sheet: Sheet, left: float, top: float, side: float) -> None:
            def cover(axes: "Axes") -> None:
                veil(axes, np.full(difference.shape, 0.8), VEIL)
                veil(axes, np.clip(difference / most, 0, 1), MORE)
                veil(axes, np.clip(-difference / most, 0, 1), LESS)

            self._over(sheet, left, top, side, cover)
            self._mark_query(sheet)

        return Panel(title, tuple(notes), draw)

    def _over(
        self, sheet: Sheet, left: float, top: float, side: float, draw: Callable[["Axes"], None]
    ) -> None:
        height, width = self.values.shape
        if not sheet.picture(left, top, side, text(self.first, "picture")):
            sheet.plain_axes(left, top, side, side).barh(side / 2, side, side, color=VEIL)
        axes = sheet.axes(left, top, side, side)
        axes.set(xlim=(0, width), ylim=(height, 0))
        axes.set_axis_off()
        draw(axes)

    def _mark_query(self, sheet: Sheet) -> None:
        row, _, column = text(self.first, "query").partition(",")
        if row.isdecimal() and column.isdecimal():
            place = [int(row), int(column), int(row) + 1, int(column) + 1]
            outline(sheet.figure.axes[-1], [place], MARKED)


def views(evidence: Evidence) -> list[View]:
    """Every picture with its trees."""
    together: dict[tuple[str, ...], list[Row]] = {}
    for row in evidence.require("picture"):
        names = ("model", "title", "layer", "head", "query")
        together.setdefault(tuple(text(row, name) for name in names), []).append(row)
    return [View(rows, View.of(rows).values) for rows in together.values()]


def screen(evidence: Evidence, narrow: bool) -> Sheet:
    """For every picture and method: tree, attention full and screened, difference, and figures."""
    pairs = [(view, row) for view in views(evidence) for row in view.rows]
    width, columns = (style.NARROW, 2) if narrow else (style.WIDE, 4)
    side = (width - (columns - 1) * GAP) / columns
    # Above: a title of two lines; below each strip the notes; at the end the figures.
    strips, between, head, figures = 4 // columns, 64.0, 86.0, 118.0 if narrow else 62.0
    height = head + strips * side + (strips - 1) * between + 46 + figures
    sheet = Sheet(width, len(pairs) * height + (len(pairs) - 1) * 28)
    for index, (view, row) in enumerate(pairs):
        top = index * (height + 28)
        _headline(sheet, row, top, width)
        shown = _four(view, row)
        for line in range(strips):
            some = shown[line * columns : (line + 1) * columns]
            strip(sheet, 0, top + head + line * (side + between), side, GAP, some)
        _numbers(sheet, row, top + height - figures + 14, side + GAP, columns)
    return sheet


def _four(view: View, row: Row) -> list[Panel]:
    full, kept = (view.attention(row, name) for name in ("attention", "screened_attention"))
    most = float(max(full.max(), kept.max()))
    leaves, tokens = len(row.get("boxes", ())), view.values.size
    moved = number(row, "moved_percent")
    return [
        view.tree_over_picture(
            row, "Tree over the picture", [f"{leaves} leaves of {tokens} tokens"]
        ),
        view.map_over_picture(full, "Full attention", [f"largest {100 * full.max():.1f} %"], most),
        view.map_over_picture(kept, "Screened", [f"largest {100 * kept.max():.1f} %"], most),
        view.difference_panel(
            kept - full,
            "Screened − full",
            []
            if moved is None
            else [f"{moved:.2f} % of the mass moved,", "orange: to, blue: from"],
        ),
    ]


def _headline(sheet: Sheet, row: Row, top: float, width: float) -> None:
    title = shorten(text(row, "title"), int(width / 9), placeholder=" …")
    sheet.text(0, top + 14, title, fontsize=style.TITLE, fontweight="bold")
    query = text(row, "query")
    who = "class token" if query == "class" else f"token {query}"
    words = f"{text(row, 'model')}, layer {text(row, 'layer')}, head {text(row, 'head')}, {who}"
    words = f"{words} · {text(row, 'method')}"
    for line, part in enumerate((words, outputs(row))):
        sheet.text(0, top + 32 + 17 * line, part, fontsize=style.SMALL, color=style.MUTED.light)


def outputs(row: Row) -> str:
    """What the model says without and with trees."""
    full, screened = (number(row, f"{name}_class_percent") for name in ("full", "screened"))
    if full is None or screened is None:
        return ""
    first, second = (text(row, f"{name}_class").partition(",")[0] for name in ("full", "screened"))
    return f"full: {first} {full:.1f} % · screened: {second} {screened:.1f} %"


def _numbers(sheet: Sheet, row: Row, top: float, step: float, columns: int) -> None:
    """The four figures of a tree, large."""
    said = [("gap", "gap of one mean", "{:.3f}"), ("error", "E of the tree", "{:.4f}")]
    source = "scores" if text(row, "certificate_from") == "scores" else "keys"
    said += [("certificate", f"certificate from {source}", "≤ {:.4f}")]
    said += [("leaf_percent", "leaf ratio", "{:.1f} %")]
    for index, (column, words, form) in enumerate(said):
        value = number(row, column)
        x, y = index % columns * step, top + index // columns * 56 + 14
        large = "–" if value is None else form.format(value)
        sheet.text(x, y, large, fontsize=20, fontweight="bold")
        sheet.text(x, y + 18, words, fontsize=style.SMALL, color=style.MUTED.light)
