"""The attention of one layer of a patched model, and functions that observe it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from bmfa.attention.api import screened_attention
from bmfa.attention.call import check_tensors
from bmfa.attention.kernels import native
from bmfa.attention.result import Screened
from bmfa.attention.tiling import DEFAULT_ERROR
from bmfa.checks import has_values
from bmfa.grid import Grid
from bmfa.models.dense_decision import DenseDecision
from bmfa.models.hosts.base import AttentionFunction, replacements_in
from bmfa.models.tile_switch import begin_observing, end_observing


@dataclass(frozen=True, eq=False)
class LayerInputs:
    """The inputs of one call of a screened layer."""

    layer: int
    q: Tensor  # (B, heads, prefix + N, d); tokens behind the grid are the first ones of the prefix
    k: Tensor  # (B, heads, prefix + N, d)
    v: Tensor  # (B, heads, prefix + N, d)
    scale: float
    grid: Grid
    prefix: int
    valid: Tensor | None  # (B or 1, N) spatial keys that exist
    query_grid: Grid | None = None  # of the queries, where they are fewer than the keys


Observer = Callable[[LayerInputs, Screened], None]


@dataclass(eq=False)
class ScreenedLayer(AttentionFunction):
    """Screened attention in place of `scaled_dot_product_attention` in one layer."""

    options: dict[str, Any] = field(default_factory=dict)  # arguments of screened_attention
    observer: Observer | None = None
    decision: DenseDecision | None = None  # None if the layer never runs dense

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kw: Any) -> Tensor:
        exact = self._exact_backend(key)
        if exact is None:
            return super().__call__(query, key, value, *args, **kw)
        if exact == "native":
            return _exact_attention(query, key, value, *args, **kw)
        return scaled_dot_product_attention(query, key, value, *args, **kw)

    def uses_host(self, x: Tensor) -> bool:
        """True if the layer runs the attention of its host for x and nothing observes it."""
        return self._exact_backend(x) == "dense"

    def _exact_backend(self, x: Tensor) -> str | None:
        """Return what runs exact attention for x, "native" or "dense"; None for tiles and observers."""
        if self.decision is None:
            return None
        if torch.compiler.is_compiling():  # caches would be guards of the graph
            grid = self.token_grid.of_attention(x.shape[-2])
            kind = (x.dtype, x.device, x.requires_grad, x.is_cuda)
            choice = self.decision.make(x.shape[0], grid, *kind)
            observed = self.observer is not None
        else:
            choice = self.decision.choice(x)
            # A forward pass that began before `observe` has no grid, so it is not observed.
            observed = self.observer is not None and self.token_grid.passes.current is not None
        return None if choice is None or observed else choice.backend

    def describe(self) -> str:
        """Return the settings of the layer as text."""
        given = {name: value for name, value in self.options.items() if value is not None}
        for name, default in (("backend", "auto"), ("allow_dense", True)):
            if given.get(name) == default:
                del given[name]
        if not given.keys() & {"rule", "error", "leaves"}:
            given = {"error": DEFAULT_ERROR} | given
        return ", ".join(f"{name}={value}" for name, value in given.items())

    def uses_host_on(self, grid: Grid, x: Tensor) -> bool:
        """True if the layer runs dense for x, which has tokens of images with this grid."""
        if self.decision is not None and not torch.compiler.is_compiling():
            self.decision.grids.setdefault(self.token_grid.special + grid.size, grid)
        return self.uses_host(x)

    def compute(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, valid: Tensor | None
    ) -> Tensor:
        """Run `screened_attention` on the grid of the running block, and call the observer."""
        grid, prefix = self.token_grid.of_attention(k.shape[2]), self.token_grid.special
        if suffix := self.token_grid.suffix:  # tokens behind the grid come first, as prefix tokens
            q, k, v = (x.roll(suffix, 2) for x in (q, k, v))
        options = self.options
        if q.shape[2] != k.shape[2] and options.get("rule") is None:
            options = options | {"query_grid": self.token_grid.query_grids.current}
        screened = screened_attention(
            q, k, v, grid=grid, prefix=prefix, scale=scale, valid=valid, **options
        )
        self.token_grid.log.add(self.layer, screened.stats, grid, valid)
        if self.observer is not None:
            query_grid = options.get("query_grid")
            inputs = LayerInputs(self.layer, q, k, v, scale, grid, prefix, valid, query_grid)
            self.observer(inputs, screened)
        return screened.output.roll(-suffix, 2) if suffix else screened.output


def _exact_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    **options: Any,
) -> Tensor:
    """`scaled_dot_product_attention` by the native kernel where it can run."""
    plain = attn_mask is None and dropout_p == 0.0 and not is_causal and query.dim() == 4
    if torch.is_autocast_enabled("cpu"):  # SDPA casts inputs of other dtypes
        plain = plain and {x.dtype for x in (query, key, value)} == {
            torch.get_autocast_dtype("cpu")
        }
    if plain and has_values(query):
        check_tensors(query, key, value)
        if native.unsupported_reason(query, key, value) is None:
            scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
            return native.exact_attention(query, key, value, scale=scale)
    return scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, **options
    )


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
    token_grids = list({id(layer.token_grid): layer.token_grid for layer in layers}.values())
    for layer in layers:
        layer.observer = observer
    if layers:
        begin_observing(model, token_grids)
    try:
        yield
    finally:
        for layer, previous in zip(layers, before, strict=True):
            layer.observer = previous
        if layers:
            end_observing(model, token_grids)
