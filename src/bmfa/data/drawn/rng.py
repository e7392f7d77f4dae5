"""Random numbers that depend on a key alone, on every platform and NumPy version."""

import numpy as np
from numpy.typing import NDArray


class UniformGenerator:
    """Uniform random numbers from PCG64, seeded by a key of non-negative integers.

    It takes uniform doubles only: NumPy fixes the stream of the bit generator across versions and
    platforms, but not its distributions.

    Raises:
        ValueError: a part of the key is negative.
    """

    def __init__(self, *key: int) -> None:
        if min(key) < 0:
            raise ValueError(
                f"the key of random numbers is {key}; pass a seed and an index of at least 0"
            )
        self._generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence(key)))

    def number(self, low: float = 0.0, high: float = 1.0) -> float:
        """Return a number in [low, high)."""
        return low + (high - low) * self._generator.random()

    def integer(self, low: int, high: int) -> int:
        """Return an integer from low to high, both included."""
        return low + int(self._generator.random() * (high - low + 1))

    def array(self, *shape: int, low: float = 0.0, high: float = 1.0) -> NDArray[np.float64]:
        """Return numbers in [low, high)."""
        return low + (high - low) * self._generator.random(shape)
