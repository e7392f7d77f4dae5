"""Screen the attention of a model, and undo it."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from bmfa.attention.api import BACKENDS, FORMS
from bmfa.checks import check_integer, check_number
from bmfa.models.forwards import override_method, override_of, restore_method
from bmfa.models.hosts import find_host
from bmfa.models.screens import GridOfBlock, TokenGrid, replacements_in
from bmfa.trees.rules import Optimal, RandomQuadrants, Rule, as_rule


def patch(
    model: nn.Module,
    *,
    rule: Rule | str | None = None,
    error: float | None = None,
    leaves: float | int | None = None,
    layers: str | Sequence[int] = "last-4",
    max_depth: int | None = None,
    form: str | None = None,
    backend: str = "auto",
    fallback: float | None = None,
) -> nn.Module:
    """Screen the attention of some layers; returns the same model, changed in place.

    Only q, k, v -> output is replaced; class and register keys stay exact. The rule is one of
    bmfa.rules or its name: one tree for each query and head covers the spatial keys. Without a rule,
    `error` and `leaves` ask for attention over tiles, dense where that is faster: what makes a model
    at high resolution fast. These and the rest are the arguments of `screened_attention`. `layers` is
    "all", "last-K" or a list of indices. Threads may run the model at once, and gradient checkpointing
    of blocks or of the model is served. A model that is patched or reduced already is restored first;
    `unpatch` undoes it.
    """
    chosen = _chosen_rule(rule, error, leaves)
    options = _options(error, leaves, max_depth, form, backend, fallback)
    host = find_host(model)
    indices = layer_indices(layers, len(host.attentions))
    unpatch(model)
    grid = TokenGrid(host.prefix)
    grid.watch(host.projection)
    for index in indices:
        screen = host.screen(index, grid, _rule_of_layer(chosen, index), options)
        screen.install(host.attentions[index])
    for index, block in enumerate(host.blocks):
        override_method(block, GridOfBlock(index, grid))
    return model


def unpatch(model: nn.Module) -> nn.Module:
    """Undo `patch` or `reduce`; a model as it was made stays as it is."""
    for module, replacement in replacements_in(model):
        replacement.grid.forget()
        replacement.restore(module)
    for module in model.modules():
        if override_of(module) is not None:
            restore_method(module)
    return model


def layer_indices(layers: str | Sequence[int], depth: int) -> tuple[int, ...]:
    """The indices of the layers that a description of layers means.

    Args:
        layers: "all", "last-K", or a list, tuple, range or array of indices. A negative index counts
            from the end.
        depth: The number of layers of the model.

    Returns:
        The indices from 0 to depth - 1 in ascending order, each once.

    Raises:
        TypeError: If `layers` is a number, or an index is no integer.
        ValueError: If there is no such layer, or `layers` is empty.

    Example:
        >>> layer_indices([0, -1], 12)
        (0, 11)
    """
    if hasattr(layers, "tolist"):  # a NumPy array or a tensor
        layers = layers.tolist()
    if isinstance(layers, str):
        if layers == "all":
            return tuple(range(depth))
        last = re.fullmatch(r"last-(\d+)", layers)
        if last is None or not 1 <= int(last[1]) <= depth:
            raise ValueError(
                f"layers is {layers!r}; pass 'all', 'last-K' with K from 1 to {depth}, or a list"
            )
        return tuple(range(depth - int(last[1]), depth))
    if not hasattr(layers, "__iter__"):
        raise TypeError(f"layers is {layers!r}; pass {_advice(layers)}a list of indices")
    indices = [check_integer("layers", index, low=-depth, high=depth - 1) for index in layers]
    if not indices:
        raise ValueError("layers is empty; pass 'all', 'last-K' or at least one index")
    return tuple(sorted({index % depth for index in indices}))


def _advice(layers: object) -> str:
    """What to pass instead of one number."""
    if not isinstance(layers, int):
        return "'all', 'last-K' or "
    return f"[{layers}] for that layer alone, 'last-{layers}' for the last {layers}, 'all' or "


def _chosen_rule(rule: Rule | str | None, error: float | None, leaves: float | None) -> Rule | None:
    values = {"rule": rule, "error": error, "leaves": leaves}
    given = [name for name, value in values.items() if value is not None]
    if len(given) > 1:
        raise ValueError(
            f"{' and '.join(given)} are given; pass at most one of {', '.join(values)}"
        )
    return None if rule is None else as_rule(rule)


def _options(
    error: float | None,
    leaves: float | int | None,
    max_depth: int | None,
    form: str | None,
    backend: str,
    fallback: float | None,
) -> dict[str, Any]:
    """Arguments of `screened_attention`, checked before any picture is seen."""
    if error is not None or leaves is not None:
        Optimal(error=error, leaves=leaves)  # refuses what is no target or budget
    if max_depth is not None:
        check_integer("max_depth", max_depth, low=0)
    if fallback is not None:
        check_number("fallback", fallback, low=0.0)
    for name, value, accepted in (("form", form, (None, *FORMS)), ("backend", backend, BACKENDS)):
        if value not in accepted:
            raise ValueError(
                f"{name} is {value!r}; pass one of {', '.join(filter(None, accepted))}"
            )
    return {
        "error": error,
        "leaves": leaves,
        "max_depth": max_depth,
        "form": form,
        "backend": backend,
        "fallback": fallback,
    }


def _rule_of_layer(rule: Rule | None, index: int) -> Rule | None:
    """The rule; coins fall independently in every layer."""
    if isinstance(rule, RandomQuadrants):
        return replace(rule, seed=1009 * rule.seed + index)
    return rule
