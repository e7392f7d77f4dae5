"""The chapter on where each rule fails."""

from typing import Any

from bmfa.evidence.failures.explanations import explain
from bmfa.evidence.page.chapter import Chapter
from bmfa.evidence.page.panels import group
from bmfa.evidence.page.record_set import RecordSet, get_text
from bmfa.records import Row


def values(records: RecordSet) -> dict[str, Any]:
    """Return one row for each rule, with the columns of the other trees added."""
    joined: list[Row] = []
    for rows in group(records.rows("failures"), "rule"):
        roles = {get_text(row, "role"): row for row in rows}
        others = {
            f"{role}_{key}": roles[role][key]
            for role in ("better", "optimal")
            for key in ("method", "error", "leaves")
            if role in roles
        }
        joined.append({**roles["fails"], **others, "why": explain(roles["fails"])})
    return {"rows": joined}


FAILURES = Chapter(
    "failures", "Where each rule fails", "failures/failures.html.j2", "failures", values=values
)
