"""Tables, files, progress and error lines of the commands."""

import csv
import io
import os
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from bmfa.files import write_atomic
from bmfa.records import Record, Row

if TYPE_CHECKING:
    from bmfa.evidence.runner import Progress

# Seconds that the other processes of torchrun wait before they report an error. If the first one
# meets the same error, torchrun ends the others while they wait, and the line appears once.
REPORT_DELAY = 5.0
# Characters in a line of a table without --wide: two windows side by side on a common screen.
MAX_WIDTH = 120
COLUMN_GAP = 2  # spaces between two columns
# What a written file is called by its suffix; any other is a figure.
KINDS = {".json": "plan", ".html": "page", ".htm": "page"}


@dataclass(frozen=True)
class Common:
    """The options of every command.

    Args:
        quiet: Print no table and no progress.
        seed (N): Seed of all random numbers.
        device (NAME): auto (CUDA if available, else the CPU), cpu, cuda, cuda:1 or mps.
    """

    quiet: bool = False
    seed: int = 0
    device: str = "auto"

    def torch_device(self, own: Callable[[str], str] = str) -> str:
        """Return the torch device that `--device` stands for.

        Args:
            own: Returns the device of this process of torchrun.

        Raises:
            ValueError: If the device cannot be used on this machine.
        """
        import torch

        name = own(
            self.device if self.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
        )
        try:
            torch.empty(1, device=name)
        except (RuntimeError, AssertionError) as error:
            reason = str(error).splitlines()[0]
            raise ValueError(
                f"device {name!r} is not usable ({reason}); pass --device cpu"
            ) from None
        return name


@dataclass(frozen=True)
class Output(Common):
    """The options of a command that shows a record.

    Args:
        json (FILE): Write the record to FILE; - is standard output.
        csv (FILE): Write the rows as CSV to FILE; - is standard output.
        wide: Print every column; by default at most 120 characters.
    """

    json: str | None = None
    csv: str | None = None
    wide: bool = False

    def progress(self, unit: str) -> "Progress | None":
        """Return a callback that draws a bar on a terminal; None with `--quiet`."""
        if self.quiet or process_rank() != 0:
            return None
        from tqdm import tqdm

        bar: Any = None

        def update(done: int, total: int) -> None:
            nonlocal bar
            if bar is None or bar.n >= bar.total:
                # Steps of an earlier run that is being resumed do not count towards the rate.
                options = {"disable": None, "leave": False, "dynamic_ncols": True}
                bar = tqdm(initial=done, total=total, unit=f" {unit}", **options)
            bar.update(done - bar.n)
            if done >= total:
                bar.close()

        return update

    def finish(
        self,
        record: Record,
        columns: str,
        *,
        table: str | None = None,
        notes: Sequence[str] = (),
        warnings: Sequence[str] = (),
        figures: Mapping[str | Path, Callable[[], bytes]] | None = None,
        announce: bool = True,
    ) -> None:
        """Print the result of a command, then write its files.

        If one part cannot be printed or written, the others still are, so that the work is not lost;
        if the record cannot be written, the table is printed even with `--quiet`.

        Args:
            record: Written by `--json`, its rows by `--csv`.
            columns: The columns of the table that is printed unless the record or its rows go to
                standard output.
            table: Another table to print.
            notes: Lines below the table.
            warnings: Lines about missing data; they go to standard error if the record goes to
                standard output.
            figures: Functions that return the content of further files, by path: figures, plans
                (`.json`) and pages (`.html`).
            announce: True to print the names of the files.

        Raises:
            OSError: The first part that could not be printed or written.
        """
        to_stdout = "-" in (self.json, self.csv)
        table = table_of(record.rows, columns, self.wide) if table is None else table
        files: dict[str | Path, Callable[[], bytes | str]] = {**(figures or {})}
        files |= {} if self.json is None else {self.json: record.to_json}
        files |= {} if self.csv is None else {self.csv: partial(csv_of, record.rows)}
        errors: list[OSError] = []
        with _collected(errors), flushed_stdout():
            for line in () if self.quiet or to_stdout else (table, *notes):
                print(line)
            for line in () if self.quiet else warnings:
                print(line, file=sys.stderr if to_stdout else sys.stdout)
        for path, content in files.items():
            with _collected(errors):
                write_atomic(path, content())
                if announce and not self.quiet and not to_stdout:
                    kind = KINDS.get(Path(path).suffix, "figure")
                    kind = {self.json: "record", self.csv: "rows"}.get(str(path), kind)
                    print(f"{kind}: {path}")
        if errors and self.quiet and not to_stdout:
            with suppress(OSError), flushed_stdout():
                print(table)
        if errors:
            raise errors[0]


