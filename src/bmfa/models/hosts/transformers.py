"""Vision Transformers of transformers, through its own attention interface."""

import math
import sys
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor, nn

from bmfa.attention.api import screened_attention
from bmfa.attention.dispatch import exact_choice, in_graph
from bmfa.grid import Grid
from bmfa.models.hosts.base import (
    AttentionReplacement,
    BlockLayout,
    VisionTransformer,
    class_name,
    is_noop,
    replacement_of,
)
from bmfa.models.hosts.unsupported import SUPPORTED
from bmfa.models.override import override_method, restore_method
from bmfa.packages import load_package

# The name of our attention function in `config._attn_implementation`.
IMPLEMENTATION = "bmfa"
# The function of transformers that runs where ours does not and the model names no other.
_DENSE_FUNCTION = "sdpa"
_functions: Any = {}  # the attention functions of transformers by name, from `register_function` on

_VIT = BlockLayout(
    ("layernorm_before", "attention", "dropout"), ("layernorm_after", "mlp", "dropout")
)
_DINO = BlockLayout(
    ("norm1", "attention", "layer_scale1", "drop_path"),
    ("norm2", "mlp", "layer_scale2", "drop_path"),
)
_DINOV3 = replace(_DINO, rotary="position_embeddings")
_INTERN = BlockLayout(
    ("layernorm_before", "attention", "lambda_1"),
    ("layernorm_after", "mlp", "dropout", "lambda_2"),
)
_CLIP = BlockLayout(("layer_norm1", "self_attn"), ("layer_norm2", "mlp"))
_AIM = BlockLayout(("rms_norm1", "attention"), ("rms_norm2", "ffn"))

# Endings of the class names of models that read spatial tokens after the last block.
_DENSE = ("ForMaskedImageModeling", "Backbone")
_DENSE_OR_POOLED = (*_DENSE, "ForImageClassification")
_ALL = ("",)


class TransformersAttention(AttentionReplacement):
    """Gives the module a configuration of its own that names our attention function."""

    implementation: ClassVar[str] = IMPLEMENTATION

    @classmethod
    def register(cls) -> None:
        """Make transformers know the attention function of this class."""
        _register()

    def _replace(self, module: nn.Module) -> None:
        self.register()
        self.saved["config"] = module.config
        self.saved["eager"] = sys.modules[type(module).__module__].__dict__.get(
            "eager_attention_forward"
        )
        config: Any = copy(module.config)
        config._attn_implementation = self.implementation
        module.config = config

    def _undo(self, module: nn.Module) -> None:
        module.config = self.saved["config"]

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.register()  # the process that unpickles the model must know the name
        self.__dict__.update(state)


