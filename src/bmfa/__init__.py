"""Measure, bound and repair what attention loses when it is summarised coarsely."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bmfa import bounds as bounds
    from bmfa import energy as energy
    from bmfa import merging as merging
    from bmfa import models as models
    from bmfa import rules as rules
    from bmfa.attention.api import screened_attention as screened_attention
    from bmfa.attention.certify import certify as certify
    from bmfa.attention.result import Screened as Screened
    from bmfa.energy import free_energy as free_energy
    from bmfa.energy import gap as gap
    from bmfa.energy import refinement_score as refinement_score
    from bmfa.grid import Grid as Grid
    from bmfa.models import Plan as Plan
    from bmfa.models import estimate as estimate
    from bmfa.models import load_model as load_model
    from bmfa.models import monitor as monitor
    from bmfa.models import patch as patch
    from bmfa.models import record as record
    from bmfa.models import reduce as reduce
    from bmfa.models import summary as summary
    from bmfa.models import tune as tune
    from bmfa.models import tune_reduction as tune_reduction
    from bmfa.models import unpatch as unpatch
    from bmfa.trees.build import screen as screen
    from bmfa.trees.build import screen_keys as screen_keys
    from bmfa.trees.tree import Tree as Tree

__version__ = "0.1.0"

# Public names by the module that defines them, imported on first use so that `import bmfa` is fast.
_PUBLIC = {
    "attention.api": "screened_attention",
    "attention.certify": "certify",
    "attention.result": "Screened",
    "energy": "free_energy gap refinement_score",
    "grid": "Grid",
    "models": "Plan estimate load_model monitor patch record reduce summary tune tune_reduction unpatch",
    "trees.build": "screen screen_keys",
    "trees.tree": "Tree",
}
_MODULES = {name: f"bmfa.{module}" for module, names in _PUBLIC.items() for name in names.split()}
_SUBMODULES = ("bounds", "energy", "merging", "models", "rules")
__all__ = ["__version__", *_MODULES, *_SUBMODULES]


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return import_module(f"bmfa.{name}")
    if name not in _MODULES:
        raise AttributeError(f"module 'bmfa' has no attribute {name!r}")
    globals()[name] = value = getattr(import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
