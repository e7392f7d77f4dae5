"""The attention of one layer of a patched model, and functions that observe it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from bmfa.attention.api import screened_attention
from bmfa.attention.result import Screened
from bmfa.grid import Grid
from bmfa.models.hosts.base import AttentionFunction, replacements_in


@dataclass(frozen=True, eq=False)
class LayerInputs:
    """The inputs of one call of a screened layer."""

    layer: int
    q: Tensor  # (B, heads, prefix + N, d)
    k: Tensor  # (B, heads, prefix + N, d)
    scale: float
    grid: Grid
    prefix: int
    valid: Tensor | None  # (B or 1, N) spatial keys that exist


Observer = Callable[[LayerInputs, Screened], None]


@dataclass(eq=False)
class ScreenedLayer(AttentionFunction):
    """Screened attention in place of `scaled_dot_product_attention` in one layer."""

    options: dict[str, Any] = field(default_factory=dict)  # arguments of screened_attention
    observer: Observer | None = None

    def compute(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, valid: Tensor | None
    ) -> Tensor:
        """Run `screened_attention` on the grid of the running block, and call the observer."""
        grid, prefix = self.token_grid.of_attention(k.shape[2]), self.token_grid.prefix
        screened = screened_attention(
            q, k, v, grid=grid, prefix=prefix, scale=scale, valid=valid, **self.options
        )
        if self.observer is not None:
            self.observer(LayerInputs(self.layer, q, k, scale, grid, prefix, valid), screened)
        return screened.output


def screened_layers(model: nn.Module) -> list[ScreenedLayer]:
    """List the screened layers of a model in order."""
    functions = (replacement.function for _, replacement in replacements_in(model))
    return [function for function in functions if isinstance(function, ScreenedLayer)]


@contextmanager
def observe(model: nn.Module, observer: Observer) -> Iterator[None]:
    """Call a function after every call of a screened layer inside the `with` block.

    Args:
        model: A model; without screened layers nothing is observed.
        observer: Called with the inputs and the result of the layer.
    """
    layers = screened_layers(model)
    before = [layer.observer for layer in layers]
    for layer in layers:
        layer.observer = observer
    try:
        yield
    finally:
        for layer, previous in zip(layers, before, strict=True):
            layer.observer = previous
