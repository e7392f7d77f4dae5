"""Models by name, with their own preprocessing and with weights from a file or the hub."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from inspect import signature
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from bmfa.models.preprocessing import Preprocessing

ACCEPTED = (
    "embedded, timm:NAME (timm:deit_tiny_patch16_224), hf:NAME (hf:facebook/deit-tiny-patch16-224), "
    "or a folder as transformers saves it"
)

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
    """A model by name, its weights from a local file where given and else from the hub.

    Names are `embedded`, `timm:NAME`, `hf:NAME` and folders that transformers saved. A file of
    weights is safetensors, or a state dict of tensors alone, with the model's own key names. The
    other arguments change the model's own preprocessing.
    """
    loaded = _load(name, weights, img_size is not None)
    preprocess = loaded.preprocess.override(
        img_size=img_size, crop_pct=crop_pct, interpolation=interpolation, mean=mean, std=std
    )
    loaded.model.eval()
    return replace(loaded, preprocess=preprocess)


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
    from bmfa.data.figures import CLASSES
    from bmfa.models import embedded

    side, mean, std = embedded.IMAGE_SIZE, embedded.MEAN, embedded.STD
    preprocess = Preprocessing((side, side), 1.0, mean=(mean,) * 3, std=(std,) * 3)
    return LoadedModel("embedded", embedded.load(weights), preprocess, tuple(CLASSES))


def _load_timm(
    name: str, architecture: str, weights: str | os.PathLike[str] | None, any_size: bool
) -> LoadedModel:
    from bmfa.data import classes
    from bmfa.models import hub, state_dicts
    from bmfa.packages import load_package

    timm = load_package("timm")
    if not timm.is_model(architecture):
        near = ", ".join(timm.list_models(f"*{architecture.partition('_')[0]}*")[:5])
        raise ValueError(f"timm has no model {architecture!r}; pass one of its names, e.g. {near}")
    options = {"dynamic_img_size": True} if any_size else {}
    if weights is None:
        model = hub.create_timm(timm, architecture, options)
    else:
        model = timm.create_model(architecture, **options)
        state_dicts.load_weights(model, weights)
    settings = load_package("timm.data").resolve_data_config({}, model=model)
    names = classes.imagenet_names() if model.num_classes == 1000 else None
    return LoadedModel(name, model, Preprocessing.of_timm(settings), names)


def _load_transformers(
    name: str, source: str, weights: str | os.PathLike[str] | None, any_size: bool
) -> LoadedModel:
    from bmfa.models import hub, state_dicts

    config = hub.transformers_config(source)
    kind = hub.transformers_class(config)
    if weights is None:
        model = hub.create_transformers(kind, source)
    else:
        model = kind._from_config(config)
        state_dicts.load_weights(model, weights)
    labels: dict[int, Any] = config.id2label if hasattr(model, "classifier") else {}
    names = tuple(str(labels[index]) for index in sorted(labels)) or None
    resizes = any_size and _INTERPOLATE in signature(model.forward).parameters
    options = {_INTERPOLATE: True} if resizes else {}
    return LoadedModel(name, model, hub.transformers_preprocessing(source, config), names, options)
