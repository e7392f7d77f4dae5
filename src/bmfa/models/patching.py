"""Screen the attention of a model, and undo it."""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from bmfa.attention.api import check_choices
from bmfa.attention.call import Backend
from bmfa.checks import check_integer, check_leaves, check_number
from bmfa.grid import Grid
from bmfa.models.described import DescribedPasses, GridSource, describe, described_model
from bmfa.models.families import VisionTransformer, check_module, find_vision_transformer
from bmfa.models.override import override_of, restore_method
from bmfa.models.passes import Passes
from bmfa.models.plan import Plan
from bmfa.models.replacement import replacement_of, replacements_in
from bmfa.models.screened_layer import AttentionFunction, ScreenedLayer
from bmfa.trees.rules import RandomQuadrants, Rule, as_rule

# A prime larger than the depth of any model, so that no two pairs of seed and layer share a stream.
_SEED_STRIDE = 1009
_DEFAULT_RULE_LAYERS = "last-4"  # the layers of the paper


def patch(
    model: nn.Module,
    *,
    rule: Rule | str | None = None,
    error: float | None = None,
    leaves: float | int | None = None,
    plan: Plan | str | os.PathLike[str] | None = None,
    layers: str | Sequence[int] | None = None,
    max_depth: int | None = None,
    allow_dense: bool = True,
    backend: Backend = "auto",
    attention: str | Sequence[str] | None = None,
    grid: GridSource = None,
    prefix: int = 0,
    suffix: int = 0,
) -> nn.Module:
    """Screen the attention of some layers of a model, in place.

    Only the step from q, k, v to the output of attention is replaced, by `screened_attention`; norms,
    projections, rotary embeddings and dropout run as the model defines them. Class and register keys
    stay exact.

    With `rule`, every query and head has a tree of its own over the spatial keys. Without a rule, the
    layers attend over tiles of keys, within the target `error` or the budget `leaves`: this form makes
    models at high resolution faster. For images at which dense attention is faster, the model runs its
    own forward, on a CPU with exact attention by the native kernel where that is faster, unless
    `allow_dense` is False or a `backend` is given. `error=0.0` makes attention exact at every size.

    With `plan`, every layer has the setting that `bmfa.tune` chose for it. A plan holds for one image
    size: images with another number of tokens run dense attention, with one warning for each number.

    A model of a class that is not known is patched by naming its attention modules, `attention=`. Each
    must call `torch.nn.functional.scaled_dot_product_attention` among the tokens of one image, which are
    `prefix` tokens, a grid in raster order, and `suffix` tokens; the first forward pass refuses others.
    `register_model` does the same for a class of models.

    The model can run in several threads at once, under `torch.compile`, and with gradient
    checkpointing of whole blocks or of the whole model. A model that is already patched or reduced is
    restored first.

    Args:
        model: A timm or transformers Vision Transformer, the embedded model, a model that contains
            one of them, or any model with `attention=`.
        rule: A rule of `bmfa.rules` or its name, e.g. `"optimal:0.002"`. At most one of `rule`,
            `error` and `leaves` is given.
        error: The target for the error of attention over tiles, as in `screened_attention`. For a tree
            for each query, pass `rule=rules.Optimal(error=...)`.
        leaves: The budget of attention over tiles: a float in (0, 1] is a fraction of the tokens, an
            int from 2 on is a count. For a tree for each query, pass `rule=rules.Optimal(leaves=...)`.
        plan: A `Plan`, or the file of one; no other option is given with it.
        layers: `"all"`, `"last-K"`, or the indices of the layers; negative ones count from the end. None
            selects all layers, and `"last-4"` with a rule.
        max_depth: The depth at which trees are not split further; None goes down to single tokens.
        allow_dense: If False, tiles run even where dense attention is faster.
        backend: `"auto"`, `"native"`, `"eager"` or `"triton"`.
        attention: The names of the attention modules of a model that is not known, as
            `model.named_modules()` has them; `*` is any characters but a dot: `"blocks.*.attn"`.
        grid: With `attention`: (height, width) of the grid in tokens, a function that returns it from
            the arguments of the model, or None if the spatial tokens are a square.
        prefix: With `attention`: the number of class and register tokens before the grid.
        suffix: With `attention`: the number of tokens behind the grid.

    Returns:
        The same model.

    Raises:
        TypeError: If the model or its attention is not supported, or an argument has a wrong type.
        ValueError: If arguments exclude each other or are out of range, or the plan is for another
            model. The model is unchanged.
        OSError: If the file of the plan cannot be read. The model is unchanged.

    Example:
        >>> import bmfa, torch
        >>> loaded = bmfa.load_model("embedded")
        >>> images = torch.zeros(1, 3, 112, 112)
        >>> full = loaded.logits(images)
        >>> model = bmfa.patch(loaded.model, rule=bmfa.rules.ExactGap(0.0), layers="last-2")
        >>> torch.allclose(loaded.logits(images), full, atol=1e-4)  # a gap of 0 is exact
        True
        >>> torch.equal(bmfa.unpatch(model)(images), full)
        True
    """
    options = {
        "rule": None if rule is None else as_rule(rule),
        "error": error,
        "leaves": leaves,
        "max_depth": max_depth,
        "allow_dense": allow_dense,
        "backend": backend,
    }
    if attention is None and (grid is not None or prefix or suffix):
        raise ValueError(
            f"grid is {grid!r}, prefix {prefix} and suffix {suffix}, which are for models that are not "
            "known, and attention is not given; name the attention modules, e.g. "
            "attention='blocks.*.attn', or leave grid, prefix and suffix out"
        )
    if plan is not None:
        if attention is not None:
            raise ValueError(
                f"attention is {attention!r} and a plan is given; call bmfa.models.register_model for "
                "the class of the model, then patch(model, plan=...)"
            )
        _check_alone(options | {"layers": layers})
        return patch_planned(model, plan)
    _check_options(**options)
    if attention is None:
        vit = find_vision_transformer(model)
    else:
        vit = described_model(check_module(model), describe(attention, grid, prefix, suffix))
    if layers is None:
        layers = "all" if rule is None else _DEFAULT_RULE_LAYERS
    depth = len(vit.attentions)
    if layers == _DEFAULT_RULE_LAYERS and rule is not None and depth < 4:
        layers = "all"
    indices = layer_indices(layers, depth)
    install_layers(model, vit, {index: _options_of_layer(options, index) for index in indices})
    return model


