"""Progress of long runs: a callable that experiments call, and a tqdm bar that shows it."""

import sys
from collections.abc import Callable
from typing import Any

Progress = Callable[[int, int], None]  # units done, units in total


def progress_bar(unit: str = "", *, quiet: bool = False) -> Progress | None:
    """Return a callable that draws a tqdm bar on standard error.

    Args:
        unit: Name of what is counted, such as `"pictures"`.
        quiet: True to show nothing.

    Returns:
        A callable of the units done and their total, or None if standard error is not a terminal or
        `quiet` is set. The bar closes when all units are done. Units that are done at the first
        call, restored from a checkpoint, do not count towards the rate.
    """
    if quiet or not sys.stderr.isatty():
        return None
    bars: list[Any] = []

    def show(done: int, total: int) -> None:
        if not bars:
            from tqdm import tqdm

            bars.append(tqdm(total=total, initial=done, unit=f" {unit}".rstrip(), leave=False))
        bars[0].update(done - bars[0].n)
        if done >= total:
            bars.pop().close()

    return show
