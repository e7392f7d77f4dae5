"""The Vision Transformers of transformers, through its own attention interface."""

from copy import copy
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from bmfa.models.hosts import Host, class_name
from bmfa.models.screens import Screen, screen_of
from bmfa.packages import load_package

IMPLEMENTATION = "bmfa"


@dataclass(frozen=True)
class Family:
    """The names of a model family: attention class, patch convolution, prefix tokens."""

    attention: str
    projection: str = "patch_embeddings.projection"
    prefix: int = 1
    registers: bool = False


# By the class of the embeddings, which tells the vision tower of CLIP from its text tower.
FAMILIES = {
    "vit.modeling_vit.ViTEmbeddings": Family("ViTAttention"),
    "deit.modeling_deit.DeiTEmbeddings": Family("DeiTAttention", prefix=2),
    "dinov2.modeling_dinov2.Dinov2Embeddings": Family("Dinov2Attention"),
    "dinov2_with_registers.modeling_dinov2_with_registers.Dinov2WithRegistersEmbeddings": Family(
        "Dinov2WithRegistersAttention", registers=True
    ),
    "dinov3_vit.modeling_dinov3_vit.DINOv3ViTEmbeddings": Family(
        "DINOv3ViTAttention", "patch_embeddings", registers=True
    ),
    "clip.modeling_clip.CLIPVisionEmbeddings": Family("CLIPAttention", "patch_embedding"),
    "siglip.modeling_siglip.SiglipVisionEmbeddings": Family(
        "SiglipAttention", "patch_embedding", prefix=0
    ),
}


class TransformersScreen(Screen):
    """A screen reached through a configuration of the module's own that names our function."""

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


def find(model: nn.Module) -> list[Host]:
    """The vision towers in a model."""
    hosts = []
    for tower in model.modules():
        for embeddings in tower.children():
            family = FAMILIES.get(class_name(embeddings).removeprefix("transformers.models."))
            if family is not None:
                hosts.append(_host(tower, embeddings, family))
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
    screen = screen_of(module)
    if screen is None:
        raise RuntimeError(
            f"{class_name(module)} is set to {IMPLEMENTATION!r} without a rule; use bmfa.patch(model)"
        )
    causal = bool(kwargs.get("is_causal", False))
    output = screen(query, key, value, attention_mask, dropout, causal, scaling)
    return output.transpose(1, 2).contiguous(), None


def _register() -> None:
    """Make the name known for attention and for masks: a name without masks drops them silently."""
    functions = load_package("transformers.modeling_utils").AttentionInterface
    masks = load_package("transformers.masking_utils")
    functions.register(IMPLEMENTATION, attend)
    masks.AttentionMaskInterface.register(IMPLEMENTATION, masks.sdpa_mask)


def _host(tower: nn.Module, embeddings: Any, family: Family) -> Host:
    attentions = tuple(m for m in tower.modules() if type(m).__name__ == family.attention)
    prefix = family.prefix
    if family.registers:
        prefix += int(embeddings.config.num_register_tokens)
    return Host(TransformersScreen, attentions, embeddings.get_submodule(family.projection), prefix)
