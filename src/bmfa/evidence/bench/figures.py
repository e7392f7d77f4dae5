"""Figures of the attention benchmark: time over the number of tokens, and error over speed."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from bmfa.evidence.bench import summary
from bmfa.evidence.page import style
from bmfa.evidence.page.canvas import Canvas, figure
from bmfa.evidence.page.drawing import (
    Margins,
    add_labels,
    draw_line,
    label_line_ends,
    panel_grid,
    set_log_range,
    set_ticks,
)
from bmfa.evidence.page.record_set import RecordSet, get_number, get_points, get_text
from bmfa.records import Record, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Methods with a line of their own in the figure of times; the figure of errors shows all.
TIMED_METHODS = ("tiled-tiles:0", "tiled-tiles:0.1", "tiled-error:0.1")
TITLES = {
    "dense": "dense, fastest path",
    "tiles": "bmfa, share of the tiles",
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


def attention_records(records: RecordSet) -> RecordSet:
    """Return the attention records of the machine with most rows: other times share no axis."""

    def count(record: Record) -> int:
        return sum(row.get("what") == "attention" for row in record.rows)

    found = [record for record in records.of("bench") if count(record)]
    device = _device(RecordSet(max(found, key=count))) if found else None
    return RecordSet([r for r in found if r.environment.get("device_name") == device])


def _device(records: RecordSet) -> object:
    return records.records[0].environment.get("device_name") if records.records else None


def attention_rows(records: RecordSet) -> list[Row]:
    """Return the complete rows of attention on a model's own heads, of one machine."""
    rows = attention_records(records).rows("bench")
    return [
        row
        for row in summary.own_rows([r for r in rows if "method" in r and "n" in r])
        if get_number(row, "error_l2_percent") is not None
        and all((get_number(row, column) or 0.0) > 0 for column in ("n", "milliseconds", "speedup"))
    ]


def _has_times(records: RecordSet) -> bool:
    """True if the dense path was timed at two numbers of tokens or more."""
    return len(summary.times_of(attention_rows(records), "dense")) >= 2


def _has_errors(records: RecordSet) -> bool:
    return bool(summary.tiled_rows(_long_rows(records)))


def _long_rows(records: RecordSet) -> list[Row]:
    return [row for row in attention_rows(records) if int(row["n"]) >= MIN_TOKENS]


def _require(available: bool) -> None:
    if not available:
        raise ValueError(
            "too few attention rows among the records; make them with: bmfa bench attention --json FILE"
        )


@figure("attention-time", needs=("bench",), available=_has_times)
def attention_time(records: RecordSet, narrow: bool) -> Canvas:
    """Time of attention against the number of tokens, with the fitted exponents."""
    _require(_has_times(records))
    lines = _time_lines(attention_rows(records))
    canvas, (axes,) = panel_grid(1, 1, narrow=narrow, height=300, margins=Margins(right=150))
    sizes = sorted({n for line in lines.values() for n in line})
    axes.set(xscale="log", xlim=(sizes[0] / 1.1, sizes[-1] * 1.1))
    set_ticks(axes.xaxis, sizes[-4:] if narrow else sizes)
    set_log_range(axes, "y", [time for line in lines.values() for time in line.values()], 1.3)
    ends = {}
    for name, line in lines.items():
        draw_line(axes, name, sorted(line.items()))
        ends[name] = line[max(line)]
    device = _device(attention_records(records))
    title = "Attention" if device is None else f"Attention, {device}"
    x_label = "tokens N, logarithmic; exponents fitted from 4,096 tokens"
    add_labels(canvas, axes, title, "milliseconds per image, logarithmic", x_label)
    label_line_ends(canvas, axes, ends)
    return canvas


def _time_lines(rows: Sequence[Row]) -> dict[str, Mapping[int, float]]:
    """Milliseconds by tokens; the fitted exponent is part of each name."""
    error = summary.FIXED_ERROR
    lines = {
        "dense:": summary.times_of(rows, "dense"),
        f"at-error:{error:g}%": summary.times_at_error(rows, error),
    }
    for method in TIMED_METHODS:
        lines[method.removeprefix("tiled-")] = summary.times_of(rows, method)
    named: dict[str, Mapping[int, float]] = {}
    for name, times in lines.items():
        exponent = summary.exponent(dict(times))
        if times:
            named[name if exponent is None else f"{name} N^{exponent:.2f}"] = times
    return named


@figure("attention-error", needs=("bench",), available=_has_errors)
def attention_error(records: RecordSet, narrow: bool) -> Canvas:
    """Error of attention against its speed, for every number of tokens."""
    _require(_has_errors(records))
    rows = _long_rows(records)
    sizes = sorted({int(row["n"]) for row in rows})
    legend = {name: title for name, title in TITLES.items() if _family(rows, name)}
    columns = min(2, len(sizes))
    canvas, panels = panel_grid(
        len(sizes), columns, narrow=narrow, height=200, legend=legend, legend_columns=3
    )
    for n, axes in zip(sizes, panels, strict=True):
        found = [row for row in rows if row["n"] == n]
        _draw_errors(axes, {name: _family(found, name) for name in legend})
        x_label = "speed-up over the fastest dense path, logarithmic"
        add_labels(canvas, axes, f"{n:,} tokens", "relative L2 error, %", x_label)
    return canvas


def _draw_errors(axes: "Axes", rows: Mapping[str, Sequence[Row]]) -> None:
    lines = {name: get_points(found, "speedup", "error_l2_percent") for name, found in rows.items()}
    speeds = [speed for line in lines.values() for speed, _ in line]
    errors = [error for line in lines.values() for _, error in line]
    set_log_range(axes, "x", speeds, 1.2)
    axes.set_ylim(0, 1.1 * max(errors) or 1.0)
    axes.axvline(1.0, color=style.INK.light, linewidth=1.0)
    for name, line in lines.items():
        draw_line(axes, name, line)


def _family(rows: Sequence[Row], name: str) -> list[Row]:
    """The rows of a method at all parameters; of the dense paths only the fastest."""
    if name == "dense":
        return [row for row in rows if get_text(row, "method") == name]
    return [
        row for row in rows if get_text(row, "method").removeprefix("tiled-").startswith(f"{name}:")
    ]
