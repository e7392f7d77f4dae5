"""Load models by name, with their own preprocessing and weights from a file or the hub."""

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from inspect import signature
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from torch import Tensor, nn

from bmfa.data.classification import imagenet_names
from bmfa.data.drawn.badges import BADGE_CLASSES
from bmfa.data.probes import multiples
from bmfa.models import embedded
from bmfa.models.families import find_vision_transformer
from bmfa.models.measures import logits
from bmfa.models.preprocessing import Interpolation, Preprocessing
from bmfa.models.weights import check_binary, load_weights
from bmfa.packages import load_package

ACCEPTED = (
    "embedded, timm:NAME (timm:deit_tiny_patch16_224), hf:NAME (hf:facebook/deit-tiny-patch16-224), "
    "or a folder saved by transformers"
)

_EXAMPLES = ["deit_tiny_patch16_224", "vit_base_patch16_224", "vit_small_patch14_dinov2"]
# The argument with which models of transformers accept images of another size.
_INTERPOLATE = "interpolate_pos_encoding"
_EMBEDDED_PREPROCESSING = Preprocessing(
    (embedded.IMAGE_SIZE,) * 2, 1.0, mean=(embedded.MEAN,) * 3, std=(embedded.STD,) * 3
)


@dataclass(frozen=True, eq=False, repr=False)
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

    def __repr__(self) -> str:
        """Show what the model is, without its modules."""
        classes = "" if self.classes is None else f", {len(self.classes)} classes"
        return (
            f"LoadedModel({self.name!r}, {type(self.model).__name__}{classes}, {self.preprocess})"
        )

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
        return logits(self.model, pixels, self.options)


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
    source, _, rest = name.partition(":")
    any_size = img_size is not None
    if name == "embedded":
        model = embedded.load(weights)
        loaded = LoadedModel(name, model, _EMBEDDED_PREPROCESSING, BADGE_CLASSES)
    elif source == "timm" and rest:
        loaded = _load_timm(rest, weights, any_size=any_size)
    elif (source == "hf" and rest) or Path(name).is_dir():
        loaded = _load_transformers(rest if source == "hf" else name, weights, any_size=any_size)
    else:
        raise ValueError(f"model {name!r} is unknown; pass {ACCEPTED}")
    preprocess = loaded.preprocess.override(
        img_size=img_size, crop_pct=crop_pct, interpolation=interpolation, mean=mean, std=std
    )
    if img_size is not None:
        check_img_size(name, loaded.model, preprocess.size)
    loaded.model.eval()
    return replace(loaded, name=name, preprocess=preprocess)


def find_preprocessing(
    model: LoadedModel | nn.Module, img_size: int | tuple[int, int] | None = None
) -> Preprocessing | None:
    """Return the preprocessing for images of a folder, None if it is not known.

    Raises:
        ValueError: If the model does not accept `img_size`.
    """
    if isinstance(model, LoadedModel):
        module, preprocess = model.model, model.preprocess
    elif isinstance(model, embedded.EmbeddedViT):
        module, preprocess = model, _EMBEDDED_PREPROCESSING
    elif hasattr(model, "pretrained_cfg"):
        settings = load_package("timm.data").resolve_data_config({}, model=model)
        module, preprocess = model, Preprocessing.from_timm(settings)
    else:
        return None
    if img_size is not None:
        preprocess = preprocess.override(img_size=img_size)
        check_img_size(type(module).__name__, module, preprocess.size)
    return preprocess


def check_img_size(name: str, model: nn.Module, size: tuple[int, int]) -> None:
    """Raise ValueError unless the model accepts images of this height and width.

    Models of unsupported classes are not checked; `patch` and `reduce` refuse them.
    """
    try:
        projection: Any = find_vision_transformer(model).projection
    except TypeError:
        return
    strides: Any = getattr(projection, "stride", None) or getattr(projection, "patch_size", (1, 1))
    for side, patch_size in zip(size, strides[-2:], strict=True):
        if side % patch_size:
            given = str(size[0]) if size[0] == size[1] else f"{size[0]}x{size[1]}"
            raise ValueError(
                f"img_size is {given}; {name} has patches of {patch_size} pixels, so pass "
                f"{multiples(side, patch_size)}"
            )


