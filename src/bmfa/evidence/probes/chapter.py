"""The chapter on the instance probes: its figures, and the claims of the paper on them."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from bmfa.evidence.methods import family
from bmfa.evidence.page import paper, plots
from bmfa.evidence.page.chapter import Chapter
from bmfa.evidence.page.claims import ClaimTest, Measured, Verdict, claim, judge_direction
from bmfa.evidence.page.formats import format_number, format_numbers, format_percent
from bmfa.evidence.page.origins import caption, describe_size
from bmfa.evidence.page.record_set import (
    ByMethod,
    RecordSet,
    get_number,
    get_text,
    require_any,
    unique,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

DEEPER_RULES = ("gamma-h2", "exact-gap", "certified", "optimal")
LINEAR_BELOW = 0.001  # nats; below it the gap axis is linear, so that it can show a gap of 0


def values(records: RecordSet) -> dict[str, Any]:
    """Return every probe with its rows, those with image edges, and the first one's deeper rules."""
    probes: list[dict[str, Any]] = []
    for record in records.of("probe"):
        dataset, mode = (str(record.settings.get(name, "")) for name in ("dataset", "mode"))
        title = paper.dataset_title(dataset)
        everything = [row for row in record.rows if row.get("group") == "all"]
        groups = [row for row in record.rows if row.get("group") != "all"]
        names = unique(groups, "group")
        probes.append(
            {
                "dataset": dataset,
                "mode": mode,
                "title": title,
                "heading": f"{title}, {describe_size(record)}",
                "caption": caption(f"{title}, {mode}", record),
                "printed": paper.PROBES.get((dataset, mode), {}),
                "all": ByMethod((get_text(row, "method"), row) for row in everything),
                "groups": sorted(groups, key=lambda row: names.index(row["group"])),
            }
        )
    order = paper.sort_datasets([probe["dataset"] for probe in probes])
    probes.sort(key=lambda probe: order.index(probe["dataset"]))
    image_edge = [probe for probe in probes if probe["mode"] == "image-edge"]
    rows = image_edge[0]["all"].values() if image_edge else ()
    deeper = [row for row in rows if family(row["method"]) in DEEPER_RULES]
    return {"probes": probes, "image_edge": image_edge, "deeper_rules": deeper}


# Figures


@plots.figure("trade-off", "synthetic", "probe")
def trade_off(records: RecordSet, narrow: bool) -> "Drawing":
    """Mean gap against leaf ratio for every method and data source, with the paper's points."""
    corner = records.by_method("synthetic", placement="corner")
    sources = [("Synthetic, corner", corner, paper.SYNTHETIC)] if corner else []
    for probe in values(records)["image_edge"]:
        sources.append((probe["heading"], probe["all"], probe["printed"]))
    methods = list(dict.fromkeys(method for _, rows, _ in sources for method in rows))
    drawing, panels = plots.panels(
        len(require_any(sources)), 2, narrow, 300, [*methods, paper.NAME]
    )
    for axes, (title, rows, printed) in zip(panels, sources, strict=True):
        axes.set_xscale("log")
        axes.set_yscale("symlog", linthresh=LINEAR_BELOW, linscale=0.4)
        axes.set(xlim=(0.25, 160), ylim=(-0.0004, 4))
        plots.set_ticks(axes.xaxis, [0.4, 1, 3, 10, 30, 100])
        plots.set_ticks(axes.yaxis, [0, 0.001, 0.01, 0.1, 1])
        for point in printed.values():
            plots.draw_point(axes, paper.NAME, point.leaf_percent, point.mean_gap)
        for method, row in rows.items():
            leaf, gap = get_number(row, "leaf_percent"), get_number(row, "mean_gap")
            plots.draw_point(axes, method, leaf, gap)
        y_label = f"mean gap, logarithmic above {LINEAR_BELOW:g}"
        plots.label(axes, title, y_label, "leaf ratio, % of tokens, logarithmic")
    return drawing


@plots.figure("distribution", "probe")
def distribution(records: RecordSet, narrow: bool) -> "Drawing":
    """Gap at every percentile of the instances for every method."""
    sources = []
    for probe in values(records)["image_edge"]:
        points = [
            {"method": method, "percentile": 100 * index / (len(gaps) - 1), "gap": gap}
            for method, row in probe["all"].items()
            if (gaps := row.get("gap_quantiles"))
            for index, gap in enumerate(gaps)
        ]
        if points:
            sources.append((probe["heading"], points))
    sources = require_any(sources)
    limits = plots.value_range([point for _, points in sources for point in points], "gap")
    drawing, panels = plots.panels(len(sources), 3, narrow, 340)
    for axes, (title, points) in zip(panels, sources, strict=True):
        axes.set(xlim=(0, 100), ylim=limits)
        ends = plots.draw_methods(axes, points, "percentile", "gap", marker_step=16)
        plots.label(axes, title, "gap", "percentile of the instances")
        plots.label_ends(axes, ends, 250)
    return drawing


# Claims


