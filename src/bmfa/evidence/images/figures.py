"""Figures of single images: instances with their scores and trees, and attention in a model."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from textwrap import shorten
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from bmfa.evidence.methods import family
from bmfa.evidence.page import panels, paper, plots
from bmfa.evidence.page.model_runs import ModelRun, closed_loop_runs
from bmfa.evidence.page.record_set import RecordSet, get_points, get_text
from bmfa.records import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Drawing

OPACITY = 0.82  # of the overlay over a token without attention
BRIGHTNESS_EXPONENT = 0.45  # makes small attention weights visible
SCENE = 288.0  # side of the image of the motivation in pixels
# Methods of panel (d) of the paper's overview, with their letters in it.
STRATEGIES = {"quadrant-gap": "A", "random-quadrants": "R", "fixed-blocks": "F"}


# Instances with scores


@plots.figure("motivation", "blocks")
def motivation(records: RecordSet, narrow: bool) -> "Drawing":
    """Two blocks of an image: the small part with the mass, what the mean loses, and the tree."""
    rows = records.rows("blocks")
    scene = panels.Panel("An image and two of its blocks", partial(_draw_scene, rows))
    shown = [_block_panels(row, number) for number, row in enumerate(rows)]
    if narrow:
        shown[0].insert(0, scene)
    drawing = panels.draw_strips([panels.Strip(p) for p in shown], narrow, 3, aside=SCENE + 26)
    if not narrow:
        panels.draw_panel(drawing, scene, 0, panels.TITLE, SCENE)
    return drawing


def _draw_scene(rows: Sequence[Row], axes: "Axes") -> None:
    """Draw the image with its numbered blocks outlined."""
    panels.photograph(axes, get_text(rows[0], "scene"))
    for number, row in enumerate(rows):
        left, top, right, bottom = row["scene_box"]
        panels.outlines_on_photograph(axes, [(top, left, bottom, right)], (1, 1), plots.YELLOW)
        text = axes.text(left + 0.02, 0.98 - top, f"{number + 1}", transform=axes.transAxes)
        text.set(color=plots.YELLOW, fontweight="bold", va="top")


def _block_panels(row: Row, number: int) -> list[panels.Panel]:
    scores, printed = panels.read_grid(row, "scores"), paper.FIRST_FIGURE[number]
    mean = {"boxes": [[0, 0, *scores.shape]]}
    loss = [f"loses {row['gap']:.3f}", f"paper {printed.gap:.3f}"]
    residual = [f"loses {row['error']:.3f}", _leaves(row)]
    return [
        panels.photograph_panel(row, f"Block {number + 1}"),
        panels.values_panel(scores, "Its scores"),
        panels.Panel("Bright part", partial(_draw_shares, row, printed)),
        panels.tree_panel(mean, scores, "Its mean", loss),
        panels.tree_panel(row, scores, "Algorithm 1", residual),
    ]


def _draw_shares(row: Row, printed: SimpleNamespace, axes: "Axes") -> None:
    """Draw the minority's shares of area and mass as bars, the paper's as marks on them."""
    axes.set(xlim=(0, 100), ylim=(2, 0))
    shares = (
        ("of the area", row["minority_area_percent"], printed.area_percent),
        ("of the mass", row["gibbs_mass_percent"], printed.mass_percent),
    )
    for top, (label, share, theirs) in enumerate(shares):
        axes.text(0, top + 0.2, f"{share:.1f} %")
        axes.text(0, top + 0.48, label, fontsize=plots.SMALL, color=plots.LIGHT["muted"])
        axes.barh(top + 0.68, 100, 0.18, color=plots.LIGHT["grid"])
        axes.barh(top + 0.68, share, 0.18, color=plots.LIGHT["ink"])
        axes.vlines(theirs, top + 0.54, top + 0.82, color=plots.LIGHT["gamma"], linewidth=2)


@plots.figure("pipeline", "cases")
def pipeline(records: RecordSet, narrow: bool) -> "Drawing":
    """From an image to its scores, its tree, and agreement with the full model over leaf ratio."""
    # The first kite, or the first instance, by the first method, which is Algorithm 1.
    row = min(records.rows("cases"), key=lambda row: row["category"] != "kite")
    leaves = [_leaves(row), f"paper: {paper.OVERVIEW_LEAVES} of {paper.OVERVIEW_TOKENS}"]
    shown = _instance_panels([row])
    shown[-1] = panels.tree_panel(row, panels.read_grid(row, "scores"), "Algorithm 1", leaves)
    runs = sorted(closed_loop_runs(records), key=lambda run: not run.is_papers_model)
    if runs:
        notes = ["agreement with the full model, %,", "against the leaf ratio, %"]
        shown.append(panels.Panel(runs[0].heading, partial(_draw_agreement, runs[0]), notes))
    titled = [
        replace(panel, title=f"({letter}) {panel.title}")
        for letter, panel in zip("abcd", shown, strict=False)
    ]
    return panels.draw_strips([panels.Strip(titled)], narrow, 2)


def _draw_agreement(run: ModelRun, axes: "Axes") -> None:
    """Draw agreement over leaf ratio, ours and the paper's."""
    plot = axes.inset_axes((0.12, 0.36, 0.88, 0.64))
    columns = "leaf_percent", "agreement_percent"
    values = []
    for name, point in paper.CLOSED_LOOP.items():
        if letter := STRATEGIES.get(family(name)):
            x, y = point.leaf_percent, point.agreement_percent
            plots.draw_point(plot, paper.NAME, x, y)
            plot.text(x, y, letter, ha="center", va="center", fontsize=8)
            values.append(y)
    ring = plots.marker(paper.NAME) | {"markersize": 8.0, "linestyle": "none"}
    plot.plot([], [], label=plots.PAPER_TITLE, **ring)
    for name in (name for name in (*STRATEGIES, "optimal") if name in run.families):
        line = get_points(run.families[name], *columns)
        plots.draw_line(plot, name, line, label=name)
        values += [y for _, y in line]
    plot.set(xlim=(0, 105), ylim=(10 * (min(values) // 10), 101))
    plots.set_ticks(plot.xaxis, [0, 25, 50, 75, 100])
    style: dict[str, Any] = {"ncols": 2, "fontsize": 10, "columnspacing": 0.8, "handlelength": 1.2}
    axes.legend(*plot.get_legend_handles_labels(), loc="lower left", **style)


@plots.figure("cases", "cases")
def cases(records: RecordSet, narrow: bool) -> "Drawing":
    """The paper's objects with their scores, and the trees of Algorithm 1 and of the optimal rule."""
    strips = []
    for rows in panels.group(records.rows("cases"), "dataset", "title"):
        notes = [*panels.minority_shares(rows[0]), f"gap of the mean {rows[0]['gap']:.3f}"]
        strips.append(panels.Strip(_instance_panels(rows), _title(rows[0]), [", ".join(notes)]))
    return panels.draw_strips(strips, narrow, across=2)


def _instance_panels(rows: Sequence[Row]) -> list[panels.Panel]:
    """The image, if the record has it, the scores, and the tree of every method."""
    scores = panels.read_grid(rows[0], "scores")
    image = [panels.photograph_panel(rows[0])] if "image" in rows[0] else []
    return [*image, panels.values_panel(scores), *(panels.tree_panel(row, scores) for row in rows)]


def _leaves(row: Row) -> str:
    return f"{len(row['boxes'])} of {len(row['scores'])} leaves"


def _title(row: Row) -> str:
    name, dataset = get_text(row, "title"), get_text(row, "dataset")
    if dataset not in ("", "embedded"):
        name += f", {paper.dataset_title(dataset)}"
    return name[:1].upper() + shorten(name, 50, placeholder=" …")[1:]


# Attention in a model


@plots.figure("attention-cases", "image")
def attention_cases(records: RecordSet, narrow: bool) -> "Drawing":
    """Images with the attention of the class token, full and screened by several rules."""
    strips = []
    for rows in _queries(records):
        first, largest = rows[0], _largest(rows)
        full = _attention_panel(first, largest, "Full attention", [_class(first, "full")])
        shown = [panels.photograph_panel(first), full]
        for row in rows:
            title = (
                f"{panels.method_title(row)} {get_text(row, 'method').partition(':')[2]}".strip()
            )
            notes = [f"E {row['error']:.3f} · {row['leaf_percent']:.1f} %", _class(row, "screened")]
            shown.append(_attention_panel(row, largest, title, notes, screened=True))
        loss = f"{_place(first)}, gap of one mean {first['gap']:.2f}"
        strips.append(panels.Strip(shown, _title(first), [loss]))
    return panels.draw_strips(strips, narrow, 3)


def _class(row: Row, which: str) -> str:
    """The class that the full or the screened model predicts, and its probability."""
    name = get_text(row, f"{which}_class").partition(",")[0]
    return f"{shorten(name, 14, placeholder='…')} {row[f'{which}_class_percent']:.0f} %"


def _draw_screen(records: RecordSet, narrow: bool) -> "Drawing":
    """An image with its tree, the attention of a query full and screened, and the difference."""
    strips = []
    for row in (row for rows in _queries(records) for row in rows):
        full, screened = (
            panels.read_grid(row, name) for name in ("attention", "screened_attention")
        )
        largest = _largest([row])
        leaves = [f"{len(row['boxes'])} leaves of {full.size} tokens"]
        weights = [[f"largest {100 * shown.max():.1f} %"] for shown in (full, screened)]
        moved = [f"{row['moved_percent']:.2f} % of the mass moved", "from blue to orange tokens"]
        shown = [
            panels.Panel("Tree over the image", partial(_draw_attention, row, None, True), leaves),
            _attention_panel(row, largest, "Full attention", weights[0]),
            _attention_panel(row, largest, "Screened attention", weights[1], screened=True),
            panels.Panel("Screened − full", partial(_draw_difference, row, screened - full), moved),
        ]
        title = shorten(get_text(row, "title"), 50, placeholder=" …")
        strips.append(panels.Strip(shown, title, _describe(row)))
    return panels.draw_strips(strips, narrow, 2)


# The figure of `bmfa screen`, which is not on the page.
screen = plots.Figure("screen", str(_draw_screen.__doc__), ("image",), _draw_screen)


def _describe(row: Row) -> list[str]:
    """The view, the predicted classes and the errors of a tree in words."""
    classes = {name: get_text(row, f"{name}_class") for name in ("full", "screened")}
    predicted = [
        f"{which}: {shorten(name, 40, placeholder=' …')} {row[f'{which}_class_percent']:.1f} %"
        for which, name in classes.items()
    ]
    return [
        f"{get_text(row, 'model')}, {_place(row)} · {get_text(row, 'method')}",
        " · ".join(predicted),
        f"gap of one mean {row['gap']:.3f} · E of the tree {row['error']:.4f} · certificate from "
        f"{row['certificate_from']} ≤ {row['certificate']:.4f} · leaf ratio {row['leaf_percent']:.1f} %",
    ]


def _queries(records: RecordSet) -> list[list[Row]]:
    """The rows of each query, one for each method."""
    return panels.group(records.rows("image"), "model", "title", "layer", "head", "query")


def _largest(rows: Sequence[Row]) -> float:
    """The largest weight of all."""
    return float(max(max(row["attention"] + row["screened_attention"]) for row in rows))


def _attention_panel(
    row: Row, largest: float, title: str, notes: Sequence[str], screened: bool = False
) -> panels.Panel:
    """Return a panel of the image, darkened where a token gets less than the largest weight."""
    weights = panels.read_grid(row, "screened_attention" if screened else "attention")
    brightness = np.clip(weights / (largest or 1.0), 0.0, 1.0) ** BRIGHTNESS_EXPONENT
    return panels.Panel(title, partial(_draw_attention, row, brightness, screened), notes)


def _draw_attention(row: Row, brightness: plots.Array | None, tree: bool, axes: "Axes") -> None:
    """Draw the image as bright as told, its leaves, and the query."""
    panels.photograph(axes, get_text(row, "image"))
    if brightness is not None:
        panels.overlay(axes, OPACITY * (1 - brightness), plots.DARK)
    if tree:
        alpha = 0.9 if brightness is None else 0.5
        panels.outlines_on_photograph(
            axes, row["boxes"], (row["height"], row["width"]), alpha=alpha
        )
    _mark_query(row, axes)


def _draw_difference(row: Row, difference: plots.Array, axes: "Axes") -> None:
    """Draw where attention increases (orange) and decreases (blue)."""
    relative = difference / (float(np.abs(difference).max()) or 1.0)
    panels.photograph(axes, get_text(row, "image"))
    panels.overlay(axes, np.full(difference.shape, 0.8), plots.DARK)
    panels.overlay(axes, np.clip(relative, 0, 1), plots.ORANGE)
    panels.overlay(axes, np.clip(-relative, 0, 1), plots.BLUE)
    _mark_query(row, axes)


def _mark_query(row: Row, axes: "Axes") -> None:
    place = get_text(row, "query").split(",")
    if len(place) == 2:
        top, left = map(int, place)
        box = (top, left, top + 1, left + 1)
        panels.outlines_on_photograph(axes, [box], (row["height"], row["width"]), plots.YELLOW)


def _place(row: Row) -> str:
    query = get_text(row, "query")
    name = "class token" if query == "class" else f"token {query}"
    return f"layer {get_text(row, 'layer')}, head {get_text(row, 'head')}, {name}"
