"""Tiled attention in torch operations: gathers and batched products, any device, autograd.

The semantics are kernels.reference.tiled's; shapes as in kernels.eager.tiles.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from bmfa.attention.kernels.eager.tiles import Screen, Tiles, screen_tiles
from bmfa.attention.tiling import TiledAttention, Tiling, groups_to_tokens, unflatten


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
