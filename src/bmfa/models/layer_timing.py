"""Times of dense attention and of attention over tiles, on the q, k, v of each layer of a model."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from bmfa.grid import Grid
from bmfa.models.patching import planned_options
from bmfa.models.screened_layer import ScreenedLayer
from bmfa.timing import time_alternating

# Calls between two synchronisations on CUDA, so that launches overlap with kernels as in a model.
CUDA_CALLS = 8


@dataclass(eq=False)
class TimedLayer(ScreenedLayer):
    """Times dense attention and attention over tiles on the q, k, v of a layer; its output is dense."""

    errors: tuple[float, ...] = ()
    repeats: int = 1
    milliseconds: dict[float | None, float] = field(default_factory=dict)
    grids: set[Grid] = field(default_factory=set)  # of all calls
    dtype: torch.dtype | None = None
    finished: Callable[[], None] | None = None  # called after the first call of the layer

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
    ) -> Tensor:
        arguments = (query, key, value, attn_mask, dropout_p, is_causal)
        self.grids.add(self.token_grid.of_attention(key.shape[2]))
        self.dtype = query.dtype
        dense = partial(scaled_dot_product_attention, *arguments, scale=scale)
        if self.errors and not self.milliseconds:
            calls: dict[float | None, Callable[[], object]] = {None: dense}
            for error, options in self._options().items():
                tiled = ScreenedLayer(self.layer, self.token_grid, options)
                calls[error] = partial(tiled, *arguments, scale=scale)
            self._time(calls, query.device)
        if self.finished is not None:
            self.finished()
            self.finished = None
        return dense()

    def _options(self) -> dict[float, dict[str, Any]]:
        return {error: planned_options({self.layer: error})[self.layer] for error in self.errors}

    def _time(
        self, calls: Mapping[float | None, Callable[[], object]], device: torch.device
    ) -> None:
        repeated = CUDA_CALLS if device.type == "cuda" else 1

        def repeat(call: Callable[[], object]) -> None:
            for _ in range(repeated):
                call()

        works = {str(error): partial(repeat, call) for error, call in calls.items()}
        medians = time_alternating(works, self.repeats, device)
        self.milliseconds = {error: medians[str(error)] / repeated for error in calls}
