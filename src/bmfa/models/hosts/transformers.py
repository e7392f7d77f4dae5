"""The Vision Transformers of transformers, through its own attention interface."""

from copy import copy
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from bmfa.models.hosts import SUPPORTED, Host, class_name
from bmfa.models.reduced import Branches, SizedAttention
from bmfa.models.screens import Replacement, Screen, replacement_of
from bmfa.packages import load_package

IMPLEMENTATION = "bmfa"


_VIT = Branches(("layernorm_before", "attention", "dropout"), ("layernorm_after", "mlp", "dropout"))
_DINO = Branches(
    ("norm1", "attention", "layer_scale1", "drop_path"),
    ("norm2", "mlp", "layer_scale2", "drop_path"),
)
_CLIP = Branches(("layer_norm1", "self_attn"), ("layer_norm2", "mlp"))

# How the names of those models end whose outputs read spatial tokens.
_READERS = ("ForMaskedImageModeling", "Backbone")
_POOLERS = (*_READERS, "ForImageClassification")
_ALL = ("",)


@dataclass(frozen=True)
class Family:
    """The names of a model family: attention class, block layout, patch convolution, prefix."""

    attention: str
    branches: Branches | None
    projection: str = "patch_embeddings.projection"
    prefix: int = 1
    registers: bool = False
    readers: tuple[str, ...] = _READERS


# By the class of the embeddings, which tells the vision tower of CLIP from its text tower.
FAMILIES = {
    "vit.modeling_vit.ViTEmbeddings": Family("ViTAttention", _VIT),
    "deit.modeling_deit.DeiTEmbeddings": Family("DeiTAttention", _VIT, prefix=2),
    "dinov2.modeling_dinov2.Dinov2Embeddings": Family("Dinov2Attention", _DINO, readers=_POOLERS),
    "dinov2_with_registers.modeling_dinov2_with_registers.Dinov2WithRegistersEmbeddings": Family(
        "Dinov2WithRegistersAttention", _DINO, registers=True, readers=_POOLERS
    ),
    "dinov3_vit.modeling_dinov3_vit.DINOv3ViTEmbeddings": Family(
        "DINOv3ViTAttention", None, "patch_embeddings", registers=True
    ),
    "clip.modeling_clip.CLIPVisionEmbeddings": Family(
        "CLIPAttention", _CLIP, "patch_embedding", readers=_POOLERS
    ),
    "siglip.modeling_siglip.SiglipVisionEmbeddings": Family(
        "SiglipAttention", _CLIP, "patch_embedding", prefix=0, readers=_ALL
    ),
}


class TransformersReplacement(Replacement):
    """A replacement reached through a configuration of the module's own that names our function."""

    def install(self, module: nn.Module) -> None:
        """Give the module that configuration."""
        super().install(module)
        _register()
        self.kept["config"] = module.config
        config: Any = copy(module.config)
        config._attn_implementation = IMPLEMENTATION
        module.config = config

    def restore(self, module: nn.Module) -> None:
        """Undo `install`."""
        super().restore(module)
        module.config = self.kept["config"]

    def __setstate__(self, state: dict[str, Any]) -> None:
        # The name must be known in the process that unpickles the model.
        _register()
        self.__dict__.update(state)


class TransformersScreen(TransformersReplacement, Screen):
    """A screen in transformers."""


class TransformersSized(TransformersReplacement, SizedAttention):
    """Attention among merged tokens in transformers."""


def find(model: nn.Module) -> list[Host]:
    """The vision towers in a model."""
    hosts = []
    for tower in model.modules():
        for embeddings in tower.children():
            family = FAMILIES.get(class_name(embeddings).removeprefix("transformers.models."))
            if family is not None:
                hosts.append(_host(model, tower, embeddings, family))
    return hosts


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """An attention function of transformers: (B, heads, tokens, d) to (B, tokens, heads, d)."""
    replacement = replacement_of(module)
    if replacement is None:
        raise RuntimeError(
            f"{class_name(module)} is set to {IMPLEMENTATION!r} without a rule; use bmfa.patch(model)"
        )
    if kwargs.get("output_attentions") or replacement.kept["config"].output_attentions:
        raise ValueError(
            "output_attentions=True is not served by a patched or reduced model, which forms no matrix "
            "of weights; call bmfa.unpatch(model), or, where a rule screens it, record them with "
            "bmfa.record(model, attention=True)"
        )
    causal = bool(kwargs.get("is_causal", False))
    output = replacement(query, key, value, attention_mask, dropout, causal, scaling)
    return output.transpose(1, 2).contiguous(), None


def _register() -> None:
    """Make the name known for attention and for masks: a name without masks drops them silently."""
    functions = load_package("transformers.modeling_utils").AttentionInterface
    masks = load_package("transformers.masking_utils")
    functions.register(IMPLEMENTATION, attend)
    masks.AttentionMaskInterface.register(IMPLEMENTATION, masks.sdpa_mask)


def _host(model: nn.Module, tower: nn.Module, embeddings: Any, family: Family) -> Host:
    pairs = [
        (block, child)
        for block in tower.modules()
        for child in block.children()
        if type(child).__name__ == family.attention
    ]
    prefix = family.prefix
    if family.registers:
        prefix += int(embeddings.config.num_register_tokens)
    return Host(
        TransformersScreen,
        TransformersSized,
        tower,
        tuple(_caller(attention) for _, attention in pairs),
        embeddings.get_submodule(family.projection),
        prefix,
        tuple(block for block, _ in pairs),
        family.branches,
        type(model).__module__ != type(embeddings).__module__
        or any(type(module).__name__.endswith(family.readers) for module in model.modules()),
    )


def _caller(attention: nn.Module) -> nn.Module:
    """The module that calls the attention function: the one whose configuration names it.

    That is the attention itself, or a part of it where a version of transformers nests them.
    """
    if hasattr(attention, "config"):
        return attention
    owners = [part for part in attention.modules() if hasattr(part, "config")]
    if len(owners) != 1:
        raise TypeError(
            f"{class_name(attention)} is not served: {len(owners)} of its parts own a configuration, "
            "where the one that calls the attention function is needed; "
            f"served are {SUPPORTED}, as transformers defines them from 5.9 on"
        )
    return owners[0]
