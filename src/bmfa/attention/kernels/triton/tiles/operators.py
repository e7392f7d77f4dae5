"""Tiled attention as an operator of torch."""

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from bmfa.attention.kernels.triton import unsupported_reason as unsupported_device_reason
from bmfa.attention.tiling import TILE_SIDE, TiledAttention, Tiling
from bmfa.grid import Grid, grid_from_list, grid_to_list

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
DIMS = (32, 64, 72, 80, 96, 128)  # head dimensions that the tests run
LARGEST_SIDE, MOST_TILES = 512, 4096  # tokens; tiles in a row of the selection kernel
GROUP_TILES = (1, 2)  # whose queries form a group
LARGEST_PREFIX = 64  # tokens, one block of a product

_library: Any = torch.library.Library("bmfa", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(
    "tiled(Tensor q, Tensor k, Tensor v, Tensor? valid, int height, int width, int frames, int prefix,"
    " int group_tiles, float factor, float? error, float share, float dense_threshold,"
    " int[] query_grid=[]) -> (Tensor, Tensor, Tensor, Tensor)"
)


def unsupported_reason(q: Tensor, k: Tensor, v: Tensor, tiling: Tiling, prefix: int) -> str | None:
    """Return why these kernels cannot run on the inputs, or None if they can."""
    if (reason := unsupported_device_reason(q.device)) is not None:
        return reason
    if q.dtype not in DTYPES or k.dtype != q.dtype:
        return f"q is {q.dtype} and k is {k.dtype}; the kernels take float16, bfloat16 or float32"
    if torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v)):
        return "gradients are required, and the kernels have no backward; use torch.no_grad()"
    if q.numel() == 0:
        return "there are no queries"
    dim = q.shape[-1]
    if dim not in DIMS or v.shape[-1] != dim:
        return (
            f"the head dimension is {dim} (values {v.shape[-1]}); the kernels take {DIMS}, the same "
            "for q, k and v"
        )
    if any(t.stride(-1) != 1 for t in (q, k, v)):
        return "the head dimension is not contiguous; call .contiguous() on q, k and v"
    prefixes = {"prefix": prefix}
    tilings = {"grid": tiling}
    if (query_grid := tiling.query_grid) is not None:
        tilings["query_grid"] = Tiling(query_grid)
        prefixes["prefix of q"] = q.shape[2] - query_grid.size
    for name, tiles in tilings.items():
        if max(tiles.grid.height, tiles.grid.width) > LARGEST_SIDE or tiles.tiles > MOST_TILES:
            return (
                f"the {name} is {tiles.grid}; the kernels take sides up to {LARGEST_SIDE}, and "
                f"{MOST_TILES} tiles"
            )
    if tiling.side != TILE_SIDE:
        return (
            f"the tiles have {tiling.side}x{tiling.side} tokens; the kernels take {TILE_SIDE}x"
            f"{TILE_SIDE}"
        )
    if tiling.group_tiles not in GROUP_TILES:
        return f"a group has {tiling.group_tiles} tiles; the kernels take one of {GROUP_TILES}"
    for name, before in prefixes.items():
        if before > LARGEST_PREFIX:
            return f"the {name} has {before} tokens; the kernels take up to {LARGEST_PREFIX}"
    return None


