"""The free energy that the mean tiles lose, exactly, for every query, in torch operations."""

import torch
from torch import Tensor

from bmfa.attention.tiling import (
    Tiling,
    groups_to_tokens,
    tiles_to_groups,
    tokens_to_tiles,
    unflatten,
    valid_slots,
)

# Scores held at once: few enough to stay in a CPU's cache, many enough to keep a GPU busy.
CHUNK_SCORES = {"cpu": 1 << 20, "cuda": 1 << 26}


def tile_losses(
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
