"""The embedded model: a pre-norm Vision Transformer with a class head and a mask head."""

import math
import os
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import (
    avg_pool2d,
    conv2d,
    gelu,
    interpolate,
    pad,
    pixel_shuffle,
    scaled_dot_product_attention,
)

from bmfa.data.drawn.badges import BADGE_CLASSES, BADGE_IMAGE_SIZE, SHAPES, TEXTURES, TICK_COUNTS
from bmfa.models.weights import load_weights

IMAGE_SIZE = BADGE_IMAGE_SIZE  # pixels, the size it is made for; it accepts multiples of PATCH_SIZE
PATCH_SIZE = 8
GRID_SIZE = (IMAGE_SIZE // PATCH_SIZE, IMAGE_SIZE // PATCH_SIZE)
CLASS_COUNT = len(BADGE_CLASSES)
# Outputs of the class head: scores of shapes, textures and numbers of ticks, whose sums are the logits.
FACTORS = (len(SHAPES), len(TEXTURES), len(TICK_COUNTS))
MASK_CELLS = 4  # cells of the mask along each side of a token, each of 2x2 pixels
MEAN, STD = 0.5, 0.25  # of every channel, for colours in [0, 1]
WEIGHTS = Path(__file__).with_name("embedded.safetensors")
_CONTEXT_SIZE = 2 * PATCH_SIZE  # side of the neighbourhood of a patch, in pixels of the own size
_CONTEXT_CHANNELS = 112


class PatchEmbed(nn.Module):
    """Converts images (B, 3, H, W) to tokens (B, H/8 * W/8, dim) in raster order.

    A token is the sum of two parts: `proj` reads the 8x8 pixels of its patch, and `context` the 16x16
    pixels around the centre of the patch as they are in an image of 128 pixels. A larger image is
    averaged down for `context`, so its tokens see as much of the scene as those of 16x16 tokens, at
    more places.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.grid_size = GRID_SIZE
        self.proj = nn.Conv2d(3, dim, PATCH_SIZE, PATCH_SIZE)
        self.context = nn.Conv2d(3, _CONTEXT_CHANNELS, _CONTEXT_SIZE, PATCH_SIZE)
        self.mix = nn.Linear(_CONTEXT_CHANNELS, dim)

    def forward(self, images: Tensor) -> Tensor:
        detail: Tensor = self.proj(images)  # (B, dim, rows, columns)
        # A window of 16 * ratio pixels, centred at a patch of 8, begins 8 * ratio - 4 pixels before it.
        ratio = _context_ratio(*detail.shape[-2:])
        margin = (_CONTEXT_SIZE * ratio - PATCH_SIZE) // 2
        padded = pad(images, (margin,) * 4, mode="replicate")
        averaged = avg_pool2d(padded, ratio) if ratio > 1 else padded
        context = conv2d(
            averaged, self.context.weight, self.context.bias, stride=PATCH_SIZE // ratio
        )
        mixed: Tensor = self.mix(gelu(context.flatten(2).transpose(1, 2)))  # (B, N, dim)
        return detail.flatten(2).transpose(1, 2) + mixed


def _context_ratio(rows: int, columns: int) -> int:
    """Return 1, 2 or 4: the pixels along a side that are averaged into one of the own size."""
    octaves = 0.5 * math.log2(rows * columns / (GRID_SIZE[0] * GRID_SIZE[1]))
    return int(2 ** min(max(round(octaves), 0), 2))


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
    """A class token and patches of 8 pixels through eight blocks, with the parameter names of timm.

    Its own size is 128 pixels, 16x16 tokens; it accepts other multiples of 8, and was trained at 16x16,
    32x32 and 64x64 tokens.

    Args:
        dim: The width of the tokens, a multiple of 4 and of `num_heads`.
        depth: The number of blocks.
        num_heads: The number of attention heads.

    Example:
        >>> EmbeddedViT(dim=24, depth=2)(torch.zeros(1, 3, 128, 128)).shape
        torch.Size([1, 24])
    """

    def __init__(self, dim: int = 96, depth: int = 8, num_heads: int = 3) -> None:
        super().__init__()
        self.num_prefix_tokens = 1
        self.patch_embed = PatchEmbed(dim)
        self.cls_token = nn.Parameter(0.02 * torch.randn(1, 1, dim))
        self.pos_embed = nn.Linear(dim, dim, bias=False)
        self.blocks = nn.Sequential(*(Block(dim, num_heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.head = nn.Linear(dim, sum(FACTORS))
        self.mask_head = nn.Linear(dim, MASK_CELLS**2)
        self.apply(_initialise)
        nn.init.eye_(self.pos_embed.weight)
        with torch.no_grad():  # outputs near the prior: all classes alike, and a mask of 5 %
            self.head.weight.mul_(0.1)
            self.mask_head.weight.mul_(0.1)
            self.mask_head.bias.fill_(-3.0)

    def forward(self, images: Tensor) -> Tensor:
        """Compute class logits (B, 24) of preprocessed images (B, 3, H, W)."""
        return self.class_logits(self.forward_features(images))

    def class_logits(self, features: Tensor) -> Tensor:
        """Compute class logits (B, 24) from features (B, 1 + N, dim).

        A class is a shape, a texture and a number of ticks; its logit is the sum of their scores, so
        that every image teaches its shape to all classes of that shape.
        """
        shape, texture, ticks = self.head(features[:, 0]).split(FACTORS, -1)
        scores = shape[:, :, None, None] + texture[:, None, :, None] + ticks[:, None, None, :]
        logits: Tensor = scores.flatten(1)
        return logits

    def forward_features(self, images: Tensor) -> Tensor:
        """Compute the tokens after the last norm, (B, 1 + N, dim), the class token first."""
        rows, columns = _check_images(images)
        spatial = self.patch_embed(images)  # (B, N, dim)
        positions = encode_positions(rows, columns, spatial.shape[-1], spatial.device)
        spatial = spatial + self.pos_embed(positions.to(self.pos_embed.weight.dtype))
        class_token = self.cls_token.expand(spatial.shape[0], -1, -1)
        x = torch.cat((class_token.to(spatial.dtype), spatial), 1)  # (B, 1 + N, dim)
        features: Tensor = self.norm(self.blocks(x))
        return features

    def forward_dense(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Compute class logits and the logits of the mask of the object.

        Args:
            images: (B, 3, H, W) images as `preprocess` returns them.

        Returns:
            (B, 24) class logits and (B, H, W) mask logits, positive inside the object.

        Raises:
            ValueError: If a side is not a multiple of 8, or the tokens were reduced and are not on the
                full grid.

        Example:
            >>> logits, masks = EmbeddedViT(dim=24, depth=2).forward_dense(torch.zeros(1, 3, 128, 128))
            >>> masks.shape
            torch.Size([1, 128, 128])
        """
        features = self.forward_features(images)
        cells = self.mask_cells(features, *_check_images(images))
        masks = interpolate(cells[:, None], images.shape[-2:], mode="bilinear")[:, 0]
        return self.class_logits(features), masks

    def mask_cells(self, features: Tensor, rows: int, columns: int) -> Tensor:
        """Compute mask logits (B, 4 rows, 4 columns) from features (B, 1 + rows * columns, dim)."""
        if features.shape[1] != 1 + rows * columns:
            raise ValueError(
                f"the features have {features.shape[1] - 1} spatial tokens and the grid "
                f"{rows * columns}; reduce the model with dense=True to compute masks"
            )
        return to_cells(self.mask_head(features[:, 1:]), rows, columns)


def to_cells(values: Tensor, rows: int, columns: int) -> Tensor:
    """Arrange 16 values of each token, (B, rows * columns, 16), as (B, 4 rows, 4 columns)."""
    on_grid = values.transpose(1, 2).reshape(len(values), MASK_CELLS**2, rows, columns)
    return pixel_shuffle(on_grid, MASK_CELLS)[:, 0]


def _check_images(images: Tensor) -> tuple[int, int]:
    """Return the rows and columns of tokens; raise ValueError for other shapes."""
    shape = tuple(images.shape)
    if len(shape) != 4 or shape[1] != 3 or any(side % PATCH_SIZE or not side for side in shape[2:]):
        raise ValueError(
            f"images have shape {shape}; pass (B, 3, height, width) with sides that are multiples of "
            f"{PATCH_SIZE}, ({IMAGE_SIZE}, {IMAGE_SIZE}) for its own size"
        )
    return shape[2] // PATCH_SIZE, shape[3] // PATCH_SIZE


def encode_positions(
    rows: int, columns: int, dim: int, device: torch.device | None = None
) -> Tensor:
    """Compute sines and cosines of the positions of tokens.

    Positions are those of the token centres on a grid of 16x16, whatever the grid is, so a finer grid
    samples the same waves at more places.

    Args:
        rows: Rows of tokens.
        columns: Columns of tokens.
        dim: Width of the encoding, a multiple of 4.
        device: Device of the result.

    Returns:
        (rows * columns, dim) float32 tensor.
    """
    frequency = 100.0 ** -torch.linspace(0, 1, dim // 4, device=device)
    axes = [
        (torch.arange(count, device=device) + 0.5) * (own / count) - 0.5
        for count, own in zip((rows, columns), GRID_SIZE, strict=True)
    ]
    row, column = (axis[:, None] * frequency for axis in axes)  # (count, dim / 4)
    angle = torch.cat(
        (row[:, None].expand(-1, columns, -1), column[None].expand(rows, -1, -1)), -1
    ).flatten(0, 1)
    return torch.cat((angle.sin(), angle.cos()), 1)


def _initialise(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Conv2d)) and module.bias is not None:
        outputs, inputs = module.weight.shape[0], module.weight[0].numel()
        bound = math.sqrt(6.0 / (inputs + outputs))
        nn.init.uniform_(module.weight, -bound, bound)
        nn.init.zeros_(module.bias)


def preprocess(pixels: Tensor | NDArray[np.uint8]) -> Tensor:
    """Convert 8-bit images to the input of the model.

    Args:
        pixels: (B, H, W, 3) uint8 images, sides multiples of 8.

    Returns:
        (B, 3, H, W) float32 tensor.

    Raises:
        TypeError: If the images are not uint8.
        ValueError: If they have another shape.

    Example:
        >>> preprocess(torch.zeros(2, 128, 128, 3, dtype=torch.uint8)).shape
        torch.Size([2, 3, 128, 128])
    """
    tensor = torch.as_tensor(pixels)
    if tensor.dtype != torch.uint8:
        raise TypeError(f"pixels are {tensor.dtype}; pass 8-bit images, uint8")
    if tensor.dim() != 4 or tensor.shape[3] != 3:
        raise ValueError(f"pixels have shape {tuple(tensor.shape)}; pass (B, height, width, 3)")
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
