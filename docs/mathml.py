"""A Markdown extension: fences of the language `math` and inline code in dollars become MathML.

GitHub renders both notations. Browsers draw MathML without a script.
"""

from typing import Any
from xml.etree.ElementTree import Element

from latex2mathml.converter import convert
from markdown import Markdown
from markdown.extensions import Extension
from markdown.inlinepatterns import InlineProcessor

INLINE = r"\$`([^`]+)`\$"
BEFORE_CODE = 195  # the priority of inline code is 190


def mathml(tex: str, display: str = "inline") -> str:
    """Return a formula as MathML."""
    return str(convert(tex.strip().replace("{aligned}", "{align*}"), display=display))


def block(source: str, language: str, css_class: str, options: Any, md: Any, **_: Any) -> str:
    """Return the formula of a fence, as `pymdownx.superfences` asks for it."""
    return f'<div class="math">{mathml(source, "block")}</div>'


class Inline(InlineProcessor):
    """Formulas in the line."""

    def handleMatch(self, match: Any, data: str) -> tuple[str | Element, int, int]:  # noqa: N802
        return self.md.htmlStash.store(mathml(match[1])), match.start(), match.end()


class MathML(Extension):
    """The extension that mkdocs.yml names."""

    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802
        md.inlinePatterns.register(Inline(INLINE, md), "mathml", BEFORE_CODE)


def on_config(config: Any) -> Any:
    """Add the extension and the fence to the configuration of mkdocs."""
    config.markdown_extensions.append(MathML())
    fence = {"name": "math", "class": "math", "format": block}
    config.mdx_configs["pymdownx.superfences"] = {"custom_fences": [fence]}
    return config
