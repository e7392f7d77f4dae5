"""The families of Vision Transformers that `patch` and `reduce` know, in one table.

`bmfa.models.register_model` adds a class of another package at run time. To support another family of
timm or transformers, add a row to `FAMILIES`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NoReturn

from torch import nn

from bmfa.models.hiera import hiera_attention
from bmfa.models.image_readers import (
    ImageReader,
    NaFlexAttention,
    NaFlexReader,
    ViTMAEReader,
    check_unmasked,
    has_integer_sizes,
    never,
    read_pixtral,
    read_qwen,
    read_siglip2,
)
from bmfa.models.passes import Passes
from bmfa.models.relative import DecomposedAttention
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
    tower: nn.Module  # the vision encoder, the model itself or a part of it
    blocks: tuple[nn.Module, ...]
    attentions: tuple[nn.Module, ...]
    projection: nn.Module  # convolution that makes patches into tokens
    prefix: int = 0  # class, distillation and register tokens
    suffix: int = 0  # detection tokens and others behind the grid
    layout: BlockLayout | None = None  # None if its tokens cannot be reduced
    reads_spatial_tokens: bool = True  # True if something after the last block may read them
    # Makes what reads the images of each pass; None if the projection returns the shape of the grid.
    reader: Callable[[Passes], Any] | None = None
    # Makes what follows the forward passes through the model.
    passes: Callable[..., Passes] = Passes
    # Blocks whose attention is not among `attentions`, and why it stays as it is.
    dense_blocks: dict[int, str] = field(default_factory=dict)
    not_reducible: str = ""  # why tokens cannot be reduced
    not_tunable: str = ""  # why `tune` cannot run the model: what it takes instead of pixels

    @property
    def one_grid(self) -> bool:
        """True if all layers attend over one grid, whose tokens are in raster order."""
        return self.reader is None and not self.dense_blocks and self.passes is Passes

    def follow(self) -> Passes:
        """Install hooks that follow the forward passes of the model."""
        passes = self.passes(self.prefix, self.suffix)
        passes.watch(self)
        return passes


_WINDOWS = "attention inside windows"
_PATCHES = "it takes patches of images and {} instead of (N, 3, height, width) pixels"
_PACKED = "its images share one sequence and may have different sizes"
_MAPS = "its blocks work on maps, not on sequences of tokens"
_STAGES = "its blocks pool the tokens of a whole grid"
# Endings of the class names of models that read spatial tokens after the last block.
_DENSE = ("ForMaskedImageModeling", "Backbone")
_DENSE_OR_POOLED = (*_DENSE, "ForImageClassification")
_ALL = ("",)


def _keep_none(tower: Any, index: int, block: Any) -> str:
    return ""


def _keep_windows(tower: Any, index: int, block: Any) -> str:
    return _WINDOWS if block.window_size > 0 else ""


def _keep_windows_and_rotary(tower: Any, index: int, block: Any) -> str:
    rotary = getattr(block.attn, "rope", None) is not None
    return _keep_windows(tower, index, block) or ("rotary positions" if rotary else "")


def _keep_windows_and_pooling(tower: Any, index: int, block: Any) -> str:
    return _keep_windows(tower, index, block) or ("pooled queries" if block.query_stride else "")


def _keep_listed_windows(tower: Any, index: int, block: Any) -> str:
    full = getattr(tower, "fullatt_block_indexes", None)
    return _WINDOWS if full is not None and index not in full else ""


def _keep_mask_units(tower: Any, index: int, block: Any) -> str:
    if len(tower.tokens_spatial_shape) != 2:
        raise TypeError(
            f"{class_name(tower)} with tokens in {len(tower.tokens_spatial_shape)} dimensions is not "
            "supported; pass a model of images"
        )
    return "attention inside mask units" if block.attn.use_mask_unit_attn else ""


def _keep_none_unmasked(tower: Any, index: int, block: Any) -> str:
    check_unmasked(tower.config)
    return ""


@dataclass(frozen=True)
class Family:
    """Where the parts of a family of models are, and what is done with them."""

    attention: tuple[str, ...]  # names of the classes of its attention modules
    projection: str  # of the module whose class is the key of the table
    prefix: int | None = 1  # tokens before the grid, without registers; None if the model says
    registers: bool = False
    suffix: str = ""  # name in the configuration of the number of tokens behind the grid
    layouts: BlockLayout | dict[str, BlockLayout] | None = None  # by the class of the block
    spatial_readers: tuple[str, ...] = _DENSE
    replacement: Callable[..., AttentionReplacement] = InterfaceAttention
    images: Callable[[Passes], Any] | None = None  # see `VisionTransformer.reader`
    keep: Callable[[Any, int, Any], str] = (
        _keep_none  # why a block stays as it is, "" if it does not
    )
    not_reducible: str = ""
    not_tunable: str = ""

    def special_tokens(self, config: Any) -> tuple[int, int]:
        """Return the number of tokens before and behind the grid, from a configuration."""
        registers = int(config.num_register_tokens) if self.registers else 0
        return (self.prefix or 0) + registers, int(
            getattr(config, self.suffix)
        ) if self.suffix else 0


_TIMM_ATTENTION = ("Attention", "AttentionRope", "EvaAttention")
_TIMM_LAYOUTS = {
    "timm.models.vision_transformer.Block": BlockLayout(
        ("norm1", "attn", "ls1", "drop_path1"), ("norm2", "mlp", "ls2", "drop_path2")
    ),
    "timm.models.eva.EvaBlock": BlockLayout(
        ("norm1", "attn", "gamma_1", "drop_path1"),
        ("norm2", "mlp", "gamma_2", "drop_path2"),
        rotary="rope",
    ),
    "bmfa.models.embedded.model.Block": BlockLayout(("norm1", "attn"), ("norm2", "mlp")),
}
_TIMM = Family(
    _TIMM_ATTENTION,
    "patch_embed.proj",
    None,
    layouts=_TIMM_LAYOUTS,
    replacement=InterceptedAttention,
)
# timm and the embedded model, by the class of the model; subclasses count.
_TIMM_FAMILIES = {
    "timm.models.vision_transformer.VisionTransformer": _TIMM,
    "timm.models.eva.Eva": _TIMM,
    "bmfa.models.embedded.model.EmbeddedViT": _TIMM,
    "timm.models.naflexvit.NaFlexVit": Family(
        _TIMM_ATTENTION, "embeds.proj", None, replacement=NaFlexAttention, images=NaFlexReader,
        not_reducible="its images may have different grids, and padding",
    ),
    "timm.models.hiera.Hiera": Family(
        ("MaskUnitAttention",), "patch_embed.proj", 0, replacement=hiera_attention,
        keep=_keep_mask_units, not_reducible=_STAGES,
    ),
    "timm.models.vision_transformer_sam.VisionTransformerSAM": Family(
        ("Attention",), "patch_embed.proj", 0, replacement=DecomposedAttention,
        keep=_keep_windows_and_rotary, not_reducible=_MAPS,
    ),
}  # fmt: skip

_VIT = BlockLayout(
    ("layernorm_before", "attention", "dropout"), ("layernorm_after", "mlp", "dropout")
)
_DINO = BlockLayout(
    ("norm1", "attention", "layer_scale1", "drop_path"),
    ("norm2", "mlp", "layer_scale2", "drop_path"),
)
_CLIP = BlockLayout(("layer_norm1", "self_attn"), ("layer_norm2", "mlp"))
_INTERN = BlockLayout(
    ("layernorm_before", "attention", "lambda_1"),
    ("layernorm_after", "mlp", "dropout", "lambda_2"),
)
_AIM = BlockLayout(("rms_norm1", "attention"), ("rms_norm2", "ffn"))
_CONV = "patch_embeddings.projection"
_VITDET = Family(
    ("VitDetAttention",), "embeddings.projection", 0, replacement=DecomposedAttention,
    keep=_keep_windows, not_reducible=_MAPS,
)  # fmt: skip


def _qwen(attention: str) -> Family:
    return Family(
        (attention,), "patch_embed.proj", 0, replacement=SequenceAttention,
        images=partial(ImageReader, read=read_qwen, is_static=never), keep=_keep_listed_windows,
        not_reducible=_PACKED, not_tunable=_PATCHES.format("grid_thw"),
    )  # fmt: skip


# transformers, by the class of the model.
_TOWER_FAMILIES = {
    "pixtral.modeling_pixtral.PixtralVisionModel": Family(
        ("PixtralAttention",), "patch_conv", 0, replacement=SequenceAttention,
        images=partial(ImageReader, read=read_pixtral, is_static=has_integer_sizes),
        not_reducible=_PACKED,
    ),
    "qwen2_vl.modeling_qwen2_vl.Qwen2VisionTransformerPretrainedModel": _qwen("VisionAttention"),
    "qwen2_5_vl.modeling_qwen2_5_vl.Qwen2_5_VisionTransformerPretrainedModel": _qwen(
        "Qwen2_5_VLVisionAttention"
    ),
    "qwen3_vl.modeling_qwen3_vl.Qwen3VLVisionModel": _qwen("Qwen3VLVisionAttention"),
    "qwen3_vl_moe.modeling_qwen3_vl_moe.Qwen3VLMoeVisionModel": _qwen("Qwen3VLMoeVisionAttention"),
    "siglip2.modeling_siglip2.Siglip2VisionModel": Family(
        ("Siglip2Attention",), "embeddings.patch_embedding", 0,
        images=partial(ImageReader, read=read_siglip2, is_static=never),
        not_reducible="its images have different sizes, so that they would keep different numbers of "
        "tokens",
        not_tunable=_PATCHES.format("spatial_shapes"),
    ),
    "vit_mae.modeling_vit_mae.ViTMAEModel": Family(
        ("ViTMAEAttention",), "embeddings.patch_embeddings.projection", 1, images=ViTMAEReader,
        keep=_keep_none_unmasked,
        not_reducible="its patches are in a random order, so that the grid of the policies is not "
        "theirs",
    ),
    "sam2.modeling_sam2.Sam2HieraDetModel": Family(
        ("Sam2MultiScaleAttention",), "patch_embed.projection", 0, replacement=MapAttention,
        keep=_keep_windows_and_pooling, not_reducible=_STAGES,
    ),
    "sam.modeling_sam.SamVisionEncoder": Family(
        ("SamVisionAttention", "SamVisionSdpaAttention"), "patch_embed.projection", 0,
        replacement=DecomposedAttention, keep=_keep_windows, not_reducible=_MAPS,
    ),
    "vitdet.modeling_vitdet.VitDetModel": _VITDET,
    "vitdet.modeling_vitdet.VitDetBackbone": _VITDET,
}  # fmt: skip
# transformers, by the class of the embeddings, which distinguishes the vision encoder of CLIP from its
# text encoder and is the same in all classes of models.
_EMBEDDING_FAMILIES = {
    "vit.modeling_vit.ViTEmbeddings": Family(("ViTAttention",), _CONV, layouts=_VIT),
    "deit.modeling_deit.DeiTEmbeddings": Family(("DeiTAttention",), _CONV, 2, layouts=_VIT),
    "dinov2.modeling_dinov2.Dinov2Embeddings": Family(
        ("Dinov2Attention",), _CONV, layouts=_DINO, spatial_readers=_DENSE_OR_POOLED
    ),
    "dinov2_with_registers.modeling_dinov2_with_registers.Dinov2WithRegistersEmbeddings": Family(
        ("Dinov2WithRegistersAttention",), _CONV, registers=True, layouts=_DINO,
        spatial_readers=_DENSE_OR_POOLED,
    ),
    "dinov3_vit.modeling_dinov3_vit.DINOv3ViTEmbeddings": Family(
        ("DINOv3ViTAttention",), "patch_embeddings", registers=True,
        layouts=replace(_DINO, rotary="position_embeddings"),
    ),
    "clip.modeling_clip.CLIPVisionEmbeddings": Family(
        ("CLIPAttention",), "patch_embedding", layouts=_CLIP, spatial_readers=_DENSE_OR_POOLED
    ),
    "siglip.modeling_siglip.SiglipVisionEmbeddings": Family(
        ("SiglipAttention",), "patch_embedding", 0, layouts=_CLIP, spatial_readers=_ALL
    ),
    "vit_msn.modeling_vit_msn.ViTMSNEmbeddings": Family(("ViTMSNAttention",), _CONV, layouts=_VIT),
    "ijepa.modeling_ijepa.IJepaEmbeddings": Family(
        ("IJepaAttention",), _CONV, 0, layouts=_VIT, spatial_readers=_ALL
    ),
    "dpt.modeling_dpt.DPTViTEmbeddings": Family(("DPTViTAttention",), _CONV),
    "dpt.modeling_dpt.DPTViTHybridEmbeddings": Family(("DPTViTAttention",), "projection"),
    "yolos.modeling_yolos.YolosEmbeddings": Family(
        ("YolosAttention",), _CONV, suffix="num_detection_tokens"
    ),
    "vitpose_backbone.modeling_vitpose_backbone.VitPoseBackboneEmbeddings": Family(
        ("VitPoseBackboneAttention",), _CONV, 0, spatial_readers=_ALL
    ),
    "aimv2.modeling_aimv2.Aimv2VisionEmbeddings": Family(
        ("Aimv2Attention",), "patch_embed", 0, layouts=_AIM, spatial_readers=_ALL
    ),
    "owlvit.modeling_owlvit.OwlViTVisionEmbeddings": Family(
        ("OwlViTAttention",), "patch_embedding", layouts=_CLIP,
        spatial_readers=("ForObjectDetection",),
    ),
    "internvl.modeling_internvl.InternVLVisionEmbeddings": Family(
        ("InternVLVisionAttention",), _CONV, layouts=_INTERN, spatial_readers=_ALL
    ),
    "blip.modeling_blip.BlipVisionEmbeddings": Family(
        ("BlipAttention",), "patch_embedding", layouts=_CLIP, spatial_readers=_ALL,
        replacement=BlipAttention,
    ),
}  # fmt: skip
_PREFIX = "transformers.models."
FAMILIES = _TIMM_FAMILIES | {
    _PREFIX + name: family for name, family in (_TOWER_FAMILIES | _EMBEDDING_FAMILIES).items()
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
        _describe(model, tower, anchor, FAMILIES[name])
        for tower, anchor, name in _find_towers(model)
    ]
    if len(found) > 1:
        raise ValueError(
            f"{type(model).__name__} contains {len(found)} vision encoders; pass one of them"
        )
    return found[0] if found else raise_unsupported(model)


def _find_towers(model: nn.Module) -> list[tuple[nn.Module, nn.Module, str]]:
    """List the vision encoders, each with the module that the table has by the name of its class."""
    found = []
    for module in model.modules():
        classes = [f"{kind.__module__}.{kind.__qualname__}" for kind in type(module).__mro__]
        names = [name for name in classes if name in _TIMM_FAMILIES]
        own = classes[0].removeprefix(_PREFIX)
        if own in _TOWER_FAMILIES:
            names.append(classes[0])
        found += [(module, module, name) for name in names[:1]]
        for child in module.children():
            if class_name(child).removeprefix(_PREFIX) in _EMBEDDING_FAMILIES:
                found.append((module, child, class_name(child)))
    return found


def _describe(model: nn.Module, tower: Any, anchor: Any, family: Family) -> VisionTransformer:
    pairs = [
        (block, child)
        for block in tower.modules()
        for child in block.children()
        if type(child).__name__ in family.attention
    ]
    blocks = tuple(block for block, _ in pairs)
    if family.prefix is None:  # timm
        for block in tower.blocks:
            if block not in blocks:
                raise_unsupported(tower, getattr(block, "attn", block))
        prefix, suffix = int(tower.num_prefix_tokens), 0
        spatial = model is not tower or getattr(tower, "global_pool", "token") != "token"
    else:
        prefix, suffix = family.special_tokens(getattr(anchor, "config", None))
        named = any(type(m).__name__.endswith(family.spatial_readers) for m in model.modules())
        spatial = named or type(model).__module__ != type(anchor).__module__
    kept = {index: family.keep(tower, index, block) for index, block in enumerate(blocks)}
    attentions = [child for index, (_, child) in enumerate(pairs) if not kept[index]]
    make: Any = family.replacement
    if make is hiera_attention:
        make = partial(hiera_attention, tower)
    elif issubclass(make, InterfaceAttention):
        attentions = [_config_owner(attention) for attention in attentions]
    layout = family.layouts
    if isinstance(layout, dict):
        kinds = {class_name(block) for block in blocks}
        layout = layout.get(kinds.pop()) if len(kinds) == 1 else None
    return VisionTransformer(
        replacement=make,
        tower=tower,
        blocks=blocks,
        attentions=tuple(attentions),
        projection=_projection(tower, anchor, family),
        prefix=prefix,
        suffix=suffix,
        layout=layout,
        reads_spatial_tokens=spatial,
        reader=family.images,
        dense_blocks={index: reason for index, reason in kept.items() if reason},
        not_reducible=family.not_reducible,
        not_tunable=family.not_tunable,
    )


def _projection(tower: Any, anchor: nn.Module, family: Family) -> nn.Module:
    """Return the module that makes patches into tokens, whose output has the shape of the grid."""
    owner, _, name = family.projection.rpartition(".")
    embed = anchor.get_submodule(owner)
    projection: Any = getattr(embed, name, None)
    if family.images is None and not isinstance(projection, (nn.Conv2d, nn.Conv3d)):
        raise TypeError(
            f"{class_name(embed)} in {type(tower).__name__} is not supported: its patches do not come "
            "from a convolution, so the grid is unknown; build the model with a PatchEmbed"
        )
    found: nn.Module = projection
    return found


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
            "configuration, and exactly one must name the attention function; install transformers "
            "5.9 or newer"
        )
    return owners[0]


def check_module(model: nn.Module) -> nn.Module:
    """Raise a TypeError unless the model is a module, and return it."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model is {type(model).__name__}; pass the torch.nn.Module (load_model(...).model)"
        )
    return model


_BIAS = "it adds a relative position bias to the scores, which is not a product of query and key"
_SWIN = "it attends inside windows, not over one grid"
_DIFFERENCE = "its output is the difference of two softmax maps"
_UNKNOWN = "its class is not known, so its keys may not be a prefix followed by one grid"
# By a part of the name of the attention class, or of the block.
_REASONS = {
    "swin": _SWIN,
    "beit": _BIAS,
    "relpos": _BIAS,
    "diff": _DIFFERENCE,
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
    reason = vit.not_reducible or (
        "it has tokens behind the grid, which the policies would merge"
        if vit.suffix
        else "its block is not an attention branch followed by an MLP branch"
    )
    raise TypeError(
        f"the tokens of {class_name(vit.blocks[0])} in {type(model).__name__} cannot be reduced: "
        f"{reason}.\ndocs/models.md lists the models whose tokens can be reduced."
    )
