"""Screened attention as one operator of torch, for tensors whose numbers cannot be read.

The numbers in q and k decide which tiles are expanded and which blocks are split. Tensors have no
numbers in a graph that is being compiled or exported, on the meta device and in a FakeTensorMode. There
a call becomes one node of the graph, `torch.ops.bmfa.screened_attention`, which runs as a call outside
of a graph does. Its backward computes the forward again. Dense attention and the Triton kernels for
tiles choose by shapes alone on the host, and are nodes of their own.

A program that loads an exported graph imports this module first; `bmfa.screened_attention` does too.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from bmfa.attention.per_query import TreeCall
from bmfa.attention.result import Trees
from bmfa.attention.tiles import TileCall
from bmfa.attention.tiling import Budget, TiledAttention, Tiling
from bmfa.grid import Grid
from bmfa.trees.rules import RandomQuadrants, Rule, parse
from bmfa.trees.tree import Tree


class Settings(NamedTuple):
    """Everything about a call but its tensors, in types that an operator takes."""

    height: int
    width: int
    prefix: int
    tau: float
    scale: float
    order: str
    backend: str
    form: str
    certified: bool
    fallback: float | None
    error: float | None = None  # of tiles, as is `expand`
    expand: int | None = None
    most: float = 1.0  # dense attention runs where more than this share of the tiles is expanded
    rule: str = ""  # of trees, as are `seed` and `max_depth`
    seed: int = 0
    max_depth: int | None = None

    @property
    def tiling(self) -> Tiling:
        """The tiles of the grid."""
        return Tiling(Grid(self.height, self.width))


_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? valid, int height, int width, int prefix, float tau, "
    "float scale, str order, str backend, str form, bool certified, float? fallback, float? error, "
    "int? expand, float most, str rule, int seed, int? max_depth"
)
_library: Any = torch.library.Library("bmfa", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(f"screened_attention({_ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor)")
_library.define(f"screened_attention_backward(Tensor g, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor)")


def tiles_in_graph(
    call: TileCall,
    backend: str,
    tiling: Tiling,
    question: Budget,
    most: float,
    certified: bool,
    fallback: float | None,
) -> tuple[TiledAttention, Tensor | None, int | Tensor]:
    """`TileCall.compute` as an operator; dense attention, if it is to be, runs in the operator."""
    settings = _settings(call, backend, "tiled", certified, fallback)._replace(
        error=question.error, expand=question.expand, most=most
    )
    output, marks, bound, replaced = _operator(*call.inputs, call.mask, *settings)
    result = TiledAttention(output, marks.sum(-1, dtype=torch.int32), marks)
    return (result, *_bounded(bound, replaced, certified, fallback))


def trees_in_graph(
    call: TreeCall,
    backend: str,
    rule: Rule,
    max_depth: int | None,
    form: str,
    certified: bool,
    fallback: float | None,
) -> tuple[Tensor, Trees, Tensor | None, int | Tensor]:
    """`TreeCall.compute` as an operator; the trees are built again where they are wanted."""
    settings = _settings(call, backend, form, certified, fallback)._replace(
        rule=str(rule),
        seed=rule.seed if isinstance(rule, RandomQuadrants) else 0,
        max_depth=max_depth,
    )
    output, _, bound, replaced = _operator(*call.inputs, call.mask, *settings)
    trees = Trees(partial(_tree, call, backend, rule, max_depth, form))
    return (output, trees, *_bounded(bound, replaced, certified, fallback))


def _settings(
    call: TileCall | TreeCall, backend: str, form: str, certified: bool, fallback: float | None
) -> Settings:
    """The settings that all forms have."""
    grid = call.grid
    return Settings(
        grid.height, grid.width, call.prefix, call.tau, call.scale, call.order,
        backend, form, certified, fallback,
    )  # fmt: skip


def _bounded(
    bound: Tensor, replaced: Tensor, certified: bool, fallback: float | None
) -> tuple[Tensor | None, int | Tensor]:
    asked = certified or fallback is not None
    return bound if asked else None, 0 if fallback is None else replaced


def _tree(call: TreeCall, backend: str, rule: Rule, max_depth: int | None, form: str) -> Tree:
    return call.run(backend, rule, max_depth, form)[1].tree


def _attend(
    q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None, settings: Settings
) -> tuple[Tensor, Tensor | None, Tensor | None, int | Tensor]:
    """Output, marks of tiles, certificate and the number of recomputed queries, with gradients."""
    s = settings
    inputs = (q, k, v, Grid(s.height, s.width), s.prefix, s.tau, s.scale, valid, s.order)
    if s.form != "tiled":
        trees, rule = TreeCall(*inputs), parse(s.rule, s.seed)
        output, _, bound, replaced = trees.compute(
            s.backend, rule, s.max_depth, s.form, s.certified, s.fallback
        )
        return output, None, bound, replaced
    call, question = TileCall(*inputs), Budget(s.error, s.expand)
    computed = call.compute(s.backend, s.tiling, question, s.most, s.certified, s.fallback)
    if computed is None:
        output = scaled_dot_product_attention(
            *call.without_absent, attn_mask=call.dense_mask, scale=s.scale / s.tau
        )
        return output, None, None, 0
    result, bound, replaced = computed
    return result.output, result.expanded, bound, replaced


def _forward(
    q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    settings = Settings(*rest)
    outputs = _fake(q, k, v, valid, *rest)  # contiguous, as graphs are told that they are
    with torch.autocast(q.device.type, enabled=False):
        output, marks, bound, replaced = _attend(q, k, v, valid, settings)
    outputs[0].copy_(output)
    outputs[1].copy_(outputs[1].new_ones(()) if marks is None else marks)
    if bound is not None:
        outputs[2].copy_(bound)
    outputs[3].fill_(replaced)
    return outputs


def _fake(
    q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output, marks, certificate and count, unwritten; without elements where there are none."""
    settings = Settings(*rest)
    tiled = settings.form == "tiled"
    marks = (*q.shape[:2], settings.tiling.groups, settings.tiling.tiles) if tiled else (0,)
    bounded = settings.certified or settings.fallback is not None
    return (
        q.new_empty((*q.shape[:3], v.shape[-1])),
        q.new_empty(marks, dtype=torch.bool),
        q.new_empty(q.shape[:3] if bounded else (0,), dtype=torch.float64),
        q.new_empty((), dtype=torch.int64),
    )


