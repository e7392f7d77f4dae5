"""Screened attention on q, k, v: checks, chooses a backend, returns output, trees and statistics."""

from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bmfa import dense_attention, tiled
from bmfa.checks import check_floating, check_integer, check_number
from bmfa.dense_attention import DenseCall
from bmfa.grid import Grid
from bmfa.rules import Optimal, Rule
from bmfa.screened import Audit, Screened, Stats
from bmfa.tile_attention import TileCall
from bmfa.tiling import Tiling
from bmfa.tree_attention import TreeCall

__all__ = ["Audit", "Screened", "Stats", "screened_attention"]

BACKENDS = ("auto", "eager", "reference", "triton")
FORMS = ("representative", "repeated", "tiled")
DEFAULT_RULE = Optimal(error=0.05)


def screened_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    grid: Grid,
    prefix: int = 0,
    rule: Rule | None = None,
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
    """Attention with the spatial keys of each query summarised by blocks, as exactly as is asked.

    q, k, v are (B, heads, prefix + N, d) as in scaled_dot_product_attention, prefix tokens first and
    always exact, spatial tokens in raster or, `order="z"`, in Z-order. At most one of `rule`, `error`
    and `leaves` is given.

    Without a rule the form is "tiled", the fast one for long sequences: 8x8 tiles of keys, queries in
    groups of two tiles, one representative query for each group that sees every token exactly. It
    chooses the tiles that are expanded, and corrects the mass and the values of the others. `error` is
    a target for the mean E of a group before these corrections (0.1 where nothing is given), estimated
    at the representative and from how far the queries lie apart; `leaves` is a budget: a float is a
    fraction of the tokens, an int a count. "auto" takes dense attention where that is faster.

    With a rule, or with `form` "representative" (one logit M + tau log n and one mean value for each
    leaf) or "repeated" (every score replaced by its leaf's mean: the same output), every query and
    head has a tree of its own and `error` and `leaves` hold for each of them; q may have any number
    of queries.

    `audit` recomputes that fraction of the queries exactly and reports their error; `certificate`
    bounds E of every query, and `fallback` recomputes exactly the queries whose certificate exceeds
    it. `stats` says what ran and why. The Triton kernels serve CUDA, without gradients. Calls on CUDA
    and compiled ones wait for nothing, and so let a NaN in q or k through to the outputs that read it,
    where the others raise.
    """
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
        check_integer("max_depth", max_depth, low=0)
    check_number("audit", audit, low=0.0, high=1.0)
    if fallback is not None:
        check_number("fallback", fallback, low=0.0)
    _check_at_most_one(rule=rule, error=error, leaves=leaves)
    tokens, precision = _autocast(q, k, v)
    inputs = (*tokens, grid, prefix, tau, scale, valid, order)
    with precision:
        if form == "tiled" or (form is None and rule is None and max_depth is None):
            if rule is not None or max_depth is not None:
                raise ValueError(
                    "form='tiled' takes no rule and no max_depth; pass error= or leaves="
                )
            call = TileCall(*inputs)
            if form == "tiled" or call.self_attention:
                return _tiled_attention(
                    call, error, leaves, form, backend, audit, certificate, fallback, like
                )
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
    output, trees = call.run(ran, chosen, max_depth, form)
    bound = None
    if certificate or fallback is not None:
        bound = call.certificate(chosen, trees.tree)
    replaced = 0
    if fallback is not None and bound is not None:
        output, replaced = call.fall_back(output, ~(bound <= fallback))
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
    question = tiled.Question.of(tiling, error, leaves)
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
    result = None
    if ran != "dense":
        most = 1.0 if forced or backend != "auto" else 1.0 / tiled.expanded_cost(call.inputs[0])
        result = call.attend(ran, tiling, question, most)
        if result is None:
            why = f"auto: {question} expands more than {most:.0%} of the tiles, dense is faster"
    if result is None:
        return _dense_attention(call, tiling, question, why, audit, like)
    trees = call.trees(result, tiling, question, ran)
    output, bound, replaced = result.output, None, 0
    if certificate or fallback is not None:
        bound = call.certificate(result, tiling, ran)
    if fallback is not None and bound is not None:
        output, replaced = call.fall_back(output, ~(bound <= fallback))
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
        result.counts,
        tiling.tiles,
        call.existing(tiling, ran),
    )
    return Screened(output.to(call.inputs[0].dtype), trees, stats)


def _dense_attention(
    call: TileCall,
    tiling: Tiling,
    question: tiled.Question,
    why: str,
    audit: float,
    like: Hashable | None,
) -> Screened:
    """Dense attention, which later calls like this one have without checks."""
    mask, tensors = call.dense_mask(), call.inputs
    if mask is not None:
        there = mask.transpose(-1, -2)
        q, k, v = (x.where(there, 0.0) for x in tensors)  # what does not exist may hold anything
        tensors = (q, k, v)
    dense = DenseCall(
        tensors, mask, tiling, question, why, call.prefix, call.scale, call.tau, call.valid
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
    if not torch.is_autocast_enabled(kind):
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


def _choose_rule(rule: Rule | None, error: float | None, leaves: float | int | None) -> Rule:
    if error is not None:
        return Optimal(error=error)
    if leaves is not None:
        return Optimal(leaves=leaves)
    if rule is not None and not isinstance(rule, Rule):
        raise TypeError(f"rule is {rule!r}; pass one of bmfa.rules, e.g. rules.Gamma(0.005)")
    return DEFAULT_RULE if rule is None else rule
