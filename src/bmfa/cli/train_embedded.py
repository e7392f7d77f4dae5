"""bmfa train-embedded."""

from typing import TYPE_CHECKING, Annotated

from bmfa.cli import options as opt
from bmfa.cli.output import Output, table_of

if TYPE_CHECKING:
    from bmfa.records import Row


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
        int | None, opt.option("--steps N", "Length of the training in steps instead of seconds.")
    ] = None,
    seconds: Annotated[
        float | None,
        opt.option(
            "--seconds S", "Length of the training; that of the shipped weights by default."
        ),
    ] = None,
    stop_after: Annotated[
        float | None,
        opt.option("--stop-after S", "Stop this call after S seconds; --resume FILE goes on."),
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

    record = training.train(
        output,
        seed=training.SEED if seed is None else seed,
        steps=steps,
        seconds=seconds,
        stop_after=stop_after,
        device=opt.resolve_device(device),
        resume=resume,
        log=None if quiet else _print_row,
    )
    if record is None:
        if not quiet:
            print(
                f"stopped after {stop_after:g} s; run the same command again to go on from {resume}"
            )
        return
    held_out = [row for row in record.rows if row["what"] == "held-out"]
    table = table_of(held_out, "img_size tokens grain images top1_percent mask_iou")
    Output(json, quiet).finish(record, table, notes=[f"weights: {output}"])


def _print_row(row: "Row") -> None:
    print("  ".join(f"{name} {value}" for name, value in row.items() if name != "what"), flush=True)
