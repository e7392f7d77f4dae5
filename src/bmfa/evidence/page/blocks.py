"""The building blocks of a chapter; templates/blocks.html.j2 has one macro for each."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from bmfa.evidence.page.canvas import Figure
from bmfa.evidence.page.claims import ClaimTest
from bmfa.evidence.page.formats import format_number, format_small
from bmfa.evidence.page.origins import recorded_sources
from bmfa.evidence.page.record_set import MissingValueError, RecordSet
from bmfa.records import Record, Row


@dataclass(frozen=True)
class Paragraph:
    """A paragraph: an optional bold lead, and text. `style` is a class of page.css."""

    macro: ClassVar[str] = "paragraph"
    text: str
    lead: str = ""
    style: str = ""


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        key: key of its values in the rows; the paper's numbers have keys that start with `paper_`.
        title: its heading.
        decimals: digits after the point; None for text.
        code: True for text that is typed on the command line.
        small: True for numbers that may need a power of ten.
    """

    key: str
    title: str
    decimals: int | None = None
    code: bool = False
    small: bool = False

    @property
    def css_class(self) -> str:
        """The classes of its cells in page.css."""
        paper = self.key.startswith("paper_")
        return " ".join(["text"] * (self.decimals is None) + ["paper"] * paper)

    def format(self, value: Any) -> str:
        """Format one value of the column."""
        return format_small(value) if self.small else format_number(value, self.decimals)


METHOD = Column("method", "Method", code=True)
PAPER_GAP_COLUMNS = (
    Column("paper_mean_gap", "Paper: mean", 3),
    Column("paper_p95_gap", "P95", 3),
    Column("paper_leaf_percent", "Leaf %", 3),
)


@dataclass(frozen=True)
class Table:
    """A table that scrolls sideways on a narrow screen; `folded` is the summary of a closed one."""

    macro: ClassVar[str] = "table"
    caption: str
    columns: Sequence[Column]
    rows: Sequence[Mapping[str, Any]]
    folded: str = ""


@dataclass(frozen=True)
class Illustration:
    """A figure for wide and for narrow screens, its caption and the commands that make its data."""

    macro: ClassVar[str] = "illustration"
    name: str
    wide_svg: str
    narrow_svg: str
    caption: str
    commands: Sequence[str]


@dataclass(frozen=True)
class Commands:
    """The commands that make what is shown above."""

    macro: ClassVar[str] = "commands"
    commands: Sequence[str]


@dataclass(frozen=True)
class NotMeasured:
    """The command that makes what a chapter needs."""

    macro: ClassVar[str] = "not_measured"
    command: str


@dataclass(frozen=True)
class Properties:
    """A list of names and values under a heading."""

    macro: ClassVar[str] = "properties"
    heading: str
    values: Mapping[str, Any]


Block = Paragraph | Table | Illustration | Commands | NotMeasured | Properties


@dataclass(frozen=True)
class Chapter:
    """One section of the page.

    Attributes:
        name: its anchor.
        title: its heading and its entry in the navigation.
        experiment: the experiment whose record it needs.
        content: returns its blocks; not called without the record.
        claims: tests the claims of the paper that belong to it, for the summary.
        select: returns the records that it shows; by default all.
        command: the command that makes the missing record; by default that of the experiment.
    """

    name: str
    title: str
    experiment: str
    content: Callable[[RecordSet], list[Block]]
    claims: Sequence[ClaimTest] = ()
    select: Callable[[RecordSet], RecordSet] = lambda records: records
    command: str = ""

    def blocks(self, records: RecordSet) -> list[Block]:
        """Return the content, or the command that makes the missing record."""
        records = self.select(records)
        if records.has(self.experiment):
            return [*self.content(records), *_recorded_data(records.of(self.experiment))]
        return [NotMeasured(self.command or records.commands(self.experiment)[0])]


def _recorded_data(records: Sequence[Record]) -> "list[Block]":
    """A sentence on the records of a chapter that came with the library, if there are any."""
    sources = recorded_sources(records)
    replaced = " or ".join(sources["commands"])
    return paragraph(
        f"{'; '.join(sources['names'])}." if sources["names"] else "",
        f"{replaced} shows your own instead." if replaced else "",
        lead="Recorded, not run with this page.",
    )


def paragraph(*sentences: str, lead: str = "", style: str = "") -> list[Block]:
    """Join sentences into a paragraph, empty ones left out; no block if all are empty."""
    text = " ".join(sentence for sentence in sentences if sentence)
    return [Paragraph(text, lead, style)] if text else []


def describe(write: Callable[..., str], *arguments: Any) -> str:
    """Return write(*arguments), or "" if the records lack a number that the sentence needs."""
    try:
        return write(*arguments)
    except MissingValueError:
        return ""


def illustrate(figure: Figure, records: RecordSet, caption: str) -> list[Block]:
    """Draw a figure for the page; no block if the records do not hold its data."""
    if not figure.available(records):
        return []
    wide, narrow = (figure(records.records, narrow=n, inline=True) for n in (False, True))
    commands = records.commands(*(name for name in figure.needs if records.has(name)))
    return [Illustration(figure.name, wide, narrow, caption, commands)]


# Values of rows that do not fit into a cell.
LONG_VALUES = (
    *("scores", "boxes", "image", "gap_quantiles"),
    *("attention", "screened_attention"),
)


def generic_table(caption: str, rows: Sequence[Row]) -> Table:
    """Return a table of all values of rows, for experiments without a table of their own."""
    columns = []
    for key in dict.fromkeys(key for row in rows for key in row if row[key] is not None):
        values = [row[key] for row in rows if row.get(key) is not None]
        decimals: int | None = None
        if all(isinstance(value, int | float) for value in values):
            decimals = 0 if all(isinstance(value, int) for value in values) else 3
        if key not in LONG_VALUES:
            title = key.replace("_", " ")
            columns.append(Column(key, title, decimals, code=key == "method"))
    return Table(caption, columns, rows)


def with_paper(row: Row, point: Any) -> Row:
    """Return a row with the numbers of a point of the paper added under keys `paper_...`."""
    printed = {} if point is None else vars(point)
    return {**row, **{f"paper_{key}": value for key, value in printed.items()}}
