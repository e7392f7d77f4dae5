"""Tables, files, progress and error lines of the commands."""

import csv
import io
import os
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from bmfa.files import write_atomic
from bmfa.records import Record, Row

if TYPE_CHECKING:
    from rich.table import Table

    from bmfa.evidence.runner import Progress

# Seconds that the other processes of torchrun wait before they report an error. If the first one
# meets the same error, torchrun ends the others while they wait, and the line appears once.
REPORT_DELAY = 5.0
# Characters in a line of a table that is printed to a file or pipe: no line is wrapped.
PIPE_WIDTH = 10_000
# Characters in a line of a table without --wide: two windows side by side on a common screen.
MAX_WIDTH = 120
COLUMN_GAP = 2  # spaces between two columns
# Seconds between two lines of progress where standard error is not a terminal.
PROGRESS_INTERVAL = 30.0
# What a written file is called by its suffix; any other is a figure.
KINDS = {".json": "plan", ".html": "page", ".htm": "page"}


@dataclass(frozen=True)
class Output:
    """Where the result of a command goes: `--json`, `--csv` and `--quiet`."""

    json: str | None
    quiet: bool
    csv: str | None = None

    def progress(self, unit: str) -> "Progress | None":
        """Return a callback that shows progress, or None with `--quiet` and in other processes.

        A terminal gets a bar, a file or pipe one line every 30 seconds.
        """
        if self.quiet or process_rank() != 0:
            return None
        return progress_bar(unit) if sys.stderr.isatty() else progress_lines(unit)

    def finish(
        self,
        record: Record,
        table: "Table | str",
        *,
        notes: "Sequence[Table | str]" = (),
        warnings: Sequence[str] = (),
        figures: Mapping[str | Path, Callable[[], bytes]] | None = None,
        announce: bool = True,
    ) -> None:
        """Print the result of a command, then write its files.

        If one part cannot be printed or written, the others still are, so that the work is not lost;
        if the record cannot be written, the table is printed even with `--quiet`.

        Args:
            record: written by `--json`, its rows by `--csv`.
            table: printed unless the record or its rows go to standard output.
            notes: lines and further tables, printed below the table.
            warnings: lines about missing data; they go to standard error if the record goes to
                standard output.
            figures: functions that return the content of further files, by path: figures, plans
                (`.json`) and pages (`.html`).
            announce: print the names of the files.

        Raises:
            OSError: the first part that could not be printed or written.
        """
        to_stdout = "-" in (self.json, self.csv)
        errors: list[OSError] = []
        try:
            with flushed_stdout():
                if not self.quiet:
                    for part in () if to_stdout else (table, *notes):
                        show(part)
                    for line in warnings:
                        print(line, file=sys.stderr if to_stdout else sys.stdout)
        except OSError as error:
            errors.append(error)
        files: dict[str | Path, Callable[[], bytes | str]] = {**(figures or {})}
        if self.json is not None:
            files[self.json] = record.to_json
        if self.csv is not None:
            files[self.csv] = partial(csv_of, record.rows)
        for path, content in files.items():
            try:
                write_atomic(path, content())
            except OSError as error:
                errors.append(error)
                continue
            if announce and not self.quiet and not to_stdout:
                kind = KINDS.get(Path(path).suffix, "figure")
                kind = {self.json: "record", self.csv: "rows"}.get(str(path), kind)
                print(f"{kind}: {path}")
        if errors:
            if self.quiet and not to_stdout:
                with suppress(OSError), flushed_stdout():
                    show(table)
            raise errors[0]


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


