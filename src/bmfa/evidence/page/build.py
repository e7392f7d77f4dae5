"""Builds the page: records to chapters, chapters to one self-contained HTML file."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import PurePath
from typing import Any

from bmfa.evidence.ablation.chapter import ABLATIONS
from bmfa.evidence.bench.chapter import DENSE_PREDICTION, SPEED
from bmfa.evidence.classification.chapter import CLASSIFICATION, REDUCTIONS
from bmfa.evidence.closed_loop.chapter import CLOSED_LOOP, LAYERS
from bmfa.evidence.comparison.chapter import EQUAL_LEAVES, EQUAL_OPERATIONS
from bmfa.evidence.failures.chapter import FAILURES
from bmfa.evidence.faster.chapter import FASTER
from bmfa.evidence.images import figures as _  # noqa: F401 - draws what the chapters show
from bmfa.evidence.images.chapter import IMAGES, INSTANCES
from bmfa.evidence.methods import METHODS, find_method
from bmfa.evidence.page import paper, plots
from bmfa.evidence.page.chapter import Chapter
from bmfa.evidence.page.claims import Claim
from bmfa.evidence.page.formats import format_number, format_percent, format_small
from bmfa.evidence.page.model_runs import of_family
from bmfa.evidence.page.origins import describe_data, recorded_sources
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
from bmfa.records import Record, Row

TITLE = "What attention loses when blocks become means"
CHAPTERS = (
    *(FASTER, *SYNTHETIC, PROBES, ABLATIONS, INSTANCES, FAILURES, EQUAL_LEAVES),
    *(CLOSED_LOOP, LAYERS, IMAGES, CLASSIFICATION, EQUAL_OPERATIONS, REDUCTIONS),
    *(DENSE_PREDICTION, SPEED),
)
FIGURES = plots.FIGURES  # those of all chapters
# Values of rows that do not fit into a cell.
LONG_VALUES = {"scores", "boxes", "image", "gap_quantiles", "attention", "screened_attention"}


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
    known = {chapter.experiment for chapter in CHAPTERS} | {"gallery", "blocks"}
    known |= {"reduction"} if found.has("evaluate") else set()  # a part of that chapter
    page: str = (
        _templates()
        .get_template("page/templates/page.html.j2")
        .render(
            title=TITLE,
            records=found,
            claims=all_claims(found),
            methods=_methods(found),
            chapters=[(chapter, _chapter(chapter, found)) for chapter in CHAPTERS],
            others=dict.fromkeys(r.experiment for r in records if r.experiment not in known),
            environments=_environments(records),
            explorer=explorer,
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

    def or_dash(form: Callable[..., str]) -> Callable[..., str]:
        """Let a number that a record does not hold be a dash."""
        return lambda value, *options: form(
            None if isinstance(value, jinja2.Undefined) else value, *options
        )

    environment.filters |= {
        "number": or_dash(format_number),
        "percent": or_dash(format_percent),
        "small": or_dash(format_small),
        "filled_keys": lambda rows: {key for row in rows for key in row if row[key] is not None},
        "with_paper": lambda rows, points: [
            paper.beside(row, points.get(get_text(row, "method"))) for row in rows
        ],
        "of_family": of_family,
        "describe_data": describe_data,
        "describe_settings": _describe_settings,
        "recorded_sources": recorded_sources,
        "columns_of": _columns_of,
    }
    environment.globals |= {"figures": FIGURES, "paper": paper}
    return environment


def _chapter(chapter: Chapter, records: RecordSet) -> str:
    """The chapter as HTML, "" if the records do not hold what it shows."""
    if not records.has(chapter.experiment):
        return ""
    try:
        values = {"records": records, **chapter.values(records)}
    except MissingValueError:
        return ""
    try:
        return str(_templates().get_template(chapter.template).render(values))
    except load_package("jinja2").UndefinedError as error:
        raise ValueError(f"the records of {chapter.experiment} lack a column: {error}") from error


def _methods(records: RecordSet) -> list[dict[str, Any]]:
    """The methods in the records."""
    experiments = ("synthetic", "probe", "closed-loop", "evaluate")
    names = [name for e in experiments for name in unique(records.rows(e), "method")]
    shown = {method.name for name in names if (method := find_method(name)) is not None}
    return [vars(m) for m in METHODS.values() if m.name in shown and m.kind != "full"]


def _columns_of(rows: Sequence[Row]) -> list[tuple[str, str, str]]:
    """The columns of a table of all values of rows, for experiments without a chapter."""
    keys = dict.fromkeys(key for row in rows for key in row if key not in LONG_VALUES)
    forms = {"method": "code"}
    return [(key, key.replace("_", " "), forms.get(key, "text")) for key in keys]


def _environments(records: Sequence[Record]) -> list[tuple[str, Mapping[str, Any]]]:
    """Every environment with the experiments that ran in it."""
    found: dict[str, list[Record]] = {}
    for record in records:
        found.setdefault(repr(sorted(record.environment.items(), key=str)), []).append(record)
    return [
        (", ".join(dict.fromkeys(record.experiment for record in same)), same[0].environment)
        for same in found.values()
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
