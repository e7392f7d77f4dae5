"""bmfa closed-loop."""

from bmfa.cli import options as opt
from bmfa.cli.output import Output

COLUMNS = "method layers images leaf_percent agreement_percent output_kl attention_kl top1_percent"


def closed_loop(
    output: Output,
    images: opt.ModelOnImages,
    method: opt.Methods = None,
    layers: list[str] | None = None,
) -> None:
    """A model's outputs with its attention screened.

    Args:
        method (NAME:VALUE): Method such as gamma:0.005; repeat for several. Without this option, a
            default list runs. The methods are listed at the end of this page.
        layers (CHOICE): Screened layers: all, last-K or indices such as 8,9,10; repeat for several
            choices.  [default: last-4]
    """
    from bmfa.evidence.closed_loop import run as experiment
    from bmfa.evidence.closed_loop.chapter import closed_loop as drawing

    images.run(
        experiment.run,
        output,
        COLUMNS,
        drawing,
        methods=method or experiment.DEFAULT_METHODS,
        layers=[opt.parse_layers(text) for text in layers or ["last-4"]],
    )
