"""Models and pictures at any resolution: for benchmarks, whose weights may be random."""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import interpolate

from bmfa.data.drawn.scenes import draw_scene
from bmfa.data.pictures import PictureFiles
from bmfa.models import LoadedModel, Preprocessing, load_model
from bmfa.models.embedded import EmbeddedViT
from bmfa.models.loading import check_img_size, check_timm_name
from bmfa.packages import load_package

Picture = NDArray[np.uint8]
RANDOM, SHIPPED = "random", "shipped"


class AnySize(nn.Module):
    """The embedded model for pictures of any size: its position embeddings are interpolated."""

    def __init__(self, tower: EmbeddedViT) -> None:
        super().__init__()
        self.tower = tower

    def forward_features(self, pictures: Tensor) -> Tensor:
        """(B, 1 + N, dim), normalised."""
        tower = self.tower
        maps: Tensor = tower.patch_embed.proj(pictures)  # (B, dim, height, width)
        own = tower.patch_embed.grid_size
        places = tower.pos_embed[:, 1:].transpose(1, 2).reshape(1, -1, *own)
        spatial = maps + interpolate(places, maps.shape[-2:], mode="bicubic")
        first = (tower.cls_token + tower.pos_embed[:, :1]).expand(len(maps), -1, -1)
        tokens = torch.cat((first, spatial.flatten(2).transpose(1, 2)), 1)
        features: Tensor = tower.norm(tower.blocks(tokens))
        return features

    def forward(self, pictures: Tensor) -> Tensor:
        scores: Tensor = self.tower.head(self.forward_features(pictures)[:, 0])
        return scores


def load_long(
    name: str,
    weights: str | os.PathLike[str] | None = None,
    *,
    size: int,
    head_dim: int | None = None,
    seed: int = 0,
) -> tuple[LoadedModel, str]:
    """A model for pictures of size x size, the whole of their centre square, and what its weights are.

    A timm model without a file of weights has random ones: nothing is downloaded for a benchmark. So
    has any model whose heads are asked to be `head_dim` wide.
    """
    if head_dim is not None or (name.startswith("timm:") and weights is None):
        return _random(name, size, head_dim, seed), RANDOM
    if name == "embedded":
        loaded = load_model(name, weights, crop_pct=1.0)
        tower = loaded.model
        if not isinstance(tower, EmbeddedViT):
            raise TypeError(f"the embedded model is {type(tower).__name__}")
        preprocess = loaded.preprocess.override(img_size=size)
        loaded = LoadedModel(name, AnySize(tower).eval(), preprocess)
        check_img_size(name, loaded.model, preprocess.size)
    else:
        loaded = load_model(name, weights, img_size=size, crop_pct=1.0)
        _resize(loaded.model, size)
    return loaded, SHIPPED if weights is None else os.path.basename(weights)


def _random(name: str, size: int, head_dim: int | None, seed: int) -> LoadedModel:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if name == "embedded":
            tower = EmbeddedViT(dim=3 * (head_dim or 32), num_heads=3)
            preprocess = Preprocessing((size, size), 1.0, mean=(0.5,) * 3, std=(0.25,) * 3)
            model = AnySize(tower).eval()
            check_img_size(name, model, (size, size))
            return LoadedModel(name, model, preprocess)
        if not name.startswith("timm:"):
            raise ValueError(
                f"model {name!r} has no random form; pass embedded or timm:NAME, or leave out --head-dim"
            )
        return _random_timm(name, size, head_dim)


def _random_timm(name: str, size: int, head_dim: int | None) -> LoadedModel:
    timm = load_package("timm")
    architecture = name.partition(":")[2]
    check_timm_name(timm, architecture)
    changes: dict[str, Any] = {}
    if head_dim is not None:
        heads = timm.create_model(architecture).blocks[0].attn.num_heads
        changes["embed_dim"] = heads * head_dim
    model = timm.create_model(architecture, dynamic_img_size=True, **changes).eval()
    check_img_size(name, model, (size, size))
    _resize(model, size)
    settings = load_package("timm.data").resolve_data_config({}, model=model)
    preprocess = Preprocessing.of_timm(settings).override(img_size=size, crop_pct=1.0)
    return LoadedModel(name, model, preprocess)


def _resize(model: Any, size: int) -> None:
    """Interpolate position embeddings now rather than in every call, where the host can."""
    if hasattr(model, "set_input_size"):
        model.set_input_size(img_size=(size, size))


def pictures_of(folder: str | None, count: int, seed: int = 0) -> tuple[list[Picture], list[str]]:
    """The first pictures of a folder, or embedded scenes, and their names."""
    if folder is None:
        names = [f"embedded scene {index}" for index in range(count)]
        return [draw_scene(seed, index)[0].picture.pixels for index in range(count)], names
    files = PictureFiles(folder)
    entries = list(files.entries[:count])
    if len(entries) < count:
        raise ValueError(
            f"{folder} holds {len(entries)} pictures and {count} are asked for; pass --pictures"
            f" {len(entries)}" + ("" if entries else " with a folder of jpg, png or webp")
        )
    return [files.read(entry) for entry in entries], entries


def pixels_of(loaded: LoadedModel, pictures: Sequence[Picture], device: str) -> Tensor:
    """(B, 3, size, size) on the device."""
    return loaded.preprocess.batch(pictures).to(device)
