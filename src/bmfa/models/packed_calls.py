"""Attention layers and blocks of models whose sequences hold several images or padding."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from bmfa.grid import Grid
from bmfa.models.override import override_method
from bmfa.models.packing import Packing

if TYPE_CHECKING:
    from bmfa.models.hosts.base import AttentionFunction, VisionTransformer
    from bmfa.models.token_grid import TokenGrid


def attend_images(
    function: "AttentionFunction",
    grid: Grid,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    dropout: float = 0.0,
    scale: float | None = None,
    query_grid: Grid | None = None,
) -> Tensor:
    """Call the function of a layer on images of one grid.

    Args:
        function: The function of the layer.
        grid: The grid of the keys.
        q: (images, heads, prefix + N, d) queries; k, v likewise.
        k: Keys.
        v: Values.
        dropout: The probability of attention dropout.
        scale: The scale of the scores.
        query_grid: The grid of the queries, where it is not that of the keys.
    """
    call = partial(function, q, k, v, None, dropout, False, scale)
    token_grid = function.token_grid
    if query_grid is not None:
        call = partial(token_grid.query_grids.run_with, query_grid, call)
    return token_grid.passes.run_with(grid, call)


def begin_pass(token_grid: "TokenGrid", packing: Packing) -> None:
    """Set the images of the forward pass that begins in this thread."""
    if not packing.traced:  # a graph writes no log
        token_grid.log.begin()
    token_grid.packings.set(packing)


def is_traced(token_grid: "TokenGrid") -> bool:
    """Return True if the graph that torch.compile traces has made the images of the pass."""
    if not torch.compiler.is_compiling():
        return False
    packing = token_grid.packings.current
    return packing is not None and packing.traced


def runs_dense(function: "AttentionFunction", packing: Packing, x: Tensor) -> bool:
    """Return True if the layer runs dense for all images; x has the dtype and device of the tokens."""
    passes = function.token_grid.passes
    for group in packing.groups:
        tokens = x.new_empty((*group.index.shape, 0))
        if not passes.run_with(group.grid, partial(function.uses_host_on, group.grid, tokens)):
            return False
    return True


@dataclass(eq=False)
class PackedBlock:
    """Override of a block that runs it with the images of the tokens that it receives."""

    token_grid: "TokenGrid"
    last: bool = False  # True if no block follows

    def uses_host(self, x: Any) -> bool:
        """True in a graph, where attention finds the images of the thread."""
        return torch.compiler.is_compiling() and not (self.last and is_traced(self.token_grid))

    def run(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Compute the output of the block."""
        passes = self.token_grid.packings
        if torch.compiler.is_compiling():
            output = forward(*args, **kwargs)
            passes.forget()  # what is left at the end of a graph would be an output of it
            return output
        packing = passes.find(args[0]) if args else None
        packing = passes.current if packing is None else packing
        if packing is None or not args:
            return forward(*args, **kwargs)
        passes.attach(args[0], packing)
        run = partial(forward, *args, **kwargs)
        log = partial(self.token_grid.log.run_block, 1, args[0], run)  # the reader begins a pass
        output = passes.run_with(packing, log)
        passes.attach(output[0] if isinstance(output, tuple) else output, packing)
        return output


def carry_images(host: "VisionTransformer", token_grid: "TokenGrid") -> None:
    """Let the blocks of a tower carry the images of a pass."""
    for index, block in enumerate(host.blocks):
        override_method(block, PackedBlock(token_grid, last=index == len(host.blocks) - 1))


@dataclass(eq=False)
class LoggedBlock:
    """Override of a block whose attention knows its grid: the block carries the log of the pass."""

    layer: int
    token_grid: "TokenGrid"

    def uses_host(self, x: Any) -> bool:
        """True in a graph, which writes no log."""
        return torch.compiler.is_compiling()

    def run(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Compute the output of the block."""
        run = partial(forward, *args, **kwargs)
        return self.token_grid.log.run_block(self.layer, args[0], run) if args else run()


def watch_blocks(host: "VisionTransformer", token_grid: "TokenGrid") -> None:
    """Let the blocks of a host whose attention modules know their grids carry the log of a pass."""
    for index, block in enumerate(host.blocks):
        override_method(block, LoggedBlock(index, token_grid))
