"""Inputs of the benchmarks: models and images of any size, and the q, k, v of their attention."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from bmfa.data.drawn.scenes import draw_scene
from bmfa.data.images import ImageFiles
from bmfa.grid import Grid
from bmfa.models import LoadedModel, Preprocessing, load_model
from bmfa.models.families import VisionTransformer, find_vision_transformer
from bmfa.models.loading import check_img_size, check_timm_name
from bmfa.models.replacement import Interceptor
from bmfa.packages import load_package

Pixels = NDArray[np.uint8]
QKV = tuple[Tensor, Tensor, Tensor]
# The source "random" has no model: q, k, v are normal and independent, with the heads of DeiT-Tiny.
RANDOM = "random"
RANDOM_HEADS, RANDOM_DIM, RANDOM_PATCH = 3, 64, 16
SHIPPED = "shipped"  # the weights of the embedded model


@dataclass(frozen=True, eq=False)
class RecordedInputs:
    """q, k, v of some blocks of a model, each (images, heads, prefix + N, d) in float32."""

    grid: Grid
    prefix: int
    blocks: dict[int, QKV]

    @property
    def shape(self) -> tuple[int, int, int]:
        """Images, heads and head dimension."""
        q = next(iter(self.blocks.values()))[0]
        return q.shape[0], q.shape[1], q.shape[3]


class InputSource:
    """A model and images from which q, k, v are recorded; for `RANDOM`, several draws.

    Args:
        model: Name of a model, or `RANDOM` for q, k, v drawn at random.
        weights: File of weights.
        data_dir: Folder of which the first images are taken; None for embedded scenes.
        images: Number of images.
        seed: Seed of random weights and draws.
        device: Device of the model and the tensors.

    Raises:
        ValueError: If `RANDOM` is combined with weights or images, or there are too few.
    """

    def __init__(
        self,
        model: str = "embedded",
        weights: str | None = None,
        data_dir: str | None = None,
        *,
        images: int = 1,
        seed: int = 0,
        device: str = "cpu",
    ) -> None:
        self.model, self.weights, self.seed, self.device = model, weights, seed, device
        if model == RANDOM:
            if weights is not None or data_dir is not None:
                raise ValueError("model random has no weights and no images; leave both out")
            self.names = [f"draw {index}" for index in range(images)]
            self.patch_size, self.depth, self.weights_name = RANDOM_PATCH, 1, "none"
            return
        self.images, self.names = read_images(data_dir, images, seed)
        loaded, self.weights_name = load_any_size(model, weights, size=224)
        vit = find_vision_transformer(loaded.model)
        self.patch_size, self.depth = _patch_size(vit), len(vit.attentions)

    def describe(self) -> dict[str, Any]:
        """Return what the settings of a record say about the source."""
        return {"model": self.model, "weights": self.weights_name, "images": self.names}

    def record(self, size: int, blocks: Sequence[int]) -> RecordedInputs:
        """Record q, k, v of some blocks for images of size x size pixels."""
        if self.model == RANDOM:
            return self._draw(size // RANDOM_PATCH, blocks)
        loaded, _ = load_any_size(self.model, self.weights, size=size, seed=self.seed)
        model = loaded.model.to(self.device)
        vit = find_vision_transformer(model)
        recorded: list[dict[int, QKV]] = []
        for image in self.images:
            pixels = loaded.preprocess.batch([image]).to(self.device)
            recorded.append(_record(model, loaded.options, pixels, blocks))
        side = size // _patch_size(vit)
        joined: dict[int, Any] = {
            block: tuple(map(torch.cat, zip(*(one[block] for one in recorded), strict=True)))
            for block in blocks
        }
        return RecordedInputs(Grid(side, side), vit.prefix, joined)

    def _draw(self, side: int, blocks: Sequence[int]) -> RecordedInputs:
        """Draw normal q, k, v on a side x side grid without a prefix."""
        generator = torch.Generator().manual_seed(self.seed)
        shape = (len(self.names), RANDOM_HEADS, side * side, RANDOM_DIM)
        drawn: dict[int, Any] = {
            block: tuple(torch.randn(shape, generator=generator).to(self.device) for _ in range(3))
            for block in blocks
        }
        return RecordedInputs(Grid(side, side), 0, drawn)


def check_one_grid(vit: VisionTransformer) -> None:
    """Raise a ValueError unless all layers of a model have the grid of its patches.

    Args:
        vit: The parts of the model.

    Raises:
        ValueError: If they do not, or if images of several grids share a call.
    """
    if not vit.one_grid:
        raise ValueError(
            f"{type(vit.encoder).__name__} is not supported by bmfa bench, which needs one grid of "
            "tokens in all layers; use a model such as timm:vit_base_patch16_224"
        )


def _patch_size(vit: VisionTransformer) -> int:
    check_one_grid(vit)
    projection: Any = vit.projection
    return int(projection.stride[0])


def as_projection(q: Tensor, k: Tensor, v: Tensor) -> QKV:
    """Return q, k, v as most hosts hand them over: views of one projection (B, tokens, 3, heads, d)."""
    tokens = torch.stack([x.transpose(1, 2) for x in (q, k, v)], 2)
    q, k, v = tokens.permute(2, 0, 3, 1, 4).unbind(0)
    return q, k, v


def _record(
    model: nn.Module, options: Any, pixels: Tensor, blocks: Sequence[int]
) -> dict[int, QKV]:
    """Return q, k, v of some calls of scaled_dot_product_attention, one call for each block."""
    recorded: dict[int, QKV] = {}

    def attend(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if interceptor.calls - 1 in blocks:
            recorded[interceptor.calls - 1] = (q, k, v)
        return scaled_dot_product_attention(q, k, v, *args, **kwargs)

    interceptor = Interceptor(attend)
    with torch.inference_mode(), interceptor:
        model(pixels, **options)
    if interceptor.calls <= max(blocks):
        raise ValueError(
            f"{type(model).__name__} called scaled_dot_product_attention {interceptor.calls} times, too "
            f"few for block {max(blocks)}; unset TIMM_FUSED_ATTN, or pass a model whose attention is "
            "fused"
        )
    return recorded


def load_any_size(
    name: str, weights: str | os.PathLike[str] | None = None, *, size: int, seed: int = 0
) -> tuple[LoadedModel, str]:
    """Load a model for images of size x size pixels, without a download.

    Args:
        name: Name of a model as in `load_model`.
        weights: File of weights. A timm model without one has random weights.
        size: Side of the images in pixels; they are cropped to their centre square.
        seed: Seed of random weights.

    Returns:
        The model, and a word for its weights: `"random"`, `"shipped"` or the name of the file.

    Raises:
        ValueError: If the model is unknown, or does not support the size.
    """
    if name.startswith("timm:") and weights is None:
        loaded, found = _load_random(name, size, seed), RANDOM
    else:
        loaded = load_model(name, weights, img_size=size, crop_pct=1.0)
        found = SHIPPED if weights is None else os.path.basename(weights)
    model: Any = loaded.model
    if hasattr(model, "set_input_size"):  # interpolates position embeddings once, not in every call
        model.set_input_size(img_size=(size, size))
    return loaded, found


def _load_random(name: str, size: int, seed: int) -> LoadedModel:
    timm, architecture = load_package("timm"), name.partition(":")[2]
    check_timm_name(timm, architecture)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = timm.create_model(architecture, dynamic_img_size=True).eval()
    check_img_size(name, model, (size, size))
    settings = load_package("timm.data").resolve_data_config({}, model=model)
    preprocess = Preprocessing.from_timm(settings).override(img_size=size, crop_pct=1.0)
    return LoadedModel(name, model, preprocess)


def read_images(folder: str | None, count: int, seed: int = 0) -> tuple[list[Pixels], list[str]]:
    """Return the first images of a folder, or embedded scenes, and their names.

    Raises:
        ValueError: If the folder has fewer images.
    """
    if folder is None:
        names = [f"embedded scene {index}" for index in range(count)]
        return [draw_scene(seed, index)[0].image.pixels for index in range(count)], names
    files = ImageFiles(folder)
    entries = list(files.entries[:count])
    if len(entries) < count:
        raise ValueError(
            f"{folder} holds {len(entries)} images and {count} are asked for; pass --images"
            f" {len(entries)}" + ("" if entries else " with a folder of jpg, png or webp")
        )
    return [files.read(entry) for entry in entries], entries
