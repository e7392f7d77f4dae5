"""The form "tiled": queries in groups that share which tiles of keys are expanded."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bmfa.attention.dense import apply_fallback, dense_attention, native_dense_attention
from bmfa.attention.inputs import (
    AttentionInputs,
    AttentionOptions,
    CertificateKind,
    Order,
    check_finite_scores,
    permute_tokens,
)
from bmfa.attention.kernels import native
from bmfa.attention.kernels.eager.certificate import bound_output
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
    unflatten,
)
from bmfa.checks import has_values
from bmfa.trees.layout import tile_layout
from bmfa.trees.pyramid import Counts
from bmfa.trees.tree import Tree


def compute_tiled(inputs: AttentionInputs, options: AttentionOptions) -> Computed:
    """Run the kernels of a backend, then the certificate and the fallback.

    Where every head would be computed exactly (`options.exact_above`), dense attention runs.
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
    order = kernel_order(inputs, options)
    result, dense, missed = _run_to_target(inputs, tiling, options, order)
    computed = wrap_result(inputs, tiling, result, budget, order)
    computed.dense, computed.missed = dense, missed
    if options.certificate is not None:
        computed.certificate, computed.energy_bound = tiled_certificate(
            inputs, tiling, result.output, result.expanded, order, options.certificate
        )
        if options.fallback is not None:
            apply_fallback(inputs, computed, options.fallback)
    # Other backends do not return a result that misses its target.
    if options.backend == "triton" and has_values(inputs.q) and budget.error is not None:
        if inputs.q.is_cuda:
            check_later(result.probes, budget.error)
        else:
            warn_if_missed(result.probes, budget.error)
    return computed


def _run_to_target(
    inputs: AttentionInputs, tiling: Tiling, options: AttentionOptions, kernel_order: Order
) -> tuple[TiledAttention, bool, bool]:
    """Run the kernels, and where the probes miss the target, again: with a lower one, or exactly.

    Triton runs once, because the host would wait for the device.

    Returns:
        The result; whether every head was computed exactly; and whether that is because tiles missed
        the target.
    """
    budget = options.budget
    assert budget is not None
    run = _prepare_kernel(inputs, tiling, options, kernel_order)
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


def kernel_order(inputs: AttentionInputs, options: AttentionOptions) -> Order:
    """Order of the tokens in the kernel of a backend, which numbers tiles and groups."""
    return inputs.order if options.backend == "triton" else "raster"


def wrap_result(
    inputs: AttentionInputs,
    tiling: Tiling,
    result: TiledAttention,
    budget: Budget,
    kernel_order: Order,
) -> Computed:
    """Wrap the result of a kernel, with its tree and statistics on demand."""
    return Computed(
        result.output,
        partial(_result_tree, inputs, tiling, result, budget, kernel_order),
        tiled=result,
        measure_density=partial(_density, inputs, tiling, result, kernel_order),
        measure_leaf_ratio=partial(_leaf_ratio, inputs, tiling, result, kernel_order),
        measure_error=partial(
            ErrorEstimate.from_probes, result.probes, budget.error, tiling.probes_per_group
        ),
    )


