"""Screen the attention of a model, and undo it."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn

from bmfa.attention.api import check_choices
from bmfa.attention.call import Backend
from bmfa.checks import check_error, check_integer, check_leaves
from bmfa.grid import Grid
from bmfa.models.described import DescribedPasses, Description, GridSource, described_model
from bmfa.models.families import VisionTransformer, check_module, find_vision_transformer
from bmfa.models.plan import Plan, ReductionPlan
from bmfa.models.replacement import replacement_of
from bmfa.models.screened_layer import ScreenedLayer
from bmfa.trees.rules import RandomQuadrants, Rule, as_rule

AnyPlan = TypeVar("AnyPlan", Plan, ReductionPlan)
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
    rule = None if rule is None else as_rule(rule)
    options: dict[str, Any] = {"rule": rule, "error": error, "leaves": leaves}
    options |= {"max_depth": max_depth, "allow_dense": allow_dense, "backend": backend}
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
    _check_options(options)
    if attention is None:
        vit = find_vision_transformer(model)
    else:
        vit = described_model(check_module(model), Description(attention, grid, prefix, suffix))
    if layers is None:
        layers = "all" if rule is None else _DEFAULT_RULE_LAYERS
    depth = len(vit.attentions)
    if layers == _DEFAULT_RULE_LAYERS and rule is not None and depth < 4:
        layers = "all"
    chosen = {index: dict(options) for index in layer_indices(layers, depth)}
    if isinstance(rule, RandomQuadrants):  # an independent seed in every layer
        for index, one in chosen.items():
            one["rule"] = replace(rule, seed=_SEED_STRIDE * rule.seed + index)
    install_layers(model, vit, chosen)
    return model


def patch_planned(model: nn.Module, plan: Plan | str | os.PathLike[str]) -> nn.Module:
    """Give every layer of a model the setting of a plan, in place."""
    plan = read_plan(plan, Plan, "tune", model)
    vit = find_vision_transformer(model)
    exact = {"error": 0.0}  # by the native kernel where that is faster
    options = dict.fromkeys(range(len(vit.attentions)), exact) | planned_options(plan.errors)
    install_layers(model, vit, options, [Grid(*sides) for sides in plan.grids])
    return model


def read_plan(plan: object, kind: type[AnyPlan], maker: str, model: nn.Module) -> AnyPlan:
    """Return a plan, or that of a file, which must be for this model."""
    if isinstance(plan, (str, os.PathLike)):
        plan = kind.load(plan)
    if not isinstance(plan, kind):
        raise TypeError(
            f"plan is {type(plan).__name__}; pass what bmfa.{maker} returned, or the file it was saved "
            "to"
        )
    plan.check_model(model)
    return plan


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
    passes = vit.follow()
    passes.depth, passes.other_blocks = len(vit.attentions), dict(vit.dense_blocks)
    for index in sorted(options):
        layer = ScreenedLayer(index, passes, options[index])
        if planned is not None and layer.options["error"]:
            layer.planned = planned[index]
        vit.replacement(layer).install(vit.attentions[index])
    if isinstance(passes, DescribedPasses):
        passes.idle = set(options)


def is_patched(model: nn.Module) -> bool:
    """True if `patch` or `reduce` has changed the model."""
    return any(replacement_of(module) is not None for module in model.modules())


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
    for module in model.modules():
        if (replacement := replacement_of(module)) is not None:
            replacement.restore(module)
    return model


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluate a model without gradients; restore it however the block ends, also if it is patched."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        unpatch(model)
        for module in training:
            module.training = True


def copy_sharing_weights(model: nn.Module) -> nn.Module:
    """Return a copy of a model, to be patched on its own, with the same parameters and buffers."""
    return deepcopy(
        model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    )


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
    for name, value in options.items():
        if value is not None and value is not True and value != "auto":
            raise ValueError(
                f"{name} is {value!r} and a plan is given, which has settings for every layer; pass one "
                "of the two"
            )


def _check_options(options: Mapping[str, Any]) -> None:
    """Check the arguments of `screened_attention` before the model is changed."""
    rule, max_depth = options["rule"], options["max_depth"]
    exclusive = {name: options[name] for name in ("rule", "error", "leaves")}
    check_choices(options["allow_dense"], options["backend"], **exclusive)
    if options["error"] is not None:
        check_error(options["error"])
    if options["leaves"] is not None:
        check_leaves(options["leaves"])
    if max_depth is not None:
        check_integer("max_depth", max_depth, low=0)
    if rule is None and max_depth is not None:
        raise ValueError(
            f"max_depth is {max_depth}, which limits trees, and no rule is given; pass rule=, e.g. "
            "bmfa.rules.Optimal(error=0.05), or leave max_depth out"
        )
