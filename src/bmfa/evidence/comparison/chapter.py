"""The chapters that tell methods apart: rules at equal leaves, merging policies at equal operations."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bmfa.evidence.comparison.run import BASELINE_RULE
from bmfa.evidence.methods import family
from bmfa.evidence.page import plots
from bmfa.evidence.page.chapter import Chapter
from bmfa.evidence.page.claims import Measured, Verdict, claim
from bmfa.evidence.page.formats import format_number, format_percent, format_small
from bmfa.evidence.page.model_runs import of_family
from bmfa.evidence.page.panels import method_title
from bmfa.evidence.page.record_set import RecordSet, get_number, get_text, need_number, require_any
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


def rules(records: RecordSet) -> Groups:
    """Return the rows of rules by their share of leaves in percent, those with most agreement first."""
    return _grouped(records.rows(EXPERIMENT, kind="rule"), "target_percent")


def policies(records: RecordSet) -> Groups:
    """Return the rows of policies by their baseline, those with most agreement first."""
    return _grouped(records.rows(EXPERIMENT, kind="reduction"), "baseline")


def _grouped(rows: Sequence[Row], key: str) -> Groups:
    groups: dict[Any, list[Row]] = {}
    for row in sorted(
        require_any(row for row in rows if get_number(row, "agreement_percent") is not None),
        key=lambda row: (-need_number(row, "agreement_percent"), need_number(row, "output_kl")),
    ):
        groups.setdefault(row.get(key), []).append(row)
    return dict(sorted(groups.items()))


def _full(records: RecordSet, rows: Sequence[Row]) -> Row:
    """The row of the full model on the images of other rows, or an empty row."""
    return next(iter(records.rows(EXPERIMENT, kind="full", images=rows[0].get("images"))), {})


# Figures


@plots.figure("equal-leaves", EXPERIMENT)
def equal_leaves(records: RecordSet, narrow: bool) -> "Drawing":
    """Agreement, top-1 and IoU of the mask of every rule at equal leaves."""
    titles = {share: f"{format_number(share, 2)} % leaves" for share in rules(records)}
    return _draw(records, rules(records), titles, RULE_MEASURES, narrow)


@plots.figure("equal-operations", EXPERIMENT)
def equal_operations(records: RecordSet, narrow: bool) -> "Drawing":
    """Agreement and IoU of the mask of every merging policy at the operations of ToMe."""
    titles = {}
    for baseline, rows in policies(records).items():
        ours, whole = (get_number(row, "gflops") for row in (rows[0], _full(records, rows)))
        share = 100 * ours / whole if ours and whole else None
        titles[baseline] = f"{baseline}: {format_percent(share, 0)} of the operations"
    return _draw(records, policies(records), titles, POLICY_MEASURES, narrow)


def _draw(
    records: RecordSet,
    groups: Groups,
    titles: Mapping[Any, str],
    measures: Sequence[tuple[str, str]],
    narrow: bool,
) -> "Drawing":
    """Draw a row of panels for each group, a marker for each method."""
    height = 80 + 19 * max(map(len, groups.values()))
    drawing, panels = plots.panels(len(groups) * len(measures), len(measures), narrow, height)
    pairs = [(name, measure) for name in groups for measure in measures]
    for axes, (name, (column, y_label)) in zip(panels, pairs, strict=True):
        full = {"gain_pp": 0.0} | _full(records, groups[name]) | {"agreement_percent": None}
        plots.mark_level(axes, x=get_number(full, column))
        _draw_rows(axes, groups[name], column)
        if column != measures[0][0] and not narrow:
            axes.tick_params(labelleft=False)
        plots.label(axes, titles[name], y_label)
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


@claim(
    "An adaptive tree keeps the model's answers where few leaves are left: agreement of the best tree "
    "minus that of Algorithm 1 at equal leaves, points",
    "not in the paper",
    EXPERIMENT,
)
def _optimal_ahead(records: RecordSet) -> Measured:
    leads = {}
    for share, rows in rules(records).items():
        best, first = (of_family(rows, name) for name in ("optimal", BASELINE_RULE))
        apart = need_number(best, "leaf_percent") - need_number(first, "leaf_percent")
        if abs(apart) <= LEAF_DISTANCE:
            leads[share] = need_number(best, "gain_pp")
    shown = ", ".join(
        f"{format_number(lead, 1)} at {format_number(share, 2)} %" for share, lead in leads.items()
    )
    verdict = Verdict.AHEAD if max(require_any(leads.values())) >= LEAST_LEAD else Verdict.LEVEL
    return shown, verdict, "Embedded model, all layers.", _read(records, "leaves")


@claim(
    "Merging by free energy at equal operations: agreement minus that of ToMe, points",
    "not in the paper",
    EXPERIMENT,
)
def _merging_ahead(records: RecordSet) -> Measured:
    ours = {name: of_family(rows, "free-energy") for name, rows in policies(records).items()}
    keys = ("gain_pp", "gain_low_pp", "gain_high_pp")
    gains = {name: [need_number(row, key) for key in keys] for name, row in ours.items()}
    verdict = Verdict.LEVEL
    if min(high for _, _, high in gains.values()) < 0:
        verdict = Verdict.DIFFERS
    elif min(low for _, low, _ in gains.values()) > 0:
        verdict = Verdict.AHEAD
    shown = ", ".join(
        f"{format_number(gain, 1)} ({format_number(low, 1)} to {format_number(high, 1)}) against {name}"
        for name, (gain, low, high) in gains.items()
    )
    kl = ", ".join(format_small(get_number(row, "output_kl")) for row in ours.values())
    note = f"Embedded model, 95 % intervals; output KL {kl}."
    return shown, verdict, note, _read(records, "baselines")


def _read(records: RecordSet, setting: str) -> list[Record]:
    """The records that compare rules (`leaves`) or merging policies (`baselines`)."""
    return [record for record in records.of(EXPERIMENT) if record.settings.get(setting)]


def _leaves_values(records: RecordSet) -> dict[str, Any]:
    groups = rules(records)
    return {"groups": groups, "full": _full(records, next(iter(groups.values())))}


EQUAL_LEAVES = Chapter(
    "equal-leaves",
    "Rules at equal leaves",
    "comparison/leaves.html.j2",
    EXPERIMENT,
    (_optimal_ahead,),
    _leaves_values,
)
EQUAL_OPERATIONS = Chapter(
    "equal-operations",
    "Merging at equal operations",
    "comparison/operations.html.j2",
    EXPERIMENT,
    (_merging_ahead,),
    lambda records: {"groups": policies(records)},
)
