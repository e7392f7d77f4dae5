"""Writes the page of an exploration: templates and data to one self-contained HTML file."""

import base64
import hashlib
from pathlib import Path
from typing import Any

from bmfa.evidence.explorer.packing import rounded_up
from bmfa.evidence.explorer.run import Exploration
from bmfa.evidence.methods import METHODS
from bmfa.evidence.page import plots
from bmfa.evidence.page.record_set import UNPRINTABLE
from bmfa.packages import load_package

# Rules of the page with the symbol of their threshold, its range on the slider and the first value.
# The ranges reach from nearly all tokens to a single leaf on the scores of DeiT-Tiny.
RULES: dict[str, tuple[str, float, float, float]] = {
    "gamma": ("ε", 1e-5, 10.0, 0.05),
    "gamma-h2": ("ε", 1e-5, 10.0, 0.05),
    "exact-gap": ("ε", 1e-4, 10.0, 0.5),
    "mass": ("share of Z", 1e-6, 1.0, 0.002),
    "optimal": ("price of a leaf", 1e-6, 0.5, 0.002),
}
# The two rules that are compared first: those of the chapters on images.
FIRST_RULES = ("gamma:0.05", "optimal:0.002")
SCRIPTS = ("trees.js", "explorer.js")


def build_explorer(exploration: Exploration, report: str | None = None) -> str:
    """Build the page of one image.

    Args:
        exploration: What `bmfa.evidence.explorer.run.run` returns.
        report: Address of the page of the evidence, for a link back; None for no link.

    Returns:
        The page as text; it loads nothing from other files or hosts.

    Raises:
        ModuleNotFoundError: If jinja2 is missing; the message names the extra.
    """
    jinja2 = load_package("jinja2")
    template = jinja2.Template(
        _read("explorer.html.j2"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    script = "\n".join(_read(name) for name in SCRIPTS)
    # The source of the only script that the browser may run.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    page: str = template.render(
        exploration=exploration,
        rounding=rounded_up(max(row["rounding"] for row in exploration.record.rows)),
        report=report,
        data={
            "image": exploration.image,
            "start": exploration.start,
            "first_rules": FIRST_RULES,
            "rules": [_describe_rule(name) for name in RULES],
            "layers": [layer.to_json() for layer in exploration.layers],
        },
        script=script,
        script_hash=f"'sha256-{digest}'",
        style=plots.STYLE_SHEET + _read("explorer.css"),
    )
    return UNPRINTABLE.sub("\ufffd", page)


def _read(name: str) -> str:
    return (Path(__file__).parent / "templates" / name).read_text(encoding="utf-8")


def _describe_rule(name: str) -> dict[str, Any]:
    method = METHODS[name]
    description = method.description.partition(";")[0]
    return {
        "name": name,
        "title": method.title,
        "description": f"{description[:1].upper()}{description[1:]}",
        "colour": method.mark.colour if method.mark else "ink",
        **dict(zip(("symbol", "least", "most", "first"), RULES[name], strict=True)),
    }
