"""Scenes with their trees: the gallery, the motivation, the pipeline and the qualitative cases."""

from textwrap import shorten

import torch

from bmfa.energy import gap
from bmfa.evidence.page import style
from bmfa.evidence.page.marks import foot
from bmfa.evidence.page.records import Evidence, in_order, number, text
from bmfa.evidence.page.sheet import Sheet
from bmfa.evidence.pictures.plates import Panel, Scene, share_of_mass, strip, tree_title
from bmfa.evidence.probes import figures as scatter
from bmfa.records import Row

PLACES = {
    "corner": "In the corner",
    "centred": "In the centre",
    "shifted-1-1": "Shifted by one token",
    "shifted-4-4": "Shifted by four tokens",
    "scattered": "Scattered",
}
GAP = 10.0


def gallery(evidence: Evidence, narrow: bool) -> Sheet:
    """The same bright minority at different places, and what every summary keeps of it."""
    rows = evidence.require("gallery")
    places = in_order(rows, "placement")
    scenes = [Scene.of([r for r in rows if text(r, "placement") == place]) for place in places]
    columns = 1 + max(len(scene.rows) for scene in scenes)
    width, words = (style.NARROW, 0.0) if narrow else (style.WIDE, 190.0)
    side = min(165.0, (width - words - (columns - 1) * GAP - 1) / columns)
    head, below = (74.0, 44.0) if narrow else (26.0, 22.0)
    sheet = Sheet(width, len(scenes) * (head + side + below))
    for index, (place, scene) in enumerate(zip(places, scenes, strict=True)):
        top = index * (head + side + below) + head
        shown = [scene.scores_panel("Scores")]
        shown += [scene.tree_panel(row, tree_title(row)) for row in scene.rows]
        strip(sheet, words, top, side, GAP, shown)
        y = top - head + 14 if narrow else top + 14
        sheet.text(0, y, PLACES.get(place, place), fontsize=style.TITLE, fontweight="bold")
        lines = [share_of_mass(scene.first)]
        for line, part in enumerate(lines if narrow else lines[0].split(", ")):
            _muted(sheet, 0, y + 18 + 17 * line, part)
    return sheet


def motivation(evidence: Evidence, narrow: bool) -> Sheet:
    """A block whose small bright part carries the mass, and what its mean makes of it."""
    scene = _best_scene(evidence)
    side = 166.0 if narrow else 196.0
    step = side + (28 if narrow else 32)
    sheet = Sheet(*((style.NARROW, 2 * (side + 58)) if narrow else (style.WIDE, side + 62)))
    whole = {"title": text(scene.first, "title"), "boxes": [[0, 0, *scene.values.shape]]}
    crop = [scene.picture_panel("A block of a picture")] if text(scene.first, "picture") else []
    seen = [*crop, scene.scores_panel("Its scores"), scene.tree_panel(whole, "What its mean keeps")]
    places = [(0, 0), (1, 0), (1, 1)] if narrow else [(0, 0), (1, 0), (3, 0)]
    if not crop:
        places = places[1:]
    for panel, (column, row) in zip(seen, places, strict=True):
        strip(sheet, column * step, row * (side + 58) + 26, side, 0, [panel])
    if narrow:
        _bars(sheet, 0, side + 84, side, scene)
    else:
        _bars(sheet, 2 * step, 26, side, scene)
    return sheet


def pipeline(evidence: Evidence, narrow: bool) -> Sheet:
    """Picture, scores, tree, and the trade-off over all instances."""
    shown = _pipeline_panels(_best_scene(evidence))
    found = [one for one in scatter.sources(evidence) if one.instances]
    width, side, apart, top = (
        (style.NARROW, 108.0, 18.0, 40.0) if narrow else (style.WIDE, 184.0, 28.0, 26.0)
    )
    height = top + side + 40
    sheet = Sheet(width, height + (262 if narrow and found else 0))
    strip(sheet, 0, top, side, apart, shown)
    for index in range(1, len(shown)):
        x = index * (side + apart) - apart / 2
        sheet.text(x, top + side / 2 + 6, "→", ha="center", fontsize=16, color=style.MUTED.light)
    if found:
        left, start = (0.0, height + 30) if narrow else (width - 232.0, top)
        title = f"{len(shown) + 1}. Trade-off, {found[0].title}"
        _trade_off(sheet, title, (left, start, width - left, 184.0), found[0])
    return sheet


