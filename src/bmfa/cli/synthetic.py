"""bmfa synthetic."""

from bmfa.cli import options as opt
from bmfa.cli.output import Output

COLUMNS = "placement method count mean_gap p95_gap leaf_percent"
CURVE_COLUMNS = "method cells delta minority_mass gap leaf_percent"


def synthetic(
    output: Output,
    method: opt.Methods = None,
    placement: list[str] | None = None,
    max_depth: int = 4,
    scatter_seeds: int = 200,
    curve: bool = False,
) -> None:
    """The stress test: bright minorities on a 16x16 grid.

    396 settings of size and brightness at each of several placements.

    Args:
        method (NAME:VALUE): Method such as gamma:0.005; repeat for several. Without this option, a
            default list runs. The methods are listed at the end of this page.
        placement (NAME): corner, shifted-1-1, shifted-4-4, centred or scattered; repeat for several.
            All of them by default.
        max_depth (D): Depth limit of the trees.
        scatter_seeds (N): Number of scattered masks.
        curve: Run the failure curve at 4 cells and 1 cell instead.
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
