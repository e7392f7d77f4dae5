"""Triton kernels of keep-or-drop attention on tokens in the order of tiles."""

import torch
import triton
import triton.language as tl

from bmfa.attention.kernels.triton.tiles.primitives import (
    LOG2E,
    load_rows,
    online_softmax,
    split_batch_head,
)

SLOTS = 64  # tokens of a tile
BLOCK_R = 64  # mean queries of a program
TILES_PER_PROGRAM = 16  # tiles that a program scores
NUM_WARPS, NUM_STAGES = 4, 3  # those of the mean tiles, whose inner loops are the same


@triton.jit
def mass_kernel(
    q_mean, k, mass, stride_kb, stride_kh, stride_kt, H, num_tiles, qk_scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr,
    S: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the log-sum-exp (B * H, T, T) of BLOCK_T tiles by BLOCK_R mean queries of one head.

    Grid: (blocks of tiles, blocks of mean queries, B * H).
    """
    program, block = tl.program_id(0), tl.program_id(1)
    batch, head, batch_head = split_batch_head(tl.program_id(2), H)
    k += batch * stride_kb + head * stride_kh
    rows = block * BLOCK_R + tl.arange(0, BLOCK_R)
    is_row = rows < num_tiles
    queries = load_rows(q_mean + batch_head * num_tiles * D, rows, D, is_row, D, BLOCK_D)
    slots, members = tl.arange(0, S), tl.arange(0, BLOCK_T)
    lse = tl.full((BLOCK_R, BLOCK_T), float("-inf"), tl.float32)
    for member in range(BLOCK_T):
        tile = program * BLOCK_T + member
        tokens = tile * S + slots
        keys = load_rows(k, tokens, stride_kt, tokens < num_tiles * S, D, BLOCK_D)  # (S, BLOCK_D)
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * qk_scale
        m_i = tl.max(scores, 1)
        tile_lse = m_i + tl.log(tl.sum(tl.exp(scores - m_i[:, None]), 1))
        lse = tl.where((members == member)[None, :], tile_lse[:, None], lse)
    tiles = program * BLOCK_T + members
    offsets = (batch_head * num_tiles + rows.to(tl.int64))[:, None] * num_tiles + tiles[None, :]
    tl.store(mass + offsets, lse, mask=is_row[:, None] & (tiles < num_tiles)[None, :])


@triton.jit
def listed_tiles_kernel(
    q, k, v, chosen, o,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt,
    H, prefix, num_tiles, kept, qk_scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, S: tl.constexpr, BLOCK_PREFIX: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend with the S queries of one tile to the prefix and to `kept` listed tiles.

    Grid: (tiles of queries, B * H). Reads chosen (B * H, T, kept), writes o (B * H, T * S, D).
    """
    tile = tl.program_id(0)
    batch, head, batch_head = split_batch_head(tl.program_id(1), H)
    q += batch * stride_qb + head * stride_qh
    k += batch * stride_kb + head * stride_kh
    v += batch * stride_vb + head * stride_vh
    slots, columns = tl.arange(0, S), tl.arange(0, BLOCK_D)
    every_slot = slots < S
    tokens = tile * S + slots
    queries = load_rows(q, tokens, stride_qt, every_slot, D, BLOCK_D)  # (S, BLOCK_D)
    qk_scale_log2 = qk_scale * LOG2E
    m_i = tl.full((S,), float("-inf"), tl.float32)
    l_i = tl.zeros((S,), tl.float32)
    acc = tl.zeros((S, BLOCK_D), tl.float32)
    if BLOCK_PREFIX > 0:
        index = tl.arange(0, BLOCK_PREFIX)
        in_prefix = index < prefix
        prefix_tokens = num_tiles * S + index
        prefix_k = load_rows(k, prefix_tokens, stride_kt, in_prefix, D, BLOCK_D)
        prefix_v = load_rows(v, prefix_tokens, stride_vt, in_prefix, D, BLOCK_D)
        logits = tl.dot(queries, tl.trans(prefix_k), input_precision=PRECISION) * qk_scale_log2
        logits = tl.where(in_prefix[None, :], logits, float("-inf"))
        m_i, l_i, acc = online_softmax(m_i, l_i, acc, logits, prefix_v, PRECISION)
    chosen += (batch_head * num_tiles + tile) * kept
    for number in range(kept):
        key_tokens = tl.load(chosen + number) * S + slots
        keys = load_rows(k, key_tokens, stride_kt, every_slot, D, BLOCK_D)
        values = load_rows(v, key_tokens, stride_vt, every_slot, D, BLOCK_D)
        tile_logits = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * qk_scale_log2
        m_i, l_i, acc = online_softmax(m_i, l_i, acc, tile_logits, values, PRECISION)
    pointers = o + (batch_head * num_tiles * S + tokens.to(tl.int64))[:, None] * D
    acc = acc / l_i[:, None]
    mask = every_slot[:, None] & (columns < D)[None, :]
    tl.store(pointers + columns[None, :], acc.to(o.dtype.element_ty), mask=mask)


def tile_masses(q_mean: torch.Tensor, k: torch.Tensor, tiles: int) -> torch.Tensor:
    """Return float32 (B, H, T, T): log sum exp of the scores of each tile, by mean query."""
    batch, heads, _, dim = k.shape
    mass = q_mean.new_empty((batch, heads, tiles, tiles), dtype=torch.float32)
    grid = (-(-tiles // TILES_PER_PROGRAM), -(-tiles // BLOCK_R), batch * heads)
    mass_kernel[grid](
        q_mean.contiguous(), k, mass, *k.stride()[:3], heads, tiles, dim**-0.5, D=dim,
        BLOCK_D=_dot_block(dim), BLOCK_R=BLOCK_R, BLOCK_T=TILES_PER_PROGRAM, S=SLOTS,
        PRECISION=_precision(k), num_warps=NUM_WARPS, num_stages=NUM_STAGES,
    )  # fmt: skip
    return mass


def attend_to_tiles(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, chosen: torch.Tensor
) -> torch.Tensor:
    """Return (B, H, 64 T, d): attention of the queries of each tile to chosen tiles and the prefix."""
    batch, heads, tiles, kept = chosen.shape
    dim, prefix = q.shape[-1], q.shape[2] - tiles * SLOTS
    o = q.new_empty((batch, heads, tiles * SLOTS, dim))
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3])
    listed_tiles_kernel[(tiles, batch * heads)](
        q, k, v, chosen.to(torch.int32), o, *strides, heads, prefix, tiles, kept, dim**-0.5,
        D=dim, BLOCK_D=_dot_block(dim), S=SLOTS, BLOCK_PREFIX=_dot_block(prefix) if prefix else 0,
        PRECISION=_precision(q), num_warps=NUM_WARPS, num_stages=NUM_STAGES,
    )  # fmt: skip
    return o


def _precision(x: torch.Tensor) -> str:
    return "ieee" if x.dtype == torch.float32 else "tf32"


def _dot_block(size: int) -> int:
    """Return the block of a dimension of `tl.dot`: a power of 2, at least 16."""
    return max(16, 1 << (size - 1).bit_length())
