"""Pictures in a model side by side: what it attends to, and the trees of several rules."""

from textwrap import shorten

from bmfa.evidence.page import style
from bmfa.evidence.page.records import Evidence, number, text
from bmfa.evidence.page.sheet import Sheet
from bmfa.evidence.pictures.attention_maps import View, views
from bmfa.evidence.pictures.plates import Panel, strip
from bmfa.records import Row

GAP = 10.0
RULES = {
    "quadrant-gap": "Quadrant gap",
    "gamma": "Algorithm 1",
    "optimal": "Optimal tree",
    "fixed-blocks": "Fixed blocks",
    "mass": "Mass rule",
    "exact-gap": "Exact gap",
    "random-quadrants": "Random quadrants",
    "global-mean": "One mean",
}


def attention_cases(evidence: Evidence, narrow: bool) -> Sheet:
    """A strip for every picture: itself, full attention, and screened attention with the trees."""
    shown = [(view, _panels(view)) for view in views(evidence)]
    most = max(len(panels) for _, panels in shown)
    width, columns = (style.NARROW, 3) if narrow else (style.WIDE, most)
    side = (width - (columns - 1) * GAP) / columns
    lines = -(-most // columns)
    step = side + (88 if narrow else 76)
    head = 86 if narrow else 72
    height = head + lines * step
    sheet = Sheet(width, len(shown) * height - 26)
    for index, (view, panels) in enumerate(shown):
        top = index * height
        title = shorten(text(view.first, "title"), int(width / 8), placeholder=" …")
        sheet.text(0, top + 14, title, fontsize=style.TITLE, fontweight="bold")
        sheet.text(0, top + 32, _where(view.first), fontsize=style.SMALL, color=style.MUTED.light)
        for line in range(lines):
            some = panels[line * columns : (line + 1) * columns]
            strip(sheet, 0, top + head + line * step, side, GAP, some)
    return sheet


def _panels(view: View) -> list[Panel]:
    first = view.first
    full = view.attention(first, "attention")
    kept = [view.attention(row, "screened_attention") for row in view.rows]
    most = float(max(values.max() for values in (full, *kept)))
    said = _said(first, "full")
    shown = [
        view.picture_panel("Picture"),
        view.map_over_picture(full, "Full attention", said, most),
    ]
    for row, values in zip(view.rows, kept, strict=True):
        notes = [*_cost(row), *_said(row, "screened")]
        shown.append(view.map_over_picture(values, rule_title(row), notes, most, row))
    return shown


def _where(row: Row) -> str:
    query = text(row, "query")
    who = "class token" if query == "class" else f"token {query}"
    gap = number(row, "gap")
    lost = "" if gap is None else f", gap of one mean {gap:.2f}"
    return f"layer {text(row, 'layer')}, head {text(row, 'head')}, {who}{lost}"


def _cost(row: Row) -> list[str]:
    error, leaf = number(row, "error"), number(row, "leaf_percent")
    if error is None or leaf is None:
        return []
    return [f"E {error:.3f} · {leaf:.1f} %"]


def _said(row: Row, which: str) -> list[str]:
    """The class that the model says, and how sure it is."""
    sure = number(row, f"{which}_class_percent")
    name = text(row, f"{which}_class").partition(",")[0]
    return [] if sure is None else [f"{shorten(name, 14, placeholder='…')} {sure:.0f} %"]


def rule_title(row: Row) -> str:
    """What people call the rule, with its parameter."""
    family, _, value = text(row, "method").partition(":")
    return f"{RULES.get(family, family)} {value}".strip()
