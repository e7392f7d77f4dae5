"""The documentation of the public surface: complete, and its examples run."""

import doctest
import inspect
import re
from collections.abc import Callable
from functools import cached_property
from importlib import import_module
from types import ModuleType

import torch

import bmfa
from bmfa.quantiles import quantile
from bmfa.records import without_folders

MODULES = ("energy", "bounds", "rules", "merging", "models")
CLASSES = ("Plan", "Tree", "Screened")
# Methods of public classes that only other parts of the library call.
INTERNAL = {
    *("Tree.mask_of_heads", "Tree.level_splits", "Tree.level_leaves", "Tree.leaf_nodes"),
}
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def is_ours(value: object) -> bool:
    return getattr(value, "__module__", "").partition(".")[0] == "bmfa"


def members(module: ModuleType) -> dict[str, object]:
    """Public functions and classes of a module: those in `__all__`, or else defined in it."""
    own = [name for name, value in vars(module).items() if value.__class__ is not ModuleType]
    own = [
        name for name in own if getattr(getattr(module, name), "__module__", "") == module.__name__
    ]
    names = getattr(module, "__all__", [name for name in own if not name.startswith("_")])
    values = {name: getattr(module, name) for name in names}
    return {name: value for name, value in values.items() if callable(value) and is_ours(value)}


def surface() -> dict[str, object]:
    """Every public function, class, method and property by its name."""
    found = {name: value for name, value in members(bmfa).items() if type(value) is not ModuleType}
    for module in MODULES:
        found |= {f"{module}.{n}": v for n, v in members(import_module(f"bmfa.{module}")).items()}
    for owner in CLASSES:
        for name, value in vars(getattr(bmfa, owner)).items():
            if isinstance(value, cached_property):
                value = property(value.func)
            method = inspect.isfunction(value) or isinstance(value, (classmethod, property))
            if method and not name.startswith("_") and f"{owner}.{name}" not in INTERNAL:
                found[f"{owner}.{name}"] = value
    return found


def own_parameters(value: object) -> list[str]:
    if isinstance(value, property):
        return []
    call = value.__func__ if isinstance(value, classmethod) else value
    assert isinstance(call, Callable)
    names = inspect.signature(call).parameters
    return [name for name in names if name not in ("self", "cls") and not name.startswith("_")]


def returns(value: object) -> bool:
    """True for functions and methods with a result; classes and properties describe themselves."""
    if isinstance(value, (property, type)):
        return False
    call = value.__func__ if isinstance(value, classmethod) else value
    return inspect.signature(call).return_annotation not in (None, "None", inspect.Signature.empty)


def missing_sections(value: object) -> list[str]:
    text = inspect.getdoc(value) or ""
    wanted = {
        # A class that users do not make themselves lists its attributes instead.
        "Args:": bool(own_parameters(value)) and "Attributes:" not in text,
        "Returns:": returns(value),
        "Example:": not (isinstance(value, property) and len(text.splitlines()) == 1),
    }
    found = [section for section, needed in wanted.items() if needed and section not in text]
    if "Example:" in text and ">>>" not in text:
        found.append(">>>")
    arguments = text.partition("Args:")[2].partition("\n\n")[0]
    for name in own_parameters(value) if "Args:" in text else []:
        if not re.search(rf"(^|[\s,]){re.escape(name)}(,[^:]*)?:", arguments):
            found.append(f"argument {name}")
    return found


def test_public_names_are_documented_and_their_examples_run():
    """With all of `Grid`, and functions of other modules that users read about."""
    values = surface()
    missing = {name: missing_sections(value) for name, value in values.items()}
    assert {name: sections for name, sections in missing.items() if sections} == {}
    grid = ("z_order", "partition")
    values |= {f"Grid.{name}": getattr(bmfa.Grid, name) for name in grid}
    values |= {"quantile": quantile, "without_folders": without_folders}
    finder, report, seen = doctest.DocTestFinder(recurse=False), [], set()
    for name, value in values.items():
        documented = value.fget if isinstance(value, property) else value
        module = inspect.getmodule(documented)
        if id(documented) not in seen and module is not None:
            seen.add(id(documented))
            for example in finder.find(documented, name, module=module, globs=dict(vars(module))):
                torch.manual_seed(0)
                torch.set_printoptions(profile="default")
                doctest.DocTestRunner(optionflags=OPTIONS).run(example, out=report.append)
    assert len(seen) > 100
    assert not report, "".join(report)
