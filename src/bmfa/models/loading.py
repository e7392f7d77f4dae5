"""Load models by name, with their own preprocessing and weights from a file or the hub."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from inspect import signature
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from bmfa.data.classification import imagenet_names
from bmfa.data.drawn.badges import BADGE_CLASSES
from bmfa.data.probes import multiples
from bmfa.models import embedded, hub
from bmfa.models.families import find_vision_transformer
from bmfa.models.preprocessing import Interpolation, Preprocessing
from bmfa.models.weights import load_weights
from bmfa.packages import load_package

ACCEPTED = (
    "embedded, timm:NAME (timm:deit_tiny_patch16_224), hf:NAME (hf:facebook/deit-tiny-patch16-224), "
    "or a folder saved by transformers"
)

_EXAMPLES = ["deit_tiny_patch16_224", "vit_base_patch16_224", "vit_small_patch14_dinov2"]
# The argument with which models of transformers accept images of another size.
_INTERPOLATE = "interpolate_pos_encoding"


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model in evaluation mode, with its preprocessing and class names, as `load_model` returns it.

    Args:
        name: The name it was loaded by.
        model: The module, for `patch`, `reduce` and `record`.
        preprocess: Converts an image to the tensor that the model expects.
        classes: The names of the outputs, or None if they are unknown.
        options: Keyword arguments that every call of the model needs.

    Example:
        >>> import bmfa, numpy as np
        >>> loaded = bmfa.load_model("embedded")
        >>> image = np.zeros((128, 128, 3), np.uint8)
        >>> index = int(loaded.logits(loaded.preprocess(image)[None]).argmax())
        >>> loaded.classes[index] in loaded.classes
        True
    """

    name: str
    model: nn.Module
    preprocess: Preprocessing
    classes: tuple[str, ...] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def logits(self, pixels: Tensor) -> Tensor:
        """Compute the class scores of preprocessed images.

        Args:
            pixels: (B, 3, height, width) images as `preprocess` returns them.

        Returns:
            (B, classes) logits.

        Raises:
            TypeError: If the model is not a classifier.

        Example:
            >>> import bmfa, torch
            >>> bmfa.load_model("embedded").logits(torch.zeros(2, 3, 128, 128)).shape
            torch.Size([2, 24])
        """
        output = self.model(pixels, **self.options)
        if isinstance(output, Tensor):
            return output
        logits = getattr(output, "logits", None)
        if not isinstance(logits, Tensor):
            raise TypeError(
                f"{self.name} returns {type(output).__name__} without logits; load a classifier"
            )
        return logits


