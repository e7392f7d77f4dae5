"""Attention of transformers models, through the attention interface of transformers."""

import math
import sys
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn

from bmfa.grid import Grid
from bmfa.models.packing import Packing, outside_graphs, prepare_compiling
from bmfa.models.passes import PerThread
from bmfa.models.replacement import AttentionReplacement, replacement_of, split_heads
from bmfa.models.screened_layer import AttentionFunction, ScreenedLayer
from bmfa.packages import load_package

# The name of our attention function in `config._attn_implementation`.
IMPLEMENTATION = "bmfa"
# The function of transformers that runs where ours does not and the model names no other.
_DENSE_FUNCTION = "sdpa"
_no_passes = PerThread()  # of models that are not patched: torch.compile cannot make one
_functions: Any = {}  # the attention functions of transformers by name, from `register_attention` on


@dataclass(eq=False)
class InterfaceAttention(AttentionReplacement):
    """Gives the module a configuration of its own that names our attention function."""

    method = "extra_repr"
    config: Any = field(init=False, default=None)  # of the model
    handle: Any = field(init=False, default=None)  # of the hook
    prepare: ClassVar[Any] = None  # forward pre-hook of a subclass

    def install(self, module: nn.Module) -> None:
        """Name our function."""
        register_attention()
        super().install(module)
        self.config = module.config
        config: Any = copy(module.config)
        config._attn_implementation = IMPLEMENTATION
        module.config = config
        if self.prepare is not None:
            self.handle = module.register_forward_pre_hook(self.prepare, with_kwargs=True)

    def restore(self, module: nn.Module) -> None:
        """Undo `install`."""
        super().restore(module)
        module.config = self.config
        if self.handle is not None:
            self.handle.remove()

    def __setstate__(self, state: dict[str, Any]) -> None:
        register_attention()  # the process that unpickles the model must know the name
        self.__dict__.update(state)


class MapAttention(InterfaceAttention):
    """For modules whose input (B, H, W, C) has the shape of the grid."""

    def prepare(self, module: Any, args: Any, kwargs: Any) -> None:
        """Read the grid of the call."""
        x = args[0] if args else kwargs["hidden_states"]
        # Integers, not symbols: whatever depends on a grid is a constant of a compiled graph.
        self.function.passes.set_grid(Grid(int(x.shape[1]), int(x.shape[2])))


