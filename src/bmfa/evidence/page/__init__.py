"""The page of all experiments: shared drawing and text, templates, and the chapters put together."""

from collections.abc import Sequence
from pathlib import Path

from bmfa.evidence.page import figures
from bmfa.evidence.page.build import build_page
from bmfa.files import write_atomic
from bmfa.records import Record

__all__ = ["build_page", "figures", "save_png"]


def save_png(
    name: str, records: Record | Sequence[Record], path: str | Path, *, scale: float = 2.0
) -> None:
    """Write a figure as a PNG file.

    Args:
        name: a name in `figures.ALL`.
        records: one or more records that hold its data.
        path: the file, replaced atomically.
        scale: pixels for each CSS pixel.

    Raises:
        ValueError: if the name is unknown or the records do not hold the data of the figure.
    """
    if name not in figures.ALL:
        raise ValueError(f"no figure is named {name!r}; pass one of {', '.join(figures.ALL)}")
    write_atomic(path, figures.ALL[name].png(records, scale=scale))
