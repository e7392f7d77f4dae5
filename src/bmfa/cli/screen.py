"""bmfa screen: one image as a model attends to it."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from bmfa.cli import options as opt
from bmfa.cli.groups import POSITIONAL
from bmfa.cli.output import Output, check_file
from bmfa.packages import require_packages
from bmfa.records import Record

if TYPE_CHECKING:
    from bmfa.data.classification import LabelledImage

EMBEDDED = "embedded:"
COLUMNS = "method layer head query leaves leaf_percent gap error certificate moved_percent"


def screen(
    common: Output,
    image: Annotated[str, POSITIONAL],
    model: opt.ModelOptions,
    layer: int | None = None,
    head: int | None = None,
    query: str = "class",
    method: opt.Methods = None,
    layers: str = "last-4",
    output: str = "screen.png",
) -> None:
    """One image: a query's attention, tree and certificate.

    Args:
        image (IMAGE): An image file, or embedded:N for the N-th embedded image.
        layer (L): Layer to show, from 0; the last by default.
        head (H): Head, from 0; the one with the largest gap by default.
        query (TOKEN): class or ROW,COLUMN.
        method (NAME:VALUE): Method such as gamma:0.005; repeat for several. Without this option, a
            default list runs. The methods are listed at the end of this page.
        layers (CHOICE): Screened layers: all, last-K or indices such as 8,9,10.
        output (FILE.png): File for the figure.
    """
    require_packages(("matplotlib", "PIL"), "report")
    from bmfa.evidence.images import figures
    from bmfa.evidence.images import run as experiment

    check_file("--output", output, ".png")
    view = experiment.View(layer, head, query)
    shown = read_image(image, common.seed)
    record = experiment.run(
        model.load(),
        [shown],
        method or experiment.DEFAULT_METHODS,
        view=view,
        layers=layers,
        seed=common.seed,
        device=common.torch_device(),
    )
    drawn = image.startswith(EMBEDDED)
    common.finish(
        record,
        COLUMNS,
        notes=_predictions(record, layers),
        warnings=[] if drawn else model.toy_warning("this image was"),
        figures={output: partial(figures.screen.png, record)},
    )


def read_image(name: str, seed: int) -> "LabelledImage":
    """Read an image file, or draw the embedded image that `embedded:N` names."""
    from bmfa.data.classification import EmbeddedImages, LabelledImage
    from bmfa.data.images import ImageFiles

    index = name.removeprefix(EMBEDDED)
    if index != name:
        if not index.isdecimal():
            raise ValueError(f"image {name!r} names no embedded image; pass e.g. embedded:3")
        return EmbeddedImages(int(index) + 1, seed)[int(index)]
    path = Path(name)
    if not path.is_file():
        kind = "a folder" if path.is_dir() else "no file"
        raise ValueError(f"{name} is {kind}; pass an image file, or embedded:N to try without one")
    return LabelledImage(path.name, ImageFiles(path.parent).read(path.name))


def _predictions(record: Record, layers: str) -> list[str]:
    """Describe the classes that the model predicts, with full and with screened attention."""
    row = record.rows[0]
    label = f", labelled {row['label']}" if "label" in row else ""
    full = f"\nfull: {row['full_class']} ({row['full_class_percent']:.1f} %){label}"
    return [full] + [
        f"{row['method']} in {layers}: {row['screened_class']} "
        f"({row['screened_class_percent']:.1f} %), output KL {row['output_kl']:.2g}; certificate "
        f"from {row['certificate_from']}"
        for row in record.rows
    ]
