"""The figure of a plan: sensitivity of the layers, the choice, predicted and measured, speed."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from bmfa.evidence.page import style
from bmfa.evidence.page.canvas import Canvas, figure
from bmfa.evidence.page.drawing import add_labels, panel_grid, set_log_range, set_ticks
from bmfa.evidence.page.record_set import RecordSet
from bmfa.packages import load_package
from bmfa.records import Record, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LEGEND_STEP = 28.0  # pixels between two error targets in the title of a panel
MOST_LAYER_TICKS = 16  # more of them would overlap in a panel of half the width


@figure("tuning", needs=("tune",))
def tuning(records: RecordSet, narrow: bool) -> Canvas:
    """Change and time of each layer alone, and change and time of the whole model, with the choice."""
    records.require("tune")
    record = records.of("tune")[-1]
    canvas, panels = panel_grid(4, 2, narrow=narrow, height=210)
    _draw_sensitivity(canvas, panels[0], record)
    _draw_times(canvas, panels[1], record)
    _draw_changes(canvas, panels[2], record)
    _draw_speed(canvas, panels[3], record)
    return canvas


def _draw_sensitivity(canvas: Canvas, axes: "Axes", record: Record) -> None:
    """Change of every layer alone at every error target; the chosen ones are filled."""
    scale, unit = _change_unit(record)
    rows = [
        row
        for row in record.rows
        if row["error"] is not None and row["change"] and (row["chosen"] or not row["interpolated"])
    ]
    errors = sorted({row["error"] for row in rows if not row["interpolated"]})
    targets = sorted({row["error"] for row in rows})
    colours = dict(zip(targets, _shades(len(targets)), strict=True))
    for row in rows:
        axes.plot(
            row["layer"],
            scale * row["change"],
            marker="o",
            markersize=9.0 if row["chosen"] else 6.0,
            markerfacecolor=colours[row["error"]] if row["chosen"] else "none",
            markeredgecolor=colours[row["error"]],
            markeredgewidth=1.3,
            linestyle="none",
            clip_on=False,
        )
    if rows:
        set_log_range(axes, "y", [scale * row["change"] for row in rows], 1.6)
    else:
        axes.text(
            0.5, 0.5, "no setting is faster than dense", ha="center", transform=axes.transAxes
        )
    _set_layers(axes, record.rows)
    left, top, width, _ = canvas.bounds(axes)
    for index, error in enumerate(reversed(errors)):
        x, text = left + width - LEGEND_STEP * index, f"{error:g}".removeprefix("0")
        canvas.add_text(x, top - 29, text, fontsize=style.SMALL, color=colours[error], ha="right")
    title = "Change by one layer with error" if errors else "Change by one layer"
    y_label = f"{unit}, logarithmic; chosen settings are filled"
    add_labels(canvas, axes, title, y_label, "layer")


def _draw_times(canvas: Canvas, axes: "Axes", record: Record) -> None:
    """Time of the attention of every layer, dense and chosen."""
    chosen = [row for row in record.rows if row["chosen"]]
    layers = [row["layer"] for row in chosen]
    dense, optimal = style.LIGHT["mean"], style.LIGHT["optimal"]
    axes.bar(layers, [row["dense_milliseconds"] for row in chosen], 0.8, color=dense, alpha=0.35)
    axes.bar(layers, [row["milliseconds"] for row in chosen], 0.5, color=optimal)
    labelled = len(chosen) <= MOST_LAYER_TICKS
    for row in chosen if labelled else ():
        text = "" if row["error"] is None else f"{row['error']:g}".removeprefix("0")
        height = max(row["milliseconds"], row["dense_milliseconds"])
        axes.annotate(
            text,
            (row["layer"], height),
            (0, 3),
            textcoords="offset points",
            ha="center",
            fontsize=10,
            color=style.MUTED.light,
        )
    axes.set_ylim(0, 1.15 * max(row["dense_milliseconds"] for row in chosen) or 1.0)
    _set_layers(axes, record.rows)
    y_label = f"milliseconds: dense (grey), chosen (blue{', with its target' if labelled else ''})"
    add_labels(canvas, axes, "Time of attention", y_label, "layer")


def _draw_changes(canvas: Canvas, axes: "Axes", record: Record) -> None:
    """Predicted and measured change of every combination that was checked."""
    scale, unit = _change_unit(record)
    checks, tolerance = record.settings["checks"], scale * record.settings["tolerance"]
    highest = tolerance
    for index, check in enumerate(checks):
        bars = (("predicted_change", -0.2, "mean"), ("validation_change", 0.2, "optimal"))
        for name, shift, colour in bars:
            if check[name] is None:
                continue
            value = scale * check[name]
            highest = max(highest, value)
            axes.bar(index + shift, value, 0.36, color=style.LIGHT[colour])
            if check["chosen"]:
                _label_bar(axes, index + shift, f"{value:.3g}")
    axes.axhline(tolerance, color=style.INK.light, linewidth=1.0)
    axes.set(xlim=(-0.8, max(1, len(checks)) - 0.2), ylim=(0, 1.2 * highest))
    set_ticks(axes.xaxis, range(len(checks)), [str(index + 1) for index in range(len(checks))])
    y_label = f"{unit}: predicted (grey), measured (blue), tolerance (line)"
    x_label = "combinations checked; the plan has its values"
    add_labels(canvas, axes, "Change of the model", y_label, x_label)


def _draw_speed(canvas: Canvas, axes: "Axes", record: Record) -> None:
    """Time of the model, dense, predicted and measured."""
    settings = record.settings
    bars = {
        "dense": (settings["dense_milliseconds"], "mean"),
        "predicted": (settings["predicted_milliseconds"], "mean"),
        "measured": (settings["milliseconds"], "optimal"),
    }
    for index, (name, (value, colour)) in enumerate(bars.items()):
        axes.bar(index, value, 0.5, color=style.LIGHT[colour], alpha=0.35 if name == "dense" else 1)
        _label_bar(axes, index, f"{settings['dense_milliseconds'] / value:.2f}x")
    axes.set(xlim=(-0.6, 2.6), ylim=(0, 1.2 * max(value for value, _ in bars.values())))
    set_ticks(axes.xaxis, range(len(bars)), list(bars))
    height, width = settings["img_size"]
    x_label = f"{width}x{height} px, {settings['dtype']}, {settings['device']}"
    add_labels(canvas, axes, "Time of the model", "milliseconds for a batch", x_label)


def _label_bar(axes: "Axes", x: float, text: str) -> None:
    """Write the value into the foot of a bar, where it hides no line."""
    axes.annotate(
        text,
        (x, 0),
        (0, 6),
        textcoords="offset points",
        ha="center",
        fontsize=style.SMALL,
        bbox={"facecolor": style.SURFACE.light, "edgecolor": "none", "pad": 1.5},
    )


def _set_layers(axes: "Axes", rows: Sequence[Row]) -> None:
    layers = sorted({row["layer"] for row in rows})
    step = -(-len(layers) // MOST_LAYER_TICKS)
    set_ticks(axes.xaxis, layers[::step])
    axes.set_xlim(layers[0] - 0.6, layers[-1] + 0.6)


def _change_unit(record: Record) -> tuple[float, str]:
    """Return the factor and the name of the unit in which changes are shown."""
    measure = record.settings["measure"]
    if measure == "logits":
        return 1.0, "KL in nats"
    return 100.0, "% of the features" if measure == "features" else f"percent ({measure})"


def _shades(count: int) -> list[Any]:
    """Return colours from light to dark, one for each error target."""
    colours = load_package("matplotlib").colormaps["viridis"]
    return [colours(0.85 - 0.85 * index / max(1, count - 1)) for index in range(count)]
