"""Figures of single images: instances with their scores and trees, and attention in a model."""

from collections.abc import Sequence
from functools import partial
from textwrap import shorten
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
import torch

from bmfa.data.drawn.badges import BADGE_CLASSES
from bmfa.energy import gap
from bmfa.evidence.methods import family
from bmfa.evidence.page import paper, plots
from bmfa.evidence.page.model_runs import ModelRun, closed_loop_runs
from bmfa.evidence.page.panels import (
    TITLE,
    Panel,
    Strip,
    draw_panel,
    draw_strips,
    group,
    method_title,
    minority_shares,
    outlines_on_photograph,
    overlay,
    photograph,
    photograph_panel,
    read_boxes,
    read_grid,
    tree_panel,
    values_panel,
)
from bmfa.evidence.page.record_set import RecordSet, get_number, get_points, get_text
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
    scene = Panel("An image and two of its blocks", partial(_draw_scene, rows))
    panels = [_block_panels(row, number) for number, row in enumerate(rows)]
    if narrow:
        panels[0].insert(0, scene)
    drawing = draw_strips([Strip(p) for p in panels], narrow, 3 if narrow else 5, aside=SCENE + 26)
    if not narrow:
        draw_panel(drawing, scene, 0, TITLE, SCENE)
    return drawing


def _draw_scene(rows: Sequence[Row], axes: "Axes") -> None:
    """Draw the image with its numbered blocks outlined."""
    photograph(axes, get_text(rows[0], "scene"))
    for number, row in enumerate(rows):
        left, top, right, bottom = row["scene_box"]
        outlines_on_photograph(axes, [(top, left, bottom, right)], (1, 1), plots.YELLOW)
        text = axes.text(left + 0.02, 0.98 - top, f"{number + 1}", transform=axes.transAxes)
        text.set(color=plots.YELLOW, fontweight="bold", va="top")


def _block_panels(row: Row, number: int) -> list[Panel]:
    scores, printed = read_grid(row, "scores"), paper.FIRST_FIGURE[number]
    mean = {"boxes": [[0, 0, *scores.shape]]}
    loss = [f"loses {_gap_of_mean(scores):.3f}", f"paper {printed.gap:.3f}"]
    leaves = f"{len(row['boxes'])} of {scores.size} leaves"
    residual = f"loses {get_number(row, 'error') or 0.0:.3f}"
    return [
        photograph_panel(row, f"Block {number + 1}"),
        values_panel(scores, "Its scores"),
        Panel("Bright part", partial(_draw_shares, row, printed)),
        tree_panel(mean, scores, "Its mean", loss),
        tree_panel(row, scores, "Algorithm 1", [residual, leaves]),
    ]


def _draw_shares(row: Row, printed: SimpleNamespace, axes: "Axes") -> None:
    """Draw the minority's shares of area and mass as bars, the paper's as marks on them."""
    axes.set(xlim=(0, 100), ylim=(2, 0))
    shares = (
        ("of the area", "minority_area_percent", printed.area_percent),
        ("of the mass", "gibbs_mass_percent", printed.mass_percent),
    )
    for top, (label, column, theirs) in enumerate(shares):
        share = get_number(row, column) or 0.0
        axes.text(0, top + 0.2, f"{share:.1f} %")
        axes.text(0, top + 0.48, label, fontsize=plots.SMALL, color=plots.LIGHT["muted"])
        axes.barh(top + 0.68, 100, 0.18, color=plots.LIGHT["grid"])
        axes.barh(top + 0.68, share, 0.18, color=plots.LIGHT["ink"])
        mark = [top + 0.54, top + 0.82]
        axes.plot([theirs, theirs], mark, color=plots.LIGHT["gamma"], linewidth=2)


@plots.figure("pipeline", "cases")
def pipeline(records: RecordSet, narrow: bool) -> "Drawing":
    """From an image to its scores, its tree, and agreement with the full model over leaf ratio."""
    instances = group(records.rows("cases"), "dataset", "title")
    kites = [rows for rows in instances if get_text(rows[0], "category") == "kite"]
    rows = (kites or instances)[0]
    scores = read_grid(rows[0], "scores")
    tree = next((row for row in rows if family(get_text(row, "method")) == "gamma"), rows[0])
    leaves = f"{len(tree['boxes'])} of {scores.size} leaves"
    printed = f"paper: {paper.OVERVIEW_LEAVES} of {paper.OVERVIEW_TOKENS}"
    panels = [
        *([photograph_panel(rows[0])] if get_text(rows[0], "image") else []),
        values_panel(scores),
        tree_panel(tree, scores, "Algorithm 1", [leaves, printed]),
    ]
    runs = sorted(closed_loop_runs(records), key=lambda run: not run.is_papers_model)
    if runs:
        axes = ["agreement with the full model, %,", "against the leaf ratio, %"]
        panels.append(Panel(runs[0].heading, partial(_draw_agreement, runs[0]), axes))
    titled = [
        Panel(f"({letter}) {panel.title}", panel.draw, panel.notes)
        for letter, panel in zip("abcd", panels, strict=False)
    ]
    return draw_strips([Strip(titled)], narrow, 2 if narrow else 4)


