"""bmfa bench trees."""

from bmfa.cli import options as opt
from bmfa.cli.output import Output

COLUMNS = (
    "what n dtype method threads microseconds_per_grid speedup multiple_of_softmax leaf_percent "
    "milliseconds"
)


def trees(
    output: Output,
    method: opt.Methods = None,
    grids: int = 36_000,
    batch_size: int = 64,
    repeats: int = 7,
) -> None:
    """Trees against the queue-based oracle, and against softmax.

    Args:
        method (NAME:VALUE): Method such as gamma:0.005; repeat for several. Without this option, a
            default list runs.
        grids (N): Number of 16x16 grids.
        batch_size (N): Images in a batch of the softmax part.
        repeats (N): Timings; their median counts.
    """
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
