"""Read the weights of a model from a file: safetensors, or a pickle that contains only tensors."""

import os
import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

# Keys under which training scripts store the weights in a checkpoint.
_WRAPPERS = ("model", "state_dict", "model_state", "teacher")
# Control characters: text has none, and the first bytes of every weights file have some.
_CONTROL = frozenset({*range(9), *range(14, 32)})
_ACCEPTED = "pass a safetensors file, or a state dict that torch.save wrote"


def read_state_dict(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Read a state dict.

    Args:
        path: A safetensors file, or a pickle of tensors that `torch.save` wrote.

    Returns:
        The tensors by name, on the CPU.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file contains anything but tensors, or is damaged.
    """
    file = Path(path)
    if not file.is_file():
        problem = "is a folder" if file.is_dir() else "does not exist"
        raise FileNotFoundError(f"weights {file} {problem}; {_ACCEPTED}")
    check_binary(file)
    if file.suffix == ".safetensors":
        return _read_safetensors(file)
    try:
        with warnings.catch_warnings():
            # torch warns about pickles of other programs; what it cannot read raises anyway.
            warnings.simplefilter("ignore")
            content = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"{file} is refused: it contains more than tensors ({reason}); "
            "save model.state_dict() alone, or as safetensors"
        ) from None
    except Exception as error:  # on other content torch raises errors of any type
        raise ValueError(
            f"{file} is not a readable state dict: {error or type(error).__name__}; {_ACCEPTED}"
        ) from None
    return _tensors(content, file)


def load_weights(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Copy the tensors of a file into the model, in the model's dtype.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file is not a state dict, or its keys or shapes do not fit the model.
    """
    found, expected = read_state_dict(path), model.state_dict()
    missing = [key for key in expected if key not in found]
    unexpected = [key for key in found if key not in expected]
    if missing or unexpected:
        raise ValueError(
            f"{path} does not fit {type(model).__name__}: {_summary('missing', missing)}; "
            f"{_summary('unexpected', unexpected)}; pass weights of the same model"
        )
    for key, tensor in expected.items():
        if tensor.shape != found[key].shape:
            raise ValueError(
                f"{path} does not fit {type(model).__name__}: {key} is "
                f"{tuple(found[key].shape)}, the model's is {tuple(tensor.shape)}; "
                "pass weights of the same model"
            )
    model.load_state_dict(found)


def check_binary(file: Path) -> None:
    """Raise ValueError for empty files and for text, such as a web page or a Git LFS pointer."""
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
        raise ValueError(
            f"{file} is not a readable safetensors file ({error}); {_ACCEPTED}"
        ) from None


def _tensors(content: Any, file: Path) -> dict[str, Tensor]:
    for name in _WRAPPERS:
        if isinstance(content, Mapping) and isinstance(content.get(name), Mapping):
            content = content[name]
    if not isinstance(content, Mapping) or not content:
        raise ValueError(
            f"{file} contains a {type(content).__name__}; pass a file with a dict of tensors"
        )
    wrong = next((key for key, value in content.items() if not isinstance(value, Tensor)), None)
    if wrong is not None:
        raise ValueError(
            f"{file} contains {wrong!r}, which is not a tensor; save only a state dict"
        )
    return dict(content)


def _summary(what: str, keys: list[str]) -> str:
    if not keys:
        return f"none {what}"
    return f"{len(keys)} {what}, first {keys[0]}"
