"""Optional packages, loaded on first use."""

from importlib import import_module
from typing import Any


def load(module: str) -> Any:
    """Import a module of the `data` extra, or say how to install it."""
    package = module.partition(".")[0]
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        raise ModuleNotFoundError(
            f"pictures and annotations need the package {'pillow' if package == 'PIL' else package}; "
            "run: pip install 'bmfa[data]'",
            name=error.name,
        ) from None