def _draw_agreement(run: ModelRun, axes: "Axes") -> None:
    """Draw agreement over leaf ratio, ours and the paper's."""
    plot = axes.inset_axes((0.12, 0.36, 0.88, 0.64))
    printed = [
        {"method": name, **vars(point)}
        for name, point in paper.CLOSED_LOOP.items()
        if family(name) in STRATEGIES
    ]
    shown = [name for name in (*STRATEGIES, "optimal") if name in run.families]
    rows = [*printed, *(row for name in shown for row in run.families.get(name, ()))]
    values = [get_number(row, "agreement_percent") or 0.0 for row in rows]
    plot.set(xlim=(0, 105), ylim=(10 * (min(values) // 10), 101))
    plots.set_ticks(plot.xaxis, [0, 25, 50, 75, 100])
    for row in printed:
        x, y = row["leaf_percent"], row["agreement_percent"]
        plots.draw_point(plot, paper.NAME, x, y)
        plot.text(x, y, STRATEGIES[family(row["method"])], ha="center", va="center", fontsize=8)
    for name in shown:
        line = get_points(run.families.get(name, []), "leaf_percent", "agreement_percent")
        plots.draw_line(plot, name, line, label=name)
    handles = plot.get_legend_handles_labels()
    axes.legend(
        *handles, loc="lower left", ncols=2, fontsize=10, columnspacing=0.8, handlelength=1.2
    )


@plots.figure("cases", "cases")
def cases(records: RecordSet, narrow: bool) -> "Drawing":
    """The paper's objects with their scores, and the trees of Algorithm 1 and of the optimal rule."""
    strips = []
    for rows in group(records.rows("cases"), "dataset", "title"):
        scores = read_grid(rows[0], "scores")
        trees = [row for row in rows if get_text(row, "method") != "block-mean"]
        panels = [
            *([photograph_panel(rows[0])] if get_text(rows[0], "image") else []),
            values_panel(scores),
            *(tree_panel(row, scores) for row in trees),
        ]
        notes = [*minority_shares(rows[0]), f"gap of the mean {_gap_of_mean(scores):.3f}"]
        strips.append(Strip(panels, _title(rows[0]), [", ".join(notes)]))
    return draw_strips(strips, narrow, max(len(strip.panels) for strip in strips), across=2)


def _gap_of_mean(scores: plots.Array) -> float:
    return float(gap(torch.from_numpy(scores.ravel())))


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
        full, screened, largest = _attention(rows)
        first = rows[0]
        panels = [
            photograph_panel(first),
            _attention_panel(first, full, largest, "Full attention", _predicted(first, "full")),
        ]
        for row, attention in zip(rows, screened, strict=True):
            title = f"{method_title(row)} {get_text(row, 'method').partition(':')[2]}".strip()
            error, leaf = get_number(row, "error") or 0.0, get_number(row, "leaf_percent") or 0.0
            notes = [f"E {error:.3f} · {leaf:.1f} %", *_predicted(row, "screened")]
            panels.append(_attention_panel(row, attention, largest, title, notes, tree=True))
        loss = f"{_place(first)}, gap of one mean {get_number(first, 'gap') or 0.0:.2f}"
        strips.append(Strip(panels, _title(first), [loss]))
    columns = 3 if narrow else max(len(strip.panels) for strip in strips)
    return draw_strips(strips, narrow, columns)


@plots.figure("screen", "image")
def screen(records: RecordSet, narrow: bool) -> "Drawing":
    """An image with its tree, the attention of a query full and screened, and the difference."""
    strips = []
    for rows in _queries(records):
        for row in rows:
            full, (screened,), largest = _attention([row])
            source = "scores" if get_text(row, "certificate_from") == "scores" else "keys"
            notes = [
                f"{get_text(row, 'model')}, {_place(row)} · {get_text(row, 'method')}",
                predicted_classes(row),
                f"gap of one mean {_number(row, 'gap')} · E of the tree {_number(row, 'error', 4)} · "
                f"certificate from {source} ≤ {_number(row, 'certificate', 4)} · "
                f"leaf ratio {_number(row, 'leaf_percent', 1)} %",
            ]
            leaves = [f"{len(row['boxes'])} leaves of {full.size} tokens"]
            moved = f"{_number(row, 'moved_percent', 2)} % of the mass moved"
            panels = [
                Panel("Tree over the image", partial(_draw_attention, row, None, True), leaves),
                _attention_panel(row, full, largest, "Full attention", [_largest(full)]),
                _attention_panel(
                    row, screened, largest, "Screened attention", [_largest(screened)]
                ),
                Panel(
                    "Screened − full",
                    partial(_draw_difference, row, screened - full),
                    [moved, "from blue to orange tokens"],
                ),
            ]
            strips.append(
                Strip(panels, shorten(get_text(row, "title"), 50, placeholder=" …"), notes)
            )
    return draw_strips(strips, narrow, 2 if narrow else 4)


def _queries(records: RecordSet) -> list[list[Row]]:
    """The rows of each query, one for each method."""
    return group(records.rows("image"), "model", "title", "layer", "head", "query")


def _attention(rows: Sequence[Row]) -> tuple[plots.Array, list[plots.Array], float]:
    """The full attention, the screened one of each row, and the largest weight of all."""
    full = read_grid(rows[0], "attention")
    screened = [read_grid(row, "screened_attention") for row in rows]
    return full, screened, float(max(values.max() for values in (full, *screened)))


def _attention_panel(
    row: Row,
    attention: plots.Array,
    largest: float,
    title: str,
    notes: Sequence[str],
    tree: bool = False,
) -> Panel:
    """Return a panel of the image, darkened where a token gets less than the largest weight."""
    relative = np.clip(attention / (largest or 1.0), 0.0, 1.0)
    return Panel(title, partial(_draw_attention, row, relative**BRIGHTNESS_EXPONENT, tree), notes)


def _draw_attention(row: Row, brightness: plots.Array | None, tree: bool, axes: "Axes") -> None:
    """Draw the image as bright as told, its leaves, and the query."""
    photograph(axes, get_text(row, "image"))
    grid = (row["height"], row["width"])
    if brightness is not None:
        overlay(axes, OPACITY * (1 - brightness), plots.DARK)
    if tree:
        alpha = 0.9 if brightness is None else 0.5
        outlines_on_photograph(axes, read_boxes(row, grid), grid, alpha=alpha)
    _mark_query(row, axes)


def _draw_difference(row: Row, difference: plots.Array, axes: "Axes") -> None:
    """Draw where attention increases (orange) and decreases (blue)."""
    relative = difference / (float(np.abs(difference).max()) or 1.0)
    photograph(axes, get_text(row, "image"))
    overlay(axes, np.full(difference.shape, 0.8), plots.DARK)
    overlay(axes, np.clip(relative, 0, 1), plots.ORANGE)
    overlay(axes, np.clip(-relative, 0, 1), plots.BLUE)
    _mark_query(row, axes)


def _mark_query(row: Row, axes: "Axes") -> None:
    place = get_text(row, "query").split(",")
    if len(place) == 2:
        top, left = map(int, place)
        box = (top, left, top + 1, left + 1)
        outlines_on_photograph(axes, [box], (row["height"], row["width"]), plots.YELLOW)


def _place(row: Row) -> str:
    query = get_text(row, "query")
    name = "class token" if query == "class" else f"token {query}"
    return f"layer {get_text(row, 'layer')}, head {get_text(row, 'head')}, {name}"


def _number(row: Row, column: str, decimals: int = 3) -> str:
    value = get_number(row, column)
    return "–" if value is None else f"{value:.{decimals}f}"


def _largest(attention: plots.Array) -> str:
    return f"largest {100 * attention.max():.1f} %"


def _predicted(row: Row, which: str) -> list[str]:
    """The class that the full or the screened model predicts, and its probability."""
    percent = get_number(row, f"{which}_class_percent")
    name = get_text(row, f"{which}_class").partition(",")[0]
    return [] if percent is None else [f"{shorten(name, 14, placeholder='…')} {percent:.0f} %"]


def predicted_classes(row: Row) -> str:
    """Return the classes that the full and the screened model predict, "" if they are missing."""
    classes = []
    for which in ("full", "screened"):
        name, percent = get_text(row, f"{which}_class"), get_number(row, f"{which}_class_percent")
        if percent is None:
            return ""
        # ImageNet separates synonyms by commas; badges have commas, but no synonyms.
        name = name if name in BADGE_CLASSES else name.partition(",")[0]
        classes.append(f"{which}: {name} {percent:.1f} %")
    return " · ".join(classes)
