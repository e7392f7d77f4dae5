"""The families of Vision Transformers that `patch` and `reduce` know, in one table.

`bmfa.models.register_model` adds a class of another package at run time. To support another family of
timm or transformers, add a row to `FAMILIES`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NoReturn

from torch import nn

from bmfa.models.image_readers import read_pixtral, read_sequence, read_siglip2
from bmfa.models.packing import Packing
from bmfa.models.passes import Passes, numbers
from bmfa.models.replacement import AttentionReplacement, InterceptedAttention, class_name
from bmfa.models.screened_layer import AttentionFunction
from bmfa.models.transformers_attention import (
    BlipAttention,
    InterfaceAttention,
    MapAttention,
    SequenceAttention,
)


@dataclass(frozen=True)
class BlockLayout:
    """Names of the modules in the two residual branches of a block, in the order of their calls.

    After the attention and the MLP, a name may also be that of a parameter, which scales the branch, or
    of an attribute that is None.
    """

    attention: tuple[str, ...]
    mlp: tuple[str, ...]
    # Argument of the block with the rotary tables, whose second last axis is that of the spatial tokens.
    rotary: str = ""


@dataclass(frozen=True, eq=False)
class VisionTransformer:
    """The parts of a Vision Transformer, in the order in which they run."""

    replacement: Callable[[AttentionFunction], AttentionReplacement]
    encoder: nn.Module  # the vision encoder, the model itself or a part of it
    blocks: tuple[nn.Module, ...]
    attentions: tuple[nn.Module, ...]
    projection: nn.Module  # makes patches into tokens, mostly a convolution
    prefix: int = 0  # class, distillation and register tokens
    suffix: int = 0  # detection tokens and others behind the grid
    layout: BlockLayout | None = None  # None if its tokens cannot be reduced
    reads_spatial_tokens: bool = True  # True if something after the last block may read them
    # Returns the images of a pass, from the encoder and the arguments of its forward; None if the
    # projection returns the shape of the grid.
    reader: Callable[..., Packing] | None = None
    # Makes what follows the forward passes through the model.
    passes: Callable[..., Passes] = Passes
    # Blocks whose attention is not among `attentions`, and why it stays as it is.
    dense_blocks: dict[int, str] = field(default_factory=dict)
    not_tunable: str = ""  # why `tune` cannot run the model: what it takes instead of pixels

    @property
    def one_grid(self) -> bool:
        """True if all layers attend over one grid, whose tokens are in raster order."""
        one = self.reader is None and not self.dense_blocks and self.passes is Passes
        return one and hasattr(self.projection, "stride")

    def follow(self) -> Passes:
        """Install hooks that follow the forward passes of the model."""
        name = f"{type(self.encoder).__name__}, patched model {next(numbers)}"
        passes = self.passes(self.prefix, self.suffix, name)
        passes.watch(self)
        return passes


_WINDOWS = "attention inside windows"
_VIDEOS = "it takes videos instead of (N, 3, height, width) pixels"
_PATCHES = "it takes patches of images and {} instead of (N, 3, height, width) pixels"
# Modules that return the shape of the grid, or the positions of the tokens.
_TELLING = ("NaFlexEmbeds", "Gemma4PatchEmbed")
# Endings of the class names of models that read spatial tokens after the last block.
_DENSE = ("ForMaskedImageModeling", "Backbone")
_POOLED = (*_DENSE, "ForImageClassification")
_DETECTOR = ("ForObjectDetection",)
_ALL = ("",)


def _keep_windows(encoder: Any, index: int, block: Any) -> str:
    if block.window_size > 0:
        return _WINDOWS
    return "pooled queries" if getattr(block, "query_stride", None) else ""


def _keep_listed_windows(encoder: Any, index: int, block: Any) -> str:
    full = getattr(encoder, "fullatt_block_indexes", None)
    return _WINDOWS if full is not None and index not in full else ""


@dataclass(frozen=True)
class Family:
    """Where the parts of a family of models are, and what is done with them."""

    # Names of the classes of its attention modules, * for any characters.
    attention: str | tuple[str, ...]
    projection: str  # of the module whose class is the key of the table
    prefix: int | None = 1  # tokens before the grid, without registers; None if the model says
    layouts: BlockLayout | dict[str, BlockLayout] | None = None  # by the class of the block
    spatial_readers: tuple[str, ...] = _DENSE
    replacement: type[AttentionReplacement] = InterfaceAttention
    registers: bool = False
    suffix: str = ""  # name in the configuration of the number of tokens behind the grid
    read: Callable[..., Packing] | None = None  # see `VisionTransformer.reader`
    # Why a block stays as it is, "" if it does not.
    keep: Callable[[Any, int, Any], str] | None = None
    not_tunable: str = ""

    def special_tokens(self, config: Any) -> tuple[int, int]:
        """Return the number of tokens before and behind the grid, from a configuration."""
        registers = int(config.num_register_tokens) if self.registers else 0
        suffix = int(getattr(config, self.suffix)) if self.suffix else 0
        return (self.prefix or 0) + registers, suffix


_TIMM_LAYOUTS = {
    "timm.models.vision_transformer.Block": BlockLayout(
        ("norm1", "attn", "ls1", "drop_path1"), ("norm2", "mlp", "ls2", "drop_path2")
    ),
    "timm.models.eva.EvaBlock": BlockLayout(
        ("norm1", "attn", "gamma_1", "drop_path1"),
        ("norm2", "mlp", "gamma_2", "drop_path2"),
        rotary="rope",
    ),
    "timm.models.deepseek_vit.DeepseekVitBlock": BlockLayout(
        ("norm1", "attn", "drop_path1"), ("norm2", "mlp", "drop_path2"), rotary="rope"
    ),
    "bmfa.models.embedded.model.Block": BlockLayout(("norm1", "attn"), ("norm2", "mlp")),
}
_TIMM_ATTENTION = ("Attention", "AttentionRope", "EvaAttention", "Gemma4Attention")
_intercepted = partial(Family, _TIMM_ATTENTION, prefix=None, replacement=InterceptedAttention)
_TIMM = _intercepted("patch_embed.proj", layouts=_TIMM_LAYOUTS)
_VIT = BlockLayout(
    ("layernorm_before", "attention", "dropout"), ("layernorm_after", "mlp", "dropout")
)
_DINO = BlockLayout(
    ("norm1", "attention", "layer_scale1", "drop_path"),
    ("norm2", "mlp", "layer_scale2", "drop_path"),
)
_DINO3 = replace(_DINO, rotary="position_embeddings")
_CLIP = BlockLayout(("layer_norm1", "self_attn"), ("layer_norm2", "mlp"))
_INTERN = BlockLayout(
    ("layernorm_before", "attention", "lambda_1"),
    ("layernorm_after", "mlp", "dropout", "lambda_2"),
)
_AIM = BlockLayout(("rms_norm1", "attention"), ("rms_norm2", "ffn"))
_CONV, _EMBED = "patch_embeddings.projection", "patch_embedding"
_sequence = partial(
    Family,
    attention="*VisionAttention",
    projection="patch_embed.proj",
    prefix=0,
    replacement=SequenceAttention,
    read=read_sequence,
    keep=_keep_listed_windows,
    not_tunable=_PATCHES.format("grid_thw"),
)
_SIGLIP2 = Family(
    "Siglip2Attention",
    "embeddings.patch_embedding",
    0,
    read=read_siglip2,
    not_tunable=_PATCHES.format("spatial_shapes"),
)
_maps = partial(Family, prefix=0, replacement=MapAttention, keep=_keep_windows)
# timm and the embedded model, by the class of the model; subclasses count.
_TIMM_FAMILIES = {
    "timm.models.vision_transformer.VisionTransformer": _TIMM,
    "timm.models.eva.Eva": _TIMM,
    "bmfa.models.embedded.model.EmbeddedViT": _TIMM,
    "timm.models.qwen3_vit.Qwen3VitEncoder": _TIMM,
    "timm.models.deepseek_vit.DeepseekVitEncoder": _TIMM,
    "timm.models.gemma4_vit.Gemma4VitEncoder": _intercepted("patch_embed"),
    "timm.models.naflexvit.NaFlexVit": _intercepted("embeds"),
}
# transformers, by the name of the family and the class of the embeddings, which distinguishes the vision
# encoder of CLIP from its text encoder and is the same in all classes of models; or of the model.
# Attention, projection, prefix, layout of blocks, what reads spatial tokens.
_TRANSFORMERS_FAMILIES = {
    "vit.ViTEmbeddings": Family("ViTAttention", _CONV, 1, _VIT),
    "deit.DeiTEmbeddings": Family("DeiTAttention", _CONV, 2, _VIT),
    "dinov2.Dinov2Embeddings": Family("Dinov2Attention", _CONV, 1, _DINO, _POOLED),
    "dinov2_with_registers.Dinov2WithRegistersEmbeddings": Family(
        "Dinov2WithRegistersAttention", _CONV, 1, _DINO, _POOLED, registers=True
    ),
    "dinov3_vit.DINOv3ViTEmbeddings": Family(
        "DINOv3ViTAttention", "patch_embeddings", 1, _DINO3, registers=True
    ),
    "clip.CLIPVisionEmbeddings": Family("CLIPAttention", _EMBED, 1, _CLIP, _POOLED),
    "siglip.SiglipVisionEmbeddings": Family("SiglipAttention", _EMBED, 0, _CLIP, _ALL),
    "vit_msn.ViTMSNEmbeddings": Family("ViTMSNAttention", _CONV, 1, _VIT),
    "ijepa.IJepaEmbeddings": Family("IJepaAttention", _CONV, 0, _VIT, _ALL),
    "dpt.DPTViTEmbeddings": Family("DPTViTAttention", _CONV),
    "dpt.DPTViTHybridEmbeddings": Family("DPTViTAttention", "projection"),
    "yolos.YolosEmbeddings": Family("YolosAttention", _CONV, suffix="num_detection_tokens"),
    "vitpose_backbone.VitPoseBackboneEmbeddings": Family("VitPoseBackboneAttention", _CONV, 0),
    "aimv2.Aimv2VisionEmbeddings": Family("Aimv2Attention", "patch_embed", 0, _AIM, _ALL),
    "owlvit.OwlViTVisionEmbeddings": Family("OwlViTAttention", _EMBED, 1, _CLIP, _DETECTOR),
    "internvl.InternVLVisionEmbeddings": Family("InternVLVisionAttention", _CONV, 1, _INTERN, _ALL),
    "blip.BlipVisionEmbeddings": Family("BlipAttention", _EMBED, 1, _CLIP, _ALL, BlipAttention),
    "pixtral.PixtralVisionModel": Family("PixtralAttention", "patch_conv", 0, read=read_pixtral),
    "siglip2.Siglip2VisionModel": _SIGLIP2,
    "sam2.Sam2HieraDetModel": _maps("Sam2MultiScaleAttention", "patch_embed.projection"),
    "sam3.Sam3ViTModel": _maps("Sam3ViTRoPEAttention", "embeddings.patch_embeddings.projection"),
    "vjepa2.VJEPA2Embeddings": Family(
        "VJEPA2RopeAttention", "patch_embeddings.proj", 0, not_tunable=_VIDEOS
    ),
    "kimi_k25.Kimi_K25VisionModel": _sequence(read=partial(read_sequence, whole_clips=True)),
    **dict.fromkeys(
        (
            "qwen2_vl.Qwen2VisionTransformerPretrainedModel",
            "qwen2_5_vl.Qwen2_5_VisionTransformerPretrainedModel",
            "qwen2_5_omni.Qwen2_5OmniVisionEncoder",
            "qwen3_vl.Qwen3VLVisionModel",
            "qwen3_vl_moe.Qwen3VLMoeVisionModel",
            "qwen3_omni_moe.Qwen3OmniMoeVisionEncoder",
            "qwen3_5.Qwen3_5VisionModel",
            "qwen3_5_moe.Qwen3_5MoeVisionModel",
            "qwen4_exp.Qwen4ExpVisionModel",
            "glm4v.Glm4vVisionModel",
            "glm4v_moe.Glm4vMoeVisionModel",
            "glm_ocr.GlmOcrVisionModel",
            "glm5_next.Glm5NextVisionModel",
            "ernie4_5_vl_moe.Ernie4_5_VLMoeVisionTransformerPretrainedModel",
            "exaone4_5.Exaone4_5_VisionModel",
        ),
        _sequence(),
    ),
    **dict.fromkeys(
        (
            "hunyuan_vl.HunYuanVLVisionTransformer",
            "paddleocr_vl.PaddleOCRVisionTransformer",
            "video_llama_3.VideoLlama3VisionModel",
        ),
        _sequence(projection="embeddings.patch_embedding"),
    ),
}
FAMILIES = _TIMM_FAMILIES | {
    "transformers.models.{0}.modeling_{0}.{1}".format(*key.split(".")): family
    for key, family in _TRANSFORMERS_FAMILIES.items()
}


def find_vision_transformer(model: nn.Module) -> VisionTransformer:
    """Find the one Vision Transformer in a model.

    Args:
        model: A vision encoder, or a model that contains one.

    Returns:
        The encoder with its blocks, attention layers, patch projection and number of prefix tokens.

    Raises:
        TypeError: If `model` is not a module, or contains no encoder of a supported class.
        ValueError: If it contains several encoders.

    Example:
        >>> import bmfa
        >>> vit = find_vision_transformer(bmfa.load_model("embedded").model)
        >>> len(vit.attentions), vit.prefix
        (8, 1)
    """
    from bmfa.models.described import find_registered

    check_module(model)
    # What a user registers comes before what is built in.
    found = find_registered(model) or [
        _describe(model, encoder, anchor, FAMILIES[name])
        for encoder, anchor, name in _find_encoders(model)
    ]
    if len(found) > 1:
        raise ValueError(
            f"{type(model).__name__} contains {len(found)} vision encoders; pass one of them"
        )
    return found[0] if found else raise_unsupported(model)


def _find_encoders(model: nn.Module) -> list[tuple[nn.Module, nn.Module, str]]:
    """List the vision encoders, each with the module that the table has by the name of its class."""
    found = []
    for module in model.modules():
        classes = (f"{kind.__module__}.{kind.__qualname__}" for kind in type(module).__mro__)
        name = next((name for name in classes if name in FAMILIES), "Embeddings")
        if not name.endswith("Embeddings"):
            found.append((module, module, name))
        for child in module.children():
            name = class_name(child)
            if name in FAMILIES and name.endswith("Embeddings"):
                found.append((module, child, name))
    return found


def _describe(model: nn.Module, encoder: Any, anchor: Any, family: Family) -> VisionTransformer:
    names = (family.attention,) if isinstance(family.attention, str) else family.attention
    children = ((block, child) for block in encoder.modules() for child in block.children())
    pairs = [
        (block, child)
        for block, child in children
        if any(fnmatchcase(type(child).__name__, name) for name in names)
    ]
    blocks = tuple(block for block, _ in pairs)
    if family.prefix is None:  # timm
        for block in encoder.blocks:
            if block not in blocks:
                raise_unsupported(encoder, getattr(block, "attn", block))
        prefix, suffix = int(encoder.num_prefix_tokens), 0
        spatial = model is not encoder or getattr(encoder, "global_pool", "token") != "token"
    else:
        prefix, suffix = family.special_tokens(getattr(anchor, "config", None))
        named = any(type(m).__name__.endswith(family.spatial_readers) for m in model.modules())
        spatial = named or type(model).__module__ != type(anchor).__module__
    keep = family.keep or (lambda *_: "")
    kept = {index: keep(encoder, index, block) for index, block in enumerate(blocks)}
    attentions = [child for index, (_, child) in enumerate(pairs) if not kept[index]]
    if issubclass(family.replacement, InterfaceAttention):
        attentions = [_config_owner(attention) for attention in attentions]
    layout = family.layouts
    if isinstance(layout, dict):
        kinds = {class_name(block) for block in blocks}
        layout = layout.get(kinds.pop()) if len(kinds) == 1 else None
    return VisionTransformer(
        replacement=family.replacement,
        encoder=encoder,
        blocks=blocks,
        attentions=tuple(attentions),
        projection=_projection(encoder, anchor, family),
        prefix=prefix,
        suffix=suffix,
        layout=layout,
        reads_spatial_tokens=spatial,
        reader=family.read,
        dense_blocks={index: reason for index, reason in kept.items() if reason},
        not_tunable=family.not_tunable,
    )


def _projection(encoder: Any, anchor: nn.Module, family: Family) -> nn.Module:
    """Return the module that makes patches into tokens, whose output tells the shape of the grid."""
    owner, _, name = family.projection.rpartition(".")
    embed = anchor.get_submodule(owner)
    projection: Any = getattr(embed, name, None)
    tells = isinstance(projection, (nn.Conv2d, nn.Conv3d)) or type(projection).__name__ in _TELLING
    if family.read is None and not tells:
        raise TypeError(
            f"{class_name(embed)} in {type(encoder).__name__} is not supported: its patches do not come "
            "from a convolution, so the grid is unknown; build the model with a PatchEmbed"
        )
    found: nn.Module = projection
    return found


def _config_owner(attention: nn.Module) -> nn.Module:
    """Return the module whose configuration names the attention function.

    That is the attention itself, or a part of it in versions of transformers that nest them.
    """
    for part in attention.modules():
        if hasattr(part, "config"):
            return part
    raise TypeError(
        f"{class_name(attention)} is not supported: none of its parts has a configuration, which names "
        "the attention function; install transformers 5.9 or newer"
    )


def check_module(model: nn.Module) -> nn.Module:
    """Raise a TypeError unless the model is a module, and return it."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model is {type(model).__name__}; pass the torch.nn.Module (load_model(...).model)"
        )
    return model


