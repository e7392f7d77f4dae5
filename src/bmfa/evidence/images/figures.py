"""Figures of single images: instances with their scores and trees, and attention in a model."""

from collections.abc import Callable, Sequence
from textwrap import shorten
from typing import TYPE_CHECKING

import numpy as np
import torch

from bmfa.data.drawn.badges import BADGE_CLASSES
from bmfa.energy import gap
from bmfa.evidence.methods import find_method
from bmfa.evidence.page import paper, style
from bmfa.evidence.page.canvas import Canvas, figure
from bmfa.evidence.page.drawing import (
    Array,
    draw_line,
    draw_overlay,
    draw_point,
    outline_boxes,
    set_ticks,
)
from bmfa.evidence.page.model_runs import ModelRun, closed_loop_runs
from bmfa.evidence.page.record_set import RecordSet, get_number, get_points, get_text
from bmfa.evidence.page.score_maps import (
    Panel,
    ScoreMap,
    draw_row,
    minority_shares,
    read_boxes,
    read_grid,
    tree_title,
)
from bmfa.records import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DARK, ORANGE, BLUE, YELLOW = "#0a0d12", "#ff9352", "#6faaff", "#ffd23f"
OPACITY = 0.82  # of the overlay over a token without attention
BRIGHTNESS_EXPONENT = 0.45  # makes small attention weights visible
GAP = 12.0  # pixels between panels