class SequenceAttention(InterfaceAttention):
    """For modules that split a sequence (..., tokens, C) at its images, which attend in one call."""

    def prepare(self, module: Any, args: Any, kwargs: Any) -> Any:
        """Join the images of the call, unless all run dense."""
        return outside_graphs(self._join, module, args, kwargs)

    def _join(self, module: Any, args: Any, kwargs: Any) -> Any:
        x = args[0] if args else kwargs["hidden_states"]
        tokens, heads = x.shape[-2], module.num_heads
        if self.function.passes.images is None:
            self.function.passes.grid_of(tokens)  # raises: the model itself was not called
        if self.function.runs_host((1, heads, tokens, x.shape[-1] // heads), x):
            return None
        ends = torch.tensor([0, tokens], dtype=torch.int32)
        return args, kwargs | {"cu_seqlens": ends, "bmfa_joined": True}


class BlipAttention(AttentionReplacement):
    """Computes q, k, v and the output as BLIP does, whose attention calls no other function."""

    def run(self, module: Any, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Compute the output of the attention module."""
        x: Tensor = args[0] if args else kwargs["hidden_states"]
        weights = asks_for_weights(module.config, kwargs)
        dropout = module.dropout.p if module.training else 0.0
        shape = (x.shape[0], module.num_heads, x.shape[1], module.head_dim)
        if self.function.runs_host(shape, x, plain=not weights and dropout == 0.0):
            return method(*args, **kwargs)
        if weights:
            refuse_weights()
        q, k, v = split_heads(module.qkv(x), module.num_heads)
        output = self.function(q, k, v, dropout_p=dropout, scale=module.scale)
        return module.projection(output.transpose(1, 2).flatten(2)), None


def bmfa_attention_forward(
    module: nn.Module, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Attention function of transformers: (B, heads, tokens, d) to (B, tokens, heads, d)."""
    replacement = replacement_of(module)
    if not isinstance(replacement, InterfaceAttention):  # named by attn_implementation="bmfa"
        return _attend(module, module.config, None, *args, **kwargs)
    function = replacement.function
    split = isinstance(replacement, SequenceAttention) and "bmfa_joined" not in kwargs
    found: tuple[Tensor, Tensor | None]
    if isinstance(function.passes.images, Packing):
        found = outside_graphs(
            _attend, module, replacement.config, function, *args, split=split, **kwargs
        )
        return found
    return _attend(module, replacement.config, function, *args, split=split, **kwargs)


def _attend(
    module: Any,
    config: Any,
    function: AttentionFunction | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    split: bool = False,
    bmfa_joined: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Run the function of a layer, tiles with the default target, or the function of the model."""
    causal = kwargs.get("is_causal")
    causal = getattr(module, "is_causal", False) if causal is None else causal
    weights = asks_for_weights(config, kwargs)
    plain = attention_mask is None and dropout == 0.0 and not causal and not weights
    if function is None and plain and query.shape == key.shape:
        function = _guess_layer(module, int(key.shape[2]))
    if (
        function is None
        or split  # by the hook of the module, which joins images that do not run dense
        or (not bmfa_joined and function.runs_host(query.shape, query, plain=plain))
    ):
        name = config._attn_implementation
        name = _DENSE_FUNCTION if name == IMPLEMENTATION else name
        eager = sys.modules[type(module).__module__].__dict__.get("eager_attention_forward")
        return _functions.get(name, eager)(  # type: ignore[no-any-return]
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
        )
    if weights:
        refuse_weights()
    attend = function.attend if bmfa_joined else function
    output = attend(query, key, value, attention_mask, dropout, causal, scaling)
    return output.transpose(1, 2).contiguous(), None


def asks_for_weights(config: Any, kwargs: dict[str, Any]) -> bool:
    """True if a call, or the configuration of its module, asks for attention weights."""
    return bool(kwargs.get("output_attentions") or getattr(config, "output_attentions", False))


def refuse_weights() -> NoReturn:
    """Raise a ValueError that names what has the weights."""
    raise ValueError(
        "output_attentions=True is not supported in patched or reduced models, which compute no "
        "attention matrix; call bmfa.unpatch(model), or, if the model is patched with a rule, record "
        "the weights with bmfa.record(model, attention=True)"
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


def _guess_layer(module: Any, tokens: int) -> ScreenedLayer | None:
    """Return a layer with the default target over a number of tokens, None if their grid is unknown.

    An attention function of transformers sees no image. The grid is that of the configuration if it has
    that many tokens, and a square otherwise.
    """
    from bmfa.models.described import DescribedPasses
    from bmfa.models.families import FAMILIES

    named = (
        family
        for name, family in FAMILIES.items()
        if name.rpartition(".")[0] == type(module).__module__ and not family.read
    )
    family, config = next(named, None), module.config
    sizes: list[Any] = [getattr(config, name, None) for name in ("image_size", "patch_size")]
    if family is None or None in sizes:  # a text encoder has no patches
        return None
    prefix, suffix = family.special_tokens(config)
    spatial = max(tokens - prefix - suffix, 0)
    image, patch = ((x, x) if isinstance(x, int) else tuple(x) for x in sizes)
    height, width = image[0] // patch[0], image[1] // patch[1]
    if height * width != spatial:
        height = width = math.isqrt(spatial)
    if height * width != spatial or spatial == 0:
        return None
    passes = DescribedPasses(prefix, suffix, local=_no_passes, source=Grid(height, width))
    return ScreenedLayer(0, passes)
