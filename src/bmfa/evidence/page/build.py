"""Builds the page: records to chapters, chapters to one self-contained HTML file."""

import tomllib
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from bmfa.evidence.methods import METHODS, find_method
from bmfa.evidence.page import plots
from bmfa.evidence.page.claims import TEXTS, Claim, Verdict, judge
from bmfa.evidence.page.record_set import UNPRINTABLE, MissingValueError, RecordSet, unique
from bmfa.evidence.page.rendering import VALUES, templates
from bmfa.packages import load_package
from bmfa.records import Record

TITLE = "What attention loses when blocks become means"
CHAPTERS: Mapping[str, Mapping[str, str]] = tomllib.loads(
    Path(__file__).with_name("chapters.toml").read_text("utf-8")
)
for _folder in {chapter["template"].partition("/")[0] for chapter in CHAPTERS.values()}:
    import_module(f"bmfa.evidence.{_folder}.chapter")  # registers figures, claims and values
FIGURES = plots.FIGURES  # those of all chapters


def build_page(
    records: Sequence[Record], explorer: str | None = None, *, only_measured: bool = False
) -> str:
    """Build one self-contained HTML page.

    Args:
        records: records of any experiments. A chapter without its record shows the command that makes
            the record; an experiment without a chapter gets a plain table.
        explorer: address of the explorer of the same run, for a link; None for no link.
        only_measured: leave out the chapters and the claims that the records do not hold.

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
    claims, chapters = all_claims(found), {name: _chapter(name, found) for name in CHAPTERS}
    if only_measured:
        claims = [claim for claim in claims if claim.verdict is not Verdict.NOT_MEASURED]
        chapters = {name: html for name, html in chapters.items() if html}
    known = {chapter["experiment"] for chapter in CHAPTERS.values()} | {"gallery", "blocks"}
    known |= {"reduction"} if found.has("evaluate") else set()  # a part of that chapter
    page: str = (
        templates()
        .get_template("page/templates/page.html.j2")
        .render(
            title=TITLE,
            records=found,
            claims=claims,
            methods=_methods(found),
            chapters=[(name, CHAPTERS[name], html) for name, html in chapters.items()],
            others=dict.fromkeys(r.experiment for r in records if r.experiment not in known),
            environments=_environments(records),
            explorer=explorer,
        )
    )
    return UNPRINTABLE.sub("\ufffd", page).replace(" %", "\u00a0%")


def all_claims(records: RecordSet) -> list[Claim]:
    """Return the claims of all chapters in order."""
    return [judge(name, records) for name in TEXTS]


def _chapter(name: str, records: RecordSet) -> str:
    """The chapter as HTML, "" if the records do not hold what it shows."""
    template, experiment = CHAPTERS[name]["template"], CHAPTERS[name]["experiment"]
    if not records.has(experiment):
        return ""
    try:
        values = {"records": records, **(VALUES[name](records) if name in VALUES else {})}
    except MissingValueError:
        return ""
    try:
        return str(templates().get_template(template).render(values))
    except load_package("jinja2").UndefinedError as error:
        raise ValueError(f"the records of {experiment} lack a column: {error}") from error


def _methods(records: RecordSet) -> list[dict[str, Any]]:
    """The methods in the records."""
    experiments = ("synthetic", "probe", "closed-loop", "evaluate")
    names = [name for e in experiments for name in unique(records.rows(e), "method")]
    shown = {method.name for name in names if (method := find_method(name)) is not None}
    return [vars(m) for m in METHODS.values() if m.name in shown and m.kind != "full"]


def _environments(records: Sequence[Record]) -> list[tuple[str, Mapping[str, Any]]]:
    """Every environment with the experiments that ran in it."""
    found: dict[str, list[Record]] = {}
    for record in records:
        found.setdefault(repr(sorted(record.environment.items(), key=str)), []).append(record)
    return [
        (", ".join(dict.fromkeys(record.experiment for record in same)), same[0].environment)
        for same in found.values()
    ]
