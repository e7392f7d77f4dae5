"""What the commands print and write, and how they refuse."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from bmfa.files import write_whole
from bmfa.records import Record, text_table


def finish(
    record: Record, options: argparse.Namespace, columns: str, group: str | None = None
) -> None:
    """Write the record where asked, and print its table unless that would spoil the output."""
    if options.json is not None:
        write_whole(options.json, record.to_json())
    if not options.quiet and options.json != "-":
        rows = [row for row in record.rows if group is None or row["group"] == group]
        print(text_table(rows, columns.split()))
        if options.json is not None:
            print(f"\nrecord: {options.json}")


def progress_line(options: argparse.Namespace, what: str = "") -> Callable[[int, int], None] | None:
    """A line that counts up on a terminal; nothing in a pipe."""
    if options.quiet or not sys.stderr.isatty():
        return None

    def show(done: int, total: int) -> None:
        line = "" if done >= total else f"{what} {done}/{total}".strip()
        print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)

    return show


def check_device(name: str) -> str:
    """The device, if torch has it here."""
    import torch

    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"device {name!r} is not usable ({reason}); pass --device cpu") from None
    return name


def check_target(path: str | None) -> None:
    """Find out before the work whether its result can be written."""
    if path is None or path == "-":
        return
    if Path(path).is_dir():
        raise ValueError(f"--json {path} is a folder; name a file in it")
    Path(path).parent.mkdir(parents=True, exist_ok=True)


def refuse(message: str) -> NoReturn:
    """End with one line and exit status 2."""
    print(f"bmfa: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)
