"""Attention of transformers models, through the attention interface of transformers."""

import math
import sys
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bmfa.attention.api import screened_attention
from bmfa.attention.dispatch import exact_choice, in_graph
from bmfa.grid import Grid
from bmfa.models.packing import Packing, outside_graphs, prepare_compiling
from bmfa.models.replacement import AttentionReplacement, dropout_of, replacement_of
from bmfa.packages import load_package

# The name of our attention function in `config._attn_implementation`.
IMPLEMENTATION = "bmfa"
# The function of transformers that runs where ours does not and the model names no other.
_DENSE_FUNCTION = "sdpa"
_functions: Any = {}  # the attention functions of transformers by name, from `register_attention` on


@dataclass(eq=False)
class InterfaceAttention(AttentionReplacement):
    """Gives the module a configuration of its own that names our attention function."""

    config: Any = field(init=False, default=None)  # of the model
    handle: Any = field(init=False, default=None)  # of the hook of a subclass

    def replace(self, module: nn.Module) -> None:
        """Name our function."""
        register_attention()
        self.config = module.config
        config: Any = copy(module.config)
        config._attn_implementation = IMPLEMENTATION
        module.config = config

    def undo(self, module: nn.Module) -> None:
        """Undo `replace`."""
        module.config = self.config
        if self.handle is not None:
            self.handle.remove()

    def __setstate__(self, state: dict[str, Any]) -> None:
        register_attention()  # the process that unpickles the model must know the name
        self.__dict__.update(state)


