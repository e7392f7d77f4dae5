"""Optional packages of the models, loaded on first use."""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

# torchvision declares these in a compiled library that does not load beside a torch without CUDA.
_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_USERS_OF_TORCHVISION = ("timm", "torchvision", "transformers")
_declared: list[Any] = []


def load_package(module: str) -> Any:
    """Import a module of the `models` extra, or say how to install it."""
    package = module.partition(".")[0]
    try:
        if package in _USERS_OF_TORCHVISION:
            cure_torchvision()
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        raise ModuleNotFoundError(
            f"models need the package {'pillow' if package == 'PIL' else package}; "
            "run: pip install 'bmfa[models]'",
            name=error.name,
        ) from None


def cure_torchvision() -> None:
    """Make `import torchvision` succeed beside a torch without CUDA.

    timm imports torchvision, and so do the vision models of transformers where it is installed. Its
    wheel is built against CUDA and then fails for want of two operators, which models never call.
    """
    if torch.version.cuda is not None or find_spec("torchvision") is None:
        return
    try:
        import_module("torchvision")
    except RuntimeError as error:
        if _declared or "operator torchvision::nms does not exist" not in str(error):
            raise
        library: Any = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
        for schema in _SCHEMAS:
            library.define(schema)
        _declared.append(library)  # the declarations live as long as the library
        import_module("torchvision")
