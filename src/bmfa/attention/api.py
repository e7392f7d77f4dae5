"""The public function `screened_attention`: checks, one choice of a backend, one result."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial, wraps
from typing import ParamSpec, TypeVar, get_args

import torch
from torch import Tensor

from bmfa.attention.call import Backend, Call, cast_for_autocast, check_mask
from bmfa.attention.dense import dense_attention
from bmfa.attention.dispatch import choose, dense_threshold, in_graph, run_tiles, too_many
from bmfa.attention.graph_operator import run_in_graph
from bmfa.attention.result import Screened, Stats
from bmfa.attention.trees import attend_trees, build_trees
from bmfa.checks import check_flag, has_values
from bmfa.grid import Grid
from bmfa.trees.rules import Rule
from bmfa.trees.tree import Tree

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
        for name in _SDPA_ARGUMENTS:
            if name in kwargs:
                raise TypeError(f"screened_attention takes no {name}: {_SDPA_ARGUMENTS[name]}")
        if len(args) > 3:
            raise TypeError(
                f"screened_attention takes q, k and v as positional arguments and got {len(args)}; "
                "name the others: grid=, prefix=, valid=; for an attention mask, pass valid="
            )
        if "grid" not in kwargs:
            raise TypeError(
                "screened_attention got no grid; pass grid=(height, width), the grid of the spatial "
                "tokens, and prefix=, the number of class and register tokens before them"
            )
        return function(*args, **kwargs)

    return wrapper


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
    _caller: tuple[str, ...] = (),
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
    q, k, v, outside_autocast = cast_for_autocast(q, k, v)
    with outside_autocast:
        call = Call.from_arguments(
            q, k, v, grid=grid, prefix=prefix, rule=rule, error=error, leaves=leaves, tau=tau,
            scale=scale, max_depth=max_depth, query_grid=query_grid, caller=_caller,
        )  # fmt: skip
        valid = None if valid is None else check_mask(valid, q, call)
        chosen, reason, exact = choose(q, k, v, call, backend, allow_dense)
        if exact:
            output = dense_attention(q, k, v, valid, call, chosen, in_graph(q))
            return Screened(output, Stats(chosen, "dense", reason, call, valid))
        threshold = dense_threshold(call.error, chosen)
        call = replace(call, backend=chosen, dense_threshold=threshold)
        if rule is not None:
            return _attend_trees(q, k, v, valid, call, reason)
        return _attend_tiles(q, k, v, valid, call, reason, allow_dense and backend == "auto")


def _attend_trees(
    q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None, call: Call, reason: str
) -> Screened:
    if has_values(q):
        output, tree = attend_trees(q, k, v, valid, call)
        make_tree = partial(_identity, tree)
    else:
        output = run_in_graph(q, k, v, valid, call).output
        make_tree = partial(build_trees, q.detach(), k.detach(), valid, call)
    stats = Stats(call.backend, "tree", reason, call, valid, make_tree=make_tree)
    return Screened(output, stats)


# A function of the module instead of a lambda: results of compiled graphs hold it.
def _identity(tree: Tree) -> Tree:
    return tree


def _attend_tiles(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    valid: Tensor | None,
    call: Call,
    reason: str,
    allow_dense: bool,
) -> Screened:
    """Attend over tiles, or exactly where they are too many or miss their target."""
    if call.backend == "triton" or has_values(q):
        tiles, exact = run_tiles(q, k, v, valid, call)
        if exact and allow_dense:
            backend = "native" if call.backend == "native" else "dense"
            reason = f"auto: {exact}"
            return Screened(tiles.output, Stats(backend, "dense", reason, call, valid))
        if exact:
            reason = f"{reason}; attention is exact, because {exact}"
    else:
        tiles = run_in_graph(q, k, v, valid, call)
        if call.dense_threshold < 1.0:
            reason = f"auto: tiles, or dense attention inside the operator if {too_many(call)}"
    return Screened(tiles.output, Stats(call.backend, "tiled", reason, call, valid, tiles))


def check_choices(allow_dense: object, backend: object, **exclusive: object) -> None:
    """Check the options with a fixed set of values, and that at most one criterion is given."""
    check_flag("allow_dense", allow_dense)
    if backend not in get_args(Backend):
        raise ValueError(f"backend is {backend!r}; pass one of {', '.join(get_args(Backend))}")
    given = [name for name, value in exclusive.items() if value is not None]
    if len(given) > 1:
        raise ValueError(
            f"{' and '.join(given)} are given; pass at most one of {', '.join(exclusive)}"
        )
