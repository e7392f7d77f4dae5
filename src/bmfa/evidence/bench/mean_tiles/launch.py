"""Launches of the five kernels of mean tiles.

Everything but the tensors is computed once for calls with equal shapes, strides and options.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bmfa.attention.kernels.triton.launch import LaunchGrid, LaunchSequence, Workspace
from bmfa.evidence.bench.mean_tiles.kernels import (
    mean_attention_kernel,
    mean_pool_kernel,
    mean_residual_kernel,
    mean_score_kernel,
    mean_select_kernel,
)
from bmfa.evidence.bench.mean_tiles.tiling import GAP_CAP, GroupedTiling
from bmfa.grid import Grid

# Tensors that every call passes; kernels find them by these names.
INPUTS = ("q", "k", "v", "o", "expanded_count", "coarse_bits")

# The settings below are pinned rather than tuned at run time, so that equal inputs give equal bits.
# `bmfa bench attention` measures them.
BLOCK_T = 16  # tiles that a program of the score and residual kernels holds at once
BLOCK_MEANS = 64  # mean tiles in one step of the attention kernel
STRIP = 16  # rows of kv_cov that one program adds up
NUM_WARPS, NUM_STAGES = 4, 3
WIDE_HEAD = 64  # above this head dimension the pooling kernel takes twice as many warps
LONG_ROW = 1024  # tiles; above this the selection takes four warps instead of one
BUSY_PROGRAMS = 512  # programs that fill a large GPU
# Shares of the bytes of k and v that lse and gap, and the parts of the residual, may take.
SCORES_SHARE, RESIDUAL_SHARE = 0.10, 0.035
SCORE_BYTES = 6  # of one representative and tile: lse in float32, gap in float16


class CallKey(NamedTuple):
    """Everything about a call that its launches depend on."""

    batch: int
    heads: int
    dim: int
    strides: tuple[tuple[int, ...], ...]  # (batch, head, token) of q, k, v and o
    dtype: torch.dtype
    device: int
    height: int
    width: int
    prefix: int

    @classmethod
    def of(cls, tensors: tuple[Tensor, ...], grid: Grid, prefix: int) -> "CallKey":
        """Read the key off q, k, v and o, (B, H, prefix + N, D) each."""
        q = tensors[0]
        batch, heads, _, dim = q.shape
        strides = tuple(tensor.stride()[:3] for tensor in tensors)
        sides = (grid.height, grid.width)
        return cls(batch, heads, dim, strides, q.dtype, q.get_device(), *sides, prefix)

    @property
    def tiling(self) -> GroupedTiling:
        """Tiles of the one size that the kernels are written for."""
        return GroupedTiling(Grid(self.height, self.width))

    def arguments(self) -> dict[str, Any]:
        """Return the arguments that the kernels share, by the names of their parameters."""
        tiling = self.tiling
        strides = {
            f"stride_{name}{dimension}": stride
            for name, tensor_strides in zip("qkvo", self.strides, strict=False)
            for dimension, stride in zip("bht", tensor_strides, strict=True)
        }
        return {
            **strides,
            "H": self.heads,
            "prefix": self.prefix,
            "height": self.height,
            "width": self.width,
            "tiles_across": tiling.columns,
            "num_tiles": tiling.tiles,
            "num_groups": tiling.groups,
            "qk_scale": self.dim**-0.5,
            "D": self.dim,
            "BLOCK_D": _dot_block(self.dim),
            "SIDE": tiling.side,
            "LOG2_S": math.log2(tiling.slots),
            "GROUP": tiling.group,
            "BLOCK_PREFIX": _dot_block(self.prefix) if self.prefix else 0,
            "RAGGED": tiling.ragged,
            "PRECISION": "ieee" if self.dtype == torch.float32 else "tf32",
        }


@dataclass(frozen=True)
class WorkSplit:
    """How tiles and representatives are divided among programs."""

    pooled: int  # tiles of a program of the pooling kernel
    scored: int  # tiles of a program of the score kernel
    rows: int  # representatives that are processed at once
    block_r: int  # representatives of a program
    tiles_per_split: int  # tiles of a program of the residual kernel
    few: bool  # too few tiles for long loops to fill the GPU

    @classmethod
    def of(cls, heads: int, tiling: GroupedTiling, dim: int, itemsize: int) -> "WorkSplit":
        """Divide the work of (heads, N, dim) keys and values of `itemsize` bytes a number."""
        tiles, groups = tiling.tiles, tiling.groups
        kv_bytes = 2 * tiling.grid.size * dim * itemsize  # of one head
        few = tiles * heads < 2 * BUSY_PROGRAMS
        pooled, scored = (4, 2) if few else (8, BLOCK_T)
        chunks = -(-SCORE_BYTES * groups * tiles // max(1, int(SCORES_SHARE * kv_bytes)))
        chunks = max(1, min(chunks, groups // 64))
        rows = -(-groups // chunks)
        block_r = 64 if rows > 32 else 32 if rows > 16 else 16
        programs = heads * -(-rows // block_r)
        splits = min(
            BUSY_PROGRAMS // programs, int(RESIDUAL_SHARE * kv_bytes) // (itemsize * rows * dim)
        )
        step = BLOCK_T // 2 if few else BLOCK_T
        tiles_per_split = step * -(-tiles // (step * max(1, splits)))
        return cls(pooled, scored, rows, block_r, tiles_per_split, few)


class _AttentionLaunch:
    """The launches for one `CallKey` and one number of expanded tiles."""

    def __init__(self, key: CallKey, expand: int) -> None:
        self.key, self.tiling = key, key.tiling
        self.batch_heads = key.batch * key.heads
        self.work = WorkSplit.of(self.batch_heads, self.tiling, key.dim, key.dtype.itemsize)
        self.parts = -(-self.tiling.tiles // self.work.pooled)
        self.splits = -(-self.tiling.tiles // self.work.tiles_per_split)
        self.arguments: dict[str, Any] = {
            **key.arguments(),
            "budget": expand,
            "BLOCK_MEANS": BLOCK_MEANS,
            "STRIP": STRIP,
            "GAP_CAP": GAP_CAP,
            "BLOCK_R": self.work.block_r,
        }
        self.sequence = LaunchSequence(INPUTS, self._workspace())
        self._add(
            mean_pool_kernel, (self.parts, self.batch_heads, 1), TILES_PER_PROGRAM=self.work.pooled,
            num_warps=NUM_WARPS if key.dim <= WIDE_HEAD else 2 * NUM_WARPS,
        )  # fmt: skip
        for first_group in range(0, self.tiling.groups, self.work.rows):
            self._add_groups(first_group)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, o: Tensor) -> tuple[Tensor, Tensor]:
        """Fill o, and return expanded_count (B * H, R) and coarse_bits (B * H, R, words)."""
        lines = (self.batch_heads, self.tiling.groups)
        coarse_bits = q.new_empty((*lines, -(-self.tiling.tiles // 32)), dtype=torch.int32)
        expanded_count = q.new_empty(lines, dtype=torch.int32)
        self.sequence(q, k, v, o, expanded_count, coarse_bits)
        return expanded_count, coarse_bits

    def _workspace(self) -> Workspace:
        key, tiling = self.key, self.tiling
        dim, dtype, single = key.dim, key.dtype, torch.float32
        # Of sums that are added up in float32.
        rough = single if dtype == single else torch.bfloat16
        tiles, groups = (self.batch_heads, tiling.tiles), (self.batch_heads, tiling.groups)
        parts = (self.batch_heads, self.parts)
        rows = (self.batch_heads, min(self.work.rows, tiling.groups))
        workspace = Workspace()
        workspace.add("k_mean", (*tiles, dim), dtype)
        workspace.add("v_mean", (*tiles, dim), dtype)
        workspace.add("q_mean", (*groups, dim), dtype)
        workspace.add("k_spread", tiles, single)
        workspace.add("q_spread", groups, single)
        workspace.add("counts", tiles, single)
        workspace.add("kv_cov", (self.batch_heads, dim, dim), dtype)
        workspace.add("kv_cov_parts", (*parts, dim, dim), rough)
        workspace.add("prefix_m", (*parts, key.prefix), single)
        workspace.add("prefix_l", (*parts, key.prefix), single)
        workspace.add("prefix_acc", (*parts, key.prefix, dim), single)
        workspace.add("lse", (*rows, tiling.tiles), single)
        workspace.add("gap", (*rows, tiling.tiles), torch.float16)
        workspace.add("lse_max", rows, single)
        workspace.add("coarse_mass", rows, single)
        workspace.add("residual_parts", (*rows, self.splits, dim), rough)
        return workspace

    def _add_groups(self, first_group: int) -> None:
        """Score, select, sum residuals and attend for `work.rows` groups from the first one."""
        work, tiles, group = self.work, self.tiling.tiles, self.tiling.group
        rows = min(work.rows, self.tiling.groups - first_group)
        blocks, tile_programs = -(-rows // work.block_r), -(-tiles // work.scored)
        strips = -(-self.key.dim // STRIP) if first_group == 0 else 0
        which = {"first_group": first_group, "num_rows": rows}
        self._add(
            mean_score_kernel, (tile_programs + strips, blocks, self.batch_heads), **which,
            BLOCK_T=BLOCK_T, TILES_PER_PROGRAM=work.scored, tile_programs=tile_programs,
            parts=self.parts, BLOCK_PARTS=_power_of_2(self.parts),
        )  # fmt: skip
        self._add(
            mean_select_kernel, (rows, self.batch_heads, 1), **which,
            BLOCK_T=max(32, _power_of_2(tiles)), num_warps=1 if tiles <= LONG_ROW else NUM_WARPS,
        )  # fmt: skip
        self._add(
            mean_residual_kernel, (self.splits, blocks, self.batch_heads), **which, BLOCK_T=BLOCK_T,
            tiles_per_split=work.tiles_per_split, TILES_PER_STEP=min(BLOCK_T, work.tiles_per_split),
        )  # fmt: skip
        self._add(
            mean_attention_kernel, (min(rows * group, tiles - first_group * group), self.batch_heads, 1),
            **which, splits=self.splits, BLOCK_SPLITS=_power_of_2(self.splits),
            num_stages=NUM_STAGES - 1 if work.few else NUM_STAGES,
        )  # fmt: skip

    def _add(
        self,
        kernel: Any,
        grid: LaunchGrid,
        num_warps: int = NUM_WARPS,
        num_stages: int = NUM_STAGES,
        **arguments: int,
    ) -> None:
        arguments = {**self.arguments, **arguments}
        self.sequence.add(kernel, grid, arguments, num_warps=num_warps, num_stages=num_stages)


@lru_cache(maxsize=64)
def prepare(key: CallKey, expand: int) -> _AttentionLaunch:
    """Return the launches for all calls with this key."""
    return _AttentionLaunch(key, expand)


def attention(
    q: Tensor, k: Tensor, v: Tensor, grid: Grid, prefix: int, expand: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute attention over mean tiles.

    Args:
        q, k, v: (B, H, prefix + N, D), with a contiguous last dimension.
        grid: Grid of the N spatial tokens.
        prefix: Number of tokens before the grid.
        expand: Number of tiles that every group expands.

    Returns:
        The output (B, H, prefix + N, D), the number of expanded tiles (B * H, R) in int32, and int32
        words (B * H, R, T / 32) whose bits mark the tiles that are not expanded.
    """
    batch, heads, tokens, dim = q.shape
    o = q.new_empty((batch, tokens, heads, dim)).transpose(1, 2)
    return o, *prepare(CallKey.of((q, k, v, o), grid, prefix), expand)(q, k, v, o)


def _power_of_2(number: int) -> int:
    """Return the smallest power of 2 that is at least the number."""
    return 1 << (number - 1).bit_length()


def _dot_block(size: int) -> int:
    """Return the block of a dimension of `tl.dot`: a power of 2, at least 16."""
    return max(16, _power_of_2(size))
