"""Smoke test of an installed wheel: `python try_wheel.py [objects | pure]`.

`objects` loads every shared object and needs no torch; `pure` expects none. Without an argument, an
object must be chosen for the processor, and a call of the library must agree with dense attention.
"""

import ctypes
import importlib.util
import sys
from pathlib import Path


def main(word: str = "") -> None:
    """Run the checks and print what was found."""
    package = Path(importlib.util.find_spec("bmfa").origin).parent
    objects = sorted(package.glob("attention/kernels/native/tiles-*.so"))
    assert bool(objects) == (word != "pure"), objects
    for path in objects:
        sources = ctypes.CDLL(str(path)).bmfa_sources
        sources.restype = ctypes.c_char_p
        print(path.name, "of sources", sources().decode())
    if word != "objects":
        attend(word == "pure")


def attend(pure: bool) -> None:
    """Compare a call with dense attention."""
    import torch

    import bmfa
    from bmfa.attention.kernels.native import library

    assert (library.instruction_set() is None) == pure, library.unavailable_reason()
    smooth = torch.nn.functional.interpolate(torch.randn(9, 64, 8, 8), size=64, mode="bicubic")
    q, k, v = smooth.flatten(2).mT.reshape(3, 1, 3, 64 * 64, 64)
    output, stats = bmfa.screened_attention(q, k, v, grid=(64, 64), error=0.03)
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    error = float((output - exact).norm() / exact.norm())
    print(stats.backend, stats.reason, f"error {error:.4f}")
    assert error < 0.06  # twice the target, which is estimated from a sample


if __name__ == "__main__":
    main(*sys.argv[1:])
