"""Screened attention on q, k, v: checks, chooses a backend, returns output, trees and statistics."""

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from bmfa.attention import dense as dense_attention
from bmfa.attention import dispatch as tiled
from bmfa.attention.dense import DenseCall
from bmfa.attention.operator import tiles_in_graph, trees_in_graph
from bmfa.attention.per_query import TreeCall
from bmfa.attention.result import Audit, Screened, Stats
from bmfa.attention.tiles import TileCall
from bmfa.attention.tiling import Budget, Tiling
from bmfa.checks import check_floating, check_integer, check_number, has_values, python_number
from bmfa.grid import Grid, check_grid
from bmfa.trees.rules import Optimal, Rule, as_rule

__all__ = ["Audit", "Screened", "Stats", "screened_attention"]

BACKENDS = ("auto", "eager", "reference", "triton")
FORMS = ("representative", "repeated", "tiled")
DEFAULT_RULE = Optimal(error=0.05)


_P = ParamSpec("_P")
_R = TypeVar("_R")
# Arguments of scaled_dot_product_attention, and what to do without them.
_SDPA = {
    "attn_mask": "pass valid=, a torch.bool mask of the spatial tokens that exist; biases and masks "
    "that differ between queries are not served",
    "dropout_p": "attention dropout is not served; leave the argument out",
    "is_causal": "tokens of a grid have no causal order, and every query sees every token; leave the "
    "argument out",
    "enable_gqa": "pass one key head for each query head: k.repeat_interleave(groups, 1), and v "
    "likewise",
}