class OverridingAttention(TransformersAttention):
    """Also overrides the forward of the module: a subclass has `run`, which decides who attends."""

    def _replace(self, module: nn.Module) -> None:
        super()._replace(module)
        override_method(module, self)

    def _undo(self, module: nn.Module) -> None:
        restore_method(module)
        super()._undo(module)

    def uses_host(self, x: Any) -> bool:
        """False: `run` decides, which knows the grid of the pass."""
        return False

    def run(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Compute the output of the attention module."""
        raise NotImplementedError


class BlipAttention(AttentionReplacement):
    """Computes q, k, v and the output as BLIP does, whose attention calls no other function."""

    def _replace(self, module: nn.Module) -> None:
        override_method(module, self)

    def _undo(self, module: nn.Module) -> None:
        restore_method(module)

    def uses_host(self, x: Any) -> bool:
        """False: `run` decides, because the block passes its tokens by name."""
        return False

    def run(self, module: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Compute the output of the attention module."""
        x: Tensor = args[0] if args else kwargs["hidden_states"]
        if self.function.uses_host(x):
            return forward(*args, **kwargs)
        refuse_attentions(module.config, kwargs)
        qkv = module.qkv(x).unflatten(-1, (3, module.num_heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # (B, heads, T, d) each
        dropout = 0.0 if is_noop(module.dropout) else module.dropout.p
        output = self.function(q, k, v, None, dropout, False, module.scale)
        return module.projection(output.transpose(1, 2).flatten(2)), None


@dataclass(frozen=True)
class Family:
    """The names of a model family's attention class, block layout, patch projection and tokens."""

    attention: str
    layout: BlockLayout | None
    projection: str = "patch_embeddings.projection"
    prefix: int = 1  # without registers
    registers: bool = False
    spatial_readers: tuple[str, ...] = _DENSE
    suffix: str | None = None  # name in the configuration of the number of tokens behind the grid
    replacement: type[AttentionReplacement] = TransformersAttention


# By the class of the embeddings, which distinguishes the vision tower of CLIP from its text tower.
FAMILIES = {
    "vit.modeling_vit.ViTEmbeddings": Family("ViTAttention", _VIT),
    "deit.modeling_deit.DeiTEmbeddings": Family("DeiTAttention", _VIT, prefix=2),
    "dinov2.modeling_dinov2.Dinov2Embeddings": Family(
        "Dinov2Attention", _DINO, spatial_readers=_DENSE_OR_POOLED
    ),
    "dinov2_with_registers.modeling_dinov2_with_registers.Dinov2WithRegistersEmbeddings": Family(
        "Dinov2WithRegistersAttention", _DINO, registers=True, spatial_readers=_DENSE_OR_POOLED
    ),
    "dinov3_vit.modeling_dinov3_vit.DINOv3ViTEmbeddings": Family(
        "DINOv3ViTAttention", _DINOV3, "patch_embeddings", registers=True
    ),
    "clip.modeling_clip.CLIPVisionEmbeddings": Family(
        "CLIPAttention", _CLIP, "patch_embedding", spatial_readers=_DENSE_OR_POOLED
    ),
    "siglip.modeling_siglip.SiglipVisionEmbeddings": Family(
        "SiglipAttention", _CLIP, "patch_embedding", prefix=0, spatial_readers=_ALL
    ),
    "vit_msn.modeling_vit_msn.ViTMSNEmbeddings": Family("ViTMSNAttention", _VIT),
    "ijepa.modeling_ijepa.IJepaEmbeddings": Family(
        "IJepaAttention", _VIT, prefix=0, spatial_readers=_ALL
    ),
    "dpt.modeling_dpt.DPTViTEmbeddings": Family("DPTViTAttention", None),
    "dpt.modeling_dpt.DPTViTHybridEmbeddings": Family("DPTViTAttention", None, "projection"),
    "yolos.modeling_yolos.YolosEmbeddings": Family(
        "YolosAttention", None, suffix="num_detection_tokens"
    ),
    "vitpose_backbone.modeling_vitpose_backbone.VitPoseBackboneEmbeddings": Family(
        "VitPoseBackboneAttention", None, prefix=0, spatial_readers=_ALL
    ),
    "aimv2.modeling_aimv2.Aimv2VisionEmbeddings": Family(
        "Aimv2Attention", _AIM, "patch_embed", prefix=0, spatial_readers=_ALL
    ),
    "owlvit.modeling_owlvit.OwlViTVisionEmbeddings": Family(
        "OwlViTAttention", _CLIP, "patch_embedding", spatial_readers=("ForObjectDetection",)
    ),
    "internvl.modeling_internvl.InternVLVisionEmbeddings": Family(
        "InternVLVisionAttention", _INTERN, spatial_readers=_ALL
    ),
    "blip.modeling_blip.BlipVisionEmbeddings": Family(
        "BlipAttention", _CLIP, "patch_embedding", spatial_readers=_ALL, replacement=BlipAttention
    ),
}


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
    if replacement is None:  # the user has named our function: attn_implementation="bmfa"
        return _default_attention(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
        )
    if not replacement.active:  # patched, dense at this size, and the user has named our function
        return _functions[_DENSE_FUNCTION](  # type: ignore[no-any-return]
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
        )
    if replacement.function.uses_host(query):
        # As `attend_by_host`, without a further call in every layer that runs dense.
        name, eager = replacement.saved["config"]._attn_implementation, replacement.saved["eager"]
        name = _DENSE_FUNCTION if name == IMPLEMENTATION else name
        return _functions.get(name, eager)(  # type: ignore[no-any-return]
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
        )
    refuse_attentions(replacement.saved["config"], kwargs)
    causal = bool(kwargs.get("is_causal", False))
    output = replacement.function(query, key, value, attention_mask, dropout, causal, scaling)
    return output.transpose(1, 2).contiguous(), None


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
    if grid is None or not plain or weights or query.shape != key.shape:
        dense = True
    else:
        choice = exact_choice(
            query.shape,
            query.dtype,
            query.device.type,
            grid,
            {},
            in_graph=in_graph(query),
            requires_grad=query.requires_grad,
        )
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
    config: Any = getattr(module, "config", None)
    family = _BY_MODULE.get(type(module).__module__.removeprefix("transformers.models."))
    sizes: list[Any] = [getattr(config, name, None) for name in ("image_size", "patch_size")]
    if family is None or None in sizes:  # a text tower has no patches
        return None, 0, 0
    prefix = family.prefix + (int(config.num_register_tokens) if family.registers else 0)
    suffix = int(getattr(config, family.suffix)) if family.suffix else 0
    spatial = tokens - prefix - suffix
    image, patch = ((x, x) if isinstance(x, int) else tuple(x) for x in sizes)
    height, width = image[0] // patch[0], image[1] // patch[1]
    if spatial > 0 and height * width == spatial:
        return Grid(height, width), prefix, suffix
    side = math.isqrt(max(spatial, 0))
    square = spatial > 0 and side * side == spatial
    return (Grid(side, side) if square else None), prefix, suffix


def attend_by_host(
    replacement: AttentionReplacement, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Call the attention function that the module would use if it were not patched."""
    name, eager = replacement.saved["config"]._attn_implementation, replacement.saved["eager"]
    name = _DENSE_FUNCTION if name == IMPLEMENTATION else name
    return _functions.get(name, eager)(*args, **kwargs)  # type: ignore[no-any-return]


def required_replacement(module: Any) -> AttentionReplacement:
    """Return what replaces the attention of a module whose configuration names one of our functions.

    Raises:
        RuntimeError: If the module is not patched.
    """
    replacement = replacement_of(module)
    if replacement is None:
        raise RuntimeError(
            f"{class_name(module)} names {module.config._attn_implementation!r} as its attention but is "
            "not patched; call bmfa.patch(model)"
        )
    return replacement


def refuse_attentions(config: Any, kwargs: dict[str, Any]) -> None:
    """Raise a ValueError if a call, or the configuration of its module, asks for attention weights."""
    if kwargs.get("output_attentions") or config.output_attentions:
        raise ValueError(
            "output_attentions=True is not supported in patched or reduced models, which compute no "
            "attention matrix; call bmfa.unpatch(model), or, if the model is patched with a rule, "
            "record the weights with bmfa.record(model, attention=True)"
        )


def register_attention() -> None:
    """Make transformers know `attn_implementation="bmfa"`.

    A model that is made or loaded with that name attends over tiles with the default target of
    `screened_attention` in every layer where tiles are faster, and runs dense elsewhere: for text
    towers, models that are not supported, masks, and images whose grid is unknown. An attention function
    of transformers does not see the image. The grid is taken from the image size of the configuration
    if that has as many tokens, and a square otherwise; for other images, and for other settings, call
    `bmfa.patch(model)`, which reads the grid of every image.

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
    _register()


def register_function(name: str, function: Callable[..., Any]) -> None:
    """Register a name for attention and for masks: without the latter, masks are silently dropped."""
    global _functions
    modeling = load_package("transformers.modeling_utils")
    masks = load_package("transformers.masking_utils")
    _functions = modeling.ALL_ATTENTION_FUNCTIONS
    modeling.AttentionInterface.register(name, function)
    masks.AttentionMaskInterface.register(name, masks.sdpa_mask)


def _register() -> None:
    register_function(IMPLEMENTATION, bmfa_attention_forward)


# By the module that defines the family, for attention modules that are not patched.
_BY_MODULE = {name.rpartition(".")[0]: family for name, family in FAMILIES.items()}


def find_towers(model: nn.Module) -> list[VisionTransformer]:
    """List the transformers vision towers in a model."""
    hosts = []
    for tower in model.modules():
        for embeddings in tower.children():
            family = FAMILIES.get(class_name(embeddings).removeprefix("transformers.models."))
            if family is not None:
                hosts.append(_host(model, tower, embeddings, family))
    return hosts


def _host(model: nn.Module, tower: nn.Module, embeddings: Any, family: Family) -> VisionTransformer:
    pairs = [
        (block, child)
        for block in tower.modules()
        for child in block.children()
        if type(child).__name__ == family.attention
    ]
    registers = int(embeddings.config.num_register_tokens) if family.registers else 0
    suffix = int(getattr(embeddings.config, family.suffix)) if family.suffix else 0
    return VisionTransformer(
        replacement=family.replacement,
        tower=tower,
        blocks=tuple(block for block, _ in pairs),
        attentions=tuple(_config_owner(attention) for _, attention in pairs),
        projection=embeddings.get_submodule(family.projection),
        prefix=family.prefix + registers,
        suffix=suffix,
        layout=family.layout,
        reads_spatial_tokens=type(model).__module__ != type(embeddings).__module__
        or any(type(m).__name__.endswith(family.spatial_readers) for m in model.modules()),
    )


def _config_owner(attention: nn.Module) -> nn.Module:
    """Return the module whose configuration names the attention function.

    That is the attention itself, or a part of it in versions of transformers that nest them.
    """
    if hasattr(attention, "config"):
        return attention
    owners = [part for part in attention.modules() if hasattr(part, "config")]
    if len(owners) != 1:
        raise TypeError(
            f"{class_name(attention)} is not supported: {len(owners)} of its parts have a "
            "configuration, and exactly one must name the attention function; "
            f"supported are {SUPPORTED}, as transformers defines them from 5.9 on"
        )
    return owners[0]
