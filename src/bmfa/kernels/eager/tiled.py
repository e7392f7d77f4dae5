"""Tiled attention in torch operations: gathers and batched products, any device, autograd.

The semantics are kernels.reference.tiled's. Heads of all pictures lie in one dimension G, tokens in
tiles: (G, T, S, d) with S = side * side slots.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from bmfa.screening import query_chunks
from bmfa.tiling import CAP, Tiled, Tiling

# Logits held at once: few enough to stay in a processor's cache, enough to hide the calls.
CHUNK_ELEMENTS = 1 << 18
# An accelerator has no such cache, and calls cost more there.
DEVICE_ELEMENTS = 1 << 24


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tiling: Tiling,
    *,
    prefix: int,
    scale: float,
    tau: float = 1.0,
    error: float | None = None,
    expand: int | None = None,
    valid: Tensor | None = None,
) -> Tiled:
    """Attention of (B, heads, prefix + N, d) tokens in raster order over tiles.

    One of `error` (a target for E of every representative) and `expand` (tiles expanded for each
    group) is given. Half types are computed in float32. The choice of the expanded tiles is not
    differentiated; everything else is.
    """
    if (error is None) == (expand is None):
        raise ValueError(f"error is {error!r} and expand is {expand!r}; pass exactly one of them")
    tiles = _Tiles.of(q, k, v, tiling, prefix, scale / tau, valid)
    limit = None if error is None else -math.expm1(-error / tau)
    screen = _screen(tiles, limit, expand)
    spatial = _raster(_attend(tiles, screen), tiling).unflatten(0, q.shape[:2])
    output = spatial.to(q.dtype)
    if prefix:
        output = torch.cat((_dense_prefix(q, tiles, scale / tau).to(q.dtype), output), 2)
    marks = screen.expanded.unflatten(0, (*q.shape[:2], tiling.groups))
    return Tiled(output, marks.sum(-1, dtype=torch.int32), marks)


@dataclass(frozen=True, eq=False)
class _Tiles:
    """Tokens by tiles, and their means.

    `keys` and `values` hold in one table the rows that attention gathers: the T mean tiles, the
    prefix, and the tokens of all tiles, 0 where a slot has none.
    """

    q: Tensor  # (G, R, group * S, d) times scale / tau, as is mean_q
    mean_q: Tensor  # (G, R, d) the representatives
    keys: Tensor  # (G, T + prefix + T S, d)
    values: Tensor  # (G, T + prefix + T S, e)
    deviation: Tensor  # (G, T S, d) keys less the mean of their tile
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
    ) -> "_Tiles":
        """Lay tokens out in tiles, in at least float32, and take means."""
        working = torch.promote_types(q.dtype, torch.float32)
        exists = _existing(tiling, valid, q)
        before = [x[:, :, :prefix].to(working).flatten(0, 1) for x in (k, v)]
        q, k, v = (_by_tiles(x[:, :, prefix:], tiling, working) for x in (q, k, v))
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
        missing = tiling.groups * tiling.group - tiling.tiles
        sums = _grouped(q.sum(2), missing, tiling.group).sum(2)
        members = _grouped(counts.unsqueeze(-1), missing, tiling.group).sum(2)
        return cls(
            _grouped(q.flatten(2), missing, tiling.group).view(*sums.shape[:2], -1, q.shape[-1]),
            sums / members.clamp(min=1),
            torch.cat((means[0], before[0], k.flatten(1, 2)), 1),
            torch.cat((means[1], before[1], v.flatten(1, 2)), 1),
            deviation.flatten(1, 2),
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
class _Screen:
    """What the representatives found."""

    gap: Tensor  # (G R, T) capped
    expanded: Tensor  # (G R, T) bool
    residual: Tensor  # (G R, e)


def _screen(tiles: _Tiles, limit: float | None, expand: int | None) -> _Screen:
    """The exact gap of every tile at every representative, the choice, and the lost values."""
    heads, groups = tiles.mean_q.shape[:2]
    parts = [
        _screen_part(tiles, some, rows, limit, expand)
        for some, rows in query_chunks(heads, groups, tiles.deviation.shape[1], tiles.chunk)
    ]
    fields = zip(*parts, strict=True)
    gap, expanded, residual = (torch.cat([x.flatten(0, 1) for x in field]) for field in fields)
    return _Screen(gap, expanded, residual)


def _screen_part(
    tiles: _Tiles, heads: slice, rows: slice, limit: float | None, expand: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """`_screen` of some heads and groups."""
    count = tiles.counts if len(tiles.counts) == 1 else tiles.counts[heads]
    count = count.unsqueeze(1)  # (1 or g, 1, T)
    keys, values = tiles.keys[heads], tiles.values[heads]
    representative = tiles.mean_q[heads, rows]  # (g, r, d)
    scores = representative @ tiles.deviation[heads].transpose(1, 2)
    scores = scores.unflatten(2, (tiles.tiles, tiles.slots))  # (g, r, T, S) s - M
    if tiles.exists is not None:
        # A tile without tokens keeps its zeros; its count of 0 takes it out below.
        absent = ~tiles.exists[heads].unsqueeze(1) & (count > 0).unsqueeze(-1)
        scores = scores.masked_fill(absent, -torch.inf)
    shares = scores.softmax(-1)
    # log sum exp, at the price of two maxima instead of a second exponential
    energy = scores.amax(-1) - shares.amax(-1).log()
    gap = (energy - count.clamp(min=1).log()).clamp(0.0, CAP)
    coarse = representative @ keys[:, : tiles.first].transpose(1, 2)
    mean, before = coarse.split((tiles.tiles, tiles.prefix), -1)
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


def _attend(tiles: _Tiles, screen: _Screen) -> Tensor:
    """(G, R, group * S, e) outputs; groups that expand alike are computed together."""
    heads, groups, size, _ = tiles.q.shape
    amounts = screen.expanded.sum(-1)  # (G R)
    order = amounts.argsort(stable=True)
    ordered = amounts[order].tolist()
    alike = ordered[0] == ordered[-1]
    table = _Table.of(tiles, screen)
    outputs, start = [], 0
    while start < len(ordered):
        stop = start + 1
        while stop < len(ordered):
            rows = size * (tiles.first + ordered[stop] * tiles.slots)
            if (stop + 1 - start) * rows > tiles.chunk:
                break
            stop += 1
        some = slice(start, stop) if alike else order[start:stop]
        outputs.append(table.attend(some, ordered[stop - 1]))
        start = stop
    output = torch.cat(outputs)
    if not alike:
        output = output[order.argsort()]
    return output.unflatten(0, (heads, groups))


@dataclass(frozen=True, eq=False)
class _Table:
    """Everything attention reads, groups and rows of all heads in one dimension."""

    tiles: _Tiles
    screen: _Screen
    head: Tensor  # (G R)
    bias: Tensor  # (G R, 1, T) log n + gap; -inf for expanded and empty tiles
    linear: Tensor  # (G, d, e) cross / n
    fixed: Tensor  # (T + prefix) rows that every group reads
    tokens: Tensor  # (S) rows of a tile, from its first

    @classmethod
    def of(cls, tiles: _Tiles, screen: _Screen) -> "_Table":
        """Bias and first-order matrix."""
        heads, groups = tiles.q.shape[:2]
        device = tiles.q.device
        sizes = tiles.counts.log().repeat_interleave(heads * groups // len(tiles.counts), 0)
        bias = (screen.gap + sizes).masked_fill(screen.expanded, -torch.inf)
        # Deviations sum to 0 in every tile: the mean value takes nothing away.
        cross = tiles.deviation.transpose(1, 2) @ tiles.values[:, tiles.first :]
        return cls(
            tiles,
            screen,
            torch.arange(heads * groups, device=device) // groups,
            bias.unsqueeze(1),
            cross / tiles.counts.sum(-1).clamp(min=1).view(-1, 1, 1),
            torch.arange(tiles.first, device=device),
            torch.arange(tiles.slots, device=device),
        )

    def attend(self, some: Tensor | slice, reach: int) -> Tensor:
        """(n, group * S, e) outputs of some groups, none of which expands more than `reach` tiles."""
        tiles, head = self.tiles, self.head[some]
        queries = tiles.q.flatten(0, 1)[some]
        rows, absent = self.gathered(some, reach)
        rows = (rows + head.unsqueeze(1) * tiles.keys.shape[1]).flatten()
        keys = tiles.keys.flatten(0, 1).index_select(0, rows).unflatten(0, (len(head), -1))
        values = tiles.values.flatten(0, 1).index_select(0, rows).unflatten(0, (len(head), -1))
        logits = queries @ keys.transpose(1, 2)
        logits[..., : tiles.tiles] += self.bias[some]
        if absent is not None:
            logits[..., tiles.first :].masked_fill_(absent.unsqueeze(1), -torch.inf)
        weights = logits.softmax(-1)
        share = weights[..., : tiles.tiles].sum(-1, keepdim=True)  # u
        apart = queries - tiles.mean_q.flatten(0, 1)[some].unsqueeze(1)
        lost = torch.baddbmm(self.screen.residual[some].unsqueeze(1), apart, self.linear[head])
        return torch.baddbmm(share * lost, weights, values)

    def gathered(self, some: Tensor | slice, reach: int) -> tuple[Tensor, Tensor | None]:
        """(n, rows) of the tables that groups read, and (n, reach S) which of the tokens are none."""
        tiles = self.tiles
        marks = self.screen.expanded[some]
        fixed = self.fixed.expand(len(marks), -1)
        if not reach:
            return fixed, None
        # The expanded tiles of each group, then others to fill the row.
        marked, places = marks.to(torch.uint8).sort(dim=-1, descending=True, stable=True)
        marked, places = marked[:, :reach].bool(), places[:, :reach]
        rows = (tiles.first + places * tiles.slots).unsqueeze(-1) + self.tokens
        absent = None
        if tiles.exists is not None:
            present = tiles.exists[self.head[some].unsqueeze(1), places]  # (n, reach, S)
            absent = ~(present & marked.unsqueeze(-1)).flatten(1)
        elif not bool(marked.all()):
            absent = ~marked.repeat_interleave(tiles.slots, 1)
        return torch.cat((fixed, rows.flatten(1)), 1), absent


def _dense_prefix(q: Tensor, tiles: _Tiles, factor: float) -> Tensor:
    """(B, heads, prefix, e) exact outputs of the prefix queries."""
    queries = q[:, :, : tiles.prefix].to(tiles.q.dtype)
    keys, values = (
        x[:, tiles.tiles :].unflatten(0, q.shape[:2]) for x in (tiles.keys, tiles.values)
    )
    mask = None
    if tiles.exists is not None:
        spatial = tiles.exists.flatten(1).unflatten(0, q.shape[:2]).unsqueeze(2)
        mask = pad(spatial, (tiles.prefix, 0), value=True)
    return scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=factor)


def _by_tiles(x: Tensor, tiling: Tiling, dtype: torch.dtype) -> Tensor:
    """(G, T, S, *) from (B, heads, N, *) in raster order, zeros in slots without a token."""
    side, grid = tiling.side, tiling.grid
    x = x.flatten(0, 1).to(dtype).unflatten(1, (grid.height, grid.width))
    if tiling.ragged:
        x = pad(x, (0, 0, 0, -grid.width % side, 0, -grid.height % side))
    x = x.unflatten(2, (tiling.tiles_across, side)).unflatten(1, (tiling.tiles_down, side))
    return x.transpose(2, 3).flatten(3, 4).flatten(1, 2)


def _raster(x: Tensor, tiling: Tiling) -> Tensor:
    """(G, N, *) from (G, R, group * S, *)."""
    side, grid = tiling.side, tiling.grid
    x = x.flatten(1, 2)[:, : tiling.tiles * side * side]
    x = x.unflatten(1, (tiling.tiles_down, tiling.tiles_across, side, side)).transpose(2, 3)
    x = x.flatten(3, 4).flatten(1, 2)  # (G, rows, columns, *)
    return x[:, : grid.height, : grid.width].flatten(1, 2)


def _existing(tiling: Tiling, valid: Tensor | None, like: Tensor) -> Tensor | None:
    """(G, T, S) which slots hold a token of (B, heads, ...); None where all do."""
    batch, heads = like.shape[:2]
    if valid is None:
        if not tiling.ragged:
            return None
        valid = torch.ones(1, tiling.grid.size, dtype=torch.bool, device=like.device)
    inside = _by_tiles(valid[:, None, :, None], tiling, torch.bool).squeeze(-1)
    return inside.repeat_interleave(batch * heads // len(inside), 0)


def _grouped(x: Tensor, missing: int, group: int) -> Tensor:
    """(G, R, group, *) from (G, T, *), zeros where the last group has fewer tiles."""
    if missing:
        x = pad(x, (0, 0, 0, missing))
    return x.unflatten(1, (-1, group))
