"""What the commands print and write, and how they refuse."""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from bmfa.files import write_atomic
from bmfa.records import Record, text_table

# Seconds that a process which is not the first waits before it tells of an error.
DEFERENCE = 5.0


def finish(
    record: Record,
    options: argparse.Namespace,
    table: str,
    *,
    notes: Sequence[str] = (),
    warnings: Sequence[str] = (),
    figures: Mapping[str | Path, Callable[[], bytes]] | None = None,
    announce: bool = True,
) -> None:
    """Print the result of a command, then write its files.

    What cannot be printed or written does not keep the rest from being printed and written, so that
    the work is not lost; where the record cannot be written, `--quiet` prints the table too.

    Args:
        record: what `--json` writes.
        options: those of the command; `json` and `quiet` are read.
        table: the rows as text; not printed where the record itself goes to standard output.
        notes: lines below the table, printed where it is.
        warnings: lines on what the table lacks; beside a record on standard output they go to
            standard error.
        figures: further files by path, made when they are written.
        announce: print the names of the files.

    Raises:
        OSError: with the first that could not be printed or written.
    """
    beside = options.json == "-"
    errors: list[OSError] = []
    try:
        with printing():
            if not options.quiet:
                for line in () if beside else (table, *notes):
                    print(line)
                for line in warnings:
                    print(line, file=sys.stderr if beside else sys.stdout)
    except OSError as error:
        errors.append(error)
    files: dict[str | Path, Callable[[], bytes | str]] = {**(figures or {})}
    if options.json is not None:
        files[options.json] = record.to_json
    for path, content in files.items():
        try:
            write_atomic(path, content())
        except OSError as error:
            errors.append(error)
            continue
        if announce and not options.quiet and not beside:
            print(f"{'record' if path == options.json else 'figure'}: {path}")
    if errors:
        if options.quiet and not beside:
            with suppress(OSError), printing():
                print(table)
        raise errors[0]


def table_of(record: Record, columns: str, group: str | None = None) -> str:
    """The rows of a record, or those of one group, as text."""
    rows = [row for row in record.rows if group is None or row["group"] == group]
    return text_table(rows, columns.split())


def progress_line(options: argparse.Namespace, what: str = "") -> Callable[[int, int], None] | None:
    """A line that counts up on a terminal, with the rate and the time left; nothing in a pipe."""
    if options.quiet or process_rank() != 0 or not sys.stderr.isatty():
        return None
    first: list[tuple[int, float]] = []  # what was done when, at the first call

    def show(done: int, total: int) -> None:
        now = time.monotonic()
        first[:] = first or [(done, now)]
        line = "" if done >= total else f"{what} {done}/{total}".strip()
        seconds, steps = now - first[0][1], done - first[0][0]
        if line and steps > 0 and seconds > 0:
            rate = steps / seconds
            line += f", {rate:.3g}/s, {_duration((total - done) / rate)} left"
        print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)

    return show


def _duration(seconds: float) -> str:
    """Hours and minutes, minutes and seconds, or seconds."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


def process_rank() -> int:
    """The rank that torchrun gave this process; 0 without it."""
    return int(os.environ.get("RANK", "0")) if os.environ.get("WORLD_SIZE", "1") != "1" else 0


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


@contextmanager
def printing() -> Iterator[None]:
    """Print inside the block; where that fails, say so once and not again when Python exits."""
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            raise
        raise OSError(f"standard output cannot be written ({error.strerror})") from error


def refuse(message: str) -> NoReturn:
    """End with one line and exit status 2.

    Of several processes the first tells first: where it meets the same error, torchrun ends the
    others while they wait, and the line appears once.
    """
    rank = process_rank()
    if rank != 0:
        time.sleep(DEFERENCE)
    place = f" process {rank}:" if rank else ""
    print(f"bmfa:{place} {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)
