"""Settings of tiled attention by name, such as `tiles:0.03` or `error:0.1`."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor

from bmfa.attention.api import screened_attention
from bmfa.attention.inputs import Backend
from bmfa.attention.result import Screened
from bmfa.attention.tiling import Tiling
from bmfa.checks import check_number
from bmfa.evidence.bench.inputs import RecordedInputs
from bmfa.grid import Grid

DEFAULT_METHODS = {
    "cuda": (
        *("tiles:0", "tiles:0.01", "tiles:0.03", "tiles:0.06", "tiles:0.1", "tiles:0.2"),
        *("error:0.02", "error:0.05", "error:0.1"),
    ),
    "cpu": ("tiles:0", "tiles:0.1", "error:0.03", "error:0.05", "error:0.1"),
}
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_NAME = re.compile(r"(tiles|leaves|error):([0-9.eE+-]+)")

EXACT = "exact"  # the method `error=0`

ScreenedCall = Callable[[Tensor, Tensor, Tensor], Tensor | Screened]  # q, k, v to outputs


@dataclass(frozen=True)
class TileSetting:
    """A share of the tiles to expand, or `leaves` or `error` of `screened_attention`."""

    kind: Literal["tiles", "leaves", "error"]
    value: float

    @classmethod
    def parse(cls, name: str) -> "TileSetting":
        """Parse `tiles:0.03`, `leaves:0.05` or `error:0.1`; raise ValueError for other names."""
        found = _NAME.fullmatch(name)
        if found is None:
            raise ValueError(
                f"setting {name!r} is unknown; pass tiles:SHARE, leaves:SHARE or error:E"
            )
        kind = cast(Literal["tiles", "leaves", "error"], found[1])
        try:
            value = float(found[2])
        except ValueError:
            raise ValueError(f"setting {name!r} has no number; pass e.g. {kind}:0.1") from None
        high = torch.inf if kind == "error" else 1.0
        check_number(name, value, low=0.0, high=high, open_low=kind == "leaves")
        return cls(kind, value)

    def arguments(self, grid: Grid) -> dict[str, Any]:
        """Return the arguments of `screened_attention`."""
        if self.kind != "tiles":
            return {self.kind: self.value}
        tiling = Tiling(grid)
        return {"leaves": leaves_for(tiling, round(self.value * tiling.tiles))}

    def __str__(self) -> str:
        return f"{self.kind}:{self.value:g}"


def leaves_for(tiling: Tiling, expanded: int) -> int:
    """Return the budget of leaves that expands so many tiles for each group of queries."""
    leaves = min(tiling.grid.size, tiling.tiles + expanded * (tiling.side**2 - 1))
    return max(2, leaves)  # 1 is refused; 2 leaves expand no tile either


def tiled_call(
    inputs: RecordedInputs, backend: Backend, setting: TileSetting, **options: Any
) -> ScreenedCall:
    """Return tiled attention at a setting."""
    options |= {"allow_dense": False, "backend": backend, **setting.arguments(inputs.grid)}
    return partial(screened_attention, grid=inputs.grid, prefix=inputs.prefix, **options)


def auto_call(inputs: RecordedInputs) -> ScreenedCall:
    """Return attention with default arguments: the default error, or dense where that is faster."""
    return partial(screened_attention, grid=inputs.grid, prefix=inputs.prefix)


def exact_call(inputs: RecordedInputs) -> ScreenedCall:
    """Return exact attention, by the native kernel or SDPA, whichever is expected to be faster."""
    return partial(screened_attention, grid=inputs.grid, prefix=inputs.prefix, error=0.0)
