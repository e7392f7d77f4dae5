"""Agreement and output KL over the layers that are screened."""

from typing import TYPE_CHECKING

from bmfa.evidence.closed_loop.figures import LEAST_KL, MEASURES, least, scale
from bmfa.evidence.page import runs, style
from bmfa.evidence.page.marks import end_labels, foot, heading
from bmfa.evidence.page.records import Evidence, number, text
from bmfa.evidence.page.sheet import Margins, Sheet, panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def ready(evidence: Evidence) -> bool:
    """Whether several choices of layers were screened."""
    return bool(runs.depths(evidence) or runs.depths(evidence, single=True))


def layers(evidence: Evidence, narrow: bool) -> Sheet:
    """Over how many layers are screened, and over single layers."""
    shown = [
        (run, choices, single, measure)
        for single in (False, True)
        for run, choices in runs.depths(evidence, single)
        for measure in MEASURES
    ]
    if not shown:
        raise ValueError(
            "no closed-loop rows of several choices of layers among the records; make them with: "
            "bmfa closed-loop --layers last-2 --layers last-4 --layers all --json layers.json"
        )
    width, columns = (style.NARROW, 1) if narrow else (style.WIDE, 2)
    sheet, axes = panels(len(shown), columns, width, 210, Margins(left=44, right=156))
    for panel, (run, choices, single, (column, below)) in zip(axes, shown, strict=True):
        ends = _lines(panel, run, choices, column)
        names = [choice.replace("last-", "last ") for choice in choices]
        panel.set_xticks(range(len(choices)), names)
        panel.set_xlim(-0.25, len(choices) - 0.75)
        what = ", one layer" if single else ""
        heading(sheet, panel, f"{run.heading}{what}", below, indent=40)
        foot(sheet, panel, "the layer that is screened" if single else "layers that are screened")
        end_labels(sheet, panel, ends)
    return sheet


def _lines(axes: "Axes", run: runs.Run, choices: list[str], column: str) -> dict[str, float]:
    """A line for every method; where each ends."""
    scale(axes, column, least(run.rows, column))
    ends = {}
    for method in dict.fromkeys(text(row, "method") for row in run.rows):
        some = [row for row in run.rows if text(row, "method") == method]
        places = [(choices.index(text(row, "layers")), number(row, column)) for row in some]
        known = sorted((x, y) for x, y in places if y is not None)
        if not known:
            continue
        xs = [x for x, _ in known]
        ys = [max(y, LEAST_KL) if column == "output_kl" else y for _, y in known]
        look = style.method_style(method)
        axes.plot(xs, ys, clip_on=False, **look.line, **look.mark)
        ends[method] = ys[-1]
    return ends
