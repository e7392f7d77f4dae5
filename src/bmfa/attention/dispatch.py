"""Attention over tiles for long sequences: which backend runs, and when dense attention is faster."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from bmfa.attention.tiling import DEFAULT_ERROR, Budget, TiledAttention, Tiling
from bmfa.checks import check_number
from bmfa.trees.layout import tile_layout
from bmfa.trees.pyramid import Counts
from bmfa.trees.tree import Tree

# Measured break-even. Below so many tokens dense attention is as fast.
LEAST_TOKENS = {"cuda": 4096, "cpu": 2048}
# A call must save so many operations of dense attention: on CUDA to fill the card with what comes before
# the attending, and, unless its launches are recorded, to make up for the host's time to launch it.
LEAST_SAVED = {"cuda": 2e11, "recorded": 2e10, "cpu": 0.0}
# An expanded tile costs so many times what it costs dense attention.
EXPANDED_COST = {"cuda": 1.7, "cpu": 2.3}
# An error target of 0.1 expands this share of the tiles of 64 x 64 tokens, others by a power of the
# target; larger grids take less.
EXPANDED_SHARE, TARGET_POWER = 0.19, -0.6
_recorded_anyway = False


def expected_share(budget: Budget, tiles: int) -> float:
    """Share of the tiles that is expanded: known for a number of tiles, estimated for a target."""
    if budget.expand is not None:
        return budget.expand / tiles
    if not budget.error:
        return 1.0
    return min(1.0, EXPANDED_SHARE * math.pow(budget.error / DEFAULT_ERROR, TARGET_POWER))


def slower_than_dense(q: Tensor, tiling: Tiling, question: Budget) -> str | None:
    """Why dense attention is taken for the faster one; None where tiles are."""
    kind, size = q.device.type, tiling.grid.size
    if q.numel() == 0:
        return "there is nothing to attend to"
    least = LEAST_TOKENS.get(kind, LEAST_TOKENS["cpu"])
    if size < least:
        return f"dense attention is as fast below {least} tokens, and there are {size}"
    if question.error and not q.is_cuda:
        return None  # the eager kernels find out, after a screening that takes little
    share = expected_share(question, tiling.tiles)
    saved = operations(q) * (1.0 - expanded_cost(q) * share)
    if saved >= LEAST_SAVED.get("recorded" if recorded(q) else kind, 0.0):
        return None
    if torch.compiler.is_compiling():  # sizes may be symbols, which have no format
        return "tiles save less than they cost"
    return f"{question} would expand {share:.0%} of the tiles, which saves less than tiles cost"


def expanded_cost(q: Tensor) -> float:
    """What an expanded tile costs, over what it costs dense attention."""
    return EXPANDED_COST.get(q.device.type, EXPANDED_COST["cpu"])


def most_expanded(q: Tensor) -> float:
    """The share of expanded tiles above which dense attention is faster."""
    return check_number("share", 1.0 / expanded_cost(q), low=0.0, high=1.0)


def triton_refusal(
    q: Tensor, k: Tensor, v: Tensor, tiling: Tiling, prefix: int, order: str
) -> str | None:
    """Why the Triton kernels do not serve a call; None where they do."""
    from bmfa.attention.kernels.triton.tiles import operators

    return operators.unsupported_reason(q, k, v, tiling, prefix, order)


def attend(
    backend: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tiling: Tiling,
    question: Budget,
    *,
    prefix: int,
    scale: float,
    tau: float,
    valid: Tensor | None,
    order: str,
    most: float = 1.0,
) -> TiledAttention | None:
    """Run the kernels of a backend; all but Triton's take raster order.

    None where the eager ones find that more than a share `most` of the tiles would be expanded; for
    Triton's to know that, the host would have to wait for the device.
    """
    asked = {"error": question.error, "expand": question.expand}
    common = {"prefix": prefix, "scale": scale, "tau": tau, "valid": valid}
    if backend == "triton":
        from bmfa.attention.kernels.triton.tiles import operators

        return operators.tiled_attention(q, k, v, tiling, order=order, **asked, **common)  # type: ignore[arg-type]
    if backend == "reference":
        return _reference(q, k, v, tiling, {**asked, **common})
    from bmfa.attention.kernels.eager.tiles import tiled_attention

    return tiled_attention(q, k, v, tiling, max_expanded=most, **asked, **common)  # type: ignore[arg-type]


def choose(
    backend: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tiling: Tiling,
    question: Budget,
    *,
    prefix: int,
    order: str,
    forced: bool,
) -> tuple[str, str]:
    """The backend that runs ("dense" among them, unless tiles are `forced`), and why."""
    if backend in ("eager", "reference"):
        return backend, "requested"
    refusal = None
    if backend == "triton" or q.is_cuda:
        refusal = triton_refusal(q, k, v, tiling, prefix, order)
    if backend == "triton":
        if refusal is not None:
            raise ValueError(
                f"backend='triton' does not serve this call: {refusal}; pass backend='auto' or 'eager'"
            )
        return backend, "requested"
    if not forced and (reason := slower_than_dense(q, tiling, question)) is not None:
        return "dense", f"auto: {reason}"
    if not q.is_cuda:
        return "eager", "auto: eager serves every device"
    if refusal is None:
        return "triton", "auto: triton serves the grid, the dtype and the device"
    if forced:
        return "eager", f"auto: eager, because for triton {refusal}"
    return "dense", f"auto: dense, because for triton {refusal}"


def tree_of(
    tiled: TiledAttention,
    tiling: Tiling,
    prefix: int,
    tau: float,
    rule: str,
    order: str,
    valid: Tensor | None = None,
) -> Tree:
    """The partition of the spatial keys that every query of a tiled call sees.

    A leaf is a token of an expanded tile, or a tile of which the call takes the mean. The corrections
    that the call adds to mean tiles are no part of a tree. Prefix queries see every token.

    Args:
        tiled: The result of the call.
        tiling: Its tiles and groups of queries.
        prefix: The number of prefix queries.
        tau: The temperature.
        rule: What the trees say of how they were made.
        order: The order in which the backend took the tokens, "raster" or "z": it numbers the tiles
            and groups of `tiled`, and orders the trees.
        valid: (B or 1, 1, N) bool in raster order: the keys that exist. All do by default.

    Returns:
        Trees of shape (B, heads, prefix + N), queries in `order`.
    """
    layout = tile_layout(tiling.grid, tiling.side)
    marks = tiled.expanded  # (B, heads, R, T)
    batch, heads = marks.shape[:2]
    slots = tiling.slot_tokens.to(marks.device)
    large = (slots >= 0).sum(-1) > 1
    number = torch.arange(tiling.tiles, device=marks.device)
    group = torch.empty(tiling.grid.size, dtype=torch.int64, device=marks.device)
    if order == "z":
        first = tiling.grid.z_rank.to(marks.device)[slots[:, 0]]
        number = first // tiling.side**2  # where a tile stands in Z-order
        place = torch.arange(tiling.grid.size, device=marks.device)
        group = place // (tiling.side**2 * tiling.group)
    else:
        of_tile = (number // tiling.group).unsqueeze(-1).expand_as(slots)
        group[slots[slots >= 0]] = of_tile[slots >= 0]
    split = marks[:, :, group][..., number[large]]  # (B, heads, N, blocks)
    split = torch.cat((split.new_ones(batch, heads, prefix, split.shape[-1]), split), 2)
    shape = tuple(split.shape[:3])
    blocks = split.flatten(0, 2).T.contiguous()
    layout = layout.to(marks.device)
    if valid is None:
        return Tree(layout, blocks, shape, tau, rule)
    masks = valid.squeeze(1).T  # (N, B or 1)
    if layout.block_count:  # a tile with one valid token is a leaf, and one without is none
        several = Counts.of(layout, torch.float32, masks).blocks[0] > 1
        blocks &= several.repeat_interleave(blocks.shape[1] // max(1, several.shape[1]), 1)
    return Tree(layout, blocks, shape, tau, rule, masks)


def _reference(
    q: Tensor, k: Tensor, v: Tensor, tiling: Tiling, options: dict[str, Any]
) -> TiledAttention:
    """The float64 specification."""
    from bmfa.attention.kernels import reference

    valid = options.pop("valid")
    masks = None if valid is None else valid.expand(q.shape[0], -1).cpu().numpy()
    wide, keys, values = (x.detach().double().cpu().numpy() for x in (q, k, v))
    result = reference.tiled_attention(wide, keys, values, tiling, valid=masks, **options)
    expanded = torch.from_numpy(result.expanded).to(q.device)
    output = torch.from_numpy(result.output).to(q)
    return TiledAttention(output, expanded.sum(-1, dtype=torch.int32), expanded)


def recorded(q: Tensor) -> bool:
    """Whether the launches of a call are recorded, in a compiled or a CUDA graph, for later."""
    if not q.is_cuda:
        return False
    compiling = torch.compiler.is_compiling()
    return compiling or _recorded_anyway or torch.cuda.is_current_stream_capturing()


@contextmanager
def as_recorded(recorded: bool = True) -> Iterator[None]:
    """Choose as for calls in a graph: what a graph did is judged by calls outside of it."""
    global _recorded_anyway
    before, _recorded_anyway = _recorded_anyway, recorded
    try:
        yield
    finally:
        _recorded_anyway = before


def operations(q: Tensor) -> float:
    """Of dense attention."""
    batch, heads, tokens, dim = q.shape
    return 4.0 * batch * heads * dim * tokens**2
