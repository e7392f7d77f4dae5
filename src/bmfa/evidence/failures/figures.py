"""Figure of the failures: for every rule its tree, a better one and the optimal one."""

from typing import TYPE_CHECKING

import numpy as np
import torch

from bmfa.energy import free_energy, gibbs
from bmfa.evidence.failures.explanations import explain
from bmfa.evidence.methods import is_kind
from bmfa.evidence.page import plots
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
from bmfa.evidence.page.record_set import RecordSet, get_number, get_text
from bmfa.records import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

TITLES = {"fails": "This rule", "optimal": "Optimal tree"}


@plots.figure("failures", "failures")
def failures(records: RecordSet, narrow: bool) -> "Drawing":
    """For every rule an image or a field on which another rule is clearly better at equal leaves."""
    strips = []
    for rows in group(records.rows("failures"), "rule"):
        fails = rows[0]
        notes = [get_text(fails, "method"), explain(fails)]
        strips.append(Strip(_panels(rows), method_title(fails), notes))
    return draw_strips(strips, narrow, 3 if narrow else 5, aside=250)


def _panels(rows: list[Row]) -> list[Panel]:
    """The image or the softmax mass, the scores, and the trees of all roles."""
    first = rows[0]
    scores = read_grid(first, "scores")
    flat = torch.from_numpy(scores.ravel())
    panels = [values_panel(scores, notes=[f"gap {format_number(get_number(first, 'gap'))}"])]
    if get_text(first, "image"):
        panels.insert(0, photograph_panel(first, get_text(first, "title").capitalize()))
    else:
        panels.append(values_panel(gibbs(flat).numpy().reshape(scores.shape), "Softmax mass"))
    for row in rows:
        title = TITLES.get(get_text(row, "role")) or method_title(row)
        error, leaves = get_number(row, "error") or 0.0, row["leaves"]
        count = f"{leaves} {'leaf' if leaves == 1 else 'leaves'}"
        if is_kind(get_text(row, "method"), "summary"):
            # An estimate without a tree is drawn as the score that it stands for.
            estimate = np.full_like(scores, float(free_energy(flat)) - error)
            notes = [f"error {format_number(error)}", count]
            panels.append(values_panel(estimate, title, notes, like=scores))
        else:
            panels.append(tree_panel(row, scores, title, [f"E {format_number(error)}", count]))
    return panels
