"""Registry of methods: the name, kind, parameter, inputs and figure mark of each, from `methods.toml`.

A method is named `NAME` or `NAME:VALUE` on the command line and in records. Rules are parsed by
`bmfa.trees.rules`, reductions by `bmfa.merging`; this module describes them and imports neither, so
that `bmfa methods` starts without torch.
"""

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Kind = Literal["summary", "rule", "reduction", "full", "bench", "historical"]
Line = Literal["solid", "dotted", "dashed", "long-dashed", "dash-dot", "dash-dot-dot"]

_REGISTRY = Path(__file__).with_name("methods.toml")
FULL = "full"
# Default methods of the experiments on score grids: the paper's six, then further rules.
DEFAULT_METHODS = (
    *("block-mean", "mean-variance", "fixed-depth:1", "fixed-depth:2", "gamma:0.005", "edge-aware"),
    *("gamma-h2:0.005", "exact-gap:0.005", "certified:0.005", "mass:0.002", "optimal:0.001"),
)
# Further rules with about as many leaves as gamma:0.005 on the probes, so that gaps are comparable.
COMPARABLE_METHODS = (
    *("gamma-h2:0.2", "exact-gap:1.2", "certified:1.3", "mass:0.0004", "optimal:0.005"),
)


@dataclass(frozen=True)
class Mark:
    """Marker and line of a method in figures.

    Args:
        colour: Name of a colour role of `bmfa.evidence.page.plots`, with a light and a dark value.
        marker: Marker in Matplotlib's notation.
        line: Line style.
        width: Line width in points.
        hollow: True if the marker is filled with the background.
        size: Marker size in points.
    """

    colour: str
    marker: str
    line: Line = "solid"
    width: float = 1.4
    hollow: bool = False
    size: float = 6.0


@dataclass(frozen=True)
class Method:
    """One method of the experiments.

    Args:
        name: Name on the command line and in records, without its value.
        kind: `"summary"` (a closed form on a score grid), `"rule"` (a tree), `"reduction"` (merges
            or prunes tokens), `"full"` (the unchanged model), `"bench"` (a setting or a peer of
            `bmfa bench attention`) or `"historical"` (in recorded runs alone).
        title: Short title for panels of figures.
        description: What the method does, as a phrase.
        reads: The inputs its decisions depend on.
        parameter: Meaning of the value after the colon; empty if the method takes none.
        mark: Its mark in figures; None for the neutral mark of methods without one.
        marks_by_value: Marks of particular values that differ from `mark`.

    Example:
        >>> METHODS["tome"].kind, METHODS["tome"].reads
        ('reduction', 'keys')
    """

    name: str
    kind: Kind
    title: str
    description: str
    reads: str
    parameter: str = ""
    mark: Mark | None = None
    marks_by_value: Mapping[str, Mark] = field(default_factory=dict, hash=False)

    @property
    def usage(self) -> str:
        """The name as it is passed on the command line, for example `gamma:VALUE`."""
        return f"{self.name}:VALUE" if self.parameter else self.name


# What a method of each kind is.
KINDS: Mapping[Kind, str] = {
    "full": "the model as it is",
    "summary": "one number for a block, in closed form",
    "rule": "a tree for each query and head",
    "reduction": "fewer tokens after a block",
    "bench": "settings and peers of bmfa bench",
    "historical": "in recorded runs alone; the package no longer computes it",
}


def _read_methods() -> dict[str, Method]:
    """Read the registry; a mark there is a table of the fields of `Mark`."""
    methods = {}
    for name, entry in tomllib.loads(_REGISTRY.read_text("utf-8")).items():
        marks = {key: Mark(**mark) for key, mark in entry.pop("marks_by_value", {}).items()}
        mark = Mark(**entry.pop("mark")) if "mark" in entry else None
        methods[name] = Method(name, **entry, mark=mark, marks_by_value=marks)
    return methods


METHODS: Mapping[str, Method] = _read_methods()

_LOOKAHEAD = re.compile(r"gamma-h\d+")


def family(name: str) -> str:
    """Return a method name without its value.

    Example:
        >>> family("gamma:0.005")
        'gamma'
    """
    return name.partition(":")[0]


def find_method(name: str) -> Method | None:
    """Return the registered method of a name with or without its value.

    Args:
        name: A name of the command line or of a record, such as `"tome:8"`. `gamma-hN` for any N
            is the method `gamma-h2`; `bmfa.rules.register` adds rules.

    Returns:
        The method, or None if the name is not registered.

    Example:
        >>> find_method("gamma-h3:0.005").title
        'Look-ahead'
    """
    base = family(name)
    if _LOOKAHEAD.fullmatch(base):
        return METHODS["gamma-h2"]
    return METHODS.get(base) or _own_rule(base)


def _own_rule(name: str) -> Method | None:
    from bmfa.trees.rules.names import OWN_RULES  # torch is there where a method is looked up

    text = "a rule of your own"
    return Method(name, "rule", name, text, text, "its value") if name in OWN_RULES else None


def find_mark(name: str) -> Mark | None:
    """Return the mark of a method in figures, or None if it has none of its own.

    Example:
        >>> find_mark("fixed-depth:1").line, find_mark("fixed-depth:2").line
        ('dotted', 'dashed')
    """
    method = find_method(name)
    if method is None:
        return None
    return method.marks_by_value.get(name.partition(":")[2], method.mark)


def is_kind(name: str, *kinds: Kind) -> bool:
    """Return True if the name is registered as one of these kinds.

    Example:
        >>> is_kind("dct2:0.9", "reduction"), is_kind("dct2:0.9", "rule")
        (True, False)
    """
    method = find_method(name)
    return method is not None and method.kind in kinds


def names(kinds: Iterable[Kind]) -> list[str]:
    """Return the names of these kinds, in the order of the registry.

    Example:
        >>> names(["summary"])
        ['block-mean', 'mean-variance', 'edge-aware']
    """
    wanted = set(kinds)
    return [method.name for method in METHODS.values() if method.kind in wanted]
