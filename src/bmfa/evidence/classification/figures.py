"""Accuracy against throughput: what every method gains in speed, and what it loses for it."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from bmfa.evidence.page import runs, style
from bmfa.evidence.page.marks import LEGEND_ROW, foot, heading, legend, log_ticks
from bmfa.evidence.page.records import Evidence, number
from bmfa.evidence.page.sheet import Margins, Sheet, panels
from bmfa.records import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RATE = "images_per_second"
# The accuracy shown: the second where pictures have no labels.
MEASURES = {"top1_percent": "top-1, %", "agreement_percent": "agreement with the full model, %"}


def timed(evidence: Evidence) -> list[runs.Run]:
    """Every evaluation with the methods alone whose speed was measured."""
    found = []
    for run in runs.evaluations(evidence):
        rows = [row for row in run.rows if number(row, RATE)]
        found += [runs.Run(run.model, run.full, rows)] if rows else []
    return found


def accuracy(evidence: Evidence, narrow: bool) -> Sheet:
    """Top-1 against images per second, a panel for each model; lines cross at the full model."""
    evidence.require("evaluate")
    found = timed(evidence)
    if not found:
        raise ValueError("no evaluate row was timed; evaluate with --repeats 5")
    names = list(dict.fromkeys(runs.family(row) for run in found for row in run.rows))
    columns, legend_columns = (1, 2) if narrow else (min(2, len(found)), 4)
    room = -(-len(names) // legend_columns) * LEGEND_ROW + 12
    width = style.NARROW if narrow else style.WIDE
    sheet, axes = panels(len(found), columns, width, 240, Margins(left=44), foot=room)
    for run, panel in zip(found, axes, strict=True):
        column = _column(run)
        _scales(panel, run, column)
        _cross(panel, run, column)
        for name in names:
            _family(panel, name, run.family(name), column)
        heading(sheet, panel, run.heading, MEASURES[column], indent=40)
        foot(sheet, panel, "images per second, logarithmic; lines cross at the full model")
    legend(sheet, names, sheet.height - room + 8, legend_columns)
    return sheet


def _column(run: runs.Run) -> str:
    labelled = any(number(row, "top1_percent") is not None for row in run.rows)
    return "top1_percent" if labelled else "agreement_percent"


def _values(run: runs.Run, column: str) -> list[float]:
    rows = [*run.rows, *([] if run.full is None else [run.full])]
    return [value for row in rows if (value := number(row, column)) is not None]


def _scales(axes: "Axes", run: runs.Run, column: str) -> None:
    """Rates on a logarithmic axis with a few round ticks; accuracy with room above the best."""
    rates = [rate for rate in _values(run, RATE) if rate > 0]
    axes.set_xscale("log")
    low, high = min(rates) / 1.15, max(rates) * 1.15
    axes.set_xlim(low, high)
    log_ticks(axes.xaxis, round_ticks(low, high))
    worst, best = min(_values(run, column)), max(_values(run, column))
    margin = max(0.08 * (best - worst), 0.2)
    axes.set_ylim(worst - margin, best + margin)


def round_ticks(low: float, high: float) -> list[float]:
    """At most seven round numbers inside a range, from steps of 1 to 10 to finer ones."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    chosen: list[float] = []
    for steps in ((1.0,), (1.0, 3.0), (1.0, 2.0, 5.0), (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)):
        ticks = [step * 10.0**power for power in powers for step in steps]
        inside = [tick for tick in ticks if low <= tick <= high]
        if len(inside) <= 7:
            chosen = inside
    return chosen or [low, high]


def _cross(axes: "Axes", run: runs.Run, column: str) -> None:
    full = run.full or {}
    for value, line in ((number(full, column), axes.axhline), (number(full, RATE), axes.axvline)):
        if value is not None:
            line(value, color=style.INK.light, linewidth=1.0)


def _family(axes: "Axes", name: str, rows: Sequence[Row], column: str) -> None:
    """A line through the settings of a method."""
    pairs = [(number(row, RATE), number(row, column)) for row in rows]
    places = sorted((x, y) for x, y in pairs if x and y is not None)
    if places:
        look = style.method_style(name)
        xs, ys = zip(*places, strict=True)
        axes.plot(xs, ys, clip_on=False, **look.line, **look.open_mark)
