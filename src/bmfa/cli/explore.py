"""bmfa explore: one image on a page where query, layer, head and rule can be chosen."""

from typing import TYPE_CHECKING, Annotated

from bmfa.cli import options as opt
from bmfa.cli.groups import POSITIONAL
from bmfa.cli.output import Output, check_file
from bmfa.cli.screen import EMBEDDED, read_image
from bmfa.packages import require_packages

if TYPE_CHECKING:
    from bmfa.evidence.explorer.run import Exploration

COLUMNS = "layer head height width mean_gap max_gap"


def explore(
    common: Output,
    image: Annotated[str, POSITIONAL],
    model: opt.ModelOptions,
    layers: str | None = None,
    output: str = "explorer.html",
) -> None:
    """One image as an interactive page for the browser.

    Args:
        image (IMAGE): An image file, or embedded:N for the N-th embedded image.
        layers (CHOICE): Layers on the page: all, last-K or indices such as 8,9,10. By default as many
            of the last layers as fit in 4 MB.
        output (FILE.html): File for the page.
    """
    require_packages(("jinja2", "PIL"), "report")
    from bmfa.evidence.explorer import run as experiment
    from bmfa.evidence.explorer.page import build_explorer

    check_file("--output", output, ".html", ".htm")
    exploration = experiment.run(
        model.load(),
        read_image(image, common.seed),
        layers=None if layers is None else opt.parse_layers(layers),
        drawn=image.startswith(EMBEDDED),
        device=common.torch_device(),
    )
    record = exploration.record
    warnings = [f"not on the page: {reason}" for reason in record.settings["left_out"]]
    if not exploration.drawn:
        warnings += model.toy_warning("this image was")
    common.finish(
        record,
        COLUMNS,
        notes=_notes(exploration),
        warnings=warnings,
        figures={output: lambda: build_explorer(exploration).encode()},
    )


def _notes(exploration: "Exploration") -> list[str]:
    from bmfa.evidence.explorer.packing import rounded_up

    rounding = rounded_up(max(row["rounding"] for row in exploration.record.rows))
    lines = [f"\nscores: 16-bit queries and keys change none by more than {rounding}"]
    if exploration.prediction:
        labelled = f", labelled {exploration.label}" if exploration.label else ""
        lines.append(f"prediction: {exploration.prediction}{labelled}")
    shown, depth = len(exploration.layers), exploration.depth
    if shown < depth:
        lines.append(
            f"layers: the page has {shown} of {depth}; --layers all puts all of them on it"
        )
    return lines
