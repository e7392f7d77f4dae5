"""Random draws that depend on a key alone."""

import numpy as np
from numpy.typing import NDArray


class Draws:
    """Uniform draws from PCG64, seeded by a key of integers.

    Only uniform doubles are taken from NumPy: they are the bit generator's own words, whose stream is
    fixed across versions and platforms, which NumPy does not promise of its distributions.
    """

    def __init__(self, *key: int) -> None:
        if min(key) < 0:
            raise ValueError(
                f"the key of random draws is {key}; pass a seed and an index of at least 0"
            )
        self._generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence(key)))

    def number(self, low: float = 0.0, high: float = 1.0) -> float:
        """A real number in [low, high)."""
        return low + (high - low) * self._generator.random()

    def integer(self, low: int, high: int) -> int:
        """An integer from low to high, both included."""
        return low + int(self._generator.random() * (high - low + 1))

    def array(self, *shape: int, low: float = 0.0, high: float = 1.0) -> NDArray[np.float64]:
        """Real numbers in [low, high)."""
        return low + (high - low) * self._generator.random(shape)
