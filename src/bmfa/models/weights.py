"""Read the weights of a model from a file: safetensors, or a pickle that contains only tensors."""

import os
import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path

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
    found, expected = read_state_dict(path), model.state_dict()
    missing = [key for key in expected if key not in found]
    unexpected = [key for key in found if key not in expected]
    wrong = [key for key in expected if key in found and found[key].shape != expected[key].shape]
    if not missing and not unexpected and not wrong:
        model.load_state_dict(found)
        return
    problem = f"{_summary('missing', missing)}; {_summary('unexpected', unexpected)}"
    if wrong:
        given, own = (tuple(state[wrong[0]].shape) for state in (found, expected))
        problem += f"; {wrong[0]} is {given}, the model's is {own}"
    raise ValueError(
        f"{path} does not fit {type(model).__name__}: {problem}; pass weights of the same model"
    )


def check_binary(file: Path) -> None:
    """Raise ValueError for empty files and for text, such as a web page or a Git LFS pointer."""
    with file.open("rb") as content:
        start = content.read(256)
    if not start:
        raise ValueError(f"{file} is empty; {_ACCEPTED}")
    if _CONTROL.isdisjoint(start):
        line = start.decode(errors="replace").strip().partition("\n")[0][:40]
        raise ValueError(f"{file} is a text file that begins with {line!r}; {_ACCEPTED}")


def _summary(what: str, keys: list[str]) -> str:
    return f"{len(keys)} {what}, first {keys[0]}" if keys else f"none {what}"
