"""Keep-or-drop attention: a baseline that reads the tiles with most mass and drops all others.

The mean query of each tile of 8x8 queries scores every key, and the tiles of keys with the largest
exact masses are read by the queries of the tile, together with the prefix. Prefix queries are exact.
Tokens are in the order of tiles, prefix tokens last.
"""

import torch
from torch import Tensor

from bmfa.grid import Grid
from bmfa.trees.keys import query_chunks

SIDE = 8
SLOTS = SIDE**2  # tokens of a tile
CHUNK_ELEMENTS = 1 << 22  # numbers of gathered keys in memory at once


def tiles_of(grid: Grid) -> int:
    """Return the number of tiles.

    Raises:
        ValueError: If the grid has no complete 8x8 tiles.
    """
    if grid.height % SIDE or grid.width % SIDE:
        raise ValueError(
            f"the grid is {grid.height}x{grid.width}; keep-or-drop attention takes sides that are "
            f"multiples of {SIDE}"
        )
    return grid.size // SLOTS


def topk_attention(q: Tensor, k: Tensor, v: Tensor, *, tiles: int, kept: int) -> Tensor:
    """Compute keep-or-drop attention: in Triton on CUDA, in torch operations elsewhere.

    Args:
        q, k, v: (B, H, 64 T + prefix, d), tokens of a tile in a row, prefix tokens last.
        tiles: T, the number of tiles.
        kept: Number of tiles that the queries of a tile read.

    Returns:
        (B, H, 64 T + prefix, d).
    """
    q_mean = q[:, :, : tiles * SLOTS].unflatten(2, (tiles, SLOTS)).mean(3)  # type: ignore[no-untyped-call]
    if q.is_cuda:
        from bmfa.evidence.bench.topk import kernels

        masses, attend = kernels.tile_masses, kernels.attend_to_tiles
    else:
        masses, attend = tile_masses, attend_to_tiles
    chosen = masses(q_mean, k, tiles).topk(kept, -1).indices  # (B, H, T, kept)
    spatial = attend(q, k, v, chosen)
    return torch.cat((spatial, exact_rows(q[:, :, tiles * SLOTS :], k, v)), 2)


def exact_rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Exact attention of a few queries (B, H, Q, d); products spread the keys over the device."""
    logits = at_least_float32(q @ k.transpose(2, 3)) * q.shape[-1] ** -0.5
    output: Tensor = logits.softmax(-1).to(v.dtype) @ v
    return output


def at_least_float32(x: Tensor) -> Tensor:
    """Return half precision as float32, and other tensors as they are."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def tile_masses(q_mean: Tensor, k: Tensor, tiles: int) -> Tensor:
    """Return (B, H, T, T): log sum exp of the scores of the keys of each tile, by mean query."""
    keys = k[:, :, : tiles * SLOTS].transpose(2, 3)
    masses = []
    rows = max(1, CHUNK_ELEMENTS // (q_mean.shape[1] * keys.shape[-1]))
    for queries in torch.split(q_mean, rows, dim=2):
        scores = at_least_float32(queries @ keys) * q_mean.shape[-1] ** -0.5
        masses.append(scores.view(*scores.shape[:3], tiles, SLOTS).logsumexp(-1))
    return torch.cat(masses, 2)


def attend_to_tiles(q: Tensor, k: Tensor, v: Tensor, chosen: Tensor) -> Tensor:
    """Return (B, H, 64 T, d): attention of the queries of each tile to chosen tiles and the prefix."""
    batch, heads, tiles, kept = chosen.shape
    tokens, dim = tiles * SLOTS, q.shape[-1]
    grouped = (batch * heads, tiles, SLOTS, dim)
    queries, keys, values = (x[:, :, :tokens].reshape(grouped) for x in (q, k, v))
    prefix_k, prefix_v = (x[:, :, tokens:].flatten(0, 1).unsqueeze(1) for x in (k, v))
    index = chosen.flatten(0, 1)
    output = torch.empty_like(queries)
    size = kept * SLOTS * dim
    for head, group in query_chunks(batch * heads, tiles, size, CHUNK_ELEMENTS):
        listed = index[head, group]  # (g, r, kept)
        row = torch.arange(len(listed), device=q.device).view(-1, 1, 1)
        chunk_k, chunk_v = (x[head][row, listed].flatten(2, 3) for x in (keys, values))
        shape = (*chunk_k.shape[:2], -1, dim)
        chunk_k = torch.cat((prefix_k[head].expand(*shape[:2], -1, dim), chunk_k), 2)
        chunk_v = torch.cat((prefix_v[head].expand(*shape[:2], -1, dim), chunk_v), 2)
        output[head, group] = exact_rows(queries[head, group], chunk_k, chunk_v)
    return output.view(batch, heads, tokens, dim)
