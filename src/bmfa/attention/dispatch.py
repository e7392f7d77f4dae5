"""Which backend runs a call, and why.

The eager backend runs every call. The native kernels and Triton have one predicate, which returns None
if the kernels can run a call and a reason if they cannot: it selects the backend for "auto" and explains
the refusal of a requested one. `dense_faster_reason` does the same for dense attention.

An error target on a CPU is decided later: the kernels count the expanded tiles first, and attend exactly
in heads in which they are too many (`Call.dense_threshold`). `run_tiles` runs what was chosen.
"""

import math
import platform
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bmfa.attention.call import Backend, Call, budget, check_finite_scores, zero_invalid
from bmfa.attention.dense import attention_operations, dense_attention
from bmfa.attention.kernels import native
from bmfa.attention.kernels.native import library
from bmfa.attention.result import check_later, excess_of_probes, warn_if_missed
from bmfa.attention.tiling import (
    DEFAULT_ERROR,
    MOST_EXCESS,
    RETRY_AIM,
    TiledAttention,
    slots_with_tokens,
)
from bmfa.checks import has_values, is_compiling
from bmfa.grid import Grid

# Constants of the backends: "cuda" is Triton, "native" the C++ kernels on x86-64, "neon" those on ARM,
# which nobody has measured and which are cautious, and "eager" torch operations. Those of CUDA are read
# off the records of `bmfa bench attention` on the q, k, v of DeiT-Tiny,
# records/attention-h200.json. The native ones are printed by, on q, k, v of the same model,
#   BMFA_NATIVE=avx512 bmfa bench attention --threads 1 --threads 2 --repeats 15
#     --tokens 64 --tokens 144 --tokens 256 --tokens 576 --tokens 1024 --tokens 2304 --tokens 4096
#     --method tiles:0 --method tiles:0.1 --method tiles:0.3 --method error:0.03
# and likewise for avx2 and baseline. Those of eager are read off records/attention-cpu.json.
NATIVE = "neon" if platform.machine().lower() in ("arm64", "aarch64") else "native"

# Spatial tokens from which the tiled form runs for an error target, and for a number of tiles. Which
# tiles a target expands depends on the data: with fewer tokens than 16,384 on CUDA, real models gain a
# tenth and random data lose a third, so that the choice would be a guess. Native tiles at the default
# target are slower than native exact attention with 1,024 tokens, where they expand 60 % of the tiles,
# and faster with 4,096 (records/model-cpu.json). Torch operations on a CPU are no faster than dense
# attention with 4,096 tokens.
LEAST_TOKENS = {"cuda": 16384, "native": 2304, "neon": 4096, "eager": 16384}
LEAST_TOKENS_OF_BUDGET = {"cuda": 4096, "native": 1024, "neon": 4096, "eager": 4096}
# Queries times keys of all heads from which exact attention by the native kernel is faster than that of
# torch, whose threads are already running. By instruction set: torch takes the best one in any case.
# With 3 heads of 256 tokens on a processor that has AVX-512, avx512 is 2.0 times as fast as torch, avx2
# 1.15 times and baseline 0.4 times; with 64 tokens avx512 is about as fast and avx2 slower.
LEAST_EXACT_SCORES = {
    **dict.fromkeys(("avx512", "avx2"), 3 * 128**2),
    **dict.fromkeys(("baseline", "neon"), math.inf),
}
# Time that an expanded tile adds, relative to the time that dense attention spends on a tile. On CUDA
# it is the slope of time over density at 16,384 tokens, 1.9 in records/attention-saliency-h200.json and
# 2.0 in records/attention-h200.json. The native kernel expands a tile in the time of exact attention.
EXPANDED_COST = {"cuda": 1.9, "native": 1.15, "neon": 2.3, "eager": 2.3}
# Mean share of the tiles that an error target expands at 16,384 tokens: 15 % at the default target in
# records/attention-saliency-h200.json (DeiT-Tiny expands a fifth of that). It grows with about this
# power of the inverse of the target.
DEFAULT_EXPANDED_SHARE, SHARE_EXPONENT = 0.15, 1.5
# Part of the time of dense attention that tiles take more for queries with a grid of their own, at most:
# all that tiles take on CUDA if none is expanded, 0.16 at 16,384 tokens in records/attention-h200.json.
# The record has groups of two tiles, and such queries have groups of one: twice the representatives.
OWN_GRID_COST = {"cuda": 0.16, "native": 0.0, "neon": 0.0, "eager": 0.0}
# Operations of dense attention that the tiled form must save. On an H200 2e10 operations take about
# 0.04 ms, the time of the kernels that run before the attention itself; a call outside of a graph adds
# about 0.2 ms of host time for its launches (milliseconds_eager - milliseconds in the record).
LEAST_SAVED_OPERATIONS = {"cuda": 1e11, "cuda graph": 2e10}


