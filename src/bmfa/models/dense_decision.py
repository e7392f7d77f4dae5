"""Decide once for each input shape whether layers of a patched model run the attention of their host."""

import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bmfa.attention.dispatch import dense_reason
from bmfa.grid import Grid

# Decisions that are kept, about 200 bytes each; later ones are made again in every call.
_MAX_DECISIONS = 4096

# Images, tokens, dtype, device, whether autocast is on, whether a CUDA graph is captured.
Key = tuple[int, int, torch.dtype, torch.device, bool, bool]


@dataclass(eq=False)
class DenseDecision:
    """Decides from shapes alone whether layers with the same options run dense attention.

    A layer that does runs the forward of its host. The decision depends on the number of images and
    tokens, the dtype and the device. Of several grids with equally many tokens the first one decides, so
    that a block finds the decision from its tokens alone, in any thread and in the recomputation of
    gradient checkpointing.
    """

    prefix: int
    heads: int
    head_dim: int
    options: dict[str, Any]  # arguments of screened_attention
    grids: dict[int, Grid] = field(default_factory=dict)  # by the number of tokens
    # Why dense attention runs, None where it is not certain from shapes; `Stats.why` has the same text.
    reasons: dict[Key, str | None] = field(default_factory=dict)
    # By shape, dtype and device: True if dense attention runs with and without autocast and graphs.
    always: dict[tuple[Any, ...], bool] = field(default_factory=dict)

    def is_dense(self, x: Tensor) -> bool:
        """Return the decision for the tokens (B, tokens, C) or the queries (B, heads, tokens, d)."""
        always = self.always.get((x.shape, x.dtype, x.device))
        return always or self._look_up(x, always is None)

    def _look_up(self, x: Tensor, first: bool) -> bool:
        shape = x.shape
        if first and len(self.always) < _MAX_DECISIONS:
            always = self._is_always_dense(shape[0], shape[-2], x.dtype, x.device)
            self.always[shape, x.dtype, x.device] = always
        if x.is_cuda:
            autocast, capturing = torch.is_autocast_enabled("cuda"), is_capturing(x)
        else:
            autocast, capturing = torch.is_autocast_enabled("cpu"), False
        key = (shape[0], shape[-2], x.dtype, x.device, autocast, capturing)
        try:
            return self.reasons[key] is not None
        except KeyError:
            return self.decide(key) is not None

    def _is_always_dense(
        self, batch: int, tokens: int, dtype: torch.dtype, device: torch.device
    ) -> bool:
        grid = self._grid_of(tokens)
        return all(
            self.reason(batch, grid, cast, device, in_graph=in_graph) is not None
            for cast in {dtype, torch.float16, torch.bfloat16}
            for in_graph in (False, True)
        )

    def reason(
        self, batch: int, grid: Grid, dtype: torch.dtype, device: torch.device, *, in_graph: bool
    ) -> str | None:
        """Return why dense attention runs at a size, None if it is not certain from shapes."""
        shape = (batch, self.heads, self.prefix + grid.size, self.head_dim)
        return dense_reason(shape, dtype, device.type, grid, self.options, in_graph=in_graph)

    def decide(self, key: Key) -> str | None:
        """Make and store the decision for a key."""
        batch, tokens, dtype, device, autocast, capturing = key
        if autocast and dtype != torch.float64:
            dtype = torch.get_autocast_dtype(device.type if device.type == "cuda" else "cpu")
        reason = self.reason(batch, self._grid_of(tokens), dtype, device, in_graph=capturing)
        if len(self.reasons) < _MAX_DECISIONS:
            self.reasons[key] = reason
        return reason

    def _grid_of(self, tokens: int) -> Grid:
        """Return the grid of a number of tokens, one row if the projection has not seen that many.

        Those are a part of a grid: the host drops the others.
        """
        return self.grids.get(tokens) or Grid(1, max(1, tokens - self.prefix))


@dataclass(eq=False)
class PlannedDecision(DenseDecision):
    """Decides for the layers of a plan: tiles for images of its grid, dense attention for all others.

    The first images with another number of tokens warn.
    """

    planned: Grid = field(kw_only=True)
    warned: set[int] = field(default_factory=set)  # numbers of tokens

    def __post_init__(self) -> None:
        self.grids[self.prefix + self.planned.size] = self.planned

    def reason(
        self, batch: int, grid: Grid, dtype: torch.dtype, device: torch.device, *, in_graph: bool
    ) -> str | None:
        """Return why dense attention runs at a size, None at that of the plan."""
        if grid.size == self.planned.size:
            return None
        height, width = self.planned.height, self.planned.width
        return (
            f"the plan is for a {height}x{width} grid of tokens, and there are {grid.size} tokens"
        )

    def decide(self, key: Key) -> str | None:
        """Make and store the decision for a key, and warn if it is for another size than planned."""
        reason = super().decide(key)
        if reason is not None and key[1] not in self.warned:
            self.warned.add(key[1])
            warnings.warn(
                f"{reason}: this size runs dense attention; make a plan for it with bmfa.tune",
                stacklevel=2,
            )
        return reason


def is_capturing(x: Tensor) -> bool:
    """True if a CUDA graph is captured on the current stream."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()
