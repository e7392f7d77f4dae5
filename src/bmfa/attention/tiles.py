"""The form "tiled": queries in groups that share which tiles of keys are expanded."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bmfa.attention.dense import dense_attention, native_dense_attention
from bmfa.attention.inputs import (
    AttentionInputs,
    AttentionOptions,
    check_finite_scores,
)
from bmfa.attention.kernels import native
from bmfa.attention.result import (
    Computed,
    ErrorEstimate,
    check_later,
    excess_of_probes,
    warn_if_missed,
)
from bmfa.attention.tiling import (
    MOST_EXCESS,
    RETRY_AIM,
    Budget,
    TiledAttention,
    Tiling,
    probes_per_group,
    tokens_to_tiles,
)
from bmfa.checks import has_values
from bmfa.trees.layout import tile_layout
from bmfa.trees.pyramid import Counts
from bmfa.trees.tree import Tree


def compute_tiled(inputs: AttentionInputs, options: AttentionOptions) -> Computed:
    """Run the kernels of a backend.

    Where every head would be computed exactly (`options.dense_threshold`), dense attention runs.
    """
    assert options.budget is not None
    budget = options.budget
    if options.backend == "native" and native.unsupported_reason(inputs.q, inputs.k, inputs.v):
        options = replace(options, backend="eager")  # an operator of a graph, with other tensors
    tiling = Tiling(
        inputs.grid,
        query_grid=inputs.query_grid,
        probes_per_group=probes_per_group(options.backend),
    )
    result, dense, missed = _run_to_target(inputs, tiling, options)
    computed = wrap_result(inputs, tiling, result, budget)
    computed.dense, computed.missed = dense, missed
    # Other backends do not return a result that misses its target.
    if options.backend == "triton" and has_values(inputs.q) and budget.error is not None:
        if inputs.q.is_cuda:
            check_later(result.probes, budget.error)
        else:
            warn_if_missed(result.probes, budget.error)
    return computed


def _run_to_target(
    inputs: AttentionInputs, tiling: Tiling, options: AttentionOptions
) -> tuple[TiledAttention, bool, bool]:
    """Run the kernels, and where the probes miss the target, again: with a lower one, or exactly.

    Triton runs once, because the host would wait for the device.

    Returns:
        The result; whether every head was computed exactly; and whether that is because tiles missed
        the target.
    """
    budget = options.budget
    assert budget is not None
    run = _prepare_kernel(inputs, tiling, options)
    result, dense = run(budget)
    if not budget.error or dense or options.backend == "triton":
        return result, dense, False
    probes_per_group = tiling.probes_per_group
    missed = excess_of_probes(result.probes, budget.error, probes_per_group)
    if missed <= 1.0:
        return result, dense, False
    if missed <= MOST_EXCESS:
        result, dense = run(Budget(RETRY_AIM * budget.error / missed, None))
        if dense or excess_of_probes(result.probes, budget.error, probes_per_group) <= 1.0:
            return result, dense, dense
    return _exact_result(inputs, tiling, options.backend), True, True


def wrap_result(
    inputs: AttentionInputs,
    tiling: Tiling,
    result: TiledAttention,
    budget: Budget,
) -> Computed:
    """Wrap the result of a kernel, with its tree and statistics on demand."""
    return Computed(
        result.output,
        partial(_result_tree, inputs, tiling, result, budget),
        tiled=result,
        measure_density=partial(_density, inputs, tiling, result),
        measure_leaf_ratio=partial(_leaf_ratio, inputs, tiling, result),
        measure_error=partial(
            ErrorEstimate.from_probes, result.probes, budget.error, tiling.probes_per_group
        ),
    )


def _prepare_kernel(
    inputs: AttentionInputs, tiling: Tiling, options: AttentionOptions
) -> Callable[[Budget], tuple[TiledAttention, bool]]:
    """Return a function of the budget that runs the kernels.

    It returns the result, and whether every head was computed exactly instead.
    """
    shared: dict[str, Any] = {"prefix": inputs.prefix, "scale": inputs.scale, "tau": inputs.tau}
    if options.backend == "triton":
        from bmfa.attention.kernels.triton.tiles import operators

        def run_triton(budget: Budget) -> tuple[TiledAttention, bool]:
            result = operators.tiled_attention(
                inputs.q, inputs.k, inputs.v, tiling, valid=inputs.valid,
                error=budget.error, expand=budget.expand,
                dense_threshold=options.dense_threshold, **shared,
            )  # fmt: skip
            return result, False

        return run_triton
    q, k, v = inputs.q, inputs.k, inputs.v
    shared |= {"query_prefix": inputs.query_prefix, "valid": inputs.valid}
    attend: Callable[[float | None, float | None, float], tuple[TiledAttention | None, bool]]
    is_native = options.backend == "native"
    if is_native and q.numel():
        attend = native.prepare_tiles(q, k, v, tiling, **shared)
    else:
        if not inputs.q.is_cuda:
            check_finite_scores(*inputs.zero_invalid()[:2], inputs.scale)
        attend = partial(_run_eager, (q, k, v), tiling, shared)

    def run(budget: Budget) -> tuple[TiledAttention, bool]:
        found, dense = None, True
        if not (is_native and budget.expands_all(tiling)):
            found, dense = attend(budget.error, budget.expand, options.dense_threshold)
        if found is None:
            return _exact_result(inputs, tiling, options.backend), True
        if dense:  # nothing is left for probes to measure
            found = replace(found, probes=torch.zeros_like(found.probes))
        return found, dense

    return run


def _run_eager(
    tensors: tuple[Tensor, Tensor, Tensor], tiling: Tiling, settings: dict[str, Any],
    error: float | None, expand: float | None, dense_threshold: float,
) -> tuple[TiledAttention | None, bool]:  # fmt: skip
    """Run the torch form; None instead of a result if every head is exact."""
    q, k, v = tensors
    settings = settings | {"error": error, "expand": expand, "dense_threshold": dense_threshold}
    from bmfa.attention.kernels.eager import tiles

    return tiles.tiled_attention(q, k, v, tiling, **settings), False


def _exact_result(inputs: AttentionInputs, tiling: Tiling, backend: str) -> TiledAttention:
    """Dense attention as a result with every tile expanded."""
    shape = (*inputs.q.shape[:2], tiling.groups, tiling.tiles)
    valid = _tile_sizes(inputs, tiling) > 0  # (B or 1, T)
    expanded = valid[:, None, None].expand(shape)
    probes = inputs.q.new_zeros(
        (*shape[:2], tiling.probes(inputs.query_prefix), 3), dtype=torch.float64
    )
    count = expanded.sum(-1, dtype=torch.int32)
    attend = native_dense_attention if backend == "native" else dense_attention
    return TiledAttention(attend(inputs), count, probes, expanded)


def _result_tree(
    inputs: AttentionInputs,
    tiling: Tiling,
    result: TiledAttention,
    budget: Budget,
) -> Tree:
    return tiled_tree(inputs, tiling, result.expanded, budget)


def tiled_tree(
    inputs: AttentionInputs,
    tiling: Tiling,
    expanded: Tensor,
    budget: Budget,
) -> Tree:
    """Build the partition of the spatial keys that every query sees, (B, H, Q).

    A leaf is a token of an expanded tile, or an unexpanded tile. Prefix queries see every token.

    Args:
        inputs: Inputs of the call.
        tiling: Tiles of the grid.
        expanded: (B, H, R, T) bool, the tiles that every group of queries expands.
        budget: Names the tree.
    """
    device = expanded.device
    layout = tile_layout(tiling.grid, tiling.side).to(device)
    slots = tiling.slot_tokens.to(device)
    group = torch.empty(tiling.queries.grid.size, dtype=torch.int64, device=device)  # of each query
    members = tiling.queries.slot_tokens.to(device)
    groups = torch.arange(tiling.groups, device=device).unsqueeze(-1).expand_as(members)
    group[members[members >= 0]] = groups[members >= 0]
    several = (slots >= 0).sum(-1) > 1  # a tile of one token is a leaf either way
    split = expanded[:, :, group][..., several]  # (B, H, N, blocks)
    prefix = split.new_ones(*split.shape[:2], inputs.query_prefix, split.shape[-1])
    split = torch.cat((prefix, split), 2)
    shape = tuple(split.shape[:3])
    blocks = split.flatten(0, 2).T.contiguous()  # (blocks, B H (prefix + N))
    if inputs.valid is None:
        return Tree(layout, blocks, shape, inputs.tau, str(budget), block_means=False)
    masks = inputs.valid.T  # (N, B or 1)
    if layout.block_count:  # a tile with one valid token is a leaf; one without is not
        counted = Counts.of(layout, torch.float32, masks).blocks[0] > 1
        blocks &= counted.repeat_interleave(blocks.shape[1] // max(1, counted.shape[1]), 1)
    return Tree(layout, blocks, shape, inputs.tau, str(budget), masks, block_means=False)


def dense_tree(inputs: AttentionInputs, budget: Budget) -> Tree:
    """Build the partition of dense attention: every token is a leaf."""
    tiling = inputs.tiling
    shape = (*inputs.q.shape[:2], tiling.groups, tiling.tiles)
    expanded = torch.ones(shape, dtype=torch.bool, device=inputs.q.device)
    return tiled_tree(inputs, tiling, expanded, budget)


def _tile_sizes(inputs: AttentionInputs, tiling: Tiling) -> Tensor:
    """(B or 1, T) valid tokens of each tile."""
    valid = inputs.valid
    if valid is None:
        valid = torch.ones(1, tiling.grid.size, dtype=torch.bool, device=inputs.q.device)
    return tokens_to_tiles(valid[:, None, :, None], tiling, torch.bool).squeeze(-1).sum(-1)


def _group_sizes(inputs: AttentionInputs, tiling: Tiling) -> Tensor:
    """(B or 1, R) valid queries of each group."""
    if tiling.query_grid is None:  # the mask is that of the queries, too
        return _tile_sizes(inputs, tiling.queries)
    return (tiling.queries.slot_tokens >= 0).sum(-1).unsqueeze(0).to(inputs.q.device)


def _density(inputs: AttentionInputs, tiling: Tiling, result: TiledAttention) -> float:
    """Mean share of the tiles that a group of queries expands, as `Stats.density` defines it."""
    counts = result.expanded_count.double()
    if inputs.valid is None:
        return float(counts.mean()) / tiling.tiles
    sizes = _tile_sizes(inputs, tiling)  # (B or 1, T)
    shares = counts / (sizes > 0).sum(-1).view(-1, 1, 1)
    groups = (_group_sizes(inputs, tiling) > 0).unsqueeze(1)  # (B or 1, 1, R)
    return float(shares[groups.expand_as(shares)].mean())


def _leaf_ratio(inputs: AttentionInputs, tiling: Tiling, result: TiledAttention) -> float:
    """Mean number of leaves over valid tokens, as `Stats.leaf_ratio` defines it."""
    sizes = _tile_sizes(inputs, tiling).double()[:, None, None]  # (B or 1, 1, 1, T)
    leaves = torch.where(result.expanded, sizes, sizes.clamp(max=1)).sum(-1)  # (B, H, R)
    ratios = leaves / sizes.sum(-1)
    queries = _group_sizes(inputs, tiling).double().unsqueeze(1).expand_as(ratios)
    prefix = ratios.shape[0] * ratios.shape[1] * inputs.query_prefix  # they see every token
    return float(((ratios * queries).sum() + prefix) / (queries.sum() + prefix))
