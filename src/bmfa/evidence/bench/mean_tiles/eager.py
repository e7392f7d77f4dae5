"""Mean tiles in torch operations: gathers and batched products, on any device.

Shapes here: G = B * H heads, T tiles of S = side * side slots, R groups of queries, d channels.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from bmfa.attention.tiling import tokens_to_tiles, unflatten
from bmfa.evidence.bench.mean_tiles.tiling import (
    GAP_CAP,
    GroupedTiling,
    groups_to_tokens,
    tiles_to_groups,
)
from bmfa.grid import Grid
from bmfa.trees.keys import query_chunks

# Logits in memory at once. On a CPU they stay in the cache; an accelerator has none that large, and
# its launches cost more.
CHUNK_ELEMENTS = 1 << 19
DEVICE_CHUNK_ELEMENTS = 1 << 24
# Deviations of keys up to this many roundings of their mean key count as 0: the mean and the difference
# from it are off by a few roundings each.
SPREAD_ROUNDINGS = 8


def attention(
    q: Tensor, k: Tensor, v: Tensor, grid: Grid, prefix: int, expand: int
) -> tuple[Tensor, Tensor]:
    """Compute attention over mean tiles; half precision is computed in float32.

    Args:
        q, k, v: (B, H, prefix + N, d), spatial tokens in raster order.
        grid: Grid of the N spatial tokens.
        prefix: Number of tokens before the grid.
        expand: Number of tiles that every group expands.

    Returns:
        Output (B, H, prefix + N, d), and bool (B, H, R, T), True for expanded tiles.
    """
    tiling, scale = GroupedTiling(grid), q.shape[-1] ** -0.5
    tiles = _Tiles.of(q, k, v, tiling, prefix, scale)
    selection = _select_tiles(tiles, expand)
    spatial = groups_to_tokens(_attend_by_groups(tiles, selection), tiling)
    output = unflatten(spatial, 0, q.shape[:2]).to(q.dtype)
    if prefix:
        output = torch.cat((_prefix_outputs(q, tiles, scale).to(q.dtype), output), 2)
    return output, unflatten(selection.expanded, 0, (*q.shape[:2], tiling.groups))


@dataclass(frozen=True, eq=False)
class _Tiles:
    """Tokens in tiles, and their means.

    `keys` and `values` hold all rows that attention gathers in one table: the T mean tiles, the prefix,
    and the tokens of all tiles, 0 in empty slots.
    """

    q: Tensor  # (G, R, group * S, d) times the scale, as is q_mean
    q_mean: Tensor  # (G, R, d) representatives
    q_spread: Tensor  # (G, R) mean squared distance of queries from q_mean, over 2d
    keys: Tensor  # (G, T + prefix + T S, d)
    values: Tensor  # (G, T + prefix + T S, d)
    k_deviation: Tensor  # (G, T S, d) keys minus the mean of their tile
    k_spread: Tensor  # (G, T) mean squared norm of the deviations
    exists: Tensor | None  # (1, T, S) bool; None if every slot holds a token
    counts: Tensor  # (1, T) tokens of each tile
    prefix: int

    @classmethod
    def of(
        cls, q: Tensor, k: Tensor, v: Tensor, tiling: GroupedTiling, prefix: int, factor: float
    ) -> "_Tiles":
        """Arrange tokens in tiles, in at least float32, and compute means."""
        dtype = torch.promote_types(q.dtype, torch.float32)
        exists = (tiling.slot_tokens >= 0).unsqueeze(0).to(q.device) if tiling.ragged else None
        prefix_k, prefix_v = (x[:, :, :prefix].to(dtype).flatten(0, 1) for x in (k, v))
        q, k, v = (tokens_to_tiles(x[:, :, prefix:], tiling, dtype) for x in (q, k, v))
        q = q * factor  # (G, T, S, d)
        counts = q.new_full((1, tiling.tiles), float(tiling.slots))
        if exists is not None:
            counts = exists.sum(-1).to(dtype)
        k_mean, v_mean = (x.sum(2) / counts.unsqueeze(-1) for x in (k, v))
        k_deviation = k - k_mean.unsqueeze(2)
        if exists is not None:
            k_deviation = k_deviation.masked_fill(~exists.unsqueeze(-1), 0.0)
        q_sum = tiles_to_groups(q.sum(2), tiling).sum(2)
        group_counts = tiles_to_groups(counts.unsqueeze(-1), tiling).sum(2)
        q_mean = q_sum / group_counts  # (G, R, d)
        grouped_q = tiles_to_groups(q.flatten(2), tiling).view(*q_sum.shape[:2], -1, q.shape[-1])
        q_deviation = grouped_q - q_mean.unsqueeze(2)
        if exists is not None or tiling.tiles % tiling.group:
            present = q.new_ones(1, *q.shape[1:3]) if exists is None else exists.to(dtype)
            q_deviation = q_deviation * tiles_to_groups(present, tiling).flatten(2).unsqueeze(-1)
        q_spread = _sum_of_squares(q_deviation) / group_counts.squeeze(-1) / (2 * q.shape[-1])
        k_spread = _sum_of_squares(k_deviation) / counts
        rounding = (SPREAD_ROUNDINGS * torch.finfo(dtype).eps) ** 2 * k_mean.square().sum(-1)
        return cls(
            q=grouped_q,
            q_mean=q_mean,
            q_spread=q_spread,
            keys=torch.cat((k_mean, prefix_k, k.flatten(1, 2)), 1),
            values=torch.cat((v_mean, prefix_v, v.flatten(1, 2)), 1),
            k_deviation=k_deviation.flatten(1, 2),
            k_spread=k_spread.where(k_spread > rounding, 0.0),
            exists=exists,
            counts=counts,
            prefix=prefix,
        )

    @property
    def num_tiles(self) -> int:
        return self.counts.shape[1]

    @property
    def slots(self) -> int:
        return self.k_deviation.shape[1] // self.num_tiles

    @property
    def first_token(self) -> int:
        """Row of the first spatial token in `keys` and `values`."""
        return self.num_tiles + self.prefix

    @property
    def chunk_elements(self) -> int:
        return CHUNK_ELEMENTS if self.q.device.type == "cpu" else DEVICE_CHUNK_ELEMENTS


@dataclass(frozen=True, eq=False)
class _Selection:
    """What the representatives decide for their groups."""

    gap: Tensor  # (G R, T) gaps with the spread of the group, capped
    expanded: Tensor  # (G R, T) bool
    residual: Tensor  # (G R, d)


def _select_tiles(tiles: _Tiles, expand: int) -> _Selection:
    heads, groups = tiles.q_mean.shape[:2]
    tokens = tiles.k_deviation.shape[1]
    chunks = [
        _select_chunk(tiles, head_slice, group_slice, expand)
        for head_slice, group_slice in query_chunks(heads, groups, tokens, tiles.chunk_elements)
    ]
    gap, expanded, residual = (
        torch.cat([x.flatten(0, 1) for x in field]) for field in zip(*chunks, strict=True)
    )
    return _Selection(gap, expanded, residual)


def _select_chunk(
    tiles: _Tiles, heads: slice, groups: slice, expand: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return gap (g, r, T), expanded (g, r, T) and residual (g, r, d) of g heads and r groups."""
    count = tiles.counts.unsqueeze(1)  # (1, 1, T)
    keys, values = tiles.keys[heads], tiles.values[heads]
    q_mean = tiles.q_mean[heads, groups]  # (g, r, d)
    scores = q_mean @ tiles.k_deviation[heads].transpose(1, 2)
    # (g, r, T, S) minus the mean score of the tile
    scores = unflatten(scores, 2, (tiles.num_tiles, tiles.slots))
    if tiles.exists is not None:
        scores = scores.masked_fill(~tiles.exists.unsqueeze(1), -torch.inf)
    token_share = scores.softmax(-1)
    # log sum exp from the largest share: two maxima are cheaper than a second exponential.
    log_sum = scores.amax(-1) - token_share.amax(-1).log()
    gap = (log_sum - count.log()).clamp(min=0.0)
    spread = tiles.q_spread[heads, groups].unsqueeze(-1) * tiles.k_spread[heads].unsqueeze(1)
    gap = (gap + spread.nan_to_num(0.0)).clamp(max=GAP_CAP)  # 0 * inf where squares overflow
    coarse_scores = q_mean @ keys[:, : tiles.first_token].transpose(1, 2)
    mean_score = coarse_scores[..., : tiles.num_tiles]
    prefix_score = coarse_scores[..., tiles.num_tiles :]
    log_mass = mean_score + log_sum  # A_L
    log_z = torch.cat((log_mass, prefix_score), -1).logsumexp(-1, keepdim=True)
    loss = (log_mass - log_z).exp() * -torch.expm1(-gap)
    expanded = _expand_largest(loss, expand)
    any_coarse = (~expanded).any(-1, keepdim=True)
    logits = log_mass.masked_fill(expanded & any_coarse, -torch.inf).masked_fill(~any_coarse, 0.0)
    tile_share = logits.softmax(-1) * any_coarse  # (g, r, T) of the mass that is not expanded
    token_share = (token_share * tile_share.unsqueeze(-1)).flatten(2)
    residual = token_share @ values[:, tiles.first_token :]
    return gap, expanded, residual - tile_share @ values[:, : tiles.num_tiles]


