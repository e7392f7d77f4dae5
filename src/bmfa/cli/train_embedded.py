"""bmfa train-embedded."""

from typing import Annotated

from bmfa.cli import options as opt
from bmfa.cli.output import Output


def train_embedded(
    *,
    json: opt.Json = None,
    seed: Annotated[
        int | None, opt.option("--seed N", "Seed; that of the shipped weights by default.")
    ] = None,
    device: opt.Device = "auto",
    quiet: opt.Quiet = False,
    output: Annotated[
        str, opt.option("--output FILE", "File for the weights.")
    ] = "embedded.safetensors",
    steps: Annotated[
        int | None, opt.option("--steps N", "Steps; those of the shipped weights by default.")
    ] = None,
    resume: Annotated[
        str | None,
        opt.option(
            "--resume FILE", "Checkpoint to continue from; it is created if it does not exist."
        ),
    ] = None,
) -> None:
    """Train the embedded model from scratch."""
    from bmfa.models.embedded import training

    progress = Output(json, quiet).progress("steps")
    training.train(
        output,
        seed=training.SEED if seed is None else seed,
        steps=training.STEPS if steps is None else steps,
        device=opt.resolve_device(device),
        resume=resume,
        progress=None if progress is None else lambda step, steps, _: progress(step, steps),
    )
    if not quiet:
        print(f"weights: {output}")
