"""Read the weights of a model from a file: safetensors, or a pickle that contains only tensors."""

import os
import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from textwrap import shorten

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
    try:
        if file.suffix == ".safetensors":
            from safetensors.torch import load_file

            return dict(load_file(file))
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
        kind = "safetensors file" if file.suffix == ".safetensors" else "state dict"
        raise ValueError(f"{file} is not a readable {kind}: {error!r}; {_ACCEPTED}") from None
    for name in _WRAPPERS:
        if isinstance(content, Mapping) and isinstance(content.get(name), Mapping):
            content = content[name]
    tensors = dict(content) if isinstance(content, Mapping) else {"the file": content}
    wrong = [name for name, value in tensors.items() if not isinstance(value, Tensor)]
    if wrong or not tensors:
        held = f"{wrong[0]!r}, which is not a tensor" if wrong else "no tensors"
        raise ValueError(f"{file} contains {held}; save only a state dict")
    return tensors


def load_weights(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Copy the tensors of a file into the model, in the model's dtype.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file is not a state dict, or its keys or shapes do not fit the model.
    """
    try:
        model.load_state_dict(read_state_dict(path))
    except RuntimeError as error:
        problems = (line.strip(" \t.") for line in str(error).splitlines()[1:4])
        listed = "; ".join(shorten(line, 160, placeholder=" ...") for line in problems)
        raise ValueError(
            f"{path} does not fit {type(model).__name__}: {listed}; pass weights of the same model"
        ) from None


def check_binary(file: Path) -> None:
    """Raise ValueError for empty files and for text, such as a web page or a Git LFS pointer."""
    with file.open("rb") as content:
        start = content.read(256)
    if not start:
        raise ValueError(f"{file} is empty; {_ACCEPTED}")
    if _CONTROL.isdisjoint(start):
        line = start.decode(errors="replace").strip().partition("\n")[0][:40]
        raise ValueError(f"{file} is a text file that begins with {line!r}; {_ACCEPTED}")
