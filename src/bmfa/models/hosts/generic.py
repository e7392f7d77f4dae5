"""Models of unknown classes, through `scaled_dot_product_attention` as their named modules call it.

`patch(model, attention=...)` names the modules for one call, `register_model` for a class of models.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from bmfa.attention.dispatch import may_run_dense
from bmfa.checks import check_integer
from bmfa.grid import Grid, check_grid
from bmfa.models.dense_decision import DenseDecision
from bmfa.models.hosts.base import AttentionReplacement, VisionTransformer, class_name
from bmfa.models.override import override_method, restore_method
from bmfa.models.token_grid import TokenGrid

# A fixed grid, a function of the inputs of the model, or None for a square.
GridSource: TypeAlias = Grid | tuple[int, int] | Callable[..., Grid | tuple[int, int]] | None


@dataclass(frozen=True)
class Description:
    """Where the attention of a model is, and how its tokens are laid out."""

    attention: tuple[str, ...]  # patterns of module names
    grid: GridSource
    prefix: int | Callable[[Any], int]  # a number, or a function of the model
    suffix: int | Callable[[Any], int]


def describe(
    attention: str | Sequence[str],
    grid: GridSource = None,
    prefix: int | Callable[[Any], int] = 0,
    suffix: int | Callable[[Any], int] = 0,
) -> Description:
    """Check a description of a model."""
    patterns = (attention,) if isinstance(attention, str) else attention
    patterns = tuple(patterns) if isinstance(patterns, Sequence) else ()
    if not patterns or not all(isinstance(pattern, str) and pattern for pattern in patterns):
        raise TypeError(
            f"attention is {attention!r}; pass the name of the attention modules as "
            "model.named_modules() has it, with * for any characters but a dot, e.g. 'blocks.*.attn', "
            "or a list of such names"
        )
    if grid is not None and not callable(grid):
        grid = check_grid(grid)
    for name, count in (("prefix", prefix), ("suffix", suffix)):
        if not callable(count):
            check_integer(name, count, low=0)
    return Description(patterns, grid, prefix, suffix)


def described_host(tower: nn.Module, description: Description) -> VisionTransformer:
    """Return the host of a model whose layout is described.

    Raises:
        ValueError: If no module has such a name, or one of them is inside another.
    """
    named = [
        (name, module)
        for name, module in tower.named_modules()
        if name and any(_matches(name, pattern) for pattern in description.attention)
    ]
    patterns = " or ".join(map(repr, description.attention))
    if not named:
        likely = [
            name
            for name, m in tower.named_modules()
            if "attn" in name.lower().split(".")[-1] or "attention" in type(m).__name__.lower()
        ]
        found = (
            f"names that may be meant are {', '.join(likely[:4])}"
            if likely
            else ("list them with [name for name, _ in model.named_modules()]")
        )
        raise ValueError(
            f"attention is {patterns}, and no module of {type(tower).__name__} has such a name; {found}"
        )
    names = [name for name, _ in named]
    for name in names:
        outer = next((other for other in names if name.startswith(f"{other}.")), None)
        if outer is not None:
            raise ValueError(
                f"attention is {patterns}, which names {outer!r} and {name!r} inside of it; name the "
                "modules that call scaled_dot_product_attention, each once"
            )
    prefix, suffix = (
        check_integer(label, count(tower) if callable(count) else count, low=0)
        for label, count in (("prefix", description.prefix), ("suffix", description.suffix))
    )
    modules = tuple(module for _, module in named)
    return VisionTransformer(
        replacement=AttentionInside,
        tower=tower,
        blocks=modules,
        attentions=modules,
        projection=tower,
        prefix=prefix,
        suffix=suffix,
        layout=None,
        reads_spatial_tokens=True,
        watch=watch_inputs,
        make_token_grid=partial(DescribedGrid, source=description.grid),
    )


def _matches(name: str, pattern: str) -> bool:
    """True if every part of a module name, between dots, matches its part of the pattern."""
    names, patterns = name.split("."), pattern.split(".")
    return len(names) == len(patterns) and all(map(fnmatchcase, names, patterns))


@dataclass(eq=False)
class DescribedGrid(TokenGrid):
    """The grid of a model that is described: fixed, from the inputs, or a square."""

    source: GridSource = field(default=None, kw_only=True)

    def of_attention(self, tokens: int, grid: Grid | None = None) -> Grid:
        """Return the grid of attention over a number of tokens."""
        tokens = int(tokens)
        if isinstance(self.source, Grid):
            return super().of_attention(tokens, self.source)
        if callable(self.source):
            return super().of_attention(tokens)
        spatial = tokens - self.special
        side = math.isqrt(max(spatial, 0))
        if side == 0 or side * side != spatial:
            raise ValueError(
                f"attention over {tokens} tokens, of which {spatial} are left without {self.prefix} "
                f"prefix tokens and {self.suffix} behind the grid, which is not a perfect square; pass "
                "grid=(height, width) or a function of the inputs of the model, and the right prefix="
            )
        return Grid(side, side)


def watch_inputs(host: VisionTransformer, token_grid: TokenGrid) -> None:
    """Note where each forward pass begins, and read its grid from the inputs if a function does that."""
    assert isinstance(token_grid, DescribedGrid)
    token_grid.log.by_thread = True
    reader = InputReader(token_grid)
    token_grid.handle = host.tower.register_forward_pre_hook(reader, with_kwargs=True)


@dataclass(eq=False)
class InputReader:
    """Hook of a model that begins a forward pass, and calls the function for the grid."""

    token_grid: DescribedGrid

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            self.token_grid.log.begin()
        source: Any = self.token_grid.source
        if not callable(source):
            return
        result = source(*args, **kwargs)
        if not isinstance(result, Grid):
            try:
                height, width = result
                result = Grid(int(height), int(width))
            except (TypeError, ValueError):
                raise TypeError(
                    f"the function that was passed as grid= returned {result!r}; it must return "
                    "(height, width) in tokens, from the arguments of the model"
                ) from None
        self.token_grid.store(result)


class AttentionInside(AttentionReplacement):
    """Runs the module's own forward with `scaled_dot_product_attention` replaced."""

    def _replace(self, module: nn.Module) -> None:
        function: Any = self.function
        if type(function.decision) is DenseDecision:
            function.decision = None  # the first call knows the heads for certain
        if getattr(module, "fused_attn", True) is False:
            # The unfused path of timm computes the softmax itself.
            self.saved["fused_attn"] = False
            module.__dict__["fused_attn"] = True
        override_method(module, self)

    def _undo(self, module: nn.Module) -> None:
        for name, value in self.saved.items():
            setattr(module, name, value)
        restore_method(module)

    def uses_host(self, x: Any) -> bool:
        """False: whether attention runs dense is decided where it is called."""
        return False

    def run(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Compute the output of the module."""
        if isinstance(module, nn.MultiheadAttention) and _is_self_attention(
            module, *args, **kwargs
        ):
            return self._run_multihead(module, forward, *args, **kwargs)
        mode = _Intercept(self)
        with mode:
            output = forward(*args, **kwargs)
        if mode.calls == 0:
            raise RuntimeError(
                f"{class_name(module)}, attention module {self.function.layer}, has run without a call "
                "of torch.nn.functional.scaled_dot_product_attention, so its attention cannot be "
                "replaced: it computes the softmax itself or through another kernel "
                "(nn.MultiheadAttention does, unless it attends among the same tokens without masks "
                "and with need_weights=False); switch that off, name the modules that do call it, or "
                "call bmfa.unpatch(model)"
            )
        return output

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Run the function of the layer for one call of `scaled_dot_product_attention`."""
        one_head = query.dim() == 3  # (B, tokens, d)
        q, k, v = (x.unsqueeze(1) if one_head else x for x in (query, key, value))
        if q.dim() != 4 or k.dim() != 4 or q.shape[2] != k.shape[2]:
            raise ValueError(
                f"attention module {self.function.layer} attends from {tuple(query.shape)} queries to "
                f"{tuple(key.shape)} keys; supported is attention of (B, heads, tokens, d) among the "
                "same tokens: do not name modules of cross-attention or windows"
            )
        function: Any = self.function
        token_grid: TokenGrid = function.token_grid
        grid = token_grid.of_attention(k.shape[2])  # refused even where dense attention would run
        self._set_decision(grid, q.shape[1], q.shape[3])
        if function.observer is None and function.uses_host(q):
            return scaled_dot_product_attention(query, key, value, *args, **kwargs)
        if kwargs.pop("enable_gqa", False) and k.shape[1] != q.shape[1]:
            share = q.shape[1] // k.shape[1]
            k, v = (x.repeat_interleave(share, 1) for x in (k, v))
        attention = partial(function, q, k, v, *args, **kwargs)
        output: Tensor = token_grid.passes.run_with(grid, attention)
        return output.squeeze(1) if one_head else output

    def _run_multihead(
        self, module: nn.MultiheadAttention, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """Compute the output of a module of torch, whose own forward calls a fused kernel."""
        tokens: Tensor = args[0] if args else kwargs["query"]
        x = tokens if module.batch_first else tokens.transpose(0, 1)  # (B, T, C)
        function: Any = self.function
        grid = function.token_grid.of_attention(x.shape[1])
        self._set_decision(grid, module.num_heads, module.head_dim)
        if function.observer is None and function.uses_host(x):
            return forward(*args, **kwargs)  # type: ignore[no-any-return]
        qkv = linear(x, module.in_proj_weight, module.in_proj_bias)
        qkv = qkv.view(*x.shape[:2], 3, module.num_heads, module.head_dim)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # (B, heads, T, d) each
        output = self.attend(q, k, v, dropout_p=module.dropout if module.training else 0.0)
        output = module.out_proj(output.transpose(1, 2).flatten(2))
        return output if module.batch_first else output.transpose(0, 1), None

    def _set_decision(self, grid: Grid, heads: int, head_dim: int) -> None:
        """Let the layer decide from shapes whether it runs dense."""
        function: Any = self.function
        if torch.compiler.is_compiling():
            return
        special = function.token_grid.special
        if function.decision is None and may_run_dense(function.options):
            function.decision = DenseDecision(special, heads, head_dim, function.options)
        if function.decision is not None:
            function.decision.grids.setdefault(special + grid.size, grid)


def _is_self_attention(
    module: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> bool:
    """True if a call is plain self-attention without masks and weights."""
    masked = key_padding_mask is not None or attn_mask is not None or is_causal or need_weights
    added = module.bias_k is not None or module.bias_v is not None or module.add_zero_attn
    plain = module._qkv_same_embed_dim and query.dim() == 3 and query is key and key is value
    return plain and not masked and not added


class _Intercept(TorchFunctionMode):
    """Calls a replacement wherever `scaled_dot_product_attention` is called in this thread."""

    def __init__(self, replacement: AttentionInside) -> None:
        super().__init__()
        self.replacement = replacement
        self.calls = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is scaled_dot_product_attention:
            self.calls += 1
            return self.replacement.attend(*args, **(kwargs or {}))
        if func is torch.Tensor.unflatten:
            func = torch.unflatten  # torch.compile cannot trace the method inside a mode
        return func(*args, **(kwargs or {}))


_registered: dict[str, Description] = {}  # by the full name of the class


def register_model(
    model_class: type[nn.Module] | str,
    *,
    attention: str | Sequence[str],
    grid: GridSource = None,
    prefix: int | Callable[[Any], int] = 0,
    suffix: int | Callable[[Any], int] = 0,
) -> None:
    """Make `patch` know a class of models of another package.

    From then on `bmfa.patch(model)` accepts models of this class and of its subclasses, and models that
    contain one of them, as it does for timm and transformers. Registering a class again replaces
    what was registered. Pickles of patched models include the function `grid`, so pass one that can be
    pickled if you need them.

    Args:
        model_class: The class, or its full name, e.g. `"package.module.MyViT"`, which imports nothing.
        attention: The names of the modules that call `scaled_dot_product_attention`, as
            `model.named_modules()` has them; `*` is any characters but a dot. They are numbered in
            this order.
        grid: (height, width) of the grid in tokens, a function that returns it from the arguments of
            the model, or None if the spatial tokens are a square.
        prefix: The number of tokens before the grid, or a function of the model that returns it.
        suffix: The number of tokens behind the grid, or a function of the model that returns it.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If a number is out of range.

    Example:
        >>> import bmfa, torch
        >>> from torch import nn
        >>> class Tiny(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.attn = nn.MultiheadAttention(8, 2, batch_first=True)
        ...     def forward(self, x):
        ...         return self.attn(x, x, x, need_weights=False)[0]
        >>> bmfa.models.register_model(Tiny, attention="attn")
        >>> model, x = Tiny().eval(), torch.randn(1, 256, 8)
        >>> full = model(x)
        >>> coarse = bmfa.patch(model, leaves=2, allow_dense=False, layers="all")(x)
        >>> torch.equal(coarse, full), torch.equal(bmfa.unpatch(model)(x), full)
        (False, True)
    """
    if isinstance(model_class, type) and issubclass(model_class, nn.Module):
        model_class = f"{model_class.__module__}.{model_class.__qualname__}"
    if not isinstance(model_class, str) or "." not in model_class:
        raise TypeError(
            f"model_class is {model_class!r}; pass a subclass of torch.nn.Module, or its full name, "
            "e.g. 'package.module.MyViT'"
        )
    _registered[model_class] = describe(attention, grid, prefix, suffix)


def find_towers(model: nn.Module) -> list[VisionTransformer]:
    """List the towers of registered classes in a model."""
    if not _registered:
        return []
    hosts = []
    for module in model.modules():
        names = (f"{kind.__module__}.{kind.__qualname__}" for kind in type(module).__mro__)
        known = next((_registered[name] for name in names if name in _registered), None)
        if known is not None:
            hosts.append(described_host(module, known))
    return hosts
