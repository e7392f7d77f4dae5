"""Matplotlib's SVG made small, self-contained and of the colours of the page around it."""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from xml.etree import ElementTree

from bmfa.evidence.page import style

SVG = "http://www.w3.org/2000/svg"
XLINK = "http://www.w3.org/1999/xlink"
HREF = f"{{{XLINK}}}href"
NUMBER = re.compile(r"-?\d+\.\d+")
REFERENCE = re.compile(r"url\(#([^)]+)\)")
NO_ROTATION = re.compile(r"rotate\(-?0 [^)]*\)")
VARIABLES = {c.light: f"var(--{c.name}, {c.light})" for c in style.COLOURS}
COMMAND = re.compile(r"([MLCQz])([^MLCQz]*)")
MEASURES = ("x", "y", "width", "height", "transform")

MARGIN = 16

Element = ElementTree.Element


@dataclass(frozen=True)
class Placed:
    """A picture as a data URI, and the rectangle it fills."""

    uri: str
    x: float
    y: float
    width: float
    height: float


def clean(
    raw: str, name: str, label: str, pictures: Mapping[str, Placed], inline: bool = False
) -> str:
    """The drawing alone: colours as variables, text in the page's font, names of its own.

    A drawing that is not inline in a page carries the colours itself, and a margin.
    """
    root = ElementTree.fromstring(raw)
    for element in root.iter():
        _place_picture(element, pictures)
        _restyle(element)
        _shorten(element)
    _remove_styles(root)
    _rename(root, name)
    _flatten(root)
    _gather_styles(root, name)
    _head(root, label)
    if not inline:
        _stand_alone(root)
    ElementTree.register_namespace("", SVG)
    ElementTree.register_namespace("xlink", XLINK)
    return ElementTree.tostring(root, encoding="unicode")


def _place_picture(element: Element, pictures: Mapping[str, Placed]) -> None:
    """Put the original file in the place of the pixels that matplotlib made of it."""
    placed = pictures.get(element.get("id", ""))
    if placed is None or element.tag != f"{{{SVG}}}image":
        return
    element.attrib.clear()
    element.attrib.update(
        {
            HREF: placed.uri,
            "x": f"{placed.x:g}",
            "y": f"{placed.y:g}",
            "width": f"{placed.width:g}",
            "height": f"{placed.height:g}",
            "preserveAspectRatio": "none",
        }
    )


def _restyle(element: Element) -> None:
    declared = element.attrib.pop("style", None)
    if declared is None:
        return
    pairs = (part.split(": ", 1) for part in declared.split("; ") if ": " in part)
    kept = {key: VARIABLES.get(value, value) for key, value in pairs}
    if "font-family" in kept:
        mono = "Mono" in kept.pop("font-family")
        kept |= {"font-family": f"var(--mono, {style.MONO})"} if mono else {}
        kept.setdefault("fill", VARIABLES[style.INK.light])
    kept.pop("stroke-dashoffset", None)
    element.set("style", ";".join(f"{key}:{value}" for key, value in kept.items()))


def _shorten(element: Element) -> None:
    for key in MEASURES:
        if key in element.attrib:
            element.set(key, NUMBER.sub(_rounded, element.attrib[key]))
    if "d" in element.attrib:
        element.set("d", _short_path(NUMBER.sub(_rounded, element.attrib["d"])))
    if NO_ROTATION.fullmatch(element.get("transform", "")):
        del element.attrib["transform"]


def _short_path(path: str) -> str:
    """The same path with H and V for straight lines, and no command said twice in a row."""
    words: list[str] = []
    said, before = "", ["", ""]
    for match in COMMAND.finditer(path):
        command, numbers = match[1], match[2].split()
        if command == "L" and numbers[1] == before[1]:
            command, shown = "H", numbers[:1]
        elif command == "L" and numbers[0] == before[0]:
            command, shown = "V", numbers[1:]
        else:
            shown = numbers
        joined = " ".join(shown)
        words.append(f" {joined}" if command == said and command in "LHV" else command + joined)
        said, before = command, numbers[-2:] or before
    return "".join(words)


def _rounded(match: re.Match[str]) -> str:
    """To a tenth of a pixel, which no screen shows."""
    short = f"{float(match[0]):.1f}".removesuffix(".0")
    return "0" if short == "-0" else short


def _remove_styles(root: Element) -> None:
    """Matplotlib's style sheet would rule the whole page; the root's attributes say the same."""
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag in (f"{{{SVG}}}style", f"{{{SVG}}}metadata"):
                parent.remove(child)
    root.set("stroke-linejoin", "round")
    root.set("stroke-linecap", "butt")


def _rename(root: Element, name: str) -> None:
    """Ids that nothing refers to go; the others begin with the figure's name."""
    references = {
        reference
        for element in root.iter()
        for value in element.attrib.values()
        for reference in [*REFERENCE.findall(value), value[1:] if value.startswith("#") else ""]
    }
    names = {old: f"{name}-{number}" for number, old in enumerate(sorted(references - {""}))}
    for element in root.iter():
        for key, value in list(element.attrib.items()):
            if key == "id":
                element.attrib.pop(key)
                if value in names:
                    element.set(key, names[value])
            elif key == HREF and value.startswith("#"):
                element.set(key, f"#{names[value[1:]]}")
            elif "url(#" in value:
                element.set(key, REFERENCE.sub(lambda match: f"url(#{names[match[1]]})", value))


def _flatten(parent: Element) -> None:
    """Replace every group that says nothing by what it holds."""
    children: list[Element] = []
    for child in parent:
        _flatten(child)
        if child.tag == f"{{{SVG}}}g" and not child.attrib:
            children.extend(child)
        elif len(child) or child.tag != f"{{{SVG}}}defs":
            children.append(child)
    for child in children:
        child.tail = None
    if children or parent.tag != f"{{{SVG}}}text":
        parent.text = parent.text if (parent.text or "").strip() else None
    parent[:] = children


def _gather_styles(root: Element, name: str) -> None:
    """Declarations that are used again and again become classes with names of their own."""
    used = Counter(e.attrib["style"] for e in root.iter() if "style" in e.attrib)
    classes = {
        words: f"{name}-s{number}"
        for number, (words, count) in enumerate(used.items())
        if count > 1
    }
    for element in root.iter():
        if element.get("style") in classes:
            element.set("class", classes[element.attrib.pop("style")])
    sheet = ElementTree.Element(f"{{{SVG}}}style")
    sheet.text = "".join(f".{kind}{{{words}}}" for words, kind in classes.items())
    root.insert(0, sheet)


def _head(root: Element, label: str) -> None:
    for side in ("width", "height"):
        root.set(side, root.get(side, "").removesuffix("pt"))
    root.attrib.pop("version", None)
    root.set("role", "img")
    root.set("aria-label", label)
    root.set("style", f"font-family: var(--font, {style.FONT})")


def _stand_alone(root: Element) -> None:
    """Colours, light and dark, a ground of its own and room around the drawing."""
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    wide, high = width + 2 * MARGIN, height + 2 * MARGIN
    root.set("viewBox", f"{-MARGIN} {-MARGIN} {wide:g} {high:g}")
    root.set("width", f"{wide:g}")
    root.set("height", f"{high:g}")
    root[0].text = f"{style.css_variables()}:root{{background:var(--surface)}}{root[0].text}"
