"""Launches of the kernels of tiled attention.

Everything but the tensors is computed once for calls with equal shapes, strides and options.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import next_power_of_2

from bmfa.attention import tiling as tilings
from bmfa.attention.kernels.triton.launch import LaunchGrid, LaunchSequence, Workspace
from bmfa.attention.kernels.triton.tiles.attention import (
    attention_kernel,
    exact_kernel,
    expand_kernel,
)
from bmfa.attention.kernels.triton.tiles.levels import choose_kernel, levels_kernel
from bmfa.attention.kernels.triton.tiles.represent import pool_kernel, represent_kernel
from bmfa.attention.kernels.triton.tiles.select import cross_kernel, select_kernel
from bmfa.attention.tiling import Tiling
from bmfa.grid import Grid

# Tensors that every call passes; kernels find them by these names.
INPUTS = ("q", "k", "v", "valid", "o", "expanded_count", "coarse_bits", "probes")
# Constants of tiles, which kernels take by their names.
CONSTANTS = {name: value for name, value in vars(tilings).items() if name.isupper()}

# The settings below are pinned rather than tuned at run time, so that equal inputs give equal bits.
# `bmfa bench attention` measures them.
BLOCK_R = 64  # representatives of a program; PROBE_SLOTS is a multiple of it
BLOCK_MEANS = 64  # tangent tiles in one step of the attention kernel
CHUNK = 16  # tiles in one step of the levels kernel
BLOCK_M, BLOCK_N = 128, 64  # queries and keys in one step of the exact kernel
CROSS_ENTRIES, CROSS_TILES = 128, 64  # entries of D * D, and tiles, in one step of the cross kernel
WIDE_HEAD = 64  # above this head dimension some kernels take twice as many warps
FEW_TILES = 2048  # of all row blocks and heads, below which a program takes fewer of them
# Expanded tiles that one program reads, at least; more are divided among programs, in at most this many.
LEAST_ITEM_TILES, MOST_ITEMS = 8, 64
# Tiles of a grid below which no group reads so many that dividing them is worth the launch.
LEAST_DIVIDED_TILES = 128
# Groups whose tangents are held in memory at once, fewer where all scratch tensors would take more than
# MOST_SCRATCH times the memory of k and v, had these as many heads as q. The tangents of 64 groups take
# as much as k and v.
ROWS_PER_BAND, MOST_SCRATCH = 128, 4
TILES_PER_PROGRAM, STAT_TILES = 4, 1  # of the kernel of representatives
MOST_HEADS = 16  # whose probes are added up at once
# Tiles from which exact heads have a kernel of their own, which is faster than expanding every tile.
SEPARATE_EXACT_TILES = 256


class CallKey(NamedTuple):
    """Everything about a call that its launches depend on."""

    shape: tuple[int, int, int, int]  # (B, H, Q, D) of q
    strides: tuple[tuple[int, ...], ...]  # (batch, head, token) of q, k, v and o
    dtype: torch.dtype
    device: int
    masked: bool
    heads_per_key: int  # consecutive heads of q that share one of k and v
    tiling: Tiling  # with one probe a group
    prefix: int  # keys before the grid
    qk_scale: float

    @property
    def query_prefix(self) -> int:
        """Number of queries before the grid."""
        return self.shape[2] - self.tiling.queries.grid.size

    def query_arguments(self) -> dict[str, Any]:
        """Return the arguments of a kernel that reads queries alone, by the names of their grid."""
        masked = self.masked and self.tiling.query_grid is None  # the mask is one of keys
        arguments = _grid_arguments(self.tiling.queries.grid, self.query_prefix)
        return {**arguments, "MASKED": masked}

    def arguments(self) -> dict[str, Any]:
        """Return the arguments that the kernels share, by the names of their parameters."""
        tiling, dim = self.tiling, self.shape[3]
        of_queries = _grid_arguments(tiling.queries.grid, self.query_prefix)
        strides = {
            f"stride_{name}{dimension}": stride
            for name, tensor_strides in zip("qkvo", self.strides, strict=True)
            for dimension, stride in zip("bht", tensor_strides, strict=True)
        }
        return {
            **strides,
            **_grid_arguments(tiling.grid, self.prefix),
            **{f"query_{name}": value for name, value in of_queries.items()},
            "H": self.shape[1],
            "num_tiles": tiling.tiles,
            "num_groups": tiling.groups,
            "num_queries": self.shape[2],
            "qk_scale": self.qk_scale,
            "D": dim,
            "BLOCK_D": _dot_block(dim),
            "SIDE": tiling.side,
            "GROUP_TILES": tiling.group_tiles,
            "BLOCK_PREFIX": _dot_block(self.prefix) if self.prefix else 0,
            "MASKED": self.masked,
            "RAGGED": tiling.ragged,
            # Kernels ignore the grid of the queries without it: the code for self-attention is the same
            # as if there were no such arguments.
            "OWN_GRID": tiling.query_grid is not None,
            "HEADS_PER_KEY": self.heads_per_key,
            "PRECISION": "ieee" if self.dtype == torch.float32 else "tf32",
        }


def _grid_arguments(grid: Grid, prefix: int) -> dict[str, int]:
    """Return the arguments of a kernel for the tokens of a prefix and a grid."""
    return {
        "prefix": prefix,
        "height": grid.height,
        "width": grid.width,
        "frames": grid.frames,
        "tiles_across": Tiling(grid).columns,
    }


class _AttentionLaunch:
    """The launches of tiled attention for one `CallKey` and one error target or budget."""

    def __init__(
        self, key: CallKey, error: float | None, share: float, dense_threshold: float
    ) -> None:
        self.key, self.tiling = key, key.tiling
        batch, heads, _, dim = key.shape
        self.batch_heads = batch * heads
        self.num_probes = self.tiling.probes(key.query_prefix)
        self.num_slots = self.tiling.probe_slots(key.query_prefix)
        self.rows = min(ROWS_PER_BAND, self.tiling.groups)
        tiles = self.tiling.tiles
        self.line_stride = -(-(tiles + 1) // 16) * 16  # of tiles and the prefix, in whole sectors
        self.has_items = tiles >= LEAST_DIVIDED_TILES
        fewest = LEAST_ITEM_TILES if self.has_items else tiles
        self.item_tiles = max(fewest, next_power_of_2(tiles) // MOST_ITEMS)
        # The items take the memory of the probes, which are done by then.
        slots = self.tiling.queries.slots
        memory = 2 * key.dtype.itemsize * self.num_slots * tiles * dim
        capacity = self.batch_heads * memory // (4 * slots * (dim + 2) + 4)
        self.item_capacity = capacity if self.has_items else 1
        self.separate_exact = tiles >= SEPARATE_EXACT_TILES and dense_threshold < 1.0
        kv_bytes = 2 * self.batch_heads * self.tiling.grid.size * dim * key.dtype.itemsize
        workspace = self._workspace()
        while workspace.bytes > MOST_SCRATCH * kv_bytes and self.rows - 16 >= self.num_slots:
            self.rows -= 16
            workspace = self._workspace()
        self.arguments: dict[str, Any] = {
            **CONSTANTS,
            **key.arguments(),
            "row_capacity": self.rows,
            "group_stride": self.tiling.group_stride,
            "position_stride": pow(self.tiling.group_stride, -1, self.tiling.groups),
            "num_probes": self.num_probes,
            "num_slots": self.num_slots,
            "target": share if error is None else self.tiling.error_aim * error,
            "dense_threshold": dense_threshold,
            "heads": self.batch_heads,
            "line_stride": self.line_stride,
            "item_capacity": self.item_capacity,
            "ITEM_TILES": self.item_tiles,
            "NUM_ITEMS": max(2, -(-tiles // self.item_tiles)),
            "BLOCK_R": BLOCK_R,
            "BLOCK_T": max(32, next_power_of_2(tiles)),
            "BLOCK_P": next_power_of_2(self.num_probes),
            "BLOCK_MEANS": BLOCK_MEANS,
            "BLOCK_M": BLOCK_M,
            "CHUNK": CHUNK,
            "STAT_TILES": STAT_TILES,
            "LEVELS": tilings.NUM_LEVELS,
            "FARTHEST": 0.0 if error is None else tilings.FARTHEST,
            "BLOCK_H": min(MOST_HEADS, next_power_of_2(heads)),
            "SKIP_EXACT": self.separate_exact,
            "BY_ERROR": error is not None,
        }
        self.sequence = LaunchSequence(INPUTS, workspace)
        pool_grid = (self.tiling.groups, self.batch_heads, 1)
        warps = 2 * self.tiling.group_tiles
        self._add(pool_kernel, pool_grid, num_warps=warps, **key.query_arguments())
        for first_row in range(0, self.tiling.groups, self.rows):
            self._add_band(first_row)
        if self.separate_exact:
            blocks = -(-key.shape[2] // BLOCK_M)
            self._add(exact_kernel, (blocks, self.batch_heads, 1), num_warps=8, BLOCK_N=BLOCK_N)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, valid: Tensor, o: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Fill o, and return expanded_count (B * H, R), coarse_bits (B * H, R, words) and probes
        (B * H, P, 3)."""
        lines = (self.batch_heads, self.tiling.groups)
        coarse_bits = q.new_empty((*lines, -(-self.tiling.tiles // 32)), dtype=torch.int32)
        expanded_count = q.new_empty(lines, dtype=torch.int32)
        probes = q.new_empty((self.batch_heads, self.num_probes, 3), dtype=torch.float64)
        self.sequence(q, k, v, valid, o, expanded_count, coarse_bits, probes)
        return expanded_count, coarse_bits, probes

    def _workspace(self) -> Workspace:
        (batch, _, _, dim), dtype = self.key.shape, self.key.dtype
        tiles, single = self.tiling.tiles, torch.float32
        heads = (self.batch_heads,)
        rows, slots = (*heads, self.rows, tiles), (*heads, self.num_slots, tiles)
        lines = (*heads, self.num_slots, self.line_stride)
        probes = (*heads, self.num_probes)
        workspace = Workspace()
        workspace.add("q_mean", (*heads, self.tiling.groups, dim), dtype)
        for name in ("q_spread", "group_counts"):
            workspace.add(name, (*heads, self.tiling.groups), single)
        workspace.add("counts", (*heads, tiles), single)
        workspace.add("k_spread", (*heads, 2, tiles), single)
        workspace.add("v_radius", heads, torch.int32)  # the bits of float32 numbers
        workspace.add("probe_tokens", probes, torch.int32)
        workspace.add("probe_deviation", (*heads, self.num_slots, dim), dtype)
        workspace.add("probe_exact", (*probes, dim), single)
        workspace.add("level_stats", (*probes, 4, tilings.NUM_LEVELS), torch.float64)
        workspace.add("thresholds", (batch, 2), single)
        workspace.add("shrinkage", (*heads, 2), single)
        workspace.add("exact_heads", heads, torch.int32)
        workspace.add("probe_lse", lines, single)
        workspace.add("probe_v", (*lines, dim), dtype)
        workspace.add("probe_cross", (*slots, dim), dtype)
        queries = (self.item_capacity, self.tiling.queries.slots)
        later: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "item_acc": ((*queries, dim), single),
            "item_m": (queries, single),
            "item_l": (queries, single),
        }
        group_cross = ((*heads, self.rows, dim, dim), dtype)
        if not self.has_items:
            later["group_cross"] = group_cross
        workspace.reuse("probe_v", later)
        workspace.add("cross", (*heads, tiles, dim, dim), dtype)
        workspace.add("log_mass", (*heads, self.rows, self.line_stride), single)
        workspace.add("expanded_list", rows, torch.int32)
        workspace.add("first_item", rows[:2], torch.int32)
        workspace.add("items", (self.item_capacity,), torch.int32)
        workspace.add("coarse_share", rows, dtype)
        workspace.add("k_tangent", (*rows, dim), dtype)
        workspace.add("v_tangent", (*rows, dim), dtype)
        if self.has_items:
            workspace.add("group_cross", *group_cross)
        return workspace

    def _add_band(self, first_row: int) -> None:
        """Represent, select and attend for the groups at `rows` positions; probe in the first band."""
        tiling, heads, (batch, _, _, dim) = self.tiling, self.batch_heads, self.key.shape
        rows, tiles = min(self.rows, tiling.groups - first_row), tiling.tiles
        probing = first_row == 0
        blocks = -(-rows // BLOCK_R)
        tiles_per_program = TILES_PER_PROGRAM if blocks * tiles * heads > FEW_TILES else 2
        programs = -(-(tiles + 1) // tiles_per_program)
        warps = 4 if dim <= WIDE_HEAD else 8
        group_warps = min(8, warps * tiling.group_tiles)
        # Three blocks of means at once are faster for groups of two tiles, if shared memory holds them.
        deep = tiling.group_tiles == 2 and dim * self.key.dtype.itemsize <= 128
        band = {"first_row": first_row, "num_rows": rows}
        few_registers = 128 if dim <= WIDE_HEAD else None  # four programs of four warps at once
        grid = (programs, blocks, heads)
        if probing:
            stat_programs = -(-tiles // STAT_TILES)
            probe_blocks = self.num_slots // BLOCK_R
            grid = (2 * programs + stat_programs, max(blocks, probe_blocks), heads)
        self._add(
            represent_kernel, grid, **band, num_warps=warps, num_stages=2, maxnreg=few_registers,
            tile_programs=programs, TILES=tiles_per_program, PROBING=probing,
        )  # fmt: skip
        if probing:
            self._add(
                levels_kernel, (self.num_probes + self.key.query_prefix, heads, 1), num_stages=2,
                num_warps=warps // 2, maxnreg=168 if dim <= WIDE_HEAD else None,
            )  # fmt: skip
            self._add(choose_kernel, (batch, 1, 1))
        line_warps = max(1, min(8, self.arguments["BLOCK_T"] // 256))
        self._add(select_kernel, (rows, heads, 1), **band, num_warps=line_warps)
        entries = -(-(dim**2) // CROSS_ENTRIES)
        block = 128 if rows > 64 else 64
        self._add(
            cross_kernel, (entries + self.has_items, -(-rows // block), heads), **band, BLOCK_R=block,
            BLOCK_N=CROSS_ENTRIES, BLOCK_K=CROSS_TILES, entry_blocks=entries, num_warps=block // 16,
        )  # fmt: skip
        if self.has_items:
            items = (self.item_capacity, 1, 1)
            self._add(expand_kernel, items, **band, num_warps=group_warps, num_stages=2)
        self._add(
            attention_kernel, (rows, heads, 1), **band, num_warps=group_warps,
            num_stages=3 if deep else 2, maxnreg=few_registers,
        )  # fmt: skip

    def _add(self, kernel: Any, grid: LaunchGrid, **arguments: Any) -> None:
        """Append a kernel, whose options of the compiler may be among the arguments."""
        defaults = {"num_warps": 4, "num_stages": 3, "maxnreg": None}
        options = {name: arguments.pop(name, default) for name, default in defaults.items()}
        self.sequence.add(kernel, grid, {**self.arguments, **arguments}, **options)


@lru_cache(maxsize=256)
def prepare_attention(
    key: CallKey, error: float | None, share: float, dense_threshold: float
) -> _AttentionLaunch:
    """Return the launches for all calls with this key."""
    return _AttentionLaunch(key, error, share, dense_threshold)


def launch_attention(
    q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None, tiling: Tiling, prefix: int, qk_scale: float,
    error: float | None, share: float, dense_threshold: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Run tiled attention.

    Args:
        q: (B, H, Q, D).
        k, v: (B, H or a divisor of it, prefix + N, D).
        valid: bool (B, N), the tokens that exist, or None if all do.
        tiling: The tiles of the grid of N spatial tokens, and the groups of the queries.
        prefix: The number of keys before the grid.
        qk_scale: The factor of q . k, the temperature included.
        error: The target for the relative error of the output, or None.
        share: Without a target, the mean share of the tiles that a group expands.
        dense_threshold: The share of expanded tiles above which a head is computed exactly.

    Returns:
        The output (B, H, Q, D), the number of expanded tiles (B * H, R) in int32, int32 words
        (B * H, R, T / 32) whose bits mark the tiles that are not expanded, and the errors of the probes
        (B * H, P, 3) in float64.
    """
    batch, heads, tokens, dim = q.shape
    o = q.new_empty((batch, tokens, heads, dim)).transpose(1, 2)
    strides = tuple([tensor.stride()[:3] for tensor in (q, k, v, o)])
    key = CallKey(
        (batch, heads, tokens, dim), strides, q.dtype, q.get_device(), valid is not None,
        heads // k.shape[1], tiling, prefix, qk_scale,
    )  # fmt: skip
    launch = prepare_attention(key, error, share, dense_threshold)
    # Without a mask the kernels read nothing of the tensor in its place.
    mask = q if valid is None else valid.contiguous().view(torch.uint8)
    return o, *launch(q, k, v, mask, o)


def _dot_block(size: int) -> int:
    """Return the block of a dimension of `tl.dot`: a power of 2, at least 16."""
    return max(16, int(next_power_of_2(size)))
