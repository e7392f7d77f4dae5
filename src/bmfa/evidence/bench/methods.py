"""Methods of the benchmarks by name: `tiles:0.03`, `leaves:0.05` and `error:0.1`."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from bmfa.attention.call import Backend
from bmfa.attention.kernels.native import library
from bmfa.attention.result import Screened
from bmfa.attention.tiling import Tiling
from bmfa.checks import check_number
from bmfa.evidence.runner.loop import parse_dtype
from bmfa.grid import Grid

KINDS = ("tiles", "leaves", "error")

ScreenedCall = Callable[[Tensor, Tensor, Tensor], Tensor | Screened]  # q, k, v to outputs


def parse(name: str) -> tuple[str, float]:
    """Return the kind and the value of a method.

    Raises:
        ValueError: If the name is unknown or its value out of range.

    Example:
        >>> parse("tiles:0.03")
        ('tiles', 0.03)
    """
    kind, _, text = name.partition(":")
    if kind not in KINDS:
        raise ValueError(
            f"method {name!r} is unknown; pass tiles:SHARE, leaves:SHARE or error:TARGET"
        )
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"method {name!r} has no number; pass e.g. {kind}:0.1") from None
    high = torch.inf if kind == "error" else 1.0
    return kind, check_number(name, value, low=0.0, high=high, open_low=kind == "leaves")


def arguments(name: str, grid: Grid) -> dict[str, Any]:
    """Return the arguments of `screened_attention` or `patch` that a method stands for."""
    kind, value = parse(name)
    if kind != "tiles":
        return {kind: value}
    tiling = Tiling(grid)
    return {"leaves": leaves_for(tiling, round(value * tiling.tiles))}


def leaves_for(tiling: Tiling, expanded: int) -> int:
    """Return the budget of leaves that expands so many tiles for each group of queries."""
    leaves = min(tiling.grid.size, tiling.tiles + expanded * (tiling.side**2 - 1))
    return max(2, leaves)  # 1 is refused; 2 leaves expand no tile either


def for_device(values: dict[str, Any], device: torch.device) -> Any:
    """Return the value for CUDA or, on any other device, that for a CPU."""
    return values.get(device.type, values["cpu"])


def dtype_name(name: str | None, device: torch.device) -> str:
    """Return a dtype of `DTYPES`, or the default of the device."""
    parse_dtype(name)
    return name or ("bfloat16" if device.type == "cuda" else "float32")


def default_backend(device: torch.device) -> Backend:
    """Return the fastest backend of tiled attention that runs on a device."""
    if device.type == "cuda":
        return "triton"
    return "eager" if library.unavailable_reason() else "native"


@contextmanager
def missed_targets_ignored() -> Iterator[None]:
    """Silence the warning about a missed target: the rows of a benchmark say which were missed."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "screened_attention measured", UserWarning)
        yield
