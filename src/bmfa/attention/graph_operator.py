"""Screened attention as one operator of a graph, for tensors whose values cannot be read.

The values in q and k decide which tiles are expanded and which blocks are split. Values cannot be read
while a graph is compiled or exported, on the meta device and in a FakeTensorMode. There a call becomes
one node, `torch.ops.bmfa.screened_attention`, which runs like a call outside of a graph. Its backward
recomputes the forward. Dense attention and the Triton kernels depend on shapes alone, and are
nodes of their own.

A program that loads an exported graph must import this module first; `bmfa.screened_attention` does.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bmfa.attention.inputs import (
    AttentionInputs,
    AttentionOptions,
    Form,
)
from bmfa.attention.per_query import compute_per_query
from bmfa.attention.result import Computed
from bmfa.attention.tiles import compute_tiled, wrap_result
from bmfa.attention.tiling import Budget, TiledAttention, Tiling, probes_per_group
from bmfa.grid import Grid, grid_from_list, grid_to_list
from bmfa.trees.rules import RandomQuadrants, parse
from bmfa.trees.tree import Tree


class Settings(NamedTuple):
    """Everything about a call but its tensors, in types that an operator takes."""

    height: int
    width: int
    frames: int
    query_grid: list[int]  # height, width and frames, or empty
    prefix: int
    tau: float
    scale: float
    backend: str
    form: Form
    error: float | None  # of a Budget, as is `expand`
    expand: int | None
    dense_threshold: (
        float  # dense attention runs if a larger share of the tiles is expanded in all heads
    )
    rule: str  # of the other forms, as are `seed` and `max_depth`
    seed: int
    max_depth: int | None

    @classmethod
    def from_call(cls, inputs: AttentionInputs, options: AttentionOptions) -> "Settings":
        rule, budget = options.rule, options.budget
        return cls(
            inputs.grid.height, inputs.grid.width, inputs.grid.frames,
            grid_to_list(inputs.query_grid), inputs.prefix, inputs.tau, inputs.scale,
            options.backend, options.form,
            None if budget is None else budget.error, None if budget is None else budget.expand,
            options.dense_threshold, "" if rule is None else str(rule),
            rule.seed if isinstance(rule, RandomQuadrants) else 0, options.max_depth,
        )  # fmt: skip

    @property
    def tiled(self) -> bool:
        return self.form == "tiled"

    @property
    def tiling(self) -> Tiling:
        return Tiling(
            self.grid,
            query_grid=grid_from_list(self.query_grid),
            probes_per_group=probes_per_group(self.backend),
        )

    @property
    def grid(self) -> Grid:
        return Grid(self.height, self.width, frames=self.frames)

    def inputs(self, q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None) -> AttentionInputs:
        query_grid = grid_from_list(self.query_grid)
        return AttentionInputs(
            q, k, v, self.grid, self.prefix, self.tau, self.scale, valid, query_grid
        )

    @property
    def options(self) -> AttentionOptions:
        return AttentionOptions(
            self.form,
            self.backend,
            Budget(self.error, self.expand) if self.tiled else None,
            self.dense_threshold,
            None if self.tiled else parse(self.rule, self.seed),
            self.max_depth,
        )


_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? valid, int height, int width, int frames, "
    "int[] query_grid, int prefix, float tau, float scale, str backend, str form, "
    "float? error, int? expand, float dense_threshold, str rule, int seed, int? max_depth"
)
_library: Any = torch.library.Library("bmfa", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(f"screened_attention({_ARGUMENTS}) -> ({', '.join(['Tensor'] * 3)})")
_library.define(f"screened_attention_backward(Tensor g, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor)")


def compute_in_graph(inputs: AttentionInputs, options: AttentionOptions) -> Computed:
    """Insert the operator for a call whose values cannot be read.

    If more than `options.dense_threshold` of the tiles would be expanded in every head, the operator
    runs dense attention, and reports every tile as expanded.
    """
    settings = Settings.from_call(inputs, options)
    output, expanded, probes = _operator(inputs.q, inputs.k, inputs.v, inputs.valid, *settings)
    if options.form == "tiled":
        assert options.budget is not None
        count = expanded.sum(-1, dtype=torch.int32)
        result = TiledAttention(output, count, probes, expanded)
        computed = wrap_result(inputs, settings.tiling, result, options.budget)
    else:
        computed = Computed(output, partial(_rebuild_tree, inputs, options))
        computed.measure_leaf_ratio = partial(_rebuilt_leaf_ratio, inputs, options)
    return computed


def _rebuild_tree(inputs: AttentionInputs, options: AttentionOptions) -> Tree:
    return compute_per_query(inputs, options).make_tree()


def _rebuilt_leaf_ratio(inputs: AttentionInputs, options: AttentionOptions) -> float:
    return float(_rebuild_tree(inputs, options).leaf_ratio.mean())


def _compute(q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None, settings: Settings) -> Computed:
    """Run the call outside of the graph."""
    inputs = settings.inputs(q, k, v, valid)
    compute = compute_tiled if settings.tiled else compute_per_query
    return compute(inputs, settings.options)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:
    outputs = _fake(q, k, v, valid, *rest)
    output, expanded, probes = outputs
    with torch.autocast(q.device.type, enabled=False):
        computed = _compute(q, k, v, valid, Settings(*rest))
    output.copy_(computed.output)
    if computed.tiled is not None:
        expanded.copy_(computed.tiled.expanded)
        probes.copy_(computed.tiled.probes)
    return outputs


def _fake(q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    """Contiguous output, expanded tiles and probes; empty where there are none."""
    settings = Settings(*rest)
    tiling, lead, none = settings.tiling, q.shape[:2], (0,)
    tiles = (*lead, tiling.groups, tiling.tiles)
    prefix = q.shape[2] - tiling.queries.grid.size if settings.tiled else 0
    probes = (*lead, tiling.probes(prefix), 3)
    return (
        q.new_empty((*q.shape[:3], v.shape[-1])),
        q.new_empty(tiles if settings.tiled else none, dtype=torch.bool),
        q.new_empty(probes if settings.tiled else none, dtype=torch.float64),
    )


def _backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:
    """Gradients of q, k and v, from a second forward."""
    with torch.enable_grad(), torch.autocast(q.device.type, enabled=False):
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        computed = _compute(q, k, v, valid, Settings(*rest))
        output = computed.output.to(q.dtype)
    gradients = torch.autograd.grad(output, (q, k, v), g, allow_unused=True)
    return tuple(
        torch.zeros_like(x).copy_(0 if gradient is None else gradient)
        for x, gradient in zip((q, k, v), gradients, strict=True)
    )


def _fake_backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.settings = inputs[4:]
    ctx.mark_non_differentiable(*output[1:])


def _differentiate(ctx: Any, g: Tensor, *others: Tensor) -> tuple[Any, ...]:
    gradients = torch.ops.bmfa.screened_attention_backward(g, *ctx.saved_tensors, *ctx.settings)
    return (*gradients, None, *(None for _ in ctx.settings))


for _name, _kernel in (("", _forward), ("_backward", _backward)):
    # The operator is opaque to the compiler: what it runs must not be compiled in turn.
    _opaque = torch._disable_dynamo(_kernel)  # type: ignore[attr-defined]
    _library.impl(f"screened_attention{_name}", _opaque, "CompositeExplicitAutograd")
torch.library.register_fake("bmfa::screened_attention", _fake, lib=_library)
torch.library.register_fake("bmfa::screened_attention_backward", _fake_backward, lib=_library)
torch.library.register_autograd(
    "bmfa::screened_attention", _differentiate, setup_context=_save_for_backward, lib=_library
)
_operator: Any = torch.ops.bmfa.screened_attention.default
