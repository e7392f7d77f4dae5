"""Builds the page: records to chapters, chapters to one self-contained HTML file."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import PurePath
from typing import Any

from bmfa.evidence.ablation.chapter import ABLATIONS
from bmfa.evidence.bench.chapter import DENSE_PREDICTION, SPEED
from bmfa.evidence.classification.chapter import CLASSIFICATION, REDUCTIONS
from bmfa.evidence.classification.figures import reduction_runs
from bmfa.evidence.closed_loop.chapter import CLOSED_LOOP, LAYERS
from bmfa.evidence.comparison.chapter import EQUAL_LEAVES, EQUAL_OPERATIONS
from bmfa.evidence.failures.chapter import FAILURES
from bmfa.evidence.faster.chapter import FASTER
from bmfa.evidence.images.chapter import IMAGES, INSTANCES
from bmfa.evidence.methods import METHODS, find_method
from bmfa.evidence.page import blocks, paper, plots
from bmfa.evidence.page.blocks import (
    Block,
    Column,
    Commands,
    NotMeasured,
    Properties,
    Table,
    generic_table,
    paragraph,
    recorded_sources,
    with_paper,
)
from bmfa.evidence.page.chapter import Chapter
from bmfa.evidence.page.claims import LEGEND, Claim
from bmfa.evidence.page.formats import format_number, format_percent, format_small
from bmfa.evidence.page.record_set import (
    UNPRINTABLE,
    MissingValueError,
    RecordSet,
    get_text,
    unique,
)
from bmfa.evidence.probes.chapter import PROBES
from bmfa.evidence.synthetic.chapter import SYNTHETIC
from bmfa.packages import load_package
from bmfa.records import Record

TITLE = "What attention loses when blocks become means"
OPENING = (
    "This page measures how much softmax mass attention loses when a block of tokens is replaced by "
    "its mean, how far the adaptive trees of the BMFA paper repair the loss, and which trees do better. "
    "The paper's numbers are shown next to ours."
)


CHAPTERS = (
    *(FASTER, *SYNTHETIC, PROBES, ABLATIONS, INSTANCES, FAILURES, EQUAL_LEAVES),
    *(CLOSED_LOOP, LAYERS, IMAGES, CLASSIFICATION, EQUAL_OPERATIONS, REDUCTIONS),
    *(DENSE_PREDICTION, SPEED),
)


@dataclass(frozen=True)
class Section:
    """A section of the page as the template shows it."""

    name: str
    title: str
    blocks: Sequence[Block]
    in_navigation: bool = True
    html: str = ""


def build_page(records: Sequence[Record], explorer: str | None = None) -> str:
    """Build one self-contained HTML page.

    Args:
        records: records of any experiments. A chapter without its record shows the command that makes
            the record; an experiment without a chapter gets a plain table.
        explorer: address of the explorer of the same run, for a link; None for no link.

    Returns:
        The page as text; it loads nothing from other files or hosts.

    Raises:
        ModuleNotFoundError: if jinja2 or matplotlib is missing; the message names the extra.

    Example:
        >>> page = build_page([])
        >>> page.count("Not measured here") == len(CHAPTERS)
        True
    """
    found = RecordSet(records)
    page: str = (
        _templates()
        .get_template("page/templates/page.html.j2")
        .render(
            title=TITLE,
            opening=OPENING,
            records=found,
            verdict_legend=LEGEND,
            claims=all_claims(found),
            sections=_sections(found),
            explorer=explorer,
            css_variables=plots.css_variables(),
        )
    )
    return UNPRINTABLE.sub("\ufffd", page).replace(" %", "\u00a0%")


def all_claims(records: RecordSet) -> list[Claim]:
    """Test the claims of all chapters in order."""
    return [test(records) for chapter in CHAPTERS for test in chapter.claims]


@cache
def _templates() -> Any:
    """The jinja2 environment with what the templates call; text is escaped by default."""
    jinja2 = load_package("jinja2")
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("bmfa.evidence", ""),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )

    def formatter(form: Callable[..., str]) -> Callable[..., str]:
        """Let a number that a record does not hold be a dash."""

        def format_value(value: Any, *options: Any) -> str:
            return form(None if isinstance(value, jinja2.Undefined) else value, *options)

        return format_value

    environment.filters |= {
        "number": formatter(format_number),
        "percent": formatter(format_percent),
        "small": formatter(format_small),
        "prose": lambda text: text.replace(" %", "\u00a0%"),
        "filled_keys": lambda rows: {key for row in rows for key in row if row[key] is not None},
        "with_paper": lambda rows, points: [
            with_paper(row, points.get(get_text(row, "method"))) for row in rows
        ],
        "recorded_sources": recorded_sources,
    }
    environment.globals |= {"figures": plots.FIGURES, "paper": paper}
    return environment


def _sections(records: RecordSet) -> list[Section]:
    methods = _method_table(records)
    return [
        *([Section("methods", "Methods", [methods], in_navigation=False)] if methods.rows else []),
        *(_section(chapter, records) for chapter in CHAPTERS),
        *_other_experiments(records),
        Section("environment", "Environment and versions", _environment(records)),
    ]


def _section(chapter: blocks.Chapter | Chapter, records: RecordSet) -> Section:
    if isinstance(chapter, blocks.Chapter):
        return Section(chapter.name, chapter.title, chapter.blocks(records))
    try:
        if not records.has(chapter.experiment):
            raise MissingValueError(chapter.experiment)
        values = {"records": records, **chapter.values(records)}
    except MissingValueError:
        command = chapter.command or records.commands(chapter.experiment)[0]
        return Section(chapter.name, chapter.title, [NotMeasured(command)])
    html = _templates().get_template(chapter.template).render(values)
    return Section(chapter.name, chapter.title, [], html=html)


def _method_table(records: RecordSet) -> Table:
    """The methods in the records, with what each does and reads."""
    experiments = ("synthetic", "probe", "closed-loop", "evaluate")
    names = [name for e in experiments for name in unique(records.rows(e), "method")]
    shown = {method.name for name in names if (method := find_method(name)) is not None}
    return Table(
        "The methods; the number after a name is its threshold, depth, price, probability or budget",
        [
            Column("name", "Name", code=True),
            Column("description", "Description"),
            Column("reads", "Reads"),
        ],
        [
            vars(method)
            for method in METHODS.values()
            if method.name in shown and method.kind != "full"
        ],
    )


def _other_experiments(records: RecordSet) -> list[Section]:
    """A plain table for every experiment that has no chapter."""
    known = {chapter.experiment for chapter in CHAPTERS} | {"gallery", "blocks"}
    known |= (
        {"reduction"} if reduction_runs(records) else set()
    )  # part of the chapter on reductions
    others = dict.fromkeys(r.experiment for r in records.records if r.experiment not in known)
    sections = []
    for index, experiment in enumerate(others):
        title = experiment.capitalize()
        shown: list[Block] = [
            generic_table(title, records.rows(experiment)),
            Commands(records.commands(experiment)),
        ]
        sections.append(Section(f"record-{index}", title, shown))
    return sections


def _environment(records: RecordSet) -> list[Block]:
    """The environment of every record, equal ones together, and the settings of every record."""
    if not records.records:
        return paragraph("There are no records.")
    environments: dict[str, tuple[Mapping[str, Any], list[str]]] = {}
    for record in records.records:
        key = repr(sorted(record.environment.items(), key=str))
        environments.setdefault(key, (record.environment, []))[1].append(record.experiment)
    columns = (Column("record", "Record"), Column("settings", "Settings"))
    rows = [
        {"record": record.experiment, "settings": _describe_settings(record.settings)}
        for record in records.records
    ]
    return [
        *(
            Properties(", ".join(dict.fromkeys(experiments)), environment)
            for environment, experiments in environments.values()
        ),
        Table("Settings of the records", columns, rows),
    ]


def _describe_settings(settings: Mapping[str, Any]) -> str:
    shown = {name: value for name, value in settings.items() if value not in (None, {}, [])}
    return ", ".join(f"{name} = {_describe(value)}" for name, value in shown.items())


def _describe(value: Any) -> str:
    """A setting in words; of an absolute path only the last part."""
    if isinstance(value, Mapping):
        if set(value) == {"instances", "names"}:
            return str(value["instances"])
        return f"({', '.join(f'{name}: {_describe(item)}' for name, item in value.items())})"
    if isinstance(value, list | tuple):
        return " ".join(_describe(item) for item in value)
    return PurePath(value).name if str(value).startswith("/") else str(value)