@dataclass(eq=False)
class MapAttention(InterfaceAttention):
    """For modules whose input (B, H, W, C) has the shape of the grid."""

    def replace(self, module: nn.Module) -> None:
        """Name our function, and read the grid of each call."""
        super().replace(module)
        self.handle = module.register_forward_pre_hook(self.read_grid, with_kwargs=True)

    def read_grid(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Forward pre-hook."""
        x = args[0] if args else kwargs["hidden_states"]
        # Integers, not symbols: whatever depends on a grid is a constant of a compiled graph.
        self.function.passes.set_grid(Grid(int(x.shape[1]), int(x.shape[2])))


@dataclass(eq=False)
class SequenceAttention(InterfaceAttention):
    """For modules that would split a sequence at its images: these attend in one call."""

    def replace(self, module: nn.Module) -> None:
        """Name our function, and join the images of each call."""
        super().replace(module)
        self.handle = module.register_forward_pre_hook(self.join_images, with_kwargs=True)

    def join_images(self, module: Any, args: Any, kwargs: Any) -> Any:
        """Forward pre-hook."""
        images = self.function.passes.images
        traceable = isinstance(images, Packing) and images.traced
        return outside_graphs(self._join, module, args, kwargs, traceable=traceable)

    def _join(self, module: Any, args: Any, kwargs: Any) -> Any:
        x = args[0] if args else kwargs["hidden_states"]
        heads = getattr(module, "num_heads", None) or module.config.num_attention_heads
        sequences, tokens = (1, *x.shape[:-1])[-2:]
        shape = (sequences, heads, tokens, x.shape[-1] // heads)
        if self.function.passes.images is None:
            self.function.passes.grid_of(tokens)  # raises: the model itself was not called
        if self.function.runs_host(shape, x):
            return None
        if "cu_seqlens" in kwargs:  # of one sequence with all images
            kwargs["cu_seqlens"] = torch.tensor([0, tokens], dtype=torch.int32)
        if "attention_mask" in kwargs:  # block-diagonal, which the packing replaces
            kwargs["attention_mask"] = None
        return args, kwargs | {"bmfa_joined": True}


class BlipAttention(AttentionReplacement):
    """Computes q, k, v and the output as BLIP does, whose attention calls no other function."""

    def run(self, module: Any, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Compute the output of the attention module."""
        x: Tensor = args[0] if args else kwargs["hidden_states"]
        weights = kwargs.get("output_attentions") or module.config.output_attentions
        dropout = dropout_of(module)
        shape = (x.shape[0], module.num_heads, x.shape[1], module.head_dim)
        if self.function.runs_host(shape, x, plain=not weights and dropout == 0.0):
            return method(*args, **kwargs)
        refuse_attentions(module.config, kwargs)
        qkv = module.qkv(x).unflatten(-1, (3, module.num_heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # (B, heads, T, d) each
        output = self.function(q, k, v, dropout_p=dropout, scale=module.scale)
        return module.projection(output.transpose(1, 2).flatten(2)), None


def bmfa_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention function of transformers: (B, heads, tokens, d) to (B, tokens, heads, d)."""
    replacement = replacement_of(module)
    attend: Callable[..., Any]
    if not isinstance(replacement, InterfaceAttention):  # named by attn_implementation="bmfa"
        attend = _default_attention
    else:
        attend = partial(_attend, replacement)
        images = replacement.function.passes.images
        if isinstance(images, Packing) and not images.traced:
            attend = partial(outside_graphs, attend)
    result: tuple[Tensor, Tensor | None] = attend(
        module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
    )
    return result


def _attend(
    replacement: InterfaceAttention,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None,
    dropout: float,
    bmfa_joined: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    causal = bool(kwargs.get("is_causal", False))
    weights = kwargs.get("output_attentions") or replacement.config.output_attentions
    plain = attention_mask is None and dropout == 0.0 and not causal and not weights
    function = replacement.function
    split = isinstance(replacement, SequenceAttention) and not bmfa_joined
    if split or (not bmfa_joined and function.runs_host(query.shape, query, plain=plain)):
        name = replacement.config._attn_implementation
        name = _DENSE_FUNCTION if name == IMPLEMENTATION else name
        eager = sys.modules[type(module).__module__].__dict__.get("eager_attention_forward")
        return _functions.get(name, eager)(  # type: ignore[no-any-return]
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
        )
    refuse_attentions(replacement.config, kwargs)
    attend = function.attend if bmfa_joined else function  # joined images never run dense
    output = attend(query, key, value, attention_mask, dropout, causal, scaling)
    return output.transpose(1, 2).contiguous(), None


def refuse_attentions(config: Any, kwargs: dict[str, Any]) -> None:
    """Raise a ValueError if a call, or the configuration of its module, asks for attention weights."""
    if kwargs.get("output_attentions") or getattr(config, "output_attentions", False):
        raise ValueError(
            "output_attentions=True is not supported in patched or reduced models, which compute no "
            "attention matrix; call bmfa.unpatch(model), or, if the model is patched with a rule, "
            "record the weights with bmfa.record(model, attention=True)"
        )


def register_attention() -> None:
    """Make transformers know `attn_implementation="bmfa"`.

    A model that is made or loaded with that name attends over tiles with the default target of
    `screened_attention` in every layer where tiles are faster, and runs dense elsewhere: for text
    encoders, models that are not supported, masks, and images whose grid is unknown. An attention
    function of transformers does not see the image. The grid is taken from the image size of the
    configuration if that has as many tokens, and a square otherwise; for other images, and for other
    settings, call `bmfa.patch(model)`, which reads the grid of every image.

    Call this function before such a model is made or loaded. `bmfa.patch` needs no registration.

    Raises:
        ModuleNotFoundError: If transformers is not installed.

    Example:
        >>> import bmfa, torch
        >>> from transformers import AutoModel, ViTConfig
        >>> bmfa.models.register_attention()
        >>> config = ViTConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        ...                    intermediate_size=64, image_size=64, patch_size=4)
        >>> model = AutoModel.from_config(config, attn_implementation="bmfa").eval()
        >>> model(torch.zeros(1, 3, 64, 64)).last_hidden_state.shape  # 256 tokens: runs dense
        torch.Size([1, 257, 32])
    """
    global _functions
    modeling = load_package("transformers.modeling_utils")
    masks = load_package("transformers.masking_utils")
    _functions = modeling.ALL_ATTENTION_FUNCTIONS
    modeling.AttentionInterface.register(IMPLEMENTATION, bmfa_attention_forward)
    # Without this, masks are silently dropped.
    masks.AttentionMaskInterface.register(IMPLEMENTATION, masks.sdpa_mask)
    prepare_compiling()


def _default_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None,
    dropout: float,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention of a model that is not patched: tiles with the default target, or dense attention."""
    grid, prefix, suffix = _guess_layout(module, int(key.shape[2]))
    causal = kwargs.get("is_causal")
    causal = getattr(module, "is_causal", False) if causal is None else causal
    plain = attention_mask is None and dropout == 0.0 and not causal
    weights = kwargs.get("output_attentions") or module.config.output_attentions
    dense = grid is None or not plain or weights or query.shape != key.shape
    if grid is not None and not dense:
        kind: Any = (query.shape, query.dtype, query.device.type, grid, {})
        choice = exact_choice(*kind, in_graph=in_graph(query), requires_grad=query.requires_grad)
        dense = choice is not None and choice.backend == "dense"
    if grid is None or dense:
        return _functions[_DENSE_FUNCTION](  # type: ignore[no-any-return]
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
        )
    q, k, v = (x.roll(suffix, 2) if suffix else x for x in (query, key, value))
    output = screened_attention(q, k, v, grid=grid, prefix=prefix + suffix, scale=scaling).output
    output = output.roll(-suffix, 2) if suffix else output
    return output.transpose(1, 2).contiguous(), None


def _guess_layout(module: Any, tokens: int) -> tuple[Grid | None, int, int]:
    """Return the grid of a number of tokens, None if unknown, and the tokens before and behind it.

    An attention function of transformers sees no image. The grid is that of the configuration if it has
    that many tokens, and a square otherwise.
    """
    from bmfa.models.families import FAMILIES

    config: Any = getattr(module, "config", None)
    named = (
        family
        for name, family in FAMILIES.items()
        if name.rpartition(".")[0] == type(module).__module__ and not family.images
    )
    family = next(named, None)
    sizes: list[Any] = [getattr(config, name, None) for name in ("image_size", "patch_size")]
    if family is None or None in sizes:  # a text encoder has no patches
        return None, 0, 0
    prefix, suffix = family.special_tokens(config)
    spatial = tokens - prefix - suffix
    image, patch = ((x, x) if isinstance(x, int) else tuple(x) for x in sizes)
    height, width = image[0] // patch[0], image[1] // patch[1]
    if spatial > 0 and height * width == spatial:
        return Grid(height, width), prefix, suffix
    side = math.isqrt(max(spatial, 0))
    square = spatial > 0 and side * side == spatial
    return (Grid(side, side) if square else None), prefix, suffix