def _sum_of_squares(vectors: Tensor) -> Tensor:
    """Return (G, T) sums of the squares in (G, T, S, d) without a tensor of squares."""
    row = vectors.flatten(2).unsqueeze(2)
    return (row @ row.transpose(2, 3)).flatten(1)


def _expand_largest(loss: Tensor, expand: int) -> Tensor:
    """Expand the `expand` largest losses above 0, ties by index, or all tiles if there are no more."""
    if expand >= loss.shape[-1]:
        return torch.ones_like(loss, dtype=torch.bool)
    chosen = loss.sort(dim=-1, descending=True, stable=True).indices[..., :expand]
    return torch.zeros_like(loss, dtype=torch.bool).scatter(-1, chosen, True) & (loss > 0)


def _attend_by_groups(tiles: _Tiles, selection: _Selection) -> Tensor:
    """Return outputs (G, R, group * S, d). Groups with as many expanded tiles are computed together."""
    heads, groups, queries, _ = tiles.q.shape
    expanded_count = selection.expanded.sum(-1)  # (G R)
    order = expanded_count.argsort(stable=True)
    counts = expanded_count[order].tolist()
    all_equal = counts[0] == counts[-1]
    attend = _GroupAttention(tiles, selection)
    outputs, start = [], 0
    while start < len(counts):
        stop = start + 1
        while stop < len(counts):
            logits = queries * (tiles.first_token + counts[stop] * tiles.slots)
            if (stop + 1 - start) * logits > tiles.chunk_elements:
                break
            stop += 1
        rows = slice(start, stop) if all_equal else order[start:stop]
        outputs.append(attend(rows, counts[stop - 1]))
        start = stop
    output = torch.cat(outputs)
    if not all_equal:
        output = output[order.argsort()]
    return unflatten(output, 0, (heads, groups))


