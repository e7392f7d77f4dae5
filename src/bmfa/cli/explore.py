"""bmfa explore: one image on a page where query, layer, head and rule can be chosen."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument

from bmfa.cli import options as opt
from bmfa.cli.output import Output, table_of
from bmfa.cli.screen import EMBEDDED, read_image
from bmfa.packages import require_packages

if TYPE_CHECKING:
    from bmfa.evidence.explorer.run import Exploration

COLUMNS = "layer head height width mean_gap max_gap"


def explore(
    *,
    image: Annotated[
        str,
        Argument(metavar="IMAGE", help="An image file, or embedded:N for the N-th embedded image."),
    ],
    json: opt.Json = None,
    seed: opt.Seed = 0,
    device: opt.Device = "auto",
    quiet: opt.Quiet = False,
    model: opt.Model = "embedded",
    weights: opt.Weights = None,
    layers: Annotated[
        str | None,
        opt.option(
            "--layers CHOICE",
            "Layers on the page: all, last-K or indices such as 8,9,10. By default as many of the last "
            "layers as fit in 4 MB.",
        ),
    ] = None,
    crop_pct: opt.CropPct = None,
    img_size: opt.ImgSize = None,
    output: Annotated[
        str, opt.option("--output FILE.html", "File for the page.")
    ] = "explorer.html",
) -> None:
    """One image as an interactive page for the browser."""
    require_packages(("jinja2", "PIL"), "report")
    from bmfa.evidence.explorer import run as experiment
    from bmfa.evidence.explorer.page import build_explorer
    from bmfa.models import load_model

    _check_page(output)
    exploration = experiment.run(
        load_model(model, weights, img_size=img_size, crop_pct=crop_pct),
        read_image(image, seed),
        layers=None if layers is None else opt.parse_layers(layers),
        drawn=image.startswith(EMBEDDED),
        device=opt.resolve_device(device),
    )
    record = exploration.record
    warnings = [f"not on the page: {reason}" for reason in record.settings["left_out"]]
    if not exploration.drawn:
        warnings += opt.toy_model_warning(model, weights, "this image was")
    Output(json, quiet).finish(
        record,
        table_of(record.rows, COLUMNS),
        notes=_notes(exploration),
        warnings=warnings,
        figures={output: lambda: build_explorer(exploration).encode()},
    )


def _check_page(path: str) -> None:
    """Raise before the work if the page cannot be written."""
    if Path(path).is_dir() or Path(path).suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"--output {path} is not the name of a page; pass FILE.html")
    Path(path).parent.mkdir(parents=True, exist_ok=True)


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