def _prepare_kernel(
    inputs: AttentionInputs, tiling: Tiling, options: AttentionOptions, kernel_order: Order
) -> Callable[[Budget], tuple[TiledAttention, bool]]:
    """Return a function of the budget that runs the kernels in their order of tokens.

    It returns the result, with the output in the order of the caller, and whether every head was
    computed exactly instead.
    """
    shared: dict[str, Any] = {"prefix": inputs.prefix, "scale": inputs.scale, "tau": inputs.tau}
    if options.backend == "triton":
        from bmfa.attention.kernels.triton.tiles import operators

        def run_triton(budget: Budget) -> tuple[TiledAttention, bool]:
            result = operators.tiled_attention(
                inputs.q, inputs.k, inputs.v, tiling, valid=inputs.valid, order=kernel_order,
                error=budget.error, expand=budget.expand, exact_above=options.exact_above, **shared,
            )  # fmt: skip
            return result, False

        return run_triton
    q, k, v = inputs.to_raster()
    shared |= {"query_prefix": inputs.query_prefix, "valid": inputs.raster_valid}
    attend: Callable[[float | None, float | None, float], tuple[TiledAttention | None, bool]]
    is_native = options.backend == "native"
    if is_native and q.numel():
        attend = native.prepare_tiles(q, k, v, tiling, **shared)
    else:
        if not inputs.q.is_cuda:
            check_finite_scores(*inputs.zero_invalid()[:2], inputs.scale)
        attend = partial(_run_eager, options.backend, (q, k, v), tiling, inputs.share, shared)

    def run(budget: Budget) -> tuple[TiledAttention, bool]:
        found, dense = None, True
        if not (is_native and budget.expands_all(tiling)):
            found, dense = attend(budget.error, budget.expand, options.exact_above)
        if found is None:
            return _exact_result(inputs, tiling, options.backend), True
        if dense:  # nothing is left for probes to measure
            found = replace(found, probes=torch.zeros_like(found.probes))
        if inputs.order == "z":
            output = permute_tokens(found.output, inputs.prefix, inputs.z_order)
            found = replace(found, output=output)
        return found, dense

    return run


def _run_eager(
    backend: str, tensors: tuple[Tensor, Tensor, Tensor], tiling: Tiling, share: int,
    settings: dict[str, Any], error: float | None, expand: float | None, exact_above: float,
) -> tuple[TiledAttention | None, bool]:  # fmt: skip
    """Run the torch form or the specification; None instead of a result if every head is exact."""
    q, k, v = tensors
    settings = settings | {"error": error, "expand": expand, "exact_above": exact_above}
    if backend == "reference":
        k, v = (x.repeat_interleave(share, 1) for x in (k, v))
        return _run_reference(q, k, v, tiling, **settings), False
    from bmfa.attention.kernels.eager import tiles

    return tiles.tiled_attention(q, k, v, tiling, **settings), False


def _exact_result(inputs: AttentionInputs, tiling: Tiling, backend: str) -> TiledAttention:
    """Dense attention as a result with every tile expanded."""
    shape = (*inputs.q.shape[:2], tiling.groups, tiling.tiles)
    valid = _tile_sizes(inputs, tiling, "raster") > 0  # (B or 1, T)
    expanded = valid[:, None, None].expand(shape)
    probes = inputs.q.new_zeros(
        (*shape[:2], tiling.probes(inputs.query_prefix), 3), dtype=torch.float64
    )
    count = expanded.sum(-1, dtype=torch.int32)
    attend = native_dense_attention if backend == "native" else dense_attention
    return TiledAttention(attend(inputs), count, probes, expanded)


def _run_reference(
    q: Tensor, k: Tensor, v: Tensor, tiling: Tiling, *, valid: Tensor | None, **shared: Any
) -> TiledAttention:
    from bmfa.attention.kernels import reference

    masks = None if valid is None else valid.expand(q.shape[0], -1).cpu().numpy()
    query, key, value = (x.detach().double().cpu().numpy() for x in (q, k, v))
    result = reference.tiled_attention(query, key, value, tiling, valid=masks, **shared)
    expanded = torch.from_numpy(result.expanded).to(q.device)
    output, probes = torch.from_numpy(result.output).to(q), torch.from_numpy(result.probes)
    count = expanded.sum(-1, dtype=torch.int32)
    return TiledAttention(output, count, probes.to(q.device), expanded)


