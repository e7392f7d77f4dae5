"""The grid of spatial tokens in each forward pass of a patched or reduced model."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn

from bmfa.grid import Grid
from bmfa.models.dense_decision import DenseDecision
from bmfa.models.forward_state import ForwardState, is_recomputing
from bmfa.models.layer_log import LayerLog
from bmfa.models.packing import Packing

# Token counts whose grid is remembered for recomputation inside a block; later ones are refused there.
_MAX_SIZES = 256


@dataclass(eq=False)
class TokenGrid:
    """Tracks the token grid of the images in a model, separately for each forward pass.

    It is a forward hook of the patch projection, whose output has the shape of the grid. Blocks then
    carry the grid of their own tokens, so that attention finds it.
    """

    prefix: int  # tokens before the grid
    suffix: int = 0  # tokens behind it, such as detection tokens
    passes: ForwardState[Grid] = field(default_factory=ForwardState)
    # Grids of images that went through the projection and have not reached the first block yet.
    pending: ForwardState[tuple[Grid, ...]] = field(default_factory=ForwardState)
    # The images of each pass, in models whose sequences are not one grid in raster order.
    packings: ForwardState[Packing] = field(default_factory=ForwardState)
    # The grid of the queries of a call, where it is not that of the keys.
    query_grids: ForwardState[Grid] = field(default_factory=ForwardState)
    handle: Any = None
    # By token count: the grid of all passes so far, or None if several grids have that many tokens.
    unique: dict[int, Grid | None] = field(default_factory=dict)
    uses_tiles: bool = (
        False  # True if the layers of the model are active, for others than observers
    )
    keeps_tiles: bool = False  # True if they stay active: graphs or recomputed blocks rely on it
    starting: set[int] = field(
        default_factory=set
    )  # threads before the first block of a tiled pass
    observers: int = 0  # number of `with observe(model)` blocks that are open
    log: LayerLog = field(default_factory=LayerLog)  # for `bmfa.summary`

    @property
    def special(self) -> int:
        """The number of tokens that are not on the grid; their keys stay exact."""
        return self.prefix + self.suffix

    def watch(self, projection: nn.Module, hook: Callable[..., None] | None = None) -> None:
        """Read the grid from every output of the projection; `hook` may come before it."""
        self.handle = projection.register_forward_hook(self if hook is None else hook)

    def remove(self) -> None:
        """Undo `watch`."""
        self.log.remove()
        if self.handle is not None:
            self.handle.remove()
            self.handle = None

    def __call__(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        height, width = output.shape[-2:]
        # Integers, not symbols: whatever depends on a grid is a constant of a compiled graph.
        grid = Grid(int(height), int(width))
        self.store(grid)
        if not torch.compiler.is_compiling():
            self.pending.set((*(g for g in self.pending.current or () if g != grid), grid))

    def store(self, grid: Grid) -> None:
        """Set the grid of the forward pass that begins in this thread."""
        self.passes.set(grid)
        if torch.compiler.is_compiling():
            return
        if grid.size in self.unique:
            if self.unique[grid.size] != grid:
                self.unique[grid.size] = None
        elif len(self.unique) < _MAX_SIZES:
            self.unique[grid.size] = grid

    @property
    def packing(self) -> Packing:
        """The images of the running block.

        Raises:
            RuntimeError: If they are not known.
        """
        packing = self.packings.current
        if packing is None:
            raise RuntimeError(
                "the sizes of the images are unknown: in this thread the model itself was not called; "
                "call the model, not one of its blocks, and apply gradient checkpointing to whole blocks"
            )
        return packing

    def of_block(self, layer: int, tokens: Tensor) -> Grid | None:
        """Return the grid of the tokens (B, tokens, C) that a block receives, None if unknown."""
        if layer == 0 and not torch.compiler.is_compiling():
            pending = self.pending.current or ()
            size = tokens.shape[1] - self.special
            fitting = [grid for grid in pending if grid.size == size]
            if fitting:
                self.pending.set(tuple(grid for grid in pending if grid.size != size))
            if len(fitting) > 1:
                shapes = " and ".join(f"{grid.height}x{grid.width}" for grid in fitting)
                raise RuntimeError(
                    f"images with grids of {shapes} went through the patch embedding before any of them "
                    "reached the first block, and both have the same number of tokens, so the grid of "
                    "these tokens is ambiguous; run one image through the model after the other"
                )
            if fitting:
                return fitting[0]
        grid = self.passes.find(tokens)
        return self.passes.current if grid is None else grid

    def of_attention(self, tokens: int, grid: Grid | None = None) -> Grid:
        """Return the grid of the running block, or the given one, if it fits the number of tokens.

        Raises:
            RuntimeError: If no grid is known.
            ValueError: If the prefix and the grid do not make up the tokens.
        """
        grid = self.passes.current if grid is None else grid
        if grid is None and is_recomputing():
            grid = self.unique.get(tokens - self.special)
            if grid is None:
                raise RuntimeError(
                    f"attention over {tokens} tokens is recomputed in a backward pass and its grid is "
                    "unknown; apply gradient checkpointing to whole blocks or to the model"
                )
        if grid is None:
            raise RuntimeError(
                "no image went through the patch embedding in this thread; call the model itself, "
                "not one of its blocks"
            )
        if self.special + grid.size != tokens:
            suffix = f" and {self.suffix} tokens behind it" if self.suffix else ""
            raise ValueError(
                f"attention over {tokens} tokens, but {self.prefix} prefix tokens and a "
                f"{grid.height}x{grid.width} grid{suffix} make {self.special + grid.size}; screening "
                "needs all of them: switch off whatever drops or merges tokens"
            )
        return grid


@dataclass(eq=False)
class BlockGrid:
    """Override of a block that runs it with the grid of the tokens that it receives."""

    layer: int
    token_grid: TokenGrid
    # Of all screened layers of the model; empty if some of them never run dense.
    decisions: tuple[DenseDecision, ...] = ()

    def run(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Compute the output of the block."""
        grid = self.token_grid.of_block(self.layer, args[0]) if args else None
        if grid is None:
            return forward(*args, **kwargs)
        passes = self.token_grid.passes
        passes.attach(args[0], grid)
        run = partial(forward, *args, **kwargs)
        if not torch.compiler.is_compiling():
            run = partial(self.token_grid.log.run_block, self.layer, args[0], run)
            self.token_grid.starting.discard(get_ident())
            if torch.is_grad_enabled():  # gradient checkpointing may recompute the block
                self.token_grid.keeps_tiles = True
        output = passes.run_with(grid, run)
        passes.attach(output[0] if isinstance(output, tuple) else output, grid)
        return output

    def uses_host(self, x: Tensor) -> bool:
        """True if no layer needs a grid in the forward pass of the tokens x."""
        if not self.decisions or self.token_grid.observers or torch.compiler.is_compiling():
            return False
        for decision in self.decisions:  # noqa: SIM110  A generator costs a call for each element.
            if decision.choice(x) is None:
                return False
        return True
