"""The form "tiled": queries in groups that share which tiles of keys are expanded."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bmfa.attention.dense import apply_fallback
from bmfa.attention.inputs import (
    AttentionInputs,
    AttentionOptions,
    Order,
    check_finite_scores,
    permute_tokens,
)
from bmfa.attention.kernels.eager.tiles import log_partition_loss, working_precision
from bmfa.attention.result import Computed
from bmfa.attention.tiling import (
    Budget,
    TiledAttention,
    Tiling,
    tiles_to_groups,
    tokens_to_tiles,
    unflatten,
)
from bmfa.trees.layout import tile_layout
from bmfa.trees.pyramid import Counts
from bmfa.trees.tree import Tree


def compute_tiled(inputs: AttentionInputs, options: AttentionOptions) -> Computed | None:
    """Run the kernels of a backend on self-attention, then the certificate and the fallback.

    Returns:
        None if the eager kernel would expand more than `options.expanded_limit` of the tiles.
    """
    assert options.budget is not None
    tiling, budget = Tiling(inputs.grid), options.budget
    kernel_order: Order = inputs.order if options.backend == "triton" else "raster"
    result = _run_kernel(inputs, tiling, options, kernel_order)
    if result is None:
        return None
    computed = wrap_result(inputs, tiling, result, budget, kernel_order)
    if options.bounded:
        computed.certificate = tiled_certificate(inputs, tiling, result.expanded, options.backend)
        if options.fallback is not None:
            computed.output, computed.fallback = apply_fallback(
                inputs, result.output, computed.certificate, options.fallback
            )
    return computed


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
    )


def _run_kernel(
    inputs: AttentionInputs, tiling: Tiling, options: AttentionOptions, kernel_order: Order
) -> TiledAttention | None:
    """Run the kernels in their order of tokens; the output is in the caller's."""
    budget = options.budget
    assert budget is not None
    shared: dict[str, Any] = {
        "prefix": inputs.prefix, "scale": inputs.scale, "tau": inputs.tau,
        "error": budget.error, "expand": budget.expand,
    }  # fmt: skip
    if options.backend == "triton":
        from bmfa.attention.kernels.triton.tiles import operators

        q, k, v = inputs.q, inputs.k, inputs.v
        return operators.tiled_attention(
            q, k, v, tiling, valid=inputs.valid, order=kernel_order, **shared
        )
    if not inputs.q.is_cuda:
        check_finite_scores(*inputs.zero_invalid()[:2], inputs.scale)
    q, k, v = inputs.to_raster()
    if options.backend == "reference":
        result = _run_reference(q, k, v, tiling, valid=inputs.raster_valid, **shared)
    else:
        from bmfa.attention.kernels.eager import tiles

        limit = options.expanded_limit
        found = tiles.tiled_attention(
            q, k, v, tiling, valid=inputs.raster_valid, max_expanded=limit, **shared
        )
        if found is None:
            return None
        result = found
    if inputs.order == "raster":
        return result
    return replace(result, output=permute_tokens(result.output, inputs.prefix, inputs.z_order))


def _run_reference(
    q: Tensor, k: Tensor, v: Tensor, tiling: Tiling, *, valid: Tensor | None, **shared: Any
) -> TiledAttention:
    from bmfa.attention.kernels import reference

    masks = None if valid is None else valid.expand(q.shape[0], -1).cpu().numpy()
    query, key, value = (x.detach().double().cpu().numpy() for x in (q, k, v))
    result = reference.tiled_attention(query, key, value, tiling, valid=masks, **shared)
    expanded = torch.from_numpy(result.expanded).to(q.device)
    output = torch.from_numpy(result.output).to(q)
    return TiledAttention(output, expanded.sum(-1, dtype=torch.int32), expanded)


def tiled_certificate(
    inputs: AttentionInputs, tiling: Tiling, expanded: Tensor, backend: str
) -> Tensor:
    """(B, H, prefix + N) float64 upper bound on E = F - F~ of every query over all keys.

    F~ is the free energy of the partition: an unexpanded tile counts as n times its mean score,
    without the corrections of the output; expanded tiles and the prefix are exact. The bound is E
    itself, rounded up. Prefix queries and invalid queries have E = 0. All scores are computed, which
    takes less time than dense attention because no value is read.

    Args:
        inputs: Inputs of self-attention.
        tiling: Tiles of the grid.
        expanded: (B, H, R, T) bool, in the order of the backend.
        backend: The backend that computed `expanded`; "triton" takes the tokens in any order.
    """
    q, k = inputs.q, inputs.k
    factor = inputs.scale / inputs.tau
    if backend == "triton":
        from bmfa.attention.kernels.triton.tiles import operators

        with torch.no_grad():
            per_score, constant = _rounding_bounds(inputs, tiling, torch.float32)
            bound = operators.log_partition_loss_bound(
                q, k, tiling, expanded, _largest_norm(k, inputs.prefix, inputs.valid, torch.float32),
                prefix=inputs.prefix, factor=factor, per_score=per_score, always=constant,
                valid=inputs.valid, order=inputs.order,
            )  # fmt: skip
            return bound.double() * inputs.tau
    with torch.no_grad():
        q, k, _ = inputs.to_raster()
        valid, prefix = inputs.raster_valid, inputs.prefix
        per_score, constant = _rounding_bounds(inputs, tiling, working_precision(q))
        loss = log_partition_loss(
            q, k, tiling, expanded, prefix=prefix, factor=factor, valid=valid
        )  # -inf where every tile is expanded
        norms = torch.linalg.vector_norm(q[:, :, prefix:], dim=-1, dtype=torch.float64)
        largest = _largest_norm(k, prefix, valid, torch.float64)
        largest_score = abs(factor) * norms * largest.unsqueeze(-1)
        bound = loss.double().clamp(min=0) + per_score * largest_score + constant
        bound = bound.where(bound == bound, torch.inf)  # NaN: nothing is known
        bound = torch.where(loss == -torch.inf, 0.0, bound) * inputs.tau
        if valid is not None:
            bound = bound.where(valid.unsqueeze(1), 0.0)
        bound = torch.cat((bound.new_zeros(*q.shape[:2], prefix), bound), -1)
        if inputs.order == "raster":
            return bound
        return permute_tokens(bound.unsqueeze(-1), prefix, inputs.z_order).squeeze(-1)


