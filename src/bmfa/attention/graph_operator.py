"""Screened attention as one operator of a graph, for tensors whose values cannot be read.

The values in q and k decide which tiles are expanded and which blocks are split. Values cannot be read
while a graph is compiled or exported, on the meta device and in a FakeTensorMode. There a call becomes
one node, `torch.ops.bmfa.screened_attention`, which takes the tensors and the call as text. It runs like
a call outside of a graph, and its backward recomputes the forward. Dense attention and the Triton
kernels depend on shapes alone, and are nodes of their own.

A program that loads an exported graph must import this module first; `bmfa.screened_attention` does.
"""

from typing import Any

import torch
from torch import Tensor

from bmfa.attention.call import Call
from bmfa.attention.dispatch import run_tiles
from bmfa.attention.tiling import TiledAttention
from bmfa.attention.trees import attend_trees

_library: Any = torch.library.Library("bmfa", "FRAGMENT")  # type: ignore[no-untyped-call]
_ARGUMENTS = "Tensor q, Tensor k, Tensor v, Tensor? valid, str call"
_library.define(f"screened_attention({_ARGUMENTS}) -> (Tensor, Tensor, Tensor)")
_library.define(f"screened_attention_backward(Tensor g, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor)")


def run_in_graph(
    q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None, call: Call
) -> TiledAttention:
    """Insert the operator for a call whose values cannot be read.

    If more than `call.dense_threshold` of the tiles would be expanded in every head, the operator runs
    dense attention, and reports every tile as expanded. A call with a rule has an output alone.
    """
    output, expanded, probes = _operator(q, k, v, valid, call.to_text())
    return TiledAttention(output, expanded.sum(-1, dtype=torch.int32), probes, expanded)


def _run(q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None, call: Call) -> TiledAttention:
    """Run the call outside of the graph."""
    with torch.autocast(q.device.type, enabled=False):
        if call.rule is None:
            return run_tiles(q, k, v, valid, call)[0]
        output, _ = attend_trees(q, k, v, valid, call)
    none = q.new_empty(0)
    return TiledAttention(output, none, none, none)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None, text: str
) -> tuple[Tensor, ...]:
    outputs = _fake(q, k, v, valid, text)
    found = _run(q, k, v, valid, Call.from_text(text))
    for output, result in zip(outputs, (found.output, found.expanded, found.probes), strict=True):
        output.copy_(result)
    return outputs


def _fake(
    q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None, text: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Contiguous output, expanded tiles and probes; the last two are empty with a rule."""
    call, lead = Call.from_text(text), q.shape[:2]
    output = q.new_empty((*q.shape[:3], v.shape[-1]))
    if call.rule is not None:
        return output, q.new_empty(0, dtype=torch.bool), q.new_empty(0, dtype=torch.float64)
    tiling = call.tiling
    expanded = q.new_empty((*lead, tiling.groups, tiling.tiles), dtype=torch.bool)
    probes = (*lead, tiling.probes(call.query_prefix), 3)
    return output, expanded, q.new_empty(probes, dtype=torch.float64)


def _backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None, text: str
) -> tuple[Tensor, ...]:
    """Gradients of q, k and v, from a second forward."""
    with torch.enable_grad():
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        output = _run(q, k, v, valid, Call.from_text(text)).output.to(q.dtype)
    gradients = torch.autograd.grad(output, (q, k, v), g, allow_unused=True)
    return tuple(
        torch.zeros_like(x).copy_(0 if gradient is None else gradient)
        for x, gradient in zip((q, k, v), gradients, strict=True)
    )


def _fake_backward(g: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x) for x in inputs[:3])


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, ctx.text = inputs
    ctx.save_for_backward(*tensors)
    ctx.mark_non_differentiable(*output[1:])


def _differentiate(ctx: Any, g: Tensor, *others: Tensor) -> tuple[Any, ...]:
    gradients = torch.ops.bmfa.screened_attention_backward(g, *ctx.saved_tensors, ctx.text)
    return (*gradients, None, None)


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
