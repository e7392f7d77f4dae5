"""The error of every probe at every level, and the thresholds from them: step 5 of the reference."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from bmfa.attention.kernels.eager.tiles.heads import Heads, matmul
from bmfa.attention.kernels.eager.tiles.representatives import Representatives
from bmfa.attention.tiling import (
    ERROR_AIM,
    LARGEST_SHRINKAGE,
    LEVEL_RATIO,
    NUM_LEVELS,
    SMALLEST_CORRECTION,
    STEEP_FALL,
    STEEP_RISE,
    unflatten,
)


class Levels(NamedTuple):
    """What the probes find at every level; (G, P, levels) each but for `exact`."""

    error: Tensor  # |output - exact|^2 without the correction
    product: Tensor  # (exact - output) . correction, with a shrinkage of 1
    correction: Tensor  # |correction|^2
    share: Tensor  # of the tiles that are expanded
    exact: Tensor  # (G, P, e) exact outputs


@dataclass(frozen=True, eq=False)
class Choice:
    """What the probes determine for all groups."""

    thresholds: Tensor  # (G, 2) of the groups at even and odd positions; 0 expands every tile
    shrinkage: Tensor  # (G, 2)
    exact: Tensor  # (G,) bool, heads in which every tile is expanded

    @classmethod
    def everything(cls, heads: Heads) -> "Choice":
        """Expand every tile."""
        zeros = heads.diameter.new_zeros(len(heads.diameter), 2)
        return cls(zeros, zeros, zeros.new_ones(len(zeros), dtype=torch.bool))


def measure_levels(heads: Heads, representatives: Representatives) -> Levels:
    """Evaluate every probe at every level."""
    chunks = [_measure_chunk(heads, part, representatives) for part in _head_chunks(heads)]
    return Levels(*(torch.cat(field) for field in zip(*chunks, strict=True)))


def _measure_chunk(heads: Heads, part: slice, representatives: Representatives) -> Levels:
    """Evaluate the probes of g heads."""
    probes = slice(0, heads.probes)
    tangents = representatives.tangents(part, probes)
    index = heads.probe_slot[part, :, None, None].expand(-1, -1, 1, heads.q.shape[-1])
    q = heads.q[part, probes].gather(2, index)  # (g, P, 1, d)
    deviation = q - heads.q_mean[part, probes].unsqueeze(2)
    prefix_scores = heads.prefix_scores(q.squeeze(2), part)
    exact_mass, within = heads.see_tiles(q.squeeze(2), part)  # (g, P, T), (g, T, P, S)
    exact_values = matmul(within, heads.of_keys(heads.v, part)).transpose(1, 2)  # (g, P, T, e)
    counts = heads.counts_of(part)
    empty = (counts == 0).unsqueeze(1)
    tangent_mass = matmul(deviation, tangents.k.transpose(2, 3)).squeeze(2) + tangents.log_mass
    # (g, P, levels, T); at the last level everything is expanded
    expanded = tangents.loss.unsqueeze(2) >= _level_thresholds(q).to(q.dtype).unsqueeze(-1)
    expanded &= (tangents.loss > 0).unsqueeze(2)
    expanded[:, :, -1] = True
    expanded &= ~empty.unsqueeze(2)
    logits = torch.where(expanded, exact_mass.unsqueeze(2), tangent_mass.unsqueeze(2))
    prefix_logits = prefix_scores.unsqueeze(2).expand(-1, -1, NUM_LEVELS, -1)
    weights = torch.cat((logits, prefix_logits), -1).softmax(-1)
    prefix_weights = weights[..., logits.shape[-1] :]
    weights = weights[..., : logits.shape[-1]]
    coarse = (~expanded).to(weights.dtype)
    coarse_weights = weights * coarse
    output = matmul(coarse_weights, tangents.v)
    output += matmul(weights - coarse_weights, exact_values)
    if heads.prefix:
        prefix_output = prefix_weights.flatten(1, 2) @ heads.of_keys(heads.prefix_v, part)
        output += prefix_output.view_as(output)
    moved = deviation.transpose(1, 2).expand(-1, heads.tiling.tiles, -1, -1)
    first_order = matmul(moved, heads.cross[part]).transpose(1, 2)  # (g, P, T, e)
    mass = (tangents.log_mass - tangents.log_mass.amax(-1, keepdim=True)).exp().nan_to_num(0.0)
    mass = mass.unsqueeze(2) * coarse  # (g, P, levels, T)
    total = mass.sum(-1, keepdim=True).clamp(min=torch.finfo(mass.dtype).tiny)
    term = clip(matmul(mass, first_order) / total, heads.diameter[part].view(-1, 1, 1, 1))
    term = term * coarse_weights.sum(-1, keepdim=True)
    exact = output[:, :, -1]
    difference = exact.unsqueeze(2) - output
    return Levels(
        error=difference.square().sum(-1),
        product=(difference * term).sum(-1),
        correction=term.square().sum(-1),
        share=(heads.tiling.tiles - coarse.sum(-1)).double() / (counts > 0).sum(-1).view(-1, 1, 1),
        exact=exact,
    )


def _head_chunks(heads: Heads) -> Iterator[slice]:
    """Yield slices of heads whose probes have about `chunk_elements` scores."""
    step = max(1, heads.chunk_elements // (heads.probes * heads.tiling.tiles * heads.tiling.slots))
    step = 1 if heads.q.device.type == "cpu" or heads.share > 1 else step
    for start in range(0, len(heads.q), step):
        yield slice(start, min(start + step, len(heads.q)))


def _level_thresholds(like: Tensor) -> Tensor:
    """(levels,) float64 on the device of a tensor; at the last one, 0, every tile is expanded."""
    powers = torch.arange(NUM_LEVELS, device=like.device, dtype=torch.float64)
    return (LEVEL_RATIO**powers).masked_fill(powers == NUM_LEVELS - 1, 0.0)


def choose(
    heads: Heads, levels: Levels, error: float | None, share: float | None, exact_above: float
) -> Choice:
    """Step 5 of the specification, from what the probes found."""
    shape = heads.shape
    probe_weight = unflatten(heads.probe_weight, 0, shape).unsqueeze(-1)  # (B, H, P, 1)
    position = torch.arange(heads.probes, device=probe_weight.device).view(-1, 1)
    fields = (levels.error, levels.product, levels.correction, levels.share)
    squares, product, correction, shares = (unflatten(x.double(), 0, shape) for x in fields)
    norms = unflatten(levels.exact.double().square().sum(-1), 0, shape).unsqueeze(-1)
    # Half of the probes determines what the groups at positions of the other parity use.
    parity = torch.arange(2, device=position.device).view(2, 1, 1, 1, 1)
    weight = probe_weight * (position % 2 != parity)  # (2, B, H, P, 1)
    found = (weight > 0).any(3, keepdim=True).any(2, keepdim=True)
    weight = torch.where(found, weight, probe_weight)  # a single group
    total, dot, square, count = (
        (weight * x).sum(3) for x in (squares, product, correction, shares)
    )  # (2, B, H, levels)
    norm = (weight * norms).sum(3)  # (2, B, H, 1)
    known = square > SMALLEST_CORRECTION**2 * norm
    factor = (dot / square.where(known, 1.0)).where(known, 0.0).clamp(0.0, LARGEST_SHRINKAGE)
    total = (total - 2 * factor * dot + factor.square() * square).sum(2)
    norm = norm.sum(2)
    errors = (total.clamp(min=0.0) / norm.where(norm > 0, 1.0)).sqrt().flatten(0, 1)
    count = (count / weight.sum(3).clamp(min=1e-300)).clamp(max=1.0)  # ones may round up
    if error is not None:
        level, part = _interpolate_down(errors, ERROR_AIM * error)
    else:
        assert share is not None
        level, part = _interpolate_up(count.mean(2).flatten(0, 1), share)
    threshold = _threshold_at(_level_thresholds(errors), level, part)  # (2 B,), as level and part
    index = level.view(2, -1, 1, 1).expand(-1, -1, shape[1], 1)
    factor = factor.gather(3, index).squeeze(3)
    below, above = (count.gather(3, x).squeeze(3) for x in (index, (index - 1).clamp(min=0)))
    exact = torch.lerp(above, below, part.view(2, -1, 1)).mean(0) > exact_above  # (B, H)
    dtype = heads.q.dtype
    return Choice(
        threshold.view(2, -1, 1).expand(2, *shape).flatten(1).T.to(dtype),
        factor.flatten(1).T.to(dtype),
        exact.flatten(),
    )


def _interpolate_down(errors: Tensor, target: float) -> tuple[Tensor, Tensor]:
    """Return where falling errors (B, levels) reach the target: levels and parts of the steps (B,)."""
    level = _first(errors <= target) if target > 0.0 else _first(errors < 0.0)
    before, after = _step(errors.clamp(min=1e-30), level)
    ratio = (before / after).log()
    part = (before / max(target, 1e-30)).log() / ratio.where(ratio != 0.0, 1.0)
    part = part.clamp(0.0, 1.0).where(ratio != 0.0, 1.0)
    complete = (level == 0) | (level == errors.shape[1] - 1) | (after < STEEP_FALL * target)
    return level, part.where(~complete, 1.0)


def _interpolate_up(shares: Tensor, target: float) -> tuple[Tensor, Tensor]:
    """Return where growing shares (B, levels) reach the target: levels and parts of the steps (B,)."""
    last = shares.shape[1] - 1
    level = _first(shares > target)
    if target >= 1.0 or target <= 0.0:
        return torch.full_like(level, last if target >= 1.0 else 0), shares.new_ones(level.shape)
    before, after = _step(shares, level)
    part = (target - before) / (after - before).where(after > before, 1.0)
    steep = (level > 0) & ((level == last) | (after > STEEP_RISE * target))
    return level - steep.long(), part.where(~(steep | (level == 0)), 1.0)


def _threshold_at(thresholds: Tensor, level: Tensor, part: Tensor) -> Tensor:
    """Return the thresholds (B,) between levels and those before; infinity expands nothing."""
    before, after = _step(thresholds.expand(len(level), -1), level)
    between = torch.where(part == 1.0, after, before ** (1 - part) * after**part)
    return between.where(level > 0, torch.inf)


def _step(values: Tensor, level: Tensor) -> tuple[Tensor, Tensor]:
    """Return the values (B, levels) before and at the levels (B,)."""
    after = level.unsqueeze(1)
    before = (after - 1).clamp(min=0)
    return values.gather(1, before).squeeze(1), values.gather(1, after).squeeze(1)


def _first(flags: Tensor) -> Tensor:
    """(B,) index of the first True of (B, levels), the last index if there is none."""
    flags = flags.clone()
    flags[:, -1] = True
    return flags.to(torch.uint8).argmax(-1)


def coarse_bias(log_mass: Tensor, hidden: Tensor) -> Tensor:
    """Set log_mass (..., T) of hidden tiles to -inf; all to 0 where every tile is hidden."""
    bias = log_mass.masked_fill(hidden, -torch.inf)
    return bias.masked_fill(hidden.all(-1, keepdim=True), 0.0)


def clip(vectors: Tensor, length: Tensor, factor: Tensor | None = None) -> Tensor:
    """Multiply vectors (..., e) by a factor from 0 on, and limit their lengths."""
    length = length.where(length > 0, 1.0)  # of values that are all equal, which need no correction
    if torch.is_grad_enabled() and vectors.requires_grad:  # a norm has no second derivative at 0
        vectors = vectors if factor is None else vectors * factor
        return vectors * (vectors / length).square().sum(-1, keepdim=True).clamp(min=1.0).rsqrt()
    # Squares of float32 may overflow, those of float64 do not.
    norm = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True, dtype=torch.float64)
    most = length / norm.clamp(min=torch.finfo(torch.float64).tiny)
    scale = most.clamp(max=1.0) if factor is None else torch.minimum(most, factor)
    return vectors * scale.to(vectors.dtype)
