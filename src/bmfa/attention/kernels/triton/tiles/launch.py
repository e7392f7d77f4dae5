"""How tiles and representatives are spread over programs, and the kernels' pinned settings."""

from dataclasses import dataclass
from functools import lru_cache
from math import expm1
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bmfa.attention.kernels.triton.launch import CachedLaunch, LaunchGrid, LaunchSequence, Workspace
from bmfa.attention.kernels.triton.tiles.attention import attend
from bmfa.attention.kernels.triton.tiles.certificate import certify
from bmfa.attention.kernels.triton.tiles.pool import pool
from bmfa.attention.kernels.triton.tiles.residual import residual
from bmfa.attention.kernels.triton.tiles.score import score
from bmfa.attention.kernels.triton.tiles.select import select

SIDE, GROUP = 8, 2
GAP_CAP = 4.0
# 2^100 a hundred thousand times, and 2^-100, are numbers still.
PLAIN = 100.0
# Pinned, not tuned at run time: columns of a scoring program, mean tiles in one step of attention,
# rows of the first-order matrix that one program adds up.
TILES, COARSE, STRIP = 16, 64, 16
# Warps (for head dims up to 64; twice as many above) and pipeline stages of each kernel.
CONFIGURATION = {
    "pool": (4, 3),
    "score": (4, 3),
    "residual": (4, 3),
    "attend": (4, 3),
    "certify": (4, 3),
}
# LaunchGrid that keep a large card busy, and the shares of k and v that scratch memory may take.
BUSY = 512
ROWS_SHARE, PARTS_SHARE = 0.10, 0.035


