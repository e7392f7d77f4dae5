"""The jinja2 environment of all templates of the page: numbers as text, rows beside the paper's."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import PurePath
from typing import Any

from bmfa.evidence.failures.explanations import explain
from bmfa.evidence.methods import family
from bmfa.evidence.page import paper, plots
from bmfa.evidence.page.formats import format_number, format_percent, format_small
from bmfa.evidence.page.model_runs import of_family
from bmfa.evidence.page.origins import describe_data, recorded_sources
from bmfa.evidence.page.panels import group
from bmfa.evidence.page.record_set import RecordSet, get_text
from bmfa.packages import load_package
from bmfa.records import Row

Values = Callable[[RecordSet], Mapping[str, Any]]
# Functions of the records that return further values for the template of a chapter, by its name; one
# that raises MissingValueError does not find its record. Filled by the chapters.
VALUES: dict[str, Values] = {}


def chapter_values(chapter: str) -> Callable[[Values], Values]:
    """Decorate the function that returns the values of a chapter."""

    def register(function: Values) -> Values:
        VALUES[chapter] = function
        return function

    return register


@cache
def templates() -> Any:
    """Return the environment of the templates in the folder `evidence`; text is escaped."""
    jinja2 = load_package("jinja2")
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("bmfa.evidence", ""),
        extensions=["jinja2.ext.do"],
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
        "filled_keys": filled_keys,
        "pivot": pivot,
        "with_paper": beside_paper,
        "family": lambda row: family(get_text(row, "method")),
        "of_family": of_family,
        "group": group,
        "explain": explain,
        "dataset_title": paper.dataset_title,
        "describe_data": describe_data,
        "describe_setting": describe_setting,
        "recorded_sources": recorded_sources,
    }
    environment.globals |= {"figures": plots.FIGURES, "paper": paper}
    return environment


def sentence(source: str) -> Any:
    """Return the template of a sentence of plain text."""
    return templates().overlay(autoescape=False).from_string(source)


def filled_keys(rows: Sequence[Row]) -> list[str]:
    """Return the keys that have a value in any row, in order of first appearance."""
    return list(dict.fromkeys(key for row in rows for key in row if row[key] is not None))


def pivot(rows: Sequence[Row], index: str, columns: str, values: str) -> list[Row]:
    """Return a row for each value of `index`, with a number from `values` for each of `columns`."""
    found: dict[str, Row] = {}
    for row in rows:
        name = get_text(row, index)
        found.setdefault(name, {index: name})[get_text(row, columns)] = row.get(values)
    return list(found.values())


def beside_paper(rows: Sequence[Row], points: Mapping[str, Any]) -> list[Row]:
    """Return the rows with the paper's numbers for their methods."""
    return [paper.beside(row, points.get(get_text(row, "method"))) for row in rows]


def describe_setting(value: Any) -> str:
    """Return a setting in words; of an absolute path only the last part."""
    if isinstance(value, Mapping):
        if "instances" in value and "names" in value:
            return str(value["instances"])
        return f"({', '.join(f'{name}: {describe_setting(item)}' for name, item in value.items())})"
    if isinstance(value, list | tuple):
        return " ".join(map(describe_setting, value))
    return PurePath(value).name if str(value).startswith("/") else str(value)
