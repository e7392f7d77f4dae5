"""Records to figures and one page."""

from collections.abc import Sequence
from pathlib import Path

from bmfa.evidence.page import figures
from bmfa.evidence.page.page import build_page
from bmfa.files import write_atomic
from bmfa.records import Record

__all__ = ["build_page", "figures", "save_png"]


def save_png(
    name: str, records: Record | Sequence[Record], path: str | Path, *, scale: float = 2.0
) -> None:
    """Write a figure, by its name in `figures.ALL`, as PNG; the file appears whole or not at all."""
    if name not in figures.ALL:
        raise ValueError(f"no figure is named {name!r}; pass one of {', '.join(figures.ALL)}")
    write_atomic(path, figures.ALL[name].png(records, scale=scale))
