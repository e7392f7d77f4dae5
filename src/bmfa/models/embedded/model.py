"""The embedded model: a pre-norm Vision Transformer for the embedded pictures."""

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
MEAN, STD = 0.5, 0.25  # of every channel, for colours in [0, 1]
WEIGHTS = Path(__file__).with_name("embedded.safetensors")


class PatchEmbed(nn.Module):
    """Converts images (B, 3, 112, 112) to tokens (B, 196, dim) in raster order."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.grid_size = GRID_SIZE
        self.proj = nn.Conv2d(3, dim, PATCH_SIZE, PATCH_SIZE)

    def forward(self, pictures: Tensor) -> Tensor:
        tokens: Tensor = self.proj(pictures)  # (B, dim, 14, 14)
        return tokens.flatten(2).transpose(1, 2)


class Attention(nn.Module):
    """Multi-head self-attention."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.scale = self.head_dim**-0.5
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, dim = x.shape
        qkv = self.qkv(x).reshape(batch, tokens, 3, self.num_heads, self.head_dim)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # (B, heads, tokens, d)
        output = scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, tokens, dim)
        projected: Tensor = self.proj(output)
        return projected


class Mlp(nn.Module):
    """Two linear layers with a GELU between them."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, 4 * dim)
        self.fc2 = nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        projected: Tensor = self.fc2(gelu(self.fc1(x)))
        return projected


class Block(nn.Module):
    """Attention and MLP, each after a norm and with a residual connection."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.attn = Attention(dim, num_heads)
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = Mlp(dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        output: Tensor = x + self.mlp(self.norm2(x))
        return output


class EmbeddedViT(nn.Module):
    """A class token and 14x14 patches through eight blocks, with the parameter names of timm.

    Args:
        dim: The width of the tokens, a multiple of 4 and of `num_heads`.
        depth: The number of blocks.
        num_heads: The number of attention heads.

    Example:
        >>> EmbeddedViT(dim=24, depth=2)(torch.zeros(1, 3, 112, 112)).shape
        torch.Size([1, 10])
    """

    def __init__(self, dim: int = 96, depth: int = 8, num_heads: int = 3) -> None:
        super().__init__()
        self.num_prefix_tokens = 1
        self.patch_embed = PatchEmbed(dim)
        self.cls_token = nn.Parameter(0.02 * torch.randn(1, 1, dim))
        self.pos_embed = nn.Parameter(_initial_positions(dim))
        self.blocks = nn.Sequential(*(Block(dim, num_heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.head = nn.Linear(dim, CLASS_COUNT)
        self.apply(_initialise)

    def forward(self, pictures: Tensor) -> Tensor:
        """Compute logits (B, 10) of preprocessed images (B, 3, 112, 112)."""
        if pictures.dim() != 4 or pictures.shape[1:] != (3, IMAGE_SIZE, IMAGE_SIZE):
            raise ValueError(
                f"pictures have shape {tuple(pictures.shape)}; pass (B, 3, {IMAGE_SIZE}, "
                f"{IMAGE_SIZE}) as `preprocess` returns them"
            )
        spatial = self.patch_embed(pictures)
        class_token = self.cls_token.expand(spatial.shape[0], -1, -1)
        x = torch.cat((class_token, spatial), 1) + self.pos_embed  # (B, 1 + 196, dim)
        x = self.norm(self.blocks(x))
        logits: Tensor = self.head(x[:, 0])
        return logits


def _initial_positions(dim: int) -> Tensor:
    """Return (1, 1 + 196, dim) sines and cosines of row and column, 0 for the class token.

    With random initial positions, most of the training goes into learning which patches are neighbours.
    """
    frequency = 100.0 ** -torch.linspace(0, 1, dim // 4)
    position = torch.cartesian_prod(*(torch.arange(side) for side in GRID_SIZE))  # (196, 2)
    angle = (position.unsqueeze(-1) * frequency).flatten(1)
    return torch.cat((torch.zeros(1, dim), torch.cat((angle.sin(), angle.cos()), 1))).unsqueeze(0)


def _initialise(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Conv2d)) and module.bias is not None:
        outputs, inputs = module.weight.shape[0], module.weight[0].numel()
        bound = math.sqrt(6.0 / (inputs + outputs))
        nn.init.uniform_(module.weight, -bound, bound)
        nn.init.zeros_(module.bias)


def preprocess(pixels: Tensor | NDArray[np.uint8]) -> Tensor:
    """Convert 8-bit images to the input of the model.

    Args:
        pixels: (B, 112, 112, 3) uint8 images.

    Returns:
        (B, 3, 112, 112) float32 tensor.

    Raises:
        TypeError: If the images are not uint8.
        ValueError: If they have another shape.

    Example:
        >>> preprocess(torch.zeros(2, 112, 112, 3, dtype=torch.uint8)).shape
        torch.Size([2, 3, 112, 112])
    """
    tensor = torch.from_numpy(pixels) if isinstance(pixels, np.ndarray) else pixels
    if not isinstance(tensor, Tensor) or tensor.dtype != torch.uint8:
        received = tensor.dtype if isinstance(tensor, Tensor) else type(pixels).__name__
        raise TypeError(f"pixels are {received}; pass 8-bit images, uint8")
    if tensor.dim() != 4 or tensor.shape[1:] != (IMAGE_SIZE, IMAGE_SIZE, 3):
        raise ValueError(
            f"pixels have shape {tuple(tensor.shape)}; pass (B, {IMAGE_SIZE}, {IMAGE_SIZE}, 3)"
        )
    return (tensor.permute(0, 3, 1, 2).float() / 255.0 - MEAN) / STD


def load(weights: str | os.PathLike[str] | None = None) -> EmbeddedViT:
    """Load the model in evaluation mode.

    Args:
        weights: A safetensors file or a state dict; None loads the weights that are shipped.

    Returns:
        The model.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file does not fit the model.

    Example:
        >>> load().training
        False
    """
    model = EmbeddedViT()
    load_weights(model, WEIGHTS if weights is None else weights)
    return model.eval()


def save(model: EmbeddedViT, path: str | Path, metadata: Mapping[str, str]) -> None:
    """Write the weights to a safetensors file in half precision.

    Args:
        model: The model.
        path: The file, which is replaced atomically.
        metadata: Settings of the training, stored in the file.
    """
    from safetensors.torch import save as to_bytes

    state = {name: tensor.half().cpu() for name, tensor in model.state_dict().items()}
    # One entry: safetensors writes several in no fixed order, and equal weights must give equal files.
    recipe = {"recipe": json.dumps(dict(metadata), sort_keys=True)}
    write_atomic(path, to_bytes(state, metadata=recipe))
