"""Models by name, with their own preprocessing and with weights from a file or the hub."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from inspect import signature
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from bmfa.models.preprocessing import Preprocessing
from bmfa.models.weights import load_weights

ACCEPTED = (
    "embedded, timm:NAME (timm:deit_tiny_patch16_224), hf:NAME (hf:facebook/deit-tiny-patch16-224), "
    "or a folder as transformers saves it"
)

_EXAMPLES = ["deit_tiny_patch16_224", "vit_base_patch16_224", "vit_small_patch14_dinov2"]
# How transformers is asked for pictures of another size than the model was built for.
_INTERPOLATE = "interpolate_pos_encoding"


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model in evaluation mode, what prepares its pictures, and the names of its outputs."""

    name: str
    model: nn.Module
    preprocess: Preprocessing
    classes: tuple[str, ...] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)  # what every call of the model passes

    def logits(self, pixels: Tensor) -> Tensor:
        """(B, classes) of (B, 3, height, width), whatever the host wraps them in."""
        output = self.model(pixels, **self.options)
        if isinstance(output, Tensor):
            return output
        logits = getattr(output, "logits", None)
        if not isinstance(logits, Tensor):
            raise TypeError(
                f"{self.name} gives {type(output).__name__} without logits; pass a classifier"
            )
        return logits


def load_model(
    name: str,
    weights: str | os.PathLike[str] | None = None,
    *,
    img_size: int | tuple[int, int] | None = None,
    crop_pct: float | None = None,
    interpolation: str | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> LoadedModel:
    """Load a model by name, with the preprocessing it was trained with.

    Args:
        name: `embedded`, `timm:NAME`, `hf:NAME`, or a folder that transformers saved.
        weights: safetensors file, or a state dict of tensors alone, with the model's own key names;
            None for the shipped or published weights.
        img_size: side, or (height, width), of the model's input in pixels, a multiple of its patches;
            position embeddings are interpolated. None for the model's own size.
        crop_pct: share of the shorter side of a picture that is kept, in (0, 1].
        interpolation: nearest, bilinear, bicubic or lanczos.
        mean: mean of each channel, of colours in [0, 1].
        std: standard deviation of each channel.

    Returns:
        The model in evaluation mode, its preprocessing and the names of its classes.

    Raises:
        ValueError: the name, the weights or a size does not fit.
        FileNotFoundError: weights are neither in a file, nor in the local cache, nor can be fetched.
    """
    loaded = _load(name, weights, img_size is not None)
    preprocess = loaded.preprocess.override(
        img_size=img_size, crop_pct=crop_pct, interpolation=interpolation, mean=mean, std=std
    )
    if img_size is not None:
        check_img_size(name, loaded.model, preprocess.size)
    loaded.model.eval()
    return replace(loaded, preprocess=preprocess)


def check_img_size(name: str, model: nn.Module, size: tuple[int, int]) -> None:
    """Raise ValueError unless the model takes pictures of this height and width.

    Models that cannot be screened are not checked; they are refused elsewhere.
    """
    from bmfa.data.probes import multiples
    from bmfa.models.embedded import IMAGE_SIZE, EmbeddedViT
    from bmfa.models.hosts import find_host

    if isinstance(model, EmbeddedViT):
        if size != (IMAGE_SIZE, IMAGE_SIZE):
            raise ValueError(
                f"img_size is {_in_words(size)}; {name} takes {IMAGE_SIZE} alone, leave it out"
            )
        return
    try:
        projection: Any = find_host(model).projection
    except TypeError:
        return
    for side, patch in zip(size, projection.stride, strict=True):
        if side % patch:
            raise ValueError(
                f"img_size is {_in_words(size)}; {name} cuts pictures into patches of {patch} pixels, "
                f"so pass {multiples(side, patch)}"
            )


def _in_words(size: tuple[int, int]) -> str:
    return str(size[0]) if size[0] == size[1] else f"{size[0]}x{size[1]}"


def check_timm_name(timm: Any, architecture: str) -> None:
    """Raise ValueError, with names that are close, unless timm has this model."""
    model, _, tag = architecture.partition(".")
    known = timm.list_pretrained(f"{model}.*") if tag and timm.is_model(model) else None
    if known is None and timm.is_model(architecture):
        return
    if known is not None and architecture in known:
        return
    names = known if known is not None else timm.list_models()
    near = get_close_matches(architecture, names, n=5, cutoff=0.5) or known or _EXAMPLES
    raise ValueError(
        f"timm has no model {architecture!r}; pass one of its names, such as {', '.join(near[:5])} "
        "(timm.list_models() lists all)"
    )


def _load(name: str, weights: str | os.PathLike[str] | None, any_size: bool) -> LoadedModel:
    source, _, rest = name.partition(":")
    if name == "embedded":
        return _load_embedded(weights)
    if source == "timm" and rest:
        return _load_timm(name, rest, weights, any_size)
    if source == "hf" and rest:
        return _load_transformers(name, rest, weights, any_size)
    if Path(name).is_dir():
        return _load_transformers(name, name, weights, any_size)
    raise ValueError(f"model {name!r} is unknown; pass {ACCEPTED}")


def _load_embedded(weights: str | os.PathLike[str] | None) -> LoadedModel:
    from bmfa.data.drawn.figures import CLASSES
    from bmfa.models import embedded

    side, mean, std = embedded.IMAGE_SIZE, embedded.MEAN, embedded.STD
    preprocess = Preprocessing((side, side), 1.0, mean=(mean,) * 3, std=(std,) * 3)
    return LoadedModel("embedded", embedded.load(weights), preprocess, tuple(CLASSES))


def _load_timm(
    name: str, architecture: str, weights: str | os.PathLike[str] | None, any_size: bool
) -> LoadedModel:
    from bmfa.data import classes
    from bmfa.models import hub
    from bmfa.packages import load_package

    timm = load_package("timm")
    check_timm_name(timm, architecture)
    options = {"dynamic_img_size": True} if any_size else {}
    if weights is None:
        model = hub.create_timm(timm, architecture, options)
    else:
        model = timm.create_model(architecture, **options)
        load_weights(model, weights)
    settings = load_package("timm.data").resolve_data_config({}, model=model)
    names = classes.imagenet_names() if model.num_classes == 1000 else None
    return LoadedModel(name, model, Preprocessing.of_timm(settings), names)


def _load_transformers(
    name: str, source: str, weights: str | os.PathLike[str] | None, any_size: bool
) -> LoadedModel:
    from bmfa.models import hub

    config = hub.transformers_config(source)
    kind = hub.transformers_class(config)
    if weights is None:
        model = hub.create_transformers(kind, source)
    else:
        model = kind._from_config(config)
        load_weights(model, weights)
    labels: dict[int, Any] = config.id2label if hasattr(model, "classifier") else {}
    names = tuple(str(labels[index]) for index in sorted(labels)) or None
    resizes = any_size and _INTERPOLATE in signature(model.forward).parameters
    options = {_INTERPOLATE: True} if resizes else {}
    return LoadedModel(name, model, hub.transformers_preprocessing(source, config), names, options)
