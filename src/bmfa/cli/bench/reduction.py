"""bmfa bench reduction."""

from bmfa.cli import options as opt
from bmfa.cli.output import Output

COLUMNS = (
    "baseline schedule chosen_on reported_on images gflops agreement_percent output_kl gain_pp "
    "gain_low_pp gain_high_pp"
)


def reduction(
    output: Output,
    data: opt.LabelledData,
    workers: int = 1,
    choosing: int | None = None,
    rounds: int = 1,
    policy: str = "free-energy",
    baseline: list[str] | None = None,
) -> None:
    """Token merging with tuned and with fixed schedules.

    A schedule is tuned on one half of the images and measured on the other.

    Args:
        workers (N): 2 runs the two halves in processes of their own.
        choosing (N): Images of a half that choose; all by default.
        rounds (N): Rounds of exchanges of tokens between blocks.
        policy (NAME): The policy whose schedules are tuned.
        baseline (NAME:VALUE): Reduction to compare with: tome:8; may be repeated.
    """
    from bmfa.evidence.bench import reduction as experiment

    device = output.torch_device()
    loaded = data.load()
    record = experiment.run(
        loaded,
        data.images(loaded, output.seed),
        baseline or experiment.BASELINES,
        policy=policy,
        batch_size=data.batch_size,
        seed=output.seed,
        device=device,
        workers=workers,
        choosing=choosing,
        rounds=rounds,
        progress=not output.quiet,
    )
    output.finish(record, COLUMNS)
