"""Figures of the benchmarks: time of attention over tokens, error over speed, masks over speed."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from bmfa.evidence.bench import summary
from bmfa.evidence.page import plots
from bmfa.evidence.page.model_runs import by_family
from bmfa.evidence.page.record_set import RecordSet, get_number, get_points, get_text
from bmfa.records import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

# Methods with a line of their own in the figure of times; the figure of errors shows all.
TIMED_METHODS = ("tiled-tiles:0", "tiled-tiles:0.1", "tiled-error:0.1")
# Settings of one method that a line joins, with the titles of the legend.
TITLES = {
    "dense": "dense, fastest path",
    "tiles": "bmfa, share of the tiles",
    "leaves": "bmfa, budget of leaves",
    "error": "bmfa, error target",
    "mean-tiles": "mean tiles (historical)",
    "topk": "keep or drop (historical)",
    "monarch": "Monarch attention (historical)",
    "sparge": "SpargeAttn",
    "natten": "NATTEN",
    "pisa": "PISA, first order",
    "pisa-0th": "PISA, zeroth order",
}
MIN_TOKENS = 1024  # dense attention over fewer tokens takes too little time to be a bottleneck


def attention_rows(records: RecordSet) -> list[Row]:
    """Return the complete rows of attention on a model's own heads, of the machine with most rows."""
    by_device: dict[str, list[Row]] = {}
    for record in records.of("bench"):
        device = str(record.environment.get("device_name"))
        rows = [{**row, "device": device} for row in record.rows if row.get("what") == "attention"]
        by_device.setdefault(device, []).extend(rows)
    rows = max(by_device.values(), key=len, default=[])
    return [
        row
        for row in summary.own_rows([r for r in rows if "method" in r and "n" in r])
        if get_number(row, "error_l2_percent") is not None
        and all((get_number(row, column) or 0.0) > 0 for column in ("n", "milliseconds", "speedup"))
    ]


@plots.figure("attention-time", "bench")
def attention_time(records: RecordSet, narrow: bool) -> "Drawing | None":
    """Time of attention against the number of tokens, with the fitted exponents."""
    rows = attention_rows(records)
    lines = _time_lines(rows)
    if not any(name.startswith("dense:") and len(line) > 1 for name, line in lines.items()):
        return None
    drawing, (axes,) = plots.panels(1, 1, narrow, 390)
    sizes = sorted({n for line in lines.values() for n in line})
    x_label = "tokens N, logarithmic; exponents fitted from 4,096 tokens"
    labels = f"Attention, {rows[0]['device']}", "milliseconds per image, logarithmic", x_label
    axes.set(xscale="log", xlim=(sizes[0] / 1.1, sizes[-1] * 1.1))
    plots.set_axes(axes, *labels, x_ticks=sizes[-4:] if narrow else sizes)
    plots.set_log_range(axes, "y", [time for line in lines.values() for time in line.values()], 1.3)
    for name, line in lines.items():
        plots.draw_line(axes, name, sorted(line.items()))
    plots.label_ends(axes, {name: line[max(line)] for name, line in lines.items()}, 300)
    return drawing


def _time_lines(rows: Sequence[Row]) -> dict[str, Mapping[int, float]]:
    """Milliseconds by tokens; the fitted exponent is part of each name."""
    error = summary.FIXED_ERROR
    lines = {"dense:": summary.times_of(rows, "dense")}
    lines[f"at-error:{error:g}%"] = summary.times_at_error(rows, error)
    for method in TIMED_METHODS:
        lines[method.removeprefix("tiled-")] = summary.times_of(rows, method)
    named: dict[str, Mapping[int, float]] = {}
    for name, times in lines.items():
        exponent = summary.exponent(times)
        if times:
            named[name if exponent is None else f"{name} N^{exponent:.2f}"] = times
    return named


@plots.figure("attention-error", "bench")
def attention_error(records: RecordSet, narrow: bool) -> "Drawing | None":
    """Error of attention against its speed, for every number of tokens."""
    rows = [row for row in attention_rows(records) if int(row["n"]) >= MIN_TOKENS]
    if not summary.tiled_rows(rows):
        return None
    rows = [{**row, "method": get_text(row, "method").removeprefix("tiled-")} for row in rows]
    labels = ("relative L2 error, %", "speed-up over the fastest dense path, logarithmic")
    return _over_speed(rows, "error_l2_percent", labels, narrow)


def mask_rows(records: RecordSet) -> list[Row]:
    """Return the rows of whole models with the overlap of their masks, and the machine of each.

    Of the dense paths only the fastest one is there.
    """
    return [
        {**row, "device": str(record.environment.get("device_name"))}
        for record in records.of("bench")
        for row in record.rows
        if get_number(row, "mask_iou") is not None
        and get_number(row, "speedup") is not None
        and not get_text(row, "method").startswith("full-")
    ]


@plots.figure("saliency", "bench")
def saliency(records: RecordSet, narrow: bool) -> "Drawing | None":
    """Agreement of the masks of a saliency model against its speed, for every number of tokens."""
    # Without tiled layers a row is dense attention, because it is faster.
    tiled = [row for row in mask_rows(records) if row.get("tiled_layers") != 0]
    settings = Counter(row["n"] for row in tiled)
    rows = [row for row in tiled if settings[row["n"]] > 1]
    if not rows:
        return None
    labels = ("IoU with the mask of the dense model", "speed-up over the dense model, logarithmic")
    return _over_speed(rows, "mask_iou", labels, narrow, (0.45, 1.02))


def _over_speed(
    rows: Sequence[Row],
    column: str,
    labels: tuple[str, str],
    narrow: bool,
    limits: tuple[float, float] | None = None,
) -> "Drawing":
    """Draw a measure over the speed-up, in axes for each number of tokens; by default from 0 up."""
    sizes = sorted({int(row["n"]) for row in rows})
    families = by_family(rows)
    legend = {name: title for name, title in TITLES.items() if name in families}
    drawing, panels = plots.panels(len(sizes), 2, narrow, 290, legend, legend_columns=3)
    for n, axes in zip(sizes, panels, strict=True):
        lines = {
            name: get_points([row for row in families[name] if row["n"] == n], "speedup", column)
            for name in legend
        }
        plots.set_axes(axes, f"{n:,} tokens", *labels)
        speeds = [speed for line in lines.values() for speed, _ in line]
        plots.set_log_range(axes, "x", [*speeds, 1.0], 1.2)
        plots.mark_level(axes, x=1.0)
        for name, line in lines.items():
            plots.draw_line(axes, name, line)
        axes.set_ylim(limits or (0, 1.1 * axes.dataLim.y1 or 1.0))
    return drawing
