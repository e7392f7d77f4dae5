"""All figures by name."""

from collections.abc import Sequence
from pathlib import Path

from bmfa.evidence.ablation.chapter import ablation
from bmfa.evidence.bench.figures import attention_error, attention_time, saliency
from bmfa.evidence.classification.chapter import accuracy, reductions, top1
from bmfa.evidence.closed_loop.chapter import closed_loop, layers
from bmfa.evidence.comparison.chapter import equal_leaves, equal_operations
from bmfa.evidence.failures.figures import failures
from bmfa.evidence.faster.figures import faster, faster_models, masks
from bmfa.evidence.images.figures import attention_cases, cases, motivation, pipeline, screen
from bmfa.evidence.page import plots
from bmfa.evidence.probes.chapter import distribution, trade_off
from bmfa.evidence.synthetic.chapter import failure_curve, gallery, placements
from bmfa.files import write_atomic
from bmfa.records import Record

__all__ = ["ALL", "save_png", "screen"]

# The figures of the page. `screen` shows one image at a time and is not part of the page.
ALL: dict[str, plots.Figure] = {
    figure.name: figure
    for figure in (
        *(gallery, faster, faster_models, masks, failure_curve, placements),
        *(trade_off, distribution, ablation),
        *(motivation, pipeline, cases, failures, equal_leaves, equal_operations),
        *(closed_loop, layers, attention_cases, top1, accuracy, reductions),
        *(saliency, attention_time, attention_error),
    )
}


def save_png(
    name: str, records: Record | Sequence[Record], path: str | Path, *, scale: float = 2.0
) -> None:
    """Write a figure as a PNG file.

    Args:
        name: a name in `ALL`.
        records: one or more records that hold its data.
        path: the file, replaced atomically.
        scale: pixels for each CSS pixel.

    Raises:
        ValueError: if the name is unknown or the records do not hold the data of the figure.
    """
    if name not in ALL:
        raise ValueError(f"no figure is named {name!r}; pass one of {', '.join(ALL)}")
    write_atomic(path, ALL[name].png(records, scale=scale))