_SHUFFLED = "its patches are in a random order; load its weights as transformers.ViTModel"
_UNITS = (
    "its tokens are in an order of its own, and at the sizes it was trained for its global attention "
    "has at most 196 of them, so that it always runs dense"
)
_BIAS = "it adds a relative position bias to the scores"
_SWIN = "it attends inside windows, not over one grid"
_DIFFERENCE = "its output is the difference of two softmax maps"
_UNKNOWN = "its class is not known, so its keys may not be a prefix followed by one grid"
# By a part of the name of the attention class, or of the block.
_REASONS = {
    "swin": _SWIN,
    "beit": _BIAS,
    "relpos": _BIAS,
    "vision_transformer_sam": _BIAS,
    "samvision": _BIAS,
    "vitdet": _BIAS,
    "diff": _DIFFERENCE,
    "vitmae": _SHUFFLED,
    "maskunit": _UNITS,
    "parallel": "its attention is not a module of its own",
}


def raise_unsupported(model: nn.Module, attention: nn.Module | None = None) -> NoReturn:
    """Raise a TypeError that names the attention class of the model and why it is not supported."""
    if attention is None:
        named = (m for m in model.modules() if "attention" in type(m).__name__.lower())
        attention = next(named, model)
    name = class_name(attention)
    reasons = (reason for part, reason in _REASONS.items() if part in name.lower())
    raise TypeError(
        f"{name} in {type(model).__name__} is not supported: {next(reasons, _UNKNOWN)}.\n"
        "docs/models.md lists the models that are; for others, name the attention modules with "
        "bmfa.patch(model, attention=...) or bmfa.models.register_model."
    )


def raise_not_reducible(model: nn.Module, vit: VisionTransformer) -> NoReturn:
    """Raise a TypeError that names the block class of the model and why it cannot be reduced."""
    reason = "its block is not an attention branch followed by an MLP branch"
    if vit.suffix:
        reason = "it has tokens behind the grid, which the policies would merge"
    elif not vit.one_grid:
        reason = "its blocks do not all attend over one grid, the same for all images"
    raise TypeError(
        f"the tokens of {class_name(vit.blocks[0])} in {type(model).__name__} cannot be reduced: "
        f"{reason}.\ndocs/models.md lists the models whose tokens can be reduced."
    )
