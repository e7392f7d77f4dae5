"""Queries and keys of one head as 16-bit integers, from which any row of scores is computed exactly.

A browser and Python get the same scores to the last bit: the product of an integer query and an integer
key is an integer below 2^53, which float64 holds exactly in whatever order it is summed, and one
multiplication by `step` follows.
"""

import base64
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import ROUND_CEILING, Decimal
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

# Largest integer of a rounded entry. With d dimensions a product is below d * 2^30, so that sums are
# exact in float64 up to d = 2^23.
LARGEST = 2**15 - 1
# Scores of a chunk: 16 MiB in float64, so that long sequences need no matrix of all scores.
CHUNK_ELEMENTS = 1 << 21


@dataclass(frozen=True, eq=False)
class PackedHead:
    """The rounded queries and keys of one head: score(i, j) = step * (q_i . k_j).

    Args:
        q: (queries, d) integers from -32767 to 32767.
        k: (prefix + N, d) integers.
        step: Factor of the products, with the scale of the attention.
        rounding: Largest difference between a score and that of the queries and keys before rounding.
    """

    q: NDArray[np.int16]
    k: NDArray[np.int16]
    step: float
    rounding: float

    def scores(self, queries: slice = slice(None)) -> Array:
        """(queries, prefix + N) scores in float64."""
        products: Array = self.q[queries].astype(np.float64) @ self.k.astype(np.float64).T
        return products * self.step

    def to_json(self) -> dict[str, Any]:
        """Return what the page holds: integers in base64, little-endian, row by row."""
        return {"q": _encode(self.q), "k": _encode(self.k), "step": self.step}


def pack_head(q: Array, k: Array, scale: float) -> PackedHead:
    """Round the queries and keys of one head to 16 bits.

    Every dimension of q is multiplied by a factor and that of k divided by it, which leaves the scores
    as they are, so that a dimension of large keys and small queries keeps its digits.

    Args:
        q: (queries, d).
        k: (prefix + N, d).
        scale: Factor of the products.

    Returns:
        The rounded head, with the largest difference that the rounding makes in any score.

    Example:
        >>> import numpy as np
        >>> generator = np.random.default_rng(0)
        >>> q, k = generator.normal(size=(2, 50, 16))
        >>> head = pack_head(q, k, scale=0.25)
        >>> head.q.dtype, head.rounding < 0.001
        (dtype('int16'), True)
        >>> bool(np.isclose(np.abs(head.scores() - q @ k.T / 4).max(), head.rounding))
        True
    """
    balance = _balance(np.abs(q).max(0), np.abs(k).max(0))  # (d,)
    (left, left_step), (right, right_step) = _quantise(q * balance), _quantise(k / balance)
    packed = PackedHead(left, right, left_step * right_step * scale, 0.0)
    rounding = max(
        float(np.abs(packed.scores(part) - (q[part] @ k.T) * scale).max())
        for part in query_slices(len(q), len(k))
    )
    return PackedHead(left, right, packed.step, rounding)


def rounded_up(value: float) -> str:
    """Return a positive number with one digit, rounded up, so that it remains an upper bound.

    Example:
        >>> rounded_up(0.00041), rounded_up(0.0004), rounded_up(0.0)
        ('0.0005', '0.0004', '0')
    """
    if value <= 0:
        return "0"
    unit = Decimal(1).scaleb(Decimal(value).adjusted())
    return f"{float(Decimal(repr(value)).quantize(unit, ROUND_CEILING)):g}"


def query_slices(queries: int, keys: int) -> Iterator[slice]:
    """Slices of the queries whose scores over all keys fit in `CHUNK_ELEMENTS` numbers."""
    step = max(1, CHUNK_ELEMENTS // keys)
    return (slice(start, start + step) for start in range(0, queries, step))


def _balance(q_largest: Array, k_largest: Array) -> Array:
    """(d,) factors that make the largest entries of q and k equal in every dimension; 1 if one is 0."""
    used = (q_largest > 0) & (k_largest > 0)
    ratio = np.divide(k_largest, q_largest, out=np.ones_like(q_largest), where=used)
    factors: Array = np.sqrt(ratio)
    return factors


def _quantise(values: Array) -> tuple[NDArray[np.int16], float]:
    largest = float(np.abs(values).max())
    step = largest / LARGEST if largest else 1.0
    return np.rint(values / step).astype(np.int16), step


def _encode(values: NDArray[np.int16]) -> str:
    return base64.b64encode(values.astype("<i2").tobytes()).decode()
