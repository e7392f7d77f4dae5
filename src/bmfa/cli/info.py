"""bmfa info."""

from bmfa.cli.output import Output, table_of


def info(output: Output) -> None:
    """Versions, devices, backends, and why one is unavailable."""
    from bmfa.environment import describe

    record = describe()
    columns = "what name status"
    output.finish(record, columns, table=table_of(record.rows, columns, wide=True))
