"""The public function `screened_attention`: checks, one choice of a backend, one result."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar, get_args

import torch
from torch import Tensor

from bmfa.attention.dense import dense_attention, native_dense_attention
from bmfa.attention.dispatch import (
    Choice,
    choose_per_query,
    choose_tiled,
    dense_threshold,
    in_graph,
    may_run_dense,
)
from bmfa.attention.graph_operator import compute_in_graph
from bmfa.attention.inputs import (
    AttentionInputs,
    AttentionOptions,
    Backend,
    check_inputs,
)
from bmfa.attention.per_query import compute_per_query
from bmfa.attention.result import Computed, ErrorEstimate, Screened, Stats
from bmfa.attention.tiles import compute_tiled, dense_tree
from bmfa.attention.tiling import Budget
from bmfa.checks import check_floating, check_integer, has_values
from bmfa.grid import Grid, check_one_frame
from bmfa.trees.rules import Rule, as_rule

_P = ParamSpec("_P")
_R = TypeVar("_R")
# Arguments of scaled_dot_product_attention that are not supported, and what to pass instead.
_SDPA_ARGUMENTS = {
    "attn_mask": "pass valid=, a torch.bool mask of the valid spatial tokens; biases and masks that "
    "differ between queries are not supported",
    "dropout_p": "attention dropout is not supported; leave the argument out",
    "is_causal": "tokens of a grid have no causal order, and every query sees every token; leave the "
    "argument out",
    "enable_gqa": "k and v may have fewer heads than q without it; leave the argument out",
}


def _explain_sdpa_arguments(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Raise a TypeError that says what to pass instead of arguments of SDPA."""

    @wraps(function)
    def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if len(args) > 3 or "grid" not in kwargs or any(name in kwargs for name in _SDPA_ARGUMENTS):
            _raise_for_arguments(args, kwargs)
        return function(*args, **kwargs)

    return wrapper


def _raise_for_arguments(args: tuple[object, ...], kwargs: dict[str, object]) -> None:
    for name, hint in _SDPA_ARGUMENTS.items():
        if name in kwargs:
            raise TypeError(f"screened_attention takes no {name}: {hint}")
    if len(args) > 3:
        raise TypeError(
            f"screened_attention takes q, k and v as positional arguments and got {len(args)}; name "
            "the others: grid=, prefix=, valid=; for an attention mask, pass valid="
        )
    raise TypeError(
        "screened_attention got no grid; pass grid=(height, width), the grid of the spatial tokens, "
        "and prefix=, the number of class and register tokens before them"
    )


