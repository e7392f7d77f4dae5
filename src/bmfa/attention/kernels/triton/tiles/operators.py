"""Tiled attention and its certificate as operators of torch."""

from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from bmfa.attention.kernels.triton import unsupported_reason as unsupported_device_reason
from bmfa.attention.tiling import GROUP_TILES, TILE_SIDE, TiledAttention, Tiling, unflatten

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
DIMS = (32, 64, 80, 96, 128)  # head dimensions that the tests run
LARGEST_SIDE = 512  # tokens; a row of the selection kernel then has 4096 tiles
LARGEST_PREFIX = 64  # tokens, one block of a product

_library: Any = torch.library.Library("bmfa", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(
    "tiled(Tensor q, Tensor k, Tensor v, Tensor? valid, int height, int width, int prefix,"
    " float factor, float? error, int expand, bool aligned) -> (Tensor, Tensor, Tensor)"
)
_library.define(
    "tile_bounds(Tensor q, Tensor k, Tensor? valid, Tensor expanded, Tensor longest, int height,"
    " int width, int prefix, float factor, float per_score, float always, bool aligned) -> Tensor"
)


def unsupported_reason(
    q: Tensor, k: Tensor, v: Tensor, tiling: Tiling, prefix: int, order: str
) -> str | None:
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
    grid = tiling.grid
    if max(grid.height, grid.width) > LARGEST_SIDE:
        return (
            f"the grid is {grid.height}x{grid.width}; the kernels take sides up to {LARGEST_SIDE}"
        )
    if (tiling.side, tiling.group) != (TILE_SIDE, GROUP_TILES):
        return (
            f"tiles of {tiling.side}x{tiling.side} tokens are in groups of {tiling.group}; the "
            f"kernels take tiles of {TILE_SIDE}x{TILE_SIDE} in groups of {GROUP_TILES}"
        )
    if prefix > LARGEST_PREFIX:
        return f"the prefix has {prefix} tokens; the kernels take up to {LARGEST_PREFIX}"
    if order == "z" and not tiling.z_aligned:
        return (
            f"order is 'z' and a {grid.height}x{grid.width} grid has no {tiling.side}x{tiling.side} "
            "tiles in its Z-order; pass raster order"
        )
    return None


def tiled_attention(
    q: Tensor, k: Tensor, v: Tensor, tiling: Tiling, *, prefix: int, scale: float, tau: float = 1.0,
    error: float | None = None, expand: int | None = None, valid: Tensor | None = None,
    order: str = "raster",
) -> TiledAttention:  # fmt: skip
    """Compute tiled attention as specified by `bmfa.attention.kernels.reference.tiled_attention`.

    Args:
        q, k, v: (B, H, prefix + N, D) in one of `DTYPES`.
        tiling: The tiles of the grid of N spatial tokens.
        prefix: The number of tokens before the grid.
        scale: The factor of q . k.
        tau: The temperature.
        error: The target for the mean E of every group; one of `error` and `expand` is given.
        expand: The number of tiles that every group expands.
        valid: bool (B or 1, N), the spatial tokens that exist, in `order`.
        order: The order of the spatial tokens. It also orders tiles and groups in the result.
    """
    if valid is not None:
        valid = valid.expand(q.shape[0], -1)
    output, expanded_count, coarse_bits = operator(
        q, k, v, valid, tiling.grid.height, tiling.grid.width, prefix, scale / tau,
        None if error is None else error / tau, expand or 0, order == "z",
    )  # fmt: skip
    shape = (*q.shape[:2], tiling.groups)

    def expanded() -> Tensor:
        bits = torch.arange(32, device=coarse_bits.device, dtype=torch.int32)
        coarse = (coarse_bits.unsqueeze(-1) >> bits) & 1  # (B * H, R, words, 32)
        mask: Tensor = coarse.flatten(-2)[..., : tiling.tiles] == 0
        return mask.view(*shape, -1) & _tiles_with_tokens(tiling, valid, order, mask)

    return TiledAttention(output, expanded_count.view(shape), expanded)


def log_partition_loss_bound(
    q: Tensor, k: Tensor, tiling: Tiling, expanded: Tensor, longest: Tensor, *, prefix: int,
    factor: float, per_score: float, always: float, valid: Tensor | None, order: str,
) -> Tensor:  # fmt: skip
    """Bound log Z - log Z~ of every query from above, rounding included.

    Args:
        q, k: (B, H, prefix + N, D).
        tiling: The tiles of the grid of N spatial tokens.
        expanded: bool (B, H, R, T), the tiles that each query group expands.
        longest: float32 (B, H), the largest norm of a key.
        prefix: The number of tokens before the grid.
        factor: The factor of q . k, the temperature included.
        per_score: The allowance for rounding, for each unit of the largest score that norms allow.
        always: The allowance for rounding that is independent of the scores.
        valid: bool (B or 1, N), the spatial tokens that exist, in `order`.
        order: The order of the spatial tokens.

    Returns:
        float32 (B, H, prefix + N); 0 for prefix queries and for queries that do not exist.
    """
    if valid is not None:
        valid = valid.expand(q.shape[0], -1)
    grid = tiling.grid
    bound: Tensor = torch.ops.bmfa.tile_bounds.default(
        q, k, valid, expanded, longest, grid.height, grid.width, prefix, factor, per_score, always,
        order == "z",
    )  # fmt: skip
    return bound


def _tiles_with_tokens(tiling: Tiling, valid: Tensor | None, order: str, like: Tensor) -> Tensor:
    """Return a (B or 1, 1, 1, T) mask of the tiles that have a valid token, as `order` numbers them."""
    if valid is None:
        return like.new_ones(1, 1, 1, tiling.tiles)
    if order == "z":  # the tokens of a tile are consecutive
        return unflatten(valid, 1, (tiling.tiles, tiling.slots)).any(-1)[:, None, None, :]
    slots = tiling.slot_tokens.to(valid.device)
    exists = valid[:, slots.clamp(min=0)] & (slots >= 0)  # (B, T, S)
    return exists.any(-1)[:, None, None, :]


def _tiles_and_groups(height: int, width: int) -> tuple[int, int]:
    """Return T and R of a grid."""
    tiles = -(-height // TILE_SIDE) * -(-width // TILE_SIDE)
    return tiles, -(-tiles // GROUP_TILES)


# Kernels are imported on the first call: Triton may be missing.
def _launch(*arguments: Any) -> Any:
    return import_module("bmfa.attention.kernels.triton.tiles.launch").launch_attention(*arguments)


def _launch_certificate(*arguments: Any) -> Any:
    return import_module("bmfa.attention.kernels.triton.tiles.launch").launch_certificate(
        *arguments
    )


def _fake(
    q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None, height: int, width: int, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, tokens, dim = q.shape
    tiles, groups = _tiles_and_groups(height, width)
    lines = (batch * heads, groups)
    return (
        q.new_empty((batch, tokens, heads, dim)).transpose(1, 2),
        q.new_empty(lines, dtype=torch.int32),
        q.new_empty((*lines, -(-tiles // 32)), dtype=torch.int32),
    )


def _fake_certificate(q: Tensor, *rest: Any) -> Tensor:
    return q.new_empty(q.shape[:3], dtype=torch.float32)


for _device in ("CUDA", "CPU"):  # on a CPU in Triton's interpreter
    _library.impl("tiled", _launch, _device)
    _library.impl("tile_bounds", _launch_certificate, _device)
torch.library.register_fake("bmfa::tiled", _fake, lib=_library)
torch.library.register_fake("bmfa::tile_bounds", _fake_certificate, lib=_library)
operator: Any = torch.ops.bmfa.tiled.default


@register_flop_formula(torch.ops.bmfa.tiled)
def _flops(
    q: Any, k: Any, v: Any, valid: Any, height: int, width: int, prefix: int, factor: float,
    error: float | None, expand: int, *rest: Any, **kwargs: Any,
) -> int:  # fmt: skip
    """Count the products of representatives with all tokens (scores twice, values once), and of all
    queries with the prefix, the mean tiles and `expand` tiles. What a target expands is not known."""
    batch, heads, _, dim = q
    tokens, (tiles, groups) = height * width, _tiles_and_groups(height, width)
    expanded_tokens = TILE_SIDE**2 * min(expand, tiles)
    products = 1.5 * groups * tokens + tokens * (tiles + prefix + expanded_tokens)
    return int(4 * batch * heads * dim * (products + prefix * tokens))


@register_flop_formula(torch.ops.bmfa.tile_bounds)
def _certificate_flops(
    q: Any, k: Any, valid: Any, expanded: Any, longest: Any, height: int, width: int, *rest: Any,
    **kwargs: Any,
) -> int:  # fmt: skip
    """Count the products of the spatial queries with all keys."""
    batch, heads, tokens, dim = q
    return int(2 * batch * heads * dim * height * width * tokens)