class Choice(NamedTuple):
    """The backend that runs a call, and why. Backend "dense" is `scaled_dot_product_attention`."""

    backend: str
    reason: str
    exact: bool = False  # True for dense attention, by "dense" or "native"


def choose(
    q: Tensor, k: Tensor, v: Tensor, call: Call, backend: Backend, allow_dense: bool
) -> Choice:
    """Choose what runs a call.

    Args:
        q: Queries, as in `Call`.
        k: Keys.
        v: Values.
        call: Description of the call.
        backend: Requested backend, or "auto".
        allow_dense: True if "auto" may take dense attention instead of tiles.

    Raises:
        ValueError: If the requested backend cannot run the call.
    """
    if backend == "eager":
        return Choice("eager", "requested")
    fast = "triton" if q.is_cuda else "native"  # of the device, if it can run
    if backend != "auto":
        refusal: str | None = "a rule has a tree for each query, and it runs tiles"
        if call.rule is None:
            refusal = tiles_unsupported_reason(backend, q, k, v, call)
        if refusal is not None:
            raise ValueError(
                f"backend={backend!r} cannot run this call: {refusal}; pass backend='auto' or 'eager'"
            )
        return Choice(backend, "requested")
    if call.rule is not None:
        return Choice("eager", "auto: eager supports every rule, dtype and device")
    unsupported = tiles_unsupported_reason(fast, q, k, v, call)
    if allow_dense:
        exact = _choose_exact(q.shape, fast, unsupported, call, in_graph=in_graph(q))
        if exact is not None:
            return exact if has_values(q) else exact._replace(backend="dense")
    if unsupported is not None:
        return Choice("eager", f"auto: eager, because {fast} cannot run: {unsupported}")
    return Choice(fast, f"auto: {fast} supports the grid, the dtype and the device")


def _choose_exact(
    shape: Sequence[int], fast: str, unsupported: str | None, call: Call, *, in_graph: bool
) -> Choice | None:
    """Choose what runs dense attention, the native kernel or SDPA; None if tiles are faster.

    Args:
        shape: (B, H, Q, d), the shape of the queries.
        fast: Fast backend of the device, "native" or "triton".
        unsupported: Why it cannot run, or None.
        call: Description of the call.
        in_graph: True if the launches are recorded in a graph, where host time does not count.
    """
    cost = "cuda" if fast == "triton" else NATIVE
    reason = dense_faster_reason(shape, cost, call, in_graph=in_graph)
    if reason is None and unsupported is not None:
        slow = dense_faster_reason(shape, "eager", call, in_graph=in_graph)
        if fast == "triton" or slow is not None:
            reason = f"dense, because {fast} cannot run: {unsupported}"
    if reason is None:
        return None
    native_runs = fast == "native" and unsupported is None and not is_compiling()
    if native_runs:
        least = LEAST_EXACT_SCORES[library.instruction_set() or NATIVE]
        native_runs = math.prod(shape[:3]) * (call.prefix + call.grid.size) >= least
    return Choice("native" if native_runs else "dense", f"auto: {reason}", exact=True)


