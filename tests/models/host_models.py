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
from bmfa.models.replacement import AttentionReplacement, replacement_of
from bmfa.packages import load_package
from models.supported_models import EVA as EVA
from models.supported_models import HF as HF
from models.supported_models import SUPPORTED, hf_model, timm
from models.supported_models import VIT as VIT
from models.supported_models import timm_model as timm_model

# The backend of tiles on a CPU, without gradients.
CPU_BACKEND = "native" if library.unavailable_reason() is None else "eager"


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
    """Both encoders of CLIP or SigLIP, small."""
    transformers = load_package("transformers")
    text = {k: v for k, v in HF.items() if k not in ("image_size", "patch_size")}
    text |= {"vocab_size": 50, "max_position_embeddings": 8}
    config = getattr(transformers, f"{kind}Config")(text_config=text, vision_config=HF)
    model: nn.Module = getattr(transformers, f"{kind}Model")(config)
    return model


def row(name: str) -> tuple[int, Callable[[], nn.Module]]:
    """The prefix of a supported model, and the function that makes it."""
    return SUPPORTED[name].prefix, SUPPORTED[name].make


TIMM: dict[str, tuple[int, Callable[[], nn.Module]]] = {
    "vit": (1, timm("vit_tiny_patch16_224")),
    "deit-distilled": (2, timm("deit_tiny_distilled_patch16_224")),
    "registers": row("timm-vit"),
    "no-class-token": (0, timm("vit_tiny_patch16_224", class_token=False, global_pool="avg")),
    "eva": row("timm-eva"),
    "dinov3": row("timm-dinov3"),
}
TRANSFORMERS: dict[str, tuple[int, Callable[[], nn.Module]]] = {
    f"hf-{name}": row(name) for name in ("vit", "deit", "dinov2", "dinov3", "clip", "siglip")
}
TRANSFORMERS |= {"hf-nested": (1, nested_model), "hf-registers": row("dinov2-registers")}
MODELS = TIMM | TRANSFORMERS | {"embedded": row("embedded")}
# Arguments with which each host accepts images of another size than it was built for.
SIZED: dict[str, dict[str, Any]] = {name: {} for name in TIMM | TRANSFORMERS}
for name in ("hf-vit", "hf-deit", "hf-clip", "hf-siglip"):
    SIZED[name] = {"interpolate_pos_encoding": True}


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


def pixels_of(size: int, images: int = 1) -> Tensor:
    return torch.randn(images, 3, size, size, generator=torch.Generator().manual_seed(1))


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
