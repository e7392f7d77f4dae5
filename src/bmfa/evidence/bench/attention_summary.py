"""What the rows of `bmfa bench attention` say: break-even, and how time grows with the tokens."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from bmfa.records import Row

FIXED_ERROR, ACCEPTED_ERROR = 7.5, 10.0
# Launching kernels, not attention, takes the time below so many tokens.
FIT_FROM = 4096


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Break-even and exponents, for the settings of a record; nothing without a model's own heads."""
    own = own_rows(rows)
    if not own:
        return {}
    return {
        "break_even_tokens": break_even(own),
        "break_even_error_percent": ACCEPTED_ERROR,
        "exponent_tiled": exponent(times_at_error(own)),
        "exponent_dense": exponent(times_of(own, "dense")),
        "exponent_error_percent": FIXED_ERROR,
        "exponent_from_tokens": FIT_FROM,
    }


def own_rows(rows: Iterable[Row]) -> list[Row]:
    """Attention on the model's own heads, without what knowledge of the error adds."""
    return [
        row
        for row in rows
        if row.get("what") == "attention" and "keys" not in row and "+" not in str(row["method"])
    ]


def tiled_rows(rows: Iterable[Row], n: int | None = None) -> list[Row]:
    """Tiled attention at its settings."""
    return [
        row
        for row in rows
        if str(row["method"]).startswith("tiled-") and (n is None or row["n"] == n)
    ]


def break_even(rows: Sequence[Row], error: float = ACCEPTED_ERROR) -> int | None:
    """The fewest tokens from which on tiled attention is always faster than the best dense path."""
    faster: int | None = None
    for n in sorted({int(row["n"]) for row in rows}, reverse=True):
        some = tiled_rows(rows, n)
        if not any(row["error_l2_percent"] <= error and row["speedup"] > 1 for row in some):
            break
        faster = n
    return faster


def times_of(rows: Sequence[Row], method: str) -> dict[int, float]:
    """Milliseconds for each picture by number of tokens."""
    return {int(row["n"]): each(row) for row in rows if row["method"] == method}


def times_at_error(rows: Sequence[Row], error: float = FIXED_ERROR) -> dict[int, float]:
    """Milliseconds for each picture at an error, by number of tokens; those without it are absent."""
    found = {}
    for n in sorted({int(row["n"]) for row in rows}):
        time = time_at_error(tiled_rows(rows, n), error)
        if time is not None:
            found[n] = time
    return found


def time_at_error(rows: Sequence[Row], error: float) -> float | None:
    """Milliseconds for each picture at which the settings reach an error.

    Between the two neighbouring settings on their frontier the logarithm of the time is taken as
    linear in the error; a fastest setting that is better than asked counts as it is.
    """
    frontier: list[tuple[float, float]] = []  # error falls, time rises
    for time, off in sorted((each(row), float(row["error_l2_percent"])) for row in rows):
        if not frontier or off < frontier[-1][0]:
            frontier.append((off, time))
    if not frontier or frontier[-1][0] > error:
        return None
    if frontier[0][0] <= error:
        return frontier[0][1]
    index = next(i for i, (off, _) in enumerate(frontier) if off <= error)
    (above, fast), (below, slow) = frontier[index - 1], frontier[index]
    share = (above - error) / (above - below)
    return math.exp((1 - share) * math.log(fast) + share * math.log(slow))


def exponent(times: dict[int, float], first: int = FIT_FROM) -> float | None:
    """Least squares slope of log time over log tokens; None for fewer than two numbers of tokens."""
    points = [(math.log(n), math.log(t)) for n, t in times.items() if n >= first and t > 0]
    if len(points) < 2:
        return None
    x = sum(a for a, _ in points) / len(points)
    y = sum(b for _, b in points) / len(points)
    spread = sum((a - x) * (a - x) for a, _ in points)
    return sum((a - x) * (b - y) for a, b in points) / spread


def each(row: Row) -> float:
    """Milliseconds for each picture of the batch."""
    return float(row["milliseconds"]) / int(row.get("batch") or 1)


def lines(settings: dict[str, Any]) -> list[str]:
    """The summary in words."""
    if "break_even_error_percent" not in settings:
        return []
    n, off = settings.get("break_even_tokens"), settings.get("break_even_error_percent")
    if n is None:
        told = [
            f"break-even: tiled attention is not faster at any size measured (error to {off:g} %)"
        ]
    else:
        told = [f"break-even: faster than the best dense path from {n} tokens (error to {off:g} %)"]
    tiled, dense = settings.get("exponent_tiled"), settings.get("exponent_dense")
    if tiled is not None and dense is not None:
        told.append(
            f"time grows with tokens to the power {tiled:.2f} at "
            f"{settings['exponent_error_percent']:g} % error, dense to {dense:.2f} "
            f"(from {settings['exponent_from_tokens']} tokens)"
        )
    return told
