"""Weights from a file: safetensors, or a pickle of tensors and nothing else."""

import os
import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

# Where training scripts keep the weights inside a checkpoint.
_WRAPPERS = ("model", "state_dict", "model_state", "teacher")
# Bytes that no text holds, and that all files of weights begin with.
_CONTROL = frozenset({*range(9), *range(14, 32)})
_ACCEPTED = "pass a safetensors file, or a state dict that torch.save wrote"


def read_state_dict(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Read the weights of a model.

    Args:
        path: a safetensors file, or a pickle of tensors that `torch.save` wrote.

    Returns:
        The tensors by name, on the CPU.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file holds anything but tensors, or is damaged.
    """
    file = Path(path)
    if not file.is_file():
        kind = "a folder" if file.is_dir() else "no file"
        raise FileNotFoundError(f"weights {file} is {kind}; {_ACCEPTED}")
    check_binary(file)
    if file.suffix == ".safetensors":
        return _read_safetensors(file)
    try:
        with warnings.catch_warnings():
            # Torch warns of pickles of other makers; what it cannot read raises all the same.
            warnings.simplefilter("ignore")
            content = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"{file} is refused: it is no file of plain tensors ({reason}); "
            "save model.state_dict() alone, or as safetensors"
        ) from None
    except Exception as error:  # fed with anything else, torch raises whatever it stumbles over
        raise ValueError(
            f"{file} is no readable state-dict file: {error or type(error).__name__}"
        ) from None
    return _tensors(content, file)


def load_weights(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Copy a file's tensors into the model, in the model's dtype; every key must fit."""
    found, wanted = read_state_dict(path), model.state_dict()
    missing = [key for key in wanted if key not in found]
    unexpected = [key for key in found if key not in wanted]
    if missing or unexpected:
        raise ValueError(
            f"{path} does not fit {type(model).__name__}: {_first('missing', missing)}; "
            f"{_first('unexpected', unexpected)}; pass weights of the same model"
        )
    for key, tensor in wanted.items():
        if tensor.shape != found[key].shape:
            raise ValueError(
                f"{path} does not fit {type(model).__name__}: {key} is "
                f"{tuple(found[key].shape)}, the model's is {tuple(tensor.shape)}; "
                "pass weights of the same model"
            )
    model.load_state_dict(found)


def check_binary(file: Path) -> None:
    """Refuse an empty file, and text: a web page, or a pointer that stands for the file itself."""
    with file.open("rb") as content:
        start = content.read(256)
    if not start:
        raise ValueError(f"{file} is empty; {_ACCEPTED}")
    if _CONTROL.isdisjoint(start):
        line = start.decode(errors="replace").strip().partition("\n")[0][:40]
        raise ValueError(f"{file} is a text file that begins with {line!r}; {_ACCEPTED}")


def _read_safetensors(file: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return dict(load_file(file))
    except SafetensorError as error:
        raise ValueError(f"{file} is no readable safetensors file ({error}); {_ACCEPTED}") from None


def _tensors(content: Any, file: Path) -> dict[str, Tensor]:
    for name in _WRAPPERS:
        if isinstance(content, Mapping) and isinstance(content.get(name), Mapping):
            content = content[name]
    if not isinstance(content, Mapping) or not content:
        raise ValueError(
            f"{file} holds a {type(content).__name__}; pass a file with tensors by name"
        )
    other = next((key for key, value in content.items() if not isinstance(value, Tensor)), None)
    if other is not None:
        raise ValueError(f"{file} holds {other!r}, which is no tensor; save a state dict alone")
    return dict(content)


def _first(what: str, keys: list[str]) -> str:
    if not keys:
        return f"none {what}"
    return f"{len(keys)} {what}, first {keys[0]}"
