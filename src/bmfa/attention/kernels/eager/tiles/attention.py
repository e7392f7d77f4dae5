"""The tiled form in torch operations, head by head: any device, any dtype, gradients.

`bmfa.attention.kernels.reference.tiles` specifies what is computed, and this is its plain form: where a
processor has kernels, they are faster. Shapes here: T tiles of S slots, R groups of queries in the order
of `Tiling.group_order`, n probes in each of the first groups, d and e channels of keys and values.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bmfa.attention.choice import Choice, Levels, choose, level_thresholds
from bmfa.attention.kernels.eager.tiles.heads import Head, Keys, Tangents, chunk_elements, to_tiles
from bmfa.attention.tiling import (
    FARTHEST,
    NUM_LEVELS,
    TiledAttention,
    Tiling,
    slots_with_tokens,
    tiles_to_tokens,
    unflatten,
)


def tiled_attention(
    q: Tensor, k: Tensor, v: Tensor, tiling: Tiling, *, prefix: int, scale: float, tau: float = 1.0,
    error: float | None = None, expand: float | None = None, valid: Tensor | None = None,
    dense_threshold: float = 1.0, query_prefix: int | None = None,
) -> TiledAttention | None:  # fmt: skip
    """Compute tiled attention as specified by `bmfa.attention.kernels.reference.tiled_attention`.

    Half precision is computed in float32. Thresholds, shrinkage, the diameter of the values and the
    choice of the expanded tiles are constants of the gradient; everything else is differentiated.

    Args:
        q: (B, H, query_prefix + queries, d), in raster order.
        k: (B, H or a divisor of it, prefix + N, d), spatial tokens in raster order.
        v: (B, as many, prefix + N, e).
        tiling: The tiles of the grid of N spatial tokens, and the groups of the queries.
        prefix: The number of keys before the grid.
        scale: The factor of q . k.
        tau: The temperature.
        error: The target for the relative L2 error of the output; one of `error` and `expand` is given.
        expand: The mean number of tiles that a group expands.
        valid: bool (B or 1, N), the spatial tokens that exist.
        dense_threshold: The share of expanded tiles above which a head is computed exactly.
        query_prefix: The number of queries before the grid, if it is not that of the keys.

    Returns:
        Output, expanded tiles of each group and errors of the probes; None if every head would be
        computed exactly because it expands more than `dense_threshold` of the tiles.
    """
    if (error is None) == (expand is None):
        raise ValueError(f"error is {error!r} and expand is {expand!r}; pass exactly one of them")
    query_prefix = prefix if query_prefix is None else query_prefix
    batch, heads = q.shape[:2]
    farthest = 0.0 if error is None else FARTHEST
    images = _arrange(q, k, v, tiling, prefix, query_prefix, scale / tau, valid, farthest)
    with torch.no_grad():
        levels = [[measure_levels(head) for head in image] for image in images]
    budget: dict[str, Any] = {"target": error, "aim": tiling.error_aim}
    budget |= {"share": None if expand is None else expand / tiling.tiles}
    budget |= {"dense_threshold": dense_threshold}
    choices = [
        choose(join_heads(image, found), tiling.probes_per_group, **budget)
        for image, found in zip(images, levels, strict=True)
    ]
    if dense_threshold < 1.0 and all(choice.exact.all() for choice in choices):
        return None
    before = q[:, :, :query_prefix] * (scale / tau)
    results = [
        _attend_head(images[b][h], before[b, h], choices[b], h, levels[b][h].output)
        for b in range(batch)
        for h in range(heads)
    ]
    output, expanded, probes = (
        unflatten(torch.stack(x), 0, (batch, heads)) for x in zip(*results, strict=True)
    )
    return TiledAttention(output, expanded.sum(-1, dtype=torch.int32), probes, expanded)


def _arrange(
    q: Tensor, k: Tensor, v: Tensor, tiling: Tiling, prefix: int, query_prefix: int, factor: float,
    valid: Tensor | None, farthest: float = FARTHEST,
) -> list[list[Head]]:  # fmt: skip
    """Steps 1 and 2 of the specification for the heads of all images."""
    dtype, device = torch.promote_types(q.dtype, torch.float32), q.device
    order, heads_per_key = tiling.group_order.to(device), q.shape[1] // k.shape[1]
    groups = order[: tiling.probe_groups(query_prefix)].unsqueeze(1)
    draws = torch.arange(tiling.probes_per_group, device=device)
    query_valid = valid if tiling.query_grid is None else None
    key_slots = slots_with_tokens(tiling, valid, device).expand(len(q), -1, -1)
    query_slots = slots_with_tokens(tiling.queries, query_valid, device).expand(len(q), -1, -1)
    images = []
    for b, (exists, query_exists) in enumerate(zip(key_slots, query_slots, strict=True)):
        keys = [
            Keys.from_tokens(x, y, tiling, prefix, exists) for x, y in zip(k[b], v[b], strict=True)
        ]
        image = []
        for h, x in enumerate(q[b, :, query_prefix:]):
            queries = to_tiles(x, tiling.queries, query_exists, dtype)[order] * factor
            quantiles = tiling.probe_quantile(groups, h, draws)
            shared, exist = keys[h // heads_per_key], query_exists[order]
            image.append(Head.from_queries(queries, shared, exist, quantiles, farthest))
        images.append(image)
    return images


class HeadLevels(NamedTuple):
    """What the probes of a head find at every level."""

    found: (
        Tensor  # (P, 4, levels) float64 as in `Levels`; squares and products are over `Keys.unit`^2
    )
    output: Tensor  # (P, e) exact outputs over `Keys.unit`


def measure_levels(head: Head) -> HeadLevels:
    """Evaluate every probe at every level."""
    groups, probes = head.probe_slot.shape
    chunks = [_measure_chunk(head, positions) for positions in head.chunks(groups, probes)]
    return HeadLevels(*(torch.cat(field) for field in zip(*chunks, strict=True)))


def _measure_chunk(head: Head, positions: slice) -> HeadLevels:
    """Evaluate the n probes of each of r groups."""
    keys, tangents, slot = head.keys, head.tangents(positions), head.probe_slot[positions]
    shape = (*slot.shape, NUM_LEVELS, -1)
    q = head.q[positions].gather(1, slot.unsqueeze(2).expand(-1, -1, head.q.shape[2]))  # (r, n, d)
    deviation = q - head.q_mean[positions].unsqueeze(1)
    exact_mass, p = keys.softmax(q.flatten(0, 1))
    exact_values = (p @ keys.v).transpose(0, 1)  # (r n, T, e)
    tangent_mass = tangents.log_mass.unsqueeze(1) + deviation @ tangents.k.transpose(1, 2)
    thresholds = torch.from_numpy(level_thresholds()).to(q.device).view(-1, 1, 1)
    expanded = tangents.expanded(thresholds).transpose(0, 1).unsqueeze(1)  # (r, 1, levels, T)
    tiles = torch.where(
        expanded, exact_mass.view_as(tangent_mass).unsqueeze(2), tangent_mass.unsqueeze(2)
    )
    prefix = (q @ keys.prefix_k.T).unsqueeze(2).expand(shape)
    weights = torch.cat((tiles, prefix), 3).softmax(3)  # (r, n, levels, T + prefix)
    tiles, prefix = torch.split(weights, [len(keys.k), len(keys.prefix_k)], 3)
    coarse = tiles.masked_fill(expanded, 0.0)
    output = (coarse.flatten(1, 2) @ tangents.v).view(shape) + prefix @ keys.prefix_v
    output += ((tiles - coarse).flatten(0, 1) @ exact_values).view(shape)
    first_order = torch.einsum("pd,tde->pte", deviation.flatten(0, 1), head.cross)
    shares = coarse_shares(tangents.log_mass.view(-1, 1, 1, len(keys.k)), expanded)
    term = (shares.expand_as(tiles).flatten(0, 1) @ first_order).view(shape)
    term = coarse.sum(3, keepdim=True) * clip(term, head.diameter)
    exact = output[:, :, -1]
    difference, term = (exact.unsqueeze(2) - output).double(), term.double()
    present = (~keys.empty).sum().double()
    share = (expanded.sum(3) / present).expand(shape[:3])
    squares = (difference.square(), difference * term, term.square())
    found = torch.stack((*(x.sum(3) for x in squares), share), 2)  # (r, n, 4, levels)
    return HeadLevels(found.flatten(0, 1), exact.flatten(0, 1))


def join_heads(heads: list[Head], levels: list[HeadLevels]) -> Levels:
    """What the probes of an image find, from those of its heads, whose values are in different units."""
    units = torch.stack([head.keys.unit for head in heads]).double()
    ratio = (units / units.amax()).square().view(-1, 1)  # at most 1
    norm = torch.stack([x.output.double().square().sum(1) for x in levels]) * ratio
    weight = torch.stack([head.probe_weight.flatten() for head in heads])
    found = torch.stack([x.found for x in levels])  # (H, P, 4, levels)
    found[:, :, :3] *= ratio[..., None, None]
    return Levels(*(x.cpu().numpy() for x in (found, norm, weight.double())))


def coarse_shares(log_mass: Tensor, hidden: Tensor) -> Tensor:
    """Shares (..., T) of the tiles that are not hidden in their common mass, from log_mass (..., T)."""
    bias = log_mass.masked_fill(hidden, -torch.inf)
    return bias.masked_fill(bias.amax(-1, keepdim=True) == -torch.inf, 0.0).softmax(-1)


def clip(vectors: Tensor, limit: Tensor) -> Tensor:
    """Limit the lengths of vectors (..., e), whose squares may overflow in their dtype."""
    limit = limit.where(limit > 0, 1.0)  # of values that are all equal, which need no correction
    relative = (vectors.double() / limit).square().sum(-1, keepdim=True)
    return vectors * relative.clamp(min=1.0).rsqrt().to(vectors.dtype)


def _attend_head(
    head: Head, before: Tensor, choice: Choice, number: int, exact_probes: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Step 4 for all groups of a head.

    Args:
        head: The head.
        before: (query_prefix, d) queries before the grid, times scale / tau.
        choice: What the probes of the image determine.
        number: Number of the head in its image.
        exact_probes: (P, e) exact outputs of the probes.

    Returns:
        Output (query_prefix + queries, e) in the dtype of `before`, expanded tiles (R, T) in raster
        order of the groups, and float64 (P, 3) squared error and norm of the probes with their weights.
    """
    tiling, unit = head.keys.tiling, head.keys.unit
    raster = tiling.group_order.argsort().to(unit.device)
    if choice.exact[number]:
        output = head.keys.attend(head.q.flatten(0, 1)).view(*head.q.shape[:2], -1)
        expanded = ~head.keys.empty.expand(len(head.q), -1)
    else:
        thresholds = torch.from_numpy(choice.thresholds).to(unit.device)
        shrinkage = torch.from_numpy(choice.shrinkage[number]).to(unit.device)
        chunks = [
            _attend_chunk(head, positions, thresholds, shrinkage)
            for positions in head.chunks(len(head.q))
        ]
        output, expanded = (torch.cat(x) for x in zip(*chunks, strict=True))
    output = (output * unit).to(before.dtype)
    probes = _probe_errors(head, output.detach(), exact_probes)
    spatial = tiles_to_tokens(output[raster].unsqueeze(0), tiling.queries)[0]
    prefix = head.keys.attend(before.to(unit.dtype)) * unit
    return torch.cat((prefix.to(before.dtype), spatial)), expanded[raster], probes


