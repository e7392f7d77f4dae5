"""HTML from data: everything that is not markup is escaped here."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal
from html import escape
from typing import Any

from bmfa.evidence.page.figures import Plot
from bmfa.evidence.page.records import Evidence

NOTHING = "–"
LARGE = 1e15
TINIEST = 1e-12  # what is smaller is the rounding of a zero
SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
OPTION = re.compile(r"(--[a-z-]+)")


@dataclass(frozen=True)
class Column:
    """A column of a table: its head, the decimals of its numbers (None for text), whose they are."""

    head: str
    decimals: int | None = None
    code: bool = False
    paper: bool = False

    @property
    def kind(self) -> str:
        """Its classes, as an attribute; a number of ours has none."""
        classes = ["text"] * (self.decimals is None) + ["paper"] * self.paper
        return f' class="{" ".join(classes)}"' if classes else ""


PAPER_COLUMNS = (
    Column("Paper: mean", 3, paper=True),
    Column("P95", 3, paper=True),
    Column("Leaf %", 3, paper=True),
)


def decimal(value: Any, decimals: int) -> str:
    """A number with so many decimals; anything else as text, nothing as a dash."""
    if value is None:
        return NOTHING
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if not abs(value) < LARGE:
        return f"{value:g}"
    # Halves go up, as in print: 1.5625 is 1.563. What rounds to zero has no sign.
    rounded = Decimal(value).quantize(Decimal(1).scaleb(-decimals), ROUND_HALF_UP)
    return f"{abs(rounded) if rounded == 0 else rounded:,f}".replace("-", "−")


def tiny(value: float | None) -> str:
    """A number that may be very small: three decimals, or its leading digit and its power of ten."""
    if value is None:
        return NOTHING
    if value >= 0.001 or value < TINIEST:
        return decimal(max(value, 0.0), 3)
    digit, _, power = f"{value:.0e}".partition("e")
    return f"{digit}\u00a0×\u00a010{str(int(power)).translate(SUPERSCRIPT)}"


def prose(words: str) -> str:
    """Plain text, with no line broken before a per cent sign."""
    return escape(words).replace(" %", "\u00a0%")


def code(words: str) -> str:
    """Words to be typed; no line is broken inside an option."""
    kept = OPTION.sub(r"<span>\1</span>", escape(words))
    return f"<code>{kept}</code>"


def paragraph(*sentences: str) -> str:
    """Sentences of plain text; empty ones are left out, and a paragraph of none."""
    words = " ".join(sentence for sentence in sentences if sentence)
    return f"<p>{prose(words)}</p>" if words else ""


def table(caption: str, columns: Sequence[Column], rows: Sequence[Sequence[Any]]) -> str:
    """A table that scrolls in its own box where it is too wide for the screen."""
    heads = "".join(
        f'<th scope="col"{column.kind}>{escape(column.head)}</th>' for column in columns
    )
    body = "".join(f"<tr>{_cells(columns, row)}</tr>" for row in rows)
    label = escape(caption, quote=True)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{label}"><table>'
        f"<caption>{escape(caption)}</caption><thead><tr>{heads}</tr></thead>"
        f"<tbody>{body}</tbody></table></div>"
    )


def figure(plot: Plot, evidence: Evidence, caption: str) -> str:
    """A figure for wide and for narrow screens, its caption, and the commands that make it."""
    wide = plot(evidence.records, inline=True)
    narrow = plot(evidence.records, narrow=True, inline=True)
    needed = [experiment for experiment in plot.needs if evidence.has(experiment)]
    return (
        f'<figure id="figure-{plot.name}"><div class="wide">{wide}</div>'
        f'<div class="narrow">{narrow}</div><figcaption>{paragraph(caption)}'
        f"{made_by(evidence, *needed)}</figcaption></figure>"
    )


def made_by(evidence: Evidence, *experiments: str) -> str:
    """The commands that make what stands above."""
    commands = dict.fromkeys(c for name in experiments for c in evidence.commands(name))
    return f'<p class="command">Made by {", ".join(code(command) for command in commands)}</p>'


def details(summary: str, content: str) -> str:
    """Content that opens on request."""
    return f"<details><summary>{escape(summary)}</summary>{content}</details>"


def pairs(values: Mapping[str, Any]) -> str:
    """A list of names and values."""
    items = "".join(
        f"<div><dt>{escape(str(name))}</dt><dd>{escape(str(value))}</dd></div>"
        for name, value in values.items()
    )
    return f"<dl>{items}</dl>"


def _cells(columns: Sequence[Column], row: Sequence[Any]) -> str:
    cells = []
    for index, (column, value) in enumerate(zip(columns, row, strict=True)):
        plain = NOTHING if value is None else str(value)
        words = plain if column.decimals is None else decimal(value, column.decimals)
        shown = code(words) if column.code else escape(words)
        start, end = (
            (f'th scope="row"{column.kind}', "th") if index == 0 else (f"td{column.kind}", "td")
        )
        cells.append(f"<{start}>{shown}</{end}>")
    return "".join(cells)