def tiles_unsupported_reason(
    backend: str, q: Tensor, k: Tensor, v: Tensor, call: Call
) -> str | None:
    """Return why the kernels of a backend, "native" or "triton", cannot run over tiles, or None."""
    if backend == "native":
        return native.unsupported_reason(q, k, v)
    from bmfa.attention.kernels.triton.tiles import operators

    return operators.unsupported_reason(q, k, v, call.tiling, call.prefix)


def dense_faster_reason(
    shape: Sequence[int], backend: str, call: Call, *, in_graph: bool
) -> str | None:
    """Return why dense attention is expected to be faster, or None if tiles are.

    Args:
        shape: (B, H, Q, d), the shape of the queries.
        backend: "cuda", "native", "neon" or "eager", whose costs decide.
        call: Description of the call.
        in_graph: True if the launches are recorded in a graph, where host time does not count.
    """
    if math.prod(shape) == 0:
        return "the call has no queries"
    # Few keys leave little to summarise. Few queries on a large image are far apart, so that a group of
    # them expands as much as on a small image, and the probes and statistics of tiles cost as much.
    size = call.grid.size if call.query_grid is None else min(call.grid.size, call.query_grid.size)
    tokens = LEAST_TOKENS_OF_BUDGET if call.error is None else LEAST_TOKENS
    least = tokens[backend]
    if size < least:
        return f"dense attention is as fast below {least} tokens, and there are {size}"
    if call.error and backend != "cuda":
        return None  # the kernels count the expanded tiles before they read their tokens
    share = expected_share(call)
    relative_time, keys = EXPANDED_COST[backend] * share, None
    if call.query_grid is not None:
        relative_time += OWN_GRID_COST[backend]
        keys = call.grid.size
    saved = attention_operations(shape, keys) * (1.0 - relative_time)
    least_saved = LEAST_SAVED_OPERATIONS.get("cuda graph" if in_graph else backend, 0.0)
    if saved > 0 and saved >= least_saved:
        return None
    if is_compiling():  # the share may be a symbol, which has no format ".0%"
        return "tiles save less than they cost"
    return f"{call.setting} would expand {share:.0%} of the tiles, which saves less than tiles cost"


def may_run_dense(options: dict[str, Any]) -> bool:
    """True if a call with these arguments of `screened_attention` takes dense attention where faster."""
    return (
        options.get("backend", "auto") == "auto"
        and options.get("allow_dense", True)
        and options.get("rule") is None
    )


def exact_choice(
    shape: Sequence[int],
    dtype: torch.dtype,
    device: str,
    grid: Grid,
    options: dict[str, Any],
    *,
    in_graph: bool,
    requires_grad: bool = False,
) -> Choice | None:
    """Return what runs a call that is exact whatever its values are, or None if that is not certain.

    It reads no tensor, so a model can decide before it computes q, k and v.

    Args:
        shape: (B, H, prefix + N, d), the shape of the queries.
        dtype: Dtype of the queries.
        device: Type of the device, e.g. "cuda".
        grid: Grid of the spatial tokens.
        options: Arguments of `screened_attention`.
        in_graph: True if the launches are recorded in a graph, where host time does not count.
        requires_grad: True if gradients are required.
    """
    if not may_run_dense(options):
        return None
    error, expand = budget(grid, options.get("error"), options.get("leaves"))
    call = Call(grid, shape[2], shape[2] - grid.size, error=error, expand=expand)
    fast, unsupported = "triton", None
    if device != "cuda":
        fast = "native"
        unsupported = native.unsupported_kind(device, dtype, shape[3], requires_grad)
    return _choose_exact(shape, fast, unsupported, call, in_graph=in_graph)


def expected_share(call: Call) -> float:
    """Share of the tiles that are expanded: exact for a number of tiles, estimated for a target."""
    if call.expand is not None:
        return call.expand / call.tiling.tiles
    if not call.error:
        return 1.0
    growth: float = (DEFAULT_ERROR / call.error) ** SHARE_EXPONENT
    return min(1.0, DEFAULT_EXPANDED_SHARE * growth)


