"""bmfa evaluate."""

from bmfa.cli import options as opt
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
    plan: str | None = None,
    layers: str = "last-4",
    amp: bool = False,
    dtype: str | None = None,
    repeats: int = 5,
) -> None:
    """Accuracy, cost and speed of a model, method by method.

    Args:
        method (NAME:VALUE): Method such as gamma:0.005; repeat for several. Without this option, a
            default list runs. The methods are listed at the end of this page.
        plan (FILE): Plan of bmfa tune, which is compared with the full model and the other methods.
        layers (CHOICE): Screened layers: all, last-K or indices such as 8,9,10.
        amp: Run the model under autocast.
        dtype (NAME): Cast the model: float32, float16 or bfloat16.
        repeats (N): Timings; their median counts. 0 for none.
    """
    from bmfa.evidence.classification import run as experiment
    from bmfa.evidence.classification.chapter import accuracy
    from bmfa.evidence.model_methods import PLAN

    if images.figure is not None and repeats == 0:
        raise ValueError("--figure draws images per second, which --repeats 0 does not measure")
    if plan is not None:
        method = [*(method or ()), f"{PLAN}{plan}"]
    images.run(
        experiment.run,
        output,
        COLUMNS,
        accuracy,
        methods=method or experiment.DEFAULT_METHODS,
        layers=opt.parse_layers(layers),
        amp=amp,
        dtype=dtype,
        repeats=repeats,
    )