def check_timm_name(timm: Any, architecture: str) -> None:
    """Raise ValueError with similar names unless timm has this model."""
    model, _, tag = architecture.partition(".")
    tagged = timm.list_pretrained(f"{model}.*") if tag and timm.is_model(model) else []
    if architecture in tagged or (not tagged and timm.is_model(architecture)):
        return
    names = tagged or timm.list_models()
    similar = get_close_matches(architecture, names, n=5, cutoff=0.5) or tagged or _EXAMPLES
    raise ValueError(
        f"timm has no model {architecture!r}; pass one of its names, such as {', '.join(similar[:5])} "
        "(timm.list_models() lists all)"
    )


def _load_timm(name: str, weights: str | os.PathLike[str] | None, *, any_size: bool) -> LoadedModel:
    timm = load_package("timm")
    check_timm_name(timm, name)
    options: dict[str, Any] = {"dynamic_img_size": True} if any_size else {}
    if weights is None:
        repository = getattr(timm.get_pretrained_cfg(name), "hf_hub_id", None)
        if not repository:
            raise ValueError(f"timm publishes no weights for {name} on the hub; pass weights=FILE")
        with _explained(f"timm:{name}", repository, "model.safetensors"):
            file = load_package("huggingface_hub").hf_hub_download(
                repository, "model.safetensors", local_files_only=not is_reachable()
            )
        options |= {"pretrained": True, "pretrained_cfg_overlay": {"file": file}}
    try:
        model = timm.create_model(name, **options)
    except TypeError as error:
        if not any_size:
            raise
        raise ValueError(
            f"timm:{name} takes images of one size: {error}; leave img_size out, or make the model with "
            "timm.create_model and pass it to bmfa.patch"
        ) from None
    if weights is not None:
        load_weights(model, weights)
    classes = imagenet_names() if model.num_classes == 1000 else None
    return LoadedModel(name, model, find_preprocessing(model) or Preprocessing(), classes)


def _load_transformers(
    source: str, weights: str | os.PathLike[str] | None, *, any_size: bool
) -> LoadedModel:
    transformers, folder = load_package("transformers"), Path(source)
    is_path = folder.is_dir() or folder.is_absolute() or source.startswith(".")
    if is_path and not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f"{source} has no config.json; pass a folder with config.json and model.safetensors"
        )
    for file in sorted(folder.glob("*.safetensors")) if is_path and weights is None else ():
        check_binary(file)
    # Code from the hub never runs, and an unreachable hub is not asked.
    options = {"local_files_only": is_path or not is_reachable(), "trust_remote_code": False}
    files = "config.json, preprocessor_config.json and model.safetensors"
    with _explained(f"hf:{source}", source, files):
        config = transformers.AutoConfig.from_pretrained(source, **options)
        classifies = any("ForImageClassification" in name for name in config.architectures or ())
        kind = "AutoModelForImageClassification" if classifies else "AutoModel"
        make = getattr(transformers, kind)
        model = make.from_config(config) if weights else make.from_pretrained(source, **options)
    if weights is not None:
        load_weights(model, weights)
    try:
        processor = transformers.AutoImageProcessor.from_pretrained(source, **options)
        preprocess = Preprocessing.from_transformers(processor.to_dict())
    except OSError:  # the folder has none
        side = getattr(config, "vision_config", config).image_size
        preprocess = Preprocessing((side, side) if isinstance(side, int) else tuple(side))
    labels: dict[int, Any] = config.id2label if classifies else {}
    classes = tuple(str(labels[index]) for index in sorted(labels)) or None
    interpolates = any_size and _INTERPOLATE in signature(model.forward).parameters
    calls = {_INTERPOLATE: True} if interpolates else {}
    return LoadedModel(source, model, preprocess, classes, calls)


@contextmanager
def _explained(model: str, repository: str, files: str) -> Iterator[None]:
    """Raise a FileNotFoundError that says what to download if files are missing."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        message = (
            f"the files of {model} are not in the local cache and cannot be downloaded "
            f"({type(error).__name__}); on a machine with a network download {files} from "
            f"https://huggingface.co/{repository}/tree/main, copy them to this machine, and pass the "
            "weights with weights='PATH/model.safetensors' (--weights), or the folder as hf:PATH"
        )
        if Path(repository).is_dir():
            message = (
                f"{repository} does not contain a complete model: {str(error).splitlines()[0]}; "
                "put a whole model.safetensors beside config.json, or pass weights=FILE"
            )
        raise FileNotFoundError(message) from None


def is_reachable() -> bool:
    """Return True if the name of the hub resolves; if not, its client would retry for a minute."""
    if any(name.lower().endswith("_proxy") for name in os.environ):
        return True
    host = urlparse(os.environ.get("HF_ENDPOINT", "https://huggingface.co")).hostname
    try:
        socket.getaddrinfo(host, 443)
    except OSError:
        return False
    return True
