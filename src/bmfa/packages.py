"""Optional packages: loaded on first use, and said to be missing before any work."""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

# Package to its name on the index and to the smallest extra of bmfa that brings it.
PACKAGES = {
    "jinja2": ("jinja2", "report"),
    "matplotlib": ("matplotlib", "report"),
    "PIL": ("pillow", "data"),
    "pycocotools": ("pycocotools", "data"),
    "huggingface_hub": ("huggingface_hub", "models"),
    "timm": ("timm", "models"),
    "torchvision": ("torchvision", "models"),
    "transformers": ("transformers", "models"),
}
# torchvision declares these in a compiled library that does not load beside a torch without CUDA.
_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_declared: list[Any] = []


def load_package(module: str) -> Any:
    """Import a module of an optional package.

    Args:
        module: full name, such as `PIL.Image`.

    Returns:
        The module.

    Raises:
        ModuleNotFoundError: the package is missing; the message says how to install it.
    """
    package = module.partition(".")[0]
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        raise _missing([package], PACKAGES[package][1]) from None


def require_packages(packages: Sequence[str], extra: str) -> None:
    """Raise unless all packages are installed; none of them is imported.

    Args:
        packages: names as they are imported, such as `PIL`.
        extra: the extra of bmfa that brings all of them.

    Raises:
        ModuleNotFoundError: with all that are missing, and how to install them.
    """
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        raise _missing(missing, extra)


def _missing(packages: Sequence[str], extra: str) -> ModuleNotFoundError:
    names = " and ".join(PACKAGES[package][0] for package in packages)
    verb = "is" if len(packages) == 1 else "are"
    return ModuleNotFoundError(
        f"{names} {verb} not installed; run: pip install 'bmfa[{extra}]'", name=packages[0]
    )


class TorchvisionFinder:
    """Makes `import torchvision` succeed beside a torch without CUDA.

    timm imports torchvision, and so do the vision models of transformers where it is installed. Its
    wheel on the index is built against CUDA, so that its library does not load beside another torch,
    and `torchvision._meta_registrations` then fails for want of two operators. They are declared
    just before that module is imported. Calling them still raises torchvision's own error.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find nothing; declare the operators where torchvision is about to register them."""
        if name == "torchvision._meta_registrations":
            _declare_operators()
        return None


def _declare_operators() -> None:
    import torch

    import_module("torchvision.extension")  # loads the library, where that works
    if torch.version.cuda is None and not hasattr(torch.ops.torchvision, "nms") and not _declared:
        library: Any = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
        for schema in _SCHEMAS:
            library.define(schema)
        _declared.append(library)  # the declarations live as long as the library


def install_finder() -> None:
    """Put the finder before those of Python, once."""
    if not any(isinstance(finder, TorchvisionFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, TorchvisionFinder())
