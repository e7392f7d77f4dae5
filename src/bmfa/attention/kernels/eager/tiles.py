"""What tiled attention takes from tokens: tiles, means, and the screen of the representatives.

Heads of all pictures lie in one dimension G, tokens in tiles: (G, T, S, d) with S = side * side slots.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from bmfa.attention.tiling import CAP, Tiling, by_groups, by_tiles, existing_slots, split_dimension
from bmfa.trees.keys import query_chunks

# Logits held at once: few enough to stay in a processor's cache, enough to hide the calls.
CHUNK_ELEMENTS = 1 << 19
# An accelerator has no such cache, and calls cost more there.
DEVICE_ELEMENTS = 1 << 24


@dataclass(frozen=True, eq=False)
class Tiles:
    """Tokens by tiles, and their means.

    `keys` and `values` hold in one table the rows that attention gathers: the T mean tiles, the
    prefix, and the tokens of all tiles, 0 where a slot has none.
    """

    q: Tensor  # (G, R, group * S, d) times scale / tau, as is mean_q
    mean_q: Tensor  # (G, R, d) the representatives
    query_spread: Tensor  # (G, R) mean squared distance of the queries from them, over 2d
    keys: Tensor  # (G, T + prefix + T S, d)
    values: Tensor  # (G, T + prefix + T S, e)
    deviation: Tensor  # (G, T S, d) keys less the mean of their tile
    key_spread: Tensor  # (G, T) mean squared length of the deviations
    exists: Tensor | None  # (G, T, S); None where every slot holds a token
    counts: Tensor  # (1 or G, T) tokens of each tile
    prefix: int

    @classmethod
    def of(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tiling: Tiling,
        prefix: int,
        factor: float,
        valid: Tensor | None,
    ) -> "Tiles":
        """Lay tokens out in tiles, in at least float32, and take means."""
        working = torch.promote_types(q.dtype, torch.float32)
        exists = existing_slots(tiling, valid, q)
        before = [x[:, :, :prefix].to(working).flatten(0, 1) for x in (k, v)]
        q, k, v = (by_tiles(x[:, :, prefix:], tiling, working) for x in (q, k, v))
        q = q * factor
        if exists is None:
            counts = q.new_full((1, tiling.tiles), float(tiling.side**2))
        else:
            q, k, v = (x.masked_fill(~exists.unsqueeze(-1), 0.0) for x in (q, k, v))
            counts = exists.sum(-1).to(working)
        means = [x.sum(2) / counts.clamp(min=1).unsqueeze(-1) for x in (k, v)]
        deviation = k - means[0].unsqueeze(2)
        if exists is not None:
            deviation = deviation.masked_fill(~exists.unsqueeze(-1), 0.0)
        sums = by_groups(q.sum(2), tiling).sum(2)
        members = by_groups(counts.unsqueeze(-1), tiling).sum(2).clamp(min=1)
        mean_q = sums / members
        grouped = by_groups(q.flatten(2), tiling).view(*sums.shape[:2], -1, q.shape[-1])
        apart = grouped - mean_q.unsqueeze(2)
        if exists is not None or tiling.tiles % tiling.group:
            there = q.new_ones(q.shape[:3]) if exists is None else exists.to(working)
            apart = apart * by_groups(there, tiling).flatten(2).unsqueeze(-1)
        query_spread = _squares(apart) / members.squeeze(-1) / (2 * q.shape[-1])
        key_spread = _squares(deviation) / counts.clamp(min=1)
        rounding = (8 * torch.finfo(working).eps) ** 2 * means[0].square().sum(-1)
        return cls(
            grouped,
            mean_q,
            query_spread,
            torch.cat((means[0], before[0], k.flatten(1, 2)), 1),
            torch.cat((means[1], before[1], v.flatten(1, 2)), 1),
            deviation.flatten(1, 2),
            key_spread.where(key_spread > rounding, 0.0),
            exists,
            counts,
            prefix,
        )

    @property
    def tiles(self) -> int:
        """T."""
        return self.counts.shape[1]

    @property
    def slots(self) -> int:
        """S."""
        return self.deviation.shape[1] // self.tiles

    @property
    def first(self) -> int:
        """Row of the first token in `keys` and `values`."""
        return self.tiles + self.prefix

    @property
    def chunk(self) -> int:
        """Logits held at once."""
        return CHUNK_ELEMENTS if self.q.device.type == "cpu" else DEVICE_ELEMENTS


@dataclass(frozen=True, eq=False)
class Screen:
    """What the representatives found."""

    gap: Tensor  # (G R, T) of the representative and the spread of its group, capped
    expanded: Tensor  # (G R, T) bool
    residual: Tensor  # (G R, e)


def screen_tiles(tiles: Tiles, limit: float | None, expand: int | None) -> Screen:
    """The exact gap of every tile at every representative, the choice, and the lost values."""
    heads, groups = tiles.mean_q.shape[:2]
    parts = [
        _screen_part(tiles, some, rows, limit, expand)
        for some, rows in query_chunks(heads, groups, tiles.deviation.shape[1], tiles.chunk)
    ]
    fields = zip(*parts, strict=True)
    gap, expanded, residual = (torch.cat([x.flatten(0, 1) for x in field]) for field in fields)
    return Screen(gap, expanded, residual)


def _screen_part(
    tiles: Tiles, heads: slice, rows: slice, limit: float | None, expand: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """`screen_tiles` of some heads and groups."""
    count = tiles.counts if len(tiles.counts) == 1 else tiles.counts[heads]
    count = count.unsqueeze(1)  # (1 or g, 1, T)
    keys, values = tiles.keys[heads], tiles.values[heads]
    representative = tiles.mean_q[heads, rows]  # (g, r, d)
    scores = representative @ tiles.deviation[heads].transpose(1, 2)
    scores = split_dimension(scores, 2, (tiles.tiles, tiles.slots))  # (g, r, T, S) s - M
    if tiles.exists is not None:
        # A tile without tokens keeps its zeros; its count of 0 takes it out below.
        absent = ~tiles.exists[heads].unsqueeze(1) & (count > 0).unsqueeze(-1)
        scores = scores.masked_fill(absent, -torch.inf)
    shares = scores.softmax(-1)
    # log sum exp, at the price of two maxima instead of a second exponential
    energy = scores.amax(-1) - shares.amax(-1).log()
    gap = (energy - count.clamp(min=1).log()).clamp(min=0.0)
    spread = tiles.query_spread[heads, rows].unsqueeze(-1) * tiles.key_spread[heads].unsqueeze(1)
    gap = (gap + spread.nan_to_num(0.0)).clamp(max=CAP)  # 0 times squares beyond all numbers
    coarse = representative @ keys[:, : tiles.first].transpose(1, 2)
    mean, before = coarse[..., : tiles.tiles], coarse[..., tiles.tiles :]
    mass = (mean + energy).masked_fill(count == 0, -torch.inf)  # A_L
    with torch.no_grad():
        whole = torch.cat((mass, before), -1).logsumexp(-1, keepdim=True)
        loss = (mass - whole).exp() * -torch.expm1(-gap)
        loss = loss.nan_to_num(0.0)  # no token at all
        exists = (count > 0).expand(loss.shape)
        expanded = _by_error(loss, limit) if expand is None else _by_count(loss, expand, exists)
    left = exists & ~expanded
    some = left.any(-1, keepdim=True)
    weight = mass.masked_fill(~left & some, -torch.inf).masked_fill(~some, 0.0).softmax(-1)
    weight = weight * some  # (g, r, T) share of each tile in the mass that is left
    tokens = (shares * weight.unsqueeze(-1)).flatten(2)
    residual = tokens @ values[:, tiles.first :] - weight @ values[:, : tiles.tiles]
    return gap, expanded, residual


def _squares(vectors: Tensor) -> Tensor:
    """(G, T) sum of the squares in (G, T, S, d), without a tensor of them."""
    line = vectors.flatten(2).unsqueeze(2)
    return (line @ line.transpose(2, 3)).flatten(1)


def _by_error(loss: Tensor, limit: float | None) -> Tensor:
    """The fewest largest losses, ties together, that leave at most `limit`."""
    ordered = loss.sort(-1).values
    kept = (ordered.cumsum(-1) <= (limit or 0.0)).sum(-1, keepdim=True)  # tiles left as means
    least = ordered.gather(-1, kept.clamp(max=loss.shape[-1] - 1))
    return (loss >= least) & (kept < loss.shape[-1])


def _by_count(loss: Tensor, expand: int, exists: Tensor) -> Tensor:
    """The `expand` largest losses above 0, ties by the tile's index; every tile where that is all."""
    if expand >= loss.shape[-1]:
        return exists
    chosen = loss.sort(dim=-1, descending=True, stable=True).indices[..., :expand]
    return torch.zeros_like(exists.contiguous()).scatter(-1, chosen, True) & (loss > 0)