def _backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:
    """Gradients of q, k and v, from a second forward."""
    with torch.enable_grad(), torch.autocast(q.device.type, enabled=False):
        q, k, v = (tokens.detach().requires_grad_() for tokens in (q, k, v))
        output = _attend(q, k, v, valid, Settings(*rest))[0].to(q.dtype)
    found = torch.autograd.grad(output, (q, k, v), g, allow_unused=True)
    return tuple(
        torch.zeros_like(tokens).copy_(0 if grad is None else grad)
        for tokens, grad in zip((q, k, v), found, strict=True)
    )


def _fake_backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.rest = inputs[4:]
    ctx.mark_non_differentiable(*output[1:])


def _differentiate(ctx: Any, gradient: Tensor, *others: Tensor) -> tuple[Any, ...]:
    found = torch.ops.bmfa.screened_attention_backward(gradient, *ctx.saved_tensors, *ctx.rest)
    return (*found, None, *(None for _ in ctx.rest))


# What runs in a graph is not to be compiled in turn.
for _name, _kernel in (("", _forward), ("_backward", _backward)):
    _disabled = torch._disable_dynamo(_kernel)  # type: ignore[attr-defined]
    _library.impl(f"screened_attention{_name}", _disabled, "CompositeExplicitAutograd")
torch.library.register_fake("bmfa::screened_attention", _fake, lib=_library)
torch.library.register_fake("bmfa::screened_attention_backward", _fake_backward, lib=_library)
torch.library.register_autograd(
    "bmfa::screened_attention", _differentiate, setup_context=_save, lib=_library
)
_operator: Any = torch.ops.bmfa.screened_attention.default