class _GroupAttention:
    """Softmax over mean tiles, prefix and expanded tokens for some groups, indexed over all heads."""

    def __init__(self, tiles: _Tiles, selection: _Selection) -> None:
        heads, groups = tiles.q.shape[:2]
        device = tiles.q.device
        self.tiles, self.selection = tiles, selection
        self.head = torch.arange(heads * groups, device=device) // groups  # (G R)
        bias = (selection.gap + tiles.counts.log()).masked_fill(selection.expanded, -torch.inf)
        self.bias = bias.unsqueeze(1)  # (G R, 1, T) log n + gap; -inf for expanded tiles
        # Deviations sum to 0 in every tile, so that values need not be centred.
        cross = tiles.k_deviation.transpose(1, 2) @ tiles.values[:, tiles.first_token :]
        self.cross = cross / tiles.counts.sum()  # (G, d, d)
        self.common_rows = torch.arange(tiles.first_token, device=device)  # mean tiles and prefix
        self.slots = torch.arange(tiles.slots, device=device)

    def __call__(self, groups: Tensor | slice, max_count: int) -> Tensor:
        """Return outputs (n, group * S, d) of n groups that expand at most `max_count` tiles."""
        tiles, head = self.tiles, self.head[groups]
        queries = tiles.q.flatten(0, 1)[groups]
        rows, missing = self.gather_rows(groups, max_count)
        rows = (rows + head.unsqueeze(1) * tiles.keys.shape[1]).flatten()
        keys, values = (
            unflatten(x.flatten(0, 1).index_select(0, rows), 0, (len(head), -1))
            for x in (tiles.keys, tiles.values)
        )
        logits = queries @ keys.transpose(1, 2)  # (n, group * S, rows)
        logits[..., : tiles.num_tiles] += self.bias[groups]
        if missing is not None:
            logits[..., tiles.first_token :].masked_fill_(missing.unsqueeze(1), -torch.inf)
        weights = logits.softmax(-1)
        coarse_weight = weights[..., : tiles.num_tiles].sum(-1, keepdim=True)  # u
        deviation = queries - tiles.q_mean.flatten(0, 1)[groups].unsqueeze(1)
        residual = self.selection.residual[groups].unsqueeze(1)
        correction = torch.baddbmm(residual, deviation, self.cross[head])
        return torch.baddbmm(coarse_weight * correction, weights, values)

    def gather_rows(self, groups: Tensor | slice, max_count: int) -> tuple[Tensor, Tensor | None]:
        """Return the table rows (n, rows) that groups read, and a mask (n, max_count * S) of those
        after the common rows that are padding; None if none is."""
        tiles = self.tiles
        expanded = self.selection.expanded[groups]
        common = self.common_rows.expand(len(expanded), -1)
        if not max_count:
            return common, None
        # The expanded tiles of each group first, then other tiles as padding.
        is_expanded, index = expanded.to(torch.uint8).sort(dim=-1, descending=True, stable=True)
        is_expanded, index = is_expanded[:, :max_count].bool(), index[:, :max_count]
        rows = (tiles.first_token + index * tiles.slots).unsqueeze(-1) + self.slots
        missing = None
        if tiles.exists is not None:
            exists = tiles.exists[0, index]  # (n, max_count, S)
            missing = ~(exists & is_expanded.unsqueeze(-1)).flatten(1)
        elif not bool(is_expanded.all()):
            missing = ~is_expanded.repeat_interleave(tiles.slots, 1)
        return torch.cat((common, rows.flatten(1)), 1), missing


def _prefix_outputs(q: Tensor, tiles: _Tiles, factor: float) -> Tensor:
    """Return exact outputs (B, H, prefix, d) of the prefix queries."""
    queries = q[:, :, : tiles.prefix].to(tiles.q.dtype)
    keys, values = (
        unflatten(x[:, tiles.num_tiles :], 0, q.shape[:2]) for x in (tiles.keys, tiles.values)
    )
    mask = None
    if tiles.exists is not None:
        spatial = tiles.exists.flatten(1).expand(len(tiles.q), -1)
        mask = pad(unflatten(spatial, 0, q.shape[:2]).unsqueeze(2), (tiles.prefix, 0), value=True)
    return scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=factor)
