"""The figure of a plan: sensitivity of the layers, the choice, predicted and measured, speed."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from bmfa.evidence.page import plots
from bmfa.evidence.page.record_set import RecordSet
from bmfa.packages import load_package
from bmfa.records import Record, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Drawing

MOST_LAYER_TICKS = 16  # more of them would overlap in a panel of half the width
DENSE, OPTIMAL = plots.LIGHT["mean"], plots.LIGHT["optimal"]


@plots.figure("tuning", "tune")
def tuning(records: RecordSet, narrow: bool) -> "Drawing":
    """Change and time of each layer alone, and change and time of the whole model, with the choice."""
    record = records.of("tune")[-1]
    drawing, panels = plots.panels(4, 2, narrow, 290)
    _draw_sensitivity(panels[0], record)
    _draw_times(panels[1], record)
    _draw_changes(panels[2], record)
    _draw_speed(panels[3], record)
    return drawing


def _draw_sensitivity(axes: "Axes", record: Record) -> None:
    """Change of every layer alone at every error target; the chosen ones are filled."""
    scale, unit = _change_unit(record)
    y_label = f"{unit}, logarithmic; chosen settings are filled"
    plots.set_axes(axes, "Change by one layer", y_label, "layer", **_layer_axis(record.rows))
    rows = [row for row in record.rows if row["error"] is not None and row["change"]]
    if not rows:
        axes.text(
            0.5, 0.5, "no setting is faster than dense", transform=axes.transAxes, ha="center"
        )
        return
    targets = sorted({row["error"] for row in rows})
    shades = load_package("matplotlib").colormaps["viridis"]
    for index, error in enumerate(targets):
        colour = shades(0.85 - 0.85 * index / max(1, len(targets) - 1))
        for row in (row for row in rows if row["error"] == error):
            axes.plot(
                row["layer"],
                scale * row["change"],
                marker="o",
                markersize=9.0 if row["chosen"] else 6.0,
                markerfacecolor=colour if row["chosen"] else "none",
                markeredgecolor=colour,
                markeredgewidth=1.3,
                linestyle="none",
                clip_on=False,
                label=_short(error),
            )
    plots.set_log_range(axes, "y", [scale * row["change"] for row in rows], 1.6)
    handles, labels = axes.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    style: dict[str, Any] = {"title": "error", "title_fontsize": 10, "fontsize": 10}
    axes.legend(unique.values(), unique, loc="upper left", bbox_to_anchor=(1, 1), **style)


def _draw_times(axes: "Axes", record: Record) -> None:
    """Time of the attention of every layer, dense and chosen."""
    chosen = [row for row in record.rows if row["chosen"]]
    layers = [row["layer"] for row in chosen]
    axes.bar(layers, [row["dense_milliseconds"] for row in chosen], 0.8, color=DENSE, alpha=0.35)
    axes.bar(layers, [row["milliseconds"] for row in chosen], 0.5, color=OPTIMAL)
    labelled = len(chosen) <= MOST_LAYER_TICKS
    for row in chosen if labelled else ():
        height = max(row["milliseconds"], row["dense_milliseconds"])
        _write(axes, row["layer"], height, _short(row["error"]), 10)
    y_label = f"milliseconds: dense (grey), chosen (blue{', with its target' if labelled else ''})"
    highest = 1.15 * max(row["dense_milliseconds"] for row in chosen) or 1.0
    axis = _layer_axis(record.rows)
    plots.set_axes(axes, "Time of attention", y_label, "layer", ylim=(0, highest), **axis)


def _draw_changes(axes: "Axes", record: Record) -> None:
    """Predicted and measured change of every combination that was checked."""
    scale, unit = _change_unit(record)
    checks, tolerance = record.settings["checks"], scale * record.settings["tolerance"]
    highest = tolerance
    for index, check in enumerate(checks):
        bars = (("predicted_change", -0.2, DENSE), ("validation_change", 0.2, OPTIMAL))
        for name, shift, colour in bars:
            if check[name] is None:
                continue
            change = scale * check[name]
            highest = max(highest, change)
            axes.bar(index + shift, change, 0.36, color=colour)
            if check["chosen"]:
                _write(axes, index + shift, 0, f"{change:.3g}")
    plots.mark_level(axes, y=tolerance)
    y_label = f"{unit}: predicted (grey), measured (blue), tolerance (line)"
    labels = "Change of the model", y_label, "combinations checked; the plan has its values"
    right = max(1, len(checks)) - 0.2
    plots.set_axes(axes, *labels, xlim=(-0.8, right), ylim=(0, 1.2 * highest))
    plots.set_ticks(axes.xaxis, range(len(checks)), [str(i + 1) for i in range(len(checks))])


def _draw_speed(axes: "Axes", record: Record) -> None:
    """Time of the model, dense, predicted and measured."""
    settings = record.settings
    dense = settings["dense_milliseconds"]
    times = {
        "dense": dense,
        "predicted": settings["predicted_milliseconds"],
        "measured": settings["milliseconds"],
    }
    bars = axes.bar(range(len(times)), list(times.values()), 0.5, color=[DENSE, DENSE, OPTIMAL])
    bars[0].set_alpha(0.35)
    for index, time in enumerate(times.values()):
        _write(axes, index, 0, f"{dense / time:.2f}x")
    height, width = settings["img_size"]
    x_label = f"{width}x{height} px, {settings['dtype']}, {settings['device']}"
    labels = "Time of the model", "milliseconds for a batch", x_label
    plots.set_axes(axes, *labels, xlim=(-0.6, 2.6), ylim=(0, 1.2 * max(times.values())))
    plots.set_ticks(axes.xaxis, range(len(times)), list(times))


def _write(axes: "Axes", x: float, y: float, text: str, size: float = plots.SMALL) -> None:
    """Write a value above a point, or into the foot of a bar, where it hides no line."""
    plots.annotate(axes, text, (x, y), xytext=(0, 4), ha="center", fontsize=size)


def _short(error: float | None) -> str:
    return "" if error is None else f"{error:g}".removeprefix("0")


def _layer_axis(rows: Sequence[Row]) -> dict[str, Any]:
    layers = sorted({row["layer"] for row in rows})
    ticks = layers[:: -(-len(layers) // MOST_LAYER_TICKS)]
    return {"x_ticks": ticks, "xlim": (layers[0] - 0.6, layers[-1] + 0.6)}


def _change_unit(record: Record) -> tuple[float, str]:
    """Return the factor and the name of the unit in which changes are shown."""
    measure: Any = record.settings["measure"]
    if measure == "logits":
        return 1.0, "KL in nats"
    return 100.0, "% of the features" if measure == "features" else f"percent ({measure})"
