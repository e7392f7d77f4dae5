"""Models from the Hugging Face hub or its local cache, and instructions if neither has them."""

import json
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlparse

from torch import nn

from bmfa.models.preprocessing import Preprocessing
from bmfa.models.weights import check_binary
from bmfa.packages import load_package


def create_timm(timm: Any, architecture: str, options: dict[str, Any]) -> nn.Module:
    """Create a timm model with its published weights."""
    cfg = timm.get_pretrained_cfg(architecture)
    repository = cfg.hf_hub_id if cfg is not None else None
    if not repository:
        raise ValueError(
            f"timm publishes no weights for {architecture} on the hub; pass weights=FILE"
        )
    file = "model.safetensors"
    hub = load_package("huggingface_hub")
    try:
        path = hub.hf_hub_download(repository, file, local_files_only=not is_reachable())
    except OSError as error:
        raise FileNotFoundError(
            f"the weights of timm:{architecture} are not in the local cache and cannot be downloaded "
            f"({type(error).__name__}); on a machine with a network download "
            f"https://huggingface.co/{repository}/resolve/main/{file}, copy it to this machine, "
            f"and pass weights='PATH/{file}' (--weights PATH/{file})"
        ) from None
    model: nn.Module = timm.create_model(
        architecture, pretrained=True, pretrained_cfg_overlay={"file": path}, **options
    )
    return model


def transformers_config(source: str) -> Any:
    """Return the configuration of a folder or of a name on the hub."""
    transformers = load_package("transformers")
    folder = Path(source)
    is_path = folder.is_dir() or folder.is_absolute() or source.startswith(".")
    if is_path and not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f"{source} has no config.json; pass a folder with config.json and model.safetensors"
        )
    try:
        return transformers.AutoConfig.from_pretrained(source, **_loading_options(source))
    except OSError as error:
        _missing_transformers(source, error)


def transformers_class(config: Any) -> Any:
    """Return the classifier class that the configuration names, or the base model of its family."""
    transformers = load_package("transformers")
    names = [name for name in config.architectures or () if "ForImageClassification" in name]
    if names:
        return getattr(transformers, names[0])
    return transformers.AutoModel._model_mapping[type(config)]


def create_transformers(kind: Any, source: str) -> nn.Module:
    """Load a transformers model with its weights."""
    from safetensors import SafetensorError

    for file in sorted(Path(source).glob("*.safetensors")) if Path(source).is_dir() else ():
        check_binary(file)
    try:
        with _progress_bars_on_terminals_only():
            model: nn.Module = kind.from_pretrained(source, **_loading_options(source))
    except OSError as error:
        _missing_transformers(source, error)
    except SafetensorError as error:
        raise ValueError(
            f"the weights of {source} are damaged ({error}); download them again, or pass weights=FILE"
        ) from None
    return model


@contextmanager
def _progress_bars_on_terminals_only() -> Iterator[None]:
    """Disable transformers' progress bars in pipes and files, unless the environment sets them."""
    logging = load_package("transformers.utils.logging")
    configured = "HF_HUB_DISABLE_PROGRESS_BARS" in os.environ
    if sys.stderr.isatty() or configured or not logging.is_progress_bar_enabled():
        yield
        return
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()


def transformers_preprocessing(source: str, config: Any) -> Preprocessing:
    """Read preprocessor_config.json, or without one the image size of the configuration."""
    cached_file = load_package("transformers.utils").cached_file
    try:
        path = cached_file(source, "preprocessor_config.json", local_files_only=_is_local(source))
        return Preprocessing.of_transformers(json.loads(Path(path).read_text(encoding="utf-8")))
    except OSError:
        side = getattr(config, "vision_config", config).image_size
        size = (side, side) if isinstance(side, int) else (side[0], side[1])
        return Preprocessing(size)


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


def _loading_options(source: str) -> dict[str, bool]:
    """Never run code from the hub, and use local files alone if the hub is not reachable."""
    return {"local_files_only": _is_local(source), "trust_remote_code": False}


def _is_local(source: str) -> bool:
    return Path(source).is_dir() or not is_reachable()


def _missing_transformers(source: str, error: OSError) -> NoReturn:
    if Path(source).is_dir():
        raise FileNotFoundError(
            f"{source} does not contain a complete model: {str(error).splitlines()[0]}; "
            "put model.safetensors beside config.json, or pass weights=FILE"
        ) from None
    folder = source.rpartition("/")[2]
    raise FileNotFoundError(
        f"{source} is not in the local cache and cannot be downloaded ({type(error).__name__}); "
        "on a machine with a network download config.json, preprocessor_config.json and "
        f"model.safetensors from https://huggingface.co/{source}/tree/main into one folder, copy it to "
        f"this machine, and pass it: hf:PATH/{folder}"
    ) from None
