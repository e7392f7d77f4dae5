"""The attention of one layer of a patched model, and functions that observe it."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from bmfa.attention.api import screened_attention
from bmfa.attention.call import check_tensors
from bmfa.attention.dispatch import Choice, exact_choice, in_graph
from bmfa.attention.kernels import native
from bmfa.attention.result import Screened
from bmfa.attention.tiling import DEFAULT_ERROR
from bmfa.checks import has_values, is_compiling
from bmfa.grid import Grid
from bmfa.models.packing import Packing
from bmfa.models.padding_mask import valid_keys
from bmfa.models.passes import LayerCall, Passes

REPLACEMENT = "bmfa_replacement"  # key of what is replaced in a module, in its `__dict__`
# Choices that a layer keeps, about 300 bytes each.
_MAX_CHOICES = 1024


@dataclass(frozen=True, eq=False)
class LayerInputs:
    """The inputs of one call of a screened layer."""

    layer: int
    q: Tensor  # (B, heads, prefix + N, d); tokens behind the grid are in the prefix
    k: Tensor  # (B, heads, prefix + N, d)
    v: Tensor  # (B, heads, prefix + N, d)
    scale: float
    grid: Grid
    prefix: int
    valid: Tensor | None  # (B or 1, N) spatial keys that exist

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of `screened_attention`."""
        return {name: x for name, x in vars(self).items() if name != "layer"}


Observer = Callable[[LayerInputs, Screened], None]


@dataclass(eq=False)
class AttentionFunction:
    """Replaces `scaled_dot_product_attention` in one layer, and takes its arguments."""

    layer: int
    passes: Passes
    # Maps the scale, q, k, v (B, heads, tokens, d), `valid_keys` and, where images are packed, grid= to
    # the output.
    compute: ClassVar[Callable[..., Tensor]]

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
    ) -> Tensor:
        """Compute attention.

        Args:
            query: (B, heads, tokens, d); key and value likewise.
            key: Keys.
            value: Values.
            attn_mask: A padding mask; the masks of packed images say no more than the packing.
            dropout_p: Refused unless it is 0.
            is_causal: Refused unless it is False.
            scale: Scale of the scores.
            enable_gqa: Ignored: consecutive query heads may share a key head in any case.
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
        scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
        images, passes = self.passes.images, self.passes
        if isinstance(images, Packing):
            return images.attend(partial(self.compute, scale), query, key, value, scale)
        valid = None
        if attn_mask is not None:
            valid = valid_keys(attn_mask, passes.prefix, passes.suffix)
        return self.compute(scale, query, key, value, valid)

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
        self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        choice = self.choose(query.shape, query)
        if choice is None:
            return self.attend(query, key, value, *args, **kwargs)
        backend, output = _dense_attention(choice, query, key, value, *args, **kwargs)
        self.passes.log(self.layer, LayerCall("dense", backend, choice.reason))
        return output

    def runs_host(self, shape: tuple[int, ...], x: Tensor, *, plain: bool = True) -> bool:
        """True if the layer runs dense and not by the native kernel, and nothing observes it."""
        choice = self.choose(shape, x)
        if choice is None or (choice.backend == "native" and plain):
            return False
        self.passes.log(self.layer, LayerCall("dense", "host", choice.reason))
        return True

    def choose(self, shape: tuple[int, ...], x: Tensor) -> Choice | None:
        """Return what runs dense attention, None if tiles or trees may run, or an observer is called.

        Args:
            shape: (B, heads, tokens, d), the shape of the queries.
            x: A tensor of their dtype and device.
        """
        if self.observer is not None:
            return None
        tokens = int(shape[2])
        images = self.passes.layout(tokens)
        if isinstance(images, Packing):
            # All images of the pass run dense, in one call of the model's own, or none does.
            found: Choice | None = None
            for group in images.groups:
                count, size = group.index.shape
                found = self._choose(group.grid, (count, shape[1], size, shape[3]), x)
                if found is None:
                    return None
            return None if found is None else found._replace(backend="dense")
        # Dense attention needs no grid; tiles refuse a call whose grid is unknown.
        grid = images or Grid(1, max(1, tokens - self.passes.special))
        return self._choose(grid, shape, x)

    def _choose(self, grid: Grid, shape: tuple[int, ...], x: Tensor) -> Choice | None:
        dtype, device = x.dtype, x.device.type
        if device != "meta" and torch.is_autocast_enabled(device) and dtype != torch.float64:
            dtype = torch.get_autocast_dtype(device)
        gradients = x.requires_grad and torch.is_grad_enabled()
        key = (tuple(shape), dtype, device, grid, in_graph(x), gradients)
        if is_compiling():  # the stored choices would be guards of the graph
            return self._make_choice(grid, key)
        if key in self.choices:
            return self.choices[key]
        choice = self._make_choice(grid, key)
        if len(self.choices) < _MAX_CHOICES:
            self.choices[key] = choice
        return choice

    def _make_choice(self, grid: Grid, key: tuple[Any, ...]) -> Choice | None:
        planned = None if self.planned == grid else self.planned
        options = self.options if planned is None else {"error": 0.0}
        shape, dtype, device, _, graph, gradients = key
        choice = exact_choice(
            shape, dtype, device, grid, options, in_graph=graph, requires_grad=gradients
        )
        if choice is None or planned is None:
            return choice
        found = f"there are {grid.size} tokens"
        if grid.size == planned.size:
            found = f"the image has a {grid.height}x{grid.width} grid"
        reason = f"the plan is for a {planned.height}x{planned.width} grid of tokens, and {found}"
        if not is_compiling() and grid not in self.passes.warned:
            self.passes.warned.add(grid)
            warnings.warn(
                f"{reason}: this size runs dense attention; make a plan for it with bmfa.tune",
                stacklevel=2,
            )
        return choice._replace(reason=reason)

    def describe(self) -> str:
        """Return the settings of the layer as text."""
        default = {"backend": "auto", "allow_dense": True}
        given = {name: x for name, x in self.options.items() if x not in (None, default.get(name))}
        if not given.keys() & {"rule", "error", "leaves"}:
            given = {"error": DEFAULT_ERROR} | given
        return ", ".join(f"{name}={value}" for name, value in given.items())

    def compute(
        self,
        scale: float,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        valid: Tensor | None = None,
        grid: Grid | None = None,
    ) -> Tensor:
        """Run `screened_attention`, and call the observer."""
        passes = self.passes
        grid = passes.grid_of(k.shape[2], grid)
        prefix, order = k.shape[2] - grid.size, passes.special_first(grid, q)
        if order is not None:
            q, k, v = (x[:, :, order] for x in (q, k, v))
        options = self.options | {"_caller": (f"layer {self.layer}", passes.model)}
        screened = screened_attention(
            q, k, v, valid=valid, grid=grid, prefix=prefix, scale=scale, **options
        )
        passes.log(self.layer, LayerCall.from_stats(screened.stats))
        if self.observer is not None:
            inputs = LayerInputs(self.layer, q, k, v, scale, grid, prefix, valid)
            self.observer(inputs, screened)
        return screened.output if order is None else screened.output[:, :, order.argsort()]


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
    replaced = (module.__dict__.get(REPLACEMENT) for module in model.modules())
    functions = (getattr(replacement, "function", None) for replacement in replaced)
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
