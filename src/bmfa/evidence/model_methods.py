"""Methods by name on a model: the model as it is, a rule in some layers, or a token reduction."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from bmfa import merging as reduction
from bmfa.attention.api import Screened
from bmfa.merging import POLICY_NAMES
from bmfa.models import layer_indices, patch, unpatch
from bmfa.models.hosts import find_host
from bmfa.models.reducing import reduce
from bmfa.models.screens import Call, screens_in
from bmfa.trees import rules
from bmfa.trees.rules.names import MAKERS as RULES

FULL = "full"
Layers = str | Sequence[int]

_LOOKAHEAD = re.compile(r"gamma-h\d+")
_RULES = (*RULES, "random-quadrants", "global-mean")


@dataclass(frozen=True)
class Method:
    """A method with what it means: neither a rule nor a policy is the model as it is."""

    name: str
    rule: rules.Rule | None = None
    policy: reduction.Policy | None = None

    @property
    def random(self) -> bool:
        """Whether it throws coins for every picture; random pooling draws once for all of them."""
        return isinstance(self.rule, rules.RandomQuadrants)


def parse(name: str, seed: int = 0) -> Method:
    """The method of a command-line name."""
    family = name.partition(":")[0]
    if name == FULL:
        return Method(name)
    if family in _RULES or _LOOKAHEAD.fullmatch(family):
        return Method(name, rule=rules.parse(name, seed))
    if family in POLICY_NAMES:
        return Method(name, policy=reduction.parse(name, seed))
    raise ValueError(
        f"method {name!r} is unknown; pass {FULL}, a rule NAME:VALUE ({', '.join(_RULES)}) "
        f"or a reduction NAME:VALUE ({', '.join(POLICY_NAMES)})"
    )


def check_methods(names: Sequence[str], model: nn.Module, layers: Layers) -> list[str]:
    """`full`, then every other method once; raises before any picture is read."""
    if not names:
        raise ValueError("no methods; pass some, e.g. full, optimal:0.002, free-energy:8")
    for name in names:
        parse(name)
    layer_indices(layers, len(find_host(model).attentions))
    return list(dict.fromkeys((FULL, *names)))


@contextmanager
def applied(model: nn.Module, name: str, layers: Layers, seed: int = 0) -> Iterator[Method]:
    """Apply a method while the block runs; a rule in these layers, a reduction in its own blocks.

    The model is left without any patch, whatever it had before.
    """
    method = parse(name, seed)
    unpatch(model)
    if method.rule is not None:
        patch(model, rule=method.rule, layers=layers)
    elif method.policy is not None:
        reduce(model, method.policy)
    try:
        yield method
    finally:
        unpatch(model)


@dataclass(eq=False)
class Leaves:
    """Hears the screened layers of a pass and keeps their leaves alone."""

    ratios: list[Tensor] = field(default_factory=list)  # (B,) of every layer

    def heard(self, call: Call, screened: Screened) -> None:
        """One call of a layer."""
        self.ratios.append(screened.tree.leaf_ratio.double().flatten(1).mean(1))

    @property
    def sum(self) -> float:
        """The leaf ratios of all pictures, each a mean over layers, heads and queries, added up."""
        return float(torch.stack(self.ratios).mean(0).sum()) if self.ratios else 0.0


@contextmanager
def counted_leaves(model: nn.Module) -> Iterator[Leaves]:
    """Count the leaves of the screened layers while the block runs; of a model without, none."""
    leaves = Leaves()
    screens = [screen for _, screen in screens_in(model)]
    for screen in screens:
        screen.listener = leaves
    try:
        yield leaves
    finally:
        for screen in screens:
            screen.listener = None
