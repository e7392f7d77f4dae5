"""The models that `patch` supports, small and with random weights.

`test_supported_models.py` runs all of them, and the table in `docs/models.md` is `table()`.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from bmfa.models import embedded
from bmfa.packages import load_package
from models.packed_models import PACKED, SEQUENCES

VIT = {"img_size": 32, "patch_size": 4, "depth": 3, "embed_dim": 24, "num_heads": 3}
EVA = {"img_size": 32, "patch_size": 4, "depth": 3, "embed_dim": 48, "num_heads": 3}
HF = {
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "intermediate_size": 48,
    "image_size": 32,
    "patch_size": 4,
}


def timm_model(name: str, **options: Any) -> nn.Module:
    """A small timm model with random weights."""
    model: nn.Module = load_package("timm").create_model(name, num_classes=5, **options)
    return model


def hf_model(config: str, model: str, **options: Any) -> nn.Module:
    """A small transformers model with random weights."""
    transformers = load_package("transformers")
    made: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**HF | options))
    return made


SIDE = 32  # pixels of the images, in patches of 4x4

Inputs = dict[str, Any]


def images(seed: int = 1) -> Inputs:
    """Two square images."""
    generator = torch.Generator().manual_seed(seed)
    return {"pixel_values": torch.randn(2, 3, SIDE, SIDE, generator=generator)}


def hf(config: str, model: str, **options: Any) -> Callable[[], nn.Module]:
    """A function that makes a small transformers model."""
    return partial(hf_model, config, model, **options)


def timm(name: str, **options: Any) -> Callable[[], nn.Module]:
    """A function that makes a small timm model."""
    sizes = EVA if "eva" in name or "dinov3" in name else VIT
    return partial(timm_model, name, **sizes, dynamic_img_size=True, **options)


@dataclass(frozen=True)
class Supported:
    """One row of the table of models."""

    library: str
    model: str  # as the table names it; "" if another row stands for it
    make: Callable[[], nn.Module]
    prefix: int
    suffix: int = 0
    reduces: bool = False
    inputs: Callable[[int], Inputs] = images
    tokens: str = ""  # which tokens are not on the grid; "" for none
    side: int = SIDE
    fullgraph: bool = True  # False if the grids of these inputs are values of tensors
    frames: bool = False  # True if frames attend to each other, which trees do not

    @property
    def row(self) -> str:
        cells = (self.library, self.model, self.tokens or "none", "yes" if self.reduces else "no")
        return f"| {' | '.join(cells)} |"


HEAD = "| library | model | tokens beside the grid | `bmfa.reduce` |\n|---|---|---|---|"


def packed(name: str, library: str = "", model: str = "", **options: Any) -> Supported:
    """The row of a model whose inputs are not images of one size, or whose tokens have another order."""
    make, inputs = PACKED[name]
    prefix, whole = options.pop("prefix", 0), name not in SEQUENCES
    return Supported(library, model, make, prefix, inputs=inputs, **{"fullgraph": whole} | options)


def siglip2_inputs(seed: int = 1) -> Inputs:
    """Two images of 12x8 and 7x9 patches, in a batch with padding to 100."""
    sizes = torch.tensor([[12, 8], [7, 9]])
    generator = torch.Generator().manual_seed(seed)
    patches = torch.randn(2, 100, 3 * 4 * 4, generator=generator)
    mask = (torch.arange(100) < sizes.prod(-1, keepdim=True)).long()
    return {"pixel_values": patches, "pixel_attention_mask": mask, "spatial_shapes": sizes}


SUPPORTED: dict[str, Supported] = {
    "embedded": Supported(
        "bmfa", "the embedded model", embedded.EmbeddedViT, 1, tokens="class", reduces=True, side=112
    ),
    "timm-vit": Supported(
        "timm", "`VisionTransformer`: ViT, DeiT, DINOv2, also with qk-norm, LayerScale, average pooling",
        timm("vit_tiny_patch16_224", reg_tokens=4, qk_norm=True, init_values=0.5), 5,
        tokens="class, distillation, registers", reduces=True,
    ),
    "timm-eva": Supported(
        "timm", "`Eva`: EVA, EVA-02", timm("eva02_tiny_patch14_224"), 1, tokens="class", reduces=True
    ),
    "timm-dinov3": Supported(
        "timm", "`Eva`: DINOv3", timm("vit_small_patch16_dinov3"), 5,
        tokens="class, registers", reduces=True,
    ),
    "vit": Supported(
        "transformers", "ViT", hf("ViTConfig", "ViTForImageClassification"), 1,
        tokens="class", reduces=True,
    ),
    "deit": Supported(
        "transformers", "DeiT", hf("DeiTConfig", "DeiTForImageClassification"), 2,
        tokens="class, distillation", reduces=True,
    ),
    "dinov2": Supported(
        "transformers", "DINOv2", hf("Dinov2Config", "Dinov2ForImageClassification"), 1,
        tokens="class", reduces=True,
    ),
    "dinov2-registers": Supported(
        "transformers", "DINOv2 with registers",
        hf("Dinov2WithRegistersConfig", "Dinov2WithRegistersModel", num_register_tokens=3), 4,
        tokens="class, registers", reduces=True,
    ),
    "dinov3": Supported(
        "transformers", "DINOv3 ViT",
        hf("DINOv3ViTConfig", "DINOv3ViTModel", num_register_tokens=2, num_attention_heads=2), 3,
        tokens="class, registers", reduces=True,
    ),
    "clip": Supported(
        "transformers", "CLIP vision", hf("CLIPVisionConfig", "CLIPVisionModel"), 1,
        tokens="class", reduces=True,
    ),
    "siglip": Supported(
        "transformers", "SigLIP vision", hf("SiglipVisionConfig", "SiglipVisionModel"), 0, reduces=True
    ),
    "vit-msn": Supported(
        "transformers", "ViT-MSN", hf("ViTMSNConfig", "ViTMSNForImageClassification"), 1,
        tokens="class", reduces=True,
    ),
    "ijepa": Supported(
        "transformers", "I-JEPA", hf("IJepaConfig", "IJepaForImageClassification"), 0, reduces=True
    ),
    "dpt": Supported(
        "transformers", "DPT",
        hf(
            "DPTConfig", "DPTForDepthEstimation", backbone_out_indices=[0, 1, 2, 3],
            neck_hidden_sizes=[8, 8, 8, 8], fusion_hidden_size=8, reassemble_factors=[4, 2, 1, 0.5],
            is_hybrid=False, num_hidden_layers=4,
        ),
        1, tokens="class",
    ),
    "yolos": Supported(
        "transformers", "YOLOS",
        hf(
            "YolosConfig", "YolosForObjectDetection", image_size=[32, 32], num_detection_tokens=7,
            use_mid_position_embeddings=True,
        ),
        1, 7, tokens="class; detection tokens behind the grid",
    ),
    "vitpose": Supported(
        "transformers", "ViTPose",
        hf("VitPoseBackboneConfig", "VitPoseBackbone", image_size=[128, 128], patch_size=[16, 16]), 0,
        side=128,
    ),
    "aimv2": Supported(
        "transformers", "AIMv2 vision", hf("Aimv2VisionConfig", "Aimv2VisionModel"), 0, reduces=True
    ),
    "owlvit": Supported(
        "transformers", "OWL-ViT vision", hf("OwlViTVisionConfig", "OwlViTVisionModel"), 1,
        tokens="class", reduces=True,
    ),
    "blip": Supported(
        "transformers", "BLIP vision", hf("BlipVisionConfig", "BlipVisionModel"), 1,
        tokens="class", reduces=True,
    ),
    "internvl": Supported(
        "transformers", "InternVL vision",
        hf("InternVLVisionConfig", "InternVLVisionModel", image_size=[32, 32], patch_size=[4, 4]), 1,
        tokens="class", reduces=True,
    ),
    "vjepa2": packed("vjepa2", "transformers", "V-JEPA 2, frames of one size", frames=True),
    "pixtral": packed("pixtral", "transformers", "Pixtral vision"),
    "qwen2-vl": packed("qwen2-vl", "transformers", "Qwen2-VL vision"),
    "qwen2.5-vl": packed(
        "qwen2.5-vl", "transformers", "Qwen2.5-VL and Omni vision, blocks with full attention"
    ),
    "qwen3-vl": packed("qwen3-vl", "transformers", "Qwen3-VL vision, also MoE and Omni"),
    "qwen3.5": packed("qwen3.5", "transformers", "Qwen3.5 vision, also MoE and Qwen4-Exp"),
    "glm4v": packed("glm4v", "transformers", "GLM-4.xV vision, also MoE"),
    "glm-ocr": packed("glm-ocr", "transformers", "GLM-OCR and GLM-5 vision"),
    "kimi": packed("kimi", "transformers", "Kimi K2.5 vision", frames=True),
    "hunyuan": packed("hunyuan", "transformers", "HunyuanVL vision"),
    "paddleocr": packed("paddleocr", "transformers", "PaddleOCR-VL vision"),
    "ernie": packed("ernie", "transformers", "ERNIE 4.5-VL vision"),
    "videollama3": packed("videollama3", "transformers", "VideoLLaMA 3 vision"),
    "exaone4.5": packed(
        "exaone4.5", "transformers", "EXAONE 4.5 vision, blocks with full attention"
    ),
    "naflex": packed(
        "naflex", "timm", "`NaFlexVit`, images of one size", prefix=3, tokens="class, registers"
    ),
    "timm-qwen3": packed("timm-qwen3", "timm", "`Qwen3VitEncoder`", reduces=True),
    "timm-deepseek": packed("timm-deepseek", "timm", "`DeepseekVitEncoder`", reduces=True),
    "timm-gemma4": packed(
        "timm-gemma4", "timm", "`Gemma4VitEncoder`, images of one size", fullgraph=False
    ),
    "sam2": packed("sam2", "transformers", "Hiera of SAM 2, blocks with global attention"),
    "sam3": packed("sam3", "transformers", "SAM 3 vision, blocks with global attention"),
    "siglip2": Supported(
        "transformers", "SigLIP2 vision", hf("Siglip2VisionConfig", "Siglip2VisionModel"), 0,
        tokens="padding", inputs=siglip2_inputs, fullgraph=False,
    ),
    "naflex-rope": packed("naflex-rope", prefix=3),
}  # fmt: skip
# For which other rows of the table stand.
SUPPORTED |= {name: packed(name) for name in SEQUENCES if name not in SUPPORTED}


def table() -> str:
    """The table of the manual."""
    return "\n".join((HEAD, *(case.row for case in SUPPORTED.values() if case.model)))


@cache
def _build(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = SUPPORTED[name].make().eval()
    with torch.no_grad():  # weights large enough for attention to differ from a mean
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def make_supported(name: str) -> nn.Module:
    """A copy of the model of a row."""
    return copy.deepcopy(_build(name))


def inputs_of(name: str, seed: int = 1) -> Inputs:
    """Inputs of the model of a row."""
    case = SUPPORTED[name]
    if case.inputs is not images or case.side == SIDE:
        return case.inputs(seed)
    generator = torch.Generator().manual_seed(seed)
    return {"pixel_values": torch.randn(2, 3, case.side, case.side, generator=generator)}


def tensors(output: Any) -> list[Tensor]:
    """All tensors of an output, in order."""
    if isinstance(output, Tensor):
        return [output]
    values = output.values() if isinstance(output, dict) else output
    parts = values if isinstance(values, (list, tuple)) or hasattr(values, "__iter__") else ()
    return [tensor for part in parts if part is not None for tensor in tensors(part)]


def call(model: nn.Module, inputs: Inputs) -> list[Tensor]:
    """All outputs of a model; timm models take the images by position."""
    if set(inputs) == {"pixel_values"}:
        return tensors(model(inputs["pixel_values"]))
    return tensors(model(**inputs))
