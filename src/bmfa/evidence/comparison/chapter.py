"""The chapters that tell methods apart: rules at equal leaves, merging policies at equal operations."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bmfa.evidence.comparison.run import BASELINE_RULE
from bmfa.evidence.methods import family
from bmfa.evidence.page import plots
from bmfa.evidence.page.claims import Measured, Verdict, claim
from bmfa.evidence.page.formats import format_number, format_percent
from bmfa.evidence.page.model_runs import of_family
from bmfa.evidence.page.panels import method_title
from bmfa.evidence.page.record_set import RecordSet, get_number, get_text, need_number, require_any
from bmfa.evidence.page.rendering import chapter_values
from bmfa.records import Record, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Drawing

EXPERIMENT = "comparison"
LEAST_LEAD = 10.0  # points of agreement by which the optimal tree is expected to lead
LEAF_DISTANCE = 2.0  # points of leaves within which two rules count as equal
IOU = ("mask_iou", "mask IoU; line: full model")
# Columns of the rows with their axis labels.
RULE_MEASURES = (
    ("agreement_percent", "agreement with the full model, %"),
    ("top1_percent", "top-1, %; line: full model"),
    IOU,
)
POLICY_MEASURES = (("gain_pp", "agreement minus that of ToMe, points, 95 % interval"), IOU)
Groups = Mapping[Any, list[Row]]


@chapter_values("equal-leaves")
def leaves_values(records: RecordSet) -> dict[str, Any]:
    """Return the rows of rules by their share of leaves in percent, and that of the full model."""
    groups = _grouped(records, "rule", "target_percent")
    return {"groups": groups, "full": _full(records, next(iter(groups.values())))}


@chapter_values("equal-operations")
def operations_values(records: RecordSet) -> dict[str, Any]:
    """Return the rows of policies by their baseline."""
    return {"groups": _grouped(records, "reduction", "baseline")}


def _grouped(records: RecordSet, kind: str, key: str) -> Groups:
    """The rows of a kind by a column, those with most agreement first."""
    rows = require_any(
        row
        for row in records.rows(EXPERIMENT, kind=kind)
        if get_number(row, "agreement_percent") is not None
    )
    rows.sort(key=lambda row: (-row["agreement_percent"], need_number(row, "output_kl")))
    return {
        value: [row for row in rows if row[key] == value]
        for value in sorted({row[key] for row in rows})
    }


def _full(records: RecordSet, rows: Sequence[Row]) -> Row:
    """The row of the full model on the images of other rows, or an empty row."""
    return next(iter(records.rows(EXPERIMENT, kind="full", images=rows[0].get("images"))), {})


# Figures


@plots.figure("equal-leaves", EXPERIMENT)
def equal_leaves(records: RecordSet, narrow: bool) -> "Drawing":
    """Agreement, top-1 and IoU of the mask of every rule at equal leaves."""
    groups = _grouped(records, "rule", "target_percent")
    titles = [f"{format_number(share, 2)} % leaves" for share in groups]
    return _draw(records, groups, titles, RULE_MEASURES, narrow)


@plots.figure("equal-operations", EXPERIMENT)
def equal_operations(records: RecordSet, narrow: bool) -> "Drawing":
    """Agreement and IoU of the mask of every merging policy at the operations of ToMe."""
    groups = _grouped(records, "reduction", "baseline")
    titles = []
    for baseline, rows in groups.items():
        ours, whole = (get_number(row, "gflops") for row in (rows[0], _full(records, rows)))
        share = format_percent(100 * ours / whole if ours and whole else None, 0)
        titles.append(f"{baseline}: {share} of the operations")
    return _draw(records, groups, titles, POLICY_MEASURES, narrow)


def _draw(
    records: RecordSet,
    groups: Groups,
    titles: Sequence[str],
    measures: Sequence[tuple[str, str]],
    narrow: bool,
) -> "Drawing":
    """Draw a row of panels for each group, a marker for each method."""
    height = 80 + 19 * max(map(len, groups.values()))
    drawing, all_axes = plots.panels(len(groups) * len(measures), len(measures), narrow, height)
    shown = zip(titles, groups.values(), strict=True)
    pairs = [(title, rows, measure) for title, rows in shown for measure in measures]
    for axes, (title, rows, (column, y_label)) in zip(all_axes, pairs, strict=True):
        plots.set_axes(axes, title, y_label)
        full = {"gain_pp": 0.0} | _full(records, rows) | {"agreement_percent": None}
        plots.mark_level(axes, x=get_number(full, column))
        _draw_rows(axes, rows, column)
        if column != measures[0][0] and not narrow:
            axes.tick_params(labelleft=False)
    return drawing


def _draw_rows(axes: "Axes", rows: Sequence[Row], column: str) -> None:
    """Draw one marker for each row from top to bottom, a gain with its interval."""
    for index, row in enumerate(rows):
        method = get_text(row, "method")
        if column == "gain_pp":
            colour = plots.LIGHT[plots.method_mark(method).colour]
            interval = [need_number(row, name) for name in ("gain_low_pp", "gain_high_pp")]
            axes.plot(interval, [index, index], color=colour, linewidth=1.6)
        plots.draw_point(axes, family(method), get_number(row, column), index)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_yticks(range(len(rows)), [method_title(row) for row in rows])
    axes.margins(x=0.08)


# Claims


@claim("optimal-ahead")
def optimal_ahead(records: RecordSet) -> Measured:
    leads = {}
    for share, rows in _grouped(records, "rule", "target_percent").items():
        best, first = (of_family(rows, name) for name in ("optimal", BASELINE_RULE))
        apart = need_number(best, "leaf_percent") - need_number(first, "leaf_percent")
        if abs(apart) <= LEAF_DISTANCE:
            leads[share] = need_number(best, "gain_pp")
    verdict = Verdict.AHEAD if max(require_any(leads.values())) >= LEAST_LEAD else Verdict.LEVEL
    return verdict, {"leads": leads}, _read(records, "leaves")


@claim("merging-ahead")
def merging_ahead(records: RecordSet) -> Measured:
    groups = _grouped(records, "reduction", "baseline")
    rows = {baseline: of_family(found, "free-energy") for baseline, found in groups.items()}
    verdict = Verdict.LEVEL
    if min(need_number(row, "gain_high_pp") for row in rows.values()) < 0:
        verdict = Verdict.DIFFERS
    elif min(need_number(row, "gain_low_pp") for row in rows.values()) > 0:
        verdict = Verdict.AHEAD
    return verdict, {"rows": rows}, _read(records, "baselines")


def _read(records: RecordSet, setting: str) -> list[Record]:
    """The records that compare rules (`leaves`) or merging policies (`baselines`)."""
    return [record for record in records.of(EXPERIMENT) if record.settings.get(setting)]