@figure("motivation", needs=("blocks",))
def motivation(records: RecordSet, narrow: bool) -> Canvas:
    """Two blocks of an image: the small part with the mass, what the mean loses, and the tree."""
    maps = [ScoreMap.from_rows([row]) for row in records.require("blocks")]
    scene, gap = (style.NARROW, 10.0) if narrow else (288.0, 12.0)
    columns = 3 if narrow else 5
    left = 0.0 if narrow else scene + 26
    width = float(style.NARROW if narrow else style.WIDE)
    side = (width - left - (columns - 1) * gap) / columns
    step = side + 70
    lines = -(-5 // columns)
    top = scene + 40 if narrow else 0.0
    canvas = Canvas(
        width, max(top + len(maps) * (lines * step + (18 if narrow else 0)), scene + 30)
    )
    _draw_scene(canvas, scene, maps)
    for number, score_map in enumerate(maps):
        panels = _motivation_panels(score_map, number)
        for line in range(lines):
            start = top + number * (lines * step + 18 * narrow) + line * step + 26
            draw_row(canvas, left, start, side, gap, panels[line * columns : (line + 1) * columns])
    return canvas


def _draw_scene(canvas: Canvas, side: float, maps: Sequence[ScoreMap]) -> None:
    """Draw the image with its numbered blocks outlined."""
    canvas.add_title(0, 19, "An image and two of its blocks", style.SMALL)
    canvas.add_image(0, 26, side, get_text(maps[0].first, "scene"))
    axes = canvas.add_axes(0, 26, side, side)
    axes.set(xlim=(0, 1), ylim=(1, 0))
    axes.set_axis_off()
    for number, score_map in enumerate(maps):
        box = score_map.first.get("scene_box")
        if isinstance(box, list) and len(box) == 4:
            left, top, right, bottom = (float(edge) for edge in box)
            outline_boxes(axes, [(top, left, bottom, right)], YELLOW)
            canvas.add_text(
                left * side + 6, 26 + top * side + 17, f"{number + 1}", color=YELLOW,
                fontweight="bold",
            )  # fmt: skip


def _motivation_panels(score_map: ScoreMap, number: int) -> list[Panel]:
    row = score_map.first
    printed = paper.FIRST_FIGURE[number] if number < len(paper.FIRST_FIGURE) else None
    mean = _gap_of_mean(score_map)
    one_leaf = {"boxes": [[0, 0, *score_map.scores.shape]]}
    one_mean = score_map.tree_panel(one_leaf, "Its mean")
    tree = score_map.tree_panel(row, "Algorithm 1")
    scores = score_map.scores_panel("Its scores")
    paper_gap = [f"paper {printed.gap:.3f}"] if printed else []
    leaves = f"{len(row.get('boxes', ()))} of {score_map.scores.size} leaves"
    residual = get_number(row, "error") or 0.0
    return [
        score_map.image_panel(f"Block {number + 1}"),
        scores,
        Panel("Bright part", lambda *box: _draw_share_bars(score_map, printed, *box)),
        Panel(one_mean.title, one_mean.draw, [f"loses {mean:.3f}", *paper_gap]),
        Panel(tree.title, tree.draw, [f"loses {residual:.3f}", leaves]),
    ]


def _draw_share_bars(
    score_map: ScoreMap,
    printed: "paper.FigureBlock | None",
    canvas: Canvas,
    left: float,
    top: float,
    side: float,
) -> None:
    """Draw the minority's shares of area and mass as bars, the paper's as marks on them."""
    axes = canvas.add_pixel_axes(left, top, side, side)
    bars = (
        ("of the area", "minority_area_percent", printed.area_percent if printed else None),
        ("of the mass", "gibbs_mass_percent", printed.mass_percent if printed else None),
    )
    for index, (label, column, theirs) in enumerate(bars):
        share = get_number(score_map.first, column) or 0.0
        y = index * side * 0.52
        canvas.add_text(left, top + y + 10, f"{share:.1f} %", fontsize=style.TEXT)
        canvas.add_note(left, top + y + 25, label)
        axes.barh(y + 37, side, 10, color=style.GRID.light)
        axes.barh(y + 37, side * share / 100, 10, color=style.INK.light)
        if theirs is not None:
            x = side * theirs / 100
            axes.plot([x, x], [y + 29, y + 45], color=style.LIGHT["gamma"], linewidth=2)


@figure("pipeline", needs=("cases",))
def pipeline(records: RecordSet, narrow: bool) -> Canvas:
    """From an image to its scores, its tree, and agreement with the full model over leaf ratio."""
    instance = _kite(records)
    tree = instance.tree("gamma") or instance.first
    panels = [
        *([instance.image_panel("Image")] if get_text(instance.first, "image") else []),
        instance.scores_panel("Scores"),
    ]
    drawn = instance.tree_panel(tree, "Algorithm 1")
    leaves = f"{len(tree.get('boxes', ()))} of {instance.scores.size} leaves"
    printed = f"paper: {paper.OVERVIEW_LEAVES} of {paper.OVERVIEW_TOKENS}"
    panels.append(Panel(drawn.title, drawn.draw, [leaves, printed]))
    panels = [
        Panel(f"({letter}) {panel.title}", panel.draw, panel.notes)
        for letter, panel in zip("abcd", panels, strict=False)
    ]
    runs = sorted(closed_loop_runs(records), key=lambda run: not run.is_papers_model)
    run = runs[0] if runs else None
    width, side, distance, top = (
        (style.NARROW, 108.0, 18.0, 40.0) if narrow else (style.WIDE, 184.0, 28.0, 26.0)
    )
    height = top + side + (80 if run and not narrow else 44)
    canvas = Canvas(width, height + (320 if narrow and run else 0))
    draw_row(canvas, 0, top, side, distance, panels)
    for index in range(1, len(panels)):
        x = index * (side + distance) - distance / 2
        arrow = {"ha": "center", "fontsize": 16, "color": style.MUTED.light}
        canvas.add_text(x, top + side / 2 + 6, "→", **arrow)
    if run:
        left, start = (0.0, height + 30) if narrow else (width - 236.0, top)
        title = f"({'abcd'[len(panels)]}) {run.heading}"
        _draw_agreement(canvas, title, (left, start, width - left, 184.0), run)
    return canvas


# Methods of the paper's panel (d), with their letters in it.
STRATEGIES = {"quadrant-gap": "A", "random-quadrants": "R", "fixed-blocks": "F"}


def _draw_agreement(
    canvas: Canvas, title: str, box: tuple[float, float, float, float], run: ModelRun
) -> None:
    """Draw agreement over leaf ratio in a box (left, top, width, height), ours and the paper's."""
    left, top, width, height = box
    canvas.add_title(left, top - 7, shorten(title, int(width / 7), placeholder=" …"), style.SMALL)
    canvas.add_note(left, top + 8, "agreement with the full model, %")
    axes = canvas.add_axes(left + 26, top + 20, width - 32, height - 20)
    rows = [row for name in (*STRATEGIES, "optimal") for row in run.family(name)]
    printed = [
        {"method": name, **vars(point)}
        for name, point in paper.CLOSED_LOOP.items()
        if name.partition(":")[0] in STRATEGIES
    ]
    values = [get_number(row, "agreement_percent") for row in (*rows, *printed)]
    low = 10 * (min(value for value in values if value is not None) // 10)
    axes.set(xlim=(0, 105), ylim=(low, 101))
    set_ticks(axes.xaxis, [0, 25, 50, 75, 100])
    for row in printed:
        x, y = get_number(row, "leaf_percent"), get_number(row, "agreement_percent")
        draw_point(axes, paper.NAME, x, y)
        letter = STRATEGIES[get_text(row, "method").partition(":")[0]]
        axes.text(x or 0.0, (y or 0.0), letter, ha="center", va="center", fontsize=8)
    for name in (*STRATEGIES, "optimal"):
        draw_line(axes, name, get_points(run.family(name), "leaf_percent", "agreement_percent"))
    canvas.add_note(left + 26 + (width - 32) / 2, top + height + 34, "leaf ratio, %", ha="center")
    names = [name for name in (*STRATEGIES, "optimal") if run.family(name)]
    for index, name in enumerate(names):
        x, y = left + index % 2 * width / 2, top + height + 54 + index // 2 * 17
        marker = style.marker_options(style.method_mark(name))
        canvas.add_line([x + 6], [y - 4], linestyle="none", **marker)
        canvas.add_note(x + 16, y, name)


@figure("cases", needs=("cases",))
def cases(records: RecordSet, narrow: bool) -> Canvas:
    """The paper's objects with their scores, and the trees of Algorithm 1 and of the optimal rule."""
    instances = _instances(records)
    panels = [_case_panels(instance) for instance in instances]
    width, columns = (style.NARROW, 1) if narrow else (style.WIDE, 2)
    count = max(map(len, panels))
    cell = (width - (columns - 1) * 32) / columns
    side = (cell - (count - 1) * 8 - 1) / count
    height = 66 + side + 52
    canvas = Canvas(width, -(-len(instances) // columns) * height)
    for index, instance in enumerate(instances):
        left, top = index % columns * (cell + 32), index // columns * height
        canvas.add_title(left, top + 14, _shorten_title(instance.first, cell))
        loss = f"{'gap' if narrow else 'gap of the mean'} {_gap_of_mean(instance):.3f}"
        canvas.add_note(left, top + 31, ", ".join([*minority_shares(instance.first), loss]))
        draw_row(canvas, left, top + 66, side, 8, panels[index])
    return canvas


def _case_panels(instance: ScoreMap) -> list[Panel]:
    trees = [row for row in instance.rows if get_text(row, "method") != "block-mean"]
    return [
        *([instance.image_panel("Image")] if get_text(instance.first, "image") else []),
        instance.scores_panel(),
        *(instance.tree_panel(row, tree_title(row)) for row in trees),
    ]


def _group(rows: Sequence[Row], *columns: str) -> list[list[Row]]:
    """Group rows that have the same values in these columns."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(get_text(row, column) for column in columns), []).append(row)
    return list(groups.values())


def _instances(records: RecordSet) -> list[ScoreMap]:
    groups = _group(records.require("cases"), "dataset", "title")
    return [ScoreMap.from_rows(rows) for rows in groups]


def _kite(records: RecordSet) -> ScoreMap:
    """The kite, as in the paper's overview; the first instance if there is none."""
    instances = _instances(records)
    kites = [one for one in instances if get_text(one.first, "category") == "kite"]
    return (kites or instances)[0]


def _gap_of_mean(instance: ScoreMap) -> float:
    return float(gap(torch.from_numpy(instance.scores.ravel())))


def _shorten_title(row: Row, width: float) -> str:
    """The title of a row, cut to a width in pixels."""
    name, dataset = get_text(row, "title"), get_text(row, "dataset")
    if dataset not in ("", "embedded"):
        name += f", {paper.dataset_title(dataset)}"
    title = shorten(name, int(width / 8), placeholder=" …")
    return title[:1].upper() + title[1:]


class AttentionMap(ScoreMap):
    """One image and one query of one head, with the trees that were built for the query."""

    def tree_over_image(self, row: Row, title: str, notes: Sequence[str]) -> Panel:
        """Return a panel of the leaves over the image."""
        boxes = read_boxes(row, self.scores.shape)
        return self._overlay(title, notes, lambda axes: outline_boxes(axes, boxes))

    def attention_over_image(
        self,
        attention: Array,
        title: str,
        notes: Sequence[str],
        largest: float,
        tree: Row | None = None,
    ) -> Panel:
        """Return a panel of the image, darkened where a token gets little attention.

        Args:
            attention: (H, W) weights.
            title: title of the panel.
            notes: lines under the panel.
            largest: the weight that is not darkened at all.
            tree: a row whose leaves are drawn over the image.
        """
        boxes = [] if tree is None else read_boxes(tree, self.scores.shape)
        brightness = np.clip(attention / (largest or 1.0), 0.0, 1.0) ** BRIGHTNESS_EXPONENT

        def draw(axes: "Axes") -> None:
            draw_overlay(axes, OPACITY * (1 - brightness), DARK)
            if boxes:
                outline_boxes(axes, boxes, alpha=0.5)

        return self._overlay(title, notes, draw)

    def difference_panel(self, difference: Array, title: str, notes: Sequence[str]) -> Panel:
        """Return a panel of where attention increases (orange) and decreases (blue)."""
        relative = difference / (float(np.abs(difference).max()) or 1.0)

        def draw(axes: "Axes") -> None:
            draw_overlay(axes, np.full(difference.shape, 0.8), DARK)
            draw_overlay(axes, np.clip(relative, 0, 1), ORANGE)
            draw_overlay(axes, np.clip(-relative, 0, 1), BLUE)

        return self._overlay(title, notes, draw)

    def _overlay(
        self, title: str, notes: Sequence[str], draw_tokens: Callable[["Axes"], None]
    ) -> Panel:
        """A panel of the image with a drawing over it, and the query token outlined."""
        height, width = self.scores.shape
        row, _, column = get_text(self.first, "query").partition(",")

        def draw(canvas: Canvas, left: float, top: float, side: float) -> None:
            if not canvas.add_image(left, top, side, get_text(self.first, "image")):
                canvas.add_pixel_axes(left, top, side, side).barh(side / 2, side, side, color=DARK)
            axes = canvas.add_axes(left, top, side, side)
            axes.set(xlim=(0, width), ylim=(height, 0))
            axes.set_axis_off()
            draw_tokens(axes)
            if row.isdecimal() and column.isdecimal():
                query = (int(row), int(column), int(row) + 1, int(column) + 1)
                outline_boxes(axes, [query], YELLOW)

        return Panel(title, draw, notes)


def _attention_maps(records: RecordSet) -> list[AttentionMap]:
    groups = _group(records.require("image"), "model", "title", "layer", "head", "query")
    return [AttentionMap(rows, read_grid(rows[0], "scores")) for rows in groups]


def _query_name(row: Row) -> str:
    query = get_text(row, "query")
    return "class token" if query == "class" else f"token {query}"


@figure("attention-cases", needs=("image",))
def attention_cases(records: RecordSet, narrow: bool) -> Canvas:
    """Images with the attention of the class token, full and screened by several rules."""
    maps = _attention_maps(records)
    panels = [_rule_panels(attention_map) for attention_map in maps]
    count, distance = max(map(len, panels)), 10.0
    width, columns = (style.NARROW, 3) if narrow else (style.WIDE, count)
    side = (width - (columns - 1) * distance) / columns
    lines, step, above = -(-count // columns), side + (88 if narrow else 76), 86 if narrow else 72
    height = above + lines * step
    canvas = Canvas(width, len(maps) * height - 26)
    for index, attention_map in enumerate(maps):
        row, top = attention_map.first, index * height
        canvas.add_title(0, top + 14, _shorten_title(row, width))
        loss = get_number(row, "gap")
        where = f"layer {get_text(row, 'layer')}, head {get_text(row, 'head')}, {_query_name(row)}"
        where += "" if loss is None else f", gap of one mean {loss:.2f}"
        canvas.add_note(0, top + 32, where)
        for line in range(lines):
            shown = panels[index][line * columns : (line + 1) * columns]
            draw_row(canvas, 0, top + above + line * step, side, distance, shown)
    return canvas


def _rule_panels(attention_map: AttentionMap) -> list[Panel]:
    full = read_grid(attention_map.first, "attention")
    screened = [read_grid(row, "screened_attention") for row in attention_map.rows]
    largest = float(max(values.max() for values in (full, *screened)))
    panels = [
        attention_map.image_panel("Image"),
        attention_map.attention_over_image(
            full, "Full attention", _predicted(attention_map.first, "full"), largest
        ),
    ]
    for row, values in zip(attention_map.rows, screened, strict=True):
        error, leaf = get_number(row, "error"), get_number(row, "leaf_percent")
        cost = [] if error is None or leaf is None else [f"E {error:.3f} · {leaf:.1f} %"]
        notes = [*cost, *_predicted(row, "screened")]
        panels.append(
            attention_map.attention_over_image(values, _rule_title(row), notes, largest, row)
        )
    return panels


def _rule_title(row: Row) -> str:
    """The title of a rule and its parameter."""
    name, _, value = get_text(row, "method").partition(":")
    method = find_method(name)
    return f"{method.title if method else name} {value}".strip()


def _predicted(row: Row, which: str) -> list[str]:
    """The class that the full or the screened model predicts, and its probability."""
    percent = get_number(row, f"{which}_class_percent")
    name = get_text(row, f"{which}_class").partition(",")[0]
    return [] if percent is None else [f"{shorten(name, 14, placeholder='…')} {percent:.0f} %"]


@figure("screen", needs=("image",))
def screen(records: RecordSet, narrow: bool) -> Canvas:
    """An image with its tree, the attention of a query full and screened, and the difference."""
    pairs = [(one, row) for one in _attention_maps(records) for row in one.rows]
    width, columns = (style.NARROW, 2) if narrow else (style.WIDE, 4)
    side = (width - (columns - 1) * GAP) / columns
    # From top to bottom: the title, rows of panels with notes between them, and large numbers.
    lines, between, above, below = 4 // columns, 64.0, 86.0, 118.0 if narrow else 62.0
    height = above + lines * side + (lines - 1) * between + 46 + below
    canvas = Canvas(width, len(pairs) * height + (len(pairs) - 1) * 28)
    for index, (attention_map, row) in enumerate(pairs):
        top = index * (height + 28)
        title = shorten(get_text(row, "title"), int(width / 9), placeholder=" …")
        canvas.add_title(0, top + 14, title)
        where = f"{get_text(row, 'model')}, layer {get_text(row, 'layer')}, head "
        where += f"{get_text(row, 'head')}, {_query_name(row)} · {get_text(row, 'method')}"
        canvas.add_note(0, top + 32, where)
        canvas.add_note(0, top + 49, predicted_classes(row))
        panels = _screen_panels(attention_map, row)
        for line in range(lines):
            shown = panels[line * columns : (line + 1) * columns]
            draw_row(canvas, 0, top + above + line * (side + between), side, GAP, shown)
        _add_numbers(canvas, row, top + height - below + 28, side + GAP, columns)
    return canvas


def _screen_panels(attention_map: AttentionMap, row: Row) -> list[Panel]:
    full, screened = read_grid(row, "attention"), read_grid(row, "screened_attention")
    largest = float(max(full.max(), screened.max()))
    leaves, tokens = len(row.get("boxes", ())), attention_map.scores.size
    moved = get_number(row, "moved_percent")
    change = (
        [] if moved is None else [f"{moved:.2f} % of the mass moved", "from blue to orange tokens"]
    )
    return [
        attention_map.tree_over_image(
            row, "Tree over the image", [f"{leaves} leaves of {tokens} tokens"]
        ),
        attention_map.attention_over_image(
            full, "Full attention", [f"largest {100 * full.max():.1f} %"], largest
        ),
        attention_map.attention_over_image(
            screened, "Screened attention", [f"largest {100 * screened.max():.1f} %"], largest
        ),
        attention_map.difference_panel(screened - full, "Screened − full", change),
    ]


def predicted_classes(row: Row) -> str:
    """Return the classes that the full and the screened model predict, "" if they are missing."""
    full, screened = (get_number(row, f"{name}_class_percent") for name in ("full", "screened"))
    if full is None or screened is None:
        return ""
    first, second = (_first_synonym(get_text(row, f"{n}_class")) for n in ("full", "screened"))
    return f"full: {first} {full:.1f} % · screened: {second} {screened:.1f} %"


def _first_synonym(name: str) -> str:
    """Return the first of the synonyms that ImageNet separates by commas; badges have no synonyms."""
    return name if name in BADGE_CLASSES else name.partition(",")[0]


def _add_numbers(canvas: Canvas, row: Row, top: float, step: float, columns: int) -> None:
    source = "scores" if get_text(row, "certificate_from") == "scores" else "keys"
    numbers = (
        ("gap", "gap of one mean", "{:.3f}"),
        ("error", "E of the tree", "{:.4f}"),
        ("certificate", f"certificate from {source}", "≤ {:.4f}"),
        ("leaf_percent", "leaf ratio", "{:.1f} %"),
    )
    for index, (column, label, pattern) in enumerate(numbers):
        value = get_number(row, column)
        x, y = index % columns * step, top + index // columns * 56
        canvas.add_title(x, y, "–" if value is None else pattern.format(value), 20)
        canvas.add_note(x, y + 18, label)
