"""Tiled attention in torch operations: gathers and batched products, any device, autograd.

The semantics are kernels.reference.tiled's; shapes as in kernels.eager.tiles.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from bmfa.attention.tiling import (
    GAP_CAP,
    TiledAttention,
    Tiling,
    groups_to_tokens,
    tiles_to_groups,
    tokens_to_tiles,
    unflatten,
    valid_slots,
)
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
        exists = valid_slots(tiling, valid, q)
        before = [x[:, :, :prefix].to(working).flatten(0, 1) for x in (k, v)]
        q, k, v = (tokens_to_tiles(x[:, :, prefix:], tiling, working) for x in (q, k, v))
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
        sums = tiles_to_groups(q.sum(2), tiling).sum(2)
        members = tiles_to_groups(counts.unsqueeze(-1), tiling).sum(2).clamp(min=1)
        mean_q = sums / members
        grouped = tiles_to_groups(q.flatten(2), tiling).view(*sums.shape[:2], -1, q.shape[-1])
        apart = grouped - mean_q.unsqueeze(2)
        if exists is not None or tiling.tiles % tiling.group:
            there = q.new_ones(q.shape[:3]) if exists is None else exists.to(working)
            apart = apart * tiles_to_groups(there, tiling).flatten(2).unsqueeze(-1)
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
    scores = unflatten(scores, 2, (tiles.tiles, tiles.slots))  # (g, r, T, S) s - M
    if tiles.exists is not None:
        # A tile without tokens keeps its zeros; its count of 0 takes it out below.
        absent = ~tiles.exists[heads].unsqueeze(1) & (count > 0).unsqueeze(-1)
        scores = scores.masked_fill(absent, -torch.inf)
    shares = scores.softmax(-1)
    # log sum exp, at the price of two maxima instead of a second exponential
    energy = scores.amax(-1) - shares.amax(-1).log()
    gap = (energy - count.clamp(min=1).log()).clamp(min=0.0)
    spread = tiles.query_spread[heads, rows].unsqueeze(-1) * tiles.key_spread[heads].unsqueeze(1)
    gap = (gap + spread.nan_to_num(0.0)).clamp(max=GAP_CAP)  # 0 times squares beyond all numbers
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


def tiled_attention(
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
    most: float = 1.0,
) -> TiledAttention | None:
    """Attention of (B, heads, prefix + N, d) tokens in raster order over tiles.

    One of `error` (a target for the mean E of every group) and `expand` (tiles expanded for each
    group) is given. Half types are computed in float32. The choice of the expanded tiles is not
    differentiated; everything else is. None where more than a share `most` of the tiles is expanded.
    """
    if (error is None) == (expand is None):
        raise ValueError(f"error is {error!r} and expand is {expand!r}; pass exactly one of them")
    if q.numel() == 0:  # an empty batch, which still has gradients
        marks = q.new_zeros(*q.shape[:2], tiling.groups, tiling.tiles, dtype=torch.bool)
        return TiledAttention(q[..., :1] * v[:, :, :1], marks.sum(-1, dtype=torch.int32), marks)
    tiles = Tiles.of(q, k, v, tiling, prefix, scale / tau, valid)
    limit = None if error is None else -math.expm1(-error / tau)
    screen = screen_tiles(tiles, limit, expand)
    if most < 1.0 and float(screen.expanded.mean(dtype=torch.float32)) > most:
        return None
    spatial = unflatten(groups_to_tokens(_attend(tiles, screen), tiling), 0, q.shape[:2])
    output = spatial.to(q.dtype)
    if prefix:
        output = torch.cat((_dense_prefix(q, tiles, scale / tau).to(q.dtype), output), 2)
    marks = unflatten(screen.expanded, 0, (*q.shape[:2], tiling.groups))
    return TiledAttention(output, marks.sum(-1, dtype=torch.int32), marks)


def _attend(tiles: Tiles, screen: Screen) -> Tensor:
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
    return unflatten(output, 0, (heads, groups))


@dataclass(frozen=True, eq=False)
class _Table:
    """Everything attention reads, groups and rows of all heads in one dimension."""

    tiles: Tiles
    screen: Screen
    head: Tensor  # (G R)
    bias: Tensor  # (G R, 1, T) log n + gap; -inf for expanded and empty tiles
    linear: Tensor  # (G, d, e) cross / n
    fixed: Tensor  # (T + prefix) rows that every group reads
    tokens: Tensor  # (S) rows of a tile, from its first

    @classmethod
    def of(cls, tiles: Tiles, screen: Screen) -> "_Table":
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
        keys = unflatten(tiles.keys.flatten(0, 1).index_select(0, rows), 0, (len(head), -1))
        values = unflatten(tiles.values.flatten(0, 1).index_select(0, rows), 0, (len(head), -1))
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


def _dense_prefix(q: Tensor, tiles: Tiles, factor: float) -> Tensor:
    """(B, heads, prefix, e) exact outputs of the prefix queries."""
    queries = q[:, :, : tiles.prefix].to(tiles.q.dtype)
    keys, values = (
        unflatten(x[:, tiles.tiles :], 0, q.shape[:2]) for x in (tiles.keys, tiles.values)
    )
    mask = None
    if tiles.exists is not None:
        spatial = unflatten(tiles.exists.flatten(1), 0, q.shape[:2]).unsqueeze(2)
        mask = pad(spatial, (tiles.prefix, 0), value=True)
    return scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=factor)


# Scores held at once: few enough to stay in a CPU's cache, many enough to keep a GPU busy.
CHUNK_SCORES = {"cpu": 1 << 20, "cuda": 1 << 26}


def log_partition_loss(
    q: Tensor,
    k: Tensor,
    tiling: Tiling,
    expanded: Tensor,
    *,
    prefix: int,
    factor: float,
    valid: Tensor | None = None,
) -> Tensor:
    """(B, heads, N) E / tau = log Z - log Z~ of every spatial query, in raster order.

    Z adds up exp(factor q.k) over all keys, Z~ takes n exp(mean score) for the tiles that `expanded`
    (B, heads, R, T) does not mark. -inf where all are marked, and nothing is lost.
    """
    if q.numel() == 0:
        return q.new_zeros((*q.shape[:2], tiling.grid.size))
    working = working_precision(q)
    queries, tokens = (tokens_to_tiles(x[:, :, prefix:], tiling, working) for x in (q, k))
    before = k[:, :, :prefix].flatten(0, 1).to(working)
    exists = valid_slots(tiling, valid, q)
    if exists is not None:
        queries, tokens = (x.masked_fill(~exists.unsqueeze(-1), 0.0) for x in (queries, tokens))
    queries = tiles_to_groups(queries * factor, tiling).flatten(2, 3)  # (G, R, m, d)
    marks = expanded.flatten(0, 1)
    size = queries.shape[2] * tokens.shape[1] * tokens.shape[2]
    most = CHUNK_SCORES.get(q.device.type, CHUNK_SCORES["cpu"])
    rows = max(1, most // size)
    losses = [
        _losses(
            queries[head, start : start + rows],
            tokens[head],
            before[head],
            marks[head, start : start + rows],
            None if exists is None else exists[head],
        )
        for head in range(len(marks))
        for start in range(0, tiling.groups, rows)
    ]
    spatial = unflatten(torch.cat(losses), 0, (len(marks), tiling.groups)).unsqueeze(-1)
    return unflatten(groups_to_tokens(spatial, tiling).squeeze(-1), 0, q.shape[:2])


def working_precision(q: Tensor) -> torch.dtype:
    """float32, unless q is float64 or products of float32 may be rounded to less than that."""
    single = q.dtype != torch.float64 and torch.get_float32_matmul_precision() == "highest"
    return torch.float32 if single else torch.float64


def _losses(
    queries: Tensor, tokens: Tensor, before: Tensor, marks: Tensor, exists: Tensor | None
) -> Tensor:
    """(r, m) for queries (r, m, d) of some groups of a head, its tokens (T, S, d), marks (r, T)."""
    tiles, slots = tokens.shape[:2]
    scores = unflatten(queries @ tokens.flatten(0, 1).T, 2, (tiles, slots))  # (r, m, T, S)
    counts = scores.new_full((tiles,), float(slots))
    means = scores.sum(-1)
    if exists is not None:
        counts = exists.sum(-1).to(scores.dtype)
        scores.masked_fill_(~exists, -torch.inf)
    means = means / counts.clamp(min=1)
    tops = scores.amax(-1)
    tops = tops.where(tops > -torch.inf, 0.0)
    energies = tops + scores.sub_(tops.unsqueeze(-1)).exp_().sum(-1).log()  # (r, m, T)
    stays = (~marks & (counts > 1)).unsqueeze(1)  # (r, 1, T)
    coarse = torch.where(stays, means + counts.clamp(min=1).log(), energies)
    first = queries @ before.T  # (r, m, prefix)
    exact, coarse = (torch.cat((each, first), -1).logsumexp(-1) for each in (energies, coarse))
    return (exact - coarse).where(stays.any(-1), -torch.inf)
