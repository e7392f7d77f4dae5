"""The error of every probe at every level, and the thresholds from them: step 5 of the specification."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from bmfa.attention.kernels.eager.tiles.heads import Head
from bmfa.attention.tiling import (
    ERROR_AIM,
    LARGEST_SHRINKAGE,
    LEVEL_RATIO,
    NUM_LEVELS,
    SMALLEST_CORRECTION,
    STEEP_FALL,
    STEEP_RISE,
)


class Levels(NamedTuple):
    """What the probes of a head find at every level; float64 (P, levels) each but for `output`.

    Squares and products are in units of `Keys.unit`.
    """

    error: Tensor  # |output - exact|^2 without the correction
    product: Tensor  # (exact - output) . correction, with a shrinkage of 1
    correction: Tensor  # |correction|^2
    share: Tensor  # of the tiles that are expanded
    output: Tensor  # (P, e) exact outputs


class Choice(NamedTuple):
    """What the probes of an image determine."""

    thresholds: Tensor  # (2,) float64 of the groups at even and odd positions; 0 expands every tile
    shrinkage: Tensor  # (H, 2) float64
    exact: list[bool]  # (H,) heads in which every tile is expanded

    @classmethod
    def everything(cls, heads: int, device: torch.device) -> "Choice":
        """Expand every tile."""
        zeros = torch.zeros(heads + 1, 2, dtype=torch.float64, device=device)
        return cls(zeros[0], zeros[1:], [True] * heads)


def measure_levels(head: Head) -> Levels:
    """Evaluate every probe at every level."""
    groups, probes = head.probe_slot.shape
    chunks = [_measure_chunk(head, positions) for positions in head.chunks(groups, probes)]
    return Levels(*(torch.cat(field) for field in zip(*chunks, strict=True)))


def _measure_chunk(head: Head, positions: slice) -> Levels:
    """Evaluate the n probes of each of r groups."""
    keys, tangents, slot = head.keys, head.tangents(positions), head.probe_slot[positions]
    shape = (*slot.shape, NUM_LEVELS, -1)
    q = head.q[positions].gather(1, slot.unsqueeze(2).expand(-1, -1, head.q.shape[2]))  # (r, n, d)
    deviation = q - head.q_mean[positions].unsqueeze(1)
    exact_mass, p = keys.softmax(q.flatten(0, 1))
    exact_values = (p @ keys.v).transpose(0, 1)  # (r n, T, e)
    tangent_mass = tangents.log_mass.unsqueeze(1) + deviation @ tangents.k.transpose(1, 2)
    thresholds = level_thresholds().to(q.device).view(-1, 1, 1)
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
    return Levels(
        error=difference.square().sum(3).flatten(0, 1),
        product=(difference * term).sum(3).flatten(0, 1),
        correction=term.square().sum(3).flatten(0, 1),
        share=share.flatten(0, 1),
        output=exact.flatten(0, 1),
    )


def level_thresholds() -> Tensor:
    """(levels,) float64; at the last level, 0, every tile is expanded."""
    thresholds = LEVEL_RATIO ** torch.arange(NUM_LEVELS, dtype=torch.float64)
    thresholds[-1] = 0.0
    return thresholds


def choose(
    heads: list[Head], levels: list[Levels], error: float | None, share: float | None, exact_above: float
) -> Choice:  # fmt: skip
    """Step 5 of the specification for an image, from what its probes found.

    The probes of the groups at positions of one parity determine what the groups at the others use.
    """
    device = heads[0].q.device
    weights = torch.stack([head.probe_weight for head in heads]).cpu()  # (H, probe groups, n)
    # Values of the heads are in different units; `ratio` is at most 1.
    units = torch.stack([head.keys.unit for head in heads]).double().cpu()
    ratio = (units / units.amax()).square().view(-1, 1, 1)
    found = [torch.stack(x).cpu() for x in zip(*(x[:4] for x in levels), strict=True)]
    squares, product, correction = (ratio * x for x in found[:3])
    norms = (
        ratio * torch.stack([x.output.double().square().sum(1) for x in levels]).cpu()[..., None]
    )
    thresholds, shrinkage, shares = [], [], []
    for half in range(2):
        weight = weights.clone()
        if weight[:, 1 - half :: 2].any():  # otherwise there is a single group
            weight[:, half::2] = 0.0
        weight = weight.flatten(1).unsqueeze(2)  # (H, P, 1)
        total, dot, square, count, norm = (
            (weight * x).sum(1) for x in (squares, product, correction, found[3], norms)
        )  # (H, levels)
        known = square > SMALLEST_CORRECTION**2 * norm
        factor = (dot / square.where(known, 1.0)).where(known, 0.0).clamp(0.0, LARGEST_SHRINKAGE)
        total = (total - 2 * factor * dot + factor.square() * square).sum(0).clamp(min=0.0)
        norm_sum = norm.sum()
        errors = (total / norm_sum.where(norm_sum > 0, 1.0)).sqrt().tolist()
        count = (count / weight.sum(1).clamp(min=1e-300)).clamp(max=1.0)  # ones may round up
        if error is not None:
            level, part = interpolate_down(errors, ERROR_AIM * error)
        else:
            assert share is not None
            level, part = interpolate_up(count.mean(0).tolist(), share)
        thresholds.append(threshold_at(level, part))
        shrinkage.append(factor[:, level])
        shares.append(torch.lerp(count[:, max(level - 1, 0)], count[:, level], part))
    exact = (shares[0] + shares[1]) / 2 > exact_above
    return Choice(
        torch.tensor(thresholds, dtype=torch.float64, device=device),
        torch.stack(shrinkage, 1).to(device),
        exact.tolist(),
    )


def interpolate_down(errors: list[float], target: float) -> tuple[int, float]:
    """Return where falling errors reach the target: a level, and the part of the step to it."""
    last = len(errors) - 1
    if target <= 0.0:
        return last, 1.0
    level = next((j for j, value in enumerate(errors) if value <= target), last)
    if level in (0, last) or errors[level] < STEEP_FALL * target:
        return level, 1.0
    ratio = math.log(errors[level - 1] / errors[level])
    part = math.log(errors[level - 1] / target) / ratio if ratio != 0.0 else 1.0
    return level, min(max(part, 0.0), 1.0)


def interpolate_up(shares: list[float], target: float) -> tuple[int, float]:
    """Return where growing shares reach the target: a level, and the part of the step to it."""
    last = len(shares) - 1
    if target >= 1.0:
        return last, 1.0
    level = next((j for j, value in enumerate(shares) if value > target), last)
    if target <= 0.0 or level == 0:
        return 0, 1.0
    if level == last or shares[level] > STEEP_RISE * target:
        return level - 1, 1.0
    return level, (target - shares[level - 1]) / (shares[level] - shares[level - 1])


def threshold_at(level: int, part: float) -> float:
    """Return the threshold between a level and the one before it; infinity expands nothing."""
    if level == 0:
        return math.inf
    before, after = level_thresholds()[level - 1 : level + 1].tolist()
    return float(after if part == 1.0 else before ** (1 - part) * after**part)


def coarse_shares(log_mass: Tensor, hidden: Tensor) -> Tensor:
    """Shares (..., T) of the tiles that are not hidden in their common mass, from log_mass (..., T)."""
    bias = log_mass.masked_fill(hidden, -torch.inf)
    return bias.masked_fill(bias.amax(-1, keepdim=True) == -torch.inf, 0.0).softmax(-1)


def clip(vectors: Tensor, limit: Tensor) -> Tensor:
    """Limit the lengths of vectors (..., e), whose squares may overflow in their dtype."""
    limit = limit.where(limit > 0, 1.0)  # of values that are all equal, which need no correction
    relative = (vectors.double() / limit).square().sum(-1, keepdim=True)
    return vectors * relative.clamp(min=1.0).rsqrt().to(vectors.dtype)
