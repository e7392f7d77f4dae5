"""Tiled attention as an operator of torch."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from bmfa.attention.kernels.triton import unsupported_reason as unsupported_device_reason
from bmfa.attention.tiling import TILE_SIDE, TiledAttention, Tiling, slots_with_tokens
from bmfa.grid import grid_from_list, grid_to_list

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
DIMS = (32, 64, 72, 80, 96, 128)  # head dimensions that the tests run
LARGEST_SIDE, MOST_TILES = 512, 4096  # tokens; tiles in a row of the selection kernel
GROUP_TILES = (1, 2)  # whose queries form a group
LARGEST_PREFIX = 64  # tokens, one block of a product

_library: Any = torch.library.Library("bmfa", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(
    "tiled(Tensor q, Tensor k, Tensor v, Tensor? valid, int[] grid, int[] query_grid, int group_tiles,"
    " int prefix, float factor, float? error, float share, float dense_threshold)"
    " -> (Tensor, Tensor, Tensor, Tensor)"
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
    tokens = [("grid", tiling.grid, "prefix", prefix)]
    if (query_grid := tiling.query_grid) is not None:
        tokens.append(("query_grid", query_grid, "prefix of q", q.shape[2] - query_grid.size))
    for name, grid, name_before, before in tokens:
        if max(grid.height, grid.width) > LARGEST_SIDE or Tiling(grid).tiles > MOST_TILES:
            return (
                f"the {name} is {grid}; the kernels take sides up to {LARGEST_SIDE}, and {MOST_TILES} "
                "tiles"
            )
        if before > LARGEST_PREFIX:
            return f"the {name_before} has {before} tokens; the kernels take up to {LARGEST_PREFIX}"
    side = tiling.side
    if side != TILE_SIDE:
        return f"the tiles have {side}x{side} tokens; the kernels take {TILE_SIDE}x{TILE_SIDE}"
    if tiling.group_tiles not in GROUP_TILES:
        return f"a group has {tiling.group_tiles} tiles; the kernels take one of {GROUP_TILES}"
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
        q, k, v, valid, grid_to_list(tiling.grid), grid_to_list(tiling.query_grid), tiling.group_tiles,
        prefix, scale / tau, error, 0.0 if expand is None else expand / tiling.tiles, dense_threshold,
    )  # fmt: skip
    shape = (*q.shape[:2], tiling.groups)

    def expanded() -> Tensor:
        bits = torch.arange(32, device=coarse_bits.device, dtype=torch.int32)
        coarse = (coarse_bits.unsqueeze(-1) >> bits) & 1  # (B * H, R, words, 32)
        mask: Tensor = coarse.flatten(-2)[..., : tiling.tiles] == 0
        present = slots_with_tokens(tiling, valid, mask.device).any(-1)
        return mask.view(*shape, -1) & present[:, None, None]

    probes = probes.view(*q.shape[:2], -1, 3)
    return TiledAttention(output, expanded_count.view(shape), probes, expanded)


@lru_cache(maxsize=256)
def _tiling(grid: tuple[int, ...], query_grid: tuple[int, ...], group_tiles: int) -> Tiling:
    """Return the tiling of a call from arguments of the operator."""
    keys, queries = grid_from_list(grid), grid_from_list(query_grid)
    assert keys is not None
    return Tiling(keys, query_grid=queries, group_tiles=group_tiles, probes_per_group=1)


def _launch(
    q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None, grid: Sequence[int],
    query_grid: Sequence[int], group_tiles: int, *settings: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    # Imported on the first call: Triton may be missing.
    from bmfa.attention.kernels.triton.tiles.launch import launch_attention

    return launch_attention(
        q, k, v, valid, _tiling(tuple(grid), tuple(query_grid), group_tiles), *settings
    )


def _fake(
    q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None, grid: Sequence[int],
    query_grid: Sequence[int], group_tiles: int, *settings: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    batch, heads, tokens, dim = q.shape
    tiling = _tiling(tuple(grid), tuple(query_grid), group_tiles)
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
    q: Any, k: Any, v: Any, valid: Any, grid: Sequence[int], query_grid: Sequence[int],
    group_tiles: int, prefix: int, factor: float, error: float | None, share: float, *_: Any, **__: Any,
) -> int:  # fmt: skip
    """Count the products of representatives (scores, keys and values) and exact queries with all tokens,
    and of all queries with the prefix, the tangent tiles and a share of expanded tiles. What a target
    expands is not known."""
    batch, heads, all_queries, dim = q
    tiling = _tiling(tuple(grid), tuple(query_grid), group_tiles)
    tokens, tiles, groups = tiling.grid.size, tiling.tiles, tiling.groups
    queries = tiling.queries.grid.size
    exact = tiling.probes(all_queries - queries) + all_queries - queries
    products = (1.5 * groups + exact) * tokens + queries * (tiles + prefix + share * tokens)
    covariances = 0.5 * dim * (tokens + groups * tiles)
    return int(4 * batch * heads * dim * (products + covariances))
