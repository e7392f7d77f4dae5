"""Models from the Hugging Face hub or its local cache, and what to say without a network."""

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

_WAY_OUT = "on a machine with a network"


def create_timm(timm: Any, architecture: str, options: dict[str, Any]) -> nn.Module:
    """A timm model with its published weights."""
    cfg = timm.get_pretrained_cfg(architecture)
    repository = cfg.hf_hub_id if cfg is not None else None
    if not repository:
        raise ValueError(
            f"timm publishes no weights for {architecture} on the hub; pass weights=FILE"
        )
    file = "model.safetensors"
    hub = load_package("huggingface_hub")
    try:
        path = hub.hf_hub_download(repository, file, local_files_only=not reachable())
    except OSError as error:
        _missing_timm(architecture, repository, file, error)
    model: nn.Module = timm.create_model(
        architecture, pretrained=True, pretrained_cfg_overlay={"file": path}, **options
    )
    return model


def transformers_config(source: str) -> Any:
    """The configuration of a folder or a name on the hub."""
    transformers = load_package("transformers")
    folder = Path(source)
    a_path = folder.is_dir() or folder.is_absolute() or source.startswith(".")
    if a_path and not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f"{source} has no config.json; pass a folder with config.json and model.safetensors"
        )
    try:
        return transformers.AutoConfig.from_pretrained(source, **_access(source))
    except OSError as error:
        _missing_transformers(source, error)


def transformers_class(config: Any) -> Any:
    """The classifier that the configuration names, or the bare model of its family."""
    transformers = load_package("transformers")
    names = [name for name in config.architectures or () if "ForImageClassification" in name]
    if names:
        return getattr(transformers, names[0])
    return transformers.AutoModel._model_mapping[type(config)]


def create_transformers(kind: Any, source: str) -> nn.Module:
    """A transformers model with its published weights."""
    from safetensors import SafetensorError

    for file in sorted(Path(source).glob("*.safetensors")) if Path(source).is_dir() else ():
        check_binary(file)
    try:
        with _bars_on_terminals_alone():
            model: nn.Module = kind.from_pretrained(source, **_access(source))
    except OSError as error:
        _missing_transformers(source, error)
    except SafetensorError as error:
        raise ValueError(
            f"the weights of {source} are damaged ({error}); fetch them again, or pass weights=FILE"
        ) from None
    return model


@contextmanager
def _bars_on_terminals_alone() -> Iterator[None]:
    """Keep transformers' progress bars out of pipes and files, unless the environment asks for them."""
    logging = load_package("transformers.utils.logging")
    asked_for = "HF_HUB_DISABLE_PROGRESS_BARS" in os.environ
    if sys.stderr.isatty() or asked_for or not logging.is_progress_bar_enabled():
        yield
        return
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()


def transformers_preprocessing(source: str, config: Any) -> Preprocessing:
    """From preprocessor_config.json where there is one, else the configuration's picture size."""
    cached = load_package("transformers.utils").cached_file
    try:
        path = cached(source, "preprocessor_config.json", local_files_only=_is_local(source))
        return Preprocessing.of_transformers(json.loads(Path(path).read_text(encoding="utf-8")))
    except OSError:
        vision = getattr(config, "vision_config", config)
        side = vision.image_size
        size = (side, side) if isinstance(side, int) else (side[0], side[1])
        return Preprocessing(size)


def reachable() -> bool:
    """Whether the hub's name resolves: without it the hub is asked again for most of a minute."""
    if any(name.lower().endswith("_proxy") for name in os.environ):
        return True
    host = urlparse(os.environ.get("HF_ENDPOINT", "https://huggingface.co")).hostname
    try:
        socket.getaddrinfo(host, 443)
    except OSError:
        return False
    return True


def _access(source: str) -> dict[str, bool]:
    """Code from the hub is never run, and a hub that cannot be reached not asked."""
    return {"local_files_only": _is_local(source), "trust_remote_code": False}


def _is_local(source: str) -> bool:
    return Path(source).is_dir() or not reachable()


def _missing_timm(architecture: str, repository: str, file: str, error: OSError) -> NoReturn:
    raise FileNotFoundError(
        f"the weights of timm:{architecture} are neither in the local cache nor can they be fetched "
        f"({type(error).__name__}); {_WAY_OUT} download "
        f"https://huggingface.co/{repository}/resolve/main/{file}, put it anywhere here, "
        f"and pass weights='PATH/{file}' (--weights PATH/{file})"
    ) from None


def _missing_transformers(source: str, error: OSError) -> NoReturn:
    if Path(source).is_dir():
        raise FileNotFoundError(
            f"{source} lacks what a model needs: {str(error).splitlines()[0]}; "
            "put model.safetensors beside config.json, or pass weights=FILE"
        ) from None
    folder = source.rpartition("/")[2]
    raise FileNotFoundError(
        f"{source} is neither in the local cache nor can it be fetched ({type(error).__name__}); "
        f"{_WAY_OUT} download config.json, preprocessor_config.json and model.safetensors from "
        f"https://huggingface.co/{source}/tree/main into one folder here, and pass that folder: "
        f"hf:PATH/{folder}"
    ) from None
