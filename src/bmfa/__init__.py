"""Measure, bound and repair what attention loses when it is summarised coarsely."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from bmfa.packages import install_finder

if TYPE_CHECKING:
    from bmfa import rules as rules
    from bmfa.attention import Screened as Screened
    from bmfa.attention import screened_attention as screened_attention
    from bmfa.energy import free_energy as free_energy
    from bmfa.energy import gap as gap
    from bmfa.energy import refinement_score as refinement_score
    from bmfa.grid import Grid as Grid
    from bmfa.models import load_model as load_model
    from bmfa.models import patch as patch
    from bmfa.models import record as record
    from bmfa.models import reduce as reduce
    from bmfa.models import unpatch as unpatch
    from bmfa.screening import screen as screen
    from bmfa.screening import screen_keys as screen_keys
    from bmfa.tree import Tree as Tree

__version__ = "0.1.0"

# Loaded on first use, so that `import bmfa` and `bmfa --help` cost nothing.
_HOMES = {
    "Grid": "grid",
    "Screened": "attention",
    "Tree": "tree",
    "free_energy": "energy",
    "gap": "energy",
    "load_model": "models",
    "patch": "models",
    "record": "models",
    "reduce": "models",
    "refinement_score": "energy",
    "rules": "",
    "screen": "screening",
    "screen_keys": "screening",
    "screened_attention": "attention",
    "unpatch": "models",
}
__all__ = ["__version__", *_HOMES]

install_finder()


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'bmfa' has no attribute {name!r}")
    home = _HOMES[name]
    value = import_module(f"bmfa.{home}" if home else f"bmfa.{name}")
    if home:
        value = getattr(value, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