def tiled_certificate(
    inputs: AttentionInputs,
    tiling: Tiling,
    output: Tensor,
    expanded: Tensor,
    kernel_order: Order,
    kind: CertificateKind,
) -> tuple[Tensor, Tensor]:
    """Bound the distance of an output from exact attention, for every query.

    `bmfa.attention.kernels.eager.certificate` has the proofs.

    Args:
        inputs: Inputs of the call.
        tiling: Tiles of the keys, and groups of the queries.
        output: (B, H, Q, e), the output to bound, in the order of the caller.
        expanded: (B, H, R, T) bool, the tiles that every group of queries expands.
        kernel_order: Order of the tokens in the kernel, which numbers tiles and groups.
        kind: What log Z is bounded from, `"scores"` or `"boxes"`.

    Returns:
        (B, H, Q) float64 each: an upper bound on |output - exact|, and one on E of the
        attention before the correction. Invalid queries have 0.
    """
    q, k, v = inputs.to_raster()
    prefix = inputs.prefix
    if inputs.order == "z":
        output = permute_tokens(output, prefix, inputs.z_rank)
    if kernel_order == "z":
        group = _kernel_tiles(inputs, tiling.queries, kernel_order)
        expanded = expanded[:, :, group][..., _kernel_tiles(inputs, tiling, kernel_order)]
    bound = bound_output(
        q, k, v, output, tiling, expanded, prefix=prefix, factor=inputs.scale / inputs.tau,
        valid=inputs.raster_valid, kind=kind, query_prefix=inputs.query_prefix,
    )  # fmt: skip
    # Two further roundings: of the product and of tau itself, which is given in decimals.
    both = torch.stack((bound.distance, bound.divergence * inputs.tau * (1 + 1e-15)), -1)
    if inputs.order == "z":
        both = permute_tokens(both, prefix, inputs.z_order)
    certificate, energy = both.unbind(-1)
    return certificate, energy


def _kernel_tiles(inputs: AttentionInputs, tiling: Tiling, kernel_order: Order) -> Tensor:
    """(T,) number in the kernel of each tile in raster order."""
    device = inputs.q.device
    if kernel_order == "raster":
        return torch.arange(tiling.tiles, device=device)
    return inputs.z_rank[tiling.slot_tokens[:, 0].to(device)] // tiling.slots


def _result_tree(
    inputs: AttentionInputs,
    tiling: Tiling,
    result: TiledAttention,
    budget: Budget,
    kernel_order: Order,
) -> Tree:
    return tiled_tree(inputs, tiling, result.expanded, budget, kernel_order)


