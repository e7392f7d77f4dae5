"""The tiled form in torch operations, head by head: any device, any dtype, gradients.

`bmfa.attention.kernels.reference.tiles` specifies what is computed, and this is its plain form: where a
processor has kernels, they are faster. Shapes here: T tiles of S slots, R groups of queries in the order
of `Tiling.group_order`, n probes in each of the first groups, d and e channels of keys and values.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from bmfa.attention.choice import Choice, choose
from bmfa.attention.kernels.eager.tiles.heads import (
    Head,
    Keys,
    Tangents,
    chunk_elements,
    to_tiles,
)
from bmfa.attention.kernels.eager.tiles.levels import (
    clip,
    coarse_shares,
    join_heads,
    measure_levels,
)
from bmfa.attention.tiling import (
    FARTHEST,
    TiledAttention,
    Tiling,
    tiles_to_tokens,
    tokens_to_tiles,
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
    share = None if expand is None else expand / tiling.tiles
    with torch.no_grad():
        levels = [[measure_levels(head) for head in image] for image in images]
    choices = [
        choose(
            join_heads(image, found),
            tiling.probes_per_group,
            target=error,
            aim=tiling.error_aim,
            share=share,
            dense_threshold=dense_threshold,
        )
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
    order, share = tiling.group_order.to(device), q.shape[1] // k.shape[1]
    groups = order[: tiling.probe_groups(query_prefix)].unsqueeze(1)
    draws = torch.arange(tiling.probes_per_group, device=device)
    query_valid = valid if tiling.query_grid is None else None
    images = []
    for b in range(len(q)):
        exists = _exists(tiling, valid, b, device)
        query_exists = _exists(tiling.queries, query_valid, b, device)
        keys = [
            Keys.from_tokens(x, y, tiling, prefix, exists) for x, y in zip(k[b], v[b], strict=True)
        ]
        image = []
        for h, x in enumerate(q[b, :, query_prefix:]):
            queries = to_tiles(x, tiling.queries, query_exists, dtype)[order] * factor
            quantiles = tiling.probe_quantile(groups, torch.tensor(h, device=device), draws)
            image.append(
                Head.from_queries(
                    queries, keys[h // share], query_exists[order], quantiles, farthest
                )
            )
        images.append(image)
    return images


def _exists(tiling: Tiling, valid: Tensor | None, b: int, device: torch.device) -> Tensor:
    """(T, S) bool, the slots of an image with a token."""
    exists = torch.ones(tiling.grid.size, dtype=torch.bool, device=device)
    if valid is not None:
        exists = valid[b % len(valid)]
    return tokens_to_tiles(exists[None, None, :, None], tiling, torch.bool)[0, ..., 0]


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
        output = _attend_exactly(head.keys, head.q.flatten(0, 1)).view(*head.q.shape[:2], -1)
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
    prefix = _attend_exactly(head.keys, before.to(unit.dtype)) * unit
    return torch.cat((prefix.to(before.dtype), spatial)), expanded[raster], probes


def _attend_exactly(keys: Keys, q: Tensor) -> Tensor:
    """Exact outputs (n, e) of queries (n, d)."""
    k, v, exists = keys.all()
    output: Tensor = scaled_dot_product_attention(
        q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), attn_mask=exists.view(1, 1, -1), scale=1.0
    )
    return output[0]


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
