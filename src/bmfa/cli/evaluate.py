"""bmfa evaluate."""

from typing import Annotated

from bmfa.cli import options as opt
from bmfa.cli.groups import option
from bmfa.cli.output import Output

# By importance: without --wide, those that exceed the width are left out.
COLUMNS = (
    "method images top1_percent drop_pp agreement_percent leaf_percent gflops speedup output_kl "
    "final_tokens top5_percent images_per_second images_per_second_end_to_end"
)


def evaluate(
    output: Output,
    images: opt.ModelOnImages,
    method: opt.Methods = None,
    layers: opt.Layers = "last-4",
    amp: Annotated[bool, option("--amp", "Run the model under autocast.")] = False,
    dtype: Annotated[
        str | None, option("--dtype NAME", "Cast the model: float32, float16 or bfloat16.")
    ] = None,
    repeats: Annotated[int, option("--repeats N", "Timings; their median counts. 0 for none.")] = 5,
) -> None:
    """Accuracy, cost and speed of a model, method by method."""
    from bmfa.evidence.classification import run as experiment

    images.run(
        experiment.run,
        output,
        COLUMNS,
        methods=method or experiment.DEFAULT_METHODS,
        layers=opt.parse_layers(layers),
        amp=amp,
        dtype=dtype,
        repeats=repeats,
    )
