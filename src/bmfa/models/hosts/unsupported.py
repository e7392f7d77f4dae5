"""Which classes are supported, and why the others are not."""

from typing import NoReturn

from torch import nn

from bmfa.models.hosts.base import VisionTransformer, class_name

SUPPORTED = (
    "timm VisionTransformer, DeiT (also distilled), EVA, DINOv3, NaFlexViT, Hiera and SAM; "
    "transformers ViT, DeiT, DINOv2 (also with registers), DINOv3 ViT, CLIP, SigLIP and SigLIP2 vision, "
    "ViT-MAE, ViT-MSN, I-JEPA, DPT, YOLOS, ViTPose, AIMv2, OWL-ViT, BLIP, InternVL, Pixtral, Qwen2-VL, "
    "Qwen2.5-VL and Qwen3-VL vision, SAM, SAM 2, ViTDet; the embedded model"
)
REDUCIBLE = (
    "timm VisionTransformer, DeiT (also distilled), EVA and DINOv3; "
    "transformers ViT, DeiT, DINOv2 (also with registers), DINOv3 ViT, CLIP vision, SigLIP vision, "
    "ViT-MSN, I-JEPA, AIMv2, OWL-ViT, BLIP and InternVL vision; the embedded model"
)
_SUFFIX = "it has tokens behind the grid, which the policies would merge"
_LAYOUT = "its block is not an attention branch followed by an MLP branch"
_BIAS = (
    "it adds a relative position bias to the scores, with a number of its own for each head and pair of "
    "distances, which is not a product of query and key"
)
_WINDOWS = "it attends inside windows, not over one grid, and adds a relative position bias"
_DIFFERENCE = "its output is the difference of two softmax maps"
_NO_MODULE = "its attention is not a module of its own"
_UNKNOWN = (
    "its class is not known, so its keys may not be a prefix followed by one grid; name its attention "
    "modules with bmfa.patch(model, attention=...) or bmfa.models.register_model"
)
_REASONS = {
    "timm.models.beit.Attention": _BIAS,
    "timm.layers.attention_diff.DiffAttention": _DIFFERENCE,
    "timm.layers.diff_attention.DiffAttention": _DIFFERENCE,
    "timm.models.vision_transformer.ParallelScalingBlock": _NO_MODULE,
    "timm.models.vision_transformer.DiffParallelScalingBlock": _DIFFERENCE,
    "timm.models.vision_transformer.ParallelThingsBlock": _NO_MODULE,
    "timm.models.vision_transformer_relpos.RelPosAttention": _BIAS,
    "timm.models.swin_transformer.WindowAttention": _WINDOWS,
    "timm.models.swin_transformer_v2.WindowAttention": _WINDOWS,
}


def raise_unsupported(model: nn.Module, attention: nn.Module | None = None) -> NoReturn:
    """Raise a TypeError that names the attention class of the model and why it is not supported."""
    if attention is None:
        attention = next((m for m in model.modules() if _is_attention(m)), model)
    name = class_name(attention)
    guess = _WINDOWS if "swin" in name.lower() else _BIAS if "beit" in name.lower() else _UNKNOWN
    reason = _REASONS.get(name, guess)
    raise TypeError(
        f"{name} in {type(model).__name__} is not supported: {reason}; supported are {SUPPORTED}"
    )


def raise_not_reducible(model: nn.Module, host: VisionTransformer) -> NoReturn:
    """Raise a TypeError that names the block class of the model and why it cannot be reduced."""
    name = class_name(host.blocks[0])
    reason = host.not_reducible or (_SUFFIX if host.suffix else _LAYOUT)
    raise TypeError(
        f"the tokens of {name} in {type(model).__name__} cannot be reduced: {reason}; supported are "
        f"{REDUCIBLE}"
    )


def _is_attention(module: nn.Module) -> bool:
    return class_name(module) in _REASONS or "Attention" in type(module).__name__
