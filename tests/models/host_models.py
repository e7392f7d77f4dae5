"""Small models of every supported host with random weights, shared by the tests of models."""

import copy
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from bmfa.attention.kernels.native import library
from bmfa.models import embedded
from bmfa.models.replacement import AttentionReplacement, replacement_of
from bmfa.packages import load_package

# The backend of tiles on a CPU, without gradients.
CPU_BACKEND = "native" if library.unavailable_reason() is None else "eager"
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


class Dinov2Attention(nn.Module):
    """Attention as transformers nests it up to 5.17: a part of it owns the configuration."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.attention = part

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.attention(*args, **kwargs)


def nested_model() -> nn.Module:
    """DINOv2 in the nested layout, whatever the version; the part needs another class name."""
    model = hf_model("Dinov2Config", "Dinov2Model")
    family = "dinov2_with_registers"
    module = load_package(f"transformers.models.{family}.modeling_{family}")
    for layer in list(model.modules()):
        if type(layer).__name__ == "Dinov2Layer":
            part = module.Dinov2WithRegistersAttention(model.config)
            layer.attention = Dinov2Attention(part)
    return model


def clip_model(kind: str) -> nn.Module:
    """Both towers of CLIP or SigLIP, small."""
    transformers = load_package("transformers")
    text = {k: v for k, v in HF.items() if k not in ("image_size", "patch_size")}
    text |= {"vocab_size": 50, "max_position_embeddings": 8}
    config = getattr(transformers, f"{kind}Config")(text_config=text, vision_config=HF)
    model: nn.Module = getattr(transformers, f"{kind}Model")(config)
    return model


TIMM: dict[str, tuple[int, Callable[[], nn.Module]]] = {
    "vit": (1, lambda: timm_model("vit_tiny_patch16_224", **VIT, dynamic_img_size=True)),
    "deit-distilled": (
        2,
        lambda: timm_model("deit_tiny_distilled_patch16_224", **VIT, dynamic_img_size=True),
    ),
    "registers": (
        5,
        lambda: timm_model(
            "vit_tiny_patch16_224",
            **VIT,
            dynamic_img_size=True,
            reg_tokens=4,
            qk_norm=True,
            init_values=0.5,
        ),
    ),
    "no-class-token": (
        0,
        lambda: timm_model(
            "vit_tiny_patch16_224",
            **VIT,
            dynamic_img_size=True,
            class_token=False,
            global_pool="avg",
        ),
    ),
    "eva": (1, lambda: timm_model("eva02_tiny_patch14_224", **EVA, dynamic_img_size=True)),
    "dinov3": (5, lambda: timm_model("vit_small_patch16_dinov3", **EVA, dynamic_img_size=True)),
}


TRANSFORMERS: dict[str, tuple[int, Callable[[], nn.Module]]] = {
    "hf-vit": (1, lambda: hf_model("ViTConfig", "ViTForImageClassification")),
    "hf-deit": (2, lambda: hf_model("DeiTConfig", "DeiTForImageClassification")),
    "hf-dinov2": (1, lambda: hf_model("Dinov2Config", "Dinov2ForImageClassification")),
    "hf-nested": (1, nested_model),
    "hf-registers": (
        4,
        lambda: hf_model(
            "Dinov2WithRegistersConfig", "Dinov2WithRegistersModel", num_register_tokens=3
        ),
    ),
    "hf-dinov3": (
        3,
        lambda: hf_model(
            "DINOv3ViTConfig",
            "DINOv3ViTModel",
            num_register_tokens=2,
            num_attention_heads=2,
        ),
    ),
    "hf-clip": (1, lambda: hf_model("CLIPVisionConfig", "CLIPVisionModel")),
    "hf-siglip": (0, lambda: hf_model("SiglipVisionConfig", "SiglipVisionModel")),
}


MODELS = TIMM | TRANSFORMERS | {"embedded": (1, embedded.EmbeddedViT)}


# Arguments with which each host accepts images of another size than it was built for.
SIZED = {name: {} for name in TIMM} | {
    "hf-vit": {"interpolate_pos_encoding": True},
    "hf-deit": {"interpolate_pos_encoding": True},
    "hf-dinov2": {},
    "hf-nested": {},
    "hf-registers": {},
    "hf-dinov3": {},
    "hf-clip": {"interpolate_pos_encoding": True},
    "hf-siglip": {"interpolate_pos_encoding": True},
}


@cache
def _build(name: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = MODELS[name][1]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def make_model(name: str, seed: int = 0) -> nn.Module:
    """A model in evaluation mode, its weights large enough for attention to differ from a mean.

    Every process builds a model once; each call returns a copy.
    """
    model = copy.deepcopy(_build(name, seed))
    torch.manual_seed(seed)
    return model


def replacements_in(model: nn.Module) -> list[tuple[nn.Module, AttentionReplacement]]:
    """The modules whose attention is replaced, with the replacements."""
    pairs = ((module, replacement_of(module)) for module in model.modules())
    return [(module, one) for module, one in pairs if isinstance(one, AttentionReplacement)]


def images(height: int = 32, width: int = 32, seed: int = 1) -> Tensor:
    return torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(seed))


def run(model: nn.Module, pixels: Tensor, **options: Any) -> Tensor:
    """The main output of any host."""
    with torch.no_grad():
        output = model(pixels, **options)
    for name in ("logits", "last_hidden_state"):
        if hasattr(output, name):
            return getattr(output, name)
    return output


def in_threads(works: Sequence[Callable[[], Any]]) -> list[Any]:
    """What functions return that start at the same time, each in a thread of its own."""
    start = threading.Barrier(len(works))

    def serve(work: Callable[[], Any]) -> Any:
        start.wait(timeout=60)
        return work()

    with ThreadPoolExecutor(len(works)) as pool:
        return list(pool.map(serve, works))


def image_size(name: str) -> int:
    return 112 if name == "embedded" else 32
