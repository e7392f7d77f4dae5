"""Numbers as text, the same on the page, in claims and in Markdown tables."""

from decimal import ROUND_HALF_UP, Decimal
from typing import Any

MISSING = "–"
MAX_DECIMAL = 1e15  # larger numbers are printed in scientific notation
ZERO_BELOW = 1e-12  # a smaller number is the rounding error of a zero
SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def format_number(value: Any, decimals: int | None = 3) -> str:
    """Format a number with a fixed number of decimals.

    Args:
        value: a number; any other object is converted with `str`, None becomes a dash.
        decimals: digits after the point; None for six significant digits at most.

    Returns:
        The text, with thousands separators and a true minus sign; halves are rounded up, as in print.

    Example:
        >>> format_number(1.5625), format_number(36149, 0), format_number(None)
        ('1.563', '36,149', '–')
    """
    if value is None:
        return MISSING
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if decimals is None or not abs(value) < MAX_DECIMAL:
        return f"{value:g}" if isinstance(value, float) else str(value)
    rounded = Decimal(value).quantize(Decimal(1).scaleb(-decimals), ROUND_HALF_UP)
    return f"{abs(rounded) if rounded == 0 else rounded:,f}".replace("-", "−")


def format_percent(value: float | None, decimals: int = 3) -> str:
    """Format a percentage, for example "5.794 %"."""
    return MISSING if value is None else f"{format_number(value, decimals)} %"


def format_small(value: float | None) -> str:
    """Format a number that may be very small: three decimals, or one digit times a power of ten."""
    if value is None:
        return MISSING
    if value >= 0.001 or value < ZERO_BELOW:
        return format_number(max(value, 0.0))
    digit, _, power = f"{value:.0e}".partition("e")
    return f"{digit}\u00a0×\u00a010{str(int(power)).translate(SUPERSCRIPT)}"