def _attend_chunk(
    head: Head, positions: slice, thresholds: Tensor, shrinkage: Tensor
) -> tuple[Tensor, Tensor]:
    """Outputs (r, S, e) and expanded tiles (r, T) of the groups at some positions.

    Groups with about as many expanded tiles are computed together, as fewer tiles are padding then.
    """
    tangents = head.tangents(positions)
    position = torch.arange(positions.start, positions.stop, device=head.q.device)
    expanded = tangents.expanded(thresholds[position % 2].unsqueeze(1))
    counts = expanded.sum(1)
    order = counts.argsort()
    outputs = [
        _attend_groups(head, position[rows], tangents[rows], expanded[rows], shrinkage)
        for rows in _batches(order, counts[order].tolist(), head)
    ]
    return torch.cat(outputs)[order.argsort()], expanded


def _batches(rows: Tensor, counts: list[int], head: Head) -> Iterator[Tensor]:
    """Divide groups, by their growing numbers of expanded tiles, so that scores stay in a chunk."""
    queries, slots = head.q.shape[1], head.keys.exists.shape[1]
    most = chunk_elements(head.q.device) // (queries * slots)  # expanded tiles
    start = 0
    for stop in range(1, len(counts) + 1):
        if stop == len(counts) or (stop + 1 - start) * counts[stop] > most:
            yield rows[start:stop]
            start = stop


