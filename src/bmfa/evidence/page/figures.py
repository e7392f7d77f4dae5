"""All figures by name."""

from bmfa.evidence.ablation.figures import ablation
from bmfa.evidence.bench.figures import attention_error, attention_time
from bmfa.evidence.classification.figures import accuracy, reductions, top1
from bmfa.evidence.closed_loop.figures import closed_loop, layers
from bmfa.evidence.page.canvas import Figure
from bmfa.evidence.pictures.figures import attention_cases, cases, motivation, pipeline, screen
from bmfa.evidence.probes.figures import distribution, trade_off
from bmfa.evidence.synthetic.figures import failure_curve, gallery, placements

__all__ = ["ALL", "screen"]

# The figures of the page. `screen` shows one picture at a time and is not part of the page.
ALL: dict[str, Figure] = {
    figure.name: figure
    for figure in (
        *(gallery, failure_curve, placements, motivation, pipeline, trade_off, distribution),
        *(ablation, cases, closed_loop, layers, top1, accuracy, reductions, attention_cases),
        *(attention_time, attention_error),
    )
}