def table_of(rows: Sequence[Row], columns: str, wide: bool = False) -> "Table":
    """Build a table of rows.

    Args:
        rows: rows of a record.
        columns: keys of the rows, separated by spaces; a key that no row has is left out.
        wide: True for all columns; False leaves out those that exceed `MAX_WIDTH` characters, and
            names them in the caption.

    Returns:
        The table, numbers aligned to the right with three decimals for floats.
    """
    from rich.box import Box
    from rich.table import Table
    from rich.text import Text

    rule = Box("    \n    \n -- \n    \n    \n    \n    \n    \n")
    table = Table(box=rule, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    names = [name for name in columns.split() if any(row.get(name) is not None for row in rows)]
    if not wide:
        shown = _fitting(rows, names)
        hidden = [name for name in names if name not in shown]
        table.caption = f"more with --wide: {', '.join(hidden)}" if hidden else None
        names = shown
    for name in names:
        number = any(isinstance(row.get(name), (int, float)) for row in rows)
        table.add_column(name, justify="right" if number else "left", no_wrap=number)
    for row in rows:
        table.add_row(*(Text(_cell(row.get(name))) for name in names))
    return table


def _fitting(rows: Sequence[Row], names: Sequence[str]) -> list[str]:
    """Return the first column, and those after it that fit into `MAX_WIDTH` together."""
    width = -COLUMN_GAP
    for count, name in enumerate(names):
        width += max(len(name), *(len(_cell(row.get(name))) for row in rows)) + COLUMN_GAP
        if width > MAX_WIDTH:
            return list(names[: max(count, 1)])
    return list(names)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def show(part: "Table | str") -> None:
    """Print text as it is, or a table with its header in bold if standard output is a terminal."""
    if isinstance(part, str):
        print(part)
        return
    from rich.console import Console

    # Without a colour system rich writes no escape codes at all; NO_COLOR alone would keep the bold.
    terminal = sys.stdout.isatty()
    plain = "NO_COLOR" in os.environ or not terminal
    console = Console(file=sys.stdout, color_system=None if plain else "auto")
    # Text wraps at the edge of a terminal; a table of numbers may exceed it, but is never cut.
    least = console.measure(part, options=console.options.update(max_width=PIPE_WIDTH)).minimum
    console.width = max(console.width, least) if terminal else PIPE_WIDTH
    caption, part.caption = part.caption, None  # rich would centre it
    with console.capture() as captured:
        console.print(part)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))
    if caption is not None:
        print(textwrap.fill(str(caption), MAX_WIDTH))


def progress_bar(unit: str) -> "Progress":
    """Return a callback that draws steps done, rate and time left on standard error."""
    from tqdm import tqdm

    bars: list[Any] = []

    def update(done: int, total: int) -> None:
        if not bars:
            # Steps of an earlier run that is being resumed do not count towards the rate.
            bars.append(
                tqdm(initial=done, total=total, unit=f" {unit}", leave=False, dynamic_ncols=True)
            )
        bars[0].update(done - bars[0].n)
        if done >= total:
            bars.pop().close()

    return update


def progress_lines(unit: str) -> "Progress":
    """Return a callback that prints a line of progress on standard error every 30 seconds."""
    first: list[tuple[float, int]] = []  # time and steps of the first call
    last = [time.monotonic()]

    def update(done: int, total: int) -> None:
        now = time.monotonic()
        if not first:
            first.append((now, done))
        if done >= total or now - last[0] < PROGRESS_INTERVAL:
            return
        last[0] = now
        line = f"bmfa: {done:,} of {total:,} {unit}"
        # Steps of an earlier run that is being resumed do not count towards the rate.
        seconds, steps = now - first[0][0], done - first[0][1]
        if steps > 0 and seconds > 0:
            left = timedelta(seconds=round((total - done) * seconds / steps))
            line += f", {steps / seconds:.3g} {unit}/s, {left} left"
        print(line, file=sys.stderr, flush=True)

    return update


def process_rank() -> int:
    """Return the rank that torchrun gave this process, 0 without torchrun."""
    return int(os.environ.get("RANK", "0")) if os.environ.get("WORLD_SIZE", "1") != "1" else 0


def check_targets(json: str | None, csv: str | None = None) -> None:
    """Raise before the work if the record or its rows cannot be written to these paths."""
    if json is not None and json == csv:
        where = "standard output" if json == "-" else json
        raise ValueError(f"--json and --csv both go to {where}; pass a file name for one of them")
    for name, path in (("--json", json), ("--csv", csv)):
        if path is None or path == "-":
            continue
        if Path(path).is_dir():
            raise ValueError(f"{name} {path} is a folder; pass the name of a file in it")
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
