"""bmfa methods, and the methods on the help pages of other commands."""

import textwrap
from collections.abc import Sequence

from bmfa.cli.output import COLUMN_GAP, MAX_WIDTH, Output, table_of
from bmfa.evidence.methods import KINDS, METHODS, Kind, Method

COLUMNS = "method kind reads parameter description"
# Characters of a help page, as typer prints it to a file or pipe.
HELP_WIDTH = 78
NAME_WIDTH = max(len(method.usage) for method in METHODS.values()) + COLUMN_GAP


def methods(output: Output) -> None:
    """Every method, its parameter and the inputs it reads."""
    from bmfa.records import Record

    columns = ("kind", "reads", "parameter", "description")
    rows = [
        {"method": method.usage} | {name: getattr(method, name) for name in columns}
        for method in METHODS.values()
    ]
    table = table_of(rows, COLUMNS, wide=True) if output.wide else listing()
    if output.json is not None or output.csv is not None:
        output.finish(Record("methods", {}, rows), COLUMNS, table=table)
    elif not output.quiet:
        print(table)  # without a record, whose environment would import torch


def listing() -> str:
    """Return all methods by kind: the name, what the method does, its parameter and what it reads."""
    parts = []
    for kind, meaning in KINDS.items():
        found = [method for method in METHODS.values() if method.kind == kind]
        parts += [f"{kind}: {meaning}", *map(_entry, found), ""]
    return "\n".join(parts[:-1])


def _entry(method: Method) -> str:
    value = f"VALUE: {method.parameter}; reads " if method.parameter else "reads "
    lines = [method.description, value + method.reads]
    wrapped = [part for line in lines for part in textwrap.wrap(line, MAX_WIDTH - NAME_WIDTH)]
    names = [method.usage, *[""] * (len(wrapped) - 1)]
    pairs = zip(names, wrapped, strict=True)
    return "\n".join(f"{name:{NAME_WIDTH}}{line}" for name, line in pairs)


def help_text(kinds: Sequence[Kind]) -> str:
    """Return the names of some kinds and their parameters, for the end of a help page."""
    lines = ["Methods for --method, and what VALUE is (`bmfa methods` describes them):"]
    for method in (m for kind in kinds for m in METHODS.values() if m.kind == kind):
        meaning = textwrap.wrap(method.parameter, HELP_WIDTH - NAME_WIDTH - COLUMN_GAP) or [""]
        lines.append(f"{'':{COLUMN_GAP}}{method.usage:{NAME_WIDTH}}{meaning[0]}".rstrip())
        lines += [f"{'':{COLUMN_GAP + NAME_WIDTH}}{more}" for more in meaning[1:]]
    return "\b\n" + "\n".join(lines)  # \b: typer keeps the lines as they are