PRINTED = paper.PROBES["coco", "image-edge"]
BMFA, VARIANCE = paper.ALGORITHM_1, "mean-variance"
ORDER = sorted(PRINTED, key=lambda method: PRINTED[method].mean_gap)
COCO = {"dataset": "coco", "mode": "image-edge"}
COCO_MASKS = {"dataset": "coco", "mode": "mask-only"}
EMBEDDED = {"dataset": "embedded", "mode": "image-edge"}


def _values(
    records: RecordSet, source: Mapping[str, str], method: str, *columns: str
) -> list[float]:
    return [
        records.value("probe", column, **source, method=method, group="all") for column in columns
    ]


def _mean_gap(dataset: str, printed: str) -> ClaimTest:
    """The claim on the mean gap of one data set of the paper."""
    source = {"dataset": dataset, "mode": "image-edge"}
    text = (
        f"On {paper.dataset_title(dataset)} instances, Algorithm 1 reduces the mean gap of the mean"
    )

    @claim(text, printed, "probe", **source)
    def measure(records: RecordSet) -> Measured:
        (mean,) = _values(records, source, "block-mean", "mean_gap")
        columns = ("mean_gap", "leaf_percent", "instances")
        gap, leaf, instances = _values(records, source, BMFA, *columns)
        note = (
            f"{instances:,.0f} of {paper.INSTANCES[dataset]:,} instances. The scores come from our fit "
            "to the paper's table, so agreement with it is not independent evidence."
        )
        shown = f"{format_number(mean)} to {format_number(gap)} at {format_percent(leaf)}"
        return shown, judge_direction(gap < mean), note

    return measure


@claim(
    "The methods have the same order on other data: by mean gap, on the embedded images",
    "the order of its table",
    "probe",
    **EMBEDDED,
)
def _same_order(records: RecordSet) -> Measured:
    gaps = {method: _values(records, EMBEDDED, method, "mean_gap")[0] for method in ORDER}
    same = sorted(gaps, key=lambda method: gaps[method]) == ORDER
    change = f"{format_number(gaps['block-mean'])} to {format_number(gaps[BMFA])}"
    note = f"{change}, on images that this library generates."
    return "the same order" if same else "another order", judge_direction(same), note


@claim(
    "The P95 gap of Algorithm 1 is larger than that of a variance correction, on COCO",
    "2.434 against 1.162",
    "probe",
    **COCO,
)
def _p95_gap(records: RecordSet) -> Measured:
    ours, unsplit = _values(records, COCO, BMFA, "p95_gap", "unsplit_percent")
    (correction,) = _values(records, COCO, VARIANCE, "p95_gap")
    note = f"Algorithm 1 does not split the root of {format_percent(unsplit, 1)} of the instances."
    shown = f"{format_number(ours)} against {format_number(correction)}"
    return shown, judge_direction(ours > correction), note


@claim(
    "Without image edges Algorithm 1 still leads in the mean gap, but not in the P95 gap",
    "0.534, 1.830 against 0.600, 0.835",
    "probe",
    **COCO_MASKS,
)
def _mask_only(records: RecordSet) -> Measured:
    columns = ("mean_gap", "p95_gap", "instances")
    mean, p95, instances = _values(records, COCO_MASKS, BMFA, *columns)
    other_mean, other_p95, _ = _values(records, COCO_MASKS, VARIANCE, *columns)
    note = f"On {instances:,.0f} of {paper.INSTANCES['coco']:,} instances, scores from our fit."
    shown = f"{format_numbers(mean, p95)} against {format_numbers(other_mean, other_p95)}"
    return shown, judge_direction(mean < other_mean and p95 > other_p95), note


@claim(
    "The smallest P95 gap of a summary without annotations, on COCO",
    "1.162 (mean-variance)",
    "probe",
    **COCO,
)
def _smallest_p95_gap(records: RecordSet) -> Measured:
    rows = records.by_method("probe", **COCO, group="all")
    method = require_any(name for name in rows if name.startswith("optimal:"))[0]
    p95, leaf = _values(records, COCO, method, "p95_gap", "leaf_percent")
    (correction,), (leaves,) = (
        _values(records, COCO, name, column)
        for name, column in ((VARIANCE, "p95_gap"), (BMFA, "leaf_percent"))
    )
    note = (
        f"{VARIANCE} has {format_number(correction)} there, with one leaf. {method} reads exact "
        f"scores; Algorithm 1 has {format_percent(leaves)} leaves."
    )
    shown = f"{format_number(p95)} at {format_percent(leaf)}"
    return shown, Verdict.AHEAD if p95 < correction else Verdict.DIFFERS, note


PROBES = Chapter(
    "probes",
    "Instance probes",
    "probes/probes.html.j2",
    "probe",
    (
        _mean_gap("coco", "2.254 to 0.526 at 30.810 %"),
        _mean_gap("lvis", "2.277 to 0.596 at 29.225 %"),
        _same_order,
        *(_p95_gap, _mask_only, _smallest_p95_gap),
    ),
    values,
)
