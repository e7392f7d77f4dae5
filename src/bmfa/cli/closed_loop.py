"""bmfa closed-loop."""

from typing import Annotated

from bmfa.cli import options as opt
from bmfa.cli.groups import option
from bmfa.cli.output import Output

COLUMNS = "method layers images leaf_percent agreement_percent output_kl attention_kl top1_percent"


def closed_loop(
    output: Output,
    images: opt.ModelOnImages,
    method: opt.Methods = None,
    layers: Annotated[
        list[str] | None,
        option(
            "--layers CHOICE",
            "Screened layers: all, last-K or indices such as 8,9,10; repeat for several "
            "choices.  [default: last-4]",
        ),
    ] = None,
) -> None:
    """A model's outputs with its attention screened."""
    from bmfa.evidence.closed_loop import run as experiment

    images.run(
        experiment.run,
        output,
        COLUMNS,
        methods=method or experiment.DEFAULT_METHODS,
        layers=[opt.parse_layers(text) for text in layers or ["last-4"]],
    )
