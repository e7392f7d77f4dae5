"""Tiled attention as an operator of torch, and what it serves."""

from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from bmfa.attention.kernels.triton import unsupported_reason as backend_unsupported_reason
from bmfa.attention.tiling import TiledAttention, Tiling

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
DIMS = (32, 64, 80, 96, 128)
LARGEST_SIDE, MOST_PREFIX = 512, 64

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
    """Why these kernels do not serve a call; None where they do."""
    if (reason := backend_unsupported_reason(q.device)) is not None:
        return reason
    if q.dtype not in DTYPES or k.dtype != q.dtype:
        return f"q is {q.dtype} and k {k.dtype}; the kernels take float16, bfloat16 or float32"
    if torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v)):
        return "gradients are asked for, and the kernels have no backward; use torch.no_grad()"
    if q.numel() == 0:
        return "there is no query"
    dim = q.shape[-1]
    if dim not in DIMS or v.shape[-1] != dim:
        return f"heads are {dim} wide (values {v.shape[-1]}); the kernels take {DIMS}, both alike"
    if any(t.stride(-1) != 1 for t in (q, k, v)):
        return "the head dimension is not contiguous; call .contiguous() on q, k and v"
    grid = tiling.grid
    if max(grid.height, grid.width) > LARGEST_SIDE:
        return (
            f"the grid is {grid.height}x{grid.width}; the kernels take sides up to {LARGEST_SIDE}"
        )
    if prefix > MOST_PREFIX:
        return f"the prefix has {prefix} tokens; the kernels take up to {MOST_PREFIX}"
    if order == "z" and not tiling.z_aligned:
        return (
            f"order is 'z' and a {grid.height}x{grid.width} grid has no {tiling.side}x{tiling.side} "
            "tiles in its Z-order; pass raster order"
        )
    return None


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
    order: str = "raster",
) -> TiledAttention:
    """Attention over tiles, as `bmfa.attention.kernels.eager.tiles.attend` defines it."""
    if valid is not None:
        valid = valid.expand(q.shape[0], -1)
    target = None if error is None else error / tau
    output, counts, words = operator(
        q, k, v, valid, tiling.grid.height, tiling.grid.width, prefix, scale / tau,
        target, expand or 0, order == "z",
    )  # fmt: skip
    shape = (*q.shape[:2], tiling.groups)

    def marks() -> Tensor:
        bits = torch.arange(32, device=words.device, dtype=torch.int32)
        stays = (words.unsqueeze(-1) >> bits) & 1
        expanded: Tensor = stays.flatten(-2)[..., : tiling.tiles] == 0
        return expanded.view(*shape, -1) & _some(tiling, valid, expanded)

    return TiledAttention(output, counts.view(shape), marks)


def log_partition_loss_bound(
    q: Tensor,
    k: Tensor,
    tiling: Tiling,
    expanded: Tensor,
    longest: Tensor,
    *,
    prefix: int,
    factor: float,
    per_score: float,
    always: float,
    valid: Tensor | None,
    order: str,
) -> Tensor:
    """(B, heads, prefix + N) log Z - log Z~ as in `eager.certifying`, plus a bound on its rounding.

    `longest` (B, heads) is the norm of the longest key; with it `per_score` and `always` make up
    for rounding. 0 for prefix queries and those that are not valid.
    """
    if valid is not None:
        valid = valid.expand(q.shape[0], -1)
    grid = tiling.grid
    bound: Tensor = torch.ops.bmfa.tile_bounds.default(
        q, k, valid, expanded, longest, grid.height, grid.width, prefix, factor, per_score, always,
        order == "z",
    )  # fmt: skip
    return bound


def _some(tiling: Tiling, valid: Tensor | None, like: Tensor) -> Tensor:
    """(B or 1, 1, 1, T) whether a tile has any token."""
    if valid is None:
        return like.new_ones(1, 1, 1, tiling.tiles)
    slots = tiling.slot_tokens.to(valid.device)
    there = valid[:, slots.clamp(min=0)] & (slots >= 0)
    return there.any(-1)[:, None, None, :]


def _run(q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None, *sizes: Any) -> Any:
    return import_module("bmfa.attention.kernels.triton.tiles.launch").launch(
        q, k, v, valid, *sizes
    )


def _fake(
    q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None, height: int, width: int, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, tokens, dim = q.shape
    tiles = -(-height // 8) * -(-width // 8)
    lines = (batch * heads, -(-tiles // 2))
    return (
        q.new_empty((batch, tokens, heads, dim)).transpose(1, 2),
        q.new_empty(lines, dtype=torch.int32),
        q.new_empty((*lines, -(-tiles // 32)), dtype=torch.int32),
    )


def _run_bounds(*arguments: Any) -> Any:
    return import_module("bmfa.attention.kernels.triton.tiles.launch").bounds(*arguments)


def _fake_bounds(q: Tensor, *rest: Any) -> Tensor:
    return q.new_empty(q.shape[:3], dtype=torch.float32)


for _device in ("CUDA", "CPU"):  # the latter in Triton's interpreter
    _library.impl("tiled", _run, _device)
    _library.impl("tile_bounds", _run_bounds, _device)
torch.library.register_fake("bmfa::tiled", _fake, lib=_library)
torch.library.register_fake("bmfa::tile_bounds", _fake_bounds, lib=_library)
operator: Any = torch.ops.bmfa.tiled.default


@register_flop_formula(torch.ops.bmfa.tiled)
def _flops(
    q: Any, k: Any, v: Any, valid: Any, height: int, width: int, prefix: int, factor: float,
    error: float | None, expand: int, *rest: Any, **kwargs: Any,
) -> int:  # fmt: skip
    """Products of representatives with all tokens (thrice: scores twice, values once), of all queries
    with mean tiles and with `expand` tiles; what an error target expands is not known beforehand."""
    batch, heads, _, dim = q
    tokens, tiles = height * width, -(-height // 8) * -(-width // 8)
    products = 1.5 * -(-tiles // 2) * tokens + tokens * (tiles + prefix + 64 * min(expand, tiles))
    return int(4 * batch * heads * dim * (products + prefix * tokens))


@register_flop_formula(torch.ops.bmfa.tile_bounds)
def _flops_of_bounds(
    q: Any, k: Any, valid: Any, expanded: Any, longest: Any, height: int, width: int, *rest: Any,
    **kwargs: Any,
) -> int:  # fmt: skip
    """All scores of the spatial queries."""
    batch, heads, tokens, dim = q
    return int(2 * batch * heads * dim * height * width * tokens)