def _pipeline_panels(scene: Scene) -> list[Panel]:
    first = 1 if text(scene.first, "picture") else 0
    shown = [scene.picture_panel("1. Picture")] if first else []
    shown.append(scene.scores_panel(f"{first + 1}. Scores"))
    row = scene.tree("gamma") or scene.first
    return [*shown, scene.tree_panel(row, f"{first + 2}. Tree of Algorithm 1")]


def cases(evidence: Evidence, narrow: bool) -> Sheet:
    """Instances with picture, scores and trees."""
    scenes = _scenes(evidence)
    columns = 1 if narrow else 2
    shown = [_case_panels(scene) for scene in scenes]
    most = max(len(panels) for panels in shown)
    width = style.NARROW if narrow else style.WIDE
    cell = (width - (columns - 1) * 32) / columns
    side = (cell - (most - 1) * 8 - 1) / most
    height = 66 + side + 42
    sheet = Sheet(width, -(-len(scenes) // columns) * height)
    for index, (scene, panels) in enumerate(zip(scenes, shown, strict=True)):
        left, top = index % columns * (cell + 32), index // columns * height
        title = shorten(text(scene.first, "title"), int(cell / 8), placeholder=" …")
        sheet.text(left, top + 14, title, fontsize=style.TITLE, fontweight="bold")
        lost = f"gap of the mean {_mean_gap(scene):.3f}"
        _muted(sheet, left, top + 31, f"{share_of_mass(scene.first)}, {lost}".lstrip(", "))
        strip(sheet, left, top + 66, side, 8, panels)
    return sheet


def _trade_off(
    sheet: Sheet, title: str, box: tuple[float, float, float, float], source: scatter.Source
) -> None:
    """The trade-off as the last panel of a strip, its title in line with the others."""
    left, top, width, height = box
    sheet.text(left, top - 7, title, fontsize=style.SMALL, fontweight="bold")
    _muted(sheet, left, top + 10, "mean gap")
    axes = sheet.axes(left + 16, top + 20, width - 22, height - 20)
    scatter.named_points(axes, source)
    foot(sheet, axes, "leaf ratio, % of tokens")


def _case_panels(scene: Scene) -> list[Panel]:
    shown = [scene.picture_panel("Picture")] if text(scene.first, "picture") else []
    shown.append(scene.scores_panel("Scores"))
    trees = [row for row in scene.rows if text(row, "method") != "sparge-mean"]
    return [*shown, *(scene.tree_panel(row, tree_title(row)) for row in trees)]


def _scenes(evidence: Evidence) -> list[Scene]:
    """The cases, those of one title and picture together."""
    together: dict[tuple[str, ...], list[Row]] = {}
    for row in evidence.require("cases"):
        key = tuple(text(row, column) for column in ("dataset", "title", "picture"))
        together.setdefault(key, []).append(row)
    return [Scene.of(rows) for rows in together.values()]


def _best_scene(evidence: Evidence) -> Scene:
    """The case with the largest gap that Algorithm 1 does split; a scene of the gallery else."""
    if not evidence.has("cases"):
        place = evidence.require("gallery")[0].get("placement")
        return Scene.of(evidence.select("gallery", placement=place))
    scenes = _scenes(evidence)
    split = [scene for scene in scenes if len((scene.tree("gamma") or {}).get("boxes", ())) > 1]
    return max(split or scenes, key=_mean_gap)


def _mean_gap(scene: Scene) -> float:
    """The gap of the block's mean."""
    return float(gap(torch.from_numpy(scene.values.ravel())))


def _bars(sheet: Sheet, left: float, top: float, side: float, scene: Scene) -> None:
    """The minority's share of the area and of the mass, and the gap that follows."""
    sheet.text(left, top - 7, "Its bright part", fontsize=style.SMALL, fontweight="bold")
    axes = sheet.plain_axes(left, top, side, side)
    bars = (("of the area", "minority_area_percent"), ("of the softmax mass", "gibbs_mass_percent"))
    for index, (words, column) in enumerate(bars):
        share = number(scene.first, column) or 0.0
        y = 10.0 + index * side * 0.32
        axes.barh(y + 24, side, 14, color=style.GRID.light)
        axes.barh(y + 24, side * share / 100, 14, color=style.INK.light)
        sheet.text(left, top + y + 8, f"{share:.1f} % {words}")
    y = top + side * 0.8
    sheet.text(left, y, f"{_mean_gap(scene):.3f}", fontsize=24, fontweight="bold")
    _muted(sheet, left, y + 19, "gap F − M of the mean")


def _muted(sheet: Sheet, x: float, y: float, words: str) -> None:
    sheet.text(x, y, words, fontsize=style.SMALL, color=style.MUTED.light)
