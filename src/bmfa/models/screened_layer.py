"""The attention of one layer of a patched model, and functions that observe it."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from bmfa.attention.api import screened_attention
from bmfa.attention.call import check_tensors
from bmfa.attention.dispatch import Choice, exact_choice, in_graph, may_run_dense
from bmfa.attention.kernels import native
from bmfa.attention.result import Screened
from bmfa.attention.tiling import DEFAULT_ERROR
from bmfa.checks import has_values, is_compiling
from bmfa.grid import Grid
from bmfa.models.packing import Packing
from bmfa.models.padding_mask import valid_keys
from bmfa.models.passes import LayerCall, Passes

# Choices that a layer keeps, about 300 bytes each.
_MAX_CHOICES = 1024


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
class AttentionFunction:
    """Replaces `scaled_dot_product_attention` in one layer, and takes its arguments."""

    layer: int
    passes: Passes

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.attend(*args, **kwargs)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        *,
        grid: Grid | None = None,
        query_grid: Grid | None = None,
    ) -> Tensor:
        """Compute attention.

        Args:
            query: (B, heads, tokens, d); key and value likewise.
            key: Keys.
            value: Values.
            attn_mask: A padding mask.
            dropout_p: Refused unless it is 0.
            is_causal: Refused unless it is False.
            scale: Scale of the scores.
            enable_gqa: True if consecutive query heads may share a key head.
            grid: The grid of the keys, where it is not that of the running pass.
            query_grid: The grid of the queries, where it is not that of the keys.
        """
        if is_causal:
            raise ValueError(
                "causal attention is not supported in patched or reduced models, whose tokens form a "
                "grid; call bmfa.unpatch(model)"
            )
        if dropout_p > 0.0:
            raise ValueError(
                f"attention dropout of {dropout_p:g} is not supported in patched or reduced models; "
                "call model.eval(), or build the model with attention dropout 0"
            )
        if enable_gqa and key.shape[1] != query.shape[1]:
            share = query.shape[1] // key.shape[1]
            key, value = (x.repeat_interleave(share, 1) for x in (key, value))
        scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
        images = self.passes.images
        if grid is None and isinstance(images, Packing):
            if attn_mask is not None and not images.mask_is_padding:
                raise ValueError(
                    "an attention mask is not supported in this patched model, which attends inside "
                    "each image; leave it out, or call bmfa.unpatch(model)"
                )
            attend = partial(self._attend_images, scale)
            return images.attend(attend, query, key, value, scale)
        valid = None
        if attn_mask is not None:
            valid = valid_keys(attn_mask, self.passes.prefix, self.passes.suffix)
        return self.compute(query, key, value, scale, valid, grid, query_grid)

    def _attend_images(self, scale: float, grid: Grid, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.compute(q, k, v, scale, None, grid, None)

    def describe(self) -> str:
        """Return the settings of the layer as text, for the repr of its module."""
        return ""

    def runs_host(self, shape: tuple[int, ...], x: Tensor, *, plain: bool = True) -> bool:
        """True if the module computes this call as the model defines it.

        Args:
            shape: (B, heads, tokens, d), the shape of the queries.
            x: A tensor of their dtype and device.
            plain: False if the call has a mask, dropout, or asks for attention weights.
        """
        return False

    def compute(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        valid: Tensor | None,
        grid: Grid | None,
        query_grid: Grid | None,
    ) -> Tensor:
        """Map q, k, v (B, heads, tokens, d) to the output; valid is (B or 1, N) as in `valid_keys`."""
        raise NotImplementedError


@dataclass(eq=False)
class ScreenedLayer(AttentionFunction):
    """Screened attention in place of `scaled_dot_product_attention` in one layer.

    Whether a call runs dense is decided from its shapes, before anything is computed. Dense attention is
    `scaled_dot_product_attention` with the arguments of the model, or the native kernel.
    """

    options: dict[str, Any] = field(default_factory=dict)  # arguments of screened_attention
    planned: Grid | None = None  # the only grid at which the layer of a plan does not run dense
    observer: Observer | None = None
    choices: dict[tuple[Any, ...], Choice | None] = field(default_factory=dict)  # by shape

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *args: Any,
        grid: Grid | None = None,
        query_grid: Grid | None = None,
        **kwargs: Any,
    ) -> Tensor:
        if torch._C._get_tracing_state() is not None:
            raise RuntimeError(
                "a patched model cannot be traced by torch.jit.trace: a trace would keep the choice "
                "between dense attention and tiles for inputs of all sizes; use torch.compile or "
                "torch.export.export"
            )
        if self.observer is None:
            shape = (*query.shape[:2], key.shape[2], query.shape[3])
            choice = self.choose(shape, query, grid)
            if choice is not None:
                backend, output = _dense_attention(choice, query, key, value, *args, **kwargs)
                self.passes.log(self.layer, LayerCall("dense", backend, choice.reason))
                return output
        return self.attend(query, key, value, *args, grid=grid, query_grid=query_grid, **kwargs)

    def runs_host(self, shape: tuple[int, ...], x: Tensor, *, plain: bool = True) -> bool:
        """True if the layer runs dense and not by the native kernel, and nothing observes it."""
        choice = None if self.observer is not None else self.choose(shape, x)
        if choice is None or (choice.backend == "native" and plain):
            return False
        self.passes.log(self.layer, LayerCall("dense", "host", choice.reason))
        return True

    def choose(self, shape: tuple[int, ...], x: Tensor, grid: Grid | None = None) -> Choice | None:
        """Return what runs dense attention, None if tiles or trees may run.

        Args:
            shape: (B, heads, tokens, d), the shape of the queries, with the number of keys.
            x: A tensor of their dtype and device.
            grid: The grid of the keys, where it is not that of the running pass.
        """
        if self.planned is None and not may_run_dense(self.options):
            return None
        special, tokens = self.passes.special, int(shape[2])
        images = self.passes.layout(tokens) if grid is None else grid
        if isinstance(images, Packing):
            # All images of the pass run dense, in one call of the model's own, or none does.
            choices = [
                self._choose(
                    group.grid, (len(group.index), shape[1], group.index.shape[1], shape[3]), x
                )
                for group in images.groups
            ]
            first = next((choice for choice in choices if choice is not None), None)
            if first is None or None in choices:
                return None
            return first._replace(backend="dense")
        # Dense attention needs no grid; tiles refuse a call whose grid is unknown.
        return self._choose(images or Grid(1, max(1, tokens - special)), shape, x)

    def _choose(self, grid: Grid, shape: tuple[int, ...], x: Tensor) -> Choice | None:
        dtype, device = x.dtype, x.device
        if torch.is_autocast_enabled(device.type) and dtype != torch.float64:
            dtype = torch.get_autocast_dtype(device.type)
        gradients = x.requires_grad and torch.is_grad_enabled()
        if is_compiling():  # the stored choices would be guards of the graph
            return self._make_choice(grid, shape, dtype, device, in_graph(x), gradients)
        key = (grid, tuple(shape), dtype, device, in_graph(x), gradients)
        try:
            return self.choices[key]
        except KeyError:
            choice = self._make_choice(*key)
        if len(self.choices) < _MAX_CHOICES:
            self.choices[key] = choice
        return choice

    def _make_choice(
        self,
        grid: Grid,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        in_graph: bool,
        gradients: bool,
    ) -> Choice | None:
        options = self.options if self.planned is None else {"error": 0.0}
        if grid == self.planned:
            return None
        choice = exact_choice(
            shape, dtype, device.type, grid, options, in_graph=in_graph, requires_grad=gradients
        )
        if choice is None or self.planned is None:
            return choice
        height, width = self.planned.height, self.planned.width
        reason = (
            f"the plan is for a {height}x{width} grid of tokens, and there are {grid.size} tokens"
        )
        if not is_compiling() and grid not in self.passes.warned:
            self.passes.warned.add(grid)
            warnings.warn(
                f"{reason}: this size runs dense attention; make a plan for it with bmfa.tune",
                stacklevel=2,
            )
        return choice._replace(reason=reason)

    def describe(self) -> str:
        """Return the settings of the layer as text."""
        given = {name: value for name, value in self.options.items() if value is not None}
        for name, default in (("backend", "auto"), ("allow_dense", True)):
            if given.get(name) == default:
                del given[name]
        if not given.keys() & {"rule", "error", "leaves"}:
            given = {"error": DEFAULT_ERROR} | given
        return ", ".join(f"{name}={value}" for name, value in given.items())

    def compute(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        valid: Tensor | None,
        grid: Grid | None,
        query_grid: Grid | None,
    ) -> Tensor:
        """Run `screened_attention`, and call the observer."""
        passes = self.passes
        grid, prefix = passes.grid_of(k.shape[2], grid), passes.special
        if suffix := passes.suffix:  # tokens behind the grid come first, as prefix tokens
            q, k, v = (x.roll(suffix, 2) for x in (q, k, v))
        options = self.options
        if query_grid is not None and options.get("rule") is None:
            options = options | {"query_grid": query_grid}
        screened = screened_attention(
            q, k, v, grid=grid, prefix=prefix, scale=scale, valid=valid, **options
        )
        passes.log(self.layer, LayerCall.from_stats(screened.stats, grid, valid))
        if self.observer is not None:
            inputs = LayerInputs(
                self.layer, q, k, v, scale, grid, prefix, valid, options.get("query_grid")
            )
            self.observer(inputs, screened)
        return screened.output.roll(-suffix, 2) if suffix else screened.output


def _dense_attention(
    choice: Choice,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    **options: Any,
) -> tuple[str, Tensor]:
    """Run dense attention; return what ran, and the output."""
    plain = attn_mask is None and dropout_p == 0.0 and not is_causal and query.dim() == 4
    if torch.is_autocast_enabled("cpu"):  # SDPA casts inputs of other dtypes
        dtypes = {x.dtype for x in (query, key, value)}
        plain = plain and dtypes == {torch.get_autocast_dtype("cpu")}
    if choice.backend == "native" and plain and has_values(query):
        check_tensors(query, key, value)
        if native.unsupported_reason(query, key, value) is None:
            scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
            return "native", native.exact_attention(query, key, value, scale=scale)
    return "host", scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, **options
    )


def screened_layers(model: nn.Module) -> list[ScreenedLayer]:
    """List the screened layers of a model in order."""
    replaced = (module.__dict__.get("bmfa_attention") for module in model.modules())
    functions = (replacement.function for replacement in replaced if replacement is not None)
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
