"""The kernels in order, over as many queries at once as the workspace allows."""

from functools import lru_cache
from math import expm1
from typing import Any

import torch
from torch import Tensor

from bmfa.attention.kernels.triton.launcher import Chain, Programs, Scratch
from bmfa.attention.kernels.triton.tiled.arguments import Frame, mask_or_any, power_of_2
from bmfa.attention.kernels.triton.tiled.attending import attend
from bmfa.attention.kernels.triton.tiled.pooling import pool
from bmfa.attention.kernels.triton.tiled.residuals import residual
from bmfa.attention.kernels.triton.tiled.scoring import score
from bmfa.attention.kernels.triton.tiled.selecting import select
from bmfa.attention.kernels.triton.tiled.sizes import (
    COARSE,
    CONFIGURATION,
    GAP_CAP,
    GROUP,
    STRIP,
    TILES,
    Sizes,
)

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
        self.chain = Chain(GIVEN, self._scratch())
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

    def _scratch(self) -> Scratch:
        """What the kernels leave for each other."""
        sizes, dim, prefix, dtype = self.sizes, self.dim, self.prefix, self.dtype
        full = torch.float32
        rough = dtype if dtype == full else torch.bfloat16
        parts = (sizes.heads, self.pooled)
        lines = (sizes.heads, min(sizes.rows, sizes.groups))
        scratch = Scratch()
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

    def _add(self, kernel: Any, programs: Programs, **own: int) -> None:
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
