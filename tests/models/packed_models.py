"""Small models that take images of several sizes in one call, or tokens in an order of their own."""

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn

from bmfa.packages import load_package

if find_spec("timm") is None or find_spec("transformers") is None:
    pytest.skip("needs timm and transformers: pip install 'bmfa[models]'", allow_module_level=True)

# Frames, height and width of images in patches of 4x4 pixels: an image, and a video of two frames.
SIZES = ((1, 12, 8), (2, 6, 10))
IMAGES = ((1, 12, 8), (1, 6, 10))  # for encoders that take no videos
CLIPS = ((2, 12, 8), (2, 6, 10))  # for those that take videos of equal length
Inputs = dict[str, Any]
_COMMON = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "out_hidden_size": 16,
}
# As the families name the same sizes.
_BLOCKS = {"depth": 3, "num_heads": 2, "temporal_patch_size": 2}
_LAYERS = {"num_hidden_layers": 3, "num_attention_heads": 2}
_POSITIONS = {"num_position_embeddings": 64}
_WINDOWS = {"window_size": 16, "fullatt_block_indexes": [0, 2]}
_ROUND = {"image_size": 32}


def _randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def sequence_inputs(
    seed: int = 1,
    name: str = "hidden_states",
    shape: tuple[int, ...] = (3 * 2 * 4 * 4,),
    lead: tuple[int, ...] = (),
    sizes: tuple[tuple[int, int, int], ...] = SIZES,
    **others: Any,
) -> Inputs:
    """The patches of an image and of a video in one sequence."""
    tokens = sum(frames * height * width for frames, height, width in sizes)
    patches = _randn(*lead, tokens, *shape, seed=seed)
    return {name: patches, "grid_thw": torch.tensor(sizes), **others}


def pixtral_inputs(seed: int = 1) -> Inputs:
    """Two images of 12x8 and 6x10 patches, padded to a common size."""
    pixels = _randn(2, 3, 48, 40, seed=seed)
    return {"pixel_values": pixels, "image_sizes": torch.tensor([[48, 32], [24, 40]])}


def pixels(name: str, *shape: int) -> Callable[[int], Inputs]:
    """A function that makes images of one size."""
    return lambda seed=1: {name: _randn(*shape, seed=seed)}


def transformers_model(family: str, model: str, config: str, **sizes: Any) -> nn.Module:
    """A vision encoder of transformers; sizes that its configuration does not have are left out."""
    module = load_package(f"transformers.models.{family}.modeling_{family}")
    kind = getattr(load_package(f"transformers.models.{family}.configuration_{family}"), config)
    known = {*kind.__dataclass_fields__, *kind.attribute_map}
    assert not (unknown := sizes.keys() - known - _COMMON.keys()), unknown
    built = kind(**{size: x for size, x in (_COMMON | sizes).items() if size in known})
    made: nn.Module = getattr(module, model)(built)
    return made


def sequence_model(family: str, model: str, config: str, **sizes: Any) -> Callable[[], nn.Module]:
    """A function that makes a vision encoder whose images share a sequence."""
    return partial(transformers_model, family, model, config, **sizes)


def naflex(**options: Any) -> nn.Module:
    """A NaFlexViT with class token and registers."""
    module = load_package("timm.models.naflexvit")
    config = module.NaFlexVitCfg(
        patch_size=4,
        embed_dim=48,
        depth=3,
        num_heads=3,
        class_token=True,
        reg_tokens=2,
        global_pool="avg",
        pos_embed_grid_size=(8, 8),
        **options,
    )
    model: nn.Module = module.NaFlexVit(config, in_chans=3, num_classes=5)
    return model


def timm_encoder(family: str, model: str, **options: Any) -> nn.Module:
    """A vision encoder of a vision language model in timm."""
    sizes = {"img_size": 48, "patch_size": 4, "embed_dim": 48, "depth": 3, "num_heads": 3}
    made: nn.Module = getattr(load_package(f"timm.models.{family}"), model)(**sizes, **options)
    return made


def sam2() -> nn.Module:
    """Hiera as in SAM 2, with global attention over 16x32 and 8x16 tokens, heads of dimension 96."""
    return transformers_model(
        "sam2",
        "Sam2HieraDetModel",
        "Sam2HieraDetConfig",
        hidden_size=24,
        image_size=[64, 128],
        blocks_per_stage=[1, 2, 3, 1],
        embed_dim_per_stage=[24, 96, 192, 384],
        num_attention_heads_per_stage=[1, 1, 2, 4],
        window_size_per_stage=[4, 2, 4, 2],
        global_attention_blocks=[2, 4, 5],
        window_positional_embedding_background_size=[4, 4],
        patch_size=[7, 7],
    )


