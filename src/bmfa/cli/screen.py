"""bmfa screen: one picture as a model attends to it."""

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from bmfa.cli.output import check_device, finish, table_of
from bmfa.packages import require_packages
from bmfa.records import Record

if TYPE_CHECKING:
    from bmfa.data.imagenet import LabelledPicture

EMBEDDED = "embedded:"
COLUMNS = "method layer head query leaves leaf_percent gap error certificate moved_percent"


def screen(options: argparse.Namespace) -> None:
    """bmfa screen."""
    require_packages(("matplotlib", "PIL"), "report")
    from bmfa.evidence.page import figures
    from bmfa.evidence.pictures import picture
    from bmfa.models import load_model

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
    finish(
        record,
        options,
        table_of(record, COLUMNS),
        notes=_said(record, options),
        figures={options.output: partial(figures.screen.png, record)},
    )


def read_picture(name: str, seed: int) -> "LabelledPicture":
    """A file, or one of the embedded pictures."""
    from bmfa.data.imagenet import EmbeddedPictures, LabelledPicture
    from bmfa.data.pictures import PictureFiles

    index = name.removeprefix(EMBEDDED)
    if index != name:
        if not index.isdecimal():
            raise ValueError(f"picture {name!r} names no embedded picture; pass e.g. embedded:3")
        return EmbeddedPictures(int(index) + 1, seed).read(int(index))
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


def _said(record: Record, options: argparse.Namespace) -> list[str]:
    """The classes that the model gives, full and screened."""
    row = record.rows[0]
    label = f", labelled {row['label']}" if "label" in row else ""
    first = f"\nfull: {row['full_class']} ({row['full_class_percent']:.1f} %){label}"
    return [first] + [
        f"{row['method']} in {options.layers}: {row['screened_class']} "
        f"({row['screened_class_percent']:.1f} %), output KL {row['output_kl']:.2g}; certificate "
        f"from {row['certificate_from']}"
        for row in record.rows
    ]