def patch_planned(model: nn.Module, plan: Plan | str | os.PathLike[str]) -> nn.Module:
    """Give every layer of a model the setting of a plan, in place."""
    if isinstance(plan, (str, os.PathLike)):
        plan = Plan.load(plan)
    elif not isinstance(plan, Plan):
        raise TypeError(
            f"plan is {type(plan).__name__}; pass what bmfa.tune returned, or the file it was saved to"
        )
    plan.check_model(model)
    vit = find_vision_transformer(model)
    exact = {"error": 0.0}  # by the native kernel where that is faster
    options = dict.fromkeys(range(len(vit.attentions)), exact) | planned_options(plan.errors)
    install_layers(model, vit, options, plan.token_grids)
    return model


def planned_options(errors: Mapping[int, float]) -> dict[int, dict[str, Any]]:
    """Return the arguments of `screened_attention` by layer.

    Dense attention is off: tiles run wherever the plan has measured that they are faster.
    """
    return {layer: {"error": error, "allow_dense": False} for layer, error in errors.items()}


def install_layers(
    model: nn.Module,
    vit: VisionTransformer,
    options: Mapping[int, dict[str, Any]],
    planned: Sequence[Grid] | None = None,
) -> None:
    """Screen layers of a model, each with its own arguments of `screened_attention`.

    Args:
        model: The model; patches that it has are undone.
        vit: Its parts.
        options: The arguments by the index of the layer; the others stay as they are.
        planned: For each layer of the model the only grid at which it does not run dense; None for no
            such limit.
    """
    unpatch(model)
    if not options:
        return

    def make(passes: Passes) -> list[ScreenedLayer]:
        layers = [ScreenedLayer(index, passes, options[index]) for index in sorted(options)]
        if planned is not None:
            for layer in layers:
                layer.planned = planned[layer.layer] if layer.options["error"] else None
        return layers

    install_functions(vit, make)