def load_model(
    name: str,
    weights: str | os.PathLike[str] | None = None,
    *,
    img_size: int | tuple[int, int] | None = None,
    crop_pct: float | None = None,
    interpolation: Interpolation | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> LoadedModel:
    """Load a model by name, with the preprocessing it was trained with.

    Args:
        name: `"embedded"`, `"timm:NAME"`, `"hf:NAME"`, or a folder saved by transformers.
        weights: A safetensors file, or a state dict that `torch.save` wrote, with the model's own key
            names. None loads the weights that are shipped or published.
        img_size: The side, or (height, width), of the input in pixels, a multiple of the patch size;
            position embeddings are interpolated. None keeps the model's own size.
        crop_pct: The fraction of the shorter side of an image that is kept, in (0, 1].
        interpolation: `"nearest"`, `"bilinear"`, `"bicubic"` or `"lanczos"`.
        mean: The mean of each channel, for colours in [0, 1].
        std: The standard deviation of each channel.

    Returns:
        The model in evaluation mode, its preprocessing and class names.

    Raises:
        ValueError: If the name is unknown, or the weights or a size do not fit the model.
        FileNotFoundError: If the weights are neither in a file nor in the local cache, and cannot be
            downloaded.
        ModuleNotFoundError: If timm or transformers is not installed.

    Example:
        >>> import bmfa
        >>> loaded = bmfa.load_model("embedded")
        >>> loaded.preprocess.size, loaded.classes[0]
        ((128, 128), 'striped triangle, 1 tick')
    """
    any_size = img_size is not None
    source, _, rest = name.partition(":")
    if name == "embedded":
        loaded = _load_embedded(weights)
    elif source == "timm" and rest:
        loaded = _load_timm(name, rest, weights, any_size)
    elif source == "hf" and rest:
        loaded = _load_transformers(name, rest, weights, any_size)
    elif Path(name).is_dir():
        loaded = _load_transformers(name, name, weights, any_size)
    else:
        raise ValueError(f"model {name!r} is unknown; pass {ACCEPTED}")
    preprocess = loaded.preprocess.override(
        img_size=img_size, crop_pct=crop_pct, interpolation=interpolation, mean=mean, std=std
    )
    if img_size is not None:
        check_img_size(name, loaded.model, preprocess.size)
    loaded.model.eval()
    return replace(loaded, preprocess=preprocess)


def check_img_size(name: str, model: nn.Module, size: tuple[int, int]) -> None:
    """Raise ValueError unless the model accepts images of this height and width.

    Models of unsupported classes are not checked; `patch` and `reduce` refuse them.
    """
    given = str(size[0]) if size[0] == size[1] else f"{size[0]}x{size[1]}"
    try:
        host = find_vision_transformer(model)
    except TypeError:
        return
    projection: Any = host.projection
    if hasattr(projection, "stride"):
        strides = projection.stride[-2:]
    else:  # the linear projection of NaFlexViT
        embeds: Any = host.tower.embeds
        strides = embeds.patch_size
    for side, patch_size in zip(size, strides, strict=True):
        if side % patch_size:
            raise ValueError(
                f"img_size is {given}; {name} has patches of {patch_size} pixels, so pass "
                f"{multiples(side, patch_size)}"
            )


def check_timm_name(timm: Any, architecture: str) -> None:
    """Raise ValueError with similar names unless timm has this model."""
    model, _, tag = architecture.partition(".")
    tagged = timm.list_pretrained(f"{model}.*") if tag and timm.is_model(model) else None
    if architecture in tagged if tagged is not None else timm.is_model(architecture):
        return
    names = timm.list_models() if tagged is None else tagged
    similar = get_close_matches(architecture, names, n=5, cutoff=0.5) or tagged or _EXAMPLES
    raise ValueError(
        f"timm has no model {architecture!r}; pass one of its names, such as {', '.join(similar[:5])} "
        "(timm.list_models() lists all)"
    )


def _load_embedded(weights: str | os.PathLike[str] | None) -> LoadedModel:
    side, mean, std = embedded.IMAGE_SIZE, embedded.MEAN, embedded.STD
    preprocess = Preprocessing((side, side), 1.0, mean=(mean,) * 3, std=(std,) * 3)
    return LoadedModel("embedded", embedded.load(weights), preprocess, BADGE_CLASSES)


def _load_timm(
    name: str, architecture: str, weights: str | os.PathLike[str] | None, any_size: bool
) -> LoadedModel:
    timm = load_package("timm")
    check_timm_name(timm, architecture)
    options = {"dynamic_img_size": True} if any_size else {}
    try:
        if weights is None:
            model = hub.create_timm(timm, architecture, options)
        else:
            model = timm.create_model(architecture, **options)
            load_weights(model, weights)
    except TypeError as error:
        if "dynamic_img_size" not in str(error):
            raise
        raise ValueError(
            f"img_size is given, and {name} takes images of one size; leave img_size out, or make the "
            "model with timm.create_model and pass it to bmfa.patch"
        ) from None
    settings = load_package("timm.data").resolve_data_config({}, model=model)
    classes = imagenet_names() if model.num_classes == 1000 else None
    return LoadedModel(name, model, Preprocessing.of_timm(settings), classes)


def _load_transformers(
    name: str, source: str, weights: str | os.PathLike[str] | None, any_size: bool
) -> LoadedModel:
    config = hub.transformers_config(source)
    kind = hub.transformers_class(config)
    if weights is None:
        model = hub.create_transformers(kind, source)
    else:
        model = kind._from_config(config)
        load_weights(model, weights)
    labels: dict[int, Any] = config.id2label if hasattr(model, "classifier") else {}
    classes = tuple(str(labels[index]) for index in sorted(labels)) or None
    interpolates = any_size and _INTERPOLATE in signature(model.forward).parameters
    options = {_INTERPOLATE: True} if interpolates else {}
    preprocess = hub.transformers_preprocessing(source, config)
    return LoadedModel(name, model, preprocess, classes, options)
