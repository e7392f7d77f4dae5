"""Small models that take images of several sizes in one call, or tokens in an order of their own."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from bmfa.packages import load_package

# Frames, height and width of images in patches: an image, and a video of two frames.
SIZES = ((1, 12, 8), (2, 6, 10))
Inputs = dict[str, Any]


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def qwen_inputs(seed: int = 1) -> Inputs:
    """Patches of an image and of a video, 2 frames x 4x4 pixels each."""
    tokens = sum(frames * height * width for frames, height, width in SIZES)
    patches = torch.randn(tokens, 3 * 2 * 4 * 4, generator=_generator(seed))
    return {"hidden_states": patches, "grid_thw": torch.tensor(SIZES)}


def pixtral_inputs(seed: int = 1) -> Inputs:
    """Two images of 12x8 and 6x10 patches, padded to a common size."""
    pixels = torch.randn(2, 3, 48, 40, generator=_generator(seed))
    return {"pixel_values": pixels, "image_sizes": torch.tensor([[48, 32], [24, 40]])}


def qwen(family: str, model: str, config: str, **options: Any) -> Callable[[], nn.Module]:
    """A function that makes the vision encoder of a Qwen model."""

    def make() -> nn.Module:
        module = load_package(f"transformers.models.{family}.modeling_{family}")
        configuration = load_package(f"transformers.models.{family}.configuration_{family}")
        sizes = {"depth": 3, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2}
        built = getattr(configuration, config)(**sizes | {"temporal_patch_size": 2} | options)
        made: nn.Module = getattr(module, model)(built)
        return made

    return make


def pixtral() -> nn.Module:
    transformers = load_package("transformers")
    config = transformers.PixtralVisionConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=2,
        patch_size=4,
        image_size=64,
    )
    model: nn.Module = transformers.PixtralVisionModel(config)
    return model


def naflex(**options: Any) -> Callable[[], nn.Module]:
    """A function that makes a NaFlexViT with class token and registers."""

    def make() -> nn.Module:
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

    return make


def naflex_inputs(seed: int = 1) -> Inputs:
    return {"x": torch.randn(2, 3, 32, 48, generator=_generator(seed))}


def sam2() -> nn.Module:
    """Hiera as in SAM 2, with global attention over 16x32 and 8x16 tokens, heads of dimension 96."""
    module = load_package("transformers.models.sam2.modeling_sam2")
    config = load_package("transformers").Sam2HieraDetConfig(
        hidden_size=24,
        image_size=[64, 128],
        blocks_per_stage=[1, 2, 3, 1],
        embed_dim_per_stage=[24, 96, 192, 384],
        num_attention_heads_per_stage=[1, 1, 2, 4],
        window_size_per_stage=[4, 2, 4, 2],
        global_attention_blocks=[2, 4, 5],
        window_positional_embedding_background_size=[4, 4],
    )
    model: nn.Module = module.Sam2HieraDetModel(config)
    return model


def sam2_inputs(seed: int = 1) -> Inputs:
    return {"pixel_values": torch.randn(2, 3, 64, 128, generator=_generator(seed))}


_QWEN3 = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "out_hidden_size": 16,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [1],
}

PACKED: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Inputs]]] = {
    "pixtral": (pixtral, pixtral_inputs),
    "qwen2-vl": (
        qwen(
            "qwen2_vl",
            "Qwen2VisionTransformerPretrainedModel",
            "Qwen2VLVisionConfig",
            embed_dim=32,
            hidden_size=16,
            mlp_ratio=2,
        ),
        qwen_inputs,
    ),
    "qwen2.5-vl": (
        qwen(
            "qwen2_5_vl",
            "Qwen2_5_VisionTransformerPretrainedModel",
            "Qwen2_5_VLVisionConfig",
            hidden_size=32,
            intermediate_size=48,
            out_hidden_size=16,
            window_size=16,
            fullatt_block_indexes=[0, 2],
        ),
        qwen_inputs,
    ),
    "qwen3-vl": (
        qwen("qwen3_vl", "Qwen3VLVisionModel", "Qwen3VLVisionConfig", **_QWEN3),
        qwen_inputs,
    ),
    "qwen3-vl-moe": (
        qwen("qwen3_vl_moe", "Qwen3VLMoeVisionModel", "Qwen3VLMoeVisionConfig", **_QWEN3),
        qwen_inputs,
    ),
}


# Images in one sequence.
SEQUENCES = sorted(PACKED)

PACKED |= {
    "naflex": (naflex(pos_embed_use_grid_sample=True), naflex_inputs),
    "naflex-rope": (naflex(rope_type="axial"), naflex_inputs),
    "sam2": (sam2, sam2_inputs),
}


def make_packed(name: str) -> nn.Module:
    """A model in evaluation mode, its weights large enough for attention to differ from a mean."""
    torch.manual_seed(0)
    model = PACKED[name][0]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model
