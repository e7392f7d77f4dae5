"""Figure of the failures: for every rule its tree, a better one and the optimal one."""

from textwrap import wrap

import numpy as np
import torch

from bmfa.energy import free_energy, gibbs
from bmfa.evidence.failures.explanations import explain
from bmfa.evidence.methods import find_method, is_kind
from bmfa.evidence.page import style
from bmfa.evidence.page.canvas import Canvas, figure
from bmfa.evidence.page.drawing import draw_heatmap
from bmfa.evidence.page.formats import format_number
from bmfa.evidence.page.record_set import RecordSet, get_number, get_text, unique
from bmfa.evidence.page.score_maps import (
    CHARACTER_WIDTH,
    LINE_HEIGHT,
    Panel,
    ScoreMap,
    draw_row,
)
from bmfa.records import Row

GAP = 9.0  # pixels between panels
ABOVE, BELOW = 28.0, 50.0  # pixels for the titles and the notes of a row of panels
TEXT_WIDTH = 236.0  # pixels of the text at the left on a wide screen
PANELS = 5


@figure("failures", needs=("failures",))
def failures(records: RecordSet, narrow: bool) -> Canvas:
    """For every rule an image or a field on which another rule is clearly better at equal leaves."""
    rows = records.require("failures")
    groups = [
        [row for row in rows if get_text(row, "rule") == rule] for rule in unique(rows, "rule")
    ]
    width, text_width = (style.NARROW, 0.0) if narrow else (style.WIDE, TEXT_WIDTH)
    columns = 3 if narrow else PANELS
    side = (width - text_width - (columns - 1) * GAP - (0 if narrow else 14)) / columns
    characters = int((width if narrow else text_width) / CHARACTER_WIDTH)
    texts = [wrap(explain(_role(group, "fails") or group[0]), characters) for group in groups]
    panels = [_panels(group) for group in groups]
    heights = [
        _height(len(text), len(shown), columns, side, narrow)
        for text, shown in zip(texts, panels, strict=True)
    ]
    canvas = Canvas(width, sum(heights))
    top = 0.0
    for group, text, shown, height in zip(groups, texts, panels, heights, strict=True):
        fails = _role(group, "fails") or group[0]
        method = find_method(get_text(fails, "method"))
        canvas.add_title(0, top + 14, method.title if method else get_text(fails, "method"))
        canvas.add_note(0, top + 31, get_text(fails, "method"))
        start = top + 31 + LINE_HEIGHT + 4
        for line, words in enumerate(text):
            canvas.add_text(0, start + line * LINE_HEIGHT, words, fontsize=style.SMALL)
        left = 0.0 if narrow else text_width + 14
        first = start + len(text) * LINE_HEIGHT + ABOVE if narrow else top + ABOVE
        for line in range(-(-len(shown) // columns)):
            part = shown[line * columns : (line + 1) * columns]
            draw_row(canvas, left, first + line * (side + ABOVE + BELOW), side, GAP, part)
        top += height
    return canvas


def _height(lines: int, panels: int, columns: int, side: float, narrow: bool) -> float:
    """The height of one rule in pixels."""
    text = 51 + lines * LINE_HEIGHT
    shown = -(-panels // columns) * (side + ABOVE + BELOW)
    return text + shown + 26 if narrow else max(text + 12, shown + 6)


def _panels(group: list[Row]) -> list[Panel]:
    """The image or the softmax mass, the scores, and the trees of all roles."""
    score_map = ScoreMap.from_rows(group)
    mass = gibbs(torch.from_numpy(score_map.scores.ravel())).numpy()
    field = ScoreMap(group, mass.reshape(score_map.scores.shape))
    gap = get_number(score_map.first, "gap")
    scores = score_map.scores_panel()
    scores = Panel(scores.title, scores.draw, [] if gap is None else [f"gap {gap:.3f}"])
    title = get_text(score_map.first, "title")
    panels = (
        [score_map.image_panel(title.capitalize()), scores]
        if get_text(score_map.first, "image")
        else [scores, field.scores_panel("Softmax mass")]
    )
    for role, heading in (("fails", "This rule"), ("better", ""), ("optimal", "Optimal tree")):
        row = _role(group, role)
        if row is not None:
            # An estimate without a tree is drawn as the score that it stands for.
            shown = (
                _estimate_panel(score_map, row, heading or _title(row))
                if is_kind(get_text(row, "method"), "summary")
                else score_map.tree_panel(row, heading or _title(row))
            )
            panels.append(Panel(shown.title, shown.draw, _notes(row)))
    return panels


def _estimate_panel(score_map: ScoreMap, row: Row, title: str) -> Panel:
    """A panel of one score, F minus the error of the estimate, in the colours of the scores."""
    scores = score_map.scores
    value = float(free_energy(torch.from_numpy(scores.ravel()))) - (get_number(row, "error") or 0.0)

    def draw(canvas: Canvas, left: float, top: float, side: float) -> None:
        axes = canvas.add_axes(left, top, side, side)
        draw_heatmap(axes, np.full_like(scores, value), float(scores.min()), float(scores.max()))

    return Panel(title, draw)


def _notes(row: Row) -> list[str]:
    error, leaves = get_number(row, "error"), get_number(row, "leaves")
    name = "error" if is_kind(get_text(row, "method"), "summary") else "E"
    notes = [] if error is None else [f"{name} {format_number(error)}"]
    return notes + (
        [] if leaves is None else [f"{leaves:.0f} {'leaf' if leaves == 1 else 'leaves'}"]
    )


def _title(row: Row) -> str:
    method = find_method(get_text(row, "method"))
    return method.title if method else get_text(row, "method")


def _role(group: list[Row], role: str) -> Row | None:
    return next((row for row in group if get_text(row, "role") == role), None)
