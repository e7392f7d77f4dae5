"""The error of every probe at every level: step 5 of the specification."""

from typing import NamedTuple

import torch
from torch import Tensor

from bmfa.attention.choice import Levels, level_thresholds
from bmfa.attention.kernels.eager.tiles.heads import Head
from bmfa.attention.tiling import NUM_LEVELS


class HeadLevels(NamedTuple):
    """What the probes of a head find at every level; float64 (P, levels) each but for `output`.

    Squares and products are in units of `Keys.unit`.
    """

    error: Tensor  # |output - exact|^2 without the correction
    product: Tensor  # (exact - output) . correction, with a shrinkage of 1
    correction: Tensor  # |correction|^2
    share: Tensor  # of the tiles that are expanded
    output: Tensor  # (P, e) exact outputs


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
    return HeadLevels(
        error=difference.square().sum(3).flatten(0, 1),
        product=(difference * term).sum(3).flatten(0, 1),
        correction=term.square().sum(3).flatten(0, 1),
        share=share.flatten(0, 1),
        output=exact.flatten(0, 1),
    )


def join_heads(heads: list[Head], found: list[HeadLevels]) -> Levels:
    """What the probes of an image find, from those of its heads, whose values are in different units."""
    units = torch.stack([head.keys.unit for head in heads]).double()
    ratio = (units / units.amax()).square().view(-1, 1, 1)  # at most 1
    error, product, correction, share = (torch.stack(x) for x in list(zip(*found, strict=True))[:4])
    norm = torch.stack([x.output.double().square().sum(1) for x in found]) * ratio[..., 0]
    weight = torch.stack([head.probe_weight.flatten() for head in heads])
    measured = torch.stack((ratio * error, ratio * product, ratio * correction, share), 2)
    return Levels(*(x.cpu().numpy() for x in (measured, norm, weight.double())))


def coarse_shares(log_mass: Tensor, hidden: Tensor) -> Tensor:
    """Shares (..., T) of the tiles that are not hidden in their common mass, from log_mass (..., T)."""
    bias = log_mass.masked_fill(hidden, -torch.inf)
    return bias.masked_fill(bias.amax(-1, keepdim=True) == -torch.inf, 0.0).softmax(-1)


def clip(vectors: Tensor, limit: Tensor) -> Tensor:
    """Limit the lengths of vectors (..., e), whose squares may overflow in their dtype."""
    limit = limit.where(limit > 0, 1.0)  # of values that are all equal, which need no correction
    relative = (vectors.double() / limit).square().sum(-1, keepdim=True)
    return vectors * relative.clamp(min=1.0).rsqrt().to(vectors.dtype)