def tiled_tree(
    inputs: AttentionInputs,
    tiling: Tiling,
    expanded: Tensor,
    budget: Budget,
    kernel_order: Order,
) -> Tree:
    """Build the partition of the spatial keys that every query sees, (B, H, Q).

    A leaf is a token of an expanded tile, or an unexpanded tile. Prefix queries see every token.

    Args:
        inputs: Inputs of the call.
        tiling: Tiles of the grid.
        expanded: (B, H, R, T) bool, the tiles that every group of queries expands.
        budget: Names the tree.
        kernel_order: Order of the tokens in the kernel, which numbers tiles and groups.
    """
    device = expanded.device
    layout = tile_layout(tiling.grid, tiling.side).to(device)
    slots = tiling.slot_tokens.to(device)
    number = _kernel_tiles(inputs, tiling, kernel_order)  # of each raster tile in the kernel
    group = torch.empty(tiling.queries.grid.size, dtype=torch.int64, device=device)  # of each query
    if kernel_order == "z":
        group = torch.arange(tiling.grid.size, device=device) // tiling.queries.slots
    else:
        members = tiling.queries.slot_tokens.to(device)
        groups = torch.arange(tiling.groups, device=device).unsqueeze(-1).expand_as(members)
        group[members[members >= 0]] = groups[members >= 0]
    several = (slots >= 0).sum(-1) > 1  # a tile of one token is a leaf either way
    split = expanded[:, :, group][..., number[several]]  # (B, H, N, blocks)
    if inputs.order == "z" and kernel_order == "raster":
        split = split[:, :, inputs.z_order]
    prefix = split.new_ones(*split.shape[:2], inputs.query_prefix, split.shape[-1])
    split = torch.cat((prefix, split), 2)
    shape = tuple(split.shape[:3])
    blocks = split.flatten(0, 2).T.contiguous()  # (blocks, B H (prefix + N))
    if inputs.raster_valid is None:
        return Tree(layout, blocks, shape, inputs.tau, str(budget), block_means=False)
    masks = inputs.raster_valid.T  # (N, B or 1)
    if layout.block_count:  # a tile with one valid token is a leaf; one without is not
        counted = Counts.of(layout, torch.float32, masks).blocks[0] > 1
        blocks &= counted.repeat_interleave(blocks.shape[1] // max(1, counted.shape[1]), 1)
    return Tree(layout, blocks, shape, inputs.tau, str(budget), masks, block_means=False)


def dense_tree(inputs: AttentionInputs, budget: Budget) -> Tree:
    """Build the partition of dense attention: every token is a leaf."""
    tiling = inputs.tiling
    shape = (*inputs.q.shape[:2], tiling.groups, tiling.tiles)
    expanded = torch.ones(shape, dtype=torch.bool, device=inputs.q.device)
    return tiled_tree(inputs, tiling, expanded, budget, "raster")


def _tile_sizes(inputs: AttentionInputs, tiling: Tiling, kernel_order: Order) -> Tensor:
    """(B or 1, T) valid tokens of each tile, as the kernel numbers them."""
    valid = inputs.raster_valid
    if valid is None:
        valid = torch.ones(1, tiling.grid.size, dtype=torch.bool, device=inputs.q.device)
    if kernel_order == "z":  # tiles are consecutive in Z-order
        return unflatten(valid[:, inputs.z_order], 1, (tiling.tiles, tiling.slots)).sum(-1)
    return tokens_to_tiles(valid[:, None, :, None], tiling, torch.bool).squeeze(-1).sum(-1)


def _group_sizes(inputs: AttentionInputs, tiling: Tiling, kernel_order: Order) -> Tensor:
    """(B or 1, R) valid queries of each group, as the kernel numbers them."""
    if tiling.query_grid is None:  # the mask is that of the queries, too
        return _tile_sizes(inputs, tiling.queries, kernel_order)
    return (tiling.queries.slot_tokens >= 0).sum(-1).unsqueeze(0).to(inputs.q.device)


def _density(
    inputs: AttentionInputs, tiling: Tiling, result: TiledAttention, kernel_order: Order
) -> float:
    """Mean share of the tiles that a group of queries expands, as `Stats.density` defines it."""
    counts = result.expanded_count.double()
    if inputs.valid is None:
        return float(counts.mean()) / tiling.tiles
    sizes = _tile_sizes(inputs, tiling, kernel_order)  # (B or 1, T)
    shares = counts / (sizes > 0).sum(-1).view(-1, 1, 1)
    groups = (_group_sizes(inputs, tiling, kernel_order) > 0).unsqueeze(1)  # (B or 1, 1, R)
    return float(shares[groups.expand_as(shares)].mean())


def _leaf_ratio(
    inputs: AttentionInputs, tiling: Tiling, result: TiledAttention, kernel_order: Order
) -> float:
    """Mean number of leaves over valid tokens, as `Stats.leaf_ratio` defines it."""
    sizes = _tile_sizes(inputs, tiling, kernel_order).double()[:, None, None]  # (B or 1, 1, 1, T)
    leaves = torch.where(result.expanded, sizes, sizes.clamp(max=1)).sum(-1)  # (B, H, R)
    ratios = leaves / sizes.sum(-1)
    queries = _group_sizes(inputs, tiling, kernel_order).double().unsqueeze(1).expand_as(ratios)
    prefix = ratios.shape[0] * ratios.shape[1] * inputs.query_prefix  # they see every token
    return float(((ratios * queries).sum() + prefix) / (queries.sum() + prefix))
