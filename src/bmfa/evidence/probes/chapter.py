"""The chapter on the instance probes: its figures, and the claims of the paper on them."""

from typing import TYPE_CHECKING, Any

from bmfa.evidence.page import paper, plots
from bmfa.evidence.page.claims import Measured, Verdict, claim, judge_direction
from bmfa.evidence.page.origins import caption, describe_size
from bmfa.evidence.page.panels import group
from bmfa.evidence.page.record_set import RecordSet, get_number, get_text, need_number, require_any
from bmfa.evidence.page.rendering import chapter_values

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

LINEAR_BELOW = 0.001  # nats; below it the gap axis is linear, so that it can show a gap of 0
TRADE_OFF_AXES: dict[str, Any] = {
    "xlim": (0.25, 160),
    "x_ticks": (0.4, 1, 3, 10, 30, 100),
    "ylim": (-0.0004, 4),
    "y_ticks": (0, 0.001, 0.01, 0.1, 1),
}
VARIANCE = "mean-variance"


@chapter_values("probes")
def probes(records: RecordSet) -> dict[str, Any]:
    """Return every probe with its titles and rows, and those with image edges."""
    probes: list[dict[str, Any]] = []
    for record in sorted(records.of("probe"), key=lambda one: paper.place(one.settings["dataset"])):
        dataset, mode = record.settings["dataset"], record.settings["mode"]
        title, groups = paper.dataset_title(dataset), group(record.rows, "group")
        probes.append(
            {
                "title": title,
                "mode": mode,
                "heading": f"{title}, {describe_size(record)}",
                "caption": caption(f"{title}, {mode}", record),
                "printed": paper.PROBES.get((dataset, mode), {}),
                "all": RecordSet(record).by_method("probe", group="all"),
                "groups": [row for rows in groups for row in rows if row["group"] != "all"],
            }
        )
    return {"probes": probes, "image_edge": [p for p in probes if p["mode"] == "image-edge"]}


# Figures


@plots.figure("trade-off", "synthetic", "probe")
def trade_off(records: RecordSet, narrow: bool) -> "Drawing":
    """Mean gap against leaf ratio for every method and data source, with the paper's points."""
    corner = records.by_method("synthetic", placement="corner")
    sources = [("Synthetic, corner", corner, paper.SYNTHETIC)] if corner else []
    sources += [(p["heading"], p["all"], p["printed"]) for p in probes(records)["image_edge"]]
    methods = list(dict.fromkeys(method for _, rows, _ in require_any(sources) for method in rows))
    drawing, all_axes = plots.panels(len(sources), 2, narrow, 300, [*methods, paper.NAME])
    y_label = f"mean gap, logarithmic above {LINEAR_BELOW:g}"
    for axes, (title, rows, printed) in zip(all_axes, sources, strict=True):
        axes.set_yscale("symlog", linthresh=LINEAR_BELOW, linscale=0.4)
        plots.set_axes(axes, title, y_label, **plots.LEAF_AXIS | TRADE_OFF_AXES)
        for point in printed.values():
            plots.draw_point(axes, paper.NAME, point.leaf_percent, point.mean_gap)
        for method, row in rows.items():
            leaf, gap = get_number(row, "leaf_percent"), get_number(row, "mean_gap")
            plots.draw_point(axes, method, leaf, gap)
    return drawing


@plots.figure("distribution", "probe")
def distribution(records: RecordSet, narrow: bool) -> "Drawing":
    """Gap at every percentile of the instances for every method."""
    sources = {}
    for probe in probes(records)["image_edge"]:
        sources[probe["heading"]] = [
            {"method": method, "percentile": 100 * index / (len(gaps) - 1), "gap": gap}
            for method, row in probe["all"].items()
            if (gaps := row.get("gap_quantiles"))
            for index, gap in enumerate(gaps)
        ]
    points = require_any(point for found in sources.values() for point in found)
    limits = {"xlim": (0, 100), "ylim": plots.value_range(points, "gap")}
    drawing, all_axes = plots.panels(len(sources), 3, narrow, 340)
    for axes, (title, found) in zip(all_axes, sources.items(), strict=True):
        plots.set_axes(axes, title, "gap", "percentile of the instances", **limits)
        plots.draw_methods(axes, found, "percentile", "gap", 250, marker_step=16)
    return drawing


# Claims


def _rows(records: RecordSet, **methods: str) -> dict[str, Any]:
    """The rows over all instances of methods, by the names that the sentences have for them."""
    rows = {name: records.row("probe", method=m, group="all") for name, m in methods.items()}
    return {"algorithm_1": records.row("probe", method=paper.ALGORITHM_1, group="all"), **rows}


@claim("coco-mean-gap", "lvis-mean-gap")
def mean_gap(records: RecordSet) -> Measured:
    rows = _rows(records, mean="block-mean")
    ours, theirs = (need_number(row, "mean_gap") for row in rows.values())
    return judge_direction(ours < theirs), rows


@claim("same-order")
def same_order(records: RecordSet) -> Measured:
    printed = paper.PROBES["coco", "image-edge"]
    order = sorted(printed, key=lambda method: printed[method].mean_gap)
    gaps = [records.value("probe", "mean_gap", method=name, group="all") for name in order]
    same = gaps == sorted(gaps)
    return judge_direction(same), {"same": same, **_rows(records, mean="block-mean")}


@claim("p95-gap")
def p95_gap(records: RecordSet) -> Measured:
    rows = _rows(records, variance=VARIANCE)
    ours, theirs = (need_number(row, "p95_gap") for row in rows.values())
    return judge_direction(ours > theirs), rows


@claim("without-edges")
def without_edges(records: RecordSet) -> Measured:
    rows = _rows(records, variance=VARIANCE)
    mean, other_mean = (need_number(row, "mean_gap") for row in rows.values())
    p95, other_p95 = (need_number(row, "p95_gap") for row in rows.values())
    return judge_direction(mean < other_mean and p95 > other_p95), rows


@claim("smallest-p95-gap")
def smallest_p95_gap(records: RecordSet) -> Measured:
    methods = (get_text(row, "method") for row in records.rows("probe", group="all"))
    optimal = require_any(method for method in methods if method.startswith("optimal:"))[0]
    rows = _rows(records, variance=VARIANCE, optimal=optimal)
    ahead = need_number(rows["optimal"], "p95_gap") < need_number(rows["variance"], "p95_gap")
    return Verdict.AHEAD if ahead else Verdict.DIFFERS, rows
