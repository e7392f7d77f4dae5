"""Which model is served, and how: its attention layers, patch projection and prefix."""

from dataclasses import dataclass
from typing import NoReturn

from torch import nn

from bmfa.models.reduced import Branches, SizedAttention
from bmfa.models.screens import Screen

SUPPORTED = (
    "timm VisionTransformer, DeiT (also distilled), EVA and DINOv3; "
    "transformers ViT, DeiT, DINOv2 (also with registers), DINOv3 ViT, CLIP vision, SigLIP vision; "
    "the embedded model"
)
REDUCED = (
    "timm VisionTransformer and DeiT (also distilled); "
    "transformers ViT, DeiT, DINOv2 (also with registers), CLIP vision, SigLIP vision; "
    "the embedded model"
)
_ROPE = "it turns queries and keys by their place on the grid, and a merged token has none"
_LAYOUT = "its block is no attention branch followed by a perceptron branch"
_BIAS = "it adds a relative position bias to the scores, so block means are not linear in the keys"
_WINDOWS = "it attends inside windows, not over one grid, and adds a relative position bias"
_TWO = "its output is the difference of two softmax maps"
_JOINT = "its attention is no module of its own"
_UNKNOWN = "its class is not known, so nothing says that its keys are a prefix and one grid"
REASONS = {
    "timm.models.beit.Attention": _BIAS,
    "timm.layers.attention_diff.DiffAttention": _TWO,
    "timm.layers.diff_attention.DiffAttention": _TWO,
    "timm.models.vision_transformer.ParallelScalingBlock": _JOINT,
    "timm.models.vision_transformer.DiffParallelScalingBlock": _TWO,
    "timm.models.vision_transformer.ParallelThingsBlock": _JOINT,
    "timm.models.vision_transformer_relpos.RelPosAttention": _BIAS,
    "timm.models.vision_transformer_sam.Attention": _WINDOWS,
    "timm.models.swin_transformer.WindowAttention": _WINDOWS,
    "timm.models.swin_transformer_v2.WindowAttention": _WINDOWS,
}


@dataclass(frozen=True, eq=False)
class Host:
    """A vision tower: its blocks and their attention in order, patch projection and prefix tokens."""

    screen: type[Screen]
    sized: type[SizedAttention]
    tower: nn.Module
    attentions: tuple[nn.Module, ...]
    projection: nn.Module
    prefix: int
    blocks: tuple[nn.Module, ...]
    branches: Branches | None  # None where tokens cannot be reduced
    pools: bool  # whether anything behind the blocks may read spatial tokens


def class_name(module: nn.Module) -> str:
    """Module path and name of a class."""
    return f"{type(module).__module__}.{type(module).__qualname__}"


def class_names(module: nn.Module) -> set[str]:
    """The names of a module's class and of those it derives from."""
    return {f"{kind.__module__}.{kind.__qualname__}" for kind in type(module).__mro__}


def find_host(model: nn.Module) -> Host:
    """The one vision tower of a model; raises with the reason where there is none to serve."""
    from bmfa.models.hosts import timm as timm_host
    from bmfa.models.hosts import transformers as transformers_host

    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model is {type(model).__name__}; pass the torch.nn.Module (load_model(...).model)"
        )
    hosts = [*timm_host.find(model), *transformers_host.find(model)]
    if len(hosts) > 1:
        raise ValueError(
            f"{type(model).__name__} holds {len(hosts)} vision towers; pass one of them"
        )
    return hosts[0] if hosts else refuse(model)


def refuse(model: nn.Module, attention: nn.Module | None = None) -> NoReturn:
    """Raise with the attention class of the model that is not served, and why."""
    if attention is None:
        attention = next((m for m in model.modules() if _attends(m)), model)
    name = class_name(attention)
    lowered = name.lower()
    reason = REASONS.get(name)
    if reason is None:
        reason = _WINDOWS if "swin" in lowered else _BIAS if "beit" in lowered else _UNKNOWN
    raise TypeError(
        f"{name} in {type(model).__name__} is not served: {reason}; served are {SUPPORTED}"
    )


def refuse_reduction(model: nn.Module, host: Host) -> NoReturn:
    """Raise with the block class of the model that is not reduced, and why."""
    name = class_name(host.blocks[0])
    rope = any(word in name.lower() for word in ("eva", "dinov3", "rope"))
    raise TypeError(
        f"{name} in {type(model).__name__} is not reduced: {_ROPE if rope else _LAYOUT}; "
        f"reduced are {REDUCED}"
    )


def _attends(module: nn.Module) -> bool:
    return class_name(module) in REASONS or "Attention" in type(module).__name__
