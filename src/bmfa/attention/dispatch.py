"""Which backend runs a call, and why.

The eager and reference backends run every call. Triton has one predicate for each form, which returns
None if the kernels can run a call and a reason if they cannot: it selects the backend for "auto", and
explains the refusal if Triton was requested. `dense_faster_reason` does the same for dense attention.

An error target on a CPU is decided later: the eager kernel counts the expanded tiles first, and `api.py`
runs dense attention if they are too many in every head (`AttentionOptions.exact_above`).
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bmfa.attention.dense import attention_operations
from bmfa.attention.inputs import AttentionInputs, Backend
from bmfa.attention.tiling import DEFAULT_ERROR, Budget, Tiling
from bmfa.grid import Grid
from bmfa.trees.rules import Rule

# The constants below are read off the records of `bmfa bench attention` on the q, k, v of DeiT-Tiny:
# records/attention-h200.json (CUDA) and records/attention-cpu.json.

# Spatial tokens from which the tiled form runs for an error target, and for a number of tiles. Which
# tiles a target expands depends on the data: with fewer tokens than 16,384 on CUDA, real models gain a
# tenth and random data lose a third, so that the choice would be a guess.
LEAST_TOKENS = {"cuda": 16384, "cpu": 2048}
LEAST_TOKENS_OF_BUDGET = {"cuda": 4096, "cpu": 2048}
# Time that an expanded tile adds, relative to the time that dense attention spends on a tile. On CUDA
# it is the slope of time over density at 16,384 tokens, 1.9 in records/attention-saliency-h200.json and
# 2.0 in records/attention-h200.json. On a CPU it is the inverse of a density of 0.43;
# both take equally long at 0.46 on two cores and 2,304 tokens
# (`bmfa bench attention --tokens 2304 --tiles 0 0.1 0.2 0.3 0.4 0.5`).
EXPANDED_COST = {"cuda": 1.9, "cpu": 2.3}
# Mean share of the tiles that an error target expands at 16,384 tokens: 15 % at the default target in
# records/attention-saliency-h200.json (DeiT-Tiny expands a fifth of that). It grows with about this
# power of the inverse of the target.
DEFAULT_EXPANDED_SHARE, SHARE_EXPONENT = 0.15, 1.5
# Part of the time of dense attention that tiles take more for queries with a grid of their own, at most:
# all that tiles take on CUDA if none is expanded, 0.16 at 16,384 tokens in records/attention-h200.json.
# The record has groups of two tiles, and such queries have groups of one: twice the representatives.
OWN_GRID_COST = {"cuda": 0.16, "cpu": 0.0}
# Operations of dense attention that the tiled form must save. On an H200 2e10 operations take about
# 0.04 ms, the time of the kernels that run before the attention itself; a call outside of a graph adds
# about 0.2 ms of host time for its launches (milliseconds_eager - milliseconds in the record).
LEAST_SAVED_OPERATIONS = {"cuda": 1e11, "cuda graph": 2e10, "cpu": 0.0}


class Choice(NamedTuple):
    """The backend that runs a call, or "dense", and why."""

    backend: str
    why: str


def choose_tiled(
    inputs: AttentionInputs, tiling: Tiling, budget: Budget, backend: Backend, *, allow_dense: bool
) -> Choice:
    """Choose the backend of the form "tiled".

    Args:
        inputs: Inputs of the call.
        tiling: Tiles of the grid.
        budget: Error target or number of tiles.
        backend: Requested backend, or "auto".
        allow_dense: True if "auto" may take dense attention instead.

    Raises:
        ValueError: If the requested backend cannot run the call.
    """
    unsupported = None
    if backend == "triton" or (backend == "auto" and inputs.q.is_cuda):
        unsupported = triton_tiles_unsupported_reason(inputs, tiling)
    if backend != "auto":
        if unsupported is not None:
            raise _unsupported_error(backend, unsupported)
        return Choice(backend, "requested")
    if allow_dense:
        q = inputs.q
        reason = dense_faster_reason(q.shape, q.device.type, tiling, budget, in_graph=in_graph(q))
        if reason is not None:
            return Choice("dense", f"auto: {reason}")
    if not inputs.q.is_cuda:
        return Choice("eager", "auto: eager runs on every device")
    if unsupported is None:
        return Choice("triton", "auto: triton supports the grid, the dtype and the device")
    fallback = "dense" if allow_dense else "eager"
    return Choice(fallback, f"auto: {fallback}, because triton cannot run: {unsupported}")


def choose_per_query(inputs: AttentionInputs, rule: Rule, backend: Backend) -> Choice:
    """Choose the backend of the forms with a tree for each query.

    Raises:
        ValueError: If the requested backend cannot run the call.
    """
    unsupported = None
    if backend == "triton" or (backend == "auto" and inputs.q.is_cuda):
        unsupported = triton_trees_unsupported_reason(inputs, rule)
    if backend != "auto":
        if unsupported is not None:
            raise _unsupported_error(backend, unsupported)
        return Choice(backend, "requested")
    if not inputs.q.is_cuda:
        return Choice("eager", "auto: eager supports every rule, dtype and device")
    if unsupported is None:
        return Choice(
            "triton", "auto: triton supports the grid, the rule, the dtype and the device"
        )
    return Choice("eager", f"auto: eager, because triton cannot run: {unsupported}")


def _unsupported_error(backend: str, reason: str) -> ValueError:
    return ValueError(
        f"backend={backend!r} cannot run this call: {reason}; pass backend='auto' or 'eager'"
    )


def triton_tiles_unsupported_reason(inputs: AttentionInputs, tiling: Tiling) -> str | None:
    """Return why the Triton kernels of the form "tiled" cannot run, or None if they can."""
    from bmfa.attention.kernels.triton.tiles import operators

    q, k, v = inputs.q, inputs.k, inputs.v
    return operators.unsupported_reason(q, k, v, tiling, inputs.prefix, inputs.order)


def triton_trees_unsupported_reason(inputs: AttentionInputs, rule: Rule) -> str | None:
    """Return why the Triton kernel for a tree for each query cannot run, or None if it can."""
    from bmfa.attention.kernels.triton.per_query import operators

    q, k, v = inputs.q, inputs.k, inputs.v
    return operators.unsupported_reason(q, k, v, inputs.grid, rule, inputs.valid)


def dense_faster_reason(
    shape: Sequence[int], device: str, tiling: Tiling, budget: Budget, *, in_graph: bool
) -> str | None:
    """Return why dense attention is expected to be faster, or None if the tiled form is.

    Args:
        shape: (B, H, Q, d), the shape of the queries.
        device: Type of the device, e.g. "cuda".
        tiling: Tiles of the grid, and groups of the queries.
        budget: Error target or number of tiles.
        in_graph: True if the launches are recorded in a graph, where host time does not count.
    """
    # Few keys leave little to summarise. Few queries on a large image are far apart, so that a group of
    # them expands as much as on a small image, and the probes and statistics of tiles cost as much.
    size = min(tiling.grid.size, tiling.queries.grid.size)
    if math.prod(shape) == 0:
        return "the call has no queries"
    tokens = LEAST_TOKENS_OF_BUDGET if budget.error is None else LEAST_TOKENS
    least = tokens.get(device, tokens["cpu"])
    if size < least:
        return f"dense attention is as fast below {least} tokens, and there are {size}"
    if budget.error and device != "cuda":
        return None  # the eager kernel counts the expanded tiles before it reads their tokens
    share = expected_share(budget, tiling.tiles)
    relative_time, keys = expanded_cost(device) * share, None
    if tiling.query_grid is not None:
        relative_time += OWN_GRID_COST.get(device, 0.0)
        keys = tiling.grid.size
    saved = attention_operations(shape, keys) * (1.0 - relative_time)
    if saved >= LEAST_SAVED_OPERATIONS.get("cuda graph" if in_graph else device, 0.0):
        return None
    if torch.compiler.is_compiling():  # the share may be a symbol, which has no format ".0%"
        return "tiles save less than they cost"
    return f"{budget} would expand {share:.0%} of the tiles, which saves less than tiles cost"


def may_run_dense(options: dict[str, Any]) -> bool:
    """True if a call with these arguments of `screened_attention` takes dense attention where faster."""
    forced = ("rule", "form", "certificate", "fallback")
    return options.get("backend", "auto") == "auto" and not any(
        options.get(name) not in (None, False) for name in forced
    )


def dense_reason(
    shape: Sequence[int],
    dtype: torch.dtype,
    device: str,
    grid: Grid,
    options: dict[str, Any],
    *,
    in_graph: bool,
) -> str | None:
    """Return why a call runs dense whatever its values are, or None if that is not certain.

    It reads no tensor, so a model can decide before it computes q, k and v.

    Args:
        shape: (B, H, prefix + N, d), the shape of the queries.
        dtype: Dtype of the queries.
        device: Type of the device, e.g. "cuda".
        grid: Grid of the spatial tokens.
        options: Arguments of `screened_attention`.
        in_graph: True if the launches are recorded in a graph, where host time does not count.
    """
    if not may_run_dense(options):
        return None
    tiling = Tiling(grid)
    budget = Budget.of(tiling, options.get("error"), options.get("leaves"))
    reason = dense_faster_reason(shape, device, tiling, budget, in_graph=in_graph)
    return None if reason is None else f"auto: {reason}"


def expected_share(budget: Budget, tiles: int) -> float:
    """Share of the tiles that are expanded: exact for a number of tiles, estimated for a target."""
    if budget.expand is not None:
        return budget.expand / tiles
    if not budget.error:
        return 1.0
    growth: float = (DEFAULT_ERROR / budget.error) ** SHARE_EXPONENT
    return min(1.0, DEFAULT_EXPANDED_SHARE * growth)


def expanded_cost(device: str) -> float:
    """Time of an expanded tile relative to the time that dense attention spends on a tile."""
    return EXPANDED_COST.get(device, EXPANDED_COST["cpu"])


def in_graph(q: Tensor) -> bool:
    """True if the launches of a call are recorded, in a compiled graph or a CUDA graph."""
    if not q.is_cuda:
        return False
    return torch.compiler.is_compiling() or torch.cuda.is_current_stream_capturing()
