"""Square panels in a row: a photograph, its scores, and the tree of a method over them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from textwrap import wrap

import numpy as np

from bmfa.evidence.page import style
from bmfa.evidence.page.canvas import Canvas
from bmfa.evidence.page.drawing import Array, Box, draw_heatmap, draw_leaves
from bmfa.evidence.page.record_set import get_number, get_text
from bmfa.records import Row

LINE_HEIGHT = 16.0  # pixels
CHARACTER_WIDTH = 6.4  # pixels, average of the small font

TREE_TITLES = {
    "block-mean": "Mean of the block",
    "gamma": "Algorithm 1",
    "optimal": "Optimal tree",
}


@dataclass(frozen=True)
class Panel:
    """A square drawing: a title above, `draw(canvas, left, top, side)`, and notes below."""

    title: str
    draw: Callable[[Canvas, float, float, float], None]
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class ScoreMap:
    """Scores on a grid, and the trees that were built from them.

    Attributes:
        rows: rows of one instance, one for each method.
        scores: (H, W) scores.
    """

    rows: Sequence[Row]
    scores: Array

    @classmethod
    def from_rows(cls, rows: Sequence[Row]) -> "ScoreMap":
        """Read the scores of the first row; raise ValueError if they do not fill the grid."""
        return cls(rows, read_grid(rows[0], "scores"))

    @property
    def first(self) -> Row:
        """The row that holds what all methods share: title, photograph, scores."""
        return self.rows[0]

    def tree(self, family: str) -> Row | None:
        """Return the first row of a method, named without its parameter."""
        rows = [row for row in self.rows if get_text(row, "method").partition(":")[0] == family]
        return rows[0] if rows else None

    def image_panel(self, title: str) -> Panel:
        """Return a panel of the photograph."""
        uri = get_text(self.first, "image")

        def draw(canvas: Canvas, left: float, top: float, side: float) -> None:
            if not canvas.add_image(left, top, side, uri):
                canvas.add_note(left + side / 2, top + side / 2, "no image", ha="center")

        return Panel(title, draw)

    def scores_panel(self, title: str = "Scores") -> Panel:
        """Return a panel of the scores."""
        return Panel(title, lambda *box: self._draw_values(self.scores, *box))

    def tree_panel(self, row: Row, title: str) -> Panel:
        """Return a panel of the mean score of every leaf, with the gap and the leaf ratio below."""
        boxes = read_boxes(row, self.scores.shape)
        means = np.zeros_like(self.scores)
        for top, left, bottom, right in boxes:
            means[top:bottom, left:right] = self.scores[top:bottom, left:right].mean()
        middle = (self.scores.min() + self.scores.max()) / 2
        bright = np.array([means[top, left] > middle for top, left, _, _ in boxes], dtype=bool)

        def draw(canvas: Canvas, left: float, top: float, side: float) -> None:
            self._draw_values(means, canvas, left, top, side)
            draw_leaves(canvas.figure.axes[-1], boxes, bright)

        return Panel(title, draw, _tree_notes(row))

    def _draw_values(
        self, values: Array, canvas: Canvas, left: float, top: float, side: float
    ) -> None:
        height, width = (side * length / max(values.shape) for length in values.shape)
        axes = canvas.add_axes(left, top, width, height)
        draw_heatmap(axes, values, float(self.scores.min()), float(self.scores.max()))


def read_grid(row: Row, column: str) -> Array:
    """Return a column of a row as (H, W); raise ValueError if its length is not H * W."""
    values = np.asarray(row.get(column, ()), dtype=float)
    height, width = int(row.get("height", 0)), int(row.get("width", 0))
    if values.ndim != 1 or values.size != height * width or values.size == 0:
        raise ValueError(
            f"{get_text(row, 'title') or 'a row'} holds {values.size} values of {column} for a grid "
            f"of {height}x{width}; pass height * width values in raster order"
        )
    return values.reshape(height, width)


def read_boxes(row: Row, shape: tuple[int, ...]) -> list[Box]:
    """Return the leaves of a row; raise ValueError if one is not inside the grid."""
    boxes = [tuple(int(side) for side in box) for box in row.get("boxes", ())]
    for box in boxes:
        top, left, bottom, right = box if len(box) == 4 else (0, 0, 0, 0)
        if not (0 <= top < bottom <= shape[0] and 0 <= left < right <= shape[1]):
            raise ValueError(
                f"{get_text(row, 'title') or 'a row'} holds the leaf {list(box)} on a grid of "
                f"{shape[0]}x{shape[1]}; pass top, left, bottom, right inside the grid"
            )
    return [(box[0], box[1], box[2], box[3]) for box in boxes]


def _tree_notes(row: Row) -> list[str]:
    """The gap and the leaf ratio of a tree. In a row with an error, `gap` is that of the mean."""
    error, leaf = get_number(row, "error"), get_number(row, "leaf_percent")
    gap = get_number(row, "gap") if error is None else error
    notes = [] if gap is None else [f"gap {gap:.3f}"]
    return notes + ([] if leaf is None else [f"{leaf:.1f} % leaves"])


def tree_title(row: Row) -> str:
    """Return the title of a method over its tree, or the title of the row."""
    method = get_text(row, "method")
    return TREE_TITLES.get(method.partition(":")[0]) or get_text(row, "title") or method


def minority_shares(row: Row) -> list[str]:
    """Return the minority's shares of area and softmax mass in words, if the row has them."""
    area, mass = get_number(row, "minority_area_percent"), get_number(row, "gibbs_mass_percent")
    if area is None or mass is None:
        return []
    return [f"{area:.1f} % of the area", f"{mass:.1f} % of the mass"]


def draw_row(
    canvas: Canvas, left: float, top: float, side: float, gap: float, panels: Sequence[Panel]
) -> None:
    """Draw panels in a row; `top` is the top of the squares, and the titles are above it."""
    for index, panel in enumerate(panels):
        x = left + index * (side + gap)
        title = wrap(panel.title, max(8, int(side / CHARACTER_WIDTH)))[:2]
        for line, text in enumerate(reversed(title)):
            canvas.add_title(x, top - 7 - line * LINE_HEIGHT, text, style.SMALL)
        panel.draw(canvas, x, top, side)
        joined = " · ".join(panel.notes)
        notes = [joined] if len(joined) * CHARACTER_WIDTH < side else panel.notes
        for line, text in enumerate(notes):
            canvas.add_note(x, top + side + 15 + line * LINE_HEIGHT, text)
