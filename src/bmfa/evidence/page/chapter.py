"""What an experiment gives to the page: a template, its values, and claims."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bmfa.evidence.page.claims import ClaimTest
from bmfa.evidence.page.record_set import RecordSet


@dataclass(frozen=True)
class Chapter:
    """One section of the page, written as a jinja2 template.

    The template is given `records` (a `RecordSet`), `paper` (the module of the paper's numbers) and what
    `values` returns; it imports `figure`, `table`, `code` and `recorded` from
    `page/templates/macros.html.j2`. A figure is named as in `plots.figure`.

    Attributes:
        name: its anchor.
        title: its heading and its entry in the navigation.
        template: its template in the folder `evidence`, for example "synthetic/synthetic.html.j2".
        experiment: the experiment whose record it needs; without it the page shows the command.
        claims: the claims of the paper that belong to it, for the summary.
        values: returns the values of the template; a `MissingValueError` counts as a missing record.
        command: the command that makes a missing record; by default that of the experiment.
    """

    name: str
    title: str
    template: str
    experiment: str
    claims: Sequence[ClaimTest] = ()
    values: Callable[[RecordSet], Mapping[str, Any]] = lambda records: {}
    command: str = ""