def _explained(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Explain what to pass instead of the arguments of scaled_dot_product_attention."""

    @wraps(function)
    def explained(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if len(args) > 3 or "grid" not in kwargs or any(name in kwargs for name in _SDPA):
            _explain(args, kwargs)
        return function(*args, **kwargs)

    return explained


def _explain(args: tuple[object, ...], kwargs: dict[str, object]) -> None:
    for name, way_out in _SDPA.items():
        if name in kwargs:
            raise TypeError(f"screened_attention takes no {name}: {way_out}")
    if len(args) > 3:
        raise TypeError(
            f"screened_attention got {len(args)} arguments without a name and takes q, k and v so; "
            "name the others: grid=, prefix=, valid=; for an attention mask, pass valid="
        )
    raise TypeError(
        "screened_attention got no grid; pass grid=(height, width), the grid of the spatial tokens, "
        "and prefix=, the number of class and register tokens before them"
    )


@_explained
def screened_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    grid: Grid | tuple[int, int],
    prefix: int = 0,
    rule: Rule | str | None = None,
    error: float | None = None,
    leaves: float | int | None = None,
    tau: float = 1.0,
    scale: float | None = None,
    max_depth: int | None = None,
    valid: Tensor | None = None,
    order: str = "raster",
    form: str | None = None,
    backend: str = "auto",
    audit: float = 0.0,
    certificate: bool = False,
    fallback: float | None = None,
) -> Screened:
    """Attention with the spatial keys of each query summarised by blocks, to a given accuracy.

    Without a rule the form is "tiled", the fast one for long sequences: 8x8 tiles of keys, queries in
    groups of two tiles, one representative query for each group that sees every token exactly. It
    chooses the tiles that are expanded, and corrects the mass and the values of the others. "auto"
    takes dense attention where that is faster.

    With a rule, or with `form` "representative" or "repeated", every query and head has a tree of its
    own, `error` and `leaves` hold for each of them, and q may have any number of queries.

    A call in a graph of torch.compile or torch.export is one operator of the graph, or dense attention;
    torch.jit.trace is refused. Calls of dense attention and of Triton kernels in a graph, and all calls
    on CUDA, wait for nothing, and so let a NaN in q or k through to the outputs that read it; the
    others raise. On the meta device and for fake tensors the output has its shape and dtype.

    Args:
        q: (B, heads, Q, d) queries, as in scaled_dot_product_attention. Q = prefix + N for tiles.
        k: (B, heads, prefix + N, d) keys: prefix tokens first, then the N spatial tokens.
        v: (B, heads, prefix + N, e) values, of the dtype and device of k.
        grid: The grid of the N spatial tokens, or its sides (height, width).
        prefix: The number of class, register and other tokens before the grid; always exact.
        rule: A rule of `bmfa.rules`, or its name, e.g. `"gamma:0.005"`. At most one of `rule`,
            `error` and `leaves` is given.
        error: The target for the error E. With tiles it is for the mean E of a group before the
            corrections, estimated at the representative and from how far the queries lie apart
            (0.1 by default); with trees, for every query (0.05 by default).
        leaves: A budget of leaves: a float is a fraction of the tokens, an int a count. For tiles it
            is rounded down to whole tiles, and counts the tokens that `valid` marks absent.
        tau: The temperature, above 0.
        scale: The factor of q . k, 1 / sqrt(d) by default.
        max_depth: The depth at which no block is split; None goes down to single tokens.
        valid: torch.bool, (N,), (B, N) or (B, 1, 1, N): the spatial tokens that exist. The others
            may hold anything; with Q = prefix + N, the outputs of such queries have no meaning.
        order: The order of the spatial tokens, "raster" or "z" (Z-order).
        form: "tiled", "representative" (one logit M + tau log n and one mean value for each leaf),
            "repeated" (every score replaced by its leaf's mean: the same output), or None.
        backend: "auto", "eager", "triton" (CUDA, no gradients) or "reference" (NumPy, float64).
        audit: The fraction of the queries to recompute exactly; `stats.audit` reports their error.
        certificate: Whether `stats.certificate` bounds E of every query.
        fallback: Queries whose certificate exceeds this are recomputed exactly.

    Returns:
        A `Screened`: `.output` (B, heads, Q, e) in the dtype of q, `.tree` the trees of every query,
        `.stats` what ran and why.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If shapes, values or settings do not fit, or the backend does not serve the call.
        RuntimeError: If the call is traced by torch.jit.trace.
    """
    if torch._C._get_tracing_state() is not None:
        raise RuntimeError(
            "screened_attention is not traced by torch.jit.trace: a trace would keep the tiles and "
            "trees of the example for all inputs; use torch.compile or torch.export.export"
        )
    grid = check_grid(grid)
    plain = form is None and rule is None and max_depth is None and valid is None
    plain = plain and certificate is False and fallback is None and backend == "auto"
    like = None
    if plain and type(audit) in (int, float) and audit == 0:
        like = dense_attention.likeness(q, k, v, grid, prefix, error, leaves, tau, scale, order)
        if like is not None and (dense := dense_attention.known(like)) is not None:
            return dense(q, k, v)
    if form is not None and form not in FORMS:
        raise ValueError(f"form is {form!r}; pass one of {', '.join(FORMS)}")
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}; pass one of {', '.join(BACKENDS)}")
    if max_depth is not None:
        max_depth = check_integer("max_depth", max_depth, low=0)
    audit = check_number("audit", audit, low=0.0, high=1.0)
    if fallback is not None:
        fallback = check_number("fallback", fallback, low=0.0)
    _check_at_most_one(rule=rule, error=error, leaves=leaves)
    leaves = python_number(leaves)  # type: ignore[assignment]
    tokens, precision = _autocast(q, k, v)
    if audit > 0 and not has_values(q):
        raise ValueError(
            f"audit is {audit:g}, and tensors hold no numbers in a graph or on the meta device; "
            "pass audit=0 there, and audit calls outside of it"
        )
    inputs = (*tokens, grid, prefix, tau, scale, valid, order)
    with precision:
        if form == "tiled" or (form is None and rule is None and max_depth is None):
            if rule is not None or max_depth is not None:
                raise ValueError(
                    "form='tiled' takes no rule and no max_depth; pass error= or leaves="
                )
            call = TileCall(*inputs)
            if call.self_attention or (form == "tiled" and call.shape[2] > 0):
                return _tiled_attention(
                    call, error, leaves, form, backend, audit, certificate, fallback, like
                )
            form = None
        chosen = _choose_rule(rule, error, leaves)
        return _tree_attention(
            TreeCall(*inputs), chosen, max_depth, form, backend, audit, certificate, fallback
        )


def _tree_attention(
    call: TreeCall,
    chosen: Rule,
    max_depth: int | None,
    form: str | None,
    backend: str,
    audit: float,
    certificate: bool,
    fallback: float | None,
) -> Screened:
    """The forms in which every query and head has a tree of its own."""
    form = form or "representative"
    ran, why = call.choose(backend, chosen)
    form = "repeated" if ran == "triton" else form
    readable = has_values(call.inputs[0])
    compute = call.compute if readable else partial(trees_in_graph, call)
    output, trees, bound, replaced = compute(ran, chosen, max_depth, form, certificate, fallback)
    stats = Stats(
        ran,
        form,
        str(chosen),
        why,
        trees,
        bound,
        None if bound is None else ("scores" if chosen.needs == "tokens" else "keys"),
        replaced,
        call.audit(output, audit) if audit > 0 else None,
    )
    return Screened(output.to(call.inputs[0].dtype), trees, stats)


def _tiled_attention(
    call: TileCall,
    error: float | None,
    leaves: float | int | None,
    form: str | None,
    backend: str,
    audit: float,
    certificate: bool,
    fallback: float | None,
    like: Hashable | None,
) -> Screened:
    """The form "tiled", or dense attention where "auto" finds that faster."""
    call.check_self_attention()
    tiling = Tiling(call.grid)
    question = Budget.of(tiling, error, leaves)
    forced = form == "tiled" or certificate or fallback is not None
    ran, why = tiled.choose(
        backend,
        *call.inputs,
        tiling,
        question,
        prefix=call.prefix,
        order=call.order,
        forced=forced,
    )
    computed = None
    if ran != "dense":
        most = 1.0 if forced or backend != "auto" else tiled.most_expanded(call.inputs[0])
        in_graph = ran != "triton" and not has_values(call.inputs[0])
        compute = partial(tiles_in_graph, call) if in_graph else call.compute
        computed = compute(ran, tiling, question, most, certificate, fallback)
        over = f"expands more than {most:.0%} of the tiles"
        if computed is None:
            why = f"auto: {question} {over}, dense is faster"
        elif in_graph and most < 1.0:
            why = f"auto: tiles, or in the graph dense attention where {question} {over}"
    if computed is None:
        return _dense_attention(call, tiling, question, why, audit, like)
    result, bound, replaced = computed
    output, trees = result.output, call.trees(result, tiling, question, ran)
    stats = Stats(
        ran,
        "tiled",
        str(question),
        why,
        trees,
        bound,
        None if bound is None else "scores",
        replaced,
        call.audit(output, audit) if audit > 0 else None,
        result.expanded_count,
        tiling.tiles,
        call.existing(tiling, ran),
    )
    return Screened(output.to(call.inputs[0].dtype), trees, stats)


def _dense_attention(
    call: TileCall,
    tiling: Tiling,
    question: Budget,
    why: str,
    audit: float,
    like: Hashable | None,
) -> Screened:
    """Dense attention, which later calls like this one have without checks."""
    mask, tensors = call.dense_mask, call.without_absent
    dense = DenseCall(
        tensors, mask, tiling, question, why, call.prefix, call.scale, call.tau, call.on_demand
    )
    screened = dense(*tensors, mask)
    if like is not None and tiled.slower_than_dense(call.inputs[0], tiling, question) is not None:
        dense_attention.remember(like, dense)
    if audit > 0:
        screened.stats = replace(screened.stats, audit=call.audit(screened.output, audit))
    return screened


def _autocast(
    q: Tensor, k: Tensor, v: Tensor
) -> tuple[tuple[Tensor, Tensor, Tensor], AbstractContextManager[Any]]:
    """In the dtype that autocast asks of attention; what is computed inside is in none but its own."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_floating(name, tensor)
    kind = q.device.type
    if q.is_meta or not torch.is_autocast_enabled(kind):
        return (q, k, v), nullcontext()
    outside = torch.autocast(kind, enabled=False)
    if q.dtype == torch.float64:
        return (q, k, v), outside
    dtype = torch.get_autocast_dtype(kind)
    return (q.to(dtype), k.to(dtype), v.to(dtype)), outside


def _check_at_most_one(**choices: object) -> None:
    given = [name for name, choice in choices.items() if choice is not None]
    if len(given) > 1:
        raise ValueError(
            f"{' and '.join(given)} are given; pass at most one of {', '.join(choices)}"
        )


def _choose_rule(rule: Rule | str | None, error: float | None, leaves: float | int | None) -> Rule:
    if error is not None:
        return Optimal(error=error)
    if leaves is not None:
        return Optimal(leaves=leaves)
    return DEFAULT_RULE if rule is None else as_rule(rule)