def dense_threshold(error: float | None, backend: str) -> float:
    """Share of expanded tiles above which exact attention is faster; a budget of leaves has no such
    limit."""
    cost = EXPANDED_COST.get("cuda" if backend == "triton" else backend, EXPANDED_COST["eager"])
    return 1.0 if error is None else 1.0 / cost


def in_graph(q: Tensor) -> bool:
    """True if the launches of a call are recorded, in a compiled graph or a CUDA graph."""
    return q.is_cuda and (is_compiling() or torch.cuda.is_current_stream_capturing())


def run_tiles(
    q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None, call: Call
) -> tuple[TiledAttention, str]:
    """Run the kernels of a backend, and where the probes miss the target, again: with a lower one, or
    exactly.

    Triton runs once, because the host would wait for the device, and warns of a target that it misses.

    Returns:
        The result, and why every head was computed exactly, or "".
    """
    if call.backend == "triton":
        from bmfa.attention.kernels.triton.tiles import operators

        tiles = operators.tiled_attention(
            q, k, v, call.tiling, prefix=call.prefix, scale=call.scale, tau=call.tau, valid=valid,
            error=call.error, expand=call.expand, dense_threshold=call.dense_threshold,
        )  # fmt: skip
        if has_values(q) and call.error is not None:
            (check_later if q.is_cuda else warn_if_missed)(tiles.probes, call)
        return tiles, ""
    if call.backend == "native" and native.unsupported_reason(q, k, v):
        call = replace(call, backend="eager")  # an operator of a graph, with other tensors
    why = too_many(call) if q.numel() else ""
    if not why or call.expands_all:
        return _run_exactly(q, k, v, valid, call), why
    attend = _prepare_tiles(q, k, v, valid, call)
    error = call.error
    for _ in range(2):
        found = attend(error=error, expand=call.expand, dense_threshold=call.dense_threshold)
        if found is None:
            break
        if found.exact:
            return found, why
        if call.error is None:
            return found, ""
        missed = excess_of_probes(found.probes, call.error, call.tiling.probes_per_group)
        if missed <= 1.0:
            return found, ""
        why = f"tiles missed {call.setting}, as their probes measured it"
        if missed > MOST_EXCESS or math.isnan(missed):
            break
        error = RETRY_AIM * call.error / missed
    return _run_exactly(q, k, v, valid, call), why


def too_many(call: Call) -> str:
    """Say that exact attention is faster than the tiles that a call would expand."""
    if call.expands_all:
        return "every tile would be expanded"
    # torch.compile cannot format the attribute with ".0%".
    return f"{call.setting} expands more than {round(100 * call.dense_threshold)}% of the tiles"


def _prepare_tiles(
    q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None, call: Call
) -> Callable[..., TiledAttention | None]:
    """Return a function of error, expand and dense_threshold that runs native or eager kernels.

    It returns None if every head should be computed exactly.
    """
    arguments: dict[str, Any] = {
        "prefix": call.prefix, "scale": call.scale, "tau": call.tau, "valid": valid,
        "query_prefix": call.query_prefix,
    }  # fmt: skip
    if call.backend == "native":
        return native.prepare_tiles(q, k, v, call.tiling, **arguments)
    from bmfa.attention.kernels.eager import tiles

    if not q.is_cuda:
        check_finite_scores(*zero_invalid(q, k, v, valid, call)[:2], call.scale)
    return partial(tiles.tiled_attention, q, k, v, call.tiling, **arguments)


def _run_exactly(
    q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None, call: Call
) -> TiledAttention:
    """Dense attention as a result with every tile expanded."""
    tiling, backend = call.tiling, "native" if call.backend == "native" else "dense"
    output = dense_attention(q, k, v, valid, call, backend)
    present = slots_with_tokens(tiling, valid, q.device).any(-1)  # (B or 1, T)
    expanded = present[:, None, None].expand(*q.shape[:2], tiling.groups, -1)
    probes = q.new_zeros((*q.shape[:2], tiling.probes(call.query_prefix), 3), dtype=torch.float64)
    count = expanded.sum(-1, dtype=torch.int32)
    return TiledAttention(output, count, probes, expanded, exact=True)
