"""Square panels side by side: a picture, its scores, and what a tree keeps of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import Any

import numpy as np

from bmfa.evidence.page import style
from bmfa.evidence.page.marks import Array, field, leaf_means, leaves, reconstruct
from bmfa.evidence.page.records import number, text
from bmfa.evidence.page.sheet import Sheet
from bmfa.records import Row

TITLES = {"sparge-mean": "Mean of the block", "gamma": "Algorithm 1", "optimal": "Optimal tree"}
LINE = 16.0
CHARACTER = 6.4


@dataclass(frozen=True)
class Panel:
    """A square, the words above it and the lines under it."""

    title: str
    notes: tuple[str, ...]
    draw: Callable[[Sheet, float, float, float], None]


@dataclass(frozen=True)
class Scene:
    """A field of scores, with the trees that were built over it."""

    rows: Sequence[Row]
    values: Array

    @classmethod
    def of(cls, rows: Sequence[Row]) -> "Scene":
        """The scene that these rows share; an error where their scores do not fill the grid."""
        first = rows[0]
        scores = np.asarray(first.get("scores", ()), dtype=float)
        height, width = int(first.get("height", 0)), int(first.get("width", 0))
        if scores.ndim != 1 or scores.size != height * width or scores.size == 0:
            raise ValueError(
                f"{text(first, 'title') or 'a row'} holds {scores.size} scores for a grid of "
                f"{height}x{width}; pass height * width scores in raster order"
            )
        return cls(rows, scores.reshape(height, width))

    @property
    def first(self) -> Row:
        """The row from which everything but the trees is read."""
        return self.rows[0]

    def tree(self, family: str) -> Row | None:
        """The row of a method, by its name without the parameter."""
        found = [row for row in self.rows if text(row, "method").partition(":")[0] == family]
        return found[0] if found else None

    def picture_panel(self, title: str) -> Panel:
        """The crop itself."""
        uri = text(self.first, "picture")

        def draw(sheet: Sheet, left: float, top: float, side: float) -> None:
            if not sheet.picture(left, top, side, uri):
                words = {"ha": "center", "color": style.MUTED.light, "fontsize": style.SMALL}
                sheet.text(left + side / 2, top + side / 2, "no picture", **words)

        return Panel(title, (), draw)

    def scores_panel(self, title: str) -> Panel:
        """The scores, token by token."""
        return Panel(title, (), self._field(self.values))

    def tree_panel(self, row: Row, title: str) -> Panel:
        """What the leaves keep, and the leaves; under them the gap and the leaf ratio."""
        boxes = checked_boxes(row, self.values.shape)
        draw_field = self._field(reconstruct(self.values, boxes))
        means = leaf_means(self.values, boxes)
        middle = (self.values.min() + self.values.max()) / 2

        def draw(sheet: Sheet, left: float, top: float, side: float) -> None:
            draw_field(sheet, left, top, side)
            leaves(sheet.figure.axes[-1], boxes, means, float(middle))

        return Panel(title, tree_notes(row), draw)

    def _field(self, values: Array) -> Callable[[Sheet, float, float, float], None]:
        low, high = float(self.values.min()), float(self.values.max())
        longest = max(values.shape)

        def draw(sheet: Sheet, left: float, top: float, side: float) -> None:
            height, width = (side * length / longest for length in values.shape)
            field(sheet.axes(left, top, width, height), values, low, high)

        return draw


def tree_notes(row: Row) -> tuple[str, ...]:
    """The gap and the leaf ratio of a tree; where a row has an error, its gap is that of the mean."""
    error, leaf = number(row, "error"), number(row, "leaf_percent")
    gap = number(row, "gap") if error is None else error
    notes = (
        "" if gap is None else f"gap {gap:.3f}",
        "" if leaf is None else f"{leaf:.1f} % leaves",
    )
    return tuple(note for note in notes if note)


def tree_title(row: Row) -> str:
    """What people call the method, else the row's own title."""
    method = text(row, "method")
    return TITLES.get(method.partition(":")[0]) or text(row, "title") or method


def share_of_mass(row: Row) -> str:
    """How much of the area and of the mass the minority has."""
    area, mass = number(row, "minority_area_percent"), number(row, "gibbs_mass_percent")
    if area is None or mass is None:
        return ""
    return f"{area:.1f} % of the area, {mass:.1f} % of the mass"


def strip(
    sheet: Sheet, left: float, top: float, side: float, gap: float, shown: Sequence[Panel]
) -> None:
    """Panels in a row; `top` is that of the squares, titles stand above it."""
    for index, panel in enumerate(shown):
        x = left + index * (side + gap)
        lines = wrap(panel.title, max(8, int(side / CHARACTER)))[:2]
        for number_above, words in enumerate(reversed(lines)):
            y = top - 7 - number_above * LINE
            sheet.text(x, y, words, fontsize=style.SMALL, fontweight="bold")
        panel.draw(sheet, x, top, side)
        _notes(sheet, x, top + side, side, panel.notes)


def _notes(sheet: Sheet, x: float, top: float, side: float, notes: Sequence[str]) -> None:
    """The lines under a panel, in one line where they fit."""
    joined = " · ".join(notes)
    lines = [joined] if len(joined) * CHARACTER < side else notes
    options: dict[str, Any] = {"fontsize": style.SMALL, "color": style.MUTED.light}
    for index, words in enumerate(lines):
        sheet.text(x, top + 15 + index * LINE, words, **options)


def checked_boxes(row: Row, shape: tuple[int, ...]) -> list[tuple[int, int, int, int]]:
    """The leaves of a row, checked against the grid."""
    boxes = [tuple(int(side) for side in box) for box in row.get("boxes", ())]
    for box in boxes:
        top, left, bottom, right = box if len(box) == 4 else (0, 0, 0, 0)
        if not (0 <= top < bottom <= shape[0] and 0 <= left < right <= shape[1]):
            raise ValueError(
                f"{text(row, 'title') or 'a row'} holds the leaf {list(box)} on a grid of "
                f"{shape[0]}x{shape[1]}; pass top, left, bottom, right inside it"
            )
    return [(box[0], box[1], box[2], box[3]) for box in boxes]
