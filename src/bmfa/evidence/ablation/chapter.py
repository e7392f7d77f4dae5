"""The chapter on the ablations of Algorithm 1, and the claims of the paper on them."""

from collections.abc import Sequence
from itertools import pairwise

from bmfa.evidence.ablation import figures
from bmfa.evidence.page import paper
from bmfa.evidence.page.blocks import (
    Block,
    Chapter,
    Column,
    Table,
    describe,
    illustrate,
    paragraph,
    with_paper,
)
from bmfa.evidence.page.claims import Verdict, claim, judge_direction
from bmfa.evidence.page.formats import format_number, format_numbers
from bmfa.evidence.page.record_set import RecordSet, command_for, get_number, get_text
from bmfa.records import Row

COLUMNS = (
    Column("parameter", "Parameter"),
    Column("value_text", "Value", 0),
    Column("mean_gap", "Mean gap", 3),
    Column("leaf_percent", "Leaf %", 3),
    Column("microseconds_per_instance", "µs", 1),
    Column("paper_mean_gap", "Paper: mean gap", 3),
    Column("paper_leaf_percent", "Leaf %", 2),
    Column("paper_milliseconds", "ms", 3),
)


def _content(records: RecordSet) -> list[Block]:
    dataset = paper.dataset_title(str(records.setting("ablation", "dataset") or ""))
    return [
        *paragraph(
            "One parameter of Algorithm 1 is changed at a time. The others are ε = 0.005, full depth, "
            "16 × 16 cells and a look-ahead of one level.",
            f"Data: {dataset}." if dataset else "",
            describe(_lookahead, records),
        ),
        *illustrate(
            figures.ablation,
            records,
            "A smaller threshold lowers the error and increases the number of leaves. Rings are the "
            "paper's numbers on COCO; its run times are from another machine and from code that "
            "processes one instance at a time.",
        ),
        Table("Ablations", COLUMNS, [_table_row(row) for row in records.rows("ablation")]),
    ]


def _lookahead(records: RecordSet) -> str:
    one, two = _values(records, "lookahead", (1, 2))
    if two >= one:
        return ""
    return (
        f"Looking two levels down instead of one reduces the mean gap from {format_number(one)} to "
        f"{format_number(two)}; the paper leaves this to future work."
    )


def _table_row(row: Row) -> Row:
    key = (get_text(row, "parameter"), get_number(row, "value") or 0.0)
    return {**with_paper(row, paper.ABLATION.get(key)), "value_text": get_text(row, "value")}


def _values(
    records: RecordSet, parameter: str, values: Sequence[float], column: str = "mean_gap"
) -> list[float]:
    return [records.value("ablation", column, parameter=parameter, value=v) for v in values]


def _printed(parameter: str, values: Sequence[float]) -> str:
    return format_numbers(*(paper.ABLATION[parameter, value].mean_gap for value in values))


def _decreases(values: Sequence[float]) -> bool:
    return all(after < before for before, after in pairwise(values))


COMMAND = command_for("ablation")


def _threshold_words(gaps: Sequence[float], leaves: Sequence[float | None]) -> str:
    first, last = (format_number(leaf, 2) for leaf in leaves)
    return f"{format_number(gaps[0])} to {format_number(gaps[1])}, {first} to {last} %"


THRESHOLDS = (0.05, 0.001)
POINTS = [paper.ABLATION["epsilon", value] for value in THRESHOLDS]


@claim(
    "Threshold 0.05 to 0.001: mean gap and leaf ratio",
    _threshold_words([p.mean_gap for p in POINTS], [p.leaf_percent for p in POINTS]),
    COMMAND,
)
def _threshold(records: RecordSet) -> tuple[str, Verdict, str]:
    gaps = _values(records, "epsilon", THRESHOLDS)
    leaves = _values(records, "epsilon", THRESHOLDS, "leaf_percent")
    verdict = judge_direction(_decreases(gaps) and _decreases(leaves[::-1]))
    return _threshold_words(gaps, leaves), verdict, _data_note(records)


def _data_note(records: RecordSet) -> str:
    dataset = str(records.setting("ablation", "dataset") or "")
    rows = records.rows("ablation", parameter="epsilon", value=0.005)
    count = get_number(rows[-1], "instances") if rows else None
    instances = "" if count is None else f" on {count:,.0f} instances"
    return (
        f"Measured{instances} of {paper.dataset_title(dataset) or 'one source'}, scores from our fit. "
        "The paper's numbers are for COCO, so only the trend is comparable."
    )


@claim(
    "Depth 5 changes nothing on a 16 × 16 grid: mean gap at depth 4 and 5",
    _printed("depth", (4, 5)),
    COMMAND,
)
def _depth(records: RecordSet) -> tuple[str, Verdict, str]:
    gaps = _values(records, "depth", (4, 5))
    note = "True on any data: the leaves at depth 4 are single tokens, which cannot be split."
    return format_numbers(*gaps), judge_direction(gaps[0] == gaps[1]), note


@claim(
    "A finer grid has fewer leaves and loses more: mean gap at 8, 16 and 32 cells",
    _printed("grid", (8, 16, 32)),
    COMMAND,
)
def _grid(records: RecordSet) -> tuple[str, Verdict, str]:
    gaps = _values(records, "grid", (8, 16, 32))
    return format_numbers(*gaps), judge_direction(_decreases(gaps[::-1])), _data_note(records)


@claim(
    "Screening one instance at the default threshold",
    f"{format_number(1000 * (paper.ABLATION['epsilon', 0.005].milliseconds or 0.0), 0)} µs",
    COMMAND,
)
def _run_time(records: RecordSet) -> tuple[str, Verdict, str]:
    (ours,) = _values(records, "epsilon", (0.005,), "microseconds_per_instance")
    note = (
        "Another machine and other code: a batch in torch here, one instance at a time in NumPy in "
        "the paper."
    )
    return f"{format_number(ours, 0)} µs", Verdict.NOT_COMPARABLE, note


ABLATIONS = Chapter(
    "ablations", "Ablations", "ablation", _content, (_threshold, _depth, _grid, _run_time)
)
