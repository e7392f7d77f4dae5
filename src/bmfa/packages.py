"""Optional packages: imported on first use, with a message that names the extra to install."""

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

# Import name of a package, its name on the package index, and the smallest extra that installs it.
PACKAGES = {
    "jinja2": ("jinja2", "report"),
    "matplotlib": ("matplotlib", "report"),
    "PIL": ("pillow", "images"),
    "pycocotools": ("pycocotools", "data"),
    "huggingface_hub": ("huggingface_hub", "models"),
    "timm": ("timm", "models"),
    "torchvision": ("torchvision", "models"),
    "transformers": ("transformers", "models"),
    "triton": ("triton", "triton"),
}


def load_package(module: str) -> Any:
    """Import a module of an optional package.

    Args:
        module: Full name of the module, such as `PIL.Image`.

    Returns:
        The module.

    Raises:
        ModuleNotFoundError: If the package is not installed; the message names the extra.
    """
    package = module.partition(".")[0]
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing != package or package not in PACKAGES:
            raise
        raise _missing([package], PACKAGES[package][1]) from None


def is_installed(package: str) -> bool:
    """True if a package can be imported; it is not imported."""
    return find_spec(package) is not None


def require_packages(packages: Sequence[str], extra: str) -> None:
    """Raise unless all packages are installed; they are not imported.

    Args:
        packages: Import names, such as `PIL`.
        extra: Extra of bmfa that installs all of them.

    Raises:
        ModuleNotFoundError: If packages are missing; the message names them and the extra.
    """
    missing = [package for package in packages if not is_installed(package)]
    if missing:
        raise _missing(missing, extra)


def _missing(packages: Sequence[str], extra: str) -> ModuleNotFoundError:
    names = [PACKAGES[package][0] for package in packages]
    return ModuleNotFoundError(
        f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} not installed; "
        f"run: pip install {' '.join(names)}, or in a checkout of bmfa: pip install '.[{extra}]'",
        name=packages[0],
    )