@_explain_sdpa_arguments
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
    query_grid: Grid | tuple[int, int] | None = None,
    allow_dense: bool = True,
    backend: Backend = "auto",
) -> Screened:
    """Compute attention with the spatial keys of each query summarised by blocks.

    Without a rule attention is tiled, which is fast for long sequences. Keys and queries are divided
    into tiles of 8 x 8 tokens. A representative for the queries of a tile, their mean, sees every token
    exactly. It decides which tiles of keys are expanded, that is, read token by token, and summarises
    each of the others by a mean key and a mean value. Some queries, the probes, are attended exactly as
    well: they measure the error of the output and decide how many tiles are expanded.
    `backend="auto"` runs dense attention where that is faster, unless `allow_dense` is False.

    With a rule every query and head has a tree of its own, and q may have any number of queries.

    In a graph of torch.compile or torch.export a call is one operator, or dense attention;
    torch.jit.trace is refused. Calls on CUDA, and calls of dense attention or of Triton kernels in a
    graph, do not wait for the device, so a NaN in q or k appears in the outputs that read it; other
    calls raise. On the meta device and for fake tensors the output has its shape and dtype.

    Args:
        q: (B, H, Q, d) queries, as in `scaled_dot_product_attention`. Without a rule, Q = prefix + N,
            or as many as `query_grid` has.
        k: (B, H, prefix + N, d) keys: prefix tokens first, then the N spatial tokens. It may have fewer
            heads, whose number divides H: consecutive query heads share a key head.
        v: (B, H, prefix + N, e) values, of the heads, dtype and device of k.
        grid: Grid of the N spatial tokens, or its sides (height, width). `Grid(height, width,
            frames=T)` is for the tokens of T images that attend to each other; it takes no rule.
        prefix: Number of class, register and other tokens before the grid. They are always exact.
        rule: A rule of `bmfa.rules`, or its name, e.g. `"gamma:0.005"`: a tree for each query. At most
            one of `rule`, `error` and `leaves` is given.
        error: For tiles, the target for the relative L2 error of the output,
            sqrt(sum |output - exact|^2 / sum |exact|^2) over the call. It is measured by probes;
            `stats.error` has the result. A call that misses it is computed again, once with more tiles
            and then exactly; Triton warns. 0 computes exactly. Default: 0.03. A tree for each query
            takes `rule=bmfa.rules.Optimal(error=...)`, whose error is E, in units of scores.
        leaves: For tiles, a budget of leaves, on average over the groups of an image: a float in (0, 1]
            is a fraction of the tokens, an int of at least 2 is a count. It is rounded down to whole
            tiles, and counts invalid tokens. Every tile has at least one leaf, so a budget below the
            number of tiles is exceeded.
        tau: Temperature, above 0.
        scale: Factor of q . k. Default: 1 / sqrt(d).
        max_depth: Depth at which a rule splits no block. None goes down to single tokens.
        valid: torch.bool, (N,), (B, N) or (B, 1, 1, N): True for spatial tokens that exist. The others
            may hold any value. With Q = prefix + N, the outputs of invalid queries are undefined.
        query_grid: For tiles, the grid of the queries where it is not that of the keys, as in
            cross-attention or with pooled queries. Queries before those of the grid are exact, and
            `valid` is a mask of the keys alone.
        allow_dense: If False, "auto" runs tiles even where dense attention is faster. A rule, or another
            backend, never runs dense attention.
        backend: `"auto"`, `"native"` (C++ on a CPU, no gradients), `"eager"` (torch operations),
            or `"triton"` (CUDA, no gradients).

    Returns:
        A `Screened`, which unpacks as `output, stats`: the output is (B, H, Q, e) in the dtype of q.
        `.tree` builds the trees of every query on demand, and `bmfa.certify` proves a bound on the
        distance of the output from exact attention.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If shapes, values or settings do not fit, or the backend cannot run the call.
        RuntimeError: If the call is traced by torch.jit.trace.

    Example:
        >>> import torch, bmfa
        >>> q, k, v = torch.randn(3, 1, 2, 1 + 4096, 32, generator=torch.Generator().manual_seed(0))
        >>> output, stats = bmfa.screened_attention(q, k, v, grid=(64, 64), prefix=1, leaves=0.25)
        >>> output.shape, stats.form, stats.leaf_ratio < 0.3
        (torch.Size([1, 2, 4097, 32]), 'tiled', True)
        >>> exact = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        >>> screened = bmfa.screened_attention(q, k, v, grid=(64, 64), prefix=1, leaves=1.0)
        >>> torch.allclose(screened.output, exact, atol=1e-5)
        True
    """
    if torch._C._get_tracing_state() is not None:
        raise RuntimeError(
            "screened_attention cannot be traced by torch.jit.trace: a trace would keep the tiles and "
            "trees of the example for all inputs; use torch.compile or torch.export.export"
        )
    check_choices(allow_dense, backend, rule=rule, error=error, leaves=leaves)
    if max_depth is not None:
        max_depth = check_integer("max_depth", max_depth, low=0)
    q, k, v, outside_autocast = _cast_for_autocast(q, k, v)
    with outside_autocast:
        inputs = check_inputs(
            q, k, v, grid=grid, prefix=prefix, tau=tau, scale=scale, valid=valid,
            query_grid=query_grid,
        )  # fmt: skip
        if rule is not None:
            check_one_frame(inputs.grid, "a rule")
            chosen = as_rule(rule)
            run = choose_per_query(backend)
            options = AttentionOptions(
                "tree",
                run.backend,
                rule=chosen,
                max_depth=max_depth,
            )
            compute = compute_per_query if has_values(q) else compute_in_graph
            return _screened(inputs, options, compute(inputs, options), run.reason)
        _check_tiled_form(inputs, max_depth)
        tiling = inputs.tiling
        budget = Budget.from_arguments(tiling, error, leaves)
        allowed = may_run_dense({"allow_dense": allow_dense, "backend": backend})
        run = choose_tiled(inputs, tiling, budget, backend, allow_dense=allowed)
        if run.exact:
            native = run.backend == "native"
            output = (
                native_dense_attention(inputs) if native else dense_attention(inputs, in_graph(q))
            )
            return _dense(inputs, output, budget, run)
        options = AttentionOptions(
            "tiled",
            run.backend,
            budget=budget,
            dense_threshold=dense_threshold(budget, run.backend),
        )
        return _tiled(inputs, options, run.reason, allowed)


