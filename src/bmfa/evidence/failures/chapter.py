"""The chapter on where each rule fails."""

from bmfa.evidence.failures import figures
from bmfa.evidence.failures.explanations import explain
from bmfa.evidence.page.blocks import METHOD, Block, Chapter, Column, Table, illustrate, paragraph
from bmfa.evidence.page.record_set import RecordSet, get_number, get_text, unique
from bmfa.records import Row

COLUMNS = (
    METHOD,
    Column("title", "On"),
    Column("gap", "Gap of one mean", 3),
    Column("error", "E", 3),
    Column("leaves", "Leaves", 0),
    Column("better", "Better rule", code=True),
    Column("better_error", "Its E", 3),
    Column("better_leaves", "Its leaves", 0),
    Column("optimal_error", "E of the optimal tree", 3),
    Column("optimal_leaves", "Its leaves", 0),
    Column("why", "Why"),
)


def _failures(records: RecordSet) -> list[Block]:
    searched = records.setting("failures", "searched")
    settings = records.setting("failures", "settings")
    where = "" if searched is None else f"{searched} drawn images and seeded fields"
    return [
        *paragraph(
            "No rule is best everywhere. For every rule, a search over "
            f"{where or 'drawn images and seeded fields'}"
            f"{'' if settings is None else f' and {settings} settings'} finds the one on which "
            "another rule is better by the largest difference in E. The other rule has no more leaves, "
            "at most half of E, and reads no more of the scores than the rule that fails (block means, "
            "if that reads nothing). The optimal tree of no more leaves is shown beside them; optimal "
            "trees do not exist for every number of leaves."
        ),
        *illustrate(
            figures.failures,
            records,
            "Each tree shows the mean score of every leaf; lines are the borders of the leaves. E is "
            "the divergence of the attention of the tree, in nats; the gap is that of one mean. Two "
            "summaries without a tree, the mean and the mean with half of the variance, are shown by "
            "the score that they estimate, and their error is signed.",
        ),
        Table("The same in numbers", COLUMNS, _rows(records), folded="The same in numbers"),
    ]


def _rows(records: RecordSet) -> list[Row]:
    """One row for each rule, with the columns of the other trees added."""
    rows = records.rows("failures")
    joined = []
    for rule in unique(rows, "rule"):
        roles = {get_text(row, "role"): row for row in rows if get_text(row, "rule") == rule}
        fails = roles.get("fails")
        if fails is None:
            continue
        row = {**fails, "why": explain(fails)}
        for role in ("better", "optimal"):
            other = roles.get(role, {})
            row |= {f"{role}_{key}": get_number(other, key) for key in ("error", "leaves")}
        joined.append({**row, "better": get_text(roles.get("better", {}), "method") or None})
    return joined


FAILURES = Chapter("failures", "Where each rule fails", "failures", _failures)
