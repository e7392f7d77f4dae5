"""Tokens in Z-order for the whole network: permuted before the first block, put back behind the last."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from bmfa.grid import Grid
from bmfa.models.screens import Place

Places = Callable[[int, int, int, torch.device], Tensor]


@dataclass(eq=False)
class IntoOrder:
    """A hook before the first block."""

    place: Place
    handle: Any = None

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (_permuted(args[0], self.place, back=False), *args[1:])


@dataclass(eq=False)
class BackToRaster:
    """A hook behind the last block."""

    place: Place
    handle: Any = None

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (_permuted(output[0], self.place, back=True), *output[1:])
        return _permuted(output, self.place, back=True)


def keep_in_order(blocks: tuple[nn.Module, ...], place: Place) -> None:
    """Permute around these blocks, wherever the grid has its tiles in Z-order."""
    into, back = IntoOrder(place), BackToRaster(place)
    into.handle = blocks[0].register_forward_pre_hook(into)
    back.handle = blocks[-1].register_forward_hook(back)
    place.others.extend((into, back))


def _permuted(tokens: Tensor, place: Place, back: bool) -> Tensor:
    if place.order != "z" or place.grid is None:
        return tokens
    grid = place.grid
    places = _back if back else _into
    return tokens.index_select(1, places(grid.height, grid.width, place.prefix, tokens.device))


def _constant(function: Places) -> Places:
    """As torch.compiler.assume_constant_result, which would load the compiler to say so."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


# A graph knows a constant by its function's name, so the two ways have one each.
@_constant
def _into(height: int, width: int, prefix: int, device: torch.device) -> Tensor:
    """(prefix + N,) where each token comes from, into Z-order: a constant of compiled graphs."""
    return _places(Grid(height, width), prefix, False, device)


@_constant
def _back(height: int, width: int, prefix: int, device: torch.device) -> Tensor:
    """The same back to raster order."""
    return _places(Grid(height, width), prefix, True, device)


@lru_cache(maxsize=64)
def _places(grid: Grid, prefix: int, back: bool, device: torch.device) -> Tensor:
    """Kept, as a copy to the device waits for it."""
    with torch.inference_mode(False):
        order = (grid.z_rank if back else grid.z_order) + prefix
        return torch.cat((torch.arange(prefix), order)).to(device)