def tiled_attention(
    q: Tensor, k: Tensor, v: Tensor, tiling: Tiling, *, prefix: int, scale: float, tau: float = 1.0,
    error: float | None = None, expand: float | None = None, valid: Tensor | None = None,
    dense_threshold: float = 1.0,
) -> TiledAttention:  # fmt: skip
    """Compute tiled attention as specified by `bmfa.attention.kernels.reference.tiles`.

    Args:
        q: (B, H, Q, D) in one of `DTYPES`: as many as there are keys, or those of the query grid after
            any number of others.
        k, v: (B, H or a divisor of it, prefix + N, D).
        tiling: The tiles of the grid of N spatial tokens, and the groups of the queries.
        prefix: The number of keys before the grid.
        scale: The factor of q . k.
        tau: The temperature.
        error: The target for the relative L2 error of the output; one of `error` and `expand` is given.
        expand: The mean number of tiles that a group expands.
        valid: bool (B or 1, N), the spatial tokens that exist.
        dense_threshold: The share of expanded tiles above which a head is computed exactly.
    """
    if valid is not None:
        valid = valid.expand(q.shape[0], -1)
    output, expanded_count, coarse_bits, probes = operator(
        q, k, v, valid, tiling.grid.height, tiling.grid.width, tiling.grid.frames, prefix,
        tiling.group_tiles, scale / tau, error, 0.0 if expand is None else expand / tiling.tiles,
        dense_threshold, grid_to_list(tiling.query_grid),
    )  # fmt: skip
    shape = (*q.shape[:2], tiling.groups)

    def expanded() -> Tensor:
        bits = torch.arange(32, device=coarse_bits.device, dtype=torch.int32)
        coarse = (coarse_bits.unsqueeze(-1) >> bits) & 1  # (B * H, R, words, 32)
        mask: Tensor = coarse.flatten(-2)[..., : tiling.tiles] == 0
        return mask.view(*shape, -1) & _tiles_with_tokens(tiling, valid, mask)

    probes = probes.view(*q.shape[:2], -1, 3)
    return TiledAttention(output, expanded_count.view(shape), probes, expanded)


def _tiling(
    height: int, width: int, frames: int, group_tiles: int, query_grid: Sequence[int]
) -> Tiling:
    """Make the tiling of a call from the arguments of the operator."""
    grid = Grid(height, width, frames=frames)
    query = grid_from_list(query_grid)
    return Tiling(grid, query_grid=query, group_tiles=group_tiles, probes_per_group=1)


def _tiles_with_tokens(tiling: Tiling, valid: Tensor | None, like: Tensor) -> Tensor:
    """Return a (B or 1, 1, 1, T) mask of the tiles that have a valid token."""
    if valid is None:
        return like.new_ones(1, 1, 1, tiling.tiles)
    slots = tiling.slot_tokens.to(valid.device)
    exists = valid[:, slots.clamp(min=0)] & (slots >= 0)  # (B, T, S)
    return exists.any(-1)[:, None, None, :]


# Kernels are imported on the first call: Triton may be missing.
def _launch(*arguments: Any) -> Any:
    return import_module("bmfa.attention.kernels.triton.tiles.launch").launch_attention(*arguments)


def _fake(
    q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None, height: int, width: int, frames: int,
    prefix: int, group_tiles: int, factor: float, error: float | None, share: float,
    dense_threshold: float, query_grid: Sequence[int] = (),
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    batch, heads, tokens, dim = q.shape
    tiling = _tiling(height, width, frames, group_tiles, query_grid)
    probes = tiling.probes(tokens - tiling.queries.grid.size)
    lines = (batch * heads, tiling.groups)
    return (
        q.new_empty((batch, tokens, heads, dim)).transpose(1, 2),
        q.new_empty(lines, dtype=torch.int32),
        q.new_empty((*lines, -(-tiling.tiles // 32)), dtype=torch.int32),
        q.new_empty((batch * heads, probes, 3), dtype=torch.float64),
    )


for _device in ("CUDA", "CPU"):  # on a CPU in Triton's interpreter
    _library.impl("tiled", _launch, _device)
torch.library.register_fake("bmfa::tiled", _fake, lib=_library)
operator: Any = torch.ops.bmfa.tiled.default


@register_flop_formula(torch.ops.bmfa.tiled)
def _flops(
    q: Any, k: Any, v: Any, valid: Any, height: int, width: int, frames: int, prefix: int,
    group_tiles: int, factor: float, error: float | None, share: float, dense_threshold: float,
    query_grid: Sequence[int] = (), **kwargs: Any,
) -> int:  # fmt: skip
    """Count the products of representatives (scores, keys and values) and exact queries with all tokens,
    and of all queries with the prefix, the tangent tiles and a share of expanded tiles. What a target
    expands is not known."""
    batch, heads, all_queries, dim = q
    tiling = _tiling(height, width, frames, group_tiles, query_grid)
    tokens, tiles, groups = tiling.grid.size, tiling.tiles, tiling.groups
    queries = tiling.queries.grid.size
    exact = tiling.probes(all_queries - queries) + all_queries - queries
    products = (1.5 * groups + exact) * tokens + queries * (tiles + prefix + share * tokens)
    covariances = 0.5 * dim * (tokens + groups * tiles)
    return int(4 * batch * heads * dim * (products + covariances))