def _largest_norm(k: Tensor, prefix: int, valid: Tensor | None, dtype: torch.dtype) -> Tensor:
    """(B, H) largest norm of a valid key."""
    norms: Tensor = torch.linalg.vector_norm(k, dim=-1, dtype=dtype)
    if valid is not None:
        norms[:, :, prefix:].masked_fill_(~valid.unsqueeze(1), 0.0)
    return norms.amax(-1)


def _rounding_bounds(
    inputs: AttentionInputs, tiling: Tiling, dtype: torch.dtype
) -> tuple[float, float]:
    """Bounds on the rounding error of log Z - log Z~: per unit of the largest score, and constant.

    The largest score is what the norms allow. A score is a product of d terms, a mean score a sum of
    S of them, and the exponent a difference: each is off by less than d + S + 16 units. A sum over T
    tiles of S positive terms and over the prefix, and its logarithm, are off by T + S + prefix + 64
    units. A unit is two roundings of `dtype`: matrix units may truncate, and exponentials are accurate
    to two roundings. Both logarithms carry these errors, hence the factor of 2.
    """
    unit = 2 * torch.finfo(dtype).eps
    terms = tiling.tiles + tiling.slots + inputs.prefix
    return 2 * unit * (inputs.q.shape[-1] + tiling.slots + 16), 2 * unit * (terms + 64)


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
    """Build the partition of the spatial keys that every query sees, (B, H, prefix + N).

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
    number = torch.arange(tiling.tiles, device=device)  # of each raster tile in the kernel
    group = torch.empty(tiling.grid.size, dtype=torch.int64, device=device)  # of each query
    if kernel_order == "z":
        number = inputs.z_rank[slots[:, 0]] // tiling.slots
        position = torch.arange(tiling.grid.size, device=device)
        group = position // (tiling.slots * tiling.group)
    else:
        of_tile = (number // tiling.group).unsqueeze(-1).expand_as(slots)
        group[slots[slots >= 0]] = of_tile[slots >= 0]
    several = (slots >= 0).sum(-1) > 1  # a tile of one token is a leaf either way
    split = expanded[:, :, group][..., number[several]]  # (B, H, N, blocks)
    if inputs.order == "z" and kernel_order == "raster":
        split = split[:, :, inputs.z_order]
    prefix = split.new_ones(*split.shape[:2], inputs.prefix, split.shape[-1])
    split = torch.cat((prefix, split), 2)
    shape = tuple(split.shape[:3])
    blocks = split.flatten(0, 2).T.contiguous()  # (blocks, B H (prefix + N))
    if inputs.raster_valid is None:
        return Tree(layout, blocks, shape, inputs.tau, str(budget))
    masks = inputs.raster_valid.T  # (N, B or 1)
    if layout.block_count:  # a tile with one valid token is a leaf; one without is not
        counted = Counts.of(layout, torch.float32, masks).blocks[0] > 1
        blocks &= counted.repeat_interleave(blocks.shape[1] // max(1, counted.shape[1]), 1)
    return Tree(layout, blocks, shape, inputs.tau, str(budget), masks)


def dense_tree(inputs: AttentionInputs, tiling: Tiling, budget: Budget) -> Tree:
    """Build the partition of dense attention: every token is a leaf."""
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


def _density(
    inputs: AttentionInputs, tiling: Tiling, result: TiledAttention, kernel_order: Order
) -> float:
    """Mean share of the tiles that a group of queries expands, as `Stats.density` defines it."""
    counts = result.expanded_count.double()
    if inputs.valid is None:
        return float(counts.mean()) / tiling.tiles
    sizes = _tile_sizes(inputs, tiling, kernel_order)  # (B or 1, T)
    shares = counts / (sizes > 0).sum(-1).view(-1, 1, 1)
    groups = tiles_to_groups(sizes > 0, tiling).any(-1).unsqueeze(1)  # (B or 1, 1, R)
    return float(shares[groups.expand_as(shares)].mean())


def _leaf_ratio(
    inputs: AttentionInputs, tiling: Tiling, result: TiledAttention, kernel_order: Order
) -> float:
    """Mean number of leaves over valid tokens, as `Stats.leaf_ratio` defines it."""
    sizes = _tile_sizes(inputs, tiling, kernel_order).double()[:, None, None]  # (B or 1, 1, 1, T)
    leaves = torch.where(result.expanded, sizes, sizes.clamp(max=1)).sum(-1)  # (B, H, R)
    ratios = leaves / sizes.sum(-1)
    queries = tiles_to_groups(sizes[:, 0, 0], tiling).sum(-1).unsqueeze(1)  # (B or 1, 1, R)
    queries = queries.expand_as(ratios)
    prefix = ratios.shape[0] * ratios.shape[1] * inputs.prefix  # these queries see every token
    return float(((ratios * queries).sum() + prefix) / (queries.sum() + prefix))
