"""The chapter on where each rule fails: for every rule its tree, a better one and the optimal one."""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from bmfa.energy import free_energy, gibbs
from bmfa.evidence.failures.explanations import explain
from bmfa.evidence.methods import is_kind
from bmfa.evidence.page import plots
from bmfa.evidence.page.chapter import Chapter
from bmfa.evidence.page.formats import format_number
from bmfa.evidence.page.panels import (
    Panel,
    Strip,
    draw_strips,
    group,
    method_title,
    photograph_panel,
    read_grid,
    tree_panel,
    values_panel,
)
from bmfa.evidence.page.record_set import RecordSet, get_text
from bmfa.records import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

TITLES = {"fails": "This rule", "optimal": "Optimal tree"}


def values(records: RecordSet) -> dict[str, Any]:
    """Return one row for each rule, with the columns of the other trees added."""
    joined: list[Row] = []
    for rows in group(records.rows("failures"), "rule"):
        others = {
            f"{row['role']}_{key}": row[key]
            for row in rows
            for key in ("method", "error", "leaves")
        }
        joined.append({**rows[0], **others, "why": explain(rows[0])})
    return {"rows": joined}


@plots.figure("failures", "failures")
def failures(records: RecordSet, narrow: bool) -> "Drawing":
    """For every rule an image or a field on which another rule is clearly better at equal leaves."""
    strips = []
    for rows in group(records.rows("failures"), "rule"):
        notes = [get_text(rows[0], "method"), explain(rows[0])]
        strips.append(Strip(_panels(rows), method_title(rows[0]), notes))
    return draw_strips(strips, narrow, 3 if narrow else 5, aside=250)


def _panels(rows: list[Row]) -> list[Panel]:
    """The image or the softmax mass, the scores, and the trees of all roles."""
    first = rows[0]
    scores = read_grid(first, "scores")
    flat = torch.from_numpy(scores.ravel())
    panels = [values_panel(scores, notes=[f"gap {format_number(first['gap'])}"])]
    if "image" in first:
        panels.insert(0, photograph_panel(first, get_text(first, "title").capitalize()))
    else:
        panels.append(values_panel(gibbs(flat).numpy().reshape(scores.shape), "Softmax mass"))
    for row in rows:
        title = TITLES.get(row["role"]) or method_title(row)
        error, count = format_number(row["error"]), f"{row['leaves']} leaves"
        if is_kind(get_text(row, "method"), "summary"):
            # An estimate without a tree is drawn as the score that it stands for.
            estimate = np.full_like(scores, float(free_energy(flat)) - row["error"])
            notes = [f"error {error}", "1 leaf"]
            panels.append(values_panel(estimate, title, notes, like=scores))
        else:
            panels.append(tree_panel(row, scores, title, [f"E {error}", count]))
    return panels


FAILURES = Chapter(
    "failures", "Where each rule fails", "failures/failures.html.j2", "failures", values=values
)
