"""bmfa info."""

from bmfa.cli import options as opt
from bmfa.cli.output import Output, table_of


def info(
    *,
    json: opt.Json = None,
    seed: opt.Seed = 0,
    device: opt.Device = "auto",
    quiet: opt.Quiet = False,
) -> None:
    """Versions, devices, backends, and why one is unavailable."""
    from bmfa.environment import describe

    record = describe()
    Output(json, quiet).finish(record, table_of(record.rows, "what name status", wide=True))