_RASTER = partial(sequence_inputs, name="pixel_values", shape=(3, 4, 4))
_FLAT = partial(sequence_inputs, name="pixel_values", shape=(3 * 4 * 4,))
_SEQUENCES: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Inputs]]] = {
    "pixtral": (
        partial(
            transformers_model, "pixtral", "PixtralVisionModel", "PixtralVisionConfig",
            image_size=64, **_LAYERS,
        ),
        pixtral_inputs,
    ),
    "qwen2-vl": (
        sequence_model(
            "qwen2_vl", "Qwen2VisionTransformerPretrainedModel", "Qwen2VLVisionConfig",
            embed_dim=32, hidden_size=16, mlp_ratio=2, **_BLOCKS,
        ),
        sequence_inputs,
    ),
    "ernie": (
        sequence_model(
            "ernie4_5_vl_moe", "Ernie4_5_VLMoeVisionTransformerPretrainedModel",
            "Ernie4_5_VLMoeVisionConfig", depth=3, num_heads=2,
        ),
        partial(sequence_inputs, shape=(3 * 4 * 4,)),
    ),
    "hunyuan": (
        sequence_model(
            "hunyuan_vl", "HunYuanVLVisionTransformer", "HunYuanVLVisionConfig",
            max_image_size=64, text_hidden_size=16, **_LAYERS,
        ),
        partial(_FLAT, sizes=IMAGES),
    ),
    "paddleocr": (
        sequence_model(
            "paddleocr_vl", "PaddleOCRVisionTransformer", "PaddleOCRVisionConfig",
            **_ROUND, **_LAYERS,
        ),
        partial(_RASTER, lead=(1,)),
    ),
    "videollama3": (
        sequence_model(
            "video_llama_3", "VideoLlama3VisionModel", "VideoLlama3VisionConfig", **_LAYERS
        ),
        partial(_FLAT, merge_sizes=torch.tensor([2, 1])),
    ),
    "kimi": (
        sequence_model(
            "kimi_k25", "Kimi_K25VisionModel", "Kimi_K25VisionConfig",
            pos_emb_height=8, pos_emb_width=8, **_LAYERS,
        ),
        partial(_RASTER, sizes=CLIPS),
    ),
}  # fmt: skip
for _name, _family, _model, _config, _sizes in (
    ("qwen2.5-vl", "qwen2_5_vl", "Qwen2_5_VisionTransformerPretrainedModel",
     "Qwen2_5_VLVisionConfig", _WINDOWS),
    ("qwen2.5-omni", "qwen2_5_omni", "Qwen2_5OmniVisionEncoder", "Qwen2_5OmniVisionEncoderConfig",
     _WINDOWS),
    ("exaone4.5", "exaone4_5", "Exaone4_5_VisionModel", "Exaone4_5_VisionConfig",
     _WINDOWS | {"num_key_value_heads": 1}),
    ("qwen3-vl", "qwen3_vl", "Qwen3VLVisionModel", "Qwen3VLVisionConfig",
     _POSITIONS | {"deepstack_visual_indexes": [1]}),
    ("qwen3-vl-moe", "qwen3_vl_moe", "Qwen3VLMoeVisionModel", "Qwen3VLMoeVisionConfig",
     _POSITIONS | {"deepstack_visual_indexes": [1]}),
    ("qwen3-omni", "qwen3_omni_moe", "Qwen3OmniMoeVisionEncoder", "Qwen3OmniMoeVisionEncoderConfig",
     _POSITIONS | {"deepstack_visual_indexes": [1]}),
    ("qwen3.5", "qwen3_5", "Qwen3_5VisionModel", "Qwen3_5VisionConfig", _POSITIONS),
    ("qwen3.5-moe", "qwen3_5_moe", "Qwen3_5MoeVisionModel", "Qwen3_5MoeVisionConfig", _POSITIONS),
    ("qwen4-exp", "qwen4_exp", "Qwen4ExpVisionModel", "Qwen4ExpVisionConfig", _POSITIONS),
    ("glm4v", "glm4v", "Glm4vVisionModel", "Glm4vVisionConfig", _ROUND),
    ("glm4v-moe", "glm4v_moe", "Glm4vMoeVisionModel", "Glm4vMoeVisionConfig", _ROUND),
    ("glm-ocr", "glm_ocr", "GlmOcrVisionModel", "GlmOcrVisionConfig", _ROUND),
    ("glm5-next", "glm5_next", "Glm5NextVisionModel", "Glm5NextVisionConfig",
     {"projection_intermediate_size": 32}),
):  # fmt: skip
    _SEQUENCES[_name] = (
        sequence_model(_family, _model, _config, **_BLOCKS, **_sizes),
        partial(sequence_inputs, sizes=IMAGES if _name.startswith("glm4v") else SIZES),
    )

# Images in one sequence.
SEQUENCES = sorted(_SEQUENCES)

PACKED = _SEQUENCES | {
    "naflex": (partial(naflex, pos_embed_use_grid_sample=True), pixels("x", 2, 3, 32, 48)),
    "naflex-rope": (partial(naflex, rope_type="axial"), pixels("x", 2, 3, 32, 48)),
    "timm-qwen3": (
        partial(timm_encoder, "qwen3_vit", "Qwen3VitEncoder", out_features=16),
        pixels("x", 2, 3, 32, 48),
    ),
    "timm-deepseek": (
        partial(timm_encoder, "deepseek_vit", "DeepseekVitEncoder", out_features=16),
        pixels("x", 2, 3, 36, 48),
    ),
    "timm-gemma4": (
        partial(
            timm_encoder,
            "gemma4_vit",
            "Gemma4VitEncoder",
            head_dim=16,
            intermediate_size=64,
            position_embedding_size=64,
        ),
        pixels("x", 2, 3, 24, 48),
    ),
    "sam2": (sam2, pixels("pixel_values", 2, 3, 64, 128)),
    "sam3": (
        partial(
            transformers_model,
            "sam3",
            "Sam3ViTModel",
            "Sam3ViTConfig",
            image_size=48,
            pretrain_image_size=16,
            window_size=4,
            global_attn_indexes=[1, 2],
            **_LAYERS,
        ),
        pixels("pixel_values", 2, 3, 48, 48),
    ),
    "vjepa2": (
        partial(
            transformers_model,
            "vjepa2",
            "VJEPA2Model",
            "VJEPA2Config",
            crop_size=32,
            frames_per_clip=8,
            mlp_ratio=2,
            pred_hidden_size=24,
            pred_num_attention_heads=2,
            pred_num_hidden_layers=1,
            **_LAYERS,
        ),
        pixels("pixel_values_videos", 2, 8, 3, 32, 32),
    ),
}