def install_functions(
    vit: VisionTransformer, make: Callable[[Passes], Sequence[AttentionFunction]]
) -> Sequence[AttentionFunction]:
    """Replace the attention of some layers by functions of q, k and v.

    Args:
        vit: The parts of a model that is not patched.
        make: Makes the functions, one for each of the layers.

    Returns:
        The functions.
    """
    passes = vit.follow()
    functions = make(passes)
    for function in functions:
        vit.replacement(function).install(vit.attentions[function.layer])
    passes.depth = len(vit.attentions)
    passes.other_blocks = dict(vit.dense_blocks)
    if isinstance(passes, DescribedPasses):
        passes.idle = {function.layer for function in functions}
    return functions


def is_patched(model: nn.Module) -> bool:
    """True if `patch` or `reduce` has changed the model."""
    return any(
        replacement_of(module) is not None or override_of(module) is not None
        for module in model.modules()
    )


def unpatch(model: nn.Module) -> nn.Module:
    """Undo `patch` or `reduce`, in place.

    Args:
        model: A patched or reduced model. Any other model is left unchanged.

    Returns:
        The same model, which computes the same bits as before it was changed.

    Example:
        >>> import bmfa, torch
        >>> model = bmfa.load_model("embedded").model
        >>> images = torch.zeros(1, 3, 112, 112)
        >>> full = model(images)
        >>> reduced = bmfa.reduce(model, "tome:8")(images)
        >>> torch.equal(bmfa.unpatch(model)(images), full)
        True
    """
    for module, replacement in replacements_in(model):
        replacement.function.passes.remove()
        replacement.restore(module)
    for module in model.modules():
        if override_of(module) is not None:
            restore_method(module)
    return model


def layer_indices(layers: str | Sequence[int], depth: int) -> tuple[int, ...]:
    """Resolve a description of layers to their indices.

    Args:
        layers: `"all"`, `"last-K"`, or a list, tuple, range or array of indices. A negative index
            counts from the end.
        depth: The number of layers of the model.

    Returns:
        The indices from 0 to depth - 1 in ascending order, each once.

    Raises:
        TypeError: If `layers` is a number, or an index is not an integer.
        ValueError: If there is no such layer, or `layers` is empty.

    Example:
        >>> layer_indices([0, -1], 12)
        (0, 11)
        >>> layer_indices("last-2", 12)
        (10, 11)
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
    if isinstance(layers, int):
        raise TypeError(
            f"layers is {layers!r}; pass [{layers}] for that layer alone, 'last-{layers}' for the last "
            f"{layers}, 'all' or a list of indices"
        )
    if not hasattr(layers, "__iter__"):
        raise TypeError(f"layers is {layers!r}; pass 'all', 'last-K' or a list of indices")
    indices = [check_integer("layers", index, low=-depth, high=depth - 1) for index in layers]
    if not indices:
        raise ValueError("layers is empty; pass 'all', 'last-K' or at least one index")
    return tuple(sorted({index % depth for index in indices}))


def _check_alone(options: Mapping[str, Any]) -> None:
    """Raise if another option is given with a plan."""
    default = {"backend": "auto", "allow_dense": True}
    for name, value in options.items():
        plain = isinstance(value, str | bool)
        if value is not None and not (plain and value == default.get(name)):
            raise ValueError(
                f"{name} is {value!r} and a plan is given, which has settings for every layer; pass one "
                "of the two"
            )


def _check_options(
    *,
    rule: Any,
    error: Any,
    leaves: Any,
    max_depth: Any,
    allow_dense: Any,
    backend: Any,
) -> None:
    """Check the arguments of `screened_attention` before the model is changed."""
    check_choices(allow_dense, backend, rule=rule, error=error, leaves=leaves)
    if error is not None:
        check_number("error", error, low=0.0)
    if leaves is not None:
        check_leaves(leaves)
    if max_depth is not None:
        check_integer("max_depth", max_depth, low=0)
    if rule is None and max_depth is not None:
        raise ValueError(
            f"max_depth is {max_depth}, which limits trees, and no rule is given; pass rule=, e.g. "
            "bmfa.rules.Optimal(error=0.05), or leave max_depth out"
        )


def _options_of_layer(options: dict[str, Any], layer: int) -> dict[str, Any]:
    """Give random rules an independent seed in every layer."""
    rule = options["rule"]
    if isinstance(rule, RandomQuadrants):
        return options | {"rule": replace(rule, seed=_SEED_STRIDE * rule.seed + layer)}
    return options
