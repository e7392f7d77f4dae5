"""The embedded model: a plain pre-norm Vision Transformer for the embedded pictures."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

from bmfa.files import write_atomic
from bmfa.models.weights import load_weights

IMAGE_SIZE = 112
PATCH_SIZE = 8
GRID_SIZE = (IMAGE_SIZE // PATCH_SIZE, IMAGE_SIZE // PATCH_SIZE)
CLASS_COUNT = 10
MEAN, STD = 0.5, 0.25
WEIGHTS = Path(__file__).with_name("embedded.safetensors")


class PatchEmbed(nn.Module):
    """Pictures (B, 3, 112, 112) to tokens (B, 196, dim) in raster order."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.grid_size = GRID_SIZE
        self.proj = nn.Conv2d(3, dim, PATCH_SIZE, PATCH_SIZE)

    def forward(self, pictures: Tensor) -> Tensor:
        tokens: Tensor = self.proj(pictures)  # (B, dim, 14, 14)
        return tokens.flatten(2).transpose(1, 2)


class Attention(nn.Module):
    """Multi-head attention; `attend` is all that a method has to replace."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.scale = self.head_dim**-0.5
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q, k, v (B, heads, tokens, d) to the output of the same shape."""
        return scaled_dot_product_attention(q, k, v)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, dim = x.shape
        qkv = self.qkv(x).reshape(batch, tokens, 3, self.num_heads, self.head_dim)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # (B, heads, tokens, d)
        output = self.attend(q, k, v).transpose(1, 2).reshape(batch, tokens, dim)
        projected: Tensor = self.proj(output)
        return projected


class Mlp(nn.Module):
    """Two layers, token by token."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, 4 * dim)
        self.fc2 = nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        projected: Tensor = self.fc2(gelu(self.fc1(x)))
        return projected


class Block(nn.Module):
    """Attention and a perceptron, each after its norm and beside a residual path."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.attn = Attention(dim, num_heads)
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = Mlp(dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        lifted: Tensor = x + self.mlp(self.norm2(x))
        return lifted


class EmbeddedViT(nn.Module):
    """A class token and 14x14 patches through eight blocks; names and weights are laid out as timm's."""

    def __init__(self, dim: int = 96, depth: int = 8, num_heads: int = 3) -> None:
        super().__init__()
        self.num_prefix_tokens = 1
        self.num_classes = CLASS_COUNT
        self.patch_embed = PatchEmbed(dim)
        self.cls_token = nn.Parameter(0.02 * torch.randn(1, 1, dim))
        self.pos_embed = nn.Parameter(_positions(dim))
        self.blocks = nn.Sequential(*(Block(dim, num_heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.head = nn.Linear(dim, CLASS_COUNT)
        self.apply(_initialise)

    def forward(self, pictures: Tensor) -> Tensor:
        """Class scores (B, 10) of preprocessed pictures (B, 3, 112, 112)."""
        if pictures.dim() != 4 or pictures.shape[1:] != (3, IMAGE_SIZE, IMAGE_SIZE):
            raise ValueError(
                f"pictures have shape {tuple(pictures.shape)}; pass (B, 3, {IMAGE_SIZE}, "
                f"{IMAGE_SIZE}) as `preprocess` returns them"
            )
        spatial = self.patch_embed(pictures)
        x = (
            torch.cat((self.cls_token.expand(spatial.shape[0], -1, -1), spatial), 1)
            + self.pos_embed
        )
        x = self.norm(self.blocks(x))
        scores: Tensor = self.head(x[:, 0])
        return scores


def _positions(dim: int) -> Tensor:
    """(1, 1 + 196, dim): waves along rows and columns, from which learning starts; 0 for the class.

    Started from noise, the model spends most of its training on finding out which patches touch.
    """
    frequency = 100.0 ** -torch.linspace(0, 1, dim // 4)
    place = torch.cartesian_prod(*(torch.arange(side) for side in GRID_SIZE))
    angle = (place.unsqueeze(-1) * frequency).flatten(1)
    return torch.cat((torch.zeros(1, dim), torch.cat((angle.sin(), angle.cos()), 1))).unsqueeze(0)


def _initialise(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Conv2d)) and module.bias is not None:
        outputs, inputs = module.weight.shape[0], module.weight[0].numel()
        bound = math.sqrt(6.0 / (inputs + outputs))
        nn.init.uniform_(module.weight, -bound, bound)
        nn.init.zeros_(module.bias)


def preprocess(pixels: Tensor | NDArray[np.uint8]) -> Tensor:
    """8-bit pictures (B, 112, 112, 3) as the model takes them: (B, 3, 112, 112), float32."""
    tensor = torch.from_numpy(pixels) if isinstance(pixels, np.ndarray) else pixels
    if not isinstance(tensor, Tensor) or tensor.dtype != torch.uint8:
        received = tensor.dtype if isinstance(tensor, Tensor) else type(pixels).__name__
        raise TypeError(f"pixels are {received}; pass 8-bit pictures, uint8")
    if tensor.dim() != 4 or tensor.shape[1:] != (IMAGE_SIZE, IMAGE_SIZE, 3):
        raise ValueError(
            f"pixels have shape {tuple(tensor.shape)}; pass (B, {IMAGE_SIZE}, {IMAGE_SIZE}, 3)"
        )
    return (tensor.permute(0, 3, 1, 2).float() / 255.0 - MEAN) / STD


def load(weights: str | os.PathLike[str] | None = None) -> EmbeddedViT:
    """The model in eval mode with the shipped weights, or with those of a file."""
    model = EmbeddedViT()
    load_weights(model, WEIGHTS if weights is None else weights)
    return model.eval()


def save(model: EmbeddedViT, path: str | Path, metadata: Mapping[str, str]) -> None:
    """Write the weights in half precision; the file appears whole or not at all."""
    from safetensors.torch import save as to_bytes

    state = {name: tensor.half().cpu() for name, tensor in model.state_dict().items()}
    # One entry, as safetensors writes several in no fixed order, and equal weights make equal files.
    made = {"recipe": json.dumps(dict(metadata), sort_keys=True)}
    write_atomic(path, to_bytes(state, metadata=made))
