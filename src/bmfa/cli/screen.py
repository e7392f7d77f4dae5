"""bmfa screen: one picture as a model attends to it."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from bmfa.cli.output import check_device, finish
from bmfa.files import write_whole
from bmfa.records import Record

if TYPE_CHECKING:
    from bmfa.data.imagenet import LabelledPicture

EMBEDDED = "embedded:"
COLUMNS = "method layer head query leaves leaf_percent gap error certificate moved_percent"


def screen(options: argparse.Namespace) -> None:
    """bmfa screen."""
    from bmfa.experiments import picture
    from bmfa.models import load_model
    from bmfa.report import figures

    _check_figure(options.output)
    view = picture.View(options.layer, options.head, options.query)
    shown = read_picture(options.picture, options.seed)
    model = load_model(
        options.model, options.weights, img_size=options.img_size, crop_pct=options.crop_pct
    )
    record = picture.run(
        model,
        [shown],
        options.method or picture.DEFAULT_METHODS,
        view=view,
        layers=options.layers,
        seed=options.seed,
        device=check_device(options.device),
    )
    write_whole(options.output, figures.screen.png(record))
    finish(record, options, COLUMNS)
    if not options.quiet and options.json != "-":
        _tell(record, options)


def read_picture(name: str, seed: int) -> "LabelledPicture":
    """A file, or one of the embedded pictures."""
    from bmfa.data.embedded import figure_picture
    from bmfa.data.imagenet import LabelledPicture
    from bmfa.data.pictures import PictureFiles

    index = name.removeprefix(EMBEDDED)
    if index != name:
        if not index.isdecimal():
            raise ValueError(f"picture {name!r} names no embedded picture; pass e.g. embedded:3")
        pixels, label, _ = figure_picture(seed, int(index))
        return LabelledPicture(f"embedded {seed}/{index}", pixels, label)
    path = Path(name)
    if not path.is_file():
        kind = "a folder" if path.is_dir() else "no file"
        raise ValueError(f"{name} is {kind}; pass a picture file, or embedded:N to try without one")
    return LabelledPicture(path.name, PictureFiles(path.parent).read(path.name))


def _check_figure(path: str) -> None:
    """Find out before the work whether the figure can be written."""
    if Path(path).is_dir() or Path(path).suffix.lower() != ".png":
        raise ValueError(f"--output {path} is no name of a figure; pass FILE.png")
    Path(path).parent.mkdir(parents=True, exist_ok=True)


def _tell(record: Record, options: argparse.Namespace) -> None:
    """What the model says, and where the figure is."""
    row = record.rows[0]
    label = f", labelled {row['label']}" if "label" in row else ""
    print(f"\nfull: {row['full_class']} ({row['full_class_percent']:.1f} %){label}")
    for row in record.rows:
        print(
            f"{row['method']} in {options.layers}: {row['screened_class']} "
            f"({row['screened_class_percent']:.1f} %), output KL {row['output_kl']:.2g}; certificate "
            f"from {row['certificate_from']}"
        )
    print(f"figure: {options.output}")
