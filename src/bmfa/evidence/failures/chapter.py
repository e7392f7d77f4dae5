"""The figure of where each rule fails: for every rule its tree, a better one and the optimal one."""

from typing import TYPE_CHECKING

import numpy as np
import torch

from bmfa.energy import free_energy, gibbs
from bmfa.evidence.failures.explanations import explain
from bmfa.evidence.methods import is_kind
from bmfa.evidence.page import panels, plots
from bmfa.evidence.page.formats import format_number
from bmfa.evidence.page.record_set import RecordSet, get_text
from bmfa.records import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

TITLES = {"fails": "This rule", "optimal": "Optimal tree"}


@plots.figure("failures", "failures")
def failures(records: RecordSet, narrow: bool) -> "Drawing":
    """For every rule an image or a field on which another rule is clearly better at equal leaves."""
    strips = []
    for rows in panels.group(records.rows("failures"), "rule"):
        notes = [get_text(rows[0], "method"), explain(rows[0])]
        strips.append(panels.Strip(_panels(rows), panels.method_title(rows[0]), notes))
    return panels.draw_strips(strips, narrow, 3, aside=250)


def _panels(rows: list[Row]) -> list[panels.Panel]:
    """The image or the softmax mass, the scores, and the trees of all roles."""
    first = rows[0]
    scores = panels.read_grid(first, "scores")
    flat = torch.from_numpy(scores.ravel())
    shown = [panels.values_panel(scores, notes=[f"gap {format_number(first['gap'])}"])]
    if "image" in first:
        shown.insert(0, panels.photograph_panel(first, get_text(first, "title").capitalize()))
    else:
        shown.append(panels.values_panel(gibbs(flat).numpy().reshape(scores.shape), "Softmax mass"))
    for row in rows:
        title = TITLES.get(row["role"]) or panels.method_title(row)
        error, leaves = format_number(row["error"]), f"{row['leaves']} leaves"
        if is_kind(get_text(row, "method"), "summary"):
            # An estimate without a tree is drawn as the score that it stands for.
            estimate = np.full_like(scores, float(free_energy(flat)) - row["error"])
            shown.append(
                panels.values_panel(estimate, title, [f"error {error}", "1 leaf"], like=scores)
            )
        else:
            shown.append(panels.tree_panel(row, scores, title, [f"E {error}", leaves]))
    return shown
