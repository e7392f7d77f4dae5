"""Cleans the SVG that matplotlib writes, so that it fits into a page.

Colours become CSS variables (light and dark), text takes the font of the page, ids are unique on the
page, photographs keep their original JPEG data, and repeated style declarations become classes.
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from bmfa.evidence.page import style

SVG = "{http://www.w3.org/2000/svg}"
HREF = "{http://www.w3.org/1999/xlink}href"
NUMBER = re.compile(r"-?\d+\.\d+")
ID_REFERENCE = re.compile(r"url\(#([^)]+)\)")
NO_ROTATION = re.compile(r"rotate\(-?0 [^)]*\)")
VARIABLES = {c.light: f"var(--{c.name}, {c.light})" for c in style.COLOURS}
MARGIN = 16  # CSS pixels around a figure that is a file of its own


@dataclass(frozen=True)
class Image:
    """A photograph as a data URI, and the square that it fills."""

    uri: str
    left: float
    top: float
    side: float


def clean_svg(
    raw: str, name: str, label: str, images: Mapping[str, Image], inline: bool = False
) -> str:
    """Clean a drawing.

    Args:
        raw: the SVG as matplotlib writes it.
        name: prefix of its ids and classes, unique on the page.
        label: description for screen readers.
        images: photographs by the id of their `image` element.
        inline: True if the page supplies colours and margin.

    Returns:
        The SVG element as text.
    """
    root = ElementTree.fromstring(raw)
    for element in root.iter():
        if element.tag == f"{SVG}image":
            _restore_image(element, images)
        else:
            _use_variables(element)
            _round_numbers(element)
    _remove_metadata(root)
    _rename_ids(root, name)
    _share_styles(root, name)
    for side in ("width", "height"):
        root.set(side, root.get(side, "").removesuffix("pt"))
    root.attrib.pop("version", None)
    root.attrib |= {"role": "img", "aria-label": label}
    # matplotlib sets these in a style sheet that would apply to the whole page.
    root.attrib |= {"stroke-linejoin": "round", "stroke-linecap": "butt"}
    root.set("style", f"font-family: var(--font, {style.FONT})")
    if not inline:
        _add_colours_and_margin(root)
    ElementTree.register_namespace("", SVG.strip("{}"))
    ElementTree.register_namespace("xlink", HREF.rpartition("}")[0].strip("{"))
    return ElementTree.tostring(root, encoding="unicode")


def _restore_image(element: Element, images: Mapping[str, Image]) -> None:
    """Replace the pixels that matplotlib wrote by the original photograph."""
    image = images.get(element.get("id", ""))
    if image is None:
        return
    element.attrib.clear()
    box = {"x": image.left, "y": image.top, "width": image.side, "height": image.side}
    element.attrib.update({key: f"{value:g}" for key, value in box.items()})
    element.attrib.update({HREF: image.uri, "preserveAspectRatio": "none"})


def _use_variables(element: Element) -> None:
    """Replace colours by variables, and matplotlib's font by that of the page."""
    declared = element.attrib.pop("style", None)
    if declared is None:
        return
    pairs = (part.split(": ", 1) for part in declared.split("; ") if ": " in part)
    declarations = {key: VARIABLES.get(value, value) for key, value in pairs}
    if declarations.pop("font-family", None):
        declarations.setdefault("fill", VARIABLES[style.INK.light])
    declarations.pop("stroke-dashoffset", None)
    element.set("style", ";".join(f"{key}:{value}" for key, value in declarations.items()))


def _round_numbers(element: Element) -> None:
    """Round coordinates to a tenth of a pixel, which no screen shows."""
    for key in ("x", "y", "width", "height", "transform", "d"):
        if key in element.attrib:
            element.set(key, NUMBER.sub(_round, element.attrib[key]))
    if NO_ROTATION.fullmatch(element.get("transform", "")):
        del element.attrib["transform"]


def _round(match: re.Match[str]) -> str:
    short = f"{float(match[0]):.1f}".removesuffix(".0")
    return "0" if short == "-0" else short


def _remove_metadata(root: Element) -> None:
    for parent in list(root.iter()):
        parent.tail = None  # white space between elements
        for child in list(parent):
            if child.tag in (f"{SVG}style", f"{SVG}metadata"):
                parent.remove(child)


def _rename_ids(root: Element, name: str) -> None:
    """Prefix ids that are referred to with the name of the figure, and remove the others."""
    values = [value for element in root.iter() for value in element.attrib.values()]
    used = {old for value in values for old in ID_REFERENCE.findall(value)}
    used |= {value[1:] for value in values if value.startswith("#")}
    new_ids = {old: f"{name}-{index}" for index, old in enumerate(sorted(used))}
    for element in root.iter():
        old = element.attrib.pop("id", None)
        if old in new_ids:
            element.set("id", new_ids[old])
        for key, value in list(element.attrib.items()):
            if key == HREF and value.startswith("#"):
                element.set(key, f"#{new_ids[value[1:]]}")
            elif "url(#" in value:
                element.set(key, ID_REFERENCE.sub(lambda m: f"url(#{new_ids[m[1]]})", value))


def _share_styles(root: Element, name: str) -> None:
    """Turn style declarations that are used more than once into classes."""
    uses = Counter(e.attrib["style"] for e in root.iter() if "style" in e.attrib)
    repeated = [declarations for declarations, count in uses.items() if count > 1]
    classes = {declarations: f"{name}-s{index}" for index, declarations in enumerate(repeated)}
    for element in root.iter():
        if element.get("style") in classes:
            element.set("class", classes[element.attrib.pop("style")])
    sheet = Element(f"{SVG}style")
    sheet.text = "".join(f".{name}{{{declarations}}}" for declarations, name in classes.items())
    root.insert(0, sheet)


def _add_colours_and_margin(root: Element) -> None:
    width, height = (float(root.attrib[side]) + 2 * MARGIN for side in ("width", "height"))
    root.set("viewBox", f"{-MARGIN} {-MARGIN} {width:g} {height:g}")
    root.attrib |= {"width": f"{width:g}", "height": f"{height:g}"}
    root[0].text = f"{style.css_variables()}:root{{background:var(--surface)}}{root[0].text}"