@dataclass(frozen=True)
class Sizes:
    """The sizes of one call."""

    heads: int  # of all pictures
    tiles: int
    across: int
    groups: int
    pooled: int  # tiles of one pooling program
    scored: int  # tiles of one scoring program
    rows: int  # representatives at once
    block: int  # representatives of one program
    share: int  # tiles of one residual program
    few: bool  # too few tiles for long loops to fill the card

    @classmethod
    def of(cls, heads: int, height: int, width: int, dim: int, size: int) -> "Sizes":
        """For (heads, height width, dim) keys and values of `size` bytes a number."""
        down, across = -(-height // SIDE), -(-width // SIDE)
        tiles = down * across
        groups = -(-tiles // GROUP)
        room = 2 * height * width * dim * size  # bytes of k and v of one head
        few = tiles * heads < 2 * BUSY
        pooled, scored = (4, 2) if few else (8, TILES)
        # energy (4 bytes) and gap (2 bytes) of every representative and tile
        chunks = -(-6 * groups * tiles // max(1, int(ROWS_SHARE * room)))
        chunks = max(1, min(chunks, groups // 64))
        rows = -(-groups // chunks)
        block = 64 if rows > 32 else 32 if rows > 16 else 16
        programs = heads * -(-rows // block)
        parts = min(BUSY // programs, int(PARTS_SHARE * room) // (size * rows * dim))
        step = TILES // 2 if few else TILES
        share = step * -(-tiles // (step * max(1, parts)))
        return cls(heads, tiles, across, groups, pooled, scored, rows, block, share, few)


class Frame(NamedTuple):
    """Where the tokens of a call lie, and how they are scored: what its kernels are compiled for."""

    batch: int
    heads: int
    dim: int
    strides: tuple[tuple[int, ...], ...]  # (batch, head, row) of q, k and perhaps v and the output
    dtype: torch.dtype
    device: int
    masked: bool
    height: int
    width: int
    prefix: int
    factor: float
    aligned: bool

    @classmethod
    def of(
        cls,
        tensors: tuple[Tensor, ...],
        valid: Tensor | None,
        height: int,
        width: int,
        prefix: int,
        factor: float,
        aligned: bool,
    ) -> "Frame":
        """From q, k and so on, (B, heads, prefix + N, d) each."""
        q = tensors[0]
        batch, heads, _, dim = q.shape
        strides = tuple(tensor.stride()[:3] for tensor in tensors)
        return cls(
            batch, heads, dim, strides, q.dtype, q.get_device(), valid is not None,
            height, width, prefix, factor, aligned,
        )  # fmt: skip

    def arguments(self) -> dict[str, Any]:
        """As the kernels call them."""
        down, across = -(-self.height // SIDE), -(-self.width // SIDE)
        own = {
            f"{name}_{what}": stride
            for name, strides in zip("qkvo", self.strides, strict=False)
            for what, stride in zip(("batch", "head", "row"), strides, strict=True)
        }
        return {
            **own,
            "heads": self.heads,
            "prefix": self.prefix,
            "height": self.height,
            "width": self.width,
            "across": across,
            "tiles": down * across,
            "groups": -(-down * across // GROUP),
            "factor": self.factor,
            "D": self.dim,
            "BLOCK_D": max(16, power_of_2(self.dim)),
            "SIDE": SIDE,
            "GROUP": GROUP,
            "PREFIX": 0 if self.prefix == 0 else max(16, power_of_2(self.prefix)),
            "ALIGNED": self.aligned,
            "MASKED": self.masked,
            "RAGGED": bool(self.height % SIDE or self.width % SIDE),
            "PRECISION": "ieee" if self.dtype == torch.float32 else "tf32",
        }


def mask_or_any(valid: Tensor | None, other: Tensor) -> Tensor:
    """The mask in bytes; where there is none the kernels read nothing of what stands in for it."""
    return other if valid is None else valid.contiguous().view(torch.uint8)


def power_of_2(number: int) -> int:
    """The least one that is no less."""
    return 1 << (number - 1).bit_length()


# Tensors that a call brings; the kernels find them by these names.
GIVEN = ("q", "k", "v", "valid", "output", "amounts", "words")


def launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    valid: Tensor | None,
    height: int,
    width: int,
    prefix: int,
    factor: float,
    error: float | None,
    expand: int,
    aligned: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output (B, heads, prefix + N, d), expanded tiles (B heads, groups), words (B heads, groups, *).

    The bits of the words mark the tiles that stay unexpanded. `error` is a target for E / tau;
    without it the `expand` largest losses of every group are expanded.
    """
    batch, heads, tokens, dim = q.shape
    output = q.new_empty((batch, tokens, heads, dim)).transpose(1, 2)
    frame = Frame.of((q, k, v, output), valid, height, width, prefix, factor, aligned)
    call = _prepared(frame, error, expand)
    return output, *call.run(q, k, v, mask_or_any(valid, q), output)


class _Pipeline:
    """All launches of a call with everything settled but the tensors."""

    def __init__(self, frame: Frame, error: float | None, expand: int) -> None:
        self.dim, self.dtype, self.prefix = frame.dim, frame.dtype, frame.prefix
        rows = frame.batch * frame.heads
        self.sizes = sizes = Sizes.of(
            rows, frame.height, frame.width, frame.dim, frame.dtype.itemsize
        )
        self.words = (sizes.heads, sizes.groups, -(-sizes.tiles // 32))
        self.wide = 1 if self.dim <= 64 else 2
        self.values: dict[str, Any] = {
            **frame.arguments(),
            "target": 0.0 if error is None else -expm1(-error),
            "budget": expand,
            "COARSE": COARSE,
            "TILES": TILES,
            "STRIP": STRIP,
            "GAP_CAP": GAP_CAP,
            "ROWS": sizes.block,
            "BY_ERROR": error is not None,
        }
        self.pooled = -(-sizes.tiles // sizes.pooled)
        self.shares = -(-sizes.tiles // sizes.share)
        self.chain = LaunchSequence(GIVEN, self._scratch())
        self._add(pool, (self.pooled, sizes.heads, 1), TILES=sizes.pooled)
        for first in range(0, sizes.groups, sizes.rows):
            self._add_attention(first)

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, output: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Fill the output; expanded tiles of each group, and words that mark those that stay."""
        words = q.new_empty(self.words, dtype=torch.int32)
        amounts = q.new_empty(self.words[:2], dtype=torch.int32)
        self.chain(q, k, v, mask, output, amounts, words)
        return amounts, words

    def _scratch(self) -> Workspace:
        """What the kernels leave for each other."""
        sizes, dim, prefix, dtype = self.sizes, self.dim, self.prefix, self.dtype
        full = torch.float32
        rough = dtype if dtype == full else torch.bfloat16
        parts = (sizes.heads, self.pooled)
        lines = (sizes.heads, min(sizes.rows, sizes.groups))
        scratch = Workspace()
        scratch.add("kbar", (sizes.heads, sizes.tiles, dim), dtype)
        scratch.add("vbar", (sizes.heads, sizes.tiles, dim), dtype)
        scratch.add("qbar", (sizes.heads, sizes.groups, dim), dtype)
        scratch.add("key_spread", (sizes.heads, sizes.tiles), full)
        scratch.add("query_spread", (sizes.heads, sizes.groups), full)
        scratch.add("counts", (sizes.heads, sizes.tiles), full)
        scratch.add("cross", (sizes.heads, dim, dim), dtype)
        scratch.add("cross_parts", (*parts, dim, dim), rough)
        scratch.add("prefix_tops", (*parts, prefix), full)
        scratch.add("prefix_masses", (*parts, prefix), full)
        scratch.add("prefix_outputs", (*parts, prefix, dim), full)
        scratch.add("energy", (*lines, sizes.tiles), full)
        scratch.add("gap", (*lines, sizes.tiles), torch.float16)
        scratch.add("tops", lines, full)
        scratch.add("masses", lines, full)
        scratch.add("lost", (*lines, self.shares, dim), rough)
        return scratch

    def _add_attention(self, first: int) -> None:
        """Score, select, sum residuals and attend for the query groups from `first` on."""
        sizes = self.sizes
        rows = min(sizes.rows, sizes.groups - first)
        blocks, chunks = -(-rows // sizes.block), -(-sizes.tiles // sizes.scored)
        strips = -(-self.dim // STRIP) if first == 0 else 0
        some = {"first": first, "rows": rows}
        self._add(
            score, (chunks + strips, blocks, sizes.heads), **some,
            LOOP=sizes.scored, chunks=chunks, parts=self.pooled, BLOCK_P=power_of_2(self.pooled),
        )  # fmt: skip
        block = max(32, power_of_2(sizes.tiles))
        self._add(select, (rows, sizes.heads, 1), **some, BLOCK_T=block)
        self._add(
            residual, (self.shares, blocks, sizes.heads), **some,
            share=sizes.share, LOOP=min(TILES, sizes.share),
        )  # fmt: skip
        self._add(
            attend, (min(rows * GROUP, sizes.tiles - first * GROUP), sizes.heads, 1), **some,
            shares=self.shares, SHARES=power_of_2(self.shares),
        )  # fmt: skip

    def _add(self, kernel: Any, programs: LaunchGrid, **own: int) -> None:
        warps, stages = self._how(kernel)
        values = {**self.values, **own}
        self.chain.add(kernel, programs, values, num_warps=warps, num_stages=stages)

    def _how(self, kernel: Any) -> tuple[int, int]:
        """Warps and stages."""
        if kernel is select:
            return 1 if self.sizes.tiles <= 1024 else 4, 3
        warps, stages = CONFIGURATION[kernel.__name__]
        if kernel is attend and self.sizes.few:
            stages = 2
        return warps * self.wide if kernel is pool else warps, stages


# One for all calls that are alike in everything but the numbers in their tensors.
_prepared = lru_cache(maxsize=256)(_Pipeline)


def bounds(
    q: Tensor,
    k: Tensor,
    valid: Tensor | None,
    expanded: Tensor,
    longest: Tensor,
    height: int,
    width: int,
    prefix: int,
    factor: float,
    per_score: float,
    always: float,
    aligned: bool,
) -> Tensor:
    """(B, heads, prefix + N) bounds on E / tau where `expanded` (B, heads, R, T) marks tiles.

    `longest` (B, heads) is the norm of the longest key, in float32.
    """
    bound = q.new_empty(q.shape[:3], dtype=torch.float32)
    frame = Frame.of((q, k), valid, height, width, prefix, factor, aligned)
    marks = expanded.contiguous().view(torch.uint8)
    _certifier(frame, per_score, always)(q, k, mask_or_any(valid, q), marks, longest, bound)
    return bound


@lru_cache(maxsize=64)
def _certifier(frame: Frame, per_score: float, always: float) -> CachedLaunch:
    """The launch with everything settled but the tensors."""
    values = {**frame.arguments(), "per_score": per_score, "always": always, "PLAIN": PLAIN}
    names: Any = certify.arg_names[6:]  # behind the tensors
    rest = tuple(values[name] for name in names)
    programs = (values["groups"], frame.batch * frame.heads, 1)
    warps, stages = CONFIGURATION["certify"]
    return CachedLaunch(certify, programs, rest, num_warps=warps, num_stages=stages)
