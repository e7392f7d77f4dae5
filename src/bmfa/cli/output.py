"""What the commands print and write, and how they refuse."""

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from bmfa.files import write_whole
from bmfa.records import Record, text_table

# Seconds that a process which is not the first waits before it tells of an error.
DEFERENCE = 5.0


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
