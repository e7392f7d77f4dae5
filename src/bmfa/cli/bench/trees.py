"""bmfa bench trees."""

from typing import Annotated

from bmfa.cli import options as opt
from bmfa.cli.groups import option
from bmfa.cli.output import Output

COLUMNS = (
    "what n dtype method threads microseconds_per_grid speedup multiple_of_softmax leaf_percent "
    "milliseconds"
)


def trees(
    output: Output,
    method: opt.Methods = None,
    grids: Annotated[int, option("--grids N", "Number of 16x16 grids.")] = 36_000,
    batch_size: Annotated[
        int, option("--batch-size N", "Images in a batch of the softmax part.")
    ] = 64,
    repeats: Annotated[int, option("--repeats N", "Timings; their median counts.")] = 7,
) -> None:
    """Trees against the queue-based oracle, and against softmax."""
    from bmfa.evidence.bench import trees as experiment

    record = experiment.run(
        method or experiment.TREE_METHODS,
        grids=grids,
        batch_size=batch_size,
        repeats=repeats,
        seed=output.seed,
        device=output.torch_device(),
    )
    output.finish(record, COLUMNS)