def _attend_groups(
    head: Head, position: Tensor, tangents: Tangents, expanded: Tensor, shrinkage: Tensor
) -> Tensor:
    """Step 4 of the specification for the groups at m positions: outputs (m, S, e).

    Args:
        head: The head.
        position: (m,)
        tangents: Of the m groups.
        expanded: (m, T) bool.
        shrinkage: (2,) of the groups at even and odd positions.
    """
    keys, q = head.keys, head.q[position]
    deviation = q - head.q_mean[position].unsqueeze(1)
    hidden = expanded | keys.empty
    bias = tangents.log_mass.masked_fill(hidden, -torch.inf).unsqueeze(1)
    # The expanded tiles of each group, then others that are masked.
    tiles = expanded.to(torch.int8).argsort(dim=1, descending=True, stable=True)
    tiles = tiles[:, : int(expanded.sum(1).amax())]
    present = (expanded.gather(1, tiles).unsqueeze(2) & keys.exists[tiles]).flatten(1).unsqueeze(1)
    k, v = (x[tiles].flatten(1, 2) for x in (keys.k, keys.v))
    logits = (
        bias + deviation @ tangents.k.transpose(1, 2),
        q @ keys.prefix_k.T,
        (q @ k.transpose(1, 2)).masked_fill(~present, -torch.inf),
    )
    weights = torch.split(torch.cat(logits, 2).softmax(2), [x.shape[2] for x in logits], 2)
    output = weights[0] @ tangents.v + weights[1] @ keys.prefix_v + weights[2] @ v
    shares = coarse_shares(tangents.log_mass, hidden)
    cross = (shares @ head.cross.flatten(1)).view(-1, *head.cross.shape[1:])
    factor = shrinkage[position % 2].view(-1, 1, 1).to(q.dtype)
    correction = clip(factor * (deviation @ cross), head.diameter)
    return output + weights[0].sum(2, keepdim=True) * correction


@torch.no_grad()
def _probe_errors(head: Head, output: Tensor, exact: Tensor) -> Tensor:
    """Return float64 (P, 3): |output - exact|^2, |exact|^2, weight of the probe.

    Args:
        head: The head.
        output: (R, S, e) outputs of groups.
        exact: (P, e) in units of `Keys.unit`.
    """
    slot, weight = head.probe_slot.unsqueeze(2), head.probe_weight.flatten()
    got = output[: len(slot)].gather(1, slot.expand(-1, -1, output.shape[2])).flatten(0, 1).double()
    exact = exact.double() * head.keys.unit
    probes = torch.stack(((got - exact).square().sum(1), exact.square().sum(1), weight), 1)
    return probes.where(weight.unsqueeze(1) > 0, 0.0)
