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
    found: dict[tuple[int, int], dict[str, Row]] = {}
    for row in _own_rows(rows):
        by_method = found.setdefault((int(row["n"]), row.get("threads") or 0), {})
        by_method[str(row["method"])] = row
    times = {
        key: {name: float(row["milliseconds"]) for name, row in methods.items()}
        for key, methods in found.items()
        if EXACT in methods
    }
    if not times:
        return {}
    default = f"tiled-error:{DEFAULT_ERROR:g}"
    exact = {key: one["dense"] > one[EXACT] for key, one in times.items()}
    tiles = {key: one[EXACT] > one[default] for key, one in times.items() if default in one}
    slopes = []
    for key in (key for key in times if key[0] == max(times)[0]):
        shares = sorted(
            (float(row["density_percent"]), times[key][name])
            for name, row in found[key].items()
            if name.startswith("tiled-tiles:")
        )
        if len(shares) > 1 and shares[-1][0] > shares[0][0]:
            (low, fast), (high, slow) = shares[0], shares[-1]
            slopes.append(100 * (slow - fast) / (high - low) / times[key][EXACT])
    return {
        "exact_from_tokens": _from_tokens(exact),
        "tiles_from_tokens": _from_tokens(tiles),
        "expanded_cost": max(slopes, default=None),
    }


def _from_tokens(faster: Mapping[tuple[int, int], bool]) -> int | None:
    """Return the smallest number of tokens from which all are True."""
    slower = max((n for (n, _), value in faster.items() if not value), default=0)
    return min((n for n, _ in faster if n > slower), default=None)


def own_rows(rows: Iterable[Row]) -> list[Row]:
    """Return the rows on the model's own heads, without those of certificate and audit.

    Of several numbers of threads, those of the largest.
    """
    found = _own_rows(rows)
    most = max((row.get("threads") or 0 for row in found), default=0)
    return [row for row in found if (row.get("threads") or 0) == most]


def _own_rows(rows: Iterable[Row]) -> list[Row]:
    return [
        row
        for row in rows
        if row.get("what") == "attention" and "keys" not in row and "+" not in str(row["method"])
    ]


def tiled_rows(rows: Iterable[Row], n: int | None = None) -> list[Row]:
    """Return the rows of tiled attention."""
    return [
        row
        for row in rows
        if str(row["method"]).startswith("tiled-") and (n is None or row["n"] == n)
    ]


def break_even(rows: Sequence[Row], error: float = ACCEPTED_ERROR) -> int | None:
    """Return the number of tokens from which tiled attention always beats the best dense path."""
    faster: int | None = None
    for n in sorted({int(row["n"]) for row in rows}, reverse=True):
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
    found = {}
    for n in sorted({int(row["n"]) for row in rows}):
        time = time_at_error(tiled_rows(rows, n), error)
        if time is not None:
            found[n] = time
    return found


def time_at_error(rows: Sequence[Row], error: float) -> float | None:
    """Return milliseconds for an image at an error, or None if no setting reaches it.

    Between neighbouring settings on the frontier the logarithm of the time is linear in the error. If
    the fastest setting is better than the error, its time is returned.
    """
    frontier: list[tuple[float, float]] = []  # error falls, time rises
    for time, off in sorted(
        (milliseconds_per_image(row), float(row["error_l2_percent"])) for row in rows
    ):
        if not frontier or off < frontier[-1][0]:
            frontier.append((off, time))
    if not frontier or frontier[-1][0] > error:
        return None
    errors, logarithms = (
        [off for off, _ in frontier[::-1]],
        [math.log(t) for _, t in frontier[::-1]],
    )
    return math.exp(np.interp(error, errors, logarithms))


def exponent(times: dict[int, float], first: int = FIT_FROM) -> float | None:
    """Return the least-squares slope of log time over log tokens; None for fewer than two sizes."""
    points = [(math.log(n), math.log(t)) for n, t in times.items() if n >= first and t > 0]
    if len(points) < 2:
        return None
    return statistics.linear_regression(*zip(*points, strict=True)).slope


def milliseconds_per_image(row: Row) -> float:
    """Return the milliseconds of a row divided by its batch size."""
    return float(row["milliseconds"]) / int(row.get("batch") or 1)


def lines(settings: dict[str, Any]) -> list[str]:
    """Return the summary as lines of text."""
    if "break_even_error_percent" not in settings:
        return []
    n, off = settings.get("break_even_tokens"), settings.get("break_even_error_percent")
    if n is None:
        text = [
            f"break-even: tiled attention is not faster at any size measured (error to {off:g} %)"
        ]
    else:
        text = [f"break-even: faster than the best dense path from {n} tokens (error to {off:g} %)"]
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
