"""bmfa synthetic."""

from typing import Annotated

from bmfa.cli import options as opt
from bmfa.cli.groups import option
from bmfa.cli.output import Output

COLUMNS = "placement method count mean_gap p95_gap leaf_percent"
CURVE_COLUMNS = "method cells delta minority_mass gap leaf_percent"


def synthetic(
    output: Output,
    method: opt.Methods = None,
    placement: Annotated[
        list[str] | None,
        option(
            "--placement NAME",
            "corner, shifted-1-1, shifted-4-4, centred or scattered; repeat for several. "
            "All of them by default.",
        ),
    ] = None,
    max_depth: Annotated[int, option("--max-depth D", "Depth limit of the trees.")] = 4,
    scatter_seeds: Annotated[int, option("--scatter-seeds N", "Number of scattered masks.")] = 200,
    curve: Annotated[
        bool, option("--curve", "Run the failure curve at 4 cells and 1 cell instead.")
    ] = False,
) -> None:
    """The stress test: bright minorities on a 16x16 grid.

    396 settings of size and brightness at each of several placements.
    """
    from bmfa.evidence.methods import DEFAULT_METHODS
    from bmfa.evidence.synthetic import run as experiment

    methods = method or DEFAULT_METHODS
    if curve:
        record = experiment.failure_curve(methods, seed=output.seed)
        return output.finish(record, CURVE_COLUMNS)
    record = experiment.run(
        methods,
        placement or experiment.PLACEMENTS,
        max_depth=max_depth,
        seed=output.seed,
        scatter_seeds=scatter_seeds,
        device=output.torch_device(),
        progress=output.progress("placements"),
    )
    output.finish(record, COLUMNS)
