"""bmfa methods."""

from bmfa.cli import options as opt
from bmfa.cli.output import Output, show, table_of

COLUMNS = "method kind reads parameter description"


def methods(
    *,
    json: opt.Json = None,
    seed: opt.Seed = 0,
    device: opt.Device = "auto",
    quiet: opt.Quiet = False,
) -> None:
    """Every method, its parameter and the inputs it reads."""
    from bmfa.evidence.methods import METHODS
    from bmfa.records import Record

    rows = [
        {
            "method": method.usage,
            "kind": method.kind,
            "reads": method.reads,
            "parameter": method.parameter,
            "description": method.description,
        }
        for method in METHODS.values()
    ]
    table = table_of(rows, COLUMNS)
    if json is not None:
        Output(json, quiet).finish(Record("methods", {}, rows), table)
    elif not quiet:
        show(table)  # without a record, whose environment would import torch
