"""Speed of attention: time against the number of tokens, and error against speed."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from bmfa.evidence.bench import attention_summary
from bmfa.evidence.classification.figures import round_ticks
from bmfa.evidence.page import style
from bmfa.evidence.page.marks import LEGEND_ROW, end_labels, foot, heading, legend, log_ticks
from bmfa.evidence.page.records import Evidence, number, text
from bmfa.evidence.page.sheet import Margins, Sheet, panels
from bmfa.records import Record, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAMED = Margins(left=46, right=150)
# Settings that have a line of their own in the figure of times; all are in that of errors.
SHOWN = ("tiled-tiles:0", "tiled-tiles:0.1", "tiled-error:0.1")
PEERS = ("sparge", "natten", "pisa", "pisa-0th", "flex")
WORDS = {
    "dense": "dense, best path",
    "tiles": "bmfa, a share of the tiles",
    "error": "bmfa, an error target",
    "sparge": "SpargeAttn",
    "natten": "NATTEN",
    "pisa": "PISA, first order",
    "pisa-0th": "PISA, zeroth order",
    "flex": "flex attention, best blocks",
}
LEAST = 1024  # fewer tokens are no matter of speed


def attention_rows(evidence: Evidence) -> list[Row]:
    """Rows of attention on a model's own heads that have all that the figures show, of one machine."""
    device = _device(evidence)
    records = [r for r in evidence.records if r.environment.get("device_name") == device]
    rows = [row for row in Evidence(records).rows("bench") if "method" in row and "n" in row]
    return [
        row
        for row in attention_summary.own_rows(rows)
        if number(row, "error_l2_percent") is not None
        and all((number(row, column) or 0.0) > 0 for column in ("n", "milliseconds", "speedup"))
    ]


def ready(evidence: Evidence) -> bool:
    """Whether two numbers of tokens, each with its dense path, are at hand."""
    return len(attention_summary.times_of(attention_rows(evidence), "dense")) >= 2


def error_ready(evidence: Evidence) -> bool:
    """Whether tiled attention on a grid of some size is at hand."""
    rows = [row for row in attention_rows(evidence) if int(row["n"]) >= LEAST]
    return bool(attention_summary.tiled_rows(rows))


def _require(enough: bool) -> None:
    if not enough:
        raise ValueError(
            "too few attention rows among the records; make them with: bmfa bench attention --json FILE"
        )


def time_figure(evidence: Evidence, narrow: bool) -> Sheet:
    """Milliseconds for each picture over the number of tokens, both logarithmic."""
    _require(ready(evidence))
    lines = _time_lines(attention_rows(evidence))
    sheet, axes = panels(1, 1, style.NARROW if narrow else style.WIDE, 300, NAMED)
    panel = axes[0]
    times = [time for line in lines.values() for time in line.values()]
    sizes = sorted({n for line in lines.values() for n in line})
    panel.set(xscale="log", yscale="log")
    panel.set_xlim(sizes[0] / 1.1, sizes[-1] * 1.1)
    low, high = min(times) / 1.3, max(times) * 1.3
    panel.set_ylim(low, high)
    log_ticks(panel.xaxis, sizes[-4:] if narrow else sizes)
    log_ticks(panel.yaxis, round_ticks(low, high))
    ends = {}
    for name, line in lines.items():
        look = style.method_style(name)
        xs, ys = zip(*sorted(line.items()), strict=True)
        panel.plot(xs, ys, clip_on=False, **look.line, **look.open_mark)
        ends[name] = ys[-1]
    heading(sheet, panel, _title(evidence), "milliseconds for a picture, logarithmic", indent=42)
    foot(sheet, panel, "tokens N, logarithmic; exponents fitted from 4,096 tokens")
    end_labels(sheet, panel, ends)
    return sheet


def _time_lines(rows: Sequence[Row]) -> dict[str, dict[int, float]]:
    """Times by tokens; a name ends in the fitted exponent."""
    found: dict[str, Mapping[int, float]] = {"dense:": attention_summary.times_of(rows, "dense")}
    error = attention_summary.FIXED_ERROR
    found[f"at-error:{error:g}%"] = attention_summary.times_at_error(rows, error)
    for method in SHOWN:
        found[method.removeprefix("tiled-")] = attention_summary.times_of(rows, method)
    lines = {}
    for name, times in found.items():
        power = attention_summary.exponent(dict(times))
        said = name if power is None else f"{name} N^{power:.2f}"
        if times:
            lines[said] = dict(times)
    return lines


def _title(evidence: Evidence) -> str:
    device = _device(evidence)
    return "Attention" if device is None else f"Attention, {device}"


def _device(evidence: Evidence) -> object:
    """The machine of the record with most rows of attention: times of two share no axis."""

    def count(record: Record) -> int:
        return sum(row.get("what") == "attention" for row in record.rows)

    most = max(evidence.records, key=count, default=None)
    return None if most is None else most.environment.get("device_name")


def error_figure(evidence: Evidence, narrow: bool) -> Sheet:
    """Relative error over the speed against the best dense path, a panel for each number of tokens."""
    _require(error_ready(evidence))
    rows = [row for row in attention_rows(evidence) if int(row["n"]) >= LEAST]
    sizes = sorted({int(row["n"]) for row in rows})
    names = [name for name in ("dense", "tiles", "error", *PEERS) if _family(rows, name)]
    columns, legend_columns = (1, 1) if narrow else (min(2, len(sizes)), 3)
    room = -(-len(names) // legend_columns) * LEGEND_ROW + 12
    width = style.NARROW if narrow else style.WIDE
    sheet, axes = panels(len(sizes), columns, width, 200, Margins(left=44), foot=room)
    for n, panel in zip(sizes, axes, strict=True):
        some = [row for row in rows if row["n"] == n]
        _error_panel(panel, some, names)
        heading(sheet, panel, f"{n:,} tokens", "relative L2 error, %", indent=40)
        foot(sheet, panel, "times as fast as the best dense path, logarithmic")
    legend(sheet, names, sheet.height - room + 8, legend_columns, WORDS)
    return sheet


def _error_panel(panel: "Axes", rows: Sequence[Row], names: Sequence[str]) -> None:
    shown = [row for name in names for row in _family(rows, name)]
    speeds = [speed for row in shown if (speed := number(row, "speedup"))]
    low, high = min(speeds) / 1.2, max(speeds) * 1.2
    panel.set_xscale("log")
    panel.set_xlim(low, high)
    log_ticks(panel.xaxis, round_ticks(low, high))
    panel.set_ylim(0, 1.1 * max(number(row, "error_l2_percent") or 0.0 for row in shown) or 1.0)
    panel.axvline(1.0, color=style.INK.light, linewidth=1.0)
    for name in names:
        pairs = [(number(r, "speedup"), number(r, "error_l2_percent")) for r in _family(rows, name)]
        places = sorted((x, y) for x, y in pairs if x and y is not None)
        if places:
            look = style.method_style(name)
            xs, ys = zip(*places, strict=True)
            panel.plot(xs, ys, clip_on=False, **look.line, **look.open_mark)


def _family(rows: Sequence[Row], name: str) -> list[Row]:
    """All settings of a method; of the dense paths the best alone."""
    if name == "dense":
        return [row for row in rows if text(row, "method") == name]
    return [
        row for row in rows if text(row, "method").removeprefix("tiled-").startswith(f"{name}:")
    ]