@contextmanager
def _collected(errors: list[OSError]) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        errors.append(error)


def csv_of(rows: Sequence[Row]) -> str:
    """Return rows as CSV: a header of all keys with numbers in full; lists are left out.

    Example:
        >>> print(csv_of([{"method": "full", "images": 2}, {"method": "a,b", "gflops": 0.5}]), end="")
        method,images,gflops
        full,2,
        "a,b",,0.5
    """
    text = io.StringIO()
    flat = [{k: v for k, v in row.items() if not isinstance(v, list | dict)} for row in rows]
    keys = list(dict.fromkeys(key for row in flat for key in row))
    writer = csv.DictWriter(text, keys, lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return text.getvalue()


def table_of(rows: Sequence[Row], columns: str, wide: bool = False) -> str:
    """Return a table of rows, numbers aligned to the right with three decimals for floats.

    Args:
        rows: Rows of a record.
        columns: Keys of the rows, separated by spaces; a key that no row has is left out.
        wide: True for all columns; False leaves out those that exceed `MAX_WIDTH` characters, and
            names them below the table.

    Example:
        >>> print(table_of([{"method": "full", "images": 2, "gap": 0.5}], "method images gap"))
        method  images    gap
        ---------------------
        full         2  0.500
    """
    names = [name for name in columns.split() if any(row.get(name) is not None for row in rows)]
    cells = {name: [name, *(_cell(row.get(name)) for row in rows)] for name in names}
    widths = {name: max(map(len, cells[name])) for name in names}
    shown = list(names)
    while not wide and len(shown) > 1 and _total(widths[name] for name in shown) > MAX_WIDTH:
        shown.pop()
    numeric = {
        name for name in shown if any(isinstance(row.get(name), int | float) for row in rows)
    }
    lines = []
    for number in range(len(rows) + 1):
        line = [
            f"{cells[name][number]:{'>' if name in numeric else '<'}{widths[name]}}"
            for name in shown
        ]
        lines.append((" " * COLUMN_GAP).join(line).rstrip())
    lines.insert(1, "-" * _total(widths[name] for name in shown))
    if len(shown) < len(names):
        hidden = f"more with --wide: {', '.join(names[len(shown) :])}"
        lines.append(textwrap.fill(hidden, MAX_WIDTH))
    return "\n".join(lines)


def _total(widths: Iterable[int]) -> int:
    """Return the width of columns of some widths."""
    return sum(width + COLUMN_GAP for width in widths) - COLUMN_GAP


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def process_rank() -> int:
    """Return the rank that torchrun gave this process, 0 without torchrun."""
    return int(os.environ.get("RANK", "0")) if os.environ.get("WORLD_SIZE", "1") != "1" else 0


def check_targets(json: str | None, csv: str | None = None) -> None:
    """Raise before the work if the record or its rows cannot be written to these paths."""
    if json is not None and json == csv:
        where = "standard output" if json == "-" else json
        raise ValueError(f"--json and --csv both go to {where}; pass a file name for one of them")
    for name, path in (("--json", json), ("--csv", csv)):
        if path is not None and path != "-":
            check_file(name, path)


def check_file(name: str, path: str, *suffixes: str) -> None:
    """Raise before the work if a file with one of these suffixes cannot be written to this path."""
    if Path(path).is_dir():
        raise ValueError(f"{name} {path} is a folder; pass the name of a file in it")
    if suffixes and Path(path).suffix.lower() not in suffixes:
        suffix = suffixes[0]
        raise ValueError(f"{name} {path} is not the name of a {suffix} file; pass FILE{suffix}")
    Path(path).parent.mkdir(parents=True, exist_ok=True)


@contextmanager
def flushed_stdout() -> Iterator[None]:
    """Flush standard output after the block; report a failure once, not again when Python exits."""
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            raise
        raise OSError(f"standard output cannot be written ({error.strerror})") from error


def fail(message: str) -> NoReturn:
    """Print the message as one line on standard error and exit with status 2."""
    rank = process_rank()
    if rank != 0:
        time.sleep(REPORT_DELAY)
    prefix = f"bmfa: process {rank}:" if rank else "bmfa:"
    print(prefix, " ".join(message.split()), file=sys.stderr)
    sys.exit(2)
