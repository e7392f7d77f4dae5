"""Summary of `bmfa bench attention`: break-even, and growth of time with the tokens."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from bmfa.attention.tiling import DEFAULT_ERROR
from bmfa.records import Row

# Relative L2 errors in percent at which times are interpolated, and up to which tiles count as usable
# in the break-even: both are choices of the benchmark, written into its record.
FIXED_ERROR, ACCEPTED_ERROR = 7.5, 10.0
EXACT = "exact"  # the method `error=0`
# Exponents are fitted from this number of tokens on; below, launching kernels takes most of the time.
FIT_FROM = 4096


def summarize(rows: Sequence[Row]) -> dict[str, Any]:
    """Return break-even and exponents for the settings of a record; empty without a model."""
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
        **native_costs(rows),
    }


def native_costs(rows: Sequence[Row]) -> dict[str, Any]:
    """Return what the constants of the native backend in `bmfa.attention.dispatch` are read off.

    Of several numbers of threads the worst counts.

    Returns:
        The numbers of tokens from which exact attention is always faster than SDPA, and tiles at the
        default target than exact attention, None where they are not at the largest size. The cost of an
        expanded tile relative to exact attention on a tile, at the largest size. Empty without the
        backend.
    """
    runs: dict[tuple[int, int], dict[str, Row]] = {}  # by tokens and threads, then by method
    for row in _attention_rows(rows):
        key = int(row["n"]), row.get("threads") or 0
        runs.setdefault(key, {})[str(row["method"])] = row
    runs = {key: run for key, run in runs.items() if EXACT in run}
    if not runs:
        return {}

    def from_tokens(method: str, other: str) -> int | None:
        timed = [run for run in runs.values() if method in run]
        slower = [r for r in timed if r[other]["milliseconds"] <= r[method]["milliseconds"]]
        last = max((int(run[EXACT]["n"]) for run in slower), default=0)
        return min((n for run in timed if (n := int(run[EXACT]["n"])) > last), default=None)

    costs = []
    for run in (run for (n, _), run in runs.items() if n == max(runs)[0]):
        tiles = sorted(
            (float(row["density_percent"]), float(row["milliseconds"]))
            for name, row in run.items()
            if name.startswith("tiled-tiles:")
        )
        if tiles and tiles[-1][0] > tiles[0][0]:
            (low, fast), (high, slow) = tiles[0], tiles[-1]
            costs.append(100 * (slow - fast) / (high - low) / run[EXACT]["milliseconds"])
    return {
        "exact_from_tokens": from_tokens(EXACT, "dense"),
        "tiles_from_tokens": from_tokens(f"tiled-error:{DEFAULT_ERROR:g}", EXACT),
        "expanded_cost": max(costs, default=None),
    }


def own_rows(rows: Iterable[Row]) -> list[Row]:
    """Return the rows on the model's own heads, of several numbers of threads those of the largest."""
    found = _attention_rows(rows)
    most = max((row.get("threads") or 0 for row in found), default=0)
    return [row for row in found if (row.get("threads") or 0) == most]


def _attention_rows(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if row.get("what") == "attention" and "keys" not in row]


def tiled_rows(rows: Iterable[Row], n: int | None = None) -> list[Row]:
    """Return the rows of tiled attention."""
    tiled = [row for row in rows if str(row["method"]).startswith("tiled-")]
    return [row for row in tiled if n is None or row["n"] == n]


def break_even(rows: Sequence[Row], error: float = ACCEPTED_ERROR) -> int | None:
    """Return the number of tokens from which tiled attention always beats the best dense path."""
    faster: int | None = None
    for n in _sizes(rows)[::-1]:
        some = tiled_rows(rows, n)
        if not any(row["error_l2_percent"] <= error and row["speedup"] > 1 for row in some):
            break
        faster = n
    return faster


def times_of(rows: Sequence[Row], method: str) -> dict[int, float]:
    """Return milliseconds for an image by number of tokens."""
    return {int(row["n"]): milliseconds_per_image(row) for row in rows if row["method"] == method}


def times_at_error(rows: Sequence[Row], error: float = FIXED_ERROR) -> dict[int, float]:
    """Return milliseconds for an image at an error, by the numbers of tokens that reach it."""
    times = {n: time_at_error(tiled_rows(rows, n), error) for n in _sizes(rows)}
    return {n: time for n, time in times.items() if time is not None}


def _sizes(rows: Sequence[Row]) -> list[int]:
    return sorted({int(row["n"]) for row in rows})


def time_at_error(rows: Sequence[Row], error: float) -> float | None:
    """Return milliseconds for an image at an error, or None if no setting reaches it.

    Between neighbouring settings on the frontier the logarithm of the time is linear in the error. If
    the fastest setting is better than the error, its time is returned.
    """
    frontier: list[tuple[float, float]] = []  # error falls, time rises
    points = [(milliseconds_per_image(row), float(row["error_l2_percent"])) for row in rows]
    for time, off in sorted(points):
        if not frontier or off < frontier[-1][0]:
            frontier.append((off, time))
    if not frontier or frontier[-1][0] > error:
        return None
    errors, times = zip(*frontier[::-1], strict=True)
    return math.exp(np.interp(error, errors, [math.log(time) for time in times]))


def exponent(times: Mapping[int, float], first: int = FIT_FROM) -> float | None:
    """Return the least-squares slope of log time over log tokens; None for fewer than two sizes."""
    points = [(math.log(n), math.log(t)) for n, t in times.items() if n >= first and t > 0]
    if len(points) < 2:
        return None
    return statistics.linear_regression(*zip(*points, strict=True)).slope


def milliseconds_per_image(row: Row) -> float:
    """Return the milliseconds of a row divided by its batch size."""
    return float(row["milliseconds"]) / int(row.get("batch") or 1)


def lines(settings: Mapping[str, Any]) -> list[str]:
    """Return the summary as lines of text."""
    if "break_even_error_percent" not in settings:
        return []
    n, off = settings.get("break_even_tokens"), settings["break_even_error_percent"]
    result = "tiled attention is not faster at any size measured"
    if n is not None:
        result = f"faster than the best dense path from {n} tokens"
    text = [f"break-even: {result} (error to {off:g} %)"]
    tiled, dense = settings.get("exponent_tiled"), settings.get("exponent_dense")
    if tiled is not None and dense is not None:
        text.append(
            f"time grows with tokens to the power {tiled:.2f} at "
            f"{settings['exponent_error_percent']:g} % error, dense to {dense:.2f} "
            f"(from {settings['exponent_from_tokens']} tokens)"
        )
    if "expanded_cost" in settings:
        cost = settings["expanded_cost"]
        text.append(
            f"native: exact attention beats SDPA from {settings['exact_from_tokens']} tokens; tiles at "
            f"the default target beat exact attention from {settings['tiles_from_tokens']}; an expanded "
            f"tile costs {'None' if cost is None else format(cost, '.2f')} of exact attention"
        )
    return text