def _tiled(
    inputs: AttentionInputs, options: AttentionOptions, reason: str, allow_dense: bool
) -> Screened:
    """Run the form "tiled", or dense attention if too many tiles would be expanded."""
    assert options.budget is not None
    percent = round(
        100 * options.dense_threshold
    )  # torch.compile cannot format the attribute with ".0%"
    over = f"{options.budget} expands more than {percent}% of the tiles"
    if options.backend == "triton" or has_values(inputs.q):
        computed = compute_tiled(inputs, options)
    else:
        computed = compute_in_graph(inputs, options)
        if options.dense_threshold < 1.0:
            reason = f"auto: tiles, or dense attention inside the operator if {over}"
    if computed.missed:
        over = f"tiles missed {options.budget}, as their probes measured it"
    if computed.dense and allow_dense:
        reason = f"auto: {over}" + ("" if computed.missed else ", dense is faster")
        backend = "native" if options.backend == "native" else "dense"
        return _dense(inputs, computed.output, options.budget, Choice(backend, reason))
    if computed.dense:
        reason = f"{reason}; {over}, and every tile is expanded"
    return _screened(inputs, options, computed, reason)


def _dense(inputs: AttentionInputs, output: Tensor, budget: Budget, run: Choice) -> Screened:
    """Wrap the output of dense attention."""
    stats = Stats(
        run.backend,
        "dense",
        str(budget),
        run.reason,
        measure_error=partial(ErrorEstimate, budget.error, 0.0, 0.0, 0.0, 0),
    )
    return Screened(output, stats, partial(dense_tree, inputs, budget), inputs)


def _screened(
    inputs: AttentionInputs,
    options: AttentionOptions,
    computed: Computed,
    reason: str,
) -> Screened:
    rule = options.rule
    stats = Stats(
        options.backend,
        options.form,
        str(options.budget if rule is None else rule),
        reason,
        None if computed.tiled is None else computed.tiled.expanded_count,
        computed.measure_density,
        computed.measure_leaf_ratio,
        computed.measure_error,
    )
    return Screened(computed.output, stats, computed.make_tree, inputs, computed.tiled)


def check_choices(allow_dense: object, backend: object, **exclusive: object) -> None:
    """Check the options with a fixed set of values, and that at most one criterion is given."""
    if not isinstance(allow_dense, bool):
        raise TypeError(f"allow_dense is {allow_dense!r}; pass True or False")
    if backend not in get_args(Backend):
        raise ValueError(f"backend is {backend!r}; pass one of {', '.join(get_args(Backend))}")
    given = [name for name, value in exclusive.items() if value is not None]
    if len(given) > 1:
        raise ValueError(
            f"{' and '.join(given)} are given; pass at most one of {', '.join(exclusive)}"
        )


def _check_tiled_form(inputs: AttentionInputs, max_depth: int | None) -> None:
    """Refuse what a call without a rule cannot run."""
    if max_depth is not None:
        raise ValueError(
            f"max_depth is {max_depth}, which limits trees, and no rule is given; pass rule=, e.g. "
            "bmfa.rules.Optimal(error=0.05), or leave max_depth out"
        )
    if inputs.query_grid is None and not inputs.self_attention:
        raise ValueError(
            f"a call without a rule takes a query for each of {inputs.tokens} tokens, and q has "
            f"{inputs.q.shape[2]}; pass query_grid=, the grid of the queries, or rule=, e.g. "
            "bmfa.rules.Optimal(error=0.05), for a tree for each query"
        )


def _cast_for_autocast(
    q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor, AbstractContextManager[Any]]:
    """Cast to the dtype of autocast, as SDPA does; the context disables autocast inside the call."""
    kind = q.device.type if isinstance(q, Tensor) else "meta"
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return q, k, v, nullcontext()
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_floating(name, tensor)
    outside = torch.autocast(kind, enabled=False)
    if q.dtype == torch.float64:
        return q, k, v, outside
    dtype = torch.get_autocast_dtype(kind)
    return q.to(dtype), k.to(dtype), v.to(dtype), outside
