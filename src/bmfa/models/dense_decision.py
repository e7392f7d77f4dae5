"""Decide once for each input shape whether layers of a model run exact attention, and by what."""

import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bmfa.attention.dispatch import Choice, exact_choice
from bmfa.grid import Grid

# Decisions that are kept, about 200 bytes each; later ones are made again in every call.
_MAX_DECISIONS = 4096

# Images, tokens, dtype of q, device, whether gradients are required, whether a CUDA graph is captured.
Key = tuple[int, int, torch.dtype, torch.device, bool, bool]


@dataclass(eq=False)
class DenseDecision:
    """Decides from shapes alone whether layers with the same options run exact attention.

    A layer that does runs the forward of its host, or the native kernel in place of the host's SDPA. The
    decision depends on the number of images and tokens, the dtype, the device and gradients. Of several
    grids with equally many tokens the first one decides, so that a block finds the decision from its
    tokens alone, in any thread and in the recomputation of gradient checkpointing.
    """

    prefix: int
    heads: int
    head_dim: int
    options: dict[str, Any]  # arguments of screened_attention
    grids: dict[int, Grid] = field(default_factory=dict)  # by the number of tokens
    # What runs exact attention, None where tiles may run; `Stats.reason` has the same text.
    choices: dict[Key, Choice | None] = field(default_factory=dict)

    def choice(self, x: Tensor) -> Choice | None:
        """Return the decision for the tokens (B, tokens, C) or the queries (B, heads, tokens, d)."""
        key = decision_key(x)
        try:
            return self.choices[key]
        except KeyError:
            return self.decide(key)

    def decide(self, key: Key) -> Choice | None:
        """Make and store the decision for a key."""
        batch, tokens = key[:2]
        choice = self.make(batch, self._grid_of(tokens), *key[2:])
        if len(self.choices) < _MAX_DECISIONS:
            self.choices[key] = choice
        return choice

    def make(
        self,
        batch: int,
        grid: Grid,
        dtype: torch.dtype,
        device: torch.device,
        requires_grad: bool,
        in_graph: bool,
    ) -> Choice | None:
        """Return what runs exact attention at a size, None if tiles may run."""
        shape = (batch, self.heads, self.prefix + grid.size, self.head_dim)
        return exact_choice(
            shape,
            dtype,
            device.type,
            grid,
            self.options,
            in_graph=in_graph,
            requires_grad=requires_grad,
        )

    def _grid_of(self, tokens: int) -> Grid:
        """Return the grid of a number of tokens, one row if the projection has not seen that many.

        Those are a part of a grid: the host drops the others.
        """
        return self.grids.get(tokens) or Grid(1, max(1, tokens - self.prefix))


@dataclass(eq=False)
class PlannedDecision(DenseDecision):
    """Decides for the layers of a plan: tiles for images of its grid, exact attention for all others.

    The first images with another number of tokens warn.
    """

    planned: Grid = field(kw_only=True)
    warned: set[int] = field(default_factory=set)  # numbers of tokens

    def __post_init__(self) -> None:
        self.grids[self.prefix + self.planned.size] = self.planned

    def make(
        self,
        batch: int,
        grid: Grid,
        dtype: torch.dtype,
        device: torch.device,
        requires_grad: bool,
        in_graph: bool,
    ) -> Choice | None:
        """Return what runs exact attention at a size, None at that of the plan."""
        if grid.size == self.planned.size:
            return None
        choice = super().make(batch, grid, dtype, device, requires_grad, in_graph)
        assert choice is not None  # the error of the options is 0
        height, width = self.planned.height, self.planned.width
        return choice._replace(
            reason=f"the plan is for a {height}x{width} grid of tokens, and there are {grid.size} tokens"
        )

    def decide(self, key: Key) -> Choice | None:
        """Make and store the decision for a key, and warn if it is for another size than planned."""
        choice = super().decide(key)
        if choice is not None and key[1] not in self.warned:
            self.warned.add(key[1])
            warnings.warn(
                f"{choice.reason}: this size runs dense attention; make a plan for it with bmfa.tune",
                stacklevel=2,
            )
        return choice


def decision_key(x: Tensor) -> Key:
    """Return the key for the tokens (B, tokens, C) or the queries (B, heads, tokens, d)."""
    shape, dtype = x.shape, x.dtype
    kind = "cuda" if x.is_cuda else "cpu"
    if torch.is_autocast_enabled(kind) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(kind)
    capturing = x.is_cuda and is_capturing(x)
    return shape[0], shape[-2], dtype, x.device, x.requires_grad, capturing


def is_capturing(x: Tensor) -> bool:
    """True if a CUDA graph is captured on the current stream."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()
